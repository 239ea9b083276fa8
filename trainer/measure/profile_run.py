"""Measures this rank alone, by batch size, and the network's blocks.

    python -m trainer --exp resnet152_cifar --profile_s 15

Times updates without synchronisation at batches of 2, 4, 8, ..., fits fixed_ms + sample_ms * samples to the largest,
and finds the largest batch that fits into memory. Ranks of one host are measured together.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.compute.arithmetic import (
    arranged,
    build_precision,
    choose_arithmetic,
    devices_of_all_ranks,
    use_arithmetic,
)
from trainer.compute.graphs import WARM, replayable, why_not
from trainer.compute.models import build_model, gradient_bytes, stages_of
from trainer.compute.timer import Mark, timer_for
from trainer.data.loading import agree_on_facts, choose_loader, resident_bytes
from trainer.measure.block_times import Cut, Lap, blocks_on_paper, micro_batches, time_blocks
from trainer.measure.ladder import FIRST, Ladder, Measuring, again, climb, made, median, record_of
from trainer.measure.updates import Subject, Trainee
from trainer.paced.standin import StandIn, StandInOptimizer, most_samples
from trainer.pipeline.chain import Block, survey
from trainer.pipeline.stage import Criterion, Part, StageWork
from trainer.pipeline.stage_graphs import replay_stage
from trainer.ranks.agreement import together
from trainer.ranks.process_group import choose_device, join, leave, use_threads
from trainer.ranks.rank_info import RankInfo
from trainer.setup.assemble import start_fields
from trainer.setup.rank_network import stand_in
from trainer.setup.weights import build_optimizer
from trainer.shared.experiments import DataSet
from trainer.shared.metrics import MetricsWriter
from trainer.shared.pace import Pace
from trainer.shared.settings import Settings

HELD = 4
"""Times the bytes of all gradients: the most that a strategy keeps besides gradients and momentum."""
# local: start, sent weights, weight change and velocity.

OF_BLOCKS = 0.2
"""The part of `profile_s` for the blocks."""


def profile(settings: Settings, info: RankInfo, metrics: MetricsWriter) -> None:
    """Raises TrainError for a failure that a user can fix."""
    use_threads(info)
    device = torch.device("cpu") if info.pace else choose_device(settings.device, settings.backend, info)
    if device.type == "cuda":
        metrics.peak_memory_bytes = lambda: torch.cuda.max_memory_allocated(device)
    torch.manual_seed(settings.seed)
    group = join(info, settings.backend, device)
    facts = agree_on_facts(settings, info)
    everyone = devices_of_all_ranks(device)
    with together(info.node):
        settings = choose_arithmetic(choose_loader(settings, facts, info, device), device, everyone)
        use_arithmetic(settings)
        precision = build_precision(settings.amp, device, None)  # ranks of a host update independently
        model, room = _subject(settings, facts, info, metrics, device)
        model, images = arranged(model, settings), resident_bytes(facts) if settings.loader == "resident" else 0
        held = held_beside(model, device, images)
    untimed = 1
    if settings.cuda_graph != "off" and not why_not(device, settings, model):
        replayable(model, say=lambda line: None, gave_up=_say_without_graphs)
        untimed = 1 + WARM
    start = start_fields(settings, info, device, group, (settings.model, model))
    metrics.write("start", **start, batch_per_rank=None, batch_norm_groups=None, work=None, steps=0)
    optimizer = at_rest(build_optimizer(settings, model))
    subject = Subject(model, optimizer, precision, facts, device, timer_for(device), room, held)
    network = blocks_on_paper(settings.model, facts.shape, facts.classes)
    if info.rank == 0:
        print(f"{settings.exp}: measuring {info.node} alone, {settings.profile_s:g} s", flush=True)
    dist.barrier()
    with together(info.node):
        ladder = made(climb(2 * settings.batch, (1 - OF_BLOCKS) * settings.profile_s, untimed=untimed), subject.update)
        metrics.lateness = ladder.lateness
        whole = {**record_of(ladder), **made(again(ladder, settings.profile_s), subject.update)}
    with together(info.node):  # together again
        blocks = _blocks(settings, subject, ladder)
        metrics.write("profile", **whole, blocks=blocks, batch=settings.batch, network=network)
    leave()
    metrics.end("succeeded")


def _subject(
    settings: Settings, facts: DataSet, info: RankInfo, metrics: MetricsWriter, device: torch.device
) -> tuple[nn.Module, int | None]:
    """The network, and the samples that a simulated GPU's memory holds (None: no limit)."""
    if not info.pace:
        return build_model(settings.model, facts.shape, facts.classes).to(device), None
    pace = steady(info.pace)
    model = stand_in(settings, facts, info, metrics, pace, share=FIRST)
    return model, most_samples(model.anatomy, pace)


def at_rest(optimizer: torch.optim.Optimizer | StandInOptimizer) -> torch.optim.Optimizer | StandInOptimizer:
    """Sets learning rates to 0."""
    # At a run's rate without warm-up, the first gradient of two samples takes a fresh ResNet-152's weights to 1e8 and
    # more, and then to NaN; a CUDA graph's replay then never equals a plain pass.
    for group in optimizer.param_groups:
        if "lr" in group:  # a custom optimiser may have no rate, or a tensor
            group["lr"] = 0 * group["lr"]
    return optimizer


def _say_without_graphs(why: str) -> None:
    print(f"cuda_graph: larger batches are measured without it, {why}", flush=True)


