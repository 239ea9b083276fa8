"""ResNet-152 as few lines as torch allows: what the trainer's step is held against.

python -m tests.gpu.bare [--batch 256] [--fused]          prints {"step_ms": 27.2}
"""

from __future__ import annotations

import argparse
import json

WARM_UP, TIMED = 6, 30


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.bare")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--fused", action="store_true")
    asked = parser.parse_args()
    print(json.dumps({"step_ms": step_ms(asked.batch, asked.fused)}), flush=True)


def step_ms(batch: int, fused: bool) -> float:
    """Mean of steps that nobody waits for, by the device's own time line."""
    import torch
    from torch.nn.functional import cross_entropy
    from torchvision.models import resnet152

    model = resnet152(num_classes=10).cuda()
    options = {"fused": True} if fused else {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4, **options)
    images = torch.randn(batch, 3, 32, 32, device="cuda")
    labels = torch.zeros(batch, dtype=torch.long, device="cuda")
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for step in range(WARM_UP + TIMED):
        if step == WARM_UP:
            torch.cuda.synchronize()
            began.record()
        optimizer.zero_grad(set_to_none=True)
        cross_entropy(model(images), labels).backward()
        optimizer.step()
    ended.record()
    torch.cuda.synchronize()
    return began.elapsed_time(ended) / TIMED


if __name__ == "__main__":
    main()
