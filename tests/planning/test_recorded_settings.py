"""Settings of records that another version wrote, or a script's job, are read by type and leniently."""

from __future__ import annotations

import typing

import pytest

from orchestrator.planning import RecordedSettings, read_settings
from trainer.shared.settings import Settings


def test_what_a_record_says_is_read_and_what_it_does_not_say_is_none() -> None:
    settings = read_settings({"batch": 64, "sync_bn": True, "slow": "rank:1", "of_a_newer_version": [1, 2]})
    assert (settings.batch, settings.sync_bn, settings.slow) == (64, True, "rank:1")
    assert (settings.strategy, settings.checkpoint_every) == (None, None)


def test_a_value_of_another_kind_is_none_and_spoils_no_other() -> None:
    settings = read_settings({"batch": "64", "steps": True, "strategy": 7, "profile_s": 3, "num_workers": "0 on a"})
    assert (settings.batch, settings.steps, settings.strategy) == (None, None, None)
    assert (settings.profile_s, settings.num_workers) == (3.0, "0 on a")


@pytest.mark.parametrize("document", [None, [], "batch", 3])
def test_what_is_no_settings_at_all_says_nothing(document: object) -> None:
    assert read_settings(document) == RecordedSettings()


def test_each_is_a_setting_and_of_its_type() -> None:
    ours, theirs = typing.get_type_hints(RecordedSettings), typing.get_type_hints(Settings)
    for name in RecordedSettings.model_fields:
        assert theirs[name] in typing.get_args(ours[name]), name
