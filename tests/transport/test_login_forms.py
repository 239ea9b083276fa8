"""Every way in that OpenSSH's client has with keys: the same SSH configuration, by `ssh` and by us, on a real sshd.

What `ssh` gets into, we get into; what it does not, we do not.
"""

from __future__ import annotations

import base64
import contextlib
import getpass
import os
import shutil
import struct
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from orchestrator.errors import AuthError, HostError, HostKeyError
from orchestrator.transport import HostKeys, command_line, connect
from orchestrator.transport.ssh import Target, unlock
from tests.support.sshd import Sshd, make_key, needs_sshd, running_sshd, wait_for

pytestmark = needs_sshd
ME = getpass.getuser()


@pytest.fixture(autouse=True)
def nobodys_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "home/.ssh").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    monkeypatch.delenv("ORCH_SSH_CONFIG", raising=False)


def keygen(*words: object) -> None:
    subprocess.run(["ssh-keygen", "-q", *map(str, words)], check=True, capture_output=True)


def sign(authority: Path, key: Path, names: str, *words: object) -> Path:
    """The certificate `KEY-cert.pub`."""
    keygen("-s", authority, "-I", "test", *(("-n", names) if names else ()), *words, f"{key}.pub")
    return key.with_name(f"{key.name}-cert.pub")


@dataclass
class Door:
    """An sshd that takes `known` as a key, and certificates of `authority`; and a person's files."""

    server: Sshd
    folder: Path
    known: Path
    """Its key is authorized as it is."""
    authority: Path
    agents: dict[str, str] = field(default_factory=dict)

    def signed(self, kind: str = "ed25519", names: str = ME, *words: object) -> Path:
        """A new key with a certificate; without that it is a stranger."""
        key = make_key(self.folder / f"signed_{kind}", kind)
        sign(self.authority, key, names, *words)
        return key

    def stranger(self, name: str = "stranger") -> Path:
        return make_key(self.folder / name)

    def configured(self, *lines: object, known_hosts: str | None = None, host: str = "Host v100") -> Path:
        known = self.folder / "known_hosts"
        known.write_text(self.server.known_hosts_line() if known_hosts is None else known_hosts)
        config = self.folder / "config"
        usual = ("HostName 127.0.0.1", f"Port {self.server.port}", f"User {ME}", f"UserKnownHostsFile {known}")
        usual += ("GlobalKnownHostsFile none", "IdentityFile none")
        config.write_text("\n".join([host, *map(str, lines), "Host v100", *usual]) + "\n")
        return config


@pytest.fixture
def door(tmp_path: Path) -> Iterator[Door]:
    authority, known = make_key(tmp_path / "authority"), make_key(tmp_path / "id")
    (tmp_path / "trusted").write_text(Path(f"{authority}.pub").read_text())
    with running_sshd(tmp_path / "host", key=known, options=[f"TrustedUserCAKeys {tmp_path}/trusted"]) as server:
        yield Door(server, tmp_path, known, authority)


@contextlib.contextmanager
def agent(*keys: Path) -> Iterator[str]:
    """Its socket. It holds the keys, with the certificates beside them."""
    path = f"/tmp/orch-test-agent-{os.getpid()}-{len(keys)}-{ME}"
    process = subprocess.Popen(["ssh-agent", "-D", "-a", path], stdout=subprocess.DEVNULL)
    try:
        environment = {**os.environ, "SSH_AUTH_SOCK": path}
        lists = ["ssh-add", "-l"]  # exits 2 if it reaches no agent: a socket is there before anybody listens at it
        wait_for(lambda: subprocess.run(lists, env=environment, capture_output=True).returncode != 2, "the agent")
        for key in keys:
            subprocess.run(["ssh-add", "-q", key], check=True, env=environment, capture_output=True)
        yield path
    finally:
        process.kill()
        process.wait()
        Path(path).unlink(missing_ok=True)


def ssh_gets_in(config: Path) -> bool:
    argv = ["ssh", "-F", str(config), "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=yes", "v100", "true"]
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode in (0, 255), done.stderr
    return done.returncode == 0


def we_get_in(config: Path, folder: Path) -> str:
    """ "" or why not."""
    try:
        connect(Target("v100", "v100"), host_keys=HostKeys(folder / "recorded"), ssh_config=config).close()
    except (AuthError, HostKeyError) as error:
        return str(error)
    return ""


