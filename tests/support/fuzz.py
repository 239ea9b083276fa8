"""Throws damaged input at the three doors through which strangers' bytes come in, and counts what breaks.

    python tests/support/fuzz.py all --minutes 10 --seed 1        # one after the other, a third of the time each
    python tests/support/fuzz.py probe --seed 7 --case 123        # one case again, with its traceback

Targets: `inventory` (a file's bytes to an Inventory), `probe` (a host's raw answer to its facts and warnings), `log` (a
host's stream of frames to lines, progress, a job's record and a terminal). Case n of a seed is always the same. A crash
is any exception that is not an error of ours, an error message that is not printable, a control byte that reaches the
terminal, or a case that takes more than SLOW_S of the processor. The exit code is 1 when there was one.
"""

from __future__ import annotations

import argparse
import copy
import io
import json
import os
import random
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from rich.console import Console

from orchestrator.doctor import Host, Observations, checks_at, judge
from orchestrator.errors import InventoryError, OrchError
from orchestrator.hosts import Health, Inventory, Node, NodeFacts, checks, parse_inventory, read_facts, read_yaml
from orchestrator.jobs import Agent, FilePiece, JobRecord, LiveView, Notice, Splitter, combine, read_frames
from orchestrator.planning import CodeFolder, LaunchPlan, NodePlan
from orchestrator.remote import probe as remote_probe
from orchestrator.remote.occupants import occupants
from orchestrator.remote.probe import gpu_facts
from orchestrator.transport import CommandResult, ask
from orchestrator.views import following, job_table

SLOW_S = 5.0
ROOT = Path(__file__).resolve().parents[2]
MACHINE = json.loads((ROOT / "tests/data/facts/rtx_a2000.json").read_text())["raw"]
OCCUPANTS = "GPU-5f3a9c1e-7d42-4b8a-9e10-3c6d2f8b7a11, 4711, 9, python3\n"
INVENTORIES = [path.read_bytes() for path in sorted((ROOT / "inventory").glob("*.yaml"))]
MARKER = "0123456789abcdef0123456789abcdef"

# fmt: off
# What has broken readers before: YAML's and JSON's corners, terminals' commands, numbers at the edge, paths.
SCRAPS = [
    "", "~", "null", "NaN", "1e999", "-1", "0", "65536", "1_000", "0x1F", "010", "22:22", "on", "9" * 5000, "[" * 3000,
    "{}", "[]", "- ", ": ", "? ", "&a ", "*a", "<<: ", "!!python/object/apply:os.system [id]", "!x ",
    "%YAML 1.1\n---\n", "---\n", "...\n", "|\n", ">\n", "'", '"', "#", "\t", "\r\n", "\r", "\0", "\ufeff", "\x85",
    "\u2028", "\u202e", "ä🙂", "\x1b[2J", "\x1b]52;c;YQ==\x07", "\x1b]0;title\x1b\\", "\x1bP1$r\x1b\\", "\x9b31m",
    "\x9d0;t\x9c", "\x08\x08", "\x7f", "[red]", "[/]", "[link=x]", "\\[", "-oProxyCommand=x", "$(id)", "../../x",
    "/etc/passwd", "fe80::1%eth0", "[::1]:22", "a" * 300, "nodes", "env", "paced", "\\ud800", "\\x00", "\udcff",
]
VALUES = [
    None, True, False, 0, -1, 1 << 70, 10**400, 1.5, float("nan"), float("inf"), "", "x", [], {}, [[]], [None], {"": 0},
]
PLAN = LaunchPlan(
    schema=1, job="fuzz", exp="e", kind="script", cluster="c", master="a", master_address="10.0.0.1",
    rendezvous_port=29500, world_size=3, created="2026-01-01T00:00:00+00:00",
    code=CodeFolder(sha256="0" * 64, source="x", files=1, size_bytes=1),
    nodes=tuple(
        NodePlan(name=name, node_rank=i, first_rank=2 * i, ranks=2 - i, address=f"10.0.0.{i + 1}", interface="eth0",
                 device="cpu", gpu=None, python="python3", workdir="~/.orch", torchrun=(), command=("x.py",))
        for i, name in enumerate("ab")
    ),
)
RECORD = JobRecord(schema=1, id="fuzz", state="running", exp="e", cluster="c", nodes=("a", "b"))
FAILURE = {"node": "a", "rank": 0, "exit_code": 3, "signal": None, "reason": "rank 0 exited 3", "log_line": "E: x"}
AGENT = {
    "state": "failed", "alive": False, "ended": 1.7e9, "leftovers": [], "ranks": {"0": {"pid": 1}},
    "first_failure": FAILURE,
}
STEP = {"event": "step", "step": 1, "samples": 8, "t_ms": 10.0, "compute_ms": 7.0, "exposed_ms": 2.0, "loss": 0.5}
START = {"event": "start", "schema": 1, "rank": 0, "steps": 10, "wall": 1.0}
# fmt: on
# A colour (SGR) and rich's own line ends are the only control bytes that a terminal may get.
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


