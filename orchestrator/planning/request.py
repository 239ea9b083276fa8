"""What a person wants to run, from the words of `orch run`: experiment, script or module, and the files it needs.

wish = read_wish("mnist_lenet", ["epochs=1"], None, None, ())
wish.request.command        # ("-m", "trainer", "--exp=mnist_lenet", "--epochs=1")
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from orchestrator.errors import UsageError
from orchestrator.planning.bundle import names_in, pack_folder
from orchestrator.planning.launch_plan import LOCAL_RANK, CodeFolder, Elastic
from orchestrator.planning.launchers import Program, not_python, read_program
from orchestrator.planning.secret_words import names_secret, shows_secret
from trainer.shared.config import SettingsError, parse_settings
from trainer.shared.shares import WORDS

AUTO = "auto"
"""As the value of `strategy`: the fastest that is foreseen."""


@dataclass(frozen=True)
class RunRequest:
    """command: arguments after the interpreter, the same on every host."""

    kind: Literal["experiment", "script", "module"]
    name: str
    """The experiment, or the script's or module's name."""
    command: tuple[str, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    """An experiment's complete settings; of a script only the global batch, if it was told."""
    chosen: frozenset[str] = frozenset()
    """The settings that the person set by hand: the plan does not overrule them."""
    best_way: bool = False
    """strategy=auto: the plan chooses how the ranks stay together."""
    share_gpus: bool = False
    grace_s: float = 3.0
    time_limit_s: float | None = None
    elastic: Elastic | None = None
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Variables for this job alone; they win over the inventory's."""
    notes: tuple[str, ...] = ()
    """What the person should know of how their words were understood."""

    @property
    def leaves_out(self) -> bool:
        """Whether hosts without which the job is faster may be left out: the person leaves the choice of a way, or of
        the shares, to what is known of speeds.
        """
        shares = self.settings.get("shares")
        by_speed = shares == "measured" and "shares" in self.chosen
        return not self.elastic and (by_speed or (self.best_way and shares in WORDS))


@dataclass(frozen=True)
class Wish:
    """A request, and the files to ship: their description and their tar."""

    request: RunRequest
    code: CodeFolder
    blob: bytes


def read_wish(
    exp: str | None,
    settings: Sequence[str],
    module: str | None,
    folder: Path | None,
    command: tuple[str, ...],
    batch: int | None = None,
    pass_local_rank: bool = False,
) -> Wish:
    """settings: KEY=VALUE each. folder: what to ship; by default the script's folder, or this one for a module. batch:
    samples of an update over all ranks of a script, to be split among them. pass_local_rank: a script is given its
    local rank as its first argument.

    Raises UsageError where it is not exactly one of the three kinds, and for any mistake in one.
    """
    if sum([bool(exp), bool(module), bool(command) and not module]) != 1:
        raise UsageError("say what to run, once", "orch run --exp NAME, orch run -- SCRIPT ARGS, or orch run -m MODULE")
    if exp and batch is not None:
        raise UsageError("--batch belongs to a script of your own", f"--set batch={batch}")
    if exp and pass_local_rank:
        raise UsageError(
            "--pass-local-rank belongs to a script of your own", "leave it out: the trainer knows its rank"
        )
    if exp:
        return _experiment(exp, parse_pairs(settings, "--set KEY=VALUE"))
    _refuse_secrets(command)
    if settings:
        raise UsageError("--set belongs to --exp", "give your script its own arguments after --")
    told = {} if batch is None else {"batch": batch}
    program = read_program((module, *command), is_module=True) if module else read_program(command)
    arguments = ((LOCAL_RANK,) if pass_local_rank else ()) + program.arguments
    if program.is_module:
        words = (*program.flags, "-m", program.name, *arguments)
        request = RunRequest("module", program.name, words, settings=told, notes=program.notes)
        return Wish(request, *pack_folder(folder or Path()))
    return _script(program, arguments, folder, told)


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


def _experiment(exp: str, pairs: dict[str, str]) -> Wish:
    best_way = pairs.get("strategy") == AUTO
    if best_way:
        pairs = {key: value for key, value in pairs.items() if key != "strategy"}
    try:
        checked = parse_settings(exp, pairs)
    except SettingsError as error:
        raise UsageError(str(error), "`python -m trainer --help` lists every setting") from error
    found = importlib.util.find_spec("trainer")
    if found is None or found.origin is None:
        raise UsageError("the trainer package is not installed beside orch", "install this project again")
    command = ("-m", "trainer", f"--exp={exp}", *(f"--{key}={value}" for key, value in pairs.items()))
    request = RunRequest(
        "experiment", exp, command, settings=dataclasses.asdict(checked), chosen=frozenset(pairs), best_way=best_way
    )
    return Wish(request, *pack_folder(Path(found.origin).parent, prefix="trainer/"))


def _script(program: Program, arguments: tuple[str, ...], folder: Path | None, settings: Mapping[str, Any]) -> Wish:
    script = Path(program.name)
    if not script.is_file():
        raise UsageError(f"{script}: no such script", "give its path as seen from here")
    _refuse_other_languages(script)
    root = (folder or script.parent).resolve()
    if not script.resolve().is_relative_to(root):
        raise UsageError(f"{script} is not inside {root}", "choose a --folder that holds the script")
    inside = script.resolve().relative_to(root).as_posix()
    code, blob = pack_folder(root)
    if inside not in names_in(blob):
        raise UsageError(
            f"{script} itself would stay here: .gitignore or .orchignore leaves it out, or it looks like a secret",
            f"take it out of there, or add a line `!{inside}` to {root / '.orchignore'}",
        )
    words = (*program.flags, inside, *arguments)
    return Wish(RunRequest("script", script.name, words, settings=settings, notes=program.notes), code, blob)


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
