"""Training scripts by chance: `draw(seed, number)` is always the same, `one_process(drawn)` what it has to give.

A drawn script has a network, batches, a loss, an optimiser, a schedule and an average of its own, and settings of
`trainer.join`, as it stands or cut in two by a checkpoint. `one_process` is plain PyTorch on the same samples.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import default_collate

from tests.support.sums import NEWEST_FSDP
from trainer.compute.microbatches import MicroBatches
from trainer.data import SampleStream
from trainer.shared import AFTER_BACKWARD, PER_STAGE, scale_shares, split_batch

TESTS = 7
"""Samples of an evaluation."""
WIDTH, WORDS, LENGTH, CLASSES = 6, 11, 5, 3

# ---- networks ------------------------------------------------------------------------------------------------------


class Front(nn.Module):
    """Some layers behind what each network makes of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, CLASSES))

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.layers(inputs)
        return found


class Residual(Front):
    def forward(self, inputs: Tensor) -> Tensor:
        return inputs[:, :CLASSES] + super().forward(inputs)


class Logarithm(Front):
    """Not finite at 0, as the next one."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs.log())


class Direction(Front):
    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs / inputs.norm(dim=1, keepdim=True))


class Root(Front):
    """Its gradient is not finite at 0."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(self.first(inputs).square().sum(1, keepdim=True).sqrt().expand(-1, WIDTH))


class Two(Front):
    def forward(self, inputs: Tensor, other: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(inputs - other.sin())


class Noting(Front):
    """A queue and a counter, which no output depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(4, WIDTH))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs: Tensor) -> Tensor:
        self.queue = torch.cat([inputs.detach(), self.queue])[:4]
        self.seen += len(inputs)
        return super().forward(inputs)


class Masked(nn.Module):
    """Attention over what came before, by a buffer that is not finite; the output layer is tied to the embedding."""

    def __init__(self, *, is_tied: bool = True) -> None:
        super().__init__()
        self.embedding, self.inner = nn.Embedding(WORDS, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, WORDS, bias=False)
        if is_tied:
            self.head.weight = self.embedding.weight
        self.register_buffer("mask", torch.full((LENGTH, LENGTH), -torch.inf).triu(1))

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.embedding(words)
        scores = self.inner(hidden) @ hidden.transpose(1, 2) + self.mask
        found: Tensor = self.head(hidden + scores.softmax(dim=-1) @ hidden)
        return found


class Lengths(nn.Module):
    """The state of a GRU after the last word that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.gru, self.head = nn.Embedding(WORDS, 8), nn.GRU(8, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, words: Tensor, lengths: Tensor) -> Tensor:
        states, _ = self.gru(self.embedding(words))
        found: Tensor = self.head(states[torch.arange(len(words)), lengths - 1])
        return found


class Branches(Front):
    """One branch for all, and another for samples that are large: few."""

    def __init__(self) -> None:
        super().__init__()
        self.rare = nn.Linear(WIDTH, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        found = super().forward(inputs)
        is_large = inputs[:, 0] > 2.2
        return found + self.rare(inputs) * is_large[:, None] if bool(is_large.any()) else found


class Take(nn.Module):
    """The mean over time of what recurrent layers return."""

    def forward(self, outputs: Any) -> Tensor:
        found: Tensor = outputs[0] if isinstance(outputs, tuple) else outputs
        return found.mean(dim=1)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.attention(inputs, inputs, inputs, need_weights=False)[0]


def plain() -> nn.Sequential:
    layers = [nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(8, CLASSES))


def normed(make: Callable[[], nn.Module]) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 8), make(), nn.Tanh(), nn.Linear(8, 8), make(), nn.Tanh(), nn.Linear(8, 3))


def fine_tuned() -> nn.Sequential:
    """Its BatchNorm stays as it was trained."""
    model = normed(lambda: nn.BatchNorm1d(8))
    for norm in (model[1], model[4]):
        norm.running_mean += 0.3
        norm.eval()
    return model


def frozen() -> nn.Sequential:
    model = plain()
    model[0].requires_grad_(False)
    return model


def over_words(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Embedding(WORDS, 8), *layers, nn.Linear(8, CLASSES))


def encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)


