"""The command line as a person meets it: in a fresh interpreter, with no cluster or one of this machine alone."""

import json
import os
import subprocess
import sys

import pytest

from orchestrator.cli import main
from tests.support.commands import COMMANDS

HEAVY = {"asyncio", "rich", "pydantic", "fabric", "paramiko", "torch", "duckdb", "matplotlib", "yaml", "jinja2"}
HEAVY |= {"socket", "json"}


def orch(*words, **more):
    return subprocess.run([sys.executable, "-m", "orchestrator.cli", *words], capture_output=True, text=True, **more)


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_command_shows_a_line_to_type(words, capsys):
    with pytest.raises(SystemExit) as end:
        main([*words, "--help"], prog_name="orch", terminal_width=80)
    assert end.value.code == 0
    shown = capsys.readouterr().out.splitlines()
    assert [line for line in shown if len(line) > 80] == []
    lines = [line.strip() for line in shown]
    assert any(line.startswith(f"orch {' '.join(words)}") for line in lines), lines


def test_the_help_has_every_command_in_a_section_and_whole_sentences(capsys):
    assert sorted(name for names in main.sections.values() for name in names) == sorted(main.commands)
    with pytest.raises(SystemExit):
        main(["--help"], prog_name="orch", terminal_width=80)
    shown = capsys.readouterr().out
    assert "..." not in shown.replace("[ARGS]...", "") and max(map(len, shown.splitlines())) <= 80
    words = " ".join(shown.split())
    assert "End a job on all its hosts, then check that nothing is left" in words
    assert shown.index("Hosts:") < shown.index("Jobs:") < shown.index("Results:") < shown.index("Cleaning up:")


def test_help_imports_nothing_heavy():
    code = "import sys, atexit; atexit.register(lambda: print(*sys.modules, file=sys.stderr)); "
    code += "from orchestrator.cli import main; main(['--help'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "orch up" in done.stdout
    assert {name.partition(".")[0] for name in done.stderr.split()} & HEAVY == set()


@pytest.mark.parametrize(
    ("line", "code"),
    [("--help", 0), ("nosuch", 2), ("--help >&-", 0), ("jobs --json >/dev/full", 1), ("jobs --json | true", 0)],
)
def test_the_program_ends_with_its_commands_exit_code(tmp_path, line, code):
    env = {**os.environ, "ORCH_HOME": str(tmp_path), "PYTHON": sys.executable}
    shell = f'set -o pipefail; "$PYTHON" -m orchestrator.cli {line}'
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, env=env)
    assert (done.returncode, "Traceback" in done.stderr) == (code, False), done.stderr


