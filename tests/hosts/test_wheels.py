"""Which torch runs on which GPUs and drivers, and what `orch setup` makes of that."""

import pytest

from orchestrator.errors import UsageError
from orchestrator.hosts import BUILDS, RELEASES, Cluster, build_of, misfit, newest_for, numbers, supports
from orchestrator.provision import WantedVersions, choose, gpu_hosts
from tests.support.probed_hosts import CPU_TORCH, CU117, CU132, facts, gpu, node, torch

V100 = gpu("7.0", driver="580.95.05")
A2000 = gpu("8.6", name="NVIDIA RTX A2000 12GB", driver="580.95.05")
BLACKWELL = gpu("12.0", name="NVIDIA RTX PRO 6000", driver="580.95.05")
OLD_DRIVER = gpu("8.6", name="NVIDIA RTX A2000 12GB", driver="535.183.01")


@pytest.mark.parametrize(
    ("arch_list", "capability", "runs"),
    [
        (CU117, "7.0", True),
        (CU132, "7.0", False),
        (CU117, "8.9", True),  # sm_86 code runs on 8.9
        (CU117, "9.0", False),
        ((*CU117, "compute_86"), "9.0", True),  # PTX is compiled for it
        (("sm_86",), "8.0", False),  # a lower minor number
        (("sm_100",), "10.3", True),
        (("sm_90a",), "9.0", True),
        (("sm_100a",), "10.3", False),
        (("sm_100f",), "10.3", True),
        (("compute_90a",), "10.0", False),
        (("compute_100f",), "12.0", False),
        (("gfx90a", "junk"), "9.0", False),
    ],
)
def test_code_runs_where_nvidia_says_it_does(arch_list, capability, runs):
    assert supports(arch_list, capability) is runs


def test_every_known_release_has_a_build_and_later_ones_are_not_judged():
    assert [build_of(torch) for torch in RELEASES if build_of(torch) is None] == []
    assert {build_of(torch) for torch in RELEASES} == set(BUILDS)
    assert list(RELEASES) == sorted(RELEASES, key=numbers)
    assert [build_of(version) for version in ("2.99.0", "2.14.1+cu126", "junk")] == [None] * 3


@pytest.mark.parametrize(
    ("torch", "card", "words"),
    [
        ("2.10.0", V100, ""),
        ("2.11.0", V100, "no code for Tesla V100-PCIE-16GB (sm_70; built for sm_75 to sm_120)"),
        ("2.14.1+cu126", V100, ""),
        ("2.15.0", A2000, ""),
        (
            "2.15.0",
            OLD_DRIVER,
            "CUDA 13.2, which needs driver 580.65.06 or newer; NVIDIA RTX A2000 12GB has 535.183.01",
        ),
        ("2.7.1", BLACKWELL, "no code for NVIDIA RTX PRO 6000 (sm_120; built for sm_50 to sm_90)"),
        ("2.15.0", gpu(None, driver="470.1"), "CUDA 13.2, which needs driver 580.65.06 or newer; "),
    ],
)
def test_wheels_that_do_not_run_on_a_gpu_are_known_beforehand(torch, card, words):
    assert misfit(torch, card).startswith(words) and bool(misfit(torch, card)) == bool(words)


def test_the_newest_release_for_all_gpus_is_that_of_the_least():
    newest = RELEASES[-1]
    assert newest_for([A2000]) == newest_for([]) == newest
    assert newest_for([A2000, V100]) == newest_for([OLD_DRIVER]) == "2.10.0"
    assert newest_for([A2000, V100], but=["2.10.0"]) == "2.9.1"
    assert newest_for([A2000], newest="2.3.1") == "2.3.1"
    assert newest_for([gpu("3.7"), BLACKWELL]) is None


# ---- setup ----------------------------------------------------------------------------------------------------


def hosts(*cards, torches=()):
    """Facts of a host for each card; those without a torch of `torches` have none."""
    torches = [*torches, *[None] * len(cards)]
    return [facts(node=f"h{n}", gpus=(card,), torch=torches[n]) for n, card in enumerate(cards)]


