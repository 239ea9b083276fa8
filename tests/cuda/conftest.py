"""The stand-in, built where it can be, and a machine of its GPUs for all tests here."""

import pytest

from tests.cuda.build import CannotBuild
from tests.cuda.machine import Machine


@pytest.fixture(scope="session")
def machine():
    try:
        made = Machine()
    except CannotBuild as error:
        pytest.skip(f"no stand-in for CUDA: {error}")
    yield made
    made.close()
