"""Records load, memory, clock, power and temperature of a job's GPUs while its ranks run.

    python -m orch_remote.gpus <job folder>

Starts one looping `nvidia-smi` and appends a line per GPU every EVERY_S to the job's gpu.jsonl:

    {"event": "gpu", "rank": 1, "index": 0, "utilisation": 97, "memory_bytes": 8589934592, "sm_mhz": 1290,
     "watts": 69.7, "celsius": 71, "slowed_by": 4, "max_sm_mhz": 2100, "limit_watts": 70.0, "wall": 1795252271.2}

slowed_by is NVML's bit mask nvmlClocksEventReasons (nvmlClocksThrottleReasons before driver 535). Values that the
driver lacks are left out; the two limits are written when they change.

It is a process of its own because a faulty driver may block nvidia-smi, and its reader, for ever: the supervisor never
waits for it, and kills its process group with the ranks. If the supervisor is killed, the kernel ends both.
"""

from __future__ import annotations

import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .commands import PATHS, SMI_S
from .layout import JobFolder
from .processes import die_with_parent

EVERY_S = 2.0
SILENT_S = SMI_S  # an nvidia-smi silent for this long is stuck. Its first answer may take a few seconds per GPU.
GATHER_S = 0.5  # time for the rest of an answer after its beginning
GIVE_UP = 3  # attempts in a row without a reading before we stop
ANSWER_BYTES, LINE_BYTES, SAID_BYTES = 1 << 16, 1 << 12, 1 << 12
OLDER = {"clocks_event_reasons.active": "clocks_throttle_reasons.active"}
"""Field names of newer drivers -> of older ones."""
FIELDS = {
    "uuid": "uuid",
    "index": "index",
    "utilization.gpu": "utilisation",
    "memory.used": "memory_mib",
    "clocks.sm": "sm_mhz",
    "power.draw": "watts",
    "temperature.gpu": "celsius",
    "clocks_event_reasons.active": "slowed_by",
    "clocks.max.sm": "max_sm_mhz",
    "power.limit": "limit_watts",
}
LIMITS = ("max_sm_mhz", "limit_watts")
_NUMBER = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?|0x[0-9a-fA-F]{1,16}")
_REFUSED = re.compile(r'Field "([a-z_.]{1,64})" is not a valid field')


def main() -> None:
    job = JobFolder(Path(sys.argv[1]))
    node = json.loads(job.node.read_text())
    ranks = node["rank_numbers"]
    # A rank may have several GPUs; left-over ones count for the last rank.
    rank_of = {uuid: ranks[min(at, len(ranks) - 1)] for at, uuid in enumerate(node["gpu_uuids"])}
    program = shutil.which("nvidia-smi", path=f"{os.environ.get('PATH', '')}:{PATHS}")
    if program and rank_of:
        watch(program, rank_of, job.gpu_log)


def watch(program: str, rank_of: Mapping[str, int], log: Path) -> None:
    """rank_of: GPU uuid -> rank. Returns after GIVE_UP attempts without a reading."""
    fields, limits, useless, why = dict(FIELDS), dict[Any, dict[str, Any]](), 0, ""

    def note(lines: Sequence[str]) -> bool:
        found = readings(lines, list(fields.values()), rank_of, time.time())
        append(log, [without_known(event, limits) for event in found])
        return bool(found)

    while useless < GIVE_UP:
        began = time.monotonic()
        seen, output, how = listen(program, fields, note)
        why = f"nvidia-smi {how} and printed {output[:200]!r}"
        if (refused := _REFUSED.search(output)) and refused[1] in fields:
            fields = without(refused[1], fields)
            continue
        useless = 0 if seen else useless + 1
        time.sleep(max(0.0, began + EVERY_S - time.monotonic()))
    sys.stderr.write(f"GPU use is unknown from here on: {why}\n")