Form = Callable[[Door, pytest.MonkeyPatch], "contextlib.AbstractContextManager[Path]"]
FORMS: dict[str, tuple[bool, Form]] = {}


def form(*, gets_in: bool) -> Callable[[Form], Form]:
    def kept(made: Form) -> Form:
        FORMS[made.__name__] = (gets_in, made)
        return made

    return kept


def with_agent(*, keys: Callable[[Door], Sequence[Path]] = lambda door: [door.known]) -> Callable[..., Form]:
    """A form whose lines are made of the agent's socket."""

    def made(lines: Callable[[Door, str, pytest.MonkeyPatch], Sequence[object]]) -> Form:
        @contextlib.contextmanager
        def whole(door: Door, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
            with agent(*keys(door)) as socket:
                yield door.configured(*lines(door, socket, monkeypatch))

        whole.__name__ = lines.__name__
        return whole

    return made


def plain(lines: Callable[[Door], Sequence[object]]) -> Form:
    @contextlib.contextmanager
    def whole(door: Door, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
        yield door.configured(*lines(door))

    whole.__name__ = lines.__name__
    return whole


# Agents


@form(gets_in=True)
@with_agent()
def identity_agent(door, socket, monkeypatch):
    return [f"IdentityAgent {socket}"]


@form(gets_in=True)
@with_agent()
def identity_agent_quoted_with_token(door, socket, monkeypatch):
    return [f'IdentityAgent "{socket.replace(ME, "%r")}"']


@form(gets_in=True)
@with_agent()
def identity_agent_by_variable(door, socket, monkeypatch):
    monkeypatch.setenv("MY_AGENT", socket)
    return ["IdentityAgent $MY_AGENT"]


@form(gets_in=True)
@with_agent()
def identity_agent_by_variable_in_braces(door, socket, monkeypatch):
    monkeypatch.setenv("MY_FOLDER", str(Path(socket).parent))
    return [f"IdentityAgent ${{MY_FOLDER}}/{Path(socket).name}"]


@form(gets_in=True)
@with_agent()
def identity_agent_of_the_environment(door, socket, monkeypatch):
    monkeypatch.setenv("SSH_AUTH_SOCK", socket)
    return ["IdentityAgent SSH_AUTH_SOCK"]


@form(gets_in=False)
@with_agent()
def identity_agent_none(door, socket, monkeypatch):
    monkeypatch.setenv("SSH_AUTH_SOCK", socket)
    return ["IdentityAgent none"]


@form(gets_in=False)
@with_agent()
def identity_agent_that_is_gone(door, socket, monkeypatch):
    monkeypatch.setenv("SSH_AUTH_SOCK", socket)
    return [f"IdentityAgent {socket}.gone"]


@form(gets_in=True)
@with_agent(keys=lambda door: [door.stranger(), door.known])
def public_half_and_identities_only(door, socket, monkeypatch):
    elsewhere = shutil.copy(f"{door.known}.pub", door.folder / "which.pub")
    return [f"IdentityAgent {socket}", f"IdentityFile {elsewhere}", "IdentitiesOnly yes"]


@form(gets_in=False)
@with_agent(keys=lambda door: [door.known])
def public_half_of_another_key(door, socket, monkeypatch):
    return [f"IdentityAgent {socket}", f"IdentityFile {door.stranger()}.pub", "IdentitiesOnly yes"]


@form(gets_in=False)
@plain
def public_half_without_agent(door):
    return [f"IdentityFile {door.known}.pub"]


@form(gets_in=True)
@with_agent()
def encrypted_key_without_public_half_in_agent(door, socket, monkeypatch):
    keygen("-p", "-P", "", "-N", "now locked", "-f", door.known)
    Path(f"{door.known}.pub").unlink()
    return [f"IdentityAgent {socket}", f"IdentityFile {door.known}", "IdentitiesOnly yes"]


@form(gets_in=True)
@with_agent(keys=lambda door: [door.stranger(f"s{number}") for number in range(3)] + [door.known])
def one_of_many_keys_in_agent(door, socket, monkeypatch):
    return [f"IdentityAgent {socket}"]


# Certificates


@form(gets_in=True)
@plain
def certificate_beside_key(door):
    return [f"IdentityFile {door.signed()}"]


@form(gets_in=True)
@plain
def certificate_beside_rsa_key(door):
    return [f"IdentityFile {door.signed('rsa')}"]


@form(gets_in=True)
@plain
def certificate_beside_ecdsa_key(door):
    return [f"IdentityFile {door.signed('ecdsa')}"]


@form(gets_in=True)
@plain
def certificate_file(door):
    key = door.signed()
    certificate = shutil.move(f"{key}-cert.pub", door.folder / "vault")
    return [f"IdentityFile {key}", f"CertificateFile {certificate}"]


@form(gets_in=True)
@with_agent(keys=lambda door: [door.signed()])
def certificate_in_agent(door, socket, monkeypatch):
    (door.folder / "signed_ed25519-cert.pub").unlink()
    return [f"IdentityAgent {socket}"]


@form(gets_in=True)
@with_agent(keys=lambda door: [door.signed("rsa")])
def rsa_certificate_in_agent(door, socket, monkeypatch):
    (door.folder / "signed_rsa-cert.pub").unlink()
    return [f"IdentityAgent {socket}"]


def _unsigned(door: Door) -> list[Path]:
    """In the agent without its certificate, which is made afterwards."""
    return [make_key(door.folder / "later")]


@form(gets_in=True)
@with_agent(keys=_unsigned)
def certificate_file_of_a_key_in_agent(door, socket, monkeypatch):
    certificate = sign(door.authority, door.folder / "later", ME)
    moved = shutil.move(certificate, door.folder / "vault")
    return [f"IdentityAgent {socket}", f"CertificateFile {moved}"]


@form(gets_in=True)
@with_agent(keys=_unsigned)
def certificate_beside_a_public_half(door, socket, monkeypatch):
    sign(door.authority, door.folder / "later", ME)
    (door.folder / "later").unlink()
    return [f"IdentityAgent {socket}", f"IdentityFile {door.folder}/later", "IdentitiesOnly yes"]


@form(gets_in=False)
@plain
def certificate_that_expired(door):
    return [f"IdentityFile {door.signed('ed25519', ME, '-V', '20200101:20200102')}"]


@form(gets_in=False)
@plain
def certificate_of_another_user(door):
    return [f"IdentityFile {door.signed('ed25519', 'somebody')}"]


@form(gets_in=True)
@plain
def key_that_is_known_with_a_certificate_of_a_stranger(door):
    sign(door.stranger(), door.known, ME)
    return [f"IdentityFile {door.known}"]


# Blocks


def block(of: str, line: str) -> None:
    @plain
    def lines(door: Door) -> Sequence[object]:
        return [f"{line}\n  IdentityFile {door.known}"]

    lines.__name__ = f"block_{of}"
    FORMS[lines.__name__] = (True, lines)


for criteria, opening in {
    "final_all": "Match final all",
    "equals": 'Match host="v1*"',
    "original": "Match originalhost v* user *",
    "negated": "Match !host a,b,c localuser *",
    "exec": 'Match exec "test %n = v100"',
    "include": "Host v???",
}.items():
    block(criteria, opening)


@pytest.mark.parametrize("name", FORMS)
def test_where_ssh_gets_in_we_get_in(name: str, door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    gets_in, made = FORMS[name]
    with made(door, monkeypatch) as config:
        assert ssh_gets_in(config) is gets_in, "the test is wrong"
        why = we_get_in(config, door.folder)
        assert (not why) is gets_in, why
        assert "chmod" not in why
        if name.startswith("certificate"):
            assert "ssh-copy-id" not in why


def test_a_public_half_as_the_inventorys_key_file_is_signed_for_by_the_agent(door: Door) -> None:
    target = door.server.target(key_file=f"{door.known}.pub")
    keys = door.server.host_keys()
    with pytest.raises(AuthError, match=rf"key {door.known}.pub is a public key, and no agent .*\({door.known}\)$"):
        connect(target, host_keys=keys)
    with pytest.raises(AuthError, match="is a public key"):
        unlock(target, lambda path: pytest.fail("asked for a passphrase"))
    with agent(door.stranger(), door.known) as socket, pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSH_AUTH_SOCK", socket)
        unlock(target, lambda path: pytest.fail("asked for a passphrase"))
        connect(target, host_keys=keys).close()


def test_a_certificate_beside_the_inventorys_key_file_is_shown(door: Door) -> None:
    connect(door.server.target(key_file=str(door.signed())), host_keys=door.server.host_keys()).close()
    old = door.signed("ed25519", ME, "-V", "20200101:20200102")
    with pytest.raises(AuthError, match=rf"signed_ed25519-cert.pub \(for {ME}, expired 2020-01-02 00:00\) with"):
        connect(door.server.target(key_file=str(old)), host_keys=door.server.host_keys())


def test_a_refusal_names_certificates_that_were_no_use(door: Door) -> None:
    stranger, empty = door.stranger(), door.folder / "empty"
    empty.touch()
    of_another = sign(door.authority, make_key(door.folder / "another"), ME)
    lines = [f"IdentityFile {stranger}", f"CertificateFile {of_another}", f"CertificateFile {empty}"]
    config = door.configured(*lines)
    assert not ssh_gets_in(config)
    why = we_get_in(config, door.folder)
    assert f"keys tried: {stranger}, {of_another} (is of no key here), {empty} (holds no certificate): `ssh" in why
    assert "ssh-copy-id" not in why


def test_a_certificate_in_a_file_and_in_the_agent_is_shown_once(door: Door) -> None:
    """Hosts count the tries."""
    key = door.signed("ed25519", "somebody")
    with agent(key) as socket:
        why = we_get_in(door.configured(f"IdentityAgent {socket}", f"IdentityFile {key}"), door.folder)
    assert why.count("signed_ed25519-cert.pub") + why.count("signed_ed25519 (agent)") == 3  # one names both
    assert door.server.log().count("Failed publickey") == 2


def test_a_security_key_is_named_with_the_agent_that_can_use_it(door: Door) -> None:
    """Its file as ssh-keygen writes it, but for what only the security key knows."""
    fields = [b"sk-ssh-ed25519@openssh.com", b"k" * 32, b"ssh:"]
    public = b"".join(struct.pack(">I", len(one)) + one for one in fields)
    outer = [b"none", b"none", b""]
    whole = b"openssh-key-v1\0" + b"".join(struct.pack(">I", len(one)) + one for one in outer)
    whole += struct.pack(">I", 1) + struct.pack(">I", len(public)) + public + struct.pack(">I", 8) + b"x" * 8
    body = base64.encodebytes(whole).decode()
    key = door.folder / "id_sk"
    key.write_text(f"-----BEGIN OPENSSH PRIVATE KEY-----\n{body}-----END OPENSSH PRIVATE KEY-----\n")
    key.chmod(0o600)
    with pytest.raises(AuthError, match=f"key {key} is a security key, which only an agent can use: ssh-add {key}"):
        connect(door.server.target(key_file=str(key)), host_keys=door.server.host_keys())


def test_an_agent_that_does_not_sign_leaves_the_next_key_its_turn(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one does whose person says no."""
    refuses = door.stranger()
    with agent() as socket:
        environment = {
            **os.environ,
            "SSH_AUTH_SOCK": socket,
            "SSH_ASKPASS": "/bin/false",
            "SSH_ASKPASS_REQUIRE": "force",
        }
        subprocess.run(["ssh-add", "-q", "-c", refuses], check=True, env=environment, capture_output=True)
        monkeypatch.setenv("SSH_AUTH_SOCK", socket)
        config = door.configured(f"IdentityFile {refuses}", f"IdentityFile {door.known}")
        refuses.unlink()
        assert ssh_gets_in(config)
        assert we_get_in(config, door.folder) == ""


def test_the_systems_ssh_logs_in_by_the_same_means(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    """`orch ssh` hands agent and certificates of jump hosts on."""
    key = door.signed()
    certificate = shutil.move(f"{key}-cert.pub", door.folder / "vault")
    with agent(door.known) as socket:
        config = door.configured(f"IdentityAgent {socket}", f"ProxyJump {ME}@gate")
        gate = f"Host gate\n HostName localhost\n Port {door.server.port}\n IdentityFile {key}\n IdentityAgent none\n"
        gate += (
            f" CertificateFile {certificate}\n HostKeyAlias the-gate\n UserKnownHostsFile {door.folder}/known_hosts\n"
        )
        config.write_text(config.read_text() + gate)
        known = door.folder / "known_hosts"
        known.write_text(known.read_text() + f"the-gate {door.server.host_key()}\n")
        monkeypatch.setenv("ORCH_SSH_CONFIG", str(config))
        assert we_get_in(config, door.folder) == ""
        before = door.server.logins()
        argv = command_line(
            Target("v100", "v100"), HostKeys(door.folder / "recorded"), pins=door.folder, command=["true"]
        )
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL, check=False)
        assert (done.returncode, door.server.logins()) == (0, before + 2), done.stderr


def test_known_hosts_files_are_named_with_tokens_and_variables(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_FOLDER", str(door.folder))
    config = door.configured('UserKnownHostsFile "${MY_FOLDER}/no %h" ${MY_FOLDER}/%n', f"IdentityFile {door.known}")
    (door.folder / "known_hosts").rename(door.folder / "v100")
    assert ssh_gets_in(config)
    assert we_get_in(config, door.folder) == ""


# Host certificates


@dataclass
class Signed:
    gets_in: bool
    names: str = "127.0.0.1"
    validity: str = "always:forever"
    kind: str = "-h"
    line: str = "@cert-authority * {authority}"
    key: str = "ed25519"
    config: str = ""
    why: str = ""


HOSTS = {
    "signed": Signed(True),
    "rsa": Signed(True, key="rsa"),
    "ecdsa": Signed(True, key="ecdsa"),
    "by place": Signed(True, line="@cert-authority [127.0.0.1]:* {authority}"),
    "any name": Signed(True, names=""),
    "pattern": Signed(False, names="127.0.0.*", why="is not for 127.0.0.1"),
    "alias": Signed(True, names="the-v100", config="HostKeyAlias the-v100", line="@cert-authority the-* {authority}"),
    "other name": Signed(False, names="10.0.0.1", why="is not for 127.0.0.1"),
    "expired": Signed(False, validity="20200101:20200102", why="is not valid now"),
    "to come": Signed(False, validity="21200101:21200102", why="is not valid now .*not before"),
    "of a user": Signed(False, kind="", why="is not known"),
    "other authority": Signed(False, line="@cert-authority * {stranger}", why="of another authority"),
    "other host": Signed(False, line="@cert-authority *.lab {authority}", why="is not known"),
    "revoked authority": Signed(False, line="@cert-authority * {authority}\n@revoked * {authority}", why="is revoked"),
    "revoked key": Signed(False, line="@cert-authority * {authority}\n@revoked * {key}", why="is revoked"),
    "plain key": Signed(True, names="elsewhere", line="@cert-authority * {authority}\n* {key}"),
}


@pytest.mark.parametrize("name", HOSTS)
def test_host_certificates_are_judged_as_by_ssh(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = HOSTS[name]
    authority, stranger = make_key(tmp_path / "authority", case.key), make_key(tmp_path / "stranger")
    key = tmp_path / "host" / f"host_{case.key}"
    kind = [case.kind] if case.kind else []
    with running_sshd(
        tmp_path / "host",
        host_keys=[case.key],
        options=[f"HostCertificate {key}-cert.pub"],
        prepare=lambda folder: sign(authority, key, case.names, *kind, "-V", case.validity),
    ) as server:
        door = Door(server, tmp_path, server.key, authority)
        parts = {
            name: " ".join(Path(f"{path}.pub").read_text().split()[:2])
            for name, path in {"authority": authority, "stranger": stranger, "key": key}.items()
        }
        config = door.configured(
            case.config, f"IdentityFile {server.key}", known_hosts=case.line.format(**parts) + "\n"
        )
        assert ssh_gets_in(config) is case.gets_in, "the test is wrong"
        why = we_get_in(config, tmp_path)
        assert (not why) is case.gets_in, why
        if case.why:
            with pytest.raises(HostError, match=case.why):
                raise HostError("", why)
        if case.gets_in:
            monkeypatch.setenv("ORCH_SSH_CONFIG", str(config))
            keys = HostKeys(tmp_path / "recorded")
            argv = command_line(Target("v100", "v100"), keys, pins=tmp_path / "pins", command=["true"])
            assert subprocess.run(argv, stdin=subprocess.DEVNULL, timeout=60, check=False).returncode == 0
