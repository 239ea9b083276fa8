"""What a person reads before `orch down` and after it: what nobody pulled, what is gone, and where the copies are."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support import forks
from tests.support.quick_python import quick_python
from tests.support.ssh_rack import ssh_rack
from tests.support.sshd import needs_sshd, wait_for

SCRIPT = """
import os
open("snapshot.pt", "wb").write(b"w" * 300_000)
open(os.environ["ORCH_CHECKPOINTS"] + "/best.pt", "wb").write(b"w" * 5000)
print("trained by rank", os.environ["RANK"])
"""


@dataclass
class Home:
    folder: Path
    inventory: Path
    kept: str
    """Collected and pulled, into `here`."""
    lost: str

    @property
    def here(self) -> Path:
        return self.folder / "here"

    def types(self, *words, exit_code=0, cwd="here", answer=""):
        (self.folder / cwd).mkdir(exist_ok=True)
        env = {**os.environ, "ORCH_HOME": str(self.folder / "home"), "COLUMNS": "400"}
        done = forks.run(forks.ORCH, words, env=env, cwd=self.folder / cwd, input_=answer)
        assert done.returncode == exit_code, f"{words} gave {done.returncode}:\n{done.stdout}\n{done.stderr}"
        return done

    def runs(self, **options):
        return self.types("run", "--detach", "--", str(self.folder / "code" / "train.py"), **options).stdout.strip()

    def waits(self, job):
        self.types("logs", "-f", "--job", job)


@pytest.fixture(scope="module")
def before(tmp_path_factory):
    """Two jobs that have ended: one is collected and pulled, of the other nothing is here."""
    home = a_person(tmp_path_factory.mktemp("person"))
    home.kept = home.runs()
    home.waits(home.kept)
    home.lost = home.runs()
    home.waits(home.lost)
    home.types("collect", "--job", home.kept, "--checkpoints")
    home.types("pull", home.kept, "snapshot.pt")
    return home


def a_person(folder):
    """With a cluster of one local host."""
    (folder / "code").mkdir()
    (folder / "code" / "train.py").write_text(SCRIPT)
    python = quick_python(folder / "quick")
    node = f"{{host: 127.0.0.1, workdir: {folder}/work-"
    inventory = folder / "rack.yaml"
    inventory.write_text(
        f"cluster: rack\ndefaults: {{device: cpu, transport: local, python: {python}}}\n"
        f"nodes:\n  - {{name: a, {node[1:]}a}}\n"
    )
    home = Home(folder, inventory, "", "")
    home.types("up", str(inventory), "--allow-local")
    return home


@pytest.fixture(scope="module")
def after(before):
    """The same, cleared; `said` is what the command said."""
    before.said = before.types("down", "--yes", "--discard").stderr
    return before


# ---- before ---------------------------------------------------------------------------------------------------


def test_a_report_is_found_from_another_folder_and_out_still_wins(before):
    found = before.types("report", "--job", before.kept, cwd="elsewhere").stdout
    assert f"report: {before.here / 'runs' / before.kept / 'report.html'}" in found
    refused = before.types("report", "--job", before.kept, "--out", "nothing", cwd="elsewhere", exit_code=2)
    assert "nothing/" in refused.stderr and "holds no collected run" in refused.stderr
    assert f"`orch collect --job {before.kept}` first" in refused.stderr
    above = before.types("report", str(before.here / "runs"), cwd="elsewhere", exit_code=2)
    assert f"1 run in it: name one, as {before.here / 'runs' / before.kept}" in above.stderr
    empty = before.types("report", str(before.here), cwd="elsewhere", exit_code=2)
    assert "name a folder that `orch collect` wrote" in empty.stderr


def test_what_is_here_and_what_is_not_is_listed(before):
    [node] = json.loads(before.types("pull", before.kept, "--list", "--json").stdout)["nodes"].values()
    assert [(row["name"], row["size"], row["here"]) for row in node["files"]] == [
        ("checkpoints/best.pt", 5000, True),
        ("src/snapshot.pt", 300_000, True),
    ]
    listed = before.types("pull", before.lost, "--list").stdout
    assert "src/snapshot.pt" in listed and "yes" not in listed
    wrong = before.types("pull", before.lost, "*.ckpt", exit_code=2)
    assert "it wrote checkpoints/best.pt, src/snapshot.pt" in wrong.stderr


def test_down_names_what_was_never_pulled_and_asks(before):
    refused = before.types("down", answer="n\nn\n", exit_code=1)
    assert "Pull these files into runs first?" in refused.stderr and "Delete them?" in refused.stderr
    said = (
        f"never pulled of {before.lost}: 2 files, 297.9KiB (src/snapshot.pt 293.0KiB on a, checkpoints/best.pt 4.9KiB"
    )
    assert said in refused.stderr
    assert f"never pulled of {before.kept}" not in refused.stderr
    unasked = before.types("down", answer="", exit_code=2)
    assert "nothing was done: there is no terminal to ask on" in unasked.stderr
    assert "`orch down --yes --pull` pulls them first; --discard deletes them" in unasked.stderr
    assert before.types("pull", before.lost, "--list").stdout.count("KiB") == 2  # nothing is gone


def test_yes_is_no_consent_to_delete_what_was_never_pulled(before):
    refused = before.types("down", "--yes", exit_code=2)
    assert f"files that were never pulled would be deleted ({before.lost})" in refused.stderr
    assert "`orch down --yes --pull` pulls them first; --discard deletes them" in refused.stderr
    assert before.types("pull", before.lost, "--list").stdout.count("KiB") == 2  # nothing is gone


@pytest.mark.parametrize("how", ["--pull", "on a terminal"])
def test_what_was_never_pulled_comes_home_first(tmp_path, how):
    person = a_person(tmp_path)
    job = person.runs()
    person.waits(job)
    if how == "--pull":
        done = person.types("down", "--yes", "--pull", "--out", "mine")
    else:
        done = person.types("down", "--out", "mine", answer="y\ny\n")
    assert "files has 2 of 2 files" in done.stderr and "removed 1 job" in done.stdout + done.stderr
    files = person.here / "mine" / job / "nodes" / "a" / "files"
    assert (files / "src/snapshot.pt").stat().st_size == 300_000
    assert (files / "checkpoints/best.pt").stat().st_size == 5000


NO_LISTING = """#!/bin/sh
case "$*" in *orch-outputs*) exit 1;; esac
exec "$0-real" "$@"
"""


def test_where_nobody_could_ask_what_jobs_wrote_nothing_is_removed(tmp_path):
    person = a_person(tmp_path)
    job = person.runs()
    person.waits(job)
    python = tmp_path / "quick" / "bin" / "python"
    python.rename(f"{python}-real")
    python.write_text(NO_LISTING)
    python.chmod(0o755)
    refused = person.types("down", "--yes", exit_code=3).stderr
    assert "not asked what its jobs wrote: a: " in refused and "error: a: " in refused
    assert "nothing is removed on a; --discard removes it unseen" in refused
    assert "rack is not forgotten: a may still" in person.types("down", "--yes", "--forget", exit_code=3).stderr
    assert (tmp_path / "work-a" / "jobs" / job / "src" / "snapshot.pt").exists()
    assert person.types("jobs", "--json").stdout.count(job) == 1
    assert "removed 1 job" in person.types("down", "--yes", "--discard").stdout


SAVES = """
import signal, sys, time
def save(*_):
    open("last.pt", "w").write("saved")
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
print("ready", flush=True)
time.sleep(120)
"""


def test_what_a_job_saves_when_it_is_ended_comes_home_too(tmp_path):
    person = a_person(tmp_path)
    (tmp_path / "code" / "train.py").write_text(SAVES)
    job = person.runs()
    wait_for(lambda: "ready" in person.types("logs", job).stdout, "its handler")
    person.types("down", "--yes", "--pull", "--out", "mine")
    assert (person.here / "mine" / job / "nodes" / "a" / "files" / "src/last.pt").read_text() == "saved"


@pytest.mark.parametrize("how", ["--yes", "on a terminal"])
def test_what_a_job_saves_when_it_is_ended_needs_its_own_consent(tmp_path, how):
    person = a_person(tmp_path)
    (tmp_path / "code" / "train.py").write_text(SAVES)
    job = person.runs()
    wait_for(lambda: "ready" in person.types("logs", job).stdout, "its handler")
    words, answer = (["--yes"], "") if how == "--yes" else ([], "y\nn\nn\n")
    said = person.types("down", *words, answer=answer, exit_code=2 if words else 1).stderr
    assert f"files that were never pulled would be deleted ({job})" in said if words else "Delete them?" in said
    assert (tmp_path / "work-a" / "jobs" / job / "src/last.pt").read_text() == "saved"
    person.types("down", "--yes", "--pull", "--out", "mine")
    assert (person.here / "mine" / job / "nodes" / "a" / "files" / "src/last.pt").read_text() == "saved"


@pytest.mark.parametrize("lost", ["job.json", "plan.json", "its folder"])
def test_files_of_a_job_that_is_damaged_or_unknown_here_are_not_deleted_without_consent(tmp_path, lost):
    person = a_person(tmp_path)
    job = person.runs()
    person.waits(job)
    folder = tmp_path / "home" / "jobs" / job
    if lost == "its folder":
        shutil.rmtree(folder)
    else:
        (folder / lost).write_text("{")
    refused = person.types("down", "--yes", exit_code=2).stderr
    assert f"never pulled of {job}: 2 files" in refused
    person.types("down", "--yes", "--pull", "--out", "mine")
    assert (person.here / "mine" / job / "nodes" / "a" / "files" / "src/snapshot.pt").stat().st_size == 300_000


def test_files_of_a_host_that_has_another_name_since_are_left_alone(tmp_path):
    person = a_person(tmp_path)
    job = person.runs()
    person.waits(job)
    person.inventory.write_text(person.inventory.read_text().replace("name: a", "name: z"))
    person.types("up", str(person.inventory), "--allow-local")
    refused = person.types("down", "--yes", exit_code=3).stderr
    assert f"z: holds {job}, it ran on hosts of other names" in refused
    assert (tmp_path / "work-a" / "jobs" / job / "src/snapshot.pt").exists()


# ---- after ----------------------------------------------------------------------------------------------------


def test_with_yes_it_warns_and_goes_on(after):
    assert f"never pulled of {after.lost}: 2 files" in after.said
    assert f"never pulled of {after.kept}" not in after.said


def test_a_collect_says_what_removed_the_files_and_leaves_the_copy_as_it_is(after):
    copy = after.here / "runs" / after.kept
    before = {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    for cwd in ("here", "elsewhere"):
        said = after.types("collect", "--job", after.kept, cwd=cwd, exit_code=1).stderr
        assert f"{after.kept}: its files were removed by `orch down` on 20" in said
        assert f"is in {copy}" in said
    assert {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()} == before
    assert not (after.folder / "elsewhere" / "runs").exists()
    assert "no collected copy is known here" in after.types("collect", "--job", after.lost, exit_code=1).stderr


def test_logs_come_from_the_copy_and_without_one_they_say_why_there_are_none(after):
    done = after.types("logs", "--job", after.kept, cwd="elsewhere")
    assert "trained by rank 0" in done.stdout
    assert "removed by `orch down`" in done.stderr and str(after.here / "runs" / after.kept) in done.stderr
    refused = after.types("logs", "-f", "--job", after.lost, exit_code=1)
    assert refused.stdout == "" and "removed by `orch down`" in refused.stderr


def test_so_does_a_pull(after):
    assert "removed by `orch down`" in after.types("pull", after.lost, exit_code=1).stderr


def test_jobs_still_shows_how_they_ended(after):
    found = json.loads(after.types("jobs", "--json").stdout)["jobs"]
    assert {job["id"]: job["state"] for job in found} == {after.kept: "succeeded", after.lost: "succeeded"}


def test_where_somebody_else_removed_them_no_host_holds_them(after):
    (after.folder / "home" / "jobs" / after.kept / "removed.json").unlink()
    for words in (["collect"], ["logs"], ["logs", "-f"]):
        said = after.types(*words, "--job", after.kept, exit_code=1).stderr
        assert f"{after.kept}: no host holds its files" in said
        assert str(after.here / "runs" / after.kept) in said


@needs_sshd
def test_a_cluster_whose_hosts_are_gone_is_forgotten_and_names_the_places_that_may_hold_files(tmp_path):
    with ssh_rack(tmp_path) as rack:
        for name in ("a2000", "v100"):
            rack.servers[name].stop()
        kept = rack.types("down", exit_code=3).stderr
        assert "Do this on" not in kept and "is forgotten" not in kept  # there is nothing to agree to
        unasked = rack.types("down", "--forget", exit_code=2).stderr
        assert "Forget rack?" in unasked and "add --yes to agree" in unasked
        said = " ".join(rack.types("down", "--yes", "--forget", exit_code=3).stderr.split())
        assert f"files may stay in a2000:{tmp_path}/one, v100:{tmp_path}/two, with what was never pulled" in said
        assert f"cluster rack is forgotten; `orch up {tmp_path}/rack.yaml` remembers it again" in said
        assert "no cluster yet" in rack.types("status", exit_code=2).stderr
