"""What a host is, as it was probed: frozen values, which go to JSON and back. `answers` makes them. Pure.

A fact that a host cannot give (no driver, no torch, no `ip`) is None or empty beside a line that says why.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from orchestrator.errors import UsageError
from orchestrator.text import one_line

MAX_TEXT = 200
MAX_PEERS = 2048


def _cut_at(limit: int) -> AfterValidator:
    """Text from a host, made fit for a terminal and a log: printable, on one line, cut."""
    return AfterValidator(lambda text: text if len(text) <= limit and text.isprintable() else one_line(text, limit))


def _absolute(path: str) -> str:
    """A path is used as it is, so it is refused and not cut."""
    if path and not (path.startswith("/") and path.isprintable()):
        raise ValueError("not an absolute path")
    return path


Count = Annotated[int, Field(ge=0, lt=1 << 63)]
Text = Annotated[str, _cut_at(MAX_TEXT)]
Words = Annotated[str, _cut_at(1000)]
LongText = Annotated[str, _cut_at(4096)]
Address = Annotated[Text, AfterValidator(lambda text: str(ipaddress.ip_address(text)))]
AddressAndPrefix = Annotated[Text, AfterValidator(lambda text: ipaddress.ip_interface(text).with_prefixlen)]
Peer = Annotated[str, _cut_at(300)]
"""An address or a name, from the inventory."""
Peers = Annotated[tuple[Peer, ...], Field(max_length=MAX_PEERS)]


class Fact(BaseModel):
    """Frozen, goes to JSON and back; what a newer version stored besides is left out."""

    model_config = ConfigDict(frozen=True, defer_build=True, extra="ignore", allow_inf_nan=False)


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
    compute_capability: Annotated[str, Field(pattern=r"^[0-9]{1,2}\.[0-9]$")] | None = None
    """Like "8.6"; None with drivers that do not report it."""
    compute_mode: Text = "Default"
    """Or "Exclusive_Process": for one process at a time; or "Prohibited": for none."""
    occupants: Annotated[tuple[Occupant, ...], Field(max_length=256)] = ()

    @property
    def is_closed(self) -> bool:
        return self.compute_mode == "Prohibited"


class Interface(Fact):
    name: Text
    addresses: Annotated[tuple[AddressAndPrefix, ...], Field(max_length=1024)] = ()
    """With prefix length, like "192.168.1.41/24"."""
    mtu: Count
    speed_bps: Annotated[float, Field(gt=0)] | None = None
    up: bool
    """Switched on and with a carrier."""


Interfaces = Annotated[tuple[Interface, ...], Field(max_length=256)]


class Route(Fact):
    """One route from this host to others."""

    interface: Text
    source: Address
    """The host's own address on that route."""
    peers: Peers = ()
    """Who is reached on it, as was asked; empty on the way to all that no other route names."""

    @model_validator(mode="before")
    @classmethod
    def _of_one_peer(cls, fields: Any) -> Any:
        """Older versions of orch stored a route for each peer."""
        if not isinstance(fields, dict):
            return fields
        peers = [fields["peer"]] if "peer" in fields else fields.get("peers", [])
        # Behind this function pydantic no longer knows that the list was JSON's, and takes only a tuple.
        return {**fields, "peers": tuple(peers) if isinstance(peers, list) else peers}


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
    arch_list: Annotated[tuple[Text, ...], Field(max_length=64)] = ()
    """What the build was compiled for, like "sm_70", "compute_90"; empty where unknown."""
    torchvision: Text | None = None
    torchvision_error: Text | None = None
    horovod: Text | None = None
    """Version of that package; None where it is not installed, or an older orch looked."""
    gloo: bool
    nccl_available: bool
    devices: Annotated[int, Field(ge=0, lt=1024)] = 0
    """GPUs that torch itself can use."""
    cuda_error: Text | None = None
    """What torch said when it looked for GPUs, if anything."""


def _distinct(gpus: tuple[Gpu, ...]) -> tuple[Gpu, ...]:
    if len({gpu.uuid for gpu in gpus}) < len(gpus):
        raise ValueError("two GPUs with one uuid")
    return gpus


