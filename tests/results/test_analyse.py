from __future__ import annotations

import json
import os
import signal
import threading
import warnings
from pathlib import Path
from typing import Any

import duckdb
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orchestrator.errors import OrchError
from orchestrator.paths import RunFolder
from orchestrator.results import Summary
from orchestrator.results.analyse import analyse
from orchestrator.results.tables import connected
from orchestrator.views import render_report
from tests.support.cost import growth
from tests.support.run_folders import Host, end, lines, start, step, two_hosts, write_run

ONE = [Host("v100", 1, "Tesla V100-16GB")]
TWO = [Host("a2000", 1, "RTX A2000"), Host("v100", 1, "Tesla V100-16GB")]


def ten_steps(samples: int = 32, **fields: Any) -> list[dict[str, Any]]:
    return [step(number, samples, 2, 40, 6, 2, **fields) for number in range(10)]


def node(summary: Summary, name: str) -> Any:
    return next(node for node in summary.nodes if node.name == name)


# ---- golden figures -----------------------------------------------------------------------------------------------


def test_two_hosts_with_unequal_ranks_come_to_the_figures_computed_by_hand(tmp_path: Path) -> None:
    summary = analyse(two_hosts(tmp_path / "run"))

    # Four measured steps of 100 ms: 96 samples each in 0.1 s.
    assert (summary.steps, summary.warmup_steps_left_out, summary.samples_total) == (4, 3, 7 * 96)
    assert summary.samples_per_s == pytest.approx(960)
    # Load, compute and update: a2000 16 samples in 2 + 80 + 8 ms; v100 twice 40 samples in 2 + 40 + 8 ms.
    assert [n.own_samples_per_s for n in summary.nodes] == pytest.approx([16 / 0.09, 80 / 0.05])
    assert [n.samples_per_s for n in summary.nodes] == pytest.approx([160, 800])
    assert summary.efficiency == pytest.approx(960 / (16 / 0.09 + 80 / 0.05))
    assert summary.efficiency_basis == "estimated"
    v100 = node(summary, "v100")
    assert (v100.load_ms, v100.compute_ms, v100.sync_ms, v100.wait_ms, v100.optim_ms) == (2, 40, 10, 40, 8)
    assert (v100.step_ms.p50, v100.step_ms.p95, v100.ranks, v100.batch_per_rank) == (100, 100, 2, 40)
    assert v100.peak_memory_bytes == 6 * 2**30
    assert node(summary, "a2000").wait_ms == 0
    assert summary.by_gpu["Tesla V100-16GB"].share == pytest.approx(80 / 96)
    assert summary.by_gpu["RTX A2000"].samples_per_s == pytest.approx(160)
    assert summary.straggler is not None
    assert summary.straggler.node == "a2000"
    assert summary.straggler.reason == "takes 5.0x as long per sample as v100"
    assert summary.straggler.wait_ms == pytest.approx(40)
    assert (summary.accuracy, summary.accuracy_per_class) == (0.9923, {"0": 0.99, "1": 0.995})
    assert summary.loss == pytest.approx(0.5)
    assert (summary.missing, summary.warnings) == ((), ())


def test_summary_json_has_the_agreed_keys_and_loads_back_as_the_same_value(tmp_path: Path) -> None:
    run = two_hosts(tmp_path / "run")
    summary = analyse(run)
    document = json.loads(run.summary.read_text())
    top = "schema job experiment settings state world_size samples_per_s efficiency efficiency_basis nodes by_gpu"
    assert set(document) >= {*top.split(), "straggler", "missing", "first_failure"}
    host = "name gpu ranks batch_per_rank samples_per_s own_samples_per_s solo_samples_per_s step_ms load_ms compute_ms"
    host += " sync_ms wait_ms optim_ms peak_memory_bytes paced valid"
    assert set(document["nodes"][0]) >= set(host.split())
    assert Summary.load(run) == summary


