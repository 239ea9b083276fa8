"""Solo profiles: measured by real jobs, remembered as long as they hold, and what a plan makes of them."""

from __future__ import annotations

import json
import shutil
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from orchestrator.cli import main
from orchestrator.controller import Controller
from orchestrator.errors import UsageError
from orchestrator.hosts import Connections
from orchestrator.jobs import settings_of
from orchestrator.measuring import ProfileRequest, Profiling
from orchestrator.paths import Home, RunFolder
from orchestrator.planning import (
    BlockTimes,
    CodeFolder,
    JobSpec,
    Kind,
    LaunchPlan,
    NodePlan,
    Profile,
    kinds_of,
    parse_job,
    run_line,
    tf32_of,
)
from orchestrator.results.analyse import analyse
from orchestrator.store import Store
from tests.support.local_cluster import bring_up
from tests.support.quick_python import quick_python
from trainer.shared import fastest_shares, format_speeds, parse_speeds

# Slow enough that a busy machine keeps them: a step of two samples takes 43 ms or more. And far enough from each other
# that two sizes of a second tell them apart.
PACES = {"a2000": "{samples_per_s: 42, fixed_ms: 32}", "v100": "{samples_per_s: 300, fixed_ms: 36}"}
SHORT = ["batch=32", "profile_s=1"]
SHORT_SPEC = JobSpec.model_validate({"exp": "mnist_lenet", "settings": [*SHORT]})


def inventory(tmp_path, names):
    """names: of the nodes, each the pace it keeps and a letter."""
    nodes = "".join(
        f"  - {{name: {name}, gpu: {name[:-1]}, paced: {PACES[name[:-1]]}, address: 127.0.0.1, "
        f"workdir: {tmp_path}/{name}}}\n"
        for name in names
    )
    file = tmp_path / "inventory.yaml"
    python, env = quick_python(tmp_path / "quick", trains=True), 'env: {OMP_NUM_THREADS: "1"}'
    file.write_text(
        f"cluster: t\ndefaults: {{transport: local, device: cpu, gpus: 1, python: {python}, {env}}}\nnodes:\n{nodes}"
    )
    return file


@pytest.fixture(scope="module")
def cluster_home(tmp_path_factory):
    """What is remembered of two A2000 and a V100 that share this machine."""
    folder = tmp_path_factory.mktemp("cluster")
    home = Home(folder / "home")
    with Connections(home) as connections:
        bring_up(Controller(Store(home), connections), inventory(folder, ["a2000a", "a2000b", "v100a"]))
    return home.root


@pytest.fixture
def controller(tmp_path, monkeypatch, cluster_home):
    home = Home(shutil.copytree(cluster_home, tmp_path / "home"))
    monkeypatch.setenv("ORCH_HOME", str(home.root))
    with Connections(home) as connections:
        yield Controller(Store(home), connections)


def remembered(kind: Kind, fixed_ms: float, sample_ms: float, **more) -> Profile:
    measured = {"samples": (2, 4), "step_ms": (1, 2), "largest": 64, "forward_ms": 1, "optim_ms": 1, **more}
    fields = {**dict(kind), **measured, "fixed_ms": fixed_ms, "sample_ms": sample_ms}
    return Profile(**fields, schema=1, node="a2000a", created="2026-11-21T09:12:00+00:00")


def kinds(controller, *settings, exp="mnist_lenet"):
    cluster = controller.store.cluster("t")
    wish = parse_job(JobSpec.model_validate({"exp": exp, "settings": settings}))
    return kinds_of(controller.choice.plan(cluster, wish.request, wish.code), cluster.facts)


def planned(controller, *settings, only=()):
    wish = parse_job(JobSpec.model_validate({"exp": "mnist_lenet", "settings": settings}))
    return controller.choice.plan(controller.store.cluster("t"), wish.request, wish.code, only)


def remember_all(controller, **more):
    for (node, _), kind in kinds(controller).items():
        fixed_ms, sample_ms = (4, 3.003) if node.startswith("a2000") else (3, 1.2)
        controller.store.save_profile(remembered(kind, fixed_ms, sample_ms, **more))


