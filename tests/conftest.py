"""What every test gets: no SSH configuration, agent or orch state of the person who runs them."""

import gc
import itertools
import multiprocessing
import os
import signal
import sys

import pytest
from hypothesis import HealthCheck, settings

import trainer.compute  # noqa: F401 - before torchvision, for what it keeps out
from tests.support import memory_folder, shared_servers
from tests.support.workers import Workers

# Two threads that share a small sum spin while they wait for each other: on busy cores that takes twenty times the
# processor. It is read where torch is imported, so the servers that ranks are forked from need it, too.
os.environ["OMP_NUM_THREADS"] = "1"

# Without its bytecode a program is compiled at every start, and each test file at every run.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Beside other tests nothing takes as long as it does alone: what a property takes is no failure of it.
# THOROUGH=1 tries more cases of each, and takes longer.
CASES = 400 if os.environ.get("THOROUGH") else 40
settings.register_profile(
    "beside-others", deadline=None, max_examples=CASES, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("beside-others")

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
    parser.addoption("--workers", type=int, default=1, metavar="N", help=text)


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    config.pluginmanager.register(FailuresAtOnce(config), "failures-at-once")
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


LONGEST = """
cuda/test_cuda_strategies lab/test_jobs chaos/test_chaos lab/test_wire trainer/test_sync trainer/test_strategies
remote/test_supervisor trainer/test_checkpoint trainer/test_run forecast/test_plan_command remote/test_watched_steps
lab/test_itself remote/test_host_limits jobs/test_log_fidelity neighbours/test_neighbours
transport/test_ssh planning/test_profiles lab/test_ports results/test_analyse trainer/test_session
trainer/test_rebalance trainer/test_shared_network trainer/test_learner cli/test_cli lab/test_watched_steps
trainer/test_spawn jobs/test_collect cli/test_readme provision/test_setup jobs/test_controller_crash
remote/test_leftovers cuda/test_cuda_speed trainer/test_pipeline_run lab/test_refusals cuda/test_cuda_make_gpu
hosts/test_ownership remote/test_hub transport/test_noise results/test_straggler cli/test_documented_commands
transport/test_ask trainer/test_folders hosts/test_probe remote/test_peers trainer/test_models views/test_report
jobs/test_resume provision/test_push ui/test_page lab/test_pipeline forecast/test_faster cuda/test_cuda_time_line
trainer/test_tensor_run trainer/test_tensor cuda/test_cuda_wire trainer/test_target lab/test_resume cli/test_bad_input
jobs/test_second_controller transport/test_ssh_faults results/test_gpu_watch lab/test_crowd test_security
planning/test_secrets jobs/test_full_disk trainer/test_fidelity forecast/test_step cuda/test_cuda_watched
cli/test_site jobs/test_live remote/test_stillness studies/test_sweep
""".split()  # noqa: SIM905
"""Files by the time that they took, the longest first; the stand-in's go as one."""


def pytest_collection_modifyitems(config, items):
    """The longest files first, so that none of them is left to run alone at the end."""
    places = {config.rootpath / "tests" / f"{name}.py": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


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
