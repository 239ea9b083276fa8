"""Whether `orch doctor` finds what is wrong, says nothing where nothing is, and how long it takes.

    .venv/bin/python tests/bench/doctor.py seeds [P07 P14 ...]     # one fault at a time: found, on the right host, why
    .venv/bin/python tests/bench/doctor.py healthy [RUNS]          # false blocks in a healthy lab
    .venv/bin/python tests/bench/doctor.py time [RUNS]             # eight hosts, without and with --collective

A lab of real SSH servers, `orch doctor` as a person types it. Each fault is made on hosts that are hosts: addresses,
routes, filters, limits, files, processes, mounts. GPUs, which no lab has, are a stand-in for nvidia-smi and for torch's
CUDA; InfiniBand and an IOMMU are files in a host's own /sys. Needs root, as the lab does.
"""

from __future__ import annotations

import contextlib
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import yaml

from orchestrator.doctor import CHECKS
from tests.bench.launch import show_machine
from tests.support.lab import Lab, lab
from tests.support.quick_python import quick_python
from tests.support.terminal import Person

NAMES = ("alpha", "beta", "gamma")
ADDRESS = {name: f"10.77.36.{number}" for number, name in enumerate(NAMES, 1)}
SICK, OTHERS = "gamma", "alpha, beta"
INVENTORY = """
cluster: seeds
defaults: {{python: {python}, bandwidth: 1Gbps, gpus: 2}}
nodes:
  - {{name: alpha, host: 10.77.36.1, master: true}}
  - {{name: beta, host: 10.77.36.2}}
  - {{name: gamma, host: 10.77.36.3}}
"""
EIGHT = "cluster: eight\ndefaults: {device: cpu, bandwidth: 1Gbps, env: {OMP_NUM_THREADS: '1'}}\nnodes:\n" + "".join(
    f"  - {{name: h{number}, host: 10.77.37.{number}}}\n" for number in range(1, 9)
)
SMOKE = """
cluster: smoke
defaults: {device: cpu, bandwidth: 1Gbps, env: {OMP_NUM_THREADS: "1"}}
nodes:
  - {name: alpha, host: 10.77.38.1, master: true}
  - {name: beta, host: 10.77.38.2}
  - {name: gamma, host: 10.77.38.3, prepare: "test ! -e /home/lab/sick"}
"""

# ---- stand-ins for what a lab has not ------------------------------------------------------------------------------

CUDA = {
    "torch/cuda.py": "import types\nnccl = types.SimpleNamespace(version=lambda: (2, 14, 3))\n"
    "def is_available(): return True\ndef device_count(): return 2\ndef get_arch_list(): return ['sm_70']\n",
    "torch/version.py": 'cuda = "12.1"\n',
    "torch/distributed/__init__.py": "def is_available(): return True\nis_gloo_available = is_nccl_available = "
    "is_available\n",
}
SQUARE = (
    "\nclass _Square:\n    def __matmul__(self, other): return {(0, 0): 64}\ndef ones(*_, **__): return _Square()\n"
)
SMI = """#!/bin/sh
case $1 in
*fabric*) printf '{health}' ;;
*compute-apps*) echo '{apps}' ;;
*) printf '{gpus}' ;;
esac
"""
HEALTHY = "0x1, 1200, 1200, 250, 250, 16, 16, [N/A]"


def smi(node: str, *, count: int = 2, health: str = HEALTHY, apps: str = "") -> str:
    """An nvidia-smi that shows so many GPUs; the health of the last of them, and who is on it, as given."""
    rows = range(count)
    gpus = [f"{n}, Tesla V100-16GB, GPU-{node}-{n}, 16384, 0, 525.1, 0:{n}B:00.0, Default, 7.0\\n" for n in rows]
    sick = {count - 1: health}
    fine = [f"{n}, GPU-{node}-{n}, 0000:0{n}:00.0, 0, No, No, No, {sick.get(n, HEALTHY)}\\n" for n in rows]
    return SMI.format(health="".join(fine), gpus="".join(gpus), apps=apps)