# ---- measuring ----------------------------------------------------------------------------------------------------


def test_each_kind_of_host_is_measured_once_and_then_known(controller, monkeypatch):
    followed, profiles_of = [], Profiling._profiles
    # On a busy machine stand-ins are late for their pace, and such a profile would be measured again.
    in_time = {"valid": True}
    monkeypatch.setattr(
        Profiling, "_profiles", lambda *job: [profile.model_copy(update=in_time) for profile in profiles_of(*job)]
    )

    def follow(job):
        followed.append(job.plan.master)
        list(job.follow())

    cluster = controller.store.cluster("t")
    found = Profiling(controller, cluster, ProfileRequest.of(SHORT_SPEC)).run(follow)
    assert len(followed) == 2
    by_node = {each.rank[0]: each.profile for each in found}
    assert by_node["a2000a"] == by_node["a2000b"]
    assert by_node["v100a"].speed != by_node["a2000a"].speed  # how much faster is this machine's affair
    assert all(each.fresh for each in found)
    again = Profiling(controller, cluster, ProfileRequest.of(SHORT_SPEC)).run(follow)
    assert len(followed) == 2 and not any(each.fresh for each in again)
    nodes = planned(controller, "shares=measured", "batch=32").nodes
    assert [node.shares[0] for node in nodes] == list(fastest_shares([by_node[node.name].speed for node in nodes], 32))


class Stopwatch:
    """Measures in place of jobs. measured: of each profile the node, and CLUSTER/NODE, or None for its kind. more: what
    its profiles say beside.
    """

    def __init__(self, monkeypatch, sample_ms, **more):
        self.measured, self.sample_ms, self.more = [], sample_ms, more
        monkeypatch.setattr(Profiling, "_measure", lambda one, names, follow: [self._one(one, name) for name in names])

    def _one(self, one, name):
        kind = one.kinds[name, 0]
        self.measured.append((name, kind.host))
        return remembered(kind, 4, self.sample_ms, **self.more).model_copy(update={"node": name})


def profiled(controller, *, each=False, again=False):
    """By node: its ms a sample, and whether it was measured just now."""
    one = Profiling(controller, controller.store.cluster("t"), ProfileRequest.of(SHORT_SPEC), each=each)
    found = one.run(lambda plan, hosts: None, again=again)
    return {each.rank[0]: (each.profile.sample_ms, each.fresh) for each in found}


def test_a_host_that_was_measured_by_itself_is_known_where_one_of_each_kind_is_asked_for(controller, monkeypatch):
    watch = Stopwatch(monkeypatch, 3)
    assert set(profiled(controller, each=True).values()) == {(3, True)}
    assert profiled(controller) == dict.fromkeys(("a2000a", "a2000b", "v100a"), (3, False))
    assert len(watch.measured) == 3


def test_a_host_without_a_profile_of_its_own_is_measured_for_its_kind(controller, monkeypatch):
    watch = Stopwatch(monkeypatch, 3)
    controller.store.save_profile(remembered(kinds(controller)["a2000a", 0].of("t/a2000a"), 4, 9))
    assert profiled(controller) == {"a2000a": (9, False), "a2000b": (3, True), "v100a": (3, True)}
    assert sorted(watch.measured) == [("a2000b", None), ("v100a", None)]


def test_what_splits_go_by_is_what_is_measured_again(controller, monkeypatch):
    Stopwatch(monkeypatch, 9)
    profiled(controller)
    controller.store.save_profile(remembered(kinds(controller)["a2000b", 0].of("t/a2000b"), 4, 9))
    watch = Stopwatch(monkeypatch, 3)
    assert set(profiled(controller, again=True).values()) == {(3, True)}
    assert sorted(watch.measured, key=str) == [("a2000a", None), ("a2000b", "t/a2000b"), ("v100a", None)]
    known = controller.store.profiles(kinds(controller), "t")
    assert {profile.sample_ms for profile in known.values()} == {3}


LATE = {"samples": (2, 4, 8), "step_ms": (9, 9, 9), "lateness": (0.5, 0.032, 0.001), "valid": False}


