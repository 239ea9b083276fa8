"""The hosts of a chaos run: a lab of cells, three hosts each, and one pair of eyes over all their processes.

    with World(cells=4) as world:
        cell = world.cells[0]
        hosts = cell.connect()                              # name -> Host, over real SSH
        seen = world.wait(job, lambda processes: not processes, 30)

A lab's hosts are namespaces of this machine: their processes, files and links are all within reach from outside, so a
fault needs no help from the host that it strikes, and the look afterwards does not ask the programs under test.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import lab_net
import lab_plan
from lab_net import Link

from orchestrator.errors import HostError
from orchestrator.hosts import Connections, Node, load_inventory
from orchestrator.paths import Home
from orchestrator.transport import ConnectedHost
from tests.support.lab import STATE, Lab, lab

HOSTS_A_CELL = 3
LOOK_S = 0.15
USER_ID = "1000"
JOB = re.compile(rb"chaos-\d+-\d+-[a-z]{4}")
TESTS_OF_CHAOS = Path(__file__).resolve().parent
BYSTANDER = "python -m orch_remote.rank /home/lab/.orch/jobs/of-a-stranger"
_CLONE_NEWNET = 0x40000000


@dataclass(frozen=True)
class Process:
    """One process as this machine numbers it. role: "keeper", "supervisor", "launcher", "wrapper", "rank", "other"."""

    pid: int
    start_time: int
    node: str
    role: str
    rank: str | None
    command: str

    def signal(self, signum: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            handle = os.pidfd_open(self.pid)
            try:
                if (_stat(self.pid) or ["", "", 0])[2] == self.start_time:
                    signal.pidfd_send_signal(handle, signum)
            finally:
                os.close(handle)


Processes = list[Process]


@dataclass
class Sighting:
    """What was seen of one job: the processes now, every one ever, and what must never be."""

    now: Processes = field(default_factory=list)
    ever: set[Process] = field(default_factory=set)
    gone: dict[Process, float] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)


class World:
    def __init__(self, cells: int) -> None:
        self._cell_count = cells
        self._sightings: dict[str, Sighting] = defaultdict(Sighting)
        self._looked = threading.Condition()
        self._over = threading.Event()

    def __enter__(self) -> World:
        self._stack = contextlib.ExitStack()
        names = [f"{'abc'[place]}{cell}" for cell in range(self._cell_count) for place in range(HOSTS_A_CELL)]
        nodes = "".join(f"  - {{name: {name}, host: 10.78.0.{number + 1}}}\n" for number, name in enumerate(names))
        self.lab = self._stack.enter_context(lab(f"cluster: chaos\ndefaults: {{device: cpu}}\nnodes:\n{nodes}"))
        self._stack.callback(enter_network(Path("/run/netns", lab_net.controller_namespace(self.lab.cluster))))
        self.ports = {host.name: host.port for host in _plan(self.lab).hosts}
        self.folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="orch-chaos-")))
        self._networks = {_inode(lab_net.NETNS / port.namespace): name for name, port in self.ports.items()}
        self.bystanders = {name: self.start_bystander(name) for name in names}
        self.cells = [Cell(self, names[at : at + HOSTS_A_CELL]) for at in range(0, len(names), HOSTS_A_CELL)]
        self._eyes = threading.Thread(target=self._watch, name="eyes")
        self._eyes.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._eyes.join()
        for cell in self.cells:
            cell.close()
        self._stack.close()

    # ---- seeing -----------------------------------------------------------------------------------------------

    def sighting(self, job: str) -> Sighting:
        with self._looked:
            return self._sightings[job]

    def wait(self, job: str, condition: Callable[[Processes], bool], within_s: float) -> float | None:
        """Seconds until the condition held of the job's processes; None where it did not in time."""
        started = time.monotonic()
        with self._looked:
            seen = self._sightings[job]
            self._looked.wait()  # a look that began before we came says nothing
            self._looked.wait()
            while not condition(seen.now):
                if not self._looked.wait(max(0.0, started + within_s - time.monotonic())):
                    return None
        return time.monotonic() - started

    def _watch(self) -> None:
        while not self._over.wait(LOOK_S):
            found = self._look()
            with self._looked:
                for job in {*found, *self._sightings}:
                    self._note(self._sightings[job], found.get(job, []))
                self._looked.notify_all()

    def _note(self, seen: Sighting, now: Processes) -> None:
        for process in set(seen.now) - set(now):
            seen.gone[process] = time.monotonic()
        seen.now = now
        seen.ever |= set(now)
        ranks = [process.rank for process in now if process.role == "rank"]
        if len(ranks) != len(set(ranks)):
            seen.wrong.append(f"two gangs at once: {now}")

    def _look(self) -> dict[str, Processes]:
        found: dict[str, Processes] = defaultdict(list)
        keepers = set()
        for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
            with contextlib.suppress(OSError, KeyError, IndexError, ValueError):
                node = self._networks[_inode(f"/proc/{pid}/ns/net")]  # first of all: most processes are nobody's here
                command = _read(f"/proc/{pid}/cmdline")
                environment = b"" if JOB.search(command) else _read(f"/proc/{pid}/environ")
                job = JOB.search(command) or JOB.search(environment)
                stat = job and _stat(pid)
                if not job or not stat or stat[0] in "ZX":
                    continue
                if not environment:
                    environment = _read(f"/proc/{pid}/environ")
                role = _role(command)
                if role == "keeper":
                    keepers.add(pid)
                    role = "supervisor" if stat[1] in keepers or _role_of(stat[1]) == "keeper" else "keeper"
                if role == "rank" and _role_of(stat[1]) != "wrapper":
                    role = "other"  # what a rank forks looks like itself for a moment
                rank = dict(item.split(b"=", 1) for item in environment.split(b"\0") if b"=" in item).get(b"RANK")
                words = command.replace(b"\0", b" ").decode(errors="replace")
                found[job[0].decode()].append(Process(pid, stat[2], node, role, rank and rank.decode(), words))
        return found

    # ---- hosts from outside -----------------------------------------------------------------------------------

    def init(self, node: str) -> int:
        """Process 1 of a host."""
        for pid in lab_net.processes([self.ports[node].namespace]):
            with contextlib.suppress(OSError):
                if re.search(r"^NSpid:\s+\d+\s+1$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE):
                    return pid
        raise ProcessLookupError(f"{node} is off")

    def root(self, node: str) -> Path:
        """The host's own file system."""
        return Path(f"/proc/{self.init(node)}/root")

    def on_host(self, node: str, *argv: str, user: bool = True) -> list[str]:
        """An argv that runs on the host, as its ordinary user or as root."""
        into = ["nsenter", f"--target={self.init(node)}", "--net", "--mount", "--uts", "--pid", "--"]
        drop = ["setpriv", f"--reuid={USER_ID}", f"--regid={USER_ID}", "--clear-groups", "--"] if user else []
        return [*into, *drop, *argv]

    def start_bystander(self, node: str) -> tuple[int, int]:
        """A process of the same user that looks like ours and is not: pid and start time."""
        line = f"exec -a '{BYSTANDER}' sleep 1000000"
        quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        subprocess.run(self.on_host(node, "setsid", "-f", "bash", "-c", line), check=True, **quiet)
        while True:
            for pid in lab_net.processes([self.ports[node].namespace]):
                with contextlib.suppress(OSError):
                    command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                    if command[0] == BYSTANDER.encode() and (stat := _stat(pid)):
                        return pid, stat[2]
            time.sleep(0.01)

    def bystander_lives(self, node: str) -> bool:
        pid, start_time = self.bystanders[node]
        stat = _stat(pid)
        return bool(stat and stat[0] not in "ZX" and stat[2] == start_time)

    def link(self, node: str, link: Link) -> None:
        lab_net.set_link(self.ports[node], link)

    def deaf(self, node: str) -> None:
        """Nothing reaches the host from now on; what it says still arrives."""
        port = self.ports[node]
        _drop_all(port.namespace, port.interface)

    def mute(self, node: str) -> None:
        """Nothing that the host says arrives from now on."""
        port = self.ports[node]
        _drop_all(lab_net.hub_namespace(port.cluster), port.hub_interface)

    def part(self, node: str, other: str, largest: int | None = None) -> None:
        """Nothing passes between these two hosts from now on, or no packet larger than so many bytes."""
        only = f"meta length > {largest} " if largest else ""
        address = self.ports[other].addresses[0].split("/")[0]
        rules = f"type filter hook input priority 0\nip saddr {address} {only}drop"
        text = f"table inet chaos-part {{\nchain in {{\n{rules}\n}}\n}}\n"
        lab_net.run([*lab_net.enter(self.ports[node].namespace), "nft", "-f", "-"], stdin=text)

    def heal(self, node: str) -> None:
        port = self.ports[node]
        mend = "table inet chaos-part\ndelete table inet chaos-part\n"
        lab_net.run([*lab_net.enter(port.namespace), "nft", "-f", "-"], stdin=mend)
        forget = f"table netdev chaos-{port.number}\ndelete table netdev chaos-{port.number}\n"
        for namespace, text in ((port.namespace, forget.replace(f"-{port.number}", "")), (_hub(port), forget)):
            lab_net.run([*lab_net.enter(namespace), "nft", "-f", "-"], stdin=text)
        self.link(node, Link())

    def power_off(self, node: str) -> None:
        lab_net.unplug(self.ports[node])

    def power_on(self, node: str) -> None:
        self.lab.power(node, "on")
        self._networks[_inode(lab_net.NETNS / self.ports[node].namespace)] = node
        self.bystanders[node] = self.start_bystander(node)


class Cell:
    """Three hosts for one job at a time, and our connections to them."""

    def __init__(self, world: World, names: list[str]) -> None:
        self.world, self.names = world, names
        self._connections: Connections | None = None

    @property
    def nodes(self) -> list[Node]:
        return [node for node in load_inventory(self.world.lab.inventory).nodes if node.name in self.names]

    def connect(self) -> dict[str, ConnectedHost]:
        """Kept from round to round; a host that was cut off is dialled again. Raises HostError."""
        if self._connections is None:
            self._connections = Connections(Home(self.world.folder / f"home-{self.names[0]}"))
            self._hosts = self._connections.open(self.nodes)
        for host in self._hosts.values():
            if isinstance(host, HostError):
                raise host
        return dict(self._hosts)

    def reconnect(self, name: str) -> ConnectedHost:
        assert self._connections
        self._hosts[name] = self._connections.reopen(name)
        return self._hosts[name]

    def close(self) -> None:
        """The next `connect` dials all of them again."""
        if self._connections:
            self._connections.__exit__(None, None, None)
            self._connections = None


def enter_network(namespace: Path) -> Callable[[], None]:
    """Puts this thread, and those that it starts, into a network namespace; the way back is returned."""
    libc = ctypes.CDLL(None, use_errno=True)

    def enter(handle: int) -> None:
        if libc.setns(handle, _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"setns {namespace}")
        os.close(handle)

    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    enter(os.open(namespace, os.O_RDONLY))
    return lambda: enter(home)


@contextlib.contextmanager
def small_disk(world: World, node: str, folder: str, size: str) -> Iterator[Path]:
    """A file system of its own for one folder of the host; its path from here."""
    world.root(node).joinpath(folder.lstrip("/")).mkdir(exist_ok=True)
    options = f"size={size},uid={USER_ID},gid={USER_ID},mode=0700"
    mount = world.on_host(node, "mount", "-t", "tmpfs", "-o", options, "tmpfs", folder, user=False)
    subprocess.run(mount, check=True)
    try:
        yield world.root(node).joinpath(folder.lstrip("/"))
    finally:
        subprocess.run(world.on_host(node, "umount", "--lazy", folder, user=False), check=True)


def remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def _plan(standing: Lab) -> lab_plan.Lab:
    return lab_plan.from_json((STATE / standing.cluster / "lab.json").read_text())


def _hub(port: lab_net.Port) -> str:
    return lab_net.hub_namespace(port.cluster)


def _drop_all(namespace: str, interface: str) -> None:
    table = "chaos" + (f"-{interface.removeprefix('port')}" if interface.startswith("port") else "")
    chain = f'chain in {{\ntype filter hook ingress device "{interface}" priority 0\ndrop\n}}'
    text = f"table netdev {table} {{\n{chain}\n}}\n"
    lab_net.run([*lab_net.enter(namespace), "nft", "-f", "-"], stdin=text)


def _role(command: bytes) -> str:
    signs = {b"orch_remote.keeper": "keeper", b"fake_torchrun.py": "launcher", b"orch_remote.launch": "launcher",
             b"orch_remote.rank": "wrapper", b"script.py": "rank"}  # fmt: skip
    return next((role for sign, role in signs.items() if sign in command), "other")


def _role_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        return _role(_read(f"/proc/{pid}/cmdline"))
    return "other"


def _stat(pid: int) -> list | None:
    """State, parent, start time (proc(5)); None where there is no such process."""
    with contextlib.suppress(OSError):
        fields = _read(f"/proc/{pid}/stat").decode(errors="replace").rpartition(")")[2].split()
        return [fields[0], int(fields[1]), int(fields[19])]
    return None


def _inode(path: str | Path) -> int:
    return os.stat(path).st_ino


def _read(path: str) -> bytes:
    with open(path, "rb", buffering=0) as file:
        return file.read()
