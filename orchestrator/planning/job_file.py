"""A job file: what `orch run` is to run, in YAML, checked as a whole.

    script: train.py
    args: [--lr, 0.1]
    nodes: [a2000, v100]
    env: {LR: 0.1, HF_TOKEN: }          # without a value: that of this machine's environment

    job = read_job(Path("job.yaml"))    job.script == "train.py"; or all mistakes at once, each with its line
    write_job(Path("job.yaml"), job)    whole or not at all, and never over a file that is something else

Paths in it are seen from the file's own folder. It holds no value that looks like a secret, and no command for this
machine: who runs a file of somebody else's starts a job, and nothing here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import yaml
from pydantic import AfterValidator, BeforeValidator, Field, ValidationError

from orchestrator import __version__
from orchestrator.errors import InventoryError, Mistake, UsageError
from orchestrator.files import write_atomic
from orchestrator.hosts import grammar
from orchestrator.hosts.inventory import EnvName, EnvValue, Name, Written, nearest
from orchestrator.hosts.inventory_mistakes import mistake_of
from orchestrator.hosts.yamlfile import REFUSED, Document, read_yaml, resolve_scalar
from orchestrator.planning.host_choice import FORM, parse_hosts
from orchestrator.planning.naming import job_name, job_note, kept_folder
from orchestrator.planning.request import AUTO
from orchestrator.planning.secret_words import names_secret, shows_secret
from orchestrator.planning.variables import RESERVED
from orchestrator.units import parse_duration
from trainer.shared.config import parse_settings
from trainer.shared.experiments import SCRIPT
from trainer.shared.fields import SettingsError

_HEAD = "# A job of orch "
_VERBATIM: Final = ("settings", "env", "args")
"""Below these keys 1, 1.10 and false stay text."""
_INSTEAD = {"batch": "; an experiment's batch is one of its `settings`"}


def _time(text: str) -> str:
    parse_duration(text)
    return text


def _unquoted(value: Any) -> Any:
    """`hosts: 3` is a number to YAML, and needs no quotes."""
    return str(value) if type(value) is int else value


Time = Annotated[str, AfterValidator(_time)]


class JobFile(Written):
    """One job as a person asks for it. The order of the keys is that in which they are written."""

    exp: str | None = None
    """A named experiment."""
    script: str | None = None
    """A Python script, or what people type before one, like torchrun; the rest of that line is `args`."""
    module: str | None = None
    """A Python module."""
    args: list[str] = Field(default_factory=list)
    """What the script or module is given."""
    settings: dict[str, str] = Field(default_factory=dict)
    """As of `--set`."""
    resume: str | None = None
    """A job from whose last checkpoint this one goes on."""
    folder: str | None = None
    batch: int | None = Field(default=None, ge=1)
    pass_local_rank: bool = False
    no_metrics: bool = False
    name: Annotated[str, AfterValidator(job_name)] | None = None
    note: Annotated[str, AfterValidator(job_note)] | None = None
    keep: list[Annotated[str, AfterValidator(kept_folder)]] = Field(default_factory=list)
    """Folders that a script takes over from its job before."""
    cluster: Name | None = None
    nodes: list[str] = Field(default_factory=list)
    hosts: Annotated[str, BeforeValidator(_unquoted)] | None = None
    """How many of them are enough, and how many at most, as of `--hosts`."""
    env: dict[EnvName, EnvValue | None] = Field(default_factory=dict)
    """Without a value: that of this machine's environment."""
    env_files: list[str] = Field(default_factory=list)
    share: bool = False
    retries: int | None = Field(default=None, ge=1)
    retry_on: Literal["hosts", "any"] = "hosts"
    rejoin: bool = False
    retry_wait: Time = "10s"
    grace: Time | None = None
    time_limit: Time | None = None


# ---- reading ---------------------------------------------------------------------------------------------------------


def read_job(path: Path) -> JobFile:
    """Raises InventoryError with all mistakes, in the order of their lines."""
    document = read_yaml(path, verbatim=_VERBATIM)
    mistakes = list(document.mistakes)
    job = _checked(document, mistakes)
    mistakes += _mistakes_together(job, document)
    if mistakes:
        raise InventoryError(sorted(dict.fromkeys(mistakes), key=lambda mistake: mistake.line))
    return job


def _checked(document: Document, mistakes: list[Mistake]) -> JobFile:
    """What the right keys say: one that is wrong hides no mistake of another."""
    try:
        return JobFile.model_validate(document.values)
    except ValidationError as error:
        found = error.errors()
    mistakes += [_mistake(details, document) for details in found if details["input"] is not REFUSED]
    wrong = {details["loc"][0] for details in found}
    return JobFile.model_validate({key: value for key, value in document.values.items() if key not in wrong})


def _mistake(details: Any, document: Document) -> Mistake:
    path = details["loc"]
    if details["type"] == "extra_forbidden":
        known = list(JobFile.model_fields)
        if path[0] in _REMOVED:
            return Mistake(document.file, document.line(path), f"`{path[0]}` is no key any more; {_RETRIES}")
        words = f"unknown key {grammar.show(str(path[0]))}; {nearest(str(path[0]), known)}"
        return Mistake(document.file, document.line(path), words)
    return mistake_of(details, document)


_RETRIES = "`retries: 3` and `rejoin: true` start the job again on the hosts that remain, from its last checkpoint"
_REMOVED = ("elastic", "max_restarts")


