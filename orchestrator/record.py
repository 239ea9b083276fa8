"""The base of every value that is written as JSON, and whose it is.

Records are read back leniently: unknown keys of a newer version are kept out of the way. `schema` says which form a
record has.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from orchestrator.files import write_atomic
from orchestrator.text import one_line

SCHEMA = 1


class Record(BaseModel):
    model_config = ConfigDict(frozen=True, defer_build=True, extra="ignore")


def write_record(path: Path, record: Record) -> None:
    write_atomic(path, record.model_dump_json(by_alias=True, indent=1) + "\n")


class Owner(Record):
    """One $ORCH_HOME, as hosts know it; see `owner`. Only the id counts, the name is for people."""

    id: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    name: Annotated[str, Field(max_length=200)]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Owner) and other.id == self.id

    def __hash__(self) -> int:
        return hash(self.id)


Words = Annotated[str, AfterValidator(lambda text: one_line(text, 500))]
"""A host's: one printable line."""
