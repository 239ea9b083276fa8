"""The system's own `ssh` as orch starts it: the way, the keys and the host keys are those of the inventory."""

from __future__ import annotations

import contextlib
import getpass
import http.client
import http.server
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.errors import HostKeyError, OrchError
from orchestrator.transport import HostKeys, command_line, host_entry
from orchestrator.transport.ssh_config import ASKS
from tests.support import forks
from tests.support.ssh_rack import ssh_rack
from tests.support.sshd import make_key, needs_sshd, running_sshd, wait_for

pytestmark = needs_sshd
PORT = "echo port ${SSH_CONNECTION##* }"


@pytest.fixture(scope="module")
def key(tmp_path_factory):
    """In a folder whose name OpenSSH would read in another way, were it not quoted."""
    folder = tmp_path_factory.mktemp("keys") / "100 %h of 'it'"
    folder.mkdir()
    return make_key(folder / "id")


@pytest.fixture(scope="module")
def servers(tmp_path_factory, key):
    folder = tmp_path_factory.mktemp("servers")
    with (
        running_sshd(folder / "a", key=key) as a,
        running_sshd(folder / "b", key=key) as b,
        running_sshd(folder / "c", key=key) as c,
    ):
        yield a, b, c


@pytest.fixture
def keys(tmp_path, servers):
    """Keys of all of them, in a file whose name is no easier."""
    users = tmp_path / '50 % "known" hosts'
    users.write_text("".join(server.known_hosts_line() for server in servers))
    return HostKeys(tmp_path / "home" / "known_hosts", [users])


@pytest.fixture
def says(tmp_path, keys):
    """Runs a command by way of `ssh`; gives exit code, standard output and standard error."""

    def run(target, *command, host_keys=keys):
        argv = command_line(target, host_keys, pins=tmp_path / "pins", command=command)
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
        return done.returncode, done.stdout, done.stderr

    return run


def through(*servers):
    return ",".join(f"{getpass.getuser()}@127.0.0.1:{server.port}" for server in servers)


def configured(monkeypatch, tmp_path, text):
    (tmp_path / "ssh_config").write_text(text)
    monkeypatch.setenv("ORCH_SSH_CONFIG", str(tmp_path / "ssh_config"))


def test_it_logs_in_with_the_inventorys_user_port_and_key(says, servers):
    assert says(servers[0].target(), PORT) == (0, f"port {servers[0].port}\n", "")


def test_words_arrive_as_they_are_and_the_exit_code_comes_back(says, servers):
    words = ["a b", "$HOME", "it's", "-v", "--"]
    assert says(servers[0].target(), "printf", "<%s>", *words)[1] == "".join(f"<{word}>" for word in words)
    assert says(servers[0].target(), "exit 7")[0] == 7
    assert says(servers[0].target(), "-x")[0] == 127  # a command of the host's, and no option of ssh


def test_jump_hosts_are_gone_through_with_their_keys_checked(says, servers, keys):
    a, b, c = servers
    before = [server.logins() for server in servers]
    assert says(c.target(proxy_jump=through(a, b)), PORT) == (0, f"port {c.port}\n", "")
    assert [server.logins() for server in servers] == [count + 1 for count in before]
    lines = keys.users[0].read_text().splitlines(keepends=True)
    keys.users[0].write_text(lines[0] + lines[1].replace(b.host_key(), a.host_key()) + lines[2])
    code, out, err = says(c.target(proxy_jump=through(a, b)), PORT)
    assert (code, out) == (255, "") and "REMOTE HOST IDENTIFICATION HAS CHANGED" in err


def test_a_key_that_changed_is_refused_and_one_that_is_not_known_is_not_asked_for(says, servers, keys):
    a, b, _ = servers
    keys.users[0].write_text(f"[127.0.0.1]:{a.port} {b.host_key()}\n")
    code, out, err = says(a.target(), PORT)
    assert (code, out) == (255, "") and "REMOTE HOST IDENTIFICATION HAS CHANGED" in err
    with pytest.raises(HostKeyError, match="its host key is not known: `orch trust v100` first"):
        says(b.target(), PORT)
    keys.recorded.parent.mkdir()
    keys.recorded.write_text(b.known_hosts_line())
    assert says(b.target(), PORT)[1] == f"port {b.port}\n"
    assert keys.recorded.read_text() == b.known_hosts_line()