def test_setup_installs_what_the_oldest_gpu_and_driver_run(monkeypatch):
    monkeypatch.setattr("orchestrator.provision.venvs._own_torch", lambda: "2.15.0")
    assert choose(None, None, hosts(A2000)) == WantedVersions("2.15.0", None, any_torch=True)
    assert choose(None, None, hosts(A2000, V100)) == WantedVersions("2.10.0", None, any_torch=True)
    assert choose(None, None, [facts(gpus=(V100,), torch=None, machine="aarch64")]).torch == "2.15.0"
    with pytest.raises(UsageError, match=r"no torch in its list whose wheels run on the GPUs and drivers of all hosts"):
        choose(None, None, hosts(gpu("3.7"), BLACKWELL))


def test_setup_says_why_it_takes_another_torch_than_this_machines(monkeypatch):
    monkeypatch.setattr("orchestrator.provision.venvs._own_torch", lambda: "2.15.0")
    assert choose(None, None, hosts(A2000)).reason == ""
    why = "it runs on all GPUs; the wheels of 2.15.0 hold no code for Tesla V100-PCIE-16GB (sm_70; built for sm_75 to"
    assert choose(None, None, hosts(A2000, V100)).reason.startswith(why)
    there = torch(version="2.3.1+cu121")
    assert "GPU hosts with a torch have this version" in choose(None, None, hosts(A2000, V100, torches=[there])).reason


def test_a_machine_with_an_old_torch_holds_new_gpus_back_no_more_than_it_must(monkeypatch):
    monkeypatch.setattr("orchestrator.provision.venvs._own_torch", lambda: "2.3.1")
    assert choose(None, None, hosts(A2000, V100)).torch == "2.3.1"
    assert choose(None, None, hosts(BLACKWELL)).torch == RELEASES[-1]


def test_setup_gives_hosts_without_torch_the_release_that_the_others_have(monkeypatch):
    monkeypatch.setattr("orchestrator.provision.venvs._own_torch", lambda: "2.15.0")
    there = torch(version="2.3.1+cu121")
    assert choose(None, None, hosts(A2000, V100, torches=[there])) == WantedVersions("2.3.1", None, any_torch=True)
    too_new = torch(version="2.15.0+cu132")
    assert choose(None, None, hosts(A2000, V100, torches=[too_new])).torch == "2.10.0"
    assert choose(None, None, hosts(A2000, V100, torches=[CPU_TORCH])).torch == "2.10.0"
    assert choose(None, None, hosts(A2000, torches=[there])).torch == "2.15.0"  # nobody lacks any


def test_setup_refuses_a_torch_without_code_for_a_gpu_and_names_one_that_has():
    with pytest.raises(UsageError) as refused:
        choose("2.14.1", None, hosts(A2000, V100))
    assert refused.value.message.startswith(
        "h1: the wheels of torch 2.14.1 hold no code for Tesla V100-PCIE-16GB (sm_70"
    )
    assert "`orch setup --torch 2.10.0`, or `--torch 2.14.1+cu126`" in refused.value.remedy
    with pytest.raises(UsageError) as refused:
        choose("2.15.0", None, hosts(V100))
    assert refused.value.remedy == "`orch setup --torch 2.10.0`"  # of 2.15 there is no build for CUDA 12.6
    assert choose("2.14.1+cu126", None, hosts(V100)).requirements == ("torch==2.14.1+cu126", "torchvision")


def test_hosts_that_name_an_index_of_their_own_are_not_judged():
    nodes = [node(name="a"), node(name="b", env={"PIP_INDEX_URL": "***"}), node(name="c", device="cpu"), node(name="d")]
    known = Cluster(
        name="c", file="c.yaml", nodes=nodes, released=["d"], facts={one.name: facts(node=one.name) for one in nodes}
    )
    assert [found.node for found in gpu_hosts(known, [])] == ["a"]
    assert [found.node for found in gpu_hosts(known, [nodes[3]])] == ["a", "d"]
