"""What a host is: takes the raw answer of `remote/probe.py`, gives a frozen `NodeFacts`. Pure: one small parser a fact.

    facts = parse_facts("v100", answer, sent_at=before, received_at=after)
    facts.gpus[0].name, facts.torch.version      # "Tesla V100-PCIE-16GB", "2.0.1"

A fact that a host cannot give (no driver, no torch, no `ip`) is None or empty beside a line that says why. An answer
that makes no sense is refused with ProbeError: hosts are not trusted. Counts are capped, text is cut and printable.
"""

from __future__ import annotations

import ipaddress
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from typing_extensions import Self

from orchestrator.errors import ProbeError
from orchestrator.text import one_line

MAX_GPUS = 64
MAX_OCCUPANTS = 256
MAX_INTERFACES = 256
MAX_PEERS = 2048
MAX_ADDRESSES = 1024
MAX_TEXT = 200
MAX_WORDS = 1000
NOT_FOUND = 127
MIB = 1 << 20
# Flags of an interface that is up and has a carrier: IFF_UP and IFF_RUNNING of netdevice(7).
UP, RUNNING = 0x1, 0x40

Count = Annotated[int, Field(ge=0, lt=1 << 63)]
Text = Annotated[str, Field(max_length=MAX_TEXT)]
Peer = Annotated[str, Field(max_length=300)]
"""An address or a name, from the inventory."""
Command = Mapping[str, Any]
Found = TypeVar("Found")


class Fact(BaseModel):
    """Frozen, goes to JSON and back; what a newer version stored besides is left out."""

    model_config = ConfigDict(frozen=True, defer_build=True, extra="ignore", allow_inf_nan=False)

    @classmethod
    def of(cls, **fields: Any) -> Self:
        """From a host's own values, strictly: its "1" is not 1."""
        return cls.model_validate(fields, strict=True)


class Occupant(Fact):
    """A process that was on a GPU when the host was asked."""

    pid: Count
    memory_bytes: Count | None = None
    """The GPU memory that it uses; None where the driver does not say."""
    user: Text | None = None
    """Its owner; None where the system hides it, as in a container."""
    command: Text | None = None
    """Its program and script, like "python3 train.py"."""
    job: Text | None = None
    """The job of orch that it belongs to, where we may know."""


class Gpu(Fact):
    index: Annotated[int, Field(ge=0, lt=1024)]
    name: Text
    uuid: Text
    memory_bytes: Count
    """What the driver reports; 0 where it does not say, as on GPUs that share the host's memory."""
    memory_used_bytes: Count
    driver: Text
    bus_id: Text
    compute_capability: Text | None = None
    """Like "8.6"; None with drivers that do not report it."""
    compute_mode: Text = "Default"
    """Or "Exclusive_Process": for one process at a time; or "Prohibited": for none."""
    occupants: tuple[Occupant, ...] = ()

    @property
    def is_closed(self) -> bool:
        return self.compute_mode == "Prohibited"


class Interface(Fact):
    name: Text
    addresses: tuple[Text, ...] = ()
    """With prefix length, like "192.168.1.41/24"."""
    mtu: Count
    speed_bps: Annotated[float, Field(gt=0)] | None = None
    up: bool
    """Switched on and with a carrier."""


class Route(Fact):
    """One route from this host to others."""

    interface: Text
    source: Text
    """The host's own address on that route."""
    peers: tuple[Peer, ...] = ()
    """Who is reached on it, as was asked; empty on the way to all that no other route names."""

    @model_validator(mode="before")
    @classmethod
    def _of_one_peer(cls, fields: Any) -> Any:
        """Once there was a route for each peer."""
        if isinstance(fields, dict) and "peer" in fields:
            return {"peers": (fields["peer"],), **fields}
        return fields


class RdmaPort(Fact):
    """A port of an InfiniBand or RoCE device, active and open to our user."""

    device: Text
    link_layer: Text
    """ "InfiniBand" or "Ethernet"."""


class TorchFacts(Fact):
    version: Text
    cuda: Text | None = None
    """CUDA version of the build; None for a CPU build."""
    nccl: Text | None = None
    """Version of the NCCL library that this torch loads."""
    verbs: bool | None = None
    """Whether libibverbs is there, through which NCCL uses InfiniBand; None where an older orch looked."""
    cudnn: Text | None = None
    arch_list: tuple[Text, ...] = ()
    """What the build was compiled for, like "sm_70", "compute_90"; empty where unknown."""
    torchvision: Text | None = None
    torchvision_error: Text | None = None
    gloo: bool
    nccl_available: bool
    devices: Annotated[int, Field(ge=0, lt=1024)] = 0
    """GPUs that torch itself can use."""
    cuda_error: Text | None = None
    """What torch said when it looked for GPUs, if anything."""


