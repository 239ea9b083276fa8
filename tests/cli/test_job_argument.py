"""A job may be named without `--job`."""

from __future__ import annotations

from typing import Any

import click
import pytest

from orchestrator.cli import main
from orchestrator.errors import UsageError


def params(command: str, *words: str) -> dict[str, Any]:
    parent = click.Context(main, info_name="orch", **main.context_settings)
    return main.commands[command].make_context(command, list(words), parent=parent).params


@pytest.mark.parametrize("command", ["logs", "why", "cancel", "collect", "report"])
def test_with_the_option_and_without_it_is_the_same_job(command: str) -> None:
    given = params(command, "--job", "hello")
    assert given["wanted"] == "hello" and "named" not in given
    assert params(command, "hello") == given and params(command)["wanted"] is None


@pytest.mark.parametrize("words", [("a", "--job", "b"), ("--job", "b", "a")])
def test_two_jobs_are_refused(words: tuple[str, ...]) -> None:
    with pytest.raises(UsageError, match="two jobs named, b and a"):
        params("logs", *words)
