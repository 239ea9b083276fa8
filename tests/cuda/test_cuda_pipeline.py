"""A pipeline's stages on GPUs: what crosses a cut goes by pinned memory, which the host reads only when the GPU has
written it. Kernels compute nothing here: whatever crosses a cut holds a number that its host gave it.
"""

from __future__ import annotations

import functools
import itertools

import pytest

from tests.cuda.machine import Host, Job, Rank, problems

STEPS, MICRO_BATCHES = 4, 4
LENET = (
    *("--exp", "mnist_lenet", "--data", "synthetic", "--augment", "none", "--eval_every", "0", "--samples", "48"),
    *("--batch", "12", "--steps", str(STEPS), "--strategy", "pipeline", "--stages", "host-0:0,host-1:1"),
    *("--accumulate", str(MICRO_BATCHES)),
)
SLOW = {"FAKE_KERNEL_US": 500}
"""The GPU lags far behind its host, who launches a kernel in 18 us."""
WAYS: dict[str, tuple[tuple[str, ...], tuple[Host, ...]]] = {
    "zero bubble": ((), (Host(), Host())),
    "1f1b": (("--schedule", "1f1b"), (Host(), Host())),
    "fp16": (("--amp", "fp16"), (Host(), Host())),
    "bf16": (("--amp", "bf16"), (Host(), Host())),
    "two lanes": ((), (Host(2), Host())),
    "two lanes over Gloo": (("--backend", "gloo"), (Host(2), Host())),
    "a CPU behind": ((), (Host(), Host(device="cpu"))),
}


def numbered() -> None:
    """What a stage hands on is its micro-batch's number in the run; whether it gets such is printed."""
    import torch

    from trainer.pipeline import PipelineUpdate, StageWork

    def counted(run):
        def of_update(self):
            self.of.stage.before = getattr(self.of.stage, "before", 0) + 2 * MICRO_BATCHES
            return run(self)

        return of_update

    def named(task):
        def of_micro_batch(self, one, *others):
            self.of.stage.number = self.of.stage.before + one.number
            return task(self, one, *others)

        return of_micro_batch

    def checked(task):
        def of_numbers(self, given, *others):
            name = "backward" if task.__name__ == "backward" else "forward"
            if given is not None and not (name == "forward" and self.reads):
                found = given.detach().cpu().unique().tolist()
                print(name, "right" if found == [self.number] else f"wrong: {found}, not {self.number}")
            result = task(self, given, *others)
            if result is None or not result.dim():  # a loss
                return result
            return torch.full(result.shape, float(self.number), dtype=result.dtype).to(result.device)

        return of_numbers

    PipelineUpdate.run = counted(PipelineUpdate.run)
    PipelineUpdate._forward, PipelineUpdate._backward = named(PipelineUpdate._forward), named(PipelineUpdate._backward)
    StageWork.forward, StageWork.judge, StageWork.backward = map(
        checked, (StageWork.forward, StageWork.judge, StageWork.backward)
    )


@pytest.fixture(scope="module")
def played(machine):
    """played(way): the ranks of that job, which is played once."""

    def play(way: str) -> list[Rank]:
        arguments, hosts = WAYS[way]
        return machine.run(Job((*LENET, *arguments), hosts, SLOW, prelude=f"{__name__}:{numbered.__name__}"))

    return functools.cache(play)


@pytest.mark.parametrize("way", WAYS)
def test_what_a_stage_gets_is_what_the_other_has_computed(played, way):
    ranks = played(way)
    assert not (words := problems(ranks)), words
    output = "".join(rank.output for rank in ranks)
    assert "wrong" not in output
    assert output.count("forward right") == output.count("backward right") >= STEPS * MICRO_BATCHES
    assert not any(rank.rows("end")[0]["counts"]["overwritten"] for rank in ranks)


@pytest.mark.parametrize("way", ["zero bubble", "1f1b", "fp16"])
def test_no_stage_waits_for_all_that_its_gpu_has_to_do(played, way):
    """But where the numbers above are written and read, once for each message: see `numbered`."""
    for rank in played(way):
        for step in rank.counts(skip=0):
            assert step["stream_waits"] <= 2 * MICRO_BATCHES and not step["device_waits"]


def test_tasks_are_timed_by_the_gpu(played):
    """Its host has queued one long before the GPU begins it: eight kernels forward."""
    first, _ = played("zero bubble")
    (event,) = first.rows("tasks")
    tasks = [row for row in event["tasks"] if row[1] is not None]
    assert all(row[2] >= before[3] for before, row in itertools.pairwise(tasks))
    assert [row[3] - row[2] for row in tasks if row[0] == "forward"] == pytest.approx([4] * MICRO_BATCHES, rel=0.02)
