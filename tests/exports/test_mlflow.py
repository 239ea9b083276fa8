"""A run in MLflow: a real server, asked by MLflow's own client."""

from __future__ import annotations

import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.errors import OrchError, UsageError
from orchestrator.exports import send
from orchestrator.results.analyse import analyse
from tests.support.free_port import free_port
from tests.support.run_folders import steady_run

pytest.importorskip("mlflow.server", reason="needs mlflow: pip install mlflow")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder, address = tmp_path_factory.mktemp("mlflow"), f"http://127.0.0.1:{free_port()}"
    words = ["--backend-store-uri", f"sqlite:///{folder}/runs.db", "--artifacts-destination", str(folder)]
    port = address.rpartition(":")[2]
    command = [sys.executable, "-m", "mlflow", "server", *words, "--host", "127.0.0.1", "--port", port]
    with subprocess.Popen([*command, "--workers", "1"], cwd=folder, start_new_session=True) as process:
        try:
            _wait(address, process)
            yield address
        finally:
            process.terminate()


def _wait(address: str, process: subprocess.Popen[bytes]) -> None:
    until_s = time.monotonic() + 180
    while True:
        assert process.poll() is None and time.monotonic() < until_s
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.3)


def test_a_server_has_its_settings_figures_and_curves_once(
    server: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from mlflow.tracking import MlflowClient

    summary = analyse(steady_run(tmp_path / "run", 88))
    client, run_id = MlflowClient(tracking_uri=server), send(summary, server)
    assert capsys.readouterr().out == ""  # `orch report --json` has one document there
    run = client.get_run(run_id)
    assert (run.info.run_name, run.info.status) == (summary.job, "FINISHED")
    assert run.data.params["strategy"] == "allreduce"
    assert run.data.metrics["run/samples_per_s"] == pytest.approx(960, rel=0.01)
    assert len(client.get_metric_history(run_id, "samples_per_s/v100")) == 15
    assert [point.step for point in client.get_metric_history(run_id, "accuracy/test")] == [62]
    with pytest.raises(UsageError, match=f"was sent before, as run {run_id}"):
        send(summary, server)


def test_of_a_run_that_could_not_be_sent_whole_nothing_stays(server: str, tmp_path: Path) -> None:
    from mlflow.tracking import MlflowClient

    summary = analyse(steady_run(tmp_path / "run", 88)).model_copy(update={"job": "another"})
    with pytest.raises(OrchError):  # to MLflow both are `key_`, with two values
        send(summary.model_copy(update={"settings": {"key?": 1, "key!": 2}}), server)
    assert MlflowClient(tracking_uri=server).get_run(send(summary, server)).info.status == "FINISHED"


def test_an_address_where_nobody_listens_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    address = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(OrchError, match=address):
        send(analyse(steady_run(tmp_path / "run", 88)), address)
