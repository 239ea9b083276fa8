"""Builds a JobSpec from a command line. Words after a script belong to the script, as with python and torchrun."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args, get_origin

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from orchestrator.cli import common
from orchestrator.cli.common import Quantity
from orchestrator.errors import UsageError

if TYPE_CHECKING:
    from orchestrator.planning.job_spec import JobSpec


JOB_FILES = (".yaml", ".yml")
"""`orch run FILE` recognises a job file only by these endings."""
_DIVIDED = "orchestrator.cli.spec_words.divided"


def is_job_file(word: str) -> bool:
    return word.endswith(JOB_FILES)


class ScriptCommand(click.Command):
    """Its own options end at the first other word, or at `--`."""

    allow_interspersed_args = False
    fields: ClassVar[Sequence[str] | None] = ("exp", "settings", "folder")
    """None: all fields."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        if not any(parameter.name == "is_module" for parameter in self.params):  # made late: it needs pydantic
            self.params = [*_options(self.fields), *self.params]
        return super().get_params(ctx)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        typed = list(args)
        try:
            rest = super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            script, option = next((word for word in typed if word.endswith(".py")), None), error.option_name
            if script is None:
                raise
            behind = f"options of {script} go after it: {ctx.command_path} {script} {option} ..."
            if error.possibilities:
                behind = f"did you mean {error.possibilities[0]}? {behind[0].upper()}{behind[1:]}"
            raise click.UsageError(f"{option} is not an option of {ctx.command_path}; {behind}", ctx) from error
        command: tuple[str, ...] = ctx.params.get("command") or ()
        before = typed[: len(typed) - len(command)]
        ctx.meta[_DIVIDED] = bool(command) and before[-1:] == ["--"]
        if not ctx.meta[_DIVIDED] and command[1:2] == ("--",):  # `-m MODULE -- ARGS` divides there
            ctx.params["command"] = (command[0], *command[2:])
            ctx.meta[_DIVIDED] = True
        return rest

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        if ctx.params.get("command"):
            return [CompletionItem(incomplete, type="file")]
        return super().shell_complete(ctx, incomplete)


class RunCommand(ScriptCommand):
    """Options may follow a job file; words after `--` are for its script."""

    fields: ClassVar[Sequence[str] | None] = None

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        typed = list(args)
        rest = super().parse_args(ctx, args)
        command: tuple[str, ...] = ctx.params.get("command") or ("",)
        if not is_job_file(command[0]) or ctx.params.get("is_module"):
            return rest
        at = len(typed) - len(command)
        at -= typed[at] != command[0]  # the command lacks a `--` after the file
        before, options, added = _around(typed[:at], typed[at + 1 :])
        ctx.params.clear()
        rest = super().parse_args(ctx, [*before, *options])
        if stray := ctx.params.get("command"):
            raise click.UsageError(f"{stray[0]}: words for the script of {command[0]} go after `--`", ctx)
        ctx.params["command"] = (command[0], *added)
        ctx.meta[_DIVIDED] = True
        return rest


def _around(before: list[str], behind: list[str]) -> tuple[list[str], list[str], list[str]]:
    if before[-1:] == ["--"]:
        return before[:-1], [], behind
    cut = behind.index("--") if "--" in behind else len(behind)
    return before, behind[:cut], behind[cut + 1 :]


def files(ctx: click.Context, parameter: click.Parameter, begun: str) -> list[CompletionItem]:
    return [CompletionItem(begun, type="file")]


def went_to_script(ctx: click.Context, name: str, words: Sequence[str]) -> Iterator[str]:
    """Warns of a script's word that looks like an option of orch, unless `--` separates them."""
    if ctx.meta.get(_DIVIDED):
        return
    own = {name for option in ctx.command.get_params(ctx) for name in option.opts if name.startswith("--")}
    found = list(dict.fromkeys(option for word in words if (option := word.partition("=")[0]) in own))
    if found:
        goes = "goes" if len(found) == 1 else "go"
        yield f"{', '.join(found)} {goes} to {name}; orch's own options go before it: orch run {found[0]} ... {name}"


