"""How a job starts, and is retried, on a cluster: host choice, plan, carried-over files."""

from typing import TYPE_CHECKING

from trainer.shared.doors import door

if not TYPE_CHECKING:  # a type checker looks for names in the modules themselves
    __getattr__ = door(__name__, __path__[0])
