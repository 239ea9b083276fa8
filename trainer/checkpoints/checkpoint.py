"""Saves and restores everything that a run needs to continue, one file per checkpoint.

    keeper = CheckpointKeeper(run)                 rank 0 writes, the other ranks send it their own state
    progress = keeper.resume()
    keeper.save(progress)                          on every rank, after an update

With the same world size, shares and settings, a resumed run on CPUs is bit-identical to an uninterrupted run. (ddp over
three or more ranks sums its first update in another order.) Otherwise the samples stay the same and training continues
from the mean weights and BatchNorm statistics, and rank 0's other buffers.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.checkpoints import kept_state
from trainer.checkpoints.file import (
    BUFFERS,
    SCHEMA,
    Checkpoint,
    Copies,
    forget_older,
    name_of,
    newest,
    open_folder,
    parse,
    read_file,
    reason,
    write_file,
)
from trainer.checkpoints.kept_state import (
    Kept,
    State,
    by_others,
    fill,
    for_other_ranks,
    kinds_of,
    mistake_of,
    numbered,
    restore,
    state_of,
)
from trainer.compute.models import running_statistics
from trainer.ranks.agreement import gather_lines, together
from trainer.shared.config import begun_with, names_of
from trainer.shared.errors import TrainError
from trainer.shared.settings import Settings
from trainer.training.rates import Progress, RandomState, random_state
from trainer.training.run import shared_network, trained_network

if TYPE_CHECKING:
    from trainer.training.run import Run


_SAME = names_of(lambda each: each.resumes_same)


class CheckpointKeeper:
    """Raises TrainError if this kind of run cannot have checkpoints."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.folder = folder_of(run.settings)
        self.every = run.settings.checkpoint_every
        if self.every or run.settings.resume:
            check_kind(run)
            with together(run.info.node):
                self.data = run.training_task.mark(run.settings) if run.info.rank == 0 else ""
        self.copies = Copies(run)
        self.kept = Kept()

    def is_due(self, updates: int) -> bool:
        """updates: since the beginning of the run."""
        return self.every > 0 and (updates % self.every == 0 or updates == self.run.last_step)

    # ---- writing ----------------------------------------------------------------------------------------------

    def save(self, progress: Progress) -> None:
        """A collective call; its time counts into no step. The copy on a second host is made during later updates."""
        began_s, written = time.perf_counter(), None
        self.copies.settle()
        content = self._collect(progress)
        if content is not None:
            updates = self._updates(progress)
            path = self.folder / name_of(updates)
            size, failure = 0, self._not_finite(content)
            try:
                if not failure:
                    size = write_file(path, content)
                    written = path
                    forget_older(self.folder)
            except (OSError, RuntimeError) as error:  # torch wraps errors of the disk
                failure = reason(error)
            if failure:
                sys.stderr.write(f"cannot write checkpoint {path}: {failure}; training goes on\n")
            write_ms = round((time.perf_counter() - began_s) * 1000, 3)
            fields = {"step": updates - 1, "name": path.name, "bytes": size, "write_ms": write_ms}
            self.run.metrics.write("checkpoint", **fields, failure=failure)
        self.copies.begin(written)
        dist.barrier()

    def _not_finite(self, content: Checkpoint) -> str | None:
        """Why this checkpoint is not written, or None."""
        network = kept_state.skeleton(self.run) if self.run.strategy.parts else self.run.model
        for name in (_plain(name) for name, _ in network.named_parameters()):
            if not content.model[name].isfinite().all():
                return f"{name} holds NaN or infinity; the last finite one is kept"
        return None

    def _collect(self, progress: Progress) -> Checkpoint | None:
        """The content on rank 0, None elsewhere."""
        run = self.run
        names = gather_lines(_name(run))
        sums = gather(torch.tensor([progress.loss_sum, progress.samples, progress.recent], dtype=torch.float64))
        own = self._gathered(self._own_tensors() | self._buffers_unlike_those_kept())
        state = random_state()
        random, kept = gather(state.torch), gather(self.kept.packed(state.others))
        with trained_network(run, progress, own_weights=True) as network:
            model, remembered = self._whole(network, self._state())
        ema: dict[str, Tensor] = {}
        if run.ema:
            with shared_network(run, progress) as network:
                ema, _ = self._whole(network, {})
        if run.info.rank != 0:
            return None
        return Checkpoint(
            schema=SCHEMA,
            settings=dataclasses.asdict(run.settings),
            data=self.data,
            train_samples=run.training_task.train_samples,
            world_size=run.info.world_size,
            names=names,
            shares=list(run.stream.shares),
            epoch=progress.epoch,
            step=progress.step,
            model=model,
            optimizer={
                kind: [None if one is None else one.cpu() for one in of_kind] for kind, of_kind in remembered.items()
            },
            scaler=scaler.state_dict() if (scaler := _scaler(run)) else {},
            sums=[tensor.tolist() for tensor in sums],
            own=own,
            random=random,
            ema=ema,
            kept=kept,
        )

    def _state(self) -> dict[str, list[Tensor | None]]:
        assert isinstance(self.run.optimizer, torch.optim.Optimizer)  # noqa: S101 - `check_kind` has seen to it
        return state_of(self.run.optimizer, self.run.model)

    def _whole(
        self, network: nn.Module, state: State
    ) -> tuple[dict[str, Tensor], Mapping[str, Sequence[Tensor | None]]]:
        """The state of the whole network and of its optimiser, on rank 0."""
        of_ranks = self.run.strategy.parts
        if of_ranks is None:
            seen = network.state_dict() if self.run.info.rank == 0 else {}
            return {_plain(name): tensor.detach().cpu().clone() for name, tensor in seen.items()}, state
        whole = kept_state.skeleton(self.run)
        own = kept_state.to_be_kept(self.run, network, of_ranks, whole, state)
        kept = self._gathered(own)
        if self.run.info.rank:
            return {}, {}
        model, remembered = kept_state.joined(kept, of_ranks, whole)
        return {_plain(name): tensor for name, tensor in model.items()}, remembered

    def _gathered(self, own: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        """Every rank's tensors on rank 0. [] elsewhere."""
        described = gather(describe(own))
        flats = gather(flat_bytes(own.values()))
        return [apart(flat, described_as(words)) for flat, words in zip(flats, described, strict=True)]

    def _own_tensors(self) -> dict[str, Tensor]:
        """State that differs between ranks, by name: KIND or KIND.WHICH. (Optimiser: if weights are averaged.)"""
        run = self.run
        own = run.strategy.own_state()
        if not run.strategy.parts:
            # Ranks that share a part of the network resume with the mean of their BatchNorm statistics, which `model`
            # holds. Training does not read them, and evaluation uses only their mean, which does not depend on each
            # rank's start.
            own |= numbered("statistics", running_statistics(run.model))
        own |= run.precision.own_scale()
        if run.settings.strategy == "parameter_average" or run.settings.fidelity == "local":
            for kind, tensors in self._state().items():
                own |= numbered(f"optimizer.{kind}", [tensor for tensor in tensors if tensor is not None])
        return {name: tensor for name, tensor in own.items() if tensor.numel()}

    def _own_buffers(self) -> dict[str, Tensor]:
        """Buffers that are never averaged (queues, codebooks, counters, masks)."""
        run = self.run
        averaged = set(map(id, running_statistics(run.model)))
        state = run.model.state_dict(keep_vars=True)
        return {
            BUFFERS + _plain(name): state[name]
            for name, buffer in run.model.named_buffers(remove_duplicate=False)
            if name in state and id(buffer) not in averaged and buffer.numel()
        }

    def _buffers_unlike_those_kept(self) -> dict[str, Tensor]:
        """Buffers that differ from `model` in the checkpoint. Most are constant and equal on all ranks."""
        run, own = self.run, self._own_buffers()
        digests = {name: hashlib.sha256(flat_bytes([one]).numpy().tobytes()).hexdigest() for name, one in own.items()}
        kept: dict[str, str] = json.loads(broadcast(json.dumps(digests).encode() if run.info.rank == 0 else b""))
        if of_ranks := run.strategy.parts:
            named = {name.removeprefix(BUFFERS): one for name, one in own.items()}
            of_rank = of_ranks.kept(run.info.rank, named, kept_state.skeleton(run))
            kept |= {name: digests[name] for name in own if name.removeprefix(BUFFERS) in of_rank}
        return {name: one for name, one in own.items() if kept.get(name) != digests[name]}

    # ---- going on ---------------------------------------------------------------------------------------------

    def resume(self) -> Progress:
        """Rank 0 reads and broadcasts. Raises the same TrainError on every rank."""
        info, source, saved, content = self.run.info, None, None, b""
        passed_over: dict[Path, str] = {}
        with together(info.node):
            if info.rank == 0:
                if source := source_of(self.run.settings):
                    saved, content, passed_over = read_file(source)
                    for line in passed_over.values():
                        self.run.console.say(f"{line}; trying the one before it")
                    self._check(saved)
                if self.every:
                    open_folder(self.folder, self._updates(saved) if saved else 0, passed_over)
        content = broadcast(content)
        if not content:
            return Progress()
        names = gather_lines(_name(self.run))
        with together(info.node):
            saved = saved or parse(content, "the checkpoint")
            if saved.names == names:
                self._take_shares(saved)
            return self._restore(saved, source)

    def _take_shares(self, saved: Checkpoint) -> None:
        """Restores the shares that the earlier run had measured (`shares=auto`)."""
        run, before = self.run, self.run.stream.shares
        if not run.rebalancer or saved.settings.get("shares") != "auto" or saved.shares == list(before):
            return
        if sum(saved.shares) != run.stream.batch or min(saved.shares) < 0:
            return  # not written by this trainer
        run.rebalancer.take(saved.shares)
        updates = self._updates(saved)
        run.metrics.write("rebalance", step=updates, shares=saved.shares, before=list(before), spread=0.0)

    def _restore(self, saved: Checkpoint, source: Path | None) -> Progress:
        run, rank, optimizer = self.run, self.run.info.rank, self.run.optimizer
        assert isinstance(optimizer, torch.optim.Optimizer)  # noqa: S101 - `check_kind` has seen to it
        if of_ranks := run.strategy.parts:
            whole = kept_state.skeleton(run)
            kept_state.take(run.model, of_ranks.held(rank, _named_as(whole, saved.model), whole))
            restore(optimizer, run.model, kept_state.own_state(run, of_ranks, saved.optimizer))
        else:
            run.model.load_state_dict(_named_as(run.model, saved.model))
            restore(optimizer, run.model, saved.optimizer)
        if run.ema:
            averaged = of_ranks.held(rank, _named_as(whole, saved.ema), whole) if of_ranks else saved.ema
            run.ema.restart(_named_as(run.model, averaged))
        if saved.scaler and (scaler := _scaler(run)):
            scaler.load_state_dict(saved.scaler)
        same = saved.world_size == run.info.world_size and saved.shares == list(run.stream.shares)
        same_parts = same and saved.settings.get("stages", "") == run.settings.stages
        own = saved.own[rank] if same_parts else for_other_ranks(saved, run.info.world_size)
        if of_ranks and not same_parts:
            own = {}  # state of a whole network, or of other parts
        run.strategy.expect(own)
        tensors = self._own_tensors() | self._own_buffers()
        if not saved.kept:  # an older file counts all floating-point buffers as statistics
            tensors |= numbered("statistics", [buffer for buffer in run.model.buffers() if buffer.is_floating_point()])
        change = fill(tensors, own)
        run.precision.take_scale(own)
        if not same_parts:
            run.strategy.regroup(run.stream.shares[rank] / run.stream.batch)
        how = "" if same else by_others(saved)
        others = self.kept.unpack(saved.kept[rank if same_parts else 0] if saved.kept else None)
        if run.ema and not saved.ema:
            how += "; ema: not in the checkpoint, started fresh"
        run.console.say(f"going on from {source} after {self._updates(saved)} updates{how}{change}")
        if same:
            loss_sum, samples, recent = saved.sums[rank]
            random = RandomState(saved.random[rank], others)
            return Progress(saved.epoch, saved.step, loss_sum, int(samples), recent, random)
        # All ranks have the same statistics now: there is nothing to average yet.
        loss_sum, samples = (sum(of_rank[part] for of_rank in saved.sums) if rank == 0 else 0.0 for part in (0, 1))
        return Progress(saved.epoch, saved.step, loss_sum, int(samples))

    def _check(self, saved: Checkpoint) -> None:
        """Raises TrainError if the checkpoint does not fit this run. Rank 0 only."""
        now = dataclasses.asdict(self.run.settings)
        added = begun_with(self.run.settings.exp)
        before = {name: saved.settings.get(name, added[name]) for name in _SAME}  # older versions have fewer settings
        other = [name for name in _SAME if before[name] != now[name]]
        if other:
            changed = ", ".join(f"{name}={before[name]} (now {now[name]})" for name in other)
            raise TrainError(
                f"the checkpoint is of a run with {changed}: resume with the same settings, or start again without it"
            )
        samples = self.run.training_task.train_samples
        if (saved.data, saved.train_samples) != (self.data, samples):
            differ = f"{saved.train_samples} training samples, not {samples}"
            differ = differ if saved.train_samples != samples else f"also {samples} training samples, but different"
            raise TrainError(f"the checkpoint is of other data: {differ}; restore the data, or start again without it")
        updates = self._updates(saved)
        if updates > self.run.last_step:
            raise TrainError(
                f"the checkpoint is at update {updates}, this run ends at {self.run.last_step}: raise epochs or steps"
            )
        network = kept_state.skeleton(self.run) if self.run.strategy.parts else self.run.model
        wanted = _shapes(network.state_dict())
        if wanted != _shapes(saved.model) or (saved.ema and wanted != _shapes(saved.ema)):
            raise TrainError(f"the checkpoint holds another network than {now['model']}: start again without it")
        shapes = [parameter.shape for parameter in network.parameters()]
        assert isinstance(self.run.optimizer, torch.optim.Optimizer)  # noqa: S101 - as above
        if mistake := mistake_of(self.run.optimizer, saved.optimizer, shapes):
            raise TrainError(f"the optimiser state in the checkpoint {mistake}: start again without it")

    def _updates(self, of: Progress | Checkpoint) -> int:
        return of.epoch * self.run.stream.steps + of.step


# ---------------------------------------------------------------------------------------------------------------------


def _shapes(state: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    return {_plain(name): tensor.shape for name, tensor in state.items()}


def _plain(name: str) -> str:
    """The name of a weight without torch.compile's prefix."""
    return name.replace("_orig_mod.", "")


def _named_as(network: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    own = {_plain(name): name for name in network.state_dict()}
    return {own[_plain(name)]: tensor for name, tensor in state.items()}


def _name(run: Run) -> str:
    """Identifies this rank, even if the order of ranks changes."""
    return f"{run.info.node}:{run.info.local_rank}"


def _scaler(run: Run) -> Any:
    """torch's gradient scaler, or None if there is no loss scale."""
    return getattr(run.precision, "scaler", None)


def folder_of(settings: Settings) -> Path:
    """The folder of the setting, otherwise of the job, otherwise `./checkpoints`."""
    named = settings.checkpoint_dir or os.environ.get("ORCH_CHECKPOINTS") or "checkpoints"
    return Path(named).expanduser().absolute()


def source_of(settings: Settings) -> Path | None:
    """The checkpoint or folder to resume from: the setting's; after a restart by torchrun, or by the job's hosts
    (`--retries` with `--detach`), this job's.
    """
    before = {os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), os.environ.get("ORCH_ATTEMPT", "0")} - {"0"}
    if before and settings.checkpoint_every and newest(folder_of(settings)):
        return folder_of(settings)
    return Path(settings.resume).expanduser().absolute() if settings.resume else None


def check_kind(run: Run) -> None:
    """Raises TrainError if this kind of run can have no checkpoints."""
    if run.settings.strategy == "fsdp":
        raise TrainError("checkpoint_every, resume: fsdp keeps the optimiser in pieces; use another strategy for these")
    if not run.learns or run.info.pace:
        raise TrainError("checkpoint_every, resume: a run with paced ranks trains no weights that could be kept")
    if kinds_of(run.optimizer) is None:
        raise TrainError(
            "checkpoint_every, resume: checkpoints keep the state of SGD, Adam and AdamW only, not that of "
            f"{type(run.optimizer).__name__}; leave these settings out, or use one of these three"
        )


# Exchanges checkpoint bytes between ranks over Gloo.

_CHUNK = 1 << 26


def gather(own: Tensor) -> list[Tensor]:
    """Every rank's tensor on rank 0; lengths may differ. [] on other ranks."""
    own = own.cpu()
    lengths = [torch.zeros(1, dtype=torch.long) for _ in range(dist.get_world_size())]
    dist.all_gather(lengths, torch.tensor([own.numel()]))
    longest = max(int(length) for length in lengths)
    padded = torch.cat([own, own.new_zeros(longest - own.numel())])
    found = [torch.empty_like(padded) for _ in lengths] if dist.get_rank() == 0 else None
    dist.gather(padded, found)
    return [tensor[: int(length)].clone() for tensor, length in zip(found or (), lengths, strict=False)]


def broadcast(content: bytes) -> bytes:
    length = torch.tensor([len(content)])
    dist.broadcast(length, src=0)
    whole = torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
    if dist.get_rank() != 0:
        whole = torch.empty(int(length), dtype=torch.uint8)
    for part in whole.split(_CHUNK) if len(whole) else ():
        dist.broadcast(part, src=0)
    return content or whole.numpy().tobytes()


def flat_bytes(tensors: Iterable[Tensor]) -> Tensor:
    none = torch.empty(0, dtype=torch.uint8)
    return torch.cat([none, *(tensor.detach().flatten().cpu().view(torch.uint8) for tensor in tensors)])


def describe(tensors: Mapping[str, Tensor]) -> Tensor:
    """Names, shapes and types as JSON bytes."""
    rows = [[name, list(tensor.shape), str(tensor.dtype).partition(".")[2]] for name, tensor in tensors.items()]
    return torch.tensor(list(json.dumps(rows).encode()), dtype=torch.uint8)


def described_as(words: Tensor) -> dict[str, Tensor]:
    """The inverse of `describe`, on device "meta"."""
    rows = json.loads(bytes(words.tolist()))
    return {name: torch.empty(shape, dtype=getattr(torch, dtype), device="meta") for name, shape, dtype in rows}


def apart(flat: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Splits the bytes of `flat_bytes` into tensors with the names, shapes and types of `like`."""
    parts = flat.split([tensor.numel() * tensor.element_size() for tensor in like.values()]) if like else ()
    return {
        name: part.clone().view(like[name].dtype).view(like[name].shape) for name, part in zip(like, parts, strict=True)
    }
