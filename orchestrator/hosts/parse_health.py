"""Takes the raw answer of `remote/examine.py`, gives a frozen `Health`. Pure: one small parser a fact.

health = parse_health("v100", answer)          # beside parse_facts("v100", answer, ...), of the same answer

An answer that makes no sense is refused with ProbeError: hosts are not trusted. Counts are capped, text is cut and
printable.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from orchestrator.hosts.health import Disk, GpuHealth, Health, Limit, NetworkCard
from orchestrator.hosts.parse_facts import making_sense
from orchestrator.hosts.raw_answer import Command, at_most, clean, failure, loads, mapping, whole

MOST = 256
_NUMBER = re.compile(r"\d{1,12}(\.\d{1,6})?", re.ASCII)
_MASK = re.compile(r"0x[0-9a-fA-F]{1,16}")


def parse_health(node: str, raw: Mapping[str, Any]) -> Health:
    """node: its name in the inventory. raw: the program's answer. Raises ProbeError naming the fact that makes none."""

    def fact(name: str, parse: Callable[..., Any], *inputs: Any) -> Any:
        return making_sense(node, name, parse, *inputs)

    said = fact("its health", mapping, raw.get("health"))
    commands = fact("itself", mapping, raw.get("commands"))
    found = {
        "limits": fact("its limits", parse_limits, said.get("limits")),
        **fact("its control groups", parse_groups, said.get("cgroup")),
        "environment": fact("its environment", parse_environment, said.get("environment")),
        "available_bytes": said.get("available_bytes"),
        "uptime_s": said.get("uptime_s"),
        "reboot": fact("its reboot", words_or_none, said.get("reboot")),
        "kills_left": said.get("kills_left"),
        "cards": fact("its cards", parse_cards, said.get("cards")),
        "jobs": fact("its jobs", words_or_none, said.get("jobs")) or (),
        "gpus": fact("its GPUs' health", parse_gpu_health, raw.get("gpu_health"), commands.get("torch")),
        "data": fact("its data", parse_data, commands.get("data")),
        "disk": fact("its disk", parse_disk, commands.get("disk")),
    }
    return fact("its health", lambda: Health.of(**found))  # type: ignore[no-any-return]


def parse_limits(value: Any) -> dict[str, Limit]:
    return {clean(name): Limit.of(soft=soft, hard=hard) for name, (soft, hard) in _items(value)}


def parse_groups(value: Any) -> dict[str, Any]:
    found = mapping(value)
    return {
        "group_memory_bytes": found["memory_bytes"],
        "group_pids": found["pids"],
        "group_cpus": found["cpus"],
    }


def parse_environment(value: Any) -> dict[str, str]:
    return {clean(name): clean(text) for name, text in _items(value)}


def parse_cards(value: Any) -> dict[str, NetworkCard]:
    found = {}
    for name, (duplex, errors, packets) in _items(value):
        counts = {"crc_errors": whole(errors or "0"), "packets": int(_count(packets or "0"))}
        found[clean(name)] = NetworkCard.of(duplex=None if duplex is None else clean(duplex), **counts)
    return found


def parse_gpu_health(rows: Any, torch: Command | None) -> tuple[GpuHealth, ...]:
    computes = _computes(torch)
    return tuple(_gpu(mapping(row), computes) for row in at_most(rows, MOST))


def _gpu(row: Mapping[str, Any], computes: Mapping[str, Any]) -> GpuHealth:
    index, due = whole(row["index"]), (row.get("retired_pages.pending"), row.get("remapped_rows.pending"))
    failed = computes.get(str(index))
    return GpuHealth.of(
        index=index,
        uncorrected=_integer(row.get("ecc.errors.uncorrected.volatile.total")),
        replacement_due=any(_is_yes(word) for word in due),
        replacement_failed=_is_yes(row.get("remapped_rows.failure")),
        slowed_by=_mask(row.get("clocks_event_reasons.active")),
        clock_mhz=_number(row.get("clocks.applications.graphics")),
        default_clock_mhz=_number(row.get("clocks.default_applications.graphics")),
        limit_watts=_number(row.get("power.limit")),
        default_limit_watts=_number(row.get("power.default_limit")),
        link_width=_integer(row.get("pcie.link.width.current")),
        most_link_width=_integer(row.get("pcie.link.width.max")),
        fabric=_word(row.get("fabric.state")),
        iommu=_word(row.get("iommu")),
        computes=None if failed is None else clean(failed),
    )


def _computes(torch: Command | None) -> Mapping[str, Any]:
    """What torch's attempt on each GPU came to, by index; empty where there was none."""
    if torch is None or failure(torch):
        return {}
    return mapping(mapping(loads(torch["out"].strip().splitlines()[-1])).get("computes", {}))


def parse_data(command: Command | None) -> tuple[str, ...] | None:
    return None if failure(command) else words_or_none(loads((command or {})["out"]))


def parse_disk(command: Command | None) -> Disk | None:
    if failure(command):
        return None
    kind, source, path, device = loads((command or {})["out"])
    return Disk.of(kind=clean(kind), source=clean(source), path=clean(path, 4096), device=device)


def words_or_none(value: Any) -> tuple[str, ...] | None:
    return None if value is None else tuple(clean(word) for word in at_most(value, MOST))


def _items(value: Any) -> list[tuple[Any, Any]]:
    return at_most(list(mapping(value).items()), MOST)


def _count(text: Any) -> str:
    """A counter of the kernel may be longer than any other number of ours."""
    if not isinstance(text, str) or not re.fullmatch(r"\d{1,18}\s*", text, re.ASCII):
        raise ValueError("no count")
    return text


def _is_yes(value: Any) -> bool:
    """As nvidia-smi writes it."""
    return isinstance(value, str) and value == "Yes"


def _number(value: Any) -> float | None:
    """None for "[N/A]" and its like."""
    return float(value) if isinstance(value, str) and _NUMBER.fullmatch(value) else None


def _integer(value: Any) -> int | None:
    number = _number(value)
    return None if number is None else int(number)


def _mask(value: Any) -> int | None:
    mask = int(value, 16) if isinstance(value, str) and _MASK.fullmatch(value) else None
    return mask if mask is not None and mask < 1 << 63 else None


def _word(value: Any) -> str | None:
    word = clean(value) if isinstance(value, str) else ""
    return word if word and not word.startswith("[") and word != "N/A" else None
