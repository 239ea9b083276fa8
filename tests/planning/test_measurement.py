"""What a host reports of its speed alone: read back, bounded, and in words."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from orchestrator.planning import BlockTimes, Measurement, Profile
from orchestrator.views import blocks_words

WHOLE = {"samples": [2, 4], "step_ms": [1, 2], "fixed_ms": 0.5, "sample_ms": 1, "largest": 4, "forward_ms": 1}
WHOLE |= {"optim_ms": 1}
BLOCKS = {"samples": [8, 16], "stretches": 2, "of_whole": 1.04}
BLOCKS |= {"forward": [[0.1, 2], [0, 1]], "backward": [[0.1, 3], [0, 1]], "weights": [[0.2, 1], [0, 1]]}


def test_blocks_are_read_back_as_they_were_written():
    found = Measurement.model_validate({**WHOLE, "blocks": BLOCKS})
    assert (found.blocks.count, found.blocks.fixed_ms) == (2, pytest.approx(0.4))
    kind = {"exp": "e", "model": "m", "data": "d", "amp": "none", "device": "cpu", "gpu": None, "device_name": "c"}
    profile = Profile(**kind, torch=None, driver=None, ranks=1, **dict(found), schema=1, node="a", created="now")
    assert Profile.model_validate_json(profile.model_dump_json(by_alias=True)) == profile


def test_a_profile_of_an_older_orch_has_no_blocks():
    assert Measurement.model_validate(WHOLE).blocks is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"forward": [[0.1, 2]]},
        {"forward": [[0.1, -2], [0, 1]]},
        {"forward": [[0.1, float("inf")], [0, 1]]},
        {"samples": [8]},
        {"forward": [], "backward": [], "weights": []},
        {task: [[0, 1]] * 2000 for task in ("forward", "backward", "weights")},
    ],
)
def test_what_no_host_can_have_measured_is_refused(wrong):
    with pytest.raises(ValidationError):
        Measurement.model_validate({**WHOLE, "blocks": {**BLOCKS, **wrong}})


def test_one_line_says_what_is_known_of_all_hosts_blocks():
    one = BlockTimes.model_validate(BLOCKS)
    assert blocks_words([]) == ""
    assert blocks_words([one, one]) == "blocks: 2 measured, fixed 0.4 ms a micro-batch"
    quick = BlockTimes.model_validate({**BLOCKS, "weights": [[0, 1], [0, 1]], "stretches": 1})
    assert blocks_words([one, quick]) == "blocks: 2 measured in 1 group, fixed 0.2 to 0.4 ms a micro-batch"
