"""What every test gets: no SSH configuration, agent or orch state of the person who runs them."""

import multiprocessing
import os
import signal

import pytest
from hypothesis import HealthCheck, settings

# Beside other tests nothing takes as long as it does alone: what a property takes is no failure of it.
# THOROUGH=1 tries more cases of each, and takes longer.
CASES = 400 if os.environ.get("THOROUGH") else 40
settings.register_profile(
    "beside-others", deadline=None, max_examples=CASES, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("beside-others")

# What ranks import, and an optimiser with its first step: that takes seconds, and is done once for all of a test run.
RANKS_IMPORT = ["torch._dynamo", "torch.distributed.fsdp", "trainer.collectives", "trainer.strategies", "trainer.train"]
multiprocessing.set_forkserver_preload(RANKS_IMPORT)

# Started in the background, a test run inherits an ignored SIGINT, and so would everything that it starts: the tests of
# Ctrl-C would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    if not hasattr(config, "workerinput"):  # workers of pytest-xdist have nobody to tell
        config.pluginmanager.register(FailuresAtOnce(config), "failures-at-once")


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
chaos setup trainer_strategies lab_jobs elastic log_fidelity resume sweep lab_wire lab_ports lab_resume neighbours
trainer_run trainer_checkpoint trainer_sync trainer_rebalance trainer_spawn supervisor controller_crash noise live
transport_ssh security lab_refusals data_push ownership rescan full_disk host_limits analyse profiles readme lab
""".split()  # noqa: SIM905
"""Files by what they took, the longest first."""


def pytest_collection_modifyitems(items):
    """The longest files first, so that none of them is left to run alone at the end."""
    places = {f"test_{name}.py": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))


@pytest.fixture(autouse=True)
def _nobody_in_particular(monkeypatch, tmp_path):
    monkeypatch.setenv("ORCH_HOME", str(tmp_path / "orch-home"))
    monkeypatch.setenv("ORCH_SSH_CONFIG", "/dev/null")
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    monkeypatch.delenv("ORCH_CLUSTER", raising=False)
