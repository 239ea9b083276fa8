"""What commands print, for people and with `--json`, and the page of a run."""

from __future__ import annotations

import re
from pathlib import Path

from orchestrator.doctor import CHECKS, judge
from orchestrator.errors import ConnectError
from orchestrator.hosts import Node
from orchestrator.jobs import HostSnapshot, diagnose
from orchestrator.paths import Home
from orchestrator.planning import LaunchPlan
from orchestrator.results.analyse import analyse
from orchestrator.store import Store
from orchestrator.views import doctor_json, render_report, why_json
from tests.golden.conftest import Golden, Types, masked, pretty
from tests.support.examined_hosts import gpu_health, host, seen
from tests.support.plans import host as host_facts
from tests.support.remembered import cluster, job
from tests.support.run_folders import steady_run, two_hosts

WAITS = [["/venv/torch/distributed/distributed_c10d.py", 4181, "all_reduce", ""], ["/w/src/train.py", 7, "step", "x"]]
SAVES = [["/w/src/train.py", 31, "save", "copy(weights)"]]
FAILED = {"node": "b", "rank": 1, "exit_code": 7, "reason": "ended with exit code 7", "log_line": "ValueError: no"}


def both(orch: Types, *words: str, **known: str) -> str:
    """A command as a person reads it, and its document."""
    shown = []
    for more in ((), ("--json",)):
        code, out, err = orch(*words, *more)
        shown += [f"$ orch {' '.join((*words, *more))}", out.rstrip(), err.rstrip(), f"exit {code}", ""]
    return masked("\n".join(line.rstrip() for line in "\n".join(shown).splitlines()) + "\n", **known)


def test_predictions_are_what_they_were(orch: Types, golden: Golden) -> None:
    golden("plan.txt", both(orch, "plan", "--exp", "resnet152_cifar", "--set", "batch=1024"))


def test_jobs_and_status_are_what_they_were(orch: Types, golden: Golden, tmp_path: Path) -> None:
    """Of hosts that are this machine, since each is asked whether it answers."""
    store = Store(Home(tmp_path / "home"))
    here = {"host": "localhost", "transport": "local", "gpu": "Tesla V100-16GB", "gpus": 1, "bandwidth_bps": 2.5e9}
    here |= {"id": "q3XKQO", "note": "master in the study", "image": "pytorch-2.0.1"}
    nodes = tuple(Node.model_validate({"name": name, "workdir": f"{tmp_path}/{name}", **here}) for name in "ab")
    moment = "2026-11-21T09:00:00+00:00"
    probed = {"facts": {"a": host_facts(41), "b": host_facts(42)}, "probed": {"a": moment, "b": moment}}
    store.save_cluster(cluster(nodes=nodes, master="a", file=f"{tmp_path}/lab.yaml", **probed), current=True)
    ended = {"ended": "2026-11-21T09:30:00+00:00", "exit_code": 0, "state": "succeeded"}
    store.save_job(job("mnist_lenet-20261121-0900-abc", **ended))
    store.save_job(
        job("train-20261121-0930-abd", **{**ended, "state": "failed", "exit_code": 7, "first_failure": FAILED})
    )
    for name in ("jobs", "status"):
        shown = both(orch, name, HERE=str(tmp_path))
        golden(f"{name}.txt", re.sub(r"\d+ d(ays)? ago|\d+ (d|h) \d+ (h|min)", "AGE", shown))


def test_a_comparison_is_what_it_was(orch: Types, golden: Golden, tmp_path: Path) -> None:
    steady_run(tmp_path / "runs" / "slow", 88)
    steady_run(tmp_path / "runs" / "fast", 38, strategy="ddp")
    golden("compare.txt", both(orch, "compare", "slow", "fast", HERE=str(tmp_path)))


def test_a_doctors_findings_are_what_they_were(golden: Golden) -> None:
    sick = host("v100", health_changes={"gpus": (gpu_health(0, uncorrected=2), gpu_health(1, link_width=4))})
    document = doctor_json("lab", judge(seen(sick)))
    passed = document.pop("passed")
    assert passed == [check.id for check in CHECKS if check.id != "P10"]
    golden("doctor.json", masked(pretty(document)))


def test_a_verdict_is_what_it_was(golden: Golden, tmp_path: Path) -> None:
    def look(number: int, frames: list[list[object]]) -> HostSnapshot:
        process = {"pid": 77, "name": "python", "state": "S", "wchan": "futex_do_wait", "same": True, "idle": True}
        rank = {"rank": number, "ended": False, "does": "waits", "quiet_s": 300.0, "wrapper": "S"}
        rank["processes"] = [{**process, "threads": [{"main": True, "frames": frames}]}]
        return HostSnapshot.model_validate({"state": "running", "alive": True, "src": "/w/src", "ranks": [rank]})

    looks = {"a2000": look(0, WAITS), "v100": look(1, SAVES), "a16": ConnectError("a16", "no answer within 10 s")}
    plan = LaunchPlan.model_validate_json(two_hosts(tmp_path / "run").plan.read_text())
    golden("why.json", masked(pretty(why_json("j-1", diagnose(plan, looks), looks))))


def test_a_report_is_what_it_was(golden: Golden, tmp_path: Path) -> None:
    run = two_hosts(tmp_path / "run", state="failed", first_failure={**FAILED, "node": "v100"})
    page = render_report(analyse(run), None)
    page = re.sub(r"(data:[\w/+-]+;base64,)[\w+/=]+", r"\1DATA", page)
    golden("report.html", masked(re.sub(r"<style>.*?</style>|<svg.*?</svg>", "", page, flags=re.S)))
