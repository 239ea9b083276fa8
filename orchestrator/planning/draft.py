"""A plan while its settings are still being settled: all values typed, no command line yet. Pure.

draft = Draft("lab", job, created, code, request, place(...), carrier)
draft = draft.with_split(split)                                     shares
draft = draft.settled({"strategy": "ddp"}, "strategy=auto: ...")    what else the plan decides
plan = build_plan(draft)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from orchestrator.planning.launch_plan import CodeFolder
from orchestrator.planning.nccl import Carrier
from orchestrator.planning.placement import Placement
from orchestrator.planning.profiles import Profiles
from orchestrator.planning.request import RunRequest
from orchestrator.planning.split import Split
from trainer.shared.experiments import OWN
from trainer.shared.settings import Settings


@dataclass(frozen=True)
class Draft:
    cluster: str
    job: str
    created: str
    code: CodeFolder
    request: RunRequest
    """Its settings as far as they are settled."""
    placement: Placement
    carrier: Carrier
    split: Split = field(default_factory=Split)
    decided: tuple[str, ...] = ()
    """Settings that the plan has decided, in the order in which it did."""
    notes: tuple[str, ...] = ()
    """What to say of these decisions."""

    @property
    def training(self) -> Settings | None:
        return self.request.training

    @property
    def shares(self) -> tuple[int, ...]:
        """Samples of each rank, in the order of their global ranks."""
        return tuple(self.split.shares.values())

    def with_split(self, split: Split) -> Draft:
        """The batch divided so, and the setting `shares` as it turned out."""
        drawn = replace(self, split=split, notes=(*self.notes, *split.notes))
        return drawn._changed({"shares": split.policy}) if split.policy else drawn

    def with_own_batch(self, profiles: Profiles) -> Draft:
        """Where a script names the batch itself, as it is, and has been seen to: with that one."""
        settings, seen = self.training, {(profile.batch, profile.code) for profile in profiles.values()}
        if settings is None or settings.model != OWN or self.request.batch or settings.profile_s or len(seen) != 1:
            return self
        batch, code = seen.pop()
        if batch is None or code != self.code.sha256:
            return self
        drawn = self.settled({"batch": batch}, f"batch={batch}, as the script said when it was profiled")
        return replace(drawn, request=replace(drawn.request, batch=batch))

    def settled(self, values: Mapping[str, Any], note: str) -> Draft:
        """With these settings decided. Raises SettingsError where they do not go with the others."""
        drawn = replace(self, decided=(*self.decided, *values), notes=(*self.notes, note))
        return drawn._changed(values)

    def _changed(self, values: Mapping[str, Any]) -> Draft:
        if self.training is None:
            return self
        settings = replace(self.training, **values)
        return replace(self, request=replace(self.request, settings=settings))
