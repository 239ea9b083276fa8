"""Checks what a host reports of itself, and makes frozen values of it. Pure.

    facts = read_facts("v100", answer, sent_at=before, received_at=after)
    facts.gpus[0].name, facts.torch.version      # "Tesla V100-PCIE-16GB", "2.0.1"

`remote/probe.py` names each fact as `NodeFacts` and `Health` do. Hosts are not trusted: a value of another type or out
of its bounds, or too long a list, is a ProbeError; text is cut and made printable.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import Field, ValidationError

from orchestrator.errors import ProbeError
from orchestrator.hosts.facts import Count, Fact, Health, Interfaces, NodeFacts
from orchestrator.text import one_line

Time = Annotated[float, Field(ge=0, lt=1e11)]
Checked = TypeVar("Checked", bound=Fact)


class Clock(Fact):
    """The host's wall clock when its program began and when it ended."""

    began: Time
    ended: Time

    def against_ours(self, sent_at: float, received_at: float) -> dict[str, float]:
        """Offset between two clocks from four readings (NTP, RFC 5905 section 8): the probe's own time falls out.

        The rest of the round trip may lie on one side: a start-up file of the shell runs before the probe. So the
        offset is right to half of it.
        """
        on_the_way_s = (received_at - sent_at) - (self.ended - self.began)
        return {
            "clock_offset_s": round((self.began + self.ended) / 2 - (sent_at + received_at) / 2, 3),
            "clock_error_s": round(max(0.0, on_the_way_s / 2), 3),
        }


class _Now(Fact):
    """What `remote/health.py` reports."""

    clock: Clock
    disk_free_bytes: Count
    disk_free_inodes: Count | None
    shm_bytes: Count
    interfaces: Interfaces
    health: Health


def read_facts(node: str, answer: Mapping[str, Any], sent_at: float, received_at: float) -> NodeFacts:
    """node: its name in the inventory. sent_at, received_at: our wall clock around the probe.

    Raises ProbeError naming the node and the fact that makes no sense.
    """
    offset = _checked(node, Clock, answer.get("clock"), "clock").against_ours(sent_at, received_at)
    facts = answer.get("facts")
    return _checked(node, NodeFacts, {**facts, **offset, "node": node} if isinstance(facts, dict) else facts, "facts")


def read_health(node: str, answer: Mapping[str, Any]) -> Health:
    """Raises ProbeError as `read_facts` does."""
    return _checked(node, Health, answer.get("health"), "health")


def as_of_now(
    node: str, remembered: NodeFacts, answer: Any, sent_at: float, received_at: float
) -> tuple[NodeFacts, Health]:
    """What is remembered of a host, with what `remote/health.py` reported. Raises ProbeError as `read_facts` does."""
    now = _checked(node, _Now, answer, "state")
    found = {link.name: link for link in now.interfaces}
    update = {
        "disk_free_bytes": now.disk_free_bytes,
        "disk_free_inodes": now.disk_free_inodes,
        "shm_bytes": now.shm_bytes,
        "interfaces": tuple(
            found.get(link.name, link.model_copy(update={"up": False})) for link in remembered.interfaces
        ),
        **now.clock.against_ours(sent_at, received_at),
    }
    return remembered.model_copy(update=update), now.health


def _checked(node: str, kind: type[Checked], value: Any, name: str) -> Checked:
    """name: what the whole value is, for a message about no part of it."""
    try:
        # As JSON, since a strict check takes no list for a tuple elsewhere. A lone surrogate becomes a question mark.
        text = json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")
        return kind.model_validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or name
        raise ProbeError(node, one_line(f"its answer makes no sense ({where}: {first['msg']})")) from error
    except (ValueError, RecursionError) as error:
        raise ProbeError(node, f"its answer makes no sense ({name}: {type(error).__name__})") from error
