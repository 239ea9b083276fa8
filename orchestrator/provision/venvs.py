"""Environments on hosts without a fitting torch: which torch suits them all, and each host made ready.

    wanted = choose("2.3.1", None)                      # torch 2.3.1 and the torchvision that matches it
    outcomes = set_up(hosts, wanted, envs, show)        # node -> Made, or that host's error

The other end is `remote/environment.py`. Nothing outlives it: leaving ends the installers on every host.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, TypeAdapter

from orchestrator.errors import HostError, Mistake, ProbeError, UsageError
from orchestrator.hosts import grammar
from orchestrator.hosts.facts import NodeFacts
from orchestrator.hosts.wheels import OLDEST_TORCH, RELEASES, WHEELS_FOR, has_cu126, misfit, newest_for, numbers
from orchestrator.record import Owner
from orchestrator.text import one_line
from orchestrator.transport.ask import ConnectedHost, exchange, understood
from orchestrator.transport.fanout import for_each

# A requirements file, made fit for hosts that have none of this machine's files: takes a path, gives pip's lines.
#
#     read_requirements(Path("requirements.txt"))     # Requirements(("einops>=0.7", "tqdm"), ())
#
# Files that it names (`-r`, `-c`) are read along. What only this machine has (a path, `-e .`), what would have pip
# trust
# a server without a certificate, and an address that holds a password are refused with file and line; pip itself fills
# `${NAME}` in from the host's `env:`.

MAX_BYTES, MAX_DEPTH = 1 << 20, 8
_INCLUDE = re.compile(r"(-r|--requirement|-c|--constraint)(?:\s*=\s*|\s+|(?<=^-[rc]))(\S.*)")
_OPTION = re.compile(
    r"(-i|--index-url|--extra-index-url|-f|--find-links)(\s*=\s*|\s+)https?://\S+"
    r"|--(pre|prefer-binary|require-hashes|no-index)|--(no-binary|only-binary)(\s*=\s*|\s+)\S+"
)
_PASSWORD = re.compile(r"//[^/@\s]*:(?!\$\{)[^/@\s]+@")
_LOCAL = re.compile(r"[./~]|[A-Za-z]:\\|file:|\S+\.(whl|zip|tar\.gz)\b|.*@\s*(file:|[./~])", re.IGNORECASE)


@dataclass(frozen=True)
class Requirements:
    """Lines as pip reads them."""

    packages: tuple[str, ...] = ()
    constraints: tuple[str, ...] = ()


def read_requirements(path: Path) -> Requirements:
    """Raises UsageError with every mistake."""
    packages, constraints, mistakes = list[str](), list[str](), list[Mistake]()
    _read(path, packages, constraints, mistakes, ())
    if mistakes:
        raise UsageError("\n".join(str(mistake) for mistake in mistakes))
    if not packages:
        raise UsageError(f"{path}: names no package", "one a line, like tqdm or einops>=0.7")
    return Requirements(tuple(packages), tuple(constraints))


def _read(
    path: Path, lines: list[str], constraints: list[str], mistakes: list[Mistake], within: tuple[Path, ...]
) -> None:
    """within: the files that led here."""
    if path.resolve() in within or len(within) > MAX_DEPTH:
        mistakes.append(Mistake(str(path), 0, "names itself, or files too deep within files"))
        return
    for number, line in _lines(path):
        if include := _INCLUDE.fullmatch(line):
            into = constraints if include[1] in ("-c", "--constraint") else lines
            _read(path.parent / include[2].strip(), into, constraints, mistakes, (*within, path.resolve()))
        elif problem := _problem(line):
            mistakes.append(Mistake(str(path), number, problem))
        else:
            lines.append(line)


def _problem(line: str) -> str:
    """What is wrong with a line; "" where nothing is."""
    if _PASSWORD.search(line):
        return "an address holds a password; write ${NAME} in its place, and NAME under `env:` in the inventory"
    if line.startswith(("-e", "--editable")):
        return "an editable install is of this machine's files; `orch run --folder` ships code"
    if line.startswith("-"):
        return "" if _OPTION.fullmatch(line) else f"{grammar.show(line)} is not for hosts; leave it out"
    if _LOCAL.match(line) and "://" not in line.partition("file:")[0]:
        return f"{grammar.show(line)} is a file of this machine, and hosts have none of it; name a package or a URL"
    return ""


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Numbered, without comments; a backslash at a line's end joins the next."""
    try:
        with open(path, "rb") as opened:
            content = opened.read(MAX_BYTES + 1)
        text = content.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "is not UTF-8 text"
        raise UsageError(f"{path}: {why}", "give the path of a requirements file, as pip reads it") from error
    if len(content) > MAX_BYTES:
        raise UsageError(f"{path}: is larger than 1 MiB", "give the path of a requirements file, as pip reads it")
    held, begun = "", 1
    for number, line in enumerate([*text.splitlines(), ""], start=1):
        begun = begun if held else number
        if line.endswith("\\"):
            held += line[:-1]
            continue
        whole, held = re.sub(r"(^|\s)#.*", "", held + line).strip(), ""
        if whole:
            yield begun, whole


