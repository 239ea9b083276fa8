"""What a host answered of its GPUs and of its torch, as facts. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.hosts.facts import Gpu, Occupant, TorchFacts
from orchestrator.hosts.raw_answer import Command, at_most, clean, failure, loads, mapping, text_or_none, whole

MAX_GPUS = 64
MAX_OCCUPANTS = 256
MAX_WARNINGS = 8
_ROW = re.compile(r"\s*\d{1,4}\s*,(?:[^,]*,){5,7}[^,]*$")
"""A line that begins with a GPU's index and has the columns that were asked for."""
MIB = 1 << 20


def parse_gpus(command: Command | None, occupants: Any) -> tuple[tuple[Gpu, ...], str | None, tuple[str, ...]]:
    """The GPUs by index, with who is on them; why there is none; and what else nvidia-smi printed: a warning, or a GPU
    that was lost next to others. The rows count whatever its exit code is: it is 14 for a warning, 15 for a lost GPU.
    """
    error = failure(command)
    printed = f"{(command or {}).get('out', '')}\n{(command or {}).get('err', '')}".splitlines()
    rows = [row for row in printed if _ROW.match(row)]
    others = tuple(clean(line) for line in printed if line.strip() and not _ROW.match(line))
    if not rows:
        return (), next(iter(others), error), ()
    if len(rows) > MAX_GPUS:
        raise ValueError(f"{len(rows)} GPUs")
    there = _occupants(occupants)
    gpus = tuple(sorted((_gpu(row, there) for row in rows), key=lambda gpu: gpu.index))
    if len({gpu.uuid for gpu in gpus}) < len(gpus):
        raise ValueError("two GPUs with one uuid")
    return gpus, None, tuple(dict.fromkeys(others))[:MAX_WARNINGS]


def _gpu(row: str, occupants: Mapping[str, Sequence[Occupant]]) -> Gpu:
    """What a driver does not know is not asked for: the columns after the first seven may be missing."""
    fields = [clean(field) for field in row.split(",")]
    if not 7 <= len(fields) <= 9:
        raise ValueError(f"{len(fields)} columns in {clean(row)!r}")
    index, name, uuid, total, used, driver, bus_id = fields[:7]
    capability = next((field for field in fields[7:] if re.fullmatch(r"\d{1,2}\.\d", field)), None)
    mode = next((field for field in fields[7:] if field.startswith(("Exclusive", "Prohibited"))), "Default")
    return Gpu.of(
        index=whole(index),
        name=name,
        uuid=uuid,
        memory_bytes=_mebibytes(total),
        memory_used_bytes=_mebibytes(used),
        driver=driver,
        bus_id=bus_id,
        compute_capability=capability,
        compute_mode=mode,
        occupants=tuple(occupants.get(uuid, ())),
    )


def _occupants(rows: Any) -> dict[str, list[Occupant]]:
    """By the GPU's uuid."""
    found: dict[str, list[Occupant]] = {}
    for one in at_most(rows, MAX_OCCUPANTS):
        memory, words = one["mebibytes"], {name: text_or_none(one[name]) for name in ("user", "command", "job")}
        if not isinstance(memory, int | None):
            raise ValueError("memory that is no number")
        occupant = Occupant.of(pid=one["pid"], memory_bytes=None if memory is None else memory * MIB, **words)
        found.setdefault(clean(one["gpu"]), []).append(occupant)
    return found


def _mebibytes(field: str) -> int:
    """nvidia-smi writes [N/A] or [Not Supported] where a GPU has no memory of its own."""
    return 0 if field.startswith("[") else whole(field) * MIB


def parse_torch(command: Command | None) -> tuple[TorchFacts | None, str | None]:
    """The last line of the torch program; else None and the import error's last line."""
    if command is None:
        return None, None
    if error := failure(command):
        return None, error
    found = mapping(loads(command["out"].strip().splitlines()[-1]))
    archs = found["archs"]
    if not isinstance(archs, list) or len(archs) > MAX_GPUS:
        raise ValueError("no list of architectures")
    texts = {name: text_or_none(found.get(name)) for name in ("cuda", "nccl", "cudnn", "horovod", "cuda_error")}
    vision = {name: text_or_none(found.get(name)) for name in ("torchvision", "torchvision_error")}
    torch = TorchFacts.of(
        version=clean(found["version"]),
        arch_list=tuple(clean(arch) for arch in archs),
        gloo=found["gloo"],
        verbs=found.get("verbs"),
        nccl_available=found["nccl_available"],
        devices=found["devices"],
        **texts,
        **vision,
    )
    return torch, None
