"""Controllers killed while their jobs wait, run, and rest between two attempts: a short version of the bench."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

import pytest

from tests.bench.submitted import MOMENTS, play_all, rounds
from tests.support.sshd import needs_sshd


@needs_sshd
@pytest.mark.timeout(900)
def test_a_job_ends_well_whenever_its_controller_is_killed() -> None:
    lines: list[str] = []
    with tempfile.TemporaryDirectory(prefix="orch-submitted-") as folder:  # which other logins can enter
        wrong = play_all(Path(folder), rounds([*MOMENTS], 1, random.Random(7)), lines.append)
    assert not wrong and len(lines) == len(MOMENTS), "\n".join(lines)
