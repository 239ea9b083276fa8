"""`orch ui` in a real browser, on a lab: from a new host to two jobs compared, and a host that goes away."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.browser import CHROMIUM, chromium, page_of, started_by
from tests.support.lab import lab
from tests.support.page_boxes import overlaps
from tests.support.served_page import TRAINS, address_of
from tests.support.terminal import Person

pytestmark = [pytest.mark.lab, pytest.mark.timeout(600)]

INVENTORY = """
cluster: page
defaults: {device: cpu, bandwidth: 2.5Gbps}
nodes:
  - {name: a2000, host: 10.79.1.1}
  - {name: v100, host: 10.79.1.2}
  - {name: gone, host: 10.79.1.3}
  - {name: a16, host: 10.79.1.4}
"""


@pytest.fixture(scope="module")
def person(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Person]:
    """Their cluster lacks the a16, and one of its hosts is off."""
    if CHROMIUM is None:
        pytest.skip("chromium is not installed")
    with lab(INVENTORY, quick=True) as rack:
        someone = Person(rack, tmp_path_factory.mktemp("home"), tmp_path_factory.mktemp("work"))
        (someone.folder / "mine").mkdir()
        (someone.folder / "mine" / "trains.py").write_text(TRAINS)
        content = yaml.safe_load(rack.inventory.read_text())
        content["nodes"].pop()
        (someone.folder / "rack.yaml").write_text(yaml.safe_dump(content))
        rack.power("gone", "off")
        someone.types("up", "rack.yaml", exit_code=3)
        yield someone


@pytest.fixture(scope="module")
def address(person: Person) -> Iterator[str]:
    with address_of(person.starts("ui", "--out", str(person.folder / "runs"))) as url:
        yield url


@pytest.fixture
def page(person: Person, address: str, tmp_path: Path) -> Iterator[Any]:
    with (
        chromium(started_by(person.lab.to_controller, tmp_path / "chromium")) as browser,
        page_of(browser, address) as made,
    ):
        yield made


def test_from_a_new_host_to_two_jobs_compared(page: Any, person: Person) -> None:
    hosts = page.locator("#hosts tr[data-node]")
    assert hosts.evaluate_all("rows => rows.map(row => row.dataset.node)") == ["a2000", "v100", "gone"]
    assert "gone: 10.79.1.3:22: no SSH login" in page.locator(".problem").inner_text()
    page.get_by_text("status at").wait_for()
    page.locator("tr[data-node=gone] .no-answer").wait_for()
    # a host is added, another one becomes the master
    (new,) = [node for node in yaml.safe_load(person.lab.inventory.read_text())["nodes"] if node["name"] == "a16"]
    page.get_by_text("Add a host").click()
    page.get_by_label("Name", exact=True).fill("a16")
    page.get_by_label("Host", exact=True).fill(new["host"])
    page.get_by_label("More keys").fill(f"host_key='{new['host_key']}'")
    page.get_by_role("button", name="Add", exact=True).click()
    page.get_by_role("status").get_by_text("a16 was added").wait_for()
    page.locator("tr[data-node=v100]").get_by_role("button", name="Set as master").click()
    page.locator("tr[data-node=v100] .master").wait_for()
    # a host that is away is released, and restored
    page.locator("tr[data-node=gone]").get_by_role("button", name="Release").click()
    page.locator("tr[data-node=gone]").get_by_role("button", name="Restore").wait_for()
    # what is wrong is said with a remedy
    started(page, "nothing.py")
    assert "Try: give its path as seen from here" in page.get_by_role("alert").inner_text()
    assert overlaps(page) == []
    # a job starts, is watched and cancelled, twice
    for _ in range(2):
        started(page, str(person.folder / "mine" / "trains.py"))
        page.locator("#jobs tr[data-state=running] .speed", has_text="200").first.wait_for()
        slow = "a2000 waits for v100, up to 40 % of each step: v100 computes"
        page.locator("#jobs tr[data-state=running] .slow", has_text=slow).first.wait_for()
        page.locator("#jobs tr[data-state=running] a").first.click()
        page.locator("#figures h1", has_text=slow).wait_for()
        before = page.locator("#figures").inner_text()
        page.wait_for_function("before => document.getElementById('figures').innerText != before", arg=before)
        page.locator("#log", has_text="hello from 1 <b>bold</b>").wait_for()
        split = page.get_by_role("img", name="parts of a step")
        assert split.locator("title", has_text="a2000: wait 40.0 ms").count() == 1 and overlaps(page) == []
        page.get_by_role("button", name="Cancel the job").click()
        page.get_by_role("status").get_by_text("was ended on every host").wait_for()
        page.locator("#jobs tr[data-job] .cancelled").first.wait_for()
    page.get_by_role("link", name="Report").first.click()
    page.get_by_role("heading", name="Host by host").wait_for()
    page.go_back()
    for box in page.get_by_role("checkbox").all()[:2]:
        box.check()
    page.get_by_role("button", name="Compare selected").click()
    page.get_by_text("2 runs", exact=False).or_(page.get_by_text("B:", exact=False)).first.wait_for()
    assert overlaps(page) == []


def started(page: Any, script: str) -> None:
    page.get_by_text("Start a job").click()
    page.get_by_label("or script with arguments").fill(script)
    page.get_by_label("Hosts", exact=True).fill("a2000,v100")
    with page.expect_navigation():
        page.get_by_role("button", name="Start", exact=True).click()


def test_a_host_that_went_away_is_seen_and_its_older_report_is_shown_as_such(page: Any, person: Person) -> None:
    status = page.locator("tr[data-node=v100] .state")
    page.get_by_text("status at").wait_for()
    assert status.inner_text() == "master"
    person.lab.power("v100", "off")
    page.reload()
    page.locator("tr[data-node=v100] .no-answer").wait_for()
    page.get_by_role("link", name="Report").first.click()
    assert "v100" in page.get_by_role("alert").inner_text() and overlaps(page) == []
    page.get_by_role("link", name="Show what was collected before").click()
    page.get_by_role("heading", name="Host by host").wait_for()
    page.go_back()
    page.get_by_role("link", name="Clusters and jobs").click()
    page.locator("#hosts").wait_for()


def test_on_a_small_screen_every_button_of_a_host_can_be_reached(page: Any) -> None:
    page.set_viewport_size({"width": 400, "height": 900})
    boxes = [button.bounding_box() for button in page.locator("#hosts button").all()]
    assert len(boxes) > 6
    assert all(box and box["x"] >= 0 and box["x"] + box["width"] <= 400 for box in boxes)
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
