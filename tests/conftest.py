"""What every test gets: no SSH configuration, agent or orch state of the person who runs them."""

import pytest


@pytest.fixture(autouse=True)
def _nobody_in_particular(monkeypatch, tmp_path):
    monkeypatch.setenv("ORCH_HOME", str(tmp_path / "orch-home"))
    monkeypatch.setenv("ORCH_SSH_CONFIG", "/dev/null")
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
