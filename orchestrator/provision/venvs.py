"""Chooses a torch for all hosts and makes environments with it (`orch setup`).

The other end is `remote/environment.py`. Closing the connection ends the installers on every host.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, Field, TypeAdapter

from orchestrator.errors import HostError, ProbeError, UsageError
from orchestrator.hosts import grammar
from orchestrator.hosts.facts import NodeFacts
from orchestrator.hosts.wheels import OLDEST_TORCH, RELEASES, WHEELS_FOR, has_cu126, misfit, newest_for, numbers
from orchestrator.planning.requirements import Requirements
from orchestrator.record import Owner
from orchestrator.transport.ask import ConnectedHost, exchange, understood
from orchestrator.transport.fanout import for_each
from orchestrator.units import one_line

LIMIT_S = 2 * 3600.0
"""Per host: torch with its CUDA libraries is 3 GB, 40 minutes at 10 Mbit/s."""
_VERSION = r"[0-9]{1,4}(\.[0-9]{1,4}){1,3}[A-Za-z0-9.]{0,20}(\+[A-Za-z0-9.]{1,20})?"


Answer = TypeVar("Answer")


@dataclass(frozen=True)
class WantedVersions:
    torch: str
    torchvision: str | None
    """None: the version that matches torch."""
    any_torch: bool
    """Accept any torch that a host has."""
    extra: Requirements = field(default_factory=Requirements)
    """The user's requirements file."""
    reason: str = field(default="", compare=False)
    """Why this torch was chosen, if neither requested nor this machine's own."""

    @property
    def requirements(self) -> tuple[str, ...]:
        """One pip call for both, since the newest torchvision would replace torch."""
        packages = (f"torch=={self.torch}", f"torchvision=={self.torchvision}" if self.torchvision else "torchvision")
        return (*packages, "numpy<2") if numbers(self.torch) < (2, 3) else packages  # built before there was a 2


@dataclass(frozen=True)
class SetupProgress:
    node: str
    phase: str
    line: str = ""
    """The installer's last line of output."""


@dataclass(frozen=True)
class Made:
    """The environment of a host after setup."""

    python: Annotated[str, Field(pattern="^/"), AfterValidator(grammar.program)]
    torch: Annotated[str, Field(pattern=f"^{_VERSION}$")]
    torchvision: Annotated[str, Field(pattern=f"^{_VERSION}$")]
    state: Literal["own", "kept", "made", "added"]
    """`own`: the host's own Python fits; `kept`: the environment existed; `added`: only packages of a requirements file
    were missing.
    """


def choose(torch: str | None, torchvision: str | None, hosts: Sequence[NodeFacts] = ()) -> WantedVersions:
    """Without a version: this machine's torch, else the newest known, limited by the GPUs and drivers of all hosts.

    hosts: with GPUs and pip's default wheels. Raises UsageError for a malformed version, and for a torch that does not
    run on these GPUs.
    """
    for option, version in (("--torch", torch), ("--torchvision", torchvision)):
        if version and not re.fullmatch(_VERSION, version):
            raise UsageError(f"{option} {version[:40]!r} is not a version", "write it like 2.3.1")
    if torchvision and not torch:
        raise UsageError(f"--torchvision {torchvision} without --torch", "give the --torch that it was built for")
    if torch and numbers(torch) < numbers(OLDEST_TORCH):
        raise UsageError(f"torch {torch} is too old", f"{OLDEST_TORCH} is the oldest that runs here")
    judged = [facts for facts in hosts if facts.machine == WHEELS_FOR]
    if not torch:
        return _usual(judged)
    _check_fit(torch, judged)
    return WantedVersions(torch, torchvision, any_torch=False)


def _check_fit(torch: str, hosts: Sequence[NodeFacts]) -> None:
    """Raises UsageError if the default wheels of this torch do not run on some host's GPU."""
    wrong = [(facts.node, why) for facts in hosts for gpu in facts.gpus if (why := misfit(torch, gpu))]
    if not wrong:
        return
    node, why = wrong[0]
    fitting = newest_for([gpu for facts in hosts for gpu in facts.gpus])
    remedies = [f"`orch setup --torch {fitting}`"] if fitting else []
    if has_cu126(torch):
        remedies.append(f"`--torch {torch}+cu126` with an index that has this build (`PIP_INDEX_URL` in `env:`)")
    raise UsageError(f"{node}: the wheels of torch {torch} hold {why}", ", or ".join(remedies))


