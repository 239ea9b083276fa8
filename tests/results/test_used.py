"""Settings, batches and machines in a summary and on its page: as they were used, not as they were asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from orchestrator.paths import RunFolder
from orchestrator.results import Summary
from orchestrator.results.analyse import analyse
from orchestrator.views import render_report
from tests.support.run_folders import SETTINGS, Host, end, start, step, write_run

TWO = [Host("a"), Host("b")]
ASKED = {**SETTINGS, "num_workers": -1, "loader": "auto"}


def lines_of(loaders: list[int], **more: Any) -> dict[int, list[Any]]:
    """Each rank's lines: it loaded with so many processes."""
    used = [{"warmup_steps": 3, "num_workers": count, "loader": "workers", **more} for count in loaders]
    return {
        rank: [start(rank=rank, settings=one), *(step(n, 32, 2, 80, 10, 8) for n in range(9)), end()]
        for rank, one in enumerate(used)
    }


def with_plan(run: RunFolder, **changes: Any) -> RunFolder:
    plan = json.loads(run.plan.read_text())
    for node in plan["nodes"]:
        node |= changes.pop(node["name"], {})
    run.plan.write_text(json.dumps(plan | changes))
    return run


def test_settings_are_shown_as_they_turned_out_beside_what_was_asked(tmp_path: Path) -> None:
    summary = analyse(write_run(tmp_path / "run", TWO, lines_of([2, 2]), settings=ASKED))
    assert (summary.settings["num_workers"], summary.settings["loader"]) == (2, "workers")
    assert summary.settings["batch"] == 96  # no rank reports another
    assert summary.asked == {"num_workers": -1, "loader": "auto"}
    assert '<dt>num_workers</dt><dd>2 <span class="soft">(asked: -1)</span></dd>' in render_report(summary)
    assert Summary.load(RunFolder(tmp_path / "run")) == summary


def test_hosts_that_used_different_ones_are_named(tmp_path: Path) -> None:
    summary = analyse(write_run(tmp_path / "run", TWO, lines_of([2, 4]), settings=ASKED))
    assert summary.settings["num_workers"] == "2 on a, 4 on b"


def test_what_a_rank_changed_after_its_last_start_is_what_it_used(tmp_path: Path) -> None:
    lines = lines_of([2, 2], cuda_graph="on")
    off = {"event": "setting", "name": "cuda_graph", "value": "off", "why": "no room"}
    lines[0].insert(0, off)  # of a start before this one
    lines[1].insert(3, off)
    summary = analyse(write_run(tmp_path / "run", TWO, lines, settings={**ASKED, "cuda_graph": "auto"}))
    assert summary.settings["cuda_graph"] == "on on a, off on b"
    assert summary.asked["cuda_graph"] == "auto"


def test_no_host_is_believed_a_setting_that_is_none(tmp_path: Path) -> None:
    lines = lines_of([2, 2], batch=["<b>"], strategy="ddp\x1b[2J\n<b>", lr=1)
    summary = analyse(write_run(tmp_path / "run", TWO, lines, settings=ASKED))
    assert summary.settings["batch"] == 96
    assert summary.settings["strategy"] == "ddp <b>"
    assert "lr" not in summary.settings


def test_a_scripts_batch_is_its_share_else_what_its_steps_held(tmp_path: Path) -> None:
    lines = {rank: [step(n, 24, 2, 80, 10, 8) for n in range(9)] for rank in range(2)}
    run = write_run(tmp_path / "run", TWO, lines, kind="script", exp="train.py", settings={})
    assert [node.batch_per_rank for node in analyse(run).nodes] == [24, 24]
    with_plan(run, a={"shares": [30]}, b={"shares": [18]}, settings={"batch": 48})
    assert [node.batch_per_rank for node in analyse(run).nodes] == [30, 18]


def test_command_commit_and_machine_stand_in_summary_and_page(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", TWO, {}, kind="script", exp="train.py", settings={})
    assert "no git commit" in render_report(analyse(run))
    code = {"sha256": "0" * 64, "source": "/home/me/proj", "files": 2, "size_bytes": 60}
    code["commit"] = {"id": "3f2a1b9c0d4e" + "0" * 28, "dirty": True}
    system = {"os": "Ubuntu 22.04", "kernel": "5.15.0-91", "machine": "x86_64", "cores": 20, "memory_bytes": 1}
    system |= {"python": "3.10.12", "driver": "525.105.17", "cuda": "11.7"}
    with_plan(run, code=code, a={"command": ["train.py", "--lr", "0.1", "two words"], "system": system})
    summary = analyse(run)
    assert summary.command == "train.py --lr 0.1 'two words'"
    assert summary.code is not None and summary.code.commit is not None
    page = render_report(summary)
    for words in ("train.py --lr 0.1 &#39;two words&#39;", "commit 3f2a1b9c0d4e, with changes that are not committed"):
        assert words in page
    for words in ("Ubuntu 22.04", "5.15.0-91 x86_64", "525.105.17", "11.7", '<td class="n">20</td>'):
        assert words in page
