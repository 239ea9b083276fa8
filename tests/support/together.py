"""Which tests one worker of pytest-xdist takes whole: those of a file, and all of a folder whose tests share something
that takes seconds to start.

Otherwise each worker would start it for the files that it happens to get.
"""

from __future__ import annotations

from xdist.scheduler import LoadFileScheduling

FOLDERS = (
    "tests/cuda/",  # the machine of stand-in GPUs, whose server imports torch's CUDA build
    "tests/trainer/",  # the two servers that ranks are forked from
)


class TogetherScheduling(LoadFileScheduling):
    def _split_scope(self, nodeid: str) -> str:
        return next((folder for folder in FOLDERS if nodeid.startswith(folder)), super()._split_scope(nodeid))
