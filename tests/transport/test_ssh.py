"""SSH against real OpenSSH servers on this machine."""

import contextlib
import getpass
import os
import re
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import paramiko
import pytest

from orchestrator.errors import AuthError, ConnectError, HostError, HostKeyError, ProbeError, UsageError
from orchestrator.transport import (
    Deadline,
    HostKeys,
    Login,
    SshTransport,
    connect,
    connection,
    errors,
    fetch_host_key,
    find_route,
    for_each,
    ssh,
    ssh_errors,
    values,
)
from orchestrator.transport.ssh import Target, unlock
from tests.support.free_port import free_port
from tests.support.sshd import Sshd, make_key, needs_sshd, running_sshd, wait_for

pytestmark = needs_sshd

BINARY = bytes(range(256)) * 20_000  # 5 MB of every byte there is, more than twice SSH's window


@pytest.fixture(autouse=True)
def nobodys_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No key, configuration, known host or agent of whoever runs the tests has a say."""
    home = tmp_path / "home"
    (home / ".ssh").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    monkeypatch.delenv("ORCH_SSH_CONFIG", raising=False)
    return home


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    with running_sshd(tmp_path_factory.mktemp("sshd"), host_keys=("ecdsa", "ed25519", "rsa")) as running:
        yield running


@pytest.fixture
def host(server: Sshd) -> Iterator[SshTransport]:
    transport = connect(server.target(), host_keys=server.host_keys())
    yield transport
    transport.close()


def refused(server: Sshd, error: type[Exception], match: str | None = None, **changes: object) -> str:
    """The error of a connection that must not come about."""
    options = {name: changes.pop(name) for name in ("host_keys", "accept_new", "ask_passphrase") if name in changes}
    with pytest.raises(error, match=match) as caught:
        connect(server.target(**changes), **{"host_keys": server.host_keys(), **options})  # type: ignore[arg-type]
    return str(caught.value)


# Commands


def test_a_commands_outputs_and_exit_code_come_back_apart(host: SshTransport) -> None:
    result = host.run("echo out; echo err >&2; exit 3", timeout_s=10)
    assert (result.exit_code, result.stdout, result.stderr) == (3, b"out\n", b"err\n")


def test_a_signal_shows_as_128_and_its_number(host: SshTransport) -> None:
    assert host.run("kill -9 $$", timeout_s=10).exit_code == 137
    assert host.run("kill -15 $$", timeout_s=10).exit_code == 143


def test_five_megabytes_go_in_and_out_on_both_streams_unchanged(host: SshTransport) -> None:
    result = host.run("tee /dev/stderr", stdin=BINARY, timeout_s=60)
    assert result.stdout == BINARY and result.stderr == BINARY


def test_a_command_need_not_read_what_it_is_given(host: SshTransport) -> None:
    assert host.run("exit 5", stdin=BINARY, timeout_s=10).exit_code == 5


def test_a_command_that_takes_too_long_is_an_error_in_time(host: SshTransport) -> None:
    began = time.monotonic()
    with pytest.raises(ConnectError, match=r"v100: .*did not end within 0.3 s"):
        host.run("sleep 600", timeout_s=0.3)
    assert time.monotonic() - began < 60
    assert host.run("echo well", timeout_s=10).stdout == b"well\n"


def test_output_has_a_limit(host: SshTransport, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssh, "MAX_OUTPUT_BYTES", 1 << 20)
    with pytest.raises(ProbeError, match="longer than 1048576 bytes"):
        host.run("yes", timeout_s=30)


def test_many_commands_at_once_share_one_connection(server: Sshd) -> None:
    before = server.logins()
    transport = connect(server.target(), host_keys=server.host_keys())
    answers: dict[int, bytes] = {}

    def ask(number: int) -> None:
        answers[number] = transport.run(f"cat; echo {number}", stdin=b"x" * 100_000, timeout_s=30).stdout

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    transport.close()
    assert answers == {number: b"x" * 100_000 + b"%d\n" % number for number in range(8)}
    assert server.logins() == before + 1


def test_more_sessions_than_the_host_allows_is_a_message_of_ours(tmp_path: Path) -> None:
    with running_sshd(tmp_path / "host", options=["MaxSessions 1"]) as server:
        transport = connect(server.target(), host_keys=server.host_keys())
        with transport.stream("cat") as chunks:
            next(chunks)
            with pytest.raises(ConnectError, match=r"a channel was refused.*MaxSessions"):
                transport.run("true", timeout_s=10)
        transport.close()


def test_a_closed_transport_says_so(host: SshTransport) -> None:
    host.close()
    with pytest.raises(ConnectError, match="was closed"):
        host.run("true", timeout_s=5)


# Streams


def test_a_stream_brings_chunks_as_they_come_and_word_while_nothing_comes(host: SshTransport) -> None:
    with host.stream("echo first; echo unseen >&2; cat") as chunks:
        assert next(chunk for chunk in chunks if chunk) == b"first\n"
        while next(chunks):  # `cat` prints nothing and does not end
            pass


def test_a_stream_ends_with_its_command(host: SshTransport) -> None:
    with host.stream("read line; echo got $line", stdin=b"word\n") as chunks:
        assert b"".join(chunks) == b"got word\n"


def test_a_stream_is_whole_and_its_chunks_bounded(host: SshTransport) -> None:
    with host.stream("head -c 5120000 /dev/zero; echo end") as chunks:
        sizes = [len(chunk) for chunk in chunks]
    assert sum(sizes) == 5_120_004 and max(sizes) <= 1 << 20


def test_leaving_a_command_on_a_closed_connection_raises_in_no_thread(
    host: SshTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(channel: paramiko.Channel) -> None:
        raise EOFError

    raised: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    with host.stream("sleep 60") as pieces:
        next(pieces)
        monkeypatch.setattr(paramiko.Channel, "close", breaks)
    assert raised == []


def test_no_thread_outlives_its_connection(server: Sshd) -> None:
    """A thread that decrypts at the interpreter's end crashes it."""
    before = set(threading.enumerate())
    transport = connect(server.target(), host_keys=server.host_keys())
    transport.run("true", timeout_s=10)
    assert set(threading.enumerate()) > before
    transport.close()
    assert set(threading.enumerate()) <= before


