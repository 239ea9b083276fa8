"""What the page knows of a job that it cannot hear, and how it hears it again."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.paths import Home
from orchestrator.ui import Watched, app
from tests.support.local_cluster import Place
from tests.support.served_page import TRAINS
from tests.support.sshd import wait_for


def test_a_job_that_cannot_be_heard_is_shown_so_and_heard_anew_once_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(tmp_path)
    (place.here / "trains.py").write_text(TRAINS)
    job = json.loads(place.types("run", "--detach", "--json", "--", "trains.py").stdout)["id"]
    home = Home(tmp_path / "home")
    file = home.cluster("rack")
    kept = file.read_bytes()
    with contextlib.closing(Watched(home)) as page:
        try:
            file.unlink()
            looks = [page.now(job) for _ in range(2)]
            assert all("no cluster" in host.silent for look in looks for host in look.hosts)
            file.write_bytes(kept)
            assert page.now(job).hosts[0].silent  # not at each look, of which there is one a second
            monkeypatch.setattr(app, "AGAIN_S", 0.0)
            wait_for(lambda: page.now(job).step, "the first step", 60)
            assert not any(host.silent for host in page.now(job).hosts)
            assert page.now(job).record.state == "running"
        finally:
            file.write_bytes(kept)
            place.types("cancel", job, "--yes")


@pytest.mark.parametrize(
    ("is_over", "state", "after_s", "is_due"),
    [
        (True, "running", 11, True),  # no host could be logged in to
        (True, "lost", 11, True),
        (True, "running", 9, False),
        (True, "failed", 11, False),
        (False, "running", 11, False),
    ],
)
def test_what_is_no_longer_heard_is_begun_anew_unless_the_job_has_ended(
    is_over: bool, state: str, after_s: float, is_due: bool
) -> None:
    gauged: Any = SimpleNamespace(is_over=is_over, record=SimpleNamespace(state=state))
    assert app.Viewed(gauged, time.monotonic() - after_s).is_due_again is is_due
