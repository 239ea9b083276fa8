"""One round: a job on a cell's three hosts, one fault, what was expected of it, and what must hold whatever happens."""

from __future__ import annotations

import contextlib
import json
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from orchestrator.errors import OrchError
from orchestrator.hosts import Who
from orchestrator.jobs import Collected, JobRecord, claimed, combine
from orchestrator.jobs import launch as control
from orchestrator.jobs.collect import collect
from orchestrator.jobs.launch import launch
from orchestrator.paths import RunFolder
from orchestrator.planning import RENDEZVOUS_PORT, LaunchPlan, NodePlan, pack_folder, torchrun_arguments
from orchestrator.record import Owner
from tests.support.local_job import LAUNCHER, launcher_arguments

from . import invariants
from .world import TESTS_OF_CHAOS, Cell, Process, remove

RUNNING_S = 60.0
OVER_S = 30.0
"""An ordinary end, with the whole ladder for workers that ignore all but KILL."""
HOME = "/home/lab"
US = Who(Owner(id="c" * 32, name="chaos@controller"), "chaos")


@dataclass(frozen=True)
class Expected:
    """What a fault should come to. state: one, or several with `|` between them. node: whom the first failure names;
    None where several may be right.

    survives: the job goes on and is asked to end later. detected_s, gone_s: how soon the first of the other hosts'
    ranks ends, and then all that can end. heal: brings back what was frozen or cut off.
    """

    state: str = "failed"
    node: str | None = None
    says: str = ""
    exit_code: int | None = None
    survives: bool = False
    detected_s: float = 10.0
    gone_s: float = 25.0
    left_out: frozenset[str] = frozenset()
    """Hosts that can do nothing until `heal`."""
    heal: Callable[[], None] | None = None
    logs_whole: bool = True


@dataclass
class Outcome:
    number: int
    kind: str
    wrong: list[str] = field(default_factory=list)
    detected_s: float | None = None
    gone_s: float | None = None
    took_s: float = 0.0


