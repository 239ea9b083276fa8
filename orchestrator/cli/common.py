"""Shared by all commands: options, completion, prompts, errors as exit codes, and opening the controller."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import click
from click.core import ParameterSource

from orchestrator.errors import HostsError, OrchError, UsageError
from orchestrator.paths import Home

if TYPE_CHECKING:
    from orchestrator.controller import Controller
    from orchestrator.jobs.running import RunningJob
    from orchestrator.paths import RunFolder
    from orchestrator.provision.venvs import SetupProgress


# Completion by remembered names, without contacting hosts. Used as click's `shell_complete`.


def job_ids(context: click.Context, parameter: click.Parameter, begun: str) -> list[str]:
    return _fitting(["latest", *sorted(_jobs(), reverse=True)], begun)


def cluster_names(context: click.Context, parameter: click.Parameter, begun: str) -> list[str]:
    return _fitting(sorted(path.stem for path in Home.default().clusters.glob("*.json")), begun)


def node_names(context: click.Context, parameter: click.Parameter, begun: str) -> list[str]:
    """Also completes after a comma."""
    before, comma, last = begun.rpartition(",")
    return [before + comma + name for name in _fitting(_nodes(context), last)]


def node_ranges(context: click.Context, parameter: click.Parameter, begun: str) -> list[str]:
    """Like `2:3`."""
    from orchestrator.hosts.grammar import names_in

    known = _nodes(context)
    with suppress(UsageError):
        known = names_in(context.params.get("nodes"), known, "the cluster") or known
    most = len(known)
    return _fitting([f"{least}:{most}" for least in range(1, most + 1)], begun)


def experiments(context: click.Context, parameter: click.Parameter, begun: str) -> list[str]:
    from trainer.shared.config import EXPERIMENTS

    return _fitting(list(EXPERIMENTS), begun)


def torch_versions(context: click.Context, parameter: click.Parameter, begun: str) -> list[str]:
    from orchestrator.hosts.wheels import RELEASES

    return _fitting(list(reversed(RELEASES)), begun)


def setting_pairs(context: click.Context, parameter: click.Parameter, begun: str) -> list[str]:
    """`KEY=`, then the values of a key with choices."""
    from trainer.shared.config import fields_of
    from trainer.shared.setting_fields import declared
    from trainer.shared.shares import WORDS

    fields = fields_of(context.params.get("exp") or "")
    key, equals, value = begun.partition("=")
    if not equals:
        return [f"{name}=" for name in _fitting([name for name in fields if name != "exp"], key)]
    choices = declared(fields[key]).choices if key in fields else ()
    if key == "strategy":
        choices = (*choices, "auto")  # strategy=auto is orch's own
    if key == "shares":
        choices = WORDS
    return [f"{key}={choice}" for choice in _fitting(list(choices), value)]


def _nodes(context: click.Context) -> list[str]:
    import json

    home = Home.default()
    with suppress(OSError, ValueError, KeyError, TypeError):
        terminals = os.environ.get("ORCH_CLUSTER")  # as in `store`, which is slow to load
        cluster = context.params.get("cluster") or terminals or home.current_cluster.read_text().strip()
        return [node["name"] for node in json.loads(home.cluster(cluster).read_text())["nodes"]]
    return []


def _jobs() -> list[str]:
    return [path.parent.name for path in Home.default().jobs.glob("*/job.json")]


def _fitting(words: list[str], begun: str) -> list[str]:
    return [word for word in words if word.startswith(begun)]


def studies(context: click.Context, parameter: click.Parameter, begun: str) -> list[str]:
    from orchestrator.studies import study_names

    return _fitting(study_names(), begun)


INTERRUPTED = 130
UMASK = "orchestrator.cli.umask"
"""Key in a context's `meta`."""
_REMEDIES = {
    errno.ENOSPC: "free space there (`df`, and `df -i` for inodes), or choose another folder",
    errno.EDQUOT: "your quota there is used up: free some of it, or choose another folder",
    errno.EROFS: "it is mounted read-only: choose another folder",
    errno.ENOLCK: "that file system has no locks (NFS without a lock server?): choose a folder on another one",
    errno.EIO: "that disk or its server fails (see `dmesg`): choose a folder on another one",
    errno.ESTALE: "that disk or its server fails (see `dmesg`): choose a folder on another one",
    errno.EMFILE: "raise `ulimit -n`",
    errno.EAGAIN: "you may start no further process or thread: end some, or raise `ulimit -u`",
    errno.ENOMEM: "too little memory is free on this machine: end some program here",
}
"""For errors of this machine; for hosts see `remote/answer.py`."""

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]
cluster_option: Decorator = click.option(
    *("--cluster", "cluster"),
    metavar="NAME",
    help="A remembered cluster.  [default: $ORCH_CLUSTER, else the one of the last `orch up` or `orch use`]",
    shell_complete=cluster_names,
)
json_option: Decorator = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON document on standard output."
)
accept_option: Decorator = click.option(
    "--accept-new-host-keys", is_flag=True, help="Record the keys of hosts never seen before (never changed keys)."
)
job_option: Decorator = click.option(
    *("--job", "wanted"),
    metavar="ID",
    help="A job's id, a unique prefix of it, or `latest`.  [default: the cluster's latest]",
    shell_complete=job_ids,
    is_eager=True,  # before a JOB without --job
)


