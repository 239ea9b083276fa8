"""How a figure is written for people, the same on every screen and page. Pure but for the clock and its zone.

A figure that is not known is a dash in place of a number. `units` has the plain formats that sentences use, too.
"""

from __future__ import annotations

import time
from datetime import datetime
from typing import TYPE_CHECKING

from orchestrator.units import format_age, format_figure, format_percent

if TYPE_CHECKING:
    from orchestrator.results.intervals import Interval

UNKNOWN = "-"


def clock(seconds: float) -> str:
    """`0:42`, `1:02:03`, `2d 01:02:03`."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    if minutes < 60:
        return f"{minutes}:{rest:02d}"
    days, hours = divmod(minutes // 60, 24)
    return (f"{days}d {hours:02d}" if days else str(hours)) + f":{minutes % 60:02d}:{rest:02d}"


def figure(value: float | None) -> str:
    """A speed or a time, its unit beside it."""
    return UNKNOWN if value is None else format_figure(value)


def percent(part: float | None, digits: int = 0) -> str:
    """part: 0..1."""
    return UNKNOWN if part is None else format_percent(part, digits)


def span(of: Interval | None) -> str:
    """`1,110 to 1,131`."""
    return UNKNOWN if of is None else f"{figure(of.low)} to {figure(of.high)}"


def age(iso: str | None) -> str | None:
    try:
        return format_age(time.time() - datetime.fromisoformat(iso).timestamp()) if iso else None
    except ValueError:
        return None


def local_second(wall: float | None) -> str:
    """Local time of seconds since 1970, to the second; a dash where it is not known."""
    return UNKNOWN if wall is None else f"{datetime.fromtimestamp(wall):%Y-%m-%d %H:%M:%S}"


def local_minute(iso: str | None) -> str | None:
    """Local time, to the minute."""
    try:
        return f"{datetime.fromisoformat(iso).astimezone():%Y-%m-%d %H:%M}" if iso else None
    except ValueError:
        return None
