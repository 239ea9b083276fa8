"""The queue on the page."""

from __future__ import annotations

from orchestrator.jobs import Jobs, Rival, Waiting
from orchestrator.ui import pages
from tests.support.job_states import known as job
from tests.support.remembered import cluster


def test_who_waits_is_shown_in_order_and_ones_own_may_leave():
    known = cluster()
    rivals = (Rival("first<1>", "ada", 3700.0, ("a",), 1), Rival("mine-1", "bob", None, ("a", "b"), 2))
    queue = Waiting({known.name: rivals}, frozenset({"mine-1"}), lost=("gone-1",))
    page = pages.cluster_page(known, [known.name], Jobs((), {}, {}), {}, queue, "./")
    assert page.index("first&lt;1&gt;") < page.index("mine-1") and "1:01:40" in page
    assert page.count("Leave the queue") == 1 and page.index("mine-1") < page.index("Leave the queue")
    assert "gone-1 has lost its place" in page


def test_a_job_that_waits_on_its_hosts_may_leave_too():
    known = cluster()
    queue = Waiting({known.name: (Rival("first-1", "ada", 3700.0, ("a",), 1), Rival("j", "bob", None, ("a",), 2))})
    page = pages.cluster_page(known, [known.name], Jobs((job("queued"),), {}, {}), {}, queue, "./")
    assert page.count("Leave the queue") == 1 and page.index("first-1") < page.index("Leave the queue")
