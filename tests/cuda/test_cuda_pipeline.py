"""A pipeline's stages on GPUs: what crosses a cut goes by pinned memory, which the host reads only when the GPU has
written it. Kernels compute nothing here: whatever crosses a cut holds a number that its host gave it.
"""

from __future__ import annotations

import functools
import itertools
import statistics

import pytest

from tests.cuda.machine import Host, Job, Rank, problems

STEPS, MICRO_BATCHES = 8, 4
MOST_LAUNCHES = 6
"""Of a micro-batch, with its part of the update's."""
LENET = (
    *("--exp", "mnist_lenet", "--data", "synthetic", "--augment", "none", "--eval_every", "0", "--samples", "96"),
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

    from trainer.pipeline import PipelineUpdate, StageRecording, StageWork

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

    def kept(forward, backward):
        """A recording holds its micro-batch's inputs, and on the last stage its labels, until its backward pass."""

        def held(self):
            labels = [self.criterion.labels] if self.criterion else []
            return [tensor.detach().clone().cpu() for tensor in (self.piece.images, *labels)]

        def first(self, inputs):
            output = forward(self, inputs)
            self.given = held(self)
            return output

        def then(self, gradient, use):
            print("slot", "right" if all(map(torch.equal, held(self), self.given)) else "wrong")
            return backward(self, gradient, use)

        return first, then

    PipelineUpdate.run = counted(PipelineUpdate.run)
    StageRecording.forward, StageRecording.backward = kept(StageRecording.forward, StageRecording.backward)
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
    assert output.count("slot right") >= (STEPS - 1) * MICRO_BATCHES
    assert output.count("forward right") == output.count("backward right") >= STEPS * MICRO_BATCHES
    assert not any(rank.rows("end")[0]["counts"]["overwritten"] for rank in ranks)


@pytest.mark.parametrize("way", ["zero bubble", "1f1b", "fp16"])
def test_no_stage_waits_for_all_that_its_gpu_has_to_do(machine, way):
    for rank in played_twice(machine, way)[0]:
        for step in rank.counts(skip=0):
            assert not step["stream_waits"] and not step["device_waits"]


def played_twice(machine, way: str) -> tuple[list[Rank], list[Rank]]:
    """Without and with CUDA graphs, which are recorded while more and more micro-batches are in flight."""
    arguments, hosts = (WAYS | COUNTED)[way]
    off, on = (machine.run(Job((*LENET, *arguments, "--cuda_graph", graph), hosts)) for graph in ("off", "on"))
    assert not (words := problems([*off, *on])), words
    return off, on


def median(rank: Rank, name: str) -> float:
    return statistics.median(step[name] for step in rank.counts(skip=3)[:-1])


COUNTED = {
    "half": (("--fidelity", "half"), (Host(), Host())),
    "late": (("--fidelity", "late", "--late_after", "0.25"), (Host(), Host())),
}
"""`numbered` does not apply: casts compute nothing here, and micro-batches of two updates are in flight."""


@pytest.mark.parametrize("way", ["zero bubble", "1f1b", "fp16", "bf16", "half", "late"])
def test_a_stage_launches_one_graph_for_each_task(machine, way):
    off, on = played_twice(machine, way)
    tasks = 2 if way == "1f1b" else 3
    assert "cuda_graph: micro-batches of 3 samples recorded for 4 in flight" in on[0].output
    for plain, replayed in zip(off, on, strict=True):
        assert (median(plain, "graph_launches"), median(replayed, "graph_launches")) == (0, tasks * MICRO_BATCHES)
        assert not median(replayed, "stream_waits") and not median(replayed, "device_waits")
        assert median(replayed, "copies_to_host") == median(plain, "copies_to_host")
        of_update = median(replayed, "launches") + median(replayed, "graph_launches")
        assert of_update <= MOST_LAUNCHES * MICRO_BATCHES < median(plain, "launches")


@pytest.mark.parametrize("gib", [0.6, 0.8, 1, 1.2, 2])
def test_a_stage_records_what_memory_holds(machine, gib):
    """At 0.55 GiB, a run without graphs ends for lack of memory."""
    larger = {"12": "8192", "96": str(8 * 8192)}
    ranks = machine.run(Job([larger.get(word, word) for word in LENET], (Host(), Host()), {"FAKE_GIB": gib}))
    assert not (words := problems(ranks)), words
    assert len(ranks[0].rows("step")) == STEPS
    assert "out of memory" not in ranks[0].output
    if gib == 0.6:
        assert "cuda_graph: off from now on, a recording and a plain pass take" in ranks[0].output
    if gib == 2:
        assert "cuda_graph: micro-batches of 2048 samples recorded for 4 in flight" in ranks[0].output


def test_tasks_are_timed_by_the_gpu(played):
    """Its host has queued one long before the GPU begins it: eight kernels forward."""
    first, _ = played("zero bubble")
    (event,) = first.rows("tasks")
    tasks = [row for row in event["tasks"] if row[1] is not None]
    assert all(row[2] >= before[3] for before, row in itertools.pairwise(tasks))
    assert [row[3] - row[2] for row in tasks if row[0] == "forward"] == pytest.approx([4] * MICRO_BATCHES, rel=0.02)
