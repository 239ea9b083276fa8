"""Updates with recorded passes are plain ones, on a CPU that replays every call."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tests.support.cpu_graphs import CpuGraph, cpu_graphs
from trainer.compute.arithmetic import Full, build_precision
from trainer.compute.graphs import CHANGED, Graphs, Memory, Piece, replayable
from trainer.compute.models import build_model
from trainer.pipeline import Criterion, Part, StageWork, replay_stage

CPU = torch.device("cpu")


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


def test_hooks_that_a_replay_would_not_call_keep_passes_plain() -> None:
    with cpu_graphs():
        for adds, hooked, why in (
            (False, lambda model: model.layer1[0].register_forward_hook(lambda *_: None), "layer1.0 has hooks"),
            (True, lambda model: model.fc.weight.register_hook(lambda _: None), "fc.weight has hooks"),
            (False, lambda model: model.fc.weight.register_hook(lambda _: None), ""),
        ):
            model, notes, reasons = network(), list[str](), list[str]()
            graphs = replayable(model, notes.append, reasons.append)
            hooked(model)
            for _ in range(2):
                _accumulated(model, graphs, (4, 4) if adds else (4,), torch.Generator())
            _accumulated(model, graphs, (4, 4) if adds else (4,), torch.Generator())
            assert [reason.partition(",")[0] for reason in reasons] == [why] * bool(why)


def test_hooks_keep_a_stage_plain() -> None:
    part, notes, reasons = nn.Sequential(nn.Linear(4, 3), nn.ReLU()), list[str](), list[str]()
    part[0].weight.register_hook(lambda gradient: gradient.clamp(-1, 1))
    with cpu_graphs():
        stage = StageWork(part, Full(), reads=True, splits=False)
        replay_stage(stage, 2, notes.append, reasons.append)
        for _ in range(3):
            stage.begin([2, 2])
            for _ in range(2):
                stage.forward(torch.ones(2, 4), 0)
                stage.backward(torch.ones(2, 3), 4, 0)
    assert (notes, reasons) == ([], ["0.weight has hooks, which a replay does not call"])


@pytest.mark.parametrize("sizes", [((6, 6),), ((6, 2),), ((6, 6), (6, 6)), ((6, 6), (6, 2)), ((6, 6), (2, 6))])
def test_a_network_that_is_called_twice_before_backward(sizes: Sequence[tuple[int, int]]) -> None:
    """sizes: of both calls, per micro-batch."""

    def weights(*, replays: bool) -> tuple[dict[str, Tensor], int]:
        with cpu_graphs():
            model, notes, generator = network(), list[str](), torch.Generator().manual_seed(1)
            graphs = replayable(model, notes.append, notes.append) if replays else None
            optimizer = torch.optim.SGD((w for w in model.parameters() if w.requires_grad), lr=0.1)
            for update in [((6,),), *[((6,), (6,))] * 3, *[sizes] * 6]:
                optimizer.zero_grad(set_to_none=True)
                if graphs:
                    graphs.begin(adds=len(update) > 1)
                for number, calls in enumerate(update):
                    if graphs and number + 1 == len(update):
                        graphs.is_last = True
                    batches = [torch.randn(size, 1, 28, 28, generator=generator).double() for size in calls]
                    losses = [cross_entropy(model(images), torch.arange(len(images))) for images in batches]
                    sum(losses[1:], losses[0]).backward()
                optimizer.step()
            return {name: tensor.clone() for name, tensor in model.state_dict().items()}, CpuGraph.replays

    (plain, _), (replayed, count) = weights(replays=False), weights(replays=True)
    assert count > 10
    assert max((replayed[name] - tensor).abs().max().item() for name, tensor in plain.items()) <= 1e-12


class Fp32Linear(nn.Linear):
    """A layer that leaves autocast."""

    def forward(self, inputs: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return super().forward(inputs.float())


@pytest.mark.parametrize("is_stage", [False, True], ids=["whole", "stage"])
def test_a_recorded_backward_is_outside_autocast_as_in_a_run(is_stage: bool) -> None:
    def gradients(*, replays: bool) -> tuple[list[Tensor], int]:
        torch.manual_seed(0)
        layers, notes = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), Fp32Linear(8, 3), nn.ReLU()), list[str]()
        inputs, of_output, precision = torch.randn(6, 8), torch.randn(6, 3), build_precision("bf16", CPU, None)
        with cpu_graphs():
            stage = StageWork(layers, precision, reads=True, splits=True) if is_stage else None
            if replays and stage:
                replay_stage(stage, 1, notes.append, notes.append)
            elif replays:
                replayable(layers, notes.append, notes.append)
            for _ in range(5):
                layers.zero_grad(set_to_none=True)
                if stage:
                    stage.begin([6])
                    stage.forward(inputs, 0)
                    stage.backward(of_output, 6, 0)
                    stage.weights()
                    continue
                with precision.autocast():
                    output = layers(inputs)
                output.backward(of_output)
            assert ["recorded" in note for note in notes] == [True] * replays, notes
            return [weight.grad.clone() for weight in layers.parameters() if weight.grad is not None], CpuGraph.replays

    (plain, _), (replayed, count) = gradients(replays=False), gradients(replays=True)
    assert count and len(plain) == 4
    assert all(torch.equal(one, other) for one, other in zip(plain, replayed, strict=True))


def test_a_larger_micro_batch_has_the_memory_of_recordings() -> None:
    part, notes = nn.Sequential(nn.Linear(4, 3), nn.ReLU()), list[str]()
    with cpu_graphs():
        stage = StageWork(part, Full(), reads=True, splits=False)
        replay_stage(stage, 1, notes.append, notes.append)
        recorded = []
        for size in (2, 2, 2, 2, 1, 3, 3, 3, 3, 2, 2):
            stage.begin([size])
            stage.forward(torch.ones(size, 4), 0)
            recorded.append(sum(map(len, stage.graphs.recorded.values())))
            stage.backward(torch.ones(size, 3), size, 0)
    assert recorded == [0, 0, 0, 1, 1, 0, 0, 0, 1, 2, 2]


def loss_sum(outputs: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(outputs, labels, reduction="sum", label_smoothing=0.1)


def judged(amp: str, *, splits: bool, replays: bool) -> tuple[list[Tensor], int]:
    """Gradients of weights and inputs, and sums of losses, of a last stage with three micro-batches in flight."""
    torch.manual_seed(0)
    layers, notes, found = (
        nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)),
        list[str](),
        list[Tensor](),
    )
    precision = build_precision(amp, CPU, None)
    precision.take_scale({"scale.own": torch.tensor([256.0, 0.0])})
    with cpu_graphs():
        stage = StageWork(Part(layers, list(layers)), precision, reads=False, splits=splits)
        if replays:
            replay_stage(stage, 3, notes.append, notes.append)
        for sizes in [(4, 4, 4, 2, 2)] * 6 + [(4, 3, 2)] * 4:
            layers.zero_grad(set_to_none=True)
            stage.begin(sizes)
            left = list(sizes)
            while left:
                flight, left = left[:3], left[3:]
                for size in flight:
                    inputs = stage.enter(torch.randn(size, 8))
                    with precision.autocast():
                        loss = stage.part(inputs, Criterion(loss_sum, torch.randint(3, (size,))))
                    stage.judge(inputs, loss, 0)
                found += [stage.backward(None, sum(sizes), 0).clone() for _ in flight]
                for _ in flight if splits else ():
                    stage.weights()
            found += [stage.total.clone(), *(weight.grad.clone() for weight in layers.parameters())]
        sizes = {note.split()[3] for note in notes if "recorded for" in note}
        assert (sizes, len(notes)) == (({"4", "3", "2"}, 3) if replays else (set(), 0)), notes
        return found, CpuGraph.replays


@pytest.mark.parametrize("splits", [False, True])
@pytest.mark.parametrize("amp", ["none", "bf16", "fp16"])
def test_recorded_losses_are_plain_ones(amp: str, splits: bool) -> None:
    (plain, _), (replayed, count) = (judged(amp, splits=splits, replays=on) for on in (False, True))
    assert count >= (3 if splits else 2) * 25
    assert all(map(torch.equal, plain, replayed))


def test_losses_in_flight_that_share_labels_show(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, _ = judged("none", splits=True, replays=False)
    copied, shared = Criterion.copied, dict[torch.Size, Criterion]()
    monkeypatch.setattr(Criterion, "copied", lambda self: shared.setdefault(self.labels.shape, copied(self)))
    replayed, _ = judged("none", splits=True, replays=True)
    assert not all(map(torch.equal, plain, replayed))


class Tied(nn.Module):
    """A linear layer with another's weight."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, inputs: Tensor) -> Tensor:
        return nn.functional.linear(inputs, self.weight)