class NodeFacts(Fact):
    """All that one probe found out about one host."""

    node: Text
    hostname: Text
    hostname_addresses: tuple[Text, ...] = ()
    """What the host's own name leads to; empty where it leads nowhere."""
    os: Text
    kernel: Text
    machine: Text
    cores: Annotated[int, Field(ge=1, lt=1 << 16)]
    """Those that our processes may use."""
    cpu_vendor: Text | None = None
    """Like "GenuineIntel"; None where the kernel does not say, or an older orch looked."""
    memory_bytes: Count
    disk_free_bytes: Count
    """Free for us on the file system of the work folder."""
    disk_free_inodes: Count | None = None
    """The same; None where that file system makes inodes as it goes."""
    shm_bytes: Count
    clock_offset_s: float
    """The host's clock minus ours, give or take `clock_error_s`."""
    clock_error_s: Annotated[float, Field(ge=0)] = 0.0
    boot_id: Text
    machine_id: Text
    user: Text
    uid: Count
    python_version: Text
    python_executable: Annotated[str, Field(max_length=4096)]
    gpus: tuple[Gpu, ...] = ()
    gpu_error: Text | None = None
    torch: TorchFacts | None = None
    torch_error: Text | None = None
    """Why there is no torch; None as well as `torch` when it was not asked for."""
    interfaces: tuple[Interface, ...] = ()
    rdma: tuple[RdmaPort, ...] | None = None
    """Active InfiniBand and RoCE ports; None where an older orch looked."""
    routes: tuple[Route, ...] = ()
    """The ways to the other hosts; first the one to the first of them."""
    unrouted: tuple[Peer, ...] = ()
    """The other hosts, as was asked, that this one knows no way to."""
    workdir: Annotated[str, Field(max_length=4096)]
    """Absolute path on the host."""
    workdir_error: Text | None = None
    """Why it cannot be written."""
    workdir_unfit: (
        tuple[Annotated[str, Field(max_length=MAX_WORDS)], Annotated[str, Field(max_length=MAX_WORDS)]] | None
    ) = None
    """Why it may not be used, and what to try: others may write there, or it is not ours."""

    def training_interface(self, name: str | None, address: str | None) -> Interface | None:
        """The interface that a job would use: the named one, the one that carries `address`, else the first routed."""
        by_name = {interface.name: interface for interface in self.interfaces}
        if name:
            return by_name.get(name)
        for interface in self.interfaces if address else ():
            if address in [own.partition("/")[0] for own in interface.addresses]:
                return interface
        return by_name.get(self.routes[0].interface) if self.routes else None

    def way_to(self, peers: Iterable[str]) -> Route | None:
        """The first way that leads to one of these, addresses or names as were asked."""
        wanted = set(peers)
        rest = wanted.difference(self.unrouted, *(route.peers for route in self.routes))
        return next(
            (route for route in self.routes if (wanted.intersection(route.peers) if route.peers else rest)), None
        )


def parse_facts(
    node: str, raw: Mapping[str, Any], sent_at: float, received_at: float, peers: Sequence[str] = ()
) -> NodeFacts:
    """node: its name in the inventory. raw: the probe's answer. sent_at, received_at: our wall clock around the probe.
    peers: those that it was asked the route to.

    Raises ProbeError naming the node and the fact that makes no sense.
    """

    def fact(name: str, parse: Callable[..., Found], *inputs: Any) -> Found:
        try:
            return parse(*inputs)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RecursionError) as error:
            raise ProbeError(node, f"its answer about {name} makes no sense ({_reason(error)})") from error

    commands, files, values = (fact("itself", _mapping, raw.get(part)) for part in ("commands", "files", "values"))
    gpus, gpu_error = fact("GPUs", parse_gpus, commands.get("nvidia-smi"), values.get("occupants", []))
    torch, torch_error = fact("torch", parse_torch, commands.get("torch"))
    interfaces = fact("interfaces", parse_interfaces, commands.get("ip addr"), files, values)
    routes, unrouted = fact("routes", parse_routes, commands, values, interfaces, peers)
    found = {
        "node": node,
        "hostname_addresses": fact("its own name", parse_own_name, commands.get("own name")),
        "os": fact("its system", parse_os_release, files.get("/etc/os-release", "")),
        "memory_bytes": fact("memory", parse_meminfo, files.get("/proc/meminfo", "")),
        **fact("its clock", parse_clock, values, sent_at, received_at),
        "boot_id": fact("its boot", clean, files.get("/proc/sys/kernel/random/boot_id", "")),
        "machine_id": fact("its machine id", clean, files.get("/etc/machine-id", "")),
        "gpus": gpus,
        "gpu_error": gpu_error,
        "torch": torch,
        "torch_error": torch_error,
        "interfaces": interfaces,
        "rdma": fact("InfiniBand", parse_rdma, values),
        "routes": routes,
        "unrouted": unrouted,
        **fact("its work folder", parse_workdir, commands.get("workdir")),
        **fact("its system", parse_process, values),
    }
    return fact("itself", lambda: NodeFacts.of(**found))


