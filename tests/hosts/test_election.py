from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.errors import ConnectError, HostError, HostsError
from orchestrator.hosts import Node, Paced, Route, elect, load_inventory
from orchestrator.hosts.facts import Interface
from tests.support.probed_hosts import facts, gpu

INVENTORY = Path(__file__).parents[2] / "inventory"
MIB = 1 << 20
MASTERS = {
    "a2000_v100": "v100",
    "a16_v100": "v100",
    "a2000_a2000": "a2000-1",
    "a16_a16_a2000": "a16",
    "3090x2": "rtx3090",
}
# As drivers report them: the V100 by an older and a newer one, the cards with GDDR less what their ECC keeps.
REPORTED_MIB = {"a2000": (12282, 11514), "v100": (16384, 16160), "a16": (15356, 15356)}


def found(*memory_mib, **changes):
    gpus = tuple(gpu(index=i, uuid=f"GPU-{i}", memory_bytes=size * MIB) for i, size in enumerate(memory_mib))
    return facts(**{"gpus": gpus, "routes": (), "interfaces": (), **changes})


def node(name, host, **changes):
    return Node(**{"name": name, "host": host, **changes})


def down(name):
    return ConnectError(name, "no answer within 20 s")


@pytest.mark.parametrize("lab", ["", "lab_"])
@pytest.mark.parametrize(("study", "master"), MASTERS.items())
def test_the_studies_masters_win_on_labels_alone(study, master, lab):
    nodes = load_inventory(INVENTORY / f"{lab}{study}.yaml").nodes
    assert elect(nodes, {one.name: found() for one in nodes}).master == master


@pytest.mark.parametrize("driver", [0, 1])
@pytest.mark.parametrize("study", ["a2000_v100", "a16_v100"])
def test_the_studies_masters_win_on_what_drivers_report(study, driver):
    nodes = load_inventory(INVENTORY / f"{study}.yaml").nodes
    assert elect(nodes, {one.name: found(REPORTED_MIB[one.name][driver]) for one in nodes}).master == "v100"


@pytest.mark.parametrize(
    ("reported_mib", "sold_gib"),
    [(15356, 16), (16160, 16), (11514, 12), (11019, 11), (46068, 48), (143771, 141), (0, 0)],
)
def test_memory_counts_as_a_card_is_sold(reported_mib, sold_gib):
    (seen,) = elect([node("a", "10.0.0.1")], {"a": found(reported_mib)}).candidates
    assert seen.gpu_memory_bytes == sold_gib << 30


REASONS = {
    "bandwidth": (
        [node("a", "10.0.0.1", bandwidth_bps=1e9), node("b", "10.0.0.2", bandwidth_bps=2.5e9)],
        "b: more bandwidth than a (2.5Gbps against 1Gbps)",
    ),
    "memory": (
        [
            node("a2000", "192.168.1.41", gpu="RTX A2000", gpus=1, bandwidth_bps=2.5e9),
            node("v100", "192.168.1.42", gpu="Tesla V100-16GB", gpus=1, bandwidth_bps=2.5e9),
        ],
        "v100: same bandwidth as a2000 (2.5Gbps), more GPU memory (16.0GiB against 12.0GiB)",
    ),
    "number": (
        [node("a", "10.0.0.1", gpu="A16", gpus=1), node("b", "10.0.0.2", gpu="A16", gpus=2)],
        "b: same GPU memory as a (16.0GiB), more GPUs (2 against 1)",
    ),
    "address, by number and not by letter": (
        [node("a", "10.0.0.10"), node("b", "10.0.0.9")],
        "b: lower address than a (10.0.0.9 against 10.0.0.10)",
    ),
    "a number before a name": (
        [node("a", "a.lab"), node("b", "10.0.0.9")],
        "b: lower address than a (10.0.0.9 against none known)",
    ),
    "name": (
        [node("b", "127.0.0.1"), node("a", "127.0.0.1")],
        "a: equal to b, first by name",
    ),
    "address, as in the study": (
        [
            node("a16", "192.168.1.52", gpu="A16", gpus=1, bandwidth_bps=2.5e9),
            node("v100", "192.168.1.51", gpu="Tesla V100-16GB", gpus=1, bandwidth_bps=2.5e9),
        ],
        "v100: same bandwidth as a16 (2.5Gbps), same GPU memory (16.0GiB), as many GPUs (1), "
        "lower address (192.168.1.51 against 192.168.1.52)",
    ),
    "one": ([node("a", "10.0.0.1")], "a: the only usable host"),
    "pinned": (
        [node("a", "10.0.0.1", master=True), node("b", "10.0.0.2", bandwidth_bps=1e9)],
        "a: pinned as master",
    ),
}


@pytest.mark.parametrize("rule", REASONS)
def test_the_reason_names_the_rule_that_decided_and_the_runner_up(rule):
    nodes, reason = REASONS[rule]
    assert elect(nodes, {one.name: found() for one in nodes}).reason == reason


