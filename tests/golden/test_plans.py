"""`orch run --dry-run --json` of a dozen jobs: the first one whole, the others by the lines in which they differ."""

from __future__ import annotations

import difflib
import json
from pathlib import Path

import pytest

from tests.golden.conftest import Golden, Types, masked, pretty
from trainer.shared import EXPERIMENTS

EXP = ("--exp", "resnet152_cifar")
ASKED = {
    "settings": (*EXP, "--set", "batch=1024", "--set", "epochs=10", "--set", "lr=5e-2", "--set", "ema=0.999"),
    "auto": (*EXP, "--set", "strategy=auto", "--set", "shares=auto"),
    "pipeline": (*EXP, "--set", "strategy=pipeline", "--set", "batch=2048"),
    "half": (*EXP, "--set", "fidelity=half", "--set", "amp=fp16"),
    "local": (*EXP, "--set", "fidelity=local", "--set", "local_steps=0"),
    "one_host": (*EXP, "--nodes", "v100", "--set", "strategy=none"),
    "limits": ("--grace", "5s", "--time-limit", "90m", "--share", "--retries", "2", "--exp", "mnist_lenet"),
    "script": ("--batch", "8", "--env", "A=1_0", "--env", "HF_TOKEN", "proj/train.py", "--lr", "0.10", "", "null"),
    "module": ("--folder", "proj", "--no-metrics", "-m", "pack.train", "--x"),
    "torchrun": ("--pass-local-rank", "--name", "mine", "--", "torchrun", "--nnodes", "2", "proj/train.py", "--x"),
    "network": ("--exp", "collectives", "--set", "max_bytes=1024"),
}
FILES = ("proj/train.py", "proj/pack/__init__.py", "proj/pack/train.py")


@pytest.fixture
def planned(orch: Types, tmp_path: Path) -> Types:
    for path in FILES:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("print('trains')\n")

    def plan(*words: str) -> str:
        code, out, err = orch("run", "--dry-run", "--json", *words)
        assert code == 0, err
        document = json.loads(out)
        # docs/reference/settings.md has the usual values, so a new setting changes no plan.
        if usual := EXPERIMENTS.get(document["exp"]):
            settings = document["settings"]
            assert settings.keys() == usual.keys()
            document["settings"] = {name: value for name, value in settings.items() if value != usual[name]}
        # The trainer's own files are another number with each change of it.
        if document["code"]["source"].endswith("/trainer"):
            document["code"] |= {"files": 0, "size_bytes": 0}
            document["files"] = []
        return masked(pretty(document), HERE=str(tmp_path))

    return plan


def test_plans_are_what_they_were(planned: Types, golden: Golden) -> None:
    base = planned(*EXP)
    golden("plans/experiment.json", base)
    for name, words in ASKED.items():
        lines = difflib.unified_diff(base.splitlines(), planned(*words).splitlines(), n=0, lineterm="")
        golden(f"plans/{name}.diff", "\n".join(line for line in lines if line[:2] not in ("@@", "--", "++")) + "\n")
