"""Sets up a pipeline: cuts the network, splits the batch over the first stage's ranks, and builds stages and groups."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.compute.arithmetic import DTYPES as COMPUTED_IN
from trainer.compute.arithmetic import Full
from trainer.compute.compiler import Executor
from trainer.compute.microbatches import MicroBatches
from trainer.compute.models import skeleton_of, stages_of, ties_of, trainable
from trainer.compute.timer import InjectedDelay, Timer
from trainer.data.sample_stream import SampleStream
from trainer.paced.standin import LearningPart, PacedPart, check_memory
from trainer.paced.stopwatch import StageClock
from trainer.pipeline.chain import Block, Cuts, Form, balanced, survey, survey_of
from trainer.pipeline.late import LateWeights
from trainer.pipeline.paced_stages import LearningStage, PacedStage
from trainer.pipeline.pipeline_strategy import Pipeline
from trainer.pipeline.stage import Part, StageWork, part_of
from trainer.pipeline.stage_layout import Layout
from trainer.ranks.agreement import gather_lines, together
from trainer.ranks.process_group import timeout
from trainer.ranks.rank_info import RankInfo
from trainer.setup.rank_network import check_batch_norm, check_pairs, keep_records, refuse_arithmetic
from trainer.setup.training_task import TrainingTask
from trainer.shared.errors import TrainError
from trainer.shared.experiments import CHOSEN, DATA_SETS
from trainer.shared.metrics import MetricsWriter
from trainer.shared.pace import Pace
from trainer.shared.settings import Settings
from trainer.shared.shares import Speed, scale_shares
from trainer.shared.stages import ALONE, PER_STAGE, Stage, in_flight_of_rank, parse_stages, stage_names
from trainer.strategies.averaging import ParameterAverage, averaged
from trainer.strategies.base import share_initial_state
from trainer.strategies.gradient_sum import DTYPES as SENT_IN
from trainer.strategies.gradient_sum import GradientSum

# A network that learns within a simulated network's time and bytes (`paced: {like: EXP}`). The run's stages are the
# simulated network's blocks; the learning network is cut in similar proportions, and its activations are padded.

Network = tuple[str, tuple[int, int, int], int]
"""Its name, image shape, and number of classes."""


@dataclass(frozen=True)
class Learning:
    """The network that learns, with its blocks by rank. exp: the simulated experiment."""

    exp: str
    chain: tuple[Block, ...]
    layout: Layout

    def before(self, rank: int) -> tuple[int, ...] | None:
        """The input shape of the rank's part per sample; None on the first stage."""
        first = self.layout.stage(rank).first
        return self.chain[first - 1].behind if first else None


def like_of_all(info: RankInfo) -> str:
    """The experiment that the ranks simulate, or "". A collective call. Raises TrainError if ranks differ."""
    likes = gather_lines(info.pace.like if info.pace else "")
    if len(set(likes)) > 1:
        named = ", ".join(f"rank {rank}: {like or 'the run itself'}" for rank, like in enumerate(likes))
        raise TrainError(f"paced: ranks simulate different networks ({named}); give all the same `like`")
    return likes[0]


def chain_like(exp: str) -> list[Block]:
    return survey(*_network_of(exp))


def weights_like(exp: str, stage: Stage) -> list[Tensor]:
    """Shapes of a stage's weights, on the meta device."""
    return list(part_of(skeleton_of(*_network_of(exp)), stage).parameters())


def _network_of(exp: str) -> Network:
    facts = DATA_SETS[CHOSEN[exp]["data"]]
    return CHOSEN[exp]["model"], facts.shape, facts.classes


def learning_cut(exp: str, own: Sequence[Block], like: Sequence[Block], layout: Layout) -> Learning:
    """own: of the learning network. like, layout: simulated.

    Raises ValueError for more stages than blocks, or more numbers to send than the simulated network sends.
    """
    if list(own) == list(like):
        return Learning(exp, tuple(own), layout)
    stages = layout.pipelines[0]  # all pipelines are cut alike
    parts = {str(number): sum(like[block].work for block in blocks_of(stage)) for number, stage in enumerate(stages)}
    (cut,) = balanced(own, parts)
    for learns, timed in zip(cut[:-1], stages, strict=False):
        _check_width(own[learns.last], learns.last, like[timed.last])
    pipelines = tuple(
        tuple(replace(stage, first=found.first, last=found.last) for stage, found in zip(of, cut, strict=True))
        for of in layout.pipelines
    )
    return Learning(exp, tuple(own), Layout(pipelines, layout.ranks))


