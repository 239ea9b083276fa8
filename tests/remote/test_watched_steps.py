"""Scripts that nobody changed, started as a rank's wrapper starts them: their steps are measured, unnoticed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from orchestrator import remote
from orchestrator.remote.layout import JobFolder
from orchestrator.remote.rank import watched
from orchestrator.remote.script_start import ANY, WATCH
from tests.support.local_job import gang
from tests.support.quick_python import quick_python
from tests.support.watching import Measured, by_hand, events_in, unchanged
from trainer.shared import EVENT_FIELDS

TRIES = 3
"""Where the machine does other things, a rank stands still between two clocks that should read the same."""


def ranks_of(job) -> list[Path]:
    return [job.folder(node.name) / f"rank-{rank}" for node in job.plan.nodes for rank in node.rank_numbers]


def run(place: Path, text: str, switch: str = "on") -> list[Path]:
    """The folders of two ranks that ran it."""
    place.mkdir()
    with gang(place, text, env={WATCH: switch, "EPOCHS": "2"}, warm=True) as job:
        job.launch()
        assert job.wait().state == "succeeded", [(rank / "stderr.log").read_text() for rank in ranks_of(job)]
        return ranks_of(job)


@pytest.mark.parametrize(
    ("name", "model", "samples_from", "samples"), [("cnn", "Sequential", "loader", 16), ("gpt", "GPT", "network", 12)]
)
def test_each_part_of_a_step_is_what_the_script_times_by_hand(tmp_path, name, model, samples_from, samples):
    for attempt in range(TRIES):
        ranks = [Measured.read(rank) for rank in run(tmp_path / f"run-{attempt}", by_hand(name))]
        for measured in ranks:
            start, end = measured.events[0], measured.events[-1]
            for event in measured.events:
                assert event.keys() - {"event"} <= {*EVENT_FIELDS[event["event"]]}
            assert (start["model"], start["samples_from"], start["world_size"]) == (model, samples_from, 2)
            assert start["gradient_bytes"] == 4 * start["parameters"] > 0
            assert [step["samples"] for step in measured.steps] == [samples] * 24
            assert [step["step"] for step in measured.steps] == list(range(24))
            assert (end["event"], end["status"]) == ("end", "succeeded")
            assert end["peak_memory_bytes"] > 0
        misses = [measured.misses() for measured in ranks]
        if not any(misses):
            return
    raise AssertionError(misses)


@pytest.mark.parametrize("name", ["cnn", "gpt"])
def test_a_script_computes_and_prints_the_same_whether_it_is_watched_or_not(tmp_path, name):
    plain, seen = (run(tmp_path / switch, unchanged(name), switch) for switch in ("off", "on"))
    for one, other in zip(plain, seen, strict=True):
        assert {file.name for file in one.iterdir()} == {"stdout.log", "stdout.times", "stderr.log", "exit.json"}
        assert len(events_in(other)) == 26
        for log in ("stdout.log", "stderr.log"):
            assert (one / log).read_bytes() == (other / log).read_bytes()
        assert "weights" in (one / "stdout.log").read_text()


# ---- one process, no supervisor ---------------------------------------------------------------------------------


LOOP = """
import os, sys, torch
from torch.utils.data import DataLoader
torch.manual_seed(0)
model, data = torch.nn.Linear(4, 1), torch.randn(32, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def train(steps, after=lambda step: None):
    for step in range(steps):
        for batch in DataLoader(data, 32):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
            after(step)
"""


@pytest.fixture(scope="module")
def warm(tmp_path_factory) -> str:
    """A Python in which torch's import takes no time."""
    return quick_python(tmp_path_factory.mktemp("python") / "quick", torchrun=True)


def start(
    python: str,
    tmp_path: Path,
    text: str,
    *words: str,
    switch: str = "on",
    flags: Sequence[str] = (),
    program: Sequence[str] = (),
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    """A script of one process, as the wrapper would start it. program: in its place."""
    job = JobFolder(tmp_path / "job")
    job.bin.mkdir(parents=True, exist_ok=True)
    if not (job.bin / "orch_remote").exists():
        (job.bin / "orch_remote").symlink_to(Path(remote.__file__).parent)
    (tmp_path / "script.py").write_text(text)
    plain = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment = {**plain, "ORCH_METRICS": str(tmp_path / "metrics.jsonl"), **variables}
    environment |= watched(job, environment, watch=ANY if program else "") if switch == "on" else {}
    command = [*program] or [python, *flags, "script.py", *words]
    return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)


def test_a_script_alone_has_all_parts_of_its_steps(tmp_path):
    done = start(sys.executable, tmp_path, LOOP + "train(5)")
    assert (done.returncode, done.stderr) == (0, "")
    begin, *steps, end = events_in(tmp_path)
    assert (begin["samples_from"], begin["parameters"], end["status"]) == ("loader", 5, "succeeded")
    assert [step["samples"] for step in steps] == [32] * 5
    for step in steps:
        parts = [step[f"{part}_ms"] for part in ("load", "compute", "exposed", "optim")]
        assert sum(parts) == pytest.approx(step["t_ms"], abs=0.003)


LOSSES = """
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
says = open("losses.txt", "w")
for step in range(4):
    optimizer.zero_grad()
    parts = [model(part).square().mean() for part in data.chunk(2)]
    print(sum(part.item() for part in parts) / 2, file=says)
    for part in parts:
        {backward}
        part.mul_(100) if step % 2 else None
    {step}
says.close()
"""


@pytest.mark.parametrize(
    ("backward", "step"),
    [
        ("part.backward(retain_graph=True)", "optimizer.step()"),
        ("scaler.scale(part).backward()", "scaler.step(optimizer); scaler.update()"),
        ("torch.autograd.backward([part])", "optimizer.step()"),
    ],
)
def test_the_loss_of_a_step_is_the_scalar_whose_backward_the_script_called(tmp_path, backward, step):
    """The mean of several, without a scaler's factor; the script may change its memory afterwards."""
    text = LOOP + LOSSES.format(backward=backward, step=step)
    done = start(sys.executable, tmp_path, text, ORCH_SHARE="32", ORCH_BATCH="32")
    assert (done.returncode, done.stderr) == (0, "")
    _, *steps, _ = events_in(tmp_path)
    expected = [float(line) for line in (tmp_path / "losses.txt").read_text().splitlines()]
    assert [step["loss"] / step["samples"] for step in steps] == pytest.approx(expected)


def test_a_script_whose_samples_nobody_counts_has_a_loss_all_the_same(warm, tmp_path):
    text = LOOP.replace("for batch in DataLoader(data, 32):", "for batch in [data]:") + "train(3)"
    start(warm, tmp_path, text)
    begin, *steps, _ = events_in(tmp_path)
    assert (begin["samples_from"], [step["samples"] for step in steps]) == ("unknown", [0, 0, 0])
    assert steps[0]["loss"] > steps[2]["loss"] > 0


def test_the_part_of_the_batch_that_orch_gave_is_what_counts(warm, tmp_path):
    start(warm, tmp_path, LOOP + "train(2)", ORCH_SHARE="24", ORCH_BATCH="96")
    begin, *steps, _ = events_in(tmp_path)
    assert (begin["samples_from"], begin["batch_per_rank"]) == ("batch", 24)
    assert [step["samples"] for step in steps] == [24, 24]


def test_a_script_that_fails_says_so_in_its_last_record(warm, tmp_path):
    done = start(warm, tmp_path, LOOP + "train(2)\nraise ValueError('no more')")
    assert done.returncode == 1
    assert done.stderr.endswith("ValueError: no more\n")
    end = events_in(tmp_path)[-1]
    assert (end["status"], end["message"]) == ("failed", "ValueError: no more")


OWN = """
import json
def own(mode="a", **options):
    return open(os.environ["ORCH_METRICS"], mode, **options)
def line(step):
    return json.dumps({"event": "step", "step": step, "samples": 7}) + chr(10)
"""
KEPT = "file = own(buffering=1); train(4, lambda step: file.write(line(step)))"


@pytest.mark.parametrize(
    "writes",
    [
        KEPT,
        "file = own(); train(4, lambda step: file.write(line(step)))",
        "train(4, lambda step: own().write(line(step)))",
        f"train(9); {KEPT}",
        "train(9); file = own('w', buffering=1); train(4, lambda step: file.write(line(step)))",
    ],
    ids=["from the beginning", "at the end", "after each step", "late", "over ours"],
)
def test_a_script_that_writes_its_own_records_keeps_them_alone(warm, tmp_path, writes):
    done = start(warm, tmp_path, LOOP + OWN + writes)
    assert (done.returncode, done.stderr) == (0, "")
    assert events_in(tmp_path) == [{"event": "step", "step": step, "samples": 7} for step in range(4)]


JOINS = """
import torch, trainer
from torch.nn.functional import mse_loss
data = [(torch.randn(4), torch.ones(1)) for _ in range(32)]
model = torch.nn.Linear(4, 1)
run = trainer.join(batch=16, epochs=2).prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data)
for epoch in run.epochs():
    for inputs, targets in run.batches():
        run.step(mse_loss(run.model(inputs), targets, reduction="sum"))
"""


def test_a_script_that_trains_by_the_trainer_keeps_its_records_alone(warm, tmp_path):
    seen, plain = tmp_path / "seen", tmp_path / "plain"
    for place, switch in ((seen, "on"), (plain, "off")):
        place.mkdir()
        done = start(warm, place, JOINS, switch=switch, PYTHONPATH=str(Path(__file__).parents[2]))
        assert done.returncode == 0, done.stderr
    assert [event["event"] for event in events_in(seen)] == [event["event"] for event in events_in(plain)]
    assert all(event["samples_from"] is None for event in events_in(seen) if event["event"] == "start")
    assert "step" in {event["event"] for event in events_in(seen)}


TELLS = """
import orch_remote.step_watch
from trainer.integrations.records import Records
orch_remote.step_watch.LOOKS_EVERY_S = 0  # each step is looked at and written as soon as may be
records = Records()
records.begin(10, 16, counts_samples=True)
records.evaluated(0, 0.1, None, 1.0)  # after no step
records.begin_epoch()
losses = [2.0, torch.tensor(3.0), None, float("nan"), torch.ones(2)]
def tell(step):
    if step == 5:
        return
    assert records.has_untold
    records.tell(epoch=step // 4, samples=30 if step else None)
    assert not records.has_untold
    if step:
        records.tell(loss=losses[step - 1])
    if step == 3:
        records.end_epoch(0)
        records.evaluated(0, torch.tensor(0.75), None, 0.01)
count = iter(range(99))
train(6, lambda step: tell(next(count)))
"""


def test_what_a_callback_tells_stands_in_the_records_of_the_steps_before_it(warm, tmp_path):
    done = start(warm, tmp_path, LOOP + TELLS, PYTHONPATH=str(Path(__file__).parents[2]))
    assert (done.returncode, done.stderr) == (0, "")
    begin, *events, end = events_in(tmp_path)
    assert (begin["samples_from"], begin["steps"], end["event"]) == ("framework", 16, "end")
    steps = [event for event in events if event["event"] == "step"]
    assert [step["step"] for step in steps] == [10, 11, 12, 13, 14, 15]
    assert [step.get("epoch") for step in steps] == [0, 0, 0, 0, 1, None]
    assert [step["samples"] for step in steps] == [32, 30, 30, 30, 30, 32]
    losses = [step["loss"] for step in steps]
    assert losses[1:3] == [60.0, 90.0] and losses[4] is None
    assert all(losses[place] > 0 for place in (0, 3, 5))  # untold: the hooks' own
    assert all(step["compute_ms"] > 0 for step in steps)
    epoch, evaluation = (event for event in events if event["event"] != "step")
    assert (epoch["event"], epoch["epoch"], epoch["steps"]) == ("epoch", 0, 4)
    assert 0 < epoch["epoch_s"] < 60
    known = {"event": "eval", "epoch": 0, "step": 13, "accuracy": 0.75, "loss": None, "eval_s": 0.01}
    assert evaluation == known


def test_a_rank_that_is_started_again_goes_on_behind_its_first_records(warm, tmp_path):
    for _ in range(2):
        start(warm, tmp_path, LOOP + "train(2)")
    assert [event["event"] for event in events_in(tmp_path)] == ["start", "step", "step", "end"] * 2


def test_an_error_in_a_hook_ends_the_watching_and_is_said_once(warm, tmp_path):
    breaks = "import orch_remote.step_course\ndel orch_remote.step_course.Course.moves\ntrain(3)\nprint('trained')"
    done = start(warm, tmp_path, LOOP + breaks)
    assert (done.returncode, done.stdout) == (0, "trained\n")
    (said,) = done.stderr.splitlines()
    assert said.startswith("orch: steps are no longer measured: AttributeError")
    assert not (tmp_path / "metrics.jsonl").exists()


def test_a_disk_that_takes_no_records_ends_the_watching(warm, tmp_path):
    done = start(warm, tmp_path, LOOP + "train(3)\nprint('trained')", ORCH_METRICS="/dev/full")
    assert (done.returncode, done.stdout) == (0, "trained\n")
    assert done.stderr.count("\n") == 1


NO_TORCH = """
import json, os, subprocess, sys
look = "import os, sys; print(os.environ.get('PYTHONPATH'), [name for name in os.environ if 'STEP' in name],"
look += " [path for path in sys.path if 'start' in path], 'sitecustomize' in sys.modules, 'orch_remote' in sys.modules)"
exec(look)
print(subprocess.run([sys.executable, "-c", look], capture_output=True, text=True).stdout, end="")
print("torch" in sys.modules, "importlib.util" in sys.modules)
"""


@pytest.mark.parametrize("given", [None, "/given/a::/given/b"])
def test_a_script_without_torch_finds_no_trace(tmp_path, given):
    done = start(sys.executable, tmp_path, NO_TORCH, **({"PYTHONPATH": given} if given else {}))
    assert done.stderr == ""
    own, child, torch = done.stdout.splitlines()
    plainly = subprocess.run(
        [sys.executable, "-c", "import sys; print('sitecustomize' in sys.modules)"], capture_output=True, text=True
    )
    its_own = plainly.stdout.strip()  # Debian's Python has one
    assert own == child == f"{given} [] [] {its_own} False"
    assert torch.startswith("False")
    assert not (tmp_path / "metrics.jsonl").exists()


def test_the_hosts_own_sitecustomize_is_run_too(tmp_path):
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "sitecustomize.py").write_text("print('own')")
    says = LOOP + "train(1); print(sys.modules['sitecustomize'].__file__)"
    done = start(sys.executable, tmp_path, says, PYTHONPATH=f"{tmp_path}/own")
    assert done.stdout == f"own\n{tmp_path}/own/sitecustomize.py\n"
    assert len(events_in(tmp_path)) == 3


