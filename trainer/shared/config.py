"""The settings of one run: one flat frozen value, a sentence per field, checked in one place.

    >>> settings = parse_settings("mnist_lenet", {"batch": "128", "strategy": "allreduce"})
    >>> settings.batch
    128

`Settings` are those of training, `CollectiveSettings` those of measuring collectives. The same names are used as
`--set key=value`, as `python -m trainer --key value`, in records and in reports. Imports no torch.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from trainer.shared.alpha_beta import BUS_FACTORS
from trainer.shared.experiments import BROUGHT, DATA_SETS, EXPERIMENTS, OWN, SCRIPT, TRAINING, DataSet
from trainer.shared.shares import PROFILED, parse_shares, parse_speeds
from trainer.shared.slow import Slow, parse_slow
from trainer.shared.stages import ALONE, parse_stages

STRATEGIES = (
    *("ddp", "allreduce", "allreduce_flat", "reduce_broadcast", "gather_scatter", "allgather", "reduce_scatter"),
    *("parameter_average", "fsdp", "pipeline", "tensor", "none", "dp"),
)
FIDELITIES = {
    "exact": STRATEGIES,
    "half": ("ddp", "allreduce_flat", "allreduce", "pipeline", "tensor"),
    "compressed": ("ddp", "allreduce_flat"),
    "local": ("ddp", "parameter_average", "pipeline"),
}
"""How faithful the sums are, and the strategies that can be so."""
SWITCH = ("auto", "on", "off")
NOT_WITH_FSDP = ("channels_last", "fused_sgd")
"""What can only be off where weights are cut into pieces."""
OF_FIDELITY = {
    "compressed": ("compress_rank", "compress_after"),
    "local": ("local_steps", "local_overlap", "local_after", "local_batch", "outer_lr", "outer_momentum"),
}
"""Settings that one fidelity alone looks at."""
OF_PIPELINE = ("stages", "in_flight", "schedule")
"""Settings that the strategy pipeline alone looks at."""
LOCAL_STEPS = 32
"""Local steps where nobody has said, and nobody knows, how many hide the wire."""
INT_BELOW = 2**63
"""What torch and every record of ours can hold."""
MODEL_CHANNELS = {"lenet": None, "resnet152": 3}
"""Channels of an image that a model insists on; None: any."""


class SettingsError(ValueError):
    """mistakes: every mistake, one line each; `str(error)` joins them."""

    def __init__(self, mistakes: Sequence[str]) -> None:
        super().__init__("\n".join(mistakes))
        self.mistakes = tuple(mistakes)


def _setting(
    help: str,
    *,
    choices: Iterable[str] = (),
    unsaid: Iterable[str] = (),
    at_least: float = -math.inf,
    below: float = math.inf,
    above: float = -math.inf,
) -> Any:
    """A field with its sentence and its bounds: at_least <= value, above < value < below.

    unsaid: right beside `choices`, and nothing that a person writes.
    """
    bounds = {"at_least": at_least, "below": below, "above": above}
    return dataclasses.field(metadata={"help": help, "choices": tuple(choices), "unsaid": tuple(unsaid), **bounds})


def overlap_of(local_steps: int, asked: int) -> int:
    """asked: the setting `local_overlap`. (Where `orch` predicts `local_steps`, it settles -1 beforehand.)"""
    return local_steps // 4 if asked < 0 else asked


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Raises SettingsError with every mistake when a value is out of its bounds."""

    exp: str = _setting(
        "The named experiment that gave every value not set here.", choices=TRAINING, unsaid=[SCRIPT["exp"]]
    )
    model: str = _setting("The network to train.", choices=MODEL_CHANNELS, unsaid=[OWN])
    data: str = _setting(
        "The data set. synthetic makes images up, folder reads DATA_DIR/train/CLASS/* and DATA_DIR/val/CLASS/*; both "
        "in the shape of the experiment's own data set.",
        choices=[*DATA_SETS, "folder", "synthetic"],
        unsaid=[OWN],
    )
    data_dir: str = _setting("The folder on each host that holds the data sets, or receives them.")
    batch: int = _setting("Samples of one update, over all ranks together.", at_least=1, below=1 << 40)
    epochs: int = _setting("Passes over the training data.", at_least=1)
    steps: int = _setting("Updates after which to stop, if the epochs last longer; 0 is no limit.", at_least=0)
    samples: int = _setting("Train on only the first so many samples of the data; 0 is all of them.", at_least=0)
    lr: float = _setting("Learning rate of SGD.", above=0)
    momentum: float = _setting("Momentum of SGD.", at_least=0, below=1)
    weight_decay: float = _setting("L2 penalty of SGD.", at_least=0)
    seed: int = _setting("Decides the initial weights, the order of the samples and their augmentation.", at_least=0)
    device: str = _setting("Where ranks compute; auto is a GPU where there is one.", choices=["auto", "cuda", "cpu"])
    backend: str = _setting(
        "What carries gradients; auto is nccl when every rank has a GPU of its own, else gloo.",
        choices=["auto", "nccl", "gloo"],
    )
    strategy: str = _setting(
        "How ranks stay together. Gradients: in buckets during backward (ddp), or after it, one call a parameter "
        "(allreduce) or all at once (allreduce_flat, reduce_broadcast, gather_scatter, allgather, reduce_scatter); "
        "weights (parameter_average); both in pieces, none held twice (fsdp). Activations: each host holds some of the "
        "network's blocks (pipeline), or each rank some of every layer's output channels (tensor). Or one process "
        "alone, on one device (none) or on all of its host's (dp).",
        choices=STRATEGIES,
    )
    fidelity: str = _setting(
        "What synchronisation may lose: nothing but the order of sums (exact: the update of one process that adds up "
        "the gradients of the ranks' parts, each with a BatchNorm of its own unless sync_bn is set); gradients "
        "travel in 16 bits (half), or as thin matrices, with what that leaves out sent later (compressed); or ranks "
        "train by themselves for local_steps updates, then their weights are averaged (local). Nothing else lowers it.",
        choices=FIDELITIES,
    )
    wire: str = _setting(
        "What numbers travel in; auto is bf16 for half, fp32 otherwise. local may have 16 bits, too.",
        choices=["auto", "fp32", "bf16", "fp16"],
    )
    compress_rank: int = _setting("Columns of compressed's thin matrices (PowerSGD's rank).", at_least=1, below=1025)
    compress_after: int = _setting(
        "Updates before compressed begins to compress; -1 is a tenth of the run.", at_least=-1
    )
    local_steps: int = _setting(
        "Updates of each rank from one average of local's weights to the next; 0 is the fewest that hide the wire, by "
        f"what orch predicts, or {LOCAL_STEPS} where nothing is known.",
        at_least=0,
    )
    local_overlap: int = _setting(
        "Updates that go on while local's weight changes travel, before the average is applied; 0 waits for it, -1 "
        "is a quarter of local_steps; where orch chooses local_steps (0), -1 is the fewest that are predicted to hide "
        "the network, at most half of them.",
        at_least=-1,
    )
    local_after: int = _setting(
        "Updates before local begins to train by itself, exact until then (post-local SGD); -1 is a tenth of the run.",
        at_least=-1,
    )
    local_batch: int = _setting(
        "Samples of a local update, at most: a rank whose share is larger makes several updates of it, so that a fast "
        "one takes more local steps in the same time, with an lr that suits updates of so many; 0 makes one.",
        at_least=0,
    )
    outer_lr: float = _setting(
        "How far local's weights go towards the ranks' mean: 1 is to the mean itself.", above=0, below=10
    )
    outer_momentum: float = _setting(
        "Nesterov momentum of local's averages; 0 is the plain mean, DiLoCo has 0.9 with outer_lr=0.7.",
        at_least=0,
        below=1,
    )
    bucket_mib: float = _setting(
        "Size of ddp's gradient buckets, and most of fsdp's pieces, in MiB; 0 fits ddp's to the link as it is at the "
        "start, and leaves fsdp's at 25.",
        at_least=0,
    )
    shares: str = _setting(
        "How a batch is split over the ranks: equal; so that all are done at the same time by the speeds that `orch "
        "profile` measured (measured), or that the run itself shows (auto); measured where every rank has a profile, "
        "else equal (profiled); or in proportion to what is said of each "
        "node or rank, like v100=5,a2000=2 or a16:0=1,a16:1=3; a part of 0 takes a rank out."
    )
    speeds: str = _setting(
        "What is known of ranks, like v100:0=2+1.2/512: ms a micro-batch, ms a sample, and the most samples that fit "
        "its memory at once; orch fills it in from its profiles."
    )
    accumulate: int = _setting(
        "Micro-batches of each rank that make one update, its gradients summed before they travel; 0 is as few as its "
        "memory asks for, or what fills a pipeline. BatchNorm sees each by itself.",
        at_least=0,
    )
    stages: str = _setting(
        "Which blocks of the network each host of a pipeline holds, in the order in which samples pass them, like "
        "v100:0-31,a2000:32-51; a | stands between pipelines beside each other. Empty cuts by what is known of speeds."
    )
    in_flight: int = _setting(
        "Micro-batches that a pipeline's first stage holds between forward and backward, at most; each later stage "
        "holds one fewer. 0 is one a stage and four more, for those on their way.",
        at_least=0,
    )
    schedule: str = _setting(
        "When a pipeline's stage computes its weights' gradients: when it would wait otherwise (zero_bubble), or with "
        "its inputs' (1f1b), which holds less memory.",
        choices=["zero_bubble", "1f1b"],
    )
    profile_s: float = _setting(
        "Seconds in which to measure each rank alone, instead of training; 0 trains.", at_least=0
    )
    sync_bn: bool = _setting(
        "BatchNorm over the whole batch of all ranks, as one process would have it, not over each rank's own part: "
        "these groups differ in size with shares, and change in mid-run with shares=auto and with caps of memory."
    )
    amp: str = _setting(
        "Computes forward and backward in 16 bits where that is safe; bf16 needs a GPU of compute capability 8.0 "
        "(Ampere) or newer, fp16 a V100 or newer.",
        choices=["none", "bf16", "fp16"],
    )
    tf32: str = _setting(
        "Whether convolutions may round float32 to TF32's 10 bits of fraction, which GPUs from Ampere on compute "
        "faster; auto is on where every rank's GPU can, else off on all, so that ranks compute alike.",
        choices=SWITCH,
    )
    channels_last: str = _setting(
        "Whether weights and images lie in memory with their channels last, as tensor cores like them; it changes the "
        "order of sums. auto is on with amp where every rank has a GPU.",
        choices=SWITCH,
    )
    cudnn_benchmark: str = _setting(
        "Whether cuDNN times its algorithms at each new size of batch and takes the fastest: seconds at the start, and "
        "another order of sums from run to run. auto is on on a GPU, unless shares=auto changes the sizes.",
        choices=SWITCH,
    )
    fused_sgd: str = _setting(
        "Whether SGD updates all weights in one pass over their memory (torch 2.3 or newer); its last bits may differ. "
        "auto is on on a GPU, but not with fsdp.",
        choices=SWITCH,
    )
    cuda_graph: str = _setting(
        "Whether forward and backward of a size of batch that comes again are recorded as CUDA graphs and replayed: "
        "the host is spared most of its launches, memory holds one more pass for good. auto does so where memory has "
        "room and a replay gives what a plain pass gives; on also says why where it cannot.",
        choices=SWITCH,
    )
    augment: str = _setting(
        "How training images are varied: turned, moved and scaled a little (affine), cut out with a margin of 4 and "
        "flipped (crop_flip), or not at all.",
        choices=["none", "affine", "crop_flip"],
    )
    loader: str = _setting(
        "Where batches come from: processes that load sample by sample (workers), or the whole set held on the device "
        "and varied a batch at a time (resident); auto is resident where the set fits.",
        choices=["auto", "resident", "workers"],
    )
    num_workers: int = _setting(
        "Processes per rank that load samples (workers); 0 loads in the rank, -1 takes what the host's cores allow.",
        at_least=-1,
    )
    slow: str = _setting(
        "A bottleneck made on purpose: rank:R,at:start|backward|sync|call,ms:M makes rank R stand still for M ms: once "
        "a step before forward, as backward begins, or with its last gradient in hand; or before every call of a "
        "collective that exchanges gradients or weights. It counts as that rank's computing. Empty for none.",
    )
    warmup_steps: int = _setting("First updates that are left out of every speed.", at_least=0)
    checkpoint_every: int = _setting("Updates between checkpoints, one more at the end; 0 writes none.", at_least=0)
    checkpoint_dir: str = _setting("The folder for checkpoints; empty is the job's own, or ./checkpoints without one.")
    resume: str = _setting("A checkpoint, or a folder of them, to resume from; empty starts from scratch.")
    eval_every: int = _setting("Epochs between evaluations on the test data; 0 never evaluates.", at_least=0)

    def __post_init__(self) -> None:
        mistakes = [text for field in dataclasses.fields(self) for text in _bounds(field, getattr(self, field.name))]
        if not self.data_dir.strip() or not self.data_dir.isprintable():
            mistakes.append(f"data_dir: {self.data_dir!r} is not a folder's name")
        for name, parse in (
            ("slow", parse_slow),
            ("shares", parse_shares),
            ("speeds", parse_speeds),
            ("stages", parse_stages),
        ):
            try:
                parse(getattr(self, name))
            except ValueError as error:
                mistakes.append(f"{name}: {error}")
        if self.shares not in ("equal", PROFILED) and self.strategy in ("none", "dp"):
            mistakes.append(
                f"shares: strategy {self.strategy} is one process, which takes the whole batch; leave shares equal"
            )
        if "at:call" in self.slow and self.strategy in ("none", "dp"):
            mistakes.append(f"slow: strategy {self.strategy} exchanges nothing, so there is no call; use at:sync")
        if self.shares == "auto" and (self.sync_bn or self.strategy == "fsdp"):
            mistakes.append(
                "shares: auto compares how long ranks compute, and with sync_bn or fsdp they wait for each other in "
                "that time; use measured"
            )
        mistakes += self._mistakes_of_fidelity()
        mistakes += self._mistakes_of_pipeline()
        mistakes += self._mistakes_of_tensor()
        if self.strategy == "fsdp":
            asked = [name for name in NOT_WITH_FSDP if getattr(self, name) == "on"]
            mistakes += [f"{name}: strategy fsdp keeps weights in pieces and cannot; use auto or ddp" for name in asked]
        if self.profile_s and self.checkpoint_every:
            mistakes.append("checkpoint_every: does nothing with profile_s, which trains nothing; leave one out")
        averages = self.strategy == "parameter_average" and self.fidelity == "exact"
        if averages and self.shares == "auto" and self.momentum:
            mistakes.append(
                "shares: auto changes what each rank's own momentum counts for, so parameter_average is not exact; "
                "use ddp, shares=measured, momentum=0 or fidelity=local"
            )
        if self.sync_bn and (self.strategy in ("parameter_average", "dp") or self.fidelity == "local"):
            mistakes.append(f"sync_bn: {self._way} has no one network that could see the whole batch; use ddp")
        mistakes += self._mistakes_of_own()
        if not mistakes and not self.is_own and MODEL_CHANNELS[self.model] not in (None, self.data_set.shape[0]):
            mistakes.append(
                f"model: {self.model} takes images of {MODEL_CHANNELS[self.model]} channels, "
                f"not {self.data_set.shape[0]}; use data=cifar10 or exp=resnet152_cifar"
            )
        if mistakes:
            raise SettingsError(mistakes)

    @property
    def is_own(self) -> bool:
        """Of a script of one's own, which brings its network and its data?"""
        return self.exp == str(SCRIPT["exp"])

    def _mistakes_of_own(self) -> list[str]:
        if not self.is_own:
            brought = [name for name in ("model", "data") if getattr(self, name) == OWN]
            return [f"{name}: {OWN} is what a script brings that says `import trainer`" for name in brought]
        changed = [name for name in BROUGHT if getattr(self, name) != SCRIPT[name]]
        return [f"{name}: is the script's own business; give it as an argument of its own" for name in changed]

    def _mistakes_of_fidelity(self) -> list[str]:
        if self.fidelity not in FIDELITIES:
            return []  # said already
        mistakes = []
        if self.strategy in STRATEGIES and self.strategy not in FIDELITIES[self.fidelity]:
            known = ", ".join(FIDELITIES[self.fidelity])
            mistakes.append(f"fidelity: {self.fidelity} goes with strategy {known}, not with {self.strategy}")
        fitting = {"exact": ("auto", "fp32"), "compressed": ("auto", "fp32"), "half": ("auto", "bf16", "fp16")}
        if self.wire not in fitting.get(self.fidelity, (self.wire,)):
            mistakes.append(f"wire: fidelity {self.fidelity} goes with {' or '.join(fitting[self.fidelity])}")
        if self.fidelity == "compressed" and self.amp == "fp16":
            mistakes.append("amp: fp16 leaves out updates that overflow, compressed would remember them; use bf16")
        if self.local_batch and self.accumulate:
            mistakes.append("accumulate: adds up what local_batch takes apart; leave one out")
        if self.local_overlap >= self.local_steps > 0:
            limit = f"less than local_steps, {self.local_steps}"
            mistakes.append(f"local_overlap: {self.local_overlap} is too large; {limit}")
        own = _begun_with(self.exp)
        for fidelity, names in OF_FIDELITY.items():
            changed = [name for name in names if getattr(self, name) != own.get(name, getattr(self, name))]
            if changed and fidelity != self.fidelity:
                mistakes += [f"{name}: does nothing with fidelity {self.fidelity}; use {fidelity}" for name in changed]
        return mistakes

    def _mistakes_of_pipeline(self) -> list[str]:
        if self.strategy != "pipeline":
            own = _begun_with(self.exp)
            changed = [name for name in OF_PIPELINE if getattr(self, name) != own.get(name, getattr(self, name))]
            return [f"{name}: does nothing with strategy {self.strategy}; use pipeline" for name in changed]
        mistakes = []
        if self.shares == "auto":
            mistakes.append("shares: auto moves samples from rank to rank, a pipeline's stages take all; use measured")
        if self.sync_bn:
            mistakes.append("sync_bn: a pipeline's BatchNorm sees a micro-batch; use accumulate=1, or ddp")
        if self.profile_s:
            mistakes.append("profile_s: measures each rank alone, a pipeline has none; use strategy ddp")
        if self.fidelity == "local":
            mistakes += self._mistakes_of_local_pipelines()
        return mistakes

    def _mistakes_of_local_pipelines(self) -> list[str]:
        mistakes = []
        if self.stages and "|" not in self.stages:
            mistakes.append(f"stages: {ALONE}")
        if self.local_batch:
            mistakes.append("local_batch: a pipeline's micro-batches make one update; use accumulate")
        if self.local_after:
            mistakes.append("local_after: pipelines average from the first update on; leave it out")
        if self.amp == "fp16":
            mistakes.append("amp: fp16 leaves out updates that overflow, of which each pipeline has its own; use bf16")
        return mistakes

    def _mistakes_of_tensor(self) -> list[str]:
        if self.strategy != "tensor":
            return []
        mistakes = []
        if self.shares == "auto":
            mistakes.append("shares: auto moves samples from rank to rank, tensor's ranks take all; use measured")
        if self.sync_bn:
            mistakes.append("sync_bn: tensor's ranks each see the whole batch already; leave it out")
        if self.profile_s:
            mistakes.append("profile_s: measures each rank alone, tensor's have slices; use strategy ddp")
        return mistakes

    @property
    def _way(self) -> str:
        return "fidelity local" if self.fidelity == "local" else f"strategy {self.strategy}"

    @property
    def sent_as(self) -> str:
        """fp32, bf16 or fp16."""
        if self.wire == "auto":
            return "bf16" if self.fidelity == "half" else "fp32"
        return self.wire

    @property
    def overlap(self) -> int:
        """Updates that go on while local's weight changes travel."""
        return overlap_of(self.local_steps, self.local_overlap)

    def exact_updates(self, updates: int) -> int:
        """Those with which compressed or local begins, of so many of the whole run."""
        asked = self.compress_after if self.fidelity == "compressed" else self.local_after
        return updates // 10 if asked < 0 else asked

    def as_used(self, updates: int) -> Settings:
        """These settings with each `auto` and -1 of the exchange replaced by its value in a run of so many updates."""
        settled: dict[str, Any] = {"wire": self.sent_as}
        if self.fidelity == "compressed":
            settled["compress_after"] = self.exact_updates(updates)
        if self.fidelity == "local":
            settled |= {"local_after": self.exact_updates(updates), "local_overlap": self.overlap}
        return dataclasses.replace(self, **settled)

    @property
    def bottleneck(self) -> Slow | None:
        return parse_slow(self.slow)

    @property
    def data_set_name(self) -> str:
        """The experiment's own where the data are synthetic or a folder."""
        return self.data if self.data in DATA_SETS else str(EXPERIMENTS[self.exp]["data"])

    @property
    def data_set(self) -> DataSet:
        """The facts of `data_set_name`."""
        return DATA_SETS[self.data_set_name]


