"""Tables on a narrow screen: ids and figures stay whole, and the columns go that a person needs least."""

import json
import re

import pytest

from orchestrator.jobs import FirstFailure
from orchestrator.paths import Home
from orchestrator.results.analyse import analyse
from orchestrator.store import Store
from orchestrator.studies import FIGURES, Done, Outcome, RowRun, load_study, study_names
from orchestrator.views import console, dispensable, host_tables, job_table
from orchestrator.views import console as figures
from orchestrator.views import console as tables
from orchestrator.views.study_table import cells, titles
from tests.support.plan_command import RESNET, lab_home, orch
from tests.support.remembered import cluster, job
from tests.support.run_folders import two_hosts

ID = "resnet152_cifar-20261121-{:04d}-k3f"
FAILURE = FirstFailure(node="v100", rank=1, reason="rank 1 was killed by SIGKILL, most likely since memory ran out")


@pytest.fixture
def screen(monkeypatch):
    """Sets a width, and gives what is shown on a screen of it."""

    def show(width, print_it, rows=""):
        """rows: how the lines of the table begin; sentences beside it are folded by the terminal."""
        monkeypatch.setattr(console.out, "width", width)
        with console.out.capture() as shown:
            print_it()
        shown = [line.rstrip() for line in re.sub(r"\x1b\[[^m]*m", "", shown.get()).splitlines()]
        lines = [line for line in shown if re.match(rows, line)]
        assert max(map(len, lines)) <= width, lines
        return lines

    return show


def some_jobs(*clusters):
    ended = {"state": "failed", "ended": "2026-11-21T11:02:03+00:00", "exit_code": 137, "first_failure": FAILURE}
    jobs = [job(ID.format(n), "2026-11-21T09:00:00+00:00", cluster=c, **ended) for n, c in enumerate(clusters)]
    return [*jobs, job(ID.format(99), "2026-11-21T09:00:00+00:00", cluster=clusters[0])]


def test_the_ids_of_jobs_are_whole_on_eighty_columns(screen):
    header, first, *_ = lines = screen(80, lambda: job_table.print_jobs(some_jobs("lab", "lab")))
    assert header.split() == ["job", "state", "started", "took", "exit"]
    assert first.split()[:2] == [ID.format(0), "failed"] and first.split()[-1] == "137"
    assert [line.split()[1] for line in lines if line.startswith(ID.format(99))] == ["running"]
    shown = " ".join("\n".join(lines).split())
    for number in (0, 1):  # why they failed, below the table
        assert f"{ID.format(number)}: v100: rank 1 was killed by SIGKILL, most likely since memory ran out" in shown


def test_what_runs_and_where_stands_below_the_job_where_there_is_no_room_beside_it(screen):
    nodes = tuple(f"gpu{number:02d}" for number in range(32))
    jobs = [job.model_copy(update={"exp": "resnet152_cifar", "nodes": nodes}) for job in some_jobs("lab")]
    header, first, second, *_ = screen(80, lambda: job_table.print_jobs(jobs))
    assert header.split() == ["job", "state", "started", "took", "exit"]
    assert first.split()[:2] == [ID.format(0), "failed"] and first.split()[-2:] == ["2:02:03", "137"]
    assert second == "  resnet152_cifar on gpu00,"


def test_columns_that_a_narrow_screen_has_no_room_for_are_named(screen, capsys):
    screen(72, lambda: job_table.print_jobs(some_jobs("lab", "rack")))
    assert "no room for took, exit: a wider terminal" in capsys.readouterr().err
    screen(240, lambda: job_table.print_jobs(some_jobs("lab", "rack")))
    assert capsys.readouterr().err == ""


def test_jobs_of_several_clusters_name_theirs_and_a_wide_screen_shows_all(screen):
    assert "cluster" in screen(100, lambda: job_table.print_jobs(some_jobs("lab", "rack")))[0].split()
    header, first, *_ = screen(240, lambda: job_table.print_jobs(some_jobs("lab", "rack")))
    assert header.split()[-5:] == ["exit", "nodes", "exp", "first", "failure"]
    assert "v100: rank 1 was killed by SIGKILL, most likely since memory ran out" in first
    assert screen(48, lambda: job_table.print_jobs(some_jobs("lab")))[1].split()[0] == ID.format(0)
    assert len(screen(20, lambda: job_table.print_jobs(some_jobs("lab")))) > 3  # folded: nothing of an id is lost


