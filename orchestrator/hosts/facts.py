"""Values that a probe returns: facts and health of a host, and the GPUs that a job may use there. Pure.

A fact that a host cannot provide (no driver, no torch, no `ip`) is None or empty.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from orchestrator.errors import UsageError
from orchestrator.units import one_line

MAX_TEXT = 200
MAX_PEERS = 2048


def _cut_at(limit: int) -> AfterValidator:
    return AfterValidator(lambda text: text if len(text) <= limit and text.isprintable() else one_line(text, limit))


def _absolute(path: str) -> str:
    """Raises ValueError: a cut path would be another path."""
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
Peers = Annotated[tuple[Peer, ...], Field(max_length=MAX_PEERS)]


class Fact(BaseModel):
    """Ignores keys that a newer orch stored."""

    model_config = ConfigDict(frozen=True, defer_build=True, extra="ignore", allow_inf_nan=False)


class Occupant(Fact):
    pid: Count
    memory_bytes: Count | None = None
    """None if the driver does not report it."""
    user: Text | None = None
    """None if hidden, as in a container."""
    command: Text | None = None
    job: Text | None = None
    """The job of orch, if we may see it."""


class Gpu(Fact):
    index: Annotated[int, Field(ge=0, lt=1024)]
    name: Text
    uuid: Text
    memory_bytes: Count
    """0 for GPUs that share the host's memory."""
    memory_used_bytes: Count
    driver: Text
    bus_id: Text
    compute_capability: Annotated[str, Field(pattern=r"^[0-9]{1,2}\.[0-9]$")] | None = None
    """Like "8.6"; None with old drivers."""
    compute_mode: Text = "Default"
    """Or "Exclusive_Process", "Prohibited"."""
    occupants: Annotated[tuple[Occupant, ...], Field(max_length=256)] = ()

    @property
    def is_closed(self) -> bool:
        return self.compute_mode == "Prohibited"


class Interface(Fact):
    name: Text
    addresses: Annotated[tuple[AddressAndPrefix, ...], Field(max_length=1024)] = ()
    """Like "192.168.1.41/24"."""
    mtu: Count
    speed_bps: Annotated[float, Field(gt=0)] | None = None
    up: bool


Interfaces = Annotated[tuple[Interface, ...], Field(max_length=256)]


class Route(Fact):
    interface: Text
    source: Address
    peers: Peers = ()
    """Hosts reached on it; empty for the default route."""

    @model_validator(mode="before")
    @classmethod
    def _of_one_peer(cls, fields: Any) -> Any:
        """Older versions stored one peer per route."""
        if not isinstance(fields, dict):
            return fields
        peers = [fields["peer"]] if "peer" in fields else fields.get("peers", [])
        # After this function pydantic no longer treats the list as JSON, and accepts only a tuple.
        return {**fields, "peers": tuple(peers) if isinstance(peers, list) else peers}


class RdmaPort(Fact):
    """An active InfiniBand or RoCE port that our user may open."""

    device: Text
    link_layer: Text
    """ "InfiniBand" or "Ethernet"."""


class TorchFacts(Fact):
    version: Text
    cuda: Text | None = None
    """None for a CPU build."""
    nccl: Text | None = None
    verbs: bool | None = None
    """Whether libibverbs is installed, which NCCL needs for InfiniBand."""
    cudnn: Text | None = None
    arch_list: Annotated[tuple[Text, ...], Field(max_length=64)] = ()
    """Like "sm_70", "compute_90"; empty if unknown."""
    torchvision: Text | None = None
    torchvision_error: Text | None = None
    horovod: Text | None = None
    gloo: bool
    nccl_available: bool
    devices: Annotated[int, Field(ge=0, lt=1024)] = 0
    cuda_error: Text | None = None


def _distinct(gpus: tuple[Gpu, ...]) -> tuple[Gpu, ...]:
    if len({gpu.uuid for gpu in gpus}) < len(gpus):
        raise ValueError("two GPUs with one uuid")
    return gpus


class NodeFacts(Fact):
    node: Text
    hostname: Text
    hostname_addresses: Annotated[tuple[Address, ...], Field(max_length=1024)] = ()
    os: Text
    kernel: Text
    machine: Text
    cores: Annotated[int, Field(ge=1, lt=1 << 16)]
    cpu_vendor: Text | None = None
    memory_bytes: Count
    disk_free_bytes: Count
    disk_free_inodes: Count | None = None
    """None if the file system has no fixed number."""
    shm_bytes: Count
    clock_offset_s: float
    """Host minus ours, within `clock_error_s`."""
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
    torch: TorchFacts | None = None
    torch_error: Text | None = None
    """None, like `torch`, if torch was not asked for."""
    slurm: Text | None = None
    """Its state as a node of Slurm, like "idle" or "down*"; None if it is no such node."""
    interfaces: Interfaces = ()
    rdma: Annotated[tuple[RdmaPort, ...], Field(max_length=256)] | None = None
    routes: Annotated[tuple[Route, ...], Field(max_length=MAX_PEERS)] = ()
    """The first leads to the first other host."""
    unrouted: Peers = ()
    workdir: Annotated[str, Field(max_length=4096), AfterValidator(_absolute)]
    workdir_inode: Count | None = None
    workdir_error: Text | None = None
    workdir_unfit: tuple[Words, Words] | None = None
    """Problem and remedy if others may write there, or it is not ours."""

    def training_interface(self, name: str | None, address: str | None) -> Interface | None:
        """The named interface, else the one with `address`, else that of the first route."""
        by_name = {interface.name: interface for interface in self.interfaces}
        if name:
            return by_name.get(name)
        for interface in self.interfaces if address else ():
            if address in [own.partition("/")[0] for own in interface.addresses]:
                return interface
        return by_name.get(self.routes[0].interface) if self.routes else None

    def bound_address(self, interface: str | None) -> str | None:
        """The interface's first address, which Gloo and NCCL use."""
        own = next((each.addresses for each in self.interfaces if each.name == interface), ())
        return own[0].partition("/")[0] if own else None

    @property
    def torch_is_slow(self) -> bool:
        return bool(self.torch_error and self.torch_error.startswith("no answer in "))

    @property
    def addresses(self) -> frozenset[str]:
        return frozenset(address.partition("/")[0] for each in self.interfaces for address in each.addresses)

    def way_to(self, peers: Iterable[str]) -> Route | None:
        """peers: addresses or names as in the request."""
        wanted = set(peers)
        rest = wanted.difference(self.unrouted, *(route.peers for route in self.routes))
        return next(
            (route for route in self.routes if (wanted.intersection(route.peers) if route.peers else rest)), None
        )


