"""Words from a host, made fit for a person's terminal and page. Pure.

What a host prints may be anything: escape sequences (ECMA-48: CSI, and the OSC, DCS, APC, PM and SOS strings), other
control characters, characters that show nothing or turn around the reading direction (Unicode's format characters).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_ESCAPES = re.compile(r"\x1b[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b\[[0-?]*[ -/]*[@-~]?|\x1b[ -/]*[0-~]?")
# C0 but for the tab, DEL and C1, line and paragraph separators, lone surrogates, and all that Unicode calls a format
# character (category Cf): soft hyphens, joiners, bidirectional controls, tags. A joined emoji falls into its parts.
_CONTROLS = re.compile(
    "[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff"
    "\xad\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2\u180e\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufeff"
    "\ufff9-\ufffb\U000110bd\U000110cd\U00013430-\U0001343f\U0001bca0-\U0001bca3\U0001d173-\U0001d17a"
    "\U000e0001\U000e0020-\U000e007f]"
)
NOTHING = "(its message holds no printable character)"


def clean(text: str) -> str:
    """Without escape sequences, control characters (a tab stays) and format characters."""
    return _CONTROLS.sub("", _ESCAPES.sub("", text))


def clean_lines(text: object) -> str:
    """The same for text whose line breaks are meant."""
    return "\n".join(clean(line) for line in str(text).split("\n"))


def one_line(text: object, limit: int = 300) -> str:
    """All of it on one printable line of at most `limit` characters, cleaned."""
    if isinstance(text, str) and len(text) <= limit and text.isascii() and text.isprintable() and "  " not in text:
        return text.strip()  # the usual case: a list of jobs has thousands of them
    spaced = re.sub(r"\s+", " ", str(text)[: 4 * limit])
    line = "".join(char for char in clean(spaced) if char.isprintable()).strip()
    return line if len(line) <= limit else line[: limit - 1] + "…"


def some(names: Sequence[str], count: int) -> str:
    """`a, b and 3 more`."""
    more = f" and {len(names) - count} more" if len(names) > count else ""
    return ", ".join(names[:count]) + more


def message(text: object, limit: int = 300) -> str:
    """What a host says in place of an answer: as `one_line`, and never empty."""
    return one_line(text, limit) or NOTHING


def place(host: str, port: int) -> str:
    """`192.168.1.41:22`, `[fd00::1]:22`: without the brackets the port would read as a part of an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def fits(pattern: str, name: str) -> bool:
    """Whether a pattern as OpenSSH has them, with `*` and `?` alone, is that of `name`."""
    if not {"*", "?"} & set(pattern):
        return pattern == name
    # fnmatch would read the brackets of [host]:port as a set of characters.
    return re.fullmatch(re.escape(pattern).replace(r"\*", ".*").replace(r"\?", "."), name) is not None
