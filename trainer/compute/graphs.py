"""CUDA graphs: queues a network's forward and backward with a few calls instead of one per kernel.

    graphs = replayable(model, say, gave_up)    in place; records each batch size at its third training pass

ResNet-152 has 1,350 launches per step, 24 ms of host time. Recordings are cut into pieces, so that gradients are handed
on during backward as usual. They use memory of their own, and the next backward overwrites their gradients. If an
update has several micro-batches (`begin(adds=True)`), recordings add up gradients in `sums` and hand them on with the
last one. A pipeline's recordings: `trainer.pipeline.stage_graphs`.
"""
# torch.cuda.make_graphed_callables does not fit: its warm-up moves BatchNorm's statistics, it uses the parameters
# themselves, whose gradients DDP's hooks have bound to another stream, and it copies between pieces.

from __future__ import annotations

import contextlib
import gc
import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call

from trainer.compute.models import gradient_bytes, has_hooks, has_weight_hooks, stages_of, trainable
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
CHANGED = "cuda_graph: a frozen weight, a mode (train, eval) or a hook has changed; passes are recorded anew"


def why_not(device: torch.device, settings: Any, model: nn.Module) -> str:
    """Empty if recording is possible."""
    if device.type != "cuda":
        return "the rank computes on the CPU"
    if "capture_error_mode" not in inspect.signature(torch.cuda.graph).parameters:
        return f"torch {torch.__version__} is older than 2.1"
    if why := why_not_replayed(settings.strategy, settings.sync_bn):
        return why
    if settings.strategy == "pipeline" or stages_of(model):  # a stage is one piece
        return ""
    return f"{settings.model} cannot be cut into pieces"


class Graphs:
    """A network's recordings by image shape. gave_up: called with the reason when this rank stops."""

    def __init__(self, say: Callable[[str], None], gave_up: Callable[[str], None]) -> None:
        self.say, self.gave_up, self.given_up = say, gave_up, False
        self.passes: dict[torch.Size, int] = {}
        self.recorded: dict[tuple[torch.Size, bool], Recording] = {}
        self.sums: Sums | None = None
        self.adds, self.is_last = False, True
        """Whether the update has several micro-batches, and whether its last one has begun."""
        self.last_used: Recording | None = None
        self.trained: Trained | None = None
        """The network of the first recording."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Graphs:
        # A copied network has other weights: it never replays.
        copied = Graphs(self.say, self.gave_up)
        copied.given_up = True
        return copied

    def begin(self, *, adds: bool) -> None:
        """Call before each update."""
        self.adds, self.is_last = adds, not adds
        if self.trained:
            self.trained.is_checked = False
        if self.sums:
            self.sums.is_empty, self.sums.has_left = True, False

    def hand_over(self) -> None:
        """Adds the sums to .grad, before a plain pass ends the update."""
        if self.sums and not self.sums.is_empty:
            self.sums.hand_over()

    def replay(self, model: nn.Module, images: Tensor) -> Tensor | None:
        """The output; None for a plain pass."""
        if self.given_up or not learns(model, images) or self._is_called_again():
            return None
        if self.trained and self.trained.have_changed():
            if self.recorded:
                self.say(CHANGED)
            self.recorded, self.passes, self.sums = {}, {}, None
        recording = self._recording(model, images)
        if recording is None:
            if self.is_last:
                self.hand_over()
            return None
        if recording.sums:
            recording.sums.begin()
        self.last_used = recording
        return recording.replay(images, hands_over=self.is_last)

    def _is_called_again(self) -> bool:
        """Before the last replay's backward, which needs its memory and sums, or after the sums have left."""
        if self.last_used and not self.last_used.is_free:
            return True
        self.last_used = None  # its memory may be needed
        return bool(self.sums and self.sums.has_left)

    def _recording(self, model: nn.Module, images: Tensor) -> Recording | None:
        key = images.shape, self.adds
        if recording := self.recorded.pop(key, None):
            self.recorded[key] = recording  # most recently used last
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
        needed = 2 * pass_bytes(images.device) + 3 * gradient_bytes(model)
        if why := hooks_of(model, of_weights=self.adds) or lacking(needed, images.device):
            self._give_up(why)
            return None
        free = torch.cuda.mem_get_info(images.device)[0]
        self.trained = self.trained or Trained(model)
        try:
            if self.adds and not self.sums:
                self.sums = Sums(trainable(model))
            found = Recording(model, images, self.sums if self.adds else None)
            gib = (free - torch.cuda.mem_get_info(images.device)[0]) / 2**30
            far, apart = found.distances(model, images)
        except RuntimeError as error:  # torch's error for anything that CUDA refuses
            self._give_up(str(error).partition("\n")[0][:200])
            return None
        if why := why_inexact(far, apart):
            self._give_up(why)
            return None
        self.recorded[images.shape, self.adds] = found
        self.say(
            f"cuda_graph: {len(images)} samples recorded in {len(found.pieces)} pieces, {gib:.1f} GiB, "
            f"{far:.1g} off a plain pass"
        )
        return found

    def _give_up(self, why: str) -> None:
        self.given_up, self.recorded = True, {}
        self.hand_over()
        self.sums = None
        self.gave_up(why)