# ---- GPUs and torch -------------------------------------------------------------------------------------------


def parse_gpus(command: Command | None, occupants: Any) -> tuple[tuple[Gpu, ...], str | None]:
    """The rows of nvidia-smi, by index, with who is there; else no GPU and the first thing it said that is no row."""
    if error := _failure(command):
        said = f"{(command or {})['out']}\n{(command or {})['err']}".splitlines()
        return (), next((clean(line) for line in said if line.strip() and line.count(",") < 6), error)
    rows = [row for row in str((command or {})["out"]).splitlines() if row.strip()]
    if len(rows) > MAX_GPUS:
        raise ValueError(f"{len(rows)} GPUs")
    there = _occupants(occupants)
    gpus = tuple(sorted((_gpu(row, there) for row in rows), key=lambda gpu: gpu.index))
    if len({gpu.uuid for gpu in gpus}) < len(gpus):
        raise ValueError("two GPUs with one uuid")
    return gpus, None


def _gpu(row: str, occupants: Mapping[str, Sequence[Occupant]]) -> Gpu:
    """What a driver does not know is not asked for: the columns after the first seven may be missing."""
    fields = [clean(field) for field in row.split(",")]
    if not 7 <= len(fields) <= 9:
        raise ValueError(f"{len(fields)} columns in {clean(row)!r}")
    index, name, uuid, total, used, driver, bus_id = fields[:7]
    capability = next((field for field in fields[7:] if re.fullmatch(r"\d{1,2}\.\d", field)), None)
    mode = next((field for field in fields[7:] if field.startswith(("Exclusive", "Prohibited"))), "Default")
    return Gpu.of(
        index=_whole(index),
        name=name,
        uuid=uuid,
        memory_bytes=_mebibytes(total),
        memory_used_bytes=_mebibytes(used),
        driver=driver,
        bus_id=bus_id,
        compute_capability=capability,
        compute_mode=mode,
        occupants=tuple(occupants.get(uuid, ())),
    )


def _occupants(rows: Any) -> dict[str, list[Occupant]]:
    """By the GPU's uuid."""
    found: dict[str, list[Occupant]] = {}
    for one in _some(rows, MAX_OCCUPANTS):
        memory, words = one["mebibytes"], {name: _text_or_none(one[name]) for name in ("user", "command", "job")}
        if not isinstance(memory, int | None):
            raise ValueError("memory that is no number")
        occupant = Occupant.of(pid=one["pid"], memory_bytes=None if memory is None else memory * MIB, **words)
        found.setdefault(clean(one["gpu"]), []).append(occupant)
    return found


def _mebibytes(field: str) -> int:
    """nvidia-smi writes [N/A] or [Not Supported] where a GPU has no memory of its own."""
    return 0 if field.startswith("[") else _whole(field) * MIB


def parse_torch(command: Command | None) -> tuple[TorchFacts | None, str | None]:
    """The last line of the torch program; else None and the import error's last line."""
    if command is None:
        return None, None
    if error := _failure(command):
        return None, error
    found = _mapping(_loads(command["out"].strip().splitlines()[-1]))
    archs = found["archs"]
    if not isinstance(archs, list) or len(archs) > MAX_GPUS:
        raise ValueError("no list of architectures")
    texts = {name: _text_or_none(found.get(name)) for name in ("cuda", "nccl", "cudnn", "cuda_error")}
    vision = {name: _text_or_none(found.get(name)) for name in ("torchvision", "torchvision_error")}
    torch = TorchFacts.of(
        version=clean(found["version"]),
        arch_list=tuple(clean(arch) for arch in archs),
        gloo=found["gloo"],
        verbs=found.get("verbs"),
        nccl_available=found["nccl_available"],
        devices=found["devices"],
        **texts,
        **vision,
    )
    return torch, None


# ---- network --------------------------------------------------------------------------------------------------


