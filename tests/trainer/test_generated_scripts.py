"""Training scripts drawn by chance make the updates of one process, to 1e-12, or are refused before the first one.

A draw that fails names itself: `GENERATED=seed:number pytest tests/trainer/test_generated_scripts.py` runs it again.
GENERATED_DRAWS and GENERATED_SEED try others; THOROUGH or ORCH_LONG more of them.
"""

from __future__ import annotations

import contextlib
import gc
import math
import multiprocessing
import os
import re
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("torchvision")
import torch
from torch import Tensor
from torch.utils.data import default_collate
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from tests.support.drawn_scripts import (
    SEQUENTIAL,
    SEVERAL,
    Drawn,
    Leg,
    Trained,
    draw,
    judge_by,
    loss_sum,
    one_process,
    parts_of,
)
from tests.support.gloo_ranks import Gang, Leaves, Raised, script_met
from trainer.ranks import RankInfo
from trainer.session import Session
from trainer.setup import CustomScript, assemble
from trainer.shared import SettingsError, TrainError

MANY = bool(os.environ.get("THOROUGH") or os.environ.get("ORCH_LONG"))
SEED = int(os.environ.get("GENERATED_SEED", "1"))
NUMBERS = range(int(os.environ.get("GENERATED_DRAWS", "300" if MANY else "20")))
DRAWS = [os.environ["GENERATED"]] if "GENERATED" in os.environ else [f"{SEED}:{number}" for number in NUMBERS]
CLOSE = 1e-12
"""Distance from one process's weights, as a part of the way that these have come."""
CHAOTIC = 10
"""How many times as far as from another process, whose first weights differ by their last bit, a run may be."""
HANGS_S = 60
"""With room for a machine that does other things besides."""


@dataclass(frozen=True)
class Refused:
    line: str
    updates: int
    """That were made before."""


def met(rank: int, drawn: Drawn, leg: Leg, **more: str) -> contextlib.AbstractContextManager[assemble.JoinedRank]:
    node, local = leg.names[rank]
    info = RankInfo(rank, local, leg.ranks, leg.nodes.count(node), "vm", node, None, None)
    asked = {"batch": str(drawn.batch), "epochs": str(drawn.epochs), **leg.settings, **more}
    return script_met(info, asked)


def trained(rank: int, case: tuple[Drawn, int, str]) -> Trained | Refused | Leaves:
    """What this rank has after a leg; a folder is given if checkpoints pass between two."""
    drawn, number, folder = case
    multiprocessing.set_start_method("fork", force=True)  # that of a script which torchrun has started
    multiprocessing.process.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # loads samples
    more = {"checkpoint_dir": folder, "checkpoint_every": str(drawn.updates)} if folder else {}
    if folder:
        more |= {"resume": folder} if number else {"steps": str(drawn.cut)}
    run = None
    try:
        with met(rank, drawn, drawn.legs[number], **more) as ranks:
            model = drawn.model()
            made = drawn.build_optimiser if drawn.by == "function" else drawn.build_optimiser(drawn.weights_of(model))
            run = Session(assemble.prepare(ranks, CustomScript(model, made, drawn.data, default_collate)))
            return _trained(run, drawn, model)
    except SettingsError as error:
        return Refused("; ".join(error.mistakes), 0)  # a line of each
    except TrainError as error:
        return Leaves(Refused(str(error), run.updates - number * drawn.cut if run else 0))
    except Exception:
        return Leaves(Raised(traceback.format_exc()))  # others need not wait for it
    finally:
        end_loading()


def end_loading() -> None:
    """A script's process ends with it, and this one goes on. Python closes a queue before the loader that is collected
    with it, so that torch would wait 5 s for each loading process, and for a minute if a dozen are collected at once.
    """
    for one in gc.get_objects():
        if isinstance(one, _MultiProcessingDataLoaderIter):
            one._shutdown_workers()


