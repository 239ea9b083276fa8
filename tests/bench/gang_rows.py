"""The ranks' side of `rows.py`: many ways to train, in turn, inside one gang.

    orch run --folder . -- tests/bench/gang_rows.py ROWS_JSON

ROWS_JSON: {"exp", "blocks", "warmup", "rows": {name: settings}}. In each block every row trains its `steps` updates, of
which the first `warmup` do not count; of one that averages now and then those do that end with its second average, and
begin after the first. Only there all ranks are at the same step: in between the fast ones run ahead. A row with
strategy `none` has all ranks train alone at the same time, on equal shares; one with `metrics` false writes no metrics.
Every rank prints a line of JSON a row and block: how long it took, the times of each step, the samples that it did, how
late its pace was, and how busy the whole machine's cores were meanwhile.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, os.getcwd())  # the shipped folder, with the trainer in it

import torch
import torch.distributed as dist

from trainer.paced import PacedPart, StandIn, dissect
from trainer.ranks import RankInfo, ending, join, read_rank_info
from trainer.ranks.process_group import leave
from trainer.session import Session
from trainer.setup import assemble, rank_network, set_up
from trainer.setup import rank_network as tensor_setup
from trainer.shared import MetricsWriter, parse_settings
from trainer.strategies import ParameterAverage
from trainer.train import train_epoch
from trainer.training import Progress
from trainer.training.run import Run


def main() -> None:
    asked = json.loads(Path(sys.argv[1]).read_text())
    info = read_rank_info()
    together = join(info, "gloo", torch.device("cpu"))
    alone = [dist.new_group([rank]) for rank in range(info.world_size)][info.rank]
    with tempfile.TemporaryDirectory() as folder:
        runs: dict[str, tuple[Run, Path | None]] = {}
        for name, settings in asked["rows"].items():
            group = alone if settings["strategy"] == "none" else together
            file = Path(folder, f"{len(runs)}.jsonl") if settings.get("metrics", True) else None
            runs[name] = prepared(asked, settings, info, group, file), file
        for block in range(asked["blocks"]):
            for name, (run, file) in runs.items():
                dist.barrier()
                begin = file.stat().st_size if file else 0
                began_s, before, on_time = time.perf_counter(), core_ticks(), len(late_s(run))
                session = Session(run)
                session.progress = Progress(block)
                train_epoch(session)
                block_s, busy = time.perf_counter() - began_s, busy_since(before)
                end_rounds(run.strategy)
                facts = {"row": name, "block": block, "block_s": block_s, "busy": busy, "late_s": late_s(run)[on_time:]}
                tell({**facts, **counted(run, asked["warmup"])}, run, lines_from(file, begin))
    leave()
    ending.leave(0)


def prepared(asked: dict[str, Any], settings: dict[str, Any], info: RankInfo, group: Any, file: Path | None) -> Run:
    """An epoch of its stream is a block."""
    steps = settings["steps"]
    pairs = {key: str(value) for key, value in settings.items() if key not in ("steps", "metrics")}
    pairs |= {"data": "synthetic", "samples": str(steps * settings["batch"]), "epochs": str(asked["blocks"])}
    assemble.join = lambda *_: group  # type: ignore[assignment]  # all rows meet in the gang that is there
    rank_network.dissect = tensor_setup.dissect = dissected  # and are of one network
    run = set_up(parse_settings(asked["exp"], pairs), info, MetricsWriter(file))
    run.console.prints = False
    return run


dissected = functools.cache(dissect)


def counted(run: Run, warmup: int) -> dict[str, int]:
    """The first step of a block that counts, and how many last ones do not: with `late` one, which is too short, since
    no update follows whose forward passes it would take.
    """
    settings = run.settings
    first = settings.local_steps + settings.overlap if settings.fidelity == "local" else warmup
    return {"counts_from": first, "left_out": int(settings.fidelity == "late")}


def end_rounds(strategy: Any) -> None:
    """Nothing is left to the next row, and the next block begins with a round of its own."""
    strategy.settle()
    if isinstance(strategy, ParameterAverage):
        strategy.updates, strategy.samples, strategy.samples_of_all, strategy.under_way = 0, 0, 0, False


def late_s(run: Run) -> list[float]:
    """Of each micro-batch so far, of a pipeline's rank of each update, the seconds by which it was late; empty of one
    that computes.
    """
    return run.model.stopwatch.late_s if isinstance(run.model, (StandIn, PacedPart)) else []


def core_ticks() -> tuple[int, int]:
    """Of all cores since the machine started: idle, and in all."""
    with open("/proc/stat", encoding="ascii") as file:
        ticks = [int(word) for word in file.readline().split()[1:9]]
    return ticks[3] + ticks[4], sum(ticks)


def busy_since(before: tuple[int, int]) -> float:
    """The part of all cores' time in which they did something, whoever asked for it, 0..1."""
    idle, ticks = (now - then for now, then in zip(core_ticks(), before, strict=True))
    return 1 - idle / ticks if ticks else 0.0


def lines_from(file: Path | None, begin: int) -> list[dict[str, Any]]:
    if file is None:
        return []
    with open(file, encoding="utf-8") as lines:
        lines.seek(begin)
        return [json.loads(line) for line in lines]


def tell(facts: dict[str, Any], run: Run, lines: list[dict[str, Any]]) -> None:
    steps = [line for line in lines if line["event"] == "step"]
    columns = ("t_ms", "compute_ms", "exposed_ms", "comm_ms", "samples")
    values = {column: [step[column] for step in steps] for column in columns}
    print(json.dumps({**facts, "rank": run.info.rank, "node": run.info.node, **values}))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
