"""Reads YAML written by people, with the line number of every key. Mappings, lists and scalars only.

Scalars follow the core schema of YAML 1.2.2 (chapter 10.3), but `no`, `on`, `22:22`, `1_000`, `0x1F`, `010` are text.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, cast

import yaml

from orchestrator.errors import InventoryError, Mistake

MAX_BYTES = 1 << 20
MAX_DEPTH = 32
MAX_VALUES = 10_000

KeyPath = tuple[str | int, ...]
"""Keys and list indices from the top."""

REFUSED: Final = object()
"""Placeholder for a refused and reported value; checks skip it."""

_INT = re.compile(r"[-+]?(0|[1-9][0-9]{0,17})")
_FLOAT = re.compile(r"[-+]?(?=.*[.eE])((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?")
_NULL = frozenset({"", "~", "null", "Null", "NULL"})
_BOOL = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}

_MERGE = "merge keys (<<) are not supported; shared values go under `defaults`"
_HINTS = {
    "'\\t'": "indent with spaces, not tabs",
    "mapping values are not allowed": "quote a value that holds `: `, or check the indentation",
    "cannot start any token": "put the value in quotes",
    "expected ',' or '}', but got '['": "put a value with brackets in quotes",
    "expected <block end>": "check the indentation",
    "undefined tag handle": "tags are not supported; write the plain value",
}


@dataclass(frozen=True)
class Document:
    file: str
    values: dict[str, Any]
    lines: Mapping[KeyPath, int]
    mistakes: tuple[Mistake, ...]
    """YAML mistakes, to report with the caller's own."""
    world_writable: bool

    def line(self, path: KeyPath) -> int:
        """The line of this key or item, else of its nearest parent; 0 for the whole document."""
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path, 0)


def read_yaml(path: Path, *, verbatim: Collection[str] = ()) -> Document:
    """verbatim: keys of mappings whose values stay text as written.

    Raises InventoryError unless the file is a readable regular file of at most 1 MiB UTF-8 with one mapping.
    """
    content, mode = _read_regular(path, "a YAML file")
    document = yaml_of(str(path), _decode(str(path), content), verbatim=verbatim)
    return replace(document, world_writable=bool(mode & stat.S_IWOTH))


def yaml_of(file: str, text: str, *, verbatim: Collection[str] = ()) -> Document:
    """file: its name in messages."""
    composer = _Composer(file, text, verbatim)
    values = composer.compose()
    return Document(file, values, composer.lines, tuple(composer.mistakes), False)


def read_text(path: Path, kind: str) -> str:
    """Another format, with the same limits. kind: like `a hostfile`."""
    return _decode(str(path), _read_regular(path, kind)[0])


def _refuse(file: str, line: int, message: str) -> InventoryError:
    return InventoryError([Mistake(file, line, message)])


