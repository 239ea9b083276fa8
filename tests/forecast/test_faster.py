"""What would take less time than the run at hand is said, with a line that does it when it is pasted."""

from __future__ import annotations

import dataclasses
import shlex

import pytest

from orchestrator.clusters import Clusters
from orchestrator.errors import HostError
from orchestrator.forecast import faster_ways, inputs_of, preference, what_if
from orchestrator.forecast.pipeline import as_set
from orchestrator.planning import CodeFolder, LaunchPlan, run_line
from orchestrator.results import WORTH, measured
from orchestrator.results.analyse import analyse
from orchestrator.views import console, host_tables, render_report
from tests.support.plan_command import dry_run, orch, planned
from tests.support.plans import a2000_v100
from tests.support.run_folders import two_hosts

pytestmark = pytest.mark.usefixtures("home")


WHOLE = ("--set", "accumulate=1")
"""In one micro-batch a pipeline's stages work one after the other, so that no cut is worth a word."""


def pasted(command):
    """The plan of this line, as a shell would hand it over."""
    orch_, *words = shlex.split(command)
    assert orch_ == "orch"
    return LaunchPlan.model_validate_json(orch(*words, "--dry-run", "--json").stdout)


def alone(found):
    return next(each for each in found if each.what.endswith(" alone"))


# ---- before it runs -------------------------------------------------------------------------------------------------


def test_a_host_that_is_faster_alone_is_named_in_plan_dry_run_and_at_the_start():
    plan = dry_run()
    cut, found = plan.faster
    assert cut.what.startswith("strategy=pipeline, ")
    assert found.of_time == pytest.approx(plan.prediction.samples_per_s / 833)
    assert found.words == f"v100 alone would take {100 * found.of_time:.0f} % of the time (predicted)"
    again = pasted(found.command)
    assert [node.name for node in again.nodes] == ["v100"]
    assert again.prediction.samples_per_s == pytest.approx(833)
    shown = orch("run", "--exp", "resnet152_cifar", "--dry-run").stderr
    assert f"note: {found.words}\n  try: {found.command}\n" in shown
    lines = orch("plan", "--exp", "resnet152_cifar").stdout.rstrip().split("\n")
    assert lines[-4:] == [f"{cut.words}:", f"  {cut.command}", f"{found.words}:", f"  {found.command}"]
    assert planned()["command"] == planned()["faster"][0]["command"] == cut.command
    assert planned()["faster"][1]["command"] == found.command
    same = pasted(cut.command)
    assert same.prediction.samples_per_s == pytest.approx(cut.samples_per_s)
    assert same.faster == ()


def test_the_line_of_better_shares_splits_the_batch_as_predicted():
    plan = dry_run("--set", "batch=2048", "--set", "lr=0.1", *WHOLE)
    best = plan.faster[0]
    again = pasted(best.command)
    assert again.prediction.samples_per_s == pytest.approx(best.samples_per_s)
    assert best.samples_per_s > WORTH * plan.prediction.samples_per_s
    assert {node.name: node.shares for node in again.nodes} == {"v100": (1463,), "a2000": (585,)}
    assert again.settings["lr"] == 0.1
    assert again.faster == ()


def test_where_nothing_is_worth_a_change_the_plan_ends_with_its_own_line():
    words = ("--set", "batch=2048", "--set", "shares=v100=5,a2000=2", *WHOLE)
    lines = orch("plan", "--exp", "resnet152_cifar", *words).stdout.rstrip().split("\n")
    assert lines[-2] == "no change that these settings allow is worth it; run:"
    assert pasted(lines[-1]).settings["shares"] == "v100=5,a2000=2"


def test_one_rank_takes_nothing_along_that_speaks_of_others():
    words = ("fidelity=compressed", "compress_rank=4", "slow=rank:1,at:sync,ms:9", "weight_decay=0", "batch=128")
    found = alone(dry_run(*(word for each in words for word in ("--set", each))).faster)
    assert pasted(found.command).settings == {
        **dry_run("--nodes", "v100").settings,
        "batch": 128,
        "weight_decay": 0.0,
    }