# Has a folder of this host's kernel say something else: the rest of it is links to what it really says.
OVERLAY = """
import json, os, subprocess, sys
top, files = sys.argv[1], json.loads(sys.argv[2])
real, fake = "/run/real" + top, "/run/fake" + top
os.makedirs(real), os.makedirs(fake)
subprocess.run(["mount", "--rbind", top, real], check=True)
def link_all(rel):
    for name in os.listdir(os.path.join(real, rel)) if os.path.isdir(os.path.join(real, rel)) else ():
        os.symlink(os.path.join(real, rel, name), os.path.join(fake, rel, name))
link_all("")
for path, text in files.items():
    parts = path.split("/")
    for depth in range(1, len(parts)):
        rel = "/".join(parts[:depth])
        if not os.path.isdir(os.path.join(fake, rel)) or os.path.islink(os.path.join(fake, rel)):
            if os.path.islink(os.path.join(fake, rel)): os.unlink(os.path.join(fake, rel))
            os.mkdir(os.path.join(fake, rel))
            link_all(rel)
    place = os.path.join(fake, path)
    if os.path.islink(place): os.unlink(place)
    open(place, "w").write(text)
    os.chmod(place, 0o666)
subprocess.run(["mount", "--rbind", fake, top], check=True)
"""
UNDO_OVERLAY = 'umount -l "$0"; umount -l /run/real"$0"; rm -rf /run/real"$0" /run/fake"$0"'
# Ends what outlived a login, as systemd-logind does with KillUserProcesses=yes.
NOTHING_OUTLIVES = """
import os, time
while True:
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if open(f"/proc/{pid}/cmdline", "rb").read() == b"sleep\\x0030\\0": os.kill(int(pid), 9)
        except OSError: pass
    time.sleep(0.02)
"""
LATE_PYTHON = """#!{python} -S
import sys, time
real = time.time
time.time = lambda: real() - 61
code, sys.argv = sys.argv[2], ["-c", *sys.argv[3:]]
exec(code)
"""
IN_HOSTS = "sed -i /etc/hosts -e"
NFT = "table inet seed {{\n chain input {{\n type filter hook input priority 0; policy accept\n {rule}\n }}\n}}\n"


# ---- the lab -------------------------------------------------------------------------------------------------------


