"""What it costs a script that its steps are measured from outside: the same loops with the hooks in torch and without.

    nice -n -15 .venv/bin/python tests/bench/watched.py

One process alone, with DistributedDataParallel over Gloo: no other rank's pace is in the way. The two take turns, a
step each, so that whatever else the machine does meets both alike; the first turns are left out. What is compared is
the processor time of the thread that trains, which other programs disturb less than the time that passes: of a
step with all that is done in it, the writing of records too. Given is the mean difference of the pairs
less the twentieth at either end, with its 95 % interval (by resampling). Exits 1 where a loop takes over 0.5 % more.
"""

from __future__ import annotations

import contextlib
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torchvision
from rack import end_orderly_on_term, show_machine
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

sys.path.append(str(Path(__file__).resolve().parents[2]))

from orchestrator.remote import step_hooks

WARMUP, PAIRS, STEPS = 10, 300, 1
LIMIT = 0.005
PLACES = (
    (torch.utils.data.dataloader._BaseDataLoaderIter, "__next__"),
    (DistributedDataParallel, "forward"),
    (torch.autograd, "backward"),
)
"""What the hooks replace, beside the one at optimisers."""


class Hooks:
    """Those that `install` hung into torch, to be taken out and put back."""

    def __init__(self, folder: str) -> None:
        self._path = Path(folder, "metrics.jsonl")
        os.environ["ORCH_METRICS"] = str(self._path)
        bare = [getattr(*place) for place in PLACES]
        self._hooks = sys.modules["torch.optim.optimizer"]._global_optimizer_post_hooks
        step_hooks.install(torch)
        self._states = {True: ([getattr(*place) for place in PLACES], dict(self._hooks)), False: (bare, {})}

    def are(self, on: bool) -> None:
        functions, hooks = self._states[on]
        for place, function in zip(PLACES, functions, strict=True):
            setattr(*place, function)
        self._hooks.clear()
        self._hooks.update(hooks)

    def records(self) -> int:
        return self._path.read_text().count('"event": "step"') if self._path.exists() else 0


def convolutions() -> Iterator[None]:
    """A step each time it is asked: ResNet-18 on small pictures, with SGD."""
    data = DataLoader(TensorDataset(torch.randn(3200, 3, 32, 32), torch.randint(10, (3200,))), 16)
    model = DistributedDataParallel(torchvision.models.resnet18(num_classes=10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    while True:
        for pictures, labels in data:
            optimizer.zero_grad()
            cross_entropy(model(pictures), labels).backward()
            optimizer.step()
            yield


def transformer() -> Iterator[None]:
    """The same for a small GPT with AdamW, with the sizes that nanoGPT has for CPUs: 4 x 128, 12 texts of 64."""
    text = torch.randint(512, (100_000,))
    block = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True, norm_first=True)
    layers = (nn.Embedding(512, 128), nn.TransformerEncoder(block, 4, enable_nested_tensor=False), nn.Linear(128, 512))
    model = DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    while True:
        begins = torch.randint(len(text) - 65, (12,)).tolist()
        cut = torch.stack([text[begin : begin + 65] for begin in begins])
        optimizer.zero_grad()
        cross_entropy(model(cut[:, :-1]).flatten(0, 1), cut[:, 1:].flatten()).backward()
        optimizer.step()
        yield


def compare(name: str, loop: Iterator[None], hooks: Hooks) -> bool:
    turns: dict[bool, list[float]] = {True: [], False: []}
    before = hooks.records()
    for pair in range(WARMUP + PAIRS):
        for on in (True, False) if pair % 2 else (False, True):
            hooks.are(on)
            turns[on].append(turn_s(loop))
    more_s = [seen - bare for seen, bare in zip(turns[True][WARMUP:], turns[False][WARMUP:], strict=True)]
    step_s = statistics.median(turns[False][WARMUP:])
    more, (low, high) = middle(more_s) / step_s, (each / step_s for each in interval(more_s))
    print(f"{name}, {PAIRS} pairs of {STEPS} steps of {1000 * step_s:.1f} ms: {more:+.2%} ({low:+.2%} to {high:+.2%}), "
          f"{1e6 * more * step_s:+.0f} us a step; {hooks.records() - before} steps recorded", flush=True)  # fmt: skip
    return more <= LIMIT


def turn_s(loop: Iterator[None]) -> float:
    """Processor time of one step in the mean."""
    begin = time.thread_time()
    for _ in range(STEPS):
        next(loop)
    return (time.thread_time() - begin) / STEPS


def middle(values: list[float]) -> float:
    """The mean without the twentieth at either end."""
    rest = len(values) // 20
    return statistics.fmean(sorted(values)[rest:-rest])


def interval(values: list[float], draws: int = 1000) -> tuple[float, float]:
    """95 %, of their middle."""
    chance = random.Random(0)
    found = sorted(middle(chance.choices(values, k=len(values))) for _ in range(draws))
    return found[draws // 40], found[-draws // 40]


def main() -> int:
    end_orderly_on_term()
    show_machine()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    loops: dict[str, Callable[[], Any]] = {"convolutions": convolutions, "transformer": transformer}
    with tempfile.TemporaryDirectory() as folder:
        hooks = Hooks(folder)
        good = [compare(name, make(), hooks) for name, make in loops.items()]
    dist.destroy_process_group()
    return 0 if all(good) else 1


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
