"""Pulls a job's files into its run folder: only what is new, checked by hash, and never half of a file.

    collected = collect(plan, hosts, RunFolder(Path("runs") / plan.job))

New bytes go to a hidden file beside the old one; when the host's SHA-256 of all that it handed out agrees, the new file
takes the old one's name. File names are ours; the host only fills them.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestrator import job
from orchestrator.call import Host
from orchestrator.errors import HostError, ProbeError
from orchestrator.files import write_json
from orchestrator.frames import Agent, End, Piece
from orchestrator.paths import RunFolder
from orchestrator.records import LaunchPlan


@dataclass
class Collected:
    """new_bytes: pulled this time. agents: every host's record. errors: hosts whose part is missing or incomplete."""

    new_bytes: int = 0
    agents: dict[str, dict[str, Any]] = field(default_factory=dict)
    errors: dict[str, HostError] = field(default_factory=dict)


def collect(
    plan: LaunchPlan,
    hosts: Mapping[str, Host],
    run: RunFolder,
    progress: Callable[[str, int], None] = lambda node, size: None,
) -> Collected:
    """progress(node, bytes) is called for every piece that comes.

    A host that fails, or has nothing of the job any more, leaves what was there before.
    """
    collected = Collected()
    pulls = {node.name: _Pull(run.node(node.name)) for node in plan.nodes if node.name in hosts}
    offsets = {name: pull.offsets() for name, pull in pulls.items()}
    for name, item in job.watch(plan, hosts, offsets=offsets, follow=False):
        if isinstance(item, HostError):
            collected.errors[name] = item
        elif isinstance(item, Piece):
            pulls[name].add(item)
            collected.new_bytes += len(item.data)
            progress(name, len(item.data))
        elif isinstance(item, Agent):
            collected.agents[name] = item.record
            if item.record.get("state") != "lost" or not run.agent(name).exists():
                write_json(run.agent(name), item.record)
        elif isinstance(item, End):
            damaged = pulls[name].finish(item.files)
            if damaged:
                collected.errors[name] = ProbeError(name, f"arrived damaged: {', '.join(damaged)}", "collect again")
    for pull in pulls.values():
        pull.discard()
    return collected


class _Pull:
    """The files of one node on their way into its folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._parts: dict[str, Path] = {}

    def offsets(self) -> dict[str, int]:
        """Bytes here already, by the host's name for the file."""
        found = [path for path in self._folder.rglob("*") if path.is_file() and not path.name.startswith(".")]
        return {path.relative_to(self._folder).as_posix(): path.stat().st_size for path in found}

    def add(self, piece: Piece) -> None:
        part = self._part(piece.file)
        with open(part, "r+b") as file:
            # A file that was cut or replaced on the host comes again from its start.
            file.truncate(piece.offset)
            file.seek(piece.offset)
            file.write(piece.data)

    def finish(self, files: Mapping[str, tuple[int, str]]) -> list[str]:
        """Puts every new file that agrees with the host's (size, SHA-256) in its place. Returns those that do not."""
        damaged = []
        for name, (size, digest) in files.items():
            if size == 0 and name not in self._parts:
                continue  # its host has it no more (`orch down`): what was collected stays
            here = self._parts.pop(name, self._folder / name)
            if _fingerprint(here) != (size, digest):
                damaged.append(name)
                (self._folder / name).unlink(missing_ok=True)  # whichever is wrong, the next collect starts anew
                here.unlink(missing_ok=True)
            elif here != self._folder / name:
                here.rename(self._folder / name)
        return damaged

    def discard(self) -> None:
        for part in self._parts.values():
            part.unlink(missing_ok=True)

    def _part(self, name: str) -> Path:
        if name not in self._parts:
            whole = self._folder / name
            whole.parent.mkdir(parents=True, exist_ok=True)
            part = whole.with_name(f".{whole.name}.part")
            part.unlink(missing_ok=True)
            if whole.exists():
                shutil.copyfile(whole, part)
            else:
                part.touch()
            self._parts[name] = part
        return self._parts[name]


def _fingerprint(path: Path) -> tuple[int, str]:
    digest = hashlib.sha256()
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
        os.fsync(file.fileno())
        return file.tell(), digest.hexdigest()
    return 0, digest.hexdigest()