def test_a_command_that_neither_analyses_nor_ships_imports_nothing_for_it(tmp_path):
    code = "import sys, atexit; atexit.register(lambda: print(*sys.modules, file=sys.stderr)); "
    code += "from orchestrator.cli import main; main(['jobs'])"
    env = {**os.environ, "ORCH_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert "orchestrator.controller" in done.stderr.split()
    loaded = set(done.stderr.split())
    assert {name.partition(".")[0] for name in loaded} & {"duckdb", "matplotlib", "pathspec", "paramiko"} == set()
    rooms = ("doctor", "forecast", "starting", "results", "studies", "provision")
    assert {name for name in loaded if name.startswith(tuple(f"orchestrator.{room}." for room in rooms))} == set()
    assert loaded & {"orchestrator.hosts.yamlfile", "orchestrator.jobs.running", "trainer.shared.settings"} == set()


def test_duckdb_comes_with_the_analysis_alone():
    code = "import sys, orchestrator.controller, orchestrator.forecast.inputs, orchestrator.results.single_host\n"
    code += "import orchestrator.cli.results, orchestrator.views.console, orchestrator.studies.study\n"
    code += "print('duckdb' in sys.modules)\nimport orchestrator.results.analyse\nprint('duckdb' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_completion_script_is_made(shell):
    code = "from orchestrator.cli import main; main(prog_name='orch')"
    env = {**os.environ, "_ORCH_COMPLETE": f"{shell}_source"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.returncode == 0
    assert "_ORCH_COMPLETE" in done.stdout


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("orch run --exp mn", ["mnist_lenet"]),
        ("orch run --exp mnist_lenet --set strat", ["strategy="]),
        ("orch run --exp mnist_lenet --set model=l", ["model=lenet"]),
        ("orch run --exp mnist_lenet --set strategy=au", ["strategy=auto"]),
        ("orch run --exp mnist_lenet --set strategy = au", ["auto"]),  # as bash itself divides it
        ("orch run --exp mnist_lenet --set fidelity =", ["exact", "half", "compressed", "late", "local"]),
        ("orch run --exp mnist_lenet --set steps = 5 --set model = l", ["lenet"]),
        ("orch status --cluster = r", ["rack"]),
        ("orch run --nodes v100,a2000 --hosts 2 : ", ["2"]),
        ("orch run --exp co", ["collectives"]),
        ("orch plan --exp resnet1", ["resnet152_cifar"]),
        ("orch plan --exp mnist_lenet --nodes a", ["a2000"]),
        ("orch run --nodes v100,a", ["v100,a2000"]),
        ("orch run --hosts ", ["1:2", "2:2"]),
        ("orch run --nodes v100 --hosts ", ["1:1"]),
        ("orch master ", ["a2000", "v100"]),
        ("orch master --cluster other ", []),
        ("orch run --nodes v1* --hosts ", ["1:1"]),
        ("orch exec --nodes a2000,v", ["a2000,v100"]),
        ("orch ssh ", ["a2000", "v100"]),
        ("orch logs --job ", ["latest", "two-20261122-0000-bbb", "one-20261121-0000-aaa"]),
        ("orch collect --job one", ["one-20261121-0000-aaa"]),
        ("orch status --cluster r", ["rack"]),
    ],
)
def test_names_are_completed(line, offered, tmp_path):
    for job in ("one-20261121-0000-aaa", "two-20261122-0000-bbb"):
        (tmp_path / "jobs" / job).mkdir(parents=True)
        (tmp_path / "jobs" / job / "job.json").write_text("{}")
    (tmp_path / "clusters").mkdir()
    (tmp_path / "clusters" / "rack.json").write_text('{"nodes": [{"name": "a2000"}, {"name": "v100"}]}')
    (tmp_path / "current").write_text("rack\n")
    words = line.split(" ")
    asked = {"_ORCH_COMPLETE": "bash_complete", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    code = "from orchestrator.cli import main; main(prog_name='orch')"
    env = {**os.environ, "ORCH_HOME": str(tmp_path), **asked}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
    assert [found.partition(",")[2] for found in done.stdout.splitlines() if found] == offered


WRONG = {
    "no such command": (["launch"], "No such command 'launch'"),
    "nothing to run": (["run"], "no script, module or experiment given"),
    "two things to run": (["run", "--exp", "mnist_lenet", "-m", "x"], "--exp and -m MODULE contradict each other"),
    "no cluster": (["status"], "no cluster yet"),
    "no job": (["collect", "--job", "latest"], "no job yet"),
    "no pair": (["run", "--exp", "mnist_lenet", "--set", "epochs"], "--set: 'epochs' is not KEY=VALUE"),
    "an unknown setting": (["run", "--exp", "mnist_lenet", "--set", "epoch=1"], "epochs"),
    "an unknown experiment": (["run", "--exp", "mnist_lenett"], "mnist_lenet"),
    "an option of earlier versions": (["run", "--elastic", "2:3", "--exp", "mnist_lenet"], "is no longer an option"),
    "a page with another name": (["help", "scritps"], "did you mean scripts? pages: "),
    "a command that help lacks": (["help", "doctr"], "did you mean doctor? pages: "),
    "no time": (["run", "--time-limit", "soon", "--", "x.py"], "'soon' is not a time"),
    "no script": (["run", "--", "nowhere.py"], "nowhere.py: no such script"),
    "a question in a document": (["down", "--json"], "add --yes"),
    "no inventory": (["up", "nowhere.yaml"], "nowhere.yaml"),
}


@pytest.mark.parametrize(("words", "said"), WRONG.values(), ids=list(WRONG))
def test_wrong_usage_gives_exit_code_2_and_one_line_that_says_it(words, said, tmp_path):
    done = orch(*words, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    errors = [line for line in done.stderr.splitlines() if line.lower().startswith("error:")]
    assert len(errors) == 1
    assert said in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("words", [("jobs",), ("jobs", "--json")])
def test_a_reader_that_leaves_is_no_error(words):
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as output:
        done = subprocess.run([sys.executable, "-m", "orchestrator.cli", *words], stdout=output, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (0, b"")


def test_jobs_without_any_is_an_empty_document():
    assert json.loads(orch("jobs", "--json").stdout) == {"schema": 1, "jobs": [], "waiting": []}


@pytest.mark.parametrize("command", ["run", "profile", "plan"])
def test_an_option_of_the_script_that_stands_before_it_is_shown_its_place(command, capsys):
    with pytest.raises(SystemExit) as end:
        main([command, "--learning-rate", "0.1", "train.py"], prog_name="orch")
    said = capsys.readouterr().err
    assert (end.value.code, f"go after it: orch {command} train.py --learning-rate ..." in said) == (2, True)