script_argument = click.argument(
    "command", nargs=-1, type=click.UNPROCESSED, metavar="[SCRIPT [ARGS]...]", shell_complete=files
)


# ---- options from fields ---------------------------------------------------------------------------------------------


def _options(fields: Sequence[str] | None) -> Iterator[click.Option]:
    from orchestrator.planning.job_spec import OPTIONS

    for name in OPTIONS if fields is None else fields:
        if name == "folder":
            yield click.Option(
                ("-m", "--module", "is_module"), is_flag=True, help="Run a Python module of your folder, not a script."
            )
        yield _option(name)


def _option(name: str) -> click.Option:
    from orchestrator.planning.job_spec import OPTIONS, JobSpec, spelled

    field, option = JobSpec.model_fields[name], OPTIONS[name]
    more: dict[str, Any] = {"help": option.help, "metavar": option.metavar}
    if option.complete:
        more["shell_complete"] = getattr(common, option.complete)
    if field.annotation is bool:
        more["is_flag"] = True
    elif name.endswith("_s"):
        more["type"] = Quantity("time")
        more |= {"default": f"{field.default:g}s", "show_default": True} if field.default else {}
    elif get_origin(field.annotation) is Literal:
        more |= {"type": click.Choice(get_args(field.annotation)), "default": field.default, "show_default": True}
    elif int in get_args(field.annotation):
        more["type"] = click.INT
    elif option.metavar == "PATH":
        more["type"] = click.Path()
    more["multiple"] = get_origin(field.annotation) in (list, dict) and name != "nodes"
    return click.Option((spelled(name), name), **more)


def spec_of(ctx: click.Context, options: Mapping[str, Any], file: JobSpec | None = None) -> JobSpec:
    """options: by click's names. file: the job of a file that the command names, if it was read already. Raises
    UsageError with all mistakes.
    """
    from orchestrator.planning.job_spec import LINE, checked, refuse
    from orchestrator.planning.variables import refuse_secret_words

    refuse_secret_words(options.get("env", ()))
    values, command = _given(ctx, options), tuple(options["command"])
    if command and is_job_file(command[0]) and not options["is_module"]:
        spec = _laid_over(Path(command[0]), values, command[1:], file)
        refuse(spec, LINE)
        return spec
    if options["is_module"] and not command:
        raise UsageError("-m needs the name of a module", "like `orch run -m mypackage.train`")
    if command:
        values |= {"module" if options["is_module"] else "script": command[0]}
        values |= {"args": command[1:]} if command[1:] else {}
    return checked(values, LINE)


def _given(ctx: click.Context, options: Mapping[str, Any]) -> dict[str, Any]:
    from orchestrator.planning.job_spec import OPTIONS

    sources = {name: ctx.get_parameter_source(name) for name in OPTIONS if name in options}
    return {name: options[name] for name, source in sources.items() if source not in (None, ParameterSource.DEFAULT)}


def _laid_over(path: Path, values: Mapping[str, Any], added: Sequence[str], file: JobSpec | None) -> JobSpec:
    """The file's job, overridden by options of the line. Raises UsageError."""
    from orchestrator.planning.job_forms import read_job
    from orchestrator.planning.job_spec import LINE, validated
    from orchestrator.planning.variables import read_variables

    file, line = file or read_job(path), validated(values, LINE)
    if added and not file.command:
        raise UsageError(f"{path} starts no script that could be given {added[0]}", "--set changes its settings")
    replaced = {*line.env, *read_variables({}, line.env_files, os.environ)}
    joined: dict[str, Any] = {
        "settings": {**file.settings, **line.settings},
        "env": {**{name: value for name, value in file.env.items() if name not in replaced}, **line.env},
        "env_files": [*file.env_files, *line.env_files],
        "args": [*file.args, *added],
    }
    given = {name: getattr(line, name) for name in line.model_fields_set}
    return file.updated(**{**given, **{name: value for name, value in joined.items() if value}})