def _usual(hosts: Sequence[NodeFacts]) -> WantedVersions:
    """The release that the GPU hosts share, else this machine's, else the newest that runs on all GPUs.

    Raises UsageError if none does.
    """

    def usual(torch: str, reason: str = "") -> WantedVersions:
        return WantedVersions(torch, None, any_torch=True, reason=reason)

    own = _own_torch()
    gpus = [gpu for facts in hosts for gpu in facts.gpus]
    there = {facts.torch.version.partition("+")[0] for facts in hosts if facts.torch and facts.torch.cuda}
    if all(facts.torch for facts in hosts):
        return usual(own)
    for torch in there if len(there) == 1 else ():
        if torch in RELEASES and not any(misfit(torch, gpu) for gpu in gpus):
            return usual(torch, "GPU hosts with a torch have this version")
    why = next((why for gpu in gpus if (why := misfit(own, gpu))), None)
    if why is None:
        return usual(own)
    fitting = newest_for(gpus, newest=own) or newest_for(gpus)
    if fitting is None:
        raise UsageError(
            "orch has no torch in its list whose wheels run on the GPUs and drivers of all hosts",
            "choose one with --torch and an index of your own, or leave hosts out (`orch node release`)",
        )
    return usual(fitting, f"it runs on all GPUs; the wheels of {own} hold {why}")


def _own_torch() -> str:
    try:
        return metadata.version("torch").partition("+")[0]
    except metadata.PackageNotFoundError:
        return RELEASES[-1]


def set_up(
    hosts: Mapping[str, ConnectedHost],
    wanted: WantedVersions,
    envs: Mapping[str, Mapping[str, str]],
    show: Callable[[SetupProgress], None],
    *,
    owner: Owner,
    cluster: str,
) -> dict[str, Made | HostError]:
    """envs: pip's environment, by node. show: called from several threads. owner, cluster: the environment's user."""
    request = {
        "owner": owner.model_dump(),
        "cluster": cluster,
        "torch": wanted.torch,
        "torchvision": wanted.torchvision,
        "requirements": wanted.requirements,
        "any_torch": wanted.any_torch,
        "packages": wanted.extra.packages,
        "constraints": wanted.extra.constraints,
        "limit_s": LIMIT_S,
    }

    return _asked(hosts, request, envs, show, Made)


@dataclass(frozen=True)
class JobPython:
    """A job's environment on a host."""

    python: Annotated[str, Field(pattern="^/"), AfterValidator(grammar.program)]
    state: Literal["kept", "made"]


def set_up_for_job(
    hosts: Mapping[str, ConnectedHost],
    wanted: Requirements,
    envs: Mapping[str, Mapping[str, str]],
    show: Callable[[SetupProgress], None],
    *,
    owner: Owner,
    cluster: str,
) -> dict[str, JobPython | HostError]:
    """An environment with these packages on top of each host's own Python; it is made once for the same packages. See
    `set_up`.
    """
    request = {
        "owner": owner.model_dump(),
        "cluster": cluster,
        "for_job": True,
        "keeps_torch": not wanted.name_torch,
        "packages": wanted.packages,
        "constraints": wanted.constraints,
        "limit_s": LIMIT_S,
    }
    return _asked(hosts, request, envs, show, JobPython)


def _asked(
    hosts: Mapping[str, ConnectedHost],
    request: Mapping[str, Any],
    envs: Mapping[str, Mapping[str, str]],
    show: Callable[[SetupProgress], None],
    form: type[Answer],
) -> dict[str, Answer | HostError]:
    def one(host: ConnectedHost) -> Answer:
        progress = SetupProgress(host.node, "connects")
        own = {"workdir": host.workdir, "env": dict(envs.get(host.node, {}))}
        with exchange(host, "environment", {**request, **own}) as messages:
            for message in messages:
                if "end" in message:
                    end = message["end"]
                    return understood(host.node, lambda: TypeAdapter(form).validate_python(end))  # noqa: B023
                if "waits" in message:
                    progress = SetupProgress(host.node, "waits for another setup")
                elif "phase" in message:
                    progress = SetupProgress(host.node, one_line(message["phase"], 40))
                elif "line" in message:
                    progress = SetupProgress(host.node, progress.phase, one_line(message["line"], 200))
                show(progress)
        raise ProbeError(host.node, "its answer was cut short", "try again")

    return for_each(hosts, one, deadline_s=LIMIT_S + 60, at_once=max(1, len(hosts)))
