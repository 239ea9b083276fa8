"""Parses a JobSpec into a run request with typed settings, and packs the files to ship."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from orchestrator.errors import UsageError
from orchestrator.planning.bundle import names_in, pack_folder, trainer_folder
from orchestrator.planning.job_spec import HostRange, JobSpec
from orchestrator.planning.launch_plan import LOCAL_RANK, Attempt, CodeFolder
from orchestrator.planning.launchers import Program, is_bare, read_program
from orchestrator.planning.requirements import Requirements, read_requirements
from orchestrator.planning.variables import names_secret, read_variables, shows_secret
from trainer.shared.config import EXPERIMENTS, parse_settings
from trainer.shared.experiments import SCRIPT
from trainer.shared.setting_fields import SettingsError, close_names
from trainer.shared.settings import AnySettings, Settings
from trainer.shared.shares import WORDS
from trainer.shared.strategy_table import FIDELITIES

# Alternative starters of a host's ranks, for comparison with orch's own. One process of orch stands for all ranks.

Starter = Literal["process", "spawn", "srun", "torchrun", "launch"]
_MODULES = {"torchrun": "torch.distributed.run", "launch": "torch.distributed.launch"}


def started_by(starter: Starter, command: tuple[str, ...], ranks: int) -> tuple[str, ...]:
    """Interpreter arguments. command: the trainer's. `process` starts one rank."""
    if starter == "process":
        return command
    if starter in ("spawn", "srun"):
        return (*command, f"--{starter}={ranks}")
    return ("-m", _MODULES[starter], "--standalone", f"--nproc-per-node={ranks}", *command)


AUTO = "auto"
"""Value of `strategy`: the fastest predicted."""
_NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class RunRequest:
    kind: Literal["experiment", "script", "module", "program"]
    name: str
    """Experiment, script, module or program."""
    command: tuple[str, ...]
    """Interpreter arguments, without settings, or the whole command of a program; equal on all hosts."""
    spec: JobSpec = field(default_factory=JobSpec, repr=False)
    settings: AnySettings | None = None
    """None for a script that neither imports the trainer nor has --set."""
    chosen: Mapping[str, str] = field(default_factory=dict)
    """As typed; the plan does not change them."""
    batch: int | None = None
    """Samples per update of a script, over all ranks."""
    best_way: bool = False
    """strategy=auto."""
    hosts: HostRange | None = None
    """None: all nodes."""
    resumes: str | None = None
    """A script that resumes by itself starts with this job's files."""
    attempt: Attempt | None = None
    detached: bool = False
    """The hosts queue, retry and notify by themselves."""
    notify: str | None = field(default=None, repr=False)
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    """For this job only; overrides the inventory."""
    requirements: Requirements | None = None
    """Packages that hosts install for this job."""
    starter: Starter | None = None
    """None: orch starts the ranks."""
    job: str | None = None
    """The id, if it is decided already."""
    notes: tuple[str, ...] = ()
    """About the interpretation of the command."""

    @property
    def trains(self) -> bool:
        """Whether the trainer runs, with settings as arguments."""
        return self.kind == "experiment"

    @property
    def training(self) -> Settings | None:
        """None if the trainer trains no network."""
        return self.settings if isinstance(self.settings, Settings) else None

    @property
    def global_batch(self) -> int | None:
        """Samples per update over all ranks; None if unknown."""
        return self.training.batch if self.training and self.trains else self.batch

    @property
    def is_one_process(self) -> bool:
        """Whether one process uses all GPUs of its host."""
        return self.training is not None and self.training.strategy == "dp"

    @property
    def leaves_out(self) -> bool:
        """Slow hosts may be left out if strategy or shares follow from measured or predicted speeds."""
        if not self.training:
            return False
        shares = self.training.shares
        return (shares == "measured" and "shares" in self.chosen) or (self.best_way and shares in WORDS)


@dataclass(frozen=True)
class ParsedJob:
    request: RunRequest
    code: CodeFolder
    blob: bytes


Pack = Callable[..., tuple[CodeFolder, bytes]]


