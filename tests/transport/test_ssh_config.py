"""What an SSH configuration says of a host, beside what OpenSSH's client makes of the same file."""

from __future__ import annotations

import getpass
import os
import random
import re
import socket
import subprocess
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from orchestrator.errors import ConnectError, HostError, UsageError
from orchestrator.hosts import Connections, Node
from orchestrator.paths import Home
from orchestrator.transport import Hop, HostKeys, Target, connect, find_route, ssh_config
from tests.support.free_port import free_port
from tests.support.sshd import needs_sshd

pytestmark = needs_sshd
CASES = 200 if os.environ.get("THOROUGH") or os.environ.get("ORCH_LONG") else 15
ME = getpass.getuser()


def configured(folder: Path, text: str) -> Path:
    (folder / "config").write_text(text)
    return folder / "config"


@pytest.fixture
def without_ssh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], None]:
    """Takes the client away."""
    return lambda: monkeypatch.setattr(ssh_config.shutil, "which", lambda name: None)


# ---- generated configurations ---------------------------------------------------------------------------------------

NAMES = ["v100", "gpu01", "gpu02", "gate", "gate2", "10.9.8.7", "far.lab"]


class Written:
    """A configuration drawn from a seed, with the files that it includes."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._draw, self._folder, self._files = random.Random(seed), folder, 0
        folder.mkdir()
        blocks = [self._block(depth=0) for _ in range(self._draw.randint(2, 7))]
        if self._draw.random() < 0.8:
            blocks.append("Host *\n  User anybody\n")
        self.path = configured(folder, "".join(self._settings(self._draw.choice([0, 0, 1]))) + "".join(blocks))

    def target(self) -> Target:
        draw = self._draw
        user, key = draw.choice([None, None, "owner"]), draw.choice([None, None, "/keys/own"])
        jump = draw.choice([None, None, None, "none", "gate", "me@gate2:77,gate"])
        return Target("n", draw.choice(NAMES), draw.choice([None, None, 99]), user, key, None, jump)

    def _block(self, depth: int) -> str:
        return f"{self._opening()}\n{''.join(self._settings(self._draw.randint(1, 4), depth))}"

    def _patterns(self) -> list[str]:
        draw = self._draw
        pool = [*NAMES, "gpu*", "*", "gpu0?", "*.lab", "10.*", "!gate", "!gpu02", "!*.lab"]
        return draw.sample(pool, draw.randint(1, 3))

    def _opening(self) -> str:
        draw = self._draw
        kind = draw.choice(["host"] * 6 + ["all", "final", "match", "match", "match", "exec"])
        if kind == "host":
            return draw.choice(["Host {}", "host={}", 'HOST "{}"' if draw.random() < 0.2 else "Host  {}"]).format(
                " ".join(self._patterns())
            )
        if kind == "all":
            return "Match all"
        if kind == "final":
            return draw.choice(["Match final all", "Match final host {}"]).format(",".join(self._patterns()))
        if kind == "exec":
            return draw.choice(['Match exec "true"', 'Match exec "test %n = gpu01"', 'Match !exec "false"'])
        criteria = []
        for name in draw.sample(["host", "originalhost", "user", "localuser"], draw.randint(1, 2)):
            values = self._patterns() if "host" in name else draw.sample(["owner", "me", "any*", ME, "!me", "*"], 2)
            sign = draw.choice(["", "", "", "!"])
            criteria.append(draw.choice(["{}{} {}", "{}{}={}", '{}{}="{}"']).format(sign, name, ",".join(values)))
        return "Match " + " ".join(criteria)

    def _settings(self, count: int, depth: int = 0) -> list[str]:
        return [f"  {self._setting(depth)}\n" for _ in range(count)]

    def _setting(self, depth: int) -> str:
        draw = self._draw
        kind = draw.choice(
            ["HostName", "Port", "User", "IdentityFile", "IdentityFile", "ProxyJump", "other", "Include"]
        )
        if kind == "Include" and depth < 3:
            self._files += 1
            inner = self._folder / f"more{self._files}"
            inner.write_text("".join(self._settings(1, depth + 1)) + self._block(depth + 1))
            return draw.choice(["Include {}", 'Include "{}"', f"Include {self._folder}/none-* {{}}"]).format(inner)
        return draw.choice(
            {
                "HostName": ["HostName %h.lab", "HostName 10.0.0.1", "HostName=gate.lab", "HostName Far.LAB"],
                "Port": ["Port 2222", "Port=33", "port  44"],
                "User": ["User me", 'User "you"', "User anybody # nobody"],
                "IdentityFile": [
                    "IdentityFile /keys/%h-%p",
                    'IdentityFile "/keys/of %r"',
                    "IdentityFile /keys/%n.%u%%",
                    "IdentityFile none",
                    "IdentityFile ~/.ssh/rack",
                    "IdentityFile ${ORCH_TEST_KEYS}/id",
                ],
                "ProxyJump": [
                    "ProxyJump gate",
                    "ProxyJump me@gate:77",
                    "ProxyJump gate,you@gate2",
                    "ProxyJump none",
                    "ProxyJump gate2,gate",
                    "ProxyJump ssh://u@[10.9.8.7]:5",
                    "ProxyCommand none",
                    "ProxyCommand nc %h %p",
                ],
            }.get(kind, ["ForwardAgent no", "ServerAliveInterval 5", "IdentitiesOnly yes", "CanonicalizeHostname no"])
        )


@dataclass(frozen=True)
class Way:
    host: str
    port: int
    user: str
    keys: tuple[str, ...]
    identities_only: bool


class RefusedBySsh(Exception):
    pass


def of_ssh(config: Path, target: Target, *, depth: int = 0) -> list[Way]:
    """The hops by `ssh -G` alone, with the keys as `ssh -v` names them when it looks for them."""
    chosen = ["-o", f"ProxyJump={target.proxy_jump}"] if target.proxy_jump else []
    words = ["-F", str(config), *(["-l", target.user] if target.user else [])]
    words += ["-p", str(target.port)] if target.port else []
    done = subprocess.run(["ssh", *words, *chosen, "-TG", target.host], capture_output=True, text=True, check=False)
    if done.returncode or depth > 8:
        raise RefusedBySsh(done.stderr or "circle")
    said: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        keyword, _, value = line.partition(" ")
        said.setdefault(keyword, []).append(value)
    if not target.proxy_jump and said.get("proxycommand", ["none"])[0] != "none":
        raise RefusedBySsh("ProxyCommand")
    chain = said.get("proxyjump", ["none"])[0]
    hops: list[Way] = []
    for position, spec in enumerate(chain.split(",") if chain != "none" else []):
        match = re.fullmatch(r"(?:(.+)@)?\[?([^:\]]+)\]?(?::(\d+))?", spec)
        assert match, spec
        further = None if position == 0 else "none"
        jump = Target("n", match[2], int(match[3]) if match[3] else None, match[1], None, None, further)
        hops += of_ssh(config, jump, depth=depth + 1)
    keys = said["identityfile"]
    if any("id_rsa" in key for key in keys):
        keys = []
    elif keys != ["none"]:
        argv = ["ssh", *words, "-v", "-oProxyJump=none", "-oProxyCommand=exit 1", target.host]
        debug = subprocess.run(argv, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False).stderr
        found = re.findall(r"identity file (.+) type -?\d+", debug)
        keys = [key for key in found if not key.endswith("-cert")]
    else:
        keys = []
    only = said["identitiesonly"] == ["yes"]
    return [*hops, Way(said["hostname"][0], int(said["port"][0]), said["user"][0], tuple(keys), only)]


def of_us(route: Sequence[Hop]) -> list[Way]:
    defaults = {str(Path.home() / ".ssh" / name) for name in ("id_ed25519", "id_ecdsa", "id_rsa")}
    return [
        Way(
            hop.host,
            hop.port,
            hop.user,
            tuple(str(key) for key in hop.key_files if str(key) not in defaults),
            not hop.agent,
        )
        for hop in route
    ]


def with_own_key(ways: list[Way], target: Target) -> list[Way]:
    """The inventory's key is the only one of the host, and that of jump hosts for which nothing else is named."""
    if not target.key_file:
        return ways
    return [
        Way(
            way.host,
            way.port,
            way.user,
            way.keys if way.keys and way is not ways[-1] else (target.key_file,),
            way.identities_only,
        )
        for way in ways
    ]