def test_a_profile_that_is_not_valid_is_reported_and_counts_for_nothing(controller, monkeypatch):
    Stopwatch(monkeypatch, 9, **LATE)
    assert set(profiled(controller).values()) == {(9, True)}
    assert controller.store.profiles(kinds(controller), "t") == {}
    assert all(node.solo_samples_per_s is None for node in planned(controller).nodes)
    done = CliRunner().invoke(main, ["profile", "--exp", "mnist_lenet"])
    assert done.exit_code == 1, done.output
    assert "not kept: " in done.stderr
    assert "v100a's CPU was too slow for the pace of the simulated GPU at 2 of 3 batch sizes from 2 to 8" in done.stderr
    assert "8, 0.1 % of a step late (1 % is allowed, at two sizes)" in done.stderr
    shown = CliRunner().invoke(main, ["profile", "--exp", "mnist_lenet", "--json"])
    assert shown.exit_code == 1
    assert [(rank["valid"], rank["share"]) for rank in json.loads(shown.stdout)["ranks"]] == [(False, None)] * 3


def test_the_table_says_in_a_line_what_is_known_of_blocks_and_the_document_has_all(controller, monkeypatch):
    task = ((0.1, 1.0), (0.0, 0.5))
    tasks = {"forward": task, "backward": task, "weights": task}
    Stopwatch(monkeypatch, 9, blocks=BlockTimes(samples=(8, 16), stretches=2, **tasks))
    done = CliRunner().invoke(main, ["profile", "--exp", "mnist_lenet"])
    assert done.stdout.splitlines()[-1] == "blocks: 2 measured, fixed 0.3 ms a micro-batch"
    shown = CliRunner().invoke(main, ["profile", "--exp", "mnist_lenet", "--json"])
    assert json.loads(shown.stdout)["ranks"][0]["blocks"]["forward"] == [[0.1, 1.0], [0.0, 0.5]]


def test_shares_that_miss_a_profile_which_was_not_kept_say_so(controller, monkeypatch):
    Stopwatch(monkeypatch, 9, **LATE)
    profiled(controller)
    with pytest.raises(UsageError, match=r"a2000a was measured on 2026-11-21, but not kept: .* too slow") as caught:
        planned(controller, "shares=measured")
    assert "not been measured" not in caught.value.message
    assert "while nothing else runs" in caught.value.remedy
    assert {node.shares for node in planned(controller, "shares=auto", "batch=63").nodes} == {(21,)}
    Stopwatch(monkeypatch, 3)
    profiled(controller)
    assert (
        sum(share for node in planned(controller, "shares=measured", "batch=63").nodes for share in node.shares) == 63
    )


def test_sizes_that_a_kept_profile_leaves_out_are_named(controller, monkeypatch):
    Stopwatch(monkeypatch, 3, **{**LATE, "lateness": (0.5, 0.01, 0.001), "valid": True})
    done = CliRunner().invoke(main, ["profile", "--exp", "mnist_lenet"])
    assert done.exit_code == 0, done.output
    assert "v100a: could not keep its pace at batches of 2; its profile leaves them out" in done.stderr


def test_a_valid_profile_outlives_a_later_one_that_is_not(controller, monkeypatch):
    Stopwatch(monkeypatch, 3)
    profiled(controller)
    Stopwatch(monkeypatch, 9, valid=False)
    assert set(profiled(controller, again=True).values()) == {(9, True)}
    assert set(profiled(controller).values()) == {(3, False)}


def test_hosts_that_share_a_machine_are_measured_one_after_the_other(controller):
    cluster = controller.store.cluster("t")
    one = Profiling(controller, cluster, ProfileRequest.of(SHORT_SPEC), each=True)
    assert sorted(len(names) for names in one._rounds(one.kinds)) == [1, 1, 1]
    one.machines = dict.fromkeys(one.machines, "x") | {"v100a": "another"}
    assert sorted(len(names) for names in one._rounds(one.kinds)) == [1, 2]