def test_a_job_that_goes_on_from_a_checkpoint_stays_with_the_host_that_holds_it():
    plan = dry_run("--set", "resume=/data/point.pt")
    view = inputs_of(plan, {})
    assert alone(faster_ways(plan, view, {"resume"})).hosts == ("v100",)
    held = plan.model_copy(update={"master": "a2000"})
    assert alone(faster_ways(held, view, {"resume"})).hosts == ("a2000",)


def test_auto_leaves_a_host_out_and_says_so_unless_it_is_named():
    plan = dry_run("--set", "strategy=auto", "--set", "shares=auto")
    assert [node.name for node in plan.nodes] == ["v100"]
    (said,) = (note for note in plan.notes if "leaves out" in note)
    assert said.startswith("strategy=auto leaves out a2000: v100 alone would take 3")
    assert "--nodes v100,a2000 keeps them" in said
    assert len(dry_run("--set", "strategy=auto", "--nodes", "a2000,v100").nodes) == 2
    assert len(dry_run("--set", "strategy=auto", "--set", "batch=2048", "--set", "shares=auto").nodes) == 1
    assert len(dry_run("--set", "strategy=auto", "--set", "shares=v100=5,a2000=2").nodes) == 2


def test_with_hosts_to_choose_from_auto_leaves_out_no_more_than_may_be_missing(monkeypatch):
    monkeypatch.setattr(Clusters, "away", lambda *_: {})  # they are not there to be asked
    auto = ("--set", "strategy=auto", "--set", "shares=auto")
    plan = dry_run(*auto, "--hosts", "1:2")
    assert [node.name for node in plan.nodes] == ["v100"] and plan.hosts.spares == ("a2000",)
    assert any(note.startswith("strategy=auto leaves out a2000: ") for note in plan.notes)
    assert len(dry_run(*auto, "--hosts", "2").nodes) == 2
    assert len(dry_run(*auto, "--hosts", "1:2", "--nodes", "a2000,v100").nodes) == 2
    (one,) = (plan := dry_run("--hosts", "1")).nodes  # it is the fastest alone
    assert one.name == plan.master == "v100" and sum(plan.shares) == plan.training.batch
    assert "spare: a2000; the job takes 1 host at most, the fastest alone by the inventory's pace" in plan.notes


def test_the_host_that_holds_the_checkpoint_is_not_left_out(monkeypatch):
    monkeypatch.setattr(Clusters, "away", lambda *_: {"v100": HostError("v100", "is off")})
    orch("master", "v100")
    assert [node.name for node in dry_run("--hosts", "1:2").nodes] == ["a2000"]
    words = ("run", "--exp", "resnet152_cifar", "--dry-run", "--hosts", "1:2", "--set", "resume=/data/point.pt")
    assert "error: v100: is off" in orch(*words, code=3).stderr


def test_measured_shares_leave_a_host_out_where_its_exchange_costs_more_than_it_brings():
    speeds = ("--set", "speeds=v100:0=0+1.2,a2000:0=0+3", "--set", "shares=measured")
    plan = dry_run(*speeds)
    assert [node.name for node in plan.nodes] == ["v100"]
    assert any(note.startswith("shares=measured leaves out a2000: v100 alone") for note in plan.notes)
    both = dry_run(*speeds, "--set", "batch=2048")
    assert len(both.nodes) == 2
    assert not any("leaves out" in note for note in both.notes)


# ---- after it ran ---------------------------------------------------------------------------------------------------


def test_a_run_that_its_fastest_host_would_have_beaten_says_so_with_the_line(tmp_path, capsys):
    run = two_hosts(tmp_path / "run")
    summary = analyse(run)
    (found,) = summary.faster  # 960 samples/s together; v100 alone 80 in 2 + 40 + 8 ms
    assert found.words == "v100 alone would take 60 % of the time (by its own time in this run)"
    assert found.command.endswith("--nodes v100")
    assert found.words in render_report(summary)
    assert found.command in render_report(summary)
    console.out.file = None
    host_tables.print_summary(summary)
    assert f"{found.words}\n  try: {found.command}\n" in capsys.readouterr().out


