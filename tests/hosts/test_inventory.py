import ipaddress
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from orchestrator.errors import InventoryError, UsageError
from orchestrator.hosts import Entry, Inventory, Node, Paced, Slowdown, grammar, load_inventory, node_from_keys
from tests.support.cost import growth
from tests.support.plans import KEY

ROOT = Path(__file__).parents[2]
INVENTORIES = sorted((ROOT / "inventory").glob("*.yaml"))
TWINS = [path for path in INVENTORIES if path.stem.startswith("lab_") and path.stem != "lab_pair"]
SLOWER = Slowdown(at_step=10, factor=2)
KEYS = """name host port user key_file python activate workdir gpu gpus ranks device bandwidth address interface id
    image note master env prepare host_key proxy_jump connect_timeout transport paced slurm most allocation"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "x.yaml"


def load(file: Path, content: str | bytes) -> Inventory:
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return load_inventory(file)


def load_nodes(file: Path, *nodes: str, defaults: str = "{}") -> tuple[Node, ...]:
    """The nodes of an inventory whose first node stands on line 4."""
    lines = ["cluster: lab", f"defaults: {defaults}", "nodes:", *(f"  - {node}" for node in nodes)]
    return load(file, "\n".join(lines)).nodes


def mistakes(file: Path, *nodes: str, defaults: str = "{}") -> list[str]:
    with pytest.raises(InventoryError) as caught:
        load_nodes(file, *nodes, defaults=defaults)
    return [f"{mistake.line}: {mistake.message}" for mistake in caught.value.mistakes]


# ---------------------------------------------------------------------------------------------------- what is read


def test_the_example_of_the_manual_reads_as_it_says(file: Path) -> None:
    inventory = load(
        file,
        """\
cluster: a2000-v100
defaults: {user: ubuntu, port: 22, key_file: ~/.ssh/id_ed25519, python: /opt/conda/bin/python, workdir: ~/.orch}
nodes:
  - {name: a2000, host: 192.168.1.41, id: q3XKQO, gpu: RTX A2000, gpus: 1, bandwidth: 2.5Gbps, image: pytorch-2.0.1}
  - {name: v100, host: 192.168.1.42, id: Z7vRxK, gpu: Tesla V100-16GB, gpus: 1, bandwidth: 2.5Gbps}