def test_leaving_a_stream_closes_the_commands_input(host: SshTransport, tmp_path: Path) -> None:
    said = tmp_path / "said"
    with host.stream(f"echo ready; cat; echo ended > {said}") as chunks:
        next(chunks)
        assert not said.exists()
    wait_for(said.exists, "the command to see the end of its input")


def test_a_stream_whose_link_breaks_raises_and_the_next_command_connects_again(tmp_path: Path) -> None:
    with running_sshd(tmp_path / "host") as server:
        transport = connect(server.target(), host_keys=server.host_keys())
        with pytest.raises(ConnectError, match=r"v100: .*broke"), transport.stream("echo here; cat") as chunks:
            assert next(filter(None, chunks)) == b"here\n"  # b"" says that a second has passed
            server.stop()
            for _ in chunks:
                pass
        server.start()
        assert transport.run("echo back", timeout_s=10).stdout == b"back\n"
        transport.close()


def test_a_host_whose_key_changed_while_we_were_connected_is_refused_when_it_returns(tmp_path: Path) -> None:
    with running_sshd(tmp_path / "host") as server:
        host_keys = server.host_keys()
        transport = connect(server.target(), host_keys=host_keys)
        server.stop()
        make_key(server.folder / "host_ed25519")
        server.start()
        wait_for(lambda: not transport._connection.transport.is_active(), "the link to be seen broken")
        with pytest.raises(HostKeyError, match="not the one we know"):
            transport.run("true", timeout_s=10)
        transport.close()


# Host keys


def test_an_unknown_host_is_refused_before_any_login(server: Sshd, tmp_path: Path) -> None:
    before = server.logins()
    said = refused(server, HostKeyError, host_keys=HostKeys(tmp_path / "none"))
    assert server.fingerprint() in said and "orch trust v100" in said
    assert server.logins() == before


def test_a_changed_key_is_refused_whatever_is_asked_for(server: Sshd, tmp_path: Path) -> None:
    users = tmp_path / "known_hosts"
    stranger = " ".join(make_key(tmp_path / "stranger").with_suffix(".pub").read_text().split()[:2])
    users.write_text(f"[127.0.0.1]:{server.port} {stranger}\n")
    said = refused(server, HostKeyError, host_keys=HostKeys(tmp_path / "ours", [users]), accept_new=True)
    assert f"{users}:1" in said and server.fingerprint() in said
    assert users.read_text().count("\n") == 1 and not (tmp_path / "ours").exists()


def test_accepting_a_new_host_records_it_and_then_it_is_known(server: Sshd, tmp_path: Path) -> None:
    host_keys = HostKeys(tmp_path / "ours", [users := tmp_path / "users"])
    connect(server.target(), host_keys=host_keys, accept_new=True).close()
    connect(server.target(), host_keys=host_keys).close()
    assert (tmp_path / "ours").read_text() == server.known_hosts_line()
    assert not users.exists()


