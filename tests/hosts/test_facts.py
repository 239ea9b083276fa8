"""Each file of tests/data/facts is one odd machine: what differs from rtx_a2000.json, and what we make of it."""

import copy
import json
import math
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.errors import ProbeError
from orchestrator.hosts import NodeFacts, read_facts
from orchestrator.hosts.facts import MAX_TEXT
from orchestrator.remote import probe
from orchestrator.remote.probe import gpu_facts
from tests.support.fuzz import strings

DATA = Path(__file__).parents[1] / "data" / "facts"
PLAIN = json.loads((DATA / "rtx_a2000.json").read_text())["raw"]
PEERS = ("192.168.1.42",)
SENT_AT, RECEIVED_AT = 1795233448.0, 1795233454.0


def machine_with(changes):
    """The plain machine with a case's entries over it; null takes an entry away."""
    raw = copy.deepcopy(PLAIN)
    for part, entries in changes.items():
        merged = {**raw[part], **entries}
        raw[part] = {name: value for name, value in merged.items() if value is not None}
    return raw


def answer_of(machine, peers=PEERS):
    """What the probe makes of a machine's commands and values."""
    commands, values = machine["commands"], dict(machine["values"])
    sources, on_gpus = values.pop("sources"), values.pop("occupants", {})
    clock = {"began": values.pop("wall_start"), "ended": values.pop("wall_end")}
    ways = {name.removeprefix("ip route "): done for name, done in commands.items() if name.startswith("ip route ")}
    facts = {**values, **gpu_facts(commands["nvidia-smi"], on_gpus), **probe.facts_of(commands)}
    facts |= probe.routes(list(peers), sources, facts["interfaces"], probe.named_devices(sources, ways))
    return json.loads(json.dumps({"clock": clock, "facts": facts}))


def read(answer, node="n"):
    return read_facts(node, answer, SENT_AT, RECEIVED_AT)


def parse(machine, node="n", peers=PEERS):
    return read(answer_of(machine, peers), node)


@pytest.mark.parametrize("case", sorted(path.stem for path in DATA.glob("*.json")))
def test_a_recorded_answer_becomes_these_facts(case):
    recorded = json.loads((DATA / f"{case}.json").read_text())
    found = parse(machine_with(recorded["raw"]), peers=recorded.get("peers", PEERS)).model_dump(mode="json")
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
    facts = parse(machine_with({"commands": commands, "values": {"sources": sources}}), peers=peers)
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
    raw = machine_with({"values": {"wall_start": 1000.0, "wall_end": 1060.0}})
    assert read_facts("n", answer_of(raw), 939.0, 1001.0).clock_offset_s == 60.0


def test_a_slow_shell_makes_the_clock_uncertain_and_not_wrong():
    raw = machine_with({"values": {"wall_start": 1000.0, "wall_end": 1001.0}})
    facts = read_facts("n", answer_of(raw), 940.0, 1001.5)  # the clocks agree; a start-up file slept for a minute
    assert (facts.clock_offset_s, facts.clock_error_s) == (29.75, 30.25)