""",
    )
    assert (inventory.cluster, inventory.file, inventory.warnings) == ("a2000-v100", str(file), ())
    assert [node.name for node in inventory.nodes] == ["a2000", "v100"]
    node = inventory.node("a2000")
    assert node == Node(
        name="a2000",
        host="192.168.1.41",
        port=22,
        user="ubuntu",
        key_file="~/.ssh/id_ed25519",
        python="/opt/conda/bin/python",
        workdir="~/.orch",
        gpu="RTX A2000",
        gpus=1,
        bandwidth_bps=2.5e9,
        id="q3XKQO",
        image="pytorch-2.0.1",
        line=4,
    )


def test_every_key_reaches_the_node_in_its_final_form(file: Path) -> None:
    (node,) = load_nodes(
        file,
        "{name: n1, host: '[2001:DB8::1]', port: 2222, user: me, key_file: /k, python: ~/venv/bin/python,"
        " activate: . ~/venv/bin/activate, workdir: /data/orch, gpu: A16, gpus: 2, ranks: 3, device: cuda,"
        " bandwidth: 100 Mbit/s, address: 10.0.0.1/24, interface: eno1, id: x1, image: i,"
        " note: 'größer 🙂', master: true,"
        f" env: {{A_1: '1', B: ''}}, prepare: \"module load cuda\\nulimit -l\\n\", host_key: {KEY} root@n1,"
        " proxy_jump: 'me@gate:22,[::1]:2222', connect_timeout: 2m, transport: ssh, allocation: 12+1,"
        " paced: {samples_per_s: 333, fixed_ms: 1.5, memory: 16GiB, jitter: 0.1,"
        " slowdown: [{at_step: 10, factor: 2}]}}",
    )
    assert set(Entry.model_fields) <= set(Node.model_fields) | {"bandwidth", "connect_timeout"}
    assert node.model_dump() == {
        "name": "n1",
        "host": "2001:db8::1",
        "port": 2222,
        "user": "me",
        "key_file": "/k",
        "python": "~/venv/bin/python",
        "activate": ". ~/venv/bin/activate",
        "workdir": "/data/orch",
        "gpu": "A16",
        "gpus": 2,
        "ranks": 3,
        "device": "cuda",
        "bandwidth_bps": 1e8,
        "address": "10.0.0.1",
        "address_prefix": 24,
        "interface": "eno1",
        "id": "x1",
        "image": "i",
        "note": "größer 🙂",
        "master": True,
        "env": {"A_1": "1", "B": ""},
        "prepare": "module load cuda\nulimit -l\n",
        "host_key": KEY,
        "proxy_jump": "me@gate:22,[::1]:2222",
        "transport": "ssh",
        "slurm": None,
        "most": None,
        "kind": None,
        "allocation": "12+1",
        "connect_timeout_s": 120.0,
        "paced": Paced(
            samples_per_s=333,
            fixed_ms=1.5,
            memory_bytes=16 * 2**30,
            jitter=0.1,
            slowdown=(Slowdown(at_step=10, factor=2),),
        ).model_dump(),
    }


def test_a_node_says_little_when_little_is_written(file: Path) -> None:
    (node,) = load_nodes(file, "{name: a, host: gpu_1.lab}")
    unset = {name for name, value in node.model_dump().items() if value is None}
    assert (node.host, node.python, node.workdir, node.device) == ("gpu_1.lab", "python3", "~/.orch", "auto")
    assert {"port", "user", "key_file", "gpus", "ranks", "address", "bandwidth_bps", "host_key", "paced"} <= unset
    assert (node.env, node.master, node.transport, node.line) == ({}, False, "ssh", 4)


def test_a_nodes_own_value_beats_the_default_and_its_environment_is_added(file: Path) -> None:
    first, second = load_nodes(
        file,
        "{name: a, host: a, port: 2222, env: {B: mine}}",
        "{name: b, host: b, user: ~}",
        defaults="{port: 22, user: ubuntu, bandwidth: 1Gbps, env: {A: '1', B: '2'}}",
    )
    assert (first.port, first.user, first.bandwidth_bps, first.env) == (2222, "ubuntu", 1e9, {"A": "1", "B": "mine"})
    assert (second.port, second.user, second.env) == (22, None, {"A": "1", "B": "2"})


def test_a_local_node_needs_no_host(file: Path) -> None:
    first, second = load_nodes(file, "{name: a}", "{name: b, address: 127.0.0.1}", defaults="{transport: local}")
    assert (first.host, second.host, second.address_prefix) == ("localhost", "localhost", None)


def test_text_that_other_yaml_readers_convert_stays_as_written(file: Path) -> None:
    (node,) = load_nodes(file, "{name: a, host: a, id: 010, note: no, image: 22:22, gpu: 1_000}")
    assert (node.id, node.note, node.image, node.gpu) == ("010", "no", "22:22", "1_000")


def test_an_inventory_goes_to_json_and_back(file: Path) -> None:
    inventory = load_inventory(ROOT / "inventory" / "lab_a16_a16_a2000.yaml")
    stored = json.loads(json.dumps(inventory.model_dump(mode="json")))
    assert "line" not in stored["nodes"][0]
    again = Inventory.model_validate(stored | {"key_of_a_newer_version": 1})
    assert again.model_dump() == inventory.model_dump()
    assert again.nodes[0].paced == inventory.nodes[0].paced


def test_a_node_cannot_be_changed(file: Path) -> None:
    (node,) = load_nodes(file, "{name: a, host: a}")
    with pytest.raises(ValidationError, match="frozen"):
        node.port = 1  # type: ignore[misc]


def test_a_name_that_is_not_there_is_answered_with_the_nearest(file: Path) -> None:
    inventory = load(file, "cluster: lab\nnodes: [{name: a2000, host: a}, {name: v100, host: b}]")
    with pytest.raises(UsageError) as caught:
        inventory.node("v1000")
    assert str(caught.value) == "cluster lab has no node 'v1000': did you mean `v100`?"


def test_a_file_that_every_user_can_change_is_a_warning(file: Path) -> None:
    file.write_text("cluster: lab\nnodes: [{name: a, host: a}]")
    file.chmod(0o666)
    (warning,) = load_inventory(file).warnings
    assert str(file) in warning and "chmod o-w" in warning


def test_a_thousand_nodes_cost_no_more_each_than_250(file: Path) -> None:
    lines = [f"{{name: n{i}, host: 10.0.{i // 250}.{i % 250 + 1}, gpus: 8}}" for i in range(1000)]
    assert growth(lambda: load_nodes(file, *lines[:250]), lambda: load_nodes(file, *lines)) < 8
    assert len(load_nodes(file, *lines)) == 1000


def test_a_node_may_come_from_elsewhere_than_a_file() -> None:
    node = node_from_keys({"name": "a", "host": "h", "bandwidth": "1Gbps"}, "orch node add")
    assert (node.name, node.bandwidth_bps) == ("a", 1e9)
    with pytest.raises(InventoryError, match=r"^orch node add: node a: unknown key 'prot'; did you mean `port`\?$"):
        node_from_keys({"name": "a", "host": "h", "prot": 1}, "orch node add")


# ------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        # unknown and missing keys
        ("nam: x", "unknown key 'nam'; did you mean `name`?"),
        ("hots: x", "unknown key 'hots'; did you mean `host`?"),
        ("node_rnak: 1", "unknown key 'node_rnak'; choose from activate, address,"),
        ('"\\e[2J": 1', "unknown key '\\x1b[2J'; choose from"),
        (
            "paced: {samples_per_s: 1, samples_per_sec: 3}",
            "paced: unknown key 'samples_per_sec'; did you mean `samples_per_s`?",
        ),
        (
            "paced: {samples_per_s: 1, slowdown: [{at_step: 1, factor: 2, at: 1}]}",
            "paced.slowdown[0]: unknown key 'at'",
        ),
        ("paced: {}", "paced: `samples_per_s` is missing"),
        # text where a number is meant, and the other way round
        ("port: '22'", "port: must be a whole number, not '22'; write it plainly, without quotes"),
        ("port: '22 '", "port: must be a whole number, not '22 '"),
        (
            "port: 022",
            "port: must be a whole number, not '022'; write it plainly, without quotes, unit or leading",
        ),
        ("port: 22.0", "port: must be a whole number, not 22.0"),
        ("port: 22:22", "port: must be a whole number, not '22:22'"),
        ("port: true", "port: must be a whole number, not true"),
        ("gpus: two", "gpus: must be a whole number, not 'two'"),
        ("id: 123456", "id: must be text, not 123456; put it in quotes"),
        ("id: 1e3", "id: must be text, not 1000.0; put it in quotes"),
        ("image: 2.0", "image: must be text, not 2.0; put it in quotes"),
        ("note: true", "note: must be text, not true; put it in quotes"),
        ("note: [a]", "note: must be text, not a list"),
        ("hostname: g", "unknown key 'hostname'; did you mean `host`?"),
        ("key: ~/.ssh/k", "unknown key 'key'; did you mean `key_file`?"),
        ("Num-GPUs: 2", "unknown key 'Num-GPUs'; did you mean `gpus`?"),
        ("env: {A: [1]}", "env.A: must be text, not a list"),
        ("env: {A: }", "env.A: is empty"),
        ("env: [A]", "env: must be a mapping like {key: value}, not a list"),
        ("master: yes", "master: must be true or false, not 'yes'"),
        ("python: ", "python: is empty; give a value or remove the key"),
        ("paced: fast", "paced: must be a mapping like {key: value}, not 'fast'"),
        # ranges
        ("port: 0", "port: must be at least 1, not 0"),
        ("port: -1", "port: must be at least 1, not -1"),
        ("port: 65536", "port: must be at most 65535, not 65536"),
        ("gpus: -1", "gpus: must be at least 0, not -1"),
        ("gpus: 10000", "gpus: must be at most 64, not 10000"),
        ("ranks: 0", "ranks: must be at least 1, not 0"),
        ("ranks: 257", "ranks: must be at most 256, not 257"),
        ("paced: {samples_per_s: 0}", "paced.samples_per_s: must be more than 0, not 0"),
        ("paced: {samples_per_s: 1e999}", "paced.samples_per_s: must be a finite number, not inf"),
        ("paced: {samples_per_s: 1, jitter: 1.1}", "paced.jitter: must be at most 1, not 1.1"),
        ("paced: {samples_per_s: 1, fixed_ms: -1}", "paced.fixed_ms: must be at least 0, not -1"),
        (
            "paced: {samples_per_s: 1, slowdown: [{at_step: 1, factor: 0}]}",
            "paced.slowdown[0].factor: must be more than 0, not 0",
        ),
        ("device: gpu", "device: must be 'auto', 'cuda' or 'cpu', not 'gpu'"),
        ("transport: telnet", "transport: must be 'ssh', 'local' or 'slurm', not 'telnet'"),
        # quantities
        ("bandwidth: 2.5", "bandwidth: must be written with its unit, like 2.5Gbps, not 2.5"),
        ("bandwidth: 2.5Gbs", "bandwidth: '2.5Gbs' is not a bandwidth; write it like 2.5Gbps or 100Mbps"),
        ("paced: {samples_per_s: 1, memory: 16}", "paced.memory: must be written with its unit, like 16GiB, not 16"),
        ("paced: {samples_per_s: 1, memory: 16G}", "paced.memory: '16G' is not a size; write it like 16GiB or 100MB"),
        ("paced: {samples_per_s: 1, memory: 0B}", "paced.memory: '0B' is not a memory size"),
        # grammars
        ("user: -oProxyCommand=x", "user: '-oProxyCommand=x' must be a login name like ubuntu"),
        ("user: a b", "user: 'a b' must be a login name"),
        ("user: ''", "user: '' must be a login name"),
        ("key_file: id_ed25519", "key_file: must be an absolute path or begin with ~/, not 'id_ed25519'"),
        ("python: -c", "python: must be an absolute path or begin with ~/, not '-c'"),
        ("python: venv/bin/python", "python: must be an absolute path or begin with ~/"),
        ("python: ~bob/python", "python: must be an absolute path or begin with ~/"),
        ("workdir: orch", "workdir: must be an absolute path or begin with ~/"),
        ("workdir: /", "workdir: must name a folder of its own below / or ~"),
        ("workdir: ~/.", "workdir: must name a folder of its own below / or ~"),
        ("workdir: ~/a/../..", "workdir: must name a folder of its own below / or ~, without `..`"),
        ('activate: "a\\nb"', "activate: must be one line without control characters, and holds U+000A"),
        ('note: "\\e[2J"', "note: must be one line without control characters, and holds U+001B"),
        ('note: "\\u202e"', "note: must be one line without control characters, and holds U+202E"),
        ("note: ''", "note: must not be empty; remove the key to leave it out"),
        (f"note: {'x' * 5000}", "note: must be at most 4096 characters"),
        ('prepare: "a\\rb"', "prepare: must be one line without control characters, and holds U+000D"),
        ("env: {1A: x}", "env: '1A' must be only a variable's name"),
        ("env: {'[key]': x}", "env: '[key]' must be only a variable's name"),
        ("'[key]': x", "unknown key '[key]'"),
        ("env: {A=B: x}", "env: 'A' must be only a variable's name"),
        (f"env: {{A: '{'x' * 200_000}'}}", "env.A: is longer than the 127 KiB that Linux passes on"),
        ("interface: ../eth0", "interface: '../eth0' must be an interface name like eno1"),
        ("interface: a234567890123456", "interface: 'a234567890123456' must be an interface name"),
        ("address: gpu1", "address: 'gpu1' is not a numeric address; write it like 192.168.1.41"),
        ("address: 10.0.0.1/33", "address: '10.0.0.1/33': the prefix length behind `/` must be from 0 to 32"),
        ("address: 10.0.0.1/", "address: '10.0.0.1/': the prefix length"),
        ("address: 10.0.0.01", "address: '10.0.0.01' is not a numeric address"),
        ("address: 0.0.0.0", "address: '0.0.0.0' is not the address of a single host"),
        ("address: ff02::1", "address: 'ff02::1' is not the address of a single host"),
        ("address: fe80::1%eth0", "address: 'fe80::1%eth0': zone ids (%eth0) are not supported"),
        ("host_key: ssh-rsa AAAA", "host_key: 'ssh-rsa AAAA' is not a host key; write it like `ssh-ed25519 AAAA...`"),
        (f"host_key: n1 {KEY}", "host_key: 'n1 ssh-ed25519"),
        (f"host_key: {KEY.replace('ssh-ed25519', 'ssh-rsa')}", "host_key: 'ssh-rsa"),
        ("host_key: SHA256:abc", "host_key: 'SHA256:abc' is not a host key"),
        ("host_key: MD5:00:11", "host_key: 'MD5:00:11' is not a host key"),
        ("proxy_jump: gate:0", "proxy_jump: 'gate:0': the port must be from 1 to 65535"),
        ("proxy_jump: -oProxyCommand=x", "proxy_jump: '-oProxyCommand=x' is not a host name"),
        ("proxy_jump: 'a,'", "proxy_jump: '' is not a host name"),
        ("proxy_jump: ssh://gate", "proxy_jump: 'ssh://gate' is not a jump host; write [user@]host[:port]"),
        ("proxy_jump: a b", "proxy_jump: 'a b' is not a host name"),
        # YAML's own
        ("port: !!int 22", "tags are not supported ('!!int')"),
        ("port: *p", "aliases are not supported (*p)"),
    ],
)
def test_a_mistake_in_a_node_gives_one_clear_line(file: Path, keys: str, expected: str) -> None:
    (found,) = mistakes(file, f"{{name: n1, host: h1, {keys}}}")
    assert re.sub(r"^4: (node n1: )?", "", found).startswith(expected)
    assert found.startswith("4: ") and found.isprintable() and len(found) < 400


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("-oProxyCommand=sh", "'-oProxyCommand=sh' is not a host name or an IP address; write it like gpu1.lab"),
        ("a b", "'a b' is not a host name"),
        ("a;b", "'a;b' is not a host name"),
        ("$(id)", "'$(id)' is not a host name"),
        ("a\nb", "'a\\nb' is not a host name"),
        ("a\n", "'a\\n' is not a host name"),
        ("a/b", "'a/b' is not a host name"),
        ("..", "must be written without the final dot"),
        ("a..b", "'a..b' is not a host name"),
        ("", "'' is not a host name"),
        ("a-", "'a-' is not a host name"),
        ("x" * 64, "'xxx"),
        (".".join(["x" * 50] * 6), "'xxx"),
        ("host.", "must be written without the final dot, not 'host.'"),
        ("me@host", "must be only a host name or an IP address, not 'me@host'; the user goes in `user:`"),
        ("host:22", "must be only a host name or an IP address, not 'host:22'; the port goes in `port:`"),
        ("[::1]:22", "must be only a host name or an IP address, not '[::1]:22'; the port goes in `port:`"),
        ("fe80::1%eth0", "'fe80::1%eth0': zone ids (%eth0) are not supported"),
        ("[fe80::1%eth0]", "'fe80::1%eth0': zone ids (%eth0) are not supported"),
        ("192.168.1.1%eth0", "must be only a host name or an IP address, not '192.168.1.1%eth0'; zone ids"),
        ("[192.168.1.1]", "'192.168.1.1' is not an IPv6 address"),
        ("1:2:3", "'1:2:3' is not an IPv6 address; write it like 2001:db8::41"),
        ("192.168.1.256", "'192.168.1.256' is not an IPv4 address; write four numbers like 192.168.1.41"),
        ("192.168.01.1", "'192.168.01.1' is not an IPv4 address"),
        ("127.1", "'127.1' is not an IPv4 address"),
        ("0x7f000001", "'0x7f000001' is not an IPv4 address"),
        ("rechner-größe", "'rechner-größe' must be written in its ASCII form (xn--...)"),
    ],
)
def test_what_is_no_host_is_refused_with_the_form_expected(file: Path, host: str, expected: str) -> None:
    (found,) = mistakes(file, f"{{name: n1, host: {json.dumps(host)}}}")
    assert found.startswith(f"4: node n1: host: {expected}")
    assert found.isprintable()


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("gpu1", "gpu1"),
        ("GPU-1.lab.example", "GPU-1.lab.example"),
        ("my_alias", "my_alias"),
        ("3090", None),
        ("3com.example", "3com.example"),
        ("192.168.1.41", "192.168.1.41"),
        ("2001:DB8:0:0::1", "2001:db8::1"),
        ("[::1]", "::1"),
        ("::ffff:10.0.0.1", "::ffff:10.0.0.1"),
        ("x" * 63, "x" * 63),
    ],
)
def test_a_host_is_read_in_its_shortest_spelling(host: str, expected: str | None) -> None:
    if expected is None:
        with pytest.raises(ValueError, match="is not an IPv4 address"):
            grammar.host(host)
    else:
        found = grammar.host(host)
        assert found == expected or ipaddress.ip_address(found) == ipaddress.ip_address(expected)


@given(st.text(max_size=20) | st.from_regex(r"\A[-\[]?[0-9a-fx:.%\]]{0,20}\Z"))
def test_an_accepted_host_can_do_no_harm_on_a_command_line(text: str) -> None:
    try:
        host = grammar.host(text)
    except ValueError as error:
        assert str(error).isprintable()
    else:
        assert re.fullmatch(r"[A-Za-z0-9_:.][A-Za-z0-9_:.-]*", host)
        assert grammar.host(host) == host


@given(st.text(st.sampled_from("aZ9@:[],.-_%1 "), max_size=20))
def test_an_accepted_jump_host_reads_the_same_again(text: str) -> None:
    try:
        jump = grammar.proxy_jump(text)
    except ValueError as error:
        assert str(error).isprintable()
    else:
        assert grammar.proxy_jump(jump) == jump
        assert all(re.match(r"[A-Za-z0-9_\[]", hop) for hop in jump.split(","))


@pytest.mark.parametrize("name", ["", "-a", ".a", "..", "a b", "a/b", "a\n", "ä", "x" * 64, "a;b", "$(id)"])
def test_names_that_could_not_be_a_folder_or_a_word_are_refused(file: Path, name: str) -> None:
    (found,) = mistakes(file, f"{{name: {json.dumps(name)}, host: h}}")
    assert f"name: {grammar.show(name)} must be letters, digits, `.`, `_` and `-`, at most 63" in found
    with pytest.raises(InventoryError, match=r"cluster: .* must be letters"):
        load(file, f"cluster: {json.dumps(name)}\nnodes: [{{name: a, host: h}}]")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("nodes: [{name: a, host: h}]", "{file}: `cluster` is missing"),
        ("cluster: x", "{file}: `nodes` is missing"),
        ("cluster: x\nnodes: []", "{file}:2: nodes: must hold at least one item, not an empty list"),
        ("cluster: x\nnodes:", "{file}:2: nodes: is empty; give a value or remove the key"),
        ("cluster: x\nnodes: {a: 1}", "{file}:2: nodes: must be a list, one item a line behind `- `, not a mapping"),
        ("cluster: x\nnodes: [a]", "{file}:2: node 1: must be a mapping like {{key: value}}, not 'a'"),
        ("cluster: x\nnodes:\n- {host: h}", "{file}:3: node 1: `name` is missing"),
        ("cluster: 1\nnodes: [{name: a, host: h}]", "{file}:1: cluster: must be text, not 1; put it in quotes"),
        ("cluster: x\nnode: 1\nnodes: [{name: a, host: h}]", "{file}:2: unknown key 'node'; did you mean `nodes`?"),
        (
            "cluster: x\ndefaults: {host: h}\nnodes: [{name: a, host: h}]",
            "{file}:2: defaults: `host` belongs to one node, not to `defaults`",
        ),
        (
            "cluster: x\ndefaults: {prot: 1}\nnodes: [{name: a, host: h}]",
            "{file}:2: defaults: unknown key 'prot'; did you mean `port`?",
        ),
        ("cluster: x\ndefaults: [1]\nnodes: [{name: a, host: h}]", "{file}:2: defaults: must be a mapping like"),
        ("cluster: x\nnodes:\n- name: a\n  port: 1", "{file}:3: node a: `host` is missing; give the name or address"),
        ("cluster: x\nnodes:\n- name: a\n  host:", "{file}:3: node a: `host` is missing; give the name or address"),
    ],
)
def test_a_mistake_in_the_files_frame_gives_one_clear_line(file: Path, content: str, expected: str) -> None:
    with pytest.raises(InventoryError) as caught:
        load(file, content)
    assert str(caught.value).startswith(expected.format(file=file))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        (("{name: a, host: h}", "{name: A, host: g}"), "nodes a (line 4) and A have the same name"),
        (("{name: a, host: h}", "{name: b, host: H}"), "nodes a (line 4) and b have the same host and port"),
        (("{name: a, host: h, port: 22}", "{name: b, host: h}"), "nodes a (line 4) and b have the same host and port"),
        (("{name: a, host: '[::1]'}", "{name: b, host: '0::1'}"), "nodes a (line 4) and b have the same host and port"),
        (
            ("{name: a, host: h, address: 10.0.0.1/24}", "{name: b, host: g, address: 10.0.0.1}"),
            "nodes a (line 4) and b have the same training address",
        ),
        (
            ("{name: a, host: h, master: true}", "{name: b, host: g, master: true}"),
            "nodes a (line 4) and b are both pinned as master; keep one",
        ),
    ],
)
def test_two_nodes_that_cannot_both_be_meant_are_refused(file: Path, nodes: tuple[str, str], expected: str) -> None:
    (found,) = mistakes(file, *nodes)
    assert found.startswith(f"5: {expected}")


@pytest.mark.parametrize(
    "nodes",
    [
        ("{name: a, host: h, port: 22}", "{name: b, host: h, port: 23}"),
        ("{name: a, host: h, proxy_jump: g1}", "{name: b, host: h, proxy_jump: g2}"),
        ("{name: a, transport: local, address: 127.0.0.1}", "{name: b, transport: local, address: 127.0.0.1}"),
        ("{name: a, host: h, master: true}", "{name: b, host: g, master: false}"),
    ],
)
def test_two_nodes_that_differ_where_it_counts_are_accepted(file: Path, nodes: tuple[str, str]) -> None:
    assert len(load_nodes(file, *nodes)) == 2


def test_all_mistakes_are_named_at_once_in_order_of_their_lines(file: Path) -> None:
    found = mistakes(
        file,
        "{name: a, host: h, port: 0, gpus: x}",
        "{name: A, host: h, port: !x 1}",
        "{name: b, hots: h}",
        "3",
        defaults="{ranks: 0, ranks: 1}",
    )
    assert [re.sub(r"^(\d+: .*?)[;(,].*", r"\1", line) for line in found] == [
        "2: key 'ranks' is given twice",
        "2: defaults: ranks: must be at least 1",
        "4: node a: port: must be at least 1",
        "4: node a: gpus: must be a whole number",
        "5: tags are not supported ",
        "5: nodes a ",
        "5: nodes a ",
        "6: node b: unknown key 'hots'",
        "6: node b: `host` is missing",
        "7: node 4: must be a mapping like {key: value}",
    ]


def test_a_mistake_of_the_defaults_is_named_once_and_where_it_stands(file: Path) -> None:
    found = mistakes(file, "{name: a, host: g}", "{name: b, host: h}", defaults="{port: 0}")
    assert found == ["2: defaults: port: must be at least 1, not 0"]


def test_variables_are_text_as_written_with_or_without_quotes(file: Path) -> None:
    (node,) = load_nodes(
        file,
        "{name: a, host: h, env: {OMP_NUM_THREADS: 1, V: 1.10, F: false, O: 010, N: 'null', E: ''}}",
        defaults="{env: {D: 2}}",
    )
    threads = {"OMP_NUM_THREADS": "1", "V": "1.10", "F": "false", "O": "010", "N": "null", "E": ""}
    assert node.env == {"D": "2", **threads}


# ------------------------------------------------------------------------------------------- the files that we ship


@pytest.mark.parametrize("path", INVENTORIES, ids=lambda path: path.stem)
def test_every_shipped_inventory_loads_and_names_its_schema(path: Path) -> None:
    inventory = load_inventory(path)
    assert inventory.cluster == path.stem.replace("_", "-")
    first, second = path.read_text().splitlines()[:2]
    assert first == "# yaml-language-server: $schema=../deploy/inventory.schema.json"
    assert (path.parent / first.partition("=")[2]).exists()
    assert second.startswith("# ")
    assert all(node.user != "root" for node in inventory.nodes)


@pytest.mark.parametrize(
    "twin", [path for path in INVENTORIES if path.stem.startswith("lab_") and path.stem != "lab_pair"]
)
def test_a_twin_in_the_lab_has_the_hosts_of_its_original_and_says_that_it_is_paced(twin: Path) -> None:
    original = load_inventory(twin.with_name(twin.name.removeprefix("lab_").replace("_catalogue", "")))
    lab = load_inventory(twin)
    assert [(n.name, n.host, n.id, n.gpu, n.gpus, n.bandwidth_bps) for n in lab.nodes] == [
        (n.name, n.host, n.id, n.gpu, n.gpus, n.bandwidth_bps) for n in original.nodes
    ]
    estimated = twin.stem.endswith("_catalogue")
    assert ("an estimate" if estimated else "assumed, not measured") in twin.read_text()
    speeds = {"RTX A2000": 333, "Tesla V100-16GB": 833, "A16": 220, "RTX 3090": 900}
    for node in lab.nodes:
        assert (node.user, node.key_file, node.device) == ("lab", "/run/orch-lab/id_ed25519", "cpu")
        assert node.paced is not None and node.gpu is not None
        assert estimated or node.paced.samples_per_s == speeds[node.gpu]
        assert (node.ranks or node.gpus) == node.gpus


def test_the_published_clusters_are_as_published() -> None:
    published = {
        "a2000_a2000": [("192.168.1.43", "wO7BdJ", "RTX A2000"), ("192.168.1.44", "qg31M0", "RTX A2000")],
        "a2000_v100": [("192.168.1.41", "q3XKQO", "RTX A2000"), ("192.168.1.42", "Z7vRxK", "Tesla V100-16GB")],
        "a16_v100": [("192.168.1.51", "wLQpYR", "Tesla V100-16GB"), ("192.168.1.52", "P6GaY3", "A16")],
    }
    for name, hosts in published.items():
        nodes = load_inventory(ROOT / "inventory" / f"{name}.yaml").nodes
        assert [(node.host, node.id, node.gpu) for node in nodes] == hosts
        assert {(node.bandwidth_bps, node.image, node.gpus) for node in nodes} == {(2.5e9, "pytorch-2.0.1", 1)}


@pytest.mark.parametrize("path", INVENTORIES, ids=lambda path: path.stem)
def test_an_address_that_is_only_an_example_is_marked_as_one(path: Path) -> None:
    example = any(node.host.startswith("192.0.2.") for node in load_inventory(path).nodes)
    assert example == ("RFC 5737" in path.read_text())


# ------------------------------------------------------------------------------------------------------ the schema


def test_the_schema_describes_every_key() -> None:
    definitions = json.loads((ROOT / "deploy" / "inventory.schema.json").read_text())["$defs"]
    node = definitions["Entry"]
    assert set(node["properties"]) == set(re.findall(r"\w+", KEYS))
    assert set(node["properties"]) - set(definitions["Defaults"]["properties"]) == {
        "name",
        "host",
        "id",
        "address",
        "master",
        "slurm",
        "most",
        "allocation",
    }
    assert all(key.get("description") for key in node["properties"].values())
    assert not any(definition.get("additionalProperties", True) for definition in definitions.values())


# --------------------------------------------------------------------------------------------------------- fuzzing

ODD = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10) | st.just(["x"]) | st.just({"a": {}})
)
GOOD = {"name": "n1", "host": "h1", "port": 22, "env": {"A": "b"}, "address": "10.0.0.1/8", "bandwidth": "1Gbps"}
NODE = st.dictionaries(st.sampled_from(sorted(Entry.model_fields)) | st.text(max_size=8), ODD, max_size=8)


def accepted(file: Path, content: bytes) -> Inventory | None:
    try:
        return load(file, content)
    except InventoryError as error:
        assert error.mistakes and all(mistake.message.isprintable() for mistake in error.mistakes)
        return None


@settings(max_examples=200)
@given(
    defaults=NODE | ODD,
    nodes=st.lists(NODE | NODE.map(lambda odd: odd | GOOD) | NODE.map(lambda odd: GOOD | odd) | ODD, max_size=3) | ODD,
    extra=st.dictionaries(st.text(max_size=5), ODD, max_size=1),
)
def test_any_values_give_an_inventory_or_clear_mistakes(
    tmp_path_factory: pytest.TempPathFactory, defaults: Any, nodes: Any, extra: dict[str, Any]
) -> None:
    file = tmp_path_factory.getbasetemp() / "values.yaml"
    values = {"cluster": "x", "defaults": defaults, "nodes": nodes} | extra
    inventory = accepted(file, yaml.safe_dump(values, allow_unicode=True).encode(errors="surrogatepass"))
    if inventory:
        json.dumps(inventory.model_dump(mode="json"), allow_nan=False)


@settings(max_examples=200)
@given(
    start=st.integers(0, 400),
    length=st.integers(0, 20),
    put=st.binary(max_size=6) | st.sampled_from([b": ", b"\n", b"- ", b"'"]),
)
def test_a_damaged_file_gives_an_inventory_or_clear_mistakes(
    tmp_path_factory: pytest.TempPathFactory, start: int, length: int, put: bytes
) -> None:
    whole = (ROOT / "inventory" / "lab_a2000_v100.yaml").read_bytes().partition(b"cluster:")
    body = b"".join(whole[1:])
    accepted(tmp_path_factory.getbasetemp() / "damaged.yaml", body[:start] + put + body[start + length :])


def test_a_mistake_in_an_inventory_ends_with_code_2(file: Path) -> None:
    with pytest.raises(InventoryError) as caught:
        load(file, "")
    assert caught.value.exit_code == 2


def test_a_fifo_is_refused_at_once(file: Path) -> None:
    os.mkfifo(file)
    with pytest.raises(InventoryError, match="is not a regular file"):
        load_inventory(file)
