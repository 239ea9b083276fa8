#!/usr/bin/env python3
"""A cluster on one Linux machine: every node of an inventory becomes a host of its own, reached by real OpenSSH.

    sudo .venv/bin/python deploy/lab.py up inventory/lab.yaml
    sudo .venv/bin/python deploy/lab.py exec -- orch up inventory/lab.yaml      # in the controller's network
    sudo .venv/bin/python deploy/lab.py link a2000 rate 1Gbps loss 5%           # break a link; `link a2000 up` mends it
    sudo .venv/bin/python deploy/lab.py power a2000 off
    sudo .venv/bin/python deploy/lab.py down

Each host has its own network with the inventory's address, interface and bandwidth, its own host name, processes, boot
id, /tmp, /run and /home, one ordinary user, and an sshd with its own host key. Nothing has a route out, nothing of the
machine itself is changed, and `down` leaves nothing. It needs root, iproute2, nftables and openssh-server.

`lab_net.py` beside this file makes the links; `lab_host.py` is the inside of a host, `lab_enter.py` the way into one.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import pwd
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import lab_enter
import lab_host
import lab_net
import lab_plan
from lab_host import HostSpec
from lab_plan import Lab, LabHost

from orchestrator.errors import HostError, OrchError, UsageError
from orchestrator.files import locked, write_atomic
from orchestrator.units import format_bandwidth

if TYPE_CHECKING:
    from orchestrator.hosts.inventory import Inventory

STATE = Path("/run/orch-lab")
DISKS = Path("/var/lib/orch-lab")  # /run is often a small tmpfs, too small for a job's checkpoints
KEY = STATE / "id_ed25519"
HOST_SCRIPT = Path(lab_host.__file__).resolve()
START_S = 20.0
PACKAGES = {
    "ip": "iproute2",
    "tc": "iproute2",
    "nft": "nftables",
    "sshd": "openssh-server",
    "ssh-keygen": "openssh-client",
    "ssh-keyscan": "openssh-client",
    "nsenter": "util-linux",
    "unshare": "util-linux",
}


# ---- what a person types


def main(argv: Sequence[str]) -> int:
    """Words after `--` are a command to run and are never read as ours."""
    words = list(argv)
    end = words.index("--") if "--" in words else len(words)
    arguments = _parser().parse_args(words[:end])
    arguments.command = words[end + 1 :]
    try:
        _check_machine()
        arguments.do(arguments)
    except OrchError as error:
        print(f"lab: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"lab: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="lab.py", description="A cluster on one Linux machine.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, do: object, text: str, *, picks: bool = True) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(do=do)
        if picks:
            sub.add_argument("--cluster", help="which lab, when several stand")
        return sub

    sub = command("up", do_up, "make every node of an inventory a host", picks=False)
    sub.add_argument("inventory", type=Path)
    sub.add_argument("--bind", action="append", default=[], metavar="DIR[:TARGET]", help="show a folder, read-only")
    sub = command("down", do_down, "end a lab's processes and remove all of it", picks=False)
    sub.add_argument("lab", nargs="?", metavar="CLUSTER|INVENTORY")
    sub.add_argument("--all", action="store_true", help="every lab of this machine")
    command("list", do_list, "the labs that stand, and their hosts", picks=False)
    command("exec", do_exec, "run a command as you, in the controller's network: exec -- COMMAND...")
    command("shell", do_shell, "a shell in the controller's network")
    sub = command("host", do_host, "run a command on a host, as its root: host NODE -- COMMAND...")
    sub.add_argument("node")
    sub.add_argument("--as-user", action="store_true", help="as the host's ordinary user")
    sub = command("link", do_link, "the whole state of a link; what is not named is as in the inventory")
    sub.add_argument("node")
    sub.add_argument("words", nargs="+", metavar="down | up | rate 1Gbps | loss 5%% | drop-over BYTES")
    sub = command("power", do_power, "cut a host's power, or give it back")
    sub.add_argument("node")
    sub.add_argument("state", choices=("on", "off"))
    command("key", do_key, "the path of the private key that opens every host", picks=False)
    return parser


def do_up(arguments: argparse.Namespace) -> None:
    binds = [lab_plan.parse_bind(text) for text in arguments.bind]
    lab = lab_plan.plan(_read(arguments.inventory), sys.executable, binds)
    start = time.monotonic()
    with _lock():
        up(lab)
    print(f"lab {lab.cluster}: {len(lab.hosts)} hosts after {time.monotonic() - start:.1f} s; key {KEY}")
    for host in lab.hosts:
        print(f"  {_describe(host)}")
    print(f"next: deploy/lab.py exec --cluster {lab.cluster} -- orch up {arguments.inventory}, or deploy/lab.py shell")


def do_down(arguments: argparse.Namespace) -> None:
    if arguments.all:
        clusters = _clusters()
    else:
        clusters = [_cluster_named(arguments.lab) if arguments.lab else _pick(None).cluster]
    with _lock():
        for cluster in clusters:
            remove(cluster)
            print(f"lab {cluster}: removed")


def do_list(_: argparse.Namespace) -> None:
    for cluster in _clusters():
        try:
            lab = load(cluster)
        except UsageError:
            print(f"{cluster}  only remains: deploy/lab.py down {cluster}")
            continue
        print(cluster)
        for host in lab.hosts:
            print(f"  {_describe(host)}  {'on' if lab_enter.init_of(host) else 'off'}")


def do_exec(arguments: argparse.Namespace) -> NoReturn:
    lab = _pick(arguments.cluster)
    command = arguments.command or _usage("write the command after --, like: exec -- orch status")
    _become([*lab_enter.controller(lab.cluster), *_as_caller(), *command])


def do_shell(arguments: argparse.Namespace) -> NoReturn:
    arguments.command = [os.environ.get("SHELL", "/bin/sh")]
    do_exec(arguments)


def do_host(arguments: argparse.Namespace) -> NoReturn:
    lab = _pick(arguments.cluster)
    host = lab.host(arguments.node)
    command = arguments.command or _usage("write the command after --, like: host NODE -- ps aux")
    _become([*lab_enter.on_host(lab, host, as_user=arguments.as_user), *command])


def do_link(arguments: argparse.Namespace) -> None:
    port = _pick(arguments.cluster).host(arguments.node).port
    link = lab_plan.parse_link(arguments.words, port.bandwidth_bps)
    with _lock():
        if not (lab_net.NETNS / port.namespace).exists():
            raise HostError(port.node, "its power is off, and so is its link", f"deploy/lab.py power {port.node} on")
        lab_net.set_link(port, link)


def do_power(arguments: argparse.Namespace) -> None:
    lab = _pick(arguments.cluster)
    host = lab.host(arguments.node)
    with _lock():
        if arguments.state == "off":
            lab_net.unplug(host.port)
        elif lab_enter.init_of(host) is None:
            power_on(lab, host)


def do_key(_: argparse.Namespace) -> None:
    with _lock():
        _make_login_key()
    print(KEY)


# ---- making and removing


def up(lab: Lab) -> None:
    """Makes the lab and waits until every sshd answers. What an earlier lab of this name left is removed first; if
    one host fails, nothing is left. Raises HostError with what that host said last.
    """
    remove(lab.cluster)
    try:
        _make_login_key()
        write_atomic(_state(lab.cluster) / "lab.json", lab_plan.to_json(lab), 0o644)
        _state(lab.cluster).chmod(0o755)
        lab_net.create_hub(lab.cluster, lab.controller_addresses)
        for host in lab.hosts:
            _prepare(lab, host)
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda host: power_on(lab, host), lab.hosts))
        write_atomic(_state(lab.cluster) / "known_hosts", "".join(map(_known_host, lab.hosts)), 0o644)
    except BaseException:
        remove(lab.cluster)
        raise


def remove(cluster: str) -> None:
    """Ends every process of this lab and removes all that it is made of, its hosts' disks too."""
    lab_net.remove(lab_net.namespaces(cluster))
    for folder in (DISKS / cluster, STATE / cluster):
        if folder.exists():
            shutil.rmtree(folder)


