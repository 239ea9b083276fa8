"""The last lines of a job's logs: where they begin on each host, which a watch then takes for what is here already.

offsets = tails(plan, hosts, wanted, follow=False)      wanted: lines by rank; of all others nothing comes
for name, item in watch(plan, hosts, offsets=offsets, follow=False): ...
"""

from __future__ import annotations

import base64
import time
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import islice
from typing import Any

from orchestrator.errors import HostsError
from orchestrator.jobs.control import ASK_S, on_all
from orchestrator.jobs.frames import HEAD_BYTES, LOGS, NODE_FILES, Held
from orchestrator.planning.launch_plan import LaunchPlan
from orchestrator.transport import ask
from orchestrator.transport.ask import ConnectedHost
from orchestrator.transport.fanout import errors, values

FILES_ASKED = 100
"""At once: each answers with up to 6 KB."""


def tails(
    plan: LaunchPlan,
    hosts: Mapping[str, ConnectedHost],
    wanted: Mapping[int, int | None],
    *,
    follow: bool,
    since_wall: float | None = None,
) -> dict[str, dict[str, Held]]:
    """By node and file. wanted: how many lines of each log of a rank, None for all. follow: what tells of the job's
    progress comes whole. since_wall: of these lines those that were printed then or later, by this machine's clock.
    Raises HostsError.
    """
    found = on_all(plan, lambda name: _of_host(plan, hosts[name], wanted, follow, since_wall), ASK_S, only=hosts)
    if errors(found):
        raise HostsError(errors(found))
    return values(found)


def _of_host(
    plan: LaunchPlan, host: ConnectedHost, wanted: Mapping[int, int | None], follow: bool, since_wall: float | None
) -> dict[str, Held]:
    node, held = plan.node(host.node), dict[str, Held]()
    names: dict[str, int | None] = {
        f"rank-{rank}/{log}": wanted.get(rank, 0) for rank in node.rank_numbers for log in LOGS
    }
    if not follow:
        names |= {f"rank-{rank}/metrics.jsonl": 0 for rank in node.rank_numbers} | dict.fromkeys(NODE_FILES, 0)
    for lines in _parts(names):
        since_s = None if since_wall is None else max(0.0, time.time() - since_wall)  # the host has a clock of its own
        request = {"workdir": node.workdir, "job": plan.job, "lines": lines, "since_s": since_s}
        answer = ask.ask(host, "tails", request, timeout_s=ASK_S)
        held |= ask.understood(host.node, partial(_held, answer, lines))
    return held


def _parts(names: Mapping[str, int | None]) -> Iterator[dict[str, int | None]]:
    rest = iter(names.items())
    while part := dict(islice(rest, FILES_ASKED)):
        yield part


def _held(answer: Mapping[str, Any], asked: Mapping[str, int | None]) -> dict[str, Held]:
    """Raises ValueError, KeyError, TypeError, AttributeError for what a host would not say."""
    held = {}
    for name, (offset, inode, text) in answer["files"].items():
        head = base64.b64decode(text, validate=True)
        if name not in asked or type(offset) is not int or type(inode) is not int:
            raise ValueError(f"where {name!r} begins")
        if offset < 0 or len(head) != min(offset, HEAD_BYTES):
            raise ValueError(f"how {name!r} begins")
        held[name] = Held(offset, inode, head)
    return held
