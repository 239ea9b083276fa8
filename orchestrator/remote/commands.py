"""Runs commands in parallel, each with a time limit.

    run(["nvidia-smi"], 30)                     # {"rc": 0, "out": "...", "err": ""}
    run_all({"ip addr": ["ip", "addr"]}, 15)    # {"ip addr": {"rc": ...}}

As in a shell and timeout(1), rc is 127 if the command is missing and 124 if it was too slow.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")
COMMAND_S = 15.0
SMI_S = 30.0  # without persistence mode, nvidia-smi takes a few seconds per GPU
OUT_BYTES = 1 << 18
ERR_BYTES = 1 << 12
AT_ONCE = 8
NOT_FOUND, TOO_SLOW = 127, 124
# Tools that an SSH session's short PATH often misses.
PATHS = "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin:/usr/lib/wsl/lib:/usr/local/nvidia/bin"


def run_all(lines: dict[str, list[str]], limit_s: float) -> dict[str, dict[str, Any]]:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        waiting = {
            name: pool.submit(run, line, limit_s if name == "torch" else min(COMMAND_S, limit_s))
            for name, line in lines.items()
        }
        return {name: future.result() for name, future in waiting.items()}


def run(argv: list[str], limit_s: float) -> dict[str, Any]:
    """Runs in a session of its own, which is killed after limit_s."""
    env = {**os.environ, "LC_ALL": "C", "PATH": f"{os.environ.get('PATH', '')}:{PATHS}"}
    # A job chooses its GPUs itself; a variable from a shell profile must not hide any here.
    env.pop("CUDA_VISIBLE_DEVICES", None)
    try:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd="/",
            env=env,
            start_new_session=True,
        )
    except FileNotFoundError:
        return {"rc": NOT_FOUND, "out": "", "err": f"{argv[0]}: command not found"}
    except OSError as error:
        return {"rc": 126, "out": "", "err": f"{argv[0]}: {error.strerror}"}
    try:
        out, err = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        give_up(process)
        return {"rc": TOO_SLOW, "out": "", "err": f"no answer in {limit_s:g} s"}
    return {"rc": process.returncode, "out": text(out[:OUT_BYTES]), "err": text(err[-ERR_BYTES:])}


def give_up(process: subprocess.Popen[bytes]) -> None:
    # Kills the command's process group. A process stuck in the kernel gets the signal when it returns, if ever.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for pipe in (process.stdout, process.stderr):
        if pipe:
            pipe.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(1)


def why_failed(done: dict[str, Any]) -> str | None:
    """The last line of output; None if the command succeeded."""
    if done["rc"] == 0:
        return None
    lines = f"{done['out']}\n{done['err']}".strip().splitlines()
    return lines[-1].strip() if lines else f"exit code {done['rc']}"


def printed(done: dict[str, Any], kind: type[T]) -> T | None:
    """The JSON on the last line of output; None if the command failed or printed something else."""
    try:
        found = json.loads(done["out"].strip().splitlines()[-1]) if done["rc"] == 0 else None
    except (ValueError, IndexError, RecursionError):
        return None
    return found if isinstance(found, kind) else None


def text(data: bytes) -> str:
    return data.decode("utf-8", "replace")
