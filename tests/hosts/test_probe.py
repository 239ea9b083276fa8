"""The probe on real processes: this machine through the local transport, with the tools that it meets stood in for."""

import ast
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from orchestrator.errors import ConnectError, HostError, ProbeError
from orchestrator.hosts import Connections, Node, checks, read_facts
from orchestrator.hosts import probe as probing
from orchestrator.hosts.probe import probe as probe_host
from orchestrator.paths import Home
from orchestrator.remote import commands, health, probe
from orchestrator.transport import ConnectedHost, LocalTransport, for_each, values
from orchestrator.transport.ask import ask
from tests.support.probed_hosts import node
from tests.support.quick_python import quick_python
from tests.support.sshd import needs_sshd, running_sshd, wait_for

REQUEST = {"workdir": "~/.orch", "peers": [], "torch": False}
LOADER = Path(probe.__file__).with_name("loader.py").read_text()


def host(name="here", python=sys.executable, activate=None, workdir="~/.orch"):
    return ConnectedHost(LocalTransport(name), python, activate, str(workdir))


def probe_all(hosts, peers=(), *, torch=False, timeout_s):
    return for_each(
        hosts, lambda one: probe_host(one, peers, torch=torch, timeout_s=timeout_s), deadline_s=timeout_s + 1
    )


def gathered(**changes):
    started = time.time()
    raw = probe.gather({**REQUEST, **changes})
    return read_facts("here", raw, started, time.time())


def test_this_machine_reports_what_it_is(tmp_path):
    answers = probe_all({"here": host(workdir=tmp_path)}, ["127.0.0.1"], timeout_s=30)
    facts = answers["here"]
    assert facts.python_executable == sys.executable
    assert facts.python_version == ".".join(str(part) for part in sys.version_info[:3])
    assert facts.cores >= 1
    assert facts.memory_bytes > 1 << 28
    assert facts.disk_free_bytes > 0
    assert abs(facts.clock_offset_s) < 5
    assert facts.boot_id == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert "127.0.0.1/8" in next(one.addresses for one in facts.interfaces if one.name == "lo")
    assert [(route.interface, route.source) for route in facts.routes] == [("lo", "127.0.0.1")]
    assert (facts.torch, facts.torch_error) == (None, None)


def test_torch_is_asked_in_a_process_of_its_own():
    torch = pytest.importorskip("torch")
    facts = probe_all({"here": host()}, torch=True, timeout_s=90)["here"]
    assert facts.torch.version == str(torch.__version__)
    assert facts.torch.cuda == torch.version.cuda
    assert facts.torch.gloo
    if facts.torch.cuda:
        assert all(arch.startswith(("sm_", "compute_")) for arch in facts.torch.arch_list)
        assert facts.torch.arch_list


NMS = "operator torchvision::nms does not exist"


@pytest.mark.parametrize(
    ("compiler", "vision", "found"),
    [
        ("raise SystemExit('it takes seconds')", "from torch._dynamo.utils import supported", ("0.24.0", None)),
        ("name = 'inductor'", "import torch._dynamo as c\nc.name.upper()", ("0.24.0", None)),
        ("", f"raise RuntimeError('{NMS}')", (None, f"RuntimeError: {NMS}")),
    ],
)
def test_torchvision_is_asked_without_torchs_compiler_and_again_as_it_is_where_it_does_not_load(
    tmp_path, compiler, vision, found
):
    python = Path(quick_python(tmp_path / "quick"))
    (packages,) = python.parents[1].glob("lib/python*/site-packages")
    (packages / "torch" / "_dynamo.py").write_text(f"{compiler}\n")
    (packages / "torchvision" / "__init__.py").write_text(f"{vision}\n__version__ = '0.24.0'\n")
    facts = probe_all({"here": host(python=str(python))}, torch=True, timeout_s=90)["here"]
    assert (facts.torch.torchvision, facts.torch.torchvision_error) == found


def test_a_package_that_a_strategy_needs_is_looked_up_and_never_imported(tmp_path):
    python = Path(quick_python(tmp_path / "quick"))
    (packages,) = python.parents[1].glob("lib/python*/site-packages")
    assert probe_all({"here": host(python=str(python))}, torch=True, timeout_s=90)["here"].torch.horovod is None
    (packages / "horovod.py").write_text("raise SystemExit('it loads libraries')")
    (packages / "horovod-0.28.1.dist-info").mkdir()
    (packages / "horovod-0.28.1.dist-info" / "METADATA").write_text("Name: horovod\nVersion: 0.28.1\n")
    assert probe_all({"here": host(python=str(python))}, torch=True, timeout_s=90)["here"].torch.horovod == "0.28.1"