def _trained(run: Session, drawn: Drawn, model: torch.nn.Module) -> Trained:
    kept: dict[str, Any] = {}
    if scheduler := drawn.scheduler(run.optimizer):
        run.after_update(scheduler.step)
        kept["scheduler"] = scheduler
    if drawn.average == "own":
        kept["average"] = average = torch.optim.swa_utils.AveragedModel(model)
        run.after_update(lambda: average.update_parameters(model))
    run.keep(**kept)
    judged: dict[str, float] = {}
    for _ in run.epochs():
        for batch in run.batches():
            inputs, targets = parts_of(batch, drawn.form)
            weight = (targets != -100).sum() if drawn.loss == "tokens" else None
            run.step(loss_sum(drawn.loss, run.model(*inputs), targets), weight)
        if drawn.is_judged:
            judged = run.evaluate(judge_by(drawn.loss), drawn.tests)
    run.end()
    of_average = _held(kept["average"].module) if "average" in kept else {}
    rates = [float(group["lr"]) for group in run.optimizer.param_groups]
    return Trained(_held(run.run.strategy.whole()), of_average, rates, judged)


def _held(model: torch.nn.Module) -> dict[str, Tensor]:
    found = {}
    for name, weight in model.named_parameters():
        held: Any = weight.detach()
        whole = held.full_tensor() if hasattr(held, "full_tensor") else held
        found[name.removeprefix("module.")] = whole.clone()
    return found


# ---- what is compared ----------------------------------------------------------------------------------------------


