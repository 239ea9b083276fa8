"""Two rounds of neighbours on two hosts, and nobody loses anything; `python -m tests.neighbours` plays more."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.lab import lab

from .people import schedule

ROOT = Path(__file__).resolve().parents[2]
SEED, ROUNDS = "378", "2"
"""In these, whoever shares a login clears the hosts once while each of the others runs something there."""


@pytest.mark.lab
@pytest.mark.timeout(300)
def test_nobody_loses_anything_of_the_others():
    with lab("cluster: probe\nnodes: [{name: a, host: 10.79.0.1}]"):
        pass  # skipped where no lab can stand
    words = ["--rounds", ROUNDS, "--seed", SEED]
    run = subprocess.run([sys.executable, "-m", "tests.neighbours", *words], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, f"{run.stdout[-8000:]}\n{run.stderr[-4000:]}"
    tally = {what: int(count) for count, what in re.findall(r"(\d+) ([a-z ]+)", run.stdout.splitlines()[-1])}
    assert (tally["rounds"], tally.get("losses", 0)) == (int(ROUNDS), 0)
    assert tally["downs beside running jobs of others"] > 0


def test_a_round_is_the_same_whenever_its_seed_is():
    assert schedule(378, 7) == schedule(378, 7)
    assert schedule(378, 7) != schedule(378, 8)
