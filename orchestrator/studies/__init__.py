"""Published studies as data files, and what became of their rows on a cluster."""

from pathlib import Path

FOLDER = Path(__file__).parent


def study_names() -> list[str]:
    """One for each data file; quick, for completion and help."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))
