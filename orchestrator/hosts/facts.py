"""What a host is, as it was probed: frozen values, which go to JSON and back. `parse_facts` makes them. Pure.

A fact that a host cannot give (no driver, no torch, no `ip`) is None or empty beside a line that says why.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator
from typing_extensions import Self

MAX_TEXT = 200
MAX_WORDS = 1000

Count = Annotated[int, Field(ge=0, lt=1 << 63)]
Text = Annotated[str, Field(max_length=MAX_TEXT)]
Peer = Annotated[str, Field(max_length=300)]
"""An address or a name, from the inventory."""


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
    horovod: Text | None = None
    """Version of that package; None where it is not installed, or an older orch looked."""
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
    gpu_warnings: tuple[Text, ...] = ()
    """What nvidia-smi printed besides the GPUs."""
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
    workdir_inode: Count | None = None
    """Of the nearest folder to it that is there; None if an older orch looked."""
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
