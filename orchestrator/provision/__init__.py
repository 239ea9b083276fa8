"""Prepares hosts on request, before any job: data sets (`data push`) and Python environments (`setup`)."""

from typing import TYPE_CHECKING

from trainer.shared.doors import door

if not TYPE_CHECKING:  # a type checker looks for names in the modules themselves
    __getattr__ = door(__name__, __path__[0])
