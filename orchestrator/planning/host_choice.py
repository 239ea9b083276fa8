"""Chooses a job's hosts by `--hosts MIN:MAX`: how many, and which of the available hosts. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from orchestrator.errors import HostError, TooFewError, UsageError
from orchestrator.hosts.exec import together
from orchestrator.planning.job_spec import HostRange
from orchestrator.planning.launch_plan import HostChoice, LeftOut
from orchestrator.text import one_line, some
from orchestrator.units import counted


@dataclass(frozen=True)
class Worth:
    """Criterion for the choice of hosts: higher figures are better."""

    figures: Mapping[str, float]
    words: str


def check_range(wanted: HostRange, candidates: Sequence[str]) -> None:
    if wanted.min_hosts > len(candidates):
        words = f"{wanted}: {counted(len(candidates), 'host')} to choose from, and {_needed(wanted)}"
        fewer = f"{_fewer(wanted, len(candidates))}, or " if candidates else ""
        raise UsageError(words, f"{fewer}name more with --nodes, or `orch node restore` released hosts")


def those_there(wanted: HostRange, candidates: Sequence[str], away: Mapping[str, HostError]) -> list[str]:
    """The available candidates. away: why others are not. Raises TooFewError listing missing hosts."""
    there = [name for name in candidates if name not in away]
    if len(there) < wanted.min_hosts:
        missing = [away[name] for name in candidates if name in away]
        can = f"{len(there)} of {counted(len(candidates), 'host')} can take part"
        lines = [f"{wanted}: {can}, and {_needed(wanted)}; nothing was started"]
        remedy = "bring hosts back (`orch status` names them)"
        remedy += f", or {_fewer(wanted, len(there))}" if there else ""
        raise TooFewError("\n".join([*lines, *(str(error) for error in together(missing))]), remedy)
    return there


def ranked(names: Sequence[str], worth: Worth, pin: str | None) -> list[str]:
    """Best first: the pinned master, then by worth, then in the order of `names`."""
    return sorted(names, key=lambda name: (name != pin, -worth.figures.get(name, 0.0)))


def choice_of(
    wanted: HostRange, away: Mapping[str, HostError], spares: Sequence[str], candidates: Sequence[str]
) -> HostChoice:
    left_out = (LeftOut(node=name, reason=_reason(away[name])) for name in candidates if name in away)
    return HostChoice(
        min_hosts=wanted.min_hosts,
        max_hosts=wanted.max_hosts,
        candidates=tuple(candidates),
        left_out=tuple(left_out),
        spares=tuple(spares),
    )


def choice_notes(choice: HostChoice, away: Mapping[str, HostError], worth: Worth | None) -> tuple[str, ...]:
    """worth: the criterion of the choice; None if all available hosts take part."""
    gone = together([away[each.node] for each in choice.left_out])
    notes = [f"left out: {one_line(error.message)}" for error in gone]
    if worth:
        why = f"{counted(choice.max_hosts, 'host')} at most, {worth.words}"
        notes.append(f"spare: {some(choice.spares, 12)}; the job takes {why}")
    return tuple(notes)


def _needed(wanted: HostRange) -> str:
    return f"{wanted.min_hosts} {'is' if wanted.min_hosts == 1 else 'are'} needed"


def _fewer(wanted: HostRange, there: int) -> str:
    return f"--hosts {there}:{wanted.max_hosts}"


def _reason(error: HostError) -> str:
    return one_line(error.message.removeprefix(f"{error.node}: "))
