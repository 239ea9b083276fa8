"""An evaluation or a checkpoint looks at a run, which goes on as if nobody had looked: four real ranks over Gloo."""

from __future__ import annotations

import contextlib
import dataclasses
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

pytest.importorskip("torch")
pytest.importorskip("torchvision")
import torch
from torch import nn

from tests.support.checkpoint_driver import small_network
from tests.support.gloo_ranks import RANKS, Gang, group_of
from trainer import train as training
from trainer.checkpoints import read_file
from trainer.compute.batch_norm_kernels import estimate_running_statistics
from trainer.compute.models import running_statistics
from trainer.ranks import RankInfo
from trainer.session import session
from trainer.setup import assemble, training_task
from trainer.shared import MetricsWriter, experiments, parse_settings
from trainer.training import Evaluation, Progress
from trainer.training import run as shared
from trainer.training.run import Run, shared_network

SMALL = {"data": "synthetic", "device": "cpu", "num_workers": "0", "samples": "203", "batch": "32", "epochs": "3"}
SMALL |= {"augment": "affine", "shares": "node0=3,node1=2,node2=2,node3=1"}  # 7 updates an epoch, 21 in all
LOCAL = {"fidelity": "local", "local_steps": "5"}
WAYS = {
    "waiting": {**LOCAL, "local_overlap": "0"},
    "overlapped": {**LOCAL, "local_overlap": "2", "wire": "bf16"},
    "outer momentum": {**LOCAL, "local_overlap": "3", "outer_momentum": "0.9", "outer_lr": "0.7"},
    "local_batch": {**LOCAL, "local_batch": "4", "lr": "0.005"},
    "exact first": {
        **LOCAL,
        "strategy": "parameter_average",
        "local_overlap": "2",
        "local_after": "5",
        "local_batch": "4",
    },
    "pipelines": {
        **LOCAL,
        "strategy": "pipeline",
        "lenet": "yes",
        "stages": "node0:0,node1:1|node2:0,node3:1",
        "accumulate": "2",
        "local_overlap": "2",
        "outer_momentum": "0.5",
    },
    "exact": {"strategy": "allreduce", "loader": "workers"},
    "compressed": {"fidelity": "compressed", "compress_rank": "1", "compress_after": "3"},
}
IN_ROUNDS = ("waiting", "overlapped", "outer momentum", "local_batch", "exact first", "pipelines")
NO_LOOK = {"eval_every": "0"}


@contextlib.contextmanager
def in_the_gang(lenet: bool = False) -> Iterator[list[Run]]:
    """What `train` sets up meets in the gang that is there, and is noted."""
    runs: list[Run] = []

    def noted(*arguments: Any) -> Run:
        runs.append(assemble.set_up(*arguments))
        return runs[-1]

    few = dataclasses.replace(experiments.DATA_SETS["mnist"], test_samples=100)
    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.object(assemble, "join", lambda *_: group_of(RANKS)))
        stack.enter_context(patch.object(session, "leave", lambda: None))
        stack.enter_context(patch.object(training, "set_up", noted))
        stack.enter_context(patch.dict(experiments.DATA_SETS, mnist=few))
        if not lenet:
            stack.enter_context(patch.object(training_task, "build_model", small_network))
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        yield runs


def trained(rank: int, settings: dict[str, str]) -> Run:
    lenet = settings.pop("lenet", "") == "yes"
    info = RankInfo(rank, rank, RANKS, RANKS, "vm", f"node{rank}", None, None)
    with in_the_gang(lenet) as runs:
        training.train(parse_settings("mnist_lenet", {**SMALL, **settings}), info, MetricsWriter(None))
    return runs[0]


@dataclasses.dataclass
class Ended:
    """own: this rank's weights, statistics and momentum, one after the other. judged: by the last evaluation."""

    own: torch.Tensor
    judged: Evaluation | None

    def is_like(self, other: Ended) -> bool:
        return torch.equal(self.own, other.own) and other.judged in (None, self.judged)


def ended(rank: int, settings: dict[str, str]) -> Ended:
    run = trained(rank, settings)
    momenta = [run.optimizer.state[parameter]["momentum_buffer"] for parameter in run.model.parameters()]
    own = [*run.model.parameters(), *running_statistics(run.model), *momenta, *run.strategy.own_state().values()]
    return Ended(torch.cat([tensor.detach().double().flatten() for tensor in own]), run.console.result)


@pytest.mark.parametrize("way", WAYS)
def test_looks_change_nothing_and_a_run_cut_anywhere_goes_on(gang: Gang, way: str, tmp_path: Path) -> None:
    """Cut in the middle of a round, with a mean under way where they overlap."""
    asked, kept = WAYS[way], {"checkpoint_dir": str(tmp_path)}
    unseen = gang.run(ended, {**asked, **NO_LOOK})
    evaluated = gang.run(ended, asked)
    looked = gang.run(ended, {**asked, **kept, "checkpoint_every": "3", **NO_LOOK})
    for path in tmp_path.iterdir():
        path.unlink()
    gang.run(ended, {**asked, **kept, "checkpoint_every": "4", "steps": "12"})
    resumed = gang.run(ended, {**asked, **kept, "resume": str(tmp_path)})
    for rank in range(RANKS):
        assert evaluated[rank].is_like(unseen[rank])
        assert looked[rank].is_like(unseen[rank])
        assert resumed[rank].is_like(evaluated[rank])
    if way in IN_ROUNDS:
        saved = read_file(tmp_path).checkpoint
        assert saved.step + 7 * saved.epoch == 12
        assert saved.own[0]["round.counts"][0] == 2
        assert not torch.equal(saved.own[0]["weights.0"], saved.own[1]["weights.0"])


