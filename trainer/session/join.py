"""The entry point of a user's own script: `ranks = join(batch=256, epochs=10)`, then `run = ranks.prepare(...)`."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import default_collate

from trainer.compute.arithmetic import (
    Full,
    arranged,
    build_precision,
    choose_arithmetic,
    devices_of_all_ranks,
    use_arithmetic,
)
from trainer.compute.buffers import drop_gradients
from trainer.compute.timer import Mark, Timer, timer_for
from trainer.data.augment import moved, tensors_of
from trainer.data.script_data import Collate
from trainer.measure.block_times import Visited
from trainer.measure.ladder import Ladder, Measuring, again, climb, record_of
from trainer.measure.profile_run import OF_BLOCKS, at_rest, held_beside, record_blocks
from trainer.measure.updates import NoMemory, Times, Trainee
from trainer.pipeline.chain import Block, survey_of
from trainer.ranks.agreement import together
from trainer.ranks.process_group import leave
from trainer.ranks.rank_info import read_rank_info
from trainer.session.session import Ending, Forward, Judge, Session
from trainer.setup.assemble import JoinedRank, join_group, prepare, start_fields
from trainer.setup.training_task import AnyOptimizer, CustomScript
from trainer.shared.config import parse_settings
from trainer.shared.errors import TrainError
from trainer.shared.experiments import SCRIPT
from trainer.shared.metrics import MetricsWriter
from trainer.shared.pace import no_pace_for
from trainer.shared.setting_fields import SettingsError
from trainer.shared.settings import Settings
from trainer.training.loss_sum import Weight, checked

ASKED = "ORCH_SETTINGS"
"""Settings of the command line, a JSON object of texts."""


def join(**settings: Any) -> Ranks:
    """Joins the other ranks of the job, or none without torchrun. Ends the process with one line if that fails.

    settings: defaults by the names of `orch run --set`, mostly `batch` (samples per update over all ranks), `epochs`,
    `steps`, `seed`; the command line overrides them.
    """
    ending = Ending()
    if getattr(multiprocessing.current_process(), "_inheriting", False):  # set by multiprocessing
        raise TrainError(
            "a process that loads samples has run the script again: put the script's work into a function, and "
            'call it under `if __name__ == "__main__":` (or leave multiprocessing\'s start method at fork)'
        )
    info = read_rank_info()
    ending.metrics = metrics = MetricsWriter(info.metrics_path)
    try:
        asked = parse_settings(SCRIPT, asked_for(os.environ), settings)
    except SettingsError as error:
        raise TrainError("\n".join(error.mistakes)) from error
    assert isinstance(asked, Settings)  # noqa: S101 - for the type checker
    return Ranks(join_group(asked, info, metrics), ending)


def asked_for(environment: Mapping[str, str]) -> dict[str, str]:
    """Raises TrainError."""
    try:
        found = json.loads(environment.get(ASKED) or "{}")
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise TrainError(f'{ASKED} is no JSON object like {{"strategy": "ddp", "batch": "256"}}')
    batch = {"batch": environment["ORCH_BATCH"]} if "ORCH_BATCH" in environment else {}  # from `orch run --batch`
    return {**batch, **{str(name): str(value) for name, value in found.items()}}


class Ranks:
    """Before `prepare`."""

    def __init__(self, joined: JoinedRank, ending: Ending) -> None:
        self._joined, self._ending = joined, ending

    @property
    def rank(self) -> int:
        return self._joined.info.rank

    @property
    def world_size(self) -> int:
        return self._joined.info.world_size

    @property
    def device(self) -> torch.device:
        return self._joined.device

    @property
    def settings(self) -> Settings:
        """As asked for."""
        return self._joined.settings

    def prepare(
        self, model: nn.Module, optimizer: AnyOptimizer, dataset: Any, collate: Collate = default_collate
    ) -> Session | Rehearsal:
        """A run over all ranks, which begin with rank 0's weights; with `profile_s` a loop that only measures this
        host.

        model: any network; strategy=pipeline cuts an nn.Sequential or torchvision's ResNets. optimizer: for its
        weights, or a function that makes one from parameters. dataset: has len(dataset) and dataset[index]. collate:
        makes a batch from a list of samples; tensors have the samples along their first dimension.
        """
        own = CustomScript(model, optimizer, dataset, collate)
        if self.settings.profile_s:
            return Rehearsal(self._joined, own, self._ending)
        return Session(prepare(self._joined, own), self._ending)


LOADED = 64
"""Larger batches repeat these samples: loading is not measured."""
FILLED = 0.9
"""Part of a GPU's memory that a batch may fill: running out of memory would end the script."""


