"""Reads and writes job files (a JobSpec in YAML), and recovers the spec and `orch run` line of a planned job.

    script: train.py
    args: [--lr, 0.1]
    env: {LR: 0.1, HF_TOKEN: }          # without a value: taken from this machine's environment

Paths in a file are relative to its folder. A file contains no likely secrets and no commands for this machine, so that
running another person's file is safe here.
"""

from __future__ import annotations

import os
import re
import shlex
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, Final

import yaml
from pydantic import ValidationError

from orchestrator import __version__
from orchestrator.errors import InventoryError, Mistake, UsageError
from orchestrator.files import write_atomic
from orchestrator.hosts import grammar
from orchestrator.hosts.inventory import mistake_of, nearest
from orchestrator.hosts.yamlfile import REFUSED, Document, read_yaml, resolve_scalar
from orchestrator.planning.job_spec import FILE, FILE_KEYS, JobSpec, key_of, mistakes, words
from orchestrator.planning.launch_plan import LOCAL_RANK, HostChoice, LaunchPlan, NodePlan
from orchestrator.planning.launchers import is_bare, read_program
from orchestrator.planning.request import AUTO
from orchestrator.planning.variables import RESERVED, names_secret, shows_secret
from orchestrator.units import name_ranges
from trainer.shared.config import EXPERIMENTS, fields_of, parse_settings
from trainer.shared.experiments import SCRIPT
from trainer.shared.setting_fields import SettingsError
from trainer.shared.settings import AnySettings

_HEAD = "# A job of orch "
VERBATIM: Final = ("settings", "env", "args")
"""Values below these keys stay text: 1, 1.10, false."""


# ---- reading ---------------------------------------------------------------------------------------------------------


def read_job(path: Path) -> JobSpec:
    """Raises InventoryError with all mistakes, by line."""
    return job_in(read_yaml(path, verbatim=VERBATIM), path)


def job_in(document: Document, path: Path) -> JobSpec:
    """Raises InventoryError with all mistakes, by line."""
    found = list(document.mistakes)
    spec = _checked(document, found)
    found += _mistakes_together(spec, document)
    if found:
        raise InventoryError(sorted(dict.fromkeys(found), key=lambda mistake: mistake.line))
    return _from_here(spec, path.parent)


def _checked(document: Document, found: list[Mistake]) -> JobSpec:
    """Uses only valid keys, so that one mistake does not hide others."""
    try:
        return JobSpec.model_validate(document.values, context=FILE_KEYS)
    except ValidationError as error:
        wrong = error.errors()
    found += [_mistake(details, document) for details in wrong if details["input"] is not REFUSED]
    keys = {details["loc"][0] for details in wrong}
    rest = {key: value for key, value in document.values.items() if key not in keys}
    return JobSpec.model_validate(rest, context=FILE_KEYS)


def _mistake(details: Any, document: Document) -> Mistake:
    path = details["loc"]
    if details["type"] != "extra_forbidden":
        return mistake_of(details, document)
    words = f"unknown key {grammar.show(str(path[0]))}; {nearest(str(path[0]), [*map(key_of, JobSpec.model_fields)])}"
    if path[0] in _REMOVED:
        words = f"`{path[0]}` is no longer a key; {_RETRIES}"
    if path[0] == "grid":
        words = f"`grid` makes it a sweep: `orch sweep {document.file}`"
    return Mistake(document.file, document.line(path), words)


_RETRIES = "`retries: 3` and `rejoin: true` start the job again on the hosts that remain, from its last checkpoint"
_REMOVED = ("elastic", "max_restarts")


def _mistakes_together(spec: JobSpec, document: Document) -> Iterator[Mistake]:
    """Mistakes between keys, and in values for other parts of orch. A key with its own mistake counts as given."""

    def at(key: str, words: str, *below: str) -> Mistake:
        return Mistake(document.file, document.line((key, *below)) if key in document.values else 0, words)

    missing = {name for name in JobSpec.model_fields if name not in spec.model_fields_set}
    for mistake in mistakes(spec, FILE, [name for name in missing if key_of(name) in document.values]):
        yield at(key_of(mistake.field), "; ".join(filter(None, (mistake.words, mistake.remedy))))
    env = document.values.get("env")
    for name, value in env.items() if isinstance(env, dict) else ():
        if words := _wrong_variable(str(name), value):
            yield at("env", f"env.{name} {words}", name)
    for key, words in _wrong_settings(spec):
        yield at("exp", words) if key == "exp" else at("settings", words, key)


