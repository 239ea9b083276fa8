"""A script that resumes by itself: `--resume JOB` and `--keep FOLDER`, on two hosts that are this machine."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import signal
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.paths import Home
from orchestrator.planning import run_line, spec_of
from orchestrator.store import Store
from tests.support.disks import small_disk
from tests.support.local_cluster import Place
from tests.support.quick_python import quick_python
from tests.support.ssh_rack import Rack, ssh_rack

SAVES = """
import os, pathlib, sys, time
rank = os.environ["RANK"]
out, checkpoints = pathlib.Path("out"), pathlib.Path(os.environ["ORCH_CHECKPOINTS"])
found = {str(p): p.read_text()[:60] for p in sorted(pathlib.Path(".").rglob("*.txt"))}
found |= {"C/" + p.name: p.read_text() for p in sorted(checkpoints.iterdir())}
print("FOUND", sorted(found.items()), flush=True)
(out / "deep").mkdir(parents=True, exist_ok=True)
if "nothing" in sys.argv:
    sys.exit()
word = sys.argv[1] if len(sys.argv) > 1 else "saved"
if rank == "0":
    (out / "last.txt").write_text(word)
    (checkpoints / "c.txt").write_text(word)
(out / "deep" / f"own-{rank}.txt").write_text(f"{word} by {rank}")
(out / "each.txt").write_text(f"{word} by {rank}")
pathlib.Path("table.txt").write_text(f"changed by {rank}")
if "fails" in sys.argv:  # once all ranks have begun, for the first to end ends the others
    pathlib.Path("began").touch()
    job, _, _, hosts = [*pathlib.Path.cwd().parents][:4]
    until = time.monotonic() + 60
    while len([*hosts.glob(f"*/jobs/{job.name}/src/began")]) < int(os.environ["WORLD_SIZE"]):
        assert time.monotonic() < until, "the other ranks do not begin"
        time.sleep(0.02)
    sys.exit(3)
