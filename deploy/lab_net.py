"""The lab's network: a namespace for each host, one bridge between them, links that are shaped and broken on purpose.

    hub    = create_hub(cluster, {"192.168.1.254/24"})       # the bridge, and the controller beside it
    port   = Port(...); plug(port)                           # a cable from the bridge to one host
    set_link(port, Link(rate_bps=1e9, loss=0.05)); unplug(port)

Every namespace of a cluster is named `orch-<cluster>-hub`, `-controller` or `-host:<node>`. No name holds a colon, so
no cluster can be mistaken for a part of another, and only these are ever deleted. There is no route out of any of them.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import subprocess
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator.errors import OrchError

NETNS = Path("/run/netns")
BRIDGE = "br0"

# A bucket must hold a whole 64 KiB segmentation burst, or tc cuts it into frames at a high cost in CPU.
BURST_BYTES = 128 * 1024
BURST_S = 1e-3  # and yet a slow link must not let a second's worth through at once
FRAME_BYTES = 1600  # a bucket of one frame: tc then cuts every burst into frames (at most some 300 Mbps, measured)
QUEUE_S = 20e-3
UNSHAPED_BPS = 10e9


@dataclass(frozen=True)
class Port:
    """One host's cable. number: its place on the bridge; addresses: with prefix, as `ip` takes them."""

    cluster: str
    node: str
    number: int
    interface: str
    addresses: tuple[str, ...]
    mac: str
    bandwidth_bps: float | None

    @property
    def namespace(self) -> str:
        return host_namespace(self.cluster, self.node)

    @property
    def hub_interface(self) -> str:
        return f"port{self.number}"


@dataclass(frozen=True)
class Link:
    """The whole state of a cable. loss: 0..1 of the packets each way; drop_over: larger IP packets vanish (bytes)."""

    up: bool = True
    rate_bps: float | None = None
    loss: float = 0.0
    drop_over: int | None = None


def hub_namespace(cluster: str) -> str:
    return f"orch-{cluster}-hub"


def controller_namespace(cluster: str) -> str:
    return f"orch-{cluster}-controller"


def host_namespace(cluster: str, node: str) -> str:
    return f"orch-{cluster}-host:{node}"


def enter(namespace: str) -> list[str]:
    """The start of an argv that runs the rest of it in this network namespace, and changes nothing else."""
    return ["nsenter", f"--net={NETNS / namespace}", "--"]


def clusters() -> set[str]:
    """Those that a namespace of this machine belongs to."""
    names = os.listdir(NETNS) if NETNS.is_dir() else []
    return {match[1] for name in names if (match := re.fullmatch(r"orch-([^:]+)-(hub|controller|host:.*)", name))}


def namespaces(cluster: str) -> list[str]:
    """Those of this cluster that exist now."""
    fixed = {hub_namespace(cluster), controller_namespace(cluster)}
    names = os.listdir(NETNS) if NETNS.is_dir() else []
    return sorted(n for n in names if n in fixed or n.startswith(host_namespace(cluster, "")))


def run(argv: Sequence[str], *, stdin: str = "") -> str:
    """Standard output. Raises OrchError with the program's own words."""
    done = subprocess.run(argv, input=stdin, capture_output=True, text=True)
    if done.returncode:
        said = (done.stderr or done.stdout).strip() or f"exit code {done.returncode}"
        raise OrchError(f"{' '.join(argv)}: {said}")
    return done.stdout


def create_hub(cluster: str, controller_addresses: Iterable[str]) -> None:
    """The bridge in a namespace of its own, and the controller, unshaped, with an address in every subnet."""
    hub, controller = hub_namespace(cluster), controller_namespace(cluster)
    for namespace in (hub, controller):
        _create_namespace(namespace)
    _ip(hub, "link", "add", BRIDGE, "type", "bridge")
    _ip(hub, "link", "set", BRIDGE, "up")
    _cable(hub, "controller", controller, "eth0")
    _address(controller, "eth0", controller_addresses)


def plug(port: Port) -> None:
    """A fresh namespace for this host, and a shaped cable to it."""
    _create_namespace(port.namespace)
    _cable(hub_namespace(port.cluster), port.hub_interface, port.namespace, port.interface, mac=port.mac)
    _address(port.namespace, port.interface, port.addresses)
    for namespace, interface in _ends(port):
        _shape(namespace, interface, port.bandwidth_bps)


def unplug(port: Port) -> None:
    """Removes the cable first, so that the other hosts see silence and no farewell, then the host's namespace."""
    hub = hub_namespace(port.cluster)
    if f"{port.hub_interface}@" in run(["ip", "-n", hub, "-o", "link", "show"]):
        _ip(hub, "link", "delete", port.hub_interface)
    remove([port.namespace])


