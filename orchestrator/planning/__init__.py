"""Turns a job's specification into a launch plan: settings, shipped files, environment and shares as one value."""

from typing import TYPE_CHECKING

from trainer.shared.doors import door

if not TYPE_CHECKING:  # a type checker looks for names in the modules themselves
    __getattr__ = door(__name__, __path__[0])
