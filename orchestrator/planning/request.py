"""A job as orch reads it from its spec, and the files it needs: an experiment, a script, or a module.

job = parse_job(JobSpec(exp="mnist_lenet", settings={"epochs": "1"}))
job.request.settings.epochs                                             1
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from orchestrator.errors import UsageError
from orchestrator.planning.bundle import names_in, pack_folder, trainer_folder
from orchestrator.planning.job_spec import HostRange, JobSpec
from orchestrator.planning.launch_plan import LOCAL_RANK, Attempt, CodeFolder
from orchestrator.planning.launchers import Program, not_python, read_program
from orchestrator.planning.secret_files import names_secret, shows_secret
from orchestrator.planning.variables import read_variables
from trainer.shared.config import parse_settings
from trainer.shared.experiments import SCRIPT
from trainer.shared.setting_fields import SettingsError
from trainer.shared.settings import AnySettings, Settings
from trainer.shared.shares import WORDS

# Who starts the ranks of a host in place of orch: the command that a person would type there. Pure.
#
#     started_by("spawn", ("-m", "trainer", "--exp=mnist_lenet"), 2)
#     # ("-m", "trainer", "--exp=mnist_lenet", "--spawn=2")
#
# One process of orch's stands for all ranks of the host, which meet at a store of their own on it.

Starter = Literal["process", "spawn", "torchrun", "launch"]
_MODULES = {"torchrun": "torch.distributed.run", "launch": "torch.distributed.launch"}


def started_by(starter: Starter, command: tuple[str, ...], ranks: int) -> tuple[str, ...]:
    """Arguments after the interpreter. command: the trainer's; ranks: the host's. A `process` is one rank alone."""
    if starter == "process":
        return command
    if starter == "spawn":
        return (*command, f"--spawn={ranks}")
    return ("-m", _MODULES[starter], "--standalone", f"--nproc-per-node={ranks}", *command)


AUTO = "auto"
"""As the value of `strategy`: the fastest that is predicted."""
_NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class RunRequest:
    kind: Literal["experiment", "script", "module"]
    name: str
    """The experiment, or the script's or module's name."""
    command: tuple[str, ...]
    """Arguments after the interpreter, the same on every host; those of an experiment end before its settings."""
    spec: JobSpec = field(default_factory=JobSpec)
    settings: AnySettings | None = None
    """Of an experiment, and of a script that is shipped with the trainer; None of another script without --set."""
    chosen: Mapping[str, str] = field(default_factory=dict)
    """The settings that the person set by hand, as they wrote them: the plan does not overrule them."""
    batch: int | None = None
    """Samples of one update of a script over all ranks, if the person gave them."""
    best_way: bool = False
    """strategy=auto: the plan chooses how the ranks stay together."""
    hosts: HostRange | None = None
    """How many of the nodes are enough, and how many at most; None: all of them take part."""
    resumes: str | None = None
    """An earlier job of a script that resumes by itself: it starts with the files that this one wrote."""
    attempt: Attempt | None = None
    """The number of this attempt, of a job that is tried again."""
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Variables for this job only; they win over the inventory's."""
    starter: Starter | None = None
    """What starts the ranks of its one host; None is orch."""
    notes: tuple[str, ...] = ()
    """What the person should know of how their words were understood."""

    @property
    def trains(self) -> bool:
        """Whether the trainer runs, which takes its settings as arguments."""
        return self.kind == "experiment"

    @property
    def training(self) -> Settings | None:
        """Its settings; None if it trains no network of ours."""
        return self.settings if isinstance(self.settings, Settings) else None

    @property
    def global_batch(self) -> int | None:
        """Samples of one update over all ranks; None if unknown."""
        return self.training.batch if self.training and self.trains else self.batch

    @property
    def is_one_process(self) -> bool:
        """Whether one process is to use all GPUs of its host."""
        return self.training is not None and self.training.strategy == "dp"

    @property
    def leaves_out(self) -> bool:
        """Whether hosts without which the job is faster may be left out: the person leaves the strategy, or the
        shares, to measured or predicted speeds.
        """
        if not self.training:
            return False
        shares = self.training.shares
        return (shares == "measured" and "shares" in self.chosen) or (self.best_way and shares in WORDS)


