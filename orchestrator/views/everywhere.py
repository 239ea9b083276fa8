"""What a command printed on many hosts: each different answer once, under the hosts that gave it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console

from orchestrator.hosts.alike import host_set
from orchestrator.hosts.everywhere import MOST_BYTES, Ran
from orchestrator.text import clean_lines
from orchestrator.units import format_bytes
from orchestrator.views import console


def print_ran(found: Mapping[str, Ran], timeout_s: float) -> None:
    """Standard outputs with their exit codes as the result, standard errors beside it."""
    for (text, _, said), names in _folded(found, lambda ran: (ran.stdout, ran.exit_code, bool(ran.stderr))).items():
        nothing = "no standard output" if said else "no output"
        _put(console.out, names, _ended(found[names[0]], timeout_s), text, nothing)
    for text, names in _folded(found, lambda ran: ran.stderr).items():
        if text:
            _put(console.err, names, ", standard error", text)
    for stream in ("stdout", "stderr"):
        cut = {name: count for name, ran in found.items() if (count := getattr(ran, f"{stream}_cut_bytes"))}
        if cut:
            more = f"cut after {format_bytes(MOST_BYTES)}; up to {format_bytes(max(cut.values()))} more"
            console.warn(f"{host_set(list(cut))}: {stream} is {more}")


def _folded(found: Mapping[str, Ran], key: Callable[[Ran], Any]) -> dict[Any, list[str]]:
    """By answer the hosts that gave it, in the order in which each answer first came."""
    groups = dict[Any, list[str]]()
    for name, ran in found.items():
        groups.setdefault(key(ran), []).append(name)
    return groups


def _ended(ran: Ran, timeout_s: float) -> str:
    """What is to be said of its exit code."""
    if ran.exit_code is None:
        return f", ended after {timeout_s:g} s"
    return f", exit code {ran.exit_code}" if ran.exit_code else ""


def _put(to: Console, names: list[str], what: str, text: str, nothing: str = "") -> None:
    """nothing: what to say in place of an empty text."""
    head = f"{host_set(names)} ({len(names)}){what}:"
    to.print(console.plain(head if text else f"{head} {nothing}", "bold"))
    if text:
        print(clean_lines(text).removesuffix("\n"), file=to.file)  # the console would make blanks of tabs