def why_inexact(far: float, apart: float) -> str:
    """Empty if a replay equals a plain pass. apart: of two plain passes."""
    if far <= DIFFERENT + NOISE * apart:
        return ""
    return f"a replay is {far:.2g} off a plain pass, two of which are {apart:.2g} apart"


class Trained:
    """Notices what a script changes in a recorded network."""

    def __init__(self, model: nn.Module) -> None:
        self.modules, self.weights = list(model.modules()), list(model.parameters())
        self.is_checked, self.state = True, self._found()

    def _found(self) -> tuple[list[bool], ...]:
        return (
            [weight.requires_grad for weight in self.weights],
            [module.training for module in self.modules],
            [has_hooks(module) for module in self.modules],
            [has_weight_hooks(weight) for weight in self.weights],
        )

    @property
    def differs(self) -> bool:
        return self.state != self._found()

    def have_changed(self) -> bool:
        """In this update's first pass, since it last was true. Set `is_checked` to False before each update."""
        # Not earlier: a script may set the modes in the loop's body. Not in each pass: it takes 0.2 ms for ResNet-152.
        if self.is_checked:
            return False
        self.is_checked, before = True, self.state
        self.state = self._found()
        return self.state != before


class Sums:
    """Gradients of an update, in memory that recordings add to."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self.weights, self.is_empty, self.has_left = list(weights), True, False
        self.all = [torch.zeros_like(weight, requires_grad=False) for weight in weights]
        self.of = dict(zip(map(id, weights), self.all, strict=True))

    def begin(self) -> None:
        """Call before each replay."""
        if self.is_empty:
            torch._foreach_zero_(self.all)
            self.is_empty = False

    def hand_over(self) -> None:
        self.is_empty = self.has_left = True
        for weight, found in zip(self.weights, self.all, strict=True):
            weight.grad = found if weight.grad is None else weight.grad + found

    def bind(self, weights: Sequence[Tensor]) -> None:
        """Makes them the gradients of these weights, including what these hold. Plain passes then add to them, too."""
        if all(weight.grad is found for weight, found in zip(weights, self.all, strict=True)):
            return
        empty = []
        for weight, found in zip(weights, self.all, strict=True):
            if weight.grad is None:
                empty.append(found)
            else:
                found.copy_(weight.grad)
            weight.grad = found
        if empty:
            torch._foreach_zero_(empty)


def learns(model: nn.Module, images: Tensor) -> bool:
    return model.training and torch.is_grad_enabled() and len(images) > 0


def replayable(model: nn.Module, say: Callable[[str], None], gave_up: Callable[[str], None]) -> Graphs:
    """Changes the model's class. Parameters, hooks and names stay."""
    graphs = Graphs(say, gave_up)
    replays(model, graphs)
    return graphs


def replays(model: nn.Module, graphs: Any) -> None:
    """graphs: with `replay(model, *inputs)`, which returns None for a plain pass."""
    plain = type(model)

    def forward(self: Any, *inputs: Any) -> Tensor:
        output: Tensor | None = self.graphs.replay(self, *inputs)
        return cast(Tensor, plain.forward(self, *inputs)) if output is None else output

    model.graphs, model.plain_forward = graphs, plain.forward  # type: ignore[assignment]
    model.__class__ = type(plain.__name__, (plain,), {"forward": forward})


def hooks_of(model: nn.Module, *, of_weights: bool) -> str:
    """Names hooks that a replay would not call; otherwise empty. of_weights: include hooks of weights."""
    if found := next((name for name, module in model.named_modules() if has_hooks(module)), None):
        return f"{found} has hooks, which a replay does not call"
    for name, weight in model.named_parameters() if of_weights else ():
        if has_weight_hooks(weight):
            return f"{name} has hooks, which a replay does not call"
    return ""


def pass_bytes(device: torch.device) -> int:
    """The most that passes have held at a time."""
    return int(torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device))


def lacking(needed: float, device: torch.device) -> str:
    """Why bytes for a recording and a plain pass are not free; empty if they are. Call after `empty_cache`."""
    free = ROOM * torch.cuda.mem_get_info(device)[0]
    if needed <= free:
        return ""
    return f"a recording and a plain pass take {needed / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free"


