"""CUDA graphs: queues a network's forward and backward with a few calls instead of one per kernel.

    graphs = replayable(model, say, gave_up)    in place; records each batch size at its third training pass

ResNet-152 has 1,350 launches per step, 24 ms of host time. Recordings are cut into pieces, so that gradients are handed
on during backward as usual. They use memory of their own, and the next backward overwrites their gradients:
accumulating micro-batches needs `enabled = False`.
"""
# torch.cuda.make_graphed_callables does not fit: its warm-up moves BatchNorm's statistics, it uses the parameters
# themselves, whose gradients DDP's hooks have bound to another stream, and it copies between pieces.

from __future__ import annotations

import contextlib
import gc
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from trainer.compute.models import gradient_bytes, stages_of, trainable
from trainer.shared.strategy_table import why_not_replayed

WARM = 2
"""Plain passes before a recording: cuDNN chooses algorithms, kernels are loaded."""
MOST = 2
"""Recorded sizes: an uneven share has two."""
PIECE_BYTES = 1 << 24
"""Gradients of a piece: about one DDP bucket, so overlap is kept."""
ROOM = 0.9
"""The part of free memory that may be used."""
DIFFERENT, NOISE = 1e-3, 4
"""A recording is dropped if its distance to a plain pass exceeds DIFFERENT + NOISE * (distance of two plain passes)."""


def why_not(device: torch.device, settings: Any, model: nn.Module) -> str:
    """Empty if recording is possible."""
    if device.type != "cuda":
        return "the rank computes on the CPU"
    if "capture_error_mode" not in inspect.signature(torch.cuda.graph).parameters:
        return f"torch {torch.__version__} is older than 2.1"
    if why := why_not_replayed(settings.strategy, settings.sync_bn, settings.accumulate):
        return why
    return "" if stages_of(model) else f"{settings.model} cannot be cut into pieces"


class Graphs:
    """A network's recordings by image shape. gave_up: called with the reason when this rank stops."""

    def __init__(self, say: Callable[[str], None], gave_up: Callable[[str], None]) -> None:
        self.say, self.gave_up, self.enabled, self.given_up = say, gave_up, True, False
        self.passes: dict[torch.Size, int] = {}
        self.recorded: dict[torch.Size, Recording] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Graphs:
        # A copied network has other weights: it never replays.
        copied = Graphs(self.say, self.gave_up)
        copied.given_up = True
        return copied

    def of(self, model: nn.Module, images: Tensor) -> Recording | None:
        """None for a plain pass."""
        learns = model.training and torch.is_grad_enabled() and len(images) > 0
        if self.given_up or not self.enabled or not learns:
            return None
        if recording := self.recorded.pop(images.shape, None):
            self.recorded[images.shape] = recording  # most recently used last
            return recording
        if images.numel() > max((shape.numel() for shape in self.passes), default=0):
            self.recorded.clear()  # the largest size so far needs all memory for plain passes
        self.passes[images.shape] = self.passes.get(images.shape, 0) + 1
        return self._record(model, images) if self.passes[images.shape] > WARM else None

    def _record(self, model: nn.Module, images: Tensor) -> Recording | None:
        torch.cuda.synchronize()
        while len(self.recorded) >= MOST:
            self.recorded.pop(next(iter(self.recorded)))
        gc.collect()  # nothing can be freed during a capture
        torch.cuda.empty_cache()
        if lacking := _lacking(model, images.device):
            self._give_up(lacking)
            return None
        free = torch.cuda.mem_get_info(images.device)[0]
        try:
            found = Recording(model, images)
            gib = (free - torch.cuda.mem_get_info(images.device)[0]) / 2**30
            far, apart = distances(model, found, images)
        except RuntimeError as error:  # torch's error for anything that CUDA refuses
            self._give_up(str(error).partition("\n")[0][:200])
            return None
        if not far <= DIFFERENT + NOISE * apart:
            self._give_up(f"a replay is {far:.2g} off a plain pass, two of which are {apart:.2g} apart")
            return None
        self.recorded[images.shape] = found
        self.say(
            f"cuda_graph: {len(images)} samples recorded in {len(found.pieces)} pieces, {gib:.1f} GiB, "
            f"{far:.1g} off a plain pass"
        )
        return found

    def _give_up(self, why: str) -> None:
        self.given_up, self.recorded = True, {}
        self.gave_up(why)


def replayable(model: nn.Module, say: Callable[[str], None], gave_up: Callable[[str], None]) -> Graphs:
    """Changes the model's class. Parameters, hooks and names stay."""
    plain, graphs = type(model), Graphs(say, gave_up)

    def forward(self: Any, images: Tensor) -> Tensor:
        recording = self.graphs.of(self, images)
        output: Tensor = recording.replay(images) if recording else plain.forward(self, images)
        return output

    model.graphs, model.plain_forward = graphs, plain.forward  # type: ignore[assignment]
    model.__class__ = type(plain.__name__, (plain,), {"forward": forward})
    return graphs


def _lacking(model: nn.Module, device: torch.device) -> str:
    """Judged by the largest pass so far; empty if memory suffices."""
    held = torch.cuda.memory_allocated(device)
    taken = torch.cuda.max_memory_allocated(device) - held
    needed = 2 * taken + 3 * gradient_bytes(model)
    free = ROOM * (torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - held)
    if needed <= free:
        return ""
    return f"a recording and a plain pass take {needed / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free"