def parse_job(spec: JobSpec, kept: Mapping[str, Any] = _NOTHING, pack: Pack = pack_folder) -> ParsedJob:
    """kept: an earlier job's settings, overridden by the spec's. pack: remembers a folder for many jobs. Raises
    UsageError.
    """
    requirements = read_requirements(Path(spec.requirements)) if spec.requirements else None
    if spec.requirements:
        spec = spec.updated(requirements=os.path.abspath(spec.requirements))  # a repeated job finds it from anywhere
    job = _read_program(spec, kept, pack)
    request = replace(
        job.request, spec=spec, hosts=spec.host_range, attempt=_first_attempt(spec), requirements=requirements,
        env=read_variables(spec.env, spec.env_files, os.environ),
    )  # fmt: skip
    return replace(job, request=request)


def _read_program(spec: JobSpec, kept: Mapping[str, Any], pack: Pack) -> ParsedJob:
    if spec.exp:
        return ParsedJob(request_of(spec.exp, spec.settings, kept), *pack(trainer_folder(), prefix="trainer/"))
    _refuse_secrets(spec.command[1:] if spec.module else spec.command)
    program = read_program(spec.command, is_module=spec.module is not None)
    if program.is_hosts or (is_bare(program.name) and not program.is_module and not Path(program.name).exists()):
        return _hosts_program(program, spec, pack)
    arguments = ((LOCAL_RANK,) if spec.pass_local_rank else ()) + program.arguments
    read = _module if program.is_module else _script
    return read(program, arguments, spec, pack)


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
    if not job.request.trains and not _has_trainer(job.blob):
        raise UsageError(
            f"{job.request.name} does not import trainer, so its loop cannot be measured or predicted",
            "let it take part by `trainer.join` (`orch help scripts`), or name an experiment with --exp",
        )


def _has_trainer(blob: bytes) -> bool:
    return any(name.endswith("trainer/session/join.py") for name in names_in(blob))


def _refuse_secrets(command: Sequence[str]) -> None:
    """All users of a host can read arguments, and plans and reports repeat them. Raises UsageError."""
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
    """`["epochs=1"]` to `{"epochs": "1"}`. Raises UsageError with the expected form."""
    pairs = {}
    for item in items:
        key, equals, value = item.partition("=")
        if not equals or not key:
            raise UsageError(f"{item!r} is not {form}", "write it like epochs=1")
        pairs[key.strip()] = value
    return pairs


def request_of(exp: str, pairs: Mapping[str, str], kept: Mapping[str, Any] = _NOTHING) -> RunRequest:
    """Without files, which take 0.1 s to pack. kept: overridden by `pairs`. Raises UsageError."""
    best_way = pairs.get("strategy") == AUTO
    if best_way:
        pairs, kept = ({key: each[key] for key in each if key != "strategy"} for each in (pairs, kept))
    settings = _parsed(exp, {**pairs, **_stand_in({**kept, **pairs})} if best_way else pairs, kept)
    chosen = {**{key: str(value) for key, value in kept.items()}, **pairs}
    command = ("-m", "trainer", f"--exp={exp}")
    return RunRequest("experiment", exp, command, settings=settings, chosen=chosen, best_way=best_way)


def _module(program: Program, arguments: tuple[str, ...], spec: JobSpec, pack: Pack) -> ParsedJob:
    command = (*program.flags, "-m", program.name, *arguments)
    request = RunRequest("module", program.name, command, batch=spec.batch, notes=program.notes)
    code, blob = pack(Path(spec.folder or "."), trainer_at="")
    return ParsedJob(_with_settings(request, spec, blob), code, blob)


def _with_settings(request: RunRequest, spec: JobSpec, blob: bytes) -> RunRequest:
    """Adds settings for `trainer.join`. blob: the files to ship. Raises UsageError."""
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
    settings = _parsed(SCRIPT, {**pairs, **_stand_in(pairs)} if best_way else pairs)
    assert isinstance(settings, Settings)  # noqa: S101 - for the type checker
    batch = settings.batch if "batch" in pairs else None
    return replace(request, settings=settings, chosen=pairs, batch=batch, best_way=best_way)