@dataclass(frozen=True, kw_only=True)
class CollectiveSettings:
    """Raises SettingsError with every mistake when a value is out of its bounds."""

    exp: str = _setting("The named experiment that gave every value not set here.", choices=["collectives"])
    operations: str = _setting(f"What to measure: all, or some of {', '.join(BUS_FACTORS)}, with commas between.")
    min_bytes: int = _setting(
        "The smallest size, rounded down to the same number of elements for each rank.", at_least=4
    )
    max_bytes: int = _setting("The largest size.", at_least=4)
    factor: int = _setting("From one size to the next.", at_least=2)
    budget_s: float = _setting(
        "Seconds for all of it; what would take longer is left out, the largest sizes first.", above=0
    )
    links: bool = _setting("Whether each path from one host to another is measured by itself, too.")
    iterations: int = _setting(
        "Times that an operation of one size is timed, at most; 3 where it takes long.", at_least=1
    )
    dtype: str = _setting("The type of the elements.", choices=["float32", "bfloat16"])
    device: str = _setting(
        "Where the elements lie; auto is a GPU where there is one. What gloo carries lies in the host's memory.",
        choices=["auto", "cuda", "cpu"],
    )
    backend: str = _setting(
        "What carries them; auto is nccl when every rank has a GPU of its own, else gloo.",
        choices=["auto", "nccl", "gloo"],
    )
    seed: int = _setting("Decides the elements.", at_least=0)

    def __post_init__(self) -> None:
        mistakes = [text for field in dataclasses.fields(self) for text in _bounds(field, getattr(self, field.name))]
        unknown = [name for name in self.chosen_operations if name not in BUS_FACTORS]
        mistakes += [f"operations: {_not_among(name, ['all', *BUS_FACTORS])}" for name in unknown]
        if self.max_bytes < self.min_bytes:
            mistakes.append(f"max_bytes: {self.max_bytes} is less than min_bytes, {self.min_bytes}")
        if mistakes:
            raise SettingsError(mistakes)

    @property
    def chosen_operations(self) -> tuple[str, ...]:
        """Each once, in the order in which they were named."""
        names = BUS_FACTORS if self.operations == "all" else [name.strip() for name in self.operations.split(",")]
        return tuple(dict.fromkeys(names))

    @property
    def sizes(self) -> tuple[int, ...]:
        """In bytes, the smallest first."""
        sizes = [self.min_bytes]
        while sizes[-1] * self.factor <= self.max_bytes:
            sizes.append(sizes[-1] * self.factor)
        return tuple(sizes)