class Gangs:
    """One of each size, for as long as it lasts."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._gangs, self._made = folder, dict[int, Gang](), 0

    def run(self, ranks: int, case: Any) -> list[Any]:
        if ranks not in self._gangs:
            folder = self._folder / str(self._made)
            folder.mkdir()
            self._gangs[ranks], self._made = Gang(folder, ranks), self._made + 1
        try:
            answers = self._gangs[ranks].run(trained, case, timeout_s=HANGS_S)
        except BaseException:
            self._gangs.pop(ranks).end()
            raise
        if any(isinstance(answer, Refused) for answer in answers):
            self._gangs.pop(ranks).end()
        return answers

    def end(self) -> None:
        for gang in self._gangs.values():
            gang.end()


@pytest.fixture(scope="module")
def gangs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gangs]:
    made = Gangs(tmp_path_factory.mktemp("gangs"))
    yield made
    made.end()


def far(first: dict[str, Tensor], last: dict[str, Tensor], found: dict[str, Tensor]) -> float:
    """Distance of what was found from `last`, as a part of the way there. NaN is as far as can be."""
    off = sum((tensor - last[name]).square().sum().item() for name, tensor in found.items())
    way = sum((last[name] - tensor).square().sum().item() for name, tensor in first.items())
    return math.sqrt(off / way) if math.isfinite(off) else math.inf


def whole_of(of_ranks: list[dict[str, Tensor]], like: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """What ranks hold whole, and what they hold in slices or stages, joined: each name at least once."""
    wholes: list[dict[str, Tensor]] = [{} for _ in of_ranks]
    for name, tensor in like.items():
        held = [of_rank[name] for of_rank in of_ranks if name in of_rank]
        assert held, f"no rank has {name}"
        if any(one.shape != tensor.shape for one in held):
            held = [torch.cat(held)]
            assert held[0].shape == tensor.shape
        for whole, one in zip(wholes, held, strict=False):
            whole[name] = one
    return wholes


def distance(drawn: Drawn, answers: list[Trained], first: dict[str, Tensor], one: Trained) -> float:
    """The largest of any rank, of weights and averages."""
    distances = [far(first, one.weights, of_rank) for of_rank in whole_of([a.weights for a in answers], one.weights)]
    if drawn.average == "own":
        wholes = whole_of([answer.average for answer in answers], one.average)
        distances += [far(first, one.average, of_rank) for of_rank in wholes]
    return max(distances)


def sensitivity(drawn: Drawn) -> float:
    """How far one process comes from another, whose first weights differ by their last bit."""
    first, one = one_process(drawn)
    return max(distance(drawn, [one_process(drawn, nudge)[1]], first, one) for nudge in range(1, 11))


@pytest.mark.parametrize("name", DRAWS)
def test_a_drawn_script_is_one_process_or_is_refused(gangs: Gangs, name: str, tmp_path: Path) -> None:
    drawn = draw(*map(int, name.split(":")))
    print(f"GENERATED={name}", asdict(drawn))  # shown if it fails
    folder, answers = str(tmp_path) if drawn.cut else "", []
    for number, leg in enumerate(drawn.legs):
        answers = gangs.run(leg.ranks, (drawn, number, folder))
        if any(isinstance(answer, Refused) for answer in answers):
            check_refused(drawn, leg, answers)
            return
    first, one = one_process(drawn)
    found = distance(drawn, answers, first, one)
    assert found <= CLOSE or found <= CHAOTIC * sensitivity(drawn), f"{found:.2g} from one process"
    assert [answer.rates for answer in answers] == [pytest.approx(one.rates, rel=1e-12)] * len(answers)
    assert all(answer.judged == answers[0].judged for answer in answers)
    assert all(map(math.isfinite, answers[0].judged.values()))
    if not drawn.has_groups_of_samples:
        assert answers[0].judged == pytest.approx(one.judged, rel=1e-10)


PARTS = ("pipeline", "tensor")
REASONS = {
    r"BatchNorm needs two": lambda drawn, leg: drawn.network == "BatchNorm",
    r"^(clip_norm|ema): .*parameter_average": lambda drawn, leg: leg.strategy == "parameter_average",
    r"^strategy parameter_average is exact only if": lambda drawn, leg: "adam" in drawn.optimiser,
    r"^ema: each rank estimates BatchNorm's statistics": lambda drawn, leg: leg.settings.get("sync_bn") == "true",
    r"ema: BatchNorm's statistics .* the first tensor of each batch": lambda drawn, leg: drawn.form != "pair",
    r"strategy pipeline: needs batches of inputs and labels": lambda drawn, leg: (
        leg.strategy == "pipeline" and (drawn.form != "pair" or drawn.network in SEVERAL)
    ),
    r"strategy pipeline: \w+ is not a known chain of blocks": lambda drawn, leg: drawn.network not in SEQUENTIAL,
    r"has its own forward pass": lambda drawn, leg: drawn.network not in SEQUENTIAL,
    r"takes several tensors per sample": lambda drawn, leg: (
        leg.strategy in PARTS and (drawn.form != "pair" or drawn.network in SEVERAL)
    ),
    r"fails on torch's meta device": lambda drawn, leg: leg.strategy in PARTS,
    r"^weight: with fidelity local or compressed": lambda drawn, leg: drawn.loss == "tokens",
    r"run.keep\(average=...\): the checkpoint's state does not fit": lambda drawn, leg: (
        drawn.average == "own" and any(one.strategy in PARTS for one in drawn.legs) and len(set(drawn.legs)) > 1
    ),
    r"^strategy fsdp: \w+ cannot be copied": lambda drawn, leg: drawn.average == "own",
    r"strategy fsdp: ranks use different parts": lambda drawn, leg: drawn.network == "branches",
    r"^unused_parameters: with strategy fsdp": lambda drawn, leg: drawn.network == "branches",
    r"the loss does not depend on \d+ of \d+ parameters \(rare": lambda drawn, leg: drawn.network == "branches",
}
"""What may be said, and of which scripts."""


def check_refused(drawn: Drawn, leg: Leg, answers: list[Trained | Refused]) -> None:
    """By all ranks, in the same line but for who says it."""
    refused = [answer for answer in answers if isinstance(answer, Refused)]
    assert len(refused) == len(answers), answers
    lines = {re.sub(r"^(another rank ended the run: )?(rank \d+ on \w+, )?", "", answer.line) for answer in refused}
    assert len(lines) == 1 and "\n" not in (line := lines.pop()), refused
    assert any(re.search(words, line) and may(drawn, leg) for words, may in REASONS.items()), line
    assert drawn.network == "branches" or not any(answer.updates for answer in refused), refused
