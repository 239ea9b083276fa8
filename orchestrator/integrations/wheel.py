"""Puts `torchx_plugins.schedulers.orch` and the pages of `orch help` into the wheel, by `pyproject.toml`."""

from __future__ import annotations

import shutil
from pathlib import Path

from setuptools.command.build_py import build_py

PLACE = "torchx_plugins/schedulers/orch.py"
PAGES = "orchestrator/pages"


class BuildWithTorchX(build_py):
    """Not by package-dir, with which an editable install would load a finder at every start of Python."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            place = Path(self.build_lib, PLACE)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(Path(__file__).with_name("torchx_namespace.py"), place)
            pages = Path(self.build_lib, PAGES)
            pages.mkdir(exist_ok=True)
            for page in [*Path("docs").glob("*.md"), *Path("docs", "reference").glob("*.md")]:
                shutil.copy(page, pages)