def test_of_a_host_whose_key_is_pinned_that_key_alone_counts(says, servers, tmp_path):
    a, b, _ = servers
    nothing = HostKeys(tmp_path / "none")
    for pin in (a.host_key(), a.fingerprint()):
        assert says(a.target(host_key=pin), PORT, host_keys=nothing) == (0, f"port {a.port}\n", "")
    code, out, err = says(a.target(host_key=b.host_key()), PORT)  # known as it is, and pinned otherwise
    assert (code, out) == (255, "") and "HAS CHANGED" in err
    with pytest.raises(HostKeyError, match="is not the pinned key"):
        says(a.target(host_key=b.fingerprint()), PORT)
    nothing.recorded.write_text(f"@revoked {a.known_hosts_line()}")
    with pytest.raises(HostKeyError, match="is revoked"):
        says(a.target(host_key=a.host_key()), PORT, host_keys=nothing)


def test_the_persons_configuration_has_its_say_and_the_inventory_the_last_word(says, servers, monkeypatch, tmp_path):
    a, b, _ = servers
    text = f"Host card\n  HostName 127.0.0.1\n  Port {b.port}\n  ProxyJump nowhere:9\n"
    configured(monkeypatch, tmp_path, text)
    target = a.target(host="card", proxy_jump="none")
    assert says(target, PORT) == (0, f"port {a.port}\n", "")
    assert says(replace(target, port=None), PORT) == (0, f"port {b.port}\n", "")
    configured(monkeypatch, tmp_path, f"{text}\nHost nowhere\n  HostName 127.0.0.1\n  Port {b.port}\n")
    before = b.logins()
    assert says(replace(target, proxy_jump=f"{getpass.getuser()}@nowhere"), PORT) == (0, f"port {a.port}\n", "")
    assert b.logins() == before + 1


def test_nothing_but_names_of_files_stands_in_the_line(servers, keys, tmp_path, key):
    line = " ".join(command_line(servers[0].target(proxy_jump=through(servers[1])), keys, pins=tmp_path))
    assert "PRIVATE" not in line and not any(part and part in line for part in key.read_text().splitlines()[1:-1])


