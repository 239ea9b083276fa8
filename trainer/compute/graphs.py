"""CUDA graphs: forward and backward of a network queued with a few calls, instead of one call a kernel.

    graphs = replayable(model, say, gave_up)    in place; from the third training pass with one size of batch on,
                                                `model` replays what it recorded for it

ResNet-152 takes 1,350 launches a step, whatever the batch: some 24 ms of the host's time, in which a fast GPU with a
small batch has long been done. Recorded are forward and backward alone, in pieces: as a piece's backward ends, autograd
hands its gradients on as ever, so that DDP's hooks, and what travels beside backward, stay what they are. Loss,
exchange and optimiser are called as before. The kernels and their order are those of a plain pass; before a recording
counts, it is compared with one over the same images.

A recording reads and writes fixed places: it holds a pass's activations for good, next to what plain passes (of other
sizes, say) need. It is made only where memory has room for both. Gradients lie in places of its own, too, which the
next backward writes over: whoever adds up several micro-batches has to switch it off (`enabled`).

torch.cuda.make_graphed_callables does the same but for what matters here: it runs the network to warm up, which moves
BatchNorm's statistics, takes the parameters themselves, whose gradients DDP's hooks have bound to another stream, and
copies what passes from one piece to the next.
"""

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
"""Plain passes of a size before it is recorded: cuDNN chooses its algorithms, lazily loaded kernels are there."""
MOST = 2
"""Sizes recorded at once: a share that cannot be cut evenly has two."""
PIECE_BYTES = 1 << 24
"""Gradients that are handed on together: of the order of DDP's buckets, which so lose little of their head start."""
ROOM = 0.9
"""The part of what is free that a recording, and a plain pass beside it, may take."""
DIFFERENT, NOISE = 1e-3, 4
"""A recording whose outputs, gradients or statistics are farther from a plain pass's (as a part of these) than this
and so many times what two plain passes lie apart, is thrown away. The same kernels give the same bits, but for those
that add up in whatever order their threads come.
"""


def why_not(device: torch.device, settings: Any, model: nn.Module) -> str:
    """Why nothing can be recorded; empty where it can."""
    if device.type != "cuda":
        return "the rank computes on the CPU"
    if "capture_error_mode" not in inspect.signature(torch.cuda.graph).parameters:
        return f"torch {torch.__version__} is older than 2.1"
    if why := why_not_replayed(settings.strategy, settings.sync_bn, settings.accumulate):
        return why
    return "" if stages_of(model) else f"how {settings.model} is cut into pieces is not known"


class Graphs:
    """The recordings of one network, by the shape of its images. say: to people. gave_up: called with the reason when
    this rank stops recording and replaying. enabled: may the next pass be recorded or replayed?
    """

    def __init__(self, say: Callable[[str], None], gave_up: Callable[[str], None]) -> None:
        self.say, self.gave_up, self.enabled, self.given_up = say, gave_up, True, False
        self.passes: dict[torch.Size, int] = {}
        self.recorded: dict[torch.Size, Recording] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Graphs:
        """The graphs of a copied network, whose weights lie elsewhere: it replays nothing."""
        copied = Graphs(self.say, self.gave_up)
        copied.given_up = True
        return copied

    def of(self, model: nn.Module, images: Tensor) -> Recording | None:
        """What to replay for these images; None for a plain pass."""
        learns = model.training and torch.is_grad_enabled() and len(images) > 0
        if self.given_up or not self.enabled or not learns:
            return None
        if recording := self.recorded.pop(images.shape, None):
            self.recorded[images.shape] = recording  # at the end: the one used last
            return recording
        if images.numel() > max((shape.numel() for shape in self.passes), default=0):
            self.recorded.clear()  # larger than any before: all room is for its plain passes
        self.passes[images.shape] = self.passes.get(images.shape, 0) + 1
        return self._record(model, images) if self.passes[images.shape] > WARM else None

    def _record(self, model: nn.Module, images: Tensor) -> Recording | None:
        torch.cuda.synchronize()
        while len(self.recorded) >= MOST:
            self.recorded.pop(next(iter(self.recorded)))
        gc.collect()  # what it would free while a stream is recorded could not be freed
        torch.cuda.empty_cache()
        if lacking := _lacking(model, images.device):
            self._give_up(lacking)
            return None
        free = torch.cuda.mem_get_info(images.device)[0]
        try:
            found = Recording(model, images)
            gib = (free - torch.cuda.mem_get_info(images.device)[0]) / 2**30
            far, apart = distances(model, found, images)
        except RuntimeError as error:  # torch's word for whatever CUDA refuses
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
    """The model's class becomes one whose forward pass asks the graphs first: parameters, hooks and names stay what and
    where they are.
    """
    plain, graphs = type(model), Graphs(say, gave_up)

    def forward(self: Any, images: Tensor) -> Tensor:
        recording = self.graphs.of(self, images)
        output: Tensor = recording.replay(images) if recording else plain.forward(self, images)
        return output

    model.graphs, model.plain_forward = graphs, plain.forward  # type: ignore[assignment]
    model.__class__ = type(plain.__name__, (plain,), {"forward": forward})
    return graphs


