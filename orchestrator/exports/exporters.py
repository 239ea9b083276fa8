"""Exports a collected run: scalars over steps, totals and settings, as TensorBoard event files or into MLflow.

for scalar in scalars(summary):     Scalar(name="loss/training", step=119, seconds=4.468, value=2.31)
whole_run(summary)                  {"run/samples_per_s": 1122.0, "run/efficiency": 0.96, ...}
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any

from orchestrator.errors import OrchError, UsageError
from orchestrator.files import make_folder
from orchestrator.results.compare import figure_tables
from orchestrator.results.summary import Summary
from orchestrator.units import one_line

DRAWN = (
    ("loss", "loss", "loss/training"),
    ("evaluations", "loss", "loss/test"),
    ("evaluations", "accuracy", "accuracy/test"),
    ("speeds", "samples_per_s", "samples_per_s"),
)
"""Table of `figure_tables`, its column, and the scalar's name, to which hosts add theirs."""
OF_HOST = ("samples_per_s", "own_samples_per_s", "load_ms", "compute_ms", "sync_ms", "wait_ms", "optim_ms")


@dataclass(frozen=True)
class Scalar:
    name: str
    step: int
    seconds: float | None
    """Since the first update began; None if unknown."""
    value: float


def scalars(summary: Summary) -> Iterator[Scalar]:
    """Grouped by name, in order of steps."""
    tables = figure_tables(summary)
    for title, column, name in DRAWN:
        if title not in tables:
            continue
        for row in tables[title].rows:
            cells = dict(zip(tables[title].columns, row, strict=True))
            if cells[column] is not None:
                of = f"{name}/{one_line(cells['host'], 60)}" if "host" in cells else name
                yield Scalar(of, cells["step"], cells["seconds"], float(cells[column]))


def whole_run(summary: Summary) -> dict[str, float]:
    """Figures of the whole run; unknown ones are absent."""
    found = {
        "samples_per_s": summary.samples_per_s,
        "efficiency": summary.efficiency,
        "accuracy": summary.accuracy,
        "loss": summary.loss,
        "first_update_not_finite": summary.not_finite.step if summary.not_finite else None,
        "total_s": summary.total_s,
        "measured_steps": summary.steps,
    }
    for node in summary.nodes:
        name = one_line(node.name, 60)
        found |= {f"{field}/{name}": getattr(node, field) for field in OF_HOST}
    return {f"run/{name}": float(value) for name, value in found.items() if value is not None}


def settings_words(summary: Summary) -> dict[str, str]:
    """The ranks' settings, hosts and cluster."""
    words = {one_line(key, 60): one_line(str(value), 400) for key, value in summary.settings.items()}
    hosts = ", ".join(f"{node.name} ({node.ranks} x {node.gpu})" for node in summary.nodes)
    return {**words, "hosts": one_line(hosts, 400), "cluster": one_line(summary.cluster, 60)}


def began_at(summary: Summary) -> float:
    """Unix time of the run's start; 0 if unknown."""
    try:
        return datetime.fromisoformat((summary.started or summary.created or "").replace("Z", "+00:00")).timestamp()
    except ValueError:
        return 0.0


# TensorBoard event files, written by the package `tensorboard` (extra `exports`): one folder per run; files of an
# earlier export of the run are replaced.

SUFFIX = ".orch"


def write_events(summary: Summary, folder: Path) -> Path:
    """Returns the run's own folder. Raises UsageError if the package is not installed."""
    try:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary as Values
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
    except ImportError as error:
        raise UsageError(
            f"the package tensorboard is not installed here ({error})", "pip install 'orch[exports]'"
        ) from error

    own = folder / summary.job
    make_folder(own)
    before = list(own.glob(f"events.out.tfevents.*{SUFFIX}"))
    began = began_at(summary)
    writer = EventFileWriter(str(own), filename_suffix=SUFFIX)
    last = max((scalar.step for scalar in scalars(summary)), default=0)
    whole = [Scalar(name, last, None, value) for name, value in whole_run(summary).items()]
    for scalar in (*scalars(summary), *whole):
        value = Values.Value(tag=scalar.name, simple_value=scalar.value)
        wall = began + (scalar.seconds or 0.0)
        writer.add_event(Event(step=scalar.step, wall_time=wall, summary=Values(value=[value])))
    writer.add_event(_settings(summary, began))
    writer.close()
    for path in before:
        path.unlink(missing_ok=True)
    return own


