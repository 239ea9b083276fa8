"""Times every collective and link between the ranks (`--exp collectives`).

    all_reduce       67108864 bytes    240.1 ms   2.24 Gbps   bus 2.24 Gbps

Each operation and size, ascending, is checked once and then timed. All ranks begin each call together; the median of
the slowest rank's times counts. (A broadcast's root is done when its bytes are in a buffer.) Operations that the back
end lacks are recorded as such.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import permutations

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.compute.timer import Timer, timer_for
from trainer.ranks.agreement import agreed, gather_lines, together
from trainer.ranks.process_group import choose_device, join, leave, use_threads
from trainer.ranks.rank_info import RankInfo
from trainer.setup.assemble import start_fields
from trainer.shared.alpha_beta import algorithm_gbps, bus_factor, fit
from trainer.shared.errors import TrainError
from trainer.shared.metrics import MetricsWriter
from trainer.shared.settings import CollectiveSettings

LEAST_ITERATIONS = 3
PATTERN = 4099
"""Period of a buffer's elements; prime, so that its parts differ."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Bench:
    settings: CollectiveSettings
    info: RankInfo
    group: dist.ProcessGroup
    device: torch.device
    timer: Timer
    patterns: tuple[Tensor, ...]
    """By rank."""
    deadline_s: float

    @property
    def sum_of_patterns(self) -> Tensor:
        return torch.stack(self.patterns).sum(0, dtype=torch.float32).to(self.patterns[0].dtype)


@dataclass(frozen=True)
class Result:
    size_bytes: int
    iterations: int = 0
    time_s: float | None = None
    """None if not measured, because of `error`."""
    error: str | None = None


def measure(settings: CollectiveSettings, info: RankInfo, metrics: MetricsWriter) -> None:
    """Raises TrainError for failures that a user can fix, and wrong results."""
    if info.world_size < 2:
        raise TrainError("collectives: a single rank has no other rank to exchange bytes with; start two or more")
    use_threads(info)
    # A paced host has no GPU, but its network is real.
    device = torch.device("cpu") if info.pace else choose_device(settings.device, settings.backend, info)
    group = join(info, settings.backend, device)
    device = where_elements_lie(group, device, info)
    cells = [(size, operation) for size in settings.sizes for operation in settings.chosen_operations]
    start = start_fields(settings, info, device, group, None)
    metrics.write("start", **start, batch_per_rank=None, batch_norm_groups=None, work=None, steps=len(cells))
    deadline_s = time.monotonic() + settings.budget_s
    bench = Bench(settings, info, group, device, timer_for(device), patterns_of(settings, info, device), deadline_s)
    found: dict[str, list[Result]] = {operation: [] for operation in settings.chosen_operations}
    for step, (size, operation) in enumerate(cells):
        result = measure_one(bench, operation, size, found[operation][-1:], len(cells))
        found[operation].append(result)
        report(info, metrics, f"{step + 1}/{len(cells)}", step, operation, result)
    for operation, results in found.items():
        report_line(info, operation, results)
    if settings.links:
        measure_links(gather_lines(info.node), group, device, bench.timer, deadline_s, metrics)
    leave()
    metrics.end("succeeded")


def where_elements_lie(group: dist.ProcessGroup, device: torch.device, info: RankInfo) -> torch.device:
    """Gloo needs host memory."""
    # With GPU memory it would read the same address there (send, recv: pytorch#152645), or measure copies too.
    if dist.get_backend(group) != "gloo":
        return device
    if info.rank == 0 and device.type == "cuda":
        print("gloo is the back end, so the elements are in the hosts' memory, not on GPUs", flush=True)
    return torch.device("cpu")


def patterns_of(settings: CollectiveSettings, info: RankInfo, device: torch.device) -> tuple[Tensor, ...]:
    """Whole numbers of 0 to 3: their sum over some 80 ranks is exact even in bfloat16."""
    generator = torch.Generator().manual_seed(settings.seed)
    drawn = torch.randint(0, 4, (info.world_size, PATTERN), generator=generator)
    return tuple(drawn.to(device, DTYPES[settings.dtype]))


