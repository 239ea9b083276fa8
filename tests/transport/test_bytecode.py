"""Hosts are sent bytecode beside the text: they use it where it is their Python's own, and compile where it is not."""

import os
import sys
from pathlib import Path

import pytest

from orchestrator.remote import keeper
from orchestrator.transport import ConnectedHost, LocalTransport, bytecode, sources
from orchestrator.transport.ask import ask
from tests.support.local_job import gang


def status(folder: Path) -> object:
    host = ConnectedHost(LocalTransport("here"), sys.executable, None, str(folder / "work"))
    return ask(host, "control", {"action": "status", "workdir": host.workdir}, timeout_s=30)


@pytest.fixture
def packed_anew():
    sources.packed.cache_clear()
    yield
    sources.packed.cache_clear()


def test_a_host_compiles_nothing_that_it_has_the_bytecode_of(tmp_path, monkeypatch, packed_anew):
    texts = dict.fromkeys(sources.needed("control", sources.shipped_sources()), "raise SystemExit('compiled')")
    true = sources.bytecode_of
    monkeypatch.setattr("orchestrator.transport.ask.shipped_sources", lambda: sources.shipped_sources() | texts)
    monkeypatch.setattr(sources, "needed", lambda program, given: texts)
    monkeypatch.setattr(sources, "bytecode_of", lambda name, text: true(name, sources.shipped_sources()[name]))
    assert status(tmp_path) == {"jobs": {}}


@pytest.mark.parametrize("change", [lambda code: b"\0\0\r\n" + code[4:], lambda code: b"", lambda code: code[:9]])
def test_a_host_compiles_where_the_bytecode_is_not_of_its_python(tmp_path, monkeypatch, packed_anew, change):
    true = sources.bytecode_of
    monkeypatch.setattr(sources, "bytecode_of", lambda name, text: change(true(name, text)))
    assert status(tmp_path) == {"jobs": {}}


def test_a_changed_text_is_sent_without_the_bytecode_of_the_file(packed_anew):
    shipped = sources.shipped_sources()
    changed = shipped | {"orch_remote.control": shipped["orch_remote.control"] + "\n"}
    assert all(code for _, code in sources.pack("control", shipped).sizes.values())
    without = [name for name, (_, code) in sources.pack("control", changed).sizes.items() if not code]
    assert without == ["orch_remote.control"]


def test_a_supervisor_starts_from_the_bytecode_that_was_sent(tmp_path):
    with gang(tmp_path, "pass\n", ranks=(1,)) as job:
        job.launch()
        job.wait()
        kept = job.folder("a") / "bin" / "orch_remote" / "__pycache__" / f"keeper.{sys.implementation.cache_tag}.pyc"
        assert kept.read_bytes() == bytecode(Path(keeper.__file__))  # one that Python refuses it replaces by its own


def test_bytecode_is_that_of_the_text_as_it_now_is(tmp_path, monkeypatch):
    file = tmp_path / "module.py"
    file.write_text("A = 1\n")
    first = bytecode(file)
    assert bytecode(file) == first
    file.write_text("A = 'two'\n")
    assert b"two" in bytecode(file)
    file.write_text("A = 'three'\n")
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    assert bytecode(file) == b""


def test_a_package_that_nobody_may_write_to_has_bytecode_all_the_same(tmp_path, monkeypatch):
    file = tmp_path / "module.py"
    file.write_text("A = 1\n")
    (tmp_path / "__pycache__").write_text("no folder")
    assert bytecode(file)[:4] == bytecode(Path(os.__file__))[:4]
