"""This machine behaves as a host behind SSH does."""

import os
import time
from pathlib import Path

import pytest

from orchestrator.errors import ConnectError, ProbeError
from orchestrator.transport import LocalTransport, shell
from tests.support.sshd import wait_for

HERE = LocalTransport("here")
BINARY = bytes(range(256)) * 20_000  # 5 MB of every byte there is


def test_a_commands_outputs_and_exit_code_come_back_apart() -> None:
    result = HERE.run("echo out; echo err >&2; exit 3", timeout_s=10)
    assert (result.exit_code, result.stdout, result.stderr) == (3, b"out\n", b"err\n")


def test_a_signal_shows_as_128_and_its_number() -> None:
    assert HERE.run("kill -9 $$", timeout_s=10).exit_code == 137


def test_five_megabytes_go_in_and_out_on_both_streams_unchanged() -> None:
    result = HERE.run("tee /dev/stderr", stdin=BINARY, timeout_s=30)
    assert result.stdout == BINARY and result.stderr == BINARY


def test_a_command_need_not_read_what_it_is_given() -> None:
    assert HERE.run("exit 0", stdin=BINARY, timeout_s=10).exit_code == 0


def test_a_timeout_ends_the_whole_process_group(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    began = time.monotonic()
    with pytest.raises(ConnectError, match="here: the command did not end in time"):
        HERE.run(f"sleep 600 & echo $! > {pid_file}; wait", timeout_s=1.0)
    assert time.monotonic() - began < 60
    assert_ends(int(pid_file.read_text()))


def test_what_made_itself_a_session_lives_on(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    HERE.run(f"setsid sh -c 'echo $$ > {pid_file}; exec sleep 60' </dev/null >/dev/null 2>&1 &", timeout_s=10)
    wait_for(lambda: pid_file.exists() and pid_file.read_text().strip(), "the session's pid")
    os.kill(int(pid_file.read_text()), 9)  # raises when it is gone


def test_output_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell, "MAX_OUTPUT_BYTES", 1 << 20)
    with pytest.raises(ProbeError, match="longer than 1048576 bytes"):
        HERE.run("yes", timeout_s=30)


def test_the_environment_is_a_logins_not_the_callers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RANK", "7")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert HERE.run('echo "${RANK-none} $PWD $HOME"', timeout_s=10).stdout == f"none {tmp_path} {tmp_path}\n".encode()


def test_a_stream_brings_chunks_as_they_come_and_word_while_nothing_comes() -> None:
    with HERE.stream("echo first; read line; echo second $line; read more") as chunks:
        seen = [next(chunks), next(chunks)]
    assert seen == [b"first\n", b""]


def test_a_stream_ends_with_its_command() -> None:
    with HERE.stream("read line; echo got $line", stdin=b"word\n") as chunks:
        assert b"".join(chunks) == b"got word\n"


def test_leaving_a_stream_closes_the_commands_input_first(tmp_path: Path) -> None:
    said = tmp_path / "said"
    with HERE.stream(f"echo ready; cat; echo ended > {said}", stdin=b"") as chunks:
        next(chunks)
    assert said.read_text() == "ended\n"


def test_leaving_a_stream_ends_a_command_that_does_not_listen(tmp_path: Path) -> None:
    with HERE.stream("echo $$; exec sleep 60") as chunks:
        pid = int(next(filter(None, chunks)))
    assert_ends(pid)


def assert_ends(pid: int) -> None:
    def gone() -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
        except FileNotFoundError:
            return True

    wait_for(gone, f"process {pid} to end")
