"""The queue on the page."""

from __future__ import annotations

from orchestrator.jobs import Jobs, Rival
from orchestrator.ui import pages
from tests.support.job_states import known as job
from tests.support.remembered import cluster


def test_who_waits_is_shown_in_order_and_ones_own_may_leave():
    known = cluster()
    rivals = (Rival("first<1>", "ada", 3700.0, ("a",), 1), Rival("mine-1", "bob", None, ("a", "b"), 2))
    mine = job("queued").model_copy(update={"id": "mine-1"})
    page = pages.cluster_page(known, [known.name], Jobs((mine,), {}, {}), {}, rivals, "./")
    assert page.index("first&lt;1&gt;") < page.index("mine-1") and "1:01:40" in page
    assert page.count("Leave the queue") == 1 and page.index("mine-1") < page.index("Leave the queue")
