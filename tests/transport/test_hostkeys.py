"""Known hosts: whose key is whose, and what is refused."""

import base64
import hashlib
import hmac
import subprocess
import threading
from pathlib import Path
from tempfile import NamedTemporaryFile

import paramiko
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.errors import HostKeyError
from orchestrator.paths import Home
from orchestrator.transport import HostKeys, Peer, UnknownHostKeyError, fingerprint, known_name

KEY, OTHER = paramiko.ECDSAKey.generate(), paramiko.ECDSAKey.generate()
RSA = paramiko.RSAKey.generate(2048)
PEER = Peer("v100", "192.168.1.42")


def line(key: paramiko.PKey, hosts: str = PEER.name) -> str:
    return f"{hosts} {key.get_name()} {key.get_base64()} a comment\n"


@pytest.fixture
def users(tmp_path: Path) -> Path:
    return tmp_path / "users_known_hosts"


@pytest.fixture
def host_keys(tmp_path: Path, users: Path) -> HostKeys:
    return HostKeys(tmp_path / "home" / "known_hosts", [users])


def test_the_fingerprint_is_the_one_that_openssh_prints(tmp_path: Path) -> None:
    public = tmp_path / "key.pub"
    public.write_text(f"{KEY.get_name()} {KEY.get_base64()}\n")
    printed = subprocess.run(["ssh-keygen", "-lf", public], capture_output=True, text=True, check=True).stdout
    assert fingerprint(KEY) == printed.split()[1]


def test_a_known_key_passes(host_keys: HostKeys, users: Path) -> None:
    users.write_text("# comment\n\nnonsense\n" + line(KEY))
    host_keys.check(PEER, KEY)


def test_an_unknown_key_is_refused_with_its_fingerprint_and_what_to_do(host_keys: HostKeys) -> None:
    with pytest.raises(UnknownHostKeyError) as caught:
        host_keys.check(PEER, KEY)
    assert fingerprint(KEY) in caught.value.message
    assert "orch trust v100" in caught.value.remedy
    assert caught.value.offered.key == KEY and caught.value.node == "v100"


def test_a_changed_key_is_refused_naming_both_and_the_known_ones_line(host_keys: HostKeys, users: Path) -> None:
    users.write_text("# one\n" + line(KEY))
    with pytest.raises(HostKeyError) as caught:
        host_keys.check(PEER, OTHER, accept_new=True)
    assert fingerprint(KEY) in caught.value.message and fingerprint(OTHER) in caught.value.message
    assert f"{users}:2" in caught.value.message
    assert not isinstance(caught.value, UnknownHostKeyError)
    assert not host_keys.recorded.exists()


def test_a_key_of_another_type_than_the_known_one_is_a_change_not_news(host_keys: HostKeys, users: Path) -> None:
    users.write_text(line(KEY))
    with pytest.raises(HostKeyError, match="not the one we know"):
        host_keys.check(PEER, RSA, accept_new=True)


def test_accepting_a_new_key_records_it_once_and_leaves_the_users_file_alone(host_keys: HostKeys, users: Path) -> None:
    users.write_text(before := line(OTHER, "elsewhere"))
    host_keys.check(PEER, KEY, accept_new=True)
    host_keys.check(PEER, KEY, accept_new=True)
    host_keys.check(PEER, KEY)
    assert host_keys.recorded.read_text() == f"192.168.1.42 {KEY.get_name()} {KEY.get_base64()}\n"
    assert host_keys.recorded.stat().st_mode & 0o777 == 0o600
    assert users.read_text() == before