def _named(context: click.Context, parameter: click.Parameter, value: str | None) -> None:
    if value is None:
        return
    if context.params.get("wanted"):
        raise UsageError(f"two jobs named, {context.params['wanted']} and {value}", "name one")
    context.params["wanted"] = value


def job_given(command: Callable[..., Any]) -> Callable[..., Any]:
    argument = click.argument(
        "named", required=False, metavar="[JOB]", expose_value=False, callback=_named, shell_complete=job_ids
    )
    return argument(job_option(command))


out_option: Decorator = click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("runs"),
    show_default=True,
    help="The folder of collected runs.",
)
nodes_option: Decorator = click.option(
    *("--nodes", "nodes"),
    metavar="A,B",
    help="Use only these nodes: names, ranges like 'gpu[01-16]', patterns like 'v100*'.",
    shell_complete=node_names,
)


def given_out(out: Path) -> Path | None:
    source = click.get_current_context().get_parameter_source("out")
    return None if source in (None, ParameterSource.DEFAULT) else out


def insist(question: str) -> None:
    """Raises click.Abort for a no, UsageError if no answer is possible."""
    if not answered(question, default=False):
        raise click.Abort


def answered(question: str, *, default: bool, remedy: str = "add --yes to agree") -> bool:
    """Raises UsageError if no answer is possible."""
    try:
        return click.confirm(question, default=default, err=True)
    except click.Abort:
        if sys.stdin is not None and sys.stdin.isatty():  # Ctrl-C
            raise
        words = "nothing was done: there is no terminal to ask on, and no answer on standard input"
        raise UsageError(words, remedy) from None


def agrees(question: str) -> bool:
    can_ask = sys.stdin is not None and sys.stdin.isatty()
    return can_ask and click.confirm(question, default=False, err=True)


def chosen_id(controller: Controller, wanted: str | None, cluster: str | None) -> str:
    """Prints the id if it is the cluster's latest by default."""
    from orchestrator.jobs.job_store import LATEST
    from orchestrator.views import console

    found = controller.store.find_job(wanted or LATEST, cluster)
    if not wanted:
        console.say(f"job {found}, the latest of cluster {controller.store.job_record(found).cluster}")
    return found


def chosen_job(controller: Controller, wanted: str | None, cluster: str | None) -> RunningJob:
    return controller.jobs.find(chosen_id(controller, wanted, cluster))


def shown_cluster(controller: Controller, named: str | None) -> str | None:
    """None: all clusters."""
    from orchestrator.views import console

    terminals = controller.store.terminals()
    if not named and not terminals:
        return None
    chosen = controller.store.cluster_name(named)
    if not named and terminals:
        command = click.get_current_context().info_name
        console.say(f"jobs of cluster {chosen} ({terminals.by}); `{terminals.by}= orch {command}` shows all")
    return chosen


def collected(controller: Controller, wanted: str | None, out: Path, cluster: str | None) -> RunFolder:
    """In `out`, else the newest collected copy. Raises UsageError."""
    from orchestrator.jobs.collect import newest_copy
    from orchestrator.paths import RunFolder

    is_here = wanted and (out / wanted).is_dir()  # an old run's folder is enough: its job may be forgotten
    job = wanted if wanted and is_here else chosen_id(controller, wanted, cluster)
    found = RunFolder(out / job)
    if not found.plan.is_file() and not given_out(out):
        found = newest_copy(controller.store, job) or found
    if not found.plan.is_file():
        raise UsageError(f"{found.root} holds no collected run", _where_one_is(controller, found.root, job))
    return found


def _where_one_is(controller: Controller, folder: Path, job: str) -> str:
    from orchestrator.units import counted

    if inner := sorted(folder.glob("*/plan.json")):
        return f"{counted(len(inner), 'run')} in it: name one, as {inner[-1].parent}"
    if job in controller.store.job_ids():
        return f"`orch collect --job {job}` first"
    return "name a folder that `orch collect` wrote, or a job that `orch jobs` lists"


def settings_option(help: str) -> Decorator:
    return click.option(
        *("--set", "settings"), multiple=True, metavar="KEY=VALUE", help=help, shell_complete=setting_pairs
    )


def names_of(listed: str | None) -> list[str]:
    return [name for name in (listed or "").split(",") if name]


