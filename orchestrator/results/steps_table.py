"""The steps of a collected run, as `steps.parquet` holds them.

steps = read_steps(run)        Steps of the measured ones, in their order
"""

from __future__ import annotations

import duckdb

from orchestrator.errors import OrchError
from orchestrator.paths import RunFolder
from orchestrator.results.intervals import Steps


def read_steps(run: RunFolder) -> Steps:
    """Empty where nothing was measured. The clock is that of the rank whose steps took longest together: over many
    steps all take equally long, see `measure`.

    Raises OrchError where the file is missing or is no such table.
    """
    with duckdb.connect() as connection:
        try:
            rows = connection.execute(_STEPS, [str(run.steps)]).fetchall()
        except duckdb.Error as error:
            why = str(error).splitlines()[0]
            raise OrchError(f"{run.steps}: {why}", "`orch report` for this job makes it again") from error
    return Steps([float(samples) for samples, _ in rows], [float(ms) for _, ms in rows])


_STEPS = """
WITH measured AS (SELECT step, rank, samples, t_ms FROM read_parquet(?) WHERE measured),
longest AS (SELECT rank FROM measured WHERE t_ms > 0 GROUP BY rank ORDER BY sum(t_ms) DESC, rank LIMIT 1),
together AS (SELECT step, sum(samples) AS samples FROM measured GROUP BY step)
SELECT together.samples, t_ms FROM measured JOIN longest USING (rank) JOIN together USING (step) WHERE t_ms > 0
ORDER BY step
"""