def power_on(lab: Lab, host: LabHost) -> None:
    """Plugs the host in, starts it, and waits for its sshd. Raises HostError with what it said last."""
    lab_net.unplug(host.port)  # remains, if it failed half way
    lab_net.plug(host.port)
    folder = _state(lab.cluster) / host.name
    unshare = ["unshare", "--mount", "--uts", "--ipc", "--pid", "--fork", "--"]
    program = [lab.python, "-I", str(HOST_SCRIPT), str(folder / "host.json")]
    with open(folder / "console.log", "ab") as console:
        starter = subprocess.Popen(
            [*lab_net.enter(host.port.namespace), *unshare, *program],
            stdin=subprocess.DEVNULL,
            stdout=console,
            stderr=console,
            env={"PATH": lab_host.SYSTEM_PATH},
            cwd="/",
            start_new_session=True,
        )
    deadline = time.monotonic() + START_S
    while not _answers(host):
        if starter.poll() is not None or time.monotonic() > deadline:
            said = (folder / "console.log").read_text(errors="replace").strip().splitlines()
            raise HostError(host.name, f"its sshd does not answer: {said[-1] if said else 'it said nothing'}")
        time.sleep(0.02)


def _prepare(lab: Lab, host: LabHost) -> None:
    """The host's folder: its key, its identity, and all that its first process has to know."""
    folder = _state(lab.cluster) / host.name
    (folder / "root").mkdir(parents=True)
    _make_key(folder / "host_key", host.name)
    others = tuple((other.address, other.name) for other in lab.hosts if other is not host)
    spec = HostSpec(
        name=host.name,
        user=host.user,
        port=host.ssh_port,
        hosts=others,
        machine_id=uuid.uuid4().hex,
        python=lab.python,
        binds=lab.binds,
        root=str(folder / "root"),
        disk=str(DISKS / lab.cluster / host.name),
        host_key=str(folder / "host_key"),
        authorized_key=KEY.with_suffix(".pub").read_text(),
    )
    write_atomic(folder / "host.json", json.dumps(dataclasses.asdict(spec), indent=2) + "\n")


