"""The trainer's command line: rendered once, from what a person wrote and what the plan has decided."""

from dataclasses import replace

import pytest

from orchestrator.hosts import elect
from orchestrator.planning import Draft, choose_carrier, place, split_batch_of, trainer_arguments
from tests.support.plans import CODE, by_hand, pair
from trainer.shared import SettingsError, settings_from


def draft(**chosen):
    nodes, found = pair()
    request = by_hand(**chosen)
    placement = place(nodes, found, replace(elect(nodes, found), master="n41"), request)
    return Draft("lab", "j-1", "", CODE, request, placement, choose_carrier(placement.nodes, request))


def arguments(drawn):
    return trainer_arguments(drawn, "cuda", drawn.split.settings)


def test_what_a_person_wrote_stays_as_it_is_written():
    assert arguments(draft(lr="1e-2", device="cuda")) == ("--lr=1e-2", "--device=cuda", "--backend=nccl")


def test_what_the_plan_decides_takes_the_place_of_what_was_written_and_stands_once():
    drawn = draft(local_steps="0", fidelity="local").settled({"local_steps": 8, "local_overlap": 2}, "because")
    ours = ("--device=cuda", "--backend=nccl", "--local_steps=8", "--local_overlap=2")
    assert arguments(drawn) == ("--fidelity=local", *ours)
    assert (drawn.training.local_steps, drawn.training.overlap, drawn.notes) == (8, 2, ("because",))


def test_a_split_by_speed_is_sent_in_samples_and_kept_as_a_policy():
    drawn = draft(shares="measured", batch="6", speeds="n41:0=0+1,n42:0=0+2")
    drawn = drawn.with_split(split_batch_of(drawn.training, drawn.placement.ranks, {}))
    assert (drawn.shares, drawn.training.shares) == ((4, 2), "measured")
    assert arguments(drawn)[-2:] == ("--shares=n41:0=4,n42:0=2", "--speeds=n41:0=0+1,n42:0=0+2")
    assert sum(word.startswith("--shares=") for word in arguments(drawn)) == 1


def test_a_decision_that_the_trainer_would_refuse_is_none():
    with pytest.raises(SettingsError, match="goes with strategy"):
        draft(fidelity="half").settled({"strategy": "allgather"}, "")


def test_settings_are_read_back_from_an_older_or_a_newer_record():
    found = settings_from("mnist_lenet", {"batch": 96, "lr": 1, "of_a_newer_orch": True})
    assert (found.batch, found.lr, found.epochs) == (96, 1, 10)
    for wrong in ({"batch": "96"}, {"batch": 0}, {"strategy": "of_a_newer_orch"}):
        with pytest.raises(SettingsError):
            settings_from("mnist_lenet", wrong)
