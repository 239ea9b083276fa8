"""Quoting is tested where it matters: in real shells."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from orchestrator.transport import shell

SHELLS = ("sh", "dash", "bash", "zsh", "fish", "tcsh")
# What follows the program on standard input: every byte there is, line ends and NUL among them.
REQUEST = bytes(range(256)) * 64 + b"\r\n\n'\"$(exit 3)`exit 4`!!\n"
PROGRAM = """
import sys  # ünïcode, 'single', "double", $HOME, `back`, !history, \\\\ and a percent % stay as they are
sys.stdout.buffer.write(sys.stdin.buffer.read() + b"|" + repr((sys.argv, __name__)).encode())
""".encode()

ARGUMENT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=30)
NASTY = [
    "",
    " ",
    "-n",
    "*",
    "~",
    "$HOME",
    "$(exit 1)",
    "`x`",
    "a'b",
    'a"b',
    "\\",
    "a\nb",
    "!!",
    "ä🙂",
    "#x",
    "&&",
    "{a,b}",
]


@settings(max_examples=100)
@given(st.lists(ARGUMENT, min_size=1, max_size=100))
@example(NASTY)
def test_a_real_shell_hands_on_exactly_the_arguments_given(argv: list[str]) -> None:
    line = shell.join(["printf", "%s\\0", *argv])
    printed = subprocess.run(["sh", "-c", line], capture_output=True, check=True, timeout=30).stdout
    assert printed.decode().split("\0")[:-1] == argv


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home folder with a Python in a place that needs quoting."""
    folder = tmp_path_factory.mktemp("home")
    place = folder / "it's my (own) $python"
    place.mkdir()
    (place / "py 3").symlink_to(os.path.realpath(sys.executable))
    return folder


@pytest.fixture(params=SHELLS)
def login_shell(request: pytest.FixtureRequest) -> str:
    found = shutil.which(request.param)
    if found is None:
        pytest.skip(f"{request.param} is not installed")
    return found


def run_as_sshd_does(
    login_shell: str, line: str, program: bytes, home: Path, activate: str | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[bytes]:
    """sshd hands a command to the user's login shell with -c. activate: the line of shell ahead of the program."""
    ahead = f"{activate}\n".encode() if activate else b""
    return subprocess.run(
        [login_shell, "-c", line],
        input=b"%s%d\n%s%s" % (ahead, len(program), program, REQUEST),
        env={"HOME": str(home), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        cwd=cwd,
        capture_output=True,
        timeout=30,
    )


@pytest.mark.parametrize("place", ["name", "absolute", "below home"])
@pytest.mark.parametrize("activate", [None, 'export GREETING="it\'s $HOME" && cd /'])
def test_program_and_request_reach_python_whole(login_shell: str, place: str, activate: str | None, home: Path) -> None:
    inside = "it's my (own) $python/py 3"
    python = {"name": "python3", "absolute": f"{home}/{inside}", "below home": f"~/{inside}"}[place]
    line = shell.python_on_stdin(python, "orch-probe", activates=bool(activate))
    result = run_as_sshd_does(login_shell, line, PROGRAM, home, activate)
    assert result.stderr == b""
    assert result.stdout == REQUEST + b"|" + repr((["-c", "orch-probe", "exec"], "__main__")).encode()


@pytest.mark.parametrize("activate", [None, "true"])
def test_no_file_in_the_home_folder_is_taken_for_a_module(
    login_shell: str, activate: str | None, tmp_path: Path
) -> None:
    for name in ("signal", "json", "select"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a file of the person was run')")
    line = shell.python_on_stdin("python3", "orch-probe", activates=bool(activate))
    program = b"import json, select, signal; print(json.dumps('started'))"
    result = run_as_sshd_does(login_shell, line, program, tmp_path, activate, cwd=tmp_path)
    assert (result.stdout, result.stderr) == (b'"started"\n', b"")


def test_the_line_of_shell_in_the_inventory_runs_before_python(login_shell: str, home: Path) -> None:
    program = b"import os; print(os.environ['GREETING'], os.getcwd())"
    line = shell.python_on_stdin("python3", "orch-probe", activates=True)
    greets = 'export GREETING="it\'s $HOME" && cd /'
    assert run_as_sshd_does(login_shell, line, program, home, greets).stdout.decode() == f"it's {home} /\n"


ENDS = [
    "cd / # a comment",
    "cd /;",
    "cd /no/such 2>&- || cd /",
    "true &",
    "cat",
    " cd / ",
    r"test '\n' = '\n'",
    "! false",
]


@pytest.mark.parametrize("activate", ENDS)
def test_that_line_may_end_in_any_way(login_shell: str, activate: str, home: Path) -> None:
    line = shell.python_on_stdin("python3", "orch-probe", activates=True)
    assert run_as_sshd_does(login_shell, line, b"print('started')", home, activate).stdout == b"started\n"


def test_no_user_of_the_host_reads_that_line_in_a_command_line(login_shell: str, home: Path) -> None:
    seen = home / f"seen-{login_shell.rpartition('/')[2]}"
    line = shell.python_on_stdin("python3", "orch-probe", activates=True)
    looks = f"for id in $$ $PPID; do cat /proc/$id/cmdline; done >{seen} # Bearer 4711"
    assert run_as_sshd_does(login_shell, line, b"print('started')", home, looks).stdout == b"started\n"
    assert b"orch-probe" in seen.read_bytes() and b"4711" not in seen.read_bytes()


def test_python_is_not_started_when_that_line_fails(login_shell: str, home: Path) -> None:
    line = shell.python_on_stdin("python3", "orch-probe", activates=True)
    result = run_as_sshd_does(login_shell, line, b"print('started')", home, ". /no/such/venv")
    assert result.returncode != 0
    assert result.stdout == b"" and b"/no/such/venv" in result.stderr


def test_a_python_that_is_not_there_ends_with_code_126_or_127(login_shell: str, home: Path) -> None:
    line = shell.python_on_stdin("~/no such/python", "orch-probe")
    result = run_as_sshd_does(login_shell, line, b"", home)
    assert result.returncode in (126, 127)


def test_a_traceback_names_the_program(login_shell: str, home: Path) -> None:
    line = shell.python_on_stdin("python3", "orch-probe")
    result = run_as_sshd_does(login_shell, line, b"\n\nraise ValueError('seen')", home)
    assert b'File "orch-probe", line 3' in result.stderr


def test_the_bootstrap_holds_nothing_that_any_shell_treats_specially_in_quotes() -> None:
    line = shell.python_on_stdin("python3", "orch-probe")
    quoted = re.findall(r"'([^']*)'", line)
    assert len(quoted) == 1
    assert not set(quoted[0]) & set('\\!$`"\n')