AnySettings = Settings | CollectiveSettings


def _begun_with(exp: str) -> Mapping[str, Any]:
    """The values that nobody has set; of an unknown experiment none."""
    return SCRIPT if exp == SCRIPT["exp"] else TRAINING.get(exp, {})


def _kind_of(exp: str) -> type[AnySettings]:
    return CollectiveSettings if exp == "collectives" else Settings


def fields_of(exp: str) -> dict[str, dataclasses.Field[Any]]:
    """The settings that this experiment has, by name."""
    return {field.name: field for field in dataclasses.fields(_kind_of(exp))}


def settings_from(exp: str, document: Mapping[str, Any]) -> AnySettings:
    """As a record keeps them: names that are no settings are passed over, what is missing is the experiment's own.

    Raises SettingsError where there is no such experiment, or this version does not know a value.
    """
    return parse_settings(exp, {}, {name: document[name] for name in fields_of(exp).keys() & document.keys()})


def parse_settings(exp: str, pairs: Mapping[str, str], kept: Mapping[str, Any] = MappingProxyType({})) -> AnySettings:
    """The experiment's settings with `kept` (values) and then `pairs` (key to text) in place of its own values.

    Raises SettingsError listing every mistake; an unknown name is answered with the nearest right one.
    """
    mistakes = []
    if exp not in (*EXPERIMENTS, SCRIPT["exp"]):
        mistakes.append(f"exp: {_not_among(exp, EXPERIMENTS)}")
    mistakes += [
        f"{name}: {value!r} is not a setting's value" for name, value in kept.items() if not _fits(exp, name, value)
    ]
    if mistakes and kept:
        raise SettingsError(mistakes)
    begun_with = SCRIPT if exp == SCRIPT["exp"] else EXPERIMENTS.get(exp, next(iter(EXPERIMENTS.values())))
    values = {**begun_with, **kept}
    fields = fields_of(exp)
    for key, text in pairs.items():
        if key == "exp":
            mistakes.append("exp: is chosen with --exp, not as a setting")
        elif key not in fields:
            mistakes.append(f"{key}: no such setting{_nearest(key, fields)}")
        else:
            try:
                values[key] = _convert(fields[key], text)
            except ValueError as error:
                mistakes.append(f"{key}: {error}")
    try:
        settings = _kind_of(exp)(**values)
    except SettingsError as error:
        mistakes.extend(error.mistakes)
    if mistakes:
        raise SettingsError(mistakes)
    return settings