def test_a_wrong_experiment_or_setting_is_refused_before_anything_starts():
    with pytest.raises(UsageError, match="trains nothing"):
        ProfileRequest.of(JobSpec(exp="collectives"))
    with pytest.raises(UsageError, match="did you mean batch"):
        ProfileRequest.of(JobSpec(exp="mnist_lenet", settings={"bacth": "4"}))
    with pytest.raises(UsageError, match="measures nothing"):
        ProfileRequest.of(JobSpec(exp="mnist_lenet", settings={"profile_s": "0"}))


def test_the_command_shows_what_is_known_and_measures_nothing_again(controller):
    remember_all(controller)
    done = CliRunner().invoke(main, ["profile", "--exp", "mnist_lenet", "--json"])
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    assert {rank["node"]: (rank["sample_ms"], rank["fresh"]) for rank in document["ranks"]} == {
        "a2000a": (3.003, False), "a2000b": (3.003, False), "v100a": (1.2, False),
    }  # fmt: skip
    assert sum(rank["share"] for rank in document["ranks"]) == document["batch"] == 64
    table = CliRunner().invoke(main, ["profile", "--exp", "mnist_lenet"])
    assert "2026-11-21" in table.output and "v100a" in table.output


def test_settings_that_a_host_alone_does_nothing_with_are_named(controller):
    remember_all(controller)
    asked = ["--set", "strategy=allreduce", "--set", "accumulate=4", "--set", "shares=equal", "--set", "batch=64"]
    done = CliRunner().invoke(main, ["profile", "--exp", "mnist_lenet", "--json", *asked])
    assert done.exit_code == 0, done.output
    assert "change nothing that a host does alone: accumulate=4, strategy=allreduce\n" in done.stderr
    plain = CliRunner().invoke(main, ["profile", "--exp", "mnist_lenet", "--json"])
    assert "change nothing" not in plain.stderr
    auto = CliRunner().invoke(main, ["profile", "--exp", "mnist_lenet", "--json", "--set", "strategy=auto"])
    assert (auto.exit_code, "change nothing that a host does alone: strategy=auto\n" in auto.stderr) == (0, True)


# ---- for whom a profile holds -------------------------------------------------------------------------------------


def test_a_profile_holds_for_its_kind_alone_and_a_host_of_its_own_before_that(controller):
    known = kinds(controller)
    assert known["a2000a", 0] == known["a2000b", 0] != known["v100a", 0]
    kind = known["a2000a", 0]
    controller.store.save_profile(remembered(kind, 4, 3))
    controller.store.save_profile(remembered(kind.of("t/a2000b"), 4, 9))
    found = controller.store.profiles(known, "t")
    assert {rank[0]: profile.sample_ms for rank, profile in found.items()} == {"a2000a": 3, "a2000b": 9}
    for change in (
        {"torch": "9.9"},
        {"driver": "1"},
        {"device_name": "x"},
        {"amp": "bf16"},
        {"model": "m"},
        {"gpu_settings": "x"},
    ):
        assert kind.model_copy(update=change).key != kind.key
    assert kinds(controller, "data=synthetic", "batch=8", "lr=1")["a2000a", 0] == kind
    assert kinds(controller, "amp=bf16")["a2000a", 0] != kind
    sized = [kinds(controller, *more, exp="gpt_text")["a2000a", 0].data for more in ([], ["vocabulary=8192"])]
    assert sized == ["text of 256 tokens", "text of 256 tokens (of 8192)"]


def profile_with(**more):
    kind = Kind(exp="e", model="m", data="d", amp="off", device="cuda", gpu=None, device_name="g", torch=None,
                driver=None, ranks=1)  # fmt: skip
    return remembered(kind, 1.0, 1.0, samples=(2, 64), step_ms=(10, 100), **more)


def test_a_card_that_got_slower_while_it_was_measured_is_named():
    words = profile_with(again_samples=64, again_ms=112).drift_words()
    assert words.startswith("a2000a: 64 samples took 12 % longer at the end of the measurement than before (heat,")


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"again_samples": 64, "again_ms": 104},
        {"again_samples": 64, "again_ms": 50},
        {"again_samples": 64, "again_ms": 0},
        {"again_samples": 32, "again_ms": 999},
    ],
)
def test_a_steady_profile_and_one_that_was_not_measured_again_say_nothing(more):
    assert profile_with(**more).drift_words() == ""


