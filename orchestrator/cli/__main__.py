"""`python -m orchestrator.cli` is `orch`."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from orchestrator.cli import main

UNWRITTEN = 120
"""Python's own exit code for output that cannot be written."""


def program() -> NoReturn:
    """Ends the process at once: a thread that still decrypts while OpenSSL is taken down crashes the interpreter."""
    code: object = 0
    try:
        main()
    except SystemExit as end:
        code = end.code
    for stream in filter(None, (sys.stdout, sys.stderr)):  # None: closed before our start
        try:
            stream.flush()
        except (OSError, ValueError):
            code = code or UNWRITTEN
    os._exit(code if isinstance(code, int) else int(code is not None))


if __name__ == "__main__":
    program()
