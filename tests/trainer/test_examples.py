"""The examples in the docstrings of the trainer's torch-free modules are run, and give what they say."""

import doctest
from importlib import import_module
from pathlib import Path

import pytest

TRAINER = Path(__file__).parents[2] / "trainer"
SHARED = sorted(f"shared.{path.stem}" for path in (TRAINER / "shared").glob("*.py") if path.stem != "__init__")
WITH_EXAMPLES = {
    f"shared.{name}" for name in ("alpha_beta", "config", "experiments", "gpu_work", "pace", "shares", "slow")
}
MODULES = [*SHARED, "compute.microbatches", "rebalance.estimate"]


@pytest.mark.parametrize("name", MODULES)
def test_an_example_gives_what_it_says(name: str) -> None:
    failed, tried = doctest.testmod(import_module(f"trainer.{name}"))
    assert failed == 0
    assert tried or name in set(SHARED) - WITH_EXAMPLES
