"""`orch plan`, `strategy=auto`, and the prediction that stands beside the measurement."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from math import prod
from pathlib import Path

import pytest

from orchestrator.forecast import (
    GLOO,
    HostSpeed,
    LinkCosts,
    Scene,
    Site,
    WhatIf,
    Workload,
    inputs_of,
    network_from,
    prediction_of,
    read_network,
    runs_measuring,
)
from orchestrator.planning import Profile, kinds_of
from orchestrator.results import Summary
from orchestrator.results.analyse import analyse
from orchestrator.views import Outlook, render_report
from orchestrator.views.plan_rows import hosts_of_change
from tests.support.plan_command import RESNET, dry_run, orch, planned, remember
from tests.support.run_folders import two_hosts
from trainer.measure import blocks_on_paper
from trainer.shared import Speed


def collectives(alpha_ms=2.0, gbps=2.2, noise_ms=0.0, **changes):
    """A collected run that measured the network, as `orch collect` leaves it. noise_ms: by which small sizes differ."""
    sizes = [2**power for power in range(10, 29, 2)]
    times = [
        {"operation": "all_reduce", "bytes": size, "iterations": 5,
         "time_ms": alpha_ms + (-1) ** number * noise_ms * (size <= 2**14) + 8e-6 * size / gbps}
        for number, size in enumerate(sizes)
    ]  # fmt: skip
    nodes = [{"name": name, "gpu": "x", "ranks": 1} for name in ("a2000", "v100", "third")]
    found = {"schema": 1, "job": "collectives-20261121-0912-abc", "experiment": "collectives", "state": "succeeded"}
    found |= {"cluster": "lab-a2000-v100", "world_size": 3, "nodes": nodes}
    return found | {"collectives": {"declared_gbps": 2.5, "times": times}} | changes


def write_collectives(folder, **changes):
    found = collectives(**changes)
    (folder / found["job"]).mkdir(parents=True)
    (folder / found["job"] / "summary.json").write_text(json.dumps(found))


# ---- the command ----------------------------------------------------------------------------------------------------


def test_the_best_of_each_fidelity_fits_a_hundred_columns(home):
    shown = orch("plan", *RESNET).stdout.splitlines()
    table = [line for line in shown if re.match(r"(fidelity|exact|half|compressed|late|local)\b", line)]
    assert len(table) == 9
    assert any(line.startswith("exact *") and "pipeline" in line and "slowest stage" in line for line in table)
    assert all(len(line.rstrip()) <= 100 for line in table)
    assert any(line.startswith("exact *") and "ddp" in line and "network" in line for line in table)
    whole = orch("plan", *RESNET, "--set", "shares=auto").stdout.splitlines()
    assert any("v100 alone, 833 samples/s" in line for line in whole)
    assert any("the pace in the inventory" in line for line in shown)


def test_the_document_has_every_way_and_what_it_rests_on(home):
    document = planned()
    assert document["best"]["exact"]["samples_per_s"] == max(
        way["samples_per_s"] for way in document["ways"] if way["way"]["fidelity"] == "exact"
    )
    assert {way["way"]["strategy"] for way in document["ways"]} == {
        "ddp",
        "allreduce",
        "allreduce_flat",
        "parameter_average",
        "tensor",
    }
    assert [(h["name"], h["speed_from"], h["link_bps"]) for h in document["hosts"]] == [
        ("v100", "pace", 0.94 * 2.5e9),
        ("a2000", "pace", 0.94 * 2.5e9),
    ]
    assert {change["change"] for change in document["what_if"]} >= {
        "links four times as fast",
        "adding a host like v100",
    }
    assert document["failures"] is None


def test_each_fidelity_has_its_row_of_a_cut_network(home):
    document = planned()
    assert document["pipelines"].keys() == {"exact", "half", "late"}
    assert "late" not in document["best"]
    assert document["pipelines"]["exact"] == document["pipeline"]
    slow_link = planned("--bandwidth", "100Mbps")["pipelines"]
    assert slow_link["half"]["samples_per_s"] > 1.2 * slow_link["exact"]["samples_per_s"]
    shown = orch("plan", *RESNET, "--set", "fidelity=half").stdout.splitlines()
    assert [line.split("pipeline")[0].strip() for line in shown if " pipeline " in line] == ["exact", "half *", "late"]
    assert sum(line.startswith("late ") and "pipeline after 10 %" in line for line in shown) == 1


def test_the_same_plan_twice_says_the_same(home):
    assert planned() == planned()


def test_a_bandwidth_that_is_given_beats_what_is_declared(home):
    fast, slow = planned("--bandwidth", "10Gbps"), planned("--bandwidth", "1Gbps")
    assert fast["best"]["exact"]["step_ms"] < planned()["best"]["exact"]["step_ms"] < slow["best"]["exact"]["step_ms"]
    assert fast["hosts"][0]["link_bps"] == 0.94 * 10e9


def test_fewer_nodes_are_predicted_alone(home):
    document = planned("--nodes", "v100")
    assert document["best"]["exact"]["samples_per_s"] == pytest.approx(833)
    assert document["without"] == []


def test_links_are_as_the_newest_run_of_collectives_measured_them(home, tmp_path):
    write_collectives(tmp_path / "runs", job="collectives-20261120-0912-old", alpha_ms=9e3)
    write_collectives(tmp_path / "runs")
    write_collectives(tmp_path / "runs", job="collectives-20261122-0912-oth", cluster="another")
    document = planned()
    assert document["hosts"][0]["link_bps"] == pytest.approx(2.2e9 * 4 / 3)
    assert any("measured by collectives-20261121-0912-abc" in words for words in document["basis"])
    assert any("latency as collectives-20261121-0912-abc" in words for words in document["basis"])


def test_of_one_host_a_run_over_its_own_ranks_says_what_they_exchange(home, tmp_path):
    """Not one over several hosts; nor does this one say anything of links."""
    nodes = home.cluster().nodes
    twice = tuple(node.model_copy(update={"ranks": 2}) for node in nodes)
    home.save_cluster(home.cluster().model_copy(update={"nodes": twice}), current=True)
    write_collectives(tmp_path / "runs", job="collectives-20261120-0912-all")
    assumed = planned("--nodes", "v100")
    assert not any("measured them" in words for words in assumed["basis"])
    inside = {"world_size": 2, "nodes": [{"name": "v100", "gpu": "x", "ranks": 2}]}
    write_collectives(tmp_path / "runs", job="collectives-20261121-0912-one", gbps=0.5, **inside)
    measured = planned("--nodes", "v100")
    assert any("as collectives-20261121-0912-one measured them" in words for words in measured["basis"])
    assert measured["best"]["exact"]["step_ms"] > 2 * assumed["best"]["exact"]["step_ms"]
    assert any("measured by collectives-20261120-0912-all" in words for words in planned()["basis"])


def test_a_run_of_collectives_gives_the_latency_of_one_message():
    found = network_from(Summary.model_validate(collectives()))
    assert found.message_s == pytest.approx(2000e-6 / 4, rel=0.001)
    assert found.bps == pytest.approx(2.2e9 * 4 / 3)
    noisy = network_from(Summary.model_validate(collectives(noise_ms=1.8)))
    assert noisy.bps == pytest.approx(found.bps, rel=0.001)
    assert noisy.message_s == pytest.approx(found.message_s, rel=0.2)
    assert network_from(Summary.model_validate(collectives(world_size=1))) is None


def test_a_damaged_run_is_passed_over(home, tmp_path):
    (tmp_path / "runs" / "collectives-9").mkdir(parents=True)
    (tmp_path / "runs" / "collectives-9" / "summary.json").write_text("{")
    assert any("as declared" in words for words in planned()["basis"])


def test_a_profile_beats_the_pace(home):
    plan = dry_run()
    facts = home.cluster().facts
    for (name, _), kind in kinds_of(plan, facts).items():
        measured = {"samples": (8, 16), "step_ms": (11.0, 12.0), "fixed_ms": 10.0, "sample_ms": 1.0, "largest": 512}
        home.save_profile(
            Profile(
                **kind.model_dump(), **measured, cap=100, forward_ms=1.0, optim_ms=1.0, node=name,
                created="2026-11-21T09:00:00+00:00",
            )
        )  # fmt: skip
    document = planned()
    assert {h["speed_from"] for h in document["hosts"]} == {"profile"}
    assert document["hosts"][0]["ranks"] == [{"fixed_ms": 10.0, "sample_ms": 1.0, "cap": 100}]


def test_a_profile_that_contradicts_the_catalogue_is_named(home, tmp_path):
    store = remember(tmp_path, "a2000_v100.yaml")
    for (name, _), kind in kinds_of(dry_run(), store.cluster().facts).items():
        sample_ms = {"a2000": 0.9, "v100": 0.13}[name]  # the catalogue of the tests has 0.4 and 0.128
        measured = {"samples": (8, 16), "step_ms": (11.0, 12.0), "fixed_ms": 10.0, "sample_ms": sample_ms}
        made = {"largest": 512, "cap": None, "forward_ms": 1.0, "optim_ms": 1.0, "node": name}
        store.save_profile(Profile(**kind.model_dump(), **measured, **made, created="2026-11-21T09:00:00+00:00"))
    (words,) = [words for words in planned()["basis"] if "catalogue" in words]
    assert words.startswith("a2000: a sample takes 2.25 times as long as for the catalogue's RTX A2000 (+-28 %")
    assert words.endswith("the profile counts")


def test_gpus_without_a_profile_are_estimated_and_said_to_be(home, tmp_path):
    remember(tmp_path, "a2000_v100.yaml")
    document = planned()
    assert {h["speed_from"] for h in document["hosts"]} == {"catalogue"}
    assert any("estimate" in words and "orch profile" in words for words in document["basis"])


def test_a_cpu_whose_speed_nobody_measured_is_an_error_with_its_remedy(home, tmp_path):
    remember(tmp_path, "a2000_v100.yaml")
    done = orch("plan", *RESNET, "--set", "device=cpu", code=2)
    assert "orch profile --exp resnet152_cifar" in done.stderr


@pytest.mark.parametrize("more", [(), ("--set", "fidelity=local"), ("--set", "strategy=pipeline")])
def test_a_network_whose_layers_are_not_known_is_planned_without_a_prediction(home, more):
    """lab hosts are paced; what they make of the network they say themselves."""
    plan = dry_run("--set", "model=small_resnet", *more)
    assert (plan.settings["model"], plan.prediction) == ("small_resnet", None)
    said = orch("plan", *RESNET, "--set", "model=small_resnet", *more, code=2).stderr
    assert "small_resnet: its layers are not known here, so that nothing is predicted" in said
    assert "known: lenet, resnet50, resnet101, resnet152, gpt_tiny, gpt_small, gpt2_small, and 59 of" in said


def test_torchvisions_networks_are_predicted_without_a_profile(home):
    document = planned("--set", "model=resnet18")
    assert document["gradient_bytes"] == 4 * 11_181_642
    assert document["pipeline"]["stages"]
    assert planned("--set", "model=vgg11")["pipeline"] is None
    remember(Path(os.environ["ORCH_HOME"]).parent, "a2000_v100.yaml")
    assert any("depthwise" in words for words in planned("--set", "model=mobilenet_v2")["basis"])


def test_a_network_that_a_profile_saw_is_predicted(home):
    """In the same way as one whose layers are written down here."""
    small = ("--set", "model=small_resnet")
    blocks = blocks_on_paper("small_resnet", (3, 32, 32), 10)
    measured = {"samples": (8, 16), "step_ms": (11.0, 12.0), "fixed_ms": 10.0, "sample_ms": 1.0, "largest": 512}
    for (name, _), kind in kinds_of(dry_run(*small), home.cluster().facts).items():
        made = {"cap": None, "forward_ms": 1.0, "optim_ms": 1.0, "created": "2026-11-21T09:00:00+00:00"}
        home.save_profile(Profile(**kind.model_dump(), **measured, **made, node=name, network=blocks))
    document = planned(*small)
    assert {host["speed_from"] for host in document["hosts"]} == {"profile"}
    assert document["pipeline"]["stages"] and dry_run(*small).prediction.samples_per_s > 0
    assert document["gradient_bytes"] == 4 * sum(prod(shape) for block in blocks for layer in block["layers"]
                                                 for shape in layer["shapes"])  # fmt: skip


def test_a_host_whose_memory_holds_no_sample_is_named(home):
    cluster = home.cluster()
    small = [
        n.model_copy(update={"paced": n.paced.model_copy(update={"memory_bytes": 1 << 20})}) for n in cluster.nodes
    ]
    home.save_cluster(cluster.model_copy(update={"nodes": tuple(small)}), current=True)
    assert "not one sample fits into its memory" in orch("plan", *RESNET, code=2).stderr


def test_a_network_that_no_host_holds_is_cut(home):
    """Of weights and what one sample keeps ResNet-152 needs 724 MiB, each half of it less."""
    cluster = home.cluster()
    small = [
        n.model_copy(update={"paced": n.paced.model_copy(update={"memory_bytes": 600 << 20})}) for n in cluster.nodes
    ]
    home.save_cluster(cluster.model_copy(update={"nodes": tuple(small)}), current=True)
    said = orch("plan", *RESNET, code=2).stderr
    assert "not one sample fits into its memory" in said
    assert "--set strategy=pipeline" in said
    for words in (("--set", "strategy=pipeline"), ("--set", "strategy=auto")):
        plan = dry_run(*words)
        assert len(plan.nodes) == 2
        assert plan.settings["stages"]
        assert plan.prediction.samples_per_s > 500
    for node in cluster.nodes:
        (said,) = (note for note in plan.notes if note.startswith(f"{node.name}: blocks "))
        assert float(re.search(r"([\d.]+) GiB", said)[1]) <= 600 / 1024


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--exp", "collectives"), "trains nothing"),
        (("--exp", "resnet152_cifar", "--nodes", "500xA2000"), "--bandwidth"),
        (("--exp", "resnet152_cifar", "--nodes", "5xB2000", "--bandwidth", "1Gbps"), "not in the catalogue"),
        (("--exp", "resnet152_cifar", "--bandwidth", "fast"), "2.5Gbps"),
        (("--exp", "resnet152_cifar", "--nodes", "nowhere"), "no such node"),
        (("--exp", "resnet", "--nodes", "5xA2000", "--bandwidth", "1Gbps"), "resnet152_cifar"),
    ],
)
def test_wrong_usage_is_refused_in_words(home, words, said):
    assert said in orch("plan", *words, code=2).stderr


def changed(home, speed_bps=None, **nodes):
    """The remembered hosts, without declared links. speed_bps: of each interface."""
    cluster = home.cluster()
    links = {
        name: tuple(each.model_copy(update={"speed_bps": speed_bps}) for each in facts.interfaces)
        for name, facts in cluster.facts.items()
    }
    update = {
        "nodes": tuple(node.model_copy(update={"bandwidth_bps": None, **nodes}) for node in cluster.nodes),
        "facts": {name: facts.model_copy(update={"interfaces": links[name]}) for name, facts in cluster.facts.items()},
    }
    home.save_cluster(cluster.model_copy(update=update), current=True)


def test_a_link_that_is_not_declared_is_as_its_interface_reports(home):
    changed(home, speed_bps=1e9)
    shown = orch("plan", *RESNET).stdout
    assert "links: as the interfaces report (slowest 1Gbps), times 0.94" in shown
    assert planned()["best"] == planned("--bandwidth", "1Gbps")["best"]


def test_all_that_a_plan_lacks_is_named_at_once(home):
    changed(home, paced=None, gpu="CPU", device="cpu")
    said = " ".join(orch("plan", *RESNET, code=2).stderr.split())
    assert "a2000: the speed is unknown" in said and "a2000: the bandwidth of the link is unknown" in said
    assert "orch profile" in said and "declare its `bandwidth`" in said


def test_a_thousand_hosts_that_one_does_not_have(tmp_path, monkeypatch):
    monkeypatch.setenv("ORCH_HOME", str(tmp_path))
    words = ("--nodes", "500xA2000,500xV100", "--bandwidth", "2.5Gbps")
    document = planned(*words)
    assert document["failures"]["a_day"] == pytest.approx(1000 / 365)
    assert document["best"]["exact"]["binds"] == "wire"
    shown = orch("plan", *RESNET, *words).stdout
    assert "500 hosts A2000, 500 hosts V100" in shown
    assert "failures: 2.7 a day" in shown
    assert "estimates from the hardware catalogue (version 0: " in shown


def imagined(*words):
    return orch("plan", *RESNET, "--bandwidth", "2.5Gbps", *words).stdout


def test_hosts_that_one_does_not_have_are_spoken_of_by_kind():
    """Names that are made up help nobody."""
    many = imagined("--nodes", "500xA2000,500xV100", "--set", "batch=64000")
    assert "better: without 500xA2000 (--nodes 500xV100), " in many
    assert "adding a V100 host: " in many
    few = imagined("--nodes", "1xA2000,2x4xV100")
    assert "better: one 4xV100 host alone (--nodes 1x4xV100), " in few
    assert "adding a 4xV100 host: " in few
    assert "V100-" not in many + few


def what_if(hosts, stay):
    """What `plan` says of leaving out all but some of these hosts."""
    wire = LinkCosts([Site(host.name, 1, 1e9, 1e9) for host in hosts], GLOO)
    scene = Scene(Workload((), 64), hosts, wire)
    found = Outlook("lab", "x", scene, advice=None, basis=(), speeds_from={})
    return hosts_of_change(WhatIf("without", tuple(stay), choice=None), found)


def test_it_is_said_who_is_left_out():
    hosts = tuple(HostSpeed(f"gpu{i}", (Speed(0, 1.0 + i // 10),)) for i in range(30))
    names = [host.name for host in hosts]
    assert what_if(hosts, names[:1]) == "gpu0 alone"
    assert what_if(hosts, names[:2]) == "only gpu0, gpu1 (--nodes gpu0,gpu1)"
    assert what_if(hosts, [*names[:3], *names[4:]]) == "without gpu3"
    assert what_if(hosts, names[10:]) == "without the 10 hosts like gpu0"
    assert what_if(hosts, names[:10]) == "without the 10 hosts like gpu10 and the 10 hosts like gpu20"
    groups = tuple(HostSpeed(f"A2000 6GB-{i}", (Speed(0, 1.0),), "A2000 6GB") for i in range(3))
    assert what_if(groups, ["A2000 6GB-1"]) == "one A2000 6GB host alone (--nodes '1xA2000 6GB')"


def test_a_local_batch_is_predicted_where_it_holds_and_nowhere_else():
    words = ("--nodes", "2xA2000,2xV100", "--bandwidth", "2.5Gbps", "--set", "batch=2048", "--set", "fidelity=local")
    without, with_it = planned(*words), planned(*words, "--set", "local_batch=16")
    assert with_it["best"]["local"]["step_ms"] > 1.5 * without["best"]["local"]["step_ms"]
    assert with_it["best"]["exact"] == without["best"]["exact"]
    assert with_it["sum_of_parts_samples_per_s"] == without["sum_of_parts_samples_per_s"]


def test_of_hosts_that_one_has_a_local_batch_leaves_the_speeds_alone(home):
    document = planned("--set", "fidelity=local", "--set", "local_batch=16")
    assert {rank["cap"] for host in document["hosts"] for rank in host["ranks"]} == {None}
    assert document["best"]["local"]["local_steps"][0] > 32
    assert document["sum_of_parts_samples_per_s"] == planned()["sum_of_parts_samples_per_s"]


def test_a_share_beyond_what_memory_is_thought_to_hold_is_said(home, tmp_path):
    """Without a profile the ranks receive no speeds."""
    remember(tmp_path, "a2000_v100.yaml")
    words = ("--set", "batch=16384")
    remedy = "`orch profile`, or --set accumulate=3"
    assert fit(dry_run(*words).notes) == [
        f"a2000: a share of 8192 will not fit into its memory at once (3017 samples, estimated); {remedy}",
        f"v100: a share of 8192 will not fit into its memory at once (4184 samples, estimated); {remedy}",
    ]
    assert fit(dry_run(*words, "--set", "accumulate=3").notes) == []
    assert fit(dry_run(*words, "--set", "speeds=a2000:0=1+1/300,v100:0=1+1/300").notes) == []
    local = dry_run(*words, "--set", "fidelity=local", "--set", "local_batch=4000")
    assert [words.rpartition(" ")[2] for words in fit(local.notes)] == ["local_batch=3017"]
    assert fit(planned()["basis"]) == []
    assert fit(planned("--set", "batch=32768")["basis"])
    kinds = planned("--nodes", "2xA2000,2xV100", "--bandwidth", "1Gbps", "--set", "batch=65536")["basis"]
    assert [words.partition(":")[0] for words in fit(kinds)] == ["A2000", "V100"]


def fit(sentences):
    return [sentence for sentence in sentences if "will not fit into its memory" in sentence]


THOUSAND = ("--nodes", "500xA2000,500xV100", "--bandwidth", "2.5Gbps")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (("sync_bn=true", "strategy=fsdp"), "strategy=fsdp"),
        (("strategy=horovod",), "strategy=horovod"),
        (("shares=v100=5,a2000=2", "num_workers=0"), "shares=v100=5,a2000=2, num_workers=0"),
        (("amp=bf16", "strategy=allreduce", "shares=measured", "epochs=3", "bucket_mib=10", "loader=auto"), None),
    ],
)
def test_what_a_plan_does_not_look_at_is_said(home, settings, said):
    words = [word for setting in settings for word in ("--set", setting)]
    found = [sentence for sentence in planned(*words)["basis"] if sentence.startswith("not included in the prediction")]
    assert found == ([f"not included in the prediction: {said}"] if said else [])


def test_16_bits_change_the_speeds_of_cards_and_are_offered(home, tmp_path):
    remember(tmp_path, "a2000_v100.yaml")
    for words in (THOUSAND, ()):
        fp32, fp16 = planned(*words), planned(*words, "--set", "amp=fp16")
        assert fp16["sum_of_parts_samples_per_s"] > 1.1 * fp32["sum_of_parts_samples_per_s"]
        best = max(fp16["best"]["exact"]["samples_per_s"], (fp16["pipeline"] or fp16["best"]["exact"])["samples_per_s"])
        assert fp32["in_half"]["samples_per_s"] == pytest.approx(best)
        assert fp16["in_half"] is None
    assert "--set amp=fp16, which rounds" in orch("plan", *RESNET).stdout
    assert planned("--set", "fidelity=compressed")["in_half"] is None  # refused with fp16
    assert "V100 only emulates bf16" in orch("plan", *RESNET, "--set", "amp=bf16", code=2).stderr
    assert "V100 only emulates bf16" in orch("run", *RESNET, "--set", "amp=bf16", "--dry-run", code=2).stderr


def test_an_estimate_names_what_it_leaves_out(home, tmp_path):
    assert "not included in the prediction: backend=gloo" in planned(*THOUSAND, "--set", "backend=gloo")["basis"]
    remember(tmp_path, "a2000_v100.yaml")
    assert "not included in the prediction: cuda_graph=off" in planned("--set", "cuda_graph=off")["basis"]


def test_local_in_32_bits_is_shown_no_other(home):
    words = ("--set", "fidelity=local", "--set", "wire=fp32")
    assert {way["way"]["half_wire"] for way in planned()["ways"]} == {False, True}
    assert {way["way"]["half_wire"] for way in planned(*words)["ways"]} == {False}


def _number(text):
    return float(text.replace(",", ""))


def test_rings_of_hosts_with_several_gpus_are_shown_beside_each_other(tmp_path, monkeypatch):
    monkeypatch.setenv("ORCH_HOME", str(tmp_path))
    shown = orch("plan", *RESNET, "--nodes", "2x4xA16", "--bandwidth", "2.5Gbps").stdout
    flat, by_host = map(
        _number, re.findall(r"one ring through all ranks: ([\d.,]+) ms; inside each host first: ([\d.,]+)", shown)[0]
    )
    assert by_host < flat


# ---- strategy=auto and predictions ----------------------------------------------------------------------------------


def test_auto_takes_the_fastest_that_is_predicted_and_says_so(home):
    whole = ("--set", "shares=auto")  # which no pipeline can
    plan = dry_run("--set", "strategy=auto", "--nodes", "a2000,v100", *whole)
    assert plan.settings["strategy"] == "ddp"
    for node in plan.nodes:
        assert node.command[-2:] == ("--strategy=ddp", f"--bucket_mib={plan.settings['bucket_mib']}")
        assert not any("auto" in word for word in node.command if "strategy" in word)
    assert any(note.startswith("strategy=auto: strategy=ddp") for note in plan.notes)
    assert [each.what for each in plan.faster] == ["v100 alone"]
    assert plan.prediction.samples_per_s >= dry_run(*whole).prediction.samples_per_s


def test_auto_cuts_the_network_where_that_is_fastest_and_says_who_holds_what(home):
    plan = dry_run("--set", "strategy=auto")
    assert plan.settings["strategy"] == "pipeline"
    assert plan.prediction.samples_per_s > 0.95 * (333 + 833)
    assert plan.prediction.words.endswith("limited by the slowest stage")
    assert plan.faster == ()
    stages = plan.settings["stages"]
    for node in plan.nodes:
        assert {"--strategy=pipeline", f"--stages={stages}"} <= set(node.command)
    assert any(note.startswith(f"strategy=auto (exact): strategy=pipeline, stages={stages}") for note in plan.notes)
    for node in ("a2000", "v100"):
        (said,) = (note for note in plan.notes if note.startswith(f"{node}: blocks "))
        assert all(word in said for word in ("% of the work", "MB of weights", "GiB of memory", "MB an update"))
    assert all(note in orch("run", *RESNET, "--set", "strategy=auto", "--dry-run").stderr for note in plan.notes)
    found = planned("--set", "strategy=auto")
    assert found["pipeline"]["samples_per_s"] == pytest.approx(plan.prediction.samples_per_s)
    assert found["pipeline"]["samples_per_s"] > 3.5 * found["best"]["exact"]["samples_per_s"]


def test_at_the_catalogues_speeds_auto_leaves_the_work_to_the_fastest_host(home, tmp_path):
    remember(tmp_path, "lab_a2000_v100_catalogue.yaml", gpus=0)
    assert [node.name for node in dry_run("--set", "strategy=auto").nodes] == ["v100"]


def test_a_pipeline_without_stages_is_cut_by_the_plan_and_one_with_them_is_looked_at(home):
    plan = dry_run("--set", "strategy=pipeline", "--set", "accumulate=16")
    assert plan.settings["stages"]
    assert plan.settings["accumulate"] == 16
    by_hand = ("--set", "strategy=pipeline", "--set", "stages=v100:0-25,a2000:26-51")
    slower = dry_run(*by_hand, "--set", "accumulate=16")
    assert slower.settings["stages"] == "v100:0-25,a2000:26-51"
    assert slower.prediction.samples_per_s < 0.8 * plan.prediction.samples_per_s
    wrong = ("--set", "strategy=pipeline", "--set", "stages=v100:0-25,a16:26-51")
    said = orch("run", *RESNET, *wrong, "--dry-run", code=2).stderr
    assert "a16, a2000: each host of the job has one stage" in said
    assert "leave stages out" in said


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (("fidelity=half",), {"strategy": "pipeline", "fidelity": "half"}),
        (("fidelity=half", "shares=auto"), {"strategy": "ddp", "fidelity": "half"}),
        (("fidelity=late",), {"strategy": "pipeline", "fidelity": "late"}),
        (("fidelity=compressed", "compress_rank=4"), {"strategy": "allreduce_flat", "compress_rank": 4}),
        (("fidelity=local", "local_steps=8"), {"strategy": "parameter_average", "local_steps": 8}),
    ],
)
def test_auto_stays_within_the_fidelity_that_is_allowed(home, settings, expected):
    words = [word for setting in ("strategy=auto", *settings) for word in ("--set", setting)]
    plan = dry_run(*words)
    assert {key: plan.settings[key] for key in expected} == expected
    assert f"--strategy={expected['strategy']}" in plan.nodes[0].command
    assert any(f"({plan.settings['fidelity']})" in note for note in plan.notes)


def test_a_late_pipeline_is_cut_and_predicted_for_the_mean_of_its_run(home):
    words = ("--set", "strategy=pipeline", "--set", "fidelity=late")
    plan, at_once = dry_run(*words), dry_run(*words, "--set", "late_after=0")
    assert plan.settings["stages"]
    assert at_once.prediction.step_ms < plan.prediction.step_ms
    assert any("10 % of its updates exact, then late" in words for words in plan.prediction.basis)
    assert not any("exact" in words for words in at_once.prediction.basis)
    cut = [word for key in ("stages", "accumulate") for word in ("--set", f"{key}={at_once.settings[key]}")]
    exact = dry_run("--set", "strategy=pipeline", *cut).prediction.step_ms
    late = dry_run(*words, *cut, "--set", "late_after=0.25").prediction.step_ms
    assert late == pytest.approx(0.25 * exact + 0.75 * at_once.prediction.step_ms)
    found = planned(*words)
    assert found["fidelity"] == "late"
    assert found["pipeline"] == found["pipelines"]["late"]
    assert found["pipeline"]["samples_per_s"] == pytest.approx(plan.prediction.samples_per_s)
    shown = orch("plan", *RESNET, *words).stdout
    assert "\nlate *  " in shown
    assert "exact *" not in shown


def test_a_late_pipeline_needs_two_hosts(home):
    said = orch(
        "run", *RESNET, "--nodes", "v100", "--set", "strategy=auto", "--set", "fidelity=late", "--dry-run", code=2
    ).stderr
    assert "strategy=auto: no strategy fits fidelity late" in said


def test_local_in_16_bits_is_predicted_where_a_person_asks_for_it(home):
    local = ("--set", "fidelity=local", "--set", "local_overlap=0", "--set", "shares=v100=5,a2000=2")
    whole, half = dry_run(*local).prediction, dry_run(*local, "--set", "wire=bf16").prediction
    assert half.step_ms < whole.step_ms


def test_the_prediction_kept_with_a_run_knows_sync_bn(home):
    plain, together = dry_run().prediction, dry_run("--set", "sync_bn=true").prediction
    # 155 BatchNorms, each with an all_gather of one message and an all_reduce of two, a millisecond each.
    assert together.step_ms - plain.step_ms > 155 * 3
    assert any("sync_bn" in words for words in together.basis)
    assert planned("--set", "sync_bn=true")["best"]["exact"]["way"]["sync_bn"]


@pytest.mark.parametrize(
    ("fidelity", "strategy", "setting"),
    [("compressed", "allreduce_flat", "compress_after"), ("local", "ddp", "local_after")],
)
def test_the_prediction_kept_with_a_run_knows_how_long_it_is_exact(home, fidelity, strategy, setting):
    lossy = ("--set", f"fidelity={fidelity}", "--set", "steps=100", "--set", f"strategy={strategy}")
    exact = dry_run("--set", f"strategy={strategy}").prediction.step_ms
    at_once = dry_run(*lossy, "--set", f"{setting}=0").prediction.step_ms
    for after, part in ((-1, 0.1), (25, 0.25), (200, 1.0)):
        prediction = dry_run(*lossy, "--set", f"{setting}={after}").prediction
        assert prediction.step_ms == pytest.approx(part * exact + (1 - part) * at_once)
        assert any(f"{100 * part:.3g} % of its updates exact" in words for words in prediction.basis)
    asked = planned(*lossy, "--set", f"{setting}=-1")
    assert asked["best"][fidelity]["way"]["exact_part"] == pytest.approx(0.1)


def test_local_steps_that_are_left_to_us_stand_in_the_plan_and_in_every_command(home, tmp_path):
    plan = dry_run("--set", "fidelity=local", "--set", "local_steps=0", "--set", "wire=bf16")
    rounds = {key: plan.settings[key] for key in ("local_steps", "local_overlap")}
    assert 0 < rounds["local_overlap"] < rounds["local_steps"] <= 32
    for node in plan.nodes:
        assert [word for word in node.command if "local_" in word] == [f"--{key}={n}" for key, n in rounds.items()]
    assert any(note.startswith(f"local_steps=0: {rounds['local_steps']}, ") for note in plan.notes)
    asked = [f"--set={key}={n}" for key, n in rounds.items()]
    again = dry_run("--set", "fidelity=local", "--set", "wire=bf16", *asked)
    assert plan.prediction == again.prediction
    remember(tmp_path, "a2000_v100.yaml")
    words = ("--set", "fidelity=local", "--set", "local_steps=0", "--set", "local_overlap=40", "--set", "device=cpu")
    unknown = dry_run(*words)
    assert unknown.settings["local_steps"] == 41
    assert any(note.startswith("local_steps=0: 41, since ") and "orch profile" in note for note in unknown.notes)


def test_auto_keeps_what_a_person_chose(home):
    plan = dry_run("--set", "strategy=auto", "--set", "bucket_mib=7")
    assert plan.settings["bucket_mib"] == 7
    assert sum("bucket_mib" in word for word in plan.nodes[0].command) == 1


def test_auto_needs_speeds_and_links(home, tmp_path):
    remember(tmp_path, "a2000_v100.yaml")
    words = ("--set", "device=cpu", "--dry-run")
    assert "orch profile" in orch("run", *RESNET, "--set", "strategy=auto", *words, code=2).stderr
    orch("run", *RESNET, *words)


def test_a_plan_predicts_its_own_strategy_and_shares(home):
    equal, split = dry_run(), dry_run("--set", "shares=v100=5,a2000=2")
    assert equal.prediction.step_ms == pytest.approx(977, rel=0.05)
    assert split.prediction.step_ms < equal.prediction.step_ms
    assert dry_run("--set", "strategy=allreduce").prediction.step_ms == pytest.approx(2157, rel=0.05)
    assert dry_run("--set", "strategy=fsdp").prediction is None
    assert dry_run("--set", "strategy=horovod").prediction is None
    assert "horovod" not in {way["way"]["strategy"] for way in planned()["ways"]}
    assert "in steps of 949" in orch("run", *RESNET, "--set", "bucket_mib=25", "--dry-run").stdout
    assert "in steps of 962" in orch("run", *RESNET, "--dry-run").stdout


def test_micro_batches_that_are_asked_for_cost_their_fixed_part(home):
    plan = dry_run()
    view = inputs_of(plan, {})
    slow = tuple(
        dataclasses.replace(h, speeds=tuple(dataclasses.replace(s, fixed_ms=50.0) for s in h.speeds))
        for h in view.scene.hosts
    )
    view = dataclasses.replace(view, scene=dataclasses.replace(view.scene, hosts=slow))
    parts = plan.model_copy(update={"settings": {**plan.settings, "accumulate": 4}})
    assert prediction_of(parts, view).step_ms > prediction_of(plan, view).step_ms + 100


def test_the_prediction_stands_beside_the_measurement(tmp_path):
    run = two_hosts(tmp_path / "run")
    plan = json.loads(run.plan.read_text())
    plan["prediction"] = {"step_ms": 95.0, "samples_per_s": 1000.0, "binds": "wire", "is_estimate": True}
    run.plan.write_text(json.dumps(plan))
    summary = analyse(run)
    assert summary.of_prediction == pytest.approx(960 / 1000)
    assert json.loads(run.summary.read_text())["prediction"]["step_ms"] == 95.0
    page = render_report(summary)
    assert "estimated 1,000 samples/s in steps of 95.0 ms" in page
    assert "96 % of the prediction" in page


def test_a_run_without_a_prediction_has_none_to_show(tmp_path):
    summary = analyse(two_hosts(tmp_path / "run"))
    assert summary.prediction is None
    assert "Before it ran" not in render_report(summary)


def test_the_newest_measurement_is_the_one_that_was_started_last_whatever_the_clock_said(tmp_path, monkeypatch):
    numbers = {
        "collectives-20261127-2132-e7x": 7,
        "collectives-20261127-2330-9zz": 6,
        "collectives-20310101-0000-old": 0,
    }
    for name, number in numbers.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "job.json").write_text(json.dumps({"number": number} if number else {}))
    plain = two_hosts(tmp_path / "run")
    summary = analyse(plain).model_copy(update={"cluster": "c"})
    monkeypatch.setattr(Summary, "load", lambda run: summary.model_copy(update={"job": run.root.name}))
    names = [node.name for node in summary.nodes]
    assert [found.job for found in runs_measuring(tmp_path, "c", names)] == list(numbers)


def test_a_folder_without_runs_has_no_network(home, tmp_path):
    assert read_network(tmp_path / "nowhere", dry_run()) is None
