"""How the lines of a host are read, and that only fields are read which ranks write."""

import ast
import io
from pathlib import Path

import pytest

from orchestrator.jobs import count, duration, number, parse_event, text, whole_lines
from trainer.shared import EVENT_FIELDS, LARGEST, LINE_LIMIT, STEP_COUNTS, STEP_TIMES

ORCHESTRATOR = Path(__file__).parents[2] / "orchestrator"
READERS = [path for path in (ORCHESTRATOR / "results").glob("*.py") if path.stem != "gpu_use"]
READERS += [ORCHESTRATOR / "jobs" / "live.py", ORCHESTRATOR / "measuring" / "profiling.py"]
"""What reads metrics.jsonl; gpu.jsonl is no rank's."""


def test_lines_come_whole_and_one_that_is_too_long_is_left_out():
    long, longest = b"x" * LINE_LIMIT + b"y\n", b"z" * (LINE_LIMIT - 1) + b"\n"
    source = io.BytesIO(b"a\n" + long + longest + b"\n" + b"half")
    assert list(whole_lines(source)) == [b"a\n", None, longest, b"\n", b"half"]
    assert list(whole_lines(io.BytesIO(b"x" * (3 * LINE_LIMIT)))) == [None]


@pytest.mark.parametrize(
    "line", [b"", b"{", b"7", b"[1]", b"\xff", b"[" * 9000, b'{"a": "' + b"x" * LINE_LIMIT + b'"}'], ids=range(7)
)
def test_what_is_no_event_is_none(line):
    assert parse_event(line) is None


@pytest.mark.parametrize("value", [None, True, "1", [1], float("nan"), float("inf"), -float("inf"), 1e300, 10**400])
def test_what_is_no_number_is_none(value):
    event = {"step": value}
    assert (number(event, "step"), count(event, "step"), duration(event, "step")) == (None, None, None)
    assert number({}, "step") is None


def test_numbers_counts_durations_and_words():
    event = {
        "loss": -0.5,
        "step": 3.0,
        "half": 1.5,
        "t_ms": 2,
        "long": 2 * LARGEST,
        "name": " a\x1b[31m\nb ",
        "no": "\n",
    }
    assert (number(event, "loss"), count(event, "loss"), duration(event, "loss")) == (-0.5, None, None)
    assert (count(event, "step"), count(event, "half"), duration(event, "t_ms")) == (3, None, 2.0)
    assert (number(event, "long"), number(event, "long", LARGEST), duration(event, "long")) == (2 * LARGEST, None, None)
    assert (text(event, "name"), text(event, "no"), text(event, "loss")) == ("a b", None, None)


def test_what_a_step_must_carry_are_fields_of_a_step():
    assert {*STEP_COUNTS} < {*EVENT_FIELDS["step"]}
    assert STEP_TIMES == ("t_ms", "load_ms", "compute_ms", "exposed_ms", "comm_ms", "optim_ms")


@pytest.mark.parametrize("path", sorted(READERS), ids=lambda path: path.stem)
def test_only_events_and_fields_are_read_that_ranks_write(path):
    fields = {name for names in EVENT_FIELDS.values() for name in names} | {"value"}
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call):
            continue
        words = [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
        if isinstance(node.func, ast.Name) and node.func.id in ("number", "count", "duration", "text"):
            assert {word for word in words if isinstance(word, str)} <= fields
        if isinstance(node.func, ast.Attribute) and node.func.attr in ("latest", "of_rank", "since_start"):
            assert {word for word in words if isinstance(word, str)} <= EVENT_FIELDS.keys()
