"""A whole run with `fidelity=late`: a script's loop, batches read ahead, checkpoints, records, and paced ranks."""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import default_collate

from orchestrator.results import load_timeline
from orchestrator.results.analyse import analyse
from tests.support.gloo_ranks import RANKS, Gang, script_met
from tests.support.run_folders import Host, write_run
from tests.support.trainer_ranks import of_event, started
from tests.support.trainer_ranks import trained as run_of
from tests.trainer.test_own_networks import (
    BATCH,
    EPOCHS,
    EXACT,
    NETWORKS,
    SAMPLES,
    Data,
    built,
    entropy,
    label,
    off,
    plain_of,
    points,
)
from trainer.data import SampleStream
from trainer.pipeline import Form, Layout, survey
from trainer.ranks import RankInfo
from trainer.session import Session
from trainer.setup import CustomScript, assemble
from trainer.setup.pipeline import PipelinePlan, memory_of_stage
from trainer.shared import SettingsError, micro_batch_sizes, parse_settings, parse_stages

UPDATES = 6
LATE = {"strategy": "pipeline", "fidelity": "late"}
FOUR, LANES = ("a", "b", "c", "d"), ("a", "b", "a", "b")


def network(dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(5)
    torch.set_default_dtype(torch.float64)
    try:
        return nn.Sequential(
            *(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(dropout)),
            *(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)),
        )
    finally:
        torch.set_default_dtype(torch.float32)


