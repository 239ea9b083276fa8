"""What a person wants to run, and the files it needs: an experiment, a script, or a module.

wish = read_wish(Words(exp="mnist_lenet", settings=("epochs=1",)))      as `orch run` is given it
wish = read_experiment("mnist_lenet", {"epochs": "1"})                  the same
wish.request.settings.epochs                                            1
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from orchestrator.errors import UsageError
from orchestrator.planning.bundle import names_in, pack_folder, trainer_folder
from orchestrator.planning.host_choice import HostRange
from orchestrator.planning.launch_plan import LOCAL_RANK, Attempt, CodeFolder
from orchestrator.planning.launchers import Program, not_python, read_program
from orchestrator.planning.secret_words import names_secret, shows_secret
from orchestrator.planning.starters import Starter
from trainer.shared.config import parse_settings
from trainer.shared.experiments import SCRIPT
from trainer.shared.fields import SettingsError
from trainer.shared.settings import AnySettings, Settings
from trainer.shared.shares import WORDS

AUTO = "auto"
"""As the value of `strategy`: the fastest that is predicted."""


@dataclass(frozen=True)
class RunRequest:
    kind: Literal["experiment", "script", "module"]
    name: str
    """The experiment, or the script's or module's name."""
    command: tuple[str, ...]
    """Arguments after the interpreter, the same on every host; those of an experiment end before its settings."""
    settings: AnySettings | None = None
    """Of an experiment, and of a script that is shipped with the trainer; None of another script without --set."""
    chosen: Mapping[str, str] = field(default_factory=dict)
    """The settings that the person set by hand, as they wrote them: the plan does not overrule them."""
    batch: int | None = None
    """Samples of one update of a script over all ranks, where the person says so."""
    best_way: bool = False
    """strategy=auto: the plan chooses how the ranks stay together."""
    measures_steps: bool = True
    """Whether the steps of a script that writes no records are measured from outside."""
    share_gpus: bool = False
    grace_s: float = 3.0
    time_limit_s: float | None = None
    hosts: HostRange | None = None
    """How many of the nodes are enough, and how many at most; None: all of them take part."""
    resumes: str | None = None
    """An earlier job of a script that resumes by itself: it starts with the files that this one wrote."""
    keep: tuple[str, ...] = ()
    """Folders of the script's working folder that it takes over from its job before."""
    attempt: Attempt | None = None
    """Which one this is, of a job that is tried again."""
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Variables for this job alone; they win over the inventory's."""
    job_name: str | None = None
    """What the person calls the job."""
    note: str | None = None
    starter: Starter | None = None
    """Who starts the ranks of its one host; None is orch."""
    notes: tuple[str, ...] = ()
    """What the person should know of how their words were understood."""

    @property
    def trains(self) -> bool:
        """Is it the trainer that runs, which takes its settings as arguments?"""
        return self.kind == "experiment"

    @property
    def training(self) -> Settings | None:
        """Its settings; None of what trains no network of ours."""
        return self.settings if isinstance(self.settings, Settings) else None

    @property
    def global_batch(self) -> int | None:
        """Samples of one update over all ranks; None where it is not known, or there are none."""
        return self.training.batch if self.training and self.trains else self.batch

    @property
    def is_one_process(self) -> bool:
        """Whether one process is to use all GPUs of its host."""
        return self.training is not None and self.training.strategy == "dp"

    @property
    def leaves_out(self) -> bool:
        """Whether hosts without which the job is faster may be left out: the person leaves the choice of a way, or of
        the shares, to what is known of speeds.
        """
        if not self.training:
            return False
        shares = self.training.shares
        return (shares == "measured" and "shares" in self.chosen) or (self.best_way and shares in WORDS)


@dataclass(frozen=True)
class Wish:
    """A request, and the files to ship: their description and their tar."""

    request: RunRequest
    code: CodeFolder
    blob: bytes


@dataclass(frozen=True)
class Words:
    """What `orch run` is to run: one of an experiment, a module, or a script with its arguments."""

    exp: str | None = None
    settings: tuple[str, ...] = ()
    """The settings of the experiment, KEY=VALUE each."""
    is_module: bool = False
    """Whether `command` begins with a module's name."""
    command: tuple[str, ...] = ()
    """A script or module, and its arguments."""
    folder: Path | None = None
    """What to ship; None means the script's own folder, or this one for a module."""
    batch: int | None = None
    """Samples of an update over all ranks of a script, to be split among them."""
    pass_local_rank: bool = False
    """Whether a script is given its local rank as its first argument."""


