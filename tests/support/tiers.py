"""Three tiers of tests, and the CPU time that each folder of them took.

`pytest` without a path runs the first tier: all that judges values, and one real run for each promise. `pytest --rest`
runs the second, and again the properties, with more examples of each; with THOROUGH=1 the third, too. A path or a name
runs all of its tests.

A run of a whole tier names each folder that took more CPU seconds than its budget in tests/data/test_costs.json, scaled
by the speed of this machine. It does not fail for it: what else runs on a machine changes these seconds. The same file
lists the files that take longest, which begin first, so that none of them runs by itself at the end. BUDGETS=write
renews both; COSTS=FILE writes the seconds of each test.
"""

from __future__ import annotations

import json
import os
import resource
import time
from collections import defaultdict
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

COSTS = Path(__file__).parents[1] / "data" / "test_costs.json"
SECOND = {
    "tests/chaos/": "faults by a seed",
    "tests/cli/test_other_systems": "every module of the controller, imported anew",
    "tests/cli/test_readme.py::test_a_scheduler": "scripts of the docs that take long",
    "tests/cli/test_readme.py::test_the_script_that": "scripts of the docs that take long",
    "tests/cli/test_top_over_ssh": "two jobs, two connections",
    "tests/cli/test_wait.py::test_a_host_that_goes_away": "a queue, ticket by ticket",
    "tests/cli/test_wait.py::test_a_limit_ends": "a queue, ticket by ticket",
    "tests/cli/test_wait.py::test_an_attempt": "a queue, ticket by ticket",
    "tests/cli/test_wait.py::test_cancel": "a queue, ticket by ticket",
    "tests/cli/test_wait.py::test_ctrl_c": "a queue, ticket by ticket",
    "tests/cli/test_why": "all of `orch why`, step by step",
    "tests/cuda/test_cuda_make_gpu": "all of `make gpu`",
    "tests/cuda/test_cuda_standin.py::test_its_server": "the stand-in itself",
    "tests/cuda/test_cuda_strategies": "every strategy on the stand-in",
    "tests/cuda/test_cuda_time_line": "every kernel of a step",
    "tests/doctor/test_smoke.py::test_what_hangs": "timeouts",
    "tests/forecast/test_plan_command": "searches of whole clusters",
    "tests/hosts/test_ownership.py::test_a_rebuilt": "a rebuilt home",
    "tests/hosts/test_probe.py::test_a_torch": "servers that are slow",
    "tests/hosts/test_probe.py::test_each": "servers that are slow",
    "tests/integrations/test_torchx.py::test_a_job_that": "ends of jobs, by another command",
    "tests/jobs/test_controller_crash": "the controller killed at each step",
    "tests/jobs/test_full_disk": "disks that fill",
    "tests/jobs/test_gauge.py::test_of_more": "more jobs than a screen holds",
    "tests/jobs/test_handover.py::test_a_disk": "disks that fill",
    "tests/jobs/test_handover.py::test_a_full": "disks that fill",
    "tests/jobs/test_handover.py::test_a_start": "kills while files are handed over",
    "tests/jobs/test_handover.py::test_it_may": "files handed over to other hosts",
    "tests/jobs/test_handover.py::test_kept": "files handed over twice",
    "tests/jobs/test_handover.py::test_what_cannot": "files handed over twice",
    "tests/jobs/test_handover.py::test_what_is_shipped": "files handed over twice",
    "tests/jobs/test_log_fidelity": "logs under kills",
    "tests/jobs/test_resume.py::test_a_job": "as in the first tier, in another cluster",
    "tests/jobs/test_resume.py::test_a_new_job": "as in the first tier, in a job of its own",
    "tests/jobs/test_resume.py::test_what_the_hosts": "as tests/remote/test_alone, with a trainer",
    "tests/jobs/test_retries.py::test_a_job_whose": "a supervisor that is killed",
    "tests/jobs/test_submitted": "kills by a seed, with sshd and logins",
    "tests/jobs/test_tails.py::test_those": "times of lines",
    "tests/jobs/test_training_ends": "ends of one kind",
    "tests/jobs/test_wanted_hosts.py::test_a_host_that_lets": "servers that are slow",
    "tests/jobs/test_why.py::test_a_disk": "disks that hang",
    "tests/jobs/test_why.py::test_a_worker": "processes that load",
    "tests/lab/test_crowd": "a thousand jobs",
    "tests/lab/test_doctor.py::test_a_firewall": "firewalls",
    "tests/lab/test_doctor.py::test_a_host": "networks that lose",
    "tests/lab/test_doctor.py::test_a_link": "networks that lose",
    "tests/lab/test_doctor.py::test_an_all_reduce": "networks that lose",
    "tests/lab/test_jobs.py::test_whatever": "kills, as tests/remote/test_supervisor, over a network",
    "tests/lab/test_page": "the page, from a new host to a host that leaves",
    "tests/lab/test_pipeline": "pipelines over links of many speeds",
    "tests/lab/test_ports": "firewalls",
    "tests/lab/test_refusals": "networks that refuse",
    "tests/lab/test_resume": "as tests/jobs/test_resume, over a network",
    "tests/lab/test_sweep": "a host off in the middle of a sweep",
    "tests/lab/test_watched_steps": "watched scripts over a network",
    "tests/lab/test_wire": "predicted and measured times over a network",
    "tests/neighbours/": "several people on the same hosts",
    "tests/provision/test_push.py::test_ctrl_c": "an interrupted transfer",
    "tests/provision/test_setup.py::test_a_folder": "environments of all kinds",
    "tests/provision/test_setup.py::test_a_host": "environments of all kinds",
    "tests/provision/test_setup.py::test_an": "environments of all kinds",
    "tests/provision/test_setup.py::test_req": "environments of all kinds",
    "tests/remote/test_alone.py::test_a_supervisor": "leases that have to end",
    "tests/remote/test_alone.py::test_after_the_last": "as others of its file",
    "tests/remote/test_alone.py::test_of_two_jobs": "a queue of many",
    "tests/remote/test_alone.py::test_priority": "a queue of many",
    "tests/remote/test_alone.py::test_who_waits": "as others of its file",
    "tests/remote/test_host_limits": "hosts without processes, files or memory",
    "tests/remote/test_leftovers.py::test_a_program": "connections that are gone",
    "tests/remote/test_mesh.py::test_a_way": "networks that lose",
    "tests/remote/test_preload.py::test_a_script_sees": "real torchruns",
    "tests/remote/test_preload.py::test_its_end": "real torchruns",
    "tests/remote/test_supervisor.py::test_what_ranks": "daemons of ranks",
    "tests/remote/test_tickets.py::test_no_socket": "sockets of other users",
    "tests/remote/test_watched_steps.py::test_a_script_computes": "watched and unwatched scripts",
    "tests/results/test_analyse.py::test_a_ctrl_c": "an interrupted query",
    "tests/slurm/test_accounts": "a Slurm cluster with a database",
    "tests/slurm/test_cluster": "a Slurm cluster of its own, and jobs that measure",
    "tests/slurm/test_jobs.py::test_a": "ends and restarts on a Slurm cluster",
    "tests/slurm/test_jobs.py::test_slurms": "a time limit of minutes",
    "tests/slurm/test_jobs.py::test_two": "two jobs on a Slurm cluster",
    "tests/slurm/test_jobs.py::test_unchanged": "frameworks on a Slurm cluster",
    "tests/slurm/test_jobs.py::test_what": "ends on a Slurm cluster",
    "tests/slurm/test_jobs.py::test_why": "a rank that sleeps on a Slurm cluster",
    "tests/studies/test_slurm_row": "two rows of a study on a real Slurm",
    "tests/studies/test_study_run.py::test_a_row": "ranks that the trainer starts",
    "tests/studies/test_study_run.py::test_a_study": "a study that is taken up again",
    "tests/sweeps/test_sweep_run.py::test_a_failed": "a sweep, in other circumstances",
    "tests/sweeps/test_sweep_run.py::test_a_sweep_that": "a sweep, in other circumstances",
    "tests/sweeps/test_sweep_run.py::test_it_is": "a sweep, in other circumstances",
    "tests/sweeps/test_sweep_run.py::test_only": "a sweep, in other circumstances",
    "tests/sweeps/test_sweep_run.py::test_several": "a sweep, in other circumstances",
    "tests/test_api.py::test_a_job_that": "retries, from Python",
    "tests/test_interrupted": "runs that signals end",
    "tests/test_wheel.py::test_where": "a job of an installed wheel",
    "tests/trainer/test_ending.py::test_a_failure": "ends of one kind",
    "tests/trainer/test_ending.py::test_processes": "processes that load",
    "tests/trainer/test_generated_scripts": "scripts by a seed",
    "tests/trainer/test_kept.py::test_rates": "messages",
    "tests/trainer/test_not_finite.py::test_a_test": "an infinite loss in a test",
    "tests/trainer/test_pipeline_run.py::test_either": "checkpoints of either kind",
    "tests/trainer/test_rebalance.py::test_a_host_that": "as in the first tier, back again",
    "tests/trainer/test_rebalance.py::test_an_update": "micro-batches that are rebalanced",
    "tests/trainer/test_rehearsal.py::test_a_network": "networks of very many layers",
    "tests/trainer/test_run.py::test_a_signal": "a frozen rank",
    "tests/trainer/test_run.py::test_resnet152": "a large network",
    "tests/trainer/test_slurm.py::test_the_trainer": "the trainer under srun, as in tests/slurm",
    "tests/trainer/test_sync": "every strategy next to slowed ranks",
    "tests/trainer/test_target.py::test_a_target": "a target that is missed",
    "tests/trainer/test_unused.py::test_a_parameter": "parameters without a gradient, by strategy",
    "tests/trainer/test_unused.py::test_a_rank": "timeouts",
    "tests/transport/test_ask.py::test_a_host": "hosts without processes, files or memory",
    "tests/transport/test_noise": "logins that print",
    "tests/transport/test_ssh.py::test_a_login": "servers that are slow",
    "tests/transport/test_ssh.py::test_every_key": "servers that are slow",
    "tests/transport/test_ssh.py::test_servers": "servers that are slow",
    "tests/transport/test_ssh_faults": "servers that break",
    "tests/ui/test_page.py::test_many": "many browsers",
    "tests/views/test_harmless": "whatever a record holds, through every page",
    "tests/views/test_paper.py::test_every_table": "each table in each form",
    "tests/views/test_paper.py::test_the_same": "figures drawn twice",
}
"""What the first tier leaves out, by the beginning of its name, and why it is there."""
THIRD = {
    "tests/jobs/test_handover.py::test_a_second": "as test_resume's second attempt, with files",
    "tests/jobs/test_handover.py::test_plain": "files handed over to plain DDP",
    "tests/lab/test_itself": "the laboratory",
    "tests/remote/test_preload.py::test_a_script_that_sets": "real torchruns",
    "tests/remote/test_watched_steps.py::test_processes": "processes that a script starts",
    "tests/remote/test_watched_steps.py::test_python_with_torch": "programs that start Python",
    "tests/remote/test_watched_steps.py::test_the_hosts": "a host's own sitecustomize",
    "tests/remote/test_watched_steps.py::test_what_is_compiled": "compiled networks",
    "tests/slurm/test_lab": "the laboratory",
    "tests/studies/test_slurm_row.py::test_tasks": "tasks under srun that outlive orch",
    "tests/sweeps/test_sweep_run.py::test_bad": "a rule that tests/sweeps/test_estimates judges",
    "tests/sweeps/test_sweep_run.py::test_the_same": "a sweep, in other circumstances",
    "tests/trainer/test_ending.py::test_a_checkpoint": "compiled networks",
    "tests/trainer/test_ending.py::test_a_script_that_a": "processes that load",
    "tests/trainer/test_kept.py::test_a_compiled": "compiled networks",
    "tests/trainer/test_kept.py::test_a_schedule": "schedules and averages, resumed",
    "tests/trainer/test_kept.py::test_an_older": "checkpoints of an older version",
    "tests/trainer/test_run.py::test_one_epoch": "an epoch of MNIST, as in tests/lab/test_jobs",
    "tests/trainer/test_slurm.py::test_a_script": "scripts under srun, as in tests/slurm",
    "tests/trainer/test_strategies.py::test_with": "BatchNorm over all ranks, any shares",
    "tests/trainer/test_tensor_run.py::test_ddp": "checkpoints of either kind, as test_pipeline_run::test_either",
    "tests/trainer/test_unused.py::test_zeros": "as test_a_parameter, by zeros",
}
"""Variants of what the other tiers run, by name as above; only THOROUGH=1 runs them."""
SAMPLED = {
    "tests/cli/test_consent": 3,
    "tests/cli/test_job_files": 3,
    "tests/cuda/test_cuda_pipeline": 2,
    "tests/cuda/test_cuda_strategies": 3,
    "tests/cuda/test_cuda_time_line": 2,
    "tests/cuda/test_cuda_wire": 3,
    "tests/forecast/test_plan_command": 2,
    "tests/hosts/test_ownership": 3,
    "tests/integrations/test_torchx": 3,
    "tests/jobs/test_why": 3,
    "tests/lab/test_jobs": 2,
    "tests/lab/test_pipeline": 3,
    "tests/lab/test_wire": 3,
    "tests/provision/test_setup": 3,
    "tests/remote/test_alone": 2,
    "tests/remote/test_leftovers": 4,
    "tests/remote/test_supervisor": 2,
    "tests/remote/test_tickets": 6,
    "tests/remote/test_wanted_gpus": 3,
    "tests/remote/test_watched_steps": 3,
    "tests/results/test_analyse": 2,
    "tests/trainer/test_accumulate": 4,
    "tests/trainer/test_block_times": 2,
    "tests/trainer/test_checkpoint": 3,
    "tests/trainer/test_cut_in_two": 3,
    "tests/trainer/test_ending": 3,
    "tests/trainer/test_fidelity": 3,
    "tests/trainer/test_graphs": 2,
    "tests/trainer/test_kept": 9,
    "tests/trainer/test_late": 3,
    "tests/trainer/test_late_run": 3,
    "tests/trainer/test_learner": 6,
    "tests/trainer/test_models": 4,
    "tests/trainer/test_own_networks": 4,
    "tests/trainer/test_pipeline": 3,
    "tests/trainer/test_rebalance": 3,
    "tests/trainer/test_session": 4,
    "tests/trainer/test_shared_network": 3,
    "tests/trainer/test_strategies": 4,
    "tests/trainer/test_tensor": 3,
    "tests/trainer/test_text": 3,
    "tests/trainer/test_unused": 6,
    "tests/trainer/test_without_samples": 4,
    "tests/transport/test_login_forms": 3,
    "tests/ui/test_page": 3,
    "tests/views/test_boxes": 2,
}
"""Every n-th case of a parametrized test in these files stays in the test's tier, from the first case on. The cases
after them are one tier later, and all others in the third.
"""
SLACK = 2.0
"""Above the measured CPU seconds: cores that share their units count more of them for the same work."""
LEAST_S = 20.0
"""Less than this is not worth a budget of its own."""
EXAMPLES = {"first": 12, "rest": 40, "thorough": 400}
"""Of each property that hypothesis tries."""


