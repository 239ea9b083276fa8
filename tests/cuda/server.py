"""The process that imports torch and the trainer once, and forks the ranks of each job that its standard input names.

A line in: a `machine.Job` and the folder for what its ranks leave. A line out: the ranks' exit codes. Ranks that ended
a job well stay for the next one of the same shape.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import selectors
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

# Everything that a rank imports, before the first fork; CUDA is first asked for something in a rank.
import torch.distributed as dist
import torch.distributed.fsdp  # noqa: F401
import torchvision.models  # noqa: F401

import trainer.measure.collectives
import trainer.measure.profile_run
import trainer.train  # noqa: F401
from tests.cuda import rank
from tests.cuda.machine import END

GRACE_S = 5
"""The first rank that ends badly ends the others so long after: they might wait for it for ever."""
_PR_SET_PDEATHSIG = 1
SHAPE = ("hosts", "knobs", "prelude")
"""What jobs need to have in common to run in the same processes."""


def serve() -> None:
    end_with_parent()
    rank.draw_no_weights()
    rank.compare_no_numbers()
    gc.collect()
    gc.freeze()  # no rank looks through what was imported, which would copy all of it
    gang = None
    for line in sys.stdin:
        if line == END:
            break
        job = json.loads(line)
        shape = {name: job[name] for name in SHAPE} | {"backend": backend_of(job["arguments"])}
        if not gang or gang.shape != shape or gang.broken:
            if gang:
                gang.end()
            gang = Gang(shape)
        sys.stdout.write(json.dumps(gang.play(job)) + "\n")
        sys.stdout.flush()
    if gang:
        gang.end()


class Gang:
    """The ranks of some hosts."""

    def __init__(self, shape: dict[str, Any]) -> None:
        self.shape, self.broken = shape, False
        self.ranks = [Rank(shape, environment) for environment in ranks_of(shape["hosts"])]

    def play(self, job: dict[str, Any]) -> list[int]:
        """The exit code of each rank, 0 for one that stays."""
        with store() as port:  # of this job's own: what an older one left in it would mislead them
            return self._play({**job, "port": port})

    def _play(self, job: dict[str, Any]) -> list[int]:
        for one in self.ranks:
            one.begin(job)
        deadline_s = time.monotonic() + job["limit_s"]
        with selectors.DefaultSelector() as answers:
            for one in self.ranks:
                answers.register(one.answers, selectors.EVENT_READ, one)
            while answers.get_map():
                for key, _ in answers.select(max(0.0, deadline_s - time.monotonic())):
                    answers.unregister(key.fileobj)
                    if not key.data.take_answer():
                        deadline_s = min(deadline_s, time.monotonic() + GRACE_S)
                if time.monotonic() >= deadline_s:
                    for key in answers.get_map().values():
                        os.kill(key.data.process, signal.SIGKILL)
        self.broken = any(one.exit_code is not None for one in self.ranks)
        return [one.exit_code or 0 for one in self.ranks]

    def end(self) -> None:
        for one in self.ranks:
            if one.exit_code is None:
                end(one.process)
            one.close()


class Rank:
    """A forked process. exit_code: None while it lives."""

    def __init__(self, shape: dict[str, Any], environment: dict[str, str]) -> None:
        jobs, self.jobs = os.pipe()
        self.answers, answers = os.pipe()
        ours = (self.jobs, self.answers)
        self.process = fork(lambda: rank.be(shape, environment, jobs, answers, not_ours=ours))
        os.close(jobs)
        os.close(answers)
        self.exit_code: int | None = None

    def begin(self, job: dict[str, Any]) -> None:
        os.write(self.jobs, json.dumps(job).encode() + b"\n")

    def take_answer(self) -> bool:
        """Whether the rank has done its job; else its end."""
        if os.read(self.answers, 1):
            return True
        self.exit_code = os.waitstatus_to_exitcode(os.waitpid(self.process, 0)[1])
        return False

    def close(self) -> None:
        os.close(self.jobs)
        os.close(self.answers)


def backend_of(arguments: list[str]) -> str:
    """Over Gloo a rank's own GPU is its first: a process sees its GPUs in one order for good."""
    return arguments[arguments.index("--backend") + 1] if "--backend" in arguments else ""


def ranks_of(hosts: list[dict[str, Any]]) -> list[dict[str, str]]:
    """Each rank's environment, as torchrun and orch would set it."""
    world = sum(host["ranks"] for host in hosts)
    common = {"WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": True}
    common |= {"TORCHELASTIC_RUN_ID": "standin", "TORCHELASTIC_RESTART_COUNT": 0}
    found = []
    for index, host in enumerate(hosts):
        for local in range(host["ranks"]):
            own = {"RANK": len(found), "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": host["ranks"]}
            own |= {"ORCH_NODE": f"host-{index}", "FAKE_DEVICES": host["ranks"], "DEVICE": host["device"]}
            own |= {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(host["ranks"])))}  # orch sets it, too
            found.append({name: str(value) for name, value in {**common, **own}.items()})
    return found


@contextlib.contextmanager
def store() -> Iterator[int]:
    """The port at which ranks meet. A process of its own keeps it, since its thread would not survive a fork."""
    reader, writer = os.pipe()
    keeper = fork(lambda: keep_store(writer))
    try:
        yield int(os.read(reader, 10))
    finally:
        end(keeper)
        os.close(reader)
        os.close(writer)


def keep_store(port_writer: int) -> None:
    kept = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(minutes=10))
    os.write(port_writer, str(kept.port).encode())
    signal.pause()


def end(process: int) -> None:
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)


def fork(work: Callable[[], object]) -> int:
    """A process that does the work and ends; it never returns into this one's code."""
    process = os.fork()
    if process:
        return process
    try:
        end_with_parent()
        work()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(70)  # what ends well has ended the process by itself


def end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    serve()
    os._exit(0)  # torch takes most of a second to clear away