def test_a_machine_without_ssh_is_told(servers, keys, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(OrchError, match="this machine has no `ssh` program: install"):
        command_line(servers[0].target(), keys, pins=tmp_path)


# ---- orch ssh -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rack(tmp_path_factory):
    with ssh_rack(tmp_path_factory.mktemp("rack")) as made:
        yield made


def test_orch_ssh_runs_a_command_with_its_exit_code(rack):
    done = rack.types("ssh", "v100", "--", "printf", "<%s>", "a b", "--", "-x")
    assert (done.stdout, done.stderr) == ("<a b><--><-x>", "")
    assert rack.types("ssh", "a2000", "--", f"{PORT}; exit 5", exit_code=5).stdout.split()[1] == str(
        rack.servers["a2000"].port
    )
    assert "no such node in cluster rack" in rack.types("ssh", "x", exit_code=2).stderr
    assert rack.types("ssh", "gone", "--", "true", exit_code=3).stderr.startswith("error: gone: ")


def test_orch_ssh_is_a_shell_at_a_terminal(rack):
    """Types into it, and reads what it prints until it is left."""
    ours, theirs = os.openpty()
    argv = [sys.executable, "-m", "orchestrator.cli", "ssh", "v100"]
    streams = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
    shell = subprocess.Popen(
        argv, env=rack.environment, cwd=Path(__file__).parents[2], start_new_session=True, **streams
    )
    os.close(theirs)
    os.write(ours, b"echo $((40+2)) ${SSH_TTY:+a tty} ${SSH_CONNECTION##* }; exit 6\n")
    said = b""
    while piece := _read(ours):
        said += piece
    assert shell.wait(30) == 6
    assert f"42 a tty {rack.servers['v100'].port}".encode() in said


def _read(handle):
    try:
        return os.read(handle, 1 << 16)
    except OSError:  # nobody has it open any more
        return b""


def test_a_local_node_has_a_shell_of_this_machine(tmp_path):
    defaults = "{transport: local, device: cpu, python: /nowhere}"
    text = f"cluster: here\ndefaults: {defaults}\nnodes: [{{name: me, host: localhost}}]\n"
    (tmp_path / "here.yaml").write_text(text)
    environment = {**os.environ, "SHELL": "/bin/sh"}
    assert forks.run(forks.ORCH, ["up", "here.yaml", "--allow-local"], cwd=tmp_path, env=environment).returncode == 3
    done = forks.run(
        forks.ORCH, ["ssh", "me", "--", f"pwd; umask; touch {tmp_path}/it; exit 4"], cwd=tmp_path, env=environment
    )
    assert (done.returncode, done.stdout) == (4, f"{Path.home()}\n0022\n")
    assert done.stderr == "me is this machine (transport: local)\n"
    assert stat.S_IMODE((tmp_path / "it").stat().st_mode) == 0o644
    shell = forks.run(forks.ORCH, ["ssh", "me"], cwd=tmp_path, env=environment, input_="echo $((40+2)); exit 3\n")
    assert (shell.returncode, shell.stdout) == (3, "42\n")


# ---- orch forward ----------------------------------------------------------------------------------------------------


class Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def log_message(self, *words):
        pass


@pytest.fixture
def page():
    """The port of a web server of the host's that listens at 127.0.0.1, as TensorBoard does."""
    with http.server.HTTPServer(("127.0.0.1", 0), Page) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


def fetched(port):
    """Straight from there: a proxy that the environment names would be asked for it, too."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
        connection.request("GET", "/")
        return connection.getresponse().status
    return None


@contextlib.contextmanager
def begun(rack, *words):
    argv = [sys.executable, "-m", "orchestrator.cli", *words]
    place = {"env": rack.environment, "cwd": Path(__file__).parents[2], "text": True, "stderr": subprocess.PIPE}
    with subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, **place) as process:
        try:
            yield process
        finally:
            process.send_signal(signal.SIGINT)


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def test_forward_brings_a_port_of_the_host_here_until_ctrl_c(rack, page):
    local = free_port()
    with begun(rack, "forward", "v100", f"{page}:{local}") as process:
        wait_for(lambda: fetched(local) == 200, "the page", timeout_s=60)
        with socket.socket() as outside:  # no other machine may connect
            outside.settimeout(1)
            assert outside.connect_ex((socket.gethostbyname(socket.gethostname()), local)) or _is_loopback()
    assert process.wait(30) != 0
    assert fetched(local) is None


def _is_loopback():
    return socket.gethostbyname(socket.gethostname()).startswith("127.")


def test_forward_takes_another_port_here_if_its_own_is_in_use(rack, page):
    with begun(rack, "forward", "v100", str(page)) as process:  # the host is this machine, where the page has the port
        line = process.stderr.readline()
        local = int(re.match(rf"http://127\.0\.0\.1:(\d+) is port {page} of v100\n", line)[1])
        assert local != page
        wait_for(lambda: fetched(local) == 200, "the page", timeout_s=60)
    refused = rack.types("forward", "v100", f"6006:{page}", exit_code=2).stderr
    assert f"port {page} of this machine cannot be used: Address already in use" in refused


@pytest.mark.parametrize("port", ["0", "70000", "6006:", ":6006", "web", "1:2:3", "²"])
def test_forward_refuses_what_is_no_port(rack, port):
    assert "is no port\n  try: write PORT or PORT:LOCAL" in rack.types("forward", "v100", port, exit_code=2).stderr


def test_ssh_forwards_as_openssh_does(rack, page):
    local = free_port()
    with begun(rack, "ssh", "v100", "-L", f"{local}:127.0.0.1:{page}", "--", "sleep 60"):
        wait_for(lambda: fetched(local) == 200, "the page", timeout_s=60)


# ---- orch ssh-config ------------------------------------------------------------------------------------------------


@pytest.fixture
def config(rack):
    """Of the hosts whose keys are known: `gone` has never been reached."""
    done = rack.types("ssh-config", exit_code=3)
    assert done.stderr.startswith("error: gone: ") and "Host gone" not in done.stdout
    (rack.folder / "ssh").write_text(done.stdout)
    return rack.folder / "ssh"


def run(*words):
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_openssh_and_what_starts_it_reach_hosts_by_their_names(config, rack, tmp_path):
    for name, server in rack.servers.items():
        assert run("ssh", "-F", config, name, PORT) == f"port {server.port}\n"
    (tmp_path / "sent").write_text("by scp")
    run("scp", "-F", config, tmp_path / "sent", f"v100:{tmp_path}/arrived")
    assert (tmp_path / "arrived").read_text() == "by scp"
    (tmp_path / "batch").write_text(f"get {tmp_path}/sent {tmp_path}/got\n")  # as an editor's remote mode does
    run("sftp", "-F", config, "-b", tmp_path / "batch", "v100")
    assert (tmp_path / "got").read_text() == "by scp"


def test_a_kept_configuration_follows_up_and_trust(rack, tmp_path):
    kept = rack.types("ssh-config", "--keep", exit_code=3)
    (tmp_path / "config").write_text(kept.stdout)
    name, server = next(iter(rack.servers.items()))
    assert run("ssh", "-F", tmp_path / "config", name, PORT) == f"port {server.port}\n"
    file = next(Path(kept.stdout.split('"')[1]).parent.iterdir())
    before = file.read_text()
    file.write_text("")
    rack.types("trust", name, "--yes")
    assert file.read_text() == before
    file.write_text("")
    rack.types("up", "rack.yaml", exit_code=3)
    assert file.read_text() == before
    asks = {**os.environ, ASKS: "1"}  # so orch asks, and does not find what it wrote itself
    found = subprocess.run(["ssh", "-F", tmp_path / "config", "-G", name], capture_output=True, text=True, env=asks)
    assert f"hostname {name}\n" in found.stdout
    assert "leave out --nodes" in rack.types("ssh-config", "--keep", "--nodes", name, exit_code=2).stderr


@pytest.mark.skipif(not shutil.which("rsync"), reason="rsync is not installed")
def test_rsync_reaches_them(config, tmp_path):
    (tmp_path / "from").mkdir()
    (tmp_path / "from" / "file").write_text("by rsync")
    run("rsync", "-e", f"ssh -F {config}", "-a", f"{tmp_path}/from/", f"a2000:{tmp_path}/to/")
    assert (tmp_path / "to" / "file").read_text() == "by rsync"


def test_ansible_reaches_them(config):
    pytest.importorskip("ansible")
    python = f"ansible_python_interpreter={sys.executable}"
    said = run("ansible", "all", "-i", "a2000,v100,", "--ssh-common-args", f"-F {config}", "-e", python, "-m", "ping")
    assert said.count("pong") == 2


def test_an_entry_goes_through_jump_hosts_and_to_pinned_keys_only(servers, keys, tmp_path):
    a, b, c = servers
    target = replace(c.target(proxy_jump=through(a, b)), node="card", connect_timeout_s=7.0)
    (tmp_path / "config").write_text(host_entry(target, keys, pins=tmp_path / "pins"))
    before = [server.logins() for server in servers]
    assert run("ssh", "-F", tmp_path / "config", "card", PORT) == f"port {c.port}\n"
    assert [server.logins() for server in servers] == [count + 1 for count in before]
    assert "connecttimeout 7\n" in run("ssh", "-F", tmp_path / "config", "-G", "card")
    pinned = replace(a.target(host_key=b.host_key()), node="card")  # known as it is, and pinned otherwise
    (tmp_path / "config").write_text(host_entry(pinned, keys, pins=tmp_path / "pins"))
    with pytest.raises(AssertionError, match="HAS CHANGED"):
        run("ssh", "-F", tmp_path / "config", "card", PORT)


# ---- orch trust ------------------------------------------------------------------------------------------------------


def test_trust_shows_the_keys_of_several_hosts_and_asks_once(rack, tmp_path):
    stranger = {**rack.environment, "ORCH_HOME": str(tmp_path / "home"), "HOME": str(tmp_path)}

    def trusts(*words, answer="", exit_code=0):
        argv = ["trust", *words, "--inventory", "rack.yaml"]
        done = forks.run(forks.ORCH, argv, cwd=rack.folder, env=stranger, input_=answer)
        assert done.returncode == exit_code, done.stderr
        return done.stderr

    refused = trusts("v100", "a2000", answer="n\n", exit_code=2)
    assert "v100, a2000: their keys were not recorded" in refused and not (tmp_path / "home" / "known_hosts").exists()
    said = trusts("*00*", answer="y\n")
    assert said.count("Are these") == 1
    for server in rack.servers.values():
        assert server.fingerprint() in said
    again = trusts("*", exit_code=3)  # `gone` is off
    assert again.count("shows the known") == 2 and "Are these" not in again and "error: gone: " in again
    known = tmp_path / "home" / "known_hosts"
    lines = known.read_text().splitlines()
    swapped = [" ".join([a.split()[0], *b.split()[1:]]) for a, b in zip(lines, reversed(lines), strict=True)]
    known.write_text("\n".join(swapped) + "\n")
    assert trusts("v100", exit_code=3).startswith("error: v100: ") and known.read_text().splitlines() == swapped


def test_keys_that_nobody_compared_are_named_when_they_are_recorded(rack, tmp_path):
    stranger = {**rack.environment, "ORCH_HOME": str(tmp_path / "home"), "HOME": str(tmp_path)}
    words = ["up", "rack.yaml", "--accept-new-host-keys"]
    first, second = (forks.run(forks.ORCH, words, cwd=rack.folder, env=stranger).stderr for _ in range(2))
    for server in rack.servers.values():
        assert f"key {server.fingerprint()} of [127.0.0.1]:{server.port}, not compared" in first
    assert "recorded" not in second