def optimiser(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


Task = tuple[nn.Module, Data, Any]
"""Network, data and loss."""


def made(name: str, dropout: float = 0.0) -> Task:
    return built(name) if name else (network(dropout), Data(points, label), entropy)


def trained(
    rank: int,
    case: tuple[dict[str, str], tuple[str, ...], float | str],
    prepared: Callable[[Session], None] = lambda run: None,
) -> tuple[dict[str, Tensor], str]:
    """What this rank holds of the state, and what it said. case: settings, each rank's host, and dropout or the name of
    another network. prepared: called before the first update.
    """
    asked, nodes, which = case
    info, said = RankInfo(rank, rank, RANKS, RANKS, "vm", nodes[rank], None, None), io.StringIO()
    with script_met(info, {"batch": str(BATCH), "epochs": str(EPOCHS), **LATE, **asked}) as met:
        with contextlib.redirect_stdout(said):
            model, data, loss = made(which) if isinstance(which, str) else made("", which)
            run = Session(assemble.prepare(met, CustomScript(model, optimiser(model), data, default_collate)))
            prepared(run)
            for _ in run.epochs():
                for inputs, targets in run.batches():
                    run.step(loss(run.model(inputs), targets))
                run.evaluate(lambda outputs, targets: {"loss": loss(outputs, targets)}, data)
            run.end()
        return {name: tensor.clone() for name, tensor in run.run.model.state_dict().items()}, said.getvalue()


def delayed(
    exact: set[str],
    parts: int,
    first: int,
    clip_norm: float = 0.0,
    name: str = "",
    smaller_first: float = 0.0,
    is_frozen: Callable[[str, int], bool] = lambda name, update: False,
) -> tuple[dict[str, Tensor], ...]:
    """The first and the last state of one process. exact: names on the last stage. parts: micro-batches. first: late
    update. name: of another network. is_frozen: of a weight's name and an update.
    """
    (used, data, loss), (kept, *_) = made(name), made(name)
    for module in used.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.momentum = 1 - 0.9 ** (1 / parts)
    begun = copy.deepcopy(kept.state_dict())
    steps, stream, number = optimiser(kept), SampleStream(SAMPLES, BATCH, (BATCH,), seed=0), 0
    before = now = {name: weight.detach().clone() for name, weight in kept.named_parameters()}
    for epoch in range(EPOCHS):
        for step in range(stream.steps):
            before, now = now, {name: weight.detach().clone() for name, weight in kept.named_parameters()}
            with torch.no_grad():
                for name, weight in used.named_parameters():
                    weight.copy_(before[name] if number >= first and name not in exact else now[name])
            used.zero_grad()
            inputs, targets = default_collate([data[index] for index in stream.indices(epoch, step, 0)])
            sizes = micro_batch_sizes(len(targets), parts, smaller_first)
            for part, labels in zip(inputs.split(sizes), targets.split(sizes), strict=True):
                (loss(used(part), labels) / len(targets)).backward()
            if clip_norm:
                nn.utils.clip_grad_norm_(used.parameters(), clip_norm)
            for (name, of_kept), of_used in zip(kept.named_parameters(), used.parameters(), strict=True):
                of_kept.grad = None if is_frozen(name, number) else of_used.grad
            steps.step()
            number += 1
    return begun, kept.state_dict() | {name: buffer.clone() for name, buffer in used.named_buffers()}


CASES: dict[str, tuple[dict[str, str], tuple[str, ...], int, int]] = {
    "one micro-batch": ({}, FOUR, 1, 1),
    "several, 1f1b": ({"accumulate": "3", "schedule": "1f1b"}, FOUR, 3, 1),
    "exact at first": ({"accumulate": "2", "late_after": "0.5"}, FOUR, 2, 3),
    "never late": ({"late_after": "0.99"}, FOUR, 1, 6),
    "exact, a smaller first micro-batch": (
        {"fidelity": "exact", "accumulate": "3", "smaller_first": "0.4"},
        FOUR,
        3,
        6,
    ),
    "clipped": ({"clip_norm": "0.5"}, FOUR, 1, 1),
    "two ranks a stage": ({"accumulate": "2"}, LANES, 4, 1),
}
"""Settings, each rank's host, micro-batches, and the first late update."""


@pytest.mark.parametrize("name", CASES)
def test_a_scripts_updates_are_those_of_one_process_with_the_delay(gang: Gang, name: str) -> None:
    asked, nodes, parts, first = CASES[name]
    answers = [state for state, _ in gang.run(trained, (asked, nodes, 0.0), timeout_s=60)]
    clip_norm, smaller_first = float(asked.get("clip_norm", 0)), float(asked.get("smaller_first", 0))
    begun, last = delayed(set(answers[-1]), parts, first, clip_norm, smaller_first=smaller_first)
    assert set().union(*answers) == set(last)
    own = [
        {key: one for key, one in state.items() if nodes is FOUR or ("running" not in key and "tracked" not in key)}
        for state in answers
    ]
    assert max(off(begun, last, state) for state in own) <= 1e-12


def changes_at(rank: int, case: tuple[int, bool]) -> tuple[dict[str, Tensor], str]:
    """Trains the first layer until update case[0], or only from then on (case[1])."""
    changed, is_trained_later = case

    def set_first(run: Session, is_trained: bool) -> None:
        for name, weight in run.run.model.named_parameters():
            if name in FIRST_LAYER:
                weight.requires_grad_(is_trained)

    def prepared(run: Session) -> None:
        set_first(run, not is_trained_later)
        run.after_update(lambda: set_first(run, is_trained_later) if run.updates == changed else None)

    return trained(rank, ({}, FOUR, 0.0), prepared)


FIRST_LAYER = ("0.weight", "0.bias")


@pytest.mark.parametrize(("changed", "is_trained_later"), [(2, False), (3, False), (3, True)])
def test_a_script_that_changes_which_weights_a_late_stage_trains(
    gang: Gang, changed: int, is_trained_later: bool
) -> None:
    answers = [state for state, _ in gang.run(changes_at, (changed, is_trained_later), timeout_s=60)]
    begun, last = delayed(
        set(answers[-1]),
        1,
        1,
        is_frozen=lambda name, update: name in FIRST_LAYER and (update >= changed) != is_trained_later,
    )
    assert max(off(begun, last, state) for state in answers) <= 1e-12


def judged_each(
    rank: int, case: tuple[dict[str, str], tuple[str, ...], float | str]
) -> tuple[dict[str, Tensor], list[float]]:
    """The state, and the losses of evaluations after each update."""
    losses: list[float] = []

    def prepared(run: Session) -> None:
        data = Data(points, label)
        judge = lambda outputs, targets: {"loss": entropy(outputs, targets)}  # noqa: E731
        run.after_update(lambda: losses.append(run.evaluate(judge, data)["loss"]))

    state, _ = trained(rank, case, prepared)
    return state, losses


@pytest.mark.parametrize(("fidelity", "first"), [("exact", 6), ("late", 1)])
def test_an_evaluation_in_the_middle_of_an_epoch_changes_nothing(
    gang: Gang, tmp_path: Path, fidelity: str, first: int
) -> None:
    """Although inputs of the next update are on their way. Before a checkpoint they are not."""
    asked = {"fidelity": fidelity, "accumulate": "2"}
    answers = gang.run(judged_each, (asked, FOUR, "plain"), timeout_s=60)
    begun, last = delayed(set(answers[-1][0]), 2, first, name="plain")
    assert max(off(begun, last, state) for state, _ in answers) <= 1e-12
    kept = {**asked, "checkpoint_every": "1", "checkpoint_dir": str(tmp_path)}
    drained = gang.run(judged_each, (kept, FOUR, "plain"), timeout_s=60)
    for (_, losses), (_, same) in zip(answers, drained, strict=True):
        assert len(losses) == UPDATES and losses == same


@pytest.mark.parametrize(("nodes", "ema"), [(FOUR, "0"), (FOUR, "0.5"), (LANES, "0")])
def test_an_evaluation_leaves_statistics_that_passes_in_flight_hold(
    gang: Gang, nodes: tuple[str, ...], ema: str
) -> None:
    """Ranks of one stage average them, and averaged weights have others."""
    answers = gang.run(judged_each, ({"accumulate": "2", "ema": ema}, nodes, 0.0), timeout_s=60)
    begun, last = delayed(set(answers[-1][0]), 2 if nodes is FOUR else 4, 1)
    states = [
        {
            name: tensor
            for name, tensor in state.items()
            if nodes is FOUR or ("running" not in name and "tracked" not in name)
        }
        for state, _ in answers
    ]
    assert max(off(begun, last, state) for state in states) <= 1e-12


class Again(nn.Linear):
    """Runs a second time in backward."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__(8, 8)
        self.reentrant = reentrant

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = checkpoint(super().forward, inputs, use_reentrant=self.reentrant)
        return found.tanh()


def checkpointed(*, reentrant: bool) -> nn.Sequential:
    blocks = [Again(reentrant=reentrant) for _ in range(4)]
    return nn.Sequential(nn.Linear(6, 8), *blocks, nn.Linear(8, 3))


AGAIN = {
    "checkpointed blocks": (lambda: checkpointed(reentrant=False), plain_of(), entropy),
    "checkpointed blocks, reentrant": (lambda: checkpointed(reentrant=True), plain_of(), entropy),
}
NETWORKS |= AGAIN


@pytest.mark.parametrize("name", [*EXACT, *AGAIN])
def test_any_network_that_can_be_cut_trains_with_the_delay(gang: Gang, name: str) -> None:
    """Also if weights have hooks, are computed, are used twice, or are used again in backward."""
    answers = [state for state, _ in gang.run(trained, ({"accumulate": "2"}, FOUR, name), timeout_s=60)]
    begun, last = delayed(set(answers[-1]), 2, 1, name=name)
    assert set().union(*answers) == set(last)
    assert max(off(begun, last, state) for state in answers) <= 1e-12


@pytest.mark.parametrize(("updates", "first"), [(4, 1), (3, 1), (4, 4), (4, 5), (3, 5)])
def test_a_run_goes_on_bit_for_bit(gang: Gang, tmp_path: Path, updates: int, first: int) -> None:
    """Within the late phase, at its begin, and before it. With dropout, whose draws follow the order of forwards."""
    asked = {"late_after": str(first / UPDATES), "accumulate": "2", "ema": "0.5"}
    asked["checkpoint_every"] = "2" if updates == 4 else "3"  # the newest two stay
    whole, after = tmp_path / "whole", tmp_path / "resumed"
    states = gang.run(trained, ({**asked, "checkpoint_dir": str(whole)}, FOUR, 0.3), timeout_s=60)
    more = {"checkpoint_dir": str(after), "resume": str(whole / f"step-{updates:09}.pt")}
    resumed = gang.run(trained, ({**asked, **more}, FOUR, 0.3), timeout_s=60)
    for (state, _), (same, said) in zip(states, resumed, strict=True):
        assert all(torch.equal(tensor, same[name]) for name, tensor in state.items())
        assert "fresh" not in said and "left out" not in said
    of_both = [torch.load(folder / f"step-{UPDATES:09}.pt", weights_only=True) for folder in (whole, after)]
    for part in ("ema", "own"):
        assert flat(of_both[0], part) == flat(of_both[1], part)


def flat(saved: dict[str, Any], part: str) -> Any:
    found = saved[part] if isinstance(saved[part], list) else [saved[part]]
    return [{name: tensor.tolist() for name, tensor in each.items()} for each in found]


def test_checkpoints_and_their_copies_change_no_number(gang: Gang, tmp_path: Path) -> None:
    plain = gang.run(trained, ({}, FOUR, 0.3), timeout_s=60)
    kept = gang.run(trained, ({"checkpoint_every": "1", "checkpoint_dir": str(tmp_path)}, FOUR, 0.3), timeout_s=60)
    for (state, _), (same, _) in zip(plain, kept, strict=True):
        assert all(torch.equal(tensor, same[name]) for name, tensor in state.items())
    of_ranks = torch.load(tmp_path / "step-000000005.pt", weights_only=True)["own"]
    assert [any(name.startswith("late.") for name in own) for own in of_ranks] == [True, True, True, False]


# ---------------------------------------------------------------------------------------------------------------------
# Records

LENET = ["--exp", "mnist_lenet", "--data", "synthetic", "--device", "cpu", "--samples", "256", "--batch", "32"]
LENET += ["--epochs", "1", "--augment", "none", "--strategy", "pipeline", "--stages", "node0:0,node1:1"]  # 8 updates
AS_LATE = ["--fidelity", "late"]


def tasks_of(lines: Sequence[dict[str, Any]]) -> list[list[Any]]:
    """Of update 4, the first one after the warm-up."""
    ((step, rows),) = [(event["step"], event["tasks"]) for event in of_event(list(lines), "tasks")]
    assert step == 3
    return [row for row in rows if row[1] is not None]


def test_a_step_shows_the_forwards_that_were_done_before_it_and_those_of_the_next(tmp_path: Path) -> None:
    ranks = run_of(tmp_path, [*LENET, *AS_LATE, "--accumulate", "2"], 2)
    first, last = map(tasks_of, ranks)
    assert [row[:2] for row in last if row[0] == "forward"] == [["forward", 0], ["forward", 1]]
    forwards = [row for row in first if row[0] == "forward"]
    assert [row[1] for row in forwards] == [0, 1, 2, 3]
    assert [row[3] <= 0 for row in forwards] == [True, True, False, False]
    assert all(row[2] >= 0 for row in first if row[0] != "forward")
    for line in (line for rank in ranks for line in of_event(rank, "step")):
        parts = (line[f"{name}_ms"] for name in ("load", "compute", "exposed", "optim"))
        assert sum(parts) == pytest.approx(line["t_ms"], abs=0.01)
        assert 0 <= line["bubble_before_ms"] + line["bubble_behind_ms"] <= line["exposed_ms"] + 0.01
    assert all(sum(line["wire_ms"] for line in of_event(rank, "step")) > 0 for rank in ranks)
    hosts = [Host("node0", gpu=None), Host("node1", gpu=None)]
    run = write_run(tmp_path / "run", hosts, dict(enumerate(ranks)), settings={"strategy": "pipeline", "batch": 32})
    analyse(run)
    drawn = load_timeline(run.timeline)
    assert drawn and [len(lane.bars) for lane in drawn.lanes] == [3 * 2 + 2 + 2, 3 * 2 + 2]
    assert min(begun for lane in drawn.lanes for begun in (lane.begin_ms, *(bar.begin_ms for bar in lane.bars))) == 0
    assert sorted((one.task, one.number) for one in drawn.messages) == [
        *(("backward", 0), ("backward", 1), ("forward", 0), ("forward", 1))
    ]
    assert all(one.sent_ms <= one.came_ms for one in drawn.messages)


def test_paced_stages_overlap_one_micro_batch_of_two_updates(tmp_path: Path) -> None:
    """With one micro-batch the stages of an exact pipeline take turns. Here the last stage needs most of the time."""
    paces = [{"ORCH_PACED": f'{{"samples_per_s": {speed}}}'} for speed in (2000, 100)]
    forwards = {}
    for fidelity in ("exact", "late"):
        (folder := tmp_path / fidelity).mkdir()
        words = [*LENET, "--fidelity", fidelity, "--accumulate", "1"]
        first, _ = run_of(folder, words, 2, of_ranks=paces)
        rows = tasks_of(first)
        (backward_ms,) = [row[2] for row in rows if row[0] == "backward"]
        forwards[fidelity] = [(row[1], row[3] <= backward_ms) for row in rows if row[0] == "forward"]
    # The next update's forward is over before this one's gradient arrives.
    assert forwards == {"exact": [(0, True)], "late": [(0, True), (1, True)]}


def test_one_micro_batch_per_update_is_the_default(tmp_path: Path) -> None:
    ranks = run_of(tmp_path, [*LENET, *AS_LATE], 2)
    assert [row[0] for row in tasks_of(ranks[1])] == ["forward", "backward", "weights"]


def test_a_scaled_loss_is_taken_back_on_a_late_stage(tmp_path: Path) -> None:
    losses = {}
    for amp in ("none", "fp16"):
        (folder := tmp_path / amp).mkdir()
        _, last = run_of(folder, [*LENET, *AS_LATE, "--amp", amp], 2)
        losses[amp] = [line["loss"] for line in of_event(last, "step")]
    assert losses["fp16"] == pytest.approx(losses["none"], rel=0.01)


def test_a_late_stages_memory_holds_two_more_copies_of_its_weights_and_two_updates() -> None:
    chain = survey("lenet", (1, 28, 28), 10)
    layout = Layout.of(parse_stages("a:0,b:1"), ["a", "b"], len(chain))
    plan = PipelinePlan(tuple(chain), layout, torch.float32, Form())
    exact, late = (
        [memory_of_stage(parse_settings("mnist_lenet", pairs), plan, rank, [8]) for rank in (0, 1)]
        for pairs in ({"strategy": "pipeline"}, LATE)
    )
    assert late[0] - exact[0] == 2 * chain[0].weight_bytes + 8 * chain[0].activation_bytes
    assert late[1] == exact[1]
    adamw = memory_of_stage(parse_settings("mnist_lenet", {"strategy": "pipeline", "optimizer": "adamw"}), plan, 1, [8])
    assert adamw - exact[1] == chain[1].weight_bytes


@pytest.mark.parametrize(("optimizer", "warns"), [("adamw", True), ("sgd", False)])
def test_adamw_is_warned_of(tmp_path: Path, optimizer: str, warns: bool) -> None:
    words = [*LENET, *AS_LATE, "--optimizer", optimizer, "--lr", "0.001", "--steps", "3"]
    with started(tmp_path, words, 2) as ranks:
        said = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert ["warning: fidelity=late may cost accuracy with Adam or AdamW" in words for words in said] == [warns, False]


@pytest.mark.parametrize(
    ("pairs", "said"),
    [
        ({"strategy": "ddp", "fidelity": "late"}, "fidelity: late goes with strategy pipeline, not with ddp"),
        ({"strategy": "pipeline", "late_after": "0.2"}, "late_after: does nothing with fidelity exact; use late"),
        ({**LATE, "local_steps": "4"}, "local_steps: does nothing with fidelity late; use local"),
        ({**LATE, "late_after": "1"}, "late_after: 1.0 is too large"),
        ({**LATE, "late_after": "-0.1"}, "late_after: -0.1 is too small; at least 0"),
    ],
)
def test_what_does_not_go_with_it_is_refused(pairs: dict[str, str], said: str) -> None:
    with pytest.raises(SettingsError) as error:
        parse_settings("mnist_lenet", pairs)
    assert any(line.startswith(said) for line in error.value.mistakes), error.value


def test_the_first_update_is_exact() -> None:
    settings = parse_settings("mnist_lenet", {**LATE, "late_after": "0"})
    assert settings.exact_updates(100) == 1
    assert parse_settings("mnist_lenet", LATE).exact_updates(100) == 10