class Bench:
    """Three hosts with two GPUs each, in order; what a seed does to them it undoes."""

    def __init__(self, hosts: Lab, folder: Path, quick: Path) -> None:
        self.lab, self.quick = hosts, quick
        self.person = Person(hosts, folder / "home", folder)
        self.content = yaml.safe_load(hosts.inventory.read_text())
        self.file = folder / "seeded.yaml"
        for name in NAMES:
            self.root(name, f"{IN_HOSTS} 's/^127.0.1.1 /{ADDRESS[name]} /'")
            self.root(name, "install -d -o lab /home/lab/bin /home/lab/data/MNIST")
            self.root(name, "sed -i 's|PATH=|PATH=/home/lab/bin:|' /etc/ssh/sshd_config")
            self.gpus(name)
            self.sshd(name)

    def root(self, node: str, script: str, *words: str, check: bool = True) -> str:
        done = self.lab.host_exec(node, ["sh", "-c", script, *words])
        assert not check or done.returncode == 0, f"{node}: {script}: {done.stderr}"
        return done.stdout

    def gpus(self, node: str, **changes: Any) -> None:
        self.write(node, "/home/lab/bin/nvidia-smi", smi(node, **changes))

    def write(self, node: str, path: str, text: str) -> None:
        done = self.lab.host_exec(node, ["sh", "-c", 'cat >"$0" && chmod 755 "$0"', path], input=text)
        assert done.returncode == 0, done.stderr

    def sshd(self, node: str) -> None:
        """Has it read its settings anew: process 1 starts it again."""
        self.root(node, "kill $(pgrep -o sshd)")
        deadline = time.monotonic() + 20
        while self.lab.ssh(node, "true").returncode:
            assert time.monotonic() < deadline

    def doctor(self, *words: str) -> dict[str, Any]:
        self.file.write_text(yaml.safe_dump(self.content))
        done = self.person.types("doctor", str(self.file), "--json", *words, exit_code=None)
        assert done.stdout, done.stderr
        return dict(json.loads(done.stdout))

    @contextlib.contextmanager
    def done_and_undone(self, do: str, undo: str, node: str = SICK) -> Iterator[None]:
        try:
            self.root(node, do)
            yield
        finally:
            self.root(node, undo)

    @contextlib.contextmanager
    def in_inventory(self, name: str = SICK, **keys: Any) -> Iterator[None]:
        """A node has these keys; one that is not there is made of gamma."""
        before, nodes = self.content, [dict(node) for node in self.content["nodes"]]
        if name not in NAMES:
            nodes.append({**nodes[-1], "name": name})
        next(node for node in nodes if node["name"] == name).update(keys)
        self.content = {**before, "nodes": nodes}
        try:
            yield
        finally:
            self.content = before

    @contextlib.contextmanager
    def with_gpus(self, **changes: Any) -> Iterator[None]:
        try:
            self.gpus(SICK, **changes)
            yield
        finally:
            self.gpus(SICK)

    @contextlib.contextmanager
    def with_torch(self, file: str, old: str, new: str) -> Iterator[None]:
        """gamma's torch says something else."""
        (there,) = self.quick.glob("lib/*/site-packages/torch")
        place = f"/run/torch/{file}"
        do = f"cp -r {there} /run/torch && grep -q '{old}' {place} && sed -i 's|{old}|{new}|' {place}"
        with self.done_and_undone(f"{do} && mount --bind /run/torch {there}", f"umount {there}; rm -r /run/torch"):
            yield

    @contextlib.contextmanager
    def filtered(self, node: str, rule: str) -> Iterator[None]:
        with self.done_and_undone(f"nft '{NFT.format(rule=rule)}'", "nft delete table inet seed", node):
            yield

    @contextlib.contextmanager
    def kernel_says(self, top: str, files: dict[str, str]) -> Iterator[None]:
        try:
            self.lab.host_exec(SICK, ["python3", "-c", OVERLAY, top, json.dumps(files)], check=True)
            yield
        finally:
            self.lab.host_exec(SICK, ["sh", "-c", UNDO_OVERLAY, top])

    @contextlib.contextmanager
    def runs(self, argv: Sequence[str], *, as_user: bool = False) -> Iterator[None]:
        noted = ["sh", "-c", 'echo $$ >/tmp/seed.pid; exec "$@"', "sh", *argv]
        process = self.lab.host_popen(SICK, noted, as_user=as_user, stdout=subprocess.DEVNULL)
        try:
            yield
        finally:
            self.root(SICK, "kill $(cat /tmp/seed.pid); rm /tmp/seed.pid")
            process.communicate()


# ---- the faults ----------------------------------------------------------------------------------------------------


def off(bench: Bench) -> AbstractContextManager[object]:
    stack = contextlib.ExitStack()
    bench.lab.power(SICK, "off")
    stack.callback(lambda: back_on(bench))
    return stack


def back_on(bench: Bench) -> None:
    """What lay in its memory is gone."""
    bench.lab.power(SICK, "on")
    bench.root(SICK, f"{IN_HOSTS} 's/^127.0.1.1 /{ADDRESS[SICK]} /'")
    bench.root(SICK, "sed -i 's|PATH=|PATH=/home/lab/bin:|' /etc/ssh/sshd_config")
    bench.sshd(SICK)


