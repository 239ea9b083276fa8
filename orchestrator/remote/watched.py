"""The variables with which a rank's script is started so that its steps are measured.

environment |= watched(job, environment)
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping

from .layout import JobFolder
from .script_start import PACKAGE, WATCH


def watched(job: JobFolder, environment: Mapping[str, str]) -> dict[str, str]:
    """Has Python run `script_start` first, from a folder that holds nothing else. For a child of this process."""
    folder = job.bin / "start"
    folder.mkdir(exist_ok=True)
    with contextlib.suppress(FileExistsError):  # another rank of this host made it
        os.symlink(f"../{PACKAGE}/script_start.py", folder / "sitecustomize.py")
    paths = filter(None, (str(folder), environment.get("PYTHONPATH")))
    return {"PYTHONPATH": os.pathsep.join(paths), WATCH: str(os.getpid())}
