"""What this machine has, found out without torch: an NVIDIA GPU, or the stand-in for CUDA."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_DEVICES = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg")
"""Files that the driver makes; the last one under WSL."""
STAND_IN = "stand-in: virtual time, not a GPU"


def is_stand_in() -> bool:
    """Whether the library of tests/cuda is preloaded into this process."""
    return hasattr(ctypes.CDLL(None), "standin_counts")


def why_no_gpu() -> str:
    """Empty where there may be a GPU: whether torch can use it, only torch knows."""
    if is_stand_in() or any(Path(device).exists() for device in _DEVICES):
        return ""
    return f"no NVIDIA GPU: none of {', '.join(_DEVICES)} is there"


def visible(number: int) -> str:
    """What CUDA_VISIBLE_DEVICES has to be for this GPU alone, of those that this process may use."""
    allowed = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return allowed[number] if number < len(allowed) else str(number)
