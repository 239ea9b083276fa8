"""Whatever a person gives us, the command line answers in words: one clear line a mistake, exit code 2, no traceback.

What one reader refuses is tested where it lives (ROWS says where); here the same comes in through `orch` itself, and
with it what no reader sees: odd paths, terminals, closed streams.
"""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from orchestrator.cli import main
from orchestrator.hosts import Cluster, Node, Route
from orchestrator.hosts.facts import Interface
from orchestrator.paths import Home
from orchestrator.store import Store
from tests.support.cost import at_most_calls, growth
from tests.support.plans import KEY
from tests.support.probed_hosts import facts

ROOT = Path(__file__).resolve().parents[2]
ORCH = [sys.executable, "-m", "orchestrator.cli"]

ROWS = {
    "duplicate key, YAML 1.1, tags, aliases, nesting, empty, BOM, CRLF, tabs, Latin-1, NUL": "hosts/test_yamlfile",
    "unknown key, hosts, ports, gpus, IPv6, IDN, env, same host twice, two masters": "hosts/test_inventory",
    "one node, no GPU node, master not a member": "hosts/test_election",
    "arguments of scripts": "planning/test_secrets",
    "login shells": "transport/test_shell",
    "logs: long lines, NUL, bad UTF-8, CR, forged prefixes": "jobs/test_lines",
    "metrics: NaN, negative, infinite": "results/test_analyse",
    "file names of hosts": "jobs/test_frames",
    "clocks far off": "hosts/test_facts",
    "Ctrl-C, a reader that leaves": "cli/test_cli",
}


def test_every_row_is_tested_somewhere():
    assert [name for name in ROWS.values() if not (ROOT / f"tests/{name}.py").is_file()] == []


@pytest.fixture
def orch(capfd, tmp_path, monkeypatch):
    """Types a command in this process; gives exit code, standard output and standard error."""
    monkeypatch.chdir(tmp_path)

    def types(*words: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            main(list(words), prog_name="orch")
        shown = capfd.readouterr()
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]|Traceback", shown.out + shown.err)
        return end.value.code or 0, shown.out, shown.err

    return types


def refused(answer: tuple[int, str, str], said: str) -> None:
    """One clear line that says it, perhaps one that says what to try, and nothing else but how to use the command."""
    code, out, err = answer
    errors = [line for line in err.splitlines() if line.lower().startswith("error:")]
    assert (code, out, len(errors)) == (2, "", 1), answer
    assert said in err and len(errors[0]) < 600, err


# ---- what an inventory holds ----------------------------------------------------------------------------------