@pytest.mark.parametrize("way", ["whole", "added", "stage", "split stage"])
def test_a_module_and_a_weight_in_two_places(way: str) -> None:
    def gradients(*, replays: bool) -> tuple[list[Tensor], nn.Sequential, list[str]]:
        torch.manual_seed(0)
        first, notes = nn.Linear(4, 4), list[str]()
        layers = nn.Sequential(nn.Sequential(first, nn.Tanh(), first, nn.Linear(4, 4), Tied(first.weight), nn.Tanh()))
        with cpu_graphs():
            stage = StageWork(layers, Full(), reads=True, splits=way == "split stage") if "stage" in way else None
            if replays and stage:
                replay_stage(stage, 1, notes.append, notes.append)
            graphs = replayable(layers, notes.append, notes.append) if replays and not stage else None
            weights = list(layers.parameters())
            for size in (3, 3, 3, 3, 2):
                layers.zero_grad(set_to_none=True)
                if stage:
                    stage.begin([size])
                    stage.forward(torch.ones(size, 4), 0)
                    stage.backward(torch.ones(size, 4), size, 0)
                    if stage.splits:
                        stage.weights()
                    continue
                if graphs:
                    graphs.begin(adds=way == "added")
                    graphs.is_last = True
                layers(torch.ones(size, 4)).backward(torch.ones(size, 4))
        return [weight.grad for weight in weights if weight.grad is not None], layers, notes

    (plain, _, _), (replayed, layers, notes) = gradients(replays=False), gradients(replays=True)
    assert ["recorded" in note for note in notes] == [True], notes
    assert all(type(weight) is nn.Parameter for weight in layers.parameters())
    assert len(plain) == 4
    assert all(torch.allclose(one, other) for one, other in zip(plain, replayed, strict=True))


