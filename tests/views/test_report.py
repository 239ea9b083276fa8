from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.table import Table

from orchestrator.paths import RunFolder
from orchestrator.results import Summary
from orchestrator.results.analyse import analyse
from orchestrator.views import draw_throughput, efficiency_words, host_tables, render_report, write_report
from orchestrator.views.report import headline, outcome
from tests.support.browser import CHROMIUM
from tests.support.pages import PNG, Page, assert_self_contained
from tests.support.run_folders import Host, end, start, step, two_hosts, write_run
from trainer.shared import EXPERIMENTS

HOSTILE = '<script>alert("x")</script>"><img src=//evil.example/x onerror=alert(1)>'
FAILURE = {"node": "v100", "rank": 1, "exit_code": 1, "reason": "ended with exit code 1", "log_line": HOSTILE}


def ten_steps() -> list[Any]:
    return [step(number, 32, 2, 40, 6, 2) for number in range(10)]


def page_of(run: RunFolder) -> Page:
    return Page(write_report(run, analyse(run)).read_text())


def test_the_page_holds_everything_within_itself(tmp_path: Path) -> None:
    run = two_hosts(tmp_path / "run")
    page = page_of(run)
    assert_self_contained(page)
    assert page.open == []
    assert {"svg", "title"} <= {*page.tags}
    assert "prefers-color-scheme: dark" in page.style
    assert "@media print" in page.style
    assert run.chart.read_bytes().startswith(PNG)


def test_the_page_says_who_did_what_and_who_made_the_others_wait(tmp_path: Path) -> None:
    text = page_of(two_hosts(tmp_path / "run")).text
    for sentence in (
        "v100 did 83 % of the work; the cluster reached 54 % of its hosts' combined standalone speed (estimated).",
        "v100 waited for a2000, 40.0 ms (40 %) of each step: a2000 takes 5.0x as long per sample as v100.",
        "960 samples/s together, against 1,778, the sum of what each host does alone (estimated from each host's own",
        "v100 Tesla V100-16GB 2.00 40.0 10.0 40.0 8.00",
        "Tesla V100-16GB 1 2 800 1,600 83 %",
        "Tesla V100-PCIE-16GB 2.0.1 2.14.3 nccl 2.5Gbps",
        "test accuracy 99.23 %",
        "class 0 1 accuracy 99.0 % 99.5 %",
        "strategy allreduce",
        "How to read this",
    ):
        assert sentence in text, sentence


