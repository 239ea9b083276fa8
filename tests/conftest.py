"""What every test gets: no SSH configuration, agent or orch state of the person who runs them."""

import signal

import pytest
from hypothesis import HealthCheck, settings

# Beside other tests nothing takes as long as it does alone: what a property takes is no failure of it.
settings.register_profile("beside-others", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("beside-others")

# Started in the background, a test run inherits an ignored SIGINT, and so would everything that it starts: the tests of
# Ctrl-C would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items):
    """Files with the longest tests first, so that none of them is left to run alone at the end."""
    long_files = {item.path for item in items if item.get_closest_marker("slow") or item.get_closest_marker("lab")}
    items.sort(key=lambda item: item.path not in long_files)


@pytest.fixture(autouse=True)
def _nobody_in_particular(monkeypatch, tmp_path):
    monkeypatch.setenv("ORCH_HOME", str(tmp_path / "orch-home"))
    monkeypatch.setenv("ORCH_SSH_CONFIG", "/dev/null")
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    monkeypatch.delenv("ORCH_CLUSTER", raising=False)