def parse_interfaces(ip: Command | None, files: Mapping[str, Any], values: Mapping[str, Any]) -> tuple[Interface, ...]:
    """From `ip -j addr`, else from what the host's sockets showed."""
    speeds = _mapping(values.get("links", {}))
    if _failure(ip):
        return _socket_interfaces(values.get("sockets", []), files.get("/proc/net/if_inet6", ""), speeds)
    return tuple(
        Interface.of(
            name=clean(link["ifname"]),
            addresses=tuple(
                _address(f"{entry['local']}/{entry['prefixlen']}") for entry in _some(link["addr_info"], MAX_ADDRESSES)
            ),
            mtu=link["mtu"],
            speed_bps=_speed_bps(speeds.get(link["ifname"])),
            up={"UP", "LOWER_UP"} <= set(link["flags"]),
        )
        for link in _some(_loads((ip or {})["out"]), MAX_INTERFACES)
        # iproute2 before 4.18 writes an empty object for each thing that it filtered out
        if link
    )


def _socket_interfaces(sockets: Any, if_inet6: str, speeds: Mapping[str, Any]) -> tuple[Interface, ...]:
    """IPv4 by ioctl; IPv6 of /proc/net/if_inet6 (address, index, prefix, scope, flags, name; numbers in hex)."""
    addresses: dict[str, list[str]] = {}
    about: dict[str, tuple[int, int]] = {}
    for entry in _some(sockets, MAX_INTERFACES):
        name = clean(entry["name"]).partition(":")[0]
        about[name] = (entry["mtu"], entry["flags"])
        addresses.setdefault(name, []).append(_address(f"{entry['address']}/{entry['netmask']}"))
    for line in if_inet6.splitlines()[:MAX_INTERFACES]:
        number, _, prefix, _, _, name = line.split()
        about.setdefault(clean(name), (0, UP | RUNNING))
        addresses.setdefault(clean(name), []).append(_address(f"{_inet6(number)}/{int(prefix, 16)}"))
    return tuple(
        Interface.of(
            name=name,
            addresses=tuple(addresses[name][:MAX_ADDRESSES]),
            mtu=mtu,
            speed_bps=_speed_bps(speeds.get(name)),
            up=flags & (UP | RUNNING) == UP | RUNNING,
        )
        for name, (mtu, flags) in about.items()
    )


def parse_routes(
    commands: Mapping[str, Any], values: Mapping[str, Any], interfaces: tuple[Interface, ...], peers: Sequence[str]
) -> tuple[tuple[Route, ...], tuple[str, ...]]:
    """The ways out, and the peers that none leads to.

    A socket gave the source address towards each peer. Its interface is the one that `ip route get` named for that
    source, else the one that has the address. The way to most peers names none of them: in a cluster of hundreds, lists
    of peers on every host would be most of what is remembered.
    """
    sources = _mapping(values.get("sources", {}))
    if len(sources) > MAX_PEERS:
        raise ValueError("too many routes")
    interface_of = {own.partition("/")[0]: one.name for one in interfaces for own in one.addresses}
    for peer, source in sources.items():
        way = commands.get(f"ip route {peer}")
        if way and not _failure(way):
            interface_of[source] = clean(_some(_loads(way["out"]), MAX_INTERFACES)[0]["dev"])
    found: dict[str, list[str]] = {}
    for peer in peers:
        source = str(ipaddress.ip_address(sources[peer])) if peer in sources else None
        if source in interface_of:
            found.setdefault(source, []).append(peer)
    most = max(found, key=lambda source: len(found[source]), default=None)
    routes = [
        Route.of(interface=interface_of[source], source=source, peers=() if source == most else tuple(reached))
        for source, reached in found.items()
    ]
    routed = {peer for reached in found.values() for peer in reached}
    return tuple(routes), tuple(peer for peer in peers if peer not in routed)


def parse_own_name(command: Command | None) -> tuple[str, ...]:
    if _failure(command):
        return ()
    found = _some(_loads((command or {})["out"]), MAX_ADDRESSES)
    return tuple(str(ipaddress.ip_address(address.partition("%")[0])) for address in found)


def _address(text: str) -> str:
    return ipaddress.ip_interface(text).with_prefixlen


def _inet6(digits: str) -> str:
    return str(ipaddress.IPv6Address(bytes.fromhex(digits)))


def parse_rdma(values: Mapping[str, Any]) -> tuple[RdmaPort, ...]:
    ports = _some(values.get("rdma", []), MAX_INTERFACES)
    return tuple(RdmaPort.of(device=clean(device), link_layer=clean(layer)) for device, layer in ports)


def _speed_bps(text: Any) -> float | None:
    """The kernel writes Mbit/s, and -1 where a link has no speed."""
    return _whole(text) * 1e6 if isinstance(text, str) and re.fullmatch(r"[1-9]\d{0,8}\s*", text) else None