def listen(program: str, fields: Mapping[str, str], note: Callable[[Sequence[str]], bool]) -> tuple[bool, str, str]:
    """Reads one nvidia-smi until it ends or is silent: whether it gave a reading, its other output, how it ended."""
    seen, output = False, ""
    try:
        child = start(program, fields)
    except OSError as error:
        return False, "", f"did not start ({error.strerror})"
    for lines in answers(child):
        if note(lines):
            seen = True
        else:
            output = (output + "\n".join(lines))[:SAID_BYTES]
    return seen, output, end(child)


# ---- one nvidia-smi ---------------------------------------------------------------------------------------------


def start(program: str, fields: Mapping[str, str]) -> subprocess.Popen[bytes]:
    watcher = os.getpid()

    def end_with_us() -> None:
        die_with_parent(signal.SIGKILL)
        if os.getppid() != watcher:  # we have ended already
            os._exit(1)

    options = (f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits", f"--loop-ms={EVERY_S * 1000:.0f}")
    return subprocess.Popen(
        [program, *options],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        bufsize=0,
        env={**os.environ, "LC_ALL": "C"},
        preexec_fn=end_with_us,
    )


def answers(child: subprocess.Popen[bytes]) -> Iterator[list[str]]:
    """The whole lines of each answer, until SILENT_S pass without any; at most one answer per GATHER_S."""
    assert child.stdout
    rest = b""
    while select.select([child.stdout], [], [], SILENT_S)[0]:
        time.sleep(GATHER_S)
        output = child.stdout.read(ANSWER_BYTES)
        *lines, rest = (rest + (output or b"\n")).split(b"\n")
        yield [line.decode(errors="replace") for line in lines]
        rest = rest[-LINE_BYTES:]
        if not output:
            return


def end(child: subprocess.Popen[bytes]) -> str:
    """How it ended, or that it had to be killed. Blocks if the kernel holds it; nothing else is lost then."""
    assert child.stdout
    child.stdout.close()
    try:
        code = child.wait(GATHER_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
        return f"did not answer for {SILENT_S:g} s"
    return f"exited {code}"


def without(refused: str, fields: Mapping[str, str]) -> dict[str, str]:
    return {OLDER.get(field, field): key for field, key in fields.items() if field != refused or field in OLDER}


# ---- its output -------------------------------------------------------------------------------------------------


def readings(
    lines: Sequence[str], keys: Sequence[str], rank_of: Mapping[str, int], wall: float
) -> list[dict[str, Any]]:
    """The last event of each of our GPUs in these lines. keys: names of the columns; the first is the uuid."""
    found: dict[str, dict[str, Any]] = {}
    for line in lines:
        uuid, *values = [value.strip() for value in line.split(",")]
        if uuid not in rank_of or len(values) != len(keys) - 1:
            continue
        values_by_key = {key: _number(value) for key, value in zip(keys[1:], values, strict=True)}
        if (values_by_key.get("utilisation") or 0) > 100:
            values_by_key["utilisation"] = None
        if (mebibytes := values_by_key.pop("memory_mib", None)) is not None:
            values_by_key["memory_bytes"] = int(mebibytes) << 20
        known = {name: value for name, value in values_by_key.items() if value is not None}
        if known.keys() - {"index"}:
            found[uuid] = {"event": "gpu", "rank": rank_of[uuid], **known, "wall": round(wall, 3)}
    return list(found.values())


def _number(text: str) -> float | None:
    if not _NUMBER.fullmatch(text):
        return None
    return int(text, 16) if text.startswith("0x") else float(text) if "." in text else int(text)


def without_known(event: dict[str, Any], limits: dict[Any, dict[str, Any]]) -> dict[str, Any]:
    """The event without limits that were written before. limits: by rank and index, updated here."""
    present, gpu = {name: event[name] for name in LIMITS if name in event}, (event["rank"], event.get("index"))
    if limits.get(gpu) != present:
        limits[gpu] = present
        return event
    return {name: value for name, value in event.items() if name not in LIMITS}


def append(log: Path, events: list[dict[str, Any]]) -> None:
    # Appends whole lines in one write, so that readers never see half a line.
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
