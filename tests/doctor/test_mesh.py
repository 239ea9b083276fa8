"""Who may begin with what: the conductor alone, fed with hosts' words; no host is there."""

from __future__ import annotations

import json
from itertools import permutations

import pytest

from orchestrator.doctor import Conductor, Pair, links, pairs, slots
from tests.support.examined_hosts import NAMES, host

OPEN = {"kind": "open", "words": "", "round_trip_s": 0.001}


def sent(to, bits_per_s, trip_s=None):
    return {"sent": to, "round_trip_s": trip_s, "bits_per_s": bits_per_s}


class Stage:
    """A conductor and what it has told its hosts."""

    def __init__(self, names=NAMES):
        self.conductor = Conductor([host(name) for name in names])
        self.names = names

    def told(self, name):
        """All that waits for this host to be read."""
        lines = self.conductor._lines[name]
        return [json.loads(line) if (line := lines.get_nowait()) else None for _ in range(lines.qsize())]

    def listen(self, *names):
        for number, name in enumerate(names or self.names):
            self.conductor.take(name, {"port": 4000 + number, "firewall": "ufw"})

    def reach(self, *names, **others):
        for name in names or self.names:
            ways = {other: others.get(f"{name}_{other}", OPEN) for other in self.names if other != name}
            self.conductor.take(name, {"reached": ways})


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 5, 8, 9])
def test_every_way_has_its_turn_and_no_host_is_in_two_transfers_at_once(count):
    names = [f"n{number}" for number in range(count)]
    found = slots(links(names))
    assert len(found) <= 2 * max(0, count - 1 + count % 2)
    assert sorted(way for slot in found for way in slot) == sorted(permutations(names, 2))
    for slot in found:
        busy = [name for way in slot for name in way]
        assert len(busy) == len(set(busy))


@pytest.mark.parametrize("count", [33, 128])
def test_of_many_hosts_each_tries_the_master_and_few_others(count):
    names = [f"n{number}" for number in range(count)]
    found = links(names, "n5")
    assert len(found) == len(set(found)) < 20 * count
    tried = {name: {end for start, end in found if start == name} for name in names}
    assert tried["n5"] == {*names} - {"n5"} and all("n5" in ends for name, ends in tried.items() if name != "n5")
    assert all((end, start) in found for start, end in found)
    assert tried["n0"] >= {"n1", "n2", "n4", "n8", "n16", "n32"}
    for slot in slots(found):
        assert len({name for way in slot for name in way}) == 2 * len(slot)


def test_nobody_connects_before_all_listen_and_nobody_sends_before_all_have_connected():
    stage = Stage()
    stage.listen("a2000", "v100")
    assert [stage.told(name) for name in NAMES] == [[], [], []]
    stage.conductor.take("a16", {"port": 4002, "firewall": "nft"})
    (order,) = stage.told("a2000")
    assert order["reach"].keys() == {"v100", "a16"}
    assert order["reach"]["a16"] == {
        "address": "192.168.1.43",
        "port": 4002,
        "interface": "eno1",
        "firewall": "nft",
        "ssh_port": 22,
    }
    assert [len(stage.told(name)) for name in ("v100", "a16")] == [1, 1]
    stage.reach("a2000", "v100")
    assert [stage.told(name) for name in NAMES] == [[], [], []]
    stage.reach("a16")
    assert sum(len(stage.told(name)) for name in NAMES) == 1  # of three hosts one pair at a time


def test_a_host_that_names_others_than_it_was_asked_about_disturbs_nobody():
    stage = Stage(("a2000", "v100"))
    stage.listen()
    stage.conductor.take("a2000", {"reached": {"v100": OPEN, "a2000": OPEN, "ghost": OPEN}})
    stage.reach("v100")
    stage.conductor.take("a2000", sent("v100", 2.4e9))
    stage.conductor.take("v100", sent("a2000", 2.4e9))
    assert {(pair.start, pair.end) for pair in stage.conductor.found().pairs} == {*permutations(stage.names, 2)}
    assert [stage.told(name)[-1] for name in stage.names] == [None, None]


def test_what_was_measured_stands_beside_the_way_and_then_it_is_over():
    stage = Stage(("a2000", "v100"))
    stage.listen()
    stage.reach()
    for name, other in (("a2000", "v100"), ("v100", "a2000")):
        assert stage.told(name)[-1] == {"send": other, "seconds": pairs.TRANSFER_S}
        stage.conductor.take(name, sent(other, 2e9 if name == "a2000" else None))
    assert [stage.told(name)[-2:] for name in ("a2000", "v100")] == [[{"over": 1}, None]] * 2
    assert stage.conductor.found().pairs == (
        Pair("a2000", "v100", "open", round_trip_s=0.001, bits_per_s=2e9),
        Pair("v100", "a2000", "open", round_trip_s=0.001),
    )


