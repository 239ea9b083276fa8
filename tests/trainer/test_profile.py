"""A rank alone: the sizes that are tried, the line through them, and the record of a real one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import weakref

import pytest
import torch
from torch import nn

from orchestrator.planning import Measurement
from tests.support.trainer_ranks import ROOT, trained
from trainer.compute.arithmetic import Full
from trainer.compute.timer import CpuTimer
from trainer.measure import Ladder, NoMemory, Subject, Times, again, at_rest, climb, made, record_of
from trainer.shared import DATA_SETS, TrainError


class Rank:
    """Takes updates of a known length on a clock of its own."""

    def __init__(self, fixed_ms=5.0, sample_ms=2.0, floor_ms=0.0, room=10**9):
        self.fixed_ms, self.sample_ms, self.floor_ms, self.room = fixed_ms, sample_ms, floor_ms, room
        self.now_s, self.tried = 0.0, []

    def update(self, samples):
        self.tried.append(samples)
        if samples > self.room:
            raise NoMemory
        step_ms = max(self.floor_ms, self.fixed_ms + self.sample_ms * samples)
        self.now_s += step_ms / 1000
        return Times(step_ms, step_ms / 3, 0.1)

    def climb(self, limit=512, budget_s=15.0):
        return made(climb(limit, budget_s, now=lambda: self.now_s), self.update)


def test_the_batch_doubles_up_to_the_limit_and_the_line_is_found():
    ladder = Rank().climb()
    found = record_of(ladder)
    assert found["samples"] == [2, 4, 8, 16, 32, 64, 128, 256, 512]
    assert (found["fixed_ms"], found["sample_ms"]) == (pytest.approx(5), pytest.approx(2))
    assert (found["cap"], found["largest"]) == (None, 512)


def test_the_time_is_kept_and_two_sizes_are_measured_whatever_they_take():
    rank = Rank(sample_ms=10)
    rank.climb(budget_s=15)
    assert 5 < rank.now_s < 15.5
    slow = Rank(fixed_ms=0, sample_ms=4000)
    assert list(slow.climb(budget_s=1).times) == [2, 4]


@pytest.mark.parametrize("room", [3, 100, 128, 300, 511])
def test_the_most_that_fits_is_found_to_a_sixteenth(room):
    rank = Rank(sample_ms=0.01, room=room)
    cap = rank.climb().cap
    assert room - max(1, room // 16) <= cap <= room
    assert max(rank.climb().times) <= room


def test_a_rank_without_memory_for_two_samples_says_so():
    with pytest.raises(TrainError, match="out of memory: not even 2 samples"):
        Rank(room=1).climb()


def test_a_size_is_measured_again_at_the_end_so_that_a_card_which_slows_down_is_seen():
    rank = Rank()
    ladder = rank.climb()
    found = made(again(ladder, 15.0, now=lambda: rank.now_s), rank.update)
    assert found == {"again_samples": 32, "again_ms": 69.0}
    rank.sample_ms = 3.0  # its power cap
    assert made(again(ladder, 15.0, now=lambda: rank.now_s), rank.update) == {"again_samples": 32, "again_ms": 101.0}
    one = Ladder({2: Times(9.0, 3.0, 0.1)}, 2)
    assert made(again(one, 15.0, now=lambda: rank.now_s), rank.update)["again_samples"] == 2


class Activations:
    """What a network holds in its forward pass."""


class Greedy(nn.Module):
    """A network that fails as CUDA does, in the midst of its forward pass, where a batch has no room; or where what an
    earlier pass held is still there.
    """

    def __init__(self, room, words):
        super().__init__()
        self.room, self.words, self.layer = room, words, nn.Linear(3 * 32 * 32, 10)
        self.held, self.alive = [], 0

    def forward(self, images):
        self.alive += sum(activations() is not None for activations in self.held)
        activations = Activations()
        self.held = [weakref.ref(activations)]
        if len(images) > self.room or self.alive:
            raise RuntimeError(self.words)
        return self.layer(images.flatten(1))


NO_MEMORY = [
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 5.93 GiB",
    "GET was unable to find an engine to execute this computation",
    "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
]


def greedy(room, words=NO_MEMORY[0]):
    model = Greedy(room, words)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    device, facts = torch.device("cpu"), DATA_SETS["cifar10"]
    return Subject(model, optimizer, Full(), facts, device, CpuTimer(), None, torch.empty(0))


@pytest.mark.parametrize("words", NO_MEMORY)
def test_after_a_batch_that_does_not_fit_nothing_of_it_is_held_and_smaller_ones_are_tried(words):
    subject = greedy(room=41, words=words)
    ladder = made(climb(limit=256, budget_s=15, now=lambda: 0.0), subject.update)
    assert subject.model.alive == 0
    assert (list(ladder.times), ladder.cap) == ([2, 4, 8, 16, 32], 40)


def test_without_memory_for_two_samples_the_devices_own_words_are_said():
    with pytest.raises(TrainError, match=r"not even 2 samples fit \(CUDA out of memory\. Tried to allocate 2\.00 GiB"):
        made(climb(limit=256, budget_s=0.5), greedy(room=1).update)


def test_another_failure_is_no_lack_of_memory():
    with pytest.raises(RuntimeError, match="illegal memory access"):
        made(climb(256, 0.5), greedy(room=1, words="CUDA error: an illegal memory access was encountered").update)


def test_small_batches_that_leave_a_gpu_idle_do_not_bend_the_line():
    found = record_of(Rank(fixed_ms=2, sample_ms=1, floor_ms=30).climb())
    assert (found["fixed_ms"], found["sample_ms"]) == (pytest.approx(2, rel=0.01), pytest.approx(1, rel=0.01))


def test_a_rank_that_is_flat_over_all_sizes_still_gives_no_share_for_nothing():
    found = record_of(Ladder({2: Times(10, 3, 1), 4: Times(10, 3, 1)}, None))
    assert found["fixed_ms"] == pytest.approx(10)
    assert found["sample_ms"] > 0


class PacedRank(Rank):
    """late: how late an update of so many samples is that begins at so many seconds, as a part of it."""

    def __init__(self, late, **options):
        super().__init__(**options)
        self.late = late

    def update(self, samples):
        late = self.late(samples, self.now_s)
        times = super().update(samples)
        self.now_s += late * times.step_ms / 1000
        return Times(times.step_ms * (1 + late), times.forward_ms, times.optim_ms, late)


def late_at(late):
    """Always the same. late: by samples."""
    return PacedRank(lambda samples, now_s: late.get(samples, 0.0)).climb(limit=256)


def test_sizes_at_which_a_paced_rank_was_late_are_left_out_of_its_line():
    ladder = late_at({2: 20, 4: 9, 8: 3, 64: 0.5})
    found = record_of(ladder)
    assert found["samples"] == [2, 4, 8, 16, 32, 64, 128, 256]
    assert found["lateness"] == [20, 9, 3, 0, 0, 0.5, 0, 0]
    assert (found["fixed_ms"], found["sample_ms"]) == (pytest.approx(5), pytest.approx(2))
    assert ladder.lateness() == 0
    assert record_of(late_at({256: 0.5}))["largest"] == 128


def test_a_line_needs_two_sizes_that_were_in_time():
    late = dict.fromkeys((2, 4, 8, 16, 32, 64), 0.02)
    assert late_at(late).lateness() == 0
    assert late_at({**late, 128: 0.009}).lateness() == 0.009
    assert late_at({**late, 128: 0.011}).lateness() == 0.02


def test_what_is_left_of_the_time_goes_to_sizes_that_a_busy_moment_made_late():
    busy = PacedRank(lambda samples, now_s: 9 if now_s < 2.5 or samples < 8 else 0)  # 16 is reached after 1.6 s
    ladder = busy.climb(limit=16, budget_s=4.9)
    assert sorted(ladder.in_time) == [8, 16]
    assert record_of(ladder)["sample_ms"] == pytest.approx(2)
    assert busy.now_s < 4.9
    hopeless = PacedRank(lambda samples, now_s: 400)
    assert not hopeless.climb(limit=16, budget_s=4).kept_pace
    assert len(hopeless.tried) < 20


def measured(tmp_path, *arguments, paced=None):
    """The profile record of a real rank."""
    pace = {"ORCH_PACED": json.dumps(paced)} if paced else {}
    (events,) = trained(tmp_path, ["--exp", "mnist_lenet", "--profile_s", "1.5", *arguments], of_ranks=[pace])
    assert [event["event"] for event in events] == ["start", "profile", "end"]
    return events[1]


def measured_in_calm(tmp_path, is_right, *arguments, **options):
    """The first of three profiles that is right: other work on this machine may disturb one, a mistake is in all."""
    for _ in range(3):
        (tmp_path / "0.jsonl").unlink(missing_ok=True)
        found = measured(tmp_path, *arguments, **options)
        if is_right(found):
            break
    return found


def test_a_paced_rank_is_found_to_be_as_fast_as_its_pace_whatever_changes_that_has_planned(tmp_path):
    state_bytes = 3 * 4 * 44_426
    paced = {"samples_per_s": 1000, "fixed_ms": 4, "memory_bytes": state_bytes + 2**21}

    def is_right(found):  # with the change a sample would take 3 ms; how near it comes is the benchmarks' to say
        return 0.8 < found["sample_ms"] < 2 and 1 < found["fixed_ms"] < 10

    changing = {**paced, "slowdown": [{"at_step": 1, "factor": 3}]}
    found = measured_in_calm(tmp_path, is_right, "--batch", "256", paced=changing)
    assert is_right(found), found
    of_pace = [ms / (4 + samples) for samples, ms in zip(found["samples"], found["step_ms"], strict=True)]
    assert min(of_pace) > 0.95
    assert of_pace[-1] < 2
    assert found["cap"] and found["cap"] < 256
    assert found["again_samples"] in found["samples"] and found["again_ms"] > found["again_samples"]
    assert found["blocks"] is None


LOOKING = """
import sys, torch
from trainer.measure import profile_run as profiling
from trainer.__main__ import main

