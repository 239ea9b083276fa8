"""One running job over all its hosts: started, followed, cancelled, resumed, collected."""

from typing import TYPE_CHECKING

from trainer.shared.doors import door

if not TYPE_CHECKING:  # a type checker looks for names in the modules themselves
    __getattr__ = door(__name__, __path__[0])
