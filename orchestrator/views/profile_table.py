"""The table of `orch profile`: how fast each rank is alone, and its part of a batch."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.planning.profiles import RankProfile, measured_shares
from orchestrator.views import tables
from orchestrator.views.numbers import UNKNOWN, figure


def print_profiles(batch: int, known: Sequence[RankProfile]) -> None:
    shares = measured_shares(batch, known)
    tables.print_table(titles(batch), [cells(batch, each, shares.get(each.rank)) for each in known], right_from=2)


def titles(batch: int) -> tuple[str, ...]:
    return ("host", "GPU", "fixed ms", "ms/sample", "samples/s", "most at once", f"share of {batch}", "measured")


def cells(batch: int, each: RankProfile, share: int | None) -> tuple[str, ...]:
    """A line of the table. share: the rank's part of the batch, if it is known."""
    (node, local_rank), known = each.rank, each.profile
    return (
        node if known.ranks == 1 else f"{node}:{local_rank}",
        known.gpu or known.device_name,
        figure(known.fixed_ms),
        figure(known.sample_ms),
        figure(known.samples_per_s(batch)),
        str(known.cap) if known.cap else f"> {known.largest}",
        UNKNOWN if share is None else str(share),
        ("now" if each.fresh else known.created[:16].replace("T", " ")) + f" on {known.node}",
    )
