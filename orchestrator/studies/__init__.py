"""Published studies as data files, and results of their rows."""

from pathlib import Path
from typing import TYPE_CHECKING

from trainer.shared.doors import door

FOLDER = Path(__file__).parent


def study_names() -> list[str]:
    """Fast, for completion and help."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


if not TYPE_CHECKING:  # a type checker looks for names in the modules themselves
    __getattr__ = door(__name__, __path__[0])
