"""The queue on the page, and runs of the page that wait."""

from __future__ import annotations

import contextlib
import threading
from types import SimpleNamespace

import pytest

from orchestrator.errors import TurnError
from orchestrator.jobs import Jobs, Rival, Waiting
from orchestrator.paths import Home
from orchestrator.ui import InTurn, app, pages
from tests.support.remembered import cluster


def test_who_waits_is_shown_in_order_and_ones_own_may_leave():
    known = cluster()
    rivals = (Rival("first<1>", "ada", 3700.0, ("a",), 1), Rival("mine-1", "bob", None, ("a", "b"), 2))
    queue = Waiting({known.name: rivals}, frozenset({"mine-1"}), lost=("gone-1",))
    page = pages.cluster_page(known, [known.name], Jobs((), {}, {}), {}, queue, ["late-1 was not started: why"], "./")
    assert page.index("first&lt;1&gt;") < page.index("mine-1") and "1:01:40" in page
    assert page.count("Leave the queue") == 1 and page.index("mine-1") < page.index("Leave the queue")
    assert "gone-1 has lost its place" in page and "late-1 was not started: why" in page


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (TurnError("it was cancelled while it waited"), "it was cancelled while it waited"),
        (OSError(28, "No space left on device"), "OSError: [Errno 28] No space left on device"),
        (KeyError("ours"), "KeyError: 'ours'"),
    ],
)
def test_why_a_run_of_the_page_did_not_come_to_its_turn_is_kept(error, said, tmp_path, monkeypatch: pytest.MonkeyPatch):
    asked = list[tuple[object, bytes]]()

    def launch_in_turn(plan, blob):
        asked.append((plan, blob))
        raise error

    controller = SimpleNamespace(launch_in_turn=launch_in_turn)
    monkeypatch.setattr(app, "opened", lambda home: contextlib.nullcontext(controller))
    turns, plan = InTurn(Home(tmp_path)), SimpleNamespace(job="late-1")
    assert "late-1 starts when" in turns.begin(plan, b"code")
    for thread in threading.enumerate():
        if thread.name == "turn-late-1":
            thread.join()
    assert asked == [(plan, b"code")] and [*turns.failed] == [f"late-1 was not started: {said}"]