def read_wish(words: Words) -> Wish:
    """Raises UsageError where it is not exactly one of the three kinds, and for any mistake in one."""
    refuse_unless_one(words.exp, words.command, "give one of --exp NAME, -- SCRIPT ARGS and -m MODULE")
    if words.exp and words.batch is not None:
        raise UsageError("--batch belongs to a script of your own", f"--set batch={words.batch}")
    if words.exp and words.pass_local_rank:
        raise UsageError(
            "--pass-local-rank belongs to a script of your own", "leave it out: the trainer knows its rank"
        )
    if words.exp:
        return read_experiment(words.exp, parse_pairs(words.settings, "--set KEY=VALUE"))
    _refuse_secrets(words.command[1:] if words.is_module else words.command)
    program = read_program(words.command, is_module=True) if words.is_module else read_program(words.command)
    arguments = ((LOCAL_RANK,) if words.pass_local_rank else ()) + program.arguments
    return _module(program, arguments, words) if program.is_module else _script(program, arguments, words)


def refuse_unless_one(exp: str | None, command: Sequence[str], remedy: str) -> None:
    if bool(exp) == bool(command):
        what = "both an experiment and a script were named" if exp else "nothing to run was named"
        raise UsageError(what, remedy)


def refuse_without_trainer(wish: Wish) -> None:
    """Raises UsageError for a script whose loop the trainer has no part in."""
    if not wish.request.trains and not _has_trainer(wish.blob):
        raise UsageError(
            f"{wish.request.name} does not import trainer, so its loop cannot be measured or predicted",
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


def read_experiment(exp: str, pairs: Mapping[str, str], kept: Mapping[str, Any] = MappingProxyType({})) -> Wish:
    """pairs: settings as a person writes them; strategy may be AUTO. kept: values of others, which `pairs` go before.

    Raises UsageError for an experiment or a setting that there is not.
    """
    return Wish(request_of(exp, pairs, kept), *pack_folder(trainer_folder(), prefix="trainer/"))


def request_of(exp: str, pairs: Mapping[str, str], kept: Mapping[str, Any] = MappingProxyType({})) -> RunRequest:
    """The same without the files, which take a tenth of a second to pack."""
    best_way = pairs.get("strategy") == AUTO
    if best_way:
        pairs, kept = ({key: each[key] for key in each if key != "strategy"} for each in (pairs, kept))
    settings = _parsed(exp, pairs, kept)
    chosen = {**{key: str(value) for key, value in kept.items()}, **pairs}
    command = ("-m", "trainer", f"--exp={exp}")
    return RunRequest("experiment", exp, command, settings=settings, chosen=chosen, best_way=best_way)


def _module(program: Program, arguments: tuple[str, ...], words: Words) -> Wish:
    command = (*program.flags, "-m", program.name, *arguments)
    request = RunRequest("module", program.name, command, batch=words.batch, notes=program.notes)
    code, blob = pack_folder(words.folder or Path(), trainer_at="")
    return Wish(_asked_of(request, words, blob), code, blob)


def _asked_of(request: RunRequest, words: Words, blob: bytes) -> RunRequest:
    """A script's request, with the settings that it is to have of `trainer.join`. blob: what is shipped."""
    if not words.settings and not _has_trainer(blob):
        return request
    pairs = parse_pairs(words.settings, "--set KEY=VALUE")
    if words.batch is not None:
        if pairs.get("batch", str(words.batch)) != str(words.batch):
            raise UsageError(
                f"--batch {words.batch} and --set batch={pairs['batch']} contradict each other", "give one"
            )
        pairs["batch"] = str(words.batch)
    best_way = pairs.get("strategy") == AUTO
    if best_way:
        del pairs["strategy"]
    settings = _parsed(str(SCRIPT["exp"]), pairs)
    assert isinstance(settings, Settings)  # noqa: S101 - for the type checker
    batch = settings.batch if "batch" in pairs else None
    return replace(request, settings=settings, chosen=pairs, batch=batch, best_way=best_way)


def _parsed(exp: str, pairs: Mapping[str, str], kept: Mapping[str, Any] = MappingProxyType({})) -> AnySettings:
    try:
        return parse_settings(exp, pairs, kept)
    except SettingsError as error:
        raise UsageError(str(error), "`python -m trainer --help` lists every setting") from error


def _script(program: Program, arguments: tuple[str, ...], words: Words) -> Wish:
    script = Path(program.name)
    if not script.is_file():
        raise UsageError(f"{script}: no such script", "give its path as seen from here")
    _refuse_other_languages(script)
    root = (words.folder or script.parent).resolve()
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
    request = RunRequest("script", script.name, command, batch=words.batch, notes=program.notes)
    return Wish(_asked_of(request, words, blob), code, blob)


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
