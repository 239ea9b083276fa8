"""What `orch doctor` found: each finding with its remedy, a matrix of the hosts' connections, and a summary."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from orchestrator.doctor.seen import Mesh, Pair
from orchestrator.doctor.table import Diagnosis, Finding
from orchestrator.hosts.exec import host_set
from orchestrator.units import counted, format_bandwidth
from orchestrator.views import console
from orchestrator.views.console import table

MOST_IN_MATRIX = 12
_STYLES = {"block": "red", "warn": "yellow"}
_WAYS = {"small only": "no large packets", "silent": "no answer"}


def print_diagnosis(found: Diagnosis) -> None:
    mesh = found.seen.mesh
    if mesh and mesh.pairs:
        _print_ways(mesh)
    for same in _together(found.findings):
        _print_finding(same)
    console.put(found.summary)


def _print_finding(same: Sequence[Finding]) -> None:
    """same: findings that differ in their hosts alone."""
    first = same[0]
    console.out.print(
        Text.assemble(
            (f"{first.level}:", _STYLES[first.level]),
            " ",
            (f"{first.id} {first.name}", "bold"),
            ", ",
            console.plain(_where(same)),
            ": ",
            console.plain(first.seen),
        )
    )
    console.out.print(Text.assemble("  ", ("if ignored:", "bold"), " ", console.plain(first.causes)))
    if first.remedy:
        console.out.print(Text.assemble("  ", ("try:", "bold"), " ", console.plain(first.remedy)))


def _where(same: Sequence[Finding]) -> str:
    if same[0].is_way:
        return ", ".join(f"{one.where[0]} -> {one.where[1]}" for one in same)
    return host_set(list(dict.fromkeys(name for one in same for name in one.where)))


def _together(findings: Sequence[Finding]) -> list[list[Finding]]:
    """Each sentence once, in the order in which it first came."""
    found = dict[tuple[str, ...], list[Finding]]()
    for finding in findings:
        key = (finding.id, finding.level, finding.seen, finding.remedy)
        found.setdefault(key, []).append(finding)
    return list(found.values())


def _print_ways(mesh: Mesh) -> None:
    """A row for each start, a column for each end, with as much in each as the screen has room for; where it has none,
    the count alone: findings name those that fail.
    """
    names = list(dict.fromkeys(pair.start for pair in mesh.pairs))
    ways = {(pair.start, pair.end): pair for pair in mesh.pairs}
    for cell in (_trip_and_speed, _speed):
        rows = [[Text(start), *(cell(ways.get((start, end))) for end in names)] for start in names]
        widths = [max(len(name), *(row[at].cell_len for row in rows)) for at, name in enumerate(["", *names])]
        if len(names) <= MOST_IN_MATRIX and sum(widths) + 2 * len(names) <= console.out.width:
            title = "connections between hosts (from the row's to the column's)"
            return console.out.print(table(title, ["", *names], rows))
    is_open = sum(pair.kind == "open" for pair in mesh.pairs)
    return console.put(f"{counted(len(mesh.pairs), 'connection')} between hosts, {is_open} open")


def _trip_and_speed(pair: Pair | None) -> Text:
    if pair is None or pair.kind != "open" or not pair.round_trip_s or not pair.bits_per_s:
        return _speed(pair)
    return Text(f"{1000 * pair.round_trip_s:.2g} ms, {format_bandwidth(pair.bits_per_s)}")


def _speed(pair: Pair | None) -> Text:
    if pair is None:
        return Text("-")
    if pair.kind != "open":
        return Text(_WAYS.get(pair.kind, pair.kind), "yellow" if pair.kind == "not tried" else "red")
    return Text(format_bandwidth(pair.bits_per_s) if pair.bits_per_s else "open")
