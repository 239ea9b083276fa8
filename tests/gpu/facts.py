"""What machine this is: as torch sees it, asked in a process of its own, and as the driver reports it.

facts = find_facts(folder)
facts.why_unusable, facts.gpu, facts.nccl           "", "NVIDIA H200", (2, 30, 7)
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import child
from .here import is_stand_in, why_no_gpu

_DRIVER = (
    *("name", "driver_version", "memory.total", "memory.used", "clocks.sm", "clocks.max.sm", "power.limit"),
    *("temperature.gpu", "compute_mode", "persistence_mode"),
)
_WATCHED = (*("timestamp", "index", "utilization.gpu", "memory.used", "clocks.sm", "power.draw", "temperature.gpu"),)
_REASONS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")
"""What newer and older drivers call what holds the clocks down."""


@dataclass(frozen=True)
class Facts:
    """found: what `_ask_torch` found. driver: what nvidia-smi says of each GPU; empty where there is none."""

    found: dict[str, Any]
    driver: list[dict[str, str]]

    @property
    def why_unusable(self) -> str:
        """What is wrong, and what to do; empty where torch can use a GPU."""
        return self.found["why_unusable"]

    @property
    def gpu(self) -> str:
        return self.found["gpus"][0]["name"]

    @property
    def gpus(self) -> int:
        return len(self.found["gpus"])

    @property
    def capability(self) -> tuple[int, int]:
        return tuple(self.found["gpus"][0]["capability"])

    @property
    def nccl(self) -> tuple[int, ...]:
        return tuple(self.found["nccl"] or ())

    @property
    def is_stand_in(self) -> bool:
        return self.found["stand_in"]


def find_facts(folder: Path) -> Facts:
    if why := why_no_gpu():
        return Facts({"why_unusable": f"{why}\nRun this where nvidia-smi lists a GPU (docs/gpu.md).", "gpus": []}, [])
    log = folder / "facts.log"
    ended = child.run([sys.executable, "-m", "tests.gpu.facts"], log, limit_s=120)
    lines = [line for line in ended.output.splitlines() if line.startswith('{"why_unusable"')]
    if not lines:
        return Facts({"why_unusable": f"torch does not start: {ended.cause}; see {log}", "gpus": []}, [])
    return Facts(json.loads(lines[-1]), _ask_driver())


def _ask_driver() -> list[dict[str, str]]:
    """Older drivers lack some fields; then none."""
    command = ["nvidia-smi", f"--query-gpu={','.join(_DRIVER)}", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return []
    rows = csv.reader(io.StringIO(answer.stdout if answer.returncode == 0 else ""), skipinitialspace=True)
    return [dict(zip(_DRIVER, row, strict=False)) for row in rows]


def watch(file: Path) -> subprocess.Popen[bytes] | None:
    """Writes clocks, power and temperature every 2 s until it is ended; None where there is no nvidia-smi."""
    if not shutil.which("nvidia-smi"):
        return None
    reasons = next((name for name in _REASONS if _answers(name)), "index")
    command = ["nvidia-smi", f"--query-gpu={','.join((*_WATCHED, reasons))}", "--format=csv", "-lms", "2000"]
    with open(file, "wb") as output:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.DEVNULL)


def _answers(field: str) -> bool:
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv"]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        return subprocess.run(command, capture_output=True, timeout=30).returncode == 0
    return False


# ---- in the process that has torch ----------------------------------------------------------------------------------


def _ask_torch() -> dict[str, Any]:
    try:
        import torch
        import torchvision
    except ImportError as error:
        how = "run `make gpu`, which installs them into .venv, or name an environment that has them: GPU_PYTHON=..."
        return {"why_unusable": f"{error}\nNeeded are torch and torchvision: {how}", "gpus": [], "stand_in": False}
    found: dict[str, Any] = {
        "why_unusable": _unusable(torch),
        "stand_in": is_stand_in(),
        "gpus": [],
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "kernel": platform.release(),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "nccl": None,
    }
    if found["why_unusable"]:
        return found
    for number in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(number)
        found["gpus"].append(
            {"name": gpu.name, "capability": [gpu.major, gpu.minor], "memory_bytes": gpu.total_memory,
             "multiprocessors": gpu.multi_processor_count}
        )  # fmt: skip
    found["nccl"] = list(torch.cuda.nccl.version()) if torch.distributed.is_nccl_available() else None
    with contextlib.suppress(RuntimeError):  # of a cuDNN that is not the one torch was built with
        found["cudnn"] = torch.backends.cudnn.version()
    found["architectures"] = torch.cuda.get_arch_list()
    found["tf32"] = {
        "cudnn": torch.backends.cudnn.allow_tf32,
        "matmul": torch.backends.cuda.matmul.allow_tf32,
    }
    return found


def _unusable(torch: Any) -> str:
    if torch.version.cuda is None:
        return (
            f"torch {torch.__version__} is built without CUDA\n"
            "Install one that has it: pip install --force-reinstall torch torchvision (PyPI's have it on Linux)."
        )
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        reason = (str(error).splitlines() or ["no word"])[0]
        return (
            f"torch {torch.__version__} (CUDA {torch.version.cuda}) cannot use the GPU: {reason}\n"
            "Does nvidia-smi list it? Where the driver is too old for this CUDA, install a torch that is built for an "
            'older one (docs/gpu.md, "Which torch").'
        )
    return "" if torch.cuda.device_count() else "torch sees no GPU: is CUDA_VISIBLE_DEVICES empty?"


def _cpu() -> str:
    with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        return next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), "")


if __name__ == "__main__":
    print(json.dumps(_ask_torch()), flush=True)
