"""Pictures of a run: each host's speed in the cluster beside its speed alone, or the network's speed; lines over time.
Pure but for the files that it writes.

Takes a `Summary`, writes PNG or SVG. matplotlib is imported only when a picture is drawn.

    draw_throughput(summary, run.chart)
"""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from orchestrator.files import write_atomic
from orchestrator.results.collectives import Collectives
from orchestrator.results.summary import NodeSummary, Summary
from orchestrator.units import counted, format_bytes, format_figure

# Okabe and Ito's palette, distinct for every common form of colour vision; the hatch distinguishes them on paper.
_SERIES = (
    ("samples_per_s", "in the cluster", "#0072B2", ""),
    ("own_samples_per_s", "own speed (estimate of alone)", "#E69F00", "//"),
    ("solo_samples_per_s", "measured alone", "#009E73", ".."),
)
_INK = "#757d87"
"""A grey that can be read on a white page and on a dark one: the picture itself is transparent."""
_LINES = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#999999", "#8C564B", "#B8A800")
_MARKERS = ("o", "s", "^", "v", "D", "P", "X", "*", "<")


Series = Mapping[str, Sequence[tuple[float, float]]]
"""Points of each line, by its name; a line that is alone may have none."""


def draw_throughput(summary: Summary, path: Path) -> bool:
    """Writes the chart and returns True; where there is no speed to show, removes an older chart, returns False."""
    if not has_speeds(summary):
        path.unlink(missing_ok=True)
        return False
    save(partial(throughput_figure, summary), path)
    return True


def has_speeds(summary: Summary) -> bool:
    measured = (summary.collectives or Collectives()).operations
    return bool(measured) or any(node.samples_per_s for node in summary.nodes)


def save(draw: Callable[[], Any], path: Path) -> None:
    """Whole, in the form that the path's suffix names; the same figures give the same bytes."""
    content = io.BytesIO()
    form = path.suffix.removeprefix(".")
    with warnings.catch_warnings():
        # A host may be named in a script that the font has no glyphs for: boxes are drawn, and that is enough.
        warnings.filterwarnings("ignore", message="Glyph .* missing", category=UserWarning)
        with _plain_settings():
            without_date = {"Date": None} if form == "svg" else None
            draw().savefig(content, format=form, dpi=144, transparent=True, metadata=without_date)
    write_atomic(path, content.getvalue())


def throughput_figure(summary: Summary) -> Any:
    """Each host's speed in the cluster beside its speed alone; of a run that measured the network, that."""
    return _figure_of_network(summary) if summary.collectives else _figure(summary)


@contextlib.contextmanager
def _plain_settings() -> Iterator[None]:
    """matplotlib obeys a `matplotlibrc` of whatever folder one stands in, which may be anybody's; we do not."""
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update({"text.color": _INK, "xtick.color": _INK, "ytick.color": _INK})
        matplotlib.rcParams.update({"axes.labelcolor": _INK, "axes.edgecolor": _INK, "svg.hashsalt": "orch"})
        yield


def _empty(height_inch: float, layout: Any = "constrained") -> tuple[Any, Any]:
    """A figure with nothing on it, and its axes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.6, height_inch), layout=layout)
    FigureCanvasAgg(figure)
    return figure, figure.add_subplot()


def _plain(axes: Any, grid: str = "both") -> None:
    """No frame, and thin lines behind what is drawn. grid: the axis whose values they mark."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis=grid, color=_INK, alpha=0.25, linewidth=0.8)
    axes.set_axisbelow(True)


