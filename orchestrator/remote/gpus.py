"""How busy and how full this job's GPUs are, noted every EVERY_S while its ranks run.

    python -m orch_remote.gpus <job folder>

Asks `nvidia-smi` and appends one line a GPU to the job's gpu.jsonl:

    {"event": "gpu", "rank": 1, "index": 0, "utilisation": 97, "memory_bytes": 8589934592, "wall": 1795252271.2}

A process of its own, because a sick driver may keep nvidia-smi, and who waits for it, from ever coming back: the
supervisor starts it, never waits for it, and ends its process group, nvidia-smi included, with the ranks. Where there
is no nvidia-smi it does nothing.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .layout import Job
from .probe import PATHS

EVERY_S = 2.0
ANSWER_S = 10.0
GIVE_UP = 3
"""So many useless answers in a row, and we stop asking."""
QUERY = ("--query-gpu=uuid,index,utilization.gpu,memory.used", "--format=csv,noheader,nounits")
ANSWER_BYTES = 1 << 16
_NUMBER = re.compile(r"[0-9]{1,9}")


def main() -> None:
    job = Job(Path(sys.argv[1]))
    node = json.loads(job.node.read_text())
    rank_of = dict(zip(node["gpu_uuids"], node["rank_numbers"], strict=False))
    program = shutil.which("nvidia-smi", path=f"{os.environ.get('PATH', '')}:{PATHS}")
    if program and rank_of:
        watch(program, rank_of, job.gpu_log)


def watch(program: str, rank_of: Mapping[str, int], log: Path) -> None:
    """rank_of: GPU uuid -> the rank that has it. Returns only where asking is of no use."""
    useless, why = 0, ""
    while useless < GIVE_UP:
        asked = time.monotonic()
        answer, why = ask(program)
        found = readings(answer, rank_of, time.time())
        append(log, found)
        useless = 0 if found else useless + 1
        time.sleep(max(0.0, asked + EVERY_S - time.monotonic()))
    sys.stderr.write(f"GPU use is not known from here on: {why}\n")


def ask(program: str) -> tuple[str, str]:
    """What nvidia-smi says, and what is wrong with it should that be of no use."""
    read, write = os.pipe()
    with os.fdopen(read, "rb", buffering=0) as pipe:
        child = subprocess.Popen([program, *QUERY], stdin=subprocess.DEVNULL, stdout=write, stderr=subprocess.STDOUT)
        os.close(write)
        try:
            child.wait(ANSWER_S)  # one that says more than a pipe holds never ends, and is of no use either
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
            return "", f"nvidia-smi did not answer within {ANSWER_S:g} s"
        os.set_blocking(read, False)
        said = (pipe.read(ANSWER_BYTES) or b"").decode(errors="replace")
    return said, f"nvidia-smi exited {child.returncode} and said {said[:200]!r}"


def readings(answer: str, rank_of: Mapping[str, int], wall: float) -> list[dict[str, Any]]:
    """One event for each of our GPUs in the answer; what the driver does not know ("[N/A]") is left out."""
    found = []
    for line in answer.splitlines():
        uuid, *numbers = [field.strip() for field in line.split(",")]
        if uuid not in rank_of or len(numbers) != 3:
            continue
        index, used, mebibytes = (int(number) if _NUMBER.fullmatch(number) else None for number in numbers)
        told = {
            "index": index,
            "utilisation": used if used is not None and used <= 100 else None,
            "memory_bytes": None if mebibytes is None else mebibytes << 20,
        }
        known = {name: value for name, value in told.items() if value is not None}
        if known.keys() - {"index"}:
            found.append({"event": "gpu", "rank": rank_of[uuid], **known, "wall": round(wall, 3)})
    return found


def append(log: Path, events: list[dict[str, Any]]) -> None:
    """Whole lines in one write, so that nobody reads half of one. A full disk costs the readings and nothing else."""
    if not events:
        return
    text = "".join(json.dumps(event) + "\n" for event in events)
    try:
        handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
        try:
            os.write(handle, text.encode())
        finally:
            os.close(handle)
    except OSError as error:
        sys.stderr.write(f"cannot write {log}: {error}\n")


if __name__ == "__main__":
    main()
