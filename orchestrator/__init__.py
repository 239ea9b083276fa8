"""`orch`: one cluster out of a rack of odd GPU hosts that are reached only by SSH."""

__version__ = "0.1.0"

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orchestrator.api import Cluster, Job

__all__ = ["Cluster", "Job", "__version__"]


def __getattr__(name: str) -> Any:
    """Imports the API on first use: it loads all of `orch`, and the command's help has to be fast."""
    if name in ("Cluster", "Job"):
        from orchestrator import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