def _fits(exp: str, name: str, value: object) -> bool:
    field = fields_of(exp).get(name)
    return field is not None and isinstance(value, _TYPES[_kind(field)])


def parse_arguments(arguments: Sequence[str]) -> AnySettings:
    """Settings from `--exp NAME --key value` or `--key=value`. Raises SettingsError listing every mistake."""
    pairs: dict[str, str] = {}
    mistakes = []
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        key, equals, value = word.removeprefix("--").partition("=")
        key = key.replace("-", "_")
        if not word.startswith("--") or not key:
            mistakes.append(f"{word!r}: expected --key value")
            continue
        if not equals and (not rest or rest[0].startswith("--")):
            mistakes.append(f"{key}: a value is missing after --{key}")
            continue
        if key in pairs:
            mistakes.append(f"{key}: is given twice")
        pairs[key] = value if equals else rest.pop(0)
    exp = pairs.pop("exp", None)
    if exp is None and not any(text.startswith("exp:") for text in mistakes):
        mistakes.append(f"exp: say which experiment with --exp NAME, one of {', '.join(EXPERIMENTS)}")
    try:
        if exp == SCRIPT["exp"]:
            raise SettingsError([f"exp: {exp} is what a script of your own has that says `import trainer`; start that"])
        settings = parse_settings(next(iter(EXPERIMENTS)) if exp is None else exp, pairs)
    except SettingsError as error:
        mistakes.extend(error.mistakes)
    if mistakes:
        raise SettingsError(mistakes)
    return settings


