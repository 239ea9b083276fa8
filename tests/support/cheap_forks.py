"""Makes a process that has imported torch, and forks many others, cheap to fork from.

Its 400 MB lie in 100,000 small pages, each of which a fork has to enter for the new process, and to take out at its
end: a twenty-fifth of a second of the processor each time. In large pages they are 200; the kernel takes one apart
again where a process writes.
"""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path

_COLLAPSE = 25
"""MADV_COLLAPSE, from Linux 6.1 on; an older kernel refuses it, and forks take as long as ever."""
_LARGE = 1 << 21
_libc = ctypes.CDLL(None)


def make_forks_cheap() -> None:
    """To be called once all is imported."""
    gc.collect()
    gc.freeze()  # no fork looks through what was imported, which would copy all of it
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, may, _, _, inode, *_ = line.split()
        begin, end = (int(number, 16) for number in place.split("-"))
        begin, end = -(-begin // _LARGE) * _LARGE, end // _LARGE * _LARGE
        if may == "rw-p" and inode == "0" and begin < end:
            _libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _COLLAPSE)
