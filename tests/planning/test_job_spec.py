"""One job in all its forms: the command line, a file, Python keywords and the line that repeats it give the same spec,
and a mistake between two options is the same sentence in each.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import click
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.cli import main
from orchestrator.cli.run import run
from orchestrator.cli.spec_words import spec_of
from orchestrator.errors import UsageError
from orchestrator.planning import OPTIONS, JobSpec, checked, is_bare, job_text, key_of, read_job, words
from orchestrator.planning.job_spec import PYTHON

WORD = st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")), min_size=1, max_size=8)
NAME = st.from_regex(r"[a-z][a-z0-9]{0,7}", fullmatch=True)
VARIABLE = st.from_regex(r"[A-Z][A-Z0-9]{0,3}_X", fullmatch=True)
SECONDS = st.one_of(st.integers(1, 10**6).map(float), st.sampled_from([0.5, 1.25, 90.0]))


def values_of(name: str) -> st.SearchStrategy[Any]:
    field = JobSpec.model_fields[name]
    kinds = get_args(field.annotation)
    if field.annotation is bool:
        return st.just(True)
    if name.endswith("_s"):
        return SECONDS
    if get_origin(field.annotation) is Literal:
        return st.sampled_from(kinds)
    least, most = (
        next((getattr(limit, key) for limit in field.metadata if hasattr(limit, key)), usual)
        for key, usual in (("ge", 0), ("le", 4096))
    )
    return st.integers(least, most) if int in kinds else NAME


VALUES: dict[str, st.SearchStrategy[Any]] = {
    **{name: values_of(name) for name in OPTIONS if name != "exp"},
    "settings": st.sampled_from([{"seed": "1"}, {"seed": "0", "checkpoint_every": "500"}]),
    "keep": st.lists(NAME, unique=True, min_size=1, max_size=2),
    "folder": st.just("."),
    "env": st.dictionaries(VARIABLE, st.none() | WORD, min_size=1, max_size=3),
    "env_files": st.lists(NAME.map(lambda name: f"{name}.env"), min_size=1, max_size=2),
    "nodes": st.lists(NAME | st.just("gpu[01-16]"), min_size=1, max_size=3),
    "hosts": st.sampled_from(["1:2", "3"]),
    "silence_s": st.sampled_from([20.0, 60.0, 3600.0]),
}
"""Values are written by hand for kinds with a grammar of their own, and derived for the others."""
OF_SCRIPT = {"keep", "folder", "batch", "pass_local_rank", "no_metrics", "resume"}


@st.composite
def specs(draw: st.DrawFn) -> JobSpec:
    """Of every field; without those that contradict each other."""
    kind = draw(st.sampled_from(["exp", "script", "module"]))
    program: dict[str, Any] = {"exp": "mnist_lenet"} if kind == "exp" else {kind: draw(NAME)}
    program |= {"args": args} if kind != "exp" and (args := draw(st.lists(WORD, max_size=3))) else {}
    names = draw(st.sets(st.sampled_from(sorted(VALUES))))
    names -= OF_SCRIPT if kind == "exp" else set()
    names -= {"share", "hosts"} if names & {"wait", "wait_limit_s"} else set()
    names -= {"priority"} if not names & {"wait", "wait_limit_s"} else set()
    names |= {"retries"} if names & {"rejoin", "retry_on", "retry_wait_s"} else set()
    return JobSpec.model_validate({**program, **{name: draw(VALUES[name]) for name in sorted(names)}})


def typed(*line: str) -> JobSpec:
    context = run.make_context("run", list(line), parent=click.Context(main, **main.context_settings))
    return spec_of(context, context.params)


def test_every_field_is_tried() -> None:
    assert {*VALUES} == {*OPTIONS} - {"exp"}


@given(specs())
def test_every_form_of_a_job_is_the_same_job(tmp_path_factory: pytest.TempPathFactory, spec: JobSpec) -> None:
    assert typed(*words(spec)) == spec
    assert checked({name: getattr(spec, name) for name in spec.model_fields_set}, PYTHON) == spec
    folder = tmp_path_factory.getbasetemp()
    with pytest.MonkeyPatch.context() as here:
        here.chdir(folder)
        Path("job.yaml").write_text(job_text(spec))
        read = read_job(Path("job.yaml"))
    ships_current = spec.module or is_bare(spec.script or "a.py")
    assert read == (spec if spec.folder or not ships_current else spec.updated(folder="."))


@pytest.mark.parametrize(
    "words", [("--hosts", "2:1"), ("--retries", "0"), ("--retries", "21"), ("--set", "x"), ("--env", "1A=2")]
)
def test_a_mistake_next_to_a_job_file_is_one_line(
    words: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.yaml").write_text("exp: mnist_lenet\n")
    with pytest.raises(UsageError, match=f"^{words[0]}: "):
        typed("job.yaml", *words)


def test_empty_names_and_odd_settings_are_refused_in_words() -> None:
    with pytest.raises(UsageError, match="--exp: is empty"):
        typed("--exp", "")
    with pytest.raises(UsageError, match="settings"):
        checked({"exp": "mnist_lenet", "settings": {1: None}}, PYTHON)
    assert "s3cret" not in repr(JobSpec(script="x", env={"A": "s3cret"}))


def from_line(values: dict[str, Any]) -> None:
    typed(*words(JobSpec.model_validate(values)))


def from_python(values: dict[str, Any]) -> None:
    checked(values, PYTHON)


def from_file(values: dict[str, Any]) -> None:
    dumped = JobSpec.model_validate(values).model_dump(by_alias=True, exclude_unset=True)
    dumped = {key: f"{value}s" if isinstance(value, float) else value for key, value in dumped.items()}
    Path("job.yaml").write_text(yaml.safe_dump(dumped))
    read_job(Path("job.yaml"))


TOGETHER = {
    "nothing to run": ({"share": True}, "no script, module or experiment given"),
    "two programs": ({"exp": "mnist_lenet", "module": "x"}, "EXP and MODULE contradict each other"),
    "a share and a wait": (
        {"script": "x", "share": True, "wait": True},
        "SHARE uses GPUs next to other jobs",
    ),
    "hosts and a limit": ({"script": "x", "hosts": "1:2", "wait_limit_s": 5.0}, "HOSTS does without hosts that are in"),
    "another program": ({"exp": "mnist_lenet", "resume": "j"}, "RESUME runs what the job ran; SETTINGS changes its"),
    **{
        name: ({"script": "x", name: value}, f"{name.upper()} belongs to RETRIES")
        for name, value in {"retry_on": "any", "rejoin": True, "retry_wait_s": 30.0}.items()
    },
    **{
        name: ({"exp": "mnist_lenet", name: value}, f"{name.upper()} belongs to a script or module of your own")
        for name, value in {"batch": 8, "keep": ["out"], "no_metrics": True, "folder": "."}.items()
    },
}


@pytest.mark.parametrize("form", [from_line, from_file, from_python])
@pytest.mark.parametrize(("values", "said"), TOGETHER.values(), ids=TOGETHER)
def test_options_that_need_or_exclude_each_other_say_so_alike(
    form: Callable[[dict[str, Any]], None],
    values: dict[str, Any],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as refused:
        form(values)
    names = {"line": "--{}", "file": "`{}`", "python": "{}="}[form.__name__.removeprefix("from_")]

    def spelled(name: str) -> str:
        if form is from_line:
            name = {"settings": "set", "module": "MODULE"}.get(name, name)
            return "-m MODULE" if name == "MODULE" else names.format(key_of(name).replace("_", "-"))
        return names.format(name if form is from_python else key_of(name))

    expected = re.sub(r"\b[A-Z][A-Z_]+\b", lambda word: spelled(word[0].lower()) if word[0] != "GPU" else word[0], said)
    assert expected.replace("gpus=", "GPUs") in str(refused.value)