def _mistakes_together(job: JobFile, document: Document) -> Iterator[Mistake]:
    """What is wrong between keys, and with values that other parts of orch read."""
    given = document.values

    def at(key: str, words: str, *below: str) -> Mistake:
        return Mistake(document.file, document.line((key, *below)), words)

    kinds = [key for key in ("exp", "script", "module") if given.get(key) is not None]
    if len(kinds) > 1:
        yield at(kinds[1], f"{' and '.join(f'`{kind}`' for kind in kinds)} contradict each other; keep one")
    if not kinds and "resume" not in given:
        yield Mistake(document.file, 0, "says nothing to run; give one of `exp`, `script` and `module`")
    if "resume" in given and "exp" in given:
        yield at("exp", "`resume` runs what the job ran; leave `exp` out, `settings` changes its settings")
    if "script" not in given and "module" not in given:
        for key in ("args", "folder", "batch", "pass_local_rank", "no_metrics", "keep"):
            if given.get(key):
                yield at(key, f"`{key}` belongs to a `script` or a `module`{_INSTEAD.get(key, '')}")
    for key in ("retry_on", "rejoin", "retry_wait"):
        if key in given and job.retries is None and "retries" not in given:
            yield at(key, f"`{key}` belongs to `retries`; write that like 2")
    if job.hosts is not None:
        try:
            parse_hosts(job.hosts)
        except UsageError:
            yield at("hosts", f"hosts: {grammar.show(job.hosts)} is not {FORM}; write it like 2:4")
    env = given.get("env")
    for name, value in env.items() if isinstance(env, dict) else ():
        if words := _wrong_variable(str(name), value):
            yield at("env", f"env.{name} {words}", name)
    for key, words in _wrong_settings(job, kinds):
        yield at("exp" if key == "exp" else "settings", words, *([] if key == "exp" else [key]))


def _wrong_variable(name: str, value: Any) -> str | None:
    """No value is shown: it may be a secret."""
    if not re.fullmatch(grammar.ENV_NAME, name):
        return None  # said already
    if isinstance(value, str) and (names_secret(name) or shows_secret(value)):
        return f"looks like a secret; leave its value out (`{name}:`) and export it, or name a file in `env_files`"
    why = next((why for pattern, why in RESERVED.items() if re.fullmatch(pattern, name)), None)
    return f"cannot be given: {why}" if why else None


def _wrong_settings(job: JobFile, kinds: list[str]) -> Iterator[tuple[str, str]]:
    """(setting, what is wrong) each. Of a job that resumes they are checked with those of the job before."""
    if len(kinds) != 1 or job.resume or not (job.settings or job.exp):
        return
    pairs = {key: value for key, value in job.settings.items() if (key, value) != ("strategy", AUTO)}
    try:
        parse_settings(job.exp or str(SCRIPT["exp"]), pairs)
    except SettingsError as error:
        for words in error.mistakes:
            yield words.partition(":")[0], words


# ---- writing ---------------------------------------------------------------------------------------------------------


def write_job(path: Path, job: JobFile) -> bool:
    """Whether an older job file was replaced. Raises UsageError where another file is in the way."""
    text = job_text(job)
    try:
        with open(path, "rb") as file:
            before = file.read(len(text.encode()) + 1)
    except FileNotFoundError:
        write_atomic(path, text)
        return False
    if not before.startswith(_HEAD.encode()):
        raise UsageError(f"{path} is there already, and orch did not write it", "choose another name")
    write_atomic(path, text)
    return before != text.encode()


def job_text(job: JobFile) -> str:
    """The file's content. Raises UsageError for what is no text."""
    values = job.model_dump(exclude_defaults=True)
    for key in _VERBATIM:
        if key in values:
            values[key] = _as_written(values[key])
    lines = yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1 << 20)
    if re.search(r"\\0|\\u[dD][89a-fA-F]", lines):
        raise UsageError("a word of this job is no text (a NUL, or not UTF-8)", "change that word")
    return f"{_HEAD}{__version__}: `orch run FILE` runs it\n{lines}"


class _Verbatim(str):
    """Text that is read as it is written, whatever it looks like."""


def _as_written(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _as_written(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_as_written(item) for item in value]
    return None if value is None else _Verbatim(value)


class _Dumper(yaml.SafeDumper):
    """Quotes only what `yamlfile` would not read back as it is."""


def _text_node(dumper: _Dumper, value: str) -> yaml.ScalarNode:
    is_plain = isinstance(resolve_scalar(value), str) and not _BREAKS.search(value)
    return dumper.represent_scalar("tag:yaml.org,2002:str", str(value), style=None if is_plain else '"')


def _verbatim_node(dumper: _Dumper, value: _Verbatim) -> yaml.ScalarNode:
    plain = str(dumper.resolve(yaml.ScalarNode, str(value), (True, False)))  # type: ignore[no-untyped-call]
    number = plain if resolve_scalar(value) is not None and plain.rpartition(":")[2] in _PLAIN else None
    if number is None and resolve_scalar(value) is not None:
        return _text_node(dumper, str(value))
    return dumper.represent_scalar(number or "tag:yaml.org,2002:str", str(value), style=None if number else '"')


_BREAKS = re.compile("[\n\r\x85\u2028\u2029]")
_PLAIN = frozenset({"int", "float", "bool", "timestamp"})
_Dumper.add_representer(str, _text_node)
_Dumper.add_representer(_Verbatim, _verbatim_node)
_Dumper.add_representer(type(None), lambda dumper, _: dumper.represent_scalar("tag:yaml.org,2002:null", ""))
_Dumper.add_representer(list, lambda dumper, items: dumper.represent_sequence(_SEQUENCE, items, flow_style=True))
_SEQUENCE = "tag:yaml.org,2002:seq"
