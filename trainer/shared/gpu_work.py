"""What a GPU takes for its work on gradients beside a step: copies, casts, compression, averages. Imports no torch.

    >>> round(cast(232_657_192).seconds(gb_per_s=288), 5)       # fp32 to 16 bits
    0.00135

Such work computes next to nothing, so its time is that of the memory, at the bandwidth of the card's data sheet times
STREAMED, and of starting its kernels. A paced rank keeps these times, and the forecast counts the same; how many
bytes each kind of work moves is counted in the code that does it. docs/twins.md says what supports these figures and
what contradicts them.
"""

from __future__ import annotations

from dataclasses import dataclass

GB_PER_S = 300.0
"""The memory bandwidth of an unknown GPU: about an RTX A2000 (288). Assumed."""
STREAMED = 0.9
"""The part of the data sheet's bandwidth that a kernel reaches which only moves numbers. Published: BabelStream 4.0
copies at 812 of 900 GB/s on a V100-PCIE-16GB (its triad 846); 2.0 at 263 of 336 on a GTX 980 Ti. Not known of an A2000
or A16."""
KERNEL_S = 10e-6
"""To start a kernel from Python, where kernels are too short to hide it. Assumed, as the catalogue does: one step of
ResNet-152, 1,351 kernels, took a host 24 ms, 18 us each, on a stand-in for CUDA."""
COMPRESS_KERNELS = 2.6
"""PowerSGD's, for each tensor of the network. Counted at rank 2: three a matrix, about twenty a stack of matrices of
one shape, and one for each tensor that travels as it is are 1,199 for ResNet-152's 467."""


@dataclass(frozen=True)
class Work:
    """What a GPU does beside forward and backward."""

    moved_bytes: float
    """What is read and written in the GPU's memory."""
    kernels: float = 0.0
    """How many kernels have to be started."""

    def seconds(self, gb_per_s: float) -> float:
        """On a GPU whose data sheet promises this bandwidth."""
        return self.moved_bytes / (STREAMED * 1e9 * gb_per_s) + KERNEL_S * self.kernels


def copy(size_bytes: float) -> Work:
    """Into another buffer: read and written once."""
    return Work(2 * size_bytes)


def cast(size_bytes: float) -> Work:
    """So many bytes of fp32 to 16 bits, or to fp32 back again."""
    return Work(1.5 * size_bytes)


def project(size_bytes: float, tensors: float) -> Work:
    """PowerSGD until P travels: the gradient joins the memory (3), times Q (1). tensors: of the whole network."""
    return Work(4 * size_bytes, COMPRESS_KERNELS * tensors / 2)


def project_back(size_bytes: float) -> Work:
    """Until Q travels: the memory times P (1), less P Q^T (2)."""
    return Work(3 * size_bytes)


def restore(size_bytes: float, tensors: float) -> Work:
    """And after it: P Q^T (1) takes the gradients' place (2)."""
    return Work(3 * size_bytes, COMPRESS_KERNELS * tensors / 2)


def leave(size_bytes: float) -> Work:
    """Weights, before their change since the average travels: into a buffer (2), less the start (3), weighed (2)."""
    return Work(7 * size_bytes)


def arrive(size_bytes: float) -> Work:
    """Weights that went on meanwhile take the mean over: the start moves (3), what came since (3) goes on top (3)."""
    return Work(9 * size_bytes)


def arrive_at_once(size_bytes: float) -> Work:
    """Weights that waited: the start moves (3), and they become it (2)."""
    return Work(5 * size_bytes)
