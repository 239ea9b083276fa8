"""Every command of `orch`, and one typed in this process."""

from __future__ import annotations

from collections.abc import Callable

import click
import pytest

from orchestrator.cli import main


def commands(group=main, above=()):
    """Every command there is, as the words that a person types."""
    for name, command in group.commands.items():
        yield (*above, name), command
        if isinstance(command, click.Group):
            yield from commands(command, (*above, name))


COMMANDS = dict(commands())


def options_of(command: click.Command) -> list[click.Parameter]:
    """Without --help."""
    return command.get_params(click.Context(command, **main.context_settings))[:-1]


Types = Callable[..., tuple[int, str, str]]


def typist(capfd: pytest.CaptureFixture[str]) -> Types:
    """Types a command; gives exit code, standard output and standard error."""

    def types(*words: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            main(list(words), prog_name="orch")
        shown = capfd.readouterr()
        return int(end.value.code or 0), shown.out, shown.err

    return types