@contextlib.contextmanager
def other_key(bench: Bench) -> Iterator[None]:
    key = "/etc/ssh/ssh_host_ed25519_key"
    bench.root(SICK, f"cp -p {key} /run/key && rm {key} && ssh-keygen -q -t ed25519 -N '' -f {key}")
    bench.root(SICK, "kill $(pgrep -o sshd); sleep 2")
    try:
        yield
    finally:
        bench.root(SICK, f"cp -p /run/key {key}")
        bench.sshd(SICK)


@contextlib.contextmanager
def few_logins(bench: Bench) -> Iterator[None]:
    """Somebody else's login that takes its time is the one that its server allows."""
    config = "/etc/ssh/sshd_config"
    bench.root(SICK, f"cp {config} /run/sshd_config && echo 'MaxStartups 1:100:1\nPerSourcePenalties no' >>{config}")
    if "Bad configuration" in bench.root(SICK, "/usr/sbin/sshd -t 2>&1", check=False):
        bench.root(SICK, f"sed -i /PerSourcePenalties/d {config}")
    bench.sshd(SICK)
    slow = f"import socket, time; s = socket.create_connection(('{ADDRESS[SICK]}', 22)); time.sleep(4)"
    holding = bench.lab.popen([sys.executable, "-c", slow])
    time.sleep(0.3)
    try:
        yield
    finally:
        holding.kill()
        holding.communicate()
        bench.root(SICK, f"cp /run/sshd_config {config}")
        bench.sshd(SICK)


@contextlib.contextmanager
def few_files(bench: Bench) -> Iterator[None]:
    with bench.done_and_undone("prlimit --pid $(pgrep -o sshd) --nofile=256:256", "true"):
        yield
    bench.sshd(SICK)


@contextlib.contextmanager
def small_group(bench: Bench) -> Iterator[None]:
    group = "/sys/fs/cgroup/orch-bench-doctor"
    do = f"mount -t cgroup -o pids none /sys/fs/cgroup && mkdir {group} && echo 1000 >{group}/pids.max"
    undo = f"for pid in $(cat {group}/cgroup.procs); do echo $pid >/sys/fs/cgroup/cgroup.procs; done; rmdir {group}"
    with bench.done_and_undone(
        f"{do} && echo $(pgrep -o sshd) >{group}/cgroup.procs", f"{undo}; umount /sys/fs/cgroup"
    ):
        yield


@contextlib.contextmanager
def second_entry(bench: Bench, **keys: str) -> Iterator[None]:
    """delta is gamma by another address."""
    line = "10.77.36.33/24 dev eth0"
    with (
        bench.done_and_undone(f"ip addr add {line}", f"ip addr del {line}"),
        bench.in_inventory("delta", host="10.77.36.33", **keys),
    ):
        yield


@contextlib.contextmanager
def other_family(bench: Bench) -> Iterator[None]:
    line = "fd77::3/64 dev eth0"
    with (
        bench.done_and_undone(f"ip -6 addr add {line} nodad", f"ip -6 addr del {line}"),
        bench.in_inventory(address="fd77::3"),
    ):
        yield


@contextlib.contextmanager
def slow_link(bench: Bench) -> Iterator[None]:
    bench.lab.link(SICK, "rate", "100Mbps")
    try:
        yield
    finally:
        bench.lab.link(SICK, "up")


@contextlib.contextmanager
def infiniband(bench: Bench) -> Iterator[None]:
    """A port, in a session that may lock 8 MiB of memory, as sessions of this lab may."""
    port = "class/infiniband/mlx5_0/ports/1"
    device = {"class/infiniband_verbs/uverbs0/ibdev": "mlx5_0\n"}
    with (
        bench.kernel_says("/sys", {**device, f"{port}/state": "4: ACTIVE\n", f"{port}/link_layer": "InfiniBand\n"}),
        bench.kernel_says("/dev", {"infiniband/uverbs0": ""}),
    ):
        yield


