"""The lab: hosts that are hosts, links that break when asked, and nothing left behind."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from orchestrator.errors import UsageError
from orchestrator.hosts import Inventory, load_inventory
from tests.support.lab import PROGRAM, STATE, Lab, lab

sys.path.append(str(PROGRAM.parent))

import lab_net
import lab_plan

INVENTORY = """
cluster: pair
defaults: {user: ubuntu}
nodes:
  - {name: a2000, host: 192.168.1.41, bandwidth: 2.5Gbps}
  - {name: v100, host: 192.168.1.42, bandwidth: 1Gbps, port: 2222, interface: enp3s0}
"""


@pytest.fixture(scope="module")
def pair() -> Iterator[Lab]:
    with lab(INVENTORY) as standing:
        yield standing


@pytest.fixture
def mended(pair: Lab) -> Iterator[Lab]:
    """The same lab for a test that breaks a link of v100."""
    yield pair
    pair.link("v100", "up")


def said(result: subprocess.CompletedProcess[str]) -> str:
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def typed(*words: str) -> subprocess.CompletedProcess[str]:
    """The program itself, as a person runs it."""
    return subprocess.run([sys.executable, str(PROGRAM), *words], capture_output=True, text=True)


def wait_until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.02)


# ---- hosts


@pytest.mark.lab
def test_an_ordinary_user_logs_in_from_the_controller(pair: Lab) -> None:
    assert said(pair.ssh("a2000", "id -un; hostname; echo $HOME")).split() == ["ubuntu", "a2000", "/home/ubuntu"]
    assert said(pair.ssh("v100", "id -u; cat /etc/hostname")).split() == ["1000", "v100"]


@pytest.mark.lab
def test_commands_run_in_the_controllers_network_and_on_a_host_as_its_user_or_root(pair: Lab) -> None:
    shown = said(typed("exec", "--cluster", pair.cluster, "--", "ip", "-4", "-br", "addr"))
    assert "192.168.1.254/24" in shown
    host = ("host", "--cluster", pair.cluster, "v100")
    show = ("--", "sh", "-c", 'echo $(id -un) $(hostname) $PWD "$1"', "sh", "a b")
    assert said(typed(*host, *show)) == "root v100 /root a b"
    assert said(typed(*host, "--as-user", *show)) == "ubuntu v100 /home/ubuntu a b"


@pytest.mark.lab
def test_python3_of_a_host_is_the_one_that_runs_the_lab_and_has_its_packages(pair: Lab) -> None:
    program = "import sys, torch; print(sys.prefix, torch.__version__)"
    prefix, version = said(pair.ssh("v100", f"python3 -c '{program}'")).split()
    assert prefix == sys.prefix
    assert version.startswith("2.")


@pytest.mark.lab
def test_a_login_shell_finds_the_same_python3(pair: Lab) -> None:
    assert said(pair.ssh("v100", "sh -lc 'command -v python3'")) == f"{sys.prefix}/bin/python3"


@pytest.mark.lab
def test_every_host_has_an_identity_of_its_own(pair: Lab) -> None:
    for path in ("/proc/sys/kernel/random/boot_id", "/etc/machine-id"):
        answers = {said(pair.ssh(node, f"cat {path}")) for node in ("a2000", "v100")}
        if os.path.exists(path):
            answers.add(Path(path).read_text().strip())
        assert len(answers) >= 2 + os.path.exists(path)


@pytest.mark.lab
def test_a_host_sees_no_processes_but_its_own(pair: Lab) -> None:
    lines = said(pair.ssh("a2000", "ps -e -o pid=,args=")).splitlines()
    assert lines[0].split()[0] == "1"
    assert len(lines) < 10
    assert f" {os.getpid()} " not in "".join(lines)


@pytest.mark.lab
@pytest.mark.parametrize("folder", ["/tmp", "/dev/shm", "/home/ubuntu", "/var/tmp"])
def test_what_a_host_writes_stays_on_that_host(pair: Lab, folder: str) -> None:
    said(pair.ssh("a2000", f"touch {folder}/here"))
    assert "here" in said(pair.ssh("a2000", f"ls {folder}"))
    assert "here" not in said(pair.ssh("v100", f"ls {folder}"))
    assert not Path(folder, "here").exists()


@pytest.mark.lab
def test_nobody_on_a_host_sees_the_developers_files(pair: Lab) -> None:
    assert "Permission denied" in pair.ssh("a2000", "ls /root").stderr
    # Only the interpreter may be there, where the developer keeps it below their home.
    python = {Path(prefix).parts[2] for prefix in (sys.prefix, sys.base_prefix) if prefix.startswith("/root/")}
    assert set(said(pair.host_exec("a2000", ["ls", "-A", "/root"])).split()) <= python
    assert "No such file" in pair.host_exec("a2000", ["ls", str(PROGRAM)]).stderr
    assert "No such file" in pair.host_exec("a2000", ["ls", str(STATE)]).stderr
    people = [line for line in Path("/etc/passwd").read_text().splitlines() if 1000 <= int(line.split(":")[2]) < 65534]
    accounts = said(pair.ssh("a2000", "cat /etc/passwd"))
    assert not [person for person in people if person in accounts]


@pytest.mark.lab
def test_nothing_changes_on_the_machine_itself(pair: Lab) -> None:
    assert "a2000" not in Path("/etc/hosts").read_text()
    assert os.uname().nodename not in ("a2000", "v100")
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    assert [line for line in mounts if pair.cluster in line and " /run/netns/" not in line] == []


@pytest.mark.lab
def test_a_host_knows_the_others_by_name_and_itself_as_debian_does(pair: Lab) -> None:
    assert said(pair.ssh("a2000", "getent hosts v100")).split() == ["192.168.1.42", "v100"]
    assert said(pair.ssh("a2000", "getent ahostsv4 a2000")).split()[0] == "127.0.1.1"


@pytest.mark.lab
def test_orphans_that_end_are_reaped(pair: Lab) -> None:
    said(pair.host_exec("a2000", ["sh", "-c", "sleep 0.05 >/dev/null 2>&1 & exec true"]))
    listing = ["ps", "-e", "-o", "stat=,args="]
    wait_until(lambda: "sleep" not in said(pair.host_exec("a2000", listing)))


@pytest.mark.lab
def test_commands_on_a_host_run_as_root_or_as_its_user(pair: Lab) -> None:
    assert said(pair.host_exec("v100", ["sh", "-c", "id -u; pwd"])).split() == ["0", "/root"]
    assert said(pair.host_exec("v100", ["sh", "-c", "id -u; pwd"], as_user=True)).split() == ["1000", "/home/ubuntu"]
    assert pair.host_exec("v100", ["sh", "-c", "exit 7"]).returncode == 7


@pytest.mark.lab
def test_the_controller_keeps_folder_environment_and_exit_code(pair: Lab, tmp_path: Path) -> None:
    environment = {**os.environ, "WORD": "two words"}
    result = pair.controller_exec(["sh", "-c", "pwd; echo $WORD; exit 3"], cwd=tmp_path, env=environment)
    assert result.stdout.splitlines() == [str(tmp_path), "two words"]
    assert result.returncode == 3


@pytest.mark.lab
def test_the_inventory_of_a_lab_is_complete(pair: Lab) -> None:
    inventory = load_inventory(pair.inventory)
    assert inventory.cluster == pair.cluster
    assert all(node.host_key and node.host_key in pair.known_hosts.read_text() for node in inventory.nodes)
    assert pair.key.stat().st_mode & 0o777 == 0o600


# ---- links


@pytest.mark.lab
def test_no_packet_finds_a_way_out(pair: Lab) -> None:
    program = "import socket; socket.create_connection(('192.0.2.1', 80), timeout=20)"
    for result in (
        pair.host_exec("a2000", ["python3", "-c", program], as_user=True),
        pair.controller_exec([sys.executable, "-c", program]),
    ):
        assert "Network is unreachable" in result.stderr


@pytest.mark.lab
def test_the_interface_is_the_inventorys(pair: Lab) -> None:
    shown = json.loads(said(pair.ssh("v100", "ip -json -4 address show dev enp3s0")))
    assert shown[0]["mtu"] == 1500
    assert [(a["local"], a["prefixlen"]) for a in shown[0]["addr_info"]] == [("192.168.1.42", 24)]
    assert said(pair.ssh("v100", "ls /sys/class/net")).split() == ["enp3s0", "lo"]


@pytest.mark.lab
def test_a_link_that_is_down_has_no_carrier_and_passes_nothing(mended: Lab) -> None:
    mended.link("v100", "down")
    assert said(mended.host_exec("v100", ["cat", "/sys/class/net/enp3s0/carrier"])) == "0"
    assert datagrams(mended, "a2000", "v100", size=100, count=20) == 0
    assert datagrams(mended, "v100", "a2000", size=100, count=20) == 0
    mended.link("v100", "up")
    assert said(mended.ssh("v100", "hostname")) == "v100"


@pytest.mark.lab
def test_drop_over_loses_large_packets_alone_in_both_directions(mended: Lab) -> None:
    mended.link("v100", "drop-over", "1400")
    header = 28  # IPv4 and UDP
    for sender, receiver in (("a2000", "v100"), ("v100", "a2000")):
        assert datagrams(mended, sender, receiver, size=1400 - header, count=20) == 20
        assert datagrams(mended, sender, receiver, size=1401 - header, count=20) == 0
    mended.link("v100", "up")
    assert datagrams(mended, "a2000", "v100", size=1401 - header, count=20) == 20


@pytest.mark.lab
def test_loss_drops_about_its_share_in_both_directions(mended: Lab) -> None:
    mended.link("v100", "loss", "30%")
    for sender, receiver in (("a2000", "v100"), ("v100", "a2000")):
        assert 250 < datagrams(mended, sender, receiver, size=64, count=500) < 450


@pytest.mark.lab
def test_a_stream_of_small_segments_passes_drop_over(mended: Lab) -> None:
    mended.link("v100", "drop-over", "1400")
    said(mended.host_exec("v100", ["ip", "link", "set", "enp3s0", "mtu", "1300"]))
    try:
        # Within seconds: a stream of which only what TCP sends again gets through would take half a minute.
        text = said(mended.ssh("v100", "head -c 300000 /dev/zero | tr '\\0' x", timeout=10))
        assert len(text) == 300_000
    finally:
        said(mended.host_exec("v100", ["ip", "link", "set", "enp3s0", "mtu", "1500"]))


RECEIVE = """
import socket
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
s.bind(("", 9999)); print("ready", flush=True)
got = 0; input(); s.settimeout(0.3)
try:
    while True: s.recv(2048); got += 1