def _wrong_variable(name: str, value: Any) -> str | None:
    """Messages show no value, since it may be a secret."""
    if not re.fullmatch(grammar.ENV_NAME, name):
        return None  # already reported
    if isinstance(value, str) and (names_secret(name) or shows_secret(value)):
        return f"looks like a secret; leave its value out (`{name}:`) and export it, or name a file in `env_files`"
    why = next((why for pattern, why in RESERVED.items() if re.fullmatch(pattern, name)), None)
    return f"cannot be given: {why}" if why else None


def _wrong_settings(spec: JobSpec) -> Iterator[tuple[str, str]]:
    if spec.resume or not (spec.exp or (spec.command and spec.settings)) or (spec.exp and spec.command):
        return
    pairs = {key: value for key, value in spec.settings.items() if (key, value) != ("strategy", AUTO)}
    try:
        parse_settings(spec.exp or SCRIPT, pairs)
    except SettingsError as error:
        for words in error.mistakes:
            yield words.partition(":")[0], words


# ---- paths -----------------------------------------------------------------------------------------------------------


def _from_here(spec: JobSpec, folder: Path) -> JobSpec:

    def path(name: str) -> str:
        name = os.path.expanduser(name)
        if os.path.isabs(name) or _is_here(folder):
            return name
        return os.path.normpath(os.path.join(os.path.realpath(folder), name))

    shipped = spec.folder if spec.folder or not _ships_current(spec, path) else "."
    return with_paths(spec, shipped, path)


def _from_file(spec: JobSpec, folder: Path) -> JobSpec:

    def path(name: str) -> str:
        if os.path.isabs(name) or _is_here(folder):
            return name
        parent, last = os.path.split(name)
        return os.path.relpath(os.path.join(os.path.realpath(parent or "."), last), os.path.realpath(folder))

    shipped = spec.folder if spec.folder or not _ships_current(spec, path) or _is_here(folder) else "."
    return with_paths(spec, shipped, path)


def _ships_current(spec: JobSpec, path: Callable[[str], str]) -> bool:
    return spec.module is not None or (spec.script is not None and _is_hosts(spec.command, path))


def _is_hosts(command: tuple[str, ...], path: Callable[[str], str]) -> bool:
    program = read_program(command)
    names = (program.name, path(program.name)) if is_bare(program.name) and not program.is_module else ()
    return program.is_hosts or (bool(names) and not any(map(os.path.isfile, names)))


def with_paths(spec: JobSpec, shipped: str | None, path: Callable[[str], str]) -> JobSpec:
    changed: dict[str, Any] = {"folder": path(shipped)} if shipped else {}
    if spec.requirements:
        changed["requirements"] = path(spec.requirements)
    if spec.env_files:
        changed["env_files"] = [path(name) for name in spec.env_files]
    if spec.script:
        script, *args = _with_path(spec.command, path)
        changed |= {"script": script, **({"args": args} if args else {})}
    return spec.updated(**changed)


def _is_here(folder: Path) -> bool:
    return os.path.realpath(folder) == os.path.realpath(".")


def _with_path(command: tuple[str, ...], path: Callable[[str], str]) -> tuple[str, ...]:
    """Changes the script's path; words before it, like torchrun, stay."""
    program = read_program(command)
    if program.is_module or _is_hosts(command, path):
        return command
    at = len(command) - len(program.arguments) - 1
    return (*command[:at], path(command[at]), *command[at + 1 :])


# ---- writing ---------------------------------------------------------------------------------------------------------


def write_job(path: Path, spec: JobSpec) -> bool:
    """Returns whether a different job file was replaced. Raises UsageError if another file is in the way."""
    text = job_text(_from_file(spec, path.parent))
    try:
        with open(path, "rb") as file:
            before = file.read(len(text.encode()) + 1)
    except FileNotFoundError:
        write_atomic(path, text)
        return False
    if not before.startswith(_HEAD.encode()):
        raise UsageError(f"{path} already exists, and orch did not write it", "choose another name")
    write_atomic(path, text)
    return before != text.encode()


def job_text(spec: JobSpec) -> str:
    """Raises UsageError for a word that is not text."""
    values = {key: _written(value) for key, value in spec.model_dump(exclude_defaults=True, by_alias=True).items()}
    for key in VERBATIM:
        if key in values:
            values[key] = _verbatim(values[key])
    lines = yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1 << 20)
    if re.search(r"\\0|\\u[dD][89a-fA-F]", lines):
        raise UsageError("a word of this job is not text (a NUL, or not UTF-8)", "change that word")
    return f"{_HEAD}{__version__}: `orch run FILE` runs it\n{lines}"


def _written(value: Any) -> Any:
    return f"{value:.12g}s" if isinstance(value, float) else value