def test_processes_that_the_script_starts_write_nothing(warm, tmp_path):
    children = """
import multiprocessing, time
def train_for_long():
    train(3, lambda step: time.sleep(0.6))
if __name__ == "__main__":
    train(1)
    for way in ("fork", "spawn"):
        child = multiprocessing.get_context(way).Process(target=train_for_long)
        child.start(); child.join(); print(child.exitcode)
"""
    done = start(warm, tmp_path, LOOP + children)
    assert (done.stdout, done.stderr) == ("0\n0\n", "")
    assert [event["event"] for event in events_in(tmp_path)] == ["start", "step", "end"]


def test_only_a_child_of_the_wrapper_is_watched(warm, tmp_path):
    """Not what a script starts that Python began without a look at its environment."""
    (tmp_path / "inner.py").write_text(LOOP + "train(1)\nprint(os.environ.get('PYTHONPATH'))")
    done = start(warm, tmp_path, "import subprocess, sys; subprocess.run([sys.executable, 'inner.py'])", flags=("-E",))
    assert (done.stdout, done.stderr) == ("None\n", "")
    assert not (tmp_path / "metrics.jsonl").exists()


PROGRAMS = {
    "two in a row": "$PYTHON prepares.py && $PYTHON script.py",
    "in its place": "exec $PYTHON script.py",
    "by a Python without torch": "$PYTHON -c 'import subprocess, sys; subprocess.run([sys.executable, \"script.py\"])'",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_python_with_torch_in_a_program_is_measured_and_finds_no_trace(tmp_path, name):
    (tmp_path / "prepares.py").write_text("import torch\nprint('prepared')\n")
    says = "import importlib.util; importlib.util.find_spec('torch')\n" + LOOP
    says += "train(3); print(*(os.environ.get(n) for n in ('PYTHONPATH', 'ORCH_STEP_METRICS', 'ORCH_STACKS')))"
    shell = ("sh", "-c", PROGRAMS[name])
    done = start(sys.executable, tmp_path, says, program=shell, PYTHON=sys.executable)
    assert (done.stderr, done.stdout.splitlines()[-1]) == ("", "None None None")
    assert [event["event"] for event in events_in(tmp_path)] == ["start", *["step"] * 3, "end"]


def test_the_optimiser_that_goes_on_alone_counts_the_steps(warm, tmp_path):
    one_then_the_other = """
first, second = optimizer, torch.optim.Adam(model.parameters())
train(2)
optimizer = second
train(210)
"""
    start(warm, tmp_path, LOOP + one_then_the_other)
    steps = [event for event in events_in(tmp_path) if event["event"] == "step"]
    assert len(steps) == 2 + 11
    assert [step["samples"] for step in steps[-3:]] == [32] * 3


COMPILED = """
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
network, model = model, torch.compile(DistributedDataParallel(model), backend="aot_eager")
steps = 5
if sys.argv[1:]:
    optimizer.step = torch.compile(optimizer.step, backend="aot_eager")
train(steps)
print([weight.tolist() for weight in network.parameters()])
"""


@pytest.mark.parametrize("what", [(), ("optimiser",)], ids=["network", "optimiser"])
def test_what_is_compiled_computes_the_same(warm, tmp_path, what):
    seen, plain = (start(warm, tmp_path, LOOP + COMPILED, *what, switch=switch) for switch in ("on", "off"))
    assert seen.returncode == 0, seen.stderr
    assert seen.stdout == plain.stdout != ""
    assert (tmp_path / "metrics.jsonl").exists() == (not what)  # a compiled step has no marks
    assert what or len(events_in(tmp_path)) == 7


BUFFERS = """
import os, time, torch, torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

rank = int(os.environ["RANK"])
dist.init_process_group("gloo")

class Slow(Dataset):
    def __len__(self): return 10
    def __getitem__(self, place):
        time.sleep(0.1 if rank == {slow} else 0)
        return torch.randn(4), torch.randn(1)

network = nn.parallel.DistributedDataParallel({network})
optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
for data, wanted in DataLoader(Slow(), batch_size=2):
    optimizer.zero_grad()
    nn.functional.mse_loss(network(data), wanted).backward()
    optimizer.step()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("slow", [0, 1])
def test_the_wait_for_a_slow_ranks_buffers_is_no_computing(tmp_path, slow):
    """BatchNorm's statistics travel as the network is called: there the rank that came early waits."""
    network = "nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))"
    steps = steps_of(tmp_path / "job", BUFFERS.format(slow=slow, network=network))
    early = [step for step in steps[1 - slow][3:]]
    assert sum(step["compute_ms"] for step in early) < sum(step["exposed_ms"] for step in early) / 2
    assert sum(step["load_ms"] for step in steps[slow][3:]) > 150 * len(early)


def test_a_network_that_a_script_drops_is_gone(tmp_path):
    drops = (
        "gone = weakref.ref(network.module)\ndel network, optimizer\ngc.collect()\nassert gone() is None\ndist.destroy"
    )
    text = BUFFERS.format(slow=0, network="nn.Linear(4, 1)").replace("dist.destroy", drops)
    assert steps_of(tmp_path / "job", "import gc, weakref\n" + text)


LAYERS = """
class Plain(nn.Linear):
    has_them = False  # DistributedDataParallel refuses them on CPUs

    def modules(self):
        return [self, *([nn.SyncBatchNorm(1)] if self.has_them else [])]
"""


def test_with_layers_in_which_ranks_wait_only_the_load_is_known(tmp_path):
    text = BUFFERS.format(slow=1, network="Plain(4, 1)").replace("network = nn", f"{LAYERS}\nnetwork = nn")
    found = steps_of(tmp_path / "without", text)
    assert all("compute_ms" in step for step in found[0][1:])
    found = steps_of(tmp_path / "with", text.replace("optimizer = ", "Plain.has_them = True\noptimizer = "))
    assert all("load_ms" in step and "compute_ms" not in step for step in found[0][1:])


def steps_of(place: Path, text: str) -> list[list[dict]]:
    """Of each rank."""
    return [[event for event in events_in(rank) if event["event"] == "step"] for rank in run(place, text)]
