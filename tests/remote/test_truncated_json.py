"""What a supervisor reports fits: into the room kept on a full disk, and into one line of the hub."""

import json

import pytest

from orchestrator.remote.host_state import MOST_REPORTED, HostState
from orchestrator.remote.layout import RECORD_BYTES, RESERVE_BYTES, WorkFolder, fitted, write_final_record
from orchestrator.remote.link import MAX_LINE
from orchestrator.remote.messages import failure

LONG = "\U0001f642" * 500
"""A line as long as any that a log's end gives; each character takes 12 bytes in JSON."""


def long_failure(rank):
    return {**failure("rank", "b", f"{rank} {LONG}"), "rank": rank, "log_line": LONG}


def worst_record(ranks):
    failures = [long_failure(rank) for rank in range(MOST_REPORTED)]
    of_rank = {"pid": 4194303, "wrapper": 4194303, "started": 1.7e9 + 1 / 3, "ended": 1.7e9 + 1 / 3, "cause": None}
    return {
        "state": "failed", "job": "j" * 128, "node": "n" * 64, "failures": failures,
        "leftovers": [LONG] * 300, "first_failure": long_failure(0), "ended": 1.7e9,
        "ranks": {str(rank): {**of_rank, "exit_code": rank % 2, "signal": None} for rank in range(ranks)},
        "dropped": {f"node-{n}": {str(n): 10**12} for n in range(2000)},
    }  # fmt: skip


@pytest.mark.parametrize("ranks", [1, 16, 1024])
def test_the_last_word_fits_into_its_reserve_whatever_was_printed(tmp_path, ranks):
    job = WorkFolder(str(tmp_path)).job("j")
    job.root.mkdir(parents=True)
    record = worst_record(ranks)
    write_final_record(job, record)
    assert job.agent.stat().st_size <= RECORD_BYTES < RESERVE_BYTES
    kept = job.read_agent()
    assert kept["failures"][0]["reason"].startswith("0 \U0001f642")
    assert (kept["state"], kept["job"], kept["first_failure"]["rank"]) == ("failed", "j" * 128, 0)
    assert (
        len(record["failures"]) == MOST_REPORTED and record["first_failure"]["log_line"] == LONG
    )  # the original is whole


def test_what_fits_is_reported_as_it_is():
    record = {"state": "failed", "failures": [long_failure(0)], "ranks": {"0": {"exit_code": 0}}}
    assert fitted(record, 1 << 20) == record
    assert fitted(record, len(json.dumps(record))) == record


def test_a_members_status_is_one_line_of_the_hub_whatever_was_printed(tmp_path):
    node = {"name": "b", "rank_numbers": list(range(8)), "gpu_uuids": [], "env": {}, "is_master": False, "token": "00"}
    member = HostState(WorkFolder(str(tmp_path)).job("j"), node, {}, lambda: None)
    member.failures = [long_failure(rank) for rank in range(20)]
    member.leftovers = [LONG] * 20
    assert len(json.dumps(member.status())) < MAX_LINE - 200  # its MAC stands before it
    assert member.status()["failures"][0]["rank"] == 0