def test_steps_parquet_has_a_row_per_rank_and_step_with_the_derived_times(tmp_path: Path) -> None:
    run = two_hosts(tmp_path / "it's [a] run")
    analyse(run)
    copy = tmp_path / "steps.parquet"
    copy.write_bytes(run.steps.read_bytes())
    query = "SELECT node, gpu, rank, local_rank, wait_ms, sync_ms FROM read_parquet(?) WHERE step = 5 ORDER BY rank"
    with duckdb.connect() as connection:
        assert connection.execute("SELECT count(*) FROM read_parquet(?)", [str(copy)]).fetchone() == (21,)
        assert connection.execute(query, [str(copy)]).fetchall() == [
            ("a2000", "RTX A2000", 0, 0, 0.0, 10.0),
            ("v100", "Tesla V100-16GB", 1, 0, 40.0, 10.0),
            ("v100", "Tesla V100-16GB", 2, 1, 40.0, 10.0),
        ]
    assert {path.name for path in run.root.iterdir()} == {
        "plan.json",
        "job.json",
        "nodes",
        "summary.json",
        "steps.parquet",
    }


def test_solo_speeds_are_the_basis_of_efficiency_only_when_every_host_has_one(tmp_path: Path) -> None:
    run = two_hosts(tmp_path / "run")
    summary = analyse(run, solo={"a2000": 190.0, "v100": 1730.0})
    assert (summary.efficiency, summary.efficiency_basis) == (pytest.approx(0.5), "solo")
    assert analyse(run, solo={"a2000": 190.0}).efficiency_basis == "estimated"


def test_a_pipelines_hosts_have_contributed_by_their_part_of_the_work(tmp_path: Path) -> None:
    hosts = [Host("a2000"), Host("v100")]
    events = {
        0: [start(rank=0, work=0.3), *(step(n, 100, 2, 40, 6, 2) for n in range(10)), end()],
        1: [start(rank=1, work=0.7), *(step(n, 0, 2, 40, 6, 2) for n in range(10)), end()],
    }
    summary = analyse(write_run(tmp_path, hosts, events, settings={"warmup_steps": 0}))
    assert summary.samples_per_s == pytest.approx(2000)  # 100 in 50 ms
    assert [each.samples_per_s for each in summary.nodes] == pytest.approx([600, 1400])
    assert [each.own_samples_per_s for each in summary.nodes] == pytest.approx(
        [300 / 0.44, 700 / 0.44]
    )  # in 10 times 2 + 40 + 2 ms


def test_loading_counts_for_a_host_alone_as_it_does_in_the_cluster(tmp_path: Path) -> None:
    """Of an input-bound script the efficiency and the time that a host alone would take are based on one speed."""
    hosts = [Host("r3090"), Host("v100")]
    events = {
        rank: [start(rank=rank), *(step(n, 64, load, 69, 400 - load, 2, t_ms=640) for n in range(10)), end()]
        for rank, load in ((0, 143), (1, 390))
    }
    summary = analyse(write_run(tmp_path, hosts, events, settings={"warmup_steps": 0}))
    alone = [64 / 0.214, 64 / 0.461]
    assert [each.own_samples_per_s for each in summary.nodes] == pytest.approx(alone)
    assert summary.efficiency == pytest.approx(200 / sum(alone))
    assert [each.of_time for each in summary.faster] == pytest.approx([200 / alone[0]])


def test_time_lost_after_a_step_is_not_counted_twice(tmp_path: Path) -> None:
    """a2000 loses 10 ms after its even steps; v100 waits for it in the odd ones: 220 ms in two steps, not 240."""
    slow = [step(n, 10, 0, 90, 10, 10 if n % 2 else 20, t_ms=110) for n in range(8)]
    fast = [step(n, 10, 0, 90, 10 if n % 2 else 0, 0, t_ms=100 if n % 2 == 0 else 120) for n in range(8)]
    run = write_run(tmp_path / "run", TWO, {0: slow, 1: fast}, settings={"warmup_steps": 0})
    assert analyse(run).samples_per_s == pytest.approx(20 * 8 / 0.88)


def test_the_cluster_takes_as_long_as_its_slowest_rank(tmp_path: Path) -> None:
    slow, fast = [step(n, 10, 0, 90, 10, 0) for n in range(8)], [step(n, 10, 0, 60, 20, 0) for n in range(8)]
    assert analyse(write_run(tmp_path / "run", TWO, {0: slow, 1: fast})).samples_per_s == pytest.approx(200)


