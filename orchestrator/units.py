"""Formats for people: quantities (`2.5Gbps`, `16GiB`, `3m07s`) and untrusted text, cleaned for terminals. Pure.
Bandwidth is in decimal bits per second."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import date, datetime, time, timedelta

# Bounded, so that no number of a file becomes infinity.
_NUMBER = r"\s*([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*"
# A capital B would mean bytes: refused, not guessed. GbE is an Ethernet speed.
_BANDWIDTH = re.compile(_NUMBER + r"(?:([kKmMgGtT]?)(?:bps|bit/s|bit|b/s)|([kKmMgGtT])(?:b|bE)?)\s*")
_BYTES = re.compile(_NUMBER + r"(?:([kMGT])(i?))?B\s*", re.IGNORECASE)
_DURATION = re.compile(_NUMBER + r"([smh])\s*")
_CLOCK = re.compile(r"\d\d:\d\d(:\d\d)?")
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}
_POWER = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def parse_bandwidth(text: str) -> float:
    """Bits per second of `2.5Gbps`, `100 Mbit/s`, `10G`, `2.5GbE`. Raises ValueError, as all parsers here."""
    match = _BANDWIDTH.fullmatch(text)
    if not match or float(match[1]) <= 0:
        raise ValueError(f"{text!r} is not a bandwidth; write it like 2.5Gbps or 100Mbps")
    return float(match[1]) * 1000.0 ** _POWER[(match[2] or match[3] or "").lower()]


def parse_bytes(text: str) -> int:
    """`16GiB`, `100 MB`, `512B`."""
    match = _BYTES.fullmatch(text)
    if not match:
        raise ValueError(f"{text!r} is not a size; write it like 16GiB or 100MB")
    base = 1024 if match[3] else 1000
    unit: int = base ** _POWER[(match[2] or "").lower()]
    return round(float(match[1]) * unit)


def parse_duration(text: str) -> float:
    """Seconds of `90s`, `30m`, `12h`."""

    match = _DURATION.fullmatch(text)
    if not match or float(match[1]) <= 0:
        raise ValueError(f"{text!r} is not a time; write it like 90s, 30m or 12h")
    return float(match[1]) * _SECONDS[match[2]]


def parse_moment(text: str, now: float) -> float:
    """Seconds since 1970 of `30m` ago, `14:05`, `2026-11-25 14:05:30`, by default in local time.

    >>> parse_moment("30m", 7200.0)
    5400.0
    >>> late = datetime(2026, 11, 25, 0, 0).timestamp()
    >>> late - parse_moment("23:59:30", late)                   # yesterday's
    30.0
    """
    if _DURATION.fullmatch(text):
        return now - parse_duration(text)
    try:
        if _CLOCK.fullmatch(text):
            at, today = time.fromisoformat(text), date.fromtimestamp(now)
            moment = datetime.combine(today, at).timestamp()
            return moment if moment <= now else datetime.combine(today - timedelta(days=1), at).timestamp()
        moment = datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError):
        raise ValueError(f"{text!r} is no time; write it like 30m, 14:05 or 2026-11-25T14:05") from None
    if moment > now:
        raise ValueError(f"{text!r} is still to come")
    return moment


def format_bandwidth(bits_per_s: float) -> str:
    """`2.5Gbps`."""
    for unit, size in (("Tbps", 1e12), ("Gbps", 1e9), ("Mbps", 1e6), ("kbps", 1e3)):
        if bits_per_s >= size:
            return f"{bits_per_s / size:.4g}{unit}"
    return f"{bits_per_s:.4g}bps"


def format_bytes(count: float) -> str:
    """`16.0GiB`."""
    for unit, power in (("TiB", 4), ("GiB", 3), ("MiB", 2), ("KiB", 1)):
        if count >= 1024**power:
            return f"{count / 1024**power:.1f}{unit}"
    return f"{count:.0f}B"


def format_figure(value: float) -> str:
    """At least three digits: `0.012`, `3.21`, `42.1`, `960`, `12,345`."""
    size = abs(value)
    if size >= 1e7:
        return f"{value:.3g}"
    if size >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if size >= 10 else f"{value:.2f}" if size >= 1 else f"{value:.3g}"


def format_percent(part: float, digits: int = 0) -> str:
    """`43 %` of 0.43."""
    return f"{100 * part:.{digits}f} %"


def counted(number: int, thing: str) -> str:
    """`1 rank`, `2 ranks`."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def format_duration(seconds: float) -> str:
    """`4.2s`, `3m07s`, `2h05m`."""
    if seconds < 59.95:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}s"
    return f"{minutes // 60}h{minutes % 60:02d}m"


