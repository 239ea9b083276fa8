"""What our trainer costs beside a bare PyTorch loop with the same model, loader and optimiser, on one CPU process.

    .venv/bin/python tests/bench/overhead.py [BLOCKS]

Both run in processes of their own, in turn; throughput of each block after the warm-up, medians and spread. Then what
writing one step's line takes, against the shortest step measured. Exits 1 below 0.97 or above 1 %.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rack import ROOT, show_machine, spread

from trainer.config import Settings, parse_settings
from trainer.records import EVENT_FIELDS, MetricsWriter

WARMUP = 5
CASES = {
    "mnist_lenet": {"batch": "64", "steps": "305"},
    "resnet152_cifar": {"batch": "4", "steps": "17", "lr": "0.001"},
}
COMMON = {
    "data": "synthetic",
    "strategy": "none",
    "device": "cpu",
    "num_workers": "0",
    "eval_every": "0",
    "warmup_steps": str(WARMUP),
}


def main() -> int:
    if sys.argv[1:2] == ["bare"]:
        print(bare_loop(parse_settings(sys.argv[2], json.loads(sys.argv[3]))))
        return 0
    blocks = int(sys.argv[1]) if len(sys.argv) > 1 else 7
    show_machine()
    return 0 if all([compare(exp, settings, blocks) for exp, settings in CASES.items()]) else 1


def compare(exp: str, settings: dict[str, str], blocks: int) -> bool:
    pairs = COMMON | settings
    ours, bare, steps_ms = [], [], []
    for _ in range(blocks):
        times_ms, samples = trainer_steps(exp, pairs)
        ours.append(1000 * samples / sum(times_ms))
        steps_ms += times_ms
        bare.append(float(run([__file__, "bare", exp, json.dumps(pairs)])))
    ratio = statistics.median(mine / theirs for mine, theirs in zip(ours, bare, strict=True))
    line_ms, step_ms = step_line_ms(), statistics.median(steps_ms)
    print(f"{exp}, batch {pairs['batch']}: trainer {spread(ours, 1)}, bare loop {spread(bare, 1)} samples/s; "
          f"median ratio of pairs {ratio:.3f}")  # fmt: skip
    print(f"  a step line is written in {1000 * line_ms:.0f} us, {line_ms / step_ms:.3%} of a step of {step_ms:.1f} ms",
          flush=True)  # fmt: skip
    return ratio >= 0.97 and line_ms / step_ms < 0.01


def trainer_steps(exp: str, pairs: dict[str, str]) -> tuple[list[float], int]:
    """Milliseconds of each step after the warm-up, and their samples."""
    with tempfile.TemporaryDirectory() as folder:
        words = [word for key, value in pairs.items() for word in (f"--{key}", value)]
        run(["-m", "trainer", "--exp", exp, *words], ORCH_METRICS=f"{folder}/metrics.jsonl")
        events = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
    steps = [event for event in events if event["event"] == "step"][WARMUP:]
    return [step["t_ms"] for step in steps], sum(step["samples"] for step in steps)


def run(words: list[str], **environment: str) -> str:
    done = subprocess.run([sys.executable, *words], cwd=ROOT, env={**os.environ, **environment}, capture_output=True,
                          text=True, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def bare_loop(settings: Settings) -> float:
    """samples/s of what anybody would write."""
    import torch
    from torch.nn.functional import cross_entropy

    from trainer.data import open_data, train_loader
    from trainer.models import build_model
    from trainer.stream import RankBatches, SampleStream

    torch.manual_seed(settings.seed)
    model = build_model(settings.model, settings.data_set.shape, settings.data_set.classes)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=settings.lr, momentum=settings.momentum, weight_decay=settings.weight_decay
    )
    stream = SampleStream(settings.train_samples, settings.batch, (settings.batch,), settings.seed)
    loader = train_loader(open_data(settings)[0], RankBatches(stream, 0), settings, torch.device("cpu"))
    samples, begin = 0, 0.0
    for step, (images, labels) in enumerate(loader):
        optimizer.zero_grad(set_to_none=True)
        cross_entropy(model(images), labels).backward()
        optimizer.step()
        if step >= WARMUP:
            samples += len(labels)
        elif step == WARMUP - 1:
            begin = time.perf_counter()
        if step + 1 == settings.steps:
            break
    return samples / (time.perf_counter() - begin)


def step_line_ms(lines: int = 5000) -> float:
    fields = dict.fromkeys(EVENT_FIELDS["step"], 1234.567)
    with tempfile.TemporaryDirectory(dir=ROOT) as folder:
        writer = MetricsWriter(Path(folder, "metrics.jsonl"))
        begin = time.perf_counter()
        for _ in range(lines):
            writer.write("step", **fields)
        return 1000 * (time.perf_counter() - begin) / lines


if __name__ == "__main__":
    sys.exit(main())
