"""The health of this host's GPUs: figures of nvidia-smi, under the names of `GpuHealth`.

    gpu_health(30.0)      # [{"index": 0, "uncorrected": 0, "replacement_due": False, "link_width": 16, ...}]

A field that a driver does not know is asked for by its older name, and then left out.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from .commands import run

FIELDS = (
    "index",
    "uuid",
    "pci.bus_id",
    "ecc.errors.uncorrected.volatile.total",
    "retired_pages.pending",
    "remapped_rows.pending",
    "remapped_rows.failure",
    "clocks_event_reasons.active",
    "clocks.applications.graphics",
    "clocks.default_applications.graphics",
    "power.limit",
    "power.default_limit",
    "pcie.link.width.current",
    "pcie.link.width.max",
    "fabric.state",
)
OLDER = {"clocks_event_reasons.active": "clocks_throttle_reasons.active"}
"""What drivers before 535 call a field."""
MOST_GPUS = 64
_REFUSED = re.compile(r'Field "([a-z_.]{1,64})" is not a valid field')
_NUMBER = re.compile(r"\d{1,12}(\.\d{1,6})?", re.ASCII)
_MASK = re.compile(r"0x0*[0-7]?[0-9a-fA-F]{1,15}")


def gpu_health(limit_s: float) -> list[dict[str, Any]]:
    return [health_of(row) for row in look(limit_s)]


def health_of(row: dict[str, str]) -> dict[str, Any]:
    """row: by nvidia-smi's field. A figure is None if the driver writes [N/A] or the like."""

    def number(field: str) -> float | None:
        return float(row[field]) if _NUMBER.fullmatch(row.get(field, "")) else None

    def count(field: str) -> int | None:
        return None if (found := number(field)) is None else int(found)

    def word(text: str) -> str | None:
        return None if not text or text == "N/A" or text.startswith("[") else text

    slowed_by = row.get("clocks_event_reasons.active", "")
    return {
        "index": int(row["index"]),
        "uncorrected": count("ecc.errors.uncorrected.volatile.total"),
        "replacement_due": "Yes" in (row.get("retired_pages.pending"), row.get("remapped_rows.pending")),
        "replacement_failed": row.get("remapped_rows.failure") == "Yes",
        "slowed_by": int(slowed_by, 16) if _MASK.fullmatch(slowed_by) else None,
        "clock_mhz": number("clocks.applications.graphics"),
        "default_clock_mhz": number("clocks.default_applications.graphics"),
        "limit_watts": number("power.limit"),
        "default_limit_watts": number("power.default_limit"),
        "link_width": count("pcie.link.width.current"),
        "most_link_width": count("pcie.link.width.max"),
        "fabric": word(row.get("fabric.state", "")),
        "iommu": word(translated(row.get("pci.bus_id", "")) or ""),
    }


def look(limit_s: float) -> list[dict[str, str]]:
    """An empty list where there is no nvidia-smi, or none that answers."""
    fields = {field: field for field in FIELDS}  # what it is asked for by -> what we call it
    for _ in range(2 * len(FIELDS)):
        command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
        said = run(command, limit_s)
        refused = _REFUSED.search(said["out"] + said["err"])
        if not refused or refused[1] not in fields:
            return rows(said, list(fields.values()))
        fields = without(refused[1], fields)
    return []


def without(refused: str, fields: dict[str, str]) -> dict[str, str]:
    """The fields to ask for once a driver has refused this one: by its older name, else without it."""
    kept = {field: name for field, name in fields.items() if field != refused}
    return {**kept, OLDER[refused]: refused} if refused in OLDER else kept


def rows(said: dict[str, Any], names: list[str]) -> list[dict[str, str]]:
    lines = [[value.strip() for value in line.split(",")] for line in said["out"].splitlines()[:MOST_GPUS]]
    return [dict(zip(names, row, strict=True)) for row in lines if len(row) == len(names) and row[0].isdecimal()]


def translated(bus_id: str, devices: Path = Path("/sys/bus/pci/devices")) -> str | None:
    """How the IOMMU treats this GPU, as the kernel has it: "identity", "DMA", "DMA-FQ"; None where there is none.
    bus_id: as nvidia-smi writes it, with eight digits of the domain.
    """
    try:
        return (devices / bus_id.lower()[-12:] / "iommu_group" / "type").read_text().strip()
    except (OSError, ValueError):  # not there, or no path: a driver may print anything
        return None