@pytest.mark.parametrize(
    ("asked", "capabilities", "expected"),
    [
        ("auto", ["8.6", "9.0"], "on"),
        ("auto", ["8.6", "7.0"], "off"),
        ("auto", ["10.0"], "on"),
        ("auto", ["8.6", None], "auto"),
        ("auto", ["8.6", "cpu"], "off"),
        ("on", ["8.6", "7.0"], "on"),
    ],
)
def test_whether_tf32_is_used_follows_from_all_gpus_of_a_plan(asked, capabilities, expected):
    def gpus(capability):
        return SimpleNamespace(gpus=[SimpleNamespace(compute_capability=capability)])

    names = [f"n{i}" for i in range(len(capabilities))]
    devices = ["cpu" if capability == "cpu" else "cuda" for capability in capabilities]
    nodes = [SimpleNamespace(name=name, device=device, ranks=1) for name, device in zip(names, devices, strict=True)]
    assert tf32_of(asked, nodes, dict(zip(names, map(gpus, capabilities), strict=True))) == expected


@pytest.mark.parametrize("asked", ["sync_bn=true", "strategy=fsdp", "strategy=tensor"])
def test_settings_that_rule_cuda_graphs_out_are_measured_without_them(controller, asked):
    def of_gpus(*settings):
        plan = planned(controller, *settings)
        nodes = tuple(node.model_copy(update={"device": "cuda", "paced": None}) for node in plan.nodes)
        plan = plan.model_copy(update={"nodes": nodes})
        return kinds_of(plan, controller.store.cluster("t").facts)["v100a", 0]

    assert of_gpus(asked).gpu_settings == of_gpus("cuda_graph=off").gpu_settings == "cuda_graph=off"
    assert of_gpus("cuda_graph=on").gpu_settings == "cuda_graph=on"
    cluster = controller.store.cluster("t")
    for settings, graph in (([asked, "cuda_graph=on"], "off"), (["cuda_graph=on"], "on"), ([], "auto")):
        spec = JobSpec.model_validate({"exp": "mnist_lenet", "settings": settings})
        assert Profiling(controller, cluster, ProfileRequest.of(spec)).job.request.settings.cuda_graph == graph


def test_changes_of_speed_in_the_course_of_a_run_make_no_other_kind(controller):
    plan = planned(controller)
    facts = controller.store.cluster("t").facts
    changed = [
        node.model_copy(update={"paced": {**node.paced, "slowdown": [{"at_step": 1, "factor": 2}]}})
        for node in plan.nodes
    ]
    assert kinds_of(plan.model_copy(update={"nodes": tuple(changed)}), facts) == kinds_of(plan, facts)


def test_a_damaged_profile_is_as_good_as_none(controller):
    remember_all(controller)
    for path in controller.store.home.profiles.iterdir():
        path.write_text("{")
    assert controller.store.profiles(kinds(controller), "t") == {}


def test_a_profile_that_was_kept_although_it_is_not_valid_is_as_good_as_none(controller):
    remember_all(controller, valid=False)
    kind = kinds(controller)["a2000a", 0]
    controller.store.save_profile(remembered(kind, 4, 3))
    controller.store.save_profile(remembered(kind.of("t/a2000b"), 4, 9, valid=False))
    found = controller.store.profiles(kinds(controller), "t")
    assert {rank[0]: profile.sample_ms for rank, profile in found.items()} == {"a2000a": 3, "a2000b": 3}


# ---- what a plan makes of them ------------------------------------------------------------------------------------


def test_measured_shares_are_those_that_are_done_first_and_the_ranks_receive_them(controller):
    remember_all(controller)
    plan = planned(controller, "shares=measured", "batch=64")
    shares = {node.name: node.shares for node in plan.nodes}
    ranks = [node.name for node in plan.nodes]
    speeds = {name: remembered_speed(name) for name in ranks}
    assert [shares[name][0] for name in ranks] == list(fastest_shares([speeds[name] for name in ranks], 64))
    for node in plan.nodes:
        assert f"--shares={','.join(f'{name}:0={shares[name][0]}' for name in ranks)}" in node.command
        (option,) = (word for word in node.command if word.startswith("--speeds="))
        assert parse_speeds(option.removeprefix("--speeds=")) == {(name, 0): speeds[name] for name in ranks}
        alone_ms = speeds[node.name].step_ms(64)
        assert node.solo_samples_per_s == pytest.approx(64_000 / alone_ms)