def judged(written: Written, target: Target) -> str:
    """What came of one; fails for a difference that nothing names."""
    notes: list[str] = []
    try:
        expected = with_own_key(of_ssh(written.path, target), target)
    except RefusedBySsh as refused:
        why = str(refused).split()[0]
        try:
            find_route(target, written.path, notes.append)
        except HostError as ours:
            assert why != "ProxyCommand" or why in str(ours) or "circle" in str(ours)
            return f"refused: {why}"
        assert notes, f"{written.path}\n{target}\nssh: {refused}"
        return "named"
    try:
        route = find_route(target, written.path, notes.append)
    except HostError as error:
        if notes:
            return "named"
        assert ME == "root" and "you are root here" in str(error) and any(way.user == "root" for way in expected), error
        return "no login as root unasked"
    if of_us(route) == expected:
        return "equal"
    assert notes, f"{written.path}\n{target}\nssh: {expected}\norch: {of_us(route)}"
    return "named"


def test_generated_configurations_lead_where_ssh_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without_ssh: Callable[[], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """By `ssh -G`, and by the reader that stands in for it."""
    monkeypatch.setenv("ORCH_TEST_KEYS", "/keys/of-env")
    came: dict[str, Counter[str]] = {"with ssh": Counter(), "without": Counter()}
    drawn = [(written := Written(tmp_path / f"c{seed}", seed), written.target()) for seed in range(CASES)]
    for written, target in drawn:
        came["with ssh"][judged(written, target)] += 1
    without_ssh()
    for written, target in drawn:
        came["without"][judged(written, target)] += 1
    if CASES > 15:
        with capsys.disabled():
            print({how: dict(counts) for how, counts in came.items()})
    assert "named" not in came["with ssh"] and came["with ssh"]["equal"] > CASES / 2
    assert came["without"]["equal"] > CASES / 3


# ---- blocks that cannot be judged -----------------------------------------------------------------------------------


@pytest.mark.parametrize("there", ["ssh", "no ssh"])
@pytest.mark.parametrize(
    "criteria",
    [
        "localnetwork 203.0.113.0/24",
        "tagged x",
        "sessiontype x",
        "command x",
        "version x",
        "moon full",
        "!moon full",
        "host * moon=full",
    ],
)
def test_a_block_that_cannot_be_judged_does_not_apply(
    criteria: str, there: str, tmp_path: Path, without_ssh: Callable[[], None]
) -> None:
    """Neither here nor by a client that is too old for the criterion; a newer one judges it itself."""
    if there == "no ssh":
        without_ssh()
    text = f"Match {criteria}\n  ProxyJump me@nowhere.invalid\n  User wrong\nHost v100\n  User right\n  Port 2222\n"
    notes: list[str] = []
    (hop,) = find_route(Target("v100", "v100"), configured(tmp_path, text), notes.append)
    assert (hop.host, hop.port, hop.user) == ("v100", 2222, "right")
    kind = re.findall(r"!?([a-z]+)[ =]", criteria)[-1]
    assert notes == [
        f"{tmp_path}/config:1: the block of `Match {kind}` is left out: only a newer OpenSSH client can evaluate it"
    ]


def test_what_is_left_out_is_said_once_for_all_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "Match moon full\n  User x\nHost *\n  User me\n  HostName 127.0.0.1\n"
    monkeypatch.setenv("ORCH_SSH_CONFIG", str(configured(tmp_path, text)))
    said: list[str] = []
    nodes = [Node(name=f"n{number}", host=f"n{number}", port=free_port()) for number in range(5)]
    with Connections(Home(tmp_path / "home"), say=said.append) as connections:
        assert all(isinstance(one, ConnectError) for one in connections.open(nodes).values())
        connections.open(nodes)
    assert len(said) == 1 and "`Match moon`" in said[0]


@pytest.mark.parametrize("lines", ["Match final all\n  GSSAPIAuthentication yes", 'Match host="nobody*"\n  User x'])
def test_blocks_that_distributions_ship_are_read_in_silence(
    lines: str, tmp_path: Path, without_ssh: Callable[[], None]
) -> None:
    config, notes = configured(tmp_path, f"{lines}\nHost *\n  User me\n"), list[str]()
    for _ in ("with ssh", "without"):
        assert find_route(Target("v100", "v100"), config, notes.append)[0].user == "me"
        without_ssh()
    assert notes == []


# ---- where a value came from ----------------------------------------------------------------------------------------


def failing(config: Path, target: Target, tmp_path: Path) -> str:
    with pytest.raises(HostError) as caught:
        connect(target, host_keys=HostKeys(tmp_path / "recorded"), ssh_config=config, timeout_s=3)
    return str(caught.value)


def test_an_error_names_file_and_line_of_a_value_that_the_configuration_gave(tmp_path: Path) -> None:
    more = tmp_path / "more"
    more.write_text("\nHost a\n  ProxyJump me@nowhere.invalid\n")
    config = configured(tmp_path, f"Include {more}\nHost b\n  HostName nowhere.invalid\nHost c\n  Port {free_port()}\n")
    said = failing(config, Target("a", "a", user="me"), tmp_path)
    assert re.search(rf"no address for 'nowhere.invalid' \(.*\) \(ProxyJump in {more}:3\): check that setting$", said)
    said = failing(config, Target("b", "b", user="me"), tmp_path)
    assert re.search(rf"no address for 'nowhere.invalid' \(.*\) \(HostName in {config}:3\)", said)
    config.write_text(config.read_text().replace("Host c", "Host 127.0.0.1"))
    said = failing(config, Target("c", "127.0.0.1", user="me"), tmp_path)
    assert re.search(rf"nothing listens at 127.0.0.1:\d+ \(Port in {config}:5\): .*mend that setting", said)
    said = failing(config, Target("d", "127.0.0.1", 22, "me", proxy_jump="me@nowhere.invalid"), tmp_path)
    assert said.endswith("check `proxy_jump:` in the inventory")


# ---- what is refused by name ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "ProxyCommand nc %h %p",
            r"v100 is reached by a ProxyCommand \(.*/config:2\), which orch does not support: .*",
        ),
        ("ProxyJump v100", r"jumphost loop via v100|is its own jump host"),
        ("IdentityFile /keys/%C", r"IdentityFile /keys/%C \(.*/config:2\): orch does not support %C"),
        ("IdentityFile ${NO_SUCH_NAME}/x", r"IdentityFile .*/config:2\): \$\{NO_SUCH_NAME\} is not set"),
        ("ProxyJump a:b:c", r"a:b:c"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(line: str, said: str, tmp_path: Path) -> None:
    config = configured(tmp_path, f"Host v100\n  {line}\n  User me\n")
    with pytest.raises((HostError, UsageError), match=said):
        find_route(Target("v100", "v100"), config)


def test_a_name_is_never_an_option_of_ssh(tmp_path: Path) -> None:
    for name in ("-oProxyCommand=touch${IFS}x", "-F/etc/passwd", "--"):
        with pytest.raises(HostError, match="does not begin with a dash"):
            find_route(Target("v100", name, user="me"), configured(tmp_path, "Host *\n"))
        with pytest.raises(HostError, match="does not begin with a dash"):
            find_route(Target("v100", "h", user="me", proxy_jump=name), configured(tmp_path, "Host *\n"))


def test_a_program_of_the_configuration_that_hangs_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssh_config, "ASK_S", 0.5)
    config = configured(tmp_path, 'Match exec "sleep 3"\n  User x\n')
    with pytest.raises(HostError, match=r"`ssh -G` took over 0.5 s: look at `Match exec`"):
        find_route(Target("v100", "v100", user="me"), config)


