"""Every file name on a host, in one place.

<workdir>/.orch-work                       the mark of a work folder; who makes or removes things there locks it
         /code/<sha256>/                   code as shipped, verified, read-only
<workdir>/locks/gpu-<uuid>.lock            held by the supervisor that uses this GPU
               /venv.lock                  held while an environment is made
<workdir>/venv/torch-<version>/            environments of `orch setup`; orch-venv.json says whose, and if whole
<workdir>/handover/<job>/                  files of an earlier job, until `prepare` moves them into this job's folder
<workdir>/jobs/<job>/node.json             what this host was asked to do (mode 0600); its secrets end with the job
                    /plan.json             the whole job's plan, less its secrets: for a controller that lost its own
                    /peers.json            where the job's supervisors listen for each other
                    /agent.json            what became of it, written by the supervisor alone
                    /reserve               room for the last word in agent.json on a disk that is full
                    /bin/orch_remote/         these programs
                    /src/                  this job's own copy of the code
                    /shipped.json          what each file in src/ was when it was shipped: all else there, the job wrote
                    /received.json         what each file was that came from another host's earlier job (`handover`)
                    /rank-<r>/             stdout.log stderr.log (and .times of both) metrics.jsonl exit.json
                    /rank-<r>/stacks       where the rank's Python writes its stacks when asked; gone when it has ended
                    /gpu.jsonl             use, memory, clock, power and heat of the job's GPUs, every few seconds
                    /control               FIFO: requests and rank events, one JSON line each
                    /alive                 FIFO: its only writer is the supervisor, so its end is the supervisor's
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .fitting import fitted

JOB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
GONE = ".orch-gone-"
"""How the names of folders begin that are being removed."""
VENV_MARKER = "orch-venv.json"
VERSION = re.compile(r"\d[A-Za-z0-9.+]{0,63}")
READY_S = 20.0
"""So long may a `prepare` that is at work take from the job's folder to its supervisor's first word."""
FINAL_STATES = frozenset({"succeeded", "failed", "cancelled", "undone"})
RESERVE_BYTES = 1 << 15
"""Less than what a log that waits for room takes for enough (`pump.ROOM_BYTES`)."""
RECORD_BYTES = RESERVE_BYTES - (1 << 13)
"""An agent.json takes no more: two blocks of a disk stay for its name and for what lies beside it."""


class WorkFolder:
    """The work folder of one host."""

    def __init__(self, workdir: str) -> None:
        self.root = Path(workdir).expanduser().absolute()

    @property
    def jobs(self) -> Path:
        return self.root / "jobs"

    @property
    def locks(self) -> Path:
        return self.root / "locks"

    @property
    def codes(self) -> Path:
        return self.root / "code"

    def code(self, sha256: str) -> Path:
        if not re.fullmatch(r"[0-9a-f]{64}", sha256):
            raise ValueError(f"not a sha256: {sha256!r}")
        return self.codes / sha256

    @property
    def venvs(self) -> Path:
        return self.root / "venv"

    @property
    def venv_lock(self) -> Path:
        return self.locks / "venv.lock"

    def venv(self, torch: str) -> Path:
        if not VERSION.fullmatch(torch):
            raise ValueError(f"not a version: {torch!r}")
        return self.venvs / f"torch-{torch}"

    def job(self, job: str) -> JobFolder:
        if not JOB_ID.fullmatch(job):
            raise ValueError(f"not a job id: {job!r}")
        return JobFolder(self.jobs / job)

    @property
    def handovers(self) -> Path:
        return self.root / "handover"

    def handover(self, job: str) -> JobFolder:
        """Files that lie ready for this job, and whose they are, as a job's folder has them."""
        if not JOB_ID.fullmatch(job):
            raise ValueError(f"not a job id: {job!r}")
        return JobFolder(self.handovers / job)

    def all_jobs(self) -> list[JobFolder]:
        if not self.jobs.is_dir():
            return []
        return [JobFolder(folder) for folder in sorted(self.jobs.iterdir()) if JOB_ID.fullmatch(folder.name)]


