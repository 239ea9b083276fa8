"""The identity of one $ORCH_HOME: two people with one login never touch each other's jobs. A job on a host belongs to
(owner id, cluster name), see its `node.json`.
"""

from __future__ import annotations

import getpass
import secrets
import socket

from orchestrator.errors import StateError
from orchestrator.files import locked, own_folder, write_json
from orchestrator.paths import Home
from orchestrator.record import SCHEMA, Owner, RecordError, read_record


def read_owner(home: Home) -> Owner:
    """Raises StateError if the file is damaged: a new identity would not own the jobs of this one."""
    if not home.owner.exists():
        own_folder(home.root)
        with locked(home.root / ".lock"):
            if not home.owner.exists():
                write_json(home.owner, {"schema": SCHEMA, "id": secrets.token_hex(16), "name": _name()})
    try:
        return read_record(home.owner, Owner)
    except (OSError, RecordError) as error:
        raise StateError(
            f"{home.owner} is damaged ({error})",
            "bring it back; or remove it, and `orch jobs --rescan --adopt` makes your jobs yours again",
        ) from error


def _name() -> str:
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # a user without a passwd entry
        user = "somebody"
    return f"{user}@{socket.gethostname()}"[:200]
