"""One command on every host, over real SSH servers: what it printed, how it ended, and that it ends with us."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from pathlib import Path

import pytest

from orchestrator.errors import ProbeError
from orchestrator.hosts import MOST_BYTES, exec, line_of
from orchestrator.transport import ConnectedHost, LocalTransport, exchange
from tests.support.ssh_rack import ssh_rack
from tests.support.sshd import needs_sshd, wait_for

pytestmark = needs_sshd
BOTH = ("exec", "--nodes", "a2000,v100")


@pytest.fixture(scope="module")
def rack(tmp_path_factory):
    with ssh_rack(tmp_path_factory.mktemp("rack")) as made:
        yield made


def on_one(rack, name, there, elsewhere):
    """A line of shell that does one thing on that host and another on the rest."""
    return f"if [ ${{SSH_CONNECTION##* }} = {rack.servers[name].port} ]; then {there}; else {elsewhere}; fi"


def lives(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def pids_in(folder):
    return [int(path.read_text()) for path in folder.glob("pid-*")]


def test_equal_answers_stand_there_once(rack):
    done = rack.types(*BOTH, "--", "hostname")
    assert (done.stdout, done.stderr) == (f"a2000, v100 (2):\n{socket.gethostname()}\n", "")


def test_several_words_arrive_as_they_are_and_one_is_a_line_of_shell(rack):
    words = ["a b", "$HOME", ";", "it's", "*", "--json", "--", ""]
    done = rack.types(*BOTH, "--", "printf", "<%s>", *words)
    assert done.stdout == "a2000, v100 (2):\n" + "".join(f"<{word}>" for word in words) + "\n"
    assert rack.types(*BOTH, "--", "echo $((40 + 2)) | tr 2 3").stdout == "a2000, v100 (2):\n43\n"
    assert line_of(["ls | wc"]) == "ls | wc" and line_of(["ls", "| wc"]) == "ls '| wc'"


def test_the_line_is_in_no_command_line_nor_in_the_environment_of_what_it_starts(rack):
    done = rack.types(*BOTH, "--", "cat /proc/$PPID/cmdline /proc/$$/cmdline; env; echo $0 $#: Bearer | cut -d: -f1")
    assert "Bearer" not in done.stdout and "PATH=" in done.stdout and done.stdout.endswith("\nsh 0\n")


def test_it_runs_in_the_home_folder_with_the_hosts_own_umask_and_nothing_to_read(rack):
    done = rack.types(*BOTH, "--", "pwd; umask; wc -c")
    assert done.stdout.splitlines()[1:] == [str(Path.home()), "0022", "0"]


def test_each_host_has_its_exit_code_and_its_own_standard_error(rack):
    done = rack.types(*BOTH, "--", on_one(rack, "v100", "echo bad >&2; exit 4", "echo good"), exit_code=1)
    assert done.stdout == "a2000 (1):\ngood\nv100 (1), exit code 4: no standard output\n"
    assert done.stderr == "v100 (1), standard error:\nbad\n"
    killed = rack.types(*BOTH, "--json", "--", "kill -9 $$", exit_code=1)
    nodes = json.loads(killed.stdout)["nodes"]
    assert {node["exit_code"] for node in nodes.values()} == {137}


def test_a_host_that_is_off_is_exit_code_3_and_the_others_are_heard(rack):
    done = rack.types("exec", "--", "echo here; exit 1", exit_code=3)
    assert done.stdout == "a2000, v100 (2), exit code 1:\nhere\n"
    assert "error: gone: nothing listens at 127.0.0.1:" in done.stderr
    document = json.loads(rack.types("exec", "--json", "--", "echo here", exit_code=3).stdout)
    assert document["schema"] == 1 and document["command"] == "echo here"
    ran = {"exit_code": 0, "stdout": "here\n", "stderr": "", "stdout_cut_bytes": 0, "stderr_cut_bytes": 0}
    assert document["nodes"]["a2000"] == document["nodes"]["v100"] == ran
    assert "127.0.0.1" in document["nodes"]["gone"]["error"]


def test_nothing_that_a_host_prints_steers_the_terminal(rack):
    line = r"printf 'a\033]0;title\007\033[2Jb\r\202\n[red]\tc\n'"
    for words in ((*BOTH, "--", line), (*BOTH, "--", f"{line} >&2")):
        done = rack.types(*words)
        assert "\nab�\n[red]\tc\n" in done.stdout + done.stderr
        assert not set("\x1b\x07\r") & set(done.stdout + done.stderr)
    ran = json.loads(rack.types(*BOTH, "--json", "--", line).stdout)["nodes"]["v100"]
    assert ran["stdout"] == "ab�\n[red]\tc\n"


def test_of_endless_output_the_beginning_comes_and_the_rest_is_counted(rack):
    line = "head -c 3000000 /dev/zero | tr '\\0' x; head -c 2000000 /dev/zero | tr '\\0' y >&2"
    done = rack.types(*BOTH, "--", line)
    assert f"a2000, v100 (2):\n{'x' * MOST_BYTES}\n" == done.stdout
    assert "note: a2000, v100: stdout is cut after 1.0MiB; up to 1.9MiB more\n" in done.stderr
    ran = json.loads(rack.types(*BOTH, "--json", "--", line).stdout)["nodes"]["v100"]
    assert ran["stderr"] == "y" * MOST_BYTES
    assert (ran["stdout_cut_bytes"], ran["stderr_cut_bytes"]) == (3_000_000 - MOST_BYTES, 2_000_000 - MOST_BYTES)


def test_when_its_time_is_up_all_of_it_is_ended(rack, tmp_path):
    line = f"echo hi; sleep 1000 & echo $! > {tmp_path}/pid-${{SSH_CONNECTION##* }}; wait"
    done = rack.types(*BOTH, "--timeout", "1s", "--", line, exit_code=1)
    assert done.stdout == "a2000, v100 (2), ended after 1 s:\nhi\n"
    pids = pids_in(tmp_path)
    assert len(pids) == 2 and not any(map(lives, pids))
    ran = json.loads(rack.types(*BOTH, "--timeout", "1s", "--json", "--", line, exit_code=1).stdout)["nodes"]["a2000"]
    assert ran["exit_code"] is None and ran["stdout"] == "hi\n"


def test_a_program_may_tidy_up_when_its_time_is_up(rack, tmp_path):
    file = f"{tmp_path}/tidied-${{SSH_CONNECTION##* }}"
    line = f'trap "sleep 0.5; echo yes >{file}; exit" TERM; while :; do sleep 0.05; done'
    rack.types(*BOTH, "--timeout", "1s", "--", "sh", "-c", line, exit_code=1)
    assert [path.read_text() for path in tmp_path.glob("tidied-*")] == ["yes\n"] * 2


def test_what_it_leaves_in_the_background_lives_on_and_is_not_waited_for(rack, tmp_path):
    line = f"sleep 1000 & echo $! > {tmp_path}/pid-${{SSH_CONNECTION##* }}; echo begun"
    done = rack.types(*BOTH, "--timeout", "10m", "--", line, timeout_s=40)
    assert done.stdout == "a2000, v100 (2):\nbegun\n"
    pids = pids_in(tmp_path)
    assert len(pids) == 2 and all(map(lives, pids))
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def test_ctrl_c_ends_it_on_every_host(rack, tmp_path):
    line = f"sleep 1000 & echo $! > {tmp_path}/pid-${{SSH_CONNECTION##* }}; wait"
    with rack.starts(*BOTH, "--", line) as running:
        wait_for(lambda: len(list(tmp_path.glob("pid-*"))) == 2 and all_written(tmp_path), "both hosts", 30)
        pids = pids_in(tmp_path)
        assert all(map(lives, pids))
        running.send_signal(signal.SIGINT)
        said = running.communicate(30)[1]
    assert running.returncode == 130 and "interrupted: every host ends the command" in said
    wait_for(lambda: not any(map(lives, pids)), "the commands to end")


def all_written(folder):
    return all(path.read_text().endswith("\n") for path in folder.glob("pid-*"))


def test_it_ends_with_a_program_that_nobody_hears(tmp_path):
    """The watchdog's alarm ends our program on the host: its command, too."""
    host = ConnectedHost(LocalTransport("here"), sys.executable, None, "/nowhere")
    line = f"sleep 1000 & echo $PPID $! > {tmp_path}/pids; wait"
    with exchange(host, "execute", {"line": line, "limit_s": 100, "most_bytes": 10}) as words:
        next(words)
        wait_for(lambda: (tmp_path / "pids").exists() and len((tmp_path / "pids").read_text().split()) == 2, "it", 30)
        ours, theirs = map(int, (tmp_path / "pids").read_text().split())
        os.kill(ours, signal.SIGALRM)
        wait_for(lambda: not lives(theirs), "the command to end")


@pytest.mark.parametrize(
    "word",
    [{"stdout": "???"}, {"stderr": 7}, {"stdout": "YQ==" * (MOST_BYTES + 1)}, {"end": {}}, {"end": {"exit_code": "x"}}],
    ids=["no base 64", "a number", "too much", "no exit code", "a word"],
)
def test_a_host_that_answers_anything_else_is_that_hosts_error(word, monkeypatch):
    class Said:
        def __enter__(self):
            return iter([word])

        def __exit__(self, *_):
            pass

    monkeypatch.setattr(exec, "exchange", lambda *_: Said())
    host = ConnectedHost(LocalTransport("here"), sys.executable, None, "/nowhere")
    with pytest.raises(ProbeError, match="here: its answer"):
        exec.run_on_host(host, "ls", 1.0)


def test_a_command_is_needed(rack):
    done = rack.types("exec", "--nodes", "a2000", exit_code=2)
    assert "Missing argument" in done.stderr


def test_no_line_that_it_prints_itself_is_wider_than_a_small_terminal(rack):
    names = rack.types(*BOTH, "--timeout", "1s", "--", "sleep 9", exit_code=1)
    assert max(map(len, names.stdout.splitlines())) <= 80