def _figure(summary: Summary) -> Any:
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    series = [item for item in _SERIES if any(getattr(node, item[0]) for node in summary.nodes)]
    height_inch = 1.7 + 0.32 * (len(series) + 0.8) * len(summary.nodes)
    figure, axes = _empty(min(height_inch, 60), ConstrainedLayoutEngine(w_pad=0.15, h_pad=0.1))
    bar_height = 0.8 / len(series)
    for index, (name, label, colour, hatch) in enumerate(series):
        places = [row + (index - (len(series) - 1) / 2) * bar_height for row in range(len(summary.nodes))]
        values = [getattr(node, name) or 0.0 for node in summary.nodes]
        bars = axes.barh(
            places, values, bar_height * 0.92, label=label, color=colour, hatch=hatch, edgecolor="white", linewidth=0
        )
        axes.bar_label(
            bars, [format_figure(value) if value else "" for value in values], padding=4, color=_INK, fontsize=9
        )
    axes.set_yticks(range(len(summary.nodes)), [_label(node) for node in summary.nodes], parse_math=False)
    axes.invert_yaxis()
    axes.set_xlabel("samples per second")
    axes.set_title(_title(summary), loc="left", fontsize=11, parse_math=False)
    axes.margins(x=0.14)
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    _plain(axes, "x")
    figure.legend(loc="outside lower center", ncols=len(series), frameon=False, fontsize=9)
    return figure


def _figure_of_network(summary: Summary) -> Any:
    """Bus bandwidth over size, a line an operation; the declared bandwidth is as high as a line can come."""
    found = summary.collectives or Collectives()
    figure, axes = _empty(5.2)
    for index, operation in enumerate(found.operations):
        times = [each for each in found.times if each.operation == operation.operation and each.busbw_gbps]
        axes.plot(
            [each.bytes for each in times],
            [each.busbw_gbps or 0.0 for each in times],
            label=operation.operation,
            color=_LINES[index % len(_LINES)],
            marker=_MARKERS[index % len(_MARKERS)],
            markersize=5,
            linewidth=1.4,
        )
    if found.declared_gbps:
        axes.axhline(found.declared_gbps, color=_INK, linestyle="--", linewidth=1.2, label="declared")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    sizes = sorted({each.bytes for each in found.times})[:: max(1, len(found.times) // 100)]
    axes.set_xticks(sizes, [format_bytes(size) for size in sizes], rotation=30, ha="right", fontsize=9)
    axes.minorticks_off()
    axes.set_xlabel("bytes of the whole array")
    axes.set_ylabel("bus bandwidth, Gbit/s")
    axes.set_title(f"{_short(summary.experiment)} · {counted(summary.world_size, 'rank')}", loc="left", fontsize=11)
    _plain(axes)
    figure.legend(loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    return figure


def lines_figure(summary: Summary, series: Series, along: str, words: str) -> Any:
    """along, words: what stands on the x and on the y axis."""
    figure, axes = _empty(4.2)
    for index, (name, points) in enumerate(series.items()):
        xs, ys = zip(*points, strict=True)
        marker = _MARKERS[index % len(_MARKERS)] if len(points) <= 30 else None
        colour = _LINES[index % len(_LINES)]
        axes.plot(xs, ys, label=_short(name), color=colour, marker=marker, markersize=5, linewidth=1.4)
    axes.set_xlabel(along)
    axes.set_ylabel(words)
    axes.set_title(_title(summary), loc="left", fontsize=11, parse_math=False)
    _plain(axes)
    if len(series) > 1:
        figure.legend(loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    return figure


def _label(node: NodeSummary) -> str:
    count = f"{node.ranks} × " if node.ranks > 1 else ""
    return f"{_short(node.name)}\n{count}{_short(node.gpu)}"


def _short(text: str) -> str:
    return text if len(text) <= 32 else text[:31] + "…"


def _title(summary: Summary) -> str:
    settings = summary.recorded
    named = {"strategy": settings.strategy, "fidelity": settings.fidelity, "batch": settings.batch}
    known = [f"{name} {value}" for name, value in named.items() if value is not None]
    paced = ["paced, not real GPUs"] if summary.paced else []
    return " · ".join([_short(summary.experiment), *(_short(text) for text in known), *paced])
