"""orch beside its peers, from the typed command to the prompt: ssh + torchrun by hand, pdsh, mpirun, torchrunx.

    .venv/bin/python tests/bench/peers.py [--rows hand,orch] [--columns first,prompt] [--repeat 5]

One lab of two hosts at 2.5 Gbps, one bare script: it joins the others, sums 1 MB over them, and ends or goes on. All
rows alternate; figures are medians. Peers that are not installed are named and left out. orch is a fresh process
each time, as typed. Needs root, as the lab does. The hosts of a lab share one clock and this machine's cores.

first, prompt   to the first collective of the last rank; to the prompt of a script that ends then
killed          rank 1 killed with -9 while the ranks exchange: until all ranks are gone, until the cause is on the
                screen, until the prompt
cut             the same after the second host's link is cut, and the prompt after the ranks' end
ctrl-c          Ctrl-C: until the prompt, and processes that stay on the hosts (orch: then `orch cancel`)
python          the second host lacks that Python: until the prompt, and whether the host is named
port            the port is taken on the first host: until the prompt
unequal         one rank on the first host, two on the second: until the prompt
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.append(str(Path(__file__).resolve().parents[2] / "deploy"))

import lab_net
import lab_plan

from tests.bench.rack import end_orderly_on_term, show_machine
from tests.support.lab import STATE, Lab, lab
from tests.support.terminal import ORCH, Person

INVENTORY = """
cluster: peers
defaults: {device: cpu, bandwidth: 2.5Gbps, env: {OMP_NUM_THREADS: "1"}}
nodes:
  - {name: alpha, host: 10.77.4.1}
  - {name: beta, host: 10.77.4.2}