def add_options(parser: pytest.Parser) -> None:
    parser.addoption("--rest", action="store_true", help="run the tests that the first tier leaves out")


class Tiers:
    """Leaves out the second tier, counts CPU seconds by folder, and holds them to their budgets."""

    def __init__(self, config: pytest.Config) -> None:
        is_whole = config.args_source is config.ArgsSource.TESTPATHS and not config.option.keyword
        self.tier = "rest" if config.option.rest else "first" if is_whole else ""
        self._is_whole = is_whole
        self._spent_s: dict[str, float] = defaultdict(float)
        """CPU seconds by folder."""
        self._lasted_s: dict[str, float] = defaultdict(float)
        """By file."""
        self._tests: dict[str, tuple[float, float]] = {}
        self._kept = json.loads(COSTS.read_text()) if COSTS.exists() else {}
        self._over: list[str] = []
        self._before = (os.getpid(), _cpu_s())
        thorough = os.environ.get("THOROUGH")
        examples = EXAMPLES["thorough" if thorough else self.tier or "rest"]
        # Next to other tests everything takes longer: the time of an example is no failure.
        settings.register_profile(
            "tier", deadline=None, max_examples=examples, suppress_health_check=[HealthCheck.too_slow]
        )
        settings.load_profile("tier")

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        if self.tier == "first":
            others = [item for item in items if _tier(item) > 1]
        elif self.tier == "rest":
            last = 3 if os.environ.get("THOROUGH") else 2
            others = [
                item for item in items if not (1 < _tier(item) <= last or (_tier(item) == 1 and _is_property(item)))
            ]
        else:
            others = []
        config.hook.pytest_deselected(items=others)
        left_out = {*others}
        longest = self._kept.get("files_s", {})
        items[:] = sorted(
            (item for item in items if item not in left_out),
            key=lambda item: -longest.get(item.nodeid.partition("::")[0], 0),
        )

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> object:
        report: pytest.TestReport = yield
        pid, before_s = self._before
        now_s = _cpu_s()
        report.cpu_s = now_s - (before_s if pid == os.getpid() else 0.0)  # type: ignore[attr-defined]
        self._before = (os.getpid(), now_s)
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        cpu_s = getattr(report, "cpu_s", 0.0)
        self._spent_s[folder_of(report.nodeid)] += cpu_s
        self._lasted_s[report.nodeid.partition("::")[0]] += report.duration
        before = self._tests.get(report.nodeid, (0.0, 0.0))
        self._tests[report.nodeid] = (before[0] + cpu_s, before[1] + report.duration)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if path := os.environ.get("COSTS"):
            Path(path).write_text(json.dumps(self._tests))
        if not self._is_whole or exitstatus not in (0, 1):
            return
        if os.environ.get("BUDGETS") == "write":
            self._write()
            return
        self._over = self._over_budget()

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self._is_whole:
            return
        total_s = sum(self._spent_s.values())
        most = sorted(self._spent_s.items(), key=lambda each: -each[1])[:8]
        shown = ", ".join(f"{folder} {spent_s:.0f}" for folder, spent_s in most)
        terminalreporter.write_line(f"CPU seconds: {total_s:.0f}, most in {shown}")
        for line in self._over:
            terminalreporter.write_line(line, yellow=True)

    def _over_budget(self) -> list[str]:
        if self.tier not in self._kept:
            return []
        scale = loop_s() / self._kept["loop_s"]
        return [
            f"{folder}: {spent_s:.0f} CPU s, its budget is {allowed_s:.0f} (tests/data/test_costs.json)"
            for folder, spent_s in sorted(self._spent_s.items())
            if spent_s > (allowed_s := scale * self._kept[self.tier].get(folder, LEAST_S))
        ]

    def _write(self) -> None:
        kept = self._kept
        scale = kept.setdefault("loop_s", loop_s()) / loop_s()
        kept[self.tier] = {
            folder: round(max(LEAST_S, SLACK * scale * spent_s)) for folder, spent_s in sorted(self._spent_s.items())
        }
        longest = {**kept.get("files_s", {}), **{file: round(lasted_s) for file, lasted_s in self._lasted_s.items()}}
        in_order = sorted(longest.items(), key=lambda each: -each[1])
        kept["files_s"] = {file: lasted_s for file, lasted_s in in_order if lasted_s >= LEAST_S}
        COSTS.write_text(json.dumps(kept, indent=1) + "\n")


