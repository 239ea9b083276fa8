"""Names of all files and folders on a host, and how records are written and folders removed.

<workdir>/.orch-work                    marks a work folder; locked while files are created or removed
         /code/<sha256>/                code as shipped, verified, read-only
         /locks/gpu-<uuid>.lock         held by the supervisor that uses this GPU
         /locks/venv.lock               held while an environment is made
         /venv/torch-<version>/         environments of `orch setup`; orch-venv.json: users and versions
         /handover/<job>/               files of an earlier job for this one, until `prepare` moves them
         /jobs/<job>/node.json          this host's part of the job (mode 0600); secrets are removed at the end
                    /plan.json          the whole plan without secrets, for a controller that lost its own
                    /peers.json         addresses at which the job's supervisors listen
                    /agent.json         state and result, written only by the supervisor
                    /reserve            disk space for the final agent.json
                    /bin/orch_remote/   these programs
                    /src/               this job's own copy of the code
                    /shipped.json       files of src/ as shipped; all others are the job's output
                    /received.json      files from another host's earlier job (`handover`)
                    /rank-<r>/          stdout.log stderr.log (and .times of both) metrics.jsonl exit.json
                    /rank-<r>/stacks    the rank's Python stacks, on request; removed at its end
                    /gpu.jsonl          readings of the job's GPUs
                    /attempt-<n>/       logs and metrics of an earlier attempt
                    /control            FIFO: requests and rank events, one JSON line each
                    /alive              FIFO: closed when the supervisor, its only writer, ends
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

JOB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
GONE = ".orch-gone-"  # prefix of folders that are being removed
VENV_MARKER = "orch-venv.json"
VERSION = re.compile(r"\d[A-Za-z0-9.+]{0,63}")
READY_S = 20.0  # longest time a `prepare` takes from creating the job's folder to its supervisor's first record
FINAL_STATES = frozenset({"succeeded", "failed", "cancelled", "undone"})
RESERVE_BYTES = 1 << 15  # less than `output_writer.ROOM_BYTES`, at which a waiting log resumes
RECORD_BYTES = RESERVE_BYTES - (1 << 13)  # largest agent.json: two disk blocks stay for its name and its neighbours


class WorkFolder:
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
        if not JOB_ID.fullmatch(job):
            raise ValueError(f"not a job id: {job!r}")
        return JobFolder(self.handovers / job)

    def all_jobs(self) -> list[JobFolder]:
        if not self.jobs.is_dir():
            return []
        return [JobFolder(folder) for folder in sorted(self.jobs.iterdir()) if JOB_ID.fullmatch(folder.name)]


class JobFolder:
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

    def attempt(self, number: int) -> Path:
        return self.root / f"attempt-{number}"

    def stacks(self, rank: int) -> Path:
        return self.rank(rank) / "stacks"

    def read_agent(self) -> dict[str, Any]:
        try:
            return dict(json.loads(self.agent.read_text()))
        except (FileNotFoundError, ValueError):
            return {}

    def read_node(self) -> dict[str, Any]:
        return read_json(self.node)

    def has_token(self, token: str) -> bool:
        node = self.read_node()
        return node.get("token") == token or node.get("token_sha256") == _sha256(token)

    def forget_secrets(self) -> None:
        with contextlib.suppress(OSError):
            for half in self.root.glob(f".{self.node.name}.*"):  # left by a `prepare` that was killed
                half.unlink()
            node = self.read_node()
            if not node.get("token"):
                return
            blank = {**node, "env": {}, "prepare": None, "notify": None, "token": ""}
            blank["token_sha256"] = _sha256(node["token"])
            try:
                write_json(self.node, blank)
            except OSError:
                with open(self.node, "r+b") as file:
                    file.write(json.dumps(blank).encode())
                    file.truncate()

    def read_peers(self) -> dict[str, list[Any]]:
        """Host -> the fields of a `mesh.Place`; {} before `go`."""
        try:
            return dict(json.loads(self.peers.read_text()))
        except (OSError, ValueError):
            return {}

    def is_final(self) -> bool:
        return self.read_agent().get("state") in FINAL_STATES


def write_record(job: JobFolder, record: Mapping[str, Any], *, sync: bool = False) -> None:
    """Without `sync`, which a slow disk may take minutes for: a restart of the host voids all but the final record."""
    write_json(job.agent, fitted(record, RECORD_BYTES), sync=sync)


def write_final_record(job: JobFolder, record: Mapping[str, Any]) -> None:
    """Writes the final record, using the reserved space if the disk is full. Clears secrets first."""
    job.forget_secrets()
    try:
        write_record(job, record, sync=True)
    except OSError:
        job.reserve.unlink()
        write_record(job, record, sync=True)


def _sha256(text: str) -> str:
    import hashlib  # slow to import, and `go` has to be fast

    return hashlib.sha256(text.encode()).hexdigest()


def remove(folder: Path) -> None:
    """Renames the folder first: no process sees half of it, and a crash leaves a recognizable name. Raises OSError if
    it contains another user's files.
    """
    import shutil  # slow to import, and rarely needed

    aside = folder.with_name(f"{GONE}{os.urandom(8).hex()}")
    folder.rename(aside)
    try:
        shutil.rmtree(aside)
    except PermissionError:  # a script may have removed its own access to a folder
        _open_folders(aside)
        shutil.rmtree(aside, ignore_errors=True)
        if aside.exists():
            raise


def drop(ready: JobFolder) -> None:
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


def size_of(path: os.PathLike[str]) -> int:
    """-1 without the file."""
    try:
        return os.stat(path, follow_symlinks=False).st_size
    except OSError:
        return -1


def read_json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError, RecursionError):
        return {}


def write_json(path: Path, value: Any, *, sync: bool = True) -> None:
    """Temporary file, fsync (`sync`), rename: readers see the old or the new content. Mode 0600."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(handle, "w") as file:
            json.dump(value, file)
            file.flush()
            if sync:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


