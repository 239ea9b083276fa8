"""`pipeline`: each host computes some blocks, and micro-batches pass from stage to stage.

    strategy.announce({0: (16, 16, 16, 8)})          the micro-batches that rank 0 reads for the next update
    loss_sum, exchange = yield from strategy.update(images, labels, batch=56, number=0)

The update is that of one process that accumulates the same micro-batches; activations travel instead of gradients.
"""
# torch.distributed.pipelining has fixed schedules of equal stages that receive only when they need data, so a slow link
# idles while they compute.

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.compute.batch_norm_kernels import REMEMBERED, average_running_statistics, estimating
from trainer.compute.models import fill_gradients, gradients_of, has_batch_norm, trainable
from trainer.compute.timer import CpuTimer, InjectedDelay, Timer, covered_ms
from trainer.pipeline.chain import Cuts
from trainer.pipeline.deferred import Done, PipelineUpdate
from trainer.pipeline.late import LateWeights
from trainer.pipeline.paced_stages import PacedStage
from trainer.pipeline.stage import ACTIVATIONS, GRADIENTS, LABELS, LOSSES, Receiver, Sender, StageParts, StageWork
from trainer.pipeline.stage_layout import Layout, MicroBatch
from trainer.shared.stages import in_flight_of_rank
from trainer.strategies.after_backward import allreduce_flat
from trainer.strategies.averaging import ParameterAverage
from trainer.strategies.base import Base, Exchange, refuse_unused
from trainer.strategies.gradient_sum import GradientSum


class Announced(NamedTuple):
    """own: this rank's micro-batches. routes, of_pipeline: micro-batches and samples of its pipeline. judged: on rank
    0, samples of each other rank that sends it a loss.
    """

    own: list[MicroBatch]
    routes: int
    of_pipeline: int
    judged: Mapping[int, int]