@contextlib.contextmanager
def late(bench: Bench) -> Iterator[None]:
    python = bench.content["defaults"]["python"]
    bench.write(SICK, "/home/lab/bin/late-python", LATE_PYTHON.format(python=python))
    with bench.in_inventory(python="/home/lab/bin/late-python"):
        yield


Fault = Callable[[Bench], AbstractContextManager[object]]


@dataclass(frozen=True)
class Seed:
    """make: the fault, for as long as its context lasts. where: who is to be blamed. why: what has to be said of it."""

    make: Fault
    where: tuple[str, ...]
    why: str


def broken_driver(bench: Bench) -> AbstractContextManager[None]:
    said = "Failed to initialize NVML: Driver/library version mismatch"
    stack = contextlib.ExitStack()
    bench.write(SICK, "/home/lab/bin/nvidia-smi", f"#!/bin/sh\necho '{said}'\nexit 18\n")
    stack.callback(lambda: bench.gpus(SICK))
    return stack


G = (SICK,)
GHOST = ["env", "ORCH_JOB_DIR=/home/lab/.orch/jobs/ghost-1", "sleep", "600"]
IOMMU = {f"bus/pci/devices/0000:0{number}:00.0/iommu_group/type": "DMA\n" for number in (0, 1)}
HIGH_PORTS = "ip saddr {} tcp dport > 1024 drop"
BIG_FROM_OTHERS = f"ip saddr {{ {ADDRESS['alpha']}, {ADDRESS['beta']} }} meta length > 1400 drop"


def torch(file: str, old: str, new: str) -> Fault:
    return lambda bench: bench.with_torch(file, old, new)


def gpus(**changes: Any) -> Fault:
    return lambda bench: bench.with_gpus(**changes)


def inventory(**keys: Any) -> Fault:
    return lambda bench: bench.in_inventory(**keys)


def root(do: str, undo: str) -> Fault:
    """On gamma."""
    return lambda bench: bench.done_and_undone(do, undo)


def filtered(node: str, rule: str) -> Fault:
    return lambda bench: bench.filtered(node, rule)


def profile(line: str) -> Fault:
    """A line of gamma's start-up file."""
    return root(f"echo '{line}' >/home/lab/.bashrc", "rm /home/lab/.bashrc")


