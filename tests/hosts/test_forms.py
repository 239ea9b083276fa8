"""Hosts in the forms of other tools.

The examples in tests/data/inventories are our own, in the forms that these describe: DeepSpeed's "Getting started"
(resource configuration), Open MPI's orte_hosts(7), MPICH's page on Hydra, Ansible's guide on building inventories with
the documentation of its plugins `ini` and `yaml`, and OpenSSH's ssh_config(5). `batch_nodefile` is what PBS writes: a
line for each slot.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.errors import InventoryError, UsageError
from orchestrator.hosts import parse_inventory, yaml_of
from orchestrator.hosts.forms import Wanted, inventory_text, read_ansible, read_hostfile, sources

DATA = Path(__file__).parents[1] / "data" / "inventories"
WANTED = Wanted("rack", "somewhere")


def nodes_of(found, wanted=WANTED):
    """The nodes of the inventory that would be written."""
    return parse_inventory(yaml_of("rack.yaml", inventory_text(found, wanted), verbatim=["env"])).nodes


def short(found, *keys):
    return [(node.name, *(getattr(node, key) for key in keys)) for node in nodes_of(found)]


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
        "2: '^b' is not a host; write `host slots=4` or `host:4`",
        "3: unknown option 'frobs'; known are slots, user and max-slots",
        "4: '4' is no `option=value`; write `host slots=4` or `host:4`, one host a line",
        "6: the number of slots is given twice; keep one",
        "7: node f_-: host: 'f_é' must be written in its ASCII form (xn--...)",
        "9: f is already on line 8; write it once, with all its slots",
        "10: node me-x: host: must be only a host name or an IP address, not 'me:x'; the port goes in `port:`",
    ]


def test_no_hosts_are_a_mistake():
    assert mistakes(hostfile, "# none\n") == ["0: names no host; write `host slots=4` or `host:4`, one a line"]


# ---- Ansible ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def ansible(monkeypatch):
    """The real one, of this Python's environment."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if not shutil.which("ansible-inventory"):
        pytest.skip("ansible-core is not installed")


OF_INI = [
    ("head.lab", "head.lab", None, "admin", None, "python3", None),
    *((f"gpu0{i}.lab", f"gpu0{i}.lab", None, "deep", "~/.ssh/rack", "python3", 4) for i in (1, 2, 3)),
    ("gpu04.lab", "10.0.0.4", 2222, "deep", "~/.ssh/rack", "python3", 4),
    *((f"small-{c}", f"small-{c}", 2200, "trainer", "~/.ssh/rack", "python3.11", None) for c in "abc"),
]


def test_an_ini_inventory_has_groups_ranges_and_variables(ansible):
    found = sources.from_ansible(DATA / "ansible_hosts.ini")
    assert short(found, "host", "port", "user", "key_file", "python", "ranks") == OF_INI
    said = "\n".join(found.left_out)
    assert "ansible_password is a secret, and not carried over" in said and "correct-horse" not in said
    assert "ansible_become is not carried over" in said


def test_a_yaml_inventory_has_groups_ranges_and_variables(ansible):
    found = sources.from_ansible(DATA / "ansible_hosts.yaml")
    jump, python = "admin@gate.lab", "/opt/conda/bin/python"
    assert short(found, "host", "port", "user", "proxy_jump", "python") == [
        ("head.lab", "head.lab", None, "admin", None, python),
        ("gpu01.lab", "gpu01.lab", None, "trainer", jump, python),
        ("gpu02.lab", "gpu02.lab", None, "trainer", jump, python),
        ("gpu04", "10.0.0.4", 2222, "trainer", jump, python),
        ("last.lab", "last.lab", None, "trainer", None, python),
    ]
    assert any("ansible_password is a secret" in line for line in found.left_out)


def test_what_ansible_makes_of_groups_and_templates_counts(tmp_path, ansible):
    (tmp_path / "group_vars").mkdir()
    (tmp_path / "group_vars" / "all.yaml").write_text("ansible_user: deep\n")
    (tmp_path / "hosts").write_text("[a]\nh[1:2]\nplain ansible_user=me\n[b]\nh1 ansible_port=2222\n")
    found = sources.from_ansible(tmp_path / "hosts")
    assert short(found, "user", "port") == [("h1", "deep", 2222), ("h2", "deep", None), ("plain", "me", None)]