# ---- BatchNorm ------------------------------------------------------------------------------------------------------


def statistics_and_population(rank: int, settings: dict[str, str]) -> tuple[torch.Tensor, ...]:
    """Of the first BatchNorm of a run that has ended: the means and variances that a look has, those of this rank, and
    those that the shared network makes of every training image of the epoch; and whether the look left any trace.
    """
    run = trained(rank, {**settings, **NO_LOOK})
    before, random = run.model.state_dict(), torch.get_rng_state()
    before = {name: tensor.clone() for name, tensor in before.items()}
    with shared_network(run, Progress(recent=10.0)) as network:
        seen = torch.stack([network[1].running_mean, network[1].running_var]).clone()
        images = torch.cat([images for images, _ in run.batches_of(run.order.first(7))])
        with torch.no_grad():
            values = network[0](images).transpose(0, 1).flatten(1).double()
    count = torch.tensor([values.shape[1]], dtype=torch.float64)
    sums = torch.stack([values.sum(1), (values**2).sum(1)])
    for total in (count, sums):
        torch.distributed.all_reduce(total)
    mean, square = sums / count
    untouched = torch.equal(random, torch.get_rng_state()) and all(
        torch.equal(tensor, before[name]) for name, tensor in run.model.state_dict().items()
    )
    own = torch.stack([run.model[1].running_mean, run.model[1].running_var])
    return seen, own, torch.stack([mean, square - mean**2]).float(), torch.tensor(untouched)


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def test_a_look_judges_averaged_weights_by_statistics_of_their_own(gang: Gang) -> None:
    """A large outer step at the very end: what the ranks' statistics have followed are other weights."""
    asked = {**WAYS["outer momentum"], "local_overlap": "0", "local_steps": "7", "outer_lr": "2", "lr": "0.1"}
    for seen, own, population, untouched in gang.run(statistics_and_population, asked):
        assert distance(seen[0], population[0]) < 1e-5
        assert distance(seen[1], population[1]) < 0.02  # a batch's variance is of its samples' own mean
        assert distance(own, population) > 0.1
        assert untouched


def test_a_checkpoint_holds_the_statistics_that_belong_to_its_weights(gang: Gang, tmp_path: Path) -> None:
    asked = {**WAYS["outer momentum"], "local_overlap": "0", "local_steps": "7", "outer_lr": "2", "lr": "0.1"}
    kept = {"checkpoint_every": "21", "checkpoint_dir": str(tmp_path)}
    seen, own, *_ = gang.run(statistics_and_population, {**asked, **kept})[0]
    saved = read_file(tmp_path).checkpoint
    assert torch.equal(torch.stack([saved.model["1.running_mean"], saved.model["1.running_var"]]), seen)
    assert torch.equal(torch.stack([saved.own[0]["statistics.0"], saved.own[0]["statistics.1"]]), own)


def times_estimated(rank: int, settings: dict[str, str]) -> int:
    with patch.object(shared, "estimated_again", return_value=1) as estimated:
        trained(rank, dict(settings))
    return estimated.call_count


@pytest.mark.parametrize(
    ("settings", "times"),
    [
        (WAYS["waiting"], 3),
        ({**WAYS["waiting"], "lenet": "yes", "steps": "3"}, 0),
        ({"strategy": "parameter_average"}, 0),
        ({}, 0),
    ],
)
def test_statistics_are_estimated_again_only_where_an_average_has_moved_weights(
    gang: Gang, settings: dict[str, str], times: int
) -> None:
    assert gang.run(times_estimated, settings) == [times] * RANKS


def test_estimated_statistics_are_means_over_all_samples_and_nothing_else_changes() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3, momentum=None, track_running_stats=False))
    model[0].running_mean.fill_(float("inf"))
    model[0].num_batches_tracked += 5
    batches = list((2 * torch.randn(40, 3) + 7).split([16, 16, 8]))
    assert estimate_running_statistics(model, batches) == 40
    parts = [len(batch) / 40 for batch in batches]
    means, variances = ([part * how(batch) for part, batch in zip(parts, batches, strict=True)] for how in (
        lambda batch: batch.mean(0), lambda batch: batch.var(0)
    ))  # fmt: skip
    assert torch.allclose(model[0].running_mean, sum(means))
    assert torch.allclose(model[0].running_var, sum(variances))
    assert (model[0].momentum, model[1].momentum, int(model[0].num_batches_tracked)) == (0.1, None, 5)