class LetThrough(Exception):
    """Something came out that a person's terminal or a later stage should never see."""


# ---- damage ---------------------------------------------------------------------------------------------------


def damaged(rng: random.Random, data: bytes) -> bytes:
    """A few edits: bytes changed, cut, doubled, moved; scraps put in."""
    content = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 3, 8))):
        at = rng.randrange(len(content) + 1)
        end = min(len(content), at + rng.choice((1, 4, 40, 400)))
        edit = rng.randrange(6)
        if edit == 0:
            content[at:end] = rng.randbytes(rng.choice((1, 2, 30)))
        elif edit == 1:
            del content[at:end]
        elif edit == 2:
            content[at:at] = content[at:end] * rng.choice((1, 2, 50))
        elif edit == 3:
            content[at:end] = rng.choice(SCRAPS).encode(errors="surrogatepass")
        else:
            content[at:at] = rng.choice(SCRAPS).encode(errors="surrogatepass")
    return bytes(content[: 2 << 20])


def edited(rng: random.Random, text: str) -> str:
    return damaged(rng, text.encode(errors="surrogatepass")).decode(errors="replace")


def twisted(rng: random.Random, value: object) -> object:
    """The same JSON value with one place of it replaced."""
    value = copy.deepcopy(value)
    holder: object = {"": value}
    key: object = ""
    while isinstance(holder[key], (dict, list)) and holder[key] and rng.random() < 0.85:  # type: ignore[index]
        holder = holder[key]  # type: ignore[index]
        key = rng.choice(list(holder)) if isinstance(holder, dict) else rng.randrange(len(holder))  # type: ignore[arg-type]
    old = holder[key]  # type: ignore[index]
    if isinstance(old, str) and rng.random() < 0.6:
        holder[key] = edited(rng, old)  # type: ignore[index]
    elif isinstance(holder, dict) and rng.random() < 0.2:
        holder[rng.choice(SCRAPS)] = rng.choice(VALUES)
    else:
        holder[key] = rng.choice((*VALUES, rng.choice(SCRAPS)))  # type: ignore[index]
    return value if key != "" else holder[key]  # type: ignore[index]


