"""The settings of a training: one flat frozen value, a sentence per field, checked in one place. Imports no torch.

The same names are used as `--set key=value`, as `python -m trainer --key value`, in records and in reports.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from trainer.shared.alpha_beta import BUS_FACTORS
from trainer.shared.experiments import CHOSEN, DATA_SETS, MODEL_CHANNELS, NAMED, OWN, SCRIPT, DataSet
from trainer.shared.learning_rate import LR_SCHEDULES, parse_lr_steps
from trainer.shared.pace import Slow, parse_slow
from trainer.shared.setting_conflicts import mistakes_of, mistakes_of_network
from trainer.shared.setting_fields import SettingsError, mistakes_of_value, not_among, setting
from trainer.shared.shares import parse_shares, parse_speeds
from trainer.shared.stages import parse_stages
from trainer.shared.strategy_table import AFTER_BACKWARD, FIDELITIES, LOCAL_STEPS, OPTIMIZERS, STRATEGIES, SWITCH

# The settings of measuring collectives. Imports no torch.


@dataclass(frozen=True, kw_only=True)
class CollectiveSettings:
    """Raises SettingsError with every mistake when a value is out of its bounds."""

    exp: str = setting("The named experiment that gave every value not set here.", choices=["collectives"])
    operations: str = setting(
        f"What to measure: all, or some of {', '.join(BUS_FACTORS)}, with commas between.", default="all"
    )
    min_bytes: int = setting(
        "The smallest size, rounded down to the same number of elements for each rank.", at_least=4, default=2**10
    )
    max_bytes: int = setting("The largest size.", at_least=4, default=2**28)
    factor: int = setting("From one size to the next.", at_least=2, default=4)
    budget_s: float = setting(
        "Seconds for all of it; what would take longer is left out, the largest sizes first.", above=0, default=60.0
    )
    links: bool = setting("Whether each path from one host to another is measured by itself, too.", default=True)
    iterations: int = setting(
        "Times that an operation of one size is timed, at most; 3 where it takes long.", at_least=1, default=50
    )
    dtype: str = setting("The type of the elements.", choices=["float32", "bfloat16"], default="float32")
    device: str = setting(
        "Where the elements lie; auto is a GPU where there is one. What gloo carries lies in the host's memory.",
        choices=["auto", "cuda", "cpu"],
        default="auto",
    )
    backend: str = setting(
        "What carries them; auto is nccl when every rank has a GPU of its own, else gloo.",
        choices=["auto", "nccl", "gloo"],
        default="auto",
    )
    seed: int = setting("Decides the elements.", at_least=0, default=0)

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


def overlap_of(local_steps: int, asked: int) -> int:
    """asked: the setting `local_overlap`. (Where `orch` predicts `local_steps`, it settles -1 beforehand.)"""
    return local_steps // 4 if asked < 0 else asked


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Raises SettingsError with every mistake when a value is out of its bounds."""

    exp: str = setting(
        "The named experiment that gave every value not set here.",
        choices=NAMED,
        unsaid=[SCRIPT],
        resumes_same=True,
    )
    model: str = setting(
        "The network to train: LeNet, a small residual one with BatchNorm, or one of torchvision's for classification, "
        "with the data's classes.",
        choices=MODEL_CHANNELS,
        unsaid=[OWN],
        brought=True,
        resumes_same=True,
        also=("arch", "network"),
    )
    weights: str = setting(
        "A file on each host with the network's first weights, a state dict as torch.save writes it; a last layer of "
        "other classes stays fresh. Empty begins with fresh ones.",
        default="",
        brought=True,
    )
    data: str = setting(
        "The data set. synthetic makes images up, folder reads DATA_DIR/train/CLASS/* and DATA_DIR/val/CLASS/*; both "
        "in the shape of the experiment's own data set. imagenet lies in such a folder, too.",
        choices=[*DATA_SETS, "folder", "synthetic"],
        unsaid=[OWN],
        brought=True,
        resumes_same=True,
    )
    data_dir: str = setting(
        "The folder on each host that holds the data sets, or receives them.",
        default="~/data",
        brought=True,
        also=("data_path", "data_root", "dataset_path"),
    )
    batch: int = setting(
        "Samples of one update, over all ranks together.",
        at_least=1,
        below=1 << 40,
        resumes_same=True,
        also=("batch_size", "bs", "bsz", "global_batch", "global_batch_size", "train_batch_size"),
    )
    epochs: int = setting("Passes over the training data.", at_least=1)
    steps: int = setting(
        "Updates after which to stop, if the epochs last longer; 0 is no limit.",
        at_least=0,
        default=0,
        also=("iterations", "iters", "max_steps", "updates"),
    )
    samples: int = setting(
        "Train on only the first so many samples of the data; 0 is all of them.",
        at_least=0,
        default=0,
        brought=True,
        resumes_same=True,
    )
    optimizer: str = setting(
        "What moves the weights: SGD, or AdamW with the betas (0.9, 0.999) and eps (1e-8) that torch has.",
        choices=OPTIMIZERS,
        default="sgd",
        brought=True,
        predicted=("sgd",),
    )
    lr: float = setting("Learning rate.", above=0, brought=True, also=("learning_rate",))
    lr_schedule: str = setting(
        "How the learning rate goes on after its warm-up, by the samples seen: it stays (constant), is multiplied by "
        "lr_factor after each of lr_steps (step), or falls along half a cosine to 0 at the end of the epochs (cosine). "
        "Of a script of one's own it multiplies each rate of the optimiser.",
        choices=LR_SCHEDULES,
        default="constant",
        also=("scheduler", "lr_scheduler", "lr_scheduler_type"),
    )
    lr_warmup: float = setting(
        "Epochs in which the learning rate rises from 0; at most half of all.",
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
        "What lr_schedule=step multiplies the learning rate by.",
        above=0,
        below=1,
        default=0.1,
        only=("lr_schedule", "step"),
        also=("gamma", "lr_gamma"),
    )
    lr_batch: int = setting(
        "The batch that lr is meant for: with k times as many samples an update it becomes k times as large (linear "
        "scaling); 0 takes it as it is.",
        at_least=0,
        default=0,
    )
    momentum: float = setting("Momentum of SGD.", at_least=0, below=1, brought=True, only=("optimizer", "sgd"))
    weight_decay: float = setting(
        "L2 penalty of SGD; of AdamW the decay beside the gradient.", at_least=0, brought=True, also=("wd", "l2")
    )
    clip_norm: float = setting(
        "The largest norm of the whole network's gradient: a larger one is scaled down to it; 0 scales none. With "
        "fidelity=local of each rank's own gradient.",
        at_least=0,
        default=0.0,
    )
    label_smoothing: float = setting(
        "The part of each label that is spread evenly over all classes in the training loss; 0 is none.",
        at_least=0,
        below=1,
        default=0.0,
        brought=True,
    )
    ema: float = setting(
        "The decay of a moving average of the weights, like 0.999, that evaluations see and checkpoints keep beside "
        "the weights themselves; 0 has none.",
        at_least=0,
        below=1,
        default=0.0,
    )
    seed: int = setting(
        "Decides the initial weights, the order of the samples and their augmentation.",
        at_least=0,
        default=0,
        resumes_same=True,
    )
    device: str = setting(
        "Where ranks compute; auto is a GPU where there is one.", choices=["auto", "cuda", "cpu"], default="auto"
    )
    backend: str = setting(
        "What carries gradients; auto is nccl when every rank has a GPU of its own, else gloo.",
        choices=["auto", "nccl", "gloo"],
        default="auto",
    )
    timeout_s: float = setting(
        "Seconds that a rank waits for another in an exchange before it gives up. What one rank does by itself (an "
        "evaluation, an upload) has to take less.",
        at_least=1,
        default=600.0,
    )
    strategy: str = setting(
        "How ranks stay together. Gradients: in buckets during backward (ddp; horovod by the package of that name, if "
        "hosts have it), or after it, one call a parameter (allreduce) or all at once "
        f"({', '.join(AFTER_BACKWARD[1:])}); weights (parameter_average); both in pieces, "
        "none held twice (fsdp). Activations: each host holds some of the network's blocks (pipeline), or each rank "
        "some of every layer's output channels (tensor). Or one process alone, on one device (none) or on all of its "
        "host's (dp).",
        choices=STRATEGIES,
        default="ddp",
        of_ranks=True,
    )
    fidelity: str = setting(
        "What synchronisation may lose: nothing but the order of sums (exact: the update of one process that adds up "
        "the gradients of the ranks' parts, each with a BatchNorm of its own unless sync_bn is set); gradients "
        "travel in 16 bits (half), or as thin matrices, with what that leaves out sent later (compressed); or ranks "
        "train by themselves for local_steps updates, then their weights are averaged (local). Nothing else lowers it.",
        choices=FIDELITIES,
        default="exact",
        of_ranks=True,
    )
    wire: str = setting(
        "What numbers travel in; auto is bf16 for half, fp32 otherwise. local may have 16 bits, too.",
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
        "Updates before compressed begins to compress; -1 is a tenth of the run.",
        at_least=-1,
        default=-1,
        only=("fidelity", "compressed"),
    )
    local_steps: int = setting(
        "Updates of each rank from one average of local's weights to the next; 0 is the fewest that hide the wire, by "
        f"what orch predicts, or {LOCAL_STEPS} where nothing is known.",
        at_least=0,
        default=32,
        only=("fidelity", "local"),
    )
    local_overlap: int = setting(
        "Updates that go on while local's weight changes travel, before the average is applied; 0 waits for it, -1 "
        "is a quarter of local_steps; where orch chooses local_steps (0), -1 is the fewest that are predicted to hide "
        "the network, at most half of them.",
        at_least=-1,
        default=-1,
        only=("fidelity", "local"),
    )
    local_after: int = setting(
        "Updates before local begins to train by itself, exact until then (post-local SGD); -1 is a tenth of the run.",
        at_least=-1,
        default=0,
        only=("fidelity", "local"),
    )
    local_batch: int = setting(
        "Samples of a local update, at most: a rank whose share is larger makes several updates of it, so that a fast "
        "one takes more local steps in the same time, with an lr that suits updates of so many; 0 makes one.",
        at_least=0,
        default=0,
        only=("fidelity", "local"),
    )
    outer_lr: float = setting(
        "How far local's weights go towards the ranks' mean: 1 is to the mean itself.",
        above=0,
        below=10,
        default=1.0,
        only=("fidelity", "local"),
    )
    outer_momentum: float = setting(
        "Nesterov momentum of local's averages; 0 is the plain mean, DiLoCo has 0.9 with outer_lr=0.7.",
        at_least=0,
        below=1,
        default=0.0,
        only=("fidelity", "local"),
    )
    bucket_mib: float = setting(
        "Size of ddp's gradient buckets, and most of fsdp's pieces, in MiB; 0 fits ddp's to the link as it is at the "
        "start, and leaves fsdp's at 25.",
        at_least=0,
        default=0.0,
        of_ranks=True,
    )
    shares: str = setting(
        "How a batch is split over the ranks: equal; so that all are done at the same time by the speeds that `orch "
        "profile` measured (measured), or that the run itself shows (auto); measured where every rank has a profile, "
        "else equal (profiled); or in proportion to what is said of each "
        "node or rank, like v100=5,a2000=2 or a16:0=1,a16:1=3; a part of 0 takes a rank out.",
        default="profiled",
        parse=parse_shares,
        of_ranks=True,
    )
    speeds: str = setting(
        "What is known of ranks, like v100:0=2+1.2/512: ms a micro-batch, ms a sample, and the most samples that fit "
        "its memory at once; orch fills it in from its profiles.",
        default="",
        parse=parse_speeds,
    )
    accumulate: int = setting(
        "Micro-batches of each rank that make one update, its gradients summed before they travel; 0 is as few as its "
        "memory asks for, or what fills a pipeline. BatchNorm sees each by itself.",
        at_least=0,
        default=0,
        predicted=(0, 1),
        also=("gradient_accumulation_steps", "accumulation_steps", "accum", "grad_accum"),
    )
    stages: str = setting(
        "Which blocks of the network each host of a pipeline holds, in the order in which samples pass them, like "
        "v100:0-31,a2000:32-51; a | stands between pipelines beside each other. Empty cuts by what is known of speeds.",
        default="",
        parse=parse_stages,
        only=("strategy", "pipeline"),
    )
    in_flight: int = setting(
        "Micro-batches that a pipeline's first stage holds between forward and backward, at most; each later stage "
        "holds one fewer. 0 is one a stage and four more, for those on their way.",
        at_least=0,
        default=0,
        only=("strategy", "pipeline"),
    )
    schedule: str = setting(
        "When a pipeline's stage computes its weights' gradients: when it would wait otherwise (zero_bubble), or with "
        "its inputs' (1f1b), which holds less memory.",
        choices=["zero_bubble", "1f1b"],
        default="zero_bubble",
        only=("strategy", "pipeline"),
    )
    profile_s: float = setting(
        "Seconds in which to measure each rank alone, instead of training; 0 trains.",
        at_least=0,
        default=0.0,
    )
    unused_parameters: str = setting(
        "What happens if a rank's loss does not depend on some parameters: refuse ends the run and names them; zeros "
        "counts their gradients as 0, and leaves parameters that no rank uses in an update as they are.",
        choices=["refuse", "zeros"],
        default="refuse",
    )
    sync_bn: bool = setting(
        "BatchNorm over the whole batch of all ranks, as one process would have it, not over each rank's own part: "
        "these groups differ in size with shares, and change in mid-run with shares=auto and with caps of memory.",
        default=False,
    )
    amp: str = setting(
        "Computes forward and backward in 16 bits where that is safe; bf16 needs a GPU of compute capability 8.0 "
        "(Ampere) or newer, fp16 a V100 or newer.",
        choices=["none", "bf16", "fp16"],
        default="none",
        also=("precision", "mixed_precision", "fp16", "bf16"),
    )
    tf32: str = setting(
        "Whether convolutions may round float32 to TF32's 10 bits of fraction, which GPUs from Ampere on compute "
        "faster; auto is on where every rank's GPU can, else off on all, so that ranks compute alike.",
        choices=SWITCH,
        default="auto",
        of_gpu=True,
    )
    channels_last: str = setting(
        "Whether weights and images lie in memory with their channels last, as tensor cores like them; it changes the "
        "order of sums. auto is on with amp where every rank has a GPU.",
        choices=SWITCH,
        default="auto",
        of_gpu=True,
    )
    cudnn_benchmark: str = setting(
        "Whether cuDNN times its algorithms at each new size of batch and takes the fastest: 10 to 20 s a size for "
        "ResNet-152, and another order of sums from run to run. auto is off; on may pay in a long run in float32.",
        choices=SWITCH,
        default="auto",
        of_gpu=True,
    )
    fused_sgd: str = setting(
        "Whether SGD updates all weights in one pass over their memory (torch 2.3 or newer); its last bits may differ. "
        "auto is on on a GPU, but not with fsdp.",
        choices=SWITCH,
        default="auto",
        brought=True,
        of_gpu=True,
    )
    cuda_graph: str = setting(
        "Whether forward and backward of a size of batch that comes again are recorded as CUDA graphs and replayed: "
        "the host is spared most of its launches, memory holds one more pass for good. auto does so where memory has "
        "room and a replay gives what a plain pass gives; on also says why where it cannot.",
        choices=SWITCH,
        default="auto",
        of_gpu=True,
    )
    augment: str = setting(
        "How training images are varied: turned, moved and scaled a little (affine), cut out with a margin of 4 and "
        "flipped (crop_flip), or not at all.",
        choices=["none", "affine", "crop_flip"],
        brought=True,
        resumes_same=True,
    )
    loader: str = setting(
        "Where batches come from: processes that load sample by sample (workers), or the whole set held on the device "
        "and varied a batch at a time (resident); auto is resident where the set fits.",
        choices=["auto", "resident", "workers"],
        default="auto",
        brought=True,
        predicted=("auto", "resident"),
    )
    num_workers: int = setting(
        "Processes per rank that load samples (workers); 0 loads in the rank, -1 takes what the host's cores allow.",
        at_least=-1,
        default=-1,
        predicted=(-1,),
        also=("workers", "dataloader_workers"),
    )
    slow: str = setting(
        "A bottleneck made on purpose: rank:R,at:start|backward|sync|call,ms:M makes rank R stand still for M ms: once "
        "a step before forward, as backward begins, or with its last gradient in hand; or before every call of a "
        "collective that exchanges gradients or weights. It counts as that rank's computing. Empty for none.",
        default="",
        parse=parse_slow,
        of_ranks=True,
        predicted=("",),
    )
    warmup_steps: int = setting("First updates that are left out of every speed.", at_least=0, default=3)
    checkpoint_every: int = setting(
        "Updates between checkpoints, one more at the end; 0 writes none.",
        at_least=0,
        default=0,
        also=("save_every", "save_steps", "checkpoint_interval"),
    )
    checkpoint_dir: str = setting(
        "The folder for checkpoints; empty is the job's own, or ./checkpoints without one.", default=""
    )
    resume: str = setting("A checkpoint, or a folder of them, to resume from; empty starts from scratch.", default="")
    target_accuracy: float = setting(
        "The accuracy on the test data, 0..1, at which the run ends, after the evaluation that reaches it; 0 trains to "
        "the last epoch.",
        at_least=0,
        below=1,
        default=0.0,
    )
    not_finite: str = setting(
        "What a run does after the first loss that is NaN or infinite: report it, with update, rank and host, and go "
        "on; or stop with an error. With amp=fp16 a single infinite loss may do no harm: its update is skipped.",
        choices=["report", "stop"],
        default="report",
    )
    eval_every: int = setting(
        "Epochs between evaluations on the test data; 0 never evaluates.", at_least=0, default=1, brought=True
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
        """Of a script of one's own, which brings its network and its data?"""
        return self.exp == SCRIPT

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

    @property
    def sums_unused(self) -> bool:
        """Do ranks exchange zeros for parameters that their loss does not depend on?"""
        exchanges = STRATEGIES[self.strategy].exchanges
        is_local = self.fidelity == "local" and not self.local_after
        return exchanges and not is_local and self.unused_parameters == "zeros"

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
        return self.data if self.data in DATA_SETS else str(CHOSEN[self.exp]["data"])

    @property
    def data_set(self) -> DataSet:
        """The facts of `data_set_name`."""
        return DATA_SETS[self.data_set_name]


AnySettings = Settings | CollectiveSettings
