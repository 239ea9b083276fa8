"""Memory of a paced rank: what the GPU would need, and what the C library keeps."""

from __future__ import annotations

import contextlib
import ctypes

from trainer.paced.anatomy import Anatomy
from trainer.shared.errors import TrainError
from trainer.shared.pace import Pace


def keep_freed_memory() -> None:
    """Has the C library keep freed memory: to get it from the kernel again for each step's gradients, page
    by page, would cost more CPU than all the rest (mallopt(3); another C library than glibc may not have it).
    """
    trim_threshold, mmap_threshold = -1, -3
    with contextlib.suppress(AttributeError, OSError):
        libc = ctypes.CDLL(None)
        libc.mallopt(mmap_threshold, 32 << 20)
        libc.mallopt(trim_threshold, -1)


def memory_needed(anatomy: Anatomy, pace: Pace, samples: int) -> int:
    """Bytes that training with so many samples would take on the GPU. Raises TrainError where it has fewer."""
    needed = anatomy.state_bytes + samples * anatomy.activation_bytes
    fits = most_samples(anatomy, pace)
    if fits is not None and pace.memory_bytes is not None and samples > fits:
        remedy = "use a smaller batch, or accumulate=N"
        if not fits:
            alone = f"the network takes {anatomy.state_bytes / 2**30:.1f} GiB by itself"
            remedy = f"{alone}: strategy=pipeline gives each host a part of it"
        raise out_of_memory(f"{samples} samples", needed, pace.memory_bytes, f"at most {fits} samples fit; {remedy}")
    return needed


def out_of_memory(what: str, needed_bytes: int, has_bytes: int, remedy: str) -> TrainError:
    """what: takes more than the GPU that the rank stands in for has; in the plural."""
    return TrainError(
        f"out of memory: {what} take {needed_bytes / 2**30:.1f} GiB, the GPU that this rank stands in for has "
        f"{has_bytes / 2**30:.1f} GiB: {remedy}"
    )


def most_samples(anatomy: Anatomy, pace: Pace) -> int | None:
    """How many samples the GPU has memory for; None where its memory is not known."""
    if pace.memory_bytes is None:
        return None
    return max(0, (pace.memory_bytes - anatomy.state_bytes) // anatomy.activation_bytes)