class _Verbatim(str):
    """Text that is read back unchanged, even if it looks like a number."""


def _verbatim(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _verbatim(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_verbatim(item) for item in value]
    return None if value is None else _Verbatim(value)


class _Dumper(yaml.SafeDumper):
    """Quotes only text that `yamlfile` would read back as something else."""


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


# Recovery of a spec from a plan, also for other hosts or settings. The result names the cluster, the hosts and whole
# paths; of the job's variables only names, since values are not stored. Pure.


def run_line(plan: LaunchPlan, nodes: Collection[str] = (), settings: AnySettings | None = None) -> str:
    spec = spec_of(plan, nodes, settings).model_copy(update={"cluster": None})
    return shlex.join(["orch", "run", "--cluster", plan.cluster, *words(spec)])


def spec_of(plan: LaunchPlan, nodes: Collection[str] = (), settings: AnySettings | None = None) -> JobSpec:
    """nodes: default: the plan's. settings: instead of the plan's; only values other than defaults appear."""
    chosen = [node for node in plan.nodes if not nodes or node.name in nodes]
    choice = _choice_again(plan) if len(chosen) == len(plan.nodes) else None
    attempt = plan.attempt
    values = {
        **(_program(plan) if plan.kind != "experiment" else {"exp": plan.exp, "resume": None}),
        "settings": _settings(plan, settings),
        "env": dict.fromkeys(plan.variables),
        "env_files": [],
        "nodes": name_ranges(choice.candidates) if choice else _names_again(chosen),
        "hosts": choice.words if choice and not plan.asked.waits else None,  # a later attempt has both
        "share": plan.share_gpus,
        "grace_s": plan.grace_s,
        "time_limit_s": plan.time_limit_s,
        "name": plan.name,
        "note": plan.note,
        "cluster": plan.cluster,
    }
    if attempt:
        values |= {"retries": attempt.most - 1, "retry_on": "any" if attempt.any_cause else "hosts"}
        values |= {"rejoin": attempt.rejoin, "retry_wait_s": attempt.wait_s}
    return plan.asked.updated(**values)


def _names_again(nodes: Sequence[NodePlan]) -> list[str]:
    """Names types of hosts that Slurm has lent, since it may lend others."""
    counts = Counter(node.kind for node in nodes if node.kind)
    names = name_ranges([node.name for node in nodes if not node.kind])
    return [*names, *(kind if count == 1 else f"{count}x{kind}" for kind, count in counts.items())]


def _choice_again(plan: LaunchPlan) -> HostChoice | None:
    """The `--hosts` option of the new run; None if it needs exactly the same hosts."""
    return None if plan.recorded.stages else plan.hosts  # stages name their hosts


def _settings(plan: LaunchPlan, settings: AnySettings | None) -> dict[str, str]:
    """Only values that differ from the experiment's defaults."""
    if plan.kind != "experiment":
        return dict(_settings_of_script(plan, settings))
    chosen = settings or plan.typed_settings
    usual, names = (EXPERIMENTS[chosen.exp], fields_of(chosen.exp)) if chosen else ({}, {})
    return {name: _text(getattr(chosen, name)) for name in names if getattr(chosen, name) != usual[name]}


def _settings_of_script(plan: LaunchPlan, settings: AnySettings | None) -> Iterator[tuple[str, str]]:
    values = dict(plan.settings)
    if settings and plan.typed_settings:
        names = fields_of(settings.exp)
        changed = [name for name in names if getattr(settings, name) != getattr(plan.typed_settings, name)]
        values |= {name: getattr(settings, name) for name in changed}
    for name, value in values.items():
        if name not in ("exp", "batch"):
            yield name, _text(value)


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)


def _program(plan: LaunchPlan) -> dict[str, Any]:
    words = [word for word in plan.nodes[0].command if word != LOCAL_RANK]
    flags = list(takewhile(lambda word: word.startswith("-") and word != "-m", words))
    words = words[len(flags) :] or [plan.exp]
    if plan.kind == "script" or words[0].startswith("./"):
        words[0] = str(Path(plan.code.source, words[0]))
    first, *rest = ["python", *flags, *words] if flags else words
    is_module = first == "-m" and bool(rest)
    return {
        "script": None if is_module else first,
        "module": rest[0] if is_module else None,
        "args": rest[1:] if is_module else rest,
        "resume": plan.resumes,
        "keep": list(plan.keep),
        "folder": plan.code.source,
        "batch": plan.recorded.batch,
        "pass_local_rank": LOCAL_RANK in plan.nodes[0].command,
        "no_metrics": not plan.measures_steps,
    }
