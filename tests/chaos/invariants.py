"""What must hold after every round, whatever the fault was."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.jobs import Collected, JobRecord
from orchestrator.paths import RunFolder

if TYPE_CHECKING:
    from .rounds import Expected, Round

FINAL = {"succeeded", "failed", "cancelled", "undone"}
LOGS = ("stdout.log", "stderr.log")


def broken(round_: Round, expected: Expected, record: JobRecord, collected: Collected) -> list[str]:
    """Every invariant that does not hold, in words."""
    return [
        *round_.world.sighting(round_.job).wrong,
        *_processes(round_),
        *_records(round_),
        *_verdict(expected, record),
        *_logs(round_, expected),
        *_canary(round_),
        *_strangers(round_),
    ]


def _processes(round_: Round) -> Iterator[str]:
    """Nothing of the job runs after its end."""
    if round_.world.wait(round_.job, lambda now: not now, 5.0) is None:
        yield f"left behind: {[(p.node, p.role, p.pid, p.command[:60]) for p in round_.processes()]}"


def _records(round_: Round) -> Iterator[str]:
    """The hosts' own records parse; one whose host never fell is final, and lists no leftovers."""
    for name in round_.cell.names:
        path = round_.on_disk(name) / "agent.json"
        if not path.exists():
            continue
        try:
            agent = json.loads(path.read_text())
        except ValueError as error:
            yield f"{path} does not parse: {error}"
            continue
        if agent.get("leftovers"):
            yield f"{name} lists what stayed: {agent['leftovers']}"


def _verdict(expected: Expected, record: JobRecord) -> Iterator[str]:
    """The state, the first cause and the exit code agree with what was done, and with each other."""
    if record.state not in expected.state.split("|"):
        yield f"state {record.state}, expected {expected.state}: {record.first_failure}"
        return
    first = record.first_failure
    if (first is not None) != (record.state in ("failed", "lost")):
        yield f"state {record.state} with first failure {first}"
    if first and expected.node and first.node != expected.node:
        yield f"the first failure names {first.node}, not {expected.node}: {first.reason}"
    if first and not re.search(expected.says, first.reason):
        yield f"the reason does not say {expected.says!r}: {first.reason}"
    if expected.exit_code is not None and record.exit_code != expected.exit_code:
        yield f"exit code {record.exit_code}, expected {expected.exit_code}"
    if record.state == "succeeded" and record.exit_code != 0:
        yield f"succeeded with exit code {record.exit_code}"
    if record.state == "failed" and not record.exit_code:
        yield f"failed with exit code {record.exit_code}"


def _logs(round_: Round, expected: Expected) -> Iterator[str]:
    """What was pulled is what lies on the hosts, and no line is missing or out of order."""
    run = RunFolder(round_.folder / "run")
    for rank, name in enumerate(round_.cell.names):
        for log in LOGS:
            here, there = run.rank(name, rank) / log, round_.on_disk(name) / f"rank-{rank}" / log
            if _bytes(here) != _bytes(there):
                yield f"{name} {log}: {len(_bytes(here))} bytes pulled, {len(_bytes(there))} on the host"
        lines = _bytes(run.rank(name, rank) / "stdout.log").decode().splitlines()
        if expected.logs_whole and lines != [f"{rank} {number}" for number in range(len(lines))]:
            yield f"{name}: its numbered lines are not in order: {lines[:3]} ... {lines[-3:]}"


def _canary(round_: Round) -> Iterator[str]:
    """The secrets of a job (its token, a value of `env`) stand in node.json and nowhere else."""
    for name in round_.cell.names:
        folder = round_.on_disk(name)
        secrets = [round_.canary, *_token(folder / "node.json")]
        for path in [*_files(folder), *_files(round_.folder / "run")]:
            found = [secret for secret in secrets if path.name != "node.json" and secret.encode() in _bytes(path)]
            if found:
                yield f"a secret stands in {path}"
    commands = [p.command for p in round_.world.sighting(round_.job).ever]
    if any(round_.canary in command for command in commands):
        yield "a secret stood in an argument list"


def _strangers(round_: Round) -> Iterator[str]:
    """Nobody signalled a process that is not the job's."""
    for name in round_.cell.names:
        if not round_.world.bystander_lives(name):
            yield f"the bystander on {name} was killed"
            round_.world.bystanders[name] = round_.world.start_bystander(name)


def _token(path: Path) -> list[str]:
    try:
        token = str(json.loads(path.read_text())["token"])
        return [token] if token else []  # it ends with the job
    except (OSError, ValueError, KeyError):
        return []


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()] if folder.is_dir() else []


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def summary(outcomes: list[Any]) -> dict[str, dict[str, int]]:
    """By kind: rounds played and rounds broken."""
    kinds: dict[str, dict[str, int]] = {}
    for outcome in outcomes:
        found = kinds.setdefault(outcome.kind, {"rounds": 0, "broken": 0})
        found["rounds"] += 1
        found["broken"] += bool(outcome.wrong)
    return dict(sorted(kinds.items()))