POINTS: dict[str, Callable[[], nn.Module]] = {
    "plain": plain,
    "residual": Residual,
    "log": Logarithm,
    "norm": Direction,
    "sqrt": Root,
    "noting": Noting,
    "BatchNorm": lambda: normed(lambda: nn.BatchNorm1d(8)),
    "frozen BatchNorm": fine_tuned,
    "GroupNorm": lambda: normed(lambda: nn.GroupNorm(2, 8)),
    "frozen first layer": frozen,
    "branches": Branches,
}
TEXTS: dict[str, Callable[[], nn.Module]] = {
    "GRU": lambda: over_words(nn.Sequential(nn.GRU(8, 8, batch_first=True), Take()), nn.Linear(8, 8)),
    "LSTM": lambda: over_words(nn.Linear(8, 8), nn.Sequential(nn.LSTM(8, 8, batch_first=True), Take())),
    "attention": lambda: over_words(Attention(), nn.Linear(8, 8), Take()),
    "encoder": lambda: over_words(encoder(), encoder(), Take()),
}
TOKENS: dict[str, Callable[[], nn.Module]] = {
    "tied": Masked,
    "causal": lambda: Masked(is_tied=False),
    "encoder of tokens": lambda: nn.Sequential(nn.Embedding(WORDS, 8), encoder(), nn.Linear(8, 8), nn.Linear(8, WORDS)),
}
SEVERAL: dict[str, Callable[[], nn.Module]] = {"two inputs": Two, "lengths": Lengths}
NETWORKS = {**POINTS, **TEXTS, **TOKENS, **SEVERAL}
SEQUENTIAL = {"plain", "BatchNorm", "frozen BatchNorm", "GroupNorm", "frozen first layer", *TEXTS, "encoder of tokens"}
"""What a pipeline can cut."""
FOUR_BLOCKS = {"plain", "frozen first layer"}

# ---- data and losses -----------------------------------------------------------------------------------------------

FORMS = ("pair", "dict", "nested", "labels first")


@dataclass(frozen=True)
class Samples:
    """A map-style data set; points are never 0."""

    count: int
    network: str
    form: str
    loss: str

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        generator = torch.Generator().manual_seed(index)
        inputs, targets = self._inputs(generator), self._targets(generator)
        if self.form == "pair":
            return (inputs[0] if len(inputs) == 1 else inputs), targets
        named = dict(zip(("x", "other"), inputs, strict=False))
        if self.form == "dict":
            return {**named, "y": targets}
        return {"in": named, "out": [targets]} if self.form == "nested" else [targets, *inputs]

    def _inputs(self, generator: torch.Generator) -> tuple[Any, ...]:
        def point() -> Tensor:
            return torch.rand(WIDTH, generator=generator, dtype=torch.float64) * 2 + 0.5

        if self.network in POINTS:
            return (point(),)
        if self.network == "two inputs":
            return point(), point()
        words = torch.randint(WORDS, (LENGTH,), generator=generator)
        return (words, 1 + int(words[0]) % LENGTH) if self.network == "lengths" else (words,)

    def _targets(self, generator: torch.Generator) -> Any:
        if self.loss == "tokens":
            words = torch.randint(WORDS, (LENGTH,), generator=generator)
            words[1 + int(words[0]) % LENGTH :] = -100
            return words
        if self.loss == "squares":
            return torch.randn(CLASSES, generator=generator, dtype=torch.float64)
        classes = torch.randint(CLASSES, (2,), generator=generator)
        return classes if self.loss == "several" else int(classes[0])


def parts_of(batch: Any, form: str) -> tuple[tuple[Tensor, ...], Tensor]:
    """Inputs and targets, as the loop's body takes them from a batch."""
    if form == "pair":
        inputs, targets = batch
        return (inputs,) if isinstance(inputs, Tensor) else tuple(inputs), targets
    if form == "labels first":
        targets, *inputs = batch
        return tuple(inputs), targets
    named = batch if form == "dict" else batch["in"]
    found = tuple(named[name] for name in ("x", "other") if name in named)
    return found, batch["y"] if form == "dict" else batch["out"][0]


