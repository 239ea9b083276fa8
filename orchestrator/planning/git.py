"""What git says of a folder, asked so that nothing a repository's own configuration names is run.

    commit_of(Path("proj"))         # Commit(id="3f2a...", dirty=True); None outside of a repository, or without git

A repository of another owner, one that git cannot read, and one without a commit give None: git is asked for facts
that are good to have, and no command fails for want of them.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from orchestrator.planning.launch_plan import Commit

LISTING_S = 60.0
ANSWER_S = 10.0
_GIT = ("git", "-c", "core.fsmonitor=false", "-c", "core.untrackedCache=false", "-c", "protocol.allow=never")
"""A repository's own configuration may name programs to run, and places to fetch from: none is needed here."""


def git(folder: Path, *words: str, timeout_s: float = ANSWER_S) -> subprocess.CompletedProcess[bytes]:
    """Raises FileNotFoundError where there is no git, subprocess.TimeoutExpired where it does not answer."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    return subprocess.run(
        [*_GIT, *words],
        cwd=folder,
        env={**environment, "LC_ALL": "C", "GIT_OPTIONAL_LOCKS": "0", "GIT_NO_LAZY_FETCH": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=timeout_s,
    )


def commit_of(folder: Path) -> Commit | None:
    """The commit that is checked out there, and whether the folder holds anything else than that commit does."""
    try:
        head = git(folder, "rev-parse", "--verify", "-q", "HEAD^{commit}")
        commit = head.stdout.decode(errors="replace").strip()
        if head.returncode or not re.fullmatch(r"[0-9a-f]{40}([0-9a-f]{24})?", commit):
            return None
        if git(folder, "check-ignore", "-q", ".").returncode == 0:
            return None  # an environment inside somebody's project, for example: the commit does not hold this folder
        return Commit(id=commit, dirty=_is_dirty(folder))
    except (OSError, subprocess.TimeoutExpired):
        return None


def _is_dirty(folder: Path) -> bool | None:
    """None where git cannot say without running what the repository's own configuration names (clean filters)."""
    settings = git(folder, "config", "--show-scope", "--name-only", "-z", "--get-regexp", "^filter\\.")
    scopes = settings.stdout.split(b"\0")[:-1:2]
    if settings.returncode not in (0, 1) or {b"local", b"worktree"} & set(scopes):
        return None
    options = ("--porcelain", "--no-renames", "--ignore-submodules=dirty", "--untracked-files=normal")
    answer = git(folder, "status", *options, "--", ".")
    return None if answer.returncode else bool(answer.stdout)