"""
ADDRESSES = {"alpha": "10.77.4.1", "beta": "10.77.4.2"}
MASTER = ADDRESSES["alpha"]
PORT = 29500
SCRIPT = """
import os, sys, time
for own, theirs in (("RANK", "OMPI_COMM_WORLD_RANK"), ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE")):
    os.environ.setdefault(own, os.environ.get(theirs, ""))
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
summed = torch.ones(1 << 18)
dist.all_reduce(summed)
print(f"first {time.time():.3f} rank {dist.get_rank()} pid {os.getpid()} of {os.uname().nodename}", flush=True)
while sys.argv[1] == "stay":
    dist.all_reduce(summed)
    time.sleep(0.01)
dist.destroy_process_group()
"""
FIRST = re.compile(r"first (\d+\.\d+) rank (\d+) pid (\d+)")
CAUSE = re.compile(r"first cause|root cause|signal 9|SIGKILL|signal: 9|Killed|noticed that process", re.IGNORECASE)
OURS = (b"bare.py", b"orch_remote", b"torch.distributed.run", b"orted", b"torchrunx", b"multiprocessing")
COLUMNS = ("first", "killed", "cut", "ctrl-c", "python", "port", "unequal")


@dataclass
class Typed:
    """A running command of a row; `lines` with the time at which each came."""

    process: subprocess.Popen[str]
    began: float
    lines: list[tuple[float, str]] = field(default_factory=list)
    ended: float | None = None

    def __post_init__(self) -> None:
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            self.lines.append((time.time(), line))
        self.process.wait()
        self.ended = time.time()

    def first(self) -> dict[int, tuple[float, int]]:
        """By rank: when its first collective had ended, and its pid on its host."""
        found = (one for _, line in list(self.lines) for one in FIRST.finditer(line))  # two logins may share a line
        return {int(one[2]): (float(one[1]), int(one[3])) for one in found}

    def said(self, words: re.Pattern[str], since: float) -> float | None:
        return next((at for at, line in list(self.lines) if at >= since and words.search(line)), None)


@dataclass
class Job:
    """What a row has to run. ranks: of each host."""

    word: str = "once"
    ranks: tuple[int, int] = (1, 1)
    python: str = sys.executable
    """The second host's."""


class Peers:
    """Every row as a command of the controller: `rows[name](job)`."""

    def __init__(self, hosts: Lab, person: Person) -> None:
        self._hosts, self._person = hosts, person
        self._trust = f"-F none -i {hosts.key} -o UserKnownHostsFile={hosts.known_hosts} -o BatchMode=yes"
        self.rows: dict[str, Callable[[Job], list[str]]] = {
            "hand": self._hand, "pdsh": self._pdsh, "mpirun": self._mpirun, "torchrunx": self._torchrunx,
            "orch": self._orch, "orch-no-preload": lambda job: self._orch(job, "--no-preload"),
        }  # fmt: skip

    def _hand(self, job: Job) -> list[str]:
        logins = [
            f"ssh {self._trust} lab@{address} {shlex.quote(self._torchrun(job, number, str(number)))} &"
            for number, address in enumerate(ADDRESSES.values())
        ]
        return ["bash", "-c", "\n".join([*logins, "wait"])]

    def _pdsh(self, job: Job) -> list[str]:
        way = ["env", f"PDSH_SSH_ARGS_APPEND={self._trust}", "pdsh", "-R", "ssh", "-l", "lab", "-w"]
        return [*way, ",".join(ADDRESSES.values()), self._torchrun(job, 1, "%n")]

    def _torchrun(self, job: Job, number: int, node_rank: str) -> str:
        python = job.python if number else sys.executable
        return (
            f"cd peers && GLOO_SOCKET_IFNAME=eth0 OMP_NUM_THREADS=1 {python} -m torch.distributed.run --nnodes 2 "
            f"--node-rank {node_rank} --nproc-per-node {job.ranks[number]} --rdzv-backend static "
            f"--master-addr {MASTER} --master-port {PORT} bare.py {job.word}"
        )

    def _mpirun(self, job: Job) -> list[str]:
        places = ",".join(f"{place}:{count}" for place, count in zip(ADDRESSES.values(), job.ranks, strict=True))
        shared = {"MASTER_ADDR": MASTER, "MASTER_PORT": PORT, "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": 1}
        words = ["mpirun", "--allow-run-as-root", "--host", places, "--mca", "plm_rsh_args", f"{self._trust} -l lab"]
        words += ["--mca", "btl_tcp_if_include", "eth0", "--wdir", "/home/lab/peers"]
        words += [word for name, value in shared.items() for word in ("-x", f"{name}={value}")]
        return [*words, job.python, "bare.py", job.word]

    def _torchrunx(self, job: Job) -> list[str]:
        """By addresses, since it looks names up by DNS; from a folder that all hosts have; with each rank's output."""
        config = self._person.folder / "ssh_config"
        shared = f"Host *\n User lab\n IdentityFile {self._hosts.key}\n UserKnownHostsFile {self._hosts.known_hosts}\n"
        config.write_text(shared)
        text = (
            "import logging, os, socket, sys, torchrunx\n"
            "from torchrunx.utils.log_handling import RedirectHandler\n"
            "logging.basicConfig(level=logging.INFO, format='%(message)s', stream=sys.stdout)\n"
            "os.chdir('/')\n"
            "os.environ['GLOO_SOCKET_IFNAME'] = 'eth0'\n"
            "way = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
            f"way.connect(({MASTER!r}, 9))\n"
            "socket.getfqdn = lambda *_: way.getsockname()[0]\n"
            f"def run():\n import runpy, sys\n sys.argv = ['bare.py', {job.word!r}]\n"
            " runpy.run_path('/home/lab/peers/bare.py', run_name='__main__')\n"
            f"torchrunx.Launcher(hostnames={[*ADDRESSES.values()]}, workers_per_host={list(job.ranks)}, backend=None, "
            "extra_env_vars={'GLOO_SOCKET_IFNAME': 'eth0', 'OMP_NUM_THREADS': '1'}, "
            f"ssh_config_file={str(config)!r}).set_logging_handlers(lambda: [RedirectHandler()]).run(run)\n"
        )
        return [sys.executable, "-c", text]

    def _orch(self, job: Job, *options: str) -> list[str]:
        return [*ORCH, "run", *options, str(self._person.folder / "peers/bare.py"), job.word]

    def missing(self, row: str) -> str:
        program = {"pdsh": "pdsh", "mpirun": "mpirun"}.get(row)
        if program and not shutil.which(program):
            return f"{program} is not installed"
        lacks = row == "torchrunx" and importlib.util.find_spec("torchrunx") is None
        return "torchrunx is not installed" if lacks else ""

    # ---- one run -----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def typed(self, row: str, job: Job) -> Iterator[Typed]:
        """Ends everything of it afterwards, here and on the hosts."""
        if row.startswith("orch"):
            self._describe(job)
        options = {"env": self._person.environment, "cwd": self._person.folder, "stdin": subprocess.DEVNULL}
        began = time.time()
        process = self._hosts.popen(self.rows[row](job), stderr=subprocess.STDOUT, start_new_session=True, **options)
        run = Typed(process, began)
        try:
            yield run
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            if row.startswith("orch"):
                self._hosts.controller_exec([*ORCH, "cancel", "--job", "latest"], **options)
            until(lambda: not self.end_all(), 20)

    def _describe(self, job: Job) -> None:
        """Hosts as the row's job has them: orch takes ranks and Python from the inventory."""
        text = INVENTORY.replace("host: 10.77.4.2", f"host: 10.77.4.2, python: {job.python}")
        for address, count in zip(ADDRESSES.values(), job.ranks, strict=True):
            text = text.replace(f"host: {address}", f"host: {address}, ranks: {count}")
        if getattr(self, "_described", "") != text:
            self._described = text
            self._person.types("up", str(inventory_of(self._hosts, text)), exit_code=None)

    def processes(self) -> list[int]:
        """Of any row on any host, as this machine numbers them."""
        found = []
        for pid in self._of_hosts():
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes()
                if any(one in words for one in OURS) and b"sshd" not in words:
                    found.append(pid)
        return found

    def _of_hosts(self) -> list[int]:
        made = lab_plan.from_json((STATE / self._hosts.cluster / "lab.json").read_text())
        return lab_net.processes([made.host(name).port.namespace for name in ADDRESSES])

    def end_all(self) -> list[int]:
        found = self.processes()
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return found

    def rank(self, run: Typed, rank: int) -> int:
        """Its process, as this machine numbers it."""
        inner, network = str(run.first()[rank][1]), self._network(rank)
        for pid in self._of_hosts():
            with contextlib.suppress(OSError):
                status = Path(f"/proc/{pid}/status").read_text()
                numbers = next(line.split() for line in status.splitlines() if line.startswith("NSpid:"))
                if numbers[-1] == inner and os.readlink(f"/proc/{pid}/ns/net") == network:
                    return pid
        raise SystemExit(f"rank {rank} is nowhere")

    def _network(self, rank: int) -> str:
        made = lab_plan.from_json((STATE / self._hosts.cluster / "lab.json").read_text())
        return f"net:[{(lab_net.NETNS / made.host(list(ADDRESSES)[rank]).port.namespace).stat().st_ino}]"


def inventory_of(hosts: Lab, text: str) -> Path:
    """With this lab's name, keys and hosts' keys."""
    import yaml

    known, wanted = yaml.safe_load(hosts.inventory.read_text()), yaml.safe_load(text)
    wanted |= {"cluster": known["cluster"], "defaults": {**known["defaults"], **wanted["defaults"]}}
    for node, old in zip(wanted["nodes"], known["nodes"], strict=True):
        node["host_key"] = old["host_key"]
    hosts.inventory.write_text(yaml.safe_dump(wanted))
    return hosts.inventory


# ---- columns ---------------------------------------------------------------------------------------------------------

Figures = dict[str, float | None]
"""Seconds; None for never, within the limit."""


def first(peers: Peers, row: str, limit_s: float) -> Figures:
    with peers.typed(row, Job()) as run:
        until(lambda: run.ended, limit_s)
        at = [one for one, _ in run.first().values()]
        return {"first": since(run.began, max(at) if len(at) == 2 else None), "prompt": since(run.began, run.ended)}


def killed(peers: Peers, row: str, limit_s: float) -> Figures:
    def kill(run: Typed) -> None:
        os.kill(peers.rank(run, 1), signal.SIGKILL)

    return _broken(peers, row, limit_s, kill)


def cut(peers: Peers, row: str, limit_s: float) -> Figures:
    try:
        found = _broken(peers, row, limit_s, lambda run: peers._hosts.link("beta", "down"))
    finally:
        peers._hosts.link("beta", "up")
    gone, prompt = found["gone"], found["prompt"]
    return {**found, "prompt after the ranks": None if gone is None or prompt is None else max(0.0, prompt - gone)}


def _broken(peers: Peers, row: str, limit_s: float, break_it: Callable[[Typed], None]) -> Figures:
    with peers.typed(row, Job("stay")) as run:
        if not until(lambda: len(run.first()) == 2, limit_s):
            return {"gone": None, "cause": None, "prompt": None}
        ranks = [peers.rank(run, rank) for rank in (0, 1)]
        time.sleep(1.0)  # some exchanges
        at, gone = time.time(), list[float]()
        break_it(run)

        def over() -> bool:
            if not gone and not any(Path(f"/proc/{pid}/exe").exists() for pid in ranks):
                gone.append(time.time())
            return bool(gone) and run.ended is not None

        until(over, limit_s)
        cause = run.said(CAUSE, at)
        return {"gone": since(at, gone[0] if gone else None), "cause": since(at, cause), "prompt": since(at, run.ended)}


def ctrl_c(peers: Peers, row: str, limit_s: float) -> Figures:
    with peers.typed(row, Job("stay")) as run:
        until(lambda: len(run.first()) == 2, limit_s)
        at = time.time()
        os.killpg(run.process.pid, signal.SIGINT)
        until(lambda: run.ended, limit_s)
        if row.startswith("orch"):
            peers._hosts.controller_exec([*ORCH, "cancel", "--job", "latest"], env=peers._person.environment)
        until(lambda: not peers.processes(), 5)
        return {"prompt": since(at, run.ended), "processes left": float(len(peers.processes()))}


def python(peers: Peers, row: str, limit_s: float) -> Figures:
    with peers.typed(row, Job(python="/opt/none/bin/python")) as run:
        until(lambda: run.ended, limit_s)
        names = any(re.search(r"beta|10\.77\.4\.2", line) for _, line in run.lines)
        return {"prompt": since(run.began, run.ended), "names the host": float(names)}


def port(peers: Peers, row: str, limit_s: float) -> Figures:
    holds = f"import socket; s = socket.create_server(('0.0.0.0', {PORT})); print('held', flush=True); s.accept()"
    holder = peers._hosts.host_popen("alpha", [sys.executable, "-c", holds])
    try:
        assert holder.stdout
        holder.stdout.readline()
        return _to_the_end(peers, row, Job(), limit_s)
    finally:
        holder.kill()
        holder.wait()


def unequal(peers: Peers, row: str, limit_s: float) -> Figures:
    return _to_the_end(peers, row, Job(ranks=(1, 2)), limit_s)


def _to_the_end(peers: Peers, row: str, job: Job, limit_s: float) -> Figures:
    with peers.typed(row, job) as run:
        until(lambda: run.ended, limit_s)
        return {"prompt": since(run.began, run.ended), "ranks that met": float(len(run.first()))}


RUNS = {"first": first, "killed": killed, "cut": cut, "ctrl-c": ctrl_c, "python": python, "port": port,
        "unequal": unequal}  # fmt: skip


def since(began: float, at: float | None) -> float | None:
    return None if at is None else at - began


def until(condition: Callable[[], object], limit_s: float) -> bool:
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


# ---- the table -------------------------------------------------------------------------------------------------------


def main() -> None:
    asked = _options()
    end_orderly_on_term()
    found: dict[str, dict[str, list[Figures]]] = {column: {} for column in asked.columns}
    torchrunx = importlib.util.find_spec("torchrunx")  # PYTHONPATH may lead to it
    shown = [str(Path(torchrunx.origin).parents[1])] if torchrunx and torchrunx.origin else []
    with tempfile.TemporaryDirectory() as folder, lab(INVENTORY, binds=shown) as hosts:
        person = Person(hosts, Path(folder, "home"), Path(folder))
        peers = Peers(hosts, person)
        rows = [row for row in asked.rows if not _left_out(row, peers.missing(row))]
        _spread_script(hosts, Path(folder))
        for row in rows:  # one of each to warm caches, thrown away
            first(peers, row, asked.limit)
        for column in asked.columns:
            for number in range(asked.repeat):
                for row in rows if number % 2 == 0 else rows[::-1]:
                    figures = RUNS[column](peers, row, asked.limit)
                    found[column].setdefault(row, []).append(figures)
                    print(f"{column:8} {row:16} {_words(figures)}", flush=True)
    show_machine()
    print(f"load {os.getloadavg()[1]:.1f} over 5 minutes; medians of {asked.repeat}, in seconds")
    for column, of_rows in found.items():
        for row, runs in of_rows.items():
            print(f"{column:8} {row:16} {_words({name: _median([run[name] for run in runs]) for name in runs[0]})}")
        _ratio(of_rows)


def _options() -> argparse.Namespace:
    def names(known: Sequence[str]) -> Callable[[str], list[str]]:
        def read(text: str) -> list[str]:
            if wrong := {*text.split(",")} - {*known}:
                raise argparse.ArgumentTypeError(f"{', '.join(wrong)}: not one of {', '.join(known)}")
            return text.split(",")

        return read

    rows = ["hand", "pdsh", "mpirun", "torchrunx", "orch", "orch-no-preload"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=names(rows), default=rows[:-1])
    parser.add_argument("--columns", type=names(COLUMNS), default=[*COLUMNS])
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--limit", type=float, default=60.0, help="seconds after which a figure is never")
    return parser.parse_args()


def _left_out(row: str, why: str) -> bool:
    if why:
        print(f"{row} is left out: {why}", flush=True)
    return bool(why)


def _spread_script(hosts: Lab, folder: Path) -> None:
    (folder / "peers").mkdir()
    (folder / "peers/bare.py").write_text(SCRIPT)
    for node in ADDRESSES:
        put = ["sh", "-c", "mkdir -p peers && cat > peers/bare.py"]
        hosts.host_exec(node, put, as_user=True, input=SCRIPT, check=True)


def _median(values: Sequence[float | None]) -> float | None:
    """Never counts as longer than all others."""
    middle = statistics.median_high(float("inf") if value is None else value for value in values)
    return None if middle == float("inf") else middle


def _words(figures: Figures) -> str:
    return ", ".join(f"{name} {'never' if value is None else f'{value:.2f}'}" for name, value in figures.items())


def _ratio(of_rows: dict[str, list[Figures]]) -> None:
    if {"hand", "orch"} <= of_rows.keys():
        for name in of_rows["hand"][0].keys() & {"first", "prompt"}:
            pairs = [(a[name], b[name]) for a, b in zip(of_rows["orch"], of_rows["hand"], strict=True)]
            ratios = [ours / theirs for ours, theirs in pairs if ours and theirs]
            if ratios:
                print(f"         orch / hand      {name} {statistics.median(ratios):.2f}, "
                      f"{min(ratios):.2f} to {max(ratios):.2f}")  # fmt: skip


if __name__ == "__main__":
    main()
