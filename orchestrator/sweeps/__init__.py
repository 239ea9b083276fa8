"""Sweeps: one program with many settings. Their values, the packing of their jobs, and what is remembered of them."""

from typing import TYPE_CHECKING

from trainer.shared.doors import door

JOB_FIELDS = (
    *(
        "exp",
        "settings",
        "folder",
        "batch",
        "no_metrics",
        "env",
        "env_files",
        "requirements",
        "nodes",
        "share",
        "grace_s",
    ),
    *("time_limit_s", "name", "note", "cluster"),
)
"""Fields of JobSpec with an option in `orch sweep`; its file also has the program's."""

if not TYPE_CHECKING:  # a type checker looks for names in the modules themselves
    __getattr__ = door(__name__, __path__[0])