class Seen(profiling.Subject):
    def __init__(self, model, *others):
        super().__init__(model, *others)
        before = [weight.detach().clone() for weight in model.parameters()]
        def leave():
            alike = all(map(torch.equal, before, model.parameters()))
            print("as they were" if alike else "others", flush=True)
            left()
        left, profiling.leave = profiling.leave, leave

profiling.Subject = Seen
main(sys.argv[1:])
"""


def test_measuring_leaves_the_weights_as_they_are_whatever_the_learning_rate(tmp_path):
    """NaN is no arithmetic that a run has, and no replay of a CUDA graph would equal its plain pass."""
    arguments = ["--exp", "mnist_lenet", "--profile_s", "0.5", "--batch", "4", "--device", "cpu", "--lr", "1000"]
    environment = {**os.environ, "ORCH_METRICS": str(tmp_path / "{rank}.jsonl")}
    command = [sys.executable, "-c", LOOKING, *arguments]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "as they were"


def test_an_optimiser_of_ones_own_need_have_no_learning_rate():
    rule = torch.optim.Optimizer([{"params": [torch.zeros(2)]}, {"params": [torch.zeros(3)], "lr": 0.1}], {})
    assert [group.get("lr") for group in at_rest(rule).param_groups] == [None, 0]


def test_a_rank_that_computes_is_measured_up_to_twice_the_batch(tmp_path):
    def is_right(found):
        whole = found["samples"] == [2, 4, 8, 16, 32]  # no further, and nearer only where the time was up
        return whole and found["step_ms"][-1] > found["step_ms"][0] > found["optim_ms"] > 0

    found = measured_in_calm(tmp_path, is_right, "--batch", "16", "--device", "cpu")
    assert is_right(found), found
    blocks = found["blocks"]
    assert blocks["samples"] in ([2, 4, 8], [2, 4])  # as time allowed
    assert blocks["stretches"] == 2
    assert Measurement.model_validate(found).blocks.count == 2
    assert all(fixed_ms + sample_ms > 0 for fixed_ms, sample_ms in blocks["forward"])
    assert blocks["of_whole"] > 0