def strings(value: object) -> Iterator[str]:
    """Every text in a value of JSON; names are none."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, dict)):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from strings(inner)


def said(text: str) -> None:
    """An error message must be fit for a terminal; several lines only where there are several mistakes."""
    for line in text.split("\n"):
        if not line.isprintable():
            raise LetThrough(f"unprintable message {line!r}")


# ---- targets --------------------------------------------------------------------------------------------------


def inventory(rng: random.Random) -> None:
    content = rng.choice(INVENTORIES) if rng.random() < 0.95 else b"".join(
        rng.choice(SCRAPS).encode(errors="surrogatepass") for _ in range(rng.randrange(40)))  # fmt: skip
    file = Path(f"/dev/shm/orch-fuzz-{os.getpid()}.yaml")
    file.write_bytes(damaged(rng, content))
    try:
        found = parse_inventory(read_yaml(file))
    except InventoryError as error:
        if not error.mistakes:
            raise LetThrough("refused without a reason") from error
        raise
    finally:
        file.unlink()
    if Inventory.model_validate_json(found.model_dump_json()) != found.model_copy(
        update={"nodes": tuple(node.model_copy(update={"line": 0}) for node in found.nodes)}
    ):
        raise LetThrough("what was stored is not what was read")
    for node in found.nodes:
        said(f"{node.name} {node.host} {node.note} {node.gpu} {node.address} {node.interface}")


class _Answering:
    """A host that answers with these bytes."""

    node = "v100"


def answered(commands: dict[str, Any]) -> dict[str, Any]:
    """What the probe makes of these commands on a host."""
    values = dict(MACHINE["values"])
    links, sources = values["interfaces"], values.pop("sources")
    clock = {"began": values.pop("wall_start"), "ended": values.pop("wall_end")}
    facts = {**values, **gpu_facts(commands["nvidia-smi"], occupants(OCCUPANTS)), **remote_probe.facts_of(commands)}
    facts |= remote_probe.routes([*sources], sources, links, {})
    return {"clock": clock, "facts": facts}


def probe(rng: random.Random) -> None:
    commands = copy.deepcopy(MACHINE["commands"])
    answer: object = answered(commands)
    for _ in range(rng.choice((1, 1, 2, 5))):
        if rng.random() < 0.3:  # what commands of the host printed
            done = commands[rng.choice(list(commands))]
            done["out"] = damaged(rng, done["out"].encode(errors="surrogatepass")).decode(errors="replace")
            answer = answered(commands)
        else:
            answer = twisted(rng, answer)
    text = json.dumps(answer).encode()
    if rng.random() < 0.3:
        text = damaged(rng, text)
    stdout = b"Welcome!\n" + MARKER.encode() + text + MARKER.encode() + b"bye\n"
    if rng.random() < 0.05:
        stdout = damaged(rng, stdout)
    host = ask.ConnectedHost(_Answering(), "python3", None, "~/.orch")  # type: ignore[arg-type]
    parsed = ask.parse_answer(host, CommandResult(0, stdout, b""), MARKER)
    facts = read_facts("v100", parsed, 1795233448.0, 1795233454.0)
    if NodeFacts.model_validate_json(facts.model_dump_json()) != facts:
        raise LetThrough("what was stored is not what was read")
    node = Node(
        name="v100", host="h", gpu="A2000", gpus=1, bandwidth_bps=2.5e9, address="192.168.1.41", image="torch-2.0"
    )
    found = checks.unusable(node, facts)
    findings = judge(Observations((Host(node, facts, Health()),)), checks_at("up")).findings
    for line in (*(one.line for one in findings), *([str(found)] if found else [])):
        said(line)


def frames_of(rng: random.Random) -> bytes:
    """One host's stream: logs, metrics, records; most of it as a good host sends it."""
    out, offsets = [], {}
    for _ in range(rng.randrange(1, 12)):
        kind = rng.random()
        if kind < 0.6:
            file = rng.choice(["rank-0/stdout.log", "rank-1/stderr.log", "torchrun.log", "rank-0/metrics.jsonl"])
            text = "".join(rng.choice(SCRAPS) for _ in range(rng.randrange(5))) + rng.choice(("\n", "", "\r"))
            data = damaged(rng, b"line one\nstep 2\r\n" + text.encode(errors="surrogatepass"))[: 1 << 18] or b"x"
            if file.endswith("jsonl"):
                steps = [START, *({**STEP, "step": n} for n in range(rng.randrange(4)))]
                data = b"".join(json.dumps(twisted(rng, s)).encode() + b"\n" for s in steps)
            at = offsets.get(file, 0)
            offsets[file] = at + len(data)
            header = {"file": file, "inode": 7, "offset": at, "size": len(data)}
            if rng.random() < 0.1:
                header = twisted(rng, header)
            out.append(json.dumps(header).encode() + b"\n" + data)
        elif kind < 0.9:
            out.append(json.dumps({"agent": twisted(rng, AGENT)}).encode() + b"\n")
        else:
            out.append(json.dumps(twisted(rng, {"end": {"torchrun.log": {"size": 1, "sha256": "0"}}})).encode() + b"\n")
    return b"".join(out)


