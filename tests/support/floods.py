"""A job that writes as much as it can, and who follows it."""

from __future__ import annotations

import json
import subprocess
import sys

# 1 GB a minute on both streams, by the clock; `work_ms` is what a step takes: writing, and a fixed computation.
FLOODS = """
import os, statistics, sys, time
line = (b"x" * 99 + b"\\n") * 400
began, work_ms = time.monotonic(), []
while len(work_ms) < 625:
    start = time.perf_counter()
    for stream in (1, 2):
        os.write(stream, line)
    sum(range(40_000))
    work_ms.append(1000 * (time.perf_counter() - start))
    time.sleep(max(0, began + len(work_ms) * 2 * len(line) / 16.7e6 - time.monotonic()))
steps_per_s = len(work_ms) / (time.monotonic() - began)
with open(os.environ["ORCH_METRICS"], "a") as file:
    file.write('{"steps_per_s": %f, "work_ms": %f}\\n' % (steps_per_s, statistics.median(work_ms)))
"""

FOLLOWS = """
import pickle, sys
from types import SimpleNamespace
from orchestrator.views import following
from orchestrator.transport.ask import ConnectedHost
from orchestrator.jobs.job_store import JobRecord
from orchestrator.jobs.running import RunningJob
from orchestrator.planning.launch_plan import LaunchPlan
from orchestrator.transport.shell import LocalTransport

plan = LaunchPlan.model_validate_json(sys.stdin.read())
record = JobRecord(schema=1, id=plan.job, state="running", exp="x", cluster="c", nodes=("a",))
hosts = {n.name: ConnectedHost(LocalTransport(n.name), n.python, None, n.workdir) for n in plan.nodes}
store = SimpleNamespace(job_record=lambda name: record, change_job=lambda name, change: change(record))
following.print_events(RunningJob(plan, store, SimpleNamespace(reopen=None), hosts).follow())
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))  # ru_maxrss is the parent's, too
print(int(peak.split()[1]) // 1024, file=sys.stderr)
"""


def follower_of(job) -> subprocess.Popen[bytes]:
    """A process that follows it as `orch logs -f` does; at its end it prints its memory in MiB on standard error."""
    pipe = subprocess.PIPE
    following = subprocess.Popen([sys.executable, "-c", FOLLOWS], stdin=pipe, stdout=pipe, stderr=pipe)
    following.stdin.write(job.plan.model_dump_json(by_alias=True).encode())
    following.stdin.close()
    return following


def figures_of(job) -> dict[str, float]:
    assert job.wait().state == "succeeded"
    return json.loads((job.folder("a") / "rank-0" / "metrics.jsonl").read_text())