LIMIT_S = 2 * 3600.0
"""For one host: torch with its CUDA libraries is 3 GB, which a 10 Mbit/s line brings in 40 minutes."""
_VERSION = r"[0-9]{1,4}(\.[0-9]{1,4}){1,3}[A-Za-z0-9.]{0,20}(\+[A-Za-z0-9.]{1,20})?"


@dataclass(frozen=True)
class WantedVersions:
    """What every host's environment is to hold."""

    torch: str
    torchvision: str | None
    """None for the one that matches torch."""
    any_torch: bool
    """A host that has a torch of another version is left as it is."""
    extra: Requirements = field(default_factory=Requirements)
    """What a person's requirements file asks for beside them."""
    reason: str = field(default="", compare=False)
    """Why this torch, where nobody asked for it and it is not this machine's."""

    @property
    def requirements(self) -> tuple[str, ...]:
        """What to install: both together, or the newest torchvision would replace torch."""
        packages = (f"torch=={self.torch}", f"torchvision=={self.torchvision}" if self.torchvision else "torchvision")
        return (*packages, "numpy<2") if numbers(self.torch) < (2, 3) else packages  # built before there was a 2


@dataclass(frozen=True)
class SetupProgress:
    """How far the setup of one host is."""

    node: str
    phase: str
    """What the host is doing."""
    line: str = ""
    """What the installer printed last."""


@dataclass(frozen=True)
class Made:
    """The environment that a host ended up with."""

    python: Annotated[str, Field(pattern="^/"), AfterValidator(grammar.program)]
    torch: Annotated[str, Field(pattern=f"^{_VERSION}$")]
    torchvision: Annotated[str, Field(pattern=f"^{_VERSION}$")]
    state: Literal["own", "kept", "made", "added"]
    """`own` if the host's own Python has a fitting torch, `kept` if the environment was there, `made`, `added` if only
    packages of a requirements file were missing.
    """


def choose(torch: str | None, torchvision: str | None, hosts: Sequence[NodeFacts] = ()) -> WantedVersions:
    """What to install; without a version this machine's torch, else the newest known, and not newer than the GPUs and
    drivers of all hosts allow. hosts: those with GPUs that are to train together on the usual wheels.

    Raises UsageError for a malformed version, and for a torch that does not run on these hosts' GPUs.
    """
    for option, version in (("--torch", torch), ("--torchvision", torchvision)):
        if version and not re.fullmatch(_VERSION, version):
            raise UsageError(f"{option} {version[:40]!r} is no version", "write it like 2.3.1")
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
    """Raises UsageError if the usual wheels of this torch do not run on some host's GPUs."""
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
    """What the GPU hosts with a torch have, if that is one release; else this machine's, or another one if that does
    not run on all GPUs. Raises UsageError if none does.
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
            return usual(torch, "as the GPU hosts have it that have a torch")
    why = next((why for gpu in gpus if (why := misfit(own, gpu))), None)
    if why is None:
        return usual(own)
    fitting = newest_for(gpus, newest=own) or newest_for(gpus)
    if fitting is None:
        raise UsageError(
            "orch knows no torch whose wheels run on the GPUs and drivers of all hosts",
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
    """All hosts at once. envs: by node, what pip is to have in its environment. show: called from several threads.
    owner, cluster: who will use it.
    """
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

    def one(host: ConnectedHost) -> Made:
        progress = SetupProgress(host.node, "connects")
        own = {"workdir": host.workdir, "env": dict(envs.get(host.node, {}))}
        with exchange(host, "environment", {**request, **own}) as words:
            for word in words:
                if "end" in word:
                    end = word["end"]
                    return understood(host.node, lambda: TypeAdapter(Made).validate_python(end))  # noqa: B023
                if "waits" in word:
                    progress = SetupProgress(host.node, "waits for another setup")
                elif "phase" in word:
                    progress = SetupProgress(host.node, one_line(word["phase"], 40))
                elif "line" in word:
                    progress = SetupProgress(host.node, progress.phase, one_line(word["line"], 200))
                show(progress)
        raise ProbeError(host.node, "its answer was cut short", "try again")

    return for_each(hosts, one, deadline_s=LIMIT_S + 60, at_once=max(1, len(hosts)))
