"""Predicts a GPU's time for work on gradients outside forward and backward: copies, casts, compression, averages.

    >>> round(cast(232_657_192).seconds(gb_per_s=288), 5)       # fp32 to 16 bits
    0.00135

Imports no torch.
"""
# Such work is limited by memory bandwidth and kernel starts. Paced ranks and the forecast use the same times;
# docs/twins.md has the evidence for and against these figures.

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

GB_PER_S = 300.0
"""Memory bandwidth of an unknown GPU, assumed: about an RTX A2000 (288)."""
STREAMED = 0.9
"""The part of the data sheet's bandwidth that a copying kernel reaches."""
# Published: BabelStream 4.0 copies at 812 of 900 GB/s on a V100-PCIE-16GB (triad: 846); 2.0 at 263 of 336 on a GTX 980
# Ti. Unknown for A2000 and A16.
KERNEL_S = 10e-6
"""To start a kernel from Python, if kernels are too short to hide it. Assumed."""
# On a stand-in for CUDA, a step of ResNet-152 (1,351 kernels) took the host 24 ms, 18 us each.


@dataclass(frozen=True)
class Work:
    moved_bytes: float
    """Read and written in the GPU's memory."""
    kernels: float = 0.0
    """Number of kernels to start."""

    def seconds(self, gb_per_s: float) -> float:
        """gb_per_s: bandwidth in the data sheet."""
        return self.moved_bytes / (STREAMED * 1e9 * gb_per_s) + KERNEL_S * self.kernels


def copy(size_bytes: float) -> Work:
    """Reads and writes once."""
    return Work(2 * size_bytes)


def cast(size_bytes: float) -> Work:
    """size_bytes: in fp32; to or from 16 bits."""
    return Work(1.5 * size_bytes)


def compressed(shapes: Iterable[Sequence[int]], rank: int) -> dict[tuple[int, int], list[int]]:
    """PowerSGD's matrices: positions by rows and columns. The other tensors would not shrink, and travel unchanged."""
    found: dict[tuple[int, int], list[int]] = {}
    for position, shape in enumerate(shapes):
        rows, columns = prod(shape[:1]), prod(shape[1:])
        if rank * (rows + columns) < rows * columns:
            found.setdefault((rows, columns), []).append(position)
    return found


def compressing(
    size_bytes: float, stacks: Mapping[tuple[int, int], Sequence[int]], rank: int
) -> tuple[Work, Work, Work]:
    """PowerSGD until P travels, until Q travels, and afterwards. stacks: from `compressed`."""
    # Counted on a stand-in for CUDA: ResNet-152's 156 matrices of 21 shapes, with 7 numbers of rows, take 350 kernels
    # at rank 2. Five of them pack what travels.
    batches, matrices = len({rows for rows, _ in stacks}), sum(map(len, stacks.values()))
    return (
        Work(4 * size_bytes, 2 * len(stacks)),  # adds the gradient to the memory (3), times Q (1)
        Work(3 * size_bytes, 2 * len(stacks) + (7 * rank + 1) * batches),  # the memory times P (1), minus P Q^T (2)
        Work(size_bytes, matrices + 5),  # P Q^T replaces the gradient (1)
    )


def leave(size_bytes: float) -> Work:
    # Local updates, before the change travels: into a buffer (2), minus the start (3), weighted (2).
    return Work(7 * size_bytes)


def arrive(size_bytes: float) -> Work:
    # Weights that continued training: the start moves (3), later changes (3) are added (3).
    return Work(9 * size_bytes)


def arrive_at_once(size_bytes: float) -> Work:
    # Weights that waited: the start moves (3), and they become it (2).
    return Work(5 * size_bytes)