def test_a_long_failure_is_folded_beside_whole_ids(screen):
    lines = screen(130, lambda: job_table.print_jobs(some_jobs("lab")))
    assert any(line.startswith(ID.format(0)) and "v100: rank" in line for line in lines)
    assert " ".join(word for line in lines for word in line.split() if word == "SIGKILL,") == "SIGKILL,"


@pytest.mark.parametrize(
    ("width", "dropped"), [(80, {"network", "of"}), (70, {"network", "of", "shares"}), (110, set())]
)
def test_a_plan_on_a_narrow_screen_drops_columns_and_no_digit(tmp_path, monkeypatch, width, dropped):
    lab_home(tmp_path, monkeypatch)
    document = json.loads(orch("plan", *RESNET, "--json").stdout)
    found, tensor = document["best"], next(way for way in document["ways"] if way["way"]["strategy"] == "tensor")
    monkeypatch.setattr(console.out, "width", width)
    lines = [line.rstrip() for line in orch("plan", *RESNET).stdout.splitlines()]
    header, *rows = [line for line in lines if re.match(r"(fidelity|exact|half|compressed|local)\b", line)]
    assert len(rows) == 7 and max(map(len, (header, *rows))) <= width
    assert {"network", "of", "shares"} - set(header.split()) == dropped
    for row in rows:
        kind = document["pipelines"] if "pipeline" in row else found
        best = tensor if " tensor " in row else kind[row.split()[0]]
        assert {figures.figure(best["samples_per_s"]), figures.figure(best["step_ms"])} <= set(row.split())


def test_the_comparison_of_hosts_fits_sixty_columns(screen, tmp_path):
    summary = analyse(two_hosts(tmp_path / "run"))
    _, row, _ = screen(60, lambda: host_tables.print_hosts(summary), "node|a2000 |v100  ")
    node = summary.nodes[0]
    measured = [node.samples_per_s, node.step_ms.p50, node.compute_ms, node.sync_ms, node.wait_ms]
    assert {figures.figure(value) for value in measured} <= set(row.split())


@pytest.mark.parametrize(
    ("words", "count", "said"),
    [
        ((), 30, ""),
        (("--limit", "3"), 3, "and 27 older, 26 of them not ended: `orch jobs --limit 0` shows all"),
        (("--limit", "0"), 30, ""),
    ],
)
def test_the_list_of_jobs_ends_where_the_options_say(words, count, said, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    store = Store(Home.default())
    store.save_cluster(cluster("lab"), current=True)
    for number in range(30):
        state = "failed" if number in (0, 29, 28, 27) else "lost"
        store.save_job(job(ID.format(number), f"2026-11-21T09:{number:02d}:00+00:00", state=state, ended="x"))
    done = orch("jobs", *words)
    shown = [line.split()[0] for line in done.stdout.splitlines() if line.startswith("resnet")]
    assert shown == [ID.format(29 - n) for n in range(count)]
    assert said in done.stderr.replace("\n", " ") and bool(said) == ("older" in done.stderr)


def a_matrix(hosts):
    names = [f"host-{number:02}" for number in range(hosts)]
    return names, {(a, b): 2.35 for a in names for b in names if a != b}


def test_links_of_many_hosts_stand_in_tables_beneath_each_other(screen):
    names, gbps = a_matrix(20)
    lines = screen(80, lambda: host_tables.print_links(names, gbps), rows=r"from / to|host-")
    headers = [line.split()[3:] for line in lines if line.startswith("from / to")]
    assert [name for header in headers for name in header] == names and len(headers) == 3
    assert sum(line.count("2.35") for line in lines) == 20 * 19
    assert len(screen(200, lambda: host_tables.print_links(names, gbps), rows="from / to")) == 1


@pytest.mark.parametrize("study", study_names())
def test_a_study_keeps_its_rows_names_first_figure_and_the_published_one(screen, study):
    study = load_study(study)
    done = Done(cluster="lab", runs=[RowRun(job="j", figures=dict.fromkeys(FIGURES, 123.4), valid=True)] * 2)
    outcomes = [Outcome(row, done) for row in study.rows]
    header, *rows = [line.split("  ") for line in screen(80, lambda: study_table(study, outcomes))]
    first = FIGURES[study.figures[0]].title
    assert all(name in "  ".join(header) for name in (*study.columns, first, study.published[0]))
    assert len(rows) == len(study.rows) and all(any("123" in cell for cell in row) for row in rows)


def study_table(study, outcomes):
    rows = [cells(study, outcomes, outcome) for outcome in outcomes]
    tables.print_table(titles(study), rows, right_from=len(study.columns), drop=dispensable(study))
