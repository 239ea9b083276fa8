"""A job file's part in `orch run`: its keys become options that the command line goes before, and options a file.

options = with_file(ctx, options)               of `orch run [OPTIONS] job.yaml [OPTIONS] [-- ARGS]`
save(options, Path("job.yaml"))                 what was asked for, and no more
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from orchestrator.cli.run_options import RunOptions
from orchestrator.cli.script_words import is_job_file
from orchestrator.errors import UsageError
from orchestrator.planning.job_file import JobFile, read_job, write_job
from orchestrator.planning.launchers import read_program
from orchestrator.planning.request import RunRequest, parse_pairs
from orchestrator.planning.variables import read_variables
from orchestrator.units import parse_duration

_PLAIN = (
    *("exp", "resume", "batch", "pass_local_rank", "no_metrics", "name", "note", "cluster"),
    *("hosts", "share", "retries", "retry_on", "rejoin"),
)
"""Options that are in the file what they are here."""


# ---- from a file -----------------------------------------------------------------------------------------------------


def with_file(ctx: click.Context, options: RunOptions) -> RunOptions:
    """With what the file says that `command` begins with, where the line says nothing else. Raises UsageError."""
    file, *added = options.command
    path = Path(file)
    job = read_job(path)
    if added and not (job.script or job.module):
        raise UsageError(f"{path} starts no script that could be given {added[0]}", "--set changes its settings")
    asked = _options_of(job, path.parent)
    kept = {name: value for name, value in asked.items() if not _is_given(ctx, name)}
    overruled = {*read_variables((), options.env_files, os.environ), *(name for name, _, _ in _parted(options.env))}
    env = tuple(item for item in asked["env"] if item.partition("=")[0] not in overruled)
    joined = {
        "settings": (*asked["settings"], *options.settings),
        "env": (*env, *options.env),
        "env_files": (*asked["env_files"], *options.env_files),
        "command": (*_rebased(job, path.parent), *added),
    }
    return replace(options, **{**kept, **joined})


def _is_given(ctx: click.Context, name: str) -> bool:
    return ctx.get_parameter_source(name) not in (None, ParameterSource.DEFAULT)


def _options_of(job: JobFile, beside: Path) -> dict[str, Any]:
    """By the names of click's parameters. beside: the folder that the file lies in."""
    folder = job.folder if job.folder or not job.module else "."
    return {
        **{name: getattr(job, name) for name in _PLAIN},
        "settings": tuple(f"{key}={value}" for key, value in job.settings.items()),
        "keep": tuple(job.keep),
        "is_module": job.module is not None,
        "folder": Path(_seen(folder, beside)) if folder else None,
        "env": tuple(name if value is None else f"{name}={value}" for name, value in job.env.items()),
        "env_files": tuple(Path(_seen(name, beside)) for name in job.env_files),
        "nodes": ",".join(job.nodes) or None,
        "grace": parse_duration(job.grace) if job.grace else RunRequest.grace_s,
        "time_limit": parse_duration(job.time_limit) if job.time_limit else None,
        "retry_wait": parse_duration(job.retry_wait),
    }


def _rebased(job: JobFile, beside: Path) -> tuple[str, ...]:
    if job.module:
        return (job.module, *job.args)
    return _with_path((job.script, *job.args), lambda name: _seen(name, beside)) if job.script else ()


def _seen(path: str, beside: Path) -> str:
    """A path of a file in the folder `beside`, from here."""
    path = os.path.expanduser(path)
    if os.path.isabs(path) or _is_here(beside):
        return path
    return os.path.normpath(os.path.join(os.path.realpath(beside), path))


def _is_here(folder: Path) -> bool:
    return os.path.realpath(folder) == os.path.realpath(".")


def _with_path(command: tuple[str, ...], changed: Any) -> tuple[str, ...]:
    """The command with another path of its script; what is typed before one, like torchrun, stays as it is."""
    program = read_program(command)
    if program.is_module:
        return command
    at = len(command) - len(program.arguments) - 1
    return (*command[:at], changed(command[at]), *command[at + 1 :])


# ---- to a file -------------------------------------------------------------------------------------------------------


def save(options: RunOptions, path: Path) -> bool:
    """Writes what was asked for; whether an older job file was replaced. Raises UsageError, and writes nothing."""
    if not is_job_file(path.name):
        raise UsageError(f"{path}: a job file's name ends in .yaml or .yml", f"--save {path}.yaml")
    return write_job(path, job_of(options, path.parent))


def job_of(options: RunOptions, beside: Path) -> JobFile:
    """beside: the folder of the file to be."""
    folder = options.folder
    if folder is None and options.is_module and not _is_here(beside):
        folder = Path()
    values = {
        **{name: getattr(options, name) for name in _PLAIN},
        **_program(options, beside),
        "settings": parse_pairs(options.settings, "--set KEY=VALUE"),
        "keep": list(options.keep),
        "folder": _as_seen(str(folder), beside) if folder is not None else None,
        "nodes": re.split(r",(?![^\[]*\])", options.nodes) if options.nodes else [],
        "env": {name: value if equals else None for name, equals, value in _parted(options.env)},
        "env_files": [_as_seen(str(file), beside) for file in options.env_files],
        "grace": f"{options.grace:.12g}s" if options.grace != RunRequest.grace_s else None,
        "time_limit": f"{options.time_limit:.12g}s" if options.time_limit else None,
        "retry_wait": f"{options.retry_wait:.12g}s",
    }
    return JobFile.model_validate(values)


def _parted(items: tuple[str, ...]) -> list[tuple[str, str, str]]:
    return [item.partition("=") for item in items]


def _program(options: RunOptions, beside: Path) -> dict[str, Any]:
    if not options.command:
        return {}
    if options.is_module:
        return {"module": options.command[0], "args": list(options.command[1:])}
    first, *rest = _with_path(options.command, lambda name: _as_seen(name, beside))
    return {"script": first, "args": rest}


def _as_seen(path: str, beside: Path) -> str:
    """A path from here, as a file in the folder `beside` has it."""
    if os.path.isabs(path) or _is_here(beside):
        return path
    folder, name = os.path.split(path)
    whole = os.path.join(os.path.realpath(folder or "."), name)
    return os.path.relpath(whole, os.path.realpath(beside))