def test_a_profile_goes_before_the_compute_time_and_no_word_is_said_of_less_than_noise(tmp_path):
    run = two_hosts(tmp_path / "run")
    (found,) = analyse(run, solo={"a2000": 190.0, "v100": 1200.0}).faster
    assert (found.of_time, found.basis) == (pytest.approx(0.8), "profiled")
    assert analyse(run, solo={"v100": 960 * WORTH - 1}).faster == ()


def test_what_was_measured_takes_the_place_of_what_was_predicted(tmp_path):
    plan = dry_run("--set", "batch=2048", *WHOLE)
    assert {each.what for each in plan.faster} == {"bucket_mib=10.0, shares by speed", "v100 alone"}
    nodes = analyse(two_hosts(tmp_path / "run")).nodes
    faster = [each.model_copy(update={"own_samples_per_s": 833.0}) for each in nodes]
    assert [each.basis for each in measured(plan, faster, 656.0)] == ["predicted", "computed"]
    assert [each.basis for each in measured(plan, faster, 830.0)] == ["predicted"]
    assert measured(plan, [each.model_copy(update={"valid": False}) for each in faster], 656.0) == plan.faster
    assert measured(plan, faster[:1], 656.0) == ()


# ---- the line -------------------------------------------------------------------------------------------------------


def test_a_script_keeps_its_folder_its_arguments_and_their_quotes():
    code = CodeFolder(sha256="c0de" * 16, source="/home/me/my code", files=1, size_bytes=1)
    plan = replace_command(a2000_v100(), ("sub/train.py", "--name", "two words", "a;b"), kind="script")
    plan = plan.model_copy(update={"code": code, "settings": {"batch": 96}, "share_gpus": True, "time_limit_s": 5400.0})
    assert run_line(plan, ["v100"]) == (
        "orch run --cluster a2000-v100 --folder '/home/me/my code' --batch 96 --nodes v100 --share --time-limit 5400s "
        "-- '/home/me/my code/sub/train.py' --name 'two words' 'a;b'"
    )
    module = replace_command(plan, ("-m", "my.mod", "--local_rank={LOCAL_RANK}", "--x"), kind="module")
    assert "--batch 96 --pass-local-rank " in run_line(module) and run_line(module).endswith(" -m my.mod -- --x")
    flags = replace_command(plan, ("-u", "-Xdev", "train.py", "-m"), kind="script")
    assert run_line(flags).endswith(" -- python -u -Xdev '/home/me/my code/train.py' -m")
    flags = replace_command(plan, ("-u", "-m", "my.mod", "--x"), kind="module")
    assert run_line(flags).endswith(" -- python -u -m my.mod --x")


def replace_command(plan, command, kind):
    nodes = tuple(node.model_copy(update={"command": command}) for node in plan.nodes)
    return plan.model_copy(update={"nodes": nodes, "kind": kind})


def test_a_pipeline_whose_blocks_nobody_timed_has_to_be_a_fifth_faster():
    assert preference("pipeline", 120.0) == 120.0
    assert preference("pipeline", 120.0, is_own=True) == pytest.approx(100.0)
    assert preference("ddp", 120.0, is_own=True) == 120.0


def test_a_cut_of_fewer_hosts_has_the_micro_batches_of_its_prediction():
    """Not the plan's smaller first micro-batch, which was for all hosts."""
    plan = dry_run("--set", "strategy=pipeline")
    view = inputs_of(plan, {})
    fewer = dataclasses.replace(view.scene)
    settings = dataclasses.replace(plan.training, smaller_first=0.5)
    option = what_if._cut(settings, view, fewer, ())
    assert as_set(fewer, option.settings).samples_per_s == pytest.approx(option.samples_per_s)
    assert option.settings.smaller_first == 0
    assert what_if._cut(settings, view, fewer, ("smaller_first",)).settings.smaller_first == 0.5
