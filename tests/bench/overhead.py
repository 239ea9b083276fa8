"""What our trainer costs beside a bare PyTorch loop with the same model, input and optimiser, in one CPU process.

    .venv/bin/python tests/bench/overhead.py

The two take turns, a short epoch each, so that whatever else the machine does meets both alike; the first turns are
left out; the ratio is the median over pairs of neighbours. LeNet's epoch has 100 steps (MNIST's has 938), so that what
an epoch's end takes counts nine times too much, not fifty times as with 20. Then what writing one step's line takes,
against the median step. Exits 1 below 0.97 or above 1 %.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rack import end_orderly_on_term, show_machine, spread
from torch.nn.functional import cross_entropy

from trainer.compute.timer import CpuTimer
from trainer.data import RankBatches, SampleStream, open_batches
from trainer.ranks import read_rank_info
from trainer.session import Session
from trainer.setup import set_up
from trainer.shared import MetricsWriter, parse_settings
from trainer.strategies import Exchange
from trainer.train import train_epoch
from trainer.training import Progress, Step, line_of
from trainer.training.run import Run

WARMUP_BLOCKS = 2
CASES = {
    "mnist_lenet": {"batch": 64, "steps": 100, "blocks": 80},
    "resnet152_cifar": {"batch": 4, "steps": 3, "blocks": 20},
}
COMMON = {"data": "synthetic", "strategy": "none", "device": "cpu", "num_workers": "0", "lr": "0.001"}
COMMON |= {"lr_schedule": "constant", "lr_warmup": "0"}  # as the bare loop has it


def main() -> int:
    end_orderly_on_term()
    show_machine()
    return 0 if all([compare(exp, **case) for exp, case in CASES.items()]) else 1


def compare(exp: str, batch: int, steps: int, blocks: int) -> bool:
    epochs = blocks + WARMUP_BLOCKS
    pairs = {**COMMON, "batch": str(batch), "samples": str(batch * steps), "epochs": str(epochs)}
    settings = parse_settings(exp, pairs)
    with tempfile.TemporaryDirectory() as folder:
        run = set_up(settings, read_rank_info({}), MetricsWriter(Path(folder, "metrics.jsonl")))
        run.console.prints = False
        bare, session = BareLoop(run), Session(run)
        times_s: dict[str, list[float]] = {"trainer": [], "bare loop": []}
        turns = {"trainer": lambda epoch: one_epoch(session, epoch), "bare loop": bare.epoch}
        for epoch in range(epochs):
            for name in list(turns) if epoch % 2 else reversed(list(turns)):
                begin = time.perf_counter()
                turns[name](epoch)
                times_s[name].append(time.perf_counter() - begin)
        torch.distributed.destroy_process_group()
    speeds = {name: [batch * steps / taken_s for taken_s in taken[WARMUP_BLOCKS:]] for name, taken in times_s.items()}
    ratio = statistics.median(ours / theirs for ours, theirs in zip(*speeds.values(), strict=True))
    line_us, step_ms = step_line_us(), 1000 * batch / statistics.median(speeds["trainer"])
    print(f"{exp}, batch {batch}, {blocks} pairs of {steps} steps: trainer {spread(speeds['trainer'], 1)}, "
          f"bare loop {spread(speeds['bare loop'], 1)} samples/s; median ratio of pairs {ratio:.3f}")  # fmt: skip
    part = line_us / 1000 / step_ms
    print(f"  a step's line is written in {line_us:.0f} us, {part:.3%} of a step of {step_ms:.1f} ms", flush=True)
    return ratio >= 0.97 and part < 0.01


def one_epoch(session: Session, epoch: int) -> None:
    session.progress = Progress(epoch)
    train_epoch(session)


class BareLoop:
    """What anybody would write, with the very weights that the trainer has: of two networks that are alike but for the
    place of their weights in memory, one was 10 % faster than the other as long as the process lived.
    """

    def __init__(self, run: Run) -> None:
        settings, facts = run.settings, run.training_task.facts
        self.model, self.optimizer = run.model, run.optimizer
        stream = SampleStream(facts.train_samples, settings.batch, (settings.batch,), settings.seed)
        self.order = RankBatches(stream, 0)
        self.batches: Any = open_batches(settings, facts, self.order, run.info, run.device).train

    def epoch(self, epoch: int) -> None:
        self.order.epoch = epoch
        for images, labels in self.batches:
            self.optimizer.zero_grad(set_to_none=True)
            cross_entropy(self.model(images), labels).backward()
            self.optimizer.step()


def step_line_us(lines: int = 1000) -> float:
    """With what its marks come to and the encoding, which go on beside training."""
    timer = CpuTimer()
    marks = [timer.mark() for _ in range(6)]
    step = Step(7, 0, 64, 64, 1.5, Exchange(marks[2]), marks[0], marks[1], marks[3], marks[4], marks[5])
    with tempfile.TemporaryDirectory() as folder:
        writer = MetricsWriter(Path(folder, "metrics.jsonl"))
        begin = time.perf_counter()
        for _ in range(lines):
            writer.write_beside("step", partial(line_of, timer, step, 1.5, (marks[0], time.time())))
        writer.end("succeeded")
        return 1e6 * (time.perf_counter() - begin) / lines


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
