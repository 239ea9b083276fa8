"""Tables as files, Parquet, CSV or JSON Lines, written by DuckDB: whole or not at all.

copy_whole(connection, "SELECT * FROM timed", run.steps)
convert(Path("loss.csv"), Path("loss.parquet"))
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import duckdb

FORMS = {".parquet": "parquet", ".csv": "csv, HEADER", ".jsonl": "json"}


def copy_whole(connection: duckdb.DuckDBPyConnection, query: str, path: Path) -> None:
    """What the query finds, in the form that the path's suffix names."""
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
    with duckdb.connect() as connection:
        copy_whole(connection, f"SELECT * FROM {reader}('{quoted}')", target)  # noqa: S608 - a path that is quoted
