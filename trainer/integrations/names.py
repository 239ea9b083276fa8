"""Which of the values that a script logs is its accuracy, which its loss, by the names that people give them. Pure.

found({"val_loss": 0.3, "val_acc": 0.9}, None, ACCURACY)      0.9
found({"val_loss": 0.3, "val/f1": 0.8}, "val/f1", ACCURACY)   0.8
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_EVALUATED = r"(?:val|valid|validation|eval|evaluation|test)[/_.]"
ACCURACY = re.compile(rf"{_EVALUATED}(?:accuracy|acc)")
LOSS = re.compile(rf"{_EVALUATED}loss")
"""Both of an evaluation: without its prefix, an accuracy may be that of a batch that was trained on."""
TRAINING_LOSS = re.compile(r"(?:(?:train|training)[/_.])?loss")


def found(values: Mapping[str, Any], name: str | None, pattern: re.Pattern[str]) -> Any:
    """The value of this name; without one, the first whose name is of the pattern. None where there is none."""
    if name is not None:
        return values.get(name)
    return next((value for key, value in values.items() if pattern.fullmatch(str(key).lower())), None)