def test_facts_about_torch_are_kept_until_its_packages_change(tmp_path):
    python = Path(quick_python(tmp_path / "quick"))
    (packages,) = python.parents[1].glob("lib/python*/site-packages")
    memory = tmp_path / "memory"

    def version():
        here = host(python=str(python))
        return probing.look(here, (), torch=True, timeout_s=90, memory=str(memory))[0].torch.version

    first = version()
    (kept,) = memory.iterdir()
    with (packages / "torch" / "__init__.py").open("a") as file:
        file.write("\n__version__ = '9.8.7'\n")
    assert version() == first
    (packages / "another").mkdir()
    assert version() == "9.8.7"
    (another,) = {*memory.iterdir()} - {kept}
    another.write_text("{}")
    assert version() == "9.8.7"
    written = json.loads(another.read_text())
    assert (written["version"], "devices" in written) == ("9.8.7", False)


DRIVER = """
int cuInit(unsigned flags) { return INIT; }
int cuDriverGetVersion(int *version) { *version = VERSION; return 0; }
int cuDeviceGetCount(int *count) { *count = 3; return 0; }
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
@pytest.mark.parametrize(("init", "version", "devices"), [(0, 12020, 3), (0, 13000, 3), (0, 11080, 0), (999, 12020, 0)])
def test_a_driver_that_is_new_enough_counts_the_gpus_of_a_known_torch(tmp_path, init, version, devices):
    """Only torch can explain why it would use none of them: then it is imported. The one of this test sees none."""
    python, memory = Path(quick_python(tmp_path / "quick")), tmp_path / "memory"
    define = [f"-DINIT={init}", f"-DVERSION={version}"]
    line = ["cc", "-shared", "-fPIC", *define, "-x", "c", "-", "-o", str(tmp_path / "libcuda.so.1")]
    subprocess.run(line, input=DRIVER, text=True, check=True)

    def torch():
        here = host(python=str(python), activate=f"export LD_LIBRARY_PATH={tmp_path}")
        return probing.look(here, (), torch=True, timeout_s=90, memory=str(memory))[0].torch

    assert torch().devices == 0
    (kept,) = memory.iterdir()
    kept.write_text(json.dumps({**json.loads(kept.read_text()), "cuda": "12.4"}))
    assert torch().devices == devices


def test_an_environment_without_torch_says_so_in_one_line(monkeypatch):
    monkeypatch.setattr(probe, "TORCH", "import no_such_torch")
    facts = gathered(torch=True)
    assert facts.torch is None
    assert facts.torch_error == "ModuleNotFoundError: No module named 'no_such_torch'"


def test_a_shell_that_prints_a_banner_spoils_nothing():
    banner = host(activate="echo '*** Welcome ***'; echo '{\"error\": 1}'; echo more >&2")
    assert ask(banner, "probe", REQUEST, timeout_s=30)["facts"]["python_executable"] == sys.executable


def test_a_shell_that_takes_its_time_says_nothing_about_the_clock():
    facts = probe_all({"slow": host("slow", activate="sleep 2")}, timeout_s=60)["slow"]
    assert facts.clock_error_s >= 1
    assert abs(facts.clock_offset_s) <= facts.clock_error_s + 0.1


def test_each_host_has_its_own_answer_within_the_deadline(tmp_path):
    hosts = {
        "good": host("good", workdir=tmp_path),
        "bare": host("bare", python="no-such-python"),
        "stuck": host("stuck", activate="sleep 600"),
        "liar": host("liar", activate="echo nothing; exit"),
    }
    started = time.monotonic()
    answers = probe_all(hosts, timeout_s=8)
    assert time.monotonic() - started < 60
    assert answers["good"].node == "good"
    assert isinstance(answers["bare"], ProbeError)
    assert "no-such-python" in answers["bare"].message
    assert isinstance(answers["stuck"], ConnectError)
    assert isinstance(answers["liar"], ProbeError)
    assert list(answers) == list(hosts)


# ---- tools that fail ------------------------------------------------------------------------------------------


def test_a_driver_that_hangs_costs_one_fact(tool):
    tool("nvidia-smi", "exec sleep 600")
    started = time.monotonic()
    facts = gathered(limit_s=1)
    assert time.monotonic() - started < 60
    assert facts.gpu_error == "no answer in 1 s"
    assert facts.interfaces


def test_a_command_that_hangs_is_killed_with_its_children(tool, tmp_path):
    tool("nvidia-smi", f"sleep 60 & echo $! > {tmp_path}/child; wait")
    gathered(limit_s=1)
    child = Path("/proc", (tmp_path / "child").read_text().strip())
    end = time.monotonic() + 30
    while child.is_dir() and "State:\tZ" not in (child / "status").read_text():
        assert time.monotonic() < end, "the child of a command that was too slow still runs"
        time.sleep(0.02)


def test_a_driver_that_does_not_know_compute_cap_is_asked_again_without_it(tool):
    row = "0, Tesla P100-PCIE-16GB, GPU-1, 16280, 0, 470.256.02, 00000000:04:00.0"
    refusal = "echo 'Field \"compute_cap\" is not a valid field to query.'; exit 2"
    tool("nvidia-smi", f"case $1 in *compute_cap*) {refusal};; esac; echo '{row}'")
    (gpu,) = gathered().gpus
    assert (gpu.name, gpu.driver, gpu.compute_capability) == ("Tesla P100-PCIE-16GB", "470.256.02", None)


def test_a_broken_driver_is_not_asked_twice(tool, tmp_path):
    seen = f"case $1 in *fabric*) ;; *) echo x >> {tmp_path}/asked ;; esac"  # its health is asked for beside
    tool("nvidia-smi", f"{seen}; echo 'Failed to initialize NVML: version mismatch'; exit 18")
    assert gathered().gpu_error == "Failed to initialize NVML: version mismatch"
    assert (tmp_path / "asked").read_text() == "x\n"


def test_interfaces_are_those_that_ip_shows():
    def by_ip(link):
        addresses = [f"{each['local']}/{each['prefixlen']}" for each in link["addr_info"]]
        return link["ifname"], link["mtu"], {"UP", "LOWER_UP"} <= set(link["flags"]), sorted(addresses)

    shown = json.loads(subprocess.run(["/sbin/ip", "-j", "addr"], capture_output=True, check=True).stdout)
    found = [(link["name"], link["mtu"], link["up"], sorted(link["addresses"])) for link in health.interfaces()]
    assert sorted(found) == sorted(by_ip(link) for link in shown if link)
    assert found


SEVERAL_ADDRESSES = """
ip link add wire type veth peer name other && ip link set wire mtu 9000 up && ip link set other up
ip addr add 10.1.0.1/24 dev wire && ip addr add 10.1.0.9/30 dev wire && ip addr add 10.9.0.1/16 dev wire label wire:x
exec "$@"
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a network of its own")
def test_each_of_several_addresses_has_its_own_prefix_length():
    program = "import json; from orchestrator.remote.health import interfaces; print(json.dumps(interfaces()))"
    words = ["unshare", "-n", "sh", "-c", SEVERAL_ADDRESSES, "sh", sys.executable, "-c", program]
    shown = subprocess.run(words, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2]).stdout
    found = {link["name"]: link for link in json.loads(shown)}
    ipv4 = [address for address in found["wire"]["addresses"] if ":" not in address]
    assert ipv4 == ["10.1.0.1/24", "10.1.0.9/30", "10.9.0.1/16"]
    assert (found["wire"]["mtu"], found["wire"]["up"], found["lo"]["up"]) == (9000, True, False)


