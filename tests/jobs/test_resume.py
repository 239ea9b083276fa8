"""`orch run --resume` and `--pass-local-rank`: real jobs of two hosts that are this machine."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from orchestrator.errors import ProbeError, UsageError
from orchestrator.jobs import last_checkpoint, settings_of
from orchestrator.planning import CodeFolder, JobSpec, LaunchPlan, parse_job, request_of
from tests.support import forks
from tests.support.quick_python import quick_python
from tests.support.trainer_ranks import started

INVENTORY = """
cluster: two
defaults: {transport: local, device: cpu, python: PYTHON, env: {OMP_NUM_THREADS: "1"}}
nodes:
  - {name: one, host: localhost, port: 1001, workdir: WORK/one}
  - {name: two, host: localhost, port: 1002, workdir: WORK/two}
"""
NEWEST = "step-000000010.pt"
SMALL = ["data=synthetic", "samples=203", "batch=32", "epochs=2", "eval_every=0"]

JOINS = """
import torch, trainer
from torch.nn.functional import mse_loss
torch.manual_seed(0)
data = [(torch.randn(4), torch.ones(1)) for _ in range(70)]
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
run = trainer.join(batch=10).prepare(model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), data)
for epoch in run.epochs():
    for inputs, targets in run.batches():
        run.step(mse_loss(run.model(inputs), targets, reduction="sum"))