except TimeoutError: print(got)
"""
SEND = """
import socket, sys
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for _ in range(int(sys.argv[3])): s.sendto(bytes(int(sys.argv[2])), (sys.argv[1], 9999))
"""


def datagrams(standing: Lab, sender: str, receiver: str, *, size: int, count: int) -> int:
    """How many of `count` datagrams arrive."""
    address = next(node["host"] for node in standing.nodes if node["name"] == receiver)
    with standing.host_popen(receiver, ["python3", "-c", RECEIVE]) as listener:
        assert listener.stdout is not None
        assert listener.stdout.readline() == "ready\n"
        said(standing.host_exec(sender, ["python3", "-c", SEND, address, str(size), str(count)]))
        return int(listener.communicate("\n")[0])


@pytest.mark.lab
@pytest.mark.skipif(not shutil.which("iperf3"), reason="needs iperf3")
def test_the_speed_of_a_link_is_near_the_inventorys_in_both_directions(mended: Lab) -> None:
    mended.power("v100", "off")  # so that the cable is as it was plugged in
    mended.power("v100", "on")
    for backwards in (False, True):
        assert 0.6 < speed_bps(mended, backwards) / 1e9 < 1.0
    mended.link("v100", "rate", "100Mbps")
    for backwards in (False, True):
        assert 0.7 < speed_bps(mended, backwards) / 100e6 < 1.0


def speed_bps(standing: Lab, backwards: bool) -> float:
    with standing.host_popen("v100", ["iperf3", "-s", "-1", "--forceflush"]) as server:
        assert server.stdout is not None
        while "listening" not in server.stdout.readline():
            pass
        flags = ["-R"] if backwards else []
        client = ["iperf3", "-c", "192.168.1.42", "-t", "1", "--json", *flags]
        report = json.loads(said(standing.host_exec("a2000", client)))
        server.communicate()
    return float(report["end"]["sum_received"]["bits_per_second"])


# ---- power

SERVE = """
import socket, time
s = socket.create_server(("", 9998)); print("ready", flush=True); kept = s.accept(); time.sleep(600)
"""
LISTEN = """
import socket
s = socket.create_connection(("192.168.1.42", 9998)); print("connected", flush=True); input(); s.settimeout(0.5)
try: print("closed", s.recv(1))
except TimeoutError: print("silent")
"""


@pytest.mark.lab
def test_a_power_loss_ends_everything_in_silence_and_spares_the_disk(pair: Lab) -> None:
    said(pair.ssh("v100", "touch ~/kept /tmp/lost"))
    boot_id, machine_id = said(pair.ssh("v100", "cat /proc/sys/kernel/random/boot_id /etc/machine-id")).split()
    server = pair.host_popen("v100", ["python3", "-c", SERVE])
    assert server.stdout is not None and server.stdout.readline() == "ready\n"
    with server, pair.popen([sys.executable, "-c", LISTEN]) as peer:
        assert peer.stdout is not None and peer.stdout.readline() == "connected\n"
        pair.power("v100", "off")
        assert server.wait(10) == -signal.SIGKILL
        assert peer.communicate("\n")[0] == "silent\n"
    assert "its power is off" in typed("host", "--cluster", pair.cluster, "v100", "--", "true").stderr

    pair.power("v100", "on")
    assert said(pair.ssh("v100", "ls ~")).split() == ["kept"]
    assert "lost" not in said(pair.ssh("v100", "ls /tmp")).split()
    again = said(pair.ssh("v100", "cat /proc/sys/kernel/random/boot_id /etc/machine-id")).split()
    assert again[0] != boot_id
    assert again[1] == machine_id
    assert datagrams(pair, "a2000", "v100", size=100, count=5) == 5


# ---- up and down


def left_of(cluster: str) -> list[str]:
    """Namespaces, folders, mounts and processes that still name this cluster."""
    found = [*lab_net.namespaces(cluster)]
    found += [str(top / cluster) for top in (STATE, Path("/var/lib/orch-lab")) if (top / cluster).exists()]
    found += [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if cluster in line]
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                command = (folder / "cmdline").read_text()
            except OSError:
                continue
            found += [command] if f"/{cluster}/" in command else []
    return found


ONE = "cluster: single\nnodes: [{name: only, host: 192.168.1.41, user: root}]"


@pytest.mark.lab
def test_down_leaves_nothing_even_of_busy_hosts(pair: Lab) -> None:
    """Another lab with the same address stands all the while, and is not touched."""
    with lab(ONE) as single:
        assert said(single.ssh("only", "id -un; hostname")).split() == ["root", "only"]
        said(single.host_exec("only", ["sh", "-c", "setsid sleep 600 >/dev/null 2>&1 &"]))
        with single.popen(["sleep", "600"]) as bystander:
            assert left_of(single.cluster)
            subprocess.run([sys.executable, str(PROGRAM), "down", str(single.inventory)], check=True)
            assert bystander.wait(10) == -signal.SIGKILL
        assert left_of(single.cluster) == []
    assert said(pair.ssh("a2000", "hostname")) == "a2000"


@pytest.mark.lab
def test_a_lab_is_not_removed_from_inside(pair: Lab) -> None:
    result = pair.controller_exec([sys.executable, str(PROGRAM), "down", pair.cluster])
    assert result.returncode == 1
    assert "inside the lab" in result.stderr
    assert said(pair.ssh("a2000", "hostname")) == "a2000"


@pytest.mark.lab
def test_up_after_a_crash_starts_afresh(tmp_path: Path) -> None:
    (tmp_path / "given").write_text("data")
    with lab(ONE, binds=[f"{tmp_path}:/data/here"]) as single:
        assert said(single.ssh("only", "cat /data/here/given")) == "data"
        assert "Read-only" in single.ssh("only", "touch /data/here/new").stderr
        said(single.ssh("only", "touch ~/old"))
        init = lab_net.processes([lab_net.host_namespace(single.cluster, "only")])
        for pid in init:
            with contextlib.suppress(ProcessLookupError):  # it went with another one
                os.kill(pid, signal.SIGKILL)
        start = time.monotonic()
        subprocess.run([sys.executable, str(PROGRAM), "up", str(single.inventory)], check=True, capture_output=True)
        assert time.monotonic() - start < 10
        assert said(single.ssh("only", "ls ~")) == ""


@pytest.mark.lab
def test_a_host_that_cannot_start_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    """A folder shown inside another that is shown read-only has no place to be put."""
    (tmp_path / "outer").mkdir()
    with lab(ONE) as single:  # for the inventory and the clean-up
        binds = ["--bind", f"{tmp_path}/outer:/data", "--bind", f"{tmp_path}:/data/inner"]
        up = [sys.executable, str(PROGRAM), "up", str(single.inventory), *binds]
        result = subprocess.run(up, capture_output=True, text=True)
        assert result.returncode == 3
        assert result.stderr.startswith("lab: only: its sshd does not answer: ")
        assert "Read-only file system" in result.stderr
        assert len(result.stderr.splitlines()) == 1
        assert left_of(single.cluster) == []


@pytest.mark.lab
def test_a_python_below_a_folder_of_roots_own_serves_ordinary_users(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    (home / "secret").write_text("x")
    python = home / "venv/bin/python"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home / "venv")], check=True)
    packages = Path(sys.prefix, f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages")
    (home / "venv" / packages.relative_to(sys.prefix) / "more.pth").write_text(f"{packages}\n")
    with lab(ONE.replace("user: root", "user: someone")) as single:
        subprocess.run([str(python), str(PROGRAM), "up", str(single.inventory)], check=True, capture_output=True)
        assert said(single.ssh("only", "python3 -c 'import sys; print(sys.prefix)'")) == str(home / "venv")
        assert said(single.ssh("only", f"ls {home}")) == "venv"


# ---- the plan of a lab, which needs no root


def inventory_of(tmp_path: Path, nodes: str) -> Inventory:
    (tmp_path / "lab.yaml").write_text(f"cluster: c\nnodes: [{nodes}]")
    return load_inventory(tmp_path / "lab.yaml")


def test_the_controller_has_a_free_address_in_every_subnet(tmp_path: Path) -> None:
    nodes = "{name: a, host: 10.0.0.254}, {name: b, host: 10.0.1.7, address: 10.9.0.1/30}, {name: c, host: 'fd00::5'}"
    planned = lab_plan.plan(inventory_of(tmp_path, nodes), sys.executable)
    assert planned.controller_addresses == (
        "10.0.0.253/24",
        "10.9.0.2/30",
        "10.0.1.254/24",
        "fd00::ffff:ffff:ffff:fffe/64",
    )
    assert planned.host("b").port.addresses == ("10.9.0.1/30", "10.0.1.7/24")
    assert planned.host("b").address == "10.9.0.1"
    assert lab_plan.from_json(lab_plan.to_json(planned)) == planned


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        ("{name: a, host: gpu.example.org}", "is a name"),
        ("{name: a, host: 127.0.0.1}", "cannot be a host's own address"),
        ("{name: a, host: 10.0.0.1}, {name: b, host: 10.0.0.1, port: 23}", "two nodes have the address 10.0.0.1"),
        ("{name: a, transport: local}", "needs no lab"),
        ("{name: a, host: 10.0.0.1, address: 10.0.0.1/32}", "no address left"),
    ],
)
def test_an_inventory_that_cannot_be_a_lab_is_refused(tmp_path: Path, nodes: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        lab_plan.plan(inventory_of(tmp_path, nodes), sys.executable)


def test_the_words_of_a_link_state_the_whole_link() -> None:
    assert lab_plan.parse_link(["down"], 1e9) == lab_net.Link(up=False, rate_bps=1e9)
    assert lab_plan.parse_link(["up"], None) == lab_net.Link()
    words = ["rate", "100Mbps", "loss", "5%", "drop-over", "1400"]
    assert lab_plan.parse_link(words, 1e9) == lab_net.Link(rate_bps=1e8, loss=0.05, drop_over=1400)


@pytest.mark.parametrize("words", ["fast", "rate", "rate 5", "loss 5", "loss 101%", "loss nan%", "drop-over x"])
def test_a_link_that_is_not_understood_is_refused(words: str) -> None:
    with pytest.raises(UsageError):
        lab_plan.parse_link(words.split(), 1e9)


def test_a_folder_is_shown_under_its_own_name_or_another(tmp_path: Path) -> None:
    assert lab_plan.parse_bind(str(tmp_path)) == (str(tmp_path), str(tmp_path))
    assert lab_plan.parse_bind(f"{tmp_path}:/data/") == (str(tmp_path), "/data")
    for target in ("data", "/", "/usr/share", "/dev/x", "/proc"):
        with pytest.raises(UsageError, match="nothing can be put"):
            lab_plan.parse_bind(f"{tmp_path}:{target}")
    with pytest.raises(UsageError, match="is no folder"):
        lab_plan.parse_bind(f"{tmp_path}/none")
