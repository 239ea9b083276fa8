"""Where a script of one's own takes part: `ranks = join(batch=256, epochs=10)`, then `run = ranks.prepare(...)`."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.data import default_collate

from trainer.data.own import Collate
from trainer.ranks.rank_info import read_rank_info
from trainer.session.ending import Ending
from trainer.session.rehearsal import Rehearsal
from trainer.session.session import Session
from trainer.setup.assemble import Met, meet, prepare
from trainer.setup.own import AnyOptimizer, Own
from trainer.shared.config import parse_settings
from trainer.shared.errors import TrainError
from trainer.shared.experiments import SCRIPT
from trainer.shared.fields import SettingsError
from trainer.shared.metrics import MetricsWriter
from trainer.shared.settings import Settings

ASKED = "ORCH_SETTINGS"
"""The variable with what the command line asks for: a JSON object of names and values, both as text."""


def join(**settings: Any) -> Ranks:
    """Meets the other ranks of the job: those that torchrun has started, or nobody in a process by itself.

    settings: the script's own values, by the names of `orch run --set`, for what the command line leaves open. The most
    usual are `batch` (samples of one update over all ranks together), `epochs`, `steps`, `seed`.

    Ends the process with one line where a setting is wrong or the others cannot be met.
    """
    ending = Ending()
    if getattr(multiprocessing.current_process(), "_inheriting", False):  # multiprocessing's own word for it
        raise TrainError(
            "a process that loads samples has run the script once more: put what the script does into a function, and "
            'call it under `if __name__ == "__main__":` (or leave multiprocessing\'s start method at fork)'
        )
    info = read_rank_info()
    ending.metrics = metrics = MetricsWriter(info.metrics_path)
    try:
        asked = parse_settings(SCRIPT, asked_for(os.environ), settings)
    except SettingsError as error:
        raise TrainError("\n".join(error.mistakes)) from error
    assert isinstance(asked, Settings)  # noqa: S101 - for the type checker
    return Ranks(meet(asked, info, metrics), ending)


def asked_for(environment: Mapping[str, str]) -> dict[str, str]:
    """Raises TrainError where the variable holds something else."""
    try:
        found = json.loads(environment.get(ASKED) or "{}")
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise TrainError(f'{ASKED} is no JSON object like {{"strategy": "ddp", "batch": "256"}}')
    batch = {"batch": environment["ORCH_BATCH"]} if "ORCH_BATCH" in environment else {}  # of `orch run --batch`
    return {**batch, **{str(name): str(value) for name, value in found.items()}}


class Ranks:
    """This rank among all, before it is known what they train."""

    def __init__(self, met: Met, ending: Ending) -> None:
        self._met, self._ending = met, ending

    @property
    def rank(self) -> int:
        """Its number among all ranks."""
        return self._met.info.rank

    @property
    def world_size(self) -> int:
        """How many there are."""
        return self._met.info.world_size

    @property
    def device(self) -> torch.device:
        """Where this one computes."""
        return self._met.device

    @property
    def settings(self) -> Settings:
        """As they were asked for."""
        return self._met.settings

    def prepare(
        self, model: nn.Module, optimizer: AnyOptimizer, dataset: Any, collate: Collate = default_collate
    ) -> Session | Rehearsal:
        """A run over all ranks, which begin with the weights of rank 0. Where the command line asks how fast this host
        is alone, a loop like it that only measures.

        model: any network; strategy=pipeline cuts an nn.Sequential or torchvision's ResNets. optimizer: for its
        weights, or a function that makes one of them. dataset: has len(dataset) and dataset[index]. collate: makes a
        batch of a list of samples; tensors have the samples along their first dimension.
        """
        own = Own(model, optimizer, dataset, collate)
        if self.settings.profile_s:
            return Rehearsal(self._met, own, self._ending)
        return Session(prepare(self._met, own), self._ending)
