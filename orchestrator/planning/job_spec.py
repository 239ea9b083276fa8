"""Defines JobSpec: everything that a user can request of a job, and mistakes in a request. Pure.

Its fields define the options of `orch run`, the keys of a job file, the keywords of `Cluster.run` and the form of
`orch ui`; mistakes are reported in the words of each:

    spec = checked({"exp": "mnist_lenet", "retries": 2}, LINE)      UsageError in the words of the command line
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, get_args, get_origin

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, ValidationError, ValidationInfo

from orchestrator.errors import UsageError
from orchestrator.hosts import grammar
from orchestrator.hosts.inventory import EnvName, EnvValue, Name, Written, nearest, problem
from orchestrator.planning.naming import job_name, job_note, kept_folder
from orchestrator.units import parse_duration

FILE_KEYS: Final = "file"
"""Context of values from a file: text stays text, times need units."""


@dataclass(frozen=True)
class Option:
    help: str
    metavar: str | None = None
    spelled: str = ""
    """Replaces `--` and the field's name."""
    complete: str = ""
    """Function of `cli/common.py` that completes its value."""
    on_page: bool = False


FORM = "MIN:MAX or N, numbers of hosts, 1 <= MIN <= MAX"
SILENCE_S = 20.0
"""As LEASE_S of `remote/membership.py`: TCP's own pauses can take ten seconds."""


@dataclass(frozen=True)
class HostRange:
    min_hosts: int
    max_hosts: int

    def __str__(self) -> str:
        return f"--hosts {self.min_hosts}:{self.max_hosts}"


def parse_hosts(text: str) -> HostRange:
    """Raises UsageError."""
    found = re.fullmatch(r"([0-9]{1,5})(?::([0-9]{1,5}))?", text)
    least, most = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= least <= most:
        raise UsageError(f"--hosts {text}: expected {FORM}", "like --hosts 2:4")
    return HostRange(least, most)


# ---- values ----------------------------------------------------------------------------------------------------------


def _seconds(value: Any, info: ValidationInfo) -> Any:
    if isinstance(value, str):
        return float(parse_duration(value))
    if isinstance(value, (int, float)) and not isinstance(value, bool) and info.context == FILE_KEYS:
        raise ValueError(f"must be written with its unit, like {value:g}s, not {value:g}")
    return float(value) if type(value) is int else value


