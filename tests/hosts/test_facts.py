"""Each file of tests/data/facts is one odd machine: what differs from rtx_a2000.json, and what we make of it."""

import copy
import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.errors import ProbeError
from orchestrator.hosts.facts import MAX_TEXT, NodeFacts
from orchestrator.hosts.parse_facts import parse_facts
from tests.support.fuzz import strings

DATA = Path(__file__).parents[1] / "data" / "facts"
PLAIN = json.loads((DATA / "rtx_a2000.json").read_text())["raw"]
PEERS = ("192.168.1.42",)
SENT_AT, RECEIVED_AT = 1795233448.0, 1795233454.0


def answer_with(changes):
    """The plain host's raw answer with a case's entries over it; null takes an entry away."""
    raw = copy.deepcopy(PLAIN)
    for part, entries in changes.items():
        merged = {**raw[part], **entries}
        raw[part] = {name: value for name, value in merged.items() if value is not None}
    return raw


def parse(raw, node="n", peers=PEERS):
    return parse_facts(node, raw, SENT_AT, RECEIVED_AT, peers)


@pytest.mark.parametrize("case", sorted(path.stem for path in DATA.glob("*.json")))
def test_a_recorded_answer_becomes_these_facts(case):
    recorded = json.loads((DATA / f"{case}.json").read_text())
    found = parse(answer_with(recorded["raw"]), peers=recorded.get("peers", PEERS)).model_dump(mode="json")
    assert {name: found[name] for name in recorded["expect"]} == recorded["expect"]


def test_facts_survive_being_stored_as_json():
    facts = parse(PLAIN)
    assert NodeFacts.model_validate_json(facts.model_dump_json()) == facts
    assert NodeFacts.model_validate(json.loads(facts.model_dump_json())) == facts


def test_the_way_to_most_hosts_names_none_of_them():
    lan, vpn = "192.168.1.41", "10.8.0.2"
    near, far = [f"192.168.1.{n}" for n in range(50, 250)], ["10.8.0.5", "gate.example"]
    sources = {**dict.fromkeys(near, lan), **dict.fromkeys(far, vpn)}
    commands = {"ip route 10.8.0.5": {"rc": 0, "out": f'[{{"dev": "tun0", "prefsrc": "{vpn}"}}]', "err": ""}}
    peers = [*near[:9], *far, "nowhere.example", *near[9:]]
    facts = parse(answer_with({"commands": commands, "values": {"sources": sources}}), peers=peers)
    assert [(way.interface, way.source, way.peers) for way in facts.routes] == [
        ("eno1", lan, ()),
        ("tun0", vpn, ("10.8.0.5", "gate.example")),
    ]
    assert facts.unrouted == ("nowhere.example",)
    assert [facts.way_to([peer]).interface for peer in (near[0], near[-1], *far)] == ["eno1", "eno1", "tun0", "tun0"]
    assert facts.way_to(["nowhere.example"]) is None
    assert len(facts.model_dump_json()) < 5000


def test_routes_remembered_by_an_older_version_are_understood():
    old = {**json.loads(parse(PLAIN).model_dump_json())}
    old["routes"] = [{"peer": "192.168.1.42", "interface": "eno1", "source": "192.168.1.41"}]
    facts = NodeFacts.model_validate(old)
    assert facts.way_to(["192.168.1.43", "192.168.1.42"]).interface == "eno1"
    assert facts.way_to(["192.168.1.43"]) is None


def test_the_clock_offset_leaves_out_the_time_that_the_probe_took():
    raw = answer_with({"values": {"wall_start": 1000.0, "wall_end": 1060.0}})
    assert parse_facts("n", raw, 939.0, 1001.0).clock_offset_s == 60.0


def test_a_slow_shell_makes_the_clock_uncertain_and_not_wrong():
    raw = answer_with({"values": {"wall_start": 1000.0, "wall_end": 1001.0}})
    facts = parse_facts("n", raw, 940.0, 1001.5)  # the clocks agree; a start-up file slept for a minute
    assert (facts.clock_offset_s, facts.clock_error_s) == (29.75, 30.25)


