"""Hosts' programs have asyncio without TLS: it is what they start with most often."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import orchestrator.remote

FOLDER = Path(orchestrator.remote.__file__).parent
PROGRAM = """
import sys
import orchestrator.remote.keeper
assert not {"ssl", "_ssl"} & set(sys.modules), "TLS was imported"
import asyncio, ssl                                # whoever needs it afterwards has it
async def connects():
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    assert await reader.read() == b""
    server.close()
asyncio.run(connects())
"""


def test_a_keeper_imports_no_tls_and_its_connections_work() -> None:
    subprocess.run([sys.executable, "-S", "-c", PROGRAM], cwd=FOLDER.parents[1], check=True)


def test_no_program_imports_asyncio_past_it() -> None:
    direct = re.compile(r"^\s*(import asyncio|from asyncio)", re.MULTILINE)
    assert [path.name for path in FOLDER.glob("*.py") if direct.search(path.read_text())] == ["link.py"]