def held_beside(model: nn.Module, device: torch.device, more_bytes: int = 0) -> Tensor:
    """Occupies the GPU memory that a run needs besides training."""
    held_bytes = HELD * gradient_bytes(model) + more_bytes if device.type == "cuda" else 0
    return torch.empty(held_bytes, dtype=torch.uint8, device=device)


def _blocks(settings: Settings, subject: Subject, ladder: Ladder) -> dict[str, Any] | None:
    """None if paced, or not a chain of blocks."""
    if isinstance(subject.model, StandIn):
        return None
    if not stages_of(subject.model):
        print(f"{settings.model}: not a chain of blocks, so they are not measured one by one", flush=True)
        return None
    facts, budget_s = subject.facts, OF_BLOCKS * settings.profile_s
    blocks = survey(settings.model, facts.shape, facts.classes)
    return made(record_blocks(subject, blocks, ladder, settings, budget_s), subject.update)


def steady(pace: Pace) -> Pace:
    """Without changes of speed during a run."""
    return dataclasses.replace(pace, slowdown=())


# Times a network's blocks on the device, as stages of a pipeline compute them.
#
#     passes = Passes(trainee)
#     passes.take(16, (0, 1, 2))              a lap per stretch: blocks 0, 1, and all others
#
# Marks follow each other without waiting, so the stretches add up to one pass.

MARKS = 50
"""Pairs of marks to measure noise."""


class Passes:
    """The network can take no more whole updates: its weight gradients are delayed. replays: by CUDA graphs."""

    def __init__(self, trainee: Trainee, *, replays: bool = False) -> None:
        self.trainee, self.blocks, self.replays = trainee, stages_of(trainee.model), replays
        self.samples, self.cut = 0, cast(Cut, ())
        self.stages: list[StageWork] = []
        trainee.optimizer.zero_grad(set_to_none=True)
        if graphs := vars(trainee.model).get("graphs"):
            graphs.recorded.clear()  # their memory is needed

    def noise_ms(self) -> float:
        """Between adjacent marks."""
        timer = self.trainee.timer
        marks = [timer.mark() for _ in range(MARKS + 1)]
        timer.wait()
        return statistics.median(timer.ms(first, second) for first, second in itertools.pairwise(marks))

    def take(self, samples: int, cut: Cut) -> list[Lap]:
        """Raises NoMemory."""
        if (samples, cut) != (self.samples, self.cut):
            for stage in self.stages if self.replays else ():
                stage.graphs = None
                del stage.part.graphs  # frees memory now: the next stages need it
            self.samples, self.cut, self.stages = samples, cut, self._stages(cut)
            for _ in range(WARM + 1 if self.replays else 0):
                self.trainee.attempt(samples, lambda: self._take(samples))
        return self.trainee.attempt(samples, lambda: self._take(samples))

    def _stages(self, cut: Cut) -> list[StageWork]:
        ends = (*cut[1:], len(self.blocks))
        parts = [self.blocks[first:end] for first, end in zip(cut, ends, strict=True)]
        stages = [
            StageWork(Part(nn.Sequential(*blocks), blocks), self.trainee.precision, reads=number == 0, splits=True)
            for number, blocks in enumerate(parts)
        ]
        for stage in stages if self.replays else ():
            replay_stage(stage, 1, say=lambda line: None, gave_up=_say_without_graphs)
        return stages

    def _take(self, samples: int) -> list[Lap]:
        timer = self.trainee.timer
        for stage in self.stages:
            stage.begin([samples])
        passed, targets = self.trainee.batch(samples)
        last = len(self.stages) - 1
        forward = [timer.mark()]
        for number, stage in enumerate(self.stages):
            passed = stage.forward(passed, 0.0) if number < last else self._judged(stage, passed, targets)
            forward.append(timer.mark())
        gradient: Tensor | None = None
        back: list[tuple[Mark, Mark, Mark]] = []
        begin = forward[-1]
        for stage in reversed(self.stages):
            gradient = stage.backward(gradient, samples, 0.0)
            of_inputs = timer.mark()
            stage.weights()
            back.append((begin, of_inputs, timer.mark()))
            begin = back[-1][2]
        timer.wait()
        return [
            Lap(timer.ms(*ahead), timer.ms(behind[0], behind[1]), timer.ms(behind[1], behind[2]))
            for ahead, behind in zip(itertools.pairwise(forward), reversed(back), strict=True)
        ]

    def _judged(self, stage: StageWork, inputs: Tensor, targets: Tensor) -> Tensor:
        # Like a run's last stage, with its loss.
        inputs = stage.enter(inputs)
        with stage.precision.autocast():
            loss_sum: Tensor = stage.part(inputs, Criterion(self.trainee.loss_sum, targets))
        stage.judge(inputs, loss_sum, 0.0)
        return loss_sum


def record_blocks(
    trainee: Trainee, blocks: Sequence[Block], ladder: Ladder, settings: Settings, budget_s: float
) -> Measuring[dict[str, Any] | None]:
    """None if memory is too small. Measures the whole network again just before its blocks, for the same load."""
    sizes = micro_batches({size: times.step_ms for size, times in ladder.times.items()}, settings.batch, budget_s)
    yield sizes[-1]
    whole = yield from median(sizes[-1], budget_s / 4)
    replays = settings.cuda_graph != "off" and not why_not(trainee.device, settings, trainee.model)
    passes = Passes(trainee, replays=replays)
    found = time_blocks(passes.take, blocks, sizes, passes.noise_ms(), budget_s)
    return found.record(sizes[-1], whole.step_ms - whole.optim_ms) if found else None