ROW = "0, A16, GPU-1, 15356, 2, 525.1, 0:B1:0.0, 8.6\n"
ROWS_65 = "".join(ROW.replace("GPU-1", f"GPU-{number}") for number in range(65))
OCCUPANT = {"gpu": "GPU-1", "pid": 4711, "mebibytes": 9, "user": "alice", "command": "python3", "job": None}
NONSENSE = {
    "GPUs": [
        {"commands": {"nvidia-smi": {"rc": 0, "out": ROW.replace("15356", "-1"), "err": ""}}},
        {"commands": {"nvidia-smi": {"rc": 0, "out": ROW.replace("15356", "nan"), "err": ""}}},
        {"commands": {"nvidia-smi": {"rc": 0, "out": ROW + ROW, "err": ""}}},
        {"commands": {"nvidia-smi": {"rc": 0, "out": ROWS_65, "err": ""}}},
        {"commands": {"nvidia-smi": {"rc": "0", "out": "", "err": ""}}},
        {"commands": {"nvidia-smi": []}},
        {"values": {"occupants": "everybody"}},
        {"values": {"occupants": [OCCUPANT] * 257}},
        {"values": {"occupants": [{**OCCUPANT, "mebibytes": [0] * 9}]}},
        {"values": {"occupants": [{**OCCUPANT, "pid": "4711"}]}},
        {"values": {"occupants": [{**OCCUPANT, "user": {}}]}},
    ],
    "torch": [
        {"commands": {"torch": {"rc": 0, "out": "", "err": ""}}},
        {"commands": {"torch": {"rc": 0, "out": '{"version": NaN}', "err": ""}}},
        {"commands": {"torch": {"rc": 0, "out": '{"version": 2, "archs": []}', "err": ""}}},
    ],
    "interfaces": [
        {"commands": {"ip addr": {"rc": 0, "out": "{}", "err": ""}}},
        {"commands": {"ip addr": {"rc": 0, "out": json.dumps([{"ifname": "a"}] * 300), "err": ""}}},
        {"commands": {"ip addr": {"rc": 1, "out": "", "err": ""}}, "files": {"/proc/net/if_inet6": "zz 1 2 3 4 eno1"}},
    ],
    "InfiniBand": [{"values": {"rdma": "mlx5_0"}}, {"values": {"rdma": [["mlx5_0"]]}}, {"values": {"rdma": [[1, 2]]}}],
    "memory": [{"files": {"/proc/meminfo": "MemTotal: lots kB"}}],
    "its clock": [{"values": {"wall_start": math.nan}}, {"values": {"wall_end": "now"}}],
    "itself": [{"values": {"cores": 0}}, {"values": {"cores": True}}, {"values": {"uid": 1 << 70}}],
    "its system": [{"values": {"uname": ["Linux"]}}, {"values": {"python": "3.10"}}, {"values": {"hostname": 7}}],
    "its work folder": [{"commands": {"workdir": {"rc": 0, "out": '{"path": "../x"}', "err": ""}}}],
}


@pytest.mark.parametrize(("fact", "changes"), [(fact, case) for fact, cases in NONSENSE.items() for case in cases])
def test_nonsense_is_refused_and_names_the_node_and_the_fact(fact, changes):
    with pytest.raises(ProbeError, match=f"^v100: its answer about {fact} makes no sense"):
        parse(answer_with(changes), node="v100")


def test_a_bool_is_no_exit_code_and_no_count_of_gpus():
    torch = {"rc": 0, "out": PLAIN["commands"]["torch"]["out"].replace('"devices": 1', '"devices": true'), "err": ""}
    with pytest.raises(ProbeError, match="torch"):
        parse(answer_with({"commands": {"torch": torch}}))


def test_long_words_are_cut():
    assert len(parse(answer_with({"values": {"hostname": "x" * 5000}})).hostname) == MAX_TEXT


def test_the_training_interface_is_the_named_one_then_the_address_then_the_route():
    docker = json.loads((DATA / "docker_and_vpn_beside_eno1.json").read_text())["raw"]
    facts = parse(answer_with(docker))
    assert facts.training_interface("tun0", "192.168.1.41").name == "tun0"
    assert facts.training_interface(None, "172.17.0.1").name == "docker0"
    assert facts.training_interface(None, None).name == "eno1"
    assert facts.training_interface("eth9", None) is None


WORDS = st.text(max_size=20) | st.sampled_from(["\x1b[0m", "1e999", "-1", "[N/A]", "NaN", "9" * 5000, "[" * 3000])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=6,
)
PLACES = [(part, name) for part, entries in PLAIN.items() for name in entries]


@given(st.sampled_from(PLACES), JSON, st.sampled_from(["whole", "out", "err", "rc"]))
def test_whatever_a_host_answers_it_is_facts_or_a_probe_error(place, value, key):
    raw = copy.deepcopy(PLAIN)
    part, name = place
    if part == "commands" and key != "whole":
        raw[part][name][key] = json.dumps(value) if key == "out" else value
    else:
        raw[part][name] = value
    try:
        facts = parse(raw)
    except ProbeError as error:
        assert str(error).isprintable()
        return
    assert all(text.isprintable() for text in strings(facts.model_dump(mode="json")))
    assert NodeFacts.model_validate_json(facts.model_dump_json()) == facts


@given(JSON)
def test_an_answer_of_any_form_at_all_is_a_probe_error(value):
    with pytest.raises(ProbeError):
        parse({"commands": value, "files": {}, "values": {}})
