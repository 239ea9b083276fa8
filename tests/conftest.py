"""What every test gets: no SSH configuration, agent or orch state of the person who runs them."""

import signal

import pytest

# Started in the background, a test run inherits an ignored SIGINT, and so would everything that it starts: the tests of
# Ctrl-C would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _nobody_in_particular(monkeypatch, tmp_path):
    monkeypatch.setenv("ORCH_HOME", str(tmp_path / "orch-home"))
    monkeypatch.setenv("ORCH_SSH_CONFIG", "/dev/null")
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