def test_all_recordings_use_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    part, notes, streams = nn.Sequential(nn.Linear(4, 3), nn.ReLU()), list[str](), list[object]()
    with cpu_graphs(), monkeypatch.context() as patch:
        patch.setattr(Memory, "stream", None)
        patch.setattr(torch.cuda, "Stream", lambda: streams.append(object()) or streams[-1])
        stage = StageWork(part, Full(), reads=True, splits=True)
        replay_stage(stage, 3, notes.append, notes.append)
        for size in (4, 4, 2, 2):
            stage.begin([size] * 3)
            for _ in range(3):
                stage.forward(torch.ones(size, 4), 0)
            for _ in range(3):
                stage.backward(torch.ones(size, 3), 6, 0)
                stage.weights()
    assert [note.partition(",")[0] for note in notes] == [
        f"cuda_graph: micro-batches of {size} samples recorded for 3 in flight" for size in (4, 2)
    ]
    assert len(streams) == 1


def test_a_stage_learns_if_the_optimiser_lacks_its_first_weight() -> None:
    def weights(*, replays: bool) -> tuple[list[Tensor], int]:
        torch.manual_seed(0)
        layers, notes = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3)), list[str]()
        optimizer = torch.optim.SGD(list(layers.parameters())[1:], lr=0.1)
        with cpu_graphs():
            stage = StageWork(layers, Full(), reads=True, splits=True)
            if replays:
                replay_stage(stage, 1, notes.append, notes.append)
            for _ in range(8):
                optimizer.zero_grad()
                stage.begin([2, 2])
                for _ in range(2):
                    stage.forward(torch.ones(2, 4), 0)
                    stage.backward(torch.ones(2, 3), 4, 0)
                    stage.weights()
                optimizer.step()
            return [weight.clone() for weight in layers.parameters()], CpuGraph.replays

    (plain, _), (replayed, count) = weights(replays=False), weights(replays=True)
    assert count > 20
    assert all(map(torch.equal, plain, replayed))


CHANGES: dict[str, Callable[[nn.Sequential, list[int]], object]] = {
    "another mode": lambda layers, _: layers[1].eval(),
    "a hook of a module": lambda layers, calls: layers[2].register_forward_hook(lambda *_: calls.append(1)),
    "a hook of a weight": lambda layers, calls: layers[2].weight.register_hook(lambda _: calls.append(1)),
    "a weight is trained": lambda layers, _: layers[0].requires_grad_(True),
    "a weight is frozen": lambda layers, _: layers[2].requires_grad_(False),
}


