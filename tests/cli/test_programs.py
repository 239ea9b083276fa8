"""`orch run` of a program that is not Python: a shell script, a compiled program, one that the hosts have."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

import pytest

from tests.support.local_cluster import Place

SHOWS = """#!/bin/sh
echo "given $* rank $RANK of $WORLD_SIZE on $ORCH_NODE at ${MASTER_ADDR:?} share ${ORCH_SHARE:-none}"
cat "$(dirname "$0")/beside.txt"
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    place = Place(tmp_path_factory.mktemp("person"))
    proj = place.here / "proj"
    (proj / "beside.txt").write_text("shipped, too\n")
    (proj / "job.sh").write_text(SHOWS)
    (proj / "job.sh").chmod(0o755)
    (proj / "plain.sh").write_text("echo plain $1; exit 7\n")
    (proj / "which.sh").write_text("#!/bin/bash\nexec python -c 'import sys; print(sys.executable)'\n")
    shutil.copy(shutil.which("echo") or "/bin/echo", proj / "compiled")
    return place


def test_a_script_of_the_shell_runs_once_per_rank_with_torchruns_variables(place: Place) -> None:
    done = place.types("run", "--batch", "6", "proj/job.sh", "1", "a b")
    for rank, node in enumerate("ab"):
        assert f"given 1 a b rank {rank} of 2 on {node} at 127.0.0.1 share 3" in done.stdout
    assert done.stdout.count("shipped, too") == 2


@pytest.mark.parametrize(
    ("words", "prints"),
    [
        (("proj/compiled", "3"), "3"),
        (("--folder", "proj", "--", "bash", "plain.sh", "x"), "plain x"),
        (("--", "sh", "-c", "echo $RANK: $0 $1", "x", "y"), "0: x y"),
        (("--", "printf", "%s-%s", "a", "b"), "a-b"),
        (("--", "env", "A=1", "sh", "-c", "echo $A"), "1"),
    ],
)
def test_a_program_of_the_folder_or_of_the_hosts_keeps_its_words(place: Place, words, prints) -> None:
    fails = "plain.sh" in words
    done = place.types("run", "--nodes", "a", *words, code=1 if fails else 0)
    assert prints in done.stdout


def test_its_exit_code_is_the_first_cause(place: Place) -> None:
    done = place.types("run", "--json", "--nodes", "b", "proj/plain.sh", code=1)
    first = json.loads(done.stdout)["first_failure"]
    assert (first["exit_code"], first["node"]) == (7, "b")


def test_python_in_it_is_the_one_of_the_inventory(place: Place) -> None:
    done = place.types("run", "--nodes", "a", "proj/which.sh")
    assert str(place.folder / "quick/bin/python") in done.stdout


def test_a_program_that_no_host_has_is_named(place: Place) -> None:
    done = place.types("run", "--nodes", "a", "--", "no-such-program", code=1)
    assert "no-such-program is no file here: each host starts its own" in done.stderr
    assert "did not start" in done.stderr and "no-such-program" in done.stderr.rpartition("did not start")[2]


def test_the_job_file_and_the_repeated_line_run_it_again(place: Place, tmp_path: Path) -> None:
    place.types("run", "--nodes", "a", "--save", str(tmp_path / "job.yaml"), "--dry-run", "proj/job.sh", "1")
    assert "given 1 rank 0 of 1" in place.types("run", str(tmp_path / "job.yaml")).stdout
    for words in (("proj/job.sh", "1"), ("--folder", "proj", "--", "bash", "job.sh", "1")):
        place.types("run", "--nodes", "a", *words)
        place.types("collect")
        summary = json.loads(place.types("report", "--json").stdout)
        assert any("No rank has metrics" in words for words in summary["missing"])
        repeated = place.types(*shlex.split(summary["repeat"])[1:])
        assert "given 1 rank 0 of 1" in repeated.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--pass-local-rank", "proj/job.sh"), "is no Python script"),
        (("--", "mnist_lenet"), "mnist_lenet is an experiment, not a program: "),
        (("--", "mpirun", "-n", "2", "proj/job.sh"), "mpirun starts processes that orch could not place or end"),
        (("proj/none.sh",), "no such script"),
    ],
)
def test_what_cannot_run_is_refused_before_any_host_is_asked(place: Place, words, said) -> None:
    assert said.rstrip(": ") in place.types("run", "--dry-run", *words, code=2).stderr


def test_a_compiled_program_that_may_not_be_executed_names_the_remedy(place: Place) -> None:
    dull = place.here / "proj/dull"
    shutil.copy(place.here / "proj/compiled", dull)
    dull.chmod(0o644)
    assert "chmod +x proj/dull" in place.types("run", "--dry-run", "proj/dull", code=2).stderr