def _text(value: Any) -> Any:
    """An unquoted YAML number, or a Python value, as typed text."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, (int, float)) else value


def _path(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _number_of_hosts(value: Any) -> Any:
    return str(value) if type(value) is int else value


def _hosts(text: str) -> str:
    try:
        parse_hosts(text)
    except UsageError:
        raise ValueError(f"{grammar.show(text)} is not {FORM}; write it like 2:4") from None
    return text


def _names(value: Any) -> Any:
    """`a,b,gpu[1,3]` as a list; commas in brackets do not separate."""
    if not isinstance(value, str):
        return _listed(value)
    names = [name for name in re.split(r",(?![^\[]*\])", value) if name.strip()]
    if value.strip() and not names:
        raise ValueError(f"{value!r} names no node")
    return names


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else list(value) if isinstance(value, tuple) else value


def _pairs(value: Any) -> Any:
    """`["NAME=value", "NAME"]` as a mapping."""
    value = _listed(value)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        return value
    return {name: text if equals else None for name, equals, text in (item.partition("=") for item in value)}


def _settings(value: Any) -> Any:
    pairs = _pairs(value)
    for key, text in pairs.items() if isinstance(pairs, dict) else ():
        if not str(key).strip() or text is None:
            raise ValueError(f"{key!r} is not KEY=VALUE; write it like epochs=1")
    return {str(key).strip(): text for key, text in pairs.items()} if isinstance(pairs, dict) else pairs


def _named(text: str) -> str:
    if not text.strip():
        raise ValueError("is empty; give a name, or leave it out")
    return text


def _unique(values: list[str]) -> list[str]:
    return list(dict.fromkeys(values))


Seconds = Annotated[float, BeforeValidator(_seconds), Field(gt=0, allow_inf_nan=False)]
Silence = Annotated[float, BeforeValidator(_seconds), Field(ge=SILENCE_S, le=3600.0, allow_inf_nan=False)]
Count = Annotated[int | None, Field(ge=1)]
Retries = Annotated[int | None, Field(ge=1, le=20)]
Text = Annotated[str, BeforeValidator(_text)]
Named = Annotated[str, AfterValidator(_named)]
Path = Annotated[str, BeforeValidator(_path)]
Folder = Annotated[str, AfterValidator(kept_folder)]
Hosts = Annotated[str, BeforeValidator(_number_of_hosts), AfterValidator(_hosts)]
JobName = Annotated[str, AfterValidator(job_name)]
Note = Annotated[str, AfterValidator(job_note)]
Settings = Annotated[dict[str, Text], BeforeValidator(_settings)]
Variables = Annotated[dict[EnvName, EnvValue | None], BeforeValidator(_pairs)]
Nodes = Annotated[list[str], BeforeValidator(_names)]
Listed = BeforeValidator(_listed)


def option(default: Any, help: str, metavar: str | None = None, **more: Any) -> Any:
    """A field with a command-line option. more: of `Option`."""
    made: Any = {"option": Option(help, metavar, **more)}
    if default in ([], {}):
        is_shown = metavar != "NAME[=VALUE]"  # values of variables may be secrets
        return Field(default_factory=type(default), json_schema_extra=made, repr=is_shown)
    return Field(default, json_schema_extra=made)


class JobSpec(Written):
    """Names of fields in seconds end in `_s`; command line and files omit that and use `90s`, `30m`, `12h`. The order
    is that of `--help` and of files.
    """

    model_config = ConfigDict(alias_generator=lambda name: name.removesuffix("_s"), populate_by_name=True, frozen=True)

    exp: Named | None = option(
        None,
        "A named experiment: mnist_lenet, resnet152_cifar, resnet50_imagenet, gpt_text, or collectives (how fast "
        "the network is).",
        "NAME",
        complete="experiments",
    )
    script: Named | None = None
    """A script or program, or a command before it, like torchrun; `args` has the rest of that line."""
    module: Named | None = None
    args: Annotated[list[str], Listed] = Field(default_factory=list)
    """Arguments of the script or module."""
    settings: Settings = option(
        {},
        "A setting of the experiment; repeatable. `orch help settings` lists all.",
        "KEY=VALUE",
        spelled="--set",
        complete="setting_pairs",
    )
    resume: str | None = option(
        None,
        "Start a new job from the last checkpoint of this one; a script that resumes by itself begins with the files "
        "that this one wrote.",
        "JOB",
        complete="job_ids",
    )
    keep: Annotated[list[Folder], Listed, AfterValidator(_unique)] = option(
        [], "Begin with this folder as the script's job before left it (out/); repeatable.", "FOLDER"
    )
    folder: Path | None = option(
        None, "The folder to ship. [default: the script's folder, or the current one]", "PATH", on_page=True
    )
    batch: Count = option(None, "Global batch size; each rank finds its share in ORCH_SHARE.", "N", on_page=True)
    pass_local_rank: bool = option(False, "Give the script --local_rank=N, as torch.distributed.launch does.")
    no_metrics: bool = option(False, "Do not measure the steps of a script: install no hooks in its torch.")
    no_preload: bool = option(
        False, "Let each rank import torch by itself, instead of once per host before they are forked."
    )
    env: Variables = option(
        {},
        "A variable for the ranks of this job; repeatable. Without =VALUE it is taken from here.",
        "NAME[=VALUE]",
        on_page=True,
    )
    env_files: Annotated[list[Path], Listed] = option(
        [],
        "A file of such variables, one NAME=value per line; overrides the inventory's `env:`, --env overrides it.",
        "PATH",
        spelled="--env-file",
    )
    requirements: Path | None = option(
        None,
        "Packages for this job: a requirements file, or a pyproject.toml with uv.lock. Each host installs them once.",
        "FILE",
    )
    nodes: Nodes = option(
        [],
        "Use only these nodes: names, ranges like 'gpu[01-16]', patterns like 'v100*'.",
        "A,B",
        complete="node_names",
    )
    hosts: Hosts | None = option(
        None,
        "Start on the hosts that can take part, the best MAX of them, and on no fewer than MIN. N means N:N.",
        "MIN:MAX",
        complete="node_ranges",
        on_page=True,
    )
    share: bool = option(False, "Use GPUs even if another job or other people are on them.", on_page=True)
    wait: bool = option(False, "Queue for GPUs in use, and start when they are free.")
    wait_limit_s: Seconds | None = option(None, "Wait no longer than this: 30m, 12h. Means --wait.")
    priority: Literal["low", "normal", "high"] = option(
        "normal", "With --wait: high goes ahead of all queued jobs that are normal or low. No running job is ended."
    )
    grace_s: Seconds = option(
        3.0,
        "How long ranks have after the first signal (SIGTERM if the script handles it, else SIGINT) before SIGTERM, "
        "and after that before SIGKILL.",
        on_page=True,
    )
    silence_s: Silence = option(
        SILENCE_S,
        "How long a host may send nothing, or stand still, before the job counts it as lost: 60s for hosts that stall.",
    )
    retries: Retries = option(
        None,
        "If hosts make the job fail, start it again on the others, from its last checkpoint; at most N times (20).",
        "N",
    )
    retry_on: Literal["hosts", "any"] = option(
        "hosts", "With --retries: any also tries again if the script failed by itself."
    )
    rejoin: bool = option(False, "With --retries: take a lost host in again once it answers.")
    retry_wait_s: Seconds = option(
        10.0, "With --retries: the pause before the first one; it doubles each time, up to 6m."
    )
    time_limit_s: Seconds | None = option(None, "End the job after this time: 90s, 30m, 12h.", on_page=True)
    name: JobName | None = option(None, "Prefix of the job's id.", "NAME", on_page=True)
    note: Note | None = option(None, "A line that `orch jobs` and the report show with it.", "TEXT", on_page=True)
    cluster: Name | None = option(
        None,
        "A remembered cluster.  [default: $ORCH_CLUSTER, else the one of the last `orch up` or `orch use`]",
        "NAME",
        complete="cluster_names",
    )

    @property
    def command(self) -> tuple[str, ...]:
        program = self.script if self.module is None else self.module
        return () if program is None else (program, *self.args)

    @property
    def host_range(self) -> HostRange | None:
        return parse_hosts(self.hosts) if self.hosts else None

    @property
    def waits(self) -> bool:
        return self.wait or self.wait_limit_s is not None

    def given(self, name: str) -> bool:
        """Whether the user gave this field, other than as false or empty."""
        value = getattr(self, name)
        return name in self.model_fields_set and value is not None and value is not False and value not in ([], {})

    def updated(self, **values: Any) -> JobSpec:
        return JobSpec.model_validate({**{name: getattr(self, name) for name in self.model_fields_set}, **values})


def key_of(name: str) -> str:
    return name.removesuffix("_s")


OPTIONS: Final[Mapping[str, Option]] = {
    name: field.json_schema_extra["option"]  # type: ignore[misc]
    for name, field in JobSpec.model_fields.items()
    if isinstance(field.json_schema_extra, dict)
}
"""By field, in order."""
PAGE_FIELDS: Final = tuple(name for name, option in OPTIONS.items() if option.on_page)


# ---- spelling --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Word:
    """For `str.format_map`: `{batch}` is the field's name, `{batch:8}` the field with a value."""

    name: str
    valued: Callable[[str], str]

    def __format__(self, value: str) -> str:
        return self.valued(value) if value else self.name