def test_ways_in_that_only_ssh_knows_are_named_by_a_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh/id_ed25519_sk").touch()
    config = configured(tmp_path, "Host *\n  PKCS11Provider /usr/lib/opensc.so\n  User me\n")
    (hop,) = find_route(Target("v100", "v100"), config)
    assert hop.not_tried == f"keys of PKCS11Provider /usr/lib/opensc.so ({config}:2), the security key id_ed25519_sk"
    config.write_text("Host *\n  PKCS11Provider none\n  User me\n")
    (tmp_path / ".ssh/id_ed25519_sk").unlink()
    assert find_route(Target("v100", "v100"), config)[0].not_tried == ""


def test_relative_includes_count_from_the_persons_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of another file: `ssh -F` has it so. Without a configuration of its own ssh does not look at $HOME."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("ORCH_SSH_CONFIG", raising=False)
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh/config").write_text("Include more\nUser me\n")
    (tmp_path / ".ssh/more").write_text("Port 2222\n")
    assert find_route(Target("v100", "v100"))[0].port == 2222


def test_a_jump_host_that_is_silent_is_named_with_its_line_and_hosts_stay_alike(tmp_path: Path) -> None:
    """What differs from host to host would make one error many."""
    with socket.create_server(("127.0.0.1", 0)) as mute:
        port = mute.getsockname()[1]
        config = configured(tmp_path, f"Host a\n  ProxyJump me@127.0.0.1:{port}\nHost b\n  HostName 127.0.0.1\n")
        target, keys = Target("a", "a", user="me"), HostKeys(tmp_path / "recorded")
        with pytest.raises(
            ConnectError, match=rf"jump host 127.0.0.1:{port}: no SSH login .* \(ProxyJump in {config}:2\)"
        ):
            connect(target, host_keys=keys, ssh_config=config, timeout_s=1)
        with pytest.raises(ConnectError, match=rf"b: 127.0.0.1:{port}: no SSH login within 1 s: check"):
            connect(Target("b", "b", port, "me"), host_keys=keys, ssh_config=config, timeout_s=1)
