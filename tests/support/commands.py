"""Every command of `orch`."""

from __future__ import annotations

import click

from orchestrator.cli import main


def commands(group=main, above=()):
    """Every command there is, as the words that a person types."""
    for name, command in group.commands.items():
        yield (*above, name), command
        if isinstance(command, click.Group):
            yield from commands(command, (*above, name))


COMMANDS = dict(commands())
