"""One question to one host: what a real shell and a real Python answer, and what a bad host might."""

import ast
import json
import os
import re
import sys
import time

import pytest

from orchestrator.errors import ConnectError, HostError, ProbeError
from orchestrator.transport import CommandResult, ConnectedHost, LocalTransport, needed, shipped_sources
from orchestrator.transport import ask as call
from orchestrator.transport.ask import ask


class Answering:
    """A host that answers with what `say` makes of the request's marker."""

    node = "v100"

    def __init__(self, say, exit_code=0, stderr=b""):
        self._say, self._exit_code, self._stderr = say, exit_code, stderr

    def run(self, command, *, stdin=b"", timeout_s):
        marker = re.search(rb'"marker": "([0-9a-f]{32})"', stdin)[1]
        return CommandResult(self._exit_code, self._say(marker), self._stderr)


def asked(say, **more):
    return ask(
        ConnectedHost(Answering(say, **more), "python3", None, "~/.orch"), "control", {"action": "status"}, timeout_s=5
    )


def local(tmp_path, python=sys.executable, activate=None):
    return ConnectedHost(LocalTransport("here"), str(python), activate, str(tmp_path / "work"))


def status(host):
    return ask(host, "control", {"action": "status", "workdir": host.workdir}, timeout_s=30)


def imported(text):
    """The modules of ours that a module imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            found |= {node.module} if node.module else {name.name for name in node.names}
    return {f"orch_remote.{name}" for name in found}


def test_with_each_program_travels_all_that_it_imports_and_no_more():
    sources = shipped_sources()
    for module in (name.partition(".")[2] for name in sources if name != "orch_remote"):
        programs = {"keeper", "launch", "preload", "rank", "gpus", "step_hooks"}
        found, started = needed(module, sources), programs if module == "prepare" else set()
        roots = {"orch_remote"} | {f"orch_remote.{name}" for name in {module} | started}
        assert set(found) == roots.union(*(imported(text) for text in found.values())), module
    assert len(needed("control", sources)) < len(sources) / 3


@pytest.mark.parametrize("around", [(b"", b""), (b"Welcome!\n", b""), (b"", b"\nbye"), (b"\x1b[0m{}\n", b"{}\xff\n")])
def test_a_banner_before_or_after_the_answer_spoils_nothing(around):
    assert asked(lambda m: around[0] + m + b'{"a": 1}' + m + around[1]) == {"a": 1}


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b'{"a": "' + b"x" * call.MAX_ANSWER_BYTES + b'"}', "answered 10485.. bytes, more than 1048576"),
        (b"hello", "is not JSON"),
        (b"", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b"[1]", "is not a JSON object"),
        (b"null", "is not a JSON object"),
    ],
)
def test_an_answer_that_is_none_is_refused_and_names_the_host(answer, why):
    with pytest.raises(ProbeError, match=f"^v100: .*{why}"):
        asked(lambda m: m + answer + m)


@pytest.mark.parametrize("say", [lambda m: b"", lambda m: m + b"{}", lambda m: m + b"{}" + m + m])
def test_an_answer_without_its_two_marks_is_none(say):
    with pytest.raises(ProbeError, match=r"no answer from 'python3' \(exit 1: Killed\)"):
        asked(say, exit_code=1, stderr=b"starting\nKilled\n")


def test_a_refusal_is_the_hosts_own_words_made_printable():
    refusal = json.dumps({"error": "no\x1b[31m space\nleft", "remedy": "free some"}).encode()
    with pytest.raises(HostError, match=r"^v100: no") as error:
        asked(lambda m: m + refusal + m)
    assert error.value.remedy == "free some"
    assert not re.search(r"[\x00-\x1f]", error.value.message)


def test_a_real_host_answers_through_its_shell(tmp_path):
    assert status(local(tmp_path)) == {"jobs": {}}


def test_an_activate_line_that_talks_spoils_nothing(tmp_path):
    assert status(local(tmp_path, activate="echo loaded module cuda")) == {"jobs": {}}


def test_a_python_that_is_not_there_is_named_with_the_key_to_set(tmp_path):
    with pytest.raises(ProbeError, match=r"here: python '/nowhere/python' does not start .*`python:`.* for here"):
        status(local(tmp_path, python="/nowhere/python"))


@pytest.mark.parametrize(
    ("activate", "words", "remedy"),
    [
        ("source ~/venv/bin/activate", "source: not found", "write `activate: . FILE`"),
        ("source ~/miniconda3/bin/activate x", "source: not found", "conda.sh && conda activate NAME`"),
        ("conda activate x", "conda: not found", "conda.sh && conda activate NAME`"),
        (". /nowhere/activate", "/nowhere/activate", "correct `activate:` of here"),
        ("false", "exit 1", "correct `activate:` of here"),
        ("exit 0", "exit 0", "correct `activate:` of here"),
    ],
)
def test_an_activate_that_fails_is_named_as_such(tmp_path, activate, words, remedy):
    with pytest.raises(ProbeError) as caught:
        status(local(tmp_path, activate=activate))
    assert caught.value.message.startswith("here: its `activate` failed (") and words in caught.value.message
    assert remedy in caught.value.remedy


def test_an_old_python_answers_in_words(tmp_path):
    old = tmp_path / "python3.8"
    pretend = "import sys; sys.version_info = (3, 8, 18, 'final', 0)\n"
    old.write_text(f'#!/bin/sh\nexec {sys.executable} "$1" "{pretend}$2" "$3" "$4"\n')
    old.chmod(0o755)
    with pytest.raises(HostError, match=r"here: python 3\.8\.18 .* is too old: .*Python 3\.10 or newer"):
        status(local(tmp_path, python=old))


def test_an_error_of_escapes_alone_says_that_it_cannot_be_read():
    with pytest.raises(HostError) as caught:
        asked(lambda m: m + b'{"error": "\\u001b[2J\\u202e", "remedy": "\\u001b[0m"}' + m)
    assert str(caught.value) == "v100: (its message holds no printable character)"


AS_NOBODY = """#!/usr/bin/python3
import os, resource
resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
os.chdir("/")
os.setgid(65534)
os.setuid(65534)
os.execvp("bash", ["bash", "-c", {line!r}])
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become a user whom `ulimit -u` limits")
@pytest.mark.parametrize("line", ["ls; exit 1", "/usr/bin/python3 -c 'import threading as t; t.Thread().start()'"])
def test_a_host_where_its_user_may_start_no_process_says_so(tmp_path, line):
    """`ulimit -u` as bash and Python meet it; start-up files have nothing to do with it."""
    (tmp_path / "python").write_text(AS_NOBODY.format(line=line))
    (tmp_path / "python").chmod(0o755)
    with pytest.raises(ProbeError, match="may start no further process or thread") as caught:
        status(local(tmp_path, tmp_path / "python"))
    assert "`ulimit -u`" in caught.value.remedy
    assert "start-up files" not in caught.value.remedy


def test_a_stream_that_stalls_ends_with_the_time_for_which_nothing_was_received(monkeypatch):
    monkeypatch.setattr(call, "SILENT_S", 0.5)

    def chunks():
        yield b"mark"
        while True:  # the link under us is slow itself: it looks later than once a second
            time.sleep(2.2)
            yield b""

    with pytest.raises(ConnectError, match=r"v100: nothing received for 2 s"):
        list(call.program_output("v100", chunks(), b"mark"))
