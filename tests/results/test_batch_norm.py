"""Which samples BatchNorm saw together, and what an exact update is then the same as."""

from __future__ import annotations

import pytest
from torch import nn

from orchestrator.results.analyse import analyse
from orchestrator.views import fidelity_words, render_report
from tests.support.run_folders import Host, end, start, step, write_run
from trainer.compute.microbatches import MicroBatches
from trainer.setup import batch_norm_groups
from trainer.shared import parse_settings

NORMED, PLAIN = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), nn.Sequential(nn.Linear(4, 4))
ACCUMULATES = "the update of one process that adds up the gradients of these groups; sync_bn=true sees the whole batch"


def summary_of(folder, groups, *, settings=None, later=()):
    """The summary of a run in which each rank reported these groups. later: shares that shares=auto came to."""
    events = {
        rank: [
            start(rank=rank, **({} if own is None else {"batch_norm_groups": own})),
            *(step(number, 32, 2, 40, 6, 2) for number in range(6)),
            *({"event": "rebalance", "step": 4, "shares": shares, "before": shares, "spread": 0.1} for shares in later),
            end(),
        ]
        for rank, own in enumerate(groups)
    }
    hosts = [Host(f"h{rank}") for rank in range(len(groups))]
    return analyse(write_run(folder, hosts, events, settings={"warmup_steps": 0, **(settings or {})}))


def groups(shares, rank, model=NORMED, accumulate=0, caps=None, **settings):
    pairs = {key: str(value) for key, value in settings.items()}
    parts = MicroBatches(accumulate, caps or [None] * len(shares), together=False)
    return batch_norm_groups(model, parse_settings("resnet152_cifar", pairs), shares, parts.sizes(shares, rank))


# ---- what a rank reports --------------------------------------------------------------------------------------------


def test_a_rank_reports_its_part_or_its_micro_batches():
    assert groups((183, 73), 0) == [(183, 1)]
    assert groups((183, 73), 0, caps=[64, None]) == [(61, 3)]
    assert groups((183, 73), 1, accumulate=2) == [(37, 1), (36, 1)]
    assert groups((256, 0), 1) == []
    assert groups((183, 73), 1, sync_bn=True) == [(256, 1)]


def test_without_batch_norm_and_where_a_process_cuts_the_batch_by_itself_nothing_is_reported():
    assert groups((183, 73), 0, model=PLAIN) is None
    assert groups((256,), 0, strategy="dp") is None


# ---- what the report says of it -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        ([[[73, 1]], [[183, 1]]], "BatchNorm saw groups of 183 and 73"),
        ([[[128, 1]], [[128, 1]]], "BatchNorm saw groups of 128 and 128"),
        ([[[64, 3]], [[64, 1]], [[3, 1]]], "BatchNorm saw groups of 4 x 64 and 3"),
        ([[[256, 1]], []], "BatchNorm saw the whole batch of 256 at once"),
        ([[[size, 1]] for size in range(9, 1, -1)], "BatchNorm saw groups of 9 down to 2, 8 in all"),
    ],
)
def test_the_groups_are_named(tmp_path, groups, words):
    assert summary_of(tmp_path / "run", groups).batch_norm.words == words


def test_exact_is_said_to_be_what_it_is(tmp_path):
    apart = summary_of(tmp_path / "a", [[[73, 1]], [[183, 1]]])
    assert fidelity_words(apart) == f"exact; BatchNorm saw groups of 183 and 73: {ACCUMULATES}"
    assert fidelity_words(apart) in render_report(apart)
    together = summary_of(tmp_path / "b", [[[256, 1]], [[256, 1]]], settings={"sync_bn": True})
    assert fidelity_words(together) == (
        "exact; BatchNorm saw the whole batch of 256 at once: the update of one process with the whole batch"
    )
    half = summary_of(tmp_path / "c", [[[73, 1]], [[183, 1]]], settings={"fidelity": "half"})
    assert fidelity_words(half) == "half; BatchNorm saw groups of 183 and 73"


def test_a_change_in_mid_run_is_said(tmp_path):
    moved = summary_of(tmp_path / "run", [[[128, 1]], [[128, 1]]], later=[[100, 156], [73, 183]])
    assert moved.batch_norm.words == (
        "BatchNorm saw groups of 128 and 128; shares=auto changed them in mid-run, in the end to parts of 183 and 73, "
        "cut smaller where memory asks"
    )


@pytest.mark.parametrize("odd", [None, "73", [[73]], [[73, -1]], [[True, 1]], [[73, 1.5]], [[1, 1]] * 2000])
def test_what_a_rank_does_not_report_or_reports_oddly_is_not_guessed(tmp_path, odd):
    found = summary_of(tmp_path / "run", [[[73, 1]], odd])
    assert found.batch_norm is None
    assert fidelity_words(found) == "exact"
    local = found.model_copy(update={"settings": {**found.settings, "fidelity": "local"}})
    assert fidelity_words(local).startswith("local: two ranks lost 0.1 (8 steps) to 0.25 points (32) of accuracy")
