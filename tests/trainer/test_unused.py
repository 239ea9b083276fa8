"""Parameters that an update's loss does not depend on, and what else one rank's failure is for the others."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("torchvision")
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import default_collate

from tests.support.free_port import free_port
from tests.support.gloo_ranks import Gang
from tests.support.sums import NEWEST_FSDP
from tests.support.trainer_ranks import ROOT, environment
from tests.trainer.test_session import BATCH, EPOCHS, SAMPLES, Points, in_the_gang
from trainer.data import SampleStream
from trainer.ranks import BY_ANOTHER
from trainer.session import Session
from trainer.setup import CustomScript, assemble
from trainer.shared import AFTER_BACKWARD, SettingsError, TrainError, parse_settings

EXCHANGING = ("ddp", "parameter_average", *AFTER_BACKWARD, *(("fsdp",) if NEWEST_FSDP else ()))


class Branches(nn.Module):
    """Samples of each label have a layer of their own; one layer is for none of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(6, 8)
        self.of_label = nn.ModuleList(nn.Linear(8, 3) for _ in range(4))

    def forward(self, points: Tensor, labels: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(points))
        found = [self.of_label[label](hidden[labels == label]) for label in sorted(set(labels.tolist()))]
        return torch.cat(found)


def loss_sum(model: nn.Module, points: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(points, labels), labels.sort(stable=True)[0], reduction="sum")


def optimiser(model: nn.Module) -> torch.optim.Optimizer:
    """With a decay and a momentum that a gradient of 0 would not stop."""
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)


class Rare(Points):
    """Label 1 is in 3 samples of all, so that most updates have none, and others on one rank."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        point, label = super().__getitem__(index)
        return point, 2 * (label == 2) if index not in (5, 40, 41) else 1


def one_process() -> nn.Module:
    model, data = Branches().double(), Rare(SAMPLES)
    optimizer, stream = optimiser(model), SampleStream(SAMPLES, BATCH, (BATCH,), seed=0)
    for epoch in range(EPOCHS):
        for step in range(stream.steps):
            points, labels = default_collate([data[index] for index in stream.indices(epoch, step, 0)])
            optimizer.zero_grad()
            (loss_sum(model, points, labels) / len(labels)).backward()
            optimizer.step()
    return model


def trained(rank: int, asked: dict[str, str], kind: type[Branches] = Branches) -> dict[str, Tensor] | str:
    with in_the_gang(rank, **asked) as met:
        model = kind().double()
        run = Session(assemble.prepare(met, CustomScript(model, optimiser(model), Rare(SAMPLES), default_collate)))
        try:
            for _ in run.epochs():
                for points, labels in run.batches():
                    run.step(loss_sum(run.model, points, labels))
        except TrainError as error:
            return str(error)
        run.end()
        return {name: tensor.clone() for name, tensor in run.run.strategy.whole().state_dict().items()}


@pytest.mark.parametrize("accumulate", ["1", "2"])
@pytest.mark.parametrize("shares", ["equal", "node0=9,node1=4,node2=3,node3=0"])
@pytest.mark.parametrize("strategy", ["ddp", "allreduce", "allreduce_flat"])
def test_zeros_make_the_update_of_one_process(gang: Gang, strategy: str, shares: str, accumulate: str) -> None:
    """To the momentum and the decay of parameters that no rank has used."""
    expected, begun = one_process().state_dict(), Branches().double().state_dict()
    asked = {"strategy": strategy, "shares": shares, "accumulate": accumulate, "unused_parameters": "zeros"}
    for answer in gang.run(trained, asked, timeout_s=60):
        assert isinstance(answer, dict), answer
        for name, tensor in answer.items():
            torch.testing.assert_close(tensor, expected[name], rtol=1e-10, atol=1e-13)
        assert torch.equal(answer["of_label.3.weight"], begun["of_label.3.weight"])


class Normalised(Branches):
    """With a BatchNorm, for which all ranks meet in the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(self.first, nn.BatchNorm1d(8))


def of_few(rank: int, asked: dict[str, str]) -> dict[str, Tensor] | str:
    return trained(rank, asked, Normalised)


def test_zeros_with_samples_that_count_for_nothing(gang: Gang) -> None:
    """The last rank has no samples, and those it is given do not use all parameters."""
    shares = {"equal": "node0=4,node1=4,node2=4,node3=4", "none": "node0=6,node1=6,node2=4,node3=0"}
    asked = {"unused_parameters": "zeros", "sync_bn": "true"}
    answers = {name: gang.run(of_few, {**asked, "shares": of}) for name, of in shares.items()}
    begun = Normalised().double().state_dict()
    for answer in (one for of in answers.values() for one in of):
        assert isinstance(answer, dict), answer
        assert torch.equal(answer["of_label.3.weight"], begun["of_label.3.weight"])
        for name, tensor in answers["none"][0].items():
            torch.testing.assert_close(answer[name], tensor, rtol=1e-8, atol=1e-11)


