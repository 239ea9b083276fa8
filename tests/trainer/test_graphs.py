"""Updates with recorded passes are plain ones, on a CPU that replays every call."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tests.support.cpu_graphs import CpuGraph, cpu_graphs
from trainer.compute.graphs import Graphs, replayable
from trainer.compute.models import build_model


def network() -> nn.Module:
    torch.manual_seed(0)
    model = build_model("small_resnet", (1, 28, 28), 10).double()
    model.fc.bias.requires_grad_(False)
    return model


def trained(updates: Sequence[Sequence[int]], *, replays: bool) -> tuple[dict[str, Tensor], int, list[str]]:
    """Weights and statistics, number of replays, and what was reported. updates: sizes of micro-batches."""
    notes: list[str] = []
    with cpu_graphs():
        model = network()
        graphs = replayable(model, notes.append, notes.append) if replays else None
        optimizer = torch.optim.SGD((w for w in model.parameters() if w.requires_grad), lr=0.1, momentum=0.9)
        generator = torch.Generator().manual_seed(1)
        for sizes in updates:
            optimizer.zero_grad(set_to_none=True)
            _accumulated(model, graphs, sizes, generator)
            optimizer.step()
        return {name: tensor.clone() for name, tensor in model.state_dict().items()}, CpuGraph.replays, notes


def _accumulated(model: nn.Module, graphs: Graphs | None, sizes: Sequence[int], generator: torch.Generator) -> None:
    """As `FullUpdate` does."""
    if graphs:
        graphs.begin(adds=len(sizes) > 1)
    for number, size in enumerate(sizes):
        if graphs and number + 1 == len(sizes):
            graphs.is_last = True
        images = torch.randn(size, 1, 28, 28, generator=generator, dtype=torch.float64)
        if size:
            (cross_entropy(model(images), torch.arange(size) % 10, reduction="sum") / sum(sizes)).backward()
        elif graphs:
            graphs.hand_over()


@pytest.mark.parametrize(
    ("sizes", "off"),
    [
        ((6,), 0),
        ((6, 6, 6), 0),
        ((6, 6, 4, 4), 0),
        ((6, 6, 6, 6, 2), 1e-12),
        ((6, 2, 6, 6), 1e-12),
        ((6, 6, 0), 0),
    ],
    ids=["whole", "added", "two sizes", "the last is plain at first", "one between", "no samples last"],
)
def test_recorded_updates_are_plain_ones(sizes: Sequence[int], off: float) -> None:
    updates = [sizes] * 5 + [(6,), sizes]
    plain, none, _ = trained(updates, replays=False)
    replayed, count, notes = trained(updates, replays=True)
    assert none == 0 and count > len(updates), notes
    assert not any("off a plain pass, two" in note for note in notes)
    furthest = max((replayed[name].double() - tensor.double()).abs().max().item() for name, tensor in plain.items())
    assert furthest <= off