class Round:
    """What a fault gets to work with."""

    def __init__(self, cell: Cell, seed: int, number: int, kind: str, *, torch: bool = False) -> None:
        self.cell, self.world, self.torch = cell, cell.world, torch
        self.rng = random.Random(f"{seed}/{number}/{kind}")
        letters = "".join(self.rng.choice("abcdefghjkmnpqrstuvwxyz") for _ in range(4))
        self.job, self.kind = f"chaos-{seed}-{number}-{letters}", kind
        self.master = cell.names[0]
        self.victim = self.rng.choice(cell.names)
        self.folder = self.world.folder / self.job
        self.canary = f"canary{self.rng.getrandbits(64):016x}"
        self.behaviour: dict[str, Any] = {
            "ignores": self.rng.random() < 0.3,
            "daemons": self.rng.random() < 0.5,
            "exits": {},
            "gloo": torch,
        }
        self.changes: dict[str, Any] = {"grace_s": round(self.rng.uniform(0.2, 1.0), 1)}
        self.workdir = {name: f"{HOME}/.orch" for name in cell.names}
        self.env: dict[str, str] = {}
        self.prepare: dict[str, str] = {}
        self.log: list[dict[str, Any]] = []
        self.afterwards = contextlib.ExitStack()

    # ---- the job ----------------------------------------------------------------------------------------------

    def make(self) -> None:
        """The plan, from what the fault has asked for so far."""
        code = self.folder / "code"
        code.mkdir(parents=True)
        for source in (TESTS_OF_CHAOS / "script.py", LAUNCHER):
            (code / source.name).write_bytes(source.read_bytes())
        packed, self.blob = pack_folder(code)
        ranks = [1] * len(self.cell.names)
        env = {
            "CHAOS": json.dumps(self.behaviour),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "eth0",
            "A_TOKEN": self.canary,
            **self.env,
        }
        addresses = {name: self.world.ports[name].addresses[0].split("/")[0] for name in self.cell.names}
        nodes = [
            NodePlan(
                name=name, node_rank=index, first_rank=index, ranks=1, address=addresses[name], interface="eth0",
                device="cpu", gpu=None, python=sys.executable, workdir=self.workdir[name], env=env,
                torchrun=self._torchrun(ranks, index, addresses[self.master]), command=("script.py",),
                prepare=self.prepare.get(name),
            )
            for index, name in enumerate(self.cell.names)
        ]  # fmt: skip
        self.plan = LaunchPlan(
            schema=1, job=self.job, exp="script.py", kind="script", cluster=US.cluster, owner=US.owner,
            master=self.master, master_address=addresses[self.master], rendezvous_port=RENDEZVOUS_PORT,
            world_size=len(nodes), created="2026-01-01T00:00:00+00:00", code=packed, nodes=tuple(nodes),
        ).model_copy(update=self.changes)  # fmt: skip

    def _torchrun(self, ranks: list[int], index: int, master: str) -> tuple[str, ...]:
        if self.torch:
            return torchrun_arguments(len(ranks), index, 1, master)
        return launcher_arguments("{job_dir}/src/fake_torchrun.py", ranks, index, master)

    def launch(self) -> None:
        launch(self.plan, self.cell.connect(), self.blob)

    def cancel(self) -> None:
        control.cancel(self.plan, self.cell.connect())

    def wait_running(self) -> None:
        everywhere = set(self.cell.names)

        def all_run(now: list[Process]) -> bool:
            return {process.node for process in now if process.role == "rank"} == everywhere

        if self.world.wait(self.job, all_run, RUNNING_S) is None:
            raise RuntimeError(f"{self.job} does not come to run: {self.say_state()}")

    def let_end(self) -> None:
        for name in self.cell.names:
            (self.on_disk(name) / "src" / "end").touch()

    def collect(self) -> Collected:
        """Dials the hosts again where the links are gone."""
        run = RunFolder(self.folder / "run")
        for attempt in range(3):
            with claimed(run):
                found = collect(self.plan, self.cell.connect(), run)
            if not found.errors:
                return found
            if attempt < 2:
                self.cell.close()
                time.sleep(0.5)
        raise RuntimeError(f"{self.job} cannot be collected: {found.errors}")

    def controller(self, action: str) -> subprocess.Popen[bytes]:
        """A controller in a process of its own, to be killed: `launch`, `follow` or `collect`."""
        plan = self.folder / "plan.json"
        plan.write_text(self.plan.model_dump_json(by_alias=True))
        (self.folder / "blob").write_bytes(self.blob)
        words = ["-m", "tests.chaos.controller", action, str(self.folder), str(self.world.lab.inventory)]
        root = TESTS_OF_CHAOS.parents[1]
        with open(self.folder / f"{action}.out", "ab") as out:
            return subprocess.Popen(
                [sys.executable, *words], stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd=root
            )

    # ---- hands ------------------------------------------------------------------------------------------------

    def processes(self, role: str | None = None, node: str | None = None) -> list[Process]:
        now = self.world.sighting(self.job).now
        return [p for p in now if role in (None, p.role) and node in (None, p.node)]

    def kill(self, role: str | None, node: str | None = None, signum: int = signal.SIGKILL) -> list[Process]:
        """Every process of this role on the host (the victim's, if none is named). At least one has to be there."""
        found = self.processes(role, node or self.victim)
        if not found:
            raise RuntimeError(f"no {role} on {node or self.victim}: {self.say_state()}")
        for process in found:
            process.signal(signum)
        self.tell(signal.Signals(signum).name, role=role, node=node or self.victim)
        return found

    def on_disk(self, name: str) -> Path:
        """The job's folder on this host, from here."""
        return self.world.root(name) / self.workdir[name].lstrip("/") / "jobs" / self.job

    def agent(self, name: str) -> dict[str, Any]:
        with contextlib.suppress(OSError, ValueError):
            return dict(json.loads((self.on_disk(name) / "agent.json").read_text()))
        return {}

    def tell(self, event: str, **more: Any) -> None:
        at_s = round(time.monotonic(), 2)
        self.log.append({"round": self.job, "kind": self.kind, "at_s": at_s, "event": event, **more})

    def pause(self, longest_s: float) -> None:
        time.sleep(self.rng.uniform(0.0, longest_s))

    def say_state(self) -> str:
        shown = ("state", "phase", "failures")
        agents = {name: {key: self.agent(name).get(key) for key in shown} for name in self.cell.names}
        return f"{agents}, processes {[(p.node, p.role) for p in self.processes()]}"


