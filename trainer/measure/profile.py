"""How fast this rank is alone, by the size of its batch: `profile(settings, rank_info, metrics)`.

    python -m trainer --exp resnet152_cifar --profile_s 15

Times whole updates without synchronisation (forward, backward, optimiser; on made-up images, so that no loader is
measured) at batches of 2, 4, 8, ..., and writes one `profile` record: the medians, the line fixed_ms + sample_ms *
samples through the largest of them (small batches leave a GPU partly idle and take as long as larger ones, which no
line can show), and the largest batch that fits into memory. Ranks of one host are measured at the same moment, since
that is how they will compute. Sizes at which a paced rank could not keep its pace are left out of the line.
"""

from __future__ import annotations

import dataclasses
import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.compute.arithmetic import arranged, choose_arithmetic, devices_of_all_ranks, use_arithmetic
from trainer.compute.graphs import WARM, replayable, why_not
from trainer.compute.models import build_model, gradient_bytes
from trainer.compute.precision import Full, build_precision
from trainer.compute.timer import Timer, timer_for
from trainer.data.loading import agree_on_facts, choose_loader, resident_bytes
from trainer.paced.anatomy import dissect
from trainer.paced.memory import most_samples
from trainer.paced.standin import StandIn, StandInOptimizer
from trainer.ranks.agreement import together
from trainer.ranks.devices import choose_device, use_threads
from trainer.ranks.process_group import join, leave
from trainer.ranks.rank_info import RankInfo
from trainer.setup.network import stand_in
from trainer.setup.optimizer import build_optimizer
from trainer.setup.start_record import start_fields
from trainer.shared.alpha_beta import Line, fit
from trainer.shared.config import Settings
from trainer.shared.errors import TrainError
from trainer.shared.experiments import DataSet
from trainer.shared.metrics import LATE, MetricsWriter
from trainer.shared.pace import Pace
from trainer.strategies import local_loss

FIRST = 2
"""Samples of the smallest batch: BatchNorm can make nothing of one."""
FEWEST, MOST = 2, 15
"""Timed updates of each size. Some before them are not timed: one, or as many as a CUDA graph takes to be recorded; of
the first size the fewest more."""

HELD = 4
"""Times the size of all gradients: the most that a strategy keeps beside gradients and momentum, which is
local's start, sent weights, weight change and velocity."""

ENOUGH = 2
"""Sizes at which a paced rank has to keep its pace: a line takes two."""

STRAIGHT = 0.02
"""Times this close to a line, as a part of them, lie on it."""


@dataclass(frozen=True)
class Times:
    """The times of one update, or their medians over several."""

    step_ms: float
    forward_ms: float
    optim_ms: float
    lateness: float | None = None
    """How late a paced rank's backward ended, as a part of a step; None for a rank that computes."""

    @property
    def kept_pace(self) -> bool:
        return self.lateness is None or self.lateness <= LATE


class NoMemory(Exception):
    """A batch of this size does not fit; `str(error)` is the line that said so, where there is one."""


def profile(settings: Settings, info: RankInfo, metrics: MetricsWriter) -> None:
    """Measures, records. Raises TrainError for what a person can mend."""
    use_threads(info)
    device = torch.device("cpu") if info.pace else choose_device(settings.device, settings.backend, info)
    if device.type == "cuda":
        metrics.peak_memory_bytes = lambda: torch.cuda.max_memory_allocated(device)
    torch.manual_seed(settings.seed)
    group = join(info, settings.backend, device)
    facts = agree_on_facts(settings, info)
    everyone = devices_of_all_ranks(device)
    with together(info.node):
        settings = choose_arithmetic(choose_loader(settings, facts, info, device), device, everyone)
        use_arithmetic(settings)
        precision = build_precision(settings.amp, device, None)  # ranks of a host take their updates as they come
        model, room = _subject(settings, facts, info, metrics, device)
        model, held = arranged(model, settings), _held(model, facts, settings, device)
    untimed = 1
    if settings.cuda_graph != "off" and not why_not(device, settings, model):
        replayable(model, say=lambda line: None, gave_up=lambda why: None)
        untimed = 1 + WARM
    start = start_fields(settings, info, device, group, model)
    metrics.write("start", **start, batch_per_rank=None, batch_norm_groups=None, work=None, steps=0)
    subject = Subject(model, build_optimizer(settings, model), precision, facts, device, timer_for(device), room, held)
    if info.rank == 0:
        print(f"{settings.exp}: measuring {info.node} alone, {settings.profile_s:g} s", flush=True)
    dist.barrier()
    with together(info.node):
        ladder = climb(subject.update, 2 * settings.batch, settings.profile_s, untimed=untimed)
        metrics.lateness = ladder.lateness
        metrics.write("profile", **record_of(ladder), **again(subject.update, ladder, settings.profile_s))
    leave()
    metrics.end("succeeded")


