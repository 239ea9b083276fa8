"""Puts `torchx_plugins.schedulers.orch` into the wheel; `pyproject.toml` names the class."""

from __future__ import annotations

import shutil
from pathlib import Path

from setuptools.command.build_py import build_py

PLACE = "torchx_plugins/schedulers/orch.py"


class BuildWithTorchX(build_py):
    """Not by package-dir, with which an editable install would load a finder at every start of Python."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            place = Path(self.build_lib, PLACE)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(Path(__file__).with_name("torchx_namespace.py"), place)