# ---------------------------------------------------------------------------------------------------------------------


class Use:
    """A pass that uses a recording's memory."""


class Reusable:
    _use: Callable[[], Use | None] = staticmethod(lambda: None)

    def begin(self) -> Use:
        """Hold it until the pass's last task."""
        use = Use()
        self._use = weakref.ref(use)
        return use

    @property
    def is_free(self) -> bool:
        """False between a forward pass and its last task, unless its output is lost."""
        return self._use() is None


class Recording(Reusable):
    # All pieces share a memory pool, so they must replay in order: forward, then backward from the last piece.

    def __init__(self, model: nn.Module, images: Tensor, sums: Sums | None = None) -> None:
        self.sums = sums
        with uncached():
            self.images = images.detach().clone()
            self.pieces = _record(stages_of(model), self.images, sums)

    def replay(self, images: Tensor, *, hands_over: bool = True) -> Tensor:
        """hands_over: whether backward gives gradients to autograd."""
        value, use = images, self.begin()
        for piece in self.pieces:
            piece.hands_over = hands_over
            value = Replay.apply(piece, use, value, *piece.weights)
        return value

    def distances(self, model: Any, images: Tensor) -> tuple[float, float]:
        def found(output: Tensor) -> Found:
            with uncast(output):
                return [output], torch.autograd.grad(output, trainable(model), some_gradient(output))

        plain, sums = (lambda: found(model.plain_forward(model, images))), self.sums.all if self.sums else ()
        return distances(plain, lambda: found(self.replay(images)), model, sums)


@contextlib.contextmanager
def uncached() -> Iterator[None]:
    """For recordings with autocast: a cached cast of a weight would be read at its old address."""
    caches = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(caches)


def uncast(on: Tensor) -> torch.autocast:
    """For a backward within forward's autocast: runs have it outside."""
    return torch.autocast(on.device.type, enabled=False)


def _record(stages: Sequence[nn.Module], images: Tensor, sums: Sums | None) -> list[Piece]:
    memory = Memory()
    pieces: list[Piece] = []
    for neighbours in pieces_of(stages):
        of = [sums.of[id(weight)] for weight in trainable(neighbours)] if sums else None
        pieces.append(Piece(neighbours, pieces[-1].output if pieces else images, memory, of))
    gradient = torch.zeros_like(pieces[-1].output, requires_grad=False)
    for piece in reversed(pieces):
        gradient = piece.record_backward(gradient)
    return pieces


class Memory:
    """A pool for recordings that always replay in the same order, and the stream of all recordings."""

    # torch has 32 streams per GPU, and then gives them out again: a capture would also record what another thread does
    # in its stream. Each stream has a cuBLAS workspace, too, of 32 MiB on an H100.
    stream: ClassVar[Any] = None

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()
        Memory.stream = Memory.stream or torch.cuda.Stream()

    @contextlib.contextmanager
    def recorded(self, graph: Any) -> Iterator[None]:
        # Other threads (loaders, NCCL's watchdog) may use CUDA during the capture.
        with torch.cuda.stream(self.stream):
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            try:
                yield
            finally:
                graph.capture_end()


class Piece:
    """output, gradients: memory that a replay writes to. sums: by trainable weight; backward then adds to them.
    instead: of parameters, by their id. end: of the stages' output, makes the piece's.
    """

    hands_over = False
    """Whether backward returns gradients of weights."""

    def __init__(
        self,
        stages: nn.Sequential,
        images: Tensor,
        memory: Memory,
        sums: Sequence[Tensor] | None = None,
        instead: Mapping[int, Tensor] | None = None,
        end: Callable[[Tensor], Tensor] = lambda output: output,
    ) -> None:
        self.weights, self.memory, self.sums = trainable(stages), memory, sums
        # Aliases, because DDP's hooks bind the parameters' gradients to another stream.
        own = aliases_of(stages, instead or {})
        self.aliases = [alias for alias in dict.fromkeys(own.values()) if alias.requires_grad]
        for alias, found in zip(self.aliases, sums or (), strict=sums is not None):
            alias.grad = found
        self.images = images.detach().requires_grad_(images.requires_grad)
        self.graphs = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with memory.recorded(self.graphs[0]):
            self.output = end(functional_call(stages, own, (self.images,), tie_weights=False))

    def record_backward(self, gradient: Tensor) -> Tensor:
        """gradient: memory of the output's gradient. Returns that of the images'."""
        self.output_gradient = gradient
        self.images_gradient: Tensor | None = None
        self.gradients: Sequence[Tensor] = self.sums or ()
        if self.output.requires_grad:
            with self.memory.recorded(self.graphs[1]), uncast(gradient):
                self._backward(gradient)
        self.output = self.output.detach()  # drops the autograd graph, so that the pool can reuse its memory
        return gradient if self.images_gradient is None else self.images_gradient

    def _backward(self, gradient: Tensor) -> None:
        if self.sums is not None:
            torch.autograd.backward(self.output, gradient)
            self.images_gradient = self.images.grad
            return
        wanted = [*([self.images] if self.images.requires_grad else []), *self.aliases]
        gradients = torch.autograd.grad(self.output, wanted, gradient)
        self.gradients = gradients[len(wanted) - len(self.aliases) :]
        self.images_gradient = gradients[0] if self.images.requires_grad else None

    # Both return new tensors on the same memory, which autograd takes without a copy.

    def forward(self, images: Tensor) -> Tensor:
        _put(images, self.images)
        self.graphs[0].replay()
        output: Tensor = self.output
        return output.detach()

    def backward(self, gradient: Tensor, use: Use | None = None) -> list[Tensor | None]:
        """Gradients of images and weights."""
        _put(gradient, self.output_gradient)
        self.graphs[1].replay()
        found = [self.images_gradient, *(self.gradients if self.hands_over else [None] * len(self.gradients))]
        return [gradient if gradient is None else gradient.detach() for gradient in found]