def _lacking(model: nn.Module, device: torch.device) -> str:
    """Why memory is too small, empty where it is not: by the largest pass so far."""
    held = torch.cuda.memory_allocated(device)
    taken = torch.cuda.max_memory_allocated(device) - held
    needed = 2 * taken + 3 * gradient_bytes(model)
    free = ROOM * (torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - held)
    if needed <= free:
        return ""
    return f"a recording beside a plain pass takes {needed / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free"


# ---------------------------------------------------------------------------------------------------------------------
# One size


class Recording:
    """Forward and backward of a network for images of one shape. All its memory comes from one pool, which the order of
    replaying keeps right: forward from the first piece to the last, and back.
    """

    def __init__(self, model: nn.Module, images: Tensor) -> None:
        caches = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)  # a weight cast before would be read where it lay then
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
    """Some stages that follow each other. output, gradients: the places that a replay writes to."""

    def __init__(self, stages: nn.Sequential, images: Tensor, pool: Any, stream: Any) -> None:
        self.weights = trainable(stages)
        # Not the parameters themselves: their gradients are bound to the stream in which DDP has hooked them.
        own = {name: weight.detach().requires_grad_() for name, weight in stages.named_parameters()}
        self.aliases = list(own.values())
        self.images = images.detach().requires_grad_(images.requires_grad)
        self.forward, self.backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with recorded(self.forward, pool, stream):
            self.output = functional_call(stages, own, (self.images,))

    def record_backward(self, gradient: Tensor, pool: Any, stream: Any) -> Tensor:
        """gradient: the place of the output's. Gives the place of the images' gradient, where they have one."""
        self.output_gradient = gradient
        wanted = [*([self.images] if self.images.requires_grad else []), *self.aliases]
        with recorded(self.backward, pool, stream):
            gradients = torch.autograd.grad(self.output, wanted, gradient)
        self.gradients = gradients[len(wanted) - len(self.aliases) :]
        self.images_gradient = gradients[0] if self.images.requires_grad else None
        self.output = self.output.detach()  # without what led to it, whose memory the pool may use again
        return gradient if self.images_gradient is None else self.images_gradient


@contextlib.contextmanager
def recorded(graph: Any, pool: Any, stream: Any) -> Iterator[None]:
    """Other threads (loaders, NCCL's watchdog) may ask CUDA for what they like meanwhile."""
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
        # New names for the places, so that autograd takes them over instead of copying.
        images_gradient = None if piece.images_gradient is None else piece.images_gradient.detach()
        return None, images_gradient, *(found.detach() for found in piece.gradients)


def pieces_of(stages: Sequence[nn.Module]) -> Iterator[nn.Sequential]:
    """Neighbours together until they have PIECE_BYTES of gradients."""
    piece: list[nn.Module] = []
    for stage in stages:
        piece.append(stage)
        if stage is stages[-1] or sum(map(gradient_bytes, piece)) >= PIECE_BYTES:
            yield nn.Sequential(*piece)
            piece = []


def distances(model: Any, recording: Recording, images: Tensor) -> tuple[float, float]:
    """How far a replay lies from a plain pass over the same images, and a second plain pass from the first: the worst
    of outputs, gradients and running statistics, as a part of these. Leaves the statistics as they were.
    """
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
    """The same for the same shape, and not alike in any two places."""
    count = torch.arange(output.numel(), device=output.device)
    return (torch.sin(1.0 + count) / len(output)).view_as(output).to(output.dtype)


def _far(plain: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    pairs = list(zip(plain, other, strict=True))
    of = sum((one.double().square().sum() for one, _ in pairs), torch.zeros(()))
    off = sum(((one.double() - two.double()).square().sum() for one, two in pairs), torch.zeros(()))
    return float((off / of).sqrt()) if float(of) else float(off)
