"""A job on this machine for tests of the real supervisor: two local nodes, any script, no inventory and no probe.

`torch_free=True` puts `fake_torchrun.py` in torchrun's place: it starts the same rank wrappers with the same variables
in a tenth of a second, for tests that count starts, deaths and leftovers and train nothing.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path

from orchestrator.hosts import Cluster, Node
from orchestrator.jobs import JobRecord, combine
from orchestrator.jobs import launch as control
from orchestrator.jobs.launch import launch
from orchestrator.planning import LaunchPlan, NodePlan, pack_folder, torchrun_arguments
from orchestrator.remote import processes, reader
from orchestrator.remote.agent import agent_state
from orchestrator.remote.layout import JobFolder
from orchestrator.transport import ConnectedHost, LocalTransport
from tests.support.quick_python import quick_python

LAUNCHER = Path(__file__).with_name("fake_torchrun.py")
OURS = {"PYTHONPATH": str(Path(__file__).parents[2])}
"""For `python -m trainer` by a Python of the tests' own, in which this project is not installed."""


class Gang:
    """One job: `launch()`, then look through `agents()` and `wait()`; everything of it ends with the context."""

    def __init__(self, plan: LaunchPlan, blob: bytes, activate: str | None = None) -> None:
        self.plan, self.blob = plan, blob
        self.hosts = {n.name: ConnectedHost(LocalTransport(n.name), n.python, activate, n.workdir) for n in plan.nodes}

    def launch(self) -> None:
        launch(self.plan, self.hosts, self.blob)

    def folder(self, node: str) -> Path:
        return Path(self.plan.node(node).workdir) / "jobs" / self.plan.job

    def agents(self) -> dict[str, Mapping]:
        """Every host's record of this job, read where it lies: to ask a host starts a Python there."""
        return {node.name: reader.look(JobFolder(self.folder(node.name))) for node in self.plan.nodes}

    def cluster(self) -> Cluster:
        """Of its hosts, as the inventory of a person who has them would give it."""
        nodes = [
            Node(name=n.name, host="127.0.0.1", transport="local", python=sys.executable, workdir=n.workdir)
            for n in self.plan.nodes
        ]
        return Cluster(name="test", file="test.yaml", nodes=tuple(nodes))

    def record(self) -> JobRecord:
        nodes = tuple(node.name for node in self.plan.nodes)
        return JobRecord(schema=1, id=self.plan.job, state="starting", exp=self.plan.exp, cluster="test", nodes=nodes)

    def wait(self) -> JobRecord:
        """Until every host has spoken its last word, as who follows the job would hear it."""
        found, open_hosts = dict[str, Mapping](), {node.name for node in self.plan.nodes}
        while open_hosts:
            for name in sorted(open_hosts):
                try:
                    found[name] = reader.look(JobFolder(self.folder(name)))
                except OSError:  # its disk fails: no more is heard of it
                    open_hosts.remove(name)
                else:
                    open_hosts -= set() if found[name]["alive"] else {name}
            time.sleep(0.02 if open_hosts else 0)
        return combine(self.plan, found, self.record(), datetime.now(timezone.utc))

    def wait_for(self, condition) -> dict[str, Mapping]:
        """Until condition(agents by node) holds. Reads the records where they lie: no host is asked."""
        while True:
            found = {node.name: agent_state(JobFolder(self.folder(node.name))) for node in self.plan.nodes}
            if all("pid" in agent for agent in found.values()) and condition(found):
                return found
            assert not self.is_over(), f"the job ended before the condition held: {found}"
            time.sleep(0.02)

    def is_over(self) -> bool:
        """Whether every host has spoken its last word, and its keeper has ended. False where a disk gives no answer."""
        jobs = [JobFolder(self.folder(node.name)) for node in self.plan.nodes]
        try:
            return all(job.is_final() and not agent_state(job)["alive"] for job in jobs)
        except OSError:
            return False

    def wait_running(self) -> dict[str, Mapping]:
        return self.wait_for(
            lambda agents: (
                all(r.get("pid") for agent in agents.values() for r in agent.get("ranks", {}).values())
                and all(agent.get("ranks") for agent in agents.values())
            )
        )


def launcher_arguments(launcher: str, ranks: Sequence[int], index: int, master: str) -> tuple[str, ...]:
    """For `fake_torchrun.py`, in torchrun's place on the host of this index."""
    numbers = (ranks[index], index, len(ranks))
    return (launcher, *map(str, numbers), master, "{rendezvous_port}", "{job_dir}")


@contextmanager
def gang(
    tmp_path: Path,
    script: str,
    *,
    ranks: Sequence[int] = (1, 1),
    torch_free: bool = True,
    warm: bool | None = None,
    command: Sequence[str] = ("script.py",),
    env: Mapping[str, str] | None = None,
    activate: str | None = None,
    **plan_changes: object,
) -> Iterator[Gang]:
    """script: Python text that every rank runs. ranks: of node `a` (the master), `b`, and so on. activate: a line of
    shell that a host runs first. warm: programs are forked where torch is imported already (`warm_python`);
    None: where torchrun is the real one.
    """
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "script.py").write_text(script)
    code, blob = pack_folder(folder)
    job_id = f"test-{tmp_path.name}"[:100]
    warm = not torch_free if warm is None else warm
    python = quick_python(tmp_path / "quick", torchrun=True) if warm else sys.executable
    ours = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **(OURS if warm else {})}
    nodes, first = [], 0
    for index, count in enumerate(ranks):
        torchrun = launcher_arguments(str(LAUNCHER), ranks, index, "127.0.0.1")
        if not torch_free:
            torchrun = torchrun_arguments(len(ranks), index, count, "127.0.0.1")
        nodes.append(
            NodePlan(
                name="abcdefgh"[index],
                node_rank=index,
                first_rank=first,
                ranks=count,
                address="127.0.0.1",
                interface="lo",
                device="cpu",
                gpu=None,
                python=python,
                workdir=str(tmp_path / f"work-{index}"),
                env={**ours, **(env or {})},
                torchrun=torchrun,
                command=tuple(command),
            )
        )
        first += count
    plan = LaunchPlan(
        schema=1, job=job_id, exp="script.py", kind="script", cluster="test", master="a",
        master_address="127.0.0.1", rendezvous_port=29500, world_size=sum(ranks), created="2026-01-01T00:00:00+00:00",
        code=code, nodes=tuple(nodes),
    ).model_copy(update={"grace_s": 1.0, **plan_changes})  # fmt: skip
    made = Gang(plan, blob, activate)
    try:
        yield made
    finally:
        if not made.is_over():
            control.cancel(made.plan, made.hosts)
            made.wait()


def left(job) -> list[int]:
    return [pid for node in job.plan.nodes for pid in processes.marked(job.folder(node.name))]