def test_the_footnote_of_a_star_stands_only_where_a_star_does(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    summary = analyse(two_hosts(tmp_path / "run"))
    host_tables.print_summary(summary)
    assert "* estimated" in capsys.readouterr().out
    monkeypatch.setattr(host_tables, "table", lambda *words, **more: Table("node"))
    host_tables.print_summary(summary.model_copy(update={"efficiency": None}))
    assert "*" not in capsys.readouterr().out


def test_a_measured_basis_is_called_measured(tmp_path: Path) -> None:
    summary = analyse(two_hosts(tmp_path / "run"), solo={"a2000": 190.0, "v100": 1730.0})
    assert efficiency_words(summary).endswith(
        "against 1,920, the sum of what each host does alone (measured with each host alone)."
    )
    assert "estimated" not in Page(render_report(summary)).text


def test_what_the_efficiency_leaves_out_is_named_and_the_whole_run_stands_beside_it(tmp_path: Path) -> None:
    run = two_hosts(tmp_path / "run")
    summary = analyse(run)
    assert summary.whole_samples_per_s == pytest.approx(7 * 96 / 9.5)
    text = page_of(run).text
    assert "Left out: the first 3 steps, evaluation and checkpoints." in text
    assert "Whole run: 9.5s by the wall clock, from the start of the ranks to their end: 70.7 samples/s, 7 %" in text
    local = summary.model_copy(update={"settings": {"fidelity": "local"}})
    assert local.left_out_words.endswith("checkpoints and the averages that wait for these two or for the end")
    assert summary.model_copy(update={"restarts": 1}).wall_clock_words is None


def test_published_figures_stand_beside_this_run_with_their_hardware(tmp_path: Path) -> None:
    text = page_of(two_hosts(tmp_path / "run")).text
    assert "Measured by its authors on: 8 x RTX 3090, PyTorch 1.12" in text
    ours = "this run"
    assert text.count("This run: 1 x RTX A2000, 2 x Tesla V100-16GB, batch 96.") == 3
    assert f"nccl 3 9.50 – 99.23 % {ours} NCCL 1 200.97 1.00 99.56 % published" in text
    assert f"allreduce, 3 processes, num_workers 2 9.50 99.23 % {ours}" in text
    assert f"2 0.0020 0.0980 9.50 99.23 % {ours} 0 0.0064 0.0011 72.80 99.08 % published" in text


def test_the_mixed_cluster_study_is_named_though_it_gives_no_times(tmp_path: Path) -> None:
    chosen = {"model": "resnet152", "data": "cifar10", "strategy": "ddp"}
    text = page_of(two_hosts(tmp_path / "run", exp="resnet152_cifar", settings=chosen)).text
    assert "The study gives no times." in text
    assert "exposed sync" in text


def test_settings_that_nobody_chose_are_folded(tmp_path: Path) -> None:
    chosen = {"exp": "mnist_lenet", "lr": EXPERIMENTS["mnist_lenet"]["lr"], "batch": 7, "num_workers": 2}
    page = page_of(two_hosts(tmp_path / "run", exp="mnist_lenet", settings=chosen))
    head, _, folded = page.text.partition(" as mnist_lenet has them ")
    assert "batch 7" in head and "num_workers 2" in head and "lr 0." not in head
    assert "lr 0." in folded and {"details", "summary"} <= set(page.tags)
    assert "figure img { min-width: 0; }" in page.style


def test_a_persons_own_script_is_compared_with_no_study(tmp_path: Path) -> None:
    assert "published" not in page_of(two_hosts(tmp_path / "run", kind="script")).text


def test_a_paced_run_says_so_and_shows_neither_loss_nor_accuracy(tmp_path: Path) -> None:
    evaluation = {"event": "eval", "accuracy": 0.91, "per_class": [0.9]}
    run = write_run(tmp_path / "run", [Host("a2000", paced=True)], {0: [start(), *ten_steps(), evaluation, end()]})
    text = page_of(run).text
    assert "A paced run" in text
    assert "test accuracy 9" not in text
    assert "What it learned" not in text


def test_the_loss_of_text_is_shown_in_bits_per_byte_as_recorded(tmp_path: Path) -> None:
    evaluation = {"event": "eval", "accuracy": 0.5, "loss": 9.0, "bits_per_byte": 1.234}
    run = write_run(tmp_path / "run", [Host("a2000")], {0: [start(), *ten_steps(), evaluation, end()]})
    assert "test accuracy, 1.234 bits per byte" in page_of(run).text


def test_a_run_that_failed_before_its_first_step_has_a_page_that_starts_with_the_failure(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [Host("a2000"), Host("v100")], {}, state="failed", first_failure=FAILURE)
    page = page_of(run)
    assert_self_contained(page)
    assert "The job failed: rank 1 on v100: ended with exit code 1" in page.text
    assert HOSTILE in page.text
    assert "v100: no metrics of rank 1" in page.text
    assert not run.chart.exists()


def test_a_script_without_metrics_has_a_page_of_exit_codes_gpu_use_and_logs_alone(tmp_path: Path) -> None:
    use = [{"event": "gpu", "rank": 1, "index": 0, "utilisation": 80, "memory_bytes": 3 * 2**30}]
    hosts = [Host("a2000"), Host("v100", 2)]
    run = write_run(tmp_path / "run", hosts, {}, kind="script", settings={}, state="failed", gpu={"v100": use})
    run.agent("v100").write_text('{"ranks": {"1": {"exit_code": 7, "signal": null}, "2": {"signal": "SIGKILL"}}}')
    run.agent("a2000").write_text('{"ranks": {"0": {"exit_code": "seven"}}}')
    (run.rank("v100", 1) / "stderr.log").write_text(f"{'x' * 20_000}\n\x1b[31m{HOSTILE}\n")
    page = page_of(run)
    assert_self_contained(page)
    for shown in ("exit code 7", "ended by SIGKILL", "unknown", "80 %", "3.0GiB", "nodes/v100/rank-1/stderr.log"):
        assert shown in page.text
    assert HOSTILE in page.text
    assert "No rank has metrics" in page.text
    assert "rank-2/stdout.log" not in page.text
    for absent in ("samples/s", "Where a step", "By GPU type", "How to read", "steps measured", "efficiency"):
        assert absent not in page.text
    assert Summary.load(run).metrics is False


def test_hostile_names_and_log_lines_stay_text(tmp_path: Path) -> None:
    values = start(device_name=HOSTILE, host=HOSTILE, torch=HOSTILE, model=HOSTILE, backend=HOSTILE)
    evaluation = {"event": "eval", "accuracy": 0.5, "per_class": {HOSTILE[:70]: 0.5}}
    hosts = [Host("$x_{<b>$", gpu=HOSTILE), Host("東京", gpu="$\\frac$")]
    run = write_run(
        tmp_path / "run",
        hosts,
        {0: [values, *ten_steps(), evaluation], 1: ten_steps()},
        exp="$\\frac$",
        settings={HOSTILE: HOSTILE, "strategy": HOSTILE},
        state="failed",
        first_failure={**FAILURE, "node": HOSTILE, "reason": HOSTILE},
    )
    page = page_of(run)
    assert_self_contained(page)
    assert page.tags.count("img") == 0
    assert page.open == []
    assert page.text.count(HOSTILE) >= 8


def test_an_absent_ranks_host_is_not_said_to_have_done_nothing(tmp_path: Path) -> None:
    summary = analyse(write_run(tmp_path / "run", [Host("a2000"), Host("v100")], {1: ten_steps()}))
    assert headline(summary) == "640 samples/s from the ranks that reported; the others left no figures."
    assert {group.share for group in summary.by_gpu.values()} == {None}


def test_a_headline_names_long_waits_also_if_no_host_is_slower_throughout(tmp_path: Path) -> None:
    by_turns = {
        rank: [step(n, 32, 2, 20 if n % 2 == rank else 80, 70 if n % 2 == rank else 10, 2) for n in range(10)]
        for rank in range(2)
    }
    apart = headline(analyse(write_run(tmp_path / "ddp", [Host("a"), Host("b")], by_turns)))
    assert apart.startswith("b waited 34.3 ms (36 %) of each step, but the steps vary too much to name a slower host.")
    settings = {"strategy": "pipeline"}
    cut = headline(analyse(write_run(tmp_path / "cut", [Host("a"), Host("b")], by_turns, settings=settings)))
    assert " of each step, while the pipeline fills and drains. " in cut


def test_headlines_for_one_host_for_even_hosts_and_for_no_figures(tmp_path: Path) -> None:
    one = analyse(write_run(tmp_path / "one", [Host("v100")], {0: ten_steps()}))
    assert outcome(one) == "v100 did all the work at 640 samples/s, 88 % of its standalone speed."
    assert headline(one) == "Compute-bound: 80 % of each step is v100's own forward and backward."
    even = analyse(write_run(tmp_path / "even", [Host("a"), Host("b")], {0: ten_steps(), 1: ten_steps()}))
    assert (
        headline(even)
        == "No host held the others up. Compute-bound: 80 % of each step is a's own forward and backward."
    )
    assert outcome(even).startswith("2 hosts did equal parts of the work; the cluster reached 88 %")
    none = analyse(write_run(tmp_path / "none", [Host("a")], {0: [{"event": "step", "step": 0, "samples": 1}]}))
    assert headline(none) == "The job succeeded; no speed could be measured."


def test_a_chart_of_an_earlier_analysis_goes_when_there_is_nothing_to_draw(tmp_path: Path) -> None:
    chart = tmp_path / "throughput.png"
    chart.write_bytes(PNG)
    assert not draw_throughput(Summary(schema=1, job="x", experiment="x", state="failed", world_size=1), chart)
    assert not chart.exists()


def test_analyse_and_report_import_no_torch_and_analyse_no_matplotlib() -> None:
    program = "import sys, orchestrator.results.analyse; a = set(sys.modules); import orchestrator.views.report\n"
    program += "assert not {'torch', 'matplotlib', 'jinja2', 'fabric'} & a\n"
    program += "assert not {'torch', 'matplotlib', 'fabric'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[2])


def test_a_failure_comes_before_its_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = two_hosts(tmp_path / "run", state="failed", first_failure={**FAILURE, "log_line": "RuntimeError: no"})
    host_tables.print_summary(analyse(run))
    shown = capsys.readouterr().out.splitlines()
    assert shown[:2] == ["first cause: v100: ended with exit code 1", "  its log: RuntimeError: no"]


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
@pytest.mark.parametrize(
    ("scheme", "page_colour"), [("0", (20, 24, 29)), ("1", (246, 247, 249))], ids=["dark", "light"]
)
def test_a_real_browser_draws_the_page_offline(tmp_path: Path, scheme: int, page_colour: tuple[int, ...]) -> None:
    from matplotlib.image import imread

    run = two_hosts(tmp_path / "run", state="failed", first_failure=FAILURE)
    write_report(run, analyse(run))
    shot = tmp_path / "shot.png"
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    command += ["--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={tmp_path / 'profile'}"]
    command += [f"--blink-settings=preferredColorScheme={scheme}", "--window-size=1000,1400", f"--screenshot={shot}"]
    subprocess.run([*command, run.report.as_uri()], check=True, capture_output=True, timeout=120)
    pixels = (imread(shot)[:, :, :3] * 255).round().astype(int)
    assert tuple(pixels[2, 2]) == page_colour
    if page_colour[0] < 128:  # no white box around the chart
        assert (pixels == 255).all(axis=2).sum() < 1000
    blue_of_a_bar = (pixels == (0, 0x72, 0xB2)).all(axis=2).sum()
    assert blue_of_a_bar > 1000


@pytest.mark.parametrize(
    ("settings", "overlapped"),
    [
        ({"strategy": "ddp"}, True),
        ({"strategy": "fsdp", "fidelity": "exact"}, True),
        ({"strategy": "ddp", "fidelity": "half"}, True),
        ({"strategy": "ddp", "fidelity": "local"}, False),
        ({"strategy": "ddp", "fidelity": "compressed"}, False),
        ({"strategy": "allreduce", "fidelity": "exact"}, False),
    ],
)
def test_only_what_travels_beside_backward_is_called_exposed(
    tmp_path: Path, settings: dict[str, str], overlapped: bool
) -> None:
    summary = analyse(two_hosts(tmp_path)).model_copy(update={"settings": settings})
    assert summary.overlapped == overlapped
    assert ("exposed" in render_report(summary)) == overlapped