def measure_one(bench: Bench, operation: str, size: int, before: list[Result], cells: int) -> Result:
    """before: the result at the next smaller size, if any."""
    element_bytes = bench.patterns[0].element_size()
    part = max(1, size // element_bytes // bench.info.world_size)
    size_bytes = part * bench.info.world_size * element_bytes
    if before and before[0].time_s is None:
        return Result(size_bytes, error=before[0].error)
    if before and before[0].time_s is not None:
        expected_s = (1 + LEAST_ITERATIONS) * before[0].time_s * size_bytes / before[0].size_bytes
        left_s = agreed([bench.deadline_s - time.monotonic()], dist.ReduceOp.MIN)[0]
        if expected_s > left_s:
            why = f"left out: it would take some {expected_s:.1f} s, and {max(0.0, left_s):.1f} s of budget_s are left"
            return Result(size_bytes, error=why)
    exchange = MeasuredExchange(bench, operation, part)
    first_s = try_first(bench, exchange)
    if isinstance(first_s, str):
        return Result(size_bytes, error=first_s)
    if not before:  # the first call connects
        first_s = max(timed(bench, exchange, 1))
    slot_s = bench.settings.budget_s / cells / 2
    times = timed(bench, exchange, iterations_for(first_s, slot_s, bench.settings.iterations))
    return Result(size_bytes, len(times), statistics.median(times))


def iterations_for(first_s: float, slot_s: float, most: int) -> int:
    """As many as fit into the slot, but some in any case."""
    return min(most, max(LEAST_ITERATIONS, int(slot_s / max(first_s, 1e-6))))


def try_first(bench: Bench, exchange: MeasuredExchange) -> float | str:
    """Seconds of a call with a correct result, or why the operation is impossible here."""
    refusal, seconds = "", 0.0
    try:
        seconds = timed_together(bench.timer, exchange.run)
    except (RuntimeError, NotImplementedError, ValueError) as error:
        refusal = f"torch {torch.__version__}, {dist.get_backend(bench.group)}: {first_line(error)}"
    refused = next((line for line in gather_lines(refusal) if line), "")
    if refused:
        return refused
    with together(bench.info.node):
        if not exchange.is_right():
            raise TrainError(f"{exchange.operation}: rank {bench.info.rank} received wrong values")
    return agreed([seconds], dist.ReduceOp.MAX)[0]


def timed(bench: Bench, exchange: MeasuredExchange, iterations: int) -> list[float]:
    """Seconds of each call on its slowest rank."""
    return agreed([timed_together(bench.timer, exchange.run) for _ in range(iterations)], dist.ReduceOp.MAX)


class MeasuredExchange:
    """One operation on buffers of `part` elements per rank. The root is rank 0. send_recv is a ring."""

    def __init__(self, bench: Bench, operation: str, part: int) -> None:
        self.bench, self.operation, self.part = bench, operation, part
        self.rank, self.world_size = bench.info.rank, bench.info.world_size
        self.root = self.rank == 0
        whole = part * self.world_size
        gives_part = operation in ("gather", "all_gather")
        takes_part = operation in ("scatter", "reduce_scatter")
        self.given = self._filled(part if gives_part else whole)
        in_place = operation in ("broadcast", "reduce", "all_reduce")
        self.taken = self.given if in_place else self.given.new_zeros(part if takes_part else whole)
        self.run: Callable[[], None] = getattr(self, f"_{operation}")

    def _filled(self, count: int) -> Tensor:
        pattern = self.bench.patterns[self.rank]
        return pattern.repeat(-(-count // PATTERN))[:count].clone()

    def _send_recv(self) -> None:
        following, before = (self.rank + 1) % self.world_size, (self.rank - 1) % self.world_size
        sending = dist.P2POp(dist.isend, self.given, following, self.bench.group)
        receiving = dist.P2POp(dist.irecv, self.taken, before, self.bench.group)
        for request in dist.batch_isend_irecv([sending, receiving]):
            request.wait()

    def _broadcast(self) -> None:
        dist.broadcast(self.taken, 0, group=self.bench.group)

    def _reduce(self) -> None:
        dist.reduce(self.taken, 0, group=self.bench.group)

    def _all_reduce(self) -> None:
        dist.all_reduce(self.taken, group=self.bench.group)

    def _gather(self) -> None:
        dist.gather(self.given, self._parts(self.taken) if self.root else None, 0, group=self.bench.group)

    def _all_gather(self) -> None:
        if dist.get_backend(self.bench.group) == "nccl":  # avoids another copy of every part
            dist.all_gather_into_tensor(self.taken, self.given, group=self.bench.group)
        else:
            dist.all_gather(self._parts(self.taken), self.given, group=self.bench.group)

    def _scatter(self) -> None:
        dist.scatter(self.taken, self._parts(self.given) if self.root else None, 0, group=self.bench.group)

    def _reduce_scatter(self) -> None:
        dist.reduce_scatter_tensor(self.taken, self.given, group=self.bench.group)

    def _all_to_all(self) -> None:
        dist.all_to_all_single(self.taken, self.given, group=self.bench.group)

    def _parts(self, whole: Tensor) -> list[Tensor]:
        return list(whole.split(self.part))

    def is_right(self) -> bool:
        """True for a rank that receives nothing."""
        patterns, rank, part = self.bench.patterns, self.rank, self.part
        if self.operation in ("reduce", "gather") and not self.root:
            return True
        if self.operation in ("reduce", "all_reduce"):
            return repeats(self.taken, self.bench.sum_of_patterns)
        if self.operation == "reduce_scatter":
            return repeats(self.taken, self.bench.sum_of_patterns, rank * part)
        if self.operation in ("broadcast", "send_recv"):
            return repeats(self.taken, patterns[0 if self.operation == "broadcast" else rank - 1])
        if self.operation == "scatter":
            return repeats(self.taken, patterns[0], rank * part)
        offset = rank * part if self.operation == "all_to_all" else 0
        return all(repeats(*pair, offset) for pair in zip(self._parts(self.taken), patterns, strict=True))


def repeats(values: Tensor, pattern: Tensor, offset: int = 0) -> bool:
    """Whether these are elements from `offset` of the repeated pattern."""
    pattern = pattern.roll(-(offset % PATTERN))
    whole = len(values) // PATTERN * PATTERN
    rows, rest = values[:whole].view(-1, PATTERN), values[whole:]
    return bool((rows == pattern).all()) and bool((rest == pattern[: len(rest)]).all())


def report(info: RankInfo, metrics: MetricsWriter, done: str, step: int, operation: str, result: Result) -> None:
    if info.rank != 0:
        return
    seconds = result.time_s
    gbps = None if seconds is None else algorithm_gbps(result.size_bytes, seconds)
    bus_gbps = None if gbps is None else gbps * bus_factor(operation, info.world_size)
    metrics.write(
        "collective",
        step=step,
        operation=operation,
        bytes=result.size_bytes,
        iterations=result.iterations,
        time_ms=None if seconds is None else round(1000 * seconds, 6),
        algbw_gbps=gbps,
        busbw_gbps=bus_gbps,
        error=result.error,
    )
    head = f"{done:>7}  {operation:14} {result.size_bytes:>10} bytes"
    if seconds is None:
        print(f"{head}  {result.error}", flush=True)
    else:
        print(f"{head}  {1000 * seconds:10.3f} ms  {gbps:7.3f} Gbps  bus {bus_gbps:7.3f} Gbps", flush=True)


def report_line(info: RankInfo, operation: str, results: list[Result]) -> None:
    line = fit([(result.size_bytes, result.time_s) for result in results if result.time_s])
    if info.rank != 0 or line is None:
        return
    bus = f", bus {line.gbps * bus_factor(operation, info.world_size):.3f} Gbps" if line.gbps else ""
    print(f"{operation:14} {1e6 * line.alpha_s:.0f} us + bytes at {line.gbps or 0:.3f} Gbps{bus}, "
          f"within {100 * line.worst_error:.0f} %", flush=True)  # fmt: skip


def first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


LINK_BYTES = 8 << 20
"""27 ms at 2.5 Gbps: many times a message's cost."""
TIMES = 3


def measure_links(
    nodes: Sequence[str], group: dist.ProcessGroup, device: torch.device, timer: Timer, deadline_s: float,
    metrics: MetricsWriter,
) -> None:  # fmt: skip
    """Times paths between hosts one by one, while other ranks wait. Stops after `deadline_s` on any rank.

    nodes: of each rank. A host's first rank represents it; rank 0 records.
    """
    first_ranks = [nodes.index(node) for node in dict.fromkeys(nodes)]
    paths = list(permutations(first_ranks, 2))
    buffer = torch.ones(LINK_BYTES // 4, device=device)
    reports = dist.get_rank() == 0
    for done, (source, target) in enumerate(paths):
        if agreed([deadline_s - time.monotonic()], dist.ReduceOp.MIN)[0] < 0:
            if reports:
                print(f"{len(paths) - done} of {len(paths)} paths between hosts left out: budget_s is over", flush=True)
            return
        timed_together(timer, partial(pass_on, buffer[:256], source, target, group))  # connects
        taken_s = [timed_together(timer, partial(pass_on, buffer, source, target, group)) for _ in range(TIMES)]
        time_s = statistics.median(agreed(taken_s, dist.ReduceOp.MAX))
        gbps = algorithm_gbps(LINK_BYTES, time_s)
        if reports:
            figures = {"bytes": LINK_BYTES, "time_ms": round(1000 * time_s, 6), "gbps": gbps}
            metrics.write("link", source=source, target=target, **figures)
            print(f"{nodes[source]} -> {nodes[target]}  {1000 * time_s:10.3f} ms  {gbps:7.3f} Gbps", flush=True)


def pass_on(buffer: torch.Tensor, source: int, target: int, group: dist.ProcessGroup) -> None:
    """Does nothing on other ranks."""
    if dist.get_rank() == source:
        dist.send(buffer, target, group=group)
    elif dist.get_rank() == target:
        dist.recv(buffer, source, group=group)


def timed_together(timer: Timer, work: Callable[[], object]) -> float:
    """Seconds of this rank's work, which all ranks begin together."""
    timer.wait()
    dist.barrier()  # over Gloo, between the hosts' programs
    begin = timer.mark()
    work()
    end = timer.mark()
    timer.wait()
    return timer.ms(begin, end) / 1000