class Quantity(click.ParamType):  # type: ignore[type-arg]  # generic only since click 8.4
    """With its unit: `time` in s, `bandwidth` in bits/s, `size` in bytes."""

    def __init__(self, name: Literal["time", "bandwidth", "size"]) -> None:
        self.name = name

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        from orchestrator.units import parse_bandwidth, parse_bytes, parse_duration

        parse = {"time": parse_duration, "bandwidth": parse_bandwidth, "size": parse_bytes}[self.name]
        try:
            return value if isinstance(value, float) else float(parse(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


RETRIES = (
    "`--retries 3 --rejoin --hosts MIN:MAX` starts the job again on the hosts that remain, from its last checkpoint"
)
REMOVED = {
    "cp": "`orch ssh-config > ~/.ssh/orch`, then `scp -F ~/.ssh/orch FILE NODE:FILE`",
    "inventory": "`orch ssh-config` is for ssh and Ansible; `orch status --json` has all hosts",
    "--elastic": RETRIES,
    "--max-restarts": RETRIES,
}


class Orch(click.Group):
    """Prints expected errors without traceback and sets the exit code. The help has a section per task."""

    def __init__(self, *words: Any, **more: Any) -> None:
        super().__init__(*words, **more)
        self.sections: dict[str, list[str]] = {}

    def add_section(self, title: str, commands: Iterable[click.Command]) -> None:
        for command in commands:
            self.add_command(command)
            self.sections.setdefault(title, []).append(command.name or "")

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if args and args[0] in REMOVED:
            raise UsageError(f"`orch {args[0]}` is no longer a command", REMOVED[args[0]])
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, self.commands), default=0)
        for title, names in self.sections.items():
            with formatter.section(title):
                rows = [(name.ljust(width), _first_sentence(self.commands[name])) for name in names]
                formatter.write_dl(rows)

    def invoke(self, ctx: click.Context) -> Any:
        mask = ctx.meta[UMASK] = os.umask(0o077)  # only the owner may read what we write: state, logs, reports
        try:
            return self._invoke(ctx)
        except OrchError as error:
            from orchestrator.views import console

            console.fail_each(error.errors if isinstance(error, HostsError) else [error])
            ctx.exit(error.exit_code)
        except OSError as error:
            if isinstance(error, BrokenPipeError):
                _leave_quietly(ctx)
            _fail(error)
            ctx.exit(OrchError.exit_code)
        except KeyboardInterrupt:
            ctx.exit(INTERRUPTED)
        finally:
            os.umask(mask)

    def _invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.NoSuchOption as error:
            if error.option_name not in REMOVED:
                raise
            raise UsageError(f"{error.option_name} is no longer an option", REMOVED[error.option_name]) from None

    def main(self, *words: Any, **more: Any) -> Any:
        try:
            return super().main(*words, **more)
        except OSError as error:  # from printing help or version, outside any command
            _fail(error)
            sys.exit(OrchError.exit_code)


def _fail(error: OSError) -> None:
    from orchestrator.views import console

    where = error.filename or "this machine"
    console.fail(f"{where}: {error.strerror or error}", _REMEDIES.get(error.errno or 0, "choose another folder"))


def _first_sentence(command: click.Command) -> str:
    words = " ".join((command.help or "").partition("\n\n")[0].split())
    return words.partition(". ")[0].rstrip(".")


def _leave_quietly(ctx: click.Context) -> NoReturn:
    """The reader of our output has closed it (`orch logs | head`)."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    ctx.exit(0)


@contextlib.contextmanager
def open_controller(accept_new_host_keys: bool = False) -> Iterator[Controller]:
    from orchestrator.controller import opened
    from orchestrator.paths import Home

    home = Home.default()
    ask = _ask_passphrase if sys.stdin and sys.stdin.isatty() else None
    with opened(home, accept_new_host_keys=accept_new_host_keys, ask_passphrase=ask, say=_warn) as controller:
        try:
            yield controller
        finally:
            if controller.store.unwritten:
                _say_unwritten(home.root, controller.store.unwritten)


def _warn(line: str) -> None:
    from orchestrator.views import console

    console.warn(line)


def _say_unwritten(home: Path, error: OSError) -> None:
    from orchestrator.views import console

    why = error.strerror or str(error)
    console.warn(f"results are not remembered: {home} cannot be written ({why}); free space, or set ORCH_HOME")


def _ask_passphrase(key_file: str) -> str | None:
    return str(click.prompt(f"Passphrase of {key_file}", hide_input=True, err=True)) or None


def setup_lines(now_at: Callable[[str], None]) -> Callable[[SetupProgress], None]:
    """Shows how hosts install a job's packages: on a terminal the newest line, else each phase of a host once."""
    from orchestrator.views import console

    said = set[tuple[str, str]]()

    def show(progress: SetupProgress) -> None:
        now_at(f"{progress.node}: {progress.phase}  {progress.line}")
        if not console.err.is_terminal and (key := (progress.node, progress.phase)) not in said:
            said.add(key)
            console.say(f"{progress.node}: {progress.phase}")

    return show


@contextlib.contextmanager
def busy(what: str) -> Iterator[Callable[[str], None]]:
    """A spinner on a terminal. Yields a function that changes its text."""
    from orchestrator.views import console

    with console.err.status(what) if console.err.is_terminal else contextlib.nullcontext() as status:
        yield status.update if status else lambda words: None
