"""Published studies as data files, and results of their rows."""

from pathlib import Path

FOLDER = Path(__file__).parent


def study_names() -> list[str]:
    """Fast, for completion and help."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))