# ---------------------------------------------------------------------------------------------------------------------


class Recording:
    # All pieces share a memory pool, so they must replay in order: forward, then backward from the last piece.

    def __init__(self, model: nn.Module, images: Tensor) -> None:
        caches = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)  # a cached cast of a weight would be read at its old address
        try:
            self.images = images.detach().clone()
            self.pieces = _record(stages_of(model), self.images)
        finally:
            torch.set_autocast_cache_enabled(caches)

    def replay(self, images: Tensor) -> Tensor:
        self.images.copy_(images)
        value = self.images
        for piece in self.pieces:
            value = _Replay.apply(piece, value, *piece.weights)
        return value


def _record(stages: Sequence[nn.Module], images: Tensor) -> list[Piece]:
    pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
    pieces: list[Piece] = []
    for neighbours in pieces_of(stages):
        pieces.append(Piece(neighbours, pieces[-1].output if pieces else images, pool, stream))
    gradient = torch.zeros_like(pieces[-1].output, requires_grad=False)
    for piece in reversed(pieces):
        gradient = piece.record_backward(gradient, pool, stream)
    return pieces


class Piece:
    """output, gradients: memory that a replay writes to."""

    def __init__(self, stages: nn.Sequential, images: Tensor, pool: Any, stream: Any) -> None:
        self.weights = trainable(stages)
        # Aliases, because DDP's hooks bind the parameters' gradients to another stream.
        own = {name: weight.detach().requires_grad_() for name, weight in stages.named_parameters()}
        self.aliases = list(own.values())
        self.images = images.detach().requires_grad_(images.requires_grad)
        self.forward, self.backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with recorded(self.forward, pool, stream):
            self.output = functional_call(stages, own, (self.images,))

    def record_backward(self, gradient: Tensor, pool: Any, stream: Any) -> Tensor:
        """gradient: memory of the output's gradient. Returns that of the images'."""
        self.output_gradient = gradient
        wanted = [*([self.images] if self.images.requires_grad else []), *self.aliases]
        with recorded(self.backward, pool, stream):
            gradients = torch.autograd.grad(self.output, wanted, gradient)
        self.gradients = gradients[len(wanted) - len(self.aliases) :]
        self.images_gradient = gradients[0] if self.images.requires_grad else None
        self.output = self.output.detach()  # drops the autograd graph, so that the pool can reuse its memory
        return gradient if self.images_gradient is None else self.images_gradient


@contextlib.contextmanager
def recorded(graph: Any, pool: Any, stream: Any) -> Iterator[None]:
    # Other threads (loaders, NCCL's watchdog) may use CUDA during the capture.
    with torch.cuda.stream(stream):
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            yield
        finally:
            graph.capture_end()


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, piece: Piece, images: Tensor, *weights: Tensor) -> Tensor:
        context.piece = piece
        piece.forward.replay()
        output: Tensor = piece.output
        return output.detach()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        piece = context.piece
        if gradient.data_ptr() != piece.output_gradient.data_ptr():
            piece.output_gradient.copy_(gradient)
        piece.backward.replay()
        # New tensors on the same memory: autograd takes them without a copy.
        images_gradient = None if piece.images_gradient is None else piece.images_gradient.detach()
        return None, images_gradient, *(found.detach() for found in piece.gradients)


def pieces_of(stages: Sequence[nn.Module]) -> Iterator[nn.Sequential]:
    piece: list[nn.Module] = []
    for stage in stages:
        piece.append(stage)
        if stage is stages[-1] or sum(map(gradient_bytes, piece)) >= PIECE_BYTES:
            yield nn.Sequential(*piece)
            piece = []


def distances(model: Any, recording: Recording, images: Tensor) -> tuple[float, float]:
    """Relative distances of a replay, and of a second plain pass, to a plain pass."""
    kept = [(buffer, buffer.clone()) for buffer in model.buffers()]

    def one(forward: Callable[[Tensor], Tensor]) -> tuple[Sequence[Tensor], ...]:
        output = forward(images)
        gradients = torch.autograd.grad(output, trainable(model), _some_gradient(output))
        found = [output.detach()], gradients, [buffer.clone() for buffer, _ in kept]
        for buffer, before in kept:
            buffer.copy_(before)
        return found

    plain = one(lambda images: model.plain_forward(model, images))
    replayed = max(map(_far, plain, one(recording.replay)))
    return replayed, max(map(_far, plain, one(lambda images: model.plain_forward(model, images))))


def _some_gradient(output: Tensor) -> Tensor:
    """Depends only on the shape; all values differ."""
    count = torch.arange(output.numel(), device=output.device)
    return (torch.sin(1.0 + count) / len(output)).view_as(output).to(output.dtype)


def _far(plain: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    pairs = list(zip(plain, other, strict=True))
    of = sum((one.double().square().sum() for one, _ in pairs), torch.zeros(()))
    off = sum(((one.double() - two.double()).square().sum() for one, two in pairs), torch.zeros(()))
    return float((off / of).sqrt()) if float(of) else float(off)
