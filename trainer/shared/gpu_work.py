"""Predicts a GPU's time for work on gradients outside forward and backward: copies, casts, compression, averages.

    >>> round(cast(232_657_192).seconds(gb_per_s=288), 5)       # fp32 to 16 bits
    0.00135

Imports no torch.
"""
# Such work is limited by memory bandwidth and kernel starts. Paced ranks and the forecast use the same times;
# docs/twins.md has the evidence for and against these figures.

from __future__ import annotations

from dataclasses import dataclass

GB_PER_S = 300.0
"""Memory bandwidth of an unknown GPU, assumed: about an RTX A2000 (288)."""
STREAMED = 0.9
"""The part of the data sheet's bandwidth that a copying kernel reaches."""
# Published: BabelStream 4.0 copies at 812 of 900 GB/s on a V100-PCIE-16GB (triad: 846); 2.0 at 263 of 336 on a GTX 980
# Ti. Unknown for A2000 and A16.
KERNEL_S = 10e-6
"""To start a kernel from Python, if kernels are too short to hide it. Assumed."""
# On a stand-in for CUDA, a step of ResNet-152 (1,351 kernels) took the host 24 ms, 18 us each.
COMPRESS_KERNELS = 2.6
"""Kernels of PowerSGD per tensor of the network."""
# Counted at rank 2: three per matrix, about twenty per stack of matrices of one shape, and one per uncompressed tensor
# are 1,199 for ResNet-152's 467.


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


def project(size_bytes: float, tensors: float) -> Work:
    # PowerSGD until P travels: adds the gradient to the memory (3), times Q (1).
    return Work(4 * size_bytes, COMPRESS_KERNELS * tensors / 2)


def project_back(size_bytes: float) -> Work:
    # PowerSGD until Q travels: the memory times P (1), minus P Q^T (2).
    return Work(3 * size_bytes)


def restore(size_bytes: float, tensors: float) -> Work:
    # PowerSGD after Q: P Q^T (1) replaces the gradients (2).
    return Work(3 * size_bytes, COMPRESS_KERNELS * tensors / 2)


def leave(size_bytes: float) -> Work:
    # Local updates, before the change travels: into a buffer (2), minus the start (3), weighted (2).
    return Work(7 * size_bytes)


def arrive(size_bytes: float) -> Work:
    # Weights that continued training: the start moves (3), later changes (3) are added (3).
    return Work(9 * size_bytes)


def arrive_at_once(size_bytes: float) -> Work:
    # Weights that waited: the start moves (3), and they become it (2).
    return Work(5 * size_bytes)