def changed_after(way: str, change: str, *, replays: bool) -> tuple[list[Tensor], int, list[str]]:
    """Gradients and statistics of updates before and after a change, calls of its hook, and notes."""
    torch.manual_seed(0)
    layers, notes, calls = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 3)), list[str](), list[int]()
    layers[0].requires_grad_(False)
    found: list[Tensor] = []
    generator = torch.Generator().manual_seed(1)
    with cpu_graphs():
        stage = StageWork(layers, Full(), reads=True, splits=True) if way != "whole" else None
        if stage and replays:
            replay_stage(stage, 2, notes.append, notes.append)
        graphs = replayable(layers, notes.append, notes.append) if not stage and replays else None
        for update in range(16):
            if update == 8:
                CHANGES[change](layers, calls)
            layers.zero_grad(set_to_none=True)
            images = torch.randn(2, 4, generator=generator)
            if stage:
                stage.begin([2])
                stage.forward(images, 0)
                if way == "in flight" and update == 7:
                    continue  # to the end, a pass is in flight between two updates
                stage.backward(torch.ones(2, 3), 2, 0)
                stage.weights()
            else:
                if graphs:
                    graphs.begin(adds=True)
                    graphs.is_last = True
                layers(images).backward(torch.ones(2, 3))
            found += [weight.grad.clone() for weight in layers.parameters() if weight.grad is not None]
            found += [buffer.clone() for buffer in layers.buffers()]
    return found, len(calls), notes


@pytest.mark.parametrize(
    ("way", "change"),
    [
        *((way, change) for way in ("whole", "stage") for change in CHANGES),
        *(("in flight", change) for change in ("another mode", "a hook of a module", "a weight is trained")),
    ],
)
def test_a_script_that_changes_a_recorded_network(way: str, change: str) -> None:
    plain, called, _ = changed_after(way, change, replays=False)
    replayed, calls, notes = changed_after(way, change, replays=True)
    assert len(plain) == len(replayed) and all(map(torch.equal, plain, replayed))
    assert calls == called
    assert [note for note in notes if "has changed" in note] == [CHANGED]
    after = [note for note in notes[1:] if note != CHANGED]
    assert len(after) == (way != "in flight")
    assert all(("has hooks" if "hook" in change else " recorded ") in note for note in after)


def with_dropout(*, is_stage: bool, replays: bool) -> tuple[list[Tensor], int, list[str]]:
    """Gradients of eight passes, number of replays, and notes."""
    torch.manual_seed(0)
    layers, notes, found = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3)), list[str](), list[Tensor]()
    with cpu_graphs():
        stage = StageWork(layers, Full(), reads=True, splits=True) if is_stage else None
        if replays and stage:
            replay_stage(stage, 1, notes.append, notes.append)
        elif replays:
            replayable(layers, notes.append, notes.append)
        for _ in range(8):
            layers.zero_grad(set_to_none=True)
            if stage:
                stage.begin([2])
                stage.forward(torch.ones(2, 4), 0)
                stage.backward(torch.ones(2, 3), 2, 0)
                stage.weights()
            else:
                layers(torch.ones(2, 4)).backward(torch.ones(2, 3))
            found += [weight.grad.clone() for weight in layers.parameters() if weight.grad is not None]
        return found, CpuGraph.replays, notes


@pytest.mark.parametrize("is_stage", [False, True], ids=["whole", "stage"])
def test_a_recording_draws_the_numbers_of_plain_passes(is_stage: bool) -> None:
    plain, _, _ = with_dropout(is_stage=is_stage, replays=False)
    replayed, count, notes = with_dropout(is_stage=is_stage, replays=True)
    assert count and len(notes) == 1 and ", 0 off a plain pass" in notes[0], notes
    assert all(map(torch.equal, plain, replayed))


@pytest.mark.parametrize("is_stage", [False, True], ids=["whole", "stage"])
def test_a_wrong_recording_with_dropout_is_dropped(monkeypatch: pytest.MonkeyPatch, is_stage: bool) -> None:
    forward = Piece.forward
    monkeypatch.setattr(Piece, "forward", lambda self, images: forward(self, images) * 0)
    plain, _, _ = with_dropout(is_stage=is_stage, replays=False)
    found, _, notes = with_dropout(is_stage=is_stage, replays=True)
    assert len(notes) == 1 and "off a plain pass, two of which are 0 apart" in notes[0], notes
    assert all(map(torch.equal, plain, found))
