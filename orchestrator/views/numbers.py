"""How a figure is written for people, the same on every screen and page. Pure.

A figure that is not known is a dash in place of a number. `units` has the plain formats that sentences use, too.
"""

from __future__ import annotations

import time
from datetime import datetime

from orchestrator.units import format_age


def clock(seconds: float) -> str:
    """`0:42`, `1:02:03`, `2d 01:02:03`."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    if minutes < 60:
        return f"{minutes}:{rest:02d}"
    days, hours = divmod(minutes // 60, 24)
    return (f"{days}d {hours:02d}" if days else str(hours)) + f":{minutes % 60:02d}:{rest:02d}"


def percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}".replace("%", " %")


def short(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if 100 <= abs(value) < 1e7 else f"{value:.3g}"


def figure(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}" if value < 10 else f"{value:.1f}"


def age(iso: str | None) -> str | None:
    try:
        return format_age(time.time() - datetime.fromisoformat(iso).timestamp()) if iso else None
    except ValueError:
        return None


def local_minute(iso: str | None) -> str | None:
    """Local time, to the minute."""
    try:
        return f"{datetime.fromisoformat(iso).astimezone():%Y-%m-%d %H:%M}" if iso else None
    except ValueError:
        return None
