"""Event files, read back by TensorBoard's own reader."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.exports import write_events
from orchestrator.results.analyse import analyse
from tests.support.run_folders import steady_run

pytest.importorskip("tensorboard", reason="needs tensorboard: pip install -e '.[exports]'")


def test_tensorboard_reads_what_was_written_and_a_second_time_it_is_replaced(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    summary = analyse(steady_run(tmp_path / "run", 88))
    for _ in range(2):
        folder = write_events(summary, tmp_path / "tb")
        assert folder == tmp_path / "tb" / summary.job and len(list(folder.iterdir())) == 1
        events = EventAccumulator(str(folder))
        events.Reload()
        (accuracy,) = events.Scalars("accuracy/test")
        assert (accuracy.step, round(accuracy.value, 4)) == (62, 0.97)
        assert len(events.Scalars("samples_per_s/v100")) == 15
        assert events.Scalars("run/samples_per_s")[0].value == pytest.approx(960, rel=0.01)
        (text,) = events.Tensors("settings")
        assert b"| strategy | allreduce |" in text.tensor_proto.string_val[0]


def test_files_of_others_in_that_folder_stay(tmp_path: Path) -> None:
    summary = analyse(steady_run(tmp_path / "run", 88))
    own = tmp_path / "tb" / summary.job
    own.mkdir(parents=True)
    (own / "events.out.tfevents.1.host.1.0").write_bytes(b"somebody else's")
    write_events(summary, tmp_path / "tb")
    assert (own / "events.out.tfevents.1.host.1.0").read_bytes() == b"somebody else's"
