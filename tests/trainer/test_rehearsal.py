"""A script's own loop measured alone: what it is given, what is recorded of it, and what of its network is seen."""

from __future__ import annotations

import contextlib
import io
import json
import math
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from orchestrator.planning import Measurement
from tests.support.gloo_ranks import RANKS, group_of
from trainer.compute.models import work_of
from trainer.measure import Visited
from trainer.ranks import RankInfo
from trainer.session import Ranks, Rehearsal, fits, join
from trainer.setup import assemble
from trainer.shared import MetricsWriter, Pace, TrainError, parse_settings


class Numbers:
    """Fewer than any batch has: it is repeated."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((6,), float(index)), index % 3


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def rehearsed(rank: int, case: tuple[str, str]) -> tuple[list[int], str, bool]:
    """The sizes of this rank's batches; what it was told; and whether anything came after the loop of batches.

    case: what the loop's body does, and the folder for metrics.
    """
    body, folder = case
    pace = Pace(100.0) if body == "paced" and rank == 1 else None
    info = RankInfo(rank, rank, RANKS, RANKS, "vm", f"node{rank}", None, None, pace)
    settings = parse_settings("script", {"profile_s": "1.5", "batch": "16", "device": "cpu"})
    sizes, goes_on = list[int](), False
    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.object(assemble, "join", lambda *_: group_of(RANKS)))
        stack.enter_context(patch.object(join, "leave", lambda: None))
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        met = assemble.join_group(settings, info, MetricsWriter(Path(folder, str(rank))))
        model = network()
        try:
            optimizer = torch.optim.SGD(model.parameters(), lr=1e38 if body == "steep" else 0.1)
            run = Ranks(met, None).prepare(model, optimizer, Numbers())
            assert isinstance(run, Rehearsal) and math.isnan(run.evaluate(lambda *_: {}, Numbers())["accuracy"])
            for _ in run.epochs():
                for inputs, targets in run.batches():
                    sizes.append(len(targets))
                    if body == "no step":
                        continue
                    loss_sum = cross_entropy(run.model(inputs), targets, reduction="sum")
                    if not math.isfinite(loss_sum.item()):
                        raise SystemExit("it learns nothing")
                    run.step(loss_sum)
                    if body == "two steps":
                        run.step(cross_entropy(run.model(inputs), targets, reduction="sum"))
                goes_on = True
        except TrainError as error:
            return sizes, str(error), goes_on
        except SystemExit as error:
            return sizes, f"ended with {error.code}", goes_on
    return sizes, "", goes_on


def test_the_loop_makes_growing_updates_and_ends_when_they_are_measured(gang, tmp_path):
    for rank, (sizes, told, goes_on) in enumerate(gang.run(rehearsed, ("", str(tmp_path)))):
        events = {line["event"]: line for line in map(json.loads, (tmp_path / str(rank)).read_text().splitlines())}
        assert (told, goes_on) == ("ended with 0", False)
        found = Measurement.model_validate(events["profile"])
        assert found.samples == (2, 4, 8, 16, 32) and set(sizes) == {*found.samples}
        assert found.batch == 16 and found.cap is None and found.again_samples == 8
        assert [[layer.shapes for layer in block.layers] for block in found.network or ()] == [
            [((8, 6), (8,))],
            [((3, 8), (3,))],
        ]
        assert [block.outputs for block in found.network or ()] == [8, 3]
        assert found.blocks and found.blocks.count == 2 and found.blocks.samples[0] < found.blocks.samples[-1]
        assert events["start"]["parameters"] == 83 and events["end"]["status"] == "succeeded"


def test_a_loop_that_ends_where_it_learns_nothing_is_measured_whatever_its_learning_rate(gang, tmp_path):
    assert {told for _, told, _ in gang.run(rehearsed, ("steep", str(tmp_path)))} == {"ended with 0"}


@pytest.mark.parametrize(
    ("body", "words"),
    [("no step", "loss is missing"), ("two steps", "once per batch"), ("paced", "run only experiments")],
)
def test_a_loop_that_cannot_be_measured_is_told_why(gang, tmp_path, body, words):
    told = [told for _, told, _ in gang.run(rehearsed, (body, str(tmp_path)))]
    assert all(words in each for each in told), told


# ---- what fits ------------------------------------------------------------------------------------------------------


def test_a_batch_is_tried_where_memory_is_expected_to_hold_it():
    peaks = {2: 300, 4: 500}  # 100 and 100 a sample
    assert fits(8, peaks, 1000) and not fits(9, peaks, 1000)
    assert fits(10**6, peaks, None), "a CPU's memory is no limit"
    assert fits(10**6, {2: 300}, 1000) and fits(4, peaks, 100), "one size says nothing; what did fit fits"


# ---- what is seen of a network --------------------------------------------------------------------------------------


def seen_of(model: nn.Module, *inputs: torch.Tensor) -> list[tuple[list[list[int]], float]]:
    """Shapes and work of each layer, whichever block it is in."""
    visited = Visited(model)
    model(*inputs)
    blocks = visited.blocks(len(inputs[0]))
    assert blocks is not None
    return [(layer["shapes"], layer["work"]) for block in blocks for layer in block["layers"]]


class Language(nn.Module):
    """Its embedding's weights are those of its last layer, as in GPT-2."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm, self.last = nn.Embedding(11, 4), nn.LayerNorm(4), nn.Linear(4, 11, bias=False)
        self.mix = nn.MultiheadAttention(4, 2, batch_first=True)
        self.last.weight = self.words.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        taken = self.norm(self.words(ids))
        return self.last(self.mix(taken, taken, taken)[0]).flatten(0, 1)