def test_a_pinned_host_that_is_down_is_passed_over_and_the_reason_says_so():
    nodes = [node("a", "10.0.0.1", master=True), node("b", "10.0.0.2"), node("c", "10.0.0.3")]
    election = elect(nodes, {"a": down("a"), "b": found(), "c": found()})
    assert election.master == "b"
    assert election.reason.endswith("(10.0.0.2 against 10.0.0.3) (pinned, but unusable: a)")
    assert [(one.name, one.usable, one.position) for one in election.candidates] == [
        ("b", True, 1),
        ("c", True, 2),
        ("a", False, None),
    ]
    assert "no answer" in election.candidates[2].why_not


def test_without_a_usable_host_every_hosts_reason_is_given():
    nodes = [node("a", "10.0.0.1"), node("b", "10.0.0.2")]
    with pytest.raises(HostsError, match=r"(?s)a: no answer.*b: not looked at yet") as caught:
        elect(nodes, {"a": down("a")})
    assert caught.value.exit_code == 3


def test_the_speed_of_the_link_counts_where_no_bandwidth_is_declared():
    link = Interface(name="eno1", addresses=("10.0.0.2/24",), mtu=1500, speed_bps=1e10, up=True)
    fast = found(interfaces=(link,), routes=(Route(peers=("10.0.0.1",), interface="eno1", source="10.0.0.2"),))
    nodes = [node("a", "10.0.0.1", bandwidth_bps=2.5e9), node("b", "b.lab")]
    election = elect(nodes, {"a": found(), "b": fast})
    assert election.master == "b"
    assert election.candidates[0].bandwidth_bps == 1e10
    assert election.candidates[0].address == "10.0.0.2"


def test_a_paced_host_counts_as_the_gpu_it_stands_for():
    paced = node("a", "10.0.0.1", gpu="RTX A2000", paced=Paced(samples_per_s=333, memory_bytes=24 << 30))
    (seen,) = elect([paced], {"a": found(81559)}).candidates
    assert (seen.gpu_memory_bytes, seen.gpus) == (24 << 30, 1)


def test_a_host_kept_to_its_cpu_has_no_use_for_its_gpus():
    (seen,) = elect([node("a", "10.0.0.1", device="cpu")], {"a": found(81559, 81559)}).candidates
    assert (seen.gpu_memory_bytes, seen.gpus) == (0, 0)


@pytest.mark.parametrize(
    ("label", "gib"),
    [
        ("Tesla V100-16GB", 16),
        ("Tesla V100-SXM2-32GB", 32),
        ("RTX A2000", 12),
        ("RTX A2000 6GB", 6),
        ("A16", 16),
        ("NVIDIA GeForce RTX 3090", 24),
        ("NVIDIA H100 80GB HBM3", 80),
        ("H100", 80),
        ("NVIDIA GeForce RTX 2080 Ti", 11),
        ("RTX3090", 24),
        ("some card", 0),
    ],
)
def test_a_label_stands_for_its_memory(label, gib):
    (seen,) = elect([node("a", "10.0.0.1", gpu=label)], {"a": found()}).candidates
    assert seen.gpu_memory_bytes == gib << 30


def clusters():
    one = st.builds(
        node,
        st.just("any"),
        st.sampled_from(["10.0.0.1", "10.0.0.2", "10.0.0.10", "x.lab", "2001:db8::1"]),
        gpu=st.sampled_from([None, "A16", "RTX A2000", "Tesla V100-16GB"]),
        gpus=st.sampled_from([None, 0, 1, 2]),
        bandwidth_bps=st.sampled_from([None, 1e9, 2.5e9]),
        master=st.booleans(),
    )
    answers = st.sampled_from([HostError("any", "down"), found(), found(15356), found(16384, 16384)])
    return st.lists(st.tuples(one, answers), min_size=1, max_size=6).map(
        lambda pairs: [(one.model_copy(update={"name": f"n{i}"}), answer) for i, (one, answer) in enumerate(pairs)]
    )


@given(clusters(), st.randoms(use_true_random=False))
def test_the_choice_is_usable_and_independent_of_the_inventorys_order(cluster, random):
    answers = {one.name: answer for one, answer in cluster}
    usable = {name for name, answer in answers.items() if not isinstance(answer, HostError)}
    nodes = [one for one, _ in cluster]
    shuffled = random.sample(nodes, len(nodes))
    if not usable:
        with pytest.raises(HostsError):
            elect(nodes, answers)
        return
    election = elect(nodes, answers)
    assert election == elect(shuffled, answers)
    assert election.master in usable
    assert {one.name for one in election.candidates} == set(answers)
    pinned = {one.name for one in nodes if one.master} & usable
    assert not pinned or election.master in pinned
