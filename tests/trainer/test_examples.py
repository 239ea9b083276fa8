"""The examples in docstrings of the trainer are run, and give what they say."""

import doctest
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = {
    path.relative_to(ROOT).with_suffix("").as_posix().replace("/", "."): path.read_text().count(">>> ")
    for path in sorted((ROOT / "trainer").rglob("*.py"))
}
"""How many lines of examples each module has."""


@pytest.mark.parametrize("name", [name for name, count in EXAMPLES.items() if count])
def test_an_example_gives_what_it_says(name: str) -> None:
    failed, tried = doctest.testmod(import_module(name))
    assert failed == 0
    assert tried == EXAMPLES[name]


def test_every_part_of_the_trainer_has_some() -> None:
    packages = {name.split(".")[1] for name, count in EXAMPLES.items() if count}
    assert packages >= {"compute", "data", "measure", "paced", "pipeline", "rebalance", "shared"}