@dataclass(frozen=True)
class ParsedJob:
    """A request, and the files to ship: their description and their tar."""

    request: RunRequest
    code: CodeFolder
    blob: bytes


def parse_job(spec: JobSpec, kept: Mapping[str, Any] = _NOTHING) -> ParsedJob:
    """kept: an experiment's settings of an earlier job; those of the spec win over them. Raises UsageError."""
    job = _read_program(spec, kept)
    request = replace(
        job.request, spec=spec, hosts=spec.host_range, attempt=_first_attempt(spec),
        env=read_variables(spec.env, spec.env_files, os.environ),
    )  # fmt: skip
    return replace(job, request=request)


def _read_program(spec: JobSpec, kept: Mapping[str, Any]) -> ParsedJob:
    if spec.exp:
        return ParsedJob(request_of(spec.exp, spec.settings, kept), *pack_folder(trainer_folder(), prefix="trainer/"))
    _refuse_secrets(spec.command[1:] if spec.module else spec.command)
    program = read_program(spec.command, is_module=spec.module is not None)
    arguments = ((LOCAL_RANK,) if spec.pass_local_rank else ()) + program.arguments
    return _module(program, arguments, spec) if program.is_module else _script(program, arguments, spec)


def _first_attempt(spec: JobSpec) -> Attempt | None:
    if spec.retries is None:
        return None
    return Attempt(
        number=1,
        most=spec.retries + 1,
        any_cause=spec.retry_on == "any",
        rejoin=spec.rejoin,
        wait_s=spec.retry_wait_s,
    )


def refuse_without_trainer(job: ParsedJob) -> None:
    """Raises UsageError for a script that does not use the trainer."""
    if not job.request.trains and not _has_trainer(job.blob):
        raise UsageError(
            f"{job.request.name} does not import trainer, so its loop cannot be measured or predicted",
            "let it take part by `trainer.join` (docs/scripts.md), or name an experiment with --exp",
        )


def _has_trainer(blob: bytes) -> bool:
    return any(name.endswith("trainer/session/join.py") for name in names_in(blob))


def _refuse_secrets(command: Sequence[str]) -> None:
    """Every user of a host can read the arguments of its programs, and plans and reports repeat them."""
    for position, (argument, following) in enumerate(zip(command, (*command[1:], "-"), strict=False)):
        option, equals, value = argument.partition("=")
        given = bool(value) if equals else option.startswith("-") and not following.startswith("-")
        if (given and names_secret(option)) or shows_secret(argument):
            what = option if names_secret(option) else f"argument {position}"
            raise UsageError(
                f"{what} looks like a secret, and every user of the hosts can read a command line",
                "let the script read it from its environment: --env NAME, --env-file, or `env:` in the inventory",
            )


def parse_pairs(items: Sequence[str], form: str) -> dict[str, str]:
    """`["epochs=1"]` to `{"epochs": "1"}`. form: how an item should look, for the message."""
    pairs = {}
    for item in items:
        key, equals, value = item.partition("=")
        if not equals or not key:
            raise UsageError(f"{item!r} is not {form}", "write it like epochs=1")
        pairs[key.strip()] = value
    return pairs


def request_of(exp: str, pairs: Mapping[str, str], kept: Mapping[str, Any] = _NOTHING) -> RunRequest:
    """An experiment's request without its files, which take a tenth of a second to pack. pairs: settings as a person
    writes them; strategy may be AUTO. kept: values of others, which `pairs` win over. Raises UsageError.
    """
    best_way = pairs.get("strategy") == AUTO
    if best_way:
        pairs, kept = ({key: each[key] for key in each if key != "strategy"} for each in (pairs, kept))
    settings = _parsed(exp, pairs, kept)
    chosen = {**{key: str(value) for key, value in kept.items()}, **pairs}
    command = ("-m", "trainer", f"--exp={exp}")
    return RunRequest("experiment", exp, command, settings=settings, chosen=chosen, best_way=best_way)


