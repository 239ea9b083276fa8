"""What a run of collectives measured: a table of its operations, and one of its links."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from orchestrator.results.collectives import Collectives, link_matrix
from orchestrator.units import format_bytes
from orchestrator.views import console
from orchestrator.views.figures import figure, percent
from orchestrator.views.tables import LEAST_NAME, table


def print_network(found: Collectives) -> None:
    """A line an operation: what a small call costs, how fast a large one is, and the line between."""
    columns = ["operation", "size", "µs", "size", "bus Gbps", "of declared", "alpha µs", "beta Gbps", "off by at most"]
    rows = []
    for each in found.operations:
        ends = format_bytes(each.smallest_bytes), figure(each.latency_us), format_bytes(each.largest_bytes)
        line = percent(each.of_declared), figure(each.alpha_us), figure(each.beta_gbps), percent(each.worst_error)
        rows.append((each.operation, *ends, figure(each.busbw_gbps), *line))
    declared = f", declared {figure(found.declared_gbps)} Gbps" if found.declared_gbps else ""
    drop = ("off by at most", "of declared")
    console.out.print(table(f"collectives{declared}", columns, rows, right_from=1, drop=drop))
    if found.links:
        print_links(*link_matrix(found))


def print_links(names: Sequence[str], gbps: Mapping[tuple[str, str], float]) -> None:
    """From each host (a line) to each (a column), in as many tables as the screen's width asks for."""
    title: str | None = "Gbps from one host to another, by itself"
    first = max(len("from / to"), *map(len, names))
    for part in _parts(names, max(LEAST_NAME, console.out.width - first)):
        rows = [(a, *(figure(gbps.get((a, b))) for b in part)) for a in names]
        console.out.print(table(title, ["from / to", *part], rows, right_from=1))
        title = None


def _parts(names: Sequence[str], width: int) -> Iterator[list[str]]:
    """The names cut into runs that stand beside each other on so many columns, two before each; at least one a run."""
    part: list[str] = []
    for name in names:
        if part and sum(len(each) + 2 for each in (*part, name)) > width:
            yield part
            part = []
        part.append(name)
    yield part
