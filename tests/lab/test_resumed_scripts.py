"""Three scripts as people write them, which save checkpoints of their own: ended in mid-run, resumed over two hosts
behind real SSH, and compared with runs that nobody interrupted.

The one of Hugging Face's Trainer is skipped without the packages of the extra `frameworks`.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
from pathlib import Path

import pytest

from tests.support.lab import Lab
from tests.support.terminal import Person, until_said
from tests.support.with_packages import person_with_packages

pytestmark = [
    pytest.mark.lab,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not os.environ.get("ORCH_LONG"), reason="minutes of training: ORCH_LONG=1"),
]
SCRIPTS = Path(__file__).parents[1] / "support" / "resumed"
NO_TRANSFORMERS = pytest.mark.skipif(
    not importlib.util.find_spec("transformers") or not importlib.util.find_spec("accelerate"),
    reason="needs transformers and accelerate: pip install -e '.[frameworks]'",
)
INVENTORY = """
cluster: resumed
defaults: {{device: cpu, bandwidth: 2.5Gbps, python: {python}, env: {{OMP_NUM_THREADS: "1"}}}}
nodes:
  - {{name: alpha, host: 10.77.41.1}}
  - {{name: beta, host: 10.77.41.2}}
"""


@pytest.fixture(scope="module")
def person(tmp_path_factory):
    with person_with_packages(INVENTORY, tmp_path_factory) as someone:
        yield someone


def said(person: Person, job: str, pattern: str) -> list[str]:
    return re.findall(pattern, person.types("logs", "--job", job).stdout)


def kill_rank(rack: Lab, node: str, job: str) -> None:
    """Of the one process there that has the job's rank in its environment, and the script in its command line."""
    look = f"grep -lz 'ORCH_CHECKPOINTS=.*{job}' /proc/[0-9]*/environ 2>/dev/null | xargs -n1 dirname"
    found = rack.host_exec(node, ["/bin/sh", "-c", look]).stdout.split()
    pids = [path for path in found if "gpt.py" in rack.host_exec(node, ["cat", f"{path}/cmdline"]).stdout]
    rack.host_exec(node, ["kill", "-9", *(Path(path).name for path in pids)])


def newest(person: Person) -> str:
    return person.asks("jobs")["jobs"][0]["id"]


@pytest.mark.parametrize("name", ["ddp", "gpt", pytest.param("hf", marks=NO_TRANSFORMERS)])
def test_a_script_that_was_ended_comes_to_the_weights_of_a_run_that_nobody_ended(person: Person, name: str) -> None:
    (person.folder / name).mkdir()
    shutil.copy(SCRIPTS / f"{name}.py", person.folder / name)
    script = f"{name}/{name}.py"
    person.types("run", "--", script)
    whole = said(person, newest(person), r"weights (\w{64})")
    assert len(whole) == 2 and len(set(whole)) == 1

    run = person.starts("run", "--", script)
    until_said(run, "saved: ")
    ended = newest(person)
    if name == "gpt":  # its rank on beta is killed
        kill_rank(person.lab, "beta", ended)
    else:
        person.types("cancel", "--job", ended)
    run.communicate(timeout=120)
    state = person.job(ended)["state"]
    assert state == ("failed" if name == "gpt" else "cancelled"), "it was ended in mid-run"
    assert not said(person, ended, r"weights")

    print(person.types("run", "--resume", ended, "--", script, "--resume").stderr)
    resumed = newest(person)
    begun = said(person, resumed, r"resumed after \w+ (\d+)")
    assert len(begun) == 2 and len(set(begun)) == 1
    assert said(person, resumed, r"weights (\w{64})") == whole
    person.types("run", "--resume", ended, "--nodes", "beta", "--dry-run", "--", script, "--resume")
