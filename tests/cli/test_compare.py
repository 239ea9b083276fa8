"""`orch compare` over collected folders: tables, page, document, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.commands import Types, typist
from tests.support.run_folders import steady_run


@pytest.fixture
def orch(capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Types:
    """Types a command in a folder with two collected runs; gives exit code, standard output and standard error."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    (tmp_path / "runs").mkdir()
    steady_run(tmp_path / "runs" / "slow", 88)
    steady_run(tmp_path / "runs" / "fast", 38, strategy="ddp")
    return typist(capfd)


def test_two_runs_are_shown_side_by_side_in_80_columns(orch: Types, tmp_path: Path) -> None:
    code, out, _ = orch("compare", "slow", "runs/fast")
    assert code == 0
    assert "B: 2.00 times as fast as A (" in out
    assert "to 97.00 %" in out and "what differs" in out
    assert max(map(len, out.splitlines())) <= 80
    page = (tmp_path / "runs" / "compare.html").read_text()
    assert "2.00 times as fast as A" in page and f"page: {Path('runs/compare.html')}" in out


def test_the_document_has_what_the_tables_have(orch: Types, tmp_path: Path) -> None:
    code, out, _ = orch("compare", "slow", "fast", "--json")
    document = json.loads(out)
    assert (code, document["schema"], document["common_accuracy"]) == (0, 1, 0.97)
    first, second = document["runs"]
    assert first["of_first"] is None and first["verdict"] is None
    assert second["of_first"]["low"] < second["of_first"]["value"] < second["of_first"]["high"]
    assert document["differences"] == [{"what": "strategy", "values": ["allreduce", "ddp"]}]
    assert not (tmp_path / "runs" / "compare.html").exists()


def test_a_run_that_was_not_analysed_is_analysed_first(orch: Types, tmp_path: Path) -> None:
    (tmp_path / "runs" / "fast" / "steps.parquet").unlink()
    assert orch("compare", "slow", "fast")[0] == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("slow",), "1 job named"),
        (("slow", "none-such"), "no job yet"),
        (("slow", *["fast"] * 9), "10 jobs named"),
    ],
)
def test_what_cannot_be_compared_is_refused_in_a_line(orch: Types, words: tuple[str, ...], said: str) -> None:
    code, out, err = orch("compare", *words)
    assert (code, out) == (2, "")
    assert said in err and "Traceback" not in err
