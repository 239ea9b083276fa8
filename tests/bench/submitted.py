"""Controllers killed (SIGKILL) while their jobs wait, run, and rest between two attempts: what becomes of each job.

    python -m tests.bench.submitted [--rounds 20] [--seed 1] [--moments submits,waits,runs,rests]

Two people with logins of their own submit jobs by turns (`orch run --wait --retries 1 --detach`) to two hosts behind
real SSH servers, and follow them (`orch logs -f`). A seed draws when the controller is killed: the submitting one at
any moment, the follower while the job is in that state. Every job whose submission was not killed has to succeed, each
after as many attempts as its script needs, and nothing may run twice on a GPU, which the scripts see by a lock on each
host, or stay behind: no process, ticket or claim. A job whose submission was killed has run whole or not at all.

The GPUs are made up: only their claims are real.
"""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.bench.queued import left_of, logins, open_to_all
from tests.support.gpu_rack import GpuRack, Person, gpu_rack

HOSTS = "ab"
MOMENTS = ("submits", "waits", "runs", "rests")
SUBMITTING_S = 4.0
IN_STATE_S = 2.0
WITHIN_S = 400.0
"""For a job's next state; a half-done start is undone by its hosts after 300 s, unless `orch jobs` does it before."""
SCRIPT = """
import fcntl, os, signal, sys, time
from pathlib import Path

shared, name, dies = Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "dies"
node, rank = os.environ["ORCH_NODE"], os.environ["RANK"]
with open(os.open(shared / f"gpu-{node}", os.O_RDWR)) as gpu:
    try:
        fcntl.flock(gpu, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        (shared / f"twice-{name}-{node}").touch()
    with open(shared / f"ran-{name}-{rank}", "a") as ran:
        ran.write("x")
    if dies and os.environ.get("ORCH_ATTEMPT", "1") == "1" and rank == "0":
        while not (shared / f"seen-{name}").exists():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGKILL)
    while not (shared / f"go-{name}").exists():
        time.sleep(0.02)
"""


@dataclass(frozen=True)
class Round:
    """One job, and the controller that is killed after so long."""

    number: int
    moment: str
    killed_after_s: float

    @property
    def name(self) -> str:
        return f"{self.moment}-{self.number:02d}"

    @property
    def tries(self) -> int:
        return 2 if self.moment == "rests" else 1


def rounds(moments: list[str], count: int, draw: random.Random) -> list[Round]:
    limit = {"submits": SUBMITTING_S}
    found = [
        Round(number, moment, draw.uniform(0, limit.get(moment, IN_STATE_S)))
        for moment in moments
        for number in range(1, count + 1)
    ]
    draw.shuffle(found)
    return found


