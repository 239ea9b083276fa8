"""The settings of a sweep, and how they reach a program."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.errors import InventoryError, UsageError
from orchestrator.planning import JobSpec, read_job
from orchestrator.sweeps import axis_of, drawn, parse_grid, read_sweep, sweep_of, with_values


def settings(typed, count=None):
    return drawn([axis_of(name, given) for name, given in parse_grid(typed).items()], count)


def test_a_grid_has_all_combinations_and_the_last_key_changes_first():
    assert settings(["lr=0.1,0.01", "seed=0:2"]) == [
        {"lr": "0.1", "seed": "0"}, {"lr": "0.1", "seed": "1"}, {"lr": "0.01", "seed": "0"}, {"lr": "0.01", "seed": "1"}
    ]  # fmt: skip
    assert [each["n"] for each in settings(["n=4:0:-2"])] == ["4", "2"]
    assert settings(["m=a"]) == [{"m": "a"}]


@given(st.integers(1, 60))
def test_drawn_settings_are_different_and_more_of_them_begin_with_the_same(count):
    typed = ["lr=1e-4..1e-1:log", "width=64,128", "dropout=0.0..0.5"]
    found = settings(typed, count)
    assert len(found) == count and len({tuple(each.values()) for each in found}) == count
    assert settings(typed, count + 1)[:count] == found
    assert all(1e-4 <= float(each["lr"]) <= 1e-1 and 0 <= float(each["dropout"]) <= 0.5 for each in found)


def test_no_more_are_drawn_than_there_are():
    assert sorted(each["a"] for each in settings(["a=1,2,3"], 20)) == ["1", "2", "3"]


@pytest.mark.parametrize(
    ("typed", "count", "words"),
    [
        (["lr"], None, "expected KEY=VALUE"),
        (["lr=1", "lr=2"], None, "given twice"),
        (["lr=0.1..0.9"], None, "add --random"),
        (["lr=0..1:log"], 5, "above 0"),
        (["lr=2..1"], 5, "expected LOW..HIGH"),
        (["seed=3:0"], None, "0 values"),
        (["a=0:2000", "b=0:2000"], None, "4,000,000 jobs"),
        (["9=1"], None, "not a key"),
        (["lr="], None, "no value"),
    ],
)
def test_a_wrong_grid_is_refused_with_the_form_expected(typed, count, words):
    with pytest.raises(UsageError, match=words):
        settings(typed, count)


@pytest.mark.parametrize(
    ("job", "values", "expected"),
    [
        (
            {"exp": "mnist_lenet", "settings": {"epochs": "1"}},
            {"lr": "0.1"},
            {"settings": {"epochs": "1", "lr": "0.1"}},
        ),
        ({"script": "t.py", "args": ["--epochs", "3"]}, {"lr": "0.1"}, {"args": ["--epochs", "3", "--lr", "0.1"]}),
        ({"script": "t.sh", "args": ["{lr}", "w={w}"]}, {"lr": "0.1", "w": "8"}, {"args": ["0.1", "w=8"]}),
        ({"script": "t.py"}, {"env.LR": "0.1", "set.strategy": "ddp"}, {"env": {"LR": "0.1"}, "args": []}),
    ],
)
def test_values_reach_a_program_as_settings_arguments_places_or_variables(job, values, expected):
    made = with_values(JobSpec.model_validate(job), values)
    assert {name: getattr(made, name) for name in expected} == expected
    assert made.note == " ".join(f"{key}={value}" for key, value in values.items())


def test_a_sweep_file_is_a_job_file_with_a_grid(tmp_path):
    (tmp_path / "train.py").touch()
    file = tmp_path / "sweep.yaml"
    file.write_text(
        "script: train.py\nargs: [--epochs, 3]\ngrid: {lr: [0.10, 1e-3], seed: '0:2'}\ngpus: 1\nstop: median\n"
    )
    job, asked = read_sweep(file)
    assert job.args == ["--epochs", "3"] and asked.gpus == 1 and asked.stop == "median"
    assert [axis.values for axis in asked.axes] == [("0.10", "1e-3"), ("0", "1")]


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("script: t.py\ngrid: {}\n", 2, "grid"),
        ("script: t.py\ngrid: {lr: '1..2'}\nretries: 3\n", 3, "not for the jobs of a sweep"),
        ("script: t.py\ngrid: {lr: '1,2'}\ngpus: 1\nhosts: 2\n", 3, "leave one of them out"),
        ("script: t.py\ngrid: {lr: '1,2'}\nlength: epochs\n", 3, "no key of the grid"),
        ("grid: {lr: '1,2'}\n", 0, "no script, module or experiment given"),
        ("script: t.py\ngrid: {lr: '1,2'}\nstopp: median\n", 3, "stopp"),
    ],
)
def test_every_mistake_of_a_sweep_file_has_its_line(tmp_path, text, line, words):
    file = tmp_path / "sweep.yaml"
    file.write_text(text)
    with pytest.raises(InventoryError) as error:
        read_sweep(file)
    assert [(each.line, words in each.message) for each in error.value.mistakes] == [(line, True)]


def test_a_sweep_file_given_to_run_names_the_command(tmp_path):
    file = tmp_path / "sweep.yaml"
    file.write_text("script: t.py\ngrid: {lr: '1,2'}\n")
    with pytest.raises(InventoryError, match=f"`grid` makes it a sweep: `orch sweep {file}`"):
        read_job(file)


def test_contradicting_options_are_refused():
    with pytest.raises(UsageError, match="leave one of them out"):
        sweep_of(grid={"lr": "1"}, gpus=1, hosts=2)
    with pytest.raises(UsageError, match="numbers above 0"):
        sweep_of(grid={"m": "a,b"}, length="m")