def log(rng: random.Random) -> None:
    stream = frames_of(rng)
    if rng.random() < 0.3:
        stream = damaged(rng, stream)
    cut = rng.choice((1, 7, 100, 1 << 20)) if len(stream) < 1 << 14 else 1 << 20
    chunks = [stream[at : at + cut] for at in range(0, len(stream), cut)]
    splitter, view, record = Splitter(), LiveView(PLAN), RECORD
    events: list[object] = []
    try:
        for frame in read_frames("a", chunks, frozenset({0, 1})):
            if isinstance(frame, FilePiece):
                events.append(tuple(splitter.split("a", frame)))
                if view.take("a", frame):
                    events.append(view.progress())
            elif isinstance(frame, Agent):
                record = combine(PLAN, {"a": frame.record, "b": {}}, RECORD, datetime.now(timezone.utc))
    except OrchError as error:
        events.append(Notice(str(error)))
    events.append(tuple(splitter.rest()))
    _show(events, record, terminal=rng.random() < 0.5)


def _show(events: list[object], record: JobRecord, terminal: bool) -> None:
    """Prints as `orch run` does, on a screen of our own, and looks at every byte of it."""
    screen = io.StringIO()
    fake = Console(
        file=screen, force_terminal=terminal, soft_wrap=True, highlight=False, width=80, legacy_windows=False
    )
    with redirect_stdout(screen), redirect_stderr(screen):
        following.print_events(iter(events), stream=fake)
        job_table.print_end(record)
        job_table.print_jobs([record])
    shown = COLOUR.sub("", screen.getvalue())
    if found := CONTROL.search(shown):
        raise LetThrough(f"{found[0]!r} in {shown[max(0, found.start() - 40) : found.end() + 40]!r}")
    lines = sum(len(event) for event in events if isinstance(event, tuple))
    if shown.count("\n") < lines:
        raise LetThrough("a line was lost")


TARGETS: dict[str, Callable[[random.Random], None]] = {"inventory": inventory, "probe": probe, "log": log}


# ---- the run --------------------------------------------------------------------------------------------------


@dataclass
class Count:
    """cases: tried. refused: of those, the ones that ended in an error of ours. crashes: case number -> traceback."""

    cases: int = 0
    refused: int = 0
    slowest_s: float = 0.0
    crashes: dict[int, str] = field(default_factory=dict)


def one(name: str, seed: int, case: int) -> bool:
    """Whether it was taken; False where it was refused in our own words. Raises what a crash raises."""
    try:
        TARGETS[name](random.Random(f"{name}/{seed}/{case}"))
    except OrchError as error:
        said(str(error))
        return False
    return True


def fuzz(name: str, seed: int, seconds: float, *, max_crashes: int = 20) -> Count:
    count, deadline = Count(), time.monotonic() + seconds
    while time.monotonic() < deadline and len(count.crashes) < max_crashes:
        began = time.process_time()
        try:
            count.refused += not one(name, seed, count.cases)
        except Exception:
            count.crashes[count.cases] = traceback.format_exc()
        taken_s = time.process_time() - began
        if taken_s > SLOW_S:
            count.crashes.setdefault(count.cases, f"took {taken_s:.1f} s\n")
        count.slowest_s = max(count.slowest_s, taken_s)
        count.cases += 1
    return count


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", choices=[*TARGETS, "all"])
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--case", type=int, help="only this case, with its traceback")
    words = parser.parse_args()
    names = list(TARGETS) if words.target == "all" else [words.target]
    if words.case is not None:
        print("taken" if one(names[0], words.seed, words.case) else "refused")
        return 0
    crashed = False
    for name in names:
        count = fuzz(name, words.seed, words.minutes * 60 / len(names))
        print(f"{name}: {count.cases} cases, {count.refused} refused in our words, {len(count.crashes)} crashes, "
              f"slowest {count.slowest_s:.2f} s (seed {words.seed})", flush=True)  # fmt: skip
        for case, trace in count.crashes.items():
            print(f"  case {case}: {trace.strip().splitlines()[-1][:300]}", flush=True)
        crashed |= bool(count.crashes)
    return int(crashed)


if __name__ == "__main__":
    sys.exit(main())