@pytest.mark.parametrize(("text", "speed_bps"), [("2500\n", 2.5e9), ("-1\n", None), ("", None), ("4294967295\n", None)])
def test_the_speed_of_an_interface_is_what_the_kernel_writes(tmp_path, text, speed_bps):
    (tmp_path / "eno1").mkdir()
    (tmp_path / "eno1" / "speed").write_text(text)
    assert health.speed_bps("eno1", str(tmp_path)) == speed_bps
    assert health.speed_bps("gone", str(tmp_path)) is None


def test_ipv6_addresses_are_read_from_the_kernels_hex_and_global_ones_come_first():
    text = """00000000000000000000000000000001 01 80 10 80       lo
fe80000000000000d25f64fffe112233 02 40 20 80     eno1
20010db8000700000000000000000041 02 40 00 80     eno1
"""
    found = [*health.ipv6_addresses(text)]
    assert found == [("eno1", "2001:db8:7::41/64"), ("lo", "::1/128"), ("eno1", "fe80::d25f:64ff:fe11:2233/64")]


def test_an_ip_command_that_fails_is_made_up_for_by_sockets(tool):
    peers = ["127.0.0.1", "not.a.number", "256.1.1.1"]
    by_ip = gathered(peers=peers)
    tool("ip", 'echo "ip: unrecognized option: j" >&2; exit 1')
    assert gathered(peers=peers).routes == by_ip.routes
    tool("ip", "echo '[{}]'")
    assert gathered(peers=peers).routes == by_ip.routes
    assert by_ip.routes


