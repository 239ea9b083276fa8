"""A collected run into MLflow: a server's address, or a database's.

    run_id = send(summary, "http://127.0.0.1:5000")

The experiment has the name of ours, and the run that of the job; what its ranks used is among the parameters. A job is
sent once. The package `mlflow-skinny` sends it (extra `exports`).
"""

from __future__ import annotations

import contextlib
import io
from itertools import islice
from typing import Any

from orchestrator.errors import OrchError, UsageError
from orchestrator.exports.scalars import began_at, scalars, settings_words, whole_run
from orchestrator.results.summary import Summary

MOST_METRICS, MOST_PARAMS = 1000, 100
"""MLflow takes no more in one call."""
STATES = {"succeeded": "FINISHED", "failed": "FAILED", "cancelled": "KILLED", "lost": "FAILED"}
"""In MLflow's words; all others run."""
OF_JOB = "orch.job"


def send(summary: Summary, uri: str) -> str:
    """The id of the run there. Raises UsageError where the package is not installed or the job is there already, and
    OrchError where the server refuses.
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
        except BaseException:  # Ctrl-C, too: half a run there would look like a whole one
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
    with contextlib.redirect_stdout(io.StringIO()):  # where it prints addresses
        client.set_terminated(run, STATES.get(summary.state, "RUNNING"), end_time=ended_ms)


def _experiment(client: Any, name: str) -> str:
    found = client.get_experiment_by_name(name)
    return str(found.experiment_id if found else client.create_experiment(name))


def _refuse_twice(client: Any, experiment: str, job: str) -> None:
    there = client.search_runs([experiment], f"tags.`{OF_JOB}` = '{_name(job)}'", max_results=1)
    if there:
        run = there[0].info.run_id
        raise UsageError(f"{job} is there already, as run {run}", "delete that run in MLflow to send it again")


def _name(text: str) -> str:
    """MLflow takes letters, digits, and `_-. /:`."""
    return "".join(letter if letter.isalnum() or letter in "_-. /:" else "_" for letter in text)


def _parts(items: list[Any], most: int) -> Any:
    left = iter(items)
    return iter(lambda: list(islice(left, most)), [])


def _began_ms(summary: Summary) -> int:
    return int(1000 * began_at(summary))
