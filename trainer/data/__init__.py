"""Training data: from a name to batches on the device."""

from typing import TYPE_CHECKING

import trainer.compute  # noqa: F401 - before torchvision, for what it keeps out
from trainer.shared.doors import door

if not TYPE_CHECKING:  # a type checker looks for names in the modules themselves
    __getattr__ = door(__name__, __path__[0])
