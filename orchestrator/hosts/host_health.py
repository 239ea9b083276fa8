"""What may end a job on a host later, as `orch doctor` finds it: frozen values. `answers` makes them. Pure.

They are not remembered: what is due, set or in use on a host changes from day to day.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from orchestrator.hosts.facts import Count, Fact, LongText, Text

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
