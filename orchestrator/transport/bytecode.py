"""The bytecode of a file as Python keeps it beside it, so that hosts need not compile what they are sent.

    bytecode(Path("orchestrator/remote/control.py"))      # the content of a .pyc that belongs to no date

It begins with the number of its format: a Python of another version sees that it is not its own, and compiles.
"""

from __future__ import annotations

from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

_HEADER_BYTES = 16
_UNCHECKED = (1).to_bytes(4, "little") + bytes(8)
"""In place of the text's date and size: the bytecode is taken as it is (PEP 552)."""


def bytecode(file: Path) -> bytes:
    """b"" where there is none, and this Python was told to write none (PYTHONDONTWRITEBYTECODE)."""
    keeper = _Keeper(file.stem, str(file))
    keeper.get_code(file.stem)
    kept = keeper.bytecode
    return kept[:4] + _UNCHECKED + kept[_HEADER_BYTES:] if kept else b""


class _Keeper(SourceFileLoader):
    """Keeps the bytecode that is up to date: what it has read, or what it has made."""

    bytecode = b""

    def get_data(self, path: str) -> bytes:
        data = super().get_data(path)
        self.bytecode = b"" if path == self.path else data
        return data

    def set_data(self, path: str, data: Any, **more: Any) -> None:
        self.bytecode = bytes(data)
        super().set_data(path, data, **more)
