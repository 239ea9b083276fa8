"""Trains an experiment on one rank, with the loop of a user's own script (`trainer.session`).

If a rank simulates a GPU (`paced`), all ranks only keep time, without loss and evaluation.
"""

from __future__ import annotations

import dataclasses
import math
import time

from torch import Tensor

from trainer.ranks.rank_info import RankInfo
from trainer.session.session import Session
from trainer.setup.assemble import set_up
from trainer.shared.metrics import MetricsWriter
from trainer.shared.settings import Settings
from trainer.strategies import cross_entropy_sum
from trainer.training.ema import judged
from trainer.training.run import shared_network


def train(settings: Settings, info: RankInfo, metrics: MetricsWriter) -> None:
    """Raises TrainError for a failure that a user can fix."""
    session = Session(set_up(settings, info, metrics))
    for epoch in session.epochs():
        train_epoch(session)
        every = session.run.settings.eval_every
        if every and (session.is_over or (epoch + 1) % every == 0):
            evaluate(session)
    session.end()


def train_epoch(session: Session) -> None:
    smoothing = session.run.settings.label_smoothing

    def loss_sum(outputs: Tensor, labels: Tensor) -> Tensor:
        of_tokens = cross_entropy_sum(outputs, labels, smoothing)
        return of_tokens / labels.shape[1] if labels.dim() == 2 else of_tokens

    for inputs, labels in session.batches():
        session.learn(inputs, labels, loss_sum)


def evaluate(session: Session) -> None:
    run, progress = session.run, session.progress
    if session.loss is None or run.test_batches is None:  # some ranks are paced, so no rank evaluates
        return
    started_s = time.monotonic()
    with shared_network(run, progress) as network:
        batches = ((images.to(run.device), labels) for images, labels in run.test_batches())
        result = judged(network, run.strategy.outputs(network, batches), run.training_task.facts.classes, run.device)
    eval_s = round(time.monotonic() - started_s, 6)
    facts, fields = run.training_task.facts, {**dataclasses.asdict(result), "bits_per_byte": None}
    if facts.is_text:
        fields |= {"per_class": (), "bits_per_byte": result.loss / math.log(2) / facts.bytes_per_token}
    run.metrics.write("eval", epoch=progress.epoch, step=session.updates - 1, **fields, eval_s=eval_s)
    run.console.evaluation(progress.epoch, session.loss, result, fields["bits_per_byte"])
    session.judged(result.accuracy, result.loss)