SEEDS: dict[str, Seed] = {
    "P01": Seed(off, G, "no SSH login within"),
    "P02": Seed(other_key, G, "key"),
    "P03": Seed(few_logins, G, "hung up .* before a login"),
    "P04": Seed(
        torch("__init__.py", "from . import cuda", "import no_cuda; from . import cuda"), G, "no torch .*no_cuda"
    ),
    "P05": Seed(torch("cuda.py", "2, 14, 3", "2, 18, 1"), NAMES, f"2.14.3 on {OTHERS}; 2.18.1 on {SICK}"),
    "P06": Seed(broken_driver, G, "driver is broken"),
    "P07": Seed(torch("cuda.py", "sm_70", "sm_75"), G, "no code for its .*sm_70"),
    "P08": Seed(gpus(count=1), G, "declares 2 GPUs, the host shows 1"),
    "P09": Seed(gpus(apps=f"GPU-{SICK}-1, 1, 9000, python3"), G, "GPU 1 .* in use by"),
    "P10": Seed(gpus(health=HEALTHY.replace("0x1", "0x40")), G, "GPU 1 is slowed by heat"),
    "P11": Seed(gpus(health=HEALTHY.replace("[N/A]", "In Progress")), G, "NVSwitch fabric is not ready"),
    "P12": Seed(inventory(address="10.77.36.99"), G, "cannot listen at its training address"),
    "P13": Seed(filtered("alpha", HIGH_PORTS.format(ADDRESS[SICK])), (SICK, "alpha"), "no connection is made"),
    "P14": Seed(filtered(SICK, HIGH_PORTS.format(ADDRESS["beta"])), ("beta", SICK), "no connection is made"),
    "P15": Seed(
        root(f"ip route add unreachable {ADDRESS['beta']}", f"ip route del unreachable {ADDRESS['beta']}"),
        G,
        "no route to beta",
    ),
    "P16": Seed(
        root(
            f"{IN_HOSTS} 's/^{ADDRESS[SICK]} {SICK}/127.0.1.1 {SICK}/'", f"{IN_HOSTS} 's/^127.0.1.1 /{ADDRESS[SICK]} /'"
        ),
        G,
        "leads to 127.0.1.1",
    ),
    "P17": Seed(lambda bench: second_entry(bench, workdir="~/.orch-delta"), (SICK, "delta"), "they are one machine"),
    "P18": Seed(other_family, NAMES, f"IPv4 on {OTHERS}; IPv6 on {SICK}"),
    "P19": Seed(filtered(SICK, BIG_FROM_OTHERS), ("alpha", SICK), "large packets do not"),
    "P20": Seed(slow_link, G, "to or from it, with 1Gbps declared"),
    "P21": Seed(infiniband, G, "may lock .* of memory"),
    "P22": Seed(lambda bench: bench.kernel_says("/sys", IOMMU), G, "IOMMU stands between GPU 0 and 1"),
    "P24": Seed(root("install -d -m 755 /home/lab/.orch", "rm -r /home/lab/.orch"), G, "belongs to root"),
    "P25": Seed(
        root("mount -t tmpfs -o size=64M,mode=1777 tmpfs /dev/shm", "umount /dev/shm"), G, "holds only 64.0MiB"
    ),
    "P26": Seed(few_files, G, "256 files"),
    "P27": Seed(late, G, "1m01s behind"),
    "P28": Seed(profile("export NCCL_ALGO=Tree"), NAMES, f"NCCL_ALGO .*not set.* on {OTHERS}; Tree on {SICK}"),
    "P29": Seed(profile("export MASTER_ADDR=10.0.0.9 RANK=0"), G, "MASTER_ADDR"),
    "P30": Seed(lambda bench: bench.runs(["python3", "-c", NOTHING_OUTLIVES]), G, "ends with its SSH connection"),
    "P31": Seed(lambda bench: bench.runs(GHOST, as_user=True), G, "job ghost-1 has processes"),
    "P32": Seed(small_group, G, "control group may have 1000 processes"),
    "P33": Seed(inventory(ranks=1), NAMES, f"2 on {OTHERS}; 1 on {SICK}"),
    "P34": Seed(root("rmdir /home/lab/data/MNIST", "install -d -o lab /home/lab/data/MNIST"), G, "lacks MNIST"),
    "P35": Seed(second_entry, (SICK, "delta"), "one work folder"),
    "P36": Seed(root("touch /run/reboot-required", "rm /run/reboot-required"), G, "a reboot is due"),
}
"""P23 needs a job: `smoke`."""


# ---- what is measured ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    found: bool
    host: bool
    cause: bool
    beside: str

    @property
    def is_right(self) -> bool:
        return self.found and self.host and self.cause

    def __str__(self) -> str:
        marks = [("found", self.found), ("host", self.host), ("cause", self.cause)]
        return "  ".join(f"{name} {'yes' if value else 'NO ':3}" for name, value in marks) + f"  {self.beside}"


def outcome_of(id: str, where: Sequence[str], why: str, document: dict[str, Any]) -> Outcome:
    own = [one for one in document["findings"] if one["id"] == id]
    there = [one for one in own if sorted(one["where"]) == sorted(where)]
    beside = sorted({one["id"] for one in document["findings"] if one["id"] != id})
    words = f"beside it: {', '.join(beside)}" if beside else ""
    if own and not any(re.search(why, one["seen"]) for one in there):
        words += f"  said: {[(one['where'], one['seen']) for one in own]}"
    return Outcome(bool(own), bool(there), any(re.search(why, one["seen"]) for one in there), words)


