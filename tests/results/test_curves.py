"""How a run learned: what is kept of it, and how it is drawn on the page and shown on the terminal."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from orchestrator.results import POINTS, Curves, Epoch, EvaluationPoint, LossPoint, Moment, SpeedCourse, Summary, placed
from orchestrator.results.analyse import analyse
from orchestrator.views import (
    INK,
    PALETTE,
    ChartLine,
    LineChart,
    by_clock,
    host_tables,
    line_figure,
    render_report,
    svg,
)
from tests.support.run_folders import Host, end, start, step, write_run


def evaluated(number: int, accuracy: Any, **fields: Any) -> dict[str, Any]:
    return {"event": "eval", "epoch": 0, "step": number, "accuracy": accuracy, "loss": 0.3, **fields}


def finished(epoch: int, seconds: Any) -> dict[str, Any]:
    return {"event": "epoch", "epoch": epoch, "epoch_s": seconds}


def of_run(tmp_path: Path, *lines: Any, other: Any = (), **options: Any) -> Summary:
    """Two ranks: what the first reports, and the second; without it, the same."""
    metrics = {0: [start(), *lines, end()], 1: [start(), *(other or lines), end()]}
    return analyse(write_run(tmp_path / "run", [Host("a", **options), Host("b", **options)], metrics))


def test_the_loss_is_the_mean_over_all_ranks_samples(tmp_path: Path) -> None:
    own = [step(number, 10, 1, 1, 1, 1, loss=10.0 * number) for number in range(3)]
    other = [step(number, 30, 1, 1, 1, 1, loss=90.0 * number) for number in range(3)]
    assert of_run(tmp_path, *own, other=other).curves.loss == (
        LossPoint(step=0, loss=0), LossPoint(step=1, loss=2.5), LossPoint(step=2, loss=5.0),
    )  # fmt: skip


def test_a_step_whose_loss_one_rank_did_not_report_is_left_out(tmp_path: Path) -> None:
    lines = [step(number, 10, 1, 1, 1, 1) for number in range(4)]
    other = [*lines[:1], {**lines[1], "loss": None}, lines[2]]
    assert [point.step for point in of_run(tmp_path, *lines, other=other).curves.loss] == [0, 2]


def test_a_loss_that_one_rank_tells_after_some_steps_is_that_of_those(tmp_path: Path) -> None:
    untold = [{k: v for k, v in step(number, 10, 1, 1, 1, 1).items() if k != "loss"} for number in range(8)]
    own = [{**each, "loss": 10.0 * each["step"]} if each["step"] in (2, 6) else each for each in untold]
    summary = of_run(tmp_path, *own, other=untold)
    assert summary.curves.loss == (LossPoint(step=2, loss=2), LossPoint(step=6, loss=6))
    assert (summary.curves.updates_a_point, summary.loss) == (4, 4)  # of the last 20 steps
    assert of_run(tmp_path / "null", *own[:6], {**untold[6], "loss": None}, untold[7], other=untold).loss is None


def test_an_epoch_without_a_loss_of_its_own_has_that_of_its_steps(tmp_path: Path) -> None:
    steps = [step(number, 10, 1, 1, 1, 1, loss=10.0 * number, epoch=number // 4) for number in range(10)]
    summary = of_run(tmp_path, *steps[:4], finished(0, 1.0), *steps[4:8], finished(1, 1.0), *steps[8:])
    assert summary.loss == pytest.approx(5.5)  # of updates 4 to 7


def test_an_evaluation_may_have_a_loss_alone(tmp_path: Path) -> None:
    curves = of_run(tmp_path, step(0, 10, 1, 1, 1, 1), evaluated(0, None), evaluated(1, None, loss=None)).curves
    assert curves.evaluations == (EvaluationPoint(step=0, loss=0.3),)
    assert by_clock(Curves(course=(Moment(step=0, seconds=1, samples=1),) * 2, evaluations=curves.evaluations * 2))


def test_many_updates_are_few_points_of_their_means(tmp_path: Path) -> None:
    steps = [step(number, 10, 1, 1, 1, 1, loss=10.0 * number) for number in range(5 * POINTS)]
    curves = of_run(tmp_path, *steps).curves
    assert (len(curves.loss), curves.updates_a_point) == (POINTS, 5)
    assert (curves.loss[0], curves.loss[-1]) == (LossPoint(step=4, loss=2), LossPoint(step=999, loss=997))


def test_evaluations_and_epochs_are_kept_once_each_and_what_cannot_be_is_left_out(tmp_path: Path) -> None:
    odd = [evaluated(3, 1.5), evaluated(3, "0.9"), evaluated(-1, 0.5), evaluated(0.5, 0.5), finished(0, -1)]
    again = [evaluated(9, 0.7), finished(0, 8.0), evaluated(9, 0.8, loss=None)]
    lines = [step(0, 10, 1, 1, 1, 1), finished(0, 2.5), *odd, evaluated(4, 0.6), *again, finished(1, 9.0)]
    curves = of_run(tmp_path, *lines).curves
    assert curves.evaluations == (
        EvaluationPoint(step=4, accuracy=0.6, loss=0.3),
        EvaluationPoint(step=9, accuracy=0.8),
    )
    assert curves.epochs == (Epoch(epoch=0, seconds=8.0), Epoch(epoch=1, seconds=9.0))


def test_of_many_evaluations_the_last_is_kept(tmp_path: Path) -> None:
    lines = [evaluated(number, number / 1000) for number in range(3 * POINTS + 2)]
    kept = of_run(tmp_path, step(0, 10, 1, 1, 1, 1), *lines).curves.evaluations
    assert len(kept) <= POINTS
    assert kept[-1].step == 3 * POINTS + 1


def test_a_paced_run_learned_nothing(tmp_path: Path) -> None:
    lines = [*(step(number, 10, 1, 1, 1, 1) for number in range(5)), evaluated(4, 0.5)]
    assert of_run(tmp_path, *lines, paced=True).curves == Curves()


# ---- drawn ---------------------------------------------------------------------------------------------------------


DRAWING = '<svg viewBox="0 0 420'


def learned(tmp_path: Path) -> Summary:
    steps = [step(number, 10, 1, 1, 1, 1, loss=10 * (2.3 - number / 10)) for number in range(20)]
    classes = {"per_class": [0.9, 0.95]}
    ends = [finished(0, 11.0), evaluated(9, 0.97, **classes), finished(1, 13.0), evaluated(19, 0.99, **classes)]
    return of_run(tmp_path, *steps, *ends).model_copy(update={"speed_course": SpeedCourse()})  # the plots of learning


def test_the_report_draws_loss_and_accuracy_in_the_pages_colours(tmp_path: Path) -> None:
    page = render_report(learned(tmp_path))
    assert page.count(DRAWING) == 8  # and the step, and the speeds
    for over in ("updates", "seconds", "samples"):
        assert f'aria-label="loss over {over}"' in page and f'aria-label="test accuracy over {over}"' in page
    assert "97 %</text>" in page and "99 %</text>" in page
    assert "2, 12 s each (11 to 13 s)" in page
    drawings = re.findall(rf"{DRAWING}.*?</svg>", page, re.DOTALL)
    assert all("var(--soft)" in drawing and INK not in drawing for drawing in drawings)
    assert not any(
        re.search(r'white|#fff|black|#000| id="|xmlns|<style|font|href|url\(', drawing) for drawing in drawings
    )
    assert render_report(learned(tmp_path / "again")) == page


def test_what_was_not_reported_is_not_drawn(tmp_path: Path) -> None:
    summary = learned(tmp_path)
    only_loss = summary.curves.model_copy(update={"evaluations": summary.curves.evaluations[:1]})
    assert render_report(summary.model_copy(update={"curves": only_loss})).count(DRAWING) == 5
    assert render_report(summary.model_copy(update={"curves": Curves()})).count(DRAWING) == 2
    assert render_report(summary.model_copy(update={"loss": None, "accuracy": None})).count(DRAWING) == 8
    without_clock = summary.curves.model_copy(update={"course": ()})
    assert render_report(summary.model_copy(update={"curves": without_clock})).count(DRAWING) == 4


def test_the_course_counts_all_ranks_samples_by_one_ranks_clock(tmp_path: Path) -> None:
    own = [step(number, 10, 1, 1, 1, 1, wall=1.8e9 + 2 * number) for number in range(4)]
    other = [step(number, 30, 1, 1, 1, 1, wall=1.7e9 + number) for number in range(4)]
    course = of_run(tmp_path, *own, other=other).curves.course
    assert [(moment.step, moment.samples) for moment in course] == [(0, 40), (1, 80), (2, 120), (3, 160)]
    assert [moment.seconds for moment in course] == pytest.approx([0.004, 2.004, 4.004, 6.004], abs=1e-3)


def test_a_clock_that_was_set_back_leaves_out_what_it_says_twice(tmp_path: Path) -> None:
    walls = [0.0, 1.0, -50.0, 2.0]
    lines = [step(number, 10, 1, 1, 1, 1, wall=1.8e9 + wall) for number, wall in enumerate(walls)]
    seconds = [moment.seconds for moment in of_run(tmp_path, *lines).curves.course]
    assert seconds == sorted(seconds)


def test_an_update_between_two_moments_lies_between_them() -> None:
    moments = (Moment(step=9, seconds=1.0, samples=100), Moment(step=19, seconds=3.0, samples=300))
    evaluations = tuple(EvaluationPoint(step=number, accuracy=0.5) for number in (4, 14, 29))
    (seconds, _), (samples, _) = by_clock(Curves(course=moments, evaluations=evaluations))
    assert (seconds, samples) == ("seconds", "samples")
    place = placed(moments, [1.0, 3.0])
    assert [place(number) for number in (4, 9, 14, 19, 29)] == [1.0, 1.0, 2.0, 3.0, 3.0]


VALUES = st.floats(-1e15, 1e15)


@given(st.lists(st.tuples(st.integers(0, 10**12), VALUES), min_size=1, max_size=9), st.booleans())
@example([(0, -1000000000000.625)], False)
@settings(max_examples=12)
def test_every_point_lies_within_the_plot(points: list[tuple[float, float]], from_zero: bool) -> None:
    lines = (ChartLine("a", sorted(points), PALETTE[0], dots=True), ChartLine("b", (), PALETTE[1]))
    chart = LineChart("t", "x", lines, from_zero=from_zero)
    assert svg(chart).count("<path") >= 1 + len(points) and list(chart.key) == ["a"]
    (axes,) = line_figure(chart).axes
    (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    rounding = 1e-9 * (top - bottom)
    assert left == 0 and all(0 <= x <= right and bottom - rounding <= y <= top + rounding for x, y in points)
    assert 2 <= len(axes.get_yticks()) <= 8


@pytest.mark.parametrize(
    ("values", "texts"),
    [
        ((0.968, 0.994), ["96 %", "97 %", "98 %", "99 %", "100 %"]),
        ((0.991, 0.9915), ["99.10 %", "99.12 %", "99.14 %", "99.16 %"]),
        ((1.0, 1.0), ["0 %", "50 %", "100 %"]),
        ((0.0, 0.0), ["0 %", "50 %", "100 %"]),
    ],
)
def test_ticks_are_round_and_distinct(values: tuple[float, ...], texts: list[str]) -> None:
    drawing = svg(LineChart("t", "x", (ChartLine("a", list(enumerate(values)), PALETTE[0]),), percent=True))
    assert re.findall(r">([\d.]+ %)</text>", drawing) == texts


# ---- on the terminal ------------------------------------------------------------------------------------------------


def test_the_terminal_shows_accuracy_by_class_and_the_time_of_an_epoch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    host_tables.print_summary(learned(tmp_path))
    printed = capsys.readouterr().out
    assert "by class, %: 0 90.0, 1 95.0\n" in printed
    assert "epochs: 2, 12 s each (11 to 13 s)\n" in printed


@given(st.dictionaries(st.text(min_size=1, max_size=90), st.floats(0, 1), min_size=1, max_size=60))
def test_accuracies_by_class_fit_into_80_columns(accuracies: dict[str, float]) -> None:
    lines = host_tables.class_lines(accuracies)
    assert all(len(line) <= 80 for line in lines)
    if len(accuracies) > host_tables.CLASSES_SHOWN:
        assert lines[0].startswith(f"  worst of {len(accuracies)} classes, %: ")
        assert f"{100 * min(accuracies.values()):.1f}" in " ".join(lines)