def blocks_of(stage: Stage) -> range:
    return range(stage.first, stage.last + 1)


def _check_width(own: Block, number: int, like: Block) -> None:
    numbers, room = math.prod(own.behind), math.prod(like.behind)
    if numbers > room:
        raise ValueError(
            f"block {number} of the network that learns sends {numbers:,} numbers per sample, but the simulated "
            f"network only {room:,} at its cut: cut that network elsewhere, or train a smaller network"
        )


def as_sent(shape: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """Per sample, flattened, so that two networks can share it."""
    return None if shape is None else (math.prod(shape),)


@dataclass(frozen=True)
class PipelinePlan:
    """Equal on all ranks."""

    chain: tuple[Block, ...]
    layout: Layout
    dtype: torch.dtype
    """The network's weights have it."""
    labels: Form
    learning: Learning | None = None
    """The run's network, if chain and layout are simulated."""

    @property
    def micro_batches(self) -> int:
        """Default per rank of the first stage."""
        return PER_STAGE * len(self.layout.ranks[0])

    def blocks(self, rank: int) -> tuple[Block, ...]:
        own = self.layout.stage(rank)
        return self.chain[own.first : own.last + 1]

    def held(self, rank: int) -> Stage:
        """The rank's part of the run's network."""
        return (self.learning or self).layout.stage(rank)

    def work(self, rank: int) -> float:
        """The rank's part of the work, 0..1."""
        return sum(block.work for block in self.blocks(rank))


def plan_pipeline(
    settings: Settings, training_task: TrainingTask, info: RankInfo, speeds: Sequence[Speed | None]
) -> PipelinePlan:
    """speeds: by rank, or None. A collective call. Raises TrainError if stages and ranks do not match."""
    nodes, like = gather_lines(info.node), like_of_all(info)
    with together(info.node):
        skeleton, labels = training_task.skeleton(), training_task.labels()
        own = survey_of(skeleton, training_task.example(), training_task.name)
        chain = chain_like(like) if like else own
        try:
            pipelines = parse_stages(settings.stages) or balanced(chain, _speeds_of_stages(nodes, speeds))
            if settings.fidelity == "local" and len(pipelines) == 1:
                raise ValueError(ALONE)
            layout = Layout.of(pipelines, nodes, len(chain))
            if settings.fidelity == "local" and not like:
                _check_averaged(stages_of(skeleton), pipelines[0])
            learning = learning_cut(like, own, chain, layout) if like else None
            return PipelinePlan(tuple(chain), layout, next(skeleton.parameters()).dtype, labels, learning)
        except ValueError as error:
            tied = ties_of(skeleton) if len(chain) < len(set(stage_names(nodes))) and not like else ""
            raise TrainError(f"stages: {error}" + (f"; {tied}" if tied else "")) from error
    raise AssertionError  # `together` has raised


def _check_averaged(blocks: Sequence[nn.Module], stages: Sequence[Stage]) -> None:
    """Raises ValueError for a stage with nothing to average."""
    for stage in stages:
        if not any(trainable(block) for block in blocks[stage.first : stage.last + 1]):
            raise ValueError(f"{stage.node!r} would hold frozen blocks only, but fidelity=local averages weights")


def _speeds_of_stages(nodes: Sequence[str], speeds: Sequence[Speed | None]) -> dict[str, float]:
    """Samples per millisecond by host (by rank on a single host); equal if one is unknown."""
    names = stage_names(nodes)
    known = [1 / speed.sample_ms for speed in speeds if speed]
    found = dict.fromkeys(names, 0.0)
    for rank, name in enumerate(names):
        found[name] += known[rank] if len(known) == len(names) else 1.0
    return found


def shares_of_readers(plan: PipelinePlan, shares: Sequence[int], batch: int) -> tuple[int, ...]:
    """Splits the batch over the ranks of first stages, in proportion to their shares."""
    readers = plan.layout.first_ranks
    wanted = [shares[rank] for rank in readers]
    of_readers = dict(zip(readers, scale_shares(wanted if sum(wanted) else [1] * len(wanted), batch), strict=True))
    return tuple(of_readers.get(rank, 0) for rank in range(len(shares)))


def build_pipeline(
    settings: Settings,
    plan: PipelinePlan,
    part: nn.Module,
    precision: Full,
    group: dist.ProcessGroup,
    timer: Timer,
    delay: InjectedDelay,
    executor: Executor,
    updates: int,
) -> Pipeline:
    """A collective call. Ranks with the same blocks begin with equal weights. updates: of the whole run."""
    layout, rank = plan.layout, dist.get_rank()
    cuts, splits, sums = cuts_of(settings, plan, rank), settings.schedule == "zero_bubble", None
    stage: StageWork | PacedStage
    if isinstance(part, LearningPart):
        stage = LearningStage(part, precision, reads=cuts.before is None, splits=splits, sent_as=cuts.dtype)
    elif isinstance(part, PacedPart):
        stage = PacedStage(part, cuts, splits=splits)
    else:
        stage = StageWork(part, precision, reads=cuts.before is None, splits=splits, sent_as=cuts.dtype)
    averages, is_local = None, settings.fidelity == "local"
    for held in zip(*layout.ranks, strict=True):
        if peers := _group_of([rank for lanes in held for rank in lanes], group):
            share_initial_state(part, peers)
            if is_local:
                averages = build_averages(settings, part, peers, timer, delay, executor)
            else:
                sums = GradientSum(peers, delay=delay, executor=executor)  # its relay would need all ranks
        for lanes in held if is_local else ():
            if own := _group_of(lanes, group):
                sums = GradientSum(own, delay=delay, executor=executor)
    links = cast("dist.ProcessGroup", dist.new_group(backend="gloo", timeout=timeout()))
    late = late_weights(part, settings.exact_updates(updates)) if is_late(settings, cuts) else None
    return Pipeline(
        stage,
        layout,
        cuts,
        links,
        sums,
        timer,
        delay,
        in_flight=settings.in_flight,
        averages=averages,
        late=late,
        refuses_unused=settings.unused_parameters == "refuse" and not isinstance(part, (LearningPart, PacedPart)),
    )


def is_late(settings: Settings, cuts: Cuts) -> bool:
    """The last stage is exact."""
    return settings.fidelity == "late" and cuts.behind is not None


def late_weights(part: nn.Module, first: int) -> LateWeights | None:
    """None without arithmetic. first: late update."""
    if isinstance(part, PacedPart) and not isinstance(part, LearningPart):
        return None
    # A learning part's other weights only take time.
    of_filler = set(map(id, part.weights)) if isinstance(part, LearningPart) else set()
    return LateWeights({name: one for name, one in part.named_parameters() if id(one) not in of_filler}, first)


def _group_of(ranks: Sequence[int], like: dist.ProcessGroup) -> dist.ProcessGroup | None:
    """A collective call. None outside the group, and for a single rank."""
    if len(ranks) == 1:
        return None
    made = dist.new_group(sorted(ranks), backend=dist.get_backend(like), timeout=timeout())
    return cast("dist.ProcessGroup", made) if dist.get_rank() in ranks else None


def build_averages(
    settings: Settings,
    part: nn.Module,
    group: dist.ProcessGroup,
    timer: Timer,
    delay: InjectedDelay,
    executor: Executor,
) -> ParameterAverage:
    """group: ranks of all pipelines with the same blocks."""
    sums = GradientSum(group, dtype=SENT_IN[settings.sent_as], delay=delay, executor=executor)
    return averaged(settings, part, sums, timer, delay)


def cuts_of(settings: Settings, plan: PipelinePlan, rank: int) -> Cuts:
    own, last = plan.layout.stage(rank), len(plan.chain) - 1
    sent = SENT_IN[settings.sent_as] or COMPUTED_IN.get(settings.amp, plan.dtype)
    before = plan.chain[own.first - 1].behind if own.first else None
    behind = plan.chain[own.last].behind if own.last < last else None
    if plan.learning:
        before, behind = as_sent(before), as_sent(behind)
    return Cuts(before, behind, sent, plan.labels)


def own_sizes(plan: PipelinePlan, micro_batches: MicroBatches, shares: Sequence[int], rank: int) -> list[int]:
    """Micro-batches that pass this rank."""
    place = plan.layout.place(rank)
    routes = plan.layout.routes(place.pipeline, plan.layout.entering(place.pipeline, micro_batches, shares))
    return [micro_batch.size for micro_batch in routes if micro_batch.ranks[place.stage] == rank]


def real_part(
    training_task: TrainingTask, plan: PipelinePlan, rank: int, micro_batches: MicroBatches, stream: SampleStream
) -> Part:
    """Raises TrainError if BatchNorm cannot use the micro-batches."""
    model = training_task.network()
    check_batch_norm(model, stream, may_sync=False)
    check_pairs(model, micro_batches, stream.shares)
    part = part_of(model, plan.held(rank))
    count = len(own_sizes(plan, micro_batches, stream.shares, rank))
    for module in part.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.momentum and count:
            # Its statistics move with each micro-batch; together as much as in one whole batch.
            module.momentum = 1 - (1 - module.momentum) ** (1 / count)
    return part


def paced_clock(
    settings: Settings, plan: PipelinePlan, info: RankInfo, pace: Pace, metrics: MetricsWriter, sizes: Sequence[int]
) -> StageClock:
    """sizes: micro-batches that pass this rank. Raises TrainError if the simulated GPU lacks memory, or a setting needs
    real arithmetic.
    """
    refuse_arithmetic(settings)
    own = plan.layout.stage(info.rank)
    needed = memory_of_stage(settings, plan, info.rank, sizes)
    check_memory(
        pace,
        needed,
        f"blocks {own.first} to {own.last} with {max(sizes, default=0)} samples per micro-batch",
        "give its host fewer blocks, or use a larger accumulate, a smaller in_flight, or schedule=1f1b",
    )
    clock = StageClock(
        pace,
        plan.work(info.rank),
        sum(block.kernels for block in plan.blocks(info.rank)),
        seed=(settings.seed, info.rank),
    )
    keep_records(metrics, settings, clock, needed)
    return clock


def paced_part(plan: PipelinePlan, training_task: TrainingTask, rank: int, clock: StageClock) -> PacedPart:
    return PacedPart(list(part_of(training_task.skeleton(), plan.layout.stage(rank)).parameters()), clock)


def learning_part(plan: PipelinePlan, learning: Learning, rank: int, part: Part, clock: StageClock) -> LearningPart:
    """part: the rank's part of the learning network."""
    own, last = plan.layout.stage(rank), len(plan.chain) - 1
    sent = None if own.last == last else math.prod(plan.chain[own.last].behind)
    return LearningPart(weights_like(learning.exp, own), clock, part, learning.before(rank), sent)


def memory_of_stage(settings: Settings, plan: PipelinePlan, rank: int, sizes: Sequence[int]) -> int:
    """Bytes of weights, gradients, the optimiser's state, and activations of all micro-batches in flight. A late stage
    also has two copies of its weights, and micro-batches of two updates.
    """
    own, place = plan.layout.stage(rank), plan.layout.place(rank)
    lanes = plan.layout.ranks[place.pipeline]
    in_flight = in_flight_of_rank(settings.in_flight, len(lanes), place.stage, len(lanes[place.stage]))
    blocks = plan.blocks(rank)
    entering = math.prod(plan.chain[own.first - 1].behind) if own.first else 0
    a_sample = 4 * entering + sum(block.activation_bytes for block in blocks)
    copies, held = settings.states, sorted(sizes, reverse=True)
    if settings.fidelity == "late" and place.stage < len(lanes) - 1:
        copies, held = copies + 2, sorted([*held, *held], reverse=True)
    state = sum(copies * block.weight_bytes + block.buffer_bytes for block in blocks)
    return state + a_sample * sum(held[:in_flight])
