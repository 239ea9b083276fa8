"""The parts of `make gpu`: each a function from a `Bench` to its rows, as they are measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ..facts import Facts
from ..row import Row
from ..runs import Runs


@dataclass(frozen=True)
class Bench:
    """mnist: the folder that holds torchvision's MNIST; None: made-up images."""

    facts: Facts
    runs: Runs
    mnist: Path | None

    @property
    def folder(self) -> Path:
        return self.runs.folder


@dataclass(frozen=True)
class Part:
    """shows: one sentence. budget_s: of 20 minutes."""

    name: str
    shows: str
    budget_s: float
    play: Callable[[Bench], Iterator[Row]]


def all_parts() -> tuple[Part, ...]:
    """In the order in which they are played: what is worth most comes first."""
    from . import alone, collectives, cut, memory, mnist, overlap, suite, training, two

    return (
        Part("tests", "the tests marked gpu", 240, suite.play),
        Part("alone", "ResNet-152 on one GPU by itself, by batch and precision", 150, alone.play),
        Part("training", "the trainer's step beside a bare loop", 170, training.play),
        Part("two", "two ranks over NCCL's sockets at 2.5 Gbps, by strategy", 190, two.play),
        Part("overlap", "whether gradients travel beside backward, as CUPTI or nsys saw it", 70, overlap.play),
        Part("cut", "the network cut over two ranks, beside one process", 120, cut.play),
        Part("mnist", "10 epochs of MNIST, and their accuracy", 100, mnist.play),
        Part("memory", "a profile with 6 % of the GPU's memory", 60, memory.play),
        Part("collectives", "every collective on GPU tensors, by NCCL and by Gloo", 100, collectives.play),
    )
