"""The ranks' metrics files, checked line by line and laid into DuckDB tables.

Takes `nodes/<node>/rank-<r>/metrics.jsonl` of a run folder, gives an open `Events` with two tables:

    with read_events(files) as events:
        events.connection.sql("SELECT rank, count(*) FROM steps GROUP BY rank")

`steps` has one row per rank and step, the one told last, and says whether it came after the last start of its rank that
led to any; `others` holds the rare events as JSON text. Which rank a line belongs to is told by its file, never by its
content. Nothing in these files is trusted: what cannot be used is counted, not raised.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from orchestrator.text import one_line

LINE_LIMIT = 64 * 2**10
LARGEST = 1e12
"""No count or duration of ours is larger; what is larger would only overflow the sums."""

_COUNTED = ("step", "samples")
_TIMES = ("t_ms", "load_ms", "compute_ms", "exposed_ms", "comm_ms", "optim_ms")
_KEPT = ("start", "setting", "epoch", "eval", "collective", "link", "profile", "rebalance", "end")
"""Events that are kept as they are."""
_NOT_JSON = re.compile(rb"(?<=[:,\[\s])(?:NaN|[+-]?Infinity)(?=\s*[,}\]])")


@dataclass(frozen=True)
class MetricsFile:
    """Where one rank's metrics lie."""

    node: str
    rank: int
    path: Path


@dataclass
class Rejects:
    """Lines of one rank that were left out, by cause."""

    malformed: int = 0
    too_long: int = 0
    refused: int = 0
    repeated: int = 0
    truncated: bool = False


@dataclass(frozen=True)
class Events:
    connection: Any
    """duckdb.DuckDBPyConnection; closed with the context that gave it."""
    rejects: dict[int, Rejects] = field(default_factory=dict)
    absent: dict[int, str] = field(default_factory=dict)
    """Rank -> why its file could not be read."""

    def latest(self, event: str) -> dict[int, dict[str, Any]]:
        """Each rank's last event of this name."""
        rows = self.connection.execute(
            "SELECT rank, arg_max(content, line) FROM others WHERE event = ? GROUP BY rank ORDER BY rank", [event]
        ).fetchall()
        return {rank: content for rank, text in rows if (content := _parse_object(text)) is not None}

    def since_start(self, event: str, limit: int) -> dict[int, list[dict[str, Any]]]:
        """Each rank's first events of this name after its last start, in their order."""
        rows = self.connection.execute(
            "SELECT rank, content FROM others AS o WHERE event = ? AND line >"
            " (SELECT max(line) FROM others AS s WHERE s.rank = o.rank AND s.event = 'start')"
            " QUALIFY row_number() OVER (PARTITION BY rank ORDER BY line) <= ? ORDER BY rank, line",
            [event, limit],
        ).fetchall()
        found: dict[int, list[dict[str, Any]]] = {}
        for rank, text in rows:
            if (content := _parse_object(text)) is not None:
                found.setdefault(rank, []).append(content)
        return found

    def starts(self) -> dict[int, int]:
        """How often each rank was started and took a step: again in an elastic job, or by torchrun's --max-restarts."""
        return dict(self.connection.execute("SELECT rank, times FROM starts").fetchall())

    def of_rank(self, rank: int, event: str, limit: int) -> list[dict[str, Any]]:
        """The first events of this name in the rank's file, in their order."""
        rows = self.connection.execute(
            "SELECT content FROM others WHERE rank = ? AND event = ? ORDER BY line LIMIT ?", [rank, event, limit]
        ).fetchall()
        return [content for (text,) in rows if (content := _parse_object(text)) is not None]