GPU = answer_of(PLAIN)["facts"]["gpus"][0]
OCCUPANT = {"pid": 4711, "memory_bytes": 9, "user": "alice", "command": "python3", "job": None}
LINK, TORCH = {"name": "a", "mtu": 1500, "up": True}, answer_of(PLAIN)["facts"]["torch"]
NONSENSE = {
    "gpus.0.memory_bytes": [{"gpus": [{**GPU, "memory_bytes": -1}]}, {"gpus": [{**GPU, "memory_bytes": math.nan}]}],
    "gpus": [{"gpus": [GPU, GPU]}, {"gpus": [{**GPU, "uuid": f"GPU-{n}"} for n in range(65)]}, {"gpus": "all"}],
    "gpus.0.occupants": [{"gpus": [{**GPU, "occupants": "all"}]}, {"gpus": [{**GPU, "occupants": [OCCUPANT] * 257}]}],
    "gpus.0.occupants.0.memory_bytes": [{"gpus": [{**GPU, "occupants": [{**OCCUPANT, "memory_bytes": [0] * 9}]}]}],
    "gpus.0.occupants.0.pid": [{"gpus": [{**GPU, "occupants": [{**OCCUPANT, "pid": "4711"}]}]}],
    "gpus.0.occupants.0.user": [{"gpus": [{**GPU, "occupants": [{**OCCUPANT, "user": {}}]}]}],
    "gpu_error": [{"gpu_error": 3}],
    "torch": [{"torch": "2.0.1"}],
    "torch.version": [{"torch": {**TORCH, "version": 2}}],
    "torch.devices": [{"torch": {**TORCH, "devices": True}}],
    "interfaces": [{"interfaces": {}}, {"interfaces": [LINK] * 300}],
    "interfaces.0.mtu": [{"interfaces": [{"name": "a", "up": True}]}],
    "interfaces.0.addresses.0": [{"interfaces": [{**LINK, "addresses": ["zz/8"]}]}],
    "hostname_addresses.0": [{"hostname_addresses": ["a.example"]}],
    "routes.0.source": [{"routes": [{"interface": "a", "source": "here"}]}],
    "rdma": [{"rdma": "mlx5_0"}],
    "rdma.0": [{"rdma": [["mlx5_0"]]}],
    "rdma.0.device": [{"rdma": [{"device": 1, "link_layer": "Ethernet"}]}],
    "memory_bytes": [{"memory_bytes": None}],
    "cores": [{"cores": 0}, {"cores": True}],
    "uid": [{"uid": 1 << 70}],
    "kernel": [{"kernel": None}],
    "hostname": [{"hostname": 7}],
    "workdir": [{"workdir": "../x"}, {"workdir": "/tmp\n/x"}],
}


@pytest.mark.parametrize(("fact", "changes"), [(fact, case) for fact, cases in NONSENSE.items() for case in cases])
def test_nonsense_is_refused_and_names_the_node_and_the_fact(fact, changes):
    answer = answer_of(PLAIN)
    with pytest.raises(ProbeError, match=rf"^v100: its answer makes no sense \({re.escape(fact)}: "):
        read({**answer, "facts": {**answer["facts"], **changes}}, "v100")


@pytest.mark.parametrize("clock", [{"began": math.nan, "ended": 1.0}, {"began": 1.0, "ended": "now"}, None])
def test_a_clock_that_shows_no_time_is_refused(clock):
    with pytest.raises(ProbeError, match=r"^n: its answer makes no sense \((began|ended|clock): "):
        read({**answer_of(PLAIN), "clock": clock})


@pytest.mark.parametrize("torch", ["", "hello", '{"version": NaN', "[1]", "[" * 3000])
def test_a_torch_that_prints_something_else_is_a_torch_that_gave_no_answer(torch):
    facts = parse(machine_with({"commands": {"torch": {"rc": 0, "out": torch, "err": ""}}}))
    assert (facts.torch, facts.torch_error) == (None, "its answer was not readable")


def test_long_words_are_cut():
    assert len(parse(machine_with({"values": {"hostname": "x" * 5000}})).hostname) == MAX_TEXT


def test_the_training_interface_is_the_named_one_then_the_address_then_the_route():
    docker = json.loads((DATA / "docker_and_vpn_beside_eno1.json").read_text())["raw"]
    facts = parse(machine_with(docker))
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
COMMANDS = st.fixed_dictionaries(
    {"rc": st.sampled_from([0, 1, 124]), "out": WORDS | JSON.map(json.dumps), "err": WORDS | st.just("")}
)


@given(st.sampled_from(list(PLAIN["commands"])), COMMANDS)
def test_whatever_a_command_prints_the_host_is_facts_or_a_probe_error(name, done):
    raw = copy.deepcopy(PLAIN)
    raw["commands"][name] = done
    facts_or_error(answer_of(raw))


@given(st.sampled_from(list(answer_of(PLAIN)["facts"])), JSON)
def test_whatever_a_host_answers_it_is_facts_or_a_probe_error(name, value):
    answer = answer_of(PLAIN)
    answer["facts"][name] = value
    facts_or_error(answer)


def facts_or_error(answer):
    try:
        facts = read(answer)
    except ProbeError as error:
        assert str(error).isprintable()
        return
    assert all(text.isprintable() for text in strings(facts.model_dump(mode="json")))
    assert NodeFacts.model_validate_json(facts.model_dump_json()) == facts


@given(JSON)
def test_an_answer_of_any_form_at_all_is_a_probe_error(value):
    with pytest.raises(ProbeError):
        read({"clock": value, "facts": {}})
    with pytest.raises(ProbeError):
        read({"clock": {"began": 1.0, "ended": 1.0}, "facts": value})