def _settings(summary: Summary, began: float) -> object:
    """A table for TensorBoard's page `Text`."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary as Values
    from tensorboard.compat.proto.summary_pb2 import SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.types_pb2 import DT_STRING

    rows = [f"| {key} | {value.replace('|', '&#124;')} |" for key, value in settings_words(summary).items()]
    text = "\n".join(["| setting | value |", "| --- | --- |", *rows])
    metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
    value = Values.Value(
        tag="settings", metadata=metadata, tensor=TensorProto(dtype=DT_STRING, string_val=[text.encode()])
    )
    return Event(step=0, wall_time=began, summary=Values(value=[value]))


# MLflow, by the package `mlflow-skinny` (extra `exports`): experiment and run are named as ours, settings become
# parameters. A job is sent once.

MOST_METRICS, MOST_PARAMS = 1000, 100
"""Limits of MLflow per call."""
STATES = {"succeeded": "FINISHED", "failed": "FAILED", "cancelled": "KILLED", "lost": "FAILED"}
"""All other states are RUNNING."""
OF_JOB = "orch.job"


def send(summary: Summary, uri: str) -> str:
    """Returns the run's id. uri: a server's address, or a database's.

    Raises UsageError if the package is not installed or the job was sent before, OrchError if the server refuses.
    """
    try:
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient
    except ImportError as error:
        raise UsageError(
            f"the package mlflow-skinny is not installed here ({error})", "pip install 'orch[exports]'"
        ) from error
    try:
        client = MlflowClient(tracking_uri=uri)
        experiment = _experiment(client, summary.experiment)
        _refuse_twice(client, experiment, summary.job)
        tags = {"mlflow.runName": summary.job, OF_JOB: _name(summary.job), "orch.state": summary.state}
        tags |= {"orch.command": summary.command or ""}
        run: str = client.create_run(experiment, start_time=_began_ms(summary), tags=tags).info.run_id
        try:
            _fill(client, run, summary)
        except BaseException:  # Ctrl-C, too: a partial run there would look complete
            with contextlib.suppress(MlflowException):
                client.delete_run(run)
            raise
    except MlflowException as error:
        why = str(error).splitlines()[0]
        raise OrchError(f"MLflow at {uri}: {why}", "is that address a running MLflow server's?") from error
    return run


def _fill(client: Any, run: str, summary: Summary) -> None:
    from mlflow.entities import Metric, Param

    began_ms = _began_ms(summary)
    params = [Param(_name(key), value) for key, value in settings_words(summary).items()]
    metrics = [Metric(_name(name), value, began_ms, 0) for name, value in whole_run(summary).items()]
    metrics += [
        Metric(_name(each.name), each.value, began_ms + int(1000 * (each.seconds or 0.0)), each.step)
        for each in scalars(summary)
    ]
    for some in _parts(params, MOST_PARAMS):
        client.log_batch(run, params=some)
    for some in _parts(metrics, MOST_METRICS):
        client.log_batch(run, metrics=some)
    ended_ms = began_ms + int(1000 * (summary.total_s or 0.0))
    with contextlib.redirect_stdout(io.StringIO()):  # it prints addresses
        client.set_terminated(run, STATES.get(summary.state, "RUNNING"), end_time=ended_ms)


def _experiment(client: Any, name: str) -> str:
    found = client.get_experiment_by_name(name)
    return str(found.experiment_id if found else client.create_experiment(name))


def _refuse_twice(client: Any, experiment: str, job: str) -> None:
    there = client.search_runs([experiment], f"tags.`{OF_JOB}` = '{_name(job)}'", max_results=1)
    if there:
        run = there[0].info.run_id
        raise UsageError(f"{job} was sent before, as run {run}", "delete that run in MLflow to send it again")


def _name(text: str) -> str:
    """MLflow takes letters, digits, and `_-. /:`."""
    return "".join(letter if letter.isalnum() or letter in "_-. /:" else "_" for letter in text)


def _parts(items: list[Any], most: int) -> Any:
    left = iter(items)
    return iter(lambda: list(islice(left, most)), [])


def _began_ms(summary: Summary) -> int:
    return int(1000 * began_at(summary))
