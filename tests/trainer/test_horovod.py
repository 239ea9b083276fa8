"""The strategy horovod: by the real package where it is installed, and what is said where it is not or does not fit."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("torchvision")
import torch
import torch.distributed as dist

from tests.support.gloo_ranks import Gang, group_of
from tests.support.sums import EXAMPLE, HAS_HOROVOD, Case, data_of, network, settings_for, worst
from tests.support.trainer_ranks import of_event, started, trained
from trainer.compute.timer import CpuTimer
from trainer.ranks import served
from trainer.ranks.process_group import leave
from trainer.setup import refuse_arithmetic
from trainer.shared import SettingsError, TrainError, parse_settings
from trainer.strategies import build_strategy, local_loss, package, variables

CPU = torch.device("cpu")
LENET = ["--exp=mnist_lenet", "--data=synthetic", "--device=cpu", "--samples=128", "--steps=4", "--augment=none"]
needs_horovod = pytest.mark.skipif(not HAS_HOROVOD, reason="needs the package horovod (docs/frameworks.md)")


@needs_horovod
@pytest.mark.parametrize("shares", [(5, 2), (3, 0), (4, 0, 2, 1), (7,)])
def test_unequal_ranks_make_the_update_of_one_process(gang: Gang, shares: tuple[int, ...]) -> None:
    case = Case(shares=shares, last=3, strategies=("horovod",))
    assert worst(gang, case)["horovod"] <= 1e-12


@needs_horovod
def test_ranks_that_all_count_alike_make_another_one(gang: Gang) -> None:
    assert worst(gang, Case(shares=(5, 2), strategies=("horovod",), weight=False))["horovod"] > 0.01


def sent_during_backward(rank: int, case: Case) -> tuple[list[int], int]:
    """How many gradients were on their way each time that one was there, and how many there are."""
    strategy: Any = build_strategy(settings_for(case, "horovod"), network(case, 0), group_of(4), CpuTimer())
    seen: list[int] = []
    for weight in strategy.model.parameters():
        weight.register_hook(lambda _: seen.append(len(strategy.on_its_way)))
    images, labels = data_of(case)
    strategy.backward(local_loss(strategy.model, images[:2], labels[:2]), 2, 8)
    return seen, len(list(strategy.model.parameters()))


@needs_horovod
def test_a_gradient_is_handed_over_while_backward_computes_the_next_one(gang: Gang) -> None:
    for seen, weights in gang.run(sent_during_backward, replace(EXAMPLE, shares=(2, 2, 2, 2))):
        assert len(seen) == weights
        assert seen[0] == 0
        assert seen[-1] > weights // 2


@needs_horovod
def test_a_run_trains_as_with_another_exact_strategy_and_ends_without_a_word(tmp_path: Path) -> None:
    losses = {}
    for strategy in ("allreduce", "horovod"):
        folder = tmp_path / strategy
        folder.mkdir()
        ranks = trained(folder, [*LENET, f"--strategy={strategy}", "--shares=node0=5,node1=3", "--eval_every=1"], 2)
        losses[strategy] = [line["loss"] for lines in ranks for line in of_event(lines, "step")]
        assert of_event(ranks[1], "end")[0]["status"] == "succeeded"
    assert len(losses["horovod"]) == 8
    assert losses["horovod"] == pytest.approx(losses["allreduce"], rel=1e-5)


@needs_horovod
def test_it_ends_with_the_group_before_a_rank_closes_its_connections() -> None:
    hvd, case = package(CPU), Case(shares=(4,))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    build_strategy(settings_for(case, "horovod"), network(case, 0), dist.group.WORLD, CpuTimer())
    assert hvd.is_initialized()
    leave()
    assert not hvd.is_initialized()
    assert not dist.is_initialized()


@pytest.mark.skipif(HAS_HOROVOD, reason="the package is installed here")
def test_without_the_package_every_rank_says_in_one_line_where_and_what_to_try(tmp_path: Path) -> None:
    with started(tmp_path, [*LENET, "--strategy=horovod"], 2) as ranks:
        said = [rank.communicate(timeout=120)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [1, 1]
    (line,) = set("".join(said).splitlines())
    assert line.startswith("error: node0: strategy horovod: the package horovod cannot be imported (No module named ")
    assert line.endswith("(`orch help frameworks`, Horovod), or use strategy=ddp")


def test_a_package_that_cannot_be_loaded_is_named_with_its_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "horovod", None)
    monkeypatch.delitem(sys.modules, "horovod.torch", raising=False)
    with pytest.raises(TrainError, match=f"build it for torch {torch.__version__.partition('+')[0]}"):
        package(CPU)


@needs_horovod
def test_a_gpu_needs_a_package_that_was_built_with_nccl() -> None:
    if package(CPU).nccl_built():
        assert package(torch.device("cuda"))
        return
    with pytest.raises(TrainError, match="was built without NCCL, and this rank is on a GPU"):
        package(torch.device("cuda"))


@needs_horovod
def test_between_hosts_it_has_to_be_the_build_that_keeps_to_the_training_address(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    published = tmp_path / "horovod-0.28.1.dist-info"
    published.mkdir()
    (published / "METADATA").write_text("Metadata-Version: 2.1\nName: horovod\nVersion: 0.28.1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert package(CPU)
    with pytest.raises(TrainError, match=r"listens where a host's own name leads, .* `orch help frameworks`"):
        package(CPU, between_hosts=True)


def test_what_it_does_not_go_with_is_refused() -> None:
    for fidelity in ("half", "compressed", "local"):
        with pytest.raises(SettingsError, match=f"fidelity: {fidelity} goes with strategy .*, not with horovod"):
            parse_settings("mnist_lenet", {"strategy": "horovod", "fidelity": fidelity})
    with pytest.raises(SettingsError, match="stages: does nothing with strategy horovod"):
        parse_settings("mnist_lenet", {"strategy": "horovod", "stages": "a:0,b:1"})
    with pytest.raises(TrainError, match="strategy=horovod needs ranks that compute, but this rank is paced"):
        refuse_arithmetic(parse_settings("mnist_lenet", {"strategy": "horovod"}))


def test_a_rank_is_told_its_place_among_the_ranks_of_its_host_and_across_hosts() -> None:
    nodes = ["a", "b", "b", "c", "b"]
    with served(dist.HashStore()) as server:
        told = [variables(rank, nodes, server) for rank in range(len(nodes))]
        for name, expected in {
            "RANK": "01234",
            "SIZE": "55555",
            "LOCAL_RANK": "00102",
            "LOCAL_SIZE": "13313",
            "CROSS_RANK": "01020",
            "CROSS_SIZE": "33131",
        }.items():
            assert "".join(one[f"HOROVOD_{name}"] for one in told) == expected, name
        hosts = [one["HOROVOD_HOSTNAME"] for one in told]
        assert hosts[1] == hosts[2] == hosts[4]
        assert len(set(hosts)) == 3
        assert told[0]["HOROVOD_GLOO_RENDEZVOUS_ADDR"] == f"127.0.0.1:{server.port}/{server.secret}"


def test_it_meets_on_the_interface_that_torchs_gloo_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    with served(dist.HashStore()) as server:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ens5,eth1")
        assert variables(0, ["a"], server)["HOROVOD_GLOO_IFACE"] == "ens5"
        monkeypatch.delenv("GLOO_SOCKET_IFNAME")
        assert variables(0, ["a"], server)["HOROVOD_GLOO_IFACE"] == ""