def _tier(item: pytest.Item) -> int:
    """1 to 3."""
    begins = next((tier for tier, names in ((3, THIRD), (2, SECOND)) if item.nodeid.startswith(tuple(names))), 1)
    return min(3, begins + min(2, _turn(item)))


def _turn(item: pytest.Item) -> int:
    """0 for each n-th case of a sampled test, and for all that is not sampled."""
    step = next((step for begins, step in SAMPLED.items() if item.nodeid.startswith(begins)), 1)
    case = getattr(item, "callspec", None)
    return sum(case.indices.values()) % step if case else 0


def _is_property(item: pytest.Item) -> bool:
    return getattr(getattr(item, "obj", None), "is_hypothesis_test", False) is True


def folder_of(nodeid: str) -> str:
    """`jobs` of tests/jobs/test_pull.py::test_x; `.` of a file at the root."""
    parts = nodeid.partition("::")[0].split("/")
    return parts[1] if len(parts) > 2 else "."


def _cpu_s() -> float:
    """Of this process and of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def loop_s() -> float:
    """CPU seconds of a fixed piece of work here, the least of three: how fast this machine is."""
    times = []
    for _ in range(3):
        before_s = time.process_time()
        sum(number * number for number in range(2_000_000))
        times.append(time.process_time() - before_s)
    return round(min(times), 4)