ONE = "cluster: c\nnodes:\n- {name: a, host: h, %s}\n"
BOMB = "a: &a [x, x]\n" + "".join(f"{b}: &{b} [*{a}, *{a}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True))
HOLDS = {
    "the same key twice": ("cluster: c\ncluster: d\nnodes: [{name: a, host: h}]", ":2: key 'cluster' is given twice"),
    "a port in base 60": (ONE % "port: 22:22", ":3: node a: port: must be a whole number, not '22:22'"),
    "an octal port": (ONE % "port: 022", "not '022'"),
    "a hexadecimal count": (ONE % "gpus: 0x1F", "gpus: must be a whole number, not '0x1F'"),
    "a count with _": (ONE % "gpus: 1_0", "gpus: must be a whole number, not '1_0'"),
    "a word for true": (ONE % "master: on", "master: must be true or false, not 'on'"),
    "a number for text": (ONE % "id: 1e3", "id: must be text, not 1000.0; put it in quotes"),
    "a Python tag": (ONE % "note: !!python/object/apply:os.system [id]", "tags are not supported"),
    "an alias": (ONE % "note: *x", "aliases are not supported"),
    "3,000 brackets": ("[" * 3000, "is nested more than 32 levels deep"),
    "an unknown key": (ONE % "prot: 22", "unknown key 'prot'; did you mean `port`?"),
    "an unknown key that steers": (ONE % '"\\e[2J\\u202e": 1', "unknown key '\\x1b[2J\\u202e'"),
    "nothing": ("", "is empty"),
    "only comments": ("# nothing\n", "is empty"),
    "a list": ("- a\n", "must be a mapping"),
    "tabs": ("cluster: c\nnodes:\n\t- {name: a}", "indent with spaces, not tabs"),
    "Latin-1": (b"cluster: c\nnodes: [{name: a, host: h, note: caf\xe9}]", "is not UTF-8 text (byte 0xe9)"),
    "NUL": (b"cluster: c\0\n", "holds a NUL byte"),
    "UTF-16": ("cluster: c".encode("utf-16"), "is not UTF-8 text"),
    "an option as a host": (ONE.replace("h,", "-oProxyCommand=x,") % "port: 22", "is not a host name or an IP address"),
    "shell as a host": (ONE.replace("h,", "$(id),") % "port: 22", "is not a host name"),
    "a path as a name": (ONE.replace("name: a", "name: ../a") % "port: 22", "name: '../a' must be letters, digits"),
    "a zone id": (ONE.replace("h,", "'fe80::1%%eth0',") % "port: 22", "zone ids (%eth0) are not supported"),
    "host and port in one": (ONE.replace("h,", "'[::1]:22',") % "gpus: 1", "the port goes in `port:`"),
    "a name of other letters": (ONE.replace("h,", "größe.lab,") % "gpus: 1", "must be written in its ASCII form"),
    "a final dot": (ONE.replace("h,", "gpu1.lab.,") % "gpus: 1", "must be written without the final dot"),
    "port 65536": (ONE % "port: 65536", "port: must be at most 65535"),
    "10,000 GPUs": (ONE % "gpus: 10000", "gpus: must be at most 64"),
    "a variable named with =": (ONE % "env: {A=s3cret: x}", "'A' must be only a variable's name"),
    "200 KB in a variable": (ONE % f"env: {{A: {'x' * 200_000}}}", "env.A: is longer than the 127 KiB"),
    "one host twice": (ONE % "gpus: 1" + "- {name: b, host: H}", "nodes a (line 3) and b have the same host and port"),
    "two masters": (ONE % "master: true" + "- {name: b, host: g, master: true}", "both pinned as master"),
    "10,000 nodes": (ONE % "gpus: 1" + "".join(f"- {{name: n{i}, host: h{i}}}\n" for i in range(10_000)), "holds more"),
}  # fmt: skip


@pytest.mark.parametrize(("content", "said"), HOLDS.values(), ids=list(HOLDS))
def test_an_inventory_that_is_none_is_refused_in_one_line(content, said, orch, tmp_path):
    (tmp_path / "i.yaml").write_bytes(content if isinstance(content, bytes) else content.encode())
    refused(orch("up", "i.yaml"), said)
    refused(orch("trust", "a", "--inventory", "i.yaml"), said)


def test_an_alias_bomb_is_refused_a_line_a_mistake_with_little_work(orch, tmp_path):
    (tmp_path / "i.yaml").write_text(BOMB)
    with at_most_calls(300_000):
        code, out, err = orch("up", "i.yaml", "--json")
    assert (code, out) == (2, "")
    assert all(line.startswith("error: i.yaml") for line in err.splitlines())


@pytest.mark.parametrize("content", ["\ufeffcluster: c\r\nnodes: [{name: a, host: 127.0.0.1, port: 1, user: me}]\r\n"])
def test_a_byte_order_mark_and_crlf_are_no_mistakes(content, orch, tmp_path):
    (tmp_path / "i.yaml").write_text(content, newline="")
    code, _, err = orch("up", "i.yaml")
    assert code == 3 and "error: a: nothing listens at 127.0.0.1:1" in err  # so it was read


def test_keys_and_values_of_a_secret_are_not_repeated(orch, tmp_path):
    wrong = ["[A=12345678]", "A=12345678", "{A=12345678: }", "{A: [12345678]}", "{A: {12345678: x}}"]
    for keys in (f"env: {env}" for env in wrong):
        (tmp_path / "i.yaml").write_text(ONE % keys)
        code, out, err = orch("up", "i.yaml")
        assert code == 2 and "12345678" not in out + err, (keys, err)


# ---- where an inventory lies ----------------------------------------------------------------------------------


def test_a_path_that_is_no_readable_file_is_refused_at_once(orch, tmp_path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "gone").symlink_to("nowhere")
    paths = ["fifo", "/dev/zero", "/dev/null", "/dev/tty", ".", "loop", "gone", "none", "", "x" * 300, "a\x1b[2Jb"]
    began = time.monotonic()
    for path in paths:
        refused(orch("up", path), "give the path of a YAML file")
    if os.geteuid() != 0:
        (tmp_path / "shut").touch(mode=0)
        refused(orch("up", "shut"), "Permission denied")
    assert time.monotonic() - began < 100


def test_an_inventory_that_all_can_change_is_used_with_a_warning(orch, tmp_path):
    (tmp_path / "i.yaml").write_text("cluster: c\nnodes: [{name: a, host: 127.0.0.1, port: 1, user: me}]")
    (tmp_path / "i.yaml").chmod(0o666)
    code, _, err = orch("up", "i.yaml")
    assert code == 3 and "note: i.yaml: every user of this machine can change this file; try chmod o-w" in err


# ---- what is typed --------------------------------------------------------------------------------------------

TYPED = {
    "a node with blanks": (["node", "add", "a b", "host=h"], "must be letters, digits"),
    "a key of a node that is none": (["node", "add", "a", "host=h", "prt=1"], "unknown key 'prt'"),
    "a pair that is none": (["node", "add", "a", "host"], "is not KEY=VALUE"),
    "an environment as a word": (["node", "add", "a", "host=h", "env=A=s3cret"], "env: must be a mapping"),
    "an inventory's key": (["node", "add", "a", "host=h", f"host_key={KEY[:-9]}\x1b[2J"], "is not a host key"),
    "no cluster by that path": (["status", "--cluster", "../../etc/passwd"], "no cluster named"),
    "no cluster by that long name": (["status", "--cluster", "x" * 300], "no cluster named"),
    "no cluster that steers": (["status", "--cluster", "\x1b[2J\u202e"], "no cluster named"),
    "no job": (["logs", "--job", "../x"], "no job"),
    "no rank": (["logs", "--job", "latest", "--rank", "one"], "'one' is not a valid integer"),
    "a batch of none": (["run", "--batch", "0", "--", "x.py"], "--batch: must be at least 1, not 0"),
    "a time of none": (["run", "--time-limit", "0s", "--", "x.py"], "is not a time"),
    "an endless time": (["run", "--time-limit", "nan", "--", "x.py"], "is not a time"),
    "a script that is a folder": (["run", "--", "."], "no such script"),
    "a script that steers": (["run", "--", "\x1b[2J.py"], "no such script"),
    "a secret": (["run", "--", "x.py", "--api-key", "s3cret"], "--api-key looks like a secret"),
}  # fmt: skip


@pytest.mark.parametrize(("words", "said"), TYPED.values(), ids=list(TYPED))
def test_words_that_make_no_sense_are_refused_in_one_line(words, said, orch, tmp_path):
    (tmp_path / "x.py").touch()
    answer = orch(*words)
    refused(answer, said)
    assert "s3cret" not in answer[2]


# ---- many nodes -----------------------------------------------------------------------------------------------


def test_a_dry_run_over_a_thousand_nodes_costs_no_more_for_each_than_over_250(orch, tmp_path):
    (tmp_path / "x.py").touch()

    def dry_run(cluster: str, count: int) -> None:
        code, out, _ = orch("run", "--dry-run", "--json", "--cluster", cluster, "--", "x.py")
        assert code == 0 and len(json.loads(out)["nodes"]) == count

    save_cluster("few", 250)
    save_cluster("many", 1000)
    assert growth(lambda: dry_run("few", 250), lambda: dry_run("many", 1000)) < 8


def save_cluster(name: str, count: int) -> None:
    nodes, found = [], {}
    for number in range(count):
        address = f"10.1.{number // 250}.{number % 250 + 1}"
        nodes.append(Node(name=f"n{number}", host=address, gpus=1, gpu="A2000"))
        link = Interface(name="eno1", addresses=(f"{address}/16",), mtu=1500, up=True)
        routes = (Route(peers=("10.1.0.1" if number else "10.1.0.2",), interface="eno1", source=address),)
        found[f"n{number}"] = facts(node=f"n{number}", boot_id=f"b{number}", interfaces=(link,), routes=routes)
    Store(Home.default()).save_cluster(Cluster(name=name, file="f", nodes=tuple(nodes), facts=found), current=True)


# ---- terminals and streams ------------------------------------------------------------------------------------


def remember_a_cluster() -> None:
    node = Node(name="a", host="h", note="🙂 naïve")
    Store(Home.default()).save_cluster(Cluster(name="c", file="f", nodes=(node,)), current=True)


@pytest.mark.parametrize(("term", "columns"), [("dumb", 80), ("xterm-256color", 20), ("", 0)])
def test_any_terminal_will_do(term, columns):
    remember_a_cluster()
    screen, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 5, columns, 0, 0))
    streams = {"stdin": terminal, "stdout": terminal, "stderr": terminal}
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    environment["TERM"] = term
    process = subprocess.Popen([*ORCH, "status", "--no-look"], env=environment, start_new_session=True, **streams)
    os.close(terminal)
    shown = b""
    try:
        while data := os.read(screen, 65536):
            shown += data
    except OSError:  # how Linux says that nobody holds the other side
        pass
    os.close(screen)
    assert process.wait(30) == 0, shown
    assert b"Traceback" not in shown
    if term == "dumb":
        assert b"\x1b" not in shown
    if columns == 20:
        lines = re.sub(rb"\x1b\[[0-9;]*m", b"", shown).decode().splitlines()
        assert lines and max(map(len, lines)) <= 20