@pytest.mark.parametrize("kind", ["ecdsa", "rsa", "ed25519"])
def test_a_server_with_several_keys_shows_the_one_that_we_know(server: Sshd, kind: str) -> None:
    connect(server.target(), host_keys=server.host_keys(kind)).close()


def test_the_key_pinned_in_the_inventory_is_enough_and_decides(server: Sshd, tmp_path: Path) -> None:
    nothing = HostKeys(tmp_path / "none")
    for pin in (server.host_key("rsa"), server.fingerprint("ed25519")):
        connect(server.target(host_key=pin), host_keys=nothing).close()
    wrong = server.host_key("ed25519")[:-4] + "AAAA"
    refused(server, HostKeyError, "not the pinned key", host_key=wrong, accept_new=True)


def test_trusting_a_host_looks_at_its_key_without_a_login(server: Sshd, tmp_path: Path) -> None:
    before, host_keys = server.logins(), HostKeys(tmp_path / "ours")
    offered = fetch_host_key(server.target(key_file="/no/such/key"), host_keys=host_keys)
    assert offered.fingerprint == server.fingerprint() and not offered.peer.jump
    assert server.logins() == before and not host_keys.recorded.exists()
    host_keys.check(offered.peer, offered.key, accept_new=True)
    connect(server.target(), host_keys=host_keys).close()
    assert fetch_host_key(server.target(key_file="/no/such/key"), host_keys=host_keys).key == offered.key


def test_fabrics_own_configuration_has_no_say(server: Sshd, nobodys_home: Path) -> None:
    (nobodys_home / ".fabric.yaml").write_text("port: 1\nuser: nobody\ntimeouts: {connect: 1}\n")
    connect(server.target(), host_keys=server.host_keys()).close()


# Old algorithms


@pytest.mark.parametrize(
    "option",
    ["MACs hmac-md5,hmac-sha1", "Ciphers aes128-cbc,3des-cbc", "KexAlgorithms diffie-hellman-group14-sha1"],
)
def test_a_server_with_only_weak_algorithms_is_refused(tmp_path: Path, option: str) -> None:
    extra = ["Ciphers aes128-ctr"] if option.startswith("MACs") else []  # GCM would need no MAC
    with running_sshd(tmp_path / "host", options=[option, *extra]) as server:
        said = refused(server, ConnectError, "no safe algorithm in common.*update OpenSSH")
        assert f"it offers {option.split()[1]}" in said and "\n" not in said


def test_nothing_weak_is_offered(host: SshTransport) -> None:
    """What a server reads of us, so that the names of a paramiko to come are looked at too."""
    ours = host.open(5)._get_latest_kex_init()  # type: ignore[attr-defined]
    names = {name for kind, listed in ours.items() if kind.endswith("_list") for name in listed}
    assert {name for name in names if re.search(r"cbc|des|arcfour|md5|sha1|96|dss|^ssh-rsa$", name)} == set()
    assert {"aes256-ctr", "hmac-sha2-256"} <= names


# Login


def test_a_refused_key_names_user_key_and_the_ssh_line_to_try(server: Sshd, tmp_path: Path) -> None:
    stranger = make_key(tmp_path / "my key")
    said = refused(server, AuthError, key_file=str(stranger))
    user = server.target().user
    assert f"{user}@127.0.0.1:{server.port} was refused; keys tried: {stranger}" in said
    assert f"ssh -v -i '{stranger}' -p {server.port} {user}@127.0.0.1 true" in said


def test_the_ssh_line_to_try_shows_the_keys_that_the_configuration_names(server: Sshd, tmp_path: Path) -> None:
    stranger, config = make_key(tmp_path / "stranger"), tmp_path / "config"
    lines = [f"IdentityFile {stranger}", f"CertificateFile {tmp_path}/vault", f"IdentityAgent {tmp_path}/agent"]
    config.write_text("\n".join(["Host the-v100", *lines, "HostName 127.0.0.1"]) + "\n")
    with pytest.raises(AuthError) as caught:
        connect(server.target(host="the-v100", key_file=None), host_keys=server.host_keys(), ssh_config=config)
    options = f"-i {stranger} -o CertificateFile={tmp_path}/vault -o IdentityAgent={tmp_path}/agent -p {server.port}"
    assert f"`ssh -v {options} {server.target().user}@127.0.0.1 true`" in str(caught.value)


def test_a_refused_login_is_not_tried_again(server: Sshd, tmp_path: Path) -> None:
    with grumpy_door(server, refusals=0) as (port, count):
        key = str(make_key(tmp_path / "stranger"))
        refused(server, AuthError, port=port, host_key=server.host_key(), key_file=key)
    assert len(count) == 1


