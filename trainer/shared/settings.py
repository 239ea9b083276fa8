"""The settings of a training: one flat frozen value, checked in one place. Imports no torch.

The names are the same in `--set key=value`, `python -m trainer --key value`, records and reports.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from trainer.shared.alpha_beta import BUS_FACTORS
from trainer.shared.experiments import (
    CHOSEN,
    DATA_SETS,
    MODEL_CHANNELS,
    NAMED,
    OWN,
    SCRIPT,
    TEXT_MODELS,
    TOKENS,
    DataSet,
)
from trainer.shared.learning_rate import LR_SCHEDULES, parse_lr_steps
from trainer.shared.pace import Slow, parse_slow
from trainer.shared.setting_conflicts import mistakes_of, mistakes_of_network
from trainer.shared.setting_fields import SettingsError, mistakes_of_value, not_among, setting
from trainer.shared.shares import parse_shares, parse_speeds
from trainer.shared.stages import parse_stages
from trainer.shared.strategy_table import (
    AFTER_BACKWARD,
    FIDELITIES,
    LOCAL_STEPS,
    OPTIMIZERS,
    STATES,
    STRATEGIES,
    SWITCH,
)


@dataclass(frozen=True, kw_only=True)
class CollectiveSettings:
    """Raises SettingsError with every mistake."""

    exp: str = setting("The named experiment, which gives every value that is not set here.", choices=["collectives"])
    operations: str = setting(
        f"Operations to measure: all, or some of {', '.join(BUS_FACTORS)}, with commas between.", default="all"
    )
    min_bytes: int = setting(
        "The smallest size in bytes, rounded down to the same number of elements for each rank.",
        at_least=4,
        default=2**10,
    )
    max_bytes: int = setting("The largest size in bytes.", at_least=4, default=2**28)
    factor: int = setting("The ratio of each size to the next smaller one.", at_least=2, default=4)
    budget_s: float = setting(
        "Seconds for all measurements; measurements that would take longer are left out, the largest sizes first.",
        above=0,
        default=60.0,
    )
    links: bool = setting("Whether each path between two hosts is also measured by itself.", default=True)
    iterations: int = setting(
        "Upper limit of repetitions per operation and size; slow operations are repeated 3 times.",
        at_least=1,
        default=50,
    )
    dtype: str = setting("The type of the elements.", choices=["float32", "bfloat16"], default="float32")
    device: str = setting(
        "The device of the elements; auto is a GPU if there is one. With gloo they are in the host's memory.",
        choices=["auto", "cuda", "cpu"],
        default="auto",
    )
    backend: str = setting(
        "The back end of the collectives; auto is nccl if every rank has its own GPU, otherwise gloo.",
        choices=["auto", "nccl", "gloo"],
        default="auto",
    )
    seed: int = setting("Determines the elements.", at_least=0, default=0)

    def __post_init__(self) -> None:
        mistakes = [
            text for field in dataclasses.fields(self) for text in mistakes_of_value(field, getattr(self, field.name))
        ]
        unknown = [name for name in self.chosen_operations if name not in BUS_FACTORS]
        mistakes += [f"operations: {not_among(name, ['all', *BUS_FACTORS])}" for name in unknown]
        if self.max_bytes < self.min_bytes:
            mistakes.append(f"max_bytes: {self.max_bytes} is less than min_bytes, {self.min_bytes}")
        if mistakes:
            raise SettingsError(mistakes)

    @property
    def chosen_operations(self) -> tuple[str, ...]:
        """Without duplicates, in the given order."""
        names = BUS_FACTORS if self.operations == "all" else [name.strip() for name in self.operations.split(",")]
        return tuple(dict.fromkeys(names))

    @property
    def sizes(self) -> tuple[int, ...]:
        """In bytes, ascending."""
        sizes = [self.min_bytes]
        while sizes[-1] * self.factor <= self.max_bytes:
            sizes.append(sizes[-1] * self.factor)
        return tuple(sizes)


def overlap_of(local_steps: int, asked: int) -> int:
    """asked: the setting `local_overlap`. (If `orch` predicts `local_steps`, it replaces -1 beforehand.)"""
    return local_steps // 4 if asked < 0 else asked


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Raises SettingsError with every mistake."""

    exp: str = setting(
        "The named experiment, which gives every value that is not set here.",
        choices=NAMED,
        hidden=[SCRIPT],
        resumes_same=True,
    )
    model: str = setting(
        "The network to train: LeNet, a small residual network with BatchNorm, or a classification network of "
        "torchvision, with the data's classes; for text a GPT.",
        choices=[*MODEL_CHANNELS, *TEXT_MODELS],
        hidden=[OWN],
        brought=True,
        resumes_same=True,
        also=("arch", "network"),
    )
    weights: str = setting(
        "A file on each host with the network's initial weights: a state dict written by torch.save. A last layer "
        "for other classes is initialised randomly. Empty: all weights are random.",
        default="",
        brought=True,
        on_paced=False,
    )
    data: str = setting(
        "The data set. synthetic generates images, folder reads DATA_DIR/train/CLASS/* and DATA_DIR/val/CLASS/*; "
        "both use the shape of the experiment's own data set. imagenet is read from such a folder, too. text is the "
        "bytes of all UTF-8 files below DATA_DIR.",
        choices=[*DATA_SETS, "folder", "synthetic"],
        hidden=[OWN],
        brought=True,
        resumes_same=True,
    )
    data_dir: str = setting(
        "The folder on each host that holds or receives the data sets; it may begin with a variable, like $TMPDIR.",
        default="~/data",
        brought=True,
        also=("data_path", "data_root", "dataset_path"),
    )
    batch: int = setting(
        "Samples per update, over all ranks together.",
        at_least=1,
        below=1 << 40,
        resumes_same=True,
        also=("batch_size", "bs", "bsz", "global_batch", "global_batch_size", "train_batch_size"),
    )
    tokens: int = setting(
        "Tokens per sample of text: bytes, unless it has a vocabulary.",
        at_least=2,
        below=1 << 17,
        default=TOKENS,
        resumes_same=True,
        also=("context", "block_size", "seq_len"),
    )
    vocabulary: int = setting(
        "Tokens of a byte-pair vocabulary (BPE) that the run trains on its own text, with the package tokenizers; 0: "
        "a token is a byte.",
        at_least=0,
        below=1 << 17,
        default=0,
        resumes_same=True,
        also=("bpe", "tokeniser", "tokenizer", "vocab_size"),
    )
    epochs: int = setting("Passes over the training data.", at_least=1)
    steps: int = setting(
        "Updates after which to stop, if the epochs last longer; 0: no limit.",
        at_least=0,
        default=0,
        also=("iterations", "iters", "max_steps", "updates"),
    )
    samples: int = setting(
        "Train on only this number of samples, the first of the data; 0: all.",
        at_least=0,
        default=0,
        brought=True,
        resumes_same=True,
    )
    optimizer: str = setting(
        "The optimiser: SGD, or AdamW with torch's betas (0.9, 0.999) and eps (1e-8).",
        choices=OPTIMIZERS,
        default="sgd",
        brought=True,
        predicted=("sgd",),
    )
    lr: float = setting("Learning rate.", above=0, brought=True, also=("learning_rate",))
    lr_schedule: str = setting(
        "The learning rate after the warm-up, as a function of the samples seen: unchanged (constant), multiplied "
        "by lr_factor after each of lr_steps (step), or falling along half a cosine to 0 at the end of the epochs "
        "(cosine). In a user's own script it multiplies each rate of the optimiser.",
        choices=LR_SCHEDULES,
        default="constant",
        also=("scheduler", "lr_scheduler", "lr_scheduler_type"),
    )
    lr_warmup: float = setting(
        "Epochs in which the learning rate rises from 0; at most half of the run.",
        at_least=0,
        default=0.0,
        also=("warmup", "warmup_epochs", "lr_warmup_epochs"),
    )
    lr_steps: str = setting(
        "Epochs after which the learning rate of lr_schedule=step falls, like 30,60,80.",
        default="",
        parse=parse_lr_steps,
        only=("lr_schedule", "step"),
        also=("milestones", "lr_milestones"),
    )
    lr_factor: float = setting(
        "The factor by which lr_schedule=step multiplies the learning rate.",
        above=0,
        below=1,
        default=0.1,
        only=("lr_schedule", "step"),
        also=("gamma", "lr_gamma"),
    )
    lr_batch: int = setting(
        "The batch for which lr is meant: with k times as many samples per update, the rate is k times as large "
        "(linear scaling); 0: lr is used unchanged.",
        at_least=0,
        default=0,
    )
    momentum: float = setting("Momentum of SGD.", at_least=0, below=1, brought=True, only=("optimizer", "sgd"))
    weight_decay: float = setting(
        "L2 penalty of SGD; decoupled weight decay of AdamW.", at_least=0, brought=True, also=("wd", "l2")
    )
    clip_norm: float = setting(
        "The largest norm of the whole network's gradient: a larger gradient is scaled down to it; 0: no limit. "
        "With fidelity=local the limit is for each rank's own gradient.",
        at_least=0,
        default=0.0,
        on_paced=False,
    )
    label_smoothing: float = setting(
        "The part of each label that is spread evenly over all classes in the training loss; 0: no smoothing.",
        at_least=0,
        below=1,
        default=0.0,
        brought=True,
    )
    ema: float = setting(
        "The decay of a moving average of the weights, like 0.999. Evaluations use the average, and checkpoints "
        "keep it in addition to the weights; 0: no average.",
        at_least=0,
        below=1,
        default=0.0,
        on_paced=False,
    )
    seed: int = setting(
        "Determines the initial weights, the order of the samples and their augmentation.",
        at_least=0,
        default=0,
        resumes_same=True,
    )
    device: str = setting(
        "The device of the ranks; auto is a GPU if there is one.", choices=["auto", "cuda", "cpu"], default="auto"
    )
    backend: str = setting(
        "The back end for gradients; auto is nccl if every rank has its own GPU, otherwise gloo.",
        choices=["auto", "nccl", "gloo"],
        default="auto",
    )
    timeout_s: float = setting(
        "Seconds that a rank waits for another in an exchange before it gives up. Work that one rank does by itself "
        "(an evaluation, an upload) must take less.",
        at_least=1,
        default=600.0,
    )
    strategy: str = setting(
        "How ranks synchronise. Gradients: in buckets during backward (ddp; horovod with the package of that name, "
        "if hosts have it), or after it, one call per parameter (allreduce) or all at once "
        f"({', '.join(AFTER_BACKWARD[1:])}); weights (parameter_average); both in pieces, each held by "
        "one rank only (fsdp). Activations: each host holds some of the network's blocks (pipeline), or each rank "
        "some of every layer's output channels (tensor). Or a single process, on one device (none) or on all "
        "devices of its host (dp).",
        choices=STRATEGIES,
        default="ddp",
        of_ranks=True,
    )
    fidelity: str = setting(
        "The losses that synchronisation may cause: none except the order of sums (exact: the update of one process "
        "that adds up the gradients of the ranks' parts, with separate BatchNorms unless sync_bn is set); gradients "
        "travel in 16 bits (half), or as thin matrices, with the remainder sent later (compressed); a pipeline's "
        "stages but the last begin an update with weights that lack the update before (late); or ranks train by "
        "themselves for local_steps updates, then their weights are averaged (local). Nothing else lowers it.",
        choices=FIDELITIES,
        default="exact",
        of_ranks=True,
    )
    wire: str = setting(
        "The number format for transfers; auto is bf16 for half, otherwise fp32. late and local may use 16 bits, too.",
        choices=["auto", "fp32", "bf16", "fp16"],
        default="auto",
        of_ranks=True,
    )
    compress_rank: int = setting(
        "Columns of compressed's thin matrices (PowerSGD's rank).",
        at_least=1,
        below=1025,
        default=2,
        only=("fidelity", "compressed"),
    )
    compress_after: int = setting(
        "Updates before compressed begins to compress; -1: a tenth of the run.",
        at_least=-1,
        default=-1,
        only=("fidelity", "compressed"),
    )
    local_steps: int = setting(
        "Updates of each rank between two averages of local's weights; 0: as few as hide the network (predicted by "
        f"orch), or {LOCAL_STEPS} without a prediction.",
        at_least=0,
        default=32,
        only=("fidelity", "local"),
    )
    local_overlap: int = setting(
        "Updates during which local's weight changes travel, before the average is applied; 0 waits for it, -1 is a "
        "quarter of local_steps. If orch chooses local_steps (0), -1 is as few as hide the network (predicted), at "
        "most half of local_steps.",
        at_least=-1,
        default=-1,
        only=("fidelity", "local"),
    )
    local_after: int = setting(
        "Exact updates before local begins (post-local SGD); -1: a tenth of the run.",
        at_least=-1,
        default=0,
        only=("fidelity", "local"),
    )
    late_after: float = setting(
        "The part of the run's updates, 0..1, that are exact before late begins.",
        at_least=0,
        below=1,
        default=0.1,
        only=("fidelity", "late"),
    )
    local_batch: int = setting(
        "The most samples of a local update: a rank with a larger share makes several updates of it, so that fast "
        "ranks make more local steps in the same time. lr must suit this batch. 0: one update.",
        at_least=0,
        default=0,
        only=("fidelity", "local"),
    )
    outer_lr: float = setting(
        "Step of local's weights towards the average of all ranks; 1 takes the average.",
        above=0,
        below=10,
        default=1.0,
        only=("fidelity", "local"),
    )
    outer_momentum: float = setting(
        "Nesterov momentum of local's averages; 0: the plain average; DiLoCo uses 0.9 with outer_lr=0.7.",
        at_least=0,
        below=1,
        default=0.0,
        only=("fidelity", "local"),
    )
    bucket_mib: float = setting(
        "Size of ddp's gradient buckets, and upper limit of fsdp's pieces, in MiB; 0: ddp's fit the link, as "
        "measured at the start, and fsdp's have 25.",
        at_least=0,
        default=0.0,
        of_ranks=True,
    )
    shares: str = setting(
        "How a batch is split over the ranks: equal; so that all ranks finish at the same time, by the speeds that "
        "`orch profile` measured (measured) or that the run itself measures (auto); measured if every rank has a "
        "profile, otherwise equal (profiled); or in given parts per node or rank, like v100=5,a2000=2 or "
        "a16:0=1,a16:1=3. A part of 0 takes a rank out.",
        default="profiled",
        parse=parse_shares,
        of_ranks=True,
    )
    speeds: str = setting(
        "Measured speeds of ranks, like v100:0=2+1.2/512: ms per micro-batch, ms per sample, and the most samples "
        "that fit into memory at once. Filled in by orch from its profiles.",
        default="",
        parse=parse_speeds,
    )
    accumulate: int = setting(
        "Micro-batches of each rank per update, whose gradients are summed before they travel; 0: as few as memory "
        "requires, or as many as fill a pipeline. BatchNorm sees each by itself.",
        at_least=0,
        default=0,
        predicted=(0, 1),
        also=("gradient_accumulation_steps", "accumulation_steps", "accum", "grad_accum"),
    )
    stages: str = setting(
        "The network's blocks on each host of a pipeline, in the order in which samples pass them, like "
        "v100:0-31,a2000:32-51; a | separates parallel pipelines. Empty: cut by the measured speeds.",
        default="",
        parse=parse_stages,
        only=("strategy", "pipeline"),
    )
    in_flight: int = setting(
        "The most micro-batches that a pipeline's first stage holds between forward and backward; each later stage "
        "holds one fewer. 0: one per stage and four more for transfers.",
        at_least=0,
        default=0,
        only=("strategy", "pipeline"),
    )
    smaller_first: float = setting(
        "The part, 0..1, by which a pipeline's first micro-batch of an update is smaller than the others, so that "
        "the next stage begins sooner. 0: equal sizes.",
        at_least=0,
        below=1,
        default=0.0,
        only=("strategy", "pipeline"),
    )
    schedule: str = setting(
        "When a pipeline's stage computes its weights' gradients: in times when it would wait (zero_bubble), or "
        "together with its inputs' gradients (1f1b), which takes less memory.",
        choices=["zero_bubble", "1f1b"],
        default="zero_bubble",
        only=("strategy", "pipeline"),
    )
    profile_s: float = setting(
        "Seconds in which to measure each rank alone, instead of training; 0: train.",
        at_least=0,
        default=0.0,
    )
    unused_parameters: str = setting(
        "The reaction if a rank's loss does not depend on some parameters: refuse ends the run and names them; "
        "zeros counts their gradients as 0, and leaves parameters that no rank uses in an update unchanged.",
        choices=["refuse", "zeros"],
        default="refuse",
    )
    sync_bn: bool = setting(
        "BatchNorm over the whole batch of all ranks, like in a single process, instead of each rank's part. "
        "Without it the parts differ in size with shares, and change during the run with shares=auto and with "
        "limits of memory.",
        default=False,
        on_paced=False,
    )
    amp: str = setting(
        "Computes forward and backward in 16 bits, except for operations that need more; bf16 needs a GPU of "
        "compute capability 8.0 (Ampere) or newer, fp16 a V100 or newer.",
        choices=["none", "bf16", "fp16"],
        default="none",
        also=("precision", "mixed_precision", "fp16", "bf16"),
        on_paced=False,
    )
    tf32: str = setting(
        "Whether convolutions may round float32 to TF32's 10 bits of fraction, which GPUs since Ampere compute "
        "faster. auto is on if every rank's GPU can, otherwise off on all, so that ranks compute alike.",
        choices=SWITCH,
        default="auto",
        of_gpu=True,
    )
    channels_last: str = setting(
        "Whether weights and images have their channels last in memory, as tensor cores prefer; it changes the "
        "order of sums. auto is on with amp if every rank has a GPU.",
        choices=SWITCH,
        default="auto",
        of_gpu=True,
    )
    cudnn_benchmark: str = setting(
        "Whether cuDNN times its algorithms at each new batch size and uses the fastest: this takes 10 to 20 s per "
        "size for ResNet-152, and changes the order of sums from run to run. auto is off; on may pay in a long run "
        "in float32.",
        choices=SWITCH,
        default="auto",
        of_gpu=True,
    )
    fused_sgd: str = setting(
        "Whether SGD updates all weights in one pass over their memory (torch 2.3 or newer); its last bits may "
        "differ. auto is on with a GPU, except with fsdp.",
        choices=SWITCH,
        default="auto",
        brought=True,
        of_gpu=True,
    )
    cuda_graph: str = setting(
        "Whether forward and backward of a repeated batch size are recorded as CUDA graphs and replayed: this saves "
        "the host most of its launches, and takes the memory of one more pass permanently. auto does so if memory "
        "suffices and a replay gives the results of a plain pass; on also reports why if it cannot.",
        choices=SWITCH,
        default="auto",
        of_gpu=True,
    )
    augment: str = setting(
        "Augmentation of training images: slightly rotated, shifted and scaled (affine), cropped with a margin of 4 "
        "and flipped (crop_flip), or none.",
        choices=["none", "affine", "crop_flip"],
        brought=True,
        resumes_same=True,
    )
    loader: str = setting(
        "The source of batches: processes that load sample by sample (workers), or the whole set on the device, "
        "varied a batch at a time (resident); auto is resident if the set fits.",
        choices=["auto", "resident", "workers"],
        default="auto",
        brought=True,
        predicted=("auto", "resident"),
    )
    num_workers: int = setting(
        "Processes per rank that load samples (workers); 0: loaded by the rank itself; -1: as many as the host's "
        "cores allow.",
        at_least=-1,
        default=-1,
        predicted=(-1,),
        also=("workers", "dataloader_workers"),
    )
    slow: str = setting(
        "An artificial bottleneck: rank:R,at:start|backward|sync|call,ms:M delays rank R by M ms: once per step "
        "before forward, when backward begins, or before it hands over its last gradient; or before every call of a "
        "collective for gradients or weights. It counts as the rank's computing time. Empty: no delay.",
        default="",
        parse=parse_slow,
        of_ranks=True,
        predicted=("",),
    )
    warmup_steps: int = setting("First updates that are left out of every speed.", at_least=0, default=3)
    checkpoint_every: int = setting(
        "Updates between checkpoints, with one more at the end; 0: no checkpoints.",
        at_least=0,
        default=0,
        also=("save_every", "save_steps", "checkpoint_interval"),
    )
    checkpoint_dir: str = setting(
        "The folder for checkpoints; empty: the job's own, or ./checkpoints without a job.", default=""
    )
    resume: str = setting("A checkpoint, or a folder of them, to resume from; empty: start from scratch.", default="")
    target_accuracy: float = setting(
        "The accuracy on the test data, 0..1, at which the run ends, after the evaluation that reaches it; 0: train "
        "to the last epoch.",
        at_least=0,
        below=1,
        default=0.0,
    )
    not_finite: str = setting(
        "The reaction to the first loss that is NaN or infinite: report it, with update, rank and host, and "
        "continue; or stop with an error. With amp=fp16 a single infinite loss may be harmless: its update is "
        "skipped.",
        choices=["report", "stop"],
        default="report",
    )
    eval_every: int = setting(
        "Epochs between evaluations on the test data; 0: no evaluations.", at_least=0, default=1, brought=True
    )

    def __post_init__(self) -> None:
        mistakes = [
            text for field in dataclasses.fields(self) for text in mistakes_of_value(field, getattr(self, field.name))
        ]
        if not self.data_dir.strip() or not self.data_dir.isprintable():
            mistakes.append(f"data_dir: {self.data_dir!r} is not a folder's name")
        mistakes += mistakes_of(self)
        if not mistakes:
            mistakes += mistakes_of_network(self)
        if mistakes:
            raise SettingsError(mistakes)

    @property
    def is_own(self) -> bool:
        """Whether a user's own script brings the network and data."""
        return self.exp == SCRIPT

    @property
    def states(self) -> int:
        """Copies of the weights in memory, see `STATES`. A script's own optimiser counts as SGD."""
        return STATES[self.optimizer]

    @property
    def sent_as(self) -> str:
        """fp32, bf16 or fp16."""
        if self.wire == "auto":
            return "bf16" if self.fidelity == "half" else "fp32"
        return self.wire

    @property
    def overlap(self) -> int:
        """Updates during which local's weight changes travel."""
        return overlap_of(self.local_steps, self.local_overlap)

    @property
    def sums_unused(self) -> bool:
        """Whether ranks exchange zeros for unused parameters."""
        exchanges = STRATEGIES[self.strategy].exchanges
        is_local = self.fidelity == "local" and not self.local_after
        return exchanges and not is_local and self.unused_parameters == "zeros"

    def exact_updates(self, updates: int) -> int:
        """The number of exact updates at the start of compressed, late or local. updates: of the whole run."""
        if self.fidelity == "late":  # the first update has no update before it
            return max(1, round(self.late_after * updates))
        asked = self.compress_after if self.fidelity == "compressed" else self.local_after
        return updates // 10 if asked < 0 else asked

    def as_used(self, updates: int) -> Settings:
        """Replaces auto and -1 of the exchange. updates: of the whole run."""
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
        """The experiment's own if the data are synthetic or a folder."""
        return self.data if self.data in DATA_SETS else str(CHOSEN[self.exp]["data"])

    @property
    def data_set(self) -> DataSet:
        facts = DATA_SETS[self.data_set_name]
        if not facts.is_text:
            return facts
        return dataclasses.replace(facts, shape=(1, 1, self.tokens), classes=self.vocabulary or facts.classes)


AnySettings = Settings | CollectiveSettings