def test_zeros_in_the_exact_updates_before_local_ones(gang: Gang) -> None:
    asked = {"fidelity": "local", "local_after": "3", "local_steps": "2", "unused_parameters": "zeros"}
    begun = Branches().double().state_dict()
    for answer in gang.run(trained, asked):
        assert isinstance(answer, dict), answer
        assert torch.equal(answer["of_label.3.weight"], begun["of_label.3.weight"])


class Left(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.left = nn.Linear(6, 3), nn.Linear(3, 3)

    def forward(self, points: Tensor) -> Tensor:
        return self.used(points)


def never(rank: int, strategy: str) -> tuple[str, bool]:
    """What is said of a network with a layer that is never used, and whether the weights were moved."""
    with in_the_gang(rank, strategy=strategy) as met:
        model = Left().double()
        run = Session(assemble.prepare(met, CustomScript(model, optimiser(model), Points(SAMPLES), default_collate)))
        before = {name: tensor.clone() for name, tensor in run.run.strategy.whole().state_dict().items()}
        try:
            for points, labels in run.batches():
                run.step(nn.functional.cross_entropy(run.model(points), labels, reduction="sum"))
        except TrainError as error:
            after = run.run.strategy.whole().state_dict()
            return str(error), not all(torch.equal(before[name], after[name]) for name in before)
    return "nothing", True


@pytest.mark.parametrize("strategy", EXCHANGING)
def test_a_parameter_that_no_loss_depends_on_is_named_by_all_ranks(gang: Gang, strategy: str) -> None:
    for rank, (said, moved) in enumerate(gang.run(never, strategy)):
        who = f"rank {rank} on node{rank}, update 1: the loss does not depend on 2 of 4 parameters"
        assert said.startswith(f"{who} (left.weight, left.bias)") and not moved
        assert "unused_parameters=zeros" in said


def test_with_fsdp_all_ranks_use_all_parameters() -> None:
    with pytest.raises(SettingsError, match="unused_parameters: with strategy fsdp"):
        parse_settings("script", {"strategy": "fsdp", "unused_parameters": "zeros"})


def of_fsdp(rank: int, bucket_mib: str) -> dict[str, Tensor] | str:
    return trained(rank, {"strategy": "fsdp", "bucket_mib": bucket_mib})


@pytest.mark.skipif(not NEWEST_FSDP, reason="fsdp needs a newer torch")
@pytest.mark.parametrize(("bucket_mib", "parts"), [("0.0001", r"of_label\.\d, .*"), ("0", "first")])
def test_with_fsdp_a_branch_that_only_some_ranks_take_ends_the_run_in_a_line(
    gang: Gang, bucket_mib: str, parts: str
) -> None:
    """Gloo would abort the processes."""
    for said in gang.run(of_fsdp, bucket_mib, timeout_s=60):
        assert re.search(rf"different parts of the network in one update \(they differ at {parts}\)", str(said)), said


class Normal(Branches):
    """With a BatchNorm of their own for samples of each label."""

    def __init__(self) -> None:
        super().__init__()
        self.of_label = nn.ModuleList(nn.Sequential(layer, nn.BatchNorm1d(3)) for layer in self.of_label)


class Shifted(Normal):
    def forward(self, points: Tensor, labels: Tensor) -> Tensor:
        """The rank that a sample is on chooses its branch: as many BatchNorms on each rank, but different ones."""
        found: Tensor = self.of_label[dist.get_rank() % 2](torch.tanh(self.first(points)))
        return found


def by_shifted(rank: int, _: None) -> dict[str, Tensor] | str:
    return trained(rank, {"sync_bn": "true", "unused_parameters": "zeros"}, Shifted)


def test_statistics_of_different_layers_are_never_mixed(gang: Gang) -> None:
    """All ranks' messages have one size, so that nothing else would notice."""
    for rank, said in enumerate(gang.run(by_shifted, None)):
        assert isinstance(said, str) and said.startswith(f"rank {rank} on node{rank}, update 1: sync_bn: ranks use")
        assert "of_label.1.1, of_label.2.1, of_label.3.1, of_label.0.1, of_label.2.1, of_label.3.1" in said


# ---- real processes ------------------------------------------------------------------------------------------------

SCRIPT = """
import time, torch, trainer
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.some = nn.Linear(4, 3), nn.Linear(3, 3, bias=False)
    def forward(self, x, both):
        return self.some(self.used(x)) if both else self.used(x)
torch.manual_seed(0)
net = Net()
data = [(torch.randn(4), i % 3) for i in range(64)]
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
ranks = trainer.join(batch=8, epochs=1, steps=8, device="cpu")
run = ranks.prepare(net, optimizer, data)
for _ in run.epochs():
    for x, y in run.batches():
        run.step(nn.functional.cross_entropy(run.model(x, BOTH), y, reduction="sum"))
print("weights", net.used.weight.sum().item())
"""


def outcomes(folder: Path, script: str, **settings: str) -> list[tuple[int, str, str]]:
    """Of two ranks: exit code, standard output and error. The store is kept by a process beside them, as torchrun's."""
    port = free_port()
    keeper = f"""
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", {port}, is_master=True, wait_for_workers=False)
input()
"""
    variables = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    variables |= {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True", "PYTHONPATH": str(ROOT)}
    asked = ", ".join(f'"{name}": "{value}"' for name, value in settings.items())
    ranks = []
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(subprocess.Popen([sys.executable, "-c", keeper], stdin=subprocess.PIPE))
        for rank in range(2):
            more = {**variables, "RANK": str(rank), "ORCH_NODE": f"node{rank}", "ORCH_SETTINGS": f"{{{asked}}}"}
            ranks.append(
                subprocess.Popen(
                    [sys.executable, "-c", script],
                    env=environment(folder, **more),
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        try:
            said = [rank.communicate(timeout=100) for rank in ranks]
        finally:
            for rank in (*ranks, store):
                rank.kill()
    return [(rank.returncode, *words) for rank, words in zip(ranks, said, strict=True)]


@pytest.mark.parametrize("strategy", ["ddp", "allreduce", "allreduce_flat"])
@pytest.mark.parametrize("both", ["run.updates < 7", "run.updates < 4 or ranks.rank == 0"])
def test_a_parameter_that_one_update_misses_ends_all_ranks(tmp_path: Path, strategy: str, both: str) -> None:
    """In one line that names it, in the last update of the run, too; the same if only one rank misses it."""
    last = both == "run.updates < 7"
    for rank, (code, _, errors) in enumerate(outcomes(tmp_path, SCRIPT.replace("BOTH", both), strategy=strategy)):
        who = f"rank {rank} on node{rank}, update 8" if last else "rank 1 on node1, update 5"
        who = who if last or rank == 1 else f"{BY_ANOTHER}: {who}"
        assert code == 1
        assert errors.startswith(f"error: {who}: the loss does not depend on 1 of 3 parameters (some.weight): ")
        assert errors.count("\n") == 1


def test_zeros_stand_for_what_one_update_misses(tmp_path: Path) -> None:
    script = SCRIPT.replace("BOTH", "run.updates < 4 or (run.updates < 6 and ranks.rank == 0)")
    ways = [outcomes(tmp_path, script, strategy=way, unused_parameters="zeros") for way in ("ddp", "allreduce")]
    assert [code for ranks in ways for code, *_ in ranks] == [0] * 4, ways
    assert len({out.split("weights ")[1][:10] for ranks in ways for _, out, _ in ranks}) == 1


def test_a_rank_for_which_nobody_comes_in_time_says_what_to_do(tmp_path: Path) -> None:
    """Rank 0 does something of its own, which takes longer than timeout_s."""
    script = SCRIPT.replace("BOTH", "run.updates >= 0").replace(
        "        run.step(", "        if run.updates == 3 and ranks.rank == 0: time.sleep(14)\n        run.step("
    )
    ranks = outcomes(tmp_path, script, strategy="allreduce_flat", timeout_s="10")
    for rank, (code, _, errors) in enumerate(ranks):
        assert code == 1 and errors.count("\n") == 1
        assert errors.removeprefix(f"error: {BY_ANOTHER}: " if rank == 0 else "error: ").startswith(
            "rank 1 on node1 waited 10 s for another rank in update 4: what one rank does by"
        )


def test_what_one_rank_cannot_keep_is_the_reason_on_all(tmp_path: Path) -> None:
    script = SCRIPT.replace("BOTH", "True").replace(
        "for _ in run.epochs", "if ranks.rank:\n    run.keep(mine=object())\nfor _ in run.epochs"
    )
    for rank, (code, _, errors) in enumerate(outcomes(tmp_path, script)):
        said = errors.removeprefix(f"error: {BY_ANOTHER}: " if rank == 0 else "error: ")
        assert code == 1 and said.startswith("run.keep(mine=...): object has no state_dict"), errors
