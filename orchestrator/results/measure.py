"""Sums over the ranks' steps, in SQL over the tables of `read_events`. Wait and network time are defined in
`jobs/metric_lines`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

from duckdb import ColumnExpression, Expression, FunctionExpression

from orchestrator.jobs.live import WINDOW_STEPS
from orchestrator.jobs.metric_lines import bubble_and_sync, count, number, wait_and_sync
from orchestrator.planning.launch_plan import LaunchPlan, NodePlan, read_settings
from orchestrator.results.events import Events
from orchestrator.results.summary import StepTime
from orchestrator.results.tables import copy_whole
from orchestrator.units import one_line
from trainer.shared.metrics import STAGE_TIMES

DEFAULT_WARMUP_STEPS = 3
STRETCHES = 10
OF_RUN = ("steps", "warmup_steps_left_out", "samples_total")
"""Figures that go to the `Summary` under the same name."""


@dataclass(frozen=True)
class RankFigures:
    """Over the measured steps; a mean is None if some of them lack the value."""

    rank: int
    samples: int
    total_ms: float
    compute_total_ms: float | None
    load_ms: float | None
    compute_ms: float | None
    sync_ms: float | None
    wait_ms: float | None
    optim_ms: float | None
    bubble_before_ms: float | None
    bubble_behind_ms: float | None
    wire_ms: float | None
    """Only in a pipeline: these three."""
    compute_spread_ms: float | None
    """Half the distance between the quartiles of its compute times."""


@dataclass(frozen=True)
class Figures:
    reported: frozenset[int]
    """Ranks with a usable step line."""
    ranks: dict[int, RankFigures]
    """Empty without measured steps."""
    stretch_wait_ms: dict[int, tuple[float, ...]]
    """By rank, the mean wait in each of up to STRETCHES consecutive stretches."""
    steps: int
    warmup_steps_left_out: int
    samples_total: int
    step_ms: dict[str, StepTime]
    loss: float | None
    observed: bool = False
    """Whether a script without `import trainer` took the steps."""
    apart: bool = False
    """Whether the ranks of such a script never met."""

    def speed(self, ranks: Iterable[RankFigures]) -> float | None:
        """Samples/s of these ranks."""
        if self.apart:
            return sum(over(rank.samples, rank.total_ms / 1000) or 0.0 for rank in ranks) or None
        # Ranks that meet in every step take equally long over many; the sum of each step's slowest rank would count
        # twice a delay of one host after a step for which the others wait in the next.
        wall_s = max((rank.total_ms for rank in self.ranks.values()), default=0.0) / 1000
        return over(sum(rank.samples for rank in ranks), wall_s)

    def of(self, node: NodePlan) -> list[RankFigures]:
        return [self.ranks[rank] for rank in node.rank_numbers if rank in self.ranks]


def over(count: float, amount: float) -> float | None:
    return count / amount if amount > 0 else None


def measure(events: Events, plan: LaunchPlan) -> Figures:
    """Adds the table `timed` (wait, sync, measured). A step is measured if every reporting rank reported it with its
    time, after the warm-up and the last start (with fewer hosts, steps differ).
    """
    query = events.connection.execute
    warmup = _warmup_steps(plan, events)
    query(_TIMED.format(world_size=plan.world_size, warmup=warmup))
    steps, left_out = query(_COUNTS).fetchone()
    samples_total, reported = query("SELECT coalesce(sum(samples), 0), list(DISTINCT rank) FROM steps").fetchone()
    (loss,) = query(_LAST_LOSS).fetchone()
    epoch_loss = _last_epoch_loss(events)
    starts = events.latest("start").values()
    observed = bool(starts) and all(start.get("samples_from") for start in starts)
    return Figures(
        reported=frozenset(reported or ()),
        ranks=_by_work(events, [RankFigures(*row) for row in query(_BY_RANK).fetchall()]),
        stretch_wait_ms={rank: tuple(waits) for rank, waits in query(_STRETCHES).fetchall()},
        steps=steps,
        warmup_steps_left_out=left_out,
        samples_total=int(samples_total),
        step_ms={node: StepTime(p50=p50, p95=p95, mean=mean) for node, p50, p95, mean in query(_STEP_TIMES).fetchall()},
        loss=loss if epoch_loss is None else epoch_loss,
        observed=observed,
        apart=observed and len(starts) > 1 and all(start.get("backend") is None for start in starts),
    )


def _by_work(events: Events, ranks: Sequence[RankFigures]) -> dict[int, RankFigures]:
    """A pipeline's or tensor group's samples pass every rank, and only some ranks count them: here each rank
    contributes samples in proportion to its part of the network's work.
    """
    work = {rank: number(start, "work") for rank, start in events.latest("start").items()}
    parts = [work.get(rank.rank) for rank in ranks]
    total = sum(rank.samples for rank in ranks)
    shares = [part for part in parts if part is not None and 0 <= part <= 1]
    if len(shares) < len(ranks) or not ranks or not math.isclose(sum(shares), 1, abs_tol=1e-3):
        return {rank.rank: rank for rank in ranks}
    ends = [round(total * part) for part in accumulate(shares)]
    own = [end - begin for begin, end in zip([0, *ends], [*ends[:-1], total], strict=False)]
    return {rank.rank: replace(rank, samples=samples) for rank, samples in zip(ranks, own, strict=True)}


def _warmup_steps(plan: LaunchPlan, events: Events) -> int:
    reported = (read_settings(start.get("settings")) for start in events.latest("start").values())
    known = (settings.warmup_steps for settings in (plan.recorded, *reported))
    steps = next((steps for steps in known if steps is not None), DEFAULT_WARMUP_STEPS)
    return steps if 0 <= steps <= 10**9 else DEFAULT_WARMUP_STEPS


def _last_epoch_loss(events: Events) -> float | None:
    """As reported (a rank includes the others' steps), else the mean over that epoch's steps."""
    epochs = events.latest("epoch").values()
    if any("loss" in epoch for epoch in epochs):
        return next((loss for epoch in epochs if (loss := number(epoch, "loss")) is not None), None)
    last = max((found for epoch in epochs if (found := count(epoch, "epoch")) is not None), default=None)
    (loss,) = events.connection.execute(_EPOCHS_LOSS, [last]).fetchone()
    return None if loss is None else float(loss)


def _wait_and_sync() -> tuple[str, str]:
    exposed, comm, least_comm = (ColumnExpression(name) for name in ("exposed_ms", "comm_ms", "least_comm_ms"))
    bubble = ColumnExpression("bubble_before_ms") + ColumnExpression("bubble_behind_ms")
    among_ranks = wait_and_sync(exposed, comm, least_comm, least=_least)
    among_stages = bubble_and_sync(exposed, bubble, least=_least)
    # The bubble is NULL outside a pipeline, and least() skips NULL.
    wait, sync = (
        f"CASE WHEN {bubble} IS NULL THEN {a} ELSE {b} END" for a, b in zip(among_ranks, among_stages, strict=True)
    )
    return wait, sync


def _least(one: Expression, other: Expression) -> Expression:
    return FunctionExpression("least", one, other)


_WAIT, _SYNC = _wait_and_sync()

_TIMED = f"""
CREATE TABLE timed AS
WITH together AS (
    SELECT *, count(*) OVER step_ AS present, count(t_ms) OVER step_ AS with_time,
           count(exposed_ms) OVER step_ AS with_exposed, min(comm_ms) OVER step_ AS least_comm_ms
    FROM steps WINDOW step_ AS (PARTITION BY step)),
ranks AS (SELECT count(DISTINCT rank) AS reporting, min(step) FILTER (last_start) AS first_step FROM steps)
SELECT together.* EXCLUDE (last_start, present, with_time, with_exposed, least_comm_ms),
       CASE WHEN with_exposed = {{world_size}} THEN {_WAIT} END AS wait_ms,
       CASE WHEN with_exposed = {{world_size}} THEN {_SYNC} END AS sync_ms,
       present = reporting AS complete,
       last_start AND step - first_step < {{warmup}} AS warmup,
       last_start AND present = reporting AND with_time = reporting AND step - first_step >= {{warmup}} AS measured
FROM together, ranks
"""  # noqa: S608 - names of our own

_COUNTS = """
SELECT count(DISTINCT step) FILTER (measured), count(DISTINCT step) FILTER (warmup) FROM timed
"""


def _mean_if_whole(column: str) -> str:
    return f"CASE WHEN count({column}) = count(*) THEN avg({column}) END"


_BY_RANK = f"""
SELECT rank, sum(samples)::BIGINT, sum(t_ms), CASE WHEN count(compute_ms) = count(*) THEN sum(compute_ms) END,
       {_mean_if_whole("load_ms")}, {_mean_if_whole("compute_ms")}, {_mean_if_whole("sync_ms")},
       {_mean_if_whole("wait_ms")}, {_mean_if_whole("optim_ms")},
       {_mean_if_whole("bubble_before_ms")}, {_mean_if_whole("bubble_behind_ms")}, {_mean_if_whole("wire_ms")},
       CASE WHEN count(compute_ms) = count(*)
            THEN (quantile_cont(compute_ms, 0.75) - quantile_cont(compute_ms, 0.25)) / 2 END
FROM timed WHERE measured GROUP BY rank ORDER BY rank
"""  # noqa: S608 - names of our own

_STRETCHES = f"""
WITH steps AS (
    SELECT rank, wait_ms, ntile({STRETCHES}) OVER (PARTITION BY rank ORDER BY step) AS stretch
    FROM timed WHERE measured AND wait_ms IS NOT NULL),
means AS (SELECT rank, stretch, avg(wait_ms) AS wait_ms FROM steps GROUP BY rank, stretch)
SELECT rank, list(wait_ms ORDER BY stretch) FROM means GROUP BY rank
"""  # noqa: S608 - names of our own

_STEP_TIMES = """
WITH slowest AS (SELECT node, step, max(t_ms) AS t_ms FROM timed WHERE measured GROUP BY node, step)
SELECT node, quantile_cont(t_ms, 0.5), quantile_cont(t_ms, 0.95), avg(t_ms) FROM slowest GROUP BY node
"""

_EPOCHS_LOSS = """
SELECT CASE WHEN count(loss) < count(*) THEN NULL WHEN sum(samples) > 0 THEN sum(loss) / sum(samples) ELSE avg(loss) END
FROM timed WHERE complete AND has_loss AND epoch = ?
"""

_LAST_LOSS = f"""
WITH last AS (
    SELECT DISTINCT step FROM timed WHERE complete AND has_loss ORDER BY step DESC LIMIT {WINDOW_STEPS})
SELECT CASE WHEN count(loss) < count(*) THEN NULL WHEN sum(samples) > 0 THEN sum(loss) / sum(samples) ELSE avg(loss) END
FROM timed JOIN last ON timed.step = last.step WHERE has_loss
"""  # noqa: S608 - a number of our own


def write_steps(events: Events, plan: LaunchPlan, path: Path) -> None:
    """One row per rank and step, whole or not at all."""
    connection = events.connection
    connection.execute("CREATE TABLE places (rank INTEGER, gpu VARCHAR, local_rank INTEGER)")
    places = [[rank, gpu_label(node), i] for node in plan.nodes for i, rank in enumerate(node.rank_numbers)]
    connection.executemany("INSERT INTO places VALUES (?, ?, ?)", places)
    copy_whole(
        connection,
        f"""SELECT node, gpu, rank, local_rank, step, epoch, samples, t_ms, load_ms, compute_ms, exposed_ms,
        comm_ms, wait_ms, sync_ms, optim_ms, {", ".join(STAGE_TIMES)}, loss, wall, measured
        FROM timed JOIN places USING (rank) ORDER BY step, rank""",  # noqa: S608 - names of our own
        path,
    )


def gpu_label(node: NodePlan) -> str:
    """Groups hosts by type."""
    return one_line(node.gpu) if node.gpu else ("CPU" if node.device == "cpu" else "GPU of unknown type")
