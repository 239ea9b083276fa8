"""What a shell prints beside our programs: a greeting in `.bashrc`, a ForceCommand that prints, noise without end."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import replace

import pytest

from orchestrator.errors import ConnectError, ProbeError
from orchestrator.jobs import Agent, Beat, FilePiece, read_frames
from orchestrator.transport import MAX_NOISE_BYTES, ConnectedHost, LocalTransport, exchange, new_marker, open_stream
from orchestrator.transport import ask as call
from orchestrator.transport.ask import ask
from tests.support.lab import lab
from tests.support.terminal import Person

INVENTORY = """
cluster: noise
defaults: {device: cpu, ranks: 1}
nodes: [{name: greets, host: 10.93.1.1}, {name: forces, host: 10.93.1.2}]
"""
BASHRC = "echo welcome to this host; printf 'no line end: {'; (sleep 0.2; echo tick) &\n"
WRAPPER = """#!/bin/sh
printf 'All use is monitored.\\n{"beat": 1}\\n'
sh -c "$SSH_ORIGINAL_COMMAND"
code=$?
echo goodbye
exit $code
"""
SCRIPT = """
import os, pathlib, sys, time
print("hello from", os.environ["RANK"], flush=True)
while "wait" in sys.argv:
    time.sleep(0.05)
