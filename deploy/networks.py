"""Writes the layers of torchvision's networks, for predictions without a profile: `python deploy/networks.py`.

Each network for images of 32 and 224 pixels and 1,000 classes, as a profile sees it. Left out: networks with more
layers than a profile records, and transformers, whose attention has work that a profile does not see.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import torchvision

from orchestrator.forecast.layers import NETWORKS, PIXELS, WRITTEN_CLASSES, is_written_here
from trainer.measure import blocks_on_paper
from trainer.shared import MODEL_CHANNELS


def main() -> None:
    names = [name for name, channels in MODEL_CHANNELS.items() if channels and not is_written_here(name)]
    names = [name for name in names if not name.startswith(("vit_", "swin_"))]
    found = {name: {size: blocks_on_paper(name, (3, size, size), WRITTEN_CLASSES) for size in PIXELS} for name in names}
    whole = {name: sizes for name, sizes in found.items() if all(sizes.values())}
    content = json.dumps({"torchvision": torchvision.__version__, "networks": whole}, separators=(",", ":"))
    Path(NETWORKS).write_bytes(gzip.compress(content.encode(), mtime=0))


if __name__ == "__main__":
    main()