# ---- the system -----------------------------------------------------------------------------------------------


def parse_clock(values: Mapping[str, Any], sent_at: float, received_at: float) -> dict[str, float]:
    """Offset between two clocks from four readings (NTP, RFC 5905 section 8): the probe's own time falls out.

    What is left of the round trip may lie on one side: what a start-up file of the shell takes comes before the probe.
    So the offset is right to half of it.
    """
    remote: list[float] = [values["wall_start"], values["wall_end"]]
    if not all(isinstance(value, float) and math.isfinite(value) for value in remote):
        raise ValueError("no time")
    on_the_way_s = (received_at - sent_at) - (remote[1] - remote[0])
    return {
        "clock_offset_s": round(sum(remote) / 2 - (sent_at + received_at) / 2, 3),
        "clock_error_s": round(max(0.0, on_the_way_s / 2), 3),
    }


def parse_meminfo(text: str) -> int:
    match = re.search(r"^MemTotal:\s+(\d{1,18}) kB", text, re.MULTILINE)
    if not match:
        raise ValueError("no MemTotal")
    return int(match[1]) * 1024


def parse_os_release(text: str) -> str:
    """PRETTY_NAME of os-release(5)."""
    match = re.search(r"^PRETTY_NAME=[\"']?([^\"'\n]*)", text, re.MULTILINE)
    return clean(match[1]) if match else "unknown"


def parse_workdir(command: Command | None) -> dict[str, Any]:
    if error := _failure(command):
        return {"workdir": "", "disk_free_bytes": 0, "workdir_error": error}
    found = _mapping(_loads((command or {})["out"]))
    path, error = found["path"], _text_or_none(found["error"])
    if not isinstance(path, str) or not path.startswith("/") or not path.isprintable():
        raise ValueError("no absolute path")
    free = {"disk_free_bytes": found["free"], "disk_free_inodes": found.get("inodes")}
    why = found.get("unfit")
    unfit = tuple(clean(words, MAX_WORDS) for words in _some(why, 2)) if why else None
    return {"workdir": path, **free, "workdir_error": error, "workdir_unfit": unfit}


def parse_process(values: Mapping[str, Any]) -> dict[str, Any]:
    _, kernel, machine = values["uname"]
    python = values["python"]
    if len(python) != 3 or not all(isinstance(part, int) for part in python):
        raise ValueError("no python version")
    return {
        "hostname": clean(values["hostname"]),
        "kernel": clean(kernel),
        "machine": clean(machine),
        "cores": values["cores"],
        "cpu_vendor": _text_or_none(values.get("cpu_vendor")),
        "shm_bytes": values["shm_bytes"],
        "user": clean(values["user"]),
        "uid": values["uid"],
        "python_version": ".".join(str(part) for part in python),
        "python_executable": clean(values["executable"], 4096),
    }


# ---- small things ---------------------------------------------------------------------------------------------


def clean(text: Any, limit: int = MAX_TEXT) -> str:
    """A host's words, fit for a terminal and a log: printable, on one line, cut."""
    if not isinstance(text, str):
        raise ValueError(f"a {type(text).__name__} in place of text")
    return one_line(text, limit)


def _failure(command: Command | None) -> str | None:
    """Why a command gave nothing: the last line it said. None when it did well."""
    if command is None:
        return "not asked"
    if not isinstance(command["rc"], int):
        raise ValueError("no exit code")
    if command["rc"] == 0:
        return None
    said = f"{command['out']}\n{command['err']}".strip().splitlines()
    return (clean(said[-1]) if said else "") or f"exit code {command['rc']}"


def _mapping(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("not an object")
    return value


def _some(value: Any, limit: int) -> list[Any]:
    if not isinstance(value, list) or len(value) > limit:
        raise ValueError(f"not a list of at most {limit}")
    return value


def _loads(text: str) -> Any:
    return json.loads(text, parse_constant=_no_constant)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number")


def _whole(text: str) -> int:
    if not re.fullmatch(r"\s*\d{1,12}\s*", text, re.ASCII):
        raise ValueError(f"{clean(text)!r} is no number")
    return int(text)


def _text_or_none(value: Any) -> str | None:
    """Some versions are numbers (cuDNN's): text all the same."""
    return None if value is None else clean(str(value)) if isinstance(value, (str, int)) else clean(value)


def _reason(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors(include_input=False, include_url=False)[0]
        return clean(f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}")
    return clean(f"no {error}" if isinstance(error, KeyError) else str(error) or type(error).__name__)
