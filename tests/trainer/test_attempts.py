"""A run goes on from its own job's checkpoints after the hosts have started the job again (`--retries --detach`)."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.checkpoints.checkpoint import source_of
from trainer.shared.config import parse_settings
from trainer.shared.settings import Settings


@pytest.mark.parametrize(
    ("attempt", "kept", "resume", "source"),
    [
        (None, True, "", None),
        (None, True, "/other", "/other"),
        ("2", True, "", "own"),
        ("2", True, "/other", "own"),  # what this job has done since
        ("2", False, "/other", "/other"),
        ("2", False, "", None),
    ],
)
def test_the_checkpoint_to_go_on_from(
    attempt: str | None, kept: bool, resume: str, source: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ORCH_CHECKPOINTS", str(tmp_path))
    if attempt:
        monkeypatch.setenv("ORCH_ATTEMPT", attempt)
    if kept:
        (tmp_path / "step-000000005.pt").touch()
    settings = parse_settings("mnist_lenet", {"checkpoint_every": "5", **({"resume": resume} if resume else {})})
    assert isinstance(settings, Settings)
    assert source_of(settings) == (tmp_path if source == "own" else Path(source) if source else None)
