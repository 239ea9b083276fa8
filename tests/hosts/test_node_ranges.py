"""An inventory's entry that stands for many nodes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.errors import InventoryError
from orchestrator.hosts import MOST_HOSTS, load_inventory, node_from_keys, read_yaml, with_ranges
from tests.support.cost import at_most_calls


def load(path, *nodes, defaults=None):
    """The first node stands on line 3."""
    first = f"cluster: lab\ndefaults: {defaults}" if defaults else "cluster: lab"
    path.write_text("\n".join([first, "nodes:", *(f"- {node}" for node in nodes)]))
    return load_inventory(path).nodes


def mistakes(path, *nodes, defaults=None):
    with pytest.raises(InventoryError) as refused:
        load(path, *nodes, defaults=defaults)
    assert {mistake.file for mistake in refused.value.mistakes} == {str(path)}
    return [f"{mistake.line}: {mistake.message}" for mistake in refused.value.mistakes]


@pytest.fixture
def file(tmp_path):
    return tmp_path / "rack.yaml"


def test_a_range_stands_for_a_node_each(file):
    found = load(
        file,
        "{name: a, host: a.lab}",
        "name: gpu[08-10]\n  host: 10.0.0.[11-12,20]\n  address: 10.1.0.[1-3]\n  gpus: 2",
        '{name: "n[1-2]", transport: local}',
        "{name: z, host: '[2001:db8::1]'}",
    )
    assert [(node.name, node.host, node.address, node.gpus, node.line) for node in found] == [
        ("a", "a.lab", None, None, 3),
        ("gpu08", "10.0.0.11", "10.1.0.1", 2, 4),
        ("gpu09", "10.0.0.12", "10.1.0.2", 2, 4),
        ("gpu10", "10.0.0.20", "10.1.0.3", 2, 4),
        ("n1", "localhost", None, None, 8),
        ("n2", "localhost", None, None, 8),
        ("z", "2001:db8::1", None, None, 9),
    ]


def test_all_mistakes_name_the_line_of_the_entry(file):
    found = mistakes(
        file,
        "name: gpu[01-04]\n  host: 10.0.0.[11-14]\n  port: x\n  usr: me",
        "name: b[1-2]\n  host: h[1-3]",
        "name: c\n  host: h[1-3]",
        "name: d[2-1]\n  host: d[1-",
        '{name: "e[1-2]", host: e}',
    )
    form = "write a range like gpu[01-16] or gpu[1-4,8]"
    assert found == [
        "5: node gpu01: port: must be a whole number, not 'x'; write it plainly, without quotes, unit or leading zero",
        "6: node gpu01: unknown key 'usr'; did you mean `user`?",
        "8: host: h[1-3] stands for 3, `name` for 2; give both equally many",
        "10: host: h[1-3] stands for 3, `name` for 1; give both equally many",
        f"11: name: d[2-1]: '2-1' is not a range: {form}",
        f"12: host: d[1-: brackets do not match: {form}",
        "13: nodes e1 (line 13) and e2 have the same host and port",
    ]


def test_a_file_that_stands_for_a_million_hosts_is_refused_at_once(tmp_path):
    file = tmp_path / "rack.yaml"
    entries = [f'  - {{name: "g{i}-[1-3999]", host: "h{i}-[1-3999]"}}\n' for i in range(250)]
    plain = [f"  - {{name: n{i}, host: h{i}}}\n" for i in range(98)]
    wide = ['  - {name: "f[1-4096][1-2]", host: f}\n']
    for text, line in ((wide, 3), (entries, 4), ([entries[0], *plain], 3 + 98)):
        file.write_text("cluster: c\nnodes:\n" + "".join(text))
        with pytest.raises(InventoryError) as caught, at_most_calls(1_000_000):
            with_ranges(read_yaml(file, verbatim=["env"]))
        assert [str(mistake) for mistake in caught.value.mistakes] == [
            f"{file}:{line}: with this entry the file stands for more than {MOST_HOSTS} hosts"
        ]


@pytest.mark.parametrize("address", ["[\ud7fc", "\ud7fc[1-2]"])
def test_a_mistake_about_a_range_is_printable(file, address):
    said = mistakes(file, f"{{name: x, host: x, address: '{address}'}}")
    assert said and all(line.isprintable() for line in said)


def test_brackets_within_braces_need_quotes_and_the_mistake_says_so(file):
    assert mistakes(file, "{name: x[1-2], host: x}")[0].endswith("put a value with brackets in quotes")


def test_a_node_that_is_added_is_one():
    with pytest.raises(InventoryError, match=r"'gpu\[1-2\]' must be letters"):
        node_from_keys({"name": "gpu[1-2]", "host": "a"}, "node add")


TEXTS = st.one_of(st.text(), st.lists(st.sampled_from(["a", "[1-2]", "[", "]", "-", ",", "01", ":", "."])).map("".join))


@given(name=TEXTS, host=TEXTS)
def test_any_text_is_nodes_or_mistakes_in_words(name, host, tmp_path_factory):
    quoted = ["'" + text.replace("'", "''").replace("\n", " ") + "'" for text in (name, host)]
    path = tmp_path_factory.mktemp("ranges") / "rack.yaml"
    path.write_text(f"cluster: c\nnodes:\n- {{name: {quoted[0]}, host: {quoted[1]}}}\n", errors="replace")
    try:
        assert load_inventory(path).nodes
    except InventoryError as error:
        assert all(mistake.message for mistake in error.mistakes)


def test_every_text_of_a_node_takes_ranges_and_its_name(file):
    nodes = load(
        file,
        "name: g[01-02]\n  host: '{name}.lab'\n  workdir: /srv/orch-[01-02]\n  key_file: ~/.ssh/{name}\n"
        "  note: row [3-4]",
        "name: h[1-2]\n  host: 10.0.0.[1-2]\n  env: {RACK: 'at {name}', SHELL_S: '${name}', LOG: '{{name}}'}\n"
        "  note: '[broken] fan'",
        defaults="{workdir: '~/.orch-{name}', prepare: 'echo ${name} {name}', activate: '[ -f ~/x ] && . ~/x'}",
    )
    assert [node.host for node in nodes] == ["g01.lab", "g02.lab", "10.0.0.1", "10.0.0.2"]
    assert [node.workdir for node in nodes] == ["/srv/orch-01", "/srv/orch-02", "~/.orch-h1", "~/.orch-h2"]
    assert [node.key_file for node in nodes[:2]] == ["~/.ssh/g01", "~/.ssh/g02"]
    assert [node.note for node in nodes] == ["row 3", "row 4", "[broken] fan", "[broken] fan"]
    assert nodes[2].env == {"RACK": "at h1", "SHELL_S": "${name}", "LOG": "{name}"}
    assert [node.prepare for node in nodes[2:]] == ["echo ${name} h1", "echo ${name} h2"]


@pytest.mark.parametrize(
    ("node", "defaults", "words"),
    [
        ("{name: g1, host: h}", "{workdir: '~/.orch-[01-16]'}", "workdir: must be without brackets"),
        ("{name: g1, host: h, workdir: '~/.orch-[01-16]'}", "{}", "stands for 16, `name` for 1"),
        ("{name: 'g[1-2]', host: 'h[1-2]', workdir: '~/x-[1-3]'}", "{}", "stands for 3, `name` for 2"),
        ("{name: 'g[1-2]', host: 'h[1-2]', workdir: '~/x-[a]'}", "{}", "workdir: must be without brackets"),
    ],
)
def test_brackets_that_stay_are_a_mistake(file, node, defaults, words):
    assert any(words in mistake for mistake in mistakes(file, node, defaults=defaults))