def _read_regular(path: Path, kind: str) -> tuple[bytes, int]:
    """O_NONBLOCK, because opening a FIFO would wait for a writer."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY), "rb", buffering=0) as opened:
            mode = os.fstat(opened.fileno()).st_mode
            if not stat.S_ISREG(mode):
                raise _refuse(str(path), 0, f"is not a regular file; give the path of {kind}")
            content = _read_at_most(opened.fileno(), MAX_BYTES + 1)
    except IsADirectoryError as error:
        raise _refuse(str(path), 0, f"is a folder; give the path of {kind}") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise _refuse(str(path), 0, f"cannot be read ({reason}); give the path of {kind}") from error
    if len(content) > MAX_BYTES:
        raise _refuse(str(path), 0, "is larger than 1 MiB; this cannot be a file that a person wrote")
    return content, mode


def _read_at_most(handle: int, size: int) -> bytes:
    parts: list[bytes] = []
    while size > 0 and (part := os.read(handle, size)):
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _decode(file: str, content: bytes) -> str:
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        found = f"byte 0x{content[error.start]:02x}"
        raise _refuse(file, line, f"is not UTF-8 text ({found}); save the file as UTF-8") from error
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        raise _refuse(file, line, "holds a NUL byte; save the file as plain UTF-8 text")
    return text


class _Composer:
    """PyYAML's events carry no types, build no objects and do not recurse."""

    def __init__(self, file: str, text: str, verbatim: Collection[str]) -> None:
        self.file = file
        self.text = text
        self.verbatim = frozenset[str | int](verbatim)
        self.lines: dict[KeyPath, int] = {}
        self.mistakes: dict[Mistake, None] = {}  # an ordered set: a line may repeat a mistake many times
        self.values = 0

    def compose(self) -> dict[str, Any]:
        try:
            self.loader = yaml.SafeLoader(self.text)
            value = self._document()
        except yaml.reader.ReaderError as error:
            line = self.text.count("\n", 0, error.position) + 1
            raise self._stop(line, f"character U+{error.character:04X} is not allowed in YAML") from error
        except yaml.MarkedYAMLError as error:
            raise self._syntax_error(error) from error
        except (yaml.YAMLError, ValueError, OverflowError) as error:
            # PyYAML lets chr() and int() fail on escapes and version numbers out of range.
            line = self.loader.line + 1
            raise self._stop(line, "is not YAML: an escape or a %YAML line holds a number out of range") from error
        if value is REFUSED:
            raise InventoryError(tuple(self.mistakes))
        if not isinstance(value, dict):
            found = "a list" if isinstance(value, list) else "a single value"
            raise self._stop(1, f"must be a mapping (`key: value` lines), not {found}")
        return value

    def _document(self) -> Any:
        self._next()  # the stream's start
        if isinstance(self._next(), yaml.StreamEndEvent):
            raise self._stop(0, "is empty; it must hold `key: value` lines")
        value = self._value(self._next(), ())
        self._next()  # the document's end
        following = self._next()
        if not isinstance(following, yaml.StreamEndEvent):
            self._mistake(following, "a second document begins here; a file holds one, so remove the `---`")
        return value

    def _value(self, event: yaml.Event, path: KeyPath) -> Any:
        self.values += 1
        if self.values > MAX_VALUES:
            raise self._stop(_line(event), f"holds more than {MAX_VALUES} values")
        if len(path) > MAX_DEPTH:
            raise self._stop(_line(event), f"is nested more than {MAX_DEPTH} levels deep")
        if isinstance(event, yaml.AliasEvent):
            self._mistake(event, f"aliases are not supported (*{event.anchor}); write the value out, or use `defaults`")
            return REFUSED
        if isinstance(event, yaml.MappingStartEvent):
            value: Any = self._mapping(path)
        elif isinstance(event, yaml.SequenceStartEvent):
            value = self._sequence(path)
        else:
            value = self._scalar(cast(yaml.ScalarEvent, event), path)
        return value if self._is_plain(cast(yaml.ScalarEvent, event)) else REFUSED

    def _mapping(self, path: KeyPath) -> dict[str, Any]:
        mapping: dict[str, Any] = {}
        while not isinstance(event := self._next(), yaml.MappingEndEvent):
            key = self._key(event, path)
            where = (*path, key or "?")
            if key is None:
                self._skip(self._next(), where)
            elif key in mapping:
                message = f"key {key[:60]!r} is given twice, on lines {self.lines[where]} and {_line(event)}; keep one"
                self._mistake(event, message)
                self._skip(self._next(), where)
            else:
                self.lines[where] = _line(event)
                mapping[key] = self._value(self._next(), where)
        return mapping

    def _key(self, event: yaml.Event, path: KeyPath) -> str | None:
        """None if it was refused."""
        if not isinstance(event, yaml.ScalarEvent):
            self._mistake(event, "a key must be one word, not a list, a mapping or an alias")
            self._skip(event, (*path, "?"))
            return None
        if not (self._is_plain(event) and self._is_text(event)):
            return None
        if not event.value:
            self._mistake(event, "a key is missing before the colon")
        elif event.value == "<<" and not event.style:
            self._mistake(event, _MERGE)
        else:
            return str(event.value)
        return None

    def _skip(self, event: yaml.Event, path: KeyPath) -> None:
        known = self.lines
        self.lines = {}
        self._value(event, path)
        self.lines = known

    def _sequence(self, path: KeyPath) -> list[Any]:
        items: list[Any] = []
        while not isinstance(event := self._next(), yaml.SequenceEndEvent):
            where = (*path, len(items))
            self.lines[where] = _line(event)
            items.append(self._value(event, where))
        return items

    def _next(self) -> yaml.Event:
        return cast(yaml.Event, self.loader.get_event())  # type: ignore[no-untyped-call]

    def _scalar(self, event: yaml.ScalarEvent, path: KeyPath) -> Any:
        if not self._is_text(event):
            return REFUSED
        text: str = event.value
        above = (
            path[-3:-1] if path and isinstance(path[-1], int) else path[-2:-1]
        )  # of an item, also its list's mapping
        as_written = event.style or (not self.verbatim.isdisjoint(above) and text not in _NULL)
        return text if as_written else resolve_scalar(text)

    def _is_text(self, event: yaml.ScalarEvent) -> bool:
        if re.search("[\0\ud800-\udfff]", event.value):
            self._mistake(event, "an escape stands for NUL or half a character (\\0, \\ud800 to \\udfff)")
            return False
        return True

    def _is_plain(self, event: yaml.ScalarEvent) -> bool:
        if event.tag is not None:
            tag = event.tag.replace("tag:yaml.org,2002:", "!!")[:60]
            self._mistake(event, f"tags are not supported ({tag!r}); write the plain value")
        elif event.anchor is not None:
            self._mistake(event, f"anchors are not supported (&{event.anchor[:60]}); shared values go under `defaults`")
        return event.tag is None

    def _mistake(self, event: yaml.Event, message: str) -> None:
        self.mistakes[Mistake(self.file, _line(event), message)] = None

    def _stop(self, line: int, message: str) -> InventoryError:
        return InventoryError([*self.mistakes, Mistake(self.file, line, message)])

    def _syntax_error(self, error: yaml.MarkedYAMLError) -> InventoryError:
        mark = error.problem_mark or error.context_mark
        line, column = (mark.line + 1, mark.column + 1) if mark else (0, 0)
        problem = str(error.problem or error.context)
        hint = next((f"; {hint}" for part, hint in _HINTS.items() if part in problem), "")
        return self._stop(line, f"is not YAML, column {column}: {problem}{hint}")


def _line(event: yaml.Event) -> int:
    return event.start_mark.line + 1 if event.start_mark else 0


def resolve_scalar(text: str) -> Any:
    if text in _NULL:
        return None
    if text in _BOOL:
        return _BOOL[text]
    if _INT.fullmatch(text):
        return int(text)
    return float(text) if _FLOAT.fullmatch(text) else text
