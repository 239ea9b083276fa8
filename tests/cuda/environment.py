"""What a process needs in its environment to run on the stand-in."""

from __future__ import annotations

from collections.abc import Mapping

from tests.cuda.build import libraries


def environment(gpus: int = 1, knobs: Mapping[str, object] | None = None) -> dict[str, str]:
    """gpus: of this machine. knobs: FAKE_* variables (README.md). Raises CannotBuild."""
    preloaded = ":".join(map(str, libraries()))
    own = {"LD_PRELOAD": preloaded, "FAKE_DEVICES": gpus, "OMP_NUM_THREADS": 1, **(knobs or {})}
    return {name: str(value) for name, value in own.items()}