def test_what_ansible_refuses_is_refused_in_its_words(tmp_path, ansible):
    (tmp_path / "hosts").write_text("[a:friends]\nh\n")
    with pytest.raises(UsageError, match=r"hosts: .*friends") as refused:
        sources.from_ansible(tmp_path / "hosts")
    assert "for more: `ansible-inventory" in str(refused.value.remedy)
    with pytest.raises(UsageError, match="none: no such file"):
        sources.from_ansible(tmp_path / "none")


def test_a_folder_with_one_file_that_cannot_be_read_is_refused(tmp_path, ansible):
    (tmp_path / "good").write_text("[a]\nh\n")
    (tmp_path / "bad").write_text("[x:friends]\nzz\n")
    with pytest.raises(UsageError, match=r"friends"):
        sources.from_ansible(tmp_path)


def test_many_groups_in_each_other_are_walked_through():
    deep = {f"g{n}": {"children": [f"g{n + 1}"]} for n in range(3000)} | {"g3000": {"hosts": ["h"]}}
    assert [host.name for host in read_ansible("hosts", {"_meta": {"hostvars": {}}, **deep}).hosts] == ["h"]


def test_an_ansible_that_does_not_start_is_named(tmp_path, monkeypatch):
    (tmp_path / "ansible-inventory").write_text("#!/nowhere/python\n")
    (tmp_path / "ansible-inventory").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match=r"ansible-inventory cannot be run"):
        sources.from_ansible(DATA / "ansible_hosts.ini")


def test_without_ansible_its_listing_from_elsewhere_will_do(tmp_path, ansible, monkeypatch):
    printed = subprocess.run(
        ["ansible-inventory", "-i", DATA / "ansible_hosts.ini", "--list"], capture_output=True, check=True
    ).stdout
    (tmp_path / "hosts.json").write_bytes(printed)
    monkeypatch.setenv("PATH", "/nowhere")
    assert (
        short(sources.from_ansible(tmp_path / "hosts.json"), "host", "port", "user", "key_file", "python", "ranks")
        == OF_INI
    )
    with pytest.raises(UsageError, match="no `ansible-inventory`") as refused:
        sources.from_ansible(DATA / "ansible_hosts.ini")
    assert "--list > hosts.json` on a machine that has it, then `orch init --from ansible hosts.json`" in str(
        refused.value.remedy
    )


def listing(text):
    return read_ansible("hosts", json.loads(text))


def test_all_mistakes_of_a_listing_at_once():
    hosts = {
        "a": {"ansible_user": "{{ who }}", "ansible_password": "hunter2"},
        "v": {"ansible_user": {"__ansible_vault": "$ANSIBLE_VAULT;1.1;AES256"}},
        "b": {"ansible_port": "x", "ansible_connection": "docker"},
        "c": {"ansible_port": 70000},
    }
    assert mistakes(listing, json.dumps({"_meta": {"hostvars": hosts}})) == [
        "0: a: ansible_user is a Jinja expression, which Ansible has not computed; write the plain value",
        "0: v: ansible_user is encrypted by Ansible Vault; write the plain value",
        "0: ansible_connection: 'docker' is not SSH; leave that host out",
        "0: node b: port: must be a whole number, not 'x'; write it plainly, without quotes, unit or leading zero",
        "0: node c: port: must be at most 65535, not 70000",
    ]


@pytest.mark.parametrize(
    "text",
    [
        "1",
        "[]",
        "{}",
        '{"_meta": 1}',
        '{"_meta": {"hostvars": []}, "a": {"hosts": 7}}',
        '{"_meta": {"hostvars": {}}, "a": {"hosts": [1]}}',
        '{"_meta": {"hostvars": {}}, "a": {"hosts": "abc"}}',
    ],
)
def test_what_is_no_listing_is_refused(text):
    assert mistakes(listing, text) == ["0: is not what `ansible-inventory --list` prints"]


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


@given(text=TEXTS)
def test_any_hostfile_is_hosts_or_mistakes_in_words(text):
    try:
        nodes_of(hostfile(text))
    except InventoryError as error:
        assert error.mistakes and all(mistake.message for mistake in error.mistakes)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.sampled_from(["a", "me", "{{ x }}", "22", "local"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.text() | st.sampled_from(["ansible_user", "ansible_port", "ansible_connection", "hosts", "a"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)
LISTINGS = JSON | st.fixed_dictionaries({"_meta": st.fixed_dictionaries({"hostvars": JSON}), "all": JSON})


@given(found=LISTINGS)
def test_any_listing_is_hosts_or_mistakes_in_words(found):
    try:
        nodes_of(read_ansible("hosts", found))
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
