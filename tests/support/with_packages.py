"""A person in a lab whose hosts see every package that this Python sees.

with person_with_packages(INVENTORY, tmp_path_factory) as person:
    person.types("run", ...)
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import pytest

from tests.support.lab import lab
from tests.support.terminal import Person


@contextlib.contextmanager
def person_with_packages(inventory: str, folders: pytest.TempPathFactory) -> Iterator[Person]:
    """Once `orch up` is done. inventory: its text, with `{python}` for this Python."""
    installed = {path for path in sys.path if path.endswith("site-packages") and not path.startswith(sys.prefix)}
    with lab(inventory.format(python=sys.executable), binds=[sys.prefix, *sorted(installed)]) as hosts:
        someone = Person(hosts, folders.mktemp("home"), folders.mktemp("work"))
        someone.types("up", str(hosts.inventory))
        yield someone