def test_a_way_that_seems_slow_is_measured_again_alone_and_the_best_counts():
    stage = Stage(("a2000", "v100"))
    stage.listen()
    stage.reach()
    stage.conductor.take("a2000", sent("v100", 0.3e9, 0.0005))
    stage.conductor.take("v100", sent("a2000", 2e9, 0.002))
    assert stage.told("a2000")[-1] == {"send": "v100", "seconds": pairs.TRANSFER_S}
    stage.conductor.take("a2000", sent("v100", 2.1e9, 0.004))
    assert stage.told("v100")[-2:] == [{"over": 1}, None]
    assert [(pair.round_trip_s, pair.bits_per_s) for pair in stage.conductor.found().pairs] == [
        (0.0005, 2.1e9),
        (0.001, 2e9),
    ]


def test_a_way_that_stays_slow_is_not_measured_for_ever():
    stage = Stage(("a2000", "v100"))
    stage.listen()
    stage.reach()
    for name, other in (("a2000", "v100"), ("v100", "a2000"), ("a2000", "v100"), ("v100", "a2000")):
        stage.conductor.take(name, sent(other, 0.3e9))
    assert stage.told("a2000")[-2:] == [{"over": 1}, None]


def test_over_a_way_that_is_not_open_nothing_is_sent():
    stage = Stage(("a2000", "v100"))
    stage.listen()
    stage.reach(a2000_v100={"kind": "refused", "words": "connection refused", "opens": "sudo ufw"})
    assert stage.told("v100")[-1] == {"send": "a2000", "seconds": pairs.TRANSFER_S}
    stage.conductor.take("v100", sent("a2000", 2e9))
    assert [stage.told("a2000")[-2:]] == [[{"over": 1}, None]]
    assert stage.conductor.found().pairs[0] == Pair("a2000", "v100", "refused", "connection refused", "sudo ufw")


def test_who_leaves_is_waited_for_no_more():
    stage = Stage()
    stage.listen("a2000", "v100")
    stage.conductor.left("a16")
    assert [order["reach"].keys() for order in stage.told("a2000")] == [{"v100"}]
    stage.told("v100")
    stage.conductor.take("a2000", {"reached": {"v100": OPEN}})
    stage.conductor.left("v100")
    assert stage.told("a2000") == [{"over": 1}, None]
    assert {pair.kind for pair in stage.conductor.found().pairs if "a16" in (pair.start, pair.end)} == {"not tried"}


def test_who_is_late_is_left_out(monkeypatch):
    monkeypatch.setattr(pairs, "LISTEN_S", 0.0)
    stage = Stage()
    stage.listen("a2000", "v100")
    stage.conductor.take("a2000", {})  # time passes
    assert [order["reach"].keys() for order in stage.told("a2000")] == [{"v100"}]
    assert stage.told("a16") == []


def test_who_listened_and_is_late_to_connect_is_sent_nothing(monkeypatch):
    stage = Stage()
    stage.listen("a2000", "v100")
    monkeypatch.setattr(pairs, "REACH_S", 0.0)
    stage.conductor.take("a16", {"port": 4002, "firewall": "ufw"})
    stage.reach("a2000", "v100")
    stage.conductor.take("a2000", {})  # time passes
    told = [order for name in NAMES for order in stage.told(name) if order]
    while orders := [order for order in told if "send" in order]:
        assert [order["send"] for order in orders] in (["v100"], ["a2000"])
        start = "a2000" if orders[0]["send"] == "v100" else "v100"
        stage.conductor.take(start, sent(orders[0]["send"], 2e9))
        told = [order for name in NAMES for order in stage.told(name) if order]
    assert told == [{"over": 1}] * 3


def test_who_cannot_listen_is_named_with_its_reason_and_the_others_go_on():
    stage = Stage()
    stage.listen("a2000", "v100")
    stage.conductor.take("a16", {"closed": "Cannot assign requested address\x1b[2J"})
    assert [order["reach"].keys() for order in stage.told("v100")] == [{"a2000"}]
    assert stage.conductor.found().closed == {"a16": "Cannot assign requested address"}


NONSENSE = [
    {"port": "4000", "firewall": "ufw"},
    {"port": 1 << 16, "firewall": "ufw"},
    {"port": 4000},
    {"reached": {"v100": {"kind": "fine"}}},
    {"reached": {"v100": {"kind": "open", "round_trip_s": -1}}},
    {"reached": {"v100": {"kind": "open", "round_trip_s": "1"}}},
    {"reached": []},
    {"sent": "v100"},
    {"sent": "nobody", "round_trip_s": None, "bits_per_s": 1e9},
    {"sent": ["v100"], "round_trip_s": None, "bits_per_s": 1e9},
]


@pytest.mark.parametrize("word", NONSENSE)
def test_a_word_that_makes_no_sense_is_refused(word):
    stage = Stage()
    with pytest.raises((ValueError, TypeError, KeyError, AttributeError)):
        stage.conductor.take("a2000", word)