class JobFolder:
    """The folder of one job on this host."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.node = root / "node.json"
        self.plan = root / "plan.json"
        self.peers = root / "peers.json"
        self.agent = root / "agent.json"
        self.reserve = root / "reserve"
        self.bin = root / "bin"
        self.src = root / "src"
        self.shipped = root / "shipped.json"
        self.received = root / "received.json"
        self.control = root / "control"
        self.alive = root / "alive"
        self.checkpoints = root / "checkpoints"
        self.supervisor_log = root / "supervisor.log"
        self.prepare_log = root / "prepare.log"
        self.torchrun_log = root / "torchrun.log"
        self.gpu_log = root / "gpu.jsonl"

    @property
    def id(self) -> str:
        return self.root.name

    def rank(self, rank: int) -> Path:
        return self.root / f"rank-{rank}"

    def stacks(self, rank: int) -> Path:
        return self.rank(rank) / "stacks"

    def read_agent(self) -> dict[str, Any]:
        """The supervisor's last word; {} before its first."""
        try:
            return dict(json.loads(self.agent.read_text()))
        except (FileNotFoundError, ValueError):
            return {}

    def read_node(self) -> dict[str, Any]:
        """What this host was asked to do; {} where it was asked nothing."""
        return read_json(self.node)

    def has_token(self, token: str) -> bool:
        """Whether this is the very job that was given this token, also after its end."""
        node = self.read_node()
        return node.get("token") == token or node.get("token_sha256") == _sha256(token)

    def forget_secrets(self) -> None:
        """Blanks what only the ranks of an ended job needed and nobody else may read. A disk that is full takes
        it, too; one that fails keeps what it holds.
        """
        with contextlib.suppress(OSError):
            for half in self.root.glob(f".{self.node.name}.*"):  # of a `prepare` that was killed
                half.unlink()
            node = self.read_node()
            if not node.get("token"):
                return
            blank = {**node, "env": {}, "prepare": None, "token": "", "token_sha256": _sha256(node["token"])}
            try:
                write_json(self.node, blank)
            except OSError:
                with open(self.node, "r+b") as file:
                    file.write(json.dumps(blank).encode())
                    file.truncate()

    def read_peers(self) -> dict[str, list[Any]]:
        """By host, the fields of a `mesh.Place`; {} before the word to go."""
        try:
            return dict(json.loads(self.peers.read_text()))
        except (OSError, ValueError):
            return {}

    def is_final(self) -> bool:
        return self.read_agent().get("state") in FINAL_STATES


def write_record(job: JobFolder, record: Mapping[str, Any]) -> None:
    write_json(job.agent, fitted(record, RECORD_BYTES))


def write_last_word(job: JobFolder, record: Mapping[str, Any]) -> None:
    """The record that says how the job ended: for that there is room even on a full disk. Its secrets end before it."""
    job.forget_secrets()
    try:
        write_record(job, record)
    except OSError:
        job.reserve.unlink()
        write_record(job, record)


def _sha256(text: str) -> str:
    import hashlib  # slow to import, and `go` is waited for

    return hashlib.sha256(text.encode()).hexdigest()


def remove(folder: Path) -> None:
    """Takes its name away first: nobody meets half of it, and that name shows what a crash left. Raises OSError
    where something in it is another user's.
    """
    import shutil  # slow to import, and most programs remove nothing

    aside = folder.with_name(f"{GONE}{os.urandom(8).hex()}")
    folder.rename(aside)
    try:
        shutil.rmtree(aside)
    except PermissionError:  # a script may have closed a folder of its own to itself
        _open_folders(aside)
        shutil.rmtree(aside, ignore_errors=True)
        if aside.exists():
            raise


def drop(ready: JobFolder) -> None:
    """Removes what lies ready for a job (`handover`), if anything does."""
    with contextlib.suppress(FileNotFoundError):
        remove(ready.root)
    with contextlib.suppress(OSError):
        ready.root.parent.rmdir()


def _open_folders(top: Path) -> None:
    top.chmod(0o700)
    for above, folders, _ in os.walk(top):
        for path in (Path(above, name) for name in folders):
            with contextlib.suppress(PermissionError):
                if not path.is_symlink():
                    path.chmod(0o700)


def read_json(path: Path) -> dict[str, Any]:
    """{} where there is no such file, or it is damaged."""
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError, RecursionError):
        return {}


def write_json(path: Path, value: Any) -> None:
    """Temporary file beside it, fsync, rename: a reader meets the old content or the new, never half. Mode 0600."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(handle, "w") as file:
            json.dump(value, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