def test_without_a_word_a_batch_is_split_by_the_profiles_where_every_rank_has_one(controller):
    unknown = planned(controller, "batch=64")
    assert unknown.settings["shares"] == "equal" and not any("shares=" in note for note in unknown.notes)
    remember_all(controller)
    names = [node.name for node in unknown.nodes]
    plan, asked = planned(controller, "batch=64"), planned(controller, "shares=measured", "batch=64", only=names)
    assert [node.shares for node in plan.nodes] == [node.shares for node in asked.nodes]
    assert [node.command for node in plan.nodes] == [node.command for node in asked.nodes]
    assert plan.settings["shares"] == "measured" and any("--set shares=equal" in note for note in plan.notes)
    equal = planned(controller, "batch=64", "shares=equal")
    assert [node.shares for node in equal.nodes] == [node.shares for node in unknown.nodes]
    assert "shares=equal" in run_line(equal) and settings_of(unknown, JobSpec())[1]["shares"] == "equal"


def test_a_profile_that_its_time_ended_early_is_sent_as_a_line_that_goes_on(controller):
    remember_all(controller, largest=8)
    plan = planned(controller, "shares=measured", "batch=64")
    (setting,) = {word for node in plan.nodes for word in node.command if word.startswith("--speeds=")}
    assert all(speed.cap is None for speed in parse_speeds(setting.removeprefix("--speeds=")).values())
    assert any("extrapolated" in note and "v100a:0 (beyond 8)" in note for note in plan.notes)
    remember_all(controller, largest=64)
    assert not any("extrapolated" in note for note in planned(controller, "shares=measured", "batch=64").notes)


def test_speeds_of_some_ranks_by_hand_are_sent_with_those_that_were_measured(controller):
    remember_all(controller)
    plan = planned(controller, "shares=measured", "batch=64", "speeds=v100a:0=5+9")
    for node in plan.nodes:
        (setting,) = (word for word in node.command if word.startswith("--speeds="))
        speeds = parse_speeds(setting.removeprefix("--speeds="))
        assert speeds["v100a", 0] == parse_speeds("v100a:0=5+9")["v100a", 0]
        assert speeds["a2000a", 0] == speeds["a2000b", 0] == remembered_speed("a2000")


def remembered_speed(name):
    return parse_speeds("x:0=4+3.003" if name.startswith("a2000") else "x:0=3+1.2")["x", 0]


def test_a_rank_that_is_not_worth_it_is_left_out_aloud(controller):
    for (node, _), kind in kinds(controller).items():
        controller.store.save_profile(remembered(kind, 4000 if node.startswith("a2000") else 3, 1.2))
    plan = planned(controller, "shares=measured", "batch=64", only=("v100a", "a2000a", "a2000b"))
    assert {node.name: node.shares for node in plan.nodes} == {"v100a": (64,), "a2000a": (0,), "a2000b": (0,)}
    assert any("a2000a:0 is left out (share 0)" in note and "4002 ms" in note for note in plan.notes)
    assert [node.name for node in planned(controller, "shares=measured", "batch=64").nodes] == ["v100a"]


def test_without_a_profile_measured_says_what_to_do_and_auto_begins_equal(controller):
    with pytest.raises(UsageError, match=r"a2000b:0.* not been measured") as caught:
        planned(controller, "shares=measured")
    assert "orch profile --exp mnist_lenet" in caught.value.remedy
    plan = planned(controller, "shares=auto", "batch=63")
    assert {node.shares for node in plan.nodes} == {(21,)}
    assert any("begin equal" in note for note in plan.notes)
    assert all(node.solo_samples_per_s is None for node in plan.nodes)


