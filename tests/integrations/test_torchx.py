"""`torchx -s orch`, as it is typed: the package TorchX itself, and jobs on two hosts that are this machine."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.integrations import wheel
from tests.support.local_cluster import Place

pytest.importorskip("torchx", reason="needs TorchX: pip install -e '.[torchx]'")

MAIN = os.environ.get("TORCHX_MAIN", "")
"""A folder into which `pip install --target FOLDER torchx-nightly` has put TorchX's own main branch."""
SCRIPT = """
import os, sys, time
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], os.environ.get("LR"), *sys.argv[1:], flush=True)
if "fail" in sys.argv and os.environ["RANK"] == "1":
    sys.exit(7)
while "stay" in sys.argv:
    time.sleep(0.1)
"""
COMPONENTS = """
from torchx import specs

def two_roles() -> specs.AppDef:
    \"\"\"Two roles.\"\"\"
    roles = [specs.Role(name, image="", entrypoint="train.py", resource=specs.resource(cpu=1)) for name in "ab"]
    return specs.AppDef("two", roles)

def line(text: str) -> specs.AppDef:
    \"\"\"A line for a shell.

    Args:
        text: the line
    \"\"\"
    role = specs.Role("a", image="", entrypoint="bash", args=["-c", text], resource=specs.resource(cpu=1))
    return specs.AppDef("line", [role])
"""


class User(Place):
    def torchx(self, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "ORCH_HOME": str(self.folder / "home"), **variables}
        words = (sys.executable, "-m", "torchx.cli.main", *words)
        done = subprocess.run(words, cwd=self.here, env=env, capture_output=True, text=True, timeout=240)
        assert "Traceback" not in done.stdout + done.stderr, done.stderr
        return done

    def prints(self, *words: str) -> str:
        done = self.torchx(*words)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def refused(self, *words: str) -> str:
        done = self.torchx("run", "-s", "orch", *words)
        assert done.returncode == 1
        return done.stderr


@pytest.fixture(scope="module")
def user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[User]:
    place = User(tmp_path_factory.mktemp("torchx"))
    (place.here / "train.py").write_text(SCRIPT)
    (place.here / "parts.py").write_text(COMPONENTS)
    yield place
    place.types("down", "--yes", "--discard")


def test_five_commands_run_a_job_and_show_list_and_end_it(user: User) -> None:
    done = user.torchx("run", "-s", "orch", "dist.ddp", "--env", "LR=1", "--script", "train.py", "--", "--lr", "0.1")
    assert done.returncode == 0, done.stderr
    handle = done.stdout.strip()
    assert re.fullmatch(r"orch://torchx/train-[\w-]+", handle)
    assert "left out: torchrun" in done.stderr
    lines = sorted(re.sub(r"\x1b\[\d+m", "", user.prints("log", "--tail", handle)).splitlines())
    assert lines == [f"train/{k} {k}: rank {k} of 2 1 --lr 0.1" for k in (0, 1)]
    assert "rank 1" in (only := user.prints("log", f"{handle}/train/1")) and "rank 0" not in only
    assert "has 2 hosts, and no host 2" in user.torchx("log", f"{handle}/train/2").stderr
    assert "State: SUCCEEDED" in user.prints("status", handle)

    started = user.prints("run", "-s", "orch", "dist.ddp", "-j", "1:2x1", "--script", "train.py", "--", "stay")
    stays = started.strip()
    assert user.prints("status", stays).count("RUNNING") == 3  # the job, and each of its two hosts
    user.prints("cancel", stays)
    rows = [line.split() for line in user.prints("list", "-s", "orch").splitlines()[2:]]
    assert rows[:2] == [[stays, "CANCELLED"], [handle, "SUCCEEDED"]]


def test_a_job_that_cannot_be_ended_is_reported_without_a_traceback(user: User) -> None:
    stays = user.prints("run", "-s", "orch", "dist.ddp", "--script", "train.py", "--", "stay").strip()
    owner = user.folder / "home/owner.json"
    mine = owner.read_text()
    owner.write_text(json.dumps({**json.loads(mine), "id": "0" * 32}))
    done = user.torchx("cancel", stays)
    assert (done.returncode, "only they can end it" in done.stderr) == (1, True), done.stderr
    owner.write_text(mine)
    user.prints("cancel", stays)
    assert "State: CANCELLED" in user.prints("status", stays)