def _put(tensor: Tensor, into: Tensor) -> None:
    if tensor.data_ptr() != into.data_ptr():
        into.copy_(tensor)


def aliases_of(stages: nn.Module, instead: Mapping[int, Tensor]) -> dict[str, Tensor]:
    """By one name for each module's weight, to call with tie_weights=False: with two names for a module that is used
    twice, functional_call does not restore its weights.
    """
    of = {
        id(weight): instead.get(id(weight), weight).detach().requires_grad_(weight.requires_grad)
        for weight in stages.parameters()
    }
    return {
        f"{name}.{key}": of[id(weight)]
        for name, module in stages.named_modules()
        for key, weight in module.named_parameters(recurse=False, remove_duplicate=False)
    }


class Replay(torch.autograd.Function):
    """of: has forward(inputs), and backward(gradient, use), which returns the gradients of inputs and weights."""

    @staticmethod
    def forward(context: Any, of: Any, use: Use, inputs: Tensor, *weights: Tensor) -> Tensor:
        context.of, context.use = of, use
        output: Tensor = of.forward(inputs)
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        use, context.use = context.use, None
        return None, None, *context.of.backward(gradient, use)


def pieces_of(stages: Sequence[nn.Module]) -> Iterator[nn.Sequential]:
    piece: list[nn.Module] = []
    for stage in stages:
        piece.append(stage)
        if stage is stages[-1] or sum(map(gradient_bytes, piece)) >= PIECE_BYTES:
            yield nn.Sequential(*piece)
            piece = []


Found = tuple[Sequence[Tensor], ...]
"""Outputs, and gradients of inputs and weights."""


def distances(
    plain: Callable[[], Found], replayed: Callable[[], Found], model: nn.Module, sums: Sequence[Tensor]
) -> tuple[float, float]:
    """Relative distances of a replay, and of a second plain pass, to a plain pass. All three draw the same random
    numbers. Leaves buffers, sums and random generators as found.
    """
    changed = [*model.buffers(), *sums]
    gpus = {weight.device.index for weight in model.parameters() if weight.is_cuda}
    kept = [tensor.clone() for tensor in changed]

    def copies_of(made: Callable[[], Found]) -> list[list[Tensor]]:
        for total in sums:
            total.data.zero_()
        with torch.random.fork_rng(devices=gpus):
            copies = [[tensor.detach().clone() for tensor in each] for each in (*made(), model.buffers())]
        # Without new versions, which autograd checks: a micro-batch may hold BatchNorm's statistics for its backward.
        for tensor, before in zip(changed, kept, strict=True):
            tensor.data.copy_(before)
        return copies

    first = copies_of(plain)
    off = max(map(far, first, copies_of(replayed)))
    return off, max(map(far, first, copies_of(plain)))


def some_gradient(output: Tensor) -> Tensor:
    """Depends only on the shape; all values differ."""
    count = torch.arange(output.numel(), device=output.device)
    return (torch.sin(1.0 + count) / output.shape[:1].numel()).view_as(output).to(output.dtype)


def far(plain: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    pairs = list(zip(plain, other, strict=True))
    of = sum((one.double().square().sum() for one, _ in pairs), torch.zeros(()))
    off = sum(((one.double() - two.double()).square().sum() for one, two in pairs), torch.zeros(()))
    return float((off / of).sqrt()) if float(of) else float(off)
