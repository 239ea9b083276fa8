"""Base class of all JSON records, their reading and writing, and the owner record.

Unknown keys are ignored; a newer `schema` is refused.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from orchestrator.errors import OrchError
from orchestrator.files import write_atomic
from orchestrator.units import one_line

SCHEMA = 1
RECORD_LIMIT = 64 * 2**20


class Record(BaseModel):
    model_config = ConfigDict(frozen=True, defer_build=True, extra="ignore")


AnyRecord = TypeVar("AnyRecord", bound=Record)


class RecordError(ValueError):
    """Invalid content."""


def write_record(path: Path, record: Record) -> None:
    write_atomic(path, record.model_dump_json(by_alias=True, indent=1) + "\n")


def read_record(path: Path, form: type[AnyRecord]) -> AnyRecord:
    """Raises OSError, RecordError for invalid content, OrchError for a newer schema."""
    with open(path, "rb") as file:
        content = file.read(RECORD_LIMIT + 1)
    if len(content) > RECORD_LIMIT:
        raise RecordError("larger than such a record can be")
    try:
        record = form.model_validate_json(content)
    except ValidationError as error:
        _refuse_newer(path, content)
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise RecordError(f"{where}: {first['msg']}") from error
    if getattr(record, "schema_", SCHEMA + 1) > SCHEMA:  # the class may have no such field
        _refuse_newer(path, content)
    return record


def _refuse_newer(path: Path, content: bytes) -> None:
    with suppress(ValueError):  # the caller reports invalid JSON
        value = from_json(content)
        schema = value.get("schema") if isinstance(value, dict) else None
        if isinstance(schema, int) and schema > SCHEMA:
            raise OrchError(f"{path} was written by a newer orch (schema {schema})", "update this one")


def require_record(path: Path, form: type[AnyRecord], remedy: str) -> AnyRecord:
    """For a file that the user named. Raises only OrchError."""
    try:
        return read_record(path, form)
    except OSError as error:
        raise OrchError(f"{path}: cannot be read ({error.strerror})", remedy) from error
    except RecordError as error:
        raise OrchError(f"{path}: {error}", remedy) from error


class Owner(Record):
    """One $ORCH_HOME, as hosts identify it. Only the id counts."""

    id: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    name: Annotated[str, Field(max_length=200)]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Owner) and other.id == self.id

    def __hash__(self) -> int:
        return hash(self.id)


Words = Annotated[str, AfterValidator(lambda text: one_line(text, 500))]
"""One printable line from a host."""