class Spelling(dict[str, _Word]):
    def __init__(self, word: Callable[[str], _Word]) -> None:
        super().__init__({name: word(name) for name in JobSpec.model_fields})


def spelled(name: str) -> str:
    return OPTIONS[name].spelled or f"--{key_of(name).replace('_', '-')}"


def _on_line(name: str) -> _Word:
    option = spelled(name) if name in OPTIONS else {"script": "a script", "module": "-m MODULE"}.get(name, name)
    return _Word(option, lambda value: f"{option} {value}")


def _in_file(name: str) -> _Word:
    key = key_of(name)
    if name == "settings":
        return _Word(f"`{key}`", lambda pair: f"`{key}: {{{pair.replace('=', ': ')}}}`")
    return _Word(f"`{key}`", lambda value: f"`{key}: {value}`")


def _in_python(name: str) -> _Word:
    return _Word("a script" if name in ("script", "args") else f"{name}=", lambda value: f"{name}={value}")


LINE, FILE, PYTHON = Spelling(_on_line), Spelling(_in_file), Spelling(_in_python)


def words(spec: JobSpec) -> list[str]:
    typed = [word for name in OPTIONS for word in _option(name, getattr(spec, name))]
    if spec.module is not None:
        return [*typed, "-m", spec.module, "--", *spec.args]
    return [*typed, "--", *spec.command] if spec.command else typed


def _option(name: str, value: Any) -> Iterator[str]:
    option = spelled(name)
    if value == JobSpec.model_fields[name].get_default(call_default_factory=True):
        return
    if name == "nodes":
        yield from (option, ",".join(value))
    elif isinstance(value, dict):
        for key, text in value.items():
            yield from (option, key if text is None else f"{key}={text}")
    elif isinstance(value, list):
        for item in value:
            yield from (option, item)
    elif isinstance(value, bool):
        yield option
    else:
        yield from (option, f"{value:.12g}s" if isinstance(value, float) else str(value))