class Pipeline(Base):
    """sums: over ranks with the same blocks, or None. group: Gloo, for activations. averages: of weights between
    pipelines that update by themselves; then `sums` stay within this pipeline. late: unless all updates are exact.
    """

    def __init__(
        self,
        stage: StageWork | PacedStage,
        layout: Layout,
        cuts: Cuts,
        group: dist.ProcessGroup,
        sums: GradientSum | None,
        timer: Timer,
        delay: InjectedDelay,
        *,
        in_flight: int,
        averages: ParameterAverage | None = None,
        late: LateWeights | None = None,
        refuses_unused: bool = False,
    ) -> None:
        self.averages, self.late, self.refuses_unused = averages, late, refuses_unused
        self.stage, self.layout, self.cuts, self.group, self.sums = stage, layout, cuts, group, sums
        self.parts = StageParts(layout)
        self.timer, self.delay = timer, delay
        self.device = next(stage.part.parameters()).device
        self.rank = dist.get_rank()
        place = layout.place(self.rank)
        self.pipeline, self.number = place.pipeline, place.stage
        stages = layout.ranks[place.pipeline]
        self.is_first, self.is_last = place.stage == 0, place.stage == len(stages) - 1
        self.lanes = len(stages[place.stage])
        self.in_flight = in_flight_of_rank(in_flight, len(stages), place.stage, self.lanes)
        self.samples = 0
        """Samples of the last update."""
        self.recent = 0.0
        """A decaying sum, like BatchNorm's running statistics."""
        self.news = threading.Condition()
        self.ahead: deque[Announced] = deque()
        """Announced updates."""
        self.early: list[Done] = []
        """Forwards of the next update that are done."""
        before = () if self.is_first else stages[place.stage - 1]
        behind = () if self.is_last else stages[place.stage + 1]
        labels = not (self.is_first and self.is_last)
        self.inputs = self._receivers(before, ACTIVATIONS, self.device)
        self.gradients = self._receivers(behind, GRADIENTS, self.device)
        self.labels = self._receivers(stages[0] if self.is_last and labels else (), LABELS, self.device)
        judges = stages[-1] if 0 in [rank for lanes in stages for rank in lanes] else ()
        told_by = [one for one in judges if one] if self.rank == 0 else []
        self.losses = self._receivers(told_by, LOSSES, torch.device("cpu"))
        self.to_speaker = Sender(group, 0, LOSSES) if self.rank in judges and self.rank else None
        self.to_next = {rank: Sender(group, rank, ACTIVATIONS) for rank in behind}
        self.to_before = {rank: Sender(group, rank, GRADIENTS) for rank in before}
        self.to_last = {rank: Sender(group, rank, LABELS) for rank in (stages[-1] if self.is_first and labels else ())}
        self.judging: Judging | None = None

    def _receivers(self, ranks: Sequence[int], tag: int, device: torch.device) -> dict[int, Receiver]:
        return {rank: Receiver(self.group, rank, tag, self.news, device) for rank in ranks}

    @property
    def preceding(self) -> list[int]:
        """Ranks that send evaluation data to this one."""
        stages = self.layout.ranks[self.pipeline]
        before = () if self.is_first else stages[self.number - 1]
        return [rank for rank in before if self._next_of(rank, self.number - 1) == self.rank]

    @property
    def following(self) -> int | None:
        """The rank that gets evaluation data from this one."""
        return None if self.is_last else self._next_of(self.rank, self.number)

    def judge(self, reader: int) -> int:
        """The rank that evaluates data of `reader`."""
        for number in range(len(self.layout.ranks[self.pipeline]) - 1):
            reader = self._next_of(reader, number)
        return reader

    def _next_of(self, rank: int, number: int) -> int:
        lanes, behind = self.layout.ranks[self.pipeline][number : number + 2]
        return behind[lanes.index(rank) % len(behind)]

    @property
    def model(self) -> nn.Module:
        return self.stage.part

    def outputs(self, network: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
        return outputs(self, network, batches)

    def announce(self, sizes: Mapping[int, Sequence[int]]) -> None:
        """Prepares to receive an update's data. Call in the updates' order, possibly during the one before.

        sizes: micro-batches of each rank that reads samples for this pipeline.
        """
        routes = self.layout.routes(self.pipeline, sizes)
        own = [one for one in routes if one.ranks[self.number] == self.rank]
        for one in own:
            if self.cuts.before is not None:
                self.inputs[one.ranks[self.number - 1]].expect((one.size, *self.cuts.before), self.cuts.dtype)
            if self.cuts.behind is not None:
                self.gradients[one.ranks[self.number + 1]].expect((one.size, *self.cuts.behind), self.cuts.dtype)
            if self.labels:
                self.labels[one.ranks[0]].expect((one.size, *self.cuts.labels.shape), self.cuts.labels.dtype)
        for receiver in self.losses.values():
            receiver.expect((1,), torch.float64)
        judged = {rank: sum(one.size for one in routes if one.ranks[-1] == rank) for rank in self.losses}
        self.ahead.append(Announced(own, len(routes), sum(map(sum, sizes.values())), judged))

    def update(
        self,
        images: Tensor,
        labels: Tensor,
        batch: int,
        number: int,
        following: tuple[Tensor, Tensor] | None = None,
    ) -> Generator[tuple[Tensor, Tensor], Tensor, tuple[Tensor, Exchange]]:
        """Leaves the gradient in .grad. Returns the sum of losses.

        images, labels: of the oldest announced update, on the first stage. number: of the update in the whole run.
        following: images and labels of the next announced update, if late stages may begin it during this one. On the
        last stage yields each micro-batch's inputs and labels, and receives the sum of its losses.
        """
        own, count, of_pipeline, judged = self.ahead.popleft()
        self.samples = sum(one.size for one in own)
        self.recent = REMEMBERED * self.recent + self.samples
        # The last stage is exact: it has no stage behind it to wait for.
        after = self.ahead[0].own if following and not self.is_last else []
        parts = self._parts(own, images, labels) + (self._parts(after, *following) if following else [])
        if self.late:
            self.late.begin(number)
        after = [replace(one, number=count + one.number) for one in after]
        run = PipelineUpdate(self, own, after, parts, of_pipeline if self.averages else batch, number)
        loss_sum, done = yield from run.run()
        if self.late:
            self.late.hand_over()
        early, self.early = self.early, [replace(one, number=one.number - count) for one in done if one.number >= count]
        waits = tuple((one.since, one.begin) for one in done if one.since is not None)
        said = self._said(loss_sum, judged)
        self.delay.pause("sync")
        if self.averages:
            self.averages.count(of_pipeline / self.lanes, of_all=batch)
            self.averages.pause_before_call()
        computed = self.timer.mark()
        held_up_s = 0.0
        if self.sums and trainable(self.model):
            before_s = self.sums.held_up_s
            self._add_up(self.sums)
            held_up_s = self.sums.held_up_s - before_s
        if own and self.refuses_unused and any(weight.grad is None for weight in trainable(self.model)):
            refuse_unused(self.model)
        return loss_sum, Exchange(
            computed,
            held_up_s=held_up_s,
            waits=waits,
            tasks=tuple(done),
            early=tuple(early),
            wire_ms=self._wire_ms(),
            said=said,
        )

    def _add_up(self, sums: GradientSum) -> None:
        """A gradient stays None if no rank has it, as in one process: weight decay would move the weight."""
        weights = trainable(self.model)
        missing = [number for number, weight in enumerate(weights) if weight.grad is None]
        fill_gradients(self.model)  # in a short batch a lane may have no micro-batch
        having = weights[0].new_ones(len(weights), requires_grad=False)
        if missing:
            having[missing] = 0
        allreduce_flat([*gradients_of(self.model), having], sums)
        counts = having.tolist() if missing else []
        for number in missing:
            if not counts[number]:
                weights[number].grad = None

    def _parts(self, own: Sequence[MicroBatch], images: Tensor, labels: Tensor) -> list[tuple[Tensor, Tensor]]:
        """By micro-batch, on the first stage."""
        sizes = [one.size for one in own]
        return list(zip(images.split(sizes), labels.split(sizes), strict=True)) if self.is_first and own else []

    def _wire_ms(self) -> float:
        """Time with a message in transfer."""
        spans = [span for sender in self._senders for span in sender.take_spans()]
        return covered_ms(CpuTimer(), 0.0, spans)

    def tell(self) -> None:
        """Sends the loss of this rank's micro-batches to rank 0, which prints it."""
        # As early as possible, so that it arrives before the last gradient.
        if self.to_speaker:
            self.to_speaker.send(self.stage.total.reshape(1).clone())

    def _said(self, loss_sum: Tensor, judged: Mapping[int, int]) -> tuple[Tensor, int] | None:
        """On rank 0: its pipeline's loss, in transfer to the host, and samples."""
        if self.rank:
            return None
        loss, samples = loss_sum, self.samples * self.is_last
        for rank, receiver in self.losses.items():
            loss, samples = loss + receiver.wait().item(), samples + judged[rank]
        return loss.to("cpu", non_blocking=True), samples

    # ---- averages of parallel pipelines --------------------------------------------------------------------------

    def whole(self) -> nn.Module:
        return self.averages.whole() if self.averages else self.stage.part

    @property
    def keeps_statistics(self) -> bool:
        return self.averages is None or self.averages.keeps_statistics

    def average_statistics(self, network: nn.Module, batches: Iterable[Tensor], *, again: bool = False) -> None:
        """Over ranks with the same blocks, weighted by samples."""
        samples: float = self.recent
        if (again or not self.keeps_statistics) and self._has_statistics(network):
            with torch.no_grad(), estimating(network) as seen:
                pass_on(self, seen, batches)
            samples = seen.samples
        group = self.averages.sums.group if self.averages else self.sums.group if self.sums else None
        if group:
            average_running_statistics(network, group, samples)

    def _has_statistics(self, network: nn.Module) -> bool:
        """On any rank."""
        own = torch.tensor([float(has_batch_norm(network))])
        dist.all_reduce(own, group=self.group)
        return bool(own.item())

    def after_update(self) -> None:
        if self.averages:
            self.averages.after_update()

    def own_state(self) -> dict[str, Tensor]:
        return (self.averages.own_state() if self.averages else {}) | (self.late.own_state() if self.late else {})

    def expect(self, kept: Mapping[str, Tensor]) -> None:
        if self.averages:
            self.averages.expect(kept)
        if self.late:
            self.late.expect(kept)

    def regroup(self, part: float) -> None:
        if self.averages:
            self.averages.regroup(part)

    def settle(self) -> None:
        if self.averages:
            self.averages.settle()
        for sender in [*self._senders, self.to_speaker] if self.to_speaker else self._senders:
            sender.settle()

    @property
    def _senders(self) -> list[Sender]:
        return [*self.to_next.values(), *self.to_before.values(), *self.to_last.values()]


_HEADER = 5
"""Samples of the next batch, 0 at the end; and its reader."""
_PASSED = 6
"""For `pass_on`."""
_JUDGED, _LABELS_JUDGED = 7, 8
"""For `outputs`."""


class Judging:
    """Transfers of evaluations. In the middle of an epoch data of the next update are under way already."""

    def __init__(self, of: Any) -> None:
        readers, is_alone = of.layout.ranks[of.pipeline][0], of.is_first and of.is_last
        judge = of.judge(of.rank) if of.is_first and not is_alone else None
        judged = [one for one in readers if of.judge(one) == of.rank] if of.is_last and not is_alone else []
        self.to_next = None if of.following is None else Sender(of.group, of.following, _JUDGED)
        self.to_judge = None if judge is None else Sender(of.group, judge, _LABELS_JUDGED)
        self.inputs = {rank: Receiver(of.group, rank, _JUDGED, of.news, of.device) for rank in of.preceding}
        self.labels = {rank: Receiver(of.group, rank, _LABELS_JUDGED, of.news, of.device) for rank in judged}

    def settle(self) -> None:
        for sender in filter(None, (self.to_next, self.to_judge)):
            sender.settle()
            sender.take_spans()


@dataclass(frozen=True)
class _Batch:
    inputs: Tensor
    labels: Tensor
    reader: int


def outputs(
    of: Any, part: Callable[[Tensor], Any], batches: Iterable[tuple[Tensor, Tensor]]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Logits and labels on the last stage. batches: on the first stage."""
    dtype = next(of.model.parameters()).dtype
    following = of.following
    judging = of.judging = of.judging or Judging(of)
    for batch in _read(of, judging, batches) if of.is_first else _received(of, judging, dtype):
        output: Any = part(batch.inputs)
        if judging.to_next is None or following is None:
            yield output, batch.labels
            continue
        number = torch.tensor([len(of.cuts.check_output(output, len(batch.inputs))), batch.reader])
        dist.send(number, following, group=of.group, tag=_HEADER)
        judging.to_next.send(output)
    if following is not None:
        dist.send(torch.zeros(2, dtype=torch.int64), following, group=of.group, tag=_HEADER)
    judging.settle()


def pass_on(of: Any, part: Callable[[Tensor], Any], batches: Iterable[Tensor]) -> None:
    """Passes images through all stages between two updates; a collective call."""
    following = of.following
    for inputs in (batch.to(of.device) for batch in batches) if of.is_first else _passed(of):
        output: Any = part(inputs)
        if following is not None:
            of.cuts.check_output(output, len(inputs))
            dist.send(torch.tensor([len(output)]), following, group=of.group, tag=_PASSED)
            dist.send(output.cpu().contiguous(), following, group=of.group, tag=_PASSED)
    if following is not None:
        dist.send(torch.zeros(1, dtype=torch.int64), following, group=of.group, tag=_PASSED)


def _passed(of: Any) -> Iterator[Tensor]:
    dtype = next(of.model.parameters()).dtype
    for source in of.preceding:
        while True:
            samples = torch.empty(1, dtype=torch.int64)
            dist.recv(samples, source, group=of.group, tag=_PASSED)
            if not samples:
                break
            inputs = torch.empty((int(samples), *of.cuts.before), dtype=dtype)
            dist.recv(inputs, source, group=of.group, tag=_PASSED)
            yield inputs.to(of.device)


def _read(of: Any, judging: Judging, batches: Iterable[tuple[Tensor, Tensor]]) -> Iterator[_Batch]:
    for images, labels in batches:
        if judging.to_judge:
            judging.to_judge.send(of.cuts.check_labels(labels, len(images)))
        yield _Batch(images.to(of.device), labels.to(of.device), of.rank)


def _received(of: Any, judging: Judging, dtype: torch.dtype) -> Iterator[_Batch]:
    shape = of.cuts.before or ()
    for source in of.preceding:
        while True:
            header = torch.empty(2, dtype=torch.int64)
            dist.recv(header, source, group=of.group, tag=_HEADER)
            samples, reader = header.tolist()
            if not samples:
                break
            judging.inputs[source].expect((samples, *shape), dtype)
            labels = torch.empty(0, dtype=torch.int64)
            if judging.labels:
                judging.labels[reader].expect((samples, *of.cuts.labels.shape), of.cuts.labels.dtype)
                labels = judging.labels[reader].wait()
            yield _Batch(judging.inputs[source].wait(), labels, reader)