def test_what_we_record_openssh_can_read(host_keys: HostKeys) -> None:
    host_keys.record("Gate.Example", 2222, KEY)
    found = subprocess.run(
        ["ssh-keygen", "-F", "[gate.example]:2222", "-f", host_keys.recorded],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert KEY.get_base64() in found


def test_recording_another_key_for_a_known_host_is_refused(host_keys: HostKeys) -> None:
    host_keys.record("192.168.1.42", 22, KEY)
    host_keys.record("192.168.1.42", 22, KEY)
    with pytest.raises(HostKeyError, match="not the one we know"):
        host_keys.record("192.168.1.42", 22, OTHER)
    host_keys.check(PEER, KEY)


def test_of_many_who_record_at_once_each_hosts_key_is_kept_and_only_one_key_a_host(host_keys: HostKeys) -> None:
    refused = []

    def record(number: int) -> None:
        try:
            host_keys.record(f"10.0.0.{number % 8}", 22, KEY if number < 8 else OTHER)
        except HostKeyError:
            refused.append(number)

    threads = [threading.Thread(target=record, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refused) == 8
    assert sorted(entry.split()[0] for entry in host_keys.recorded.read_text().splitlines()) == [
        f"10.0.0.{number}" for number in range(8)
    ]


def test_the_pinned_key_wins_over_every_file(host_keys: HostKeys, users: Path) -> None:
    users.write_text(line(OTHER))
    for pin in (fingerprint(KEY), f"{KEY.get_name()} {KEY.get_base64()} comment"):
        host_keys.check(Peer("v100", PEER.name, pin=pin), KEY)
        with pytest.raises(HostKeyError, match="not the pinned key") as caught:
            host_keys.check(Peer("v100", PEER.name, pin=pin), OTHER, accept_new=True)
        assert fingerprint(KEY) in caught.value.message and fingerprint(OTHER) in caught.value.message


def test_a_malformed_pin_matches_nothing(host_keys: HostKeys) -> None:
    for pin in ("", "SHA256:", "ssh-ed25519", "ssh-ed25519 !!", KEY.get_base64()):
        with pytest.raises(HostKeyError, match="not the pinned key"):
            host_keys.check(Peer("v100", PEER.name, pin=pin), KEY, accept_new=True)


def test_a_revoked_key_is_refused_even_where_it_is_known_or_pinned(host_keys: HostKeys, users: Path) -> None:
    users.write_text(line(KEY) + "@revoked " + line(KEY, "*"))
    for peer in (PEER, Peer("v100", PEER.name, pin=fingerprint(KEY))):
        with pytest.raises(HostKeyError, match=rf"revoked \({users}:2\)"):
            host_keys.check(peer, KEY, accept_new=True)


def test_a_certificate_authority_is_no_host_key(host_keys: HostKeys, users: Path) -> None:
    users.write_text("@cert-authority " + line(KEY, "*"))
    with pytest.raises(UnknownHostKeyError):
        host_keys.check(PEER, KEY)


def hashed(name: str, salt: bytes = b"0123456789abcdefghij") -> str:
    digest = hmac.new(salt, name.encode(), hashlib.sha1).digest()
    return f"|1|{base64.b64encode(salt).decode()}|{base64.b64encode(digest).decode()}"


@pytest.mark.parametrize(
    ("hosts", "name", "matches"),
    [
        ("192.168.1.42", "192.168.1.42", True),
        ("a2000,192.168.1.42", "192.168.1.42", True),
        ("192.168.1.4", "192.168.1.42", False),
        ("192.168.1.*", "192.168.1.42", True),
        ("192.168.1.4?", "192.168.1.42", True),
        ("192.168.1.*,!192.168.1.42", "192.168.1.42", False),
        ("!192.168.1.42", "192.168.1.42", False),
        ("192.168.1.42", "[192.168.1.42]:2222", False),
        ("[192.168.1.42]:2222", "[192.168.1.42]:2222", True),
        ("[192.168.1.42]:*", "[192.168.1.42]:2222", True),
        ("[192.168.1.42]:2222", "2", False),
        ("Gate.Example", "gate.example", True),
        ("192.168.1x42", "192.168.1.42", False),
        (hashed("192.168.1.42"), "192.168.1.42", True),
        (hashed("[192.168.1.42]:2222"), "[192.168.1.42]:2222", True),
        (hashed("192.168.1.43"), "192.168.1.42", False),
        ("|1|broken", "192.168.1.42", False),
        ("|1|!!|!!", "192.168.1.42", False),
    ],
)
def test_host_patterns_are_read_as_sshd_8_says(
    host_keys: HostKeys, users: Path, hosts: str, name: str, matches: bool
) -> None:
    users.write_text(line(KEY, hosts))
    peer = Peer("v100", name)
    if matches:
        host_keys.check(peer, KEY)
    else:
        with pytest.raises(UnknownHostKeyError):
            host_keys.check(peer, KEY)


def test_a_file_hashed_by_openssh_is_understood(host_keys: HostKeys, users: Path) -> None:
    users.write_text(line(KEY) + line(OTHER, "[10.0.0.1]:2222"))
    subprocess.run(["ssh-keygen", "-q", "-H", "-f", users], check=True, capture_output=True)
    assert PEER.name not in users.read_text()
    host_keys.check(PEER, KEY)
    host_keys.check(Peer("v100", known_name("10.0.0.1", 2222)), OTHER)


def test_the_type_of_key_that_we_know_is_asked_for_first(host_keys: HostKeys, users: Path) -> None:
    users.write_text("@revoked " + line(OTHER) + line(RSA) + line(KEY))
    assert host_keys.algorithms(PEER) == ["rsa-sha2-512", "rsa-sha2-256", "ecdsa-sha2-nistp256"]
    assert host_keys.algorithms(Peer("v100", PEER.name, pin="ssh-ed25519 AAAA")) == ["ssh-ed25519"]


def test_the_usual_files_are_those_of_openssh_and_our_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh/known_hosts").write_text(line(KEY))
    keys = HostKeys.default(Home(tmp_path / "orch"))
    keys.check(PEER, KEY)
    keys.record("10.0.0.9", 22, KEY)
    assert (tmp_path / "orch/known_hosts").exists()
    assert (tmp_path / "orch").stat().st_mode & 0o777 == 0o700


@given(st.text())
def test_no_line_of_a_known_hosts_file_can_break_us(text: str) -> None:

    with NamedTemporaryFile("w", encoding="utf-8", errors="replace") as file:
        file.write(text + "\n" + line(KEY))
        file.flush()
        HostKeys(Path(file.name)).check(PEER, KEY)