_TYPES: dict[str, tuple[type, ...]] = {"bool": (bool,), "int": (int,), "float": (int, float), "str": (str,)}
_EXPECTED = {"bool": "true|false"}


def help_text() -> str:
    """What `python -m trainer --help` prints."""
    lines = [
        "usage: torchrun [...] -m trainer --exp NAME [--key value]...",
        "",
        "example: torchrun --standalone --nproc-per-node 2 -m trainer --exp mnist_lenet --epochs 1",
        "",
    ]
    for title, exp in (("training", next(iter(TRAINING))), ("--exp collectives, which trains nothing", "collectives")):
        lines += [f"settings of {title}:", ""]
        for name, field in fields_of(exp).items():
            choices = field.metadata["choices"]
            lines.append(f"  --{name} {'|'.join(choices) if choices else _EXPECTED.get(_kind(field), _kind(field))}")
            lines.append(f"      {field.metadata['help']}")
        lines.append("")
    return "\n".join(lines)


def _kind(field: dataclasses.Field[Any]) -> str:
    """`int`, `float`, `bool` or `str`: annotations are text here."""
    return str(field.type)


def _convert(field: dataclasses.Field[Any], text: str) -> Any:
    kind = _kind(field)
    if kind == "str":
        return text
    if kind == "bool":
        if text.lower() not in _TRUTH:
            raise ValueError(f"{text!r} is not true or false")
        return _TRUTH[text.lower()]
    try:
        return int(text) if kind == "int" else float(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a {'whole ' if kind == 'int' else ''}number") from None


_TRUTH = {"true": True, "on": True, "yes": True, "1": True, "false": False, "off": False, "no": False, "0": False}


def _bounds(field: dataclasses.Field[Any], value: Any) -> list[str]:
    """The mistakes of one value: none or one."""
    limits = field.metadata
    if _kind(field) == "str":
        right = not limits["choices"] or value in (*limits["choices"], *limits["unsaid"])
        return [] if right else [f"{field.name}: {_not_among(value, limits['choices'])}"]
    if isinstance(value, bool):
        return []
    if _kind(field) == "int" and abs(value) >= INT_BELOW:
        return [f"{field.name}: a number of {len(str(abs(value)))} digits; expected less than 2**63"]
    if not math.isfinite(value):
        return [f"{field.name}: {value} is not a finite number"]
    if value < limits["at_least"]:
        return [f"{field.name}: {value} is too small; at least {limits['at_least']}"]
    if value <= limits["above"]:
        return [f"{field.name}: {value} is too small; more than {limits['above']}"]
    if value >= limits["below"]:
        return [f"{field.name}: {value} is too large; less than {limits['below']}"]
    return []


def _not_among(value: str, names: Iterable[str]) -> str:
    return f"{value!r} is not one of {', '.join(names)}{_nearest(value, names)}"


_ALSO_CALLED = {
    "lr": ("learning_rate",),
    "batch": ("batch_size", "bs", "bsz", "global_batch", "global_batch_size", "train_batch_size"),
    "steps": ("iterations", "iters", "max_steps", "updates"),
    "weight_decay": ("wd", "l2"),
    "data_dir": ("data_path", "data_root", "dataset_path"),
    "accumulate": ("gradient_accumulation_steps", "accumulation_steps", "accum", "grad_accum"),
    "amp": ("precision", "mixed_precision", "fp16", "bf16"),
    "model": ("arch", "network"),
    "checkpoint_every": ("save_every", "save_steps", "checkpoint_interval"),
    "num_workers": ("workers", "dataloader_workers"),
}
"""What other tools call our settings."""


def _nearest(name: str, names: Iterable[str]) -> str:
    names = list(names)
    also = [key for key, others in _ALSO_CALLED.items() if key in names and name.lower() in others]
    close = also or difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else ""