def loss_sum(loss: str, outputs: Tensor, targets: Tensor) -> Tensor:
    if loss == "squares":
        return mse_loss(outputs, targets, reduction="sum")
    if loss == "several":
        return sum((cross_entropy(outputs, column, reduction="sum") for column in targets.T), outputs.new_zeros(()))
    if loss == "tokens":
        return cross_entropy(outputs.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")
    return cross_entropy(outputs, targets, reduction="sum")


def judge_by(loss: str) -> Callable[[Tensor, Tensor], dict[str, Tensor]]:
    def judge(outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return {"loss": loss_sum(loss, outputs, targets), "spread": outputs.double().square().sum()}

    return judge


# ---- a drawn script ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Leg:
    """A run over ranks: the whole one, or a part of it that a checkpoint ends or begins."""

    nodes: tuple[str, ...]
    """Each rank's host."""
    asked: tuple[tuple[str, str], ...]

    @property
    def ranks(self) -> int:
        return len(self.nodes)

    @property
    def settings(self) -> dict[str, str]:
        return dict(self.asked)

    @property
    def strategy(self) -> str:
        return self.settings["strategy"]

    @property
    def names(self) -> list[tuple[str, int]]:
        return [(node, self.nodes[:rank].count(node)) for rank, node in enumerate(self.nodes)]


@dataclass(frozen=True)
class Drawn:
    weights: int
    """The seed of the first weights."""
    network: str
    form: str
    loss: str
    samples: int
    batch: int
    epochs: int
    optimiser: str
    by: str
    """instance, function, or groups of weights with rates of their own."""
    clip_norm: float
    schedule: str
    average: str
    """own, ema, or none."""
    legs: tuple[Leg, ...]
    cut: int
    """Updates of the first leg, if another one follows."""

    @property
    def updates(self) -> int:
        return self.epochs * -(-self.samples // self.batch)

    @property
    def data(self) -> Samples:
        return Samples(self.samples, self.network, self.form, self.loss)

    @property
    def tests(self) -> Samples:
        return Samples(TESTS, self.network, self.form, self.loss)

    @property
    def is_judged(self) -> bool:
        """run.evaluate calls the network with what the first of a pair is."""
        return self.form == "pair" and self.network not in SEVERAL

    @property
    def has_groups_of_samples(self) -> bool:
        """Does what is computed for a sample depend on those beside it, which differ from rank to rank?"""
        return self.network == "BatchNorm"

    def model(self) -> nn.Module:
        torch.manual_seed(self.weights)
        torch.set_default_dtype(torch.float64)
        try:
            return NETWORKS[self.network]()
        finally:
            torch.set_default_dtype(torch.float32)

    def build_optimiser(self, weights: Any) -> torch.optim.Optimizer:
        """weights: parameters, or groups of them."""
        if self.optimiser == "adam":
            return torch.optim.Adam(weights, lr=0.01, eps=1e-3)  # a larger eps: gradients that are 0 but for rounding
        if self.optimiser == "adamw":
            return torch.optim.AdamW(weights, lr=0.01, eps=1e-3, weight_decay=0.1)
        if self.optimiser == "sgd":
            return torch.optim.SGD(weights, lr=0.05, weight_decay=0.01)
        is_nesterov = self.optimiser == "nesterov"
        return torch.optim.SGD(weights, lr=0.05, momentum=0.9, nesterov=is_nesterov, weight_decay=0.01)

    def weights_of(self, model: nn.Module) -> Any:
        weights = list(model.parameters())
        if self.by != "groups":
            return weights
        return [{"params": weights[1::2]}, {"params": weights[0::2], "lr": 0.02}]

    def scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
        schedulers = torch.optim.lr_scheduler
        if self.schedule == "OneCycleLR":
            turns = self.optimiser != "sgd"
            return schedulers.OneCycleLR(optimizer, 0.08, total_steps=self.updates + 1, cycle_momentum=turns)
        if self.schedule == "StepLR":
            return schedulers.StepLR(optimizer, 3, 0.5)
        return schedulers.ExponentialLR(optimizer, 0.9) if self.schedule == "ExponentialLR" else None


EMA = 0.8


def draw(seed: int, number: int) -> Drawn:
    by = random.Random(f"{seed}:{number}")
    network = by.choice(["plain", "BatchNorm", *NETWORKS])
    loss = "tokens" if network in TOKENS else by.choice(["classes", "squares", "several"])
    form = by.choice(["pair", "pair", *FORMS])
    batch = by.randint(5, 16)
    samples = batch * by.randint(2, 4) + by.choice([0, 1, 1, 2, by.randint(1, batch - 1)])
    optimiser = by.choice(["sgd", "momentum", "nesterov", "adam", "adamw"])
    drawn = Drawn(
        weights=by.randint(0, 999),
        network=network,
        form=form,
        loss=loss,
        samples=samples,
        batch=batch,
        epochs=by.randint(1, 3),
        optimiser=optimiser,
        by=by.choice(["instance", "function", "groups"]),
        clip_norm=by.choice([0.0, 0.0, 0.3]),
        schedule=by.choice(["none", "StepLR", "OneCycleLR", "ExponentialLR"]),
        average=by.choice(["none", "own", "ema"]),
        legs=(),
        cut=0,
    )
    first = _leg(by, drawn)
    is_cut = first.strategy != "fsdp" and by.random() < 0.4
    if first.strategy == "parameter_average":
        # Each rank's own momentum counts for one part of the batch, as long as that is the same.
        drawn = replace(drawn, samples=batch * (samples // batch)) if optimiser != "sgd" else drawn
        is_cut = is_cut and optimiser == "sgd"
    legs, cut = (first,), 0
    if is_cut:
        cut = by.randint(1, drawn.updates - 1)
        legs = (first, first if by.random() < 0.4 else _leg(by, drawn, kept=first))
    return replace(drawn, legs=legs, cut=cut)


def _leg(by: random.Random, drawn: Drawn, kept: Leg | None = None) -> Leg:
    """kept: the leg before, whose settings that are no matter of ranks stay."""
    ranks = by.choice([1, 2, 2, 3, 3, 3, 4, 4, 4])
    nodes = tuple("abcd"[:ranks]) if by.random() < 0.75 else tuple("aabb"[:ranks])
    strategies = ["ddp", "ddp", *AFTER_BACKWARD, "tensor"]
    if not kept or drawn.optimiser == "sgd":
        strategies += ["parameter_average"]
    if NEWEST_FSDP and not kept:
        strategies += ["fsdp", "fsdp"]
    if drawn.form == "pair" and drawn.network in SEQUENTIAL:
        strategies += ["pipeline"] * 6
    elif drawn.form != "labels first" or drawn.network in POINTS:  # an embedding would take labels for its words
        strategies += ["pipeline"]
    strategy = by.choice(strategies) if ranks > 1 else by.choice(["ddp", "none"])
    asked = {"strategy": strategy}
    leg = Leg(nodes, ())
    if strategy != "none" and by.random() < 0.6:
        parts = [by.choice([0, 0, 1, 1, 2, 3, 5, 9]) for _ in nodes]
        parts[by.randrange(ranks)] += 1
        asked["shares"] = ",".join(
            f"{node}:{local}={part}" for (node, local), part in zip(leg.names, parts, strict=True)
        )
    asked["accumulate"] = str(by.choice([1, 1, 2, 3]) if strategy != "pipeline" else by.randint(0, 4))
    if strategy == "pipeline":
        asked["schedule"] = by.choice(["1f1b", "zero_bubble"])
        asked["in_flight"] = by.choice(["0", "0", "2"])
        if drawn.network in FOUR_BLOCKS and nodes == tuple("abcd"[:ranks]) and by.random() < 0.6:
            asked["stages"] = _stages(by, ranks)
    if strategy in ("ddp", "allreduce", "allreduce_flat", "fsdp") and drawn.network == "BatchNorm":
        asked["sync_bn"] = by.choice(["true", "false"])
        if asked["sync_bn"] == "true":
            asked["accumulate"] = "1"
    if drawn.network == "branches":
        asked["unused_parameters"] = by.choice(["zeros", "zeros", "zeros", "refuse"])
    if strategy == "ddp":
        asked["bucket_mib"] = by.choice(["0", "0.0005"])
    if by.random() < 0.08:
        asked["num_workers"] = "1"
    if drawn.clip_norm:
        asked["clip_norm"] = str(drawn.clip_norm)
    if drawn.average == "ema":
        asked["ema"] = str(EMA)
    return Leg(nodes, tuple(asked.items()))


def _stages(by: random.Random, ranks: int) -> str:
    """Of four blocks, on hosts a to d; or two pipelines beside each other."""
    hosts = list("abcd"[:ranks])
    if ranks == 4 and by.random() < 0.4:
        end = by.randint(0, 2)
        return f"a:0-{end},b:{end + 1}-3|c:0-{end},d:{end + 1}-3"
    by.shuffle(hosts)
    ends = [*sorted(by.sample(range(3), ranks - 1)), 3]
    begins = [0, *(end + 1 for end in ends[:-1])]
    return ",".join(f"{host}:{begin}-{end}" for host, begin, end in zip(hosts, begins, ends, strict=True))


# ---- one process ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trained:
    """weights, average: by name; of a rank, what it holds of them."""

    weights: dict[str, Tensor]
    average: dict[str, Tensor]
    rates: list[float]
    judged: dict[str, float]


def one_process(drawn: Drawn, nudge: int = 0) -> tuple[dict[str, Tensor], Trained]:
    """The first weights, and what training has left. nudge: the seed by which the first weights differ in their last
    bits; 0 for none.
    """
    model, by = drawn.model(), torch.Generator().manual_seed(nudge)
    with torch.no_grad():
        for weight in model.parameters() if nudge else ():
            weight *= 1 + 1e-15 * torch.randn(weight.shape, dtype=weight.dtype, generator=by)
    first = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    optimizer = drawn.build_optimiser(drawn.weights_of(model))
    scheduler = drawn.scheduler(optimizer)
    average = torch.optim.swa_utils.AveragedModel(model) if drawn.average == "own" else None
    means = {name: weight.clone() for name, weight in first.items()}
    for update, groups in enumerate(_updates(drawn)):
        optimizer.zero_grad()
        targets = [parts_of(group, drawn.form)[1] for group in groups]
        samples = sum(len(of_group) for of_group in targets)
        weight = sum(int((one != -100).sum()) for one in targets) if drawn.loss == "tokens" else samples
        for group in groups:
            inputs, of_group = parts_of(group, drawn.form)
            (loss_sum(drawn.loss, model(*inputs), of_group) / weight).backward()
        if drawn.clip_norm:
            nn.utils.clip_grad_norm_(model.parameters(), drawn.clip_norm)
        optimizer.step()
        if scheduler:
            scheduler.step()
        if average:
            average.update_parameters(model)
        decay = min(EMA, (2 + update) / (11 + update))
        for name, one in model.named_parameters():
            means[name] = decay * means[name] + (1 - decay) * one.detach()
    held = _held(model)
    rates = [group["lr"] for group in optimizer.param_groups]
    return first, Trained(held, _held(average.module) if average else {}, rates, _judged(drawn, model, means))


def _held(model: nn.Module) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


@torch.no_grad()
def _judged(drawn: Drawn, model: nn.Module, means: dict[str, Tensor]) -> dict[str, float]:
    if not drawn.is_judged:
        return {}
    model.load_state_dict(means if drawn.average == "ema" else {}, strict=False)
    inputs, targets = default_collate([drawn.tests[index] for index in range(TESTS)])
    found = judge_by(drawn.loss)(model.eval()(inputs), targets)
    return {name: value.item() / TESTS for name, value in found.items()}


def _updates(drawn: Drawn) -> Iterator[list[Any]]:
    """Batches of each update: a single one, or the parts that a BatchNorm sees by itself."""
    data, number = drawn.data, 0
    for epoch in range(drawn.epochs):
        for step in range(drawn.updates // drawn.epochs):
            leg = drawn.legs[0 if number < drawn.cut else -1]
            stream = SampleStream(drawn.samples, drawn.batch, (drawn.batch,), seed=0)
            rows, begin, groups = stream.indices(epoch, step, 0), 0, []
            for size in _sizes(drawn, leg, step) if drawn.has_groups_of_samples else (len(rows),):
                groups.append(default_collate([data[index] for index in rows[begin : begin + size]]))
                begin += size
            assert begin == len(rows)
            yield groups
            number += 1


def _sizes(drawn: Drawn, leg: Leg, step: int) -> list[int]:
    """The parts of a batch by rank and micro-batch, as the documentation has them."""
    settings = leg.settings
    shares = split_batch(settings.get("shares", "equal"), {}, leg.names, drawn.batch)
    accumulate, is_whole = int(settings["accumulate"]), settings.get("sync_bn") == "true"
    if leg.strategy == "tensor":
        shares = (drawn.batch, *[0] * (leg.ranks - 1))
    if leg.strategy == "pipeline":  # its first host reads all samples; of a single host the first rank
        is_one_host = len(set(leg.nodes)) == 1
        readers = [0] if is_one_host else [rank for rank, node in enumerate(leg.nodes) if node == leg.nodes[0]]
        wanted = [shares[rank] for rank in readers]
        own = dict(zip(readers, scale_shares(wanted if sum(wanted) else [1] * len(wanted), drawn.batch), strict=True))
        shares = tuple(own.get(rank, 0) for rank in range(leg.ranks))
        accumulate = accumulate or PER_STAGE * (leg.ranks if is_one_host else len(set(leg.nodes)))
    stream = SampleStream(drawn.samples, drawn.batch, shares, seed=0, pairs=not is_whole)
    at = stream.shares_at(step)
    if is_whole:
        return [sum(at)]
    cut = MicroBatches(accumulate, [None] * leg.ranks, together=leg.strategy == "fsdp")
    return [size for rank in range(leg.ranks) for size in cut.sizes(at, rank) if size]