def test_of_a_repeated_step_the_last_line_counts(tmp_path: Path) -> None:
    again = [step(number, 64, 2, 40, 6, 2) for number in range(10)]
    summary = analyse(write_run(tmp_path / "run", ONE, {0: [*ten_steps(), *again]}))
    assert (summary.samples_per_s, summary.samples_total) == (pytest.approx(1280), 640)
    assert "10 lines with a step number seen before" in summary.warnings[0]


def test_of_ranks_that_were_restarted_the_last_start_is_measured(tmp_path: Path) -> None:
    """Six steps, a death, and from step 4 on twelve more that take half as long."""
    first = [step(n, 32, 2, 80, 16, 2) for n in range(6)]
    second = [step(n, 32, 2, 40, 6, 2) for n in range(4, 16)]
    metrics = {rank: [start(), *first, start(), *second, end()] for rank in (0, 1)}
    summary = analyse(write_run(tmp_path / "run", TWO, metrics))
    assert (summary.restarts, summary.steps, summary.warmup_steps_left_out) == (1, 9, 3)
    assert summary.samples_per_s == pytest.approx(64 / 0.05)
    assert summary.samples_total == 64 * 16
    assert summary.warnings == ("The ranks were restarted once; speeds and times are those after the last start.",)


def test_a_host_slow_at_loading_is_named_with_that_reason(tmp_path: Path) -> None:
    slow = [step(n, 32, 45, 20, 5, 1) for n in range(10)]
    fast = [step(n, 32, 3, 20, 47, 1) for n in range(10)]
    straggler = analyse(write_run(tmp_path / "run", TWO, {0: slow, 1: fast})).straggler
    assert straggler is not None
    assert (straggler.node, straggler.reason) == ("a2000", "loads data for 45.0 ms a step, v100 for 3.00 ms")


def test_a_host_with_too_large_a_share_is_named_with_that_reason(tmp_path: Path) -> None:
    slow, fast = [step(n, 64, 2, 80, 5, 1) for n in range(10)], [step(n, 32, 2, 40, 45, 1) for n in range(10)]
    straggler = analyse(write_run(tmp_path / "run", TWO, {0: slow, 1: fast})).straggler
    assert straggler is not None
    assert straggler.reason == "computes 80.0 ms a step for its share, v100 40.0 ms"


def test_on_a_single_host_the_straggler_is_a_rank(tmp_path: Path) -> None:
    fast, slow = [step(n, 32, 2, 40, 45, 1) for n in range(10)], [step(n, 32, 2, 80, 5, 1) for n in range(10)]
    straggler = analyse(write_run(tmp_path / "run", [Host("box", 2)], {0: fast, 1: slow})).straggler
    assert straggler is not None
    assert (straggler.node, straggler.rank) == ("box", 1)
    assert straggler.reason == "takes 2.0x as long per sample as the other ranks"


def test_one_slow_rank_among_many_gives_its_host_away(tmp_path: Path) -> None:
    fast, slow = [step(n, 32, 2, 40, 45, 1) for n in range(10)], [step(n, 32, 2, 80, 5, 1) for n in range(10)]
    run = write_run(
        tmp_path / "run", [Host("a", 2), Host("b", 2), Host("c", 1)], {0: fast, 1: fast, 2: slow, 3: fast, 4: fast}
    )
    straggler = analyse(run).straggler
    assert straggler is not None
    assert (straggler.node, straggler.rank) == ("b", None)
    assert straggler.reason == "takes 2.0x as long per sample as the others"


def test_a_host_late_for_another_reason_is_not_blamed_for_its_data(tmp_path: Path) -> None:
    slow, fast = [step(n, 32, 2.1, 40, 5, 30) for n in range(10)], [step(n, 32, 2, 40, 34, 1) for n in range(10)]
    straggler = analyse(write_run(tmp_path / "run", TWO, {0: slow, 1: fast})).straggler
    assert straggler is not None
    assert straggler.reason.startswith("arrives last")


