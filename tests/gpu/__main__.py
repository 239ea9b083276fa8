"""python -m tests.gpu [--parts alone,two] [--mnist DIR] [--minutes 20] [--out DIR]

Plays the parts one after the other, prints a line a row, and leaves one file to send back. Whatever fails is a row with
its cause, and the rest goes on; Ctrl-C writes the file with what there is.

Exit codes: 0 everything ran (a figure outside of its range is a finding, no failure); 1 something failed; 2 wrong
usage, or no GPU that torch can use; 130 interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import time
import traceback
from dataclasses import asdict, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from . import facts as machine
from . import parcel, table
from .facts import Facts
from .here import ROOT, STAND_IN
from .parts import Bench, Part, all_parts
from .row import Row, failed, skipped
from .runs import Runs

MINUTES = 20.0
_LEAST_S = 5.0
"""With less left of a part's time, what is left of it is not begun."""


def main(arguments: list[str]) -> int:
    asked = _parser().parse_args(arguments)
    parts = _chosen(asked.parts)
    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.default_int_handler)
    folder = asked.out / datetime.now().strftime("gpu-%Y%m%d-%H%M%S")
    folder.mkdir(parents=True)
    facts = machine.find_facts(folder)
    if facts.why_unusable:
        sys.stderr.write(f"error: {facts.why_unusable}\n")
        with contextlib.suppress(OSError):
            folder.rmdir()  # where no log is in it
        return 2
    bench = Bench(facts, Runs(folder, facts.gpus, patience=asked.minutes / MINUTES), asked.mnist)
    result = _begin(facts, asked)
    print(_heading(facts, parts, asked), flush=True)
    watching = machine.watch(folder / "gpu.csv")
    interrupted = False
    try:
        for part in parts:
            _play(part, bench, result)
            parcel.write_result(folder, result)
    except KeyboardInterrupt:
        interrupted = True
    finally:
        if watching:
            watching.kill()
            watching.wait()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # what follows takes a moment, and is what is left
    return _conclude(folder, result, interrupted)


def _play(part: Part, bench: Bench, result: dict[str, Any]) -> None:
    budget_s = bench.runs.patience * part.budget_s
    print(f"\n{part.name}: {part.shows} (at most {budget_s:.0f} s)", flush=True)
    bench.runs.deadline_s = time.monotonic() + budget_s
    began_s = time.monotonic()
    try:
        for row in part.play(bench):
            _add(row, part, result)
            if bench.runs.left_s < _LEAST_S:
                _add(skipped("the rest", f"{budget_s:.0f} s are over; --minutes gives more"), part, result)
                break
    except Exception as error:  # a mistake of this program's shall cost no more than its part
        (bench.folder / f"{part.name}-traceback.log").write_text(traceback.format_exc(), encoding="utf-8")
        _add(failed(part.name, f"{type(error).__name__}: {error}"), part, result)
    result["took_s"][part.name] = round(time.monotonic() - began_s, 1)


def _add(row: Row, part: Part, result: dict[str, Any]) -> None:
    if result["stand_in"] and row.value is not None:
        row = replace(row, verdict="stand-in")  # virtual time: nothing follows from it
    print(table.lines_of(row), flush=True)
    result["rows"].append({"part": part.name, **asdict(row)})


def _conclude(folder: Path, result: dict[str, Any], interrupted: bool) -> int:
    result["interrupted"] = interrupted
    parcel.write_result(folder, result)
    archive = parcel.pack(folder)
    rows = [Row(**{name: value for name, value in row.items() if name != "part"}) for row in result["rows"]]
    print(f"\n{'interrupted; ' if interrupted else ''}{table.summary(rows)}")
    print(f"to send back: {archive} ({archive.stat().st_size / 1024:.0f} KiB)")
    print("  holds result.json, each run's log and records, gpu.csv (clocks, power);")
    print("  no names of hosts or users, no addresses, no environment")
    if interrupted:
        return 130
    return 1 if any(row.verdict == "failed" for row in rows) else 0


def _begin(facts: Facts, asked: argparse.Namespace) -> dict[str, Any]:
    return {
        "schema": 1,
        "began": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "stand_in": facts.is_stand_in,
        "minutes": asked.minutes,
        "mnist": asked.mnist is not None,
        "torch": facts.found,
        "driver": facts.driver,
        "interrupted": False,
        "took_s": {},
        "rows": [],
    }


def _heading(facts: Facts, parts: tuple[Part, ...], asked: argparse.Namespace) -> str:
    found = facts.found
    gpus = f"{facts.gpus} x {facts.gpu}" if facts.gpus > 1 else facts.gpu
    nccl = ".".join(map(str, facts.nccl)) or "none"
    at_most = sum(part.budget_s for part in parts) * asked.minutes / MINUTES / 60
    lines = [
        f"{gpus}, torch {found['torch']}, CUDA {found['cuda']}, NCCL {nccl}; {found['cores']} cores",
        f"{', '.join(part.name for part in parts)}: at most {at_most:.0f} minutes",
    ]
    if facts.is_stand_in:
        lines.insert(0, f"{STAND_IN}: no figure below is a speed, and none is judged")
    return "\n".join([*lines, "", table.head()])


def _chosen(names: str) -> tuple[Part, ...]:
    parts = {part.name: part for part in all_parts()}
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    unknown = [name for name in wanted if name not in parts]
    if unknown:
        sys.stderr.write(f"error: no such part: {', '.join(unknown)}; there are {', '.join(parts)}\n")
        sys.exit(2)
    return tuple(part for part in parts.values() if not wanted or part.name in wanted)


def _parser() -> argparse.ArgumentParser:
    parts = "\n".join(f"  {part.name:12} {part.shows}" for part in all_parts())
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu",
        description="What orch does on this machine's GPUs: a table, and one file to send back.",
        epilog=f"parts:\n{parts}\n\nexample: python -m tests.gpu --parts alone,two --mnist ~/data",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--parts", default=os.environ.get("GPU_PARTS", ""), metavar="A,B", help="only these (GPU_PARTS); all by default"
    )
    parser.add_argument("--mnist", type=_folder, metavar="DIR", help="holds MNIST/raw; made-up digits without it")
    parser.add_argument("--minutes", type=_minutes, default=MINUTES, help="for all parts together (20)")
    parser.add_argument("--out", type=Path, default=ROOT / "runs", metavar="DIR", help="for the file (runs)")
    return parser


def _folder(text: str) -> Path:
    folder = Path(text).expanduser().absolute()
    if not (folder / "MNIST" / "raw").is_dir():
        raise argparse.ArgumentTypeError(f"{folder} holds no MNIST/raw, as torchvision lays it out")
    return folder


def _minutes(text: str) -> float:
    try:
        minutes = float(text)
    except ValueError:
        minutes = 0.0
    if not 1 <= minutes <= 600:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of minutes from 1 to 600")
    return minutes


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
