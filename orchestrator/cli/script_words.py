"""What stands after a script on a command line belongs to the script, as with python and torchrun.

@click.command(cls=ScriptCommand)
@module_option
@folder_option
@script_argument
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import click
from click.shell_completion import CompletionItem

JOB_FILES = (".yaml", ".yml")
"""By these endings alone `orch run FILE` knows a job file from a script."""
_DIVIDED = "orchestrator.cli.script_words.divided"


def is_job_file(word: str) -> bool:
    return word.endswith(JOB_FILES)


class ScriptCommand(click.Command):
    """A command whose own options end at the first word that is none, or at `--`."""

    allow_interspersed_args = False

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        typed = list(args)
        try:
            rest = super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            script, option = next((word for word in typed if word.endswith(".py")), None), error.option_name
            if script is None:
                raise
            behind = f"options of {script} stand behind it: {ctx.command_path} {script} {option} ..."
            raise click.UsageError(f"{option} is no option of {ctx.command_path}; {behind}", ctx) from error
        command: tuple[str, ...] = ctx.params.get("command") or ()
        before = typed[: len(typed) - len(command)]
        ctx.meta[_DIVIDED] = bool(command) and before[-1:] == ["--"]
        if not ctx.meta[_DIVIDED] and command[1:2] == ("--",):  # `-m MODULE -- ARGS` divides there
            ctx.params["command"] = (command[0], *command[2:])
            ctx.meta[_DIVIDED] = True
        return rest

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """After the script its options would come, and those are not known here."""
        if ctx.params.get("command"):
            return [CompletionItem(incomplete, type="file")]
        return super().shell_complete(ctx, incomplete)


class RunCommand(ScriptCommand):
    """The same, but options may follow a job file, which takes none itself; what is behind `--` is for its script."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        typed = list(args)
        rest = super().parse_args(ctx, args)
        command: tuple[str, ...] = ctx.params.get("command") or ("",)
        if not is_job_file(command[0]) or ctx.params.get("is_module"):
            return rest
        at = len(typed) - len(command)
        at -= typed[at] != command[0]  # a `--` behind the file is gone from the command
        before, options, added = _around(typed[:at], typed[at + 1 :])
        ctx.params.clear()
        rest = super().parse_args(ctx, [*before, *options])
        if stray := ctx.params.get("command"):
            raise click.UsageError(f"{stray[0]}: words for the script of {command[0]} stand behind `--`", ctx)
        ctx.params["command"] = (command[0], *added)
        ctx.meta[_DIVIDED] = True
        return rest


def _around(before: list[str], behind: list[str]) -> tuple[list[str], list[str], list[str]]:
    """The options before a job file, those behind it, and the words for its script."""
    if before[-1:] == ["--"]:
        return before[:-1], [], behind
    cut = behind.index("--") if "--" in behind else len(behind)
    return before, behind[:cut], behind[cut + 1 :]


def files(ctx: click.Context, parameter: click.Parameter, begun: str) -> list[CompletionItem]:
    return [CompletionItem(begun, type="file")]


def went_to_script(ctx: click.Context, name: str, words: Sequence[str]) -> Iterator[str]:
    """A sentence where a word of the script's looks like an option of orch's own, and no `--` says whose it is."""
    if ctx.meta.get(_DIVIDED):
        return
    own = {name for option in ctx.command.get_params(ctx) for name in option.opts if name.startswith("--")}
    found = list(dict.fromkeys(option for word in words if (option := word.partition("=")[0]) in own))
    if found:
        goes = "goes" if len(found) == 1 else "go"
        yield f"{', '.join(found)} {goes} to {name}; orch's own options stand before it: orch run {found[0]} ... {name}"


module_option = click.option(
    "-m", "--module", "is_module", is_flag=True, help="Run a Python module of your folder, not a script."
)
folder_option = click.option(
    "--folder",
    type=click.Path(path_type=Path),
    help="The folder to ship. [default: the script's folder, or the current one]",
)
script_argument = click.argument(
    "command", nargs=-1, type=click.UNPROCESSED, metavar="[SCRIPT [ARGS]...]", shell_complete=files
)