print("weights", [weight.tolist() for weight in model.parameters()])
"""

DIES = JOINS.replace(
    "        run.step(",
    """        if os.environ["RANK"] == "1" and run.updates == 9 and "ORCH_ATTEMPT" not in os.environ:
            os.kill(os.getpid(), signal.SIGKILL)
        run.step(""",
).replace("import torch, trainer", "import os, signal, torch, trainer")

Orch = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def orch(tmp_path_factory: pytest.TempPathFactory) -> Orch:
    """`orch WORDS` of a person with a cluster of two nodes; its exit code is checked."""
    folder = tmp_path_factory.mktemp("two")
    text = INVENTORY.replace("WORK", str(folder)).replace("PYTHON", quick_python(folder / "quick", trains=True))
    (folder / "two.yaml").write_text(text)
    (folder / "other.yaml").write_text(text.replace("cluster: two", "cluster: other").replace("name: one", "name: uno"))
    for name in ("mine", "tells"):  # a folder each: all of it is shipped
        (folder / name).mkdir()
    (folder / "tells" / "tells.py").write_text("import os, sys\nprint(sys.argv[1:], os.environ['ORCH_CHECKPOINTS'])\n")

    def types(*words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "ORCH_HOME": str(folder / "home")}
        done = forks.run(forks.ORCH, words, cwd=folder, env=environment)
        assert done.returncode == code, done.stdout + done.stderr
        return done

    (folder / "mine" / "joins.py").write_text(JOINS)
    (folder / "dies").mkdir()
    (folder / "dies" / "dies.py").write_text(DIES)
    types("up", "two.yaml", "--allow-local")
    return types


def experiment(orch: Orch, *settings: str, nodes: str = "one,two", code: int = 0) -> str:
    sets = [word for setting in (*SMALL, *settings) for word in ("--set", setting)]
    return str(
        json.loads(orch("run", "--json", "--nodes", nodes, "--exp", "mnist_lenet", *sets, code=code).stdout)["id"]
    )


def ids(orch: Orch, *words: str) -> str:
    return str(json.loads(orch("run", "--json", *words).stdout)["id"])


def plan_of(orch: Orch, *words: str) -> dict[str, Any]:
    return dict(json.loads(orch("run", "--dry-run", "--json", *words).stdout))


@pytest.fixture(scope="module")
def job(orch: Orch) -> str:
    """A job that ends after 10 of 14 updates, with checkpoints after 4, 8 and 10."""
    return experiment(orch, "checkpoint_every=4", "steps=10")


def test_a_new_job_goes_on_from_where_another_ended(orch: Orch, job: str, tmp_path: Path) -> None:
    """With the losses of two ranks that nobody interrupts."""
    settings = [f"--{setting}" for setting in (*SMALL, "device=cpu")]
    with started(tmp_path, ["--exp=mnist_lenet", *settings], world_size=2) as ranks:
        whole, _ = [rank.communicate(timeout=120)[0] for rank in ranks]
    found = json.loads(orch("run", "--json", "--resume", job, "--set", "steps=0").stdout)
    resumed = orch("logs", "--job", found["id"]).stdout
    assert (found["state"], found["exp"]) == ("succeeded", "mnist_lenet")
    assert f"jobs/{job}/checkpoints/step-000000010.pt after 10 updates" in resumed
    last = [text.split("step 14/14")[1].split("samples/s")[0].split()[:2] for text in (whole, resumed)]
    assert last[0] == last[1]
    assert last[0][0] == "loss"


def test_a_job_goes_on_in_its_own_cluster_whichever_is_the_current_one(orch: Orch, job: str) -> None:
    orch("up", "other.yaml", "--allow-local")
    assert plan_of(orch, "--resume", job)["cluster"] == "two"
    refused = orch("run", "--dry-run", "--resume", job, "--cluster", "other", code=2).stderr
    assert f"{job} ran on cluster two, not on other" in refused
    orch("use", "two")


def test_the_holder_of_the_checkpoint_is_the_new_master_whatever_was_elected(orch: Orch, job: str) -> None:
    holder = plan_of(orch, "--resume", job)["master"]
    (other,) = {"one", "two"} - {holder}
    orch("master", other)
    assert plan_of(orch, "--exp", "mnist_lenet")["master"] == other
    plan = plan_of(orch, "--resume", job, "--set", "epochs=5")
    assert plan["master"] == holder
    assert (plan["settings"]["epochs"], plan["settings"]["batch"]) == (5, 32)
    assert plan["settings"]["resume"].endswith(f"{holder}/jobs/{job}/checkpoints/{NEWEST}")
    assert (plan["checkpoints"], plan["nodes"][0]["env"]["ORCH_CHECKPOINT_COPY"]) == ([holder, other], other)
    shutil.rmtree(Path(plan["settings"]["resume"]).parent)
    plan = plan_of(orch, "--resume", job, "--set", "epochs=5")
    assert plan["master"] == other and plan["settings"]["resume"].endswith(f"{other}/jobs/{job}/checkpoints/{NEWEST}")
    for node in (holder, other):
        shutil.rmtree(Path(plan["settings"]["resume"].replace(f"/{other}/jobs/", f"/{node}/jobs/")).parent, True)
    refused = orch("run", "--dry-run", "--resume", job, code=2).stderr
    assert f"{job} has no checkpoint on {holder}, {other}" in refused


def test_who_keeps_no_checkpoint_of_a_job_does_not_go_on_with_it(orch: Orch) -> None:
    alone = experiment(orch, "checkpoint_every=4", "steps=4", nodes="one")
    refused = orch("run", "--dry-run", "--resume", alone, "--nodes", "two", code=2).stderr
    assert f"the checkpoints of {alone} are on one, which takes no part" in refused


def test_a_script_of_the_old_launcher_is_given_its_local_rank(orch: Orch) -> None:
    done = orch("run", "--json", "--pass-local-rank", "--", "tells/tells.py", "--lr", "1")
    found = json.loads(done.stdout)["id"]
    said = orch("logs", "--job", found).stdout
    assert said.count("['--local_rank=0', '--lr', '1']") == 2
    assert said.count(f"jobs/{found}/checkpoints") == 2
    refused = orch("run", "--resume", found, code=2).stderr
    assert f"`orch run --resume {found} -- tells.py`" in refused


def test_a_script_that_takes_part_goes_on_from_where_its_job_ended(orch: Orch, job: str) -> None:
    """With the settings that it was given, and the weights of a run that nobody interrupts."""
    given = ("--set", "epochs=2", "--set", "shares=equal", "--set", "checkpoint_every=4")
    whole, begun = (
        ids(orch, *given, "--", "mine/joins.py"),
        ids(orch, *given, "--set", "steps=9", "--", "mine/joins.py"),
    )
    named = orch("run", "--resume", begun, code=2).stderr
    assert f"`orch run --resume {begun} -- joins.py`" in named
    assert "not mine/joins.py" in orch("run", "--resume", job, "--", "mine/joins.py", code=2).stderr
    resumed = ids(orch, "--resume", begun, "--set", "steps=0", "--", "mine/joins.py")
    logs = [orch("logs", "--job", one).stdout for one in (whole, begun, resumed)]
    ends = [{line.split("weights ")[1] for line in text.splitlines() if "weights " in line} for text in logs]
    assert len(ends[0]) == 1 and ends[0] == ends[2] != ends[1]
    assert f"jobs/{begun}/checkpoints/step-000000009.pt after 9 updates" in logs[2]


def test_resume_takes_no_other_experiment(orch: Orch) -> None:
    assert "leave --exp or --resume out" in orch("run", "--resume", "latest", "--exp", "mnist_lenet", code=2).stderr
    assert "no job" in orch("run", "--resume", "nothing", code=2).stderr.lower()


# ---- without a job --------------------------------------------------------------------------------------------------


class Host:
    """Answers as a host might, or might not be expected to."""

    node, workdir = "v100", "~/.orch"

    def __init__(self, answer: dict[str, Any]) -> None:
        self.answer = answer


def old_plan(settings: Sequence[str], kind: str = "experiment") -> LaunchPlan:
    job = parse_job(JobSpec.model_validate({"exp": "mnist_lenet", "settings": list(settings)}))
    node: dict[str, Any] = {"node_rank": 0, "first_rank": 0, "ranks": 1, "address": "10.0.0.1", "interface": None}
    node |= {"device": "cpu", "gpu": None, "python": "python3", "workdir": "~/.orch", "torchrun": (), "command": ()}
    return LaunchPlan.model_validate(
        {
            "schema": 1,
            "job": "j1",
            "exp": job.request.name,
            "kind": kind,
            "cluster": "rack",
            "master": "v100",
            "settings": dataclasses.asdict(job.request.settings),
            "master_address": "10.0.0.1",
            "rendezvous_port": 29500,
            "world_size": 1,
            "created": "",
            "nodes": ({"name": "v100", **node},),
            "code": CodeFolder(sha256="0" * 64, source="", files=1, size_bytes=1),
        }
    )


def test_the_old_jobs_own_settings_go_on_and_no_others() -> None:
    settings = ["epochs=20", "sync_bn=true", "lr=0.003", "resume=/old.pt"]
    exp, values = settings_of(old_plan(settings), JobSpec())
    kept = [f"{key}={value}" for key, value in values.items()]
    assert exp == "mnist_lenet"
    assert sorted(kept) == ["epochs=20", "lr=0.003", "sync_bn=True"]
    again = dataclasses.asdict(request_of(exp, {}, values).settings)
    assert again == {**old_plan(settings).settings, "resume": ""}


def test_a_script_of_its_own_has_no_settings_to_go_on_with() -> None:
    plan = old_plan([], kind="script").model_copy(update={"settings": {}})
    assert settings_of(plan, JobSpec(script="train.py")) == (plan.exp, {})


@pytest.mark.parametrize(
    ("settings", "remedy"), [([], "--set checkpoint_every=500"), (["checkpoint_every=50"], "one every 50 updates")]
)
def test_a_job_without_checkpoints_names_the_setting(
    monkeypatch: pytest.MonkeyPatch, settings: list[str], remedy: str
) -> None:
    monkeypatch.setattr("orchestrator.transport.ask.ask", lambda host, *_, **__: host.answer)
    with pytest.raises(UsageError) as caught:
        last_checkpoint(old_plan(settings), {"v100": Host({"path": None})})  # type: ignore[dict-item]
    assert "j1 has no checkpoint on v100" in str(caught.value)
    assert remedy in caught.value.remedy


def test_a_job_that_wrote_none_hands_on_what_it_had_begun_with(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"": None, "/jobs/j0/checkpoints": "/jobs/j0/checkpoints/step-000000009.pt"}
    monkeypatch.setattr(
        "orchestrator.transport.ask.ask", lambda host, _, request, **__: {"path": there[request["folder"]]}
    )
    old = old_plan(["resume=/jobs/j0/checkpoints/step-000000009.pt"])
    assert last_checkpoint(old, {"v100": Host({})}).path == there["/jobs/j0/checkpoints"]  # type: ignore[dict-item]


@pytest.mark.parametrize("path", ["relative.pt", "/a\nb", 7, "/" + "x" * 5000])
def test_a_hosts_word_for_a_path_is_not_taken_on_trust(monkeypatch: pytest.MonkeyPatch, path: Any) -> None:
    monkeypatch.setattr("orchestrator.transport.ask.ask", lambda host, *_, **__: host.answer)
    with pytest.raises(ProbeError):
        last_checkpoint(old_plan([]), {"v100": Host({"path": path})})  # type: ignore[dict-item]


def test_what_the_hosts_try_again_goes_on_from_its_last_checkpoint(orch: Orch) -> None:
    """No controller takes part; the weights are those of an uninterrupted run."""
    kept = ("--nodes", "one,two", "--set", "checkpoint_every=4", "--set", "epochs=2")
    whole = orch("run", *kept, "mine/joins.py").stdout
    words = (*kept, "--retries", "1", "--retry-wait", "0.1s", "--detach", "dies/dies.py")
    job = orch("run", *words).stdout.strip()
    orch("logs", "-f", "--job", job)
    (row,) = [row for row in json.loads(orch("jobs", "--json").stdout)["jobs"] if row["id"] == job]
    assert (row["state"], row["attempt"]["number"], row["exit_code"]) == ("succeeded", 2, 0)
    (why,) = (one["why"] for one in row["attempt"]["earlier"])
    assert why in ("one: rank 1 was killed by SIGKILL", "two: rank 1 was killed by SIGKILL")  # either is the master
    again = orch("logs", "--job", job, "--rank", "0").stdout
    assert "after 8 updates" in again
    weights = [
        {line.partition("weights")[2] for line in text.splitlines() if "weights" in line} for text in (whole, again)
    ]
    assert weights[0] == weights[1] and len(weights[0]) == 1
