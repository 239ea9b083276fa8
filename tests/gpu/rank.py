"""One rank of the trainer, with what a measurement adds: `python -m tests.gpu.rank <trainer arguments>`

GPU_MEMORY_PART=0.06     so much of the GPU's memory and no more
GPU_DETERMINISTIC=1      of cuDNN's kernels those that add up in one order
GPU_TRACE=trace-{rank}   writes the kernels of a few steps there, as CUPTI saw them (torch.profiler's JSON)
"""

from __future__ import annotations

import os
import sys

BEFORE, TRACED = 5, 3
"""Steps: left out, and then traced."""


def main(arguments: list[str]) -> int:
    import torch

    if part := os.environ.get("GPU_MEMORY_PART"):
        torch.cuda.set_per_process_memory_fraction(float(part))
    if os.environ.get("GPU_DETERMINISTIC"):
        torch.backends.cudnn.deterministic = True
    if path := os.environ.get("GPU_TRACE"):
        return _traced(arguments, path.replace("{rank}", os.environ.get("RANK", "0")))
    from trainer.__main__ import main as train

    return train(arguments)


def _traced(arguments: list[str], path: str) -> int:
    from torch.profiler import ProfilerActivity, profile, schedule

    from trainer.ranks import read_rank_info
    from trainer.shared import MetricsWriter, parse_arguments
    from trainer.train import train

    activities = [ProfilerActivity.CUDA]
    steps = schedule(wait=BEFORE - 1, warmup=1, active=TRACED, repeat=1)
    with profile(activities=activities, schedule=steps, on_trace_ready=lambda p: p.export_chrome_trace(path)) as seen:

        class Counting(MetricsWriter):
            """Tells the profiler where a step ends."""

            def write(self, event: str, **fields: object) -> None:
                super().write(event, **fields)
                if event == "step":
                    seen.step()

        info = read_rank_info()
        train(parse_arguments(arguments), info, Counting(info.metrics_path))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