def from_text(name: str, text: str) -> Any:
    """A field's value from a form's text; None if empty. Raises ValueError."""
    kind = JobSpec.model_fields[name].annotation
    if not text.strip():
        return None
    if kind is bool:
        return True
    if get_origin(kind) in (list, dict) and name != "nodes":
        return shlex.split(text)
    is_number = int in get_args(kind) and text.strip().isdecimal() and len(text) < 20
    return int(text) if is_number else text.strip()


# ---- mistakes --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SpecMistake:
    field: str
    words: str
    remedy: str = ""


_OF_SCRIPT: Final = {
    "args": "",
    "folder": "",
    "batch": "{settings:batch=N}",
    "pass_local_rank": "leave it out: the trainer passes each rank its number",
    "no_metrics": "leave it out: the trainer writes its own",
    "keep": "{settings:checkpoint_every=500}, and later {resume:JOB}",
}
"""Fields for scripts and modules only, with the remedy for an experiment."""
_OF_RETRIES: Final = ("retry_on", "rejoin", "retry_wait_s")
_APART: Final = (
    ("share", "wait", "{share} uses GPUs next to other jobs, {wait} waits for their end"),
    ("hosts", "wait", "{hosts} does without hosts that are in use, {wait} waits for them"),
    ("exp", "resume", "{resume} runs what the job ran; {settings} changes its settings"),
)
"""Contradicting fields, and why."""


def mistakes(spec: JobSpec, spelling: Spelling, present: Collection[str] = ()) -> Iterator[SpecMistake]:
    """present: fields that were given, even if dropped for their own mistake."""
    for mistake in _between(spec, {*present, *filter(spec.given, JobSpec.model_fields)}):
        yield SpecMistake(mistake.field, mistake.words.format_map(spelling), mistake.remedy.format_map(spelling))


def _between(spec: JobSpec, given: Collection[str]) -> Iterator[SpecMistake]:
    kinds = [name for name in ("exp", "script", "module") if name in given]
    if len(kinds) > 1:
        yield SpecMistake(kinds[1], f"{{{kinds[0]}}} and {{{kinds[1]}}} contradict each other", "keep one")
    if not kinds and "resume" not in given:
        yield SpecMistake("exp", "no script, module or experiment given", "give one of {exp}, {script} and {module}")
    if not {"script", "module"} & {*given}:
        for name, remedy in _OF_SCRIPT.items():
            if name in given:
                yield SpecMistake(name, f"{{{name}}} belongs to a script or module of your own", remedy)
    for name in _OF_RETRIES:
        if name in given and "retries" not in given:
            yield SpecMistake(name, f"{{{name}}} belongs to {{retries}}", "{retries:2}")
    if "priority" in given and not spec.waits and not {"wait", "wait_limit_s"} & {*given}:
        yield SpecMistake("priority", "{priority} belongs to {wait}: it is about the order in the queue", "add {wait}")
    asked = {*given, *(["wait"] if spec.waits else [])}
    for one, other, why in _APART:
        if one in asked and other in asked:
            yield SpecMistake(one, why, f"leave {{{one}}} or {{{other}}} out")


def checked(values: Mapping[str, Any], spelling: Spelling) -> JobSpec:
    """values: by field; None is not given. Raises UsageError with all mistakes."""
    spec = validated(values, spelling)
    refuse(spec, spelling)
    return spec


def validated(values: Mapping[str, Any], spelling: Spelling) -> JobSpec:
    """Each field by itself, as of `checked`."""
    try:
        return JobSpec.model_validate({name: value for name, value in values.items() if value is not None})
    except ValidationError as error:
        lines = [_line(details["loc"], problem(details), details["type"], spelling) for details in error.errors()]
        raise UsageError("\n".join(dict.fromkeys(lines))) from None


def refuse(spec: JobSpec, spelling: Spelling) -> None:
    """Raises UsageError for contradictions."""
    found = list(mistakes(spec, spelling))
    if found:
        raise UsageError("\n".join(each.words for each in found), found[0].remedy if len(found) == 1 else "")


def _line(place: tuple[int | str, ...], what: str, kind: str, spelling: Spelling) -> str:
    name = str(place[0])
    if kind == "extra_forbidden":
        return f"{name}: no such option; {nearest(name, list(JobSpec.model_fields))}"
    return f"{spelling[_field(name)].name.rstrip('=')}: {what}"


def _field(key: str) -> str:
    return next(name for name in JobSpec.model_fields if key in (name, key_of(name)))
