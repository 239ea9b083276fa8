"""`pytest --workers 4`: all tests are collected once, and then run by so many processes forked from this one.

To collect takes a process as long as many of the files take to run, most of it for imports, torch's among them: forked
workers have all that from the start. Each takes one part of the tests after another: those of a file, or those of
several files that share something that takes seconds to start. A worker that dies fails the test that it ran, and
another takes up the rest of its part.
"""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import signal
import traceback
from collections.abc import Sequence
from multiprocessing import connection
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support import shared_servers

TOGETHER = {"the stand-in": ("tests/cuda/",)}  # the machine of stand-in GPUs, whose server imports torch's CUDA build
"""How each begins; the first that fits counts."""


def part_of(nodeid: str) -> str:
    return next((name for name, begins in TOGETHER.items() if nodeid.startswith(begins)), nodeid.partition("::")[0])


def parts_of(items: Sequence[pytest.Item]) -> list[list[int]]:
    """Places in `items`, by part; the parts in the order of their first tests."""
    found: dict[str, list[int]] = {}
    for place, item in enumerate(items):
        found.setdefault(part_of(item.nodeid), []).append(place)
    return list(found.values())


class Workers:
    """Runs the tests of a session in place of pytest's own loop."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._parts: list[list[int]] = []
        self._workers: list[Worker] = []

    @pytest.hookimpl
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        self._parts = parts_of(session.items)
        if session.config.option.collectonly or session.testsfailed or len(self._parts) < 2:
            return None  # a matter of pytest's own loop
        for number in range(min(self._count, len(self._parts))):
            self._start(session, number)
        try:
            while self._workers:
                self._hear(session)
        finally:
            for worker in self._workers:
                worker.interrupt()
            for worker in self._workers:
                worker.join()
        return True

    def _start(self, session: pytest.Session, number: int) -> None:
        session.config.get_terminal_writer().flush()  # else what is still to be written would be the worker's, too
        self._workers.append(Worker(session, number, [other.pipe for other in self._workers]))

    def _hear(self, session: pytest.Session) -> None:
        for worker in [worker for worker in self._workers if worker.pipe in self._ready()]:
            if not worker.hear(self._parts):
                self._workers.remove(worker)
                self._parts[:0] = [worker.places] if worker.places else []
                if self._parts:
                    self._start(session, worker.number)
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)

    def _ready(self) -> list[Any]:
        return connection.wait([worker.pipe for worker in self._workers])


class Worker:
    """One forked process, as seen from here."""

    def __init__(self, session: pytest.Session, number: int, of_others: Sequence[Connection]) -> None:
        self.number, self._session = number, session
        self.places: list[int] = []
        """Of the tests that it has been given and has not ended."""
        self.pipe, theirs = multiprocessing.Pipe()
        work = (session, number, theirs, [*of_others, self.pipe])
        self._process = multiprocessing.get_context("fork").Process(target=_work, args=work)
        self._process.start()
        theirs.close()

    def hear(self, parts: list[list[int]]) -> bool:
        """One thing that it says; it may ask for the first of `parts`. False: it has ended."""
        try:
            said, value = self.pipe.recv()
            if said == "more":
                part = parts.pop(0) if parts else []
                self.places += part
                self.pipe.send(part)
        except (EOFError, ConnectionError):
            self._has_ended()
            return False
        if said == "ended":
            self.places.remove(value)
        elif said != "more":
            self._pass_on(said, value)
        return True

    def _pass_on(self, said: str, value: Any) -> None:
        config = self._session.config
        if said == "report":
            report = config.hook.pytest_report_from_serializable(config=config, data=value)
            config.hook.pytest_runtest_logreport(report=report)
        elif said == "begun":
            item = self._session.items[value]
            config.hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        else:
            raise RuntimeError(f"worker {self.number}: {value}")

    def _has_ended(self) -> None:
        self._process.join()
        self.pipe.close()
        if self.places:
            item = self._session.items[self.places.pop(0)]
            how = f"the worker that ran it has ended: {self._process.exitcode}"
            report = pytest.TestReport(item.nodeid, item.location, {}, "failed", how, "call")
            self._session.config.hook.pytest_runtest_logreport(report=report)

    def interrupt(self) -> None:
        """Its test may take the signal for its own: without the pipe no other test follows."""
        self.pipe.close()
        if self._process.pid and self._process.is_alive():
            os.kill(self._process.pid, signal.SIGINT)

    def join(self) -> None:
        self._process.join()


def _work(session: pytest.Session, number: int, pipe: Connection, of_others: Sequence[Connection]) -> None:
    """A worker, from its begin to its end."""
    atexit._clear()  # what is to be done at the end of the process that forked it
    for other in of_others:
        other.close()
    _be_alone(session.config, number)
    shared_servers.take_over()
    gc.freeze()  # what was imported and collected stays: Python need not look through it for what may go
    told = Told(pipe)
    kept = SimpleNamespace(listchain=lambda: [session])  # after a part: what the tests of the session share
    session.config.pluginmanager.register(told, "told")
    try:
        while part := told.more():
            for place, following in zip(part, [*(session.items[place] for place in part[1:]), kept], strict=True):
                told.say("begun", place)
                session.config.hook.pytest_runtest_protocol(item=session.items[place], nextitem=following)
                told.say("ended", place)
    except (KeyboardInterrupt, ConnectionError, EOFError):  # a person's, or the process that forked it has ended
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    except BaseException:
        told.say("error", traceback.format_exc())
    session._setupstate.teardown_exact(None)
    atexit._run_exitfuncs()


def _be_alone(config: pytest.Config, number: int) -> None:
    """What it would share with the others: the screen, the files of caught output, the folder of temporary files."""
    for name in ("terminalreporter", "failures-at-once"):
        config.pluginmanager.unregister(name=name)
    capture: Any = config.pluginmanager.getplugin("capturemanager")
    if capture.is_globally_capturing():
        capture.stop_global_capturing()
        capture.start_global_capturing()
    factory: Any = config._tmp_path_factory
    factory._basetemp = factory.getbasetemp() / f"worker-{number}"
    factory._basetemp.mkdir(exist_ok=True)


class Told:
    """In a worker: asks for tests, and tells how each of them went."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def say(self, said: str, value: Any = None) -> None:
        self._pipe.send((said, value))

    def more(self) -> list[int]:
        """The tests of another part; none where no part is left."""
        self.say("more")
        part: list[int] = self._pipe.recv()
        return part

    @pytest.hookimpl
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.say("report", {**report._to_json(), "$report_type": "TestReport"})