def _stand_in(pairs: Mapping[str, Any]) -> dict[str, str]:
    """A strategy that has the fidelity, until `strategy=auto` is resolved."""
    strategies = FIDELITIES.get(pairs.get("fidelity", ""), ())
    return {"strategy": strategies[0]} if strategies else {}


def _parsed(exp: str, pairs: Mapping[str, str], kept: Mapping[str, Any] = _NOTHING) -> AnySettings:
    try:
        return parse_settings(exp, pairs, kept)
    except SettingsError as error:
        raise UsageError(str(error), "`orch help settings` explains every setting") from error


def _hosts_program(program: Program, spec: JobSpec, pack: Pack) -> ParsedJob:
    if program.name in EXPERIMENTS:
        raise UsageError(f"{program.name} is an experiment, not a program", f"orch run --exp {program.name}")
    _refuse_local_rank(program.name, spec)
    words, name = (program.name, *program.arguments), Path(program.name).name
    notes = () if program.is_hosts else (f"{program.name} is no file here: each host starts its own",)
    request = RunRequest("program", name, words, batch=spec.batch, notes=notes)
    code, blob = pack(Path(spec.folder or "."), trainer_at="")
    return ParsedJob(_with_settings(request, spec, blob), code, blob)


def _refuse_local_rank(name: str, spec: JobSpec) -> None:
    if spec.pass_local_rank:
        raise UsageError(f"{name} is no Python script", "leave --pass-local-rank out; LOCAL_RANK has the number")


def _script(program: Program, arguments: tuple[str, ...], spec: JobSpec, pack: Pack) -> ParsedJob:
    script = Path(program.name)
    if not script.is_file():
        there = [path.name for path in script.parent.glob(f"*{script.suffix}")] if script.parent.is_dir() else []
        near = close_names(script.name, there)
        meant = f"did you mean {script.with_name(near[0])}?" if near else "give its path as seen from here"
        raise UsageError(f"{script}: no such script", meant)
    if (before := _program_of(script)) is not None:
        _refuse_local_rank(str(script), spec)
    root = (Path(spec.folder) if spec.folder else script.parent).resolve()
    if not script.resolve().is_relative_to(root):
        raise UsageError(f"{script} is not inside {root}", "choose a --folder that holds the script")
    inside = script.resolve().relative_to(root).as_posix()
    beside = "".join(f"{part}/" for part in Path(inside).parent.parts)
    code, blob = pack(root, trainer_at=beside)
    if inside not in names_in(blob):
        raise UsageError(
            f"{script} itself would stay here: .gitignore or .orchignore leaves it out, or it looks like a secret",
            f"take it out of there, or add a line `!{inside}` to {root / '.orchignore'}",
        )
    if before is None:
        name = f"./{inside}" if inside.startswith("-") else inside  # else Python would take it for an option
        request = RunRequest("script", script.name, (*program.flags, name, *arguments), notes=program.notes)
    else:
        request = RunRequest("program", script.name, (*before, f"./{inside}", *arguments), notes=program.notes)
    request = replace(request, batch=spec.batch)
    return ParsedJob(_with_settings(request, spec, blob), code, blob)


def _program_of(script: Path) -> tuple[str, ...] | None:
    """The words that start a file that is not Python, before its name; None for Python. Raises UsageError."""
    with open(script, "rb") as file:
        begins = file.read(256)
    if script.suffix == ".py":
        return None
    words = begins[2:].partition(b"\n")[0].decode(errors="replace").split() if begins.startswith(b"#!") else []
    if any("python" in word or "pypy" in word for word in words):
        return None
    is_executable = os.access(script, os.X_OK)
    if words:
        return () if is_executable else tuple(words)
    if script.suffix in (".sh", ".bash"):
        return (script.suffix[1:],)
    if b"\0" in begins and not is_executable:
        raise UsageError(f"{script} is a compiled program that may not be executed", f"chmod +x {script}")
    return () if b"\0" in begins else None