def _known_host(host: LabHost) -> str:
    key = (_state(host.port.cluster) / host.name / "host_key.pub").read_text().rsplit(" ", 1)[0]
    place = host.ssh_address if host.ssh_port == 22 else f"[{host.ssh_address}]:{host.ssh_port}"
    return f"{place} {key}\n"


def _answers(host: LabHost) -> bool:
    """Whether the controller gets the host's key from its sshd."""
    scan = ["ssh-keyscan", "-T", "2", "-t", "ed25519", "-p", str(host.ssh_port), host.ssh_address]
    controller = lab_net.enter(lab_net.controller_namespace(host.port.cluster))
    return bool(subprocess.run([*controller, *scan], capture_output=True).stdout)


def _make_login_key() -> None:
    """One key opens every host of every lab; it belongs to whoever called sudo."""
    if not KEY.exists():
        _make_key(KEY, "orch-lab")
    os.chown(KEY, int(os.environ.get("SUDO_UID", "0")), int(os.environ.get("SUDO_GID", "0")))


def _make_key(path: Path, comment: str) -> None:
    lab_net.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", str(path)])


# ---- finding a lab, and becoming its command


def load(cluster: str) -> Lab:
    """Raises UsageError when no such lab stands."""
    try:
        text = (_state(cluster) / "lab.json").read_text()
    except OSError:
        standing = ", ".join(_clusters()) or "none"
        raise UsageError(f"no lab {cluster!r} stands here", f"standing: {standing}") from None
    return lab_plan.from_json(text)


def _state(cluster: str) -> Path:
    return STATE / cluster


def _clusters() -> list[str]:
    """All of which anything is left."""
    tops = [top for top in (STATE, DISKS) if top.is_dir()]
    return sorted({folder.name for top in tops for folder in top.iterdir() if folder.is_dir()} | lab_net.clusters())


def _pick(cluster: str | None) -> Lab:
    """The lab of this name; without one, the only lab that stands."""
    standing = _clusters()
    if cluster is None and not standing:
        raise UsageError("no lab stands here", "deploy/lab.py up INVENTORY")
    if cluster is None and len(standing) > 1:
        raise UsageError(f"several labs stand here: {', '.join(standing)}", "say which with --cluster NAME")
    return load(cluster or standing[0])


def _cluster_named(text: str) -> str:
    """The name itself, or that which an inventory gives."""
    if text in _clusters():
        return text
    if Path(text).is_file():
        return _read(Path(text)).cluster
    return load(text).cluster


def _read(path: Path) -> Inventory:
    from orchestrator.hosts.inventory_file import load_inventory

    return load_inventory(path)


def _describe(host: LabHost) -> str:
    rate = format_bandwidth(host.port.bandwidth_bps) if host.port.bandwidth_bps else "unshaped"
    return f"{host.name}  {host.user}@{host.ssh_address}:{host.ssh_port}  {host.port.interface}  {rate}"


@contextlib.contextmanager
def _lock() -> Iterator[None]:
    """One change at a time, whatever the lab: network names and process numbers belong to the whole machine."""
    STATE.mkdir(mode=0o755, exist_ok=True)
    STATE.chmod(0o755)
    with locked(STATE / "lock"):
        yield


def _as_caller() -> list[str]:
    """sudo made us root; the command runs as whoever called sudo."""
    if "SUDO_UID" not in os.environ:
        return []
    person = pwd.getpwuid(int(os.environ["SUDO_UID"]))
    identity = [f"HOME={person.pw_dir}", f"USER={person.pw_name}", f"LOGNAME={person.pw_name}"]
    drop = ["setpriv", f"--reuid={person.pw_uid}", f"--regid={person.pw_gid}", "--init-groups", "--"]
    return [*drop, "env", *identity]


def _become(argv: list[str]) -> NoReturn:
    sys.stdout.flush()
    os.execvp(argv[0], argv)


def _usage(message: str) -> NoReturn:
    raise UsageError(message)


def _check_machine() -> None:
    """Raises UsageError, in one line, unless this machine can hold a lab."""
    if not sys.platform.startswith("linux"):
        raise UsageError("a lab needs Linux", "use `transport: local` here")
    if os.geteuid() != 0:
        raise UsageError("a lab needs root", f"sudo {sys.executable} {' '.join(sys.argv)}")
    path = os.environ.get("PATH", "").split(":")
    os.environ["PATH"] = ":".join([*path, *(f for f in lab_host.SYSTEM_PATH.split(":") if f not in path)])
    missing = {package for tool, package in PACKAGES.items() if not shutil.which(tool)}
    if missing:
        names = " ".join(sorted(missing))
        raise UsageError(f"a lab needs {names}", f"apt-get install {names}")
    allowed = subprocess.run(["unshare", "--net", "--mount", "--pid", "--fork", "true"], capture_output=True, text=True)
    if allowed.returncode:
        raise UsageError(f"this root may not make namespaces: {allowed.stderr.strip()}", "is it inside a container?")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