def test_a_failed_job_names_its_first_cause_and_waiting_for_it_exits_1(user: User) -> None:
    words = ("run", "-s", "orch", "--wait", "--log", "dist.ddp", "--script", "train.py", "--", "fail")
    done = user.torchx(*words)
    assert done.returncode == 1
    assert "Job finished: FAILED" in done.stderr
    assert "rank 1 of 2" in done.stderr, "rank 0 may have been ended before it printed"
    assert "Msg: first cause: b: rank 1 exited 7" in user.prints("status", done.stdout.strip())


def test_a_dry_run_prints_the_same_start_by_orch_and_no_value_of_a_variable(user: User) -> None:
    words = ("--dryrun", "dist.ddp", "-j", "2x1", "--env", "LR=hidden", "-m", "pack.train", "--", "--lr", "0.1")
    printed = user.prints("run", "-s", "orch", "-cfg", "nodes=a,b,share=true,batch=64", *words)
    line = printed.rpartition("SCHEDULER REQUEST ===\n")[2].strip()
    options = r"--batch 64( --env \w+)+ --nodes a,b --hosts 2:2 --share --name train"
    assert re.fullmatch(rf"orch run --detach {options} -m pack.train -- --lr 0.1", line)
    assert "--env LR " in line and not user.prints("list", "-s", "orch").count("pack")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("-cfg", "ndoes=a", "dist.ddp", "--script", "train.py"),
            "ndoes: no such option of -cfg; did you mean `nodes`?",
        ),
        (("-cfg", "retries=2", "dist.ddp", "--script", "train.py"), "retries: no such option of -cfg"),
        (("-cfg", "batch", "dist.ddp", "--script", "train.py"), "batch: must be a whole number"),
        (("-cfg", "cluster=other", "dist.ddp", "--script", "train.py"), "no cluster named 'other'"),
        (("dist.ddp", "--script", "missing.py"), "missing.py: no such script"),
        (("dist.ddp", "-j", "3x1", "--script", "train.py"), "2 hosts to choose from, and 3 are needed"),
        (("dist.ddp", "--script", "train.py", "--", "${replica_id}"), "${replica_id} in the words or variables"),
        (("parts.py:two_roles",), "two has 2 roles (a, b), and orch starts one script on all hosts"),
        (("parts.py:line", "--text", "torchrun train.py > log"), "orch runs no shell, as this line needs (>)"),
        (("parts.py:line", "--text", "torchrun 'train.py"), "(No closing quotation)"),
    ],
)
def test_what_orch_cannot_run_is_refused_in_one_message(user: User, words: tuple[str, ...], message: str) -> None:
    assert message in user.refused(*words)


def test_a_job_that_does_not_exist_has_no_status(user: User) -> None:
    done = user.torchx("status", "orch://torchx/nothing")
    assert done.returncode == 1 and "no job 'nothing'" in done.stderr


def test_the_schedulers_of_torchx_are_all_listed_next_to_orch(user: User) -> None:
    from torchx.schedulers import DEFAULT_SCHEDULER_MODULES

    printed = re.sub(r"\x1b\[\d+m", "", user.prints("runopts"))
    listed = set(re.findall(r"^(\w+):", printed, re.MULTILINE))
    assert listed == {"orch", *DEFAULT_SCHEDULER_MODULES} and len(listed) == 11


@pytest.mark.skipif(not MAIN, reason="needs TorchX's main branch: TORCHX_MAIN=FOLDER")
@pytest.mark.parametrize("source", ["1", "3"], ids=["namespace", "entry point"])
def test_torchxs_main_branch_finds_orch_once_by_either_mechanism(user: User, source: str, tmp_path: Path) -> None:
    place = tmp_path / wheel.PLACE  # as a wheel has it
    place.parent.mkdir(parents=True)
    place.write_text(Path(wheel.__file__).with_name("torchx_namespace.py").read_text())
    variables = {"TORCHX_PLUGINS_SOURCE": source, "PYTHONPATH": f"{MAIN}:{tmp_path}"}
    done = user.torchx("runopts", **variables)
    listed = set(re.findall(r"^(\w+):", re.sub(r"\x1b\[\d+m", "", done.stdout), re.MULTILINE))
    assert done.returncode == 0 and {"orch", "local_docker", "local_cwd", "slurm", "kubernetes"} <= listed
    assert "registered via both" not in done.stderr
    done = user.torchx("run", "-s", "orch", "--wait", "dist.torchrun", "--script", "train.py", **variables)
    assert done.returncode == 0, done.stderr
