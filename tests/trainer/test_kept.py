"""A script's own schedule, moving average and generators: the same on all ranks, and in a run that was resumed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.free_port import free_port
from tests.support.trainer_ranks import ROOT, environment

SCRIPT = """
import json, random, sys
import numpy, torch, trainer
from trainer.data.sample_stream import SampleStream
from torch import nn

asked = json.loads(sys.argv[1])
torch.manual_seed(3)
numpy.random.seed(5)
random.seed(7)
network = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)).double()
data = [(torch.randn(4, generator=torch.Generator().manual_seed(i)).double(), torch.tensor([i % 3.0]).double())
        for i in range(97)]
optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.5)
updates = 9 * asked["epochs"]
SCHEDULES = {
    "OneCycleLR": lambda: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=updates + 1),
    "StepLR": lambda: torch.optim.lr_scheduler.StepLR(optimizer, 9, 0.5),
    "MultiStepLR": lambda: torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 11], 0.5),
    "ExponentialLR": lambda: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
}
scheduler = SCHEDULES[asked["schedule"]]()


class Counter:
    updates = 0

    def state_dict(self):
        return {"updates": self.updates}

    def load_state_dict(self, state):
        self.updates = state["updates"]


average, counter, drawn = torch.optim.swa_utils.AveragedModel(network), Counter(), []
if asked.get("one process"):
    weighted = SampleStream(97, 12, (12,), seed=0)
    for epoch in range(asked["epochs"]):
        for step in range(weighted.steps):
            rows = [data[i] for i in weighted.indices(epoch, step, 0)]
            inputs, targets = (torch.stack(column) for column in zip(*rows))
            optimizer.zero_grad()
            nn.functional.mse_loss(network(inputs), targets).backward()
            optimizer.step()
            scheduler.step()
            average.update_parameters(network)
    rank = 0
else:
    ranks = trainer.join(batch=12, **asked["settings"], epochs=asked["epochs"])
    rank, run = ranks.rank, ranks.prepare(network, optimizer, data)

    def moved():
        scheduler.step()
        average.update_parameters(network)
        counter.updates += 1
        assert counter.updates == run.updates

    if asked.get("in the body"):
        run.keep(counter=counter)
    else:
        run.after_update(moved)
        run.keep(scheduler=scheduler, average=average, counter=counter)
    for epoch in run.epochs():
        for inputs, targets in run.batches():
            drawn.append((numpy.random.beta(1, 1), random.random()))
            run.step(nn.functional.mse_loss(run.model(inputs), targets, reduction="sum"))
            if asked.get("in the body"):
                scheduler.step()
state = {name: tensor.tolist() for name, tensor in [*network.state_dict().items(), *average.state_dict().items()]}
with open(f"{asked['out']}.{rank}", "w") as file:
    json.dump({"weights": state, "lr": optimizer.param_groups[0]["lr"], "updates": counter.updates,
               "drawn": drawn[-1:]}, file)
"""


def trained(folder: Path, ranks: int, code: int = 0, **asked: Any) -> tuple[list[dict[str, Any]], str]:
    """What each rank has in the end, and what was printed."""
    folder.mkdir(exist_ok=True)
    out, port = folder / "end", str(free_port())
    asked = {"epochs": 3, "schedule": "StepLR", "settings": {}, **asked, "out": str(out)}
    processes = []
    for rank in range(ranks):
        own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
        own |= {"MASTER_ADDR": "127.0.0.1", "ORCH_NODE": f"node{rank}", "PYTHONPATH": ROOT}
        env = environment(folder, **{name: str(value) for name, value in own.items()})
        command = [sys.executable, "-c", SCRIPT, json.dumps(asked)]
        processes.append(subprocess.Popen(command, env=env, text=True, stdout=-1, stderr=subprocess.STDOUT))
    printed = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [code] * ranks, printed
    ends = [json.loads(Path(f"{out}.{rank}").read_text()) for rank in range(ranks)] if not code else []
    return ends, "\n".join(printed)


def off(end: dict[str, Any], reference: dict[str, Any]) -> float:
    """The largest difference of a weight, or of the rate."""

    def flat(value: Any) -> list[float]:
        return [one for part in value for one in flat(part)] if isinstance(value, list) else [float(value)]

    pairs = [(flat(end["weights"][name]), flat(kept)) for name, kept in reference["weights"].items()]
    return max(
        abs(a - b)
        for ours, theirs in [*pairs, ([end["lr"]], [reference["lr"]])]
        for a, b in zip(ours, theirs, strict=True)
    )


@pytest.mark.parametrize(
    ("schedule", "settings"),
    [
        ("OneCycleLR", {"shares": "node0=5,node1=2", "strategy": "allreduce_flat"}),
        ("StepLR", {"accumulate": 2}),
        ("MultiStepLR", {"strategy": "ddp", "shares": "node0=1,node1=0"}),
    ],
)
def test_a_schedule_and_an_average_are_those_of_one_process(
    tmp_path: Path, schedule: str, settings: dict[str, Any]
) -> None:
    """97 samples, 12 at once: the last batch has one sample, so that a rank has none."""
    (one,), _ = trained(tmp_path / "one", 1, schedule=schedule, **{"one process": True})
    ends, _ = trained(tmp_path / "two", 2, schedule=schedule, settings=settings)
    assert max(off(end, one) for end in ends) < 1e-12
    assert [end["updates"] for end in ends] == [27, 27]


@pytest.mark.parametrize("schedule", ["StepLR", "OneCycleLR", "MultiStepLR", "ExponentialLR"])
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path, schedule: str) -> None:
    """Bit for bit, with what numpy and random draw."""
    settings = {"checkpoint_every": 5, "shares": "node0=5,node1=2", "checkpoint_dir": str(tmp_path / "whole")}
    whole, _ = trained(tmp_path / "run", 2, schedule=schedule, settings=settings)
    settings["checkpoint_dir"] = str(tmp_path / "part")
    trained(tmp_path / "run", 2, schedule=schedule, settings={**settings, "steps": 15})
    resumed, _ = trained(
        tmp_path / "run", 2, schedule=schedule, settings={**settings, "resume": str(tmp_path / "part")}
    )
    assert [off(*pair) for pair in zip(resumed, whole, strict=True)] == [0, 0]
    assert resumed == whole


def test_rates_that_differ_are_reported_once(tmp_path: Path) -> None:
    settings = {"shares": "node0=5,node1=2", "strategy": "allreduce_flat"}
    _, printed = trained(tmp_path / "two", 2, schedule="ExponentialLR", settings=settings, **{"in the body": True})
    assert printed.count("the learning rates differ") == 1 and "on rank 1 (node1)" in printed
    assert "run.after_update(scheduler.step)" in printed


@pytest.mark.parametrize(
    ("thing", "words"),
    [
        ("object()", "object has no state_dict or no load_state_dict"),
        ("Odd()", "the state_dict of Odd cannot be stored"),
    ],
)
def test_what_cannot_be_kept_is_refused_before_the_first_update(tmp_path: Path, thing: str, words: str) -> None:
    script = f"""
