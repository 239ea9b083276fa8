"""What all our pages have alike: one HTML file with its style within itself, no script and no reference to anywhere.
Pure but for its own templates.

    environment(how=_how).get_template("report.html.j2").render(run=summary)

Names and log lines of hosts are untrusted: Jinja2 escapes every value, and each page's own policy lets nothing be
fetched or run.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from orchestrator.text import clean_lines, one_line
from orchestrator.units import format_bandwidth, format_bytes, format_duration
from orchestrator.views.charts import MARKED, PALETTE, svg
from orchestrator.views.figures import figure, percent

NOTHING = "–"


def environment(**filters: Callable[..., Any]) -> Environment:
    """filters: a page's own, beside those of all pages."""
    made = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=lambda value: clean_lines(value) if type(value) is str else value,  # a Markup is ours
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {
        "figure": or_nothing(figure),
        "percent": or_nothing(percent),
        "size": or_nothing(format_bytes),
        "bandwidth": or_nothing(format_bandwidth),
        "duration": or_nothing(format_duration),
        "known": or_nothing(str),
        "moment": _moment,
        "svg": svg,
        "line": lambda value: one_line(str(value)),
        **filters,
    }
    made.globals |= {"palette": PALETTE, "marked": MARKED}
    return made


def or_nothing(show: Callable[..., str]) -> Callable[..., str]:
    return lambda value, *more: NOTHING if value is None else show(value, *more)


def _moment(text: str | None) -> str:
    return NOTHING if not text else one_line(text, 40).replace("T", " ").replace("Z", " UTC")
