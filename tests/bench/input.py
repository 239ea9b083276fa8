"""How fast the two loaders give training batches of MNIST under its random affine, and what part of a step that takes.

    .venv/bin/python tests/bench/input.py [FOLDER THAT HOLDS MNIST/raw]

`workers` at num_workers 0, so that both do all their work in one process and one thread; a speed is images per second
of that thread's CPU time, whatever else the machine does. The two take turns, a block each; the ratio is the median
over pairs of neighbours. Then mnist_lenet is trained for some hundred steps with each, computing with one thread, on
one core and on all: load_ms against t_ms, summed over the steps after the warm-up. Exits 1 where `resident` is below
10 times as fast.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from rack import ROOT, end_orderly_on_term, show_machine, spread

from trainer.data import RankBatches, SampleStream, find_facts, open_batches
from trainer.ranks import join, read_rank_info
from trainer.shared import MetricsWriter, parse_settings
from trainer.train import train

PAIRS = 15
IMAGES = {"resident": 60_000, "workers": 2048}  # of a block
STEPS = 300
ALONE = read_rank_info({})
CPU = torch.device("cpu")


def main(archives: Path) -> int:
    end_orderly_on_term()
    show_machine()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        raw = Path(folder, "MNIST", "raw")
        raw.mkdir(parents=True)
        for file in archives.glob("MNIST/raw/*"):
            (raw / file.name).symlink_to(file)  # they are unpacked here, not there
        fast_enough = [compare(folder, batch) for batch in (64, 256)]
        all_cores = os.sched_getaffinity(0)
        for cores in ({min(all_cores)}, all_cores):  # with a core to spare, resident prepares in a thread
            os.sched_setaffinity(0, cores)
            for loader in IMAGES:
                show_load_share(folder, loader, len(cores))
    return 0 if all(fast_enough) else 1


def compare(folder: str, batch: int) -> bool:
    join(ALONE, "gloo", CPU)
    loaders = {loader: Loader(folder, loader, batch) for loader in IMAGES}
    speeds: dict[str, list[float]] = {loader: [] for loader in loaders}
    for pair in range(PAIRS + 1):
        for name in list(loaders) if pair % 2 else reversed(list(loaders)):
            images_per_s = loaders[name].epoch(pair)
            if pair:  # the first turns warm up
                speeds[name].append(images_per_s)
    torch.distributed.destroy_process_group()
    ratio = statistics.median(one / other for one, other in zip(speeds["resident"], speeds["workers"], strict=True))
    shown = ", ".join(f"{name} {spread(values, 0)}" for name, values in speeds.items())
    print(f"batch {batch}, {PAIRS} pairs: {shown} images/s a core; median ratio of pairs {ratio:.1f}", flush=True)
    return ratio >= 10


class Loader:
    def __init__(self, folder: str, loader: str, batch: int) -> None:
        pairs = {"data_dir": folder, "loader": loader, "num_workers": "0", "samples": str(IMAGES[loader])}
        settings = parse_settings("mnist_lenet", pairs)
        facts = dataclasses.replace(find_facts(settings)[0], test_samples=1)
        self.order = RankBatches(SampleStream(facts.train_samples, batch, (batch,), settings.seed), rank=0)
        self.batches = open_batches(settings, facts, self.order, ALONE, CPU).train

    def epoch(self, epoch: int) -> float:
        """Images per second of CPU time."""
        self.order.epoch = epoch
        begin_s = time.process_time()
        images = sum(len(labels) for _, labels in self.batches)
        return images / (time.process_time() - begin_s)


def show_load_share(folder: str, loader: str, cores: int) -> None:
    pairs = {"data_dir": folder, "loader": loader, "num_workers": "0", "steps": str(STEPS), "eval_every": "0"}
    settings = parse_settings("mnist_lenet", {**pairs, "device": "cpu", "strategy": "none"})
    with tempfile.TemporaryDirectory() as scratch, contextlib.redirect_stdout(io.StringIO()):
        path = Path(scratch, "metrics.jsonl")
        train(settings, ALONE, MetricsWriter(path))
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    steps = [line for line in lines if line["event"] == "step"][settings.warmup_steps :]
    load_ms, step_ms = (statistics.mean(step[name] for step in steps) for name in ("load_ms", "t_ms"))
    medians = [statistics.median(step[name] for step in steps) for name in ("load_ms", "t_ms")]
    print(
        f"{loader}, {cores} of the cores: {load_ms:.2f} of {step_ms:.2f} ms a step load, {load_ms / step_ms:.1%} "
        f"(medians {medians[0]:.2f} and {medians[1]:.2f} ms, {medians[0] / medians[1]:.1%})",
        flush=True,
    )


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else ROOT.parent / "shared" / "data" / "mnist")))