def test_the_routes_to_hundreds_of_peers_take_one_question_for_each_way(tool, tmp_path):
    tool("ip", f'echo "$*" >> {tmp_path}/asked; exec /sbin/ip "$@"')
    peers = [f"127.0.{n // 200}.{1 + n % 200}" for n in range(600)]
    facts = gathered(peers=peers)
    assert [(way.interface, way.source) for way in facts.routes] == [("lo", "127.0.0.1")]
    assert facts.unrouted == ()
    assert len((tmp_path / "asked").read_text().splitlines()) <= probe.MAX_WAYS


def test_names_of_peers_are_looked_up_all_at_once_and_what_takes_too_long_is_left_out(tool, monkeypatch):
    slow = """
import socket, time
def find(name, *more, found=socket.getaddrinfo, **settings):
    return time.sleep(60) if "slow" in name else found(name, *more, **settings)
socket.getaddrinfo = find
"""
    monkeypatch.setattr(probe, "NAMES", slow + probe.NAMES)
    facts = gathered(peers=[*(f"slow-{n}" for n in range(50)), "localhost"], limit_s=3)
    assert facts.way_to(["localhost"]).interface == "lo"
    assert facts.unrouted == tuple(f"slow-{n}" for n in range(50))


def test_a_peer_is_an_argument_and_never_shell(tool, tmp_path):
    gathered(peers=[f"$(touch {tmp_path}/owned)", f"; touch {tmp_path}/owned", "-help"])
    assert not (tmp_path / "owned").exists()