def run_round(
    cell: Cell, seed: int, number: int, kind: str, fault: Callable[[Round], Any], *, torch: bool = False
) -> tuple[Outcome, list[dict[str, Any]]]:
    """One round to its end, whatever happens in it. Returns what came of it and its events."""
    round_ = Round(cell, seed, number, kind, torch=torch)
    outcome = Outcome(number, kind)
    started = time.monotonic()
    try:
        _play(round_, fault, outcome)
    except (OrchError, OSError, RuntimeError, subprocess.SubprocessError) as error:
        outcome.wrong.append(f"{type(error).__name__}: {error}")
    outcome.took_s = round(time.monotonic() - started, 1)
    with contextlib.suppress(OrchError, OSError, RuntimeError):
        _tidy(round_, bool(outcome.wrong))
    return outcome, round_.log


def _play(round_: Round, fault: Callable[[Round], Any], outcome: Outcome) -> None:
    """A fault is a generator: what comes before its `yield` prepares the plan, what comes after it strikes and returns
    what is expected. A fault that launches by itself yields False.
    """
    steps = fault(round_)
    launches = next(steps) is not False
    round_.make()
    if launches:
        round_.launch()
        round_.wait_running()
        round_.pause(0.5)
        round_.tell("running")
    expected = _strike(steps)
    struck = time.monotonic()
    if expected.survives:
        _let_end(round_, outcome)
    else:
        _watch_the_end(round_, expected, outcome, struck)
    if expected.heal:
        expected.heal()
        round_.tell("healed")
        if round_.world.wait(round_.job, lambda now: not now, OVER_S) is None:
            outcome.wrong.append(f"not all ended after the healing: {round_.say_state()}")
    _look_back(round_, expected, outcome)


def _strike(steps: Any) -> Expected:
    try:
        next(steps)
    except StopIteration as over:
        return over.value
    raise AssertionError("a fault yields once")


def _let_end(round_: Round, outcome: Outcome) -> None:
    failed = [name for name in round_.cell.names if round_.agent(name).get("failures")]
    if failed or len(round_.processes("rank")) != len(round_.cell.names):
        outcome.wrong.append(f"did not survive: {round_.say_state()}")
    round_.let_end()
    if round_.world.wait(round_.job, lambda now: not now, OVER_S) is None:
        outcome.wrong.append(f"does not end: {round_.say_state()}")


def _watch_the_end(round_: Round, expected: Expected, outcome: Outcome, struck: float) -> None:
    others = set(round_.cell.names) - expected.left_out - ({round_.victim} if expected.detected_s else set())
    there = {p for p in round_.world.sighting(round_.job).ever if p.role == "rank" and p.node in others}

    def over(now: list[Process]) -> bool:
        return not [p for p in now if p.node not in expected.left_out]

    if round_.world.wait(round_.job, over, expected.gone_s + expected.detected_s) is None:
        outcome.wrong.append(f"not over after {expected.gone_s + expected.detected_s:.0f} s: {round_.say_state()}")
        return
    gone = round_.world.sighting(round_.job).gone
    outcome.gone_s = round(time.monotonic() - struck, 2)
    if there:
        outcome.detected_s = round(max(0.0, min(gone[p] for p in there if p in gone) - struck), 2)
        if outcome.detected_s > expected.detected_s:
            outcome.wrong.append(f"noticed after {outcome.detected_s} s, promised within {expected.detected_s:g} s")


def _look_back(round_: Round, expected: Expected, outcome: Outcome) -> None:
    collected = round_.collect()
    known = JobRecord(
        schema=1, id=round_.job, state="running", exp="script.py", cluster="chaos", nodes=tuple(round_.cell.names)
    )
    record = combine(round_.plan, collected.agents, known, datetime.now(timezone.utc))
    round_.tell("ended", state=record.state, first_failure=record.first_failure and record.first_failure.model_dump())
    outcome.wrong += invariants.broken(round_, expected, record, collected)


def _tidy(round_: Round, broken: bool) -> None:
    """Leaves the hosts as a next round needs them, whatever this one did."""
    round_.afterwards.close()
    for process in round_.processes():
        process.signal(signal.SIGCONT)
        process.signal(signal.SIGKILL)
    if broken:
        for name in round_.cell.names:
            round_.world.heal(name)
        round_.cell.close()
    else:
        remove(round_.folder)
    for name in round_.cell.names:
        with contextlib.suppress(OSError):
            remove(round_.on_disk(name))


def at_once(*actions: Callable[[], object]) -> None:
    threads = [threading.Thread(target=action) for action in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