class NodeFacts(Fact):
    """All that one probe found out about one host."""

    node: Text
    hostname: Text
    hostname_addresses: Annotated[tuple[Address, ...], Field(max_length=1024)] = ()
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
    python_executable: LongText
    gpus: Annotated[tuple[Gpu, ...], Field(max_length=64), AfterValidator(_distinct)] = ()
    gpu_error: Text | None = None
    gpu_warnings: Annotated[tuple[Text, ...], Field(max_length=8)] = ()
    """What nvidia-smi printed besides the GPUs."""
    torch: TorchFacts | None = None
    torch_error: Text | None = None
    """Why there is no torch; None as well as `torch` when it was not asked for."""
    interfaces: Interfaces = ()
    rdma: Annotated[tuple[RdmaPort, ...], Field(max_length=256)] | None = None
    """Active InfiniBand and RoCE ports; None where an older orch looked."""
    routes: Annotated[tuple[Route, ...], Field(max_length=MAX_PEERS)] = ()
    """The ways to the other hosts; first the one to the first of them."""
    unrouted: Peers = ()
    """The other hosts, as was asked, that this one knows no way to."""
    workdir: Annotated[str, Field(max_length=4096), AfterValidator(_absolute)]
    """Absolute path on the host; "" if it did not answer."""
    workdir_inode: Count | None = None
    """Of the nearest folder to it that is there; None if an older orch looked."""
    workdir_error: Text | None = None
    """Why it cannot be written."""
    workdir_unfit: tuple[Words, Words] | None = None
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

    def bound_address(self, interface: str | None) -> str | None:
        """The one that Gloo and NCCL take when they are given the name of this interface: its first."""
        own = next((each.addresses for each in self.interfaces if each.name == interface), ())
        return own[0].partition("/")[0] if own else None

    @property
    def torch_is_slow(self) -> bool:
        """Whether torch was being loaded when its time was over."""
        return bool(self.torch_error and self.torch_error.startswith("no answer in "))

    @property
    def addresses(self) -> frozenset[str]:
        """Of all interfaces, without prefix lengths."""
        return frozenset(address.partition("/")[0] for each in self.interfaces for address in each.addresses)

    def way_to(self, peers: Iterable[str]) -> Route | None:
        """The first way that leads to one of these, addresses or names as were asked."""
        wanted = set(peers)
        rest = wanted.difference(self.unrouted, *(route.peers for route in self.routes))
        return next(
            (route for route in self.routes if (wanted.intersection(route.peers) if route.peers else rest)), None
        )


# Which of a host's GPUs a job may use, and their names for CUDA: UUIDs, since an index means another GPU as soon as
# one fails or is added. Pure.
#
#     gpus = visible_gpus("a16", facts, {"CUDA_VISIBLE_DEVICES": "2,0"})     those that nvidia-smi numbers 2 and 0
#     cuda_environment(gpus, {})                        {"CUDA_VISIBLE_DEVICES": "GPU-5f3a...,GPU-77b1...", ...}
#
# CUDA C++ Programming Guide, "CUDA Environment Variables": CUDA_VISIBLE_DEVICES holds indexes or UUIDs, and of a UUID
# as
# much of its beginning as distinguishes it from the others.

VISIBLE = "CUDA_VISIBLE_DEVICES"


def visible_gpus(node: str, facts: NodeFacts, env: Mapping[str, str]) -> tuple[Gpu, ...]:
    """All that programs may use, or those that `env` names, in its order. Raises UsageError for one that the host does
    not have.
    """
    if VISIBLE not in env or _names_parts(env):
        return tuple(gpu for gpu in facts.gpus if not gpu.is_closed)
    words = [word.strip() for word in env[VISIBLE].split(",") if word.strip()]
    if not words:
        raise UsageError(f"{node}: its {VISIBLE} names no GPU", f"set `device: cpu` for {node} to train without one")
    return tuple(dict.fromkeys(_named(node, word, facts.gpus) for word in words))


def cuda_environment(gpus: Iterable[Gpu], env: Mapping[str, str]) -> dict[str, str]:
    """The variables that CUDA reads. env: of the inventory; parts of a GPU stay as it names them."""
    # Whatever else counts GPUs by index is to count as nvidia-smi does.
    order = {"CUDA_DEVICE_ORDER": env.get("CUDA_DEVICE_ORDER", "PCI_BUS_ID")}
    return order if _names_parts(env) else {**order, VISIBLE: ",".join(map(_cuda_name, gpus))}