def test_a_profile_that_hides_gpus_says_nothing_about_the_host(tool, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    assert commands.run(["sh", "-c", "echo [$CUDA_VISIBLE_DEVICES]"], 5)["out"] == "[]\n"


# ---- the work folder ------------------------------------------------------------------------------------------


def test_the_trial_of_a_work_folder_leaves_nothing_behind(tmp_path):
    facts = gathered(workdir=str(tmp_path / "a" / "b"))
    assert facts.workdir == str(tmp_path / "a" / "b")
    assert facts.workdir_error is None
    assert facts.disk_free_bytes > 0
    assert list(tmp_path.iterdir()) == []


def test_a_work_folder_that_is_there_keeps_what_it_holds(tmp_path):
    (tmp_path / "mine").write_text("x")
    assert gathered(workdir=str(tmp_path)).workdir_error is None
    assert [entry.name for entry in tmp_path.iterdir()] == ["mine"]


def test_the_trial_of_a_probe_that_was_killed_is_removed_by_a_later_one(tmp_path):
    old, new, foreign = (tmp_path / f".probe-{name}" for name in ("0" * 16, "1" * 16, "of-a-person"))
    for path in (old, new, foreign):
        path.touch()
    for path in (old, foreign):
        os.utime(path, (0, 0))
    gathered(workdir=str(tmp_path))
    assert {*tmp_path.iterdir()} == {new, foreign}


def test_a_work_folder_that_cannot_be_written_says_why(tmp_path):
    (tmp_path / "file").write_text("")
    facts = gathered(workdir=str(tmp_path / "file" / "orch"))
    assert "Not a directory" in facts.workdir_error
    assert str(tmp_path / "file") in facts.workdir_error


def test_the_home_folder_is_the_hosts_own(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert gathered(workdir="~/.orch").workdir == str(tmp_path / ".orch")


# ---- old pythons ----------------------------------------------------------------------------------------------


def test_a_python_that_is_too_old_is_answered_in_words():
    ast.parse(LOADER, feature_version=(3, 6))
    program = f"import sys; sys.version_info = (3, 8, 10, 'final', 0); exec({LOADER!r})"
    request = b'{"program": "probe", "limit_s": 0, "sources": {}}\n{"marker": "MARK"}\n'
    answer = subprocess.run([sys.executable, "-c", program], input=request, capture_output=True, check=True).stdout
    assert answer.startswith(b'MARK{"error": "python 3.8.10 ')
    assert b"is too old" in answer


def test_a_host_that_refuses_is_a_host_error():
    old = host(activate="exec sh -c 'cat >/dev/null; exit 3'")
    assert isinstance(probe_all({"old": old}, timeout_s=10)["old"], HostError)


def test_active_ports_of_devices_that_we_may_open_are_reported(tmp_path):
    """As the kernel shows two cards of which one's port is down, and a third that a container does not hand in."""
    for number, (name, state, layer, is_open) in enumerate(
        [
            ("mlx5_0", "4: ACTIVE", "Ethernet", True),
            ("mlx5_1", "1: DOWN", "InfiniBand", True),
            ("mlx5_2", "4: ACTIVE", "InfiniBand", False),
        ]
    ):
        port = tmp_path / "sys/infiniband" / name / "ports/1"
        verbs = tmp_path / f"sys/infiniband_verbs/uverbs{number}"
        for folder in (port, verbs, tmp_path / "dev"):
            folder.mkdir(parents=True, exist_ok=True)
        (port / "state").write_text(f"{state}\n")
        (port / "link_layer").write_text(f"{layer}\n")
        (verbs / "ibdev").write_text(f"{name}\n")
        if is_open:
            (tmp_path / f"dev/uverbs{number}").touch()
    (tmp_path / "sys/infiniband_verbs/abi_version").write_text("6\n")
    assert health.rdma_ports(f"{tmp_path}/sys", f"{tmp_path}/dev") == [{"device": "mlx5_0", "link_layer": "Ethernet"}]
    assert health.rdma_ports(f"{tmp_path}/none") == []


def test_the_maker_of_the_cpu_is_reported_as_the_kernel_has_it():
    said = [
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "vendor_id" in line
    ]
    assert health.cpu_vendor() == (said[0] if said else None)


def test_a_torch_that_loads_slowly_is_given_more_time_and_never_called_absent(tmp_path, monkeypatch):
    (tmp_path / "torch.py").write_text("import time\ntime.sleep(4)\nraise ImportError('came late')\n")
    slow = host(activate=f"export PYTHONPATH={tmp_path}", workdir=tmp_path / "work")
    monkeypatch.setattr(probing, "TORCH_S", 1.0)
    monkeypatch.setattr(probing, "SLOW_TORCH_S", 2.0)
    facts, _ = probing.look(slow, [], torch=True, timeout_s=30)
    assert facts.torch_is_slow
    found = checks.unusable(node(), facts)
    assert f"torch did not load within 2 s in {sys.executable}" in found.message and "`orch up` again" in found.remedy
    assert "no torch" not in found.message and "orch setup" not in found.remedy
    monkeypatch.setattr(probing, "SLOW_TORCH_S", 60.0)
    facts, _ = probing.look(slow, [], torch=True, timeout_s=30)
    assert "came late" in facts.torch_error and "no torch" in checks.unusable(node(), facts).message


# ---- one work folder of several hosts ---------------------------------------------------------------------------


@needs_sshd
def test_alike_hosts_are_tried_at_once_over_the_connections_that_are_open(tmp_path, monkeypatch):
    """Hosts of one image have folders of one path and one inode each, and a fleet of them is not logged in to again."""
    folders = {"g1": "one", "g2": "other", "g3": "one", "g4": "third"}
    with running_sshd(tmp_path) as server, Connections(Home(tmp_path / "home")) as connections:
        there = server.target()
        address = {"host": there.host, "port": there.port, "user": there.user, "host_key": server.host_key()}
        nodes = [
            Node(name=name, workdir=f"{tmp_path}/{at}", key_file=there.key_file, python=sys.executable, **address)
            for name, at in folders.items()
        ]
        facts = {}

        def all_answer():  # on a busy machine a login may not be over in time
            waiting = [node for node in nodes if node.name not in facts]
            found = connections.each(
                waiting, lambda host: probe_host(host, [], torch=False, timeout_s=60), deadline_s=60
            )
            facts.update(values(found))
            return len(facts) == len(nodes)

        wait_for(all_answer, "four hosts", 120)
        logins = server.logins()
        alike = {
            name: known.model_copy(update={"workdir": "/srv/orch", "workdir_inode": 7, "boot_id": name})
            for name, known in facts.items()
        }
        asked = []
        monkeypatch.setattr(
            probing,
            "ask",
            lambda host, what, request, **more: asked.append(request["action"]) or ask(host, what, request, **more),
        )
        assert probing.shared_folders(connections, alike) == (("g1", "g3"),)
        assert server.logins() == logins
        assert asked == ["leave"] * 4 + ["look"] * 4 + ["remove"] * 4
        assert probing.shared_folders(connections, facts) == ()  # one machine, to which no host is like
        alone = {name: alike[name] for name in ("g2", "g4")}
        assert probing.shared_folders(connections, alone) == ()
    assert [path for path in map(tmp_path.joinpath, folders.values()) if path.exists()] == []