@pytest.mark.parametrize("closed", [0, 1, 2])
def test_a_stream_that_is_not_there_is_no_error(closed):
    remember_a_cluster()
    line = f"exec {ORCH[0]} -m orchestrator.cli status --no-look {closed}>&-"
    done = subprocess.run(["sh", "-c", line], capture_output=True, timeout=30, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("words", ["--help", "--version", "run --help", "node --help", "status --no-look"])
def test_a_full_disk_behind_standard_output_is_said_in_words(words):
    remember_a_cluster()
    with open("/dev/full", "wb") as full:
        done = subprocess.run([*ORCH, *words.split()], cwd=ROOT, stdout=full, stderr=subprocess.PIPE, timeout=30)
    error, remedy = done.stderr.decode().splitlines()
    assert done.returncode == 1 and error == "error: this machine: No space left on device" and "try:" in remedy


def test_letters_that_an_encoding_lacks_are_no_error():
    remember_a_cluster()
    env = {**os.environ, "PYTHONIOENCODING": "ascii", "LC_ALL": "C"}
    done = subprocess.run([*ORCH, "status", "--no-look"], env=env, capture_output=True, timeout=30)
    assert done.returncode == 0 and b"na?ve" in done.stdout and b"Traceback" not in done.stderr


def test_a_ctrl_c_while_hosts_are_dialled_ends_with_code_130_and_no_traceback(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        (tmp_path / "i.yaml").write_text(f"cluster: c\nnodes: [{{name: a, host: 127.0.0.1, port: {port}, user: me}}]")
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = subprocess.Popen([*ORCH, "up", str(tmp_path / "i.yaml")], cwd=ROOT, **streams)
        silent.settimeout(30)
        dialled, _ = silent.accept()
        with dialled:
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (130, b"")
    assert b"Traceback" not in err