def _module(program: Program, arguments: tuple[str, ...], spec: JobSpec) -> ParsedJob:
    command = (*program.flags, "-m", program.name, *arguments)
    request = RunRequest("module", program.name, command, batch=spec.batch, notes=program.notes)
    code, blob = pack_folder(Path(spec.folder or "."), trainer_at="")
    return ParsedJob(_with_settings(request, spec, blob), code, blob)


def _with_settings(request: RunRequest, spec: JobSpec, blob: bytes) -> RunRequest:
    """A script's request, with the settings that `trainer.join` gives it. blob: the files to ship."""
    if not spec.settings and not _has_trainer(blob):
        return request
    pairs = dict(spec.settings)
    if spec.batch is not None:
        if pairs.get("batch", str(spec.batch)) != str(spec.batch):
            raise UsageError(f"--batch {spec.batch} and --set batch={pairs['batch']} contradict each other", "give one")
        pairs["batch"] = str(spec.batch)
    best_way = pairs.get("strategy") == AUTO
    if best_way:
        del pairs["strategy"]
    settings = _parsed(SCRIPT, pairs)
    assert isinstance(settings, Settings)  # noqa: S101 - for the type checker
    batch = settings.batch if "batch" in pairs else None
    return replace(request, settings=settings, chosen=pairs, batch=batch, best_way=best_way)


def _parsed(exp: str, pairs: Mapping[str, str], kept: Mapping[str, Any] = _NOTHING) -> AnySettings:
    try:
        return parse_settings(exp, pairs, kept)
    except SettingsError as error:
        raise UsageError(str(error), "`python -m trainer --help` lists every setting") from error


def _script(program: Program, arguments: tuple[str, ...], spec: JobSpec) -> ParsedJob:
    script = Path(program.name)
    if not script.is_file():
        raise UsageError(f"{script}: no such script", "give its path as seen from here")
    _refuse_other_languages(script)
    root = (Path(spec.folder) if spec.folder else script.parent).resolve()
    if not script.resolve().is_relative_to(root):
        raise UsageError(f"{script} is not inside {root}", "choose a --folder that holds the script")
    inside = script.resolve().relative_to(root).as_posix()
    beside = "".join(f"{part}/" for part in Path(inside).parent.parts)
    code, blob = pack_folder(root, trainer_at=beside)
    if inside not in names_in(blob):
        raise UsageError(
            f"{script} itself would stay here: .gitignore or .orchignore leaves it out, or it looks like a secret",
            f"take it out of there, or add a line `!{inside}` to {root / '.orchignore'}",
        )
    name = f"./{inside}" if inside.startswith("-") else inside  # else Python would take it for an option
    command = (*program.flags, name, *arguments)
    request = RunRequest("script", script.name, command, batch=spec.batch, notes=program.notes)
    return ParsedJob(_with_settings(request, spec, blob), code, blob)


def _refuse_other_languages(script: Path) -> None:
    """Python would stop at their first line. Raises UsageError."""
    with open(script, "rb") as file:
        begins = file.read(256)
    if script.suffix == ".py":
        return
    words = begins[2:].partition(b"\n")[0].decode(errors="replace").split() if begins.startswith(b"#!") else []
    if words and not any("python" in word or "pypy" in word for word in words):
        raise not_python(str(script), f"a script for `{' '.join(words)}`")
    if not words and script.suffix in (".sh", ".bash"):
        raise not_python(str(script), "a shell script")
    if b"\0" in begins:
        raise not_python(str(script), "a compiled program")