# GPUs for a job, named by UUID: an index may mean another GPU once a GPU fails or is added. CUDA_VISIBLE_DEVICES holds
# indexes, or UUIDs or their unique beginnings (CUDA C++ Programming Guide, "CUDA Environment Variables"). Pure.

VISIBLE = "CUDA_VISIBLE_DEVICES"


def visible_gpus(node: str, facts: NodeFacts, env: Mapping[str, str]) -> tuple[Gpu, ...]:
    """GPUs in `env` in its order, else all open ones. Raises UsageError for an unknown GPU."""
    if VISIBLE not in env or _names_parts(env):
        return tuple(gpu for gpu in facts.gpus if not gpu.is_closed)
    words = [word.strip() for word in env[VISIBLE].split(",") if word.strip()]
    if not words:
        raise UsageError(f"{node}: its {VISIBLE} names no GPU", f"set `device: cpu` for {node} to train without one")
    return tuple(dict.fromkeys(_named(node, word, facts.gpus) for word in words))


def cuda_environment(gpus: Iterable[Gpu], env: Mapping[str, str]) -> dict[str, str]:
    """Variables for CUDA; MIG instances in `env` stay."""
    # All other software that counts GPUs by index should count like nvidia-smi.
    order = {"CUDA_DEVICE_ORDER": env.get("CUDA_DEVICE_ORDER", "PCI_BUS_ID")}
    return order if _names_parts(env) else {**order, VISIBLE: ",".join(map(_cuda_name, gpus))}


def _names_parts(env: Mapping[str, str]) -> bool:
    """MIG instances have UUIDs that the facts do not contain."""
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
    return gpu.uuid if gpu.uuid.startswith("GPU-") else str(gpu.index)


# Health: conditions that may end a job later, for `orch doctor`. Not stored, since they change from day to day. Pure.

Figure = Annotated[float, Field(ge=0, lt=1e15)]
Texts = Annotated[tuple[Text, ...], Field(max_length=256)]
MANY: Any = Field(default_factory=dict, max_length=256)


class Limit(Fact):
    """setrlimit(2); None: unlimited."""

    soft: Count | None
    hard: Count | None


class GpuHealth(Fact):
    index: Annotated[int, Field(ge=0, lt=1024)]
    uncorrected: Count | None = None
    replacement_due: bool = False
    """Memory rows or pages wait for a reset."""
    replacement_failed: bool = False
    slowed_by: Count | None = None
    """NVML's bit mask of reasons for lower clocks."""
    clock_mhz: Figure | None = None
    default_clock_mhz: Figure | None = None
    limit_watts: Figure | None = None
    default_limit_watts: Figure | None = None
    link_width: Count | None = None
    most_link_width: Count | None = None
    fabric: Text | None = None
    """Behind NVSwitches: "Completed", "In Progress", "Not Started"."""
    iommu: Text | None = None
    computes: Text | None = None


class NetworkCard(Fact):
    duplex: Text | None = None
    crc_errors: Count = 0
    packets: Count = 0


class Disk(Fact):
    kind: Text
    source: Text
    path: LongText
    device: Count = 0
    """Device number; only it differs between containers' disks."""


class Health(Fact):
    limits: dict[Text, Limit] = MANY
    """nofile, nproc, memlock of a process started by SSH."""
    group_memory_bytes: Count | None = None
    """None: unlimited."""
    group_pids: Count | None = None
    group_cpus: Figure | None = None
    environment: dict[Text, Text] = MANY
    """Session variables that affect ranks, torch or NCCL."""
    available_bytes: Count | None = None
    uptime_s: Figure = 0.0
    reboot: Texts | None = None
    """Packages that need it, if known; None if not due."""
    kills_left: bool | None = None
    """Whether systemd-logind ends processes with their session."""
    cards: dict[Text, NetworkCard] = MANY
    jobs: Texts = ()
    gpus: Annotated[tuple[GpuHealth, ...], Field(max_length=256)] = ()
    data: Texts | None = None
    disk: Disk | None = None