def set_link(port: Port, link: Link) -> None:
    """Makes the cable so. Raises OrchError where tc or nft refuses."""
    broken = bool(link.loss or link.drop_over)
    for namespace, interface in _ends(port):
        _shape(namespace, interface, link.rate_bps or (UNSHAPED_BPS if broken else None), by_frame=broken)
        _drop(namespace, interface, link)
    # At the bridge's end, as a pulled cable is: the host keeps its address and its routes, and loses the carrier.
    _ip(hub_namespace(port.cluster), "link", "set", port.hub_interface, "up" if link.up else "down")


def remove(names: Iterable[str]) -> None:
    """Ends every process in these namespaces, then deletes them. A name that does not exist is no error."""
    there = [name for name in names if (NETNS / name).exists()]
    _end_processes(there)
    for name in there:
        run(["ip", "netns", "delete", name])


def processes(names: Iterable[str]) -> list[int]:
    """The processes in any of these namespaces, as this machine numbers them."""
    wanted = {_identity(NETNS / name) for name in names}
    pids = (int(entry) for entry in os.listdir("/proc") if entry.isdigit())
    return [pid for pid in pids if _network_of(pid) in wanted]


def _end_processes(names: Sequence[str], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while pids := processes(names):
        if time.monotonic() > deadline:
            raise OrchError(f"processes {pids} of {', '.join(names)} do not end", "see what they wait for with ps")
        if os.getpid() in pids:
            raise OrchError("this shell is inside the lab that it would remove", "leave it first (exit)")
        with contextlib.ExitStack() as handles:
            _kill(pids, {_identity(NETNS / name) for name in names}, handles)


def _kill(pids: Sequence[int], wanted: set[tuple[int, int]], handles: contextlib.ExitStack) -> None:
    """A pidfd holds on to the process that we looked at, so a reused number is never signalled."""
    poll = select.poll()
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            handle = os.pidfd_open(pid)
            handles.callback(os.close, handle)
            if _network_of(pid) in wanted:
                signal.pidfd_send_signal(handle, signal.SIGKILL)
                poll.register(handle, select.POLLIN)
    poll.poll(100)


def _ends(port: Port) -> tuple[tuple[str, str], tuple[str, str]]:
    return (hub_namespace(port.cluster), port.hub_interface), (port.namespace, port.interface)


def _identity(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_dev, status.st_ino


def _network_of(pid: int) -> tuple[int, int] | None:
    try:
        return _identity(Path(f"/proc/{pid}/ns/net"))
    except OSError:  # it ended, or is a zombie
        return None


def _ip(namespace: str, *words: str) -> None:
    run(["ip", "-n", namespace, *words])


def _create_namespace(namespace: str) -> None:
    run(["ip", "netns", "add", namespace])
    _ip(namespace, "link", "set", "lo", "up")


def _cable(hub: str, hub_interface: str, namespace: str, interface: str, mac: str | None = None) -> None:
    hardware = ["address", mac] if mac else []
    ends = [interface, "mtu", "1500", *hardware, "netns", namespace]
    _ip(hub, "link", "add", hub_interface, "mtu", "1500", "type", "veth", "peer", "name", *ends)
    _ip(hub, "link", "set", hub_interface, "master", BRIDGE, "up")
    _ip(namespace, "link", "set", interface, "up")


def _address(namespace: str, interface: str, addresses: Iterable[str]) -> None:
    for address in addresses:
        # An IPv6 address would else stay unusable for a second, while its duplicates are looked for.
        _ip(namespace, "address", "add", address, "dev", interface, *(["nodad"] if ":" in address else []))


def _shape(namespace: str, interface: str, rate_bps: float | None, *, by_frame: bool = False) -> None:
    """What this end sends is held to the rate. Without a rate, nothing is."""
    if rate_bps is None:
        subprocess.run(["tc", "-n", namespace, "qdisc", "delete", "dev", interface, "root"], capture_output=True)
        return
    burst = FRAME_BYTES if by_frame else max(FRAME_BYTES, min(BURST_BYTES, round(rate_bps / 8 * BURST_S)))
    bucket = ["rate", f"{round(rate_bps)}bit", "burst", str(burst), "latency", f"{QUEUE_S * 1000:.0f}ms"]
    run(["tc", "-n", namespace, "qdisc", "replace", "dev", interface, "root", "tbf", *bucket])


def _drop(namespace: str, interface: str, link: Link) -> None:
    """What this end receives is dropped by these rules, after the other end's shaper cut it into frames.

    Dropping at the bridge instead would meet segmentation bursts of 64 KiB and take them for single large packets.
    """
    rules = [f"meta length > {link.drop_over} drop"] if link.drop_over else []
    rules += [f"numgen random mod 10000 < {round(link.loss * 10000)} drop"] if link.loss else []
    text = "table netdev orch\ndelete table netdev orch\n"  # named first, so that there is one to delete
    if rules:
        chain = "\n".join([f'type filter hook ingress device "{interface}" priority 0', *rules])
        text += f"table netdev orch {{\nchain in {{\n{chain}\n}}\n}}\n"
    run([*enter(namespace), "nft", "-f", "-"], stdin=text)
