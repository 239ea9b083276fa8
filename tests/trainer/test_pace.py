"""A paced rank's speed: what the launcher writes is read, anything else is one clear message."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.ranks import read_rank_info
from trainer.shared import Pace, TrainError, read_pace
from trainer.shared.pace import BACKWARD, FORWARD, OPTIMISER

ROOT = Path(__file__).parents[2]


def test_a_step_takes_its_fixed_time_and_its_samples_time() -> None:
    pace = read_pace('{"samples_per_s": 333, "fixed_ms": 2}')
    assert pace.step_s(samples=128, step=0) == pytest.approx(0.002 + 128 / 333)
    assert pace.step_s(samples=0, step=0) == pytest.approx(0.002)


def test_the_parts_of_a_step_are_the_whole_step() -> None:
    assert pytest.approx(1) == FORWARD + BACKWARD + OPTIMISER


def test_everything_that_the_launcher_may_write_is_read() -> None:
    slowdown = [{"at_step": 30, "factor": 1.0}, {"at_step": 10, "factor": 2}]
    values = {"samples_per_s": 833, "fixed_ms": 1.5, "jitter": 0.1, "memory_bytes": 2**34, "slowdown": slowdown}
    pace = Pace(833, 1.5, 0.1, 2**34, ((10, 2.0), (30, 1.0)))
    assert read_pace(json.dumps(values)) == pace
    assert read_rank_info({"ORCH_PACED": json.dumps(values)}).pace == pace
    assert read_pace('{"samples_per_s": 833, "memory_bytes": null}') == Pace(833)
    assert read_rank_info({"ORCH_PACED": ""}).pace is None


def test_a_slowdown_holds_from_its_step_to_the_next_one() -> None:
    pace = Pace(1000, slowdown=((10, 2.0), (30, 0.5)))
    factors = [pace.step_s(100, step) / 0.1 for step in (0, 9, 10, 29, 30, 1000)]
    assert factors == pytest.approx([1, 1, 2, 2, 0.5, 0.5])


@given(st.floats(0, 1), st.integers(0, 10**6), st.integers(1, 4096))
def test_jitter_stays_within_its_bounds(jitter: float, step: int, samples: int) -> None:
    exact = Pace(333, 2.0).step_s(samples, step)
    rounding = 1e-15 * exact
    assert abs(Pace(333, 2.0, jitter).step_s(samples, step) - exact) <= jitter * exact * (1 + 1e-9) + rounding


def test_jitter_differs_from_step_to_step_and_from_rank_to_rank_and_fills_its_bounds() -> None:
    pace = Pace(100, jitter=0.2)
    steps = [pace.step_s(100, step, seed=(0, 1)) for step in range(200)]
    assert len(set(steps)) == 200
    assert 0.8 <= min(steps) < 0.82
    assert 1.18 < max(steps) <= 1.2
    assert steps[0] != pace.step_s(100, 0, seed=(0, 2))


def test_jitter_is_the_same_in_every_process() -> None:
    program = "from trainer.shared.pace import Pace; print(Pace(100, jitter=0.5).step_s(100, 7, seed=(3, 1)))"
    environment = {**os.environ, "PYTHONHASHSEED": "12345"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    assert float(done.stdout) == Pace(100, jitter=0.5).step_s(100, 7, seed=(3, 1))


BAD = {
    "no JSON": "333",
    "a cut-off object": '{"samples_per_s": 3',
    "no speed": "{}",
    "a speed of 0": '{"samples_per_s": 0}',
    "a negative speed": '{"samples_per_s": -1}',
    "a speed that is no number": '{"samples_per_s": NaN}',
    "an endless speed": '{"samples_per_s": Infinity}',
    "a whole number beyond every float": '{"samples_per_s": 1%s}' % ("0" * 400),
    "a speed as text": '{"samples_per_s": "333"}',
    "an unknown key": '{"samples_per_s": 1, "memory": "16GiB"}',
    "a negative fixed time": '{"samples_per_s": 1, "fixed_ms": -1}',
    "a fixed time as text": '{"samples_per_s": 1, "fixed_ms": "2"}',
    "a fixed time that is no number": '{"samples_per_s": 1, "fixed_ms": NaN}',
    "too much jitter": '{"samples_per_s": 1, "jitter": 1.5}',
    "memory as text": '{"samples_per_s": 1, "memory_bytes": "16GiB"}',
    "no memory": '{"samples_per_s": 1, "memory_bytes": 0}',
    "a slowdown without its factor": '{"samples_per_s": 1, "slowdown": [{"at_step": 3}]}',
    "a slowdown to nothing": '{"samples_per_s": 1, "slowdown": [{"at_step": 3, "factor": 0}]}',
    "a slowdown that never comes": '{"samples_per_s": 1, "slowdown": [{"at_step": Infinity, "factor": 2}]}',
    "a slowdown that is no list": '{"samples_per_s": 1, "slowdown": 2}',
    "lists without end": "[" * 100_000,
}


@pytest.mark.parametrize("bad", BAD, ids=str)
def test_what_the_launcher_does_not_write_is_refused_with_the_form_expected(bad: str) -> None:
    with pytest.raises(TrainError, match=r'ORCH_PACED is .*expected a JSON object like \{"samples_per_s"') as caught:
        read_pace(BAD[bad])
    assert len(str(caught.value)) < 1000
    assert "\n" not in str(caught.value)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9) | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["at_step", "factor"]), inner),
    max_leaves=6,
)
NAMES = ["samples_per_s", "fixed_ms", "jitter", "memory_bytes", "slowdown", "seed"]
OBJECTS = st.dictionaries(st.sampled_from(NAMES), VALUES) | st.builds(
    lambda speed, more: {"samples_per_s": speed, **more},
    st.floats(1, 1000),
    st.dictionaries(st.just("slowdown"), VALUES),
)


@given(st.text() | VALUES.map(json.dumps) | OBJECTS.map(json.dumps))
def test_whatever_is_given_there_is_a_pace_that_can_be_kept_or_one_message(text: str) -> None:
    try:
        pace = read_pace(text)
    except TrainError:
        return
    step_s = pace.step_s(128, 5)
    assert math.isfinite(step_s)
    assert step_s >= 0
