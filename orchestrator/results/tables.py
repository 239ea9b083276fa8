"""The ranks' metrics files, checked line by line, in DuckDB tables; and tables as files.

    with read_events(files) as events:
        events.connection.sql("SELECT rank, count(*) FROM steps GROUP BY rank")

`steps`: one row per rank and step, the last reported; `last_start`: after the rank's last start that led to a step;
`has_loss`: it has a loss, null if invalid. `others`: all other events as JSON text. A line belongs to the rank of its
file. The files are untrusted: unusable lines are counted, not raised.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import duckdb

from orchestrator.errors import OrchError
from orchestrator.jobs.metric_lines import parse_event, whole_lines
from orchestrator.paths import RunFolder
from orchestrator.results.curves import Steps
from orchestrator.results.events import Events, MetricsFile, Rejects
from trainer.shared.metrics import EVENT_FIELDS, LARGEST, LINE_LIMIT, STAGE_TIMES, STEP_COUNTS, STEP_TIMES

_NOT_JSON = re.compile(rb"(?<=[:,\[\s])(?:NaN|[+-]?Infinity)(?=\s*[,}\]])")


@contextlib.contextmanager
def read_events(files: Sequence[MetricsFile]) -> Iterator[Events]:
    """In bounded memory: DuckDB spills to a temporary folder beyond 1 GB."""
    with tempfile.TemporaryDirectory(prefix="orch-analyse-") as folder:
        config: dict[str, Any] = {"memory_limit": "1GB", "threads": 2, "temp_directory": folder}
        with connected(config) as connection:
            connection.execute(_TABLES)
            events = Events(connection)
            for file in files:
                _load(events, file, Path(folder) / "lines.jsonl")
            connection.execute(_STEPS)
            _count_repeated(events)
            yield events


@contextlib.contextmanager
def connected(config: Mapping[str, Any] | None = None) -> Iterator[duckdb.DuckDBPyConnection]:
    """A Ctrl-C stays a KeyboardInterrupt: DuckDB makes a RuntimeError of it if a query runs."""
    connection = duckdb.connect(":memory:", config=dict(config or {}))
    try:
        yield connection
    except RuntimeError as error:
        if "interrupted" not in str(error).lower():
            raise
        raise KeyboardInterrupt from error
    finally:
        connection.close()


def _load(events: Events, file: MetricsFile, sieved: Path) -> None:
    rejects = Rejects()
    try:
        with open(file.path, "rb") as source, open(sieved, "wb") as target:
            _sieve(source, target, rejects)
    except OSError as error:
        events.absent[file.rank] = error.strerror or type(error).__name__
        return
    connection = events.connection
    connection.execute(_READ, [file.node, file.rank, str(sieved)])
    malformed, refused, usable = connection.execute(
        "SELECT count(*) FILTER (event IS NULL), count(*) FILTER (refused), count(*) FILTER (event IS NOT NULL)"
        " FROM lines WHERE rank = ?",
        [file.rank],
    ).fetchone()
    rejects.malformed += malformed
    rejects.refused = refused
    events.rejects[file.rank] = rejects
    if not usable:
        events.absent[file.rank] = "it holds no event"


def _sieve(source: IO[bytes], target: IO[bytes], rejects: Rejects) -> None:
    """Copies possible JSON: no long line, no bad UTF-8, no partial last line."""
    for line in whole_lines(source):
        if line is None:
            rejects.too_long += 1
            continue
        if not line.endswith(b"\n") and parse_event(line) is None:
            rejects.truncated = True
            return
        if not _is_utf8(line):
            rejects.malformed += 1
        elif stripped := line.strip():
            # Python's json.dumps writes these by default; null is refused for a required number.
            if b"NaN" in stripped or b"Infinity" in stripped:
                stripped = _NOT_JSON.sub(b"null", stripped)
            target.write(stripped + b"\n")


def _is_utf8(line: bytes) -> bool:
    try:
        line.decode()
    except UnicodeDecodeError:
        return False
    return True


def _count_repeated(events: Events) -> None:
    rows = events.connection.execute(
        "SELECT rank, count(*) - count(DISTINCT step) FROM lines"
        " WHERE event = 'step' AND NOT refused GROUP BY rank HAVING count(*) > count(DISTINCT step)"
    ).fetchall()
    for rank, repeated in rows:
        events.rejects[rank].repeated = repeated


_NUMBERS = EVENT_FIELDS["step"]
"""Fields of a step line, in the order in which _READ extracts them."""
_KEPT = tuple(event for event in EVENT_FIELDS if event != "step")
"""Stored unchanged."""
_PATHS = ", ".join(f"'$.{name}'" for name in _NUMBERS)
# The JSON text of a string keeps its quotes, so only a JSON number becomes a number here.
_CASTS = ", ".join(f"TRY_CAST(texts[{i}] AS DOUBLE) AS {name}" for i, name in enumerate(_NUMBERS, start=1))


def _refusals() -> str:
    """SQL: whether a step line has an impossible number."""
    whole = [f"coalesce({name} <> floor({name}) OR {name} < 0 OR {name} > {LARGEST}, true)" for name in STEP_COUNTS]
    times = [
        f"(texts[{_NUMBERS.index(name) + 1}] IS NOT NULL"
        f" AND coalesce(NOT isfinite({name}) OR {name} < 0 OR {name} > {LARGEST}, true))"
        for name in STEP_TIMES
    ]
    return " OR ".join(whole + times)


_TABLES = f"""
CREATE TABLE lines (
    node VARCHAR, rank INTEGER, line BIGINT, event VARCHAR, refused BOOLEAN, content VARCHAR, has_loss BOOLEAN,
    {", ".join(f"{name} DOUBLE" for name in _NUMBERS)});
