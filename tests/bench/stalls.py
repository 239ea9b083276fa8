"""Whether `orch` names the host, rank, line and reason of a standstill, unasked; and gives no alarm where none is.

    .venv/bin/python tests/bench/stalls.py --rounds 0:16 [--healthy 2] [--cells 4] [--seed 1] [--results FILE]
    .venv/bin/python tests/bench/stalls.py --summary FILE

On the lab: hosts with networks of their own, real SSH, torchrun and Gloo; two hosts a job, several jobs at once. Each
round starts a job, follows it as a person does, and at a random step of a random rank makes one of eight kinds of
standstill; round N is the same with the same seed. A verdict is right if kind, host, rank and line are (a process that
is stopped or frozen in the kernel shows no line), and comes within 30 s after the minute without output
after which `orch` asks by itself. Two kinds are stand-ins: the dead mount is a disk of this machine frozen by
fsfreeze(8), whose writers wait in the kernel as those of a dead server do; the throttled GPU is a stub for nvidia-smi
that the job's own watch of GPUs asks, and `orch why` is asked by hand, since such a job does not stand still. The
half-dead link loses what one host gets over the connections of its rank, as a firewall does that forgot them; one that
loses large packets alone is found by the hosts' supervisors, who end the job and name it.

Healthy jobs are silent for 150 s each: evaluation, compilation, unpacking, a checkpoint, a slow link, a long step.
--rounds and --healthy cut the whole into slices; --results appends a line of JSON a round.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import queue
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rack import end_orderly_on_term, show_machine

from tests.support.lab import Lab, lab
from tests.support.quick_python import quick_python
from tests.support.terminal import Person

SCRIPT = Path(__file__).resolve().parents[1] / "support" / "stalling.py"
KINDS = {
    "missed collective": ("missed-elsewhere", "missed-file"),
    "deadlock": ("deadlock",),
    "loader": ("loader",),
    "dead mount": ("dead-mount",),
    "SIGSTOP": ("stopped",),
    "half-dead link": ("half-dead-link",),
    "clock throttle": ("clock-throttle",),
    "full pipe": ("full-pipe-own", "full-pipe-wrapper"),
}
HEALTHY = ("evaluation", "compile", "unpack", "checkpoint", "slow-link", "long-step")
BY_HAND = ("dead-mount", "stopped", "half-dead-link", "clock-throttle", "full-pipe-wrapper", "healthy-slow-link")
"""What the benchmark does to the job; the others the script does to itself."""
MINUTE_S, WITHIN_S = 60.0, 30.0
GIVE_UP_S = 150.0
LAST_STEP = 80
GPU = "GPU-00000000-0000-0000-0000-000000000000"
SMI = r"""#!/bin/sh
case "$*" in *uuid*) ;; *) exit 2;; esac
mhz=1980
while true; do echo "UUID, 0, 97, 8192, $mhz, 300, 88, 0x20, 1980, 300"; mhz=540; sleep 0.5; done
""".replace("UUID", GPU)
WATCHES = f"""
import sys
from pathlib import Path
from orch_remote.gpus import watch
watch(sys.argv[1], {{{GPU!r}: int(sys.argv[2])}}, Path(sys.argv[3]))
"""


@dataclass(frozen=True)
class Round:
    number: int
    family: str
    kind: str
    victim: int
    step: int


@dataclass(frozen=True)
class Outcome:
    round: Round
    right: bool
    after_s: float | None
    """From the fault to the answer."""
    verdict: dict[str, Any] | None
    wanted: dict[str, Any]
    silent_s: float = 0.0
    """Of a healthy one."""


def round_of(seed: int, number: int) -> Round:
    """Each family once in eight rounds, in an order of their own."""
    families = list(KINDS)
    random.Random(f"{seed} {number // len(KINDS)}").shuffle(families)
    drawn, family = random.Random(f"{seed} round {number}"), families[number % len(KINDS)]
    return Round(number, family, drawn.choice(KINDS[family]), drawn.randrange(2), drawn.randrange(5, LAST_STEP))


def healthy_round(seed: int, number: int) -> Round:
    drawn, name = random.Random(f"{seed} healthy {number}"), HEALTHY[number % len(HEALTHY)]
    return Round(number, "healthy", f"healthy-{name}", drawn.randrange(2), drawn.randrange(5, LAST_STEP))


def line_of(kind: str) -> str:
    """`stalling.py:47`: where the rank stands; "" where none is to be seen."""
    for number, line in enumerate(SCRIPT.read_text().splitlines(), 1):
        if line.endswith(f"# LINE {kind}"):
            return f"{SCRIPT.name}:{number}"
    return ""


# ---- a job ----------------------------------------------------------------------------------------------------------


class Cell:
    """Two hosts, on which one job runs at a time."""

    def __init__(self, hosts: Lab, person: Person, folder: Path, number: int) -> None:
        self.lab, self.person, self.folder = hosts, person, folder
        self.nodes = (f"a{number}", f"b{number}")
        self._undo = contextlib.ExitStack()

    def plays(self, one: Round) -> Outcome:
        words = [one.kind, str(one.victim), str(one.step), str(self.folder)]
        follower = self.person.starts("run", "--nodes", ",".join(self.nodes), "--", f"code/{SCRIPT.name}", *words)
        try:
            with self._undo:
                return self._followed(one, Lines(follower))
        finally:
            job = self.person.folder / f"{self.nodes[0]}.job"
            if job.exists():
                self.person.types("cancel", "--job", job.read_text(), "--yes", exit_code=None)
                job.unlink()
            follower.terminate()
            follower.wait()

    def _followed(self, one: Round, lines: Lines) -> Outcome:
        job = lines.until(r"job (\S+): ", GIVE_UP_S)[1]
        (self.person.folder / f"{self.nodes[0]}.job").write_text(job)
        lines.until("reached the step" if one.kind != "loader" else "fault now", GIVE_UP_S)
        if one.kind in BY_HAND:
            getattr(self, f"_{one.kind.replace('-', '_')}")(job, one)
        elif one.family != "healthy" and one.kind != "loader":
            lines.until("fault now", GIVE_UP_S)
        began_s = time.monotonic()
        if one.family == "healthy":
            return self._healthy(one, lines, job, began_s)
        if one.kind == "clock-throttle":
            verdict = self.person.asks("why", job)["verdict"]
        else:
            with contextlib.suppress(TimeoutError):
                lines.until("the job keeps running", GIVE_UP_S)
            stall = self.person.job(job)["stall"]
            verdict = stall and stall["answer"] and stall["answer"]["verdict"]
        return self._judged(one, verdict, time.monotonic() - began_s)

    def _healthy(self, one: Round, lines: Lines, job: str, began_s: float) -> Outcome:
        with contextlib.suppress(TimeoutError):
            lines.until("the job keeps running|slow part is over", 2 * GIVE_UP_S)
        silent_s, alarm = time.monotonic() - began_s, any("the job keeps running" in line for line in lines.seen)
        said = [line for line in lines.seen if line.startswith("still busy")]
        stall = self.person.job(job)["stall"]
        verdict = stall["answer"]["verdict"] if alarm and stall and stall["answer"] else {"said": said[-1:]}
        return Outcome(one, not alarm, None, verdict, {}, silent_s)

    def _judged(self, one: Round, verdict: dict[str, Any] | None, after_s: float) -> Outcome:
        node = self.nodes[one.victim]
        kind = {"missed-elsewhere": "missed-collective", "missed-file": "missed-collective"}.get(one.kind, one.kind)
        wanted = {
            "kind": re.sub("-(own|wrapper)$", "", kind),
            "node": node,
            "rank": one.victim,
            "line": line_of(one.kind),
        }
        if not verdict:
            return Outcome(one, False, None, None, wanted)
        found = {
            **{key: verdict[key] for key in ("kind", "node", "rank")},
            "line": verdict["place"].partition(" in ")[0],
        }
        if one.kind == "half-dead-link":  # a way has two ends, and either may be the one that sends again
            rank = found["rank"]
            wanted |= {"node": self.nodes[rank] if rank in (0, 1) else node, "rank": rank, "line": line_of("exchange")}
            right_way = all(name in verdict["reason"] for name in self.nodes)
        else:
            right_way = True
        late_s = WITHIN_S + (0.0 if one.kind == "clock-throttle" else MINUTE_S)
        return Outcome(one, found == wanted and right_way and after_s <= late_s, after_s, verdict, wanted)

    # ---- what is done to it -------------------------------------------------------------------------------------

    def _dead_mount(self, job: str, one: Round) -> None:
        disk = self.folder / f"disk-{self.nodes[one.victim]}"
        subprocess.run(["fsfreeze", "-f", disk], check=True)
        self._undo.callback(subprocess.run, ["fsfreeze", "-u", disk], check=True)

    def _stopped(self, job: str, one: Round) -> None:
        self._signals(job, one, "pid")

    def _full_pipe_wrapper(self, job: str, one: Round) -> None:
        self._signals(job, one, "wrapper")

    def _signals(self, job: str, one: Round, whom: str) -> None:
        node = self.nodes[one.victim]
        pid = str(self.person.agent(node, job)["ranks"][str(one.victim)][whom])
        self.lab.host_exec(node, ["kill", "-STOP", pid], check=True)
        self._undo.callback(self.lab.host_exec, node, ["kill", "-CONT", pid])

    def _half_dead_link(self, job: str, one: Round) -> None:
        """The victim's host takes nothing more that comes over the connections that its rank has to the other."""
        node, peer = self.nodes[one.victim], self.nodes[1 - one.victim]
        address = next(entry["host"] for entry in self.lab.nodes if entry["name"] == peer)
        pid = str(self.person.agent(node, job)["ranks"][str(one.victim)]["pid"])
        place = f'cd /home/lab/.orch/jobs/{job}/bin && exec "$@"'
        asks = ["sh", "-c", place, "sh", sys.executable, "-c", PORTS, pid, address]
        ports = self.lab.host_exec(node, asks, check=True).stdout.strip()
        self.lab.host_exec(node, ["nft", "-f", "-"], input=DROPS.format(peer=address, ports=ports), check=True)
        self._undo.callback(self.lab.host_exec, node, ["nft", "delete", "table", "ip", "stall"])

    def _healthy_slow_link(self, job: str, one: Round) -> None:
        self.lab.link(self.nodes[one.victim], "rate", "1Mbps")
        self._undo.callback(self.lab.link, self.nodes[one.victim], "up")

    def _clock_throttle(self, job: str, one: Round) -> None:
        node, root = self.nodes[one.victim], f"/home/lab/.orch/jobs/{job}"
        words = [sys.executable, "-c", WATCHES, str(self.folder / "nvidia-smi"), str(one.victim), f"{root}/gpu.jsonl"]
        place = f'cd {root}/bin && exec "$@"'
        watch = self.lab.host_popen(node, ["sh", "-c", place, "sh", *words], as_user=True)
        self._undo.callback(watch.wait)
        self._undo.callback(watch.terminate)
        log = ["sh", "-c", f"until grep -qs 540 {root}/gpu.jsonl; do sleep 0.1; done"]
        self.lab.host_exec(node, log, check=True, timeout=GIVE_UP_S)