def _names_parts(env: Mapping[str, str]) -> bool:
    """MIG instances have UUIDs of their own, which the facts do not hold."""
    return env.get(VISIBLE, "").lstrip().startswith("MIG-")


def _named(node: str, word: str, gpus: Sequence[Gpu]) -> Gpu:
    found = [gpu for gpu in gpus if (str(gpu.index) == word if word.isdigit() else gpu.uuid.startswith(word))]
    if len(found) == 1:
        return found[0]
    there = ", ".join(f"{gpu.index} ({gpu.uuid})" for gpu in gpus) or "none"
    raise UsageError(
        f"{node}: its {VISIBLE} names GPU {word}, which {'is not there' if not found else 'means several'}",
        f"its GPUs are {there}; `orch up` again if that is no longer so",
    )


def _cuda_name(gpu: Gpu) -> str:
    """Its UUID; its index where the driver reports none."""
    return gpu.uuid if gpu.uuid.startswith("GPU-") else str(gpu.index)


# What may end a job on a host later, as `orch doctor` finds it: frozen values. `answers` makes them. Pure.
#
# They are not remembered: what is due, set or in use on a host changes from day to day.

Figure = Annotated[float, Field(ge=0, lt=1e15)]
Texts = Annotated[tuple[Text, ...], Field(max_length=256)]
MANY: Any = Field(default_factory=dict, max_length=256)


class Limit(Fact):
    """As of setrlimit(2); None where there is none."""

    soft: Count | None
    hard: Count | None


class GpuHealth(Fact):
    """None where a GPU or its driver does not say."""

    index: Annotated[int, Field(ge=0, lt=1024)]
    uncorrected: Count | None = None
    """ECC errors since the driver was loaded that could not be corrected."""
    replacement_due: bool = False
    """Whether rows or pages of its memory wait for a reset to be replaced."""
    replacement_failed: bool = False
    slowed_by: Count | None = None
    """NVML's bit mask of what holds its clocks down now."""
    clock_mhz: Figure | None = None
    """The clock that its owner set for programs."""
    default_clock_mhz: Figure | None = None
    limit_watts: Figure | None = None
    default_limit_watts: Figure | None = None
    link_width: Count | None = None
    """Lanes of its PCIe link in use."""
    most_link_width: Count | None = None
    fabric: Text | None = None
    """Of a GPU behind NVSwitches: "Completed", "In Progress", "Not Started"."""
    iommu: Text | None = None
    """How the IOMMU treats it: "identity", "DMA", "DMA-FQ"."""
    computes: Text | None = None
    """Why it does not; None where it did, or was not tried."""


class NetworkCard(Fact):
    """A network card."""

    duplex: Text | None = None
    crc_errors: Count = 0
    packets: Count = 0


class Disk(Fact):
    """The file system of the work folder."""

    kind: Text
    source: Text
    path: LongText
    """The work folder from that file system's root on."""
    device: Count = 0
    """The kernel's number for it: containers' disks of one machine differ in nothing else."""


class Health(Fact):
    limits: dict[Text, Limit] = MANY
    """Of a process started by SSH: nofile, nproc, memlock."""
    group_memory_bytes: Count | None = None
    """What its control groups let it have; None where they set no limit."""
    group_pids: Count | None = None
    group_cpus: Figure | None = None
    environment: dict[Text, Text] = MANY
    """Of the variables that steer ranks, torch and NCCL, those that a session has."""
    available_bytes: Count | None = None
    """Memory that programs can still have; None where its kernel does not say."""
    uptime_s: Figure = 0.0
    reboot: Texts | None = None
    """The packages for which a reboot is due, if known; None where none is due."""
    kills_left: bool | None = None
    """Whether systemd-logind is set to end processes with their session; None where it has no say."""
    cards: dict[Text, NetworkCard] = MANY
    jobs: Texts = ()
    """Jobs of orch, of this user, that have a process there."""
    gpus: Annotated[tuple[GpuHealth, ...], Field(max_length=256)] = ()
    data: Texts | None = None
    """What lies in the data folder; None where there is no such folder."""
    disk: Disk | None = None
