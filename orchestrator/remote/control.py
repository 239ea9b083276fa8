"""What the controller asks of a host about a job: one short program a request (see `loader`).

Requests, by `action`:

    prepare   make the job's folder (its mkdir is the lock), its code and its supervisor; nothing runs yet
    go        tell the supervisor where the hub is; ranks start as soon as every host has joined
    undo      end a prepared supervisor and remove the job's folder
    cancel    ask the supervisor to end the job, everywhere
    status    the agent records of one job or of all, and whether their supervisors live
    reap      list, and on request end, what jobs without a living supervisor left behind
    down      remove everything of ours from the work folder, if nothing runs

The answer is one JSON object; {"error", "remedy"} where the host refuses.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import processes
from .agent import identity, lives, look
from .layout import Job, Work, write_json

READY_S = 20.0
UNDO_S = 10.0
DOWN_S = 40.0
FREE_BYTES = 64 << 20


class Refused(Exception):
    """message, remedy: one line each."""


def main(request: dict[str, Any]) -> None:
    actions = {
        "prepare": prepare,
        "go": go,
        "undo": undo,
        "cancel": cancel,
        "status": status,
        "reap": reap,
        "down": down,
    }
    os.umask(0o077)
    try:
        answer = actions[request["action"]](request)
    except Refused as refusal:
        answer = {"error": refusal.args[0], "remedy": refusal.args[1]}
    except ValueError as error:
        answer = {"error": f"{request['action']}: {error}", "remedy": ""}
    except OSError as error:
        answer = {
            "error": f"{request['action']}: {error.strerror or error} ({error.filename or request['workdir']})",
            "remedy": "see `orch up` for this host's work folder and free space; `workdir:` in the inventory moves it",
        }
    sys.stdout.write(request["marker"] + json.dumps(answer) + request["marker"])


# ---- starting -------------------------------------------------------------------------------------------------


def prepare(request: dict[str, Any]) -> dict[str, Any]:
    node = request["node"]
    work = Work(request["workdir"])
    job = work.job(node["job"])
    if not work.code(node["code"]).is_dir():
        if not request["blob_bytes"]:
            return {"need_code": True}
        store_code(work, node["code"], sys.stdin.buffer.read(request["blob_bytes"]))
    work.jobs.mkdir(parents=True, exist_ok=True)
    try:
        job.root.mkdir()
    except FileExistsError:
        return same_job(job, node)
    try:
        fill_folder(job, {**node, "workdir": str(work.root)}, work.code(node["code"]))
        return start_supervisor(job)
    except BaseException:
        shutil.rmtree(job.root, ignore_errors=True)
        raise


def same_job(job: Job, node: dict[str, Any]) -> dict[str, Any]:
    """The answer to a `prepare` whose first answer was lost: the same again, never a second supervisor."""
    # Its maker may be at work this very moment: first node.json appears, then the supervisor's record.
    there = _await(lambda: _node(job), READY_S)
    if there.get("token") == node["token"] and there["name"] != node["name"]:
        raise Refused(
            f"its work folder is also that of {there['name']} ({job.root.parents[1]})",
            "give each node a `workdir:` of its own: they share a disk, or are one machine",
        )
    if there.get("token") == node["token"]:
        agent = _await(job.read_agent, READY_S)
        if lives(agent):
            return {"pid": agent["pid"], "hub_port": agent.get("hub_port")}
    raise Refused(f"a job named {job.id} is already there ({job.root})", "run again: a new id is made each time")


def store_code(work: Work, sha256: str, blob: bytes) -> None:
    """Unpacks the shipped tar under its hash, read-only. A crash half-way leaves only a temporary folder."""
    if hashlib.sha256(blob).hexdigest() != sha256:
        raise Refused("the shipped code arrived damaged", "run again")
    free = shutil.disk_usage(_existing(work.root)).free
    if free < len(blob) + FREE_BYTES:
        raise Refused(f"{free >> 20} MiB free in {work.root}, too little", "free space there or set `workdir:`")
    temporary = work.codes / f".{sha256}.{os.getpid()}"
    temporary.mkdir(parents=True)
    try:
        with tarfile.open(fileobj=io.BytesIO(blob)) as tar:
            for member in tar:
                _unpack(tar, member, temporary)
        with contextlib.suppress(OSError):  # another prepare of the same code was quicker: as good
            temporary.rename(work.code(sha256))
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _unpack(tar: tarfile.TarFile, member: tarfile.TarInfo, into: Path) -> None:
    parts = Path(member.name).parts
    if not member.isreg() or not parts or Path(member.name).is_absolute() or ".." in parts:
        raise Refused(f"the shipped code holds {member.name!r}, which is no plain file", "run again")
    content = tar.extractfile(member)
    assert content
    target = into.joinpath(*parts)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(content.read())
    target.chmod(0o500 if member.mode & 0o100 else 0o400)


def fill_folder(job: Job, node: dict[str, Any], code: Path) -> None:
    write_json(job.node, node)
    job.src.mkdir()
    for source in code.rglob("*"):
        target = job.src / source.relative_to(code)
        if source.is_dir():
            target.mkdir(parents=True, exist_ok=True)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
            target.chmod(0o600 | source.stat().st_mode & 0o100)
    package = job.bin / "orch_remote"
    package.mkdir(parents=True)
    shipped = sys.modules["orch_remote"].SOURCES
    for name, text in shipped.items():
        (package / f"{name.rpartition('.')[2] if '.' in name else '__init__'}.py").write_text(text)
    job.checkpoints.mkdir()
    os.mkfifo(job.control, 0o600)
    os.mkfifo(job.alive, 0o600)


def start_supervisor(job: Job) -> dict[str, Any]:
    """Starts it in its own session with no stream of ours, so that it outlives this connection; waits for its word."""
    read, write = os.pipe()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ORCH_")}
    with open(job.supervisor_log, "wb") as log:
        child = subprocess.Popen(
            [sys.executable, "-m", "orch_remote.keeper", str(job.root), str(write)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=job.bin,
            env=environment,
            pass_fds=[write],
            start_new_session=True,
        )
    os.close(write)
    ready, _, _ = select.select([read], [], [], READY_S)
    said = os.read(read, 4096) if ready else b""
    if not said:
        child.kill()
        log_text = job.supervisor_log.read_text(errors="replace").strip().splitlines()
        raise Refused(f"the supervisor did not start ({log_text[-1] if log_text else 'no word'})", "run again")
    answer = dict(json.loads(said))
    if "error" in answer:
        child.wait()
        raise Refused(answer["error"], "wait for it, cancel it, take other hosts (`--nodes`), or `--share` the GPU")
    child.returncode = 0  # it stays: Popen must not warn that it still runs
    return answer


def go(request: dict[str, Any]) -> dict[str, Any]:
    job = _job(request)
    if not _tell(job, {"go": {"hub_port": request["hub_port"]}}):
        raise Refused(f"the supervisor of {job.id} is gone", "run again; `orch logs` may say why")
    return {}


# ---- stopping -------------------------------------------------------------------------------------------------


def undo(request: dict[str, Any]) -> dict[str, Any]:
    """Ends a supervisor that has not been told to go, and removes the job's folder. Nothing but what this very launch
    made: an earlier job of the same name, or one that already runs, stays.
    """
    job = _job(request)
    agent = job.read_agent()
    if _node(job).get("token") != request["token"]:
        return {}
    if "go" in agent:
        return cancel(request)
    _tell(job, {"request": "undo"})
    _wait_gone(agent.get("keeper"), UNDO_S)
    if lives(agent):
        raise Refused(f"the supervisor of {job.id} does not end", "see `orch reap`")
    shutil.rmtree(job.root)
    return {}


def cancel(request: dict[str, Any]) -> dict[str, Any]:
    job = _job(request)
    return {"told": job.root.is_dir() and not job.is_final() and _tell(job, {"request": "cancel"})}


def reap(request: dict[str, Any]) -> dict[str, Any]:
    found = []
    for job in Work(request["workdir"]).all_jobs():
        agent = job.read_agent()
        pids = [] if lives(agent) else processes.marked(job.root)
        if pids:
            found.append({"job": job.id, "processes": [processes.describe(pid) for pid in pids][:50]})
            if request["end"]:
                found[-1]["stayed"] = _end(job)
    return {"found": found}


def _end(job: Job) -> list[str]:
    deadline = time.monotonic() + UNDO_S
    while (pids := processes.marked(job.root)) and time.monotonic() < deadline:
        processes.end_all(pids, signal.SIGKILL)
        time.sleep(0.02)
    return [processes.describe(pid) for pid in pids]


def down(request: dict[str, Any]) -> dict[str, Any]:
    """Cancels what still runs here (its supervisors end it on the other hosts, too), then removes our folders."""
    work = Work(request["workdir"])
    live = [job for job in work.all_jobs() if lives(job.read_agent())]
    for job in live:
        _tell(job, {"request": "cancel"})
    for job in live:
        _wait_gone(job.read_agent().get("keeper"), DOWN_S)
    stayed = [process for job in work.all_jobs() for process in _end(job)]
    stayed += [f"the supervisor of {job.id}" for job in live if lives(job.read_agent())]
    if stayed:
        raise Refused(f"does not end: {', '.join(stayed)}", "end these by hand, then `orch down` again")
    removed = [str(folder) for folder in (work.jobs, work.codes, work.locks) if folder.is_dir()]
    for folder in removed:
        shutil.rmtree(folder)
    with contextlib.suppress(OSError):  # holds something that is not ours
        work.root.rmdir()
    return {"removed": removed}


# ---- looking --------------------------------------------------------------------------------------------------


def status(request: dict[str, Any]) -> dict[str, Any]:
    work = Work(request["workdir"])
    jobs = [work.job(request["job"])] if request.get("job") else work.all_jobs()
    return {"jobs": {job.id: look(job) for job in jobs[-200:] if job.root.is_dir()}}


def _wait_gone(record: dict[str, Any] | None, timeout_s: float) -> None:
    if record and identity(record).is_alive():
        with contextlib.suppress(ProcessLookupError):
            handle = os.pidfd_open(int(record["pid"]))
            select.select([handle], [], [], timeout_s)
            os.close(handle)


def _tell(job: Job, message: dict[str, Any]) -> bool:
    """One line into the supervisor's FIFO; False where nobody reads it."""
    try:
        handle = os.open(job.control, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        os.write(handle, json.dumps(message).encode() + b"\n")
    finally:
        os.close(handle)
    return True


def _await(read: Callable[[], dict[str, Any]], timeout_s: float) -> dict[str, Any]:
    """What `read` gives as soon as it is not empty; {} when the time is over."""
    deadline = time.monotonic() + timeout_s
    while not (found := read()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return found


def _node(job: Job) -> dict[str, Any]:
    """What this host was asked to do; {} where it was asked nothing."""
    try:
        return dict(json.loads(job.node.read_text()))
    except (OSError, ValueError):
        return {}


def _job(request: dict[str, Any]) -> Job:
    return Work(request["workdir"]).job(request["job"])


def _existing(path: Path) -> Path:
    return path if path.exists() else _existing(path.parent)