CREATE VIEW others AS SELECT rank, line, event, content FROM lines WHERE content IS NOT NULL;
"""  # noqa: S608 - names of our own

_READ = f"""
INSERT INTO lines
WITH texts AS (
    SELECT row_number() OVER () AS line, json,
           CASE WHEN json_type(json) = 'OBJECT' THEN left(json->>'$.event', 20) END AS event,
           json_extract(json, [{_PATHS}])::VARCHAR[] AS texts
    FROM read_ndjson_objects($3, ignore_errors = true, maximum_object_size = {2 * LINE_LIMIT})),
numbers AS (SELECT *, {_CASTS} FROM texts)
SELECT $1, $2, line, event, event = 'step' AND ({_refusals()}),
       CASE WHEN event IN ({", ".join(f"'{name}'" for name in _KEPT)}) THEN json::VARCHAR END,
       texts[{_NUMBERS.index("loss") + 1}] IS NOT NULL, {", ".join(_NUMBERS)}
FROM numbers
"""  # noqa: S608 - names of our own

_STAGE_TIMES = ", ".join(
    f"CASE WHEN isfinite({name}) AND {name} BETWEEN 0 AND {LARGEST} THEN {name} END AS {name}" for name in STAGE_TIMES
)
# If a script writes only the time of day, the difference on one host's clock is its step time.
_STEPS = f"""
CREATE TABLE starts AS
WITH ends AS (SELECT rank, max(line) AS last_step FROM lines WHERE event = 'step' AND NOT refused GROUP BY rank)
SELECT rank, max(line) AS started, count(*) AS times
FROM lines JOIN ends USING (rank) WHERE event = 'start' AND line < last_step GROUP BY rank;
CREATE TABLE steps AS
WITH latest AS (
    SELECT * FROM lines WHERE event = 'step' AND NOT refused
    QUALIFY row_number() OVER (PARTITION BY rank, step ORDER BY line DESC) = 1),
walls AS (SELECT *, 1000 * (wall - lag(wall) OVER (PARTITION BY rank ORDER BY step)) AS wall_ms FROM latest)
SELECT node, rank, step::BIGINT AS step, line > coalesce(started, 0) AS last_start,
       CASE WHEN epoch BETWEEN 0 AND {LARGEST} THEN epoch::BIGINT END AS epoch,
       samples::BIGINT AS samples,
       coalesce(t_ms, CASE WHEN wall_ms > 0 AND wall_ms < {LARGEST} THEN wall_ms END) AS t_ms,
       load_ms, compute_ms, exposed_ms, coalesce(comm_ms, exposed_ms) AS comm_ms, optim_ms, {_STAGE_TIMES},
       CASE WHEN isfinite(loss) AND abs(loss) < {LARGEST} THEN loss END AS loss, has_loss,
       CASE WHEN isfinite(wall) THEN wall END AS wall
FROM walls LEFT JOIN starts USING (rank)
"""  # noqa: S608 - names of our own


# Tables as files, Parquet, CSV or JSON Lines, written by DuckDB: complete or not at all.

FORMS = {".parquet": "parquet", ".csv": "csv, HEADER", ".jsonl": "json"}


def copy_whole(connection: duckdb.DuckDBPyConnection, query: str, path: Path) -> None:
    """The path's suffix chooses the form."""
    handle, temporary = tempfile.mkstemp(prefix=f".{path.stem}.", suffix=path.suffix, dir=path.parent)
    os.close(handle)
    try:
        quoted = temporary.replace("'", "''")
        connection.execute(f"COPY ({query}) TO '{quoted}' (FORMAT {FORMS[path.suffix]})")
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def convert(source: Path, target: Path) -> None:
    quoted = str(source).replace("'", "''")
    reader = "read_parquet" if source.suffix == ".parquet" else "read_csv"
    with connected() as connection:
        copy_whole(connection, f"SELECT * FROM {reader}('{quoted}')", target)  # noqa: S608 - a path that is quoted


def read_steps(run: RunFolder) -> Steps:
    """The measured steps in order. Times are of the rank whose steps took longest in total, see `measure`. Raises
    OrchError if the file is missing or no such table.
    """
    with connected() as connection:
        try:
            rows = connection.execute(_STEPS_TABLE_STEPS, [str(run.steps)]).fetchall()
        except duckdb.Error as error:
            why = str(error).splitlines()[0]
            raise OrchError(f"{run.steps}: {why}", "`orch report` for this job makes it again") from error
    return Steps([float(samples) for samples, _ in rows], [float(ms) for _, ms in rows])


_STEPS_TABLE_STEPS = """
WITH measured AS (SELECT step, rank, samples, t_ms FROM read_parquet(?) WHERE measured),
longest AS (SELECT rank FROM measured WHERE t_ms > 0 GROUP BY rank ORDER BY sum(t_ms) DESC, rank LIMIT 1),
together AS (SELECT step, sum(samples) AS samples FROM measured GROUP BY step)
SELECT together.samples, t_ms FROM measured JOIN longest USING (rank) JOIN together USING (step) WHERE t_ms > 0
ORDER BY step
"""
