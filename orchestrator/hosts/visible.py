"""Which of a host's GPUs a job may use, and their names for CUDA: UUIDs, since an index means another GPU as soon as
one fails or is added. Pure.

    gpus = visible_gpus("a16", facts, {"CUDA_VISIBLE_DEVICES": "2,0"})     those that nvidia-smi numbers 2 and 0
    cuda_environment(gpus, {})                        {"CUDA_VISIBLE_DEVICES": "GPU-5f3a...,GPU-77b1...", ...}

CUDA C++ Programming Guide, "CUDA Environment Variables": CUDA_VISIBLE_DEVICES holds indexes or UUIDs, and of a UUID as
much of its beginning as distinguishes it from the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from orchestrator.errors import UsageError
from orchestrator.hosts.facts import Gpu, NodeFacts

VISIBLE = "CUDA_VISIBLE_DEVICES"


def visible_gpus(node: str, facts: NodeFacts, env: Mapping[str, str]) -> tuple[Gpu, ...]:
    """All that programs may use, or those that `env` names, in its order. Raises UsageError for one that the host does
    not have.
    """
    if VISIBLE not in env or _names_parts(env):
        return tuple(gpu for gpu in facts.gpus if not gpu.is_closed)
    words = [word.strip() for word in env[VISIBLE].split(",") if word.strip()]
    if not words:
        raise UsageError(f"{node}: its {VISIBLE} names no GPU", f"set `device: cpu` for {node} to train without one")
    return tuple(dict.fromkeys(_named(node, word, facts.gpus) for word in words))


def cuda_environment(gpus: Iterable[Gpu], env: Mapping[str, str]) -> dict[str, str]:
    """The variables that CUDA reads. env: of the inventory; parts of a GPU stay as it names them."""
    # Whatever else counts GPUs by index is to count as nvidia-smi does.
    order = {"CUDA_DEVICE_ORDER": env.get("CUDA_DEVICE_ORDER", "PCI_BUS_ID")}
    return order if _names_parts(env) else {**order, VISIBLE: ",".join(map(_cuda_name, gpus))}


def _names_parts(env: Mapping[str, str]) -> bool:
    """MIG instances have UUIDs of their own, which the facts do not hold."""
    return env.get(VISIBLE, "").lstrip().startswith("MIG-")


def _named(node: str, word: str, gpus: Sequence[Gpu]) -> Gpu:
    found = [gpu for gpu in gpus if (str(gpu.index) == word if word.isdigit() else gpu.uuid.startswith(word))]
    if len(found) == 1:
        return found[0]
    there = ", ".join(f"{gpu.index} ({gpu.uuid})" for gpu in gpus) or "none"
    raise UsageError(
        f"{node}: its {VISIBLE} names GPU {word}, which {'is not there' if not found else 'means several'}",
        f"its GPUs are {there}; `orch up` again if that is no longer so",
    )


def _cuda_name(gpu: Gpu) -> str:
    """Its UUID; its index where the driver reports none."""
    return gpu.uuid if gpu.uuid.startswith("GPU-") else str(gpu.index)