class Rehearsal:
    """Replaces `Session` to measure this host alone (`orch profile -- train.py`)."""

    # The script's loop makes updates with growing batches of its first samples, loaded in advance. The process ends in
    # the middle of the loop.

    loss: float | None = None
    updates, is_over = 0, False

    def __init__(self, joined: JoinedRank, own: CustomScript, ending: Ending | None = None) -> None:
        self._ending = ending
        info, device = joined.info, joined.device
        everyone = devices_of_all_ranks(device)
        with together(info.node):
            if info.pace:
                raise no_pace_for(own.name)
            settings = choose_arithmetic(joined.settings, device, everyone)
            use_arithmetic(settings)
            self._precision = build_precision(settings.amp, device, None)
            network = arranged(own.network().to(device), settings)
            self._optimizer: Any = at_rest(own.optimizer(settings, network))
        start = start_fields(settings, info, device, joined.group, (own.name, network))
        joined.metrics.write("start", **start, batch_per_rank=None, batch_norm_groups=None, work=None, steps=0)
        self.model = Forward(lambda: network, self._precision, settings.amp)
        self._joined, self._settings, self._own, self._timer = joined, settings, own, timer_for(device)
        self._network, self._samples, self._cut = network, own.first(LOADED), _blocks_of(own)
        self._visited = Visited(network, may_cut=self._cut is not None)
        self._held = held_beside(network, device)
        self._marks: list[Mark] = []
        self._peaks: dict[int, int] = {}
        if info.rank == 0:
            print(f"{own.name}: measuring {info.node} alone, {settings.profile_s:g} s", flush=True)
        dist.barrier()

    def epochs(self) -> Iterator[int]:
        yield 0

    def batches(self) -> Iterator[Any]:
        """Ends the process at the end."""
        measuring = self._measured()
        samples = next(measuring)
        while True:
            if not fits(samples, self._peaks, self._memory_bytes()):
                samples = measuring.throw(NoMemory())
                continue
            yield self._begun(samples)
            samples = measuring.send(self._times(samples))

    def _measured(self) -> Measuring[None]:
        budget_s = self._settings.profile_s
        ladder = yield from climb(2 * self._settings.batch, (1 - OF_BLOCKS) * budget_s)
        more = yield from again(ladder, budget_s)
        network = self._visited.blocks(next(iter(ladder.times)))
        blocks = (yield from self._blocks(ladder, OF_BLOCKS * budget_s)) if network else None
        of_script = {"batch": self._settings.batch, "network": network, "blocks": blocks}
        self._joined.metrics.write("profile", **record_of(ladder), **more, **of_script)
        leave()
        self._joined.metrics.end("succeeded")
        if self._ending:
            self._ending.complete = self.end
        raise SystemExit(0)

    def _blocks(self, ladder: Ladder, budget_s: float) -> Measuring[dict[str, Any] | None]:
        if self._cut is None:
            return None
        network = ByBlocks(
            self._network, self._optimizer, self._precision, self._joined.device, self._timer, self._batch
        )
        return (yield from record_blocks(network, self._cut, ladder, self._settings, budget_s))

    def _batch(self, samples: int) -> Any:
        chosen = [self._samples[index % len(self._samples)] for index in range(samples)]
        return moved(self._own.collate(chosen), self._joined.device)

    def _begun(self, samples: int) -> Any:
        batch = self._batch(samples)
        if self._joined.device.type == "cuda":
            if samples not in self._peaks:
                torch.cuda.empty_cache()  # like the beginning of a run of that size
            torch.cuda.reset_peak_memory_stats(self._joined.device)
        self._timer.wait()
        self._marks = [self._timer.mark()]
        drop_gradients(self._optimizer)
        return batch

    def step(self, loss_sum: Tensor, weight: Weight | None = None) -> None:
        self.backward(loss_sum, weight)
        self.update()

    def backward(self, loss_sum: Tensor, weight: Weight | None = None) -> None:
        loss = checked(loss_sum)
        if len(self._marks) != 1:
            raise TrainError("call step exactly once per batch, in the body of `for ... in batches()`")
        self._marks.append(self._timer.mark())
        self._precision.scaled(loss / self._settings.batch).backward()
        self._precision.unscale(self._optimizer)
        self._marks.append(self._timer.mark())

    def update(self) -> None:
        self._precision.step(self._optimizer)
        self._marks.append(self._timer.mark())

    def _times(self, samples: int) -> Times:
        if len(self._marks) != 4:
            raise TrainError("a batch's loss is missing: call step(loss_sum) for each batch in the loop's body")
        self._timer.wait()
        begin, forwarded, computed, end = self._marks
        if self._joined.device.type == "cuda":
            self._peaks[samples] = torch.cuda.max_memory_allocated(self._joined.device)
        ms = self._timer.ms
        return Times(ms(begin, end), ms(begin, forwarded), ms(computed, end))

    def _memory_bytes(self) -> int | None:
        if self._joined.device.type != "cuda":
            return None
        free, _ = torch.cuda.mem_get_info(self._joined.device)
        return int(free) + torch.cuda.memory_reserved(self._joined.device)

    @property
    def optimizer(self) -> Any:
        return self._optimizer

    def after_update(self, function: Callable[[], object]) -> None:
        """Ignored, like `keep`: a profile changes no rates or weights."""

    def keep(self, **things: Any) -> None:
        """Ignored: a profile writes no checkpoints."""

    def evaluate(self, judge: Judge, dataset: Any) -> Mapping[str, float]:
        # NaN for every name.
        return defaultdict(lambda: math.nan)

    def end(self) -> None:
        """Nothing is left to do."""


def _blocks_of(own: CustomScript) -> list[Block] | None:
    try:
        own.labels()
        return survey_of(own.skeleton(), own.example(), own.name)
    except TrainError:
        return None


class ByBlocks(Trainee):
    """Without the script's loop; the sum of outputs replaces the loss."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        precision: Full,
        device: torch.device,
        timer: Timer,
        draw: Callable[[int], Any],
    ) -> None:
        super().__init__(model, optimizer, precision, device, timer)
        self._draw = draw

    def batch(self, samples: int) -> tuple[Tensor, Tensor]:
        inputs = tensors_of(self._draw(samples))[0]
        return inputs, inputs

    def loss_sum(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs.sum()


def fits(samples: int, peaks: Mapping[int, int], memory_bytes: int | None) -> bool:
    """Whether a batch is expected to fit. peaks: bytes by samples."""
    if memory_bytes is None or samples in peaks or len(peaks) < 2:
        return True
    fewer, more = sorted(peaks)[-2:]
    a_sample = max(0.0, (peaks[more] - peaks[fewer]) / (more - fewer))
    return peaks[more] + a_sample * (samples - more) <= FILLED * memory_bytes
