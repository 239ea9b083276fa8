"""Settings as a record on disk keeps them, read by type and leniently. Pure.

    plan.recorded.batch                 64; None where the record has none, or something else in its place

A record may be an older or a newer orch's, of an experiment that is unknown here, or a script's, of which only the
batch is known. Where all settings have to be there and right, take `LaunchPlan.training`.
"""

from __future__ import annotations

from typing import Any

from pydantic import ConfigDict, ValidationError, ValidatorFunctionWrapHandler, field_validator

from orchestrator.record import Record


class RecordedSettings(Record):
    """Those that results, listings and reports ask for, under the names that `trainer.shared.settings.Settings` has."""

    model_config = ConfigDict(strict=True)

    model: str | None = None
    data: str | None = None
    batch: int | None = None
    epochs: int | None = None
    steps: int | None = None
    strategy: str | None = None
    fidelity: str | None = None
    stages: str | None = None
    sync_bn: bool | None = None
    slow: str | None = None
    profile_s: float | None = None
    warmup_steps: int | None = None
    num_workers: int | str | None = None
    """In a summary a sentence where hosts differ: `0 on a, 2 on b`."""
    target_accuracy: float | None = None
    resume: str | None = None
    checkpoint_dir: str | None = None
    checkpoint_every: int | None = None

    @field_validator("*", mode="wrap")
    @classmethod
    def _or_none(cls, value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except ValidationError:
            return None


def read_settings(document: object) -> RecordedSettings:
    """document: what stands in the place of settings, by name; nothing of it is taken on trust."""
    return RecordedSettings.model_validate(document if isinstance(document, dict) else {})