DROPS = """table ip stall {{
chain taken {{
type filter hook input priority 0
ip saddr {peer} tcp dport {{ {ports} }} drop
}}
}}
"""


PORTS = """
import sys
from orch_remote.meeting import connections, sockets_of
held = sockets_of([int(sys.argv[1])])
print(*sorted({row.ours[1] for row in connections() if row.inode in held and row.theirs[0] == sys.argv[2]}), sep=", ")
"""


class Lines:
    """What the follower prints, as it comes."""

    def __init__(self, follower: subprocess.Popen[str]) -> None:
        self.seen = list[str]()
        self._waiting = queue.SimpleQueue[str | None]()
        threading.Thread(target=self._read, args=(follower,), daemon=True).start()

    def _read(self, follower: subprocess.Popen[str]) -> None:
        assert follower.stdout
        for line in follower.stdout:
            self._waiting.put(line)
        self._waiting.put(None)

    def until(self, words: str, timeout_s: float) -> re.Match[str]:
        """Raises TimeoutError."""
        until_s, text = time.monotonic() + timeout_s, ""
        while (left_s := until_s - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                if (line := self._waiting.get(timeout=left_s)) is None:
                    raise RuntimeError("the job ended: " + "".join(self.seen[-20:]))
                self.seen.append(line)
                text = (text + " " + line.strip())[-4000:]  # a long notice is wrapped
                if found := re.search(words, text):
                    return found
        raise TimeoutError(words)


# ---- all of them ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def standing(cells: int) -> Iterator[list[Cell]]:
    nodes = [f"{side}{cell}" for cell in range(cells) for side in "ab"]
    rows = [f"  - {{name: {name}, host: 10.77.66.{at}}}" for at, name in enumerate(nodes, 1)]
    head = 'cluster: stalls\ndefaults: {device: cpu, bandwidth: 1Gbps, env: {OMP_NUM_THREADS: "1"}}\nnodes:'
    with tempfile.TemporaryDirectory(prefix="orch-stalls-") as name, contextlib.ExitStack() as mounted:
        folder, work = Path(name, "shown"), Path(name, "work")
        (work / "code").mkdir(parents=True)
        folder.mkdir()
        Path(name).chmod(0o755)
        (work / "code" / SCRIPT.name).write_text(SCRIPT.read_text())
        (folder / "nvidia-smi").write_text(SMI)
        (folder / "nvidia-smi").chmod(0o755)
        for node in nodes:
            _mount(Path(name, f"{node}.img"), folder / f"disk-{node}")
            mounted.callback(subprocess.run, ["umount", "-l", folder / f"disk-{node}"], check=True)
        head = head.replace("{", f"{{python: {_python(folder / 'python')}, ", 1)
        binds = [str(folder), *_packages()]
        hosts = mounted.enter_context(lab("\n".join([head, *rows]), binds=binds))
        person = Person(hosts, Path(name, "home"), work)
        person.types("up", str(hosts.inventory))
        yield [Cell(hosts, person, folder, number) for number in range(cells)]


def _python(folder: Path) -> str:
    """Torch is real in whatever a job starts; who only asks what a host has is answered at once."""
    python = quick_python(folder)
    (packages,) = folder.glob("lib/*/site-packages")
    again = f"os.execv({sys.executable!r}, [{sys.executable!r}, *sys.orig_argv[1:]])"
    (packages / "real.pth").write_text(f"import os, sys; sys.orig_argv[1:2] not in ([], ['-c']) and {again}\n")
    return python


def _packages() -> list[str]:
    """Where torch lies, if not with our own Python, which hosts see anyhow."""
    found = importlib.util.find_spec("torch")
    place = str(Path(found.origin).parents[1]) if found and found.origin else ""
    return [place] if place and not place.startswith(sys.prefix) else []


def _mount(image: Path, place: Path) -> None:
    place.mkdir()
    with open(image, "wb") as file:
        file.truncate(16 << 20)
    subprocess.run(["mkfs.ext4", "-q", image], check=True)
    subprocess.run(["mount", "-o", "loop", image, place], check=True)
    place.chmod(0o777)


def play(cells: list[Cell], rounds: list[Round], told: Callable[[Outcome], None]) -> list[Round]:
    """Gives those that did not come to a verdict, and have to be run again."""
    left, lock, failed = queue.SimpleQueue[Round](), threading.Lock(), list[Round]()
    for one in rounds:
        left.put(one)

    def work(cell: Cell) -> None:
        while True:
            try:
                one = left.get_nowait()
            except queue.Empty:
                return
            try:
                outcome = cell.plays(one)
            except (
                Exception
            ) as error:  # no verdict: the machine, or the benchmark's own end, kept it from coming so far
                failed.append(one)
                print(f"{one.number:3} {one.kind:20} did not run: {type(error).__name__}: {error}"[:600], flush=True)
                continue
            with lock:
                told(outcome)

    threads = [threading.Thread(target=work, args=(cell,)) for cell in cells]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return failed


def show(rows: list[dict[str, Any]]) -> None:
    stalls = [row for row in rows if row["round"]["family"] != "healthy"]
    healthy = [row for row in rows if row["round"]["family"] == "healthy"]
    for family in KINDS:
        some = [row for row in stalls if row["round"]["family"] == family]
        after = sorted(row["after_s"] for row in some if row["after_s"] is not None)
        times = f", after {after[len(after) // 2]:.0f} s, at most {after[-1]:.0f} s" if after else ""
        print(f"{family:18} {sum(row['right'] for row in some)} of {len(some)} right{times}")
    for row in rows:
        if not row["right"]:
            print(f"wrong: {row['round']}\n    wanted {row['wanted']}\n    found {row['verdict']}")
    for kind, count in Counter(row["round"]["kind"] for row in healthy).items():
        silent_s = sum(row["silent_s"] for row in healthy if row["round"]["kind"] == kind)
        print(f"{kind:18} {count} jobs, {silent_s / 60:.1f} minutes of silence")
    false = sum(not row["right"] for row in healthy)
    minutes = sum(row["silent_s"] for row in healthy) / 60
    print(
        f"{sum(row['right'] for row in stalls)} of {len(stalls)} standstills right; "
        f"{false} false alarms in {minutes:.1f} minutes"
    )


def main() -> int:
    asked = _parser().parse_args()
    if asked.summary:
        show([json.loads(line) for line in asked.summary.read_text().splitlines()])
        return 0
    end_orderly_on_term()
    if os.geteuid() != 0:
        print("skipped: needs root, for the lab and a disk that can be frozen")
        return 0
    show_machine()
    first, _, end = asked.rounds.partition(":")
    first_healthy, _, end_healthy = asked.healthy.partition(":")
    rounds = [healthy_round(asked.seed, number) for number in range(int(first_healthy), int(end_healthy))]
    rounds += [round_of(asked.seed, number) for number in range(int(first), int(end))]
    rows = list[dict[str, Any]]()

    def told(outcome: Outcome) -> None:
        rows.append({"seed": asked.seed, **asdict(outcome)})
        one = outcome.round
        after = f" after {outcome.after_s:.0f} s" if outcome.after_s else ""
        print(
            f"{one.number:3} {one.kind:20} rank {one.victim} {'right' if outcome.right else 'WRONG'}{after}", flush=True
        )
        if asked.results:
            with open(asked.results, "a") as file:
                file.write(json.dumps(rows[-1]) + "\n")

    with standing(asked.cells) as cells:
        failed = play(cells, rounds, told)
    show(rows)
    return 1 if failed or not all(row["right"] for row in rows) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Whether standstills are named, and healthy jobs left alone.")
    parser.add_argument("--rounds", default="0:8", metavar="FROM:TO")
    parser.add_argument("--healthy", default="0:0", metavar="FROM:TO")
    parser.add_argument("--cells", type=int, default=4, help="So many jobs at once, on two hosts each.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--results", type=Path, help="Append each round to this file.")
    parser.add_argument("--summary", type=Path, help="Show what such a file holds, and do nothing else.")
    return parser


if __name__ == "__main__":
    sys.exit(main())
