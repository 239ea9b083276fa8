"""What every test gets: no SSH configuration, agent or orch state of the person who runs them."""

import gc
import itertools
import multiprocessing
import os
import signal
import sys
from pathlib import Path

import pytest

import orchestrator.hosts.cards
import trainer.compute  # noqa: F401 - before torchvision, for what it keeps out
from tests.support import guard, memory_folder, shared_servers, tiers
from tests.support.workers import Workers

# Two threads that share a small sum spin while they wait for each other: on busy cores that takes twenty times the
# processor. It is read where torch is imported, so the servers that ranks are forked from need it, too.
os.environ["OMP_NUM_THREADS"] = "1"

# A new figure in the catalogue of cards changes no test of a plan.
orchestrator.hosts.cards.FILE = Path(__file__).parent / "data" / "cards.json"

# Without its bytecode a program is compiled at every start, and each test file at every run.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Ranks are forked where all that they import is there already.
multiprocessing.set_forkserver_preload(["tests.support.ranks_import"])

# Started in the background, a test run inherits an ignored SIGINT, and so would everything that it starts: the tests of
# Ctrl-C would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """What is imported and collected stays: Python need not look through it again and again for what may go."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_addoption(parser):
    text = "run the tests in so many processes, each file's in one of them and in their order"
    tiers.add_options(parser)
    parser.addoption("--workers", type=int, default=1, metavar="N", help=text)


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    if config.option.workers > 1:
        guard.stand_guard()
    config.pluginmanager.register(FailuresAtOnce(config), "failures-at-once")
    config.pluginmanager.register(tiers.Tiers(config), "tiers")
    if config.option.workers > 1:
        config.pluginmanager.register(Workers(config.option.workers), "workers")
        if not config.option.basetemp:
            memory_folder.use()
        if config.args_source is config.ArgsSource.TESTPATHS:  # all tests: some will want them
            shared_servers.begin()


class FailuresAtOnce:
    """Tells of a failure when it happens, not at the end of all tests alone."""

    def __init__(self, config):
        self.config = config

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report):
        if report.failed:
            screen = self.config.pluginmanager.getplugin("terminalreporter")
            screen.write_line("")
            screen.write_sep("!", f"{report.nodeid} ({report.when})", red=True)
            screen.write_line(report.longreprtext[-4000:])


NUMBERS = itertools.count()


@pytest.fixture(autouse=True)
def _nobody_in_particular(request, monkeypatch, tmp_path_factory):
    if "tmp_path" in request.fixturenames:
        folder = request.getfixturevalue("tmp_path")
    else:  # a place is enough: no folder for each of thousands of tests
        folder = tmp_path_factory.getbasetemp() / f"nobody-{next(NUMBERS)}"
    monkeypatch.setenv("ORCH_HOME", str(folder / "orch-home"))
    monkeypatch.setenv("ORCH_SSH_CONFIG", "/dev/null")
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    monkeypatch.delenv("ORCH_CLUSTER", raising=False)
