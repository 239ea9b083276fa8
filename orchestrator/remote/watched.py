"""The variables with which a rank's script is started so that it writes its stacks when asked, and steps are measured.

environment |= watched(job, environment, stacks=job.rank(0) / "stacks")
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

from .layout import JobFolder
from .script_start import PACKAGE, STACKS, WATCH


def watched(
    job: JobFolder, environment: Mapping[str, str], *, steps: bool = True, stacks: Path | None = None
) -> dict[str, str]:
    """Has Python run `script_start` first, from a folder that holds nothing else. For a child of this process. {} where
    a full disk has no room for that folder: the script is more.
    """
    folder = job.bin / "start"
    try:
        folder.mkdir(exist_ok=True)
        with contextlib.suppress(FileExistsError):  # another rank of this host made it
            os.symlink(f"../{PACKAGE}/script_start.py", folder / "sitecustomize.py")
    except OSError:
        return {}
    paths = filter(None, (str(folder), environment.get("PYTHONPATH")))
    found = {"PYTHONPATH": os.pathsep.join(paths)}
    if steps:
        found[WATCH] = str(os.getpid())
    if stacks:
        found[STACKS] = f"{os.getpid()}:{stacks}"
    return found
