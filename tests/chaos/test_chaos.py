"""A fault of every kind that no other test plays, and no invariant broken; `make chaos` plays all of them, and more."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.lab import lab

from .faults import FAULTS

ROOT = Path(__file__).resolve().parents[2]
TESTED = {
    "kill_rank": "lab/test_jobs.test_whatever_is_killed_nothing_is_left_and_the_first_cause_is_named",
    "kill_launcher": "lab/test_jobs.test_whatever_is_killed_nothing_is_left_and_the_first_cause_is_named",
    "kill_supervisor": "lab/test_jobs.test_whatever_is_killed_nothing_is_left_and_the_first_cause_is_named",
    "kill_keeper_and_supervisor": (
        "remote/test_supervisor.test_what_ranks_daemonised_ends_even_where_supervisor_and_keeper_are_both_killed"
    ),
    "power_off_master": (
        "lab/test_wire.test_a_run_ends_with_the_cause_when_the_masters_host_loses_power_and_stays_away"
    ),
    "parted": "lab/test_wire.test_a_way_that_breaks_between_two_members_ends_the_job_and_names_both",
    "controller_killed_launching": (
        "jobs/test_controller_crash.test_a_run_that_is_killed_at_any_moment_leaves_a_whole_gang_or_none"
    ),
    "controller_killed_following": (
        "lab/test_jobs.test_a_job_outlives_its_killed_controller_and_a_new_one_learns_the_true_exit_code"
    ),
    "controller_killed_collecting": (
        "jobs/test_log_fidelity.test_collects_killed_at_random_moments_lose_and_double_nothing"
    ),
    "cancel": "remote/test_supervisor.test_a_cancel_during_prepare_is_a_cancel",
    "cancel_twice": "lab/test_jobs.test_one_interrupt_detaches_and_a_second_cancels",
    "mixed_exits": (
        "remote/test_supervisor.test_whichever_hosts_succeed_fail_and_echo_the_first_cause_is_the_one_that_failed_by_itself"
    ),
    "rank_dies_of_a_signal": "remote/test_supervisor.test_a_killed_rank_is_the_first_cause_and_nothing_stays",
    "daemons_of_ranks_that_are_done": "remote/test_supervisor.test_what_a_finished_script_left_running_is_ended",
    "workers_that_ignore_all": "remote/test_supervisor.test_ranks_that_ignore_term_and_children_that_daemonise_end_too",
    "time_limit": "remote/test_supervisor.test_the_time_limit_ends_a_job",
    "port_taken": "remote/test_supervisor.test_where_a_stranger_has_the_port_the_ranks_meet_at_another",
    "full_disk": "jobs/test_full_disk.test_a_hosts_full_disk_loses_nothing_that_was_written_and_does_not_stop_the_job",
    "log_truncated": (
        "jobs/test_log_fidelity.test_a_log_that_restarts_while_followed_is_shown_from_its_start_with_a_notice"
    ),
    "collected_over_and_over": "jobs/test_log_fidelity.test_two_collects_at_once_do_no_harm_and_the_second_only_reads",
    "folder_removed": "remote/test_supervisor.test_a_removed_job_folder_ends_the_job",
    "down_of_others": "hosts/test_ownership.test_down_ends_and_removes_the_jobs_of_its_own_home_alone",
}
"""Kinds that a test of their own plays on real processes, and where."""
KINDS = [kind for kind in FAULTS if kind not in TESTED]
SEED = "464"  # one that begins with the kinds that take longest
CELLS = "7"


@pytest.mark.lab
@pytest.mark.timeout(600)
def test_a_fault_of_every_kind_breaks_no_invariant(tmp_path):
    with lab("cluster: probe\nnodes: [{name: a, host: 10.79.0.1}]"):
        pass  # skipped where no lab can stand
    words = ["--kinds", ",".join(KINDS), "--faults", str(len(KINDS)), "--seed", SEED, "--cells", CELLS]
    words += ["--log", str(tmp_path / "events.jsonl")]
    run = subprocess.run([sys.executable, "-m", "tests.chaos", *words], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, f"{run.stdout[-8000:]}\n{run.stderr[-4000:]}"
    assert f"{len(KINDS)} faults of {len(KINDS)} kinds, 0 broken" in run.stdout


@pytest.mark.parametrize("kind", TESTED)
def test_a_kind_that_is_not_played_here_has_a_test_of_its_own(kind):
    file, name = TESTED[kind].split(".")
    assert kind in FAULTS
    assert re.search(rf"^def {name}\(", (ROOT / "tests" / f"{file}.py").read_text(), re.MULTILINE)