# Shortens a supervisor's record until its JSON fits into a message.
#
#     fitted(record, 24_000)      # the record itself, or one with shorter texts and lists
#
# A non-ASCII character takes up to 12 bytes. The first `failures` and `leftovers` stay, and the last `faults`, which
# are
# the newest; `first_failure` is cut last.

_STEPS = ((200, 8), (100, 4), (50, 2), (20, 1))
"""(characters of a text, entries of a list): the first pair that fits is used."""
_SENTENCES = ("reason", "log_line")
_FEW = 20  # most ranks and hosts after the last step


def fitted(record: Mapping[str, Any], most_bytes: int) -> dict[str, Any]:
    short = dict(record)
    for chars, count in _STEPS:
        if _json_bytes(short) <= most_bytes:
            return short
        short = _shorter(short, chars, count)
    if _json_bytes(short) > most_bytes:
        short |= {name: _few(name, short[name]) for name in ("ranks", "dropped") if name in short}
    if short.get("first_failure") and _json_bytes(short) > most_bytes:
        short["first_failure"] = _cut(short["first_failure"], _STEPS[0][0])
    return short


def _json_bytes(value: Any) -> int:
    return len(json.dumps(value))


def _shorter(record: dict[str, Any], chars: int, count: int) -> dict[str, Any]:
    short = dict(record)
    for name in ("failures", "leftovers", "faults"):
        if name in short:
            kept = short[name][-count:] if name == "faults" else short[name][:count]
            short[name] = [_cut(one, chars) for one in kept]
    return short


def _cut(one: Any, chars: int) -> Any:
    if isinstance(one, str):
        return one[:chars]
    return {name: _cut(value, chars) if name in _SENTENCES else value for name, value in one.items()}


def _few(name: str, entries: dict[str, Any]) -> dict[str, Any]:
    worth = {key: one for key, one in entries.items() if name != "ranks" or one.get("exit_code") != 0}
    return dict(list(worth.items())[:_FEW])