def test_a_wait_within_the_noise_names_nobody(tmp_path: Path) -> None:
    """Each host is 8 % late in every second step: much waiting, nobody's in particular."""
    first = [step(n, 32, 0, 92 if n % 2 else 100, 8 if n % 2 else 0, 0) for n in range(12)]
    second = [step(n, 32, 0, 100 if n % 2 else 92, 0 if n % 2 else 8, 0) for n in range(12)]
    summary = analyse(write_run(tmp_path / "run", TWO, {0: first, 1: second}, settings={"warmup_steps": 0}))
    assert node(summary, "v100").wait_ms == pytest.approx(4)
    assert summary.straggler is None


def test_gpu_use_is_averaged_and_gives_the_memory_when_the_rank_does_not(tmp_path: Path) -> None:
    gpu = [{"event": "gpu", "index": 0, "utilisation": use, "memory_bytes": 2**30 * use} for use in (1, 3)]
    garbage = b'{"event":"gpu","utilisation":900,"memory_bytes":-1}\n[]\n\xff\n{"event":"gpu","utilisation":50'
    files = {ONE[0].name: lines(gpu) + garbage}
    summary = analyse(write_run(tmp_path / "run", ONE, {0: [start()]}, gpu=files))
    assert (summary.nodes[0].gpu_utilisation, summary.nodes[0].peak_memory_bytes) == (2.0, 3 * 2**30)


def test_a_paced_run_has_neither_loss_nor_accuracy(tmp_path: Path) -> None:
    evaluation = {"event": "eval", "accuracy": 0.9}
    paced = [Host("a2000", paced=True)]
    summary = analyse(write_run(tmp_path / "run", paced, {0: [*ten_steps(), evaluation, end(valid=False)]}))
    assert summary.paced
    assert (summary.loss, summary.accuracy, summary.nodes[0].valid) == (None, None, False)
    assert "the lab's CPU was the limit" in summary.warnings[0]


TARGET = {"event": "target", "epoch": 2, "step": 299, "samples": 19_200, "accuracy": 0.9912, "total_s": 75.2}


@pytest.mark.parametrize(
    ("event", "words"),
    [
        (TARGET, "99.00 % reached (99.12 %) after 1m15s, 300 updates, 19,200 samples, in epoch 3"),
        ({**TARGET, "accuracy": 7}, "99.00 % not reached"),
        ({"event": "other"}, "99.00 % not reached"),
    ],
)
def test_a_target_is_reached_or_not(tmp_path: Path, event: dict[str, object], words: str) -> None:
    begin = start(rank=0, settings={"warmup_steps": 3, "target_accuracy": 0.99})
    summary = analyse(write_run(tmp_path / "run", ONE, {0: [begin, *ten_steps(), event, end()]}))
    assert summary.target and summary.target.words == words
    assert f"<dd>{words}</dd>" in render_report(summary.model_copy(update={"accuracy": 0.98}))
    assert analyse(two_hosts(tmp_path / "without")).target is None


def test_a_script_that_writes_only_samples_and_the_time_of_day_still_has_a_speed(tmp_path: Path) -> None:
    events = [{"event": "step", "step": n, "samples": 10, "wall": 1.8e9 + n / 4} for n in range(10)]
    summary = analyse(write_run(tmp_path / "run", ONE, {0: events}, kind="script", settings={}))
    assert summary.samples_per_s == pytest.approx(40)
    assert (summary.efficiency, summary.nodes[0].compute_ms) == (None, None)


def test_a_script_that_writes_only_samples_has_a_total_and_no_speed(tmp_path: Path) -> None:
    events = [{"event": "step", "step": n, "samples": 10} for n in range(10)]
    summary = analyse(write_run(tmp_path / "run", ONE, {0: events}, kind="script", settings={}))
    assert (summary.samples_total, summary.samples_per_s) == (100, None)
    assert any("without times" in warning for warning in summary.warnings)


@pytest.mark.parametrize(("backend", "warns"), [(None, True), ("gloo", False)])
def test_ranks_of_a_script_that_never_met_are_said_to_have_trained_apart(
    tmp_path: Path, backend: str | None, warns: bool
) -> None:
    events = {rank: [start(backend=backend, samples_from="loader"), *ten_steps()] for rank in (0, 1)}
    summary = analyse(write_run(tmp_path / "run", TWO, events, kind="script", settings={}))
    assert any("Each rank trained by itself" in warning for warning in summary.warnings) == warns