def test_weights_that_layers_share_and_those_of_no_layer_count_once():
    model = Language()
    layers = seen_of(model, torch.zeros(2, 5, dtype=torch.long))
    counted = [shape for shapes, _ in layers for shape in shapes]
    assert sum(math.prod(shape) for shape in counted) == sum(weight.numel() for weight in model.parameters())
    assert layers[0] == ([[11, 4]], 20.0)  # five words a sample, four numbers each
    assert layers[2][1] == 5 * 4 * 4 + 5 * 4 * 11, (
        "the last layer has no weights of its own: its work joins what is before"
    )


def test_weights_that_are_not_trained_are_no_gradient():
    model = network()
    model[0].weight.requires_grad_(False)
    assert [shapes for shapes, _ in seen_of(model, torch.zeros(3, 6))] == [[[8]], [[3, 8], [3]]]
    assert Visited(model).blocks(3) is None, "before the first pass"
    double = network().double()
    visited = Visited(double)
    double(torch.zeros(3, 6, dtype=torch.float64))
    assert visited.blocks(3) is None, "a forecast counts in 32 bits"


def test_a_network_of_more_layers_than_a_record_holds_is_not_described():
    visited = Visited(deep := nn.Sequential(*[nn.Linear(1, 1) for _ in range(1000)]))
    deep(torch.zeros(1, 1))
    assert visited.blocks(1) is None


def test_batch_norm_is_told_from_other_normalisations():
    network = nn.Sequential(nn.Conv1d(3, 4, 1), nn.BatchNorm1d(4), nn.LayerNorm(5))
    visited = Visited(network)
    network(torch.zeros(2, 3, 5))
    layers = [layer for block in visited.blocks(2) for layer in block["layers"]]
    assert [layer.get("batch_norm") for layer in layers] == [None, True, False]


def test_work_is_counted_by_the_positions_of_a_weight():
    assert work_of(nn.Conv2d(3, 8, 5), inputs=3 * 32 * 32, outputs=8 * 28 * 28) == 3 * 8 * 25 * 28 * 28
    assert work_of(nn.ConvTranspose2d(8, 3, 5), inputs=8 * 28 * 28, outputs=3 * 32 * 32) == 3 * 8 * 25 * 28 * 28
    assert work_of(nn.BatchNorm2d(8), inputs=64, outputs=64) == 64


def test_a_network_that_is_no_chain_is_one_block(tmp_path):
    visited = Visited(model := Language())
    model(torch.zeros(2, 5, dtype=torch.long))
    assert len(visited.blocks(2) or ()) == 1
