"""What a person sees holds nothing that a terminal obeys, wherever the words came from: lines, tables, pages."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orchestrator.errors import HostError
from orchestrator.hosts import Cluster
from orchestrator.jobs import FilePiece, HostRow, JobRecord, Notice, RunProgress, Splitter, Standstill
from orchestrator.planning import LaunchPlan
from orchestrator.results import Summary
from orchestrator.results.analyse import analyse
from orchestrator.views import LogEnd, console, dry_run, following, host_tables, job_table, render_report
from tests.support.run_folders import two_hosts

FORBIDDEN = {chr(c) for c in (*range(9), *range(11, 32), *range(127, 160))} | set("\u061c\u200e\u200f\u2028\u2029")
FORBIDDEN |= {chr(c) for c in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))}
# Escapes by ECMA-48 (CSI, OSC 0 and 52, DCS, their C1 forms), what redraws a line, what turns it around, rich's markup.
HOSTILE = (
    "\x1b[2J", "\x1b]0;title\x07", "\x1b]52;c;ZXZpbA==\x1b\\", "\x1bP1$r\x1b\\", "\x1b", "\x9b31m", "\x9d0;t\x9c", "\r",
    "\x08", "\x7f", "\x00", "\u202e", "\u2066", "\n", "\t", "[red]", "[/]", "[/red]", "[link=file:///]", "[", "\\", "a",
    "{", "ü", "€", "$x$", "<b>", "&",
)  # fmt: skip
hostile = st.lists(st.sampled_from(HOSTILE), min_size=1, max_size=12).map("".join)
quickly = settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
CHOICES = {"kind", "part", "device", "efficiency_basis", "basis"}
"""Fields of which a record takes only its own words."""


def shown_by(show: Callable[[], None]) -> str:
    with console.out.capture() as result, console.err.capture() as beside:
        show()
    return result.get() + beside.get()


def assert_harmless(shown: str) -> None:
    assert not FORBIDDEN & set(shown), ascii(shown)


def everywhere(value: Any, text: str, key: str = "") -> Any:
    """The same document with this text for every word in it."""
    if isinstance(value, dict):
        return {name: everywhere(part, text, name) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [everywhere(part, text, key) for part in value]
    return text if isinstance(value, str) and key not in CHOICES else value


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    failure = {"node": "v100", "rank": 1, "signal": "SIGKILL", "reason": "ended", "log_line": "why"}
    run = two_hosts(tmp_path_factory.mktemp("run"), state="failed", first_failure=failure)
    analyse(run)
    return run


@quickly
@given(hostile)
def test_sentences(text):
    failure = HostError("a", text, text)
    for show in (console.say, console.warn, console.put):
        assert_harmless(shown_by(lambda show=show: show(text)))
    assert_harmless(shown_by(lambda: console.fail(text, text)))
    assert_harmless(shown_by(lambda: console.print_answers({"a": failure, text: {}}, lambda answer: text)))


@quickly
@given(st.lists(hostile, max_size=5))
def test_log_lines_and_notices(texts):
    splitter, offset, events = Splitter(), 0, []
    for text in texts:
        data = text.encode()
        events.append(tuple(splitter.split("a", FilePiece("rank-0/stderr.log", 0, offset, data))))
        offset += len(data)
        events += [Notice(text), Standstill(text)]
        events.append(RunProgress((HostRow(text, 1, 2, 3.0, 4.0, 0.5),)))
        events += filter(None, [splitter.bars()])
    events.append(tuple(splitter.rest()))
    assert_harmless(shown_by(lambda: following.print_events(events)))


@quickly
@given(hostile)
def test_jobs(run, text):
    record = json.loads(run.job.read_text())
    job = JobRecord.model_validate({**everywhere(record, text), "state": "failed"})
    assert_harmless(shown_by(lambda: job_table.print_jobs([job])))
    assert_harmless(shown_by(lambda: job_table.print_end(job)))


@quickly
@given(hostile)
def test_plans_and_clusters(run, text):
    plan = LaunchPlan.model_validate({**everywhere(json.loads(run.plan.read_text()), text), "notes": [text]})
    assert_harmless(shown_by(lambda: dry_run.print_plan(plan)))
    cluster = Cluster(schema=1, name=text, file=text, nodes=(), master=text, master_reason=text)
    assert_harmless(shown_by(lambda: host_tables.print_cluster(cluster)))


@quickly
@given(hostile)
def test_summaries_and_pages(run, text):
    document = everywhere(json.loads(run.summary.read_text()), text) | {"warnings": [text], "missing": [text]}
    summary = Summary.model_validate(document)
    assert_harmless(shown_by(lambda: host_tables.print_summary(summary)))
    assert_harmless(render_report(summary, None, (LogEnd(text, (text, text)),)))


def test_harmless_words_are_shown_as_they_are():
    words = "[bold] a\\b [/] Straße 東京 C:\\"
    for show, prefix in ((console.put, ""), (console.say, ""), (console.warn, "note: "), (console.fail, "error: ")):
        assert shown_by(lambda show=show: show(words)) == f"{prefix}{words}\n"


PRINTS = """
from orchestrator.views import console, following
from orchestrator.jobs.lines import LogLine
following.print_events([(LogLine("a", 0, "stdout", "10 € for 東京"),)])
console.put("Straße 東")
console.warn("東")
"""


def test_letters_that_a_terminal_lacks_are_no_error():
    environment = {"PYTHONIOENCODING": "latin-1", "PATH": "/usr/bin"}
    done = subprocess.run([sys.executable, "-c", PRINTS], capture_output=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[a 0] 10 ? for ??\nStraße ?\n".encode("latin-1")
