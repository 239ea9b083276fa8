import pytest

from tests.support.plan_command import lab_home


@pytest.fixture
def home(tmp_path, monkeypatch):
    return lab_home(tmp_path, monkeypatch)
