"""Hosts in the forms of other tools, read and written.

The examples in tests/data/inventories are our own, in the forms that these describe: DeepSpeed's "Getting started"
(resource configuration), Open MPI's orte_hosts(7), MPICH's page on Hydra, Ansible's guide on building inventories with
the documentation of its plugins `ini` and `yaml`, and OpenSSH's ssh_config(5). `batch_nodefile` is what PBS writes: a
line for each slot.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.errors import InventoryError, UsageError
from orchestrator.hosts.forms import sources
from orchestrator.hosts.forms.ansible import write_ansible
from orchestrator.hosts.forms.ansible_hosts import hosts_of
from orchestrator.hosts.forms.ansible_ini import read_ini
from orchestrator.hosts.forms.ansible_yaml import read_ansible_yaml
from orchestrator.hosts.forms.hostfile import read_hostfile, write_hostfile
from orchestrator.hosts.forms.new_inventory import Wanted, inventory_text
from orchestrator.hosts.forms.ssh_config import write_ssh_config
from orchestrator.hosts.grammar import NAME, USER
from orchestrator.hosts.inventory import Node
from orchestrator.hosts.inventory_file import parse_inventory
from orchestrator.hosts.yamlfile import yaml_of

DATA = Path(__file__).parents[1] / "data" / "inventories"
WANTED = Wanted("rack", "somewhere")


def nodes_of(found, wanted=WANTED):
    """The nodes of the inventory that would be written."""
    return parse_inventory(yaml_of("rack.yaml", inventory_text(found, wanted), verbatim=["env"])).nodes


def short(found, *keys):
    return [(node.name, *(getattr(node, key) for key in keys)) for node in nodes_of(found)]


def ini(text):
    return read_ini("hosts", text)


def yml(text):
    return read_ansible_yaml(yaml_of("hosts", text))


def mistakes(read, text):
    """`<line>: <message>` of each, whoever found it."""
    with pytest.raises(InventoryError) as refused:
        inventory_text(read(text), WANTED)
    assert {mistake.file for mistake in refused.value.mistakes} == {"hosts"}
    return [f"{mistake.line}: {mistake.message}" for mistake in refused.value.mistakes]


# ---- hostfiles -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "found", "left_out"),
    [
        ("deepspeed_hostfile", [("worker-1", None, 4), ("worker-2", None, 4)], 0),
        (
            "open_mpi_hostfile",
            [("aa.lab", None, 2), ("bb.lab", None, 4), ("10.0.0.13", None, 2), ("cc.lab", "trainer", 1)],
            2,
        ),
        ("mpich_hostfile", [("donner", None, 2), ("foo", None, 4), ("10.0.0.7", None, 8), ("shakey", None, None)], 0),
        ("batch_nodefile", [("n01", None, 2), ("n02", None, 3)], 0),
    ],
)
def test_a_hostfile_has_hosts_and_ranks(name, found, left_out):
    read = sources.from_hostfile(DATA / name)
    assert short(read, "user", "ranks") == found
    assert len(read.left_out) == left_out


def hostfile(text):
    return read_hostfile("hosts", text)


def test_an_ip6_address_is_no_host_with_slots():
    found = nodes_of(hostfile("2001:db8::4 slots=2\n[2001:db8::5]:3\n"))
    assert [(n.name, n.host, n.ranks) for n in found] == [
        ("2001-db8--4", "2001:db8::4", 2),
        ("2001-db8--5", "2001:db8::5", 3),
    ]


def test_all_mistakes_of_a_hostfile_at_once():
    text = "a slots=0\n^b\nc slots=2 frobs=3\nd 4\n\ne:2 slots=2\nf_\u00e9\nf slots=1\nf slots=1\nme:x slots=2\n"
    assert mistakes(hostfile, text) == [
        "1: slots: '0' must be a whole number from 1 to 256",
        "2: '^b' is no host; write `host slots=4` or `host:4`",
        "3: unknown option 'frobs'; known are slots, user and max-slots",
        "4: '4' is no `option=value`; write `host slots=4` or `host:4`, one host a line",
        "6: the number of slots stands twice; keep one",
        "7: node f_-: host: 'f_é' must be written in its ASCII form (xn--...)",
        "9: f stands on line 8 already; write it once, with all its slots",
        "10: node me-x: host: must be a host name or an IP address alone, not 'me:x'; the port goes in `port:`",
    ]


def test_no_hosts_are_a_mistake():
    assert mistakes(hostfile, "# none\n") == ["0: names no host; write `host slots=4` or `host:4`, one a line"]


# ---- Ansible ---------------------------------------------------------------------------------------------------------

OF_INI = [
    ("head.lab", "head.lab", None, "admin", None, "python3", None),
    *((f"gpu0{i}.lab", f"gpu0{i}.lab", None, "deep", "~/.ssh/rack", "python3", 4) for i in (1, 2, 3)),
    ("gpu04.lab", "10.0.0.4", 2222, "deep", "~/.ssh/rack", "python3", 4),
    *((f"small-{c}", f"small-{c}", 2200, "trainer", "~/.ssh/rack", "python3.11", None) for c in "abc"),
]


def test_an_ini_inventory_has_groups_ranges_and_variables():
    found = sources.from_ansible(DATA / "ansible_hosts.ini")
    assert short(found, "host", "port", "user", "key_file", "python", "ranks") == OF_INI
    said = "\n".join(found.left_out)
    assert "ini:19: ansible_password is a secret, and not carried over" in said and "correct-horse" not in said
    assert "ini:18: ansible_become is not carried over" in said and "groups are not carried over" in said


def test_a_yaml_inventory_has_groups_ranges_and_variables():
    found = sources.from_ansible(DATA / "ansible_hosts.yaml")
    jump, python = "admin@gate.lab", "/opt/conda/bin/python"
    assert short(found, "host", "port", "user", "proxy_jump", "python") == [
        ("head.lab", "head.lab", None, "admin", None, python),
        ("gpu01.lab", "gpu01.lab", None, "trainer", jump, python),
        ("gpu02.lab", "gpu02.lab", None, "trainer", jump, python),
        ("gpu04", "10.0.0.4", 2222, "trainer", jump, python),
        ("last.lab", "last.lab", None, "trainer", None, python),
    ]
    assert any("yaml:17: ansible_password is a secret" in line for line in found.left_out)


@pytest.mark.parametrize(
    ("pattern", "names", "port"),
    [
        ("gpu[01:03].lab", ["gpu01.lab", "gpu02.lab", "gpu03.lab"], None),
        ("gpu[8:10]:22", ["gpu8", "gpu9", "gpu10"], 22),
        ("n[1:9:4]", ["n1", "n5", "n9"], None),
        ("n[:2]", ["n0", "n1", "n2"], None),
        ("r[a:c]-[1:2]", ["ra-1", "ra-2", "rb-1", "rb-2", "rc-1", "rc-2"], None),
        ("2001:db8::4", ["2001:db8::4"], None),
        ("[2001:db8::4]:22", ["2001:db8::4"], 22),
        ("plain", ["plain"], None),
    ],
)
def test_a_range_of_ansible_stands_for_its_hosts(pattern, names, port):
    assert hosts_of(pattern) == (names, port)


@pytest.mark.parametrize(
    "pattern",
    ["a[1:", "a]1[", "a[1-4]", "a[04:1]", "a[01:9]", "a[001:10]", "a[1:4:0]", "a[4:1]", "a[0:9999999]", "a[:]"],
)
def test_a_wrong_range_of_ansible_is_refused(pattern):
    with pytest.raises(ValueError, match="range"):
        hosts_of(pattern)


def test_all_mistakes_of_an_ini_inventory_at_once():
    text = (
        "[a:vars]\nansible_user={{ who }}\nansible_port=x\nhunter2\n[b]\nansible_password=hunter2\nh hunter2\n"
        "h1 ansible_connection=docker\n[c:friends]\n[a b]\n[d:children]\nnone=hunter2\n[a]\nh2\n'\nh3\n"
    )
    found = mistakes(ini, text)
    assert found == [
        "2: ansible_user holds a Jinja expression, which only Ansible can compute; write the plain value, or take what"
        " `ansible-inventory -i FILE --list --yaml` prints",
        "3: node h2: port: must be a whole number, not 'x'; write it plainly, without quotes, unit or leading zero",
        "4: in [a:vars] each line is `variable=value`",
        "6: a variable stands where a host is expected; group variables go below [b:vars]",
        "7: behind a host each word is `variable=value`; quote a value with blanks",
        "8: ansible_connection: 'docker' is not SSH; leave that host out",
        "9: [c:friends]: 'friends' is none of hosts, vars, children",
        "10: '[a b]' is no section; write [group], [group:vars] or [group:children]",
        "12: [d:children] names group 'none', which is nowhere; write a section for it",
        "15: cannot be split into words (No closing quotation); look for a quote without its other one",
    ]
    assert "hunter2" not in "\n".join(found)


def test_all_mistakes_of_a_yaml_inventory_at_once():
    text = (
        "all:\n  host: {a: }\n  vars: [hunter2]\n  hosts:\n    a: hunter2\n    b: {ansible_user: !vault hunter2}\n"
        "    c: {ansible_port: 70000, ansible_become_pass: !vault hunter2}\n    '{{ d }}':\n"
    )
    found = mistakes(yml, text)
    assert found == [
        "2: unknown key 'host' in group 'all'; did you mean `hosts`?",
        "3: variables must be a mapping (`name:` lines), not a list",
        "5: variables must be a mapping (`name:` lines), not a single value",
        "6: is kept by ansible-vault, which orch does not open; write the plain value, or take it out",
        "7: node c: port: must be at most 65535, not 70000",
        "8: '{{ d }}' holds a Jinja expression, which only Ansible can compute",
    ]


def test_an_anchor_is_refused_without_a_word_of_our_own_keys():
    found = mistakes(yml, "all:\n  hosts:\n    a: &x {ansible_user: me}\n    b: *x\n    c: {<<: *x}\n")
    assert [line.partition("; ")[2] for line in found] == ["write the value out"] * len(found)
    assert [line[0] for line in found] == ["3", "4", "5", "5"]


def test_a_plugin_and_a_vault_are_refused(tmp_path):
    assert "--list --yaml" in mistakes(yml, "plugin: amazon.aws.aws_ec2\nregions: [x]\n")[0]
    (tmp_path / "hosts").write_text("$ANSIBLE_VAULT;1.1;AES256\n6231\n")
    with pytest.raises(InventoryError, match=r"hosts:1: is encrypted by ansible-vault"):
        sources.from_ansible(tmp_path / "hosts")


def test_a_circle_of_groups_is_refused():
    text = "[a:children]\nb\n[b:children]\na\n[b]\nh\n"
    assert mistakes(ini, text) == ["1: groups hold each other in a circle: a, b; take one of them out of the other"]


def test_group_vars_beside_an_inventory_are_named(tmp_path):
    (tmp_path / "group_vars").mkdir()
    (tmp_path / "hosts").write_text("a\n")
    assert "group_vars beside hosts" in sources.from_ansible(tmp_path / "hosts").left_out[-1]


def test_of_equal_groups_the_later_name_wins_and_a_priority_before_it():
    text = "[a]\nh\n[b]\nh\n[a:vars]\nansible_user=ua\n[b:vars]\nansible_user=ub\n"
    assert short(ini(text), "user") == [("h", "ub")]
    assert short(ini(text + "[a:vars]\nansible_group_priority=2\n"), "user") == [("h", "ua")]


def test_a_wrong_value_of_many_hosts_is_one_mistake():
    found = mistakes(ini, "h[1:9]\n[all:vars]\nansible_user=no one\n")
    assert len(found) == 1 and found[0].startswith("3: node h1: user: 'no one' must be")


# ---- SSH -------------------------------------------------------------------------------------------------------------


def test_an_ssh_configuration_has_hosts(monkeypatch, tmp_path):
    shutil.copytree(DATA / "ssh_config.d", tmp_path / ".ssh" / "ssh_config.d")
    monkeypatch.setenv("HOME", str(tmp_path))  # relative names of Include count from ~/.ssh
    monkeypatch.setenv("ORCH_SSH_CONFIG", str(DATA / "ssh_config"))
    found = sources.from_ssh_config("gpu[01-03],v*")
    key = "~/.ssh/rack"
    assert short(found, "host", "port", "user", "key_file", "proxy_jump") == [
        ("gpu01", "10.0.0.1", 2222, "trainer", key, "gate"),
        ("gpu02", "gpu02.lab", None, "trainer", key, "gate"),
        ("gpu03", "gpu03.lab", None, "trainer", key, "gate"),
        ("v100", "192.168.1.42", None, "deep", None, None),
    ]
    assert found.left_out == ("forwardagent is not carried over",)


def test_mistakes_of_an_ssh_configuration_name_the_file_that_holds_them(tmp_path, monkeypatch):
    (tmp_path / "config").write_text(
        f"Include {tmp_path}/more\nHost a\n Port x\n ProxyCommand nc %h\nHost b c\n HostName same\n"
    )
    (tmp_path / "more").write_text("\nHost d\n User no!one\nHost same\n")
    monkeypatch.setenv("ORCH_SSH_CONFIG", str(tmp_path / "config"))
    with pytest.raises(InventoryError) as refused:
        inventory_text(sources.from_ssh_config("*"), WANTED)
    assert [str(mistake).removeprefix(f"{tmp_path}/").partition(" ")[0] for mistake in refused.value.mistakes] == [
        "config:2:",
        "config:2:",
        "config:5:",
        "more:2:",
    ]
    with pytest.raises(UsageError, match="has no `Host e`"):
        sources.from_ssh_config("a,e")


@pytest.mark.parametrize("line", ["Include 'x", "Include ~nobody-there/x", "Host 'a", "nonsense"])
def test_a_broken_ssh_configuration_is_refused_in_words(line, tmp_path, monkeypatch):
    (tmp_path / "config").write_text(f"{line}\nHost a\n")
    monkeypatch.setenv("ORCH_SSH_CONFIG", str(tmp_path / "config"))
    with pytest.raises(UsageError, match=f"^{tmp_path}/config: .*mend that line"):
        sources.from_ssh_config("a")


# ---- whatever a file holds -------------------------------------------------------------------------------------------

PIECES = [
    "gpu[01:03]",
    "a",
    "slots=4",
    ":4",
    "=",
    "[",
    "]",
    "\n",
    " ",
    "#",
    "'",
    '"',
    "{{ x }}",
    "!vault ",
    "&a ",
    "*a",
]
PIECES += [
    "[g]\n",
    "[g:vars]\n",
    "[g:children]\n",
    "ansible_user=me",
    "ansible_port",
    ": ",
    "all:",
    "\n  ",
    "hosts:",
    "{",
]
PIECES += [
    "Host ",
    "Port ",
    "Include ",
    "ProxyJump ",
    "HostName ",
    "IdentityFile ",
    "%h",
    "~",
    "*",
    "\x00",
    "\u2028",
    "1e3",
]
BEGUN = ["all:\n  hosts:", "all:\n  vars:", "g:\n  children: ", "Include ", "Host a\n Port ", "[g:vars]\n"]
MIXED = st.lists(st.sampled_from(PIECES)).map("".join)
TEXTS = st.one_of(st.text(), MIXED, st.tuples(st.sampled_from(BEGUN), MIXED).map("".join))


@pytest.mark.parametrize("read", [hostfile, ini, yml], ids=["hostfile", "ini", "yaml"])
@given(text=TEXTS)
def test_any_text_is_hosts_or_mistakes_in_words(read, text):
    try:
        nodes_of(read(text))
    except InventoryError as error:
        assert error.mistakes and all(mistake.message for mistake in error.mistakes)


@given(text=TEXTS, listed=st.sampled_from(["*", "a", "gpu[01-02]"]))
def test_any_ssh_configuration_is_hosts_or_mistakes_in_words(text, listed, tmp_path_factory):
    file = tmp_path_factory.mktemp("ssh") / "config"
    file.write_text(text, errors="replace")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ORCH_SSH_CONFIG", str(file))
        try:
            nodes_of(sources.from_ssh_config(listed))
        except UsageError as error:
            assert str(error)


# ---- and back --------------------------------------------------------------------------------------------------------

NAMES = st.from_regex(NAME, fullmatch=True)
HOSTS = st.one_of(
    st.from_regex(r"[a-z][a-z0-9]{0,8}(\.[a-z]{2,5})?", fullmatch=True),
    st.ip_addresses().map(str),
)
NODES = st.lists(
    st.builds(
        Node,
        name=NAMES,
        host=HOSTS,
        port=st.none() | st.integers(1, 65535),
        user=st.none() | st.from_regex(USER, fullmatch=True),
        ranks=st.none() | st.integers(1, 256),
        proxy_jump=st.none() | st.sampled_from(["gate", "me@gate.lab:2222,b"]),
        connect_timeout_s=st.none() | st.integers(1, 600).map(float),
    ),
    min_size=1,
    max_size=5,
    unique_by=(lambda node: node.name.lower(), lambda node: node.host),
)
KEPT = ("name", "host", "port", "user", "ranks", "proxy_jump")


def kept(nodes, keys):
    return [{key: getattr(node, key) for key in keys} for node in nodes]


@given(nodes=NODES)
def test_an_ansible_inventory_comes_back_as_it_was(nodes):
    assert kept(nodes_of(yml(write_ansible("rack", nodes).text)), KEPT) == kept(nodes, KEPT)


@given(nodes=NODES)
def test_an_ssh_configuration_comes_back_but_for_ranks(nodes, tmp_path_factory):
    file = tmp_path_factory.mktemp("ssh") / "config"
    written = write_ssh_config("rack", nodes)
    file.write_text(written.text)
    keys = [key for key in (*KEPT, "connect_timeout_s") if key != "ranks"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ORCH_SSH_CONFIG", str(file))
        found = nodes_of(sources.from_ssh_config("*"))
    assert kept(found, keys) == kept(nodes, keys)
    assert bool(written.left_out) == any(node.ranks for node in nodes)


@given(nodes=NODES)
def test_a_hostfile_comes_back_with_hosts_and_ranks(nodes):
    found = nodes_of(hostfile(write_hostfile("rack", nodes).text))
    assert [(n.host, n.ranks) for n in found] == [(n.host, n.ranks or 1) for n in nodes]


def test_what_has_no_place_is_named_without_its_value():
    node = Node(name="a", host="a", user="me", env={"TOKEN": "hunter2"}, gpus=2)
    assert write_hostfile("rack", [node]).left_out == ("user: no place in a hostfile", "env: no place in a hostfile")
    assert write_ansible("rack", [node]).left_out == ("env: no place in an Ansible inventory",)
    local = Node(name="b", host="localhost", transport="local")
    assert write_ssh_config("rack", [node, local]).left_out[0] == "b: this machine itself (transport: local)"