def test_of_ranks_that_trained_apart_each_has_its_own_speed(tmp_path: Path) -> None:
    """None waits for another: the slower one's time is not the faster one's."""
    slow, fast = [step(n, 32, 4, 12, 0, 0) for n in range(10)], [step(n, 32, 1, 7, 0, 0) for n in range(10)]
    begun = start(backend=None, samples_from="loader")
    summary = analyse(write_run(tmp_path, TWO, {0: [begun, *slow, end()], 1: [begun, *fast, end()]}))
    assert [node.samples_per_s for node in summary.nodes] == [pytest.approx(2000), pytest.approx(4000)]
    assert summary.samples_per_s == pytest.approx(6000)
    assert (summary.efficiency, summary.straggler, summary.bound, summary.faster) == (None, None, None, ())
    assert summary.slow_words == "2 ranks trained 2 networks, each by itself."


# ---- what is missing or damaged -----------------------------------------------------------------------------------


def test_a_run_that_failed_before_its_first_step_still_has_a_summary(tmp_path: Path) -> None:
    failure = {
        "node": "v100",
        "rank": 1,
        "exit_code": 1,
        "reason": "rank 1 ended",
        "log_line": "\x1b[31mOOM\x1b[0m\x07",
    }
    run = write_run(tmp_path / "run", TWO, {}, state="failed", first_failure=failure)
    summary = analyse(run)
    assert (summary.state, summary.samples_per_s, summary.efficiency, summary.straggler) == ("failed", None, None, None)
    assert summary.missing[0] == "a2000: no metrics of rank 0 (No such file or directory)."
    assert summary.first_failure is not None
    assert summary.first_failure.log_line == "OOM"
    assert run.steps.exists()


def test_an_absent_rank_leaves_waits_and_efficiency_open_and_says_so(tmp_path: Path) -> None:
    summary = analyse(write_run(tmp_path / "run", TWO, {1: ten_steps()}))
    assert summary.samples_per_s == pytest.approx(640)
    assert (summary.efficiency, summary.straggler, node(summary, "v100").wait_ms) == (None, None, None)
    assert summary.missing[0].startswith("a2000: no metrics of rank 0")
    assert "1 of 2 ranks reported steps" in summary.missing[1]


def test_steps_that_a_dead_rank_never_reported_do_not_count(tmp_path: Path) -> None:
    summary = analyse(write_run(tmp_path / "run", TWO, {0: ten_steps()[:6], 1: ten_steps()}))
    assert summary.steps == 3
    assert summary.samples_per_s == pytest.approx(64 / 0.05)


BAD_LINES = {
    "a cut-off last line": (b'{"event":"step","step":11,"sam', "the last line is cut off"),
    "garbage": (b"Traceback (most recent call last):\n\xff\xfe\n", "2 lines not JSON events"),
    "a line of 3 MB": (b'{"event":"step","x":"' + b"y" * 3_000_000 + b'"}\n', "1 line too long"),
    "a negative time": (lines([step(11, 32, 1, -5, 1, 1)]), "1 line with an impossible number"),
    "NaN samples": (b'{"event":"step","step":11,"samples":NaN,"t_ms":5}\n', "1 line with an impossible number"),
    "1e309": (b'{"event":"step","step":11,"samples":1,"t_ms":1e309}\n', "1 line with an impossible number"),
    "a number as text": (b'{"event":"step","step":11,"samples":"1"}\n', "1 line with an impossible number"),
    "half a sample": (b'{"event":"step","step":11,"samples":0.5}\n', "1 line with an impossible number"),
    "a comma for a point": (b'{"event":"step","step":11,"samples":1,"t_ms":1,5}\n', "1 line not JSON events"),
    "a list": (b"[1, 2]\n", "1 line not JSON events"),
    "a repeated step": (lines([step(9, 32, 2, 40, 6, 2)]), "1 line with a step number seen before"),
    "a newer schema": (lines([start(schema=7)]), "schema 7; this orch reads up to 1"),
}


