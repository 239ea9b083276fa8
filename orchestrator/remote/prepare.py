"""Prepares a job on this host: its folder, code and supervisor; no rank runs yet.

Request: {"action": "prepare", "workdir", "node": for node.json, "plan": for plan.json, "blob_bytes"}, then that many
bytes of code. "carried": files of an earlier job (`handover`). The answer is {"pid", "hub_port", "peer_port",
"has_gpus", "firewall", "now": see `health.now`}, {"need_code": true} if the code is missing here and in the request,
or {"error", "remedy"}. Creating the job's folder is the lock.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import select
import shutil
import stat
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from . import firewall, keeper_step
from .agent import agent_state, lives
from .answer import Refused, reply
from .claim import claimed
from .health import now
from .layout import READY_S, RESERVE_BYTES, JobFolder, WorkFolder, drop, remove, write_json
from .outputs import mark
from .workfolder import danger

FREE_BYTES = 64 << 20
_NOT_FOR_RANKS = ("ORCH_", "SLURM", "SRUN_", "PMI")
"""Variables of a Slurm step describe that step: frameworks would take its single task for their ranks."""


def main(request: dict[str, Any]) -> None:
    reply(request, prepare)


def prepare(request: dict[str, Any]) -> dict[str, Any]:
    node = request["node"]
    work = WorkFolder(request["workdir"])
    job = work.job(node["job"])
    blob = sys.stdin.buffer.read(request["blob_bytes"])
    with claimed(work):
        code = work.code(node["code"])
        if found := danger(code):
            raise Refused(*found)
        if not code.is_dir():
            if not blob:
                return {"need_code": True}
            store_code(work, node["code"], blob)
        work.jobs.mkdir(exist_ok=True)
        refuse_second_gang(work, node.get("after", ()))
        try:
            job.root.mkdir()
        except FileExistsError:
            return same_job(job, node)
        try:
            fill_folder(job, {**node, "workdir": str(work.root), "python": sys.executable}, request["plan"], code)
            if carried := request.get("carried"):
                move_into(job, work.handover(job.id), carried)
            return {**start_supervisor(job), "now": now(work.root)}
        except BaseException:
            with contextlib.suppress(OSError):
                remove(job.root)
            raise


def same_job(job: JobFolder, node: dict[str, Any]) -> dict[str, Any]:
    # The first `prepare` may still be working: node.json appears first, then the supervisor's record.
    there = _await(job.read_node, READY_S)
    if there.get("token") == node["token"] and there["name"] != node["name"]:
        raise Refused(
            f"its work folder is also that of {there['name']} ({job.root.parents[1]})",
            "give each node a `workdir:` of its own: they share a disk, or are one machine",
        )
    if there.get("token") == node["token"]:
        agent = _await(job.read_agent, READY_S)
        if lives(agent):
            return {key: agent.get(key) for key in ("pid", "hub_port", "peer_port")} | {"firewall": firewall.kind()}
    raise Refused(f"a job named {job.id} is already there ({job.root})", "run again: a new id is made each time")


def refuse_second_gang(work: WorkFolder, earlier: Sequence[str]) -> None:
    for name in earlier:
        job = work.job(name)
        found = agent_state(job) if job.root.is_dir() else {}
        if found.get("alive") or found.get("left") or found.get("leftovers"):
            raise Refused(
                f"{name}, an earlier attempt at this job, has not ended there", "`orch reap` shows what is left"
            )


def store_code(work: WorkFolder, sha256: str, blob: bytes) -> None:
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
        with contextlib.suppress(OSError):  # another `prepare` of the same code was faster
            temporary.rename(work.code(sha256))
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _unpack(tar: tarfile.TarFile, member: tarfile.TarInfo, into: Path) -> None:
    parts = Path(member.name).parts
    if not (member.isreg() or member.isdir()) or not parts or Path(member.name).is_absolute() or ".." in parts:
        raise Refused(f"the shipped code holds {member.name!r}, which is no plain file", "run again")
    if member.isdir():
        return into.joinpath(*parts).mkdir(parents=True, exist_ok=True)
    content = tar.extractfile(member)
    assert content
    target = into.joinpath(*parts)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(content.read())
    target.chmod(0o500 if member.mode & 0o100 else 0o400)
    return None


def fill_folder(job: JobFolder, node: dict[str, Any], plan: dict[str, Any], code: Path) -> None:
    write_json(job.node, node)  # first, since it names the folder's owner
    write_json(job.plan, plan)
    job.src.mkdir()
    shipped = {}
    for source in code.rglob("*"):
        name = source.relative_to(code)
        target = job.src / name
        if source.is_dir():
            target.mkdir(parents=True, exist_ok=True)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
            target.chmod(0o600 | source.stat().st_mode & 0o100)
            shipped[f"{job.src.name}/{name.as_posix()}"] = mark(target.stat())
    write_json(job.shipped, shipped)
    write_package(job.bin / "orch_remote")
    job.checkpoints.mkdir()
    with open(job.reserve, "wb") as reserve:
        os.posix_fallocate(reserve.fileno(), 0, RESERVE_BYTES)
    os.mkfifo(job.control, 0o600)
    os.mkfifo(job.alive, 0o600)


def move_into(job: JobFolder, ready: JobFolder, files: Sequence[Sequence[Any]]) -> None:
    """files: [name, size, mtime_ns, written by another host] of everything in `handover`. Raises Refused if a file is
    missing.
    """
    received = {}
    for name, size, mtime_ns, is_foreign in files:
        source, target = ready.root / name, job.root / name
        try:
            found = source.lstat()
        except OSError:
            found = None
        if found is None or not stat.S_ISREG(found.st_mode) or found.st_size != size:
            raise Refused(f"{name} of the earlier job has not arrived", "run again")
        target.parent.mkdir(parents=True, exist_ok=True)
        os.utime(source, ns=(mtime_ns, mtime_ns))
        source.replace(target)
        if is_foreign:
            received[name] = mark(target.lstat())
    write_json(job.received, received)
    drop(ready)


def write_package(folder: Path) -> None:
    kept = folder / "__pycache__"
    kept.mkdir(parents=True)
    for module, (text, bytecode) in sys.modules["orch_remote"].MODULES.items():
        name = module.rpartition(".")[2] if "." in module else "__init__"
        (folder / f"{name}.py").write_bytes(text)
        if bytecode:
            (kept / f"{name}.{sys.implementation.cache_tag}.pyc").write_bytes(bytecode)


def start_supervisor(job: JobFolder) -> dict[str, Any]:
    """In a session of its own without our streams, to outlive this connection; returns its answer. Raises Refused."""
    read, write = os.pipe()
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_NOT_FOR_RANKS)}
    argv = [sys.executable, "-S", "-m", "orch_remote.keeper", str(job.root)]
    child = None
    with open(job.supervisor_log, "wb") as log:
        if keeper := keeper_step.place():
            try:
                keeper_step.start(keeper, [*argv, keeper_step.ANSWER], job.bin, environment, write, log.fileno())
            except OSError as error:
                raise Refused(f"its Slurm step did not start the supervisor ({error})", "run again") from error
        else:
            child = subprocess.Popen(
                [*argv, str(write)],
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
        if child:
            child.kill()
        log_text = job.supervisor_log.read_text(errors="replace").strip().splitlines()
        raise Refused(f"the supervisor did not start ({log_text[-1] if log_text else 'no output'})", "run again")
    answer = dict(json.loads(said))
    if "error" in answer:
        if child:
            child.wait()
        raise Refused(answer["error"], answer["remedy"])
    if child:
        child.returncode = 0  # it stays: Popen must not warn that it still runs
    return answer | {"firewall": firewall.kind()}


def _await(read: Callable[[], dict[str, Any]], timeout_s: float) -> dict[str, Any]:
    deadline = time.monotonic() + timeout_s
    while not (found := read()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return found


def _existing(path: Path) -> Path:
    return path if path.exists() else _existing(path.parent)