def test_a_key_that_others_may_read_is_refused(server: Sshd, tmp_path: Path) -> None:
    key = tmp_path / "id"
    key.write_bytes(server.key.read_bytes())
    key.chmod(0o644)
    assert f"chmod 600 {key}" in refused(server, AuthError, "read by others.*0644", key_file=str(key))


def test_a_key_file_that_is_missing_or_no_key_is_named(server: Sshd, tmp_path: Path) -> None:
    (junk := tmp_path / "junk").write_text("hello")
    junk.chmod(0o600)
    refused(server, AuthError, f"{junk} is no private key", key_file=str(junk))
    refused(server, AuthError, "/no/such/key cannot be read: No such file", key_file="/no/such/key")


def test_a_passphrase_is_asked_for_once_however_many_hosts_want_it(tmp_path: Path) -> None:
    key, asked = make_key(tmp_path / "locked", passphrase="open sesame"), []

    def ask(path: str) -> str:
        asked.append(path)
        return "open sesame"

    with running_sshd(tmp_path / "host", key=key) as server:
        refused(server, AuthError, "is encrypted.*ssh-add")
        done = []
        dial = lambda: done.append(connect(server.target(), host_keys=server.host_keys(), ask_passphrase=ask))  # noqa: E731
        threads = [threading.Thread(target=dial) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        connect(server.target(), host_keys=server.host_keys()).close()
        for transport in done:
            transport.close()
    assert len(done) == 4 and asked == [str(key)]


def test_the_time_a_person_takes_to_answer_does_not_count(tmp_path: Path) -> None:
    key = make_key(tmp_path / "locked", passphrase="open sesame")

    def ask(path: str) -> str:
        threading.Event().wait(0.3)
        return "open sesame"

    with running_sshd(tmp_path / "host", key=key) as server:
        hop = find_route(server.target())[0]
        begun, deadline = time.monotonic(), Deadline(60)
        list(Login(hop, deadline, ask)._offers({}))
        counted, took = 60 - deadline.left(), time.monotonic() - begun
    assert 0 < counted < took - 0.25


def test_a_wrong_passphrase_is_asked_for_only_once_too(tmp_path: Path) -> None:
    key, asked = make_key(tmp_path / "locked", passphrase="open sesame"), []

    def ask(path: str) -> str:
        asked.append(path)
        return "guess"

    with running_sshd(tmp_path / "host", key=key) as server:
        for _ in range(2):
            said = refused(server, AuthError, "wrong passphrase", ask_passphrase=ask)
            assert "guess" not in said
    assert len(asked) == 1


def test_unlocking_beforehand_leaves_no_question_for_later(tmp_path: Path) -> None:
    key = make_key(tmp_path / "locked", passphrase="open sesame")
    with running_sshd(tmp_path / "host", key=key) as server:
        unlock(server.target(), lambda _: "open sesame")
        connect(server.target(), host_keys=server.host_keys()).close()
    with pytest.raises(AuthError, match="cannot be read"):
        unlock(server.target(key_file="/no/such/key"), lambda _: "x")


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    path = f"/tmp/orch-test-agent-{os.getpid()}"
    process = subprocess.Popen(["ssh-agent", "-D", "-a", path], stdout=subprocess.DEVNULL)
    wait_for(lambda: os.path.exists(path), "the agent's socket")
    monkeypatch.setenv("SSH_AUTH_SOCK", path)
    yield
    process.kill()
    process.wait()
    os.unlink(path)


def test_the_agent_signs_for_a_key_file_that_it_holds(tmp_path: Path, agent: None) -> None:
    plain = make_key(tmp_path / "key")
    subprocess.run(["ssh-add", "-q", plain], check=True)
    subprocess.run(
        ["ssh-keygen", "-q", "-p", "-P", "", "-N", "now locked", "-f", plain], check=True, capture_output=True
    )
    with running_sshd(tmp_path / "host", key=plain) as server:
        connect(server.target(), host_keys=server.host_keys()).close()
        connect(server.target(key_file=None), host_keys=server.host_keys()).close()


def test_the_agent_is_never_forwarded(tmp_path: Path, agent: None, nobodys_home: Path) -> None:
    with running_sshd(tmp_path / "host", options=["AllowAgentForwarding yes"]) as server:
        subprocess.run(["ssh-add", "-q", server.key], check=True)
        (nobodys_home / ".ssh/config").write_text("Host *\n  ForwardAgent yes\n")
        (nobodys_home / ".fabric.yaml").write_text("forward_agent: true\n")
        transport = connect(server.target(), host_keys=server.host_keys())
        assert transport.run('echo "[$SSH_AUTH_SOCK]"', timeout_s=10).stdout == b"[]\n"
        transport.close()


def test_a_login_as_root_is_never_a_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("getpass.getuser", lambda: "root")
    config = tmp_path / "config"
    config.write_text("Host set\n  User root\n")
    with pytest.raises(HostError, match=r"v100: no user is named for h, and you are root here: set `user:`"):
        find_route(Target("v100", "h"), config)
    with pytest.raises(HostError, match=r"no user is named for gate.*`user@gate` in `proxy_jump:`"):
        find_route(Target("v100", "h", user="ubuntu", proxy_jump="gate"), config)
    assert find_route(Target("v100", "h", user="root"), config)[-1].user == "root"
    assert find_route(Target("v100", "set"), config)[-1].user == "root"
    monkeypatch.setattr("getpass.getuser", lambda: "me")
    assert find_route(Target("v100", "h"), config)[-1].user == "me"


def test_identities_only_keeps_the_agents_other_keys_out(tmp_path: Path, agent: None, nobodys_home: Path) -> None:
    with running_sshd(tmp_path / "host") as server:
        subprocess.run(["ssh-add", "-q", server.key], check=True)
        stranger = str(make_key(tmp_path / "stranger"))
        connect(server.target(key_file=stranger), host_keys=server.host_keys()).close()
        (nobodys_home / ".ssh/config").write_text("Host *\n  IdentitiesOnly yes\n")
        refused(server, AuthError, f"keys tried: {stranger}:", key_file=stranger)


# Slow logins


@contextlib.contextmanager
def slow_door(folder: Path, seconds: float) -> Iterator[Sshd]:
    """A host that asks a directory for the keys of a user, once for each key that is shown."""
    key = make_key(folder / "id")
    command = f'/bin/sh -c "sleep {seconds}; cat {key}.pub"'
    options = [f"AuthorizedKeysCommand {command}", f"AuthorizedKeysCommandUser {getpass.getuser()}"]
    options.append("AuthorizedKeysFile none")
    with running_sshd(folder / "host", key=key, options=options) as server:
        yield server


def test_a_login_that_takes_long_is_no_dead_host_and_no_refusal(tmp_path: Path) -> None:
    with slow_door(tmp_path, 3) as server:
        said = refused_late(server, timeout_s=1.0)
        assert "the host answered, but the SSH login did not finish within 1 s: raise `connect_timeout:`" in said
        connect(server.target(connect_timeout_s=20), host_keys=server.host_keys(), timeout_s=1.0).close()
        config = tmp_path / "config"
        config.write_text("Host *\n  ConnectTimeout 20\n")
        connect(server.target(), host_keys=server.host_keys(), timeout_s=1.0, ssh_config=config).close()
        assert "within 1.5 s" in refused_late(server, timeout_s=1.0, connect_timeout_s=1.5, ssh_config=config)


def refused_late(server: Sshd, *, timeout_s: float, ssh_config: Path | None = None, **changes: object) -> str:
    with pytest.raises(ConnectError) as caught:
        connect(server.target(**changes), host_keys=server.host_keys(), timeout_s=timeout_s, ssh_config=ssh_config)
    assert "refused" not in str(caught.value)
    return str(caught.value)


def test_a_fan_out_waits_as_long_as_the_inventory_allows_a_login(tmp_path: Path) -> None:
    with slow_door(tmp_path, 2) as server:
        target = server.target(connect_timeout_s=20)
        dial = lambda target: connect(target, host_keys=server.host_keys(), timeout_s=0.5).close()  # noqa: E731
        assert errors(for_each({"v100": target}, dial, deadline_s=1.0)) == []


def test_every_key_has_the_whole_time(tmp_path: Path, agent: None) -> None:
    with slow_door(tmp_path, 0.8) as server:
        for number in range(3):
            subprocess.run(["ssh-add", "-q", make_key(tmp_path / f"stranger{number}")], check=True)
        subprocess.run(["ssh-add", "-q", server.key], check=True)
        transport = connect(server.target(key_file=None), host_keys=server.host_keys(), timeout_s=3.0)
        transport.close()
        assert transport.login_s > 3.0  # four times the directory, and what doctor calls slow


def test_a_time_out_that_comes_early_is_no_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """paramiko measures by the wall clock, which somebody may set."""
    with slow_door(tmp_path, 5) as server:
        monkeypatch.setattr(Deadline, "left", lambda self: 1.0)
        with pytest.raises(ConnectError, match="did not finish"):
            connect(server.target(), host_keys=server.host_keys())


def test_a_host_that_hangs_up_in_the_login_is_no_refusal(tmp_path: Path) -> None:
    """sshd ends by itself when its banner is too long for a packet."""
    banner = tmp_path / "banner"
    banner.write_text("no entry\n" * 50_000)
    with running_sshd(tmp_path / "host", options=[f"Banner {banner}"]) as server:
        refused(server, ConnectError, "the host hung up during the login: .*journalctl")
        banner.write_text("no entry\n" * 25_000)
        connect(server.target(), host_keys=server.host_keys()).close()


def test_a_host_that_takes_no_more_tries_is_a_refusal_with_its_remedy(tmp_path: Path, agent: None) -> None:
    with running_sshd(tmp_path / "host", options=["MaxAuthTries 2"]) as server:
        for number in range(3):
            subprocess.run(["ssh-add", "-q", make_key(tmp_path / f"stranger{number}")], check=True)
        said = refused(server, AuthError, "takes no more tries; name one `key_file:`", key_file=None)
        assert said.count("agent key") == 2


def test_a_key_that_was_replaced_is_read_again(tmp_path: Path) -> None:
    with running_sshd(tmp_path / "host") as server:
        mine = tmp_path / "mine"
        make_key(mine)
        refused(server, AuthError, "was refused", key_file=str(mine))
        mine.write_bytes(server.key.read_bytes())
        connect(server.target(key_file=str(mine)), host_keys=server.host_keys()).close()


# The way there


def test_a_host_behind_a_jump_host_is_reached_and_both_are_verified(server: Sshd, tmp_path: Path) -> None:
    with running_sshd(tmp_path / "gate", key=server.key) as gate:
        target = server.target(proxy_jump=f"{server.target().user}@127.0.0.1:{gate.port}")
        host_keys = HostKeys(tmp_path / "ours")
        with pytest.raises(HostKeyError, match=f"v100: jump host .*:{gate.port}: its host key .* is not known"):
            connect(target, host_keys=host_keys)
        for expected in (gate, server):
            offered = fetch_host_key(target, host_keys=host_keys)
            assert offered.fingerprint == expected.fingerprint() and offered.peer.jump is (expected is gate)
            host_keys.check(offered.peer, offered.key, accept_new=True)
        before = gate.logins()
        transport = connect(target, host_keys=host_keys)
        assert transport.run("tee /dev/stderr", stdin=BINARY, timeout_s=60).stdout == BINARY
        assert gate.logins() == before + 1
        transport.close()


def test_a_jump_host_that_cannot_reach_the_host_says_so(tmp_path: Path) -> None:
    with running_sshd(tmp_path / "gate") as gate:
        target = gate.target(port=free_port(), proxy_jump=f"{gate.target().user}@127.0.0.1:{gate.port}")
        with pytest.raises(ConnectError, match=r"a channel was refused.*AllowTcpForwarding"):
            connect(target, host_keys=gate.host_keys())


@pytest.fixture
def mute() -> Iterator[socket.socket]:
    """Takes every connection to any address of this machine, and never says a word."""
    with socket.create_server(("", 0), backlog=400) as server:
        yield server


class AllQueued(threading.Semaphore):
    """Nobody's turn comes before all stand in the queue, however late a busy machine starts their threads."""

    def __init__(self, number: int) -> None:
        super().__init__(connection.HANDSHAKES_PER_SERVER)
        self._all = threading.Barrier(number)

    def acquire(self, *args: Any, **options: Any) -> bool:
        self._all.wait(30)
        return super().acquire(*args, **options)


def test_a_dead_jump_host_is_not_dialled_for_each_host_behind_it(
    mute: socket.socket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = mute.getsockname()[1]
    gate, server = f"me@127.0.0.1:{port}", connection._Server()
    server.slots = AllQueued(100)
    monkeypatch.setitem(connection._servers, ("127.0.0.1", port), server)
    behind = {f"n{n}": Target(f"n{n}", f"10.0.0.{n}", 22, "me", proxy_jump=gate) for n in range(1, 101)}
    keys = HostKeys(tmp_path / "recorded")
    outcomes = for_each(behind, lambda target: connect(target, host_keys=keys, timeout_s=1), deadline_s=30)
    assert len(outcomes) == len(errors(outcomes)) == 100
    for node, error in outcomes.items():
        assert str(error).startswith(f"{node}: jump host 127.0.0.1:") and "no SSH login within 1 s" in str(error)
    mute.settimeout(0)
    dialled = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            mute.accept()[0].close()
            dialled += 1
    assert 1 <= dialled <= connection.HANDSHAKES_PER_SERVER


def test_servers_that_never_greet_take_no_turns_from_one_that_does(
    server: Sshd, mute: socket.socket, tmp_path: Path
) -> None:
    port, all_silent = mute.getsockname()[1], threading.Event()
    silent = {f"s{n}": Target(f"s{n}", f"127.0.1.{n}", port, "me") for n in range(1, 201)}
    ended: list[str] = []

    def dial(target: Target) -> str:
        if target.node == server.node:
            assert all_silent.wait(30)
            connect(target, host_keys=server.host_keys()).close()
        else:
            if target.node == "s200":
                all_silent.set()
            with contextlib.suppress(ConnectError):
                connect(target, host_keys=HostKeys(tmp_path / "recorded"), timeout_s=8)
        ended.append(target.node)
        return target.node

    outcomes = for_each({**silent, server.node: server.target()}, dial, deadline_s=30)
    assert len(values(outcomes)) == 201
    assert ended[0] == server.node


def test_a_link_that_goes_silent_behind_a_jump_host_is_noticed(
    server: Sshd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ssh_errors, "USER_TIMEOUT_S", 0.5)
    monkeypatch.setattr(ssh_errors, "HEARTBEAT_S", 0.1)
    with running_sshd(tmp_path / "gate", key=server.key) as gate, running_sshd(tmp_path / "far", key=server.key) as far:
        known = tmp_path / "known"
        known.write_text(gate.known_hosts_line() + far.known_hosts_line())
        target = far.target(proxy_jump=f"{gate.target().user}@127.0.0.1:{gate.port}")
        transport = connect(target, host_keys=HostKeys(tmp_path / "none", [known]))
        with pytest.raises(ConnectError, match="broke"), transport.stream("echo here; cat") as chunks:
            assert next(chunk for chunk in chunks if chunk) == b"here\n"
            far.freeze()
            for _ in chunks:
                pass
        transport.close()


class SilentAndCutOff:
    """A connection behind a jump host that is gone: nothing answers, and closing it writes to what is closed."""

    active = True

    def is_active(self) -> bool:
        return self.active

    def global_request(self, *_: object, **__: object) -> None:
        raise EOFError

    def close(self) -> None:
        self.active = False
        raise EOFError


def test_a_jump_host_that_goes_away_while_a_silent_link_is_closed_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ssh_errors, "USER_TIMEOUT_S", 0.01)
    lost = SilentAndCutOff()
    ssh_errors.beat(lost)
    assert not lost.active


def test_the_ssh_configuration_is_honoured_and_the_inventory_wins(
    server: Sshd, nobodys_home: Path, tmp_path: Path
) -> None:
    more = nobodys_home / ".ssh/more.conf"
    more.write_text(f"Host rack-*\n  Port {server.port}\n  IdentityFile {server.key}\nHost other\n  User other\n")
    (nobodys_home / ".ssh/config").write_text(
        "Include more.conf\nUser nobody\nHost rack-1\n  HostName 127.0.0.1\n  Port 1\n"
    )
    target = Target("v100", "rack-1", user=server.target().user)
    connect(target, host_keys=server.host_keys()).close()
    with pytest.raises(AuthError, match=f"nobody@127.0.0.1:{server.port} was refused"):
        connect(Target("v100", "rack-1"), host_keys=server.host_keys())


def test_another_configuration_can_be_named(server: Sshd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "config"
    config.write_text(f"Host alias\n  HostName 127.0.0.1\n  Port {server.port}\n  HostKeyAlias the-v100\n")
    target = server.target(host="alias", port=None)
    known = tmp_path / "known"
    known.write_text(f"the-v100 {server.host_key()}\n")
    host_keys = HostKeys(tmp_path / "none", [known])
    connect(target, host_keys=host_keys, ssh_config=config).close()
    monkeypatch.setenv("ORCH_SSH_CONFIG", str(config))
    connect(target, host_keys=host_keys).close()


def test_a_broken_or_missing_configuration_is_named(server: Sshd, tmp_path: Path) -> None:
    (broken := tmp_path / "config").write_text("Host *\n  nonsense\n")
    for config, said in ((broken, 'line 2: no argument after keyword "nonsense"'), (tmp_path / "none", "No such file")):
        with pytest.raises(UsageError, match=f"{config}:? {said}"):
            connect(server.target(), host_keys=server.host_keys(), ssh_config=config)


# Faults of the network


def test_nothing_listening_is_said_at_once() -> None:
    port, began = free_port(), time.monotonic()
    with pytest.raises(ConnectError, match=f"v100: nothing listens at 127.0.0.1:{port}"):
        connect(Target("v100", "127.0.0.1", port, "me"), host_keys=HostKeys(Path("/nonexistent")), timeout_s=120)
    assert time.monotonic() - began < 60


def test_a_name_without_an_address_is_said() -> None:
    with pytest.raises(ConnectError, match=r"no address for 'no-such-host\.invalid'"):
        connect(Target("v100", "no-such-host.invalid", user="me"), host_keys=HostKeys(Path("/nonexistent")))


def test_a_port_that_never_answers_costs_the_deadline_and_no_more() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        began = time.monotonic()
        with pytest.raises(ConnectError, match=r"no SSH login within 0.5 s"):
            connect(
                Target("v100", "127.0.0.1", silent.getsockname()[1], "me"),
                host_keys=HostKeys(Path("/nonexistent")),
                timeout_s=0.5,
            )
        assert time.monotonic() - began < 30


@contextlib.contextmanager
def grumpy_door(server: Sshd, refusals: int) -> Iterator[tuple[int, list[int]]]:
    """A port that hangs up on so many connections, as sshd does beyond MaxStartups, then leads to `server`."""
    count: list[int] = []

    def serve() -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            count.append(1)
            if len(count) <= refusals:
                client.sendall(b"Exceeded MaxStartups\r\n")
                client.close()
                continue
            upstream = socket.create_connection(("127.0.0.1", server.port))
            for source, sink in ((client, upstream), (upstream, client)):
                threading.Thread(target=_pour, args=(source, sink), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, daemon=True).start()
        yield listener.getsockname()[1], count
        listener.shutdown(socket.SHUT_RDWR)


def _pour(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError), source:
        while data := source.recv(65536):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)


def test_a_server_that_hangs_up_before_its_greeting_is_tried_again(server: Sshd) -> None:
    with grumpy_door(server, refusals=2) as (port, count):
        target = server.target(port=port, host_key=server.host_key())
        transport = connect(target, host_keys=server.host_keys())
        transport.close()
    assert len(count) == 3
    assert (transport.logins_tried, transport.login_s > 0.1) == (3, True)  # for `orch doctor`


def test_a_server_that_always_hangs_up_is_given_up_within_the_deadline(server: Sshd) -> None:
    with grumpy_door(server, refusals=1000) as (port, count):
        began = time.monotonic()
        with pytest.raises(ConnectError, match=r"hung up before an SSH greeting.*MaxStartups"):
            connect(server.target(port=port), host_keys=server.host_keys(), timeout_s=2.0)
        assert time.monotonic() - began < 30
    assert len(count) > 1


def test_never_more_handshakes_at_once_than_a_server_takes(tmp_path: Path) -> None:
    with running_sshd(tmp_path / "host", options=["MaxStartups 16:100:16"]) as server:
        host_keys, open_ones = server.host_keys(), []

        def dial() -> None:
            open_ones.append(connect(server.target(), host_keys=host_keys, timeout_s=60))

        # sshd counts a login as begun for a moment longer than we do, so its limit here is twice ours.
        threads = [threading.Thread(target=dial) for _ in range(40)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for transport in open_ones:
            transport.close()
        assert len(open_ones) == 40
        assert "MaxStartups" not in server.log()


def test_nothing_of_paramikos_talk_reaches_the_terminal(server: Sshd) -> None:
    program = """if True:
        import sys
        from pathlib import Path
        from orchestrator.errors import ConnectError
        from orchestrator.transport.ssh import HostKeys, Target, connect
        target = Target("v100", "127.0.0.1", int(sys.argv[1]), "me")
        try:
            connect(target, host_keys=HostKeys(Path("/none")), timeout_s=0.5)
        except ConnectError:
            print("refused")
    """
    with grumpy_door(server, refusals=1000) as (port, _):  # pytest takes logs away, so a fresh interpreter it is
        argv = [sys.executable, "-c", program, str(port)]
        ended = subprocess.run(argv, capture_output=True, text=True, cwd=Path(__file__).parents[2], check=False)
    assert (ended.stdout, ended.stderr) == ("refused\n", "")


def test_the_socket_notices_a_link_that_swallows_packets(host: SshTransport) -> None:
    sock = host.open(5).sock
    assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 20_000
    assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


def test_a_program_out_of_descriptors_does_not_blame_the_ssh_configuration(tmp_path):
    config = tmp_path / "config"
    config.write_text("Host *\n")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1, before[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            find_route(Target("v100", "h", user="me"), config)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