@pytest.mark.parametrize("bad", BAD_LINES, ids=str)
def test_a_bad_line_is_reported_and_changes_no_figure(tmp_path: Path, bad: str) -> None:
    line, words = BAD_LINES[bad]
    whole = analyse(write_run(tmp_path / "whole", ONE, {0: ten_steps()}))
    damaged = analyse(write_run(tmp_path / "damaged", ONE, {0: lines(ten_steps()) + line}))
    assert any(words in warning for warning in damaged.warnings), damaged.warnings
    assert damaged.samples_per_s == whole.samples_per_s == pytest.approx(640)
    assert damaged.samples_total == 320


def test_a_last_line_without_newline_counts_when_it_is_whole(tmp_path: Path) -> None:
    summary = analyse(write_run(tmp_path / "run", ONE, {0: lines(ten_steps()).rstrip(b"\n")}))
    assert (summary.steps, summary.warnings) == (7, ())


def test_a_loss_that_is_not_a_number_costs_the_step_nothing_but_its_loss(tmp_path: Path) -> None:
    summary = analyse(write_run(tmp_path / "run", ONE, {0: lines(ten_steps()).replace(b"16.0", b"NaN")}))
    assert (summary.steps, summary.loss, summary.warnings) == (7, None, ())


def test_a_folder_without_a_plan_is_refused_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(OrchError, match=r"plan\.json.*orch collect"):
        analyse(RunFolder(tmp_path))
    (tmp_path / "plan.json").write_text('{"schema": 1}')
    with pytest.raises(OrchError, match=r"plan\.json: job: Field required"):
        analyse(RunFolder(tmp_path))


def test_a_folder_without_the_job_record_is_analysed_and_says_so(tmp_path: Path) -> None:
    run = two_hosts(tmp_path / "run")
    run.job.unlink()
    summary = analyse(run)
    assert summary.state == "unknown"
    assert "how it ended is not known" in summary.missing[0]


@pytest.mark.parametrize("content", [None, "", "[]", '{"job": 3}', "\x00"])
def test_a_summary_that_cannot_be_read_is_one_clear_message(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "summary.json").write_text(content)
    with pytest.raises(OrchError, match=r"summary\.json.*orch collect"):
        Summary.load(RunFolder(tmp_path))


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
FIELDS = ["step", "samples", "t_ms", "exposed_ms", "compute_ms", "loss", "wall", "epoch", "schema", "accuracy"]
FIELDS += ["per_class", "valid", "settings", "device_name", "utilisation", "memory_bytes", "peak_memory_bytes"]
EVENT = st.fixed_dictionaries(
    {"event": st.sampled_from(["start", "step", "epoch", "eval", "gpu", "end"]) | VALUES},
    optional={name: st.sampled_from([0, 1, 1e308, 2**53, -1]) | VALUES for name in FIELDS},
)
LINE = st.binary(max_size=60) | EVENT.map(lambda event: json.dumps(event).encode())


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(st.lists(LINE, max_size=12))
def test_whatever_a_rank_writes_there_is_a_summary_of_plain_json(tmp_path: Path, garbled: list[bytes]) -> None:
    content = b"\n".join([lines(ten_steps()), *garbled])
    run = write_run(tmp_path / "run", TWO, {0: content, 1: ten_steps()})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        summary = analyse(run)
    assert Summary.load(run) == summary
    text = run.summary.read_text()
    assert "NaN" not in text
    assert "Infinity" not in text


def test_forty_thousand_lines_cost_no_more_each_than_ten_thousand(tmp_path: Path) -> None:
    text = lines([step(7, 32, 2, 40, 6, 2)]).decode()

    def run_of(count: int) -> RunFolder:
        content = "".join(text.replace('"step": 7', f'"step": {number}') for number in range(count)).encode()
        return write_run(tmp_path / str(count), ONE, {0: content})

    few, many = run_of(10_000), run_of(40_000)
    assert growth(lambda: analyse(few), lambda: analyse(many)) < 8  # 16 if each line looks at each other
    assert analyse(many).steps == 39_997


def test_a_ctrl_c_during_a_query_is_one() -> None:
    """DuckDB reports it as an error of its own."""
    cross = "SELECT sum(a.range * b.range) FROM range(20000) a, range(100000) b"
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt), connected() as connection:
        timer.start()
        connection.execute(cross).fetchone()
