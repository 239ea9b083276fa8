"""Which hosts `--hosts` takes of more than it needs: by their speed for this job, else by their GPUs' memory."""

from __future__ import annotations

import pytest

from orchestrator.forecast import by_memory, by_speed
from orchestrator.hosts import Paced, elect
from orchestrator.planning import ranked
from tests.support.plans import RESNET, SCRIPT, by_hand, host, node, plan
from tests.support.probed_hosts import GIB, gpu

NUMBERS = (41, 42, 43)
NAMES = ["n41", "n42", "n43"]


def made(request, **changes):
    """Three hosts. changes: by name, what is different of its inventory entry."""
    nodes = [node(number, **changes.get(f"n{number}", {})) for number in NUMBERS]
    return plan(nodes, {f"n{number}": host(number, peers=NUMBERS) for number in NUMBERS}, request)


def paced(speed, **more):
    return {"paced": Paced(samples_per_s=speed, **more)}


def test_the_fastest_for_this_job_go_first():
    worth = by_speed(made(RESNET, n41=paced(100), n42=paced(900), n43=paced(300)), {})
    assert (
        ranked(NAMES, worth, None) == ["n42", "n43", "n41"]
        and worth.words == "the fastest alone by the inventory's pace"
    )
    assert worth.figures["n42"] == pytest.approx(900)
    assert ranked(NAMES, worth, "n41") == ["n41", "n42", "n43"]  # but for a pinned master


def test_all_ranks_of_a_host_count():
    worth = by_speed(made(RESNET, n41=paced(400), n42={**paced(300), "ranks": 2}, n43=paced(500)), {})
    assert ranked(NAMES, worth, None) == ["n42", "n43", "n41"]


def test_speeds_come_from_the_catalogue_and_by_hand_too():
    labels = {"n41": {"gpu": "RTX A2000"}, "n42": {"gpu": "Tesla V100-16GB"}, "n43": paced(1)}
    worth = by_speed(made(RESNET, **labels), {})
    assert ranked(NAMES, worth, None) == ["n42", "n41", "n43"]
    assert worth.words == "the fastest alone by the hardware catalogue and the inventory's pace"
    told = by_speed(made(by_hand(speeds="n41:0=0+1,n42:0=0+3,n43:0=0+2", batch="64")), {})
    assert (
        ranked(NAMES, told, None) == ["n41", "n43", "n42"] and told.words == "the fastest alone by the setting `speeds`"
    )


@pytest.mark.parametrize(
    ("request_", "changes"),
    [(SCRIPT, {}), (RESNET, {"n42": {"gpu": "Radeon"}}), (RESNET, {"n42": paced(9, memory_bytes=1 << 20)})],
    ids=["a script of which nothing is known", "a card of which nothing is known", "one that no sample fits into"],
)
def test_where_one_speed_is_not_known_none_counts(request_, changes):
    assert by_speed(made(request_, **{name: paced(5) for name in NAMES} | changes), {}) is None


def test_then_the_memory_of_all_gpus_of_a_host_counts_as_it_is_sold():
    found = {
        "n41": host(41, gpus=1),
        "n42": host(42, gpus=2),
        "n43": host(43).model_copy(update={"gpus": (gpu(memory_bytes=15 * GIB, uuid="GPU-43-0"),)}),
    }
    worth = by_memory(elect([node(number) for number in NUMBERS], found).candidates)
    assert ranked(NAMES, worth, None) == ["n42", "n41", "n43"] and worth.words == "those with the most GPU memory"
    assert worth.figures["n41"] == worth.figures["n43"]


def test_and_then_their_order():
    nodes = [node(number, device="cpu") for number in NUMBERS]
    worth = by_memory(elect(nodes, {f"n{number}": host(number, gpus=0) for number in NUMBERS}).candidates)
    assert ranked([*reversed(NAMES)], worth, None) == ["n43", "n42", "n41"] and worth.words == "the first in order"
