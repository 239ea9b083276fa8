"""Whether a path was written for this machine's home folder where each host's own was meant. Pure.

A shell expands `~` before orch sees it, also in `data_dir=~/data`; what arrives here is `data_dir=/home/me/data`.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping

from orchestrator.hosts.facts import NodeFacts
from orchestrator.hosts.inventory import Node
from orchestrator.planning.request import RunRequest


def homes_of(nodes: Iterable[Node], facts: Mapping[str, NodeFacts]) -> dict[str, str]:
    """By node, its login's home folder, as far as the work folder shows it."""
    found = {}
    for node in nodes:
        if node.name in facts and node.workdir.startswith("~/"):
            below, workdir = node.workdir.removeprefix("~").rstrip("/"), facts[node.name].workdir
            if workdir.endswith(below):
                found[node.name] = workdir.removesuffix(below)
    return found


def notes_on(request: RunRequest, own_home: str, homes: Mapping[str, str]) -> Iterator[str]:
    """A sentence for each setting or script argument that names this machine's home folder."""
    for key in sorted(request.chosen):
        yield from expanded_here("--set", f"{key}=", str(getattr(request.settings, key)), own_home, homes)
    for word in request.command:
        path = word.partition("=")[2] if word.startswith("-") else word
        for problem in _elsewhere(path, own_home, homes):
            yield f"{problem}; give the script a path of the hosts"


def expanded_here(option: str, key: str, path: str, own_home: str, homes: Mapping[str, str]) -> Iterator[str]:
    """The same for one path that a host would expand itself. option, key: what is typed before it."""
    for problem in _elsewhere(path, own_home, homes):
        quoted = shlex.quote(f"{key}~{path.removeprefix(own_home)}")
        yield f"{problem}; for each host's own write {option} {quoted}, with the quotes"


def _elsewhere(path: str, own_home: str, homes: Mapping[str, str]) -> Iterator[str]:
    others = {node: home for node, home in homes.items() if home != own_home}
    if own_home != "/" and others and f"{path}/".startswith(f"{own_home}/"):
        node, home = next(iter(others.items()))
        yield f"{path} lies in your home folder here, and on {node} that is {home or '/'}"