import torch, trainer
class Odd:
    def state_dict(self): return {{"state": lambda: 0}}
    def load_state_dict(self, state): pass
network = torch.nn.Linear(1, 1)
trainer.join().prepare(network, torch.optim.SGD(network.parameters(), lr=1), [torch.ones(1)]).keep(mine={thing})
"""
    env = environment(tmp_path, PYTHONPATH=str(ROOT))
    done = subprocess.run([sys.executable, "-c", script], env=env, text=True, capture_output=True, check=False)
    assert done.returncode == 1 and done.stderr.startswith(f"error: run.keep(mine=...): {words}"), done.stderr
    assert os.listdir(tmp_path) == ["0.jsonl"]


OLDER = """
import dataclasses, sys
from pathlib import Path
import torch, trainer
from torch import nn
from trainer.checkpoints.file import read_file, write_file


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.tensor([1.0, 0.0, 1.0, 1.0]))
        self.norm, self.last = nn.BatchNorm1d(4), nn.Linear(4, 1)

    def forward(self, x):
        return self.last(self.norm(x * self.mask))


network, folder = Masked(), Path(sys.argv[1])
optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 9)
asked = {"resume": str(folder)} if any(folder.iterdir()) else {"checkpoint_every": 2, "steps": 2}
run = trainer.join(batch=4, checkpoint_dir=str(folder), device="cpu", **asked)
run = run.prepare(network, optimizer, [torch.rand(4) + 3 for _ in range(16)])
if "resume" in asked:
    run.keep(scheduler=scheduler)
    print("now", network.state_dict())
    run.end()
    raise SystemExit
for _ in run.epochs():
    for x in run.batches():
        run.step(run.model(x).square().sum())
print("now", network.state_dict())
saved, _, _ = read_file(folder)
numbers = [buffer for buffer in network.buffers() if buffer.is_floating_point()]
older = {f"statistics.{number}": buffer for number, buffer in enumerate(numbers)}
write_file(folder / "step-000000002.pt", dataclasses.replace(saved, kept=[], own=[older]))
"""


def test_an_older_checkpoint_counts_all_buffers_among_the_statistics(tmp_path: Path) -> None:
    """And has nothing that a script keeps, which is reported."""
    (tmp_path / "checkpoints").mkdir()
    printed = []
    for _ in range(2):
        env = environment(tmp_path, PYTHONPATH=str(ROOT))
        command = [sys.executable, "-c", OLDER, str(tmp_path / "checkpoints")]
        done = subprocess.run(command, env=env, text=True, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr
        printed.append(done.stdout)
    before, after = (text.partition("now ")[2].partition("})")[0].partition("done")[0] for text in printed)
    assert "running_var" in before and after == before
    assert "scheduler: not in the checkpoint, started fresh" in printed[1]


COMPILED = """
import sys
import torch, trainer
from torch import nn

folder, compiled, resumes = sys.argv[1], sys.argv[2] == "compiled", sys.argv[3] == "resumes"
torch.manual_seed(0)
network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
network = torch.compile(network, backend="eager") if compiled else network
optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
data = [(torch.ones(4) * number, number % 3) for number in range(16)]
asked = {"resume": folder} if resumes else {"checkpoint_every": 2, "steps": 2}
run = trainer.join(batch=4, strategy="tensor", checkpoint_dir=folder, device="cpu", **asked)
run = run.prepare(network, optimizer, data)
for _ in run.epochs() if not resumes else ():
    for inputs, targets in run.batches():
        run.step(nn.functional.cross_entropy(run.model(inputs), targets, reduction="sum"))
print("now", [weight.tolist() for weight in run.run.model.parameters()], "then")
run.end()
"""


@pytest.mark.parametrize("first", ["compiled", "plain"])
def test_a_compiled_network_in_slices_is_kept(tmp_path: Path, first: str) -> None:
    """With the names of the plain one, as which it can be resumed, and the other way round."""
    printed = []
    for how in ([first, "begins"], ["compiled", "resumes"], ["plain", "resumes"]):
        command = [sys.executable, "-c", COMPILED, str(tmp_path / "checkpoints"), *how]
        env = environment(tmp_path, PYTHONPATH=str(ROOT))
        done = subprocess.run(command, env=env, text=True, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr
        printed.append(done.stdout.partition("now ")[2].partition(" then")[0])
    assert printed[0] and printed[1:] == [printed[0]] * 2
