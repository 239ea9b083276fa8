"""Validates the JSON that a host's probe returns and makes `NodeFacts` and `Health` of it. Pure.

Hosts are not trusted: a value of a wrong type or out of bounds, or too long a list, is a ProbeError; text is cut and
made printable.
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
    """The host's clock before and after the probe, in seconds since 1970."""

    began: Time
    ended: Time

    def against_ours(self, sent_at: float, received_at: float) -> dict[str, float]:
        """Clock offset from four readings (NTP, RFC 5905 section 8); its error is half the time in transit."""
        on_the_way_s = (received_at - sent_at) - (self.ended - self.began)
        return {
            "clock_offset_s": round((self.began + self.ended) / 2 - (sent_at + received_at) / 2, 3),
            "clock_error_s": round(max(0.0, on_the_way_s / 2), 3),
        }


class _Now(Fact):
    clock: Clock
    disk_free_bytes: Count
    disk_free_inodes: Count | None
    shm_bytes: Count
    interfaces: Interfaces
    health: Health


def read_facts(node: str, answer: Mapping[str, Any], sent_at: float, received_at: float) -> NodeFacts:
    """sent_at, received_at: our clock around the probe. Raises ProbeError naming the node and the bad fact."""
    offset = _checked(node, Clock, answer.get("clock"), "clock").against_ours(sent_at, received_at)
    facts = answer.get("facts")
    return _checked(node, NodeFacts, {**facts, **offset, "node": node} if isinstance(facts, dict) else facts, "facts")


def read_health(node: str, answer: Mapping[str, Any]) -> Health:
    return _checked(node, Health, answer.get("health"), "health")


def as_of_now(
    node: str, remembered: NodeFacts, answer: Any, sent_at: float, received_at: float
) -> tuple[NodeFacts, Health]:
    """Updates remembered facts from an answer of `remote/health.py`. Raises ProbeError."""
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