def format_age(seconds: float) -> str:
    """`just now`, `5 min ago`, `2 h ago`, `3 days ago`."""
    for unit_s, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if (count := int(seconds // unit_s)) >= 1:
            return f"{count} {'day' if (count, unit) == (1, 'days') else unit} ago"
    return "just now"


# Untrusted text from hosts, cleaned for terminals and pages. Pure.

# ECMA-48: CSI, OSC, DCS, APC, PM and SOS.
_ESCAPES = re.compile(r"\x1b[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b\[[0-?]*[ -/]*[@-~]?|\x1b[ -/]*[0-~]?")
# C0 except the tab, DEL and C1, line and paragraph separators, lone surrogates, and Unicode's format characters
# (category Cf): soft hyphens, joiners, bidirectional controls, tags. A joined emoji falls into its parts.
_CONTROLS = re.compile(
    "[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff"
    "\xad\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2\u180e\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufeff"
    "\ufff9-\ufffb\U000110bd\U000110cd\U00013430-\U0001343f\U0001bca0-\U0001bca3\U0001d173-\U0001d17a"
    "\U000e0001\U000e0020-\U000e007f]"
)
NOTHING = "(its message holds no printable character)"


def clean(text: str) -> str:
    """Keeps tabs."""
    return _CONTROLS.sub("", _ESCAPES.sub("", text))


def clean_lines(text: object) -> str:
    """Keeps line breaks."""
    return "\n".join(clean(line) for line in str(text).split("\n"))


def one_line(text: object, limit: int = 300) -> str:
    """At most `limit` printable characters, cut between words unless the last one is long."""
    if isinstance(text, str) and len(text) <= limit and text.isascii() and text.isprintable() and "  " not in text:
        return text.strip()  # the usual case, thousands of times for a list of jobs
    spaced = re.sub(r"\s+", " ", str(text)[: 4 * limit])
    line = "".join(char for char in clean(spaced) if char.isprintable()).strip()
    if len(line) <= limit:
        return line
    words = line[:limit].rpartition(" ")[0]
    return (words if len(words) > 2 * limit // 3 else line[: limit - 1]) + "…"


def some(names: Sequence[str], count: int) -> str:
    """`a, b and 3 more`."""
    more = f" and {len(names) - count} more" if len(names) > count else ""
    return ", ".join(names[:count]) + more


def message(text: object, limit: int = 300) -> str:
    """A host's error message, never empty."""
    return one_line(text, limit) or NOTHING


def place(host: str, port: int) -> str:
    """`192.168.1.41:22`, `[fd00::1]:22`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def fits(pattern: str, name: str) -> bool:
    """pattern: of OpenSSH, with `*` and `?`."""
    if not {"*", "?"} & set(pattern):
        return pattern == name
    # fnmatch would read the brackets of [host]:port as a set of characters.
    return re.fullmatch(re.escape(pattern).replace(r"\*", ".*").replace(r"\?", "."), name) is not None


_NUMBERED = re.compile(r"(.*?)([0-9]+)")


def name_ranges(names: Sequence[str]) -> list[str]:
    """Three or more names in a row as a range, as `--nodes` takes it: `gpu[01-50]`."""
    rows = list[list[str]]()
    for name in names:
        if rows and name == _next_name(rows[-1][-1]):
            rows[-1].append(name)
        else:
            rows.append([name])
    parts = list[str]()
    for row in rows:
        parts += [_range_of(row[0], row[-1])] if len(row) > 2 else row
    return parts


def _range_of(first: str, last: str) -> str:
    begin, end = _NUMBERED.fullmatch(first), _NUMBERED.fullmatch(last)
    return f"{begin[1]}[{begin[2]}-{end[2]}]" if begin and end else f"{first}, {last}"


def _next_name(name: str) -> str | None:
    """The next numbered name, with as many digits."""
    numbered = _NUMBERED.fullmatch(name)
    return numbered and f"{numbered[1]}{int(numbered[2]) + 1:0{len(numbered[2])}d}"


def by_number(name: str) -> tuple[str, int, str]:
    """Sorts h2 before h10."""
    numbered = _NUMBERED.fullmatch(name)
    return (numbered[1], int(numbered[2]), name) if numbered else (name, -1, name)