class Scene:
    def __init__(self, rack: GpuRack, people: list[Person], shared: Path) -> None:
        self.rack, self._people, self._shared = rack, people, shared
        for person in people:
            (person.folder / "train.py").write_text(SCRIPT)

    def play(self, each: Round) -> str:
        """What became of the job. Raises AssertionError if it is not what it should be."""
        person, other = self._people if each.number % 2 else self._people[::-1]
        before = f"before-{each.name}"
        blocker = other.types("run", *self._words(before, "no")).stdout.strip()
        self._until(other, blocker, "running")
        words = self._words(each.name, "dies" if each.tries > 1 else "no", "--retries", "1", "--retry-wait", "3s")
        if each.moment == "submits":
            with person.starts("run", *words) as submitting:
                time.sleep(each.killed_after_s)
                has_returned = submitting.poll() is not None
                submitting.kill()
            job = self._job_of(person, each.name)
            self._go(before)
            self._until(other, blocker, "succeeded")
            self._go(each.name)
            return self._outcome(person, job, each, "returned before" if has_returned else "killed")
        job = person.types("run", *words).stdout.strip()
        self._until(person, job, "queued")
        if each.moment == "waits":
            self._kill_follower(person, job, each.killed_after_s)
        self._go(before)
        self._until(other, blocker, "succeeded")
        self._until(person, job, "running")
        if each.moment == "runs":
            self._kill_follower(person, job, each.killed_after_s)
        if each.tries > 1:
            (self._shared / f"seen-{each.name}").touch()
            self._until(person, job, "starting")
            self._kill_follower(person, job, each.killed_after_s)
        self._go(each.name)
        return self._outcome(person, job, each, "killed")

    def _words(self, name: str, dies: str, *more: str) -> list[str]:
        return ["--name", name, "--wait", *more, "--detach", "train.py", str(self._shared), name, dies]

    def _go(self, name: str) -> None:
        (self._shared / f"go-{name}").touch()

    def _kill_follower(self, person: Person, job: str, after_s: float) -> None:
        with person.starts("logs", "-f", "--job", job) as follower:
            time.sleep(after_s)
            follower.kill()

    def _job_of(self, person: Person, name: str) -> str | None:
        found = [job["id"] for job in person.jobs()["jobs"] if job["id"].startswith(f"{name}-")]
        return found[0] if found else None

    def _state(self, person: Person, job: str) -> str:
        return next(str(row["state"]) for row in person.jobs()["jobs"] if row["id"] == job)

    def _until(self, person: Person, job: str, *states: str) -> str:
        until = time.monotonic() + WITHIN_S
        while (state := self._state(person, job)) not in states:
            assert time.monotonic() < until, f"{job} is {state}, not {states}"
            time.sleep(0.3)
        return state

    # ---- afterwards ---------------------------------------------------------------------------------------------

    def _outcome(self, person: Person, job: str | None, each: Round, how: str) -> str:
        state = self._until(person, job, "succeeded", "failed", "cancelled", "lost") if job else "not known"
        self._await(lambda: not [*left_of(self.rack)], lambda: ", ".join(left_of(self.rack)))
        ran = [len(path.read_text()) for path in sorted(self._shared.glob(f"ran-{each.name}-*"))]
        whole = [each.tries] * len(HOSTS)
        may_be_gone = each.moment == "submits" and how == "killed"
        assert (state, ran) == ("succeeded", whole) or (may_be_gone and state != "succeeded" and not ran), (state, ran)
        assert not [*self._shared.glob("twice-*")]
        what = f"{state}, {each.tries} of {each.tries} attempts" if ran else f"{state}, nothing has run"
        return f"{how} after {each.killed_after_s:.2f} s: {what}, nothing left"

    @staticmethod
    def _await(condition: Callable[[], bool], words: Callable[[], str]) -> None:
        until = time.monotonic() + WITHIN_S
        while not condition():
            assert time.monotonic() < until, words()
            time.sleep(0.2)


def play_all(folder: Path, found: list[Round], say: Callable[[str], None]) -> int:
    """Returns the number of rounds that went wrong."""
    wrong = 0
    folder.chmod(0o755)
    shared = folder / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    for host in HOSTS:
        (shared / f"gpu-{host}").touch()
        (shared / f"gpu-{host}").chmod(0o666)
    with logins() as login, gpu_rack(folder, HOSTS) as rack:
        open_to_all(rack.folder)
        people = [rack.person(name, login[name]) for name in [*login][:2]]
        scene = Scene(rack, people, shared)
        for number, each in enumerate(found, 1):
            try:
                what = scene.play(each)
            except AssertionError as error:
                what, wrong = f"WRONG: {error}", wrong + 1
            say(f"{number:3} {each.name:10} {what}")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--moments", default=",".join(MOMENTS))
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # so that nothing of it stays
    found = rounds(asked.moments.split(","), asked.rounds, random.Random(asked.seed))
    folder = Path(tempfile.mkdtemp(prefix="orch-submitted-"))
    try:
        wrong = play_all(folder, found, lambda line: print(line, flush=True))
    finally:
        shutil.rmtree(folder)
    print(f"{len(found)} controllers killed, seed {asked.seed}: {wrong or 'nothing'} wrong")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