"""


@pytest.fixture(scope="module")
def person(tmp_path_factory):
    with lab(INVENTORY, quick=True) as pair:
        folder = tmp_path_factory.mktemp("work")
        someone = Person(pair, tmp_path_factory.mktemp("home"), folder)
        (folder / "train.py").write_text(SCRIPT)
        write(pair, "greets", "~/.bashrc", BASHRC)
        write(pair, "forces", "~/wrapper", WRAPPER)
        forced = "chmod +x ~/wrapper; sed -i 's|^|command=\"/home/lab/wrapper\" |' ~/.ssh/authorized_keys"
        pair.host_exec("forces", ["sh", "-c", forced], as_user=True, check=True)
        assert "welcome" in pair.ssh("greets", "true").stdout
        assert "monitored" in pair.ssh("forces", "true").stdout
        someone.types("up", str(pair.inventory))
        yield someone


def write(pair, node, path, text):
    pair.host_exec(node, ["sh", "-c", f"cat >{path}"], as_user=True, input=text, check=True)


@pytest.mark.lab
@pytest.mark.parametrize("nodes", ["greets,forces", "greets"])
def test_a_shell_that_prints_changes_nothing_for_run_logs_collect_and_cancel(person, nodes):
    ranks = range(len(nodes.split(",")))
    run = person.types("run", "--nodes", nodes, "--", "train.py")
    job = person.asks("jobs")["jobs"][0]["id"]
    for shown in (run.stdout, person.types("logs", "--job", job).stdout):
        said = sorted(line.partition("hello from ")[2] for line in shown.splitlines())
        assert said == [str(rank) for rank in ranks], shown
    assert "again" not in run.stderr and "frame" not in run.stderr.replace("framework", "")
    collected = person.asks("collect", "--job", job)
    assert collected["state"] == "succeeded"
    for rank, node in enumerate(nodes.split(",")):
        kept = person.folder / "runs" / job / "nodes" / node / f"rank-{rank}" / "stdout.log"
        assert kept.read_text() == f"hello from {rank}\n"
    waiting = person.types("run", "--detach", "--nodes", nodes, "--", "train.py", "wait").stdout.strip()
    ended = person.types("cancel", "--job", waiting)
    assert "ended on every host" in ended.stderr + ended.stdout
    assert person.job(waiting)["state"] == "cancelled"


# ---- one channel at a time ------------------------------------------------------------------------------------

QUIET = ConnectedHost(LocalTransport("here"), sys.executable, None, "/nowhere")


def noisy(line: str) -> ConnectedHost:
    return replace(QUIET, activate=line)


def endless(text: str, pause_s: float) -> str:
    """A line of shell that prints without end."""
    program = f"import time; any(print({text!r} * 99, flush=True) or time.sleep({pause_s}) for _ in iter(int, 1))"
    return f"{shlex.quote(sys.executable)} -c {shlex.quote(program)}"


def stream_of(host):
    with open_stream(host, "reader", READS, marker := new_marker()) as chunks:
        return list(read_frames("here", chunks, frozenset({0}), {}, marker=marker.encode()))


READS = {
    "workdir": "/nowhere",
    "job": "j",
    "ranks": [0],
    "offsets": {},
    "follow": False,
    "files": ["stdout.log"],
    "limit_bytes": None,
    "times": False,
}


def test_noise_up_to_its_limit_is_skipped_on_every_channel():
    host = noisy(f"head -c {MAX_NOISE_BYTES - 1000} /dev/zero")
    assert ask(host, "control", {"action": "status", "workdir": "/nowhere"}, timeout_s=60) == {"jobs": {}}
    assert [frame for frame in stream_of(host) if isinstance(frame, Agent)] == [
        Agent({"state": "lost", "alive": False, "gone": True})
    ]


@pytest.mark.parametrize("channel", ["ask", "stream", "exchange"])
def test_noise_without_end_is_cut_and_named(channel):
    host = noisy(endless("tick\x1b[2J " * 9, 0))
    with pytest.raises(ProbeError, match=r"here: .*its shell prints at login.*'tick tick.*non-interactive") as error:
        speak(host, channel, timeout_s=60)
    assert "\x1b" not in str(error.value)


@pytest.mark.parametrize("channel", ["ask", "stream", "exchange"])
def test_slow_noise_is_not_taken_for_a_program_that_lives(channel, monkeypatch):
    monkeypatch.setattr(call, "SILENT_S", 1.0)
    with pytest.raises(ConnectError, match=r"here: .*its shell prints at login \('tick"):
        speak(noisy(endless("tick ", 0.1)), channel, timeout_s=2)


def speak(host, channel, timeout_s):
    if channel == "ask":
        request = {"workdir": "/nowhere", "peers": [], "torch": False, "limit_s": 5}
        ask(host, "probe", request, timeout_s=timeout_s)
    elif channel == "stream":
        stream_of(host)
    else:
        with exchange(host, "receive", {"folder": "/nowhere", "files": []}) as words:
            list(words)


def test_a_greeting_and_then_no_python_is_reported_with_both():
    host = replace(noisy("echo welcome"), python="/nowhere/python")
    with pytest.raises(ConnectError, match=r"ended before its first output; its shell prints at login \('welcome'\)"):
        stream_of(host)


MARK = b"0123456789abcdef"


def framed(header, payload=b""):
    return MARK + json.dumps(header).encode() + b"\n" + payload


def test_noise_between_frames_is_skipped_however_the_bytes_are_cut():
    piece = framed({"file": "rank-0/stdout.log", "inode": 7, "offset": 0, "size": 3}, b"abc")
    stream = (
        b"welcome\n" + framed({"agent": {"a": 1}}) + b"tick\n{" + MARK[:9] + piece + b"\ntock\n" + framed({"beat": 1})
    )
    for size in (1, 2, 7, len(stream)):
        chunks = [stream[at : at + size] for at in range(0, len(stream), size)]
        found = list(read_frames("a", chunks, frozenset({0}), {}, marker=MARK))
        pieces = b"".join(frame.data for frame in found if isinstance(frame, FilePiece))
        assert (found[0], pieces, found[-1]) == (Agent({"a": 1}), b"abc", Beat(from_host=True))


def test_noise_without_end_between_frames_is_cut_too():
    chunks = [framed({"beat": 1}), *[b"tick\n" * 10_000] * 22]
    with pytest.raises(ProbeError, match="its shell prints"):
        list(read_frames("a", chunks, frozenset({0}), {}, marker=MARK))