@contextlib.contextmanager
def read_events(files: Sequence[MetricsFile]) -> Iterator[Events]:
    """Reads every file within bounded memory: DuckDB spills to a temporary folder beyond 1 GB."""
    import duckdb  # a tenth of a second that commands which analyse nothing need not spend

    with tempfile.TemporaryDirectory(prefix="orch-analyse-") as folder:
        config: dict[str, Any] = {"memory_limit": "1GB", "threads": 2, "temp_directory": folder}
        connection = duckdb.connect(":memory:", config=config)
        try:
            connection.execute(_TABLES)
            events = Events(connection)
            for file in files:
                _load(events, file, Path(folder) / "lines.jsonl")
            connection.execute(_STEPS)
            _count_repeated(events)
            yield events
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
    """Copies what may be JSON: no line over the limit, no bad UTF-8, no half line at the end."""
    while line := source.readline(LINE_LIMIT):
        if len(line) == LINE_LIMIT and not line.endswith(b"\n"):
            rejects.too_long += 1
            while (rest := source.readline(LINE_LIMIT)) and not rest.endswith(b"\n"):
                pass
            continue
        if not line.endswith(b"\n") and _parse_object(line) is None:
            rejects.truncated = True
            return
        if not _is_utf8(line):
            rejects.malformed += 1
        elif stripped := line.strip():
            # json.dumps of Python writes these unless told otherwise; null is refused where a number must stand.
            if b"NaN" in stripped or b"Infinity" in stripped:
                stripped = _NOT_JSON.sub(b"null", stripped)
            target.write(stripped + b"\n")


def _is_utf8(line: bytes) -> bool:
    try:
        line.decode()
    except UnicodeDecodeError:
        return False
    return True


def _parse_object(text: str | bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _count_repeated(events: Events) -> None:
    rows = events.connection.execute(
        "SELECT rank, count(*) - count(DISTINCT step) FROM lines"
        " WHERE event = 'step' AND NOT refused GROUP BY rank HAVING count(*) > count(DISTINCT step)"
    ).fetchall()
    for rank, repeated in rows:
        events.rejects[rank].repeated = repeated


def number(event: Mapping[str, Any], key: str) -> float | None:
    value = event.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or abs(value) > 1e15:
        return None
    return float(value) if math.isfinite(value) else None


def count(event: Mapping[str, Any], key: str) -> int | None:
    value = number(event, key)
    return int(value) if value is not None and value >= 0 and value == int(value) else None


def text(event: Mapping[str, Any], key: str) -> str | None:
    value = event.get(key)
    return one_line(value) if isinstance(value, str) and one_line(value).strip() else None


# Fields that a step line may carry as numbers, in the order in which _READ takes them apart.
_NUMBERS = (*_COUNTED, *_TIMES, "epoch", "loss", "wall")
_PATHS = ", ".join(f"'$.{name}'" for name in _NUMBERS)
# The JSON text of a string keeps its quotes, so that only a JSON number becomes a number here.
_CASTS = ", ".join(f"TRY_CAST(texts[{i}] AS DOUBLE) AS {name}" for i, name in enumerate(_NUMBERS, start=1))


def _refusals() -> str:
    """SQL: does a step line hold a number that no rank can have measured?"""
    whole = [
        f"coalesce({name} <> floor({name}) OR {name} < 0 OR {name} > {LARGEST}, true)" for name in ("step", "samples")
    ]
    times = [
        f"(texts[{_NUMBERS.index(name) + 1}] IS NOT NULL"
        f" AND coalesce(NOT isfinite({name}) OR {name} < 0 OR {name} > {LARGEST}, true))"
        for name in _TIMES
    ]
    return " OR ".join(whole + times)


_TABLES = f"""
CREATE TABLE lines (
    node VARCHAR, rank INTEGER, line BIGINT, event VARCHAR, refused BOOLEAN, content VARCHAR,
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
       CASE WHEN event IN ({", ".join(f"'{name}'" for name in _KEPT)}) THEN json::VARCHAR END, {", ".join(_NUMBERS)}
FROM numbers
"""  # noqa: S608 - names of our own

# A script that writes only the time of day still tells its step's length: the difference on one host's clock.
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
       load_ms, compute_ms, exposed_ms, coalesce(comm_ms, exposed_ms) AS comm_ms, optim_ms,
       CASE WHEN isfinite(loss) AND abs(loss) < {LARGEST} THEN loss END AS loss,
       CASE WHEN isfinite(wall) THEN wall END AS wall
FROM walls LEFT JOIN starts USING (rank)
"""  # noqa: S608 - names of our own