@contextlib.contextmanager
def seeded_lab() -> Iterator[Bench]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        python = quick_python(folder / "quick")
        (packages,) = (folder / "quick").glob("lib/*/site-packages")
        for file, text in CUDA.items():
            (packages / file).write_text(text)
        with open(packages / "torch/__init__.py", "a") as file:
            file.write(SQUARE)
        with lab(INVENTORY.format(python=python), binds=[str(folder / "quick")]) as hosts:
            yield Bench(hosts, folder, folder / "quick")


def seeds(wanted: Sequence[str]) -> None:
    found: dict[str, Outcome] = {}
    with seeded_lab() as bench:
        sound = bench.doctor()
        print("without a fault:", [(one["id"], one["seen"]) for one in sound["findings"]] or "no finding", flush=True)
        for id, seed in SEEDS.items():
            if not wanted or id in wanted:
                with seed.make(bench):
                    found[id] = outcome_of(id, seed.where, seed.why, bench.doctor())
                print(f"{id}  {found[id]}", flush=True)
    if not wanted or "P23" in wanted:
        found["P23"] = smoke()
        print(f"P23  {found['P23']}", flush=True)
    right = sum(outcome.is_right for outcome in found.values())
    print(f"{right} of {len(found)} found with host and cause right ({len(CHECKS)} checks)")


def smoke() -> Outcome:
    with tempfile.TemporaryDirectory() as name, lab(SMOKE, trains=True) as hosts:
        person = Person(hosts, Path(name, "home"), Path(name))
        person.types("up", str(hosts.inventory))
        hosts.host_exec(SICK, ["touch", "/home/lab/sick"], check=True)
        document = person.asks("doctor", "--collective", exit_code=None)
    return outcome_of("P23", G, "an all-reduce by gloo fails, but works without that host", document)


def healthy(runs: int) -> None:
    blocks, warned, times_s = 0, dict[str, int](), list[float]()
    with seeded_lab() as bench:
        for _ in range(runs):
            began = time.perf_counter()
            found = bench.doctor()["findings"]
            times_s.append(time.perf_counter() - began)
            blocks += any(one["level"] == "block" for one in found)
            for id in {one["id"] for one in found}:
                warned[id] = warned.get(id, 0) + 1
            if found:
                print([(one["id"], one["level"], one["where"], one["seen"]) for one in found], flush=True)
    print(f"{runs} healthy runs: {blocks} with a false block; runs with a finding, by check: {warned or 'none'}")
    print(f"three hosts: median {statistics.median(times_s):.1f} s, {min(times_s):.1f} to {max(times_s):.1f}")


def measure(runs: int) -> None:
    with tempfile.TemporaryDirectory() as name, lab(EIGHT, trains=True) as hosts:
        person = Person(hosts, Path(name, "home"), Path(name))
        person.types("up", str(hosts.inventory))
        for words in ((), ("--collective",)):
            times_s = []
            for _ in range(runs):
                began = time.perf_counter()
                found = person.asks("doctor", *words, exit_code=None)
                times_s.append(time.perf_counter() - began)
                blocking = [
                    (one["id"], one["where"], one["seen"]) for one in found["findings"] if one["level"] == "block"
                ]
                print(f"{times_s[-1]:.1f} s", blocking or "", flush=True)
            took = f"median {statistics.median(times_s):.1f} s, {min(times_s):.1f} to {max(times_s):.1f}"
            print(f"eight hosts {' '.join(words) or 'without the collective'}: {took} ({runs} runs)", flush=True)
    show_machine()


if __name__ == "__main__":
    what, *more = sys.argv[1:] or ["seeds"]
    if what == "seeds":
        seeds(more)
    else:
        {"healthy": healthy, "time": measure}[what](int(more[0]) if more else {"healthy": 50, "time": 3}[what])