def _subject(
    settings: Settings, facts: DataSet, info: RankInfo, metrics: MetricsWriter, device: torch.device
) -> tuple[nn.Module, int | None]:
    """What is trained, and for how many samples a GPU that is stood in for has memory (None: no such limit)."""
    if not info.pace:
        return build_model(settings.model, facts.shape, facts.classes).to(device), None
    pace = steady(info.pace)
    model = stand_in(settings, facts, info, metrics, pace, share=FIRST)
    return model, most_samples(dissect(settings.model, facts.shape, facts.classes), pace)


def _held(model: nn.Module, facts: DataSet, settings: Settings, device: torch.device) -> Tensor:
    """Holds as much of a GPU's memory as a run takes beside the training itself: what fits here has to fit there."""
    if device.type != "cuda":
        return torch.empty(0)
    images = resident_bytes(facts) if settings.loader == "resident" else 0
    return torch.empty(HELD * gradient_bytes(model) + images, dtype=torch.uint8, device=device)


def steady(pace: Pace) -> Pace:
    """Without the changes of speed in the course of a run."""
    return dataclasses.replace(pace, slowdown=())


class Subject:
    """A rank that takes updates of any size. room: samples for which a stand-in's GPU has memory. held: takes the place
    of what a run keeps besides.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | StandInOptimizer,
        precision: Full,
        facts: DataSet,
        device: torch.device,
        timer: Timer,
        room: int | None,
        held: Tensor,
    ) -> None:
        self.model, self.optimizer, self.precision, self.facts = model, optimizer, precision, facts
        self.device, self.timer, self.room, self.held = device, timer, room, held

    def update(self, samples: int) -> Times:
        """Raises NoMemory."""
        if self.room is not None and samples > self.room:
            raise NoMemory
        try:
            return self._update(*self._batch(samples))
        except RuntimeError as error:
            if not (why := out_of_memory(error)):
                raise
        # Only here the error is gone, and with it all that the frames of its traceback hold.
        self.optimizer.zero_grad(set_to_none=True)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        raise NoMemory(why)

    def _batch(self, samples: int) -> tuple[Tensor, Tensor]:
        labels = torch.zeros(samples, dtype=torch.long, device=self.device)
        if isinstance(self.model, StandIn):
            return torch.zeros(1).expand(samples, *self.facts.shape), labels
        return torch.randn(samples, *self.facts.shape, device=self.device), labels

    def _update(self, images: Tensor, labels: Tensor) -> Times:
        begin = self.timer.mark()
        self.optimizer.zero_grad(set_to_none=True)
        with self.precision.autocast():
            loss = local_loss(self.model, images, labels) / len(labels)
        forwarded = self.timer.mark()
        self.precision.scaled(loss).backward()
        self.precision.unscale(self.optimizer)
        computed = self.timer.mark()
        self.precision.step(self.optimizer)
        end = self.timer.mark()
        self.timer.wait()
        lateness = self.model.stopwatch.lateness[-1] if isinstance(self.model, StandIn) else None
        step_ms, forward_ms = self.timer.ms(begin, end), self.timer.ms(begin, forwarded)
        return Times(step_ms, forward_ms, self.timer.ms(computed, end), lateness)


def out_of_memory(error: RuntimeError) -> str:
    """The line that says so, empty for another error. torch's allocator, cuBLAS and cuDNN each have words of their own;
    cuDNN, whose engines all lack memory for their workspace, says that there is none (pytorch/pytorch#108645).
    """
    return next((line[:200] for line in str(error).splitlines() if _NO_MEMORY.search(line)), "")


_NO_MEMORY = re.compile(
    r"out of memory|ALLOC_FAILED|unable to find an engine|unable to find a valid cudnn algorithm", re.IGNORECASE
)


# ---------------------------------------------------------------------------------------------------------------------
# Which sizes to measure


@dataclass(frozen=True)
class Ladder:
    """The times of growing batch sizes."""

    times: dict[int, Times]
    """By size, of all sizes that were measured, ascending."""
    cap: int | None
    """The most samples that fit; None where memory was no limit."""

    @property
    def in_time(self) -> dict[int, Times]:
        """The sizes at which the rank was not late."""
        return {samples: times for samples, times in self.times.items() if times.kept_pace}

    @property
    def kept_pace(self) -> bool:
        """Whether the sizes that were not late are enough for a line."""
        return len(self.in_time) >= min(ENOUGH, len(self.times))

    @property
    def counted(self) -> dict[int, Times]:
        """The sizes that the line goes through: all, where those in time are too few."""
        return self.in_time if self.kept_pace else self.times

    def lateness(self) -> float | None:
        """The lateness of the latest size that counts; None for a rank that computes."""
        return max((times.lateness for times in self.counted.values() if times.lateness is not None), default=None)


def climb(
    update: Callable[[int], Times],
    limit: int,
    budget_s: float,
    now: Callable[[], float] = time.monotonic,
    untimed: int = 1,
) -> Ladder:
    """untimed: updates of each size before those that count.

    Doubles the batch until memory, the limit or the time ends it; two sizes at least. Where a paced rank was late at
    nearly all of them, what is left of the time goes to measuring them again. Raises TrainError where not even the
    first fits.
    """
    deadline_s = now() + budget_s
    ladder = _double(update, limit, budget_s, deadline_s, now, untimed)
    for samples in sorted(ladder.times, reverse=True):
        needed_s = FEWEST * ladder.times[samples].step_ms / 1000
        if not ladder.kept_pace and not ladder.times[samples].kept_pace and now() + needed_s <= deadline_s:
            ladder.times[samples] = _median(update, samples, budget_s / 20, now)
    return ladder


def again(
    update: Callable[[int], Times], ladder: Ladder, budget_s: float, now: Callable[[], float] = time.monotonic
) -> dict[str, object]:
    """Measures the middle size once more: a card at its power cap, or one that gets hot, ends slower than it began."""
    samples = sorted(ladder.counted)[len(ladder.counted) // 2]
    return {"again_samples": samples, "again_ms": round(_median(update, samples, budget_s / 20, now).step_ms, 4)}


def _double(
    update: Callable[[int], Times],
    limit: int,
    budget_s: float,
    deadline_s: float,
    now: Callable[[], float],
    untimed: int,
) -> Ladder:
    times: dict[int, Times] = {}
    samples = min(FIRST, limit)
    while True:
        try:
            for _ in range(untimed if times else untimed + FEWEST):
                update(samples)
            times[samples] = _median(update, samples, budget_s / 20, now)
        except NoMemory as error:
            if not times:
                why = f" ({error})" if str(error) else ""
                raise TrainError(f"out of memory: not even {samples} samples fit{why}; use a smaller model") from None
            break
        following = min(2 * samples, limit)
        needed_s = (untimed + FEWEST) * times[samples].step_ms * following / samples / 1000
        if following == samples or (len(times) > 1 and now() + needed_s > deadline_s):
            return Ladder(times, None)
        samples = following
    return Ladder(times, _squeeze(update, max(times), samples))


def _median(update: Callable[[int], Times], samples: int, budget_s: float, now: Callable[[], float]) -> Times:
    began_s, found = now(), list[Times]()
    while len(found) < FEWEST or (len(found) < MOST and now() - began_s < budget_s):
        found.append(update(samples))
    late = [one.lateness for one in found if one.lateness is not None]
    return Times(
        statistics.median(one.step_ms for one in found),
        statistics.median(one.forward_ms for one in found),
        statistics.median(one.optim_ms for one in found),
        statistics.median(late) if late else None,
    )


def _squeeze(update: Callable[[int], Times], fits: int, too_large: int) -> int:
    """Between a size that fits and one that does not, to a sixteenth."""
    while too_large - fits > max(1, fits // 16):
        middle = (fits + too_large) // 2
        try:
            update(middle)
            fits = middle
        except NoMemory:
            too_large = middle
    return fits


def line_of(points: Sequence[tuple[float, float]]) -> Line | None:
    """Through the largest sizes, as many as lie on a line, three at least. points: (samples, seconds), ascending."""
    line = fit(points)
    while line and line.worst_error > STRAIGHT and len(points) > 3:
        points = points[1:]
        line = fit(points)
    return line


def record_of(ladder: Ladder) -> dict[str, object]:
    """The fields of the `profile` record."""
    counted, largest = ladder.counted, max(ladder.counted)
    last = counted[largest]
    line = line_of([(samples, times.step_ms / 1000) for samples, times in counted.items()])
    slope_ms = 1000 * line.slope_s if line else last.step_ms / largest
    return {
        "samples": list(ladder.times),
        "step_ms": [round(times.step_ms, 4) for times in ladder.times.values()],
        "lateness": [times.lateness and round(times.lateness, 6) for times in ladder.times.values()],
        "fixed_ms": round(1000 * line.alpha_s, 6) if line else 0.0,
        # A GPU that was flat over all sizes still gets slower at some: no share is ever free.
        "sample_ms": max(slope_ms, 1e-3 * last.step_ms / largest),
        "worst_error": round(line.worst_error, 6) if line else None,
        "largest": max(largest, ladder.cap or 0),
        "cap": ladder.cap,
        "forward_ms": round(last.forward_ms, 4),
        "optim_ms": round(last.optim_ms, 4),
    }