"""


@pytest.fixture
def place(tmp_path: Path) -> Place:
    place = Place(tmp_path)
    (place.here / "proj/train.py").write_text(SAVES)
    (place.here / "proj/table.txt").write_text("as shipped")
    return place


def job_of(place: Place, *words: str, code: int = 0) -> tuple[str, str]:
    """Its id, and what was said beside it."""
    done = place.types("run", "--json", *words, code=code)
    return str(json.loads(done.stdout)["id"]), done.stderr


def found_by(place: Place, job: str) -> dict[str, dict[str, str]]:
    """By host, what its rank found when it began."""
    logs = {path.parts[-5]: path.read_text() for path in place.folder.glob(f"?/jobs/{job}/rank-*/stdout.log")}
    return {node: dict(ast.literal_eval(text.partition("FOUND ")[2])) for node, text in logs.items()}


def left_on(place: Place, node: str) -> list[str]:
    """What lies in its work folder beside jobs and code."""
    return sorted(p.name for p in (place.folder / node).iterdir() if p.name not in ("jobs", "code", "locks"))


def test_a_job_begins_with_the_files_that_another_wrote_on_the_same_hosts(place: Place) -> None:
    old, _ = job_of(place, "proj/train.py")
    before = {p: (p.read_bytes(), p.stat().st_ino) for p in place.folder.glob(f"?/jobs/{old}/*/**/*.txt")}
    new, said = job_of(place, "--resume", old, "--", "proj/train.py", "later")
    found = found_by(place, new)
    for rank, node in enumerate(("a", "b")):
        assert found[node]["out/each.txt"] == f"saved by {rank}", "each host has its own"
        assert found[node]["table.txt"] == f"changed by {rank}", "the code is the same as then"
        assert {"out/last.txt", "out/deep/own-0.txt", "out/deep/own-1.txt", "C/c.txt"} <= found[node].keys()
        assert found[node]["C/c.txt"] == "saved"
    assert f"carried over from {old}: 5 files" in said
    assert before == {p: (p.read_bytes(), p.stat().st_ino) for p in before}, "the old files stay as they are"
    for path in place.folder.glob(f"?/jobs/{new}/src/out/**/*.txt"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600 and path.stat().st_nlink == 1
    assert left_on(place, "a") == left_on(place, "b") == [".orch-work"]
    assert not list(place.folder.glob(f"?/jobs/{old}/received.json"))
    third, _ = job_of(place, "--resume", new, "--", "proj/train.py", "nothing")
    assert found_by(place, third)["a"]["out/last.txt"] == "later", "a job that was resumed can be resumed"
    fourth, _ = job_of(place, "--resume", third, "--", "proj/train.py", "nothing")
    assert found_by(place, fourth)["b"]["out/last.txt"] == "later", "though the third wrote nothing itself"
    assert not list(place.folder.glob("home/jobs/*/carried"))


def test_it_may_go_on_on_another_host_and_on_more(place: Place) -> None:
    old, _ = job_of(place, "--nodes", "a", "proj/train.py")
    plan = place.plan("--resume", old, "--nodes", "b", "--", "proj/train.py")
    note = next(note for note in plan["notes"] if old in note)
    assert re.fullmatch(rf"carried over from {old}: 5 files \(.*\) from a; .* to be sent to b", note)
    other, _ = job_of(place, "--resume", old, "--nodes", "b", "--", "proj/train.py", "nothing")
    assert found_by(place, other)["b"]["out/each.txt"] == "saved by 0"
    both, _ = job_of(place, "--resume", old, "--", "proj/train.py", "nothing")
    assert found_by(place, both)["a"] == found_by(place, both)["b"] == found_by(place, other)["b"]
    again = place.types("collect", "--job", both).stdout
    assert "job.yaml" not in again
    text = (place.here / "runs" / both / "job.yaml").read_text()
    assert f"resume: {old}" in text


def test_what_is_shipped_anew_wins_over_what_the_script_made_of_it(place: Place) -> None:
    old, _ = job_of(place, "proj/train.py")
    (place.here / "proj/other.py").write_text("# new code, the same table\n")
    same, said = job_of(place, "--resume", old, "--", "proj/train.py", "nothing")
    assert found_by(place, same)["a"]["table.txt"] == "changed by 0" and "shipped anew" not in said
    (place.here / "proj/table.txt").write_text("another one")
    (place.here / "proj/out").mkdir()
    (place.here / "proj/out/last.txt").write_text("pulled home by hand")
    changed, said = job_of(place, "--resume", old, "--", "proj/train.py", "nothing")
    found = found_by(place, changed)
    assert {found[node]["table.txt"] for node in "ab"} == {"another one"}
    assert {found[node]["out/last.txt"] for node in "ab"} == {"pulled home by hand"}
    assert found["b"]["out/each.txt"] == "saved by 1"
    assert f"table.txt: shipped anew, not carried over from {old}" in said


def test_what_cannot_be_resumed_is_refused_in_one_line(place: Place) -> None:
    empty, _ = job_of(place, "proj/train.py", "nothing")
    assert (
        f"{empty} wrote no file on a, b" in place.types("run", "--resume", empty, "--", "proj/train.py", code=2).stderr
    )
    assert f"`orch run --resume {empty} -- train.py`" in place.types("run", "--resume", empty, code=2).stderr
    (place.here / "proj/sleeps.py").write_text(
        "import time\nopen('a', 'w')\nprint('on', flush=True)\ntime.sleep(600)\n"
    )
    runs = place.types("run", "--detach", "proj/sleeps.py").stdout.strip()
    deadline = time.monotonic() + 60
    while not list(place.folder.glob(f"?/jobs/{runs}/src/a")) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert f"{runs} still runs on" in place.types("run", "--resume", runs, "--", "proj/sleeps.py", code=2).stderr
    place.types("cancel", "--job", runs)
    old, _ = job_of(place, "proj/train.py")
    place.types("down", "--yes", "--discard")
    refused = place.types("run", "--resume", old, "--", "proj/train.py", code=1).stderr
    assert len([line for line in refused.splitlines() if "error" in line]) == 1
    assert "its files were removed by `orch down`" in refused
    assert not list(place.folder.glob("?/jobs")) or not list(place.folder.glob("?/jobs/*"))


# ---- --keep ---------------------------------------------------------------------------------------------------------


def test_kept_folders_go_from_job_to_job_of_a_script(place: Place) -> None:
    first, said = job_of(place, "--keep", "out/", "proj/train.py", "one")
    assert "nothing is carried over: no earlier job of train.py has files in out/" in said
    second, said = job_of(place, "--keep", "./out", "proj/train.py", "two")
    found = found_by(place, second)
    assert found["a"]["out/last.txt"] == found["b"]["out/last.txt"] == "one"
    assert found["b"]["out/each.txt"] == "one by 1"
    assert found["b"]["table.txt"] == "as shipped" and "C/c.txt" not in found["a"], "only these folders"
    assert f"carried over from {first}: 3 files (19B) from a, 2 files" in said
    plan = Store(Home(place.folder / "home")).plan(second)
    assert "--keep out " in run_line(plan) and spec_of(plan).keep == ["out"]
    other = place.here / "proj/other.py"
    other.write_text(SAVES)
    assert "nothing is carried over" in job_of(place, "--keep", "out/", "proj/other.py", "nothing")[1]
    without, _ = job_of(place, "proj/train.py", "nothing")
    assert "out/last.txt" not in found_by(place, without)["a"]
    third, said = job_of(place, "--keep", "out/", "proj/train.py", "nothing")
    assert f"carried over from {second}" in said, "the newest that has such files"
    assert found_by(place, third)["a"]["out/last.txt"] == "two"


def test_it_can_be_written_in_every_way(place: Place) -> None:
    place.types("run", "--save", "job.yaml", "--keep", "out/", "--keep", "db", "--dry-run", "proj/train.py")
    assert "keep: [out, db]" in (place.here / "job.yaml").read_text()
    assert place.plan("job.yaml")["keep"] == ["out", "db"]
    assert place.plan("job.yaml", "--keep", "runs/")["keep"] == ["runs"]
    (place.here / "bad.yaml").write_text("exp: mnist_lenet\nkeep: [/out]\n")
    wrong = place.types("run", "bad.yaml", code=2).stderr
    assert "/out" in wrong and "`keep` belongs to a script or module of your own" in wrong
    assert "is not a folder" in place.types("run", "--keep", "../x", "proj/train.py", code=2).stderr
    assert "--keep belongs to a script" in place.types("run", "--keep", "x", "--exp", "mnist_lenet", code=2).stderr


def test_a_second_attempt_has_what_the_first_one_kept(place: Place) -> None:
    retries = ("--retries", "1", "--retry-on", "any", "--retry-wait", "1s")
    job_of(place, *retries, "--keep", "out/", "proj/train.py", "one", "fails", code=1)
    first, second = reversed([job["id"] for job in json.loads(place.types("jobs", "--json").stdout)["jobs"]])
    assert "out/last.txt" not in found_by(place, first)["a"]
    assert found_by(place, second)["b"]["out/last.txt"] == "one"
    job_of(place, *retries, "proj/train.py", "one", "fails", code=1)
    newest = json.loads(place.types("jobs", "--json").stdout)["jobs"][0]["id"]
    assert "out/last.txt" not in found_by(place, newest)["a"], "as without --keep"


# ---- what breaks --------------------------------------------------------------------------------------------------


def test_a_disk_without_room_refuses_before_anything_is_copied(place: Place, tmp_path: Path) -> None:
    (place.here / "proj/train.py").write_text("open('big.bin', 'wb').write(bytes([7]) * (70 << 20))\n")
    old, _ = job_of(place, "--nodes", "a", "proj/train.py")
    with small_disk(tmp_path / "b", "120m"):
        refused = place.types("run", "--resume", old, "--nodes", "b", "--", "proj/train.py", code=3).stderr
        assert f"b: the files of {old} need 134 MiB, and " in refused
        assert sorted(p.name for p in (tmp_path / "b").iterdir()) in ([".orch-work"], [".orch-work", "jobs"])


def test_a_full_disk_of_the_controller_refuses_and_leaves_nothing_on_the_hosts(tmp_path: Path) -> None:
    with small_disk(tmp_path / "home", "48m"):
        place = Place(tmp_path)
        (place.here / "proj/train.py").write_text("open('big.bin', 'wb').write(bytes([7]) * (40 << 20))\n")
        old, _ = job_of(place, "--nodes", "a", "proj/train.py")
        refused = place.types("run", "--resume", old, "--nodes", "b", "--", "proj/train.py", code=1).stderr
        assert f"of {old} pass through" in refused and "ORCH_HOME" in refused
        assert left_on(place, "b") == [".orch-work"] and not list(tmp_path.glob("home/jobs/*/carried"))
        own, _ = job_of(place, "--resume", old, "--nodes", "a", "--", "proj/train.py")
        assert (tmp_path / f"a/jobs/{own}/src/big.bin").stat().st_size == 40 << 20, "its own host needs no room here"


@pytest.fixture
def rack(tmp_path: Path) -> Iterator[Rack]:
    with ssh_rack(tmp_path) as rack:
        (tmp_path / "proj").mkdir()
        (tmp_path / "proj/train.py").write_text(
            "import os\nprint('FOUND', sorted(os.listdir('.')), flush=True)\n"
            "import random\nopen('big.bin', 'wb').write(random.Random(1).randbytes(48 << 20))\n"
        )
        yield rack


def test_a_start_that_is_killed_in_its_transfer_leaves_nothing_that_is_used(rack: Rack, tmp_path: Path) -> None:
    rack.types("run", "--nodes", "a2000", "proj/train.py")
    (old,) = [path.name for path in (tmp_path / "one/jobs").iterdir()]
    again = ("run", "--resume", old, "--nodes", "v100", "--", "proj/train.py")

    def has_begun() -> bool:
        return any(part.stat().st_size for part in (tmp_path / "two").glob("handover/*/src/.orch-*.part"))

    def end_amid(number: int) -> None:
        with rack.starts(*again) as start:
            deadline = time.monotonic() + 60
            while not has_begun() and time.monotonic() < deadline:
                time.sleep(0.002)
            os.killpg(start.pid, number)

    end_amid(signal.SIGINT)
    assert not list((tmp_path / "two").glob("handover")), "what was begun is undone"
    end_amid(signal.SIGKILL)
    assert list((tmp_path / "two").glob("handover/*")), "it was killed amid its transfer"
    assert not list((tmp_path / "two").glob("*/*/src/big.bin"))
    rack.types("reap", "--yes", exit_code=3)  # one host is off
    assert not list((tmp_path / "two").glob("handover/*")) and not list(tmp_path.glob("home/jobs/*/carried"))
    rack.types(*again)
    new = Store(Home(tmp_path / "home")).jobs()[0].id
    assert "'big.bin'" in rack.types("logs", "--job", new).stdout
    wrote = [(tmp_path / f"{host}/jobs/{job}/src/big.bin").read_bytes() for host, job in (("one", old), ("two", new))]
    assert wrote[0] == wrote[1]
    end_amid(signal.SIGKILL)
    rack.types("down", "--yes", "--discard", exit_code=3)
    assert not (tmp_path / "two").exists() or not list((tmp_path / "two").iterdir())


# ---- a real script ------------------------------------------------------------------------------------------------


def test_plain_ddp_goes_on_from_its_own_checkpoint_to_the_weights_of_a_whole_run(tmp_path: Path) -> None:
    place = Place(tmp_path, quick_python(tmp_path / "python", trains=True))
    shutil.copy(Path(__file__).parents[1] / "support/resumed/ddp.py", place.here / "proj/train.py")
    small = ("--env", "OMP_NUM_THREADS=1", "--", "proj/train.py", "--samples", "128", "--epochs")

    def weights(job: str) -> list[str]:
        logs = place.folder.glob(f"?/jobs/{job}/rank-*/stdout.log")
        return [re.search(r"weights (\w+)", log.read_text())[1] for log in logs]

    whole, begun = (job_of(place, *small, epochs)[0] for epochs in ("4", "2"))
    resumed, _ = job_of(place, "--resume", begun, *small, "4", "--resume")
    assert weights(resumed) == weights(whole) != weights(begun)
    third, _ = job_of(place, "--resume", resumed, *small, "6", "--resume")
    logs = [path.read_text() for path in place.folder.glob(f"?/jobs/{third}/rank-*/stdout.log")]
    assert ["resumed after epoch 3" in text for text in logs] == [True, True], "both have the newest"
