"""What is said where the packages of the extra `exports` are not installed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from orchestrator.errors import UsageError
from orchestrator.exports import send, write_events
from orchestrator.results import Summary

RUN = Summary(schema=1, job="x", experiment="x", state="failed", world_size=1)


def test_a_package_that_is_missing_is_named_with_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("mlflow", "mlflow.exceptions", "tensorboard", "tensorboard.compat.proto.event_pb2"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UsageError, match="mlflow-skinny is not installed") as of_mlflow:
        send(RUN, "http://127.0.0.1:9")
    with pytest.raises(UsageError, match="tensorboard is not installed") as of_tensorboard:
        write_events(RUN, tmp_path)
    assert {of_mlflow.value.remedy, of_tensorboard.value.remedy} == {"pip install 'orch[exports]'"}
    assert not any(tmp_path.iterdir())
