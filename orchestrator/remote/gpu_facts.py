"""This host's GPUs and the processes on them, from nvidia-smi.

look(30.0)      # {"gpus": [{"index": 0, "name": "NVIDIA A16", ...}], "gpu_error": None, "gpu_warnings": []}
"""

from __future__ import annotations

import re
from typing import Any

from .commands import NOT_FOUND, SMI_S, TOO_SLOW, run, why_failed
from .occupants import QUERY, occupants

FIELDS = "index,name,uuid,memory.total,memory.used,driver_version,pci.bus_id,compute_mode"
MOST_GPUS, MOST_WARNINGS = 64, 8
_ROW = re.compile(r"\s*\d{1,4}\s*,(?:[^,]*,){5,7}[^,]*$", re.ASCII)
_MEBIBYTES = re.compile(r"\d{1,12}", re.ASCII)


def look(limit_s: float) -> dict[str, Any]:
    limit_s = min(SMI_S, limit_s)
    shown = run(smi(FIELDS + ",compute_cap"), limit_s)
    if shown["rc"] not in (0, NOT_FOUND, TOO_SLOW):
        shown = ask_old_driver(shown, limit_s)
    used = run(["nvidia-smi", *QUERY], limit_s)["out"] if "," in shown["out"] else ""
    return gpu_facts(shown, occupants(used))


def ask_old_driver(first: dict[str, Any], limit_s: float) -> dict[str, Any]:
    # Drivers before 510 refuse the whole query because of `compute_cap`.
    again = run(smi(FIELDS), limit_s) if "compute_cap" in first["out"] + first["err"] else first
    return again if "," in again["out"] else first


def smi(fields: str) -> list[str]:
    return ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]


def gpu_facts(shown: dict[str, Any], on_gpus: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    # Reads rows at any exit code: 14 is a warning, 15 means that one of several GPUs is lost.
    lines = [line.strip() for line in f"{shown['out']}\n{shown['err']}".splitlines() if line.strip()]
    gpus = [_gpu(line, on_gpus) for line in lines if _ROW.match(line)][:MOST_GPUS]
    others = [line for line in lines if not _ROW.match(line)]
    if not gpus:
        return {"gpus": [], "gpu_error": others[0] if others else why_failed(shown)}
    ordered = sorted(gpus, key=lambda gpu: int(gpu["index"]))
    return {"gpus": ordered, "gpu_warnings": list(dict.fromkeys(others))[:MOST_WARNINGS]}


def _gpu(row: str, on_gpus: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    index, name, uuid, total, used, driver, bus_id, *more = (field.strip() for field in row.split(","))
    return {
        "index": int(index),
        "name": name,
        "uuid": uuid,
        "memory_bytes": _bytes(total),
        "memory_used_bytes": _bytes(used),
        "driver": driver,
        "bus_id": bus_id,
        "compute_capability": next((field for field in more if re.fullmatch(r"\d{1,2}\.\d", field)), None),
        "compute_mode": next((field for field in more if field.startswith(("Exclusive", "Prohibited"))), "Default"),
        "occupants": on_gpus.get(uuid, []),
    }


def _bytes(mebibytes: str) -> int:
    # 0 for a GPU without memory of its own ([N/A] or [Not Supported]).
    return int(mebibytes) << 20 if _MEBIBYTES.fullmatch(mebibytes) else 0