def test_a_share_of_which_no_node_knows_is_refused_before_anything_starts(controller):
    with pytest.raises(UsageError, match="v200 takes no part"):
        planned(controller, "shares=v200=3,v100a=2")
    shares = {node.name: node.shares for node in planned(controller, "shares=v100a=2,a2000a=1,a2000b=1").nodes}
    assert shares == {"v100a": (32,), "a2000a": (16,), "a2000b": (16,)}


def test_only_memory_that_was_measured_cuts_a_share_into_parts(controller):
    kind = kinds(controller)["v100a", 0]
    assert remembered(kind, 3, 1.2, cap=48).speed.cap == 48
    ended_by_time = remembered(kind, 3, 1.2, largest=8)
    assert ended_by_time.speed.cap is None
    assert ended_by_time.samples_per_s(100) == pytest.approx(100_000 / 123)
    assert remembered(kind, 10, 1, cap=40).samples_per_s(100) == pytest.approx(40_000 / 50)


def test_speeds_survive_their_form():
    speeds = parse_speeds("a16-x:1=0.5+1.25/512,v100:0=0+3")
    assert parse_speeds(format_speeds(speeds)) == speeds
    for wrong in ("v100=1+2", "v100:0=1", "v100:0=1+0", "v100:0=-1+1", "v100:0=1+1/0", "v:0=1+1,v:0=1+1", "v:0=nan+1"):
        with pytest.raises(ValueError, match=r"expected|once|no sample"):
            parse_speeds(wrong)


# ---- after a run --------------------------------------------------------------------------------------------------


def run_of(tmp_path, *lines, solo=(100.0, 300.0)):
    """A collected run of two nodes whose rank 0 wrote these events."""
    node = {"address": "1", "interface": None, "device": "cpu", "gpu": "X", "ranks": 1, "python": "p", "workdir": "w"}
    nodes = tuple(
        NodePlan(**node, name=name, node_rank=i, first_rank=i, torchrun=(), command=(), solo_samples_per_s=solo[i])
        for i, name in enumerate("ab")
    )
    code = CodeFolder(sha256="0", source="s", files=0, size_bytes=0)
    plan = LaunchPlan(
        schema=1, job="j", exp="mnist_lenet", kind="experiment", cluster="c", settings={"warmup_steps": 0}, master="a",
        master_address="1", rendezvous_port=1, world_size=2, created="x", code=code, nodes=nodes,
    )  # fmt: skip
    run = RunFolder(tmp_path / "run")
    run.root.mkdir()
    run.plan.write_text(plan.model_dump_json(by_alias=True))
    for rank, name in enumerate("ab"):
        run.rank(name, rank).mkdir(parents=True)
        steps = [{"event": "step", "step": i, "samples": 10, "t_ms": 100, "compute_ms": 50} for i in range(3)]
        text = "".join(json.dumps(event) + "\n" for event in [*steps, *lines])
        run.metrics(name, rank).write_text(text)
    return run


def test_efficiency_is_measured_against_profiles_where_every_host_has_one(tmp_path):
    summary = analyse(run_of(tmp_path))
    assert (summary.efficiency_basis, summary.samples_per_s) == ("solo", pytest.approx(200))
    assert summary.efficiency == pytest.approx(0.5)
    (tmp_path / "other").mkdir()
    assert analyse(run_of(tmp_path / "other", solo=(100.0, None))).efficiency_basis == "estimated"


def test_the_report_draws_how_shares_followed_and_takes_nothing_on_trust(tmp_path):
    from orchestrator.views import render_report

    good = {"event": "rebalance", "step": 7, "shares": [45, 19], "before": [32, 32], "spread": 0.83}
    bad = [{**good, "shares": [1]}, {**good, "shares": [-1, 65]}, {**good, "spread": "<b>"}, {**good, "step": -1}]
    summary = analyse(run_of(tmp_path, *bad, good))
    assert [(change.step, change.shares, change.before) for change in summary.rebalances] == [(7, (45, 19), (32, 32))]
    page = render_report(summary)
    assert "Shares that followed the speeds" in page and "83 % apart" in page
    assert "Shares that followed" not in render_report(summary.model_copy(update={"rebalances": ()}))
