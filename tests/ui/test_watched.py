"""What the page knows of a job that it cannot hear, and how it hears it again."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest

from orchestrator.paths import Home
from orchestrator.ui import watched
from orchestrator.ui.watched import Watched
from tests.support.local_cluster import Place
from tests.support.served_page import TRAINS


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
            monkeypatch.setattr(watched, "AGAIN_S", 0.0)
            assert not any(host.silent for host in page.now(job).hosts)
            assert page.now(job).record.state == "running"
        finally:
            file.write_bytes(kept)
            place.types("cancel", job, "--yes")
