"""`orch run job.yaml` and `orch run --save job.yaml`, over the local transport: the same plan, the same run again."""

from __future__ import annotations

import shutil

import pytest

from orchestrator.cli.run import run
from orchestrator.planning import JobSpec
from tests.support.commands import options_of
from tests.support.local_cluster import SCRIPT, Place


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    made = Place(tmp_path_factory.mktemp("person"))
    (made.here / "-x").mkdir()
    for name in ("-a b.py", "-c.py", "-m"):
        (made.here / "-x" / name).write_text(SCRIPT)
    return made


def test_only_how_a_job_is_started_and_shown_is_no_part_of_it() -> None:
    words = {"is_module", "command"}  # `script`, `module` and `args`
    here = {"detach", "dry_run", "as_json", "save", "notify"}
    of_job = {*JobSpec.model_fields} - {"script", "module", "args"}
    assert {one.name for one in options_of(run)} - words - here == of_job


LIMITS = ["--grace", "5s", "--time-limit", "90m", "--share"]
ASKED = {
    "as many hosts as there are": ["--exp", "mnist_lenet", "--hosts", "1:2"],
    "an experiment": ["--exp", "mnist_lenet", "--set", "epochs=1", "--set", "lr=1e-2", "--nodes", "b"],
    "settings that are chosen here": ["--exp", "mnist_lenet", "--set", "shares=equal", "--cluster", "rack"],
    "limits and variables": [*LIMITS, "--env", "A=1_0", "--env", "HF_TOKEN", "--env-file", "my.env", "proj/train.py"],
    "words of a script": ["--batch", "8", "--no-metrics", "proj/train.py", "--lr", "0.10", "", "a: b", "null"],
    "a launcher": ["--pass-local-rank", "--", "torchrun", "--nnodes", "2", "proj/train.py", "--x"],
    "flags of Python": ["--folder", "proj", "--", "python", "-u", "-m", "pack.train", "-v"],
    "a module": ["--folder", "proj", "-m", "pack.train", "--x"],
    "a script whose name begins like an option": ["--", "-x/-a b.py", "-c", "--lr"],
}


@pytest.mark.parametrize("name", ["job.yaml", "jobs/deep/job.yml"])
@pytest.mark.parametrize("words", ASKED.values(), ids=ASKED)
def test_a_saved_job_has_the_same_plan_again(words: list[str], name: str, place: Place) -> None:
    (place.here / name).unlink(missing_ok=True)
    asked = place.plan("--save", name, *words)
    assert place.plan(name) == asked
    assert place.plan(str(place.here / name), cwd="proj") == asked
    assert "hf_secret" not in (place.here / name).read_text()


@pytest.mark.parametrize("words", [["-x/-a b.py"], ["-x/-c.py"], ["-x/-m"], ["--folder", ".", "--", "-x/-a b.py"]])
def test_a_name_that_begins_like_an_option_is_a_name(words: list[str], place: Place) -> None:
    before = [] if "--" in words else ["--"]
    done = place.types("run", "--name", "dash", *before, *words, "-c", "print(1)")
    assert "given -c print(1)" in done.stdout, done.stdout + done.stderr
    if words[0] != "--folder":
        done = place.types("run", "--name", "dash", "--", words[0].removeprefix("-x/"), "-c", cwd="-x")
        assert "given -c" in done.stdout, done.stdout + done.stderr


def test_a_module_of_this_folder_and_a_file_that_is_shipped_itself(place: Place) -> None:
    for name in ("inner.yaml", "jobs/inner.yaml"):
        asked = place.plan("--save", name, "-m", "pack.train", cwd="proj")
        assert "inner.yaml" in " ".join(asked["files"]) and place.plan(name, cwd="proj") == asked
    shutil.rmtree(place.here / "proj/jobs")
    (place.here / "proj/inner.yaml").unlink()


def test_options_before_and_behind_the_file_beat_it(place: Place) -> None:
    text = "script: proj/train.py\nargs: [--lr, 0.1]\nnodes: [a]\nenv: {A: 1, LR: 2}\ntime_limit: 9m\n"
    (place.here / "mine.yaml").write_text(text)
    plan = place.plan("--nodes", "b", "mine.yaml", "--env", "A=3", "--env-file", "my.env", "--", "--lr", "0.2")
    assert [node["name"] for node in plan["nodes"]] == ["b"] and plan["time_limit_s"] == 540
    assert plan["nodes"][0]["command"] == ["train.py", "--lr", "0.1", "--lr", "0.2"]
    assert plan["variables"] == ["LR", "B", "A"]  # the file of variables that was named here beats LR, too
    assert place.plan("--", "mine.yaml", "--nodes")["nodes"][0]["command"][-1] == "--nodes"
    wrong = place.types("run", "mine.yaml", "more", code=2)
    assert "more: words for the script of mine.yaml go after `--`" in wrong.stderr


def test_settings_on_the_line_are_laid_over_those_of_the_file(place: Place) -> None:
    (place.here / "exp.yaml").write_text("exp: mnist_lenet\nsettings: {epochs: 3, batch: 64}\n")
    settings = place.plan("exp.yaml", "--set", "epochs=2")["settings"]
    assert (settings["epochs"], settings["batch"]) == (2, 64)
    wrong = place.types("run", "exp.yaml", "--", "--lr", code=2)
    assert "exp.yaml starts no script that could be given --lr" in wrong.stderr


def test_what_is_there_is_not_written_over_in_silence(place: Place) -> None:
    words = ("run", "--dry-run", "--exp", "mnist_lenet", "--save")
    assert "wrote kept.yaml" in place.types(*words, "kept.yaml").stderr
    assert "replaced kept.yaml" in place.types(*words, "kept.yaml", "--set", "epochs=2").stderr
    (place.here / "other.yaml").write_text("lr: 0.1\n")
    refused = place.types(*words, "other.yaml", code=2)
    assert "other.yaml already exists, and orch did not write it" in refused.stderr
    assert (place.here / "other.yaml").read_text() == "lr: 0.1\n"
    assert "ends in .yaml or .yml" in place.types(*words, "job.txt", code=2).stderr
    assert "'epoch': " not in place.types(*words, "wrong.yaml", "--set", "epoch=2", code=2).stderr
    assert not (place.here / "wrong.yaml").exists()


def test_a_collected_run_is_repeated_by_the_file_beside_it(place: Place) -> None:
    first = place.types("run", "--nodes", "b", "--env", "LR=3", "--detach", "proj/train.py", "two words").stdout.strip()
    place.types("logs", "-f", "--job", first)
    shown = place.types("collect", "--job", first).stdout
    file = place.here / "runs" / first / "job.yaml"
    assert f"repeat: orch run --cluster rack --folder {place.here}/proj --env LR --nodes b -- " in shown
    assert "orch run job.yaml" in file.with_name("report.html").read_text()
    again = place.types("run", str(file), "--env", "LR=3", cwd="proj")
    assert "[b 0] given two words 3" in again.stdout
    file.write_text("mine\n")
    place.types("collect", "--job", first)
    assert file.read_text() == "mine\n"
