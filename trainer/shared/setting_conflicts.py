"""Which settings do not go together: `mistakes_of(settings)`, one line each. Imports no torch."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from trainer.shared.experiments import LENET_PIXELS, MODEL_CHANNELS, OWN
from trainer.shared.setting_fields import declared, is_changed, without_effect
from trainer.shared.shares import PROFILED
from trainer.shared.stages import ALONE
from trainer.shared.strategy_table import FIDELITIES, NOT_WITH_FSDP, ONE_PROCESS, STRATEGIES

Settings = Any
"""A `trainer.shared.settings.Settings`, whose file calls this one."""


def mistakes_of(of: Settings) -> list[str]:
    """Each value by itself is right, or has been complained of."""
    ways = [*_of_exchange(of), *_of_fidelity(of), *_of_pipeline(of), *_of_tensor(of)]
    recipe = [*_of_optimizer(of), *_of_clipping(of), *_of_ema(of), *_of_learning_rate(of)]
    return [*ways, *without_effect(of), *recipe, *_of_the_rest(of), *_of_own(of)]


def mistakes_of_network(of: Settings) -> list[str]:
    """Where nothing else is wrong."""
    if of.is_own:
        return []
    if of.model == "lenet" and of.data_set.shape[1] > LENET_PIXELS:
        return [f"model: lenet takes images of {LENET_PIXELS} pixels at most, not {of.data_set.shape[1]}; use resnet50"]
    if MODEL_CHANNELS[of.model] in (None, of.data_set.shape[0]):
        return []
    return [
        f"model: {of.model} takes images of {MODEL_CHANNELS[of.model]} channels, "
        f"not {of.data_set.shape[0]}; use data=cifar10 or exp=resnet152_cifar"
    ]


def _of_exchange(of: Settings) -> list[str]:
    mistakes = []
    if of.shares not in ("equal", PROFILED) and of.strategy in ONE_PROCESS:
        mistakes.append(
            f"shares: strategy {of.strategy} is one process, which takes the whole batch; leave shares equal"
        )
    if "at:call" in of.slow and of.strategy in ONE_PROCESS:
        mistakes.append(f"slow: strategy {of.strategy} exchanges nothing, so there is no call; use at:sync")
    if of.shares == "auto" and (of.sync_bn or of.strategy == "fsdp"):
        mistakes.append(
            "shares: auto compares how long ranks compute, and with sync_bn or fsdp they wait for each other in "
            "that time; use measured"
        )
    return mistakes


def _of_optimizer(of: Settings) -> list[str]:
    if of.optimizer != "adamw":
        return []
    mistakes = ["fused_sgd: does nothing with optimizer adamw; use sgd"] if of.fused_sgd == "on" else []
    if of.strategy == "parameter_average" and of.fidelity == "exact":
        mistakes.append(
            "optimizer: parameter_average is exact where updates add up as gradients do, and adamw's do not; use ddp, "
            "sgd or fidelity=local"
        )
    return mistakes


def _of_clipping(of: Settings) -> list[str]:
    if not of.clip_norm:
        return []
    if of.strategy == "parameter_average" and of.fidelity == "exact":
        return ["clip_norm: parameter_average has no gradient of the whole batch; use ddp or fidelity=local"]
    if of.strategy == "pipeline" and of.fidelity == "local":
        return ["clip_norm: with fidelity local no rank of a pipeline has its whole gradient; use exact, or ddp"]
    return []


def _of_ema(of: Settings) -> list[str]:
    if not of.ema:
        return []
    mistakes = []
    if of.fidelity == "local" or of.strategy == "parameter_average":
        mistakes.append(f"ema: under {_way(of)} each rank has weights of its own, and averages them; leave it out")
    if of.sync_bn:
        mistakes.append("ema: BatchNorm's statistics are estimated again by each rank alone; leave sync_bn out")
    return mistakes


def _of_learning_rate(of: Settings) -> list[str]:
    misses = of.lr_schedule == "step" and not of.lr_steps
    return ["lr_steps: say after which epochs the rate falls, like lr_steps=30,60,80"] if misses else []


def _of_the_rest(of: Settings) -> list[str]:
    mistakes = []
    if of.strategy == "fsdp":
        asked = [name for name in NOT_WITH_FSDP if getattr(of, name) == "on"]
        mistakes += [f"{name}: strategy fsdp keeps weights in pieces and cannot; use auto or ddp" for name in asked]
    if of.strategy == "fsdp" and of.unused_parameters != "refuse":
        mistakes.append("unused_parameters: with strategy fsdp all ranks use all parameters; use ddp")
    if of.profile_s and of.checkpoint_every:
        mistakes.append("checkpoint_every: does nothing with profile_s, which trains nothing; leave one out")
    if of.target_accuracy and not of.eval_every:
        mistakes.append("eval_every: is 0, and target_accuracy is what an evaluation reaches; use 1")
    averages = of.strategy == "parameter_average" and of.fidelity == "exact"
    if averages and of.shares == "auto" and of.momentum:
        mistakes.append(
            "shares: auto changes what each rank's own momentum counts for, so parameter_average is not exact; "
            "use ddp, shares=measured, momentum=0 or fidelity=local"
        )
    if of.sync_bn and (of.strategy in ("parameter_average", "dp") or of.fidelity == "local"):
        mistakes.append(f"sync_bn: {_way(of)} has no one network that could see the whole batch; use ddp")
    return mistakes


def _of_own(of: Settings) -> list[str]:
    if not of.is_own:
        brought = [name for name in ("model", "data") if getattr(of, name) == OWN]
        return [f"{name}: {OWN} is what a script brings that says `import trainer`" for name in brought]
    brought = [field.name for field in fields(of) if declared(field).brought and is_changed(of, field.name)]
    return [f"{name}: is the script's own business; give it as an argument of its own" for name in brought]


def _of_fidelity(of: Settings) -> list[str]:
    if of.fidelity not in FIDELITIES:
        return []  # said already
    mistakes = []
    if of.strategy in STRATEGIES and of.strategy not in FIDELITIES[of.fidelity]:
        known = ", ".join(FIDELITIES[of.fidelity])
        mistakes.append(f"fidelity: {of.fidelity} goes with strategy {known}, not with {of.strategy}")
    fitting = {"exact": ("auto", "fp32"), "compressed": ("auto", "fp32"), "half": ("auto", "bf16", "fp16")}
    if of.wire not in fitting.get(of.fidelity, (of.wire,)):
        mistakes.append(f"wire: fidelity {of.fidelity} goes with {' or '.join(fitting[of.fidelity])}")
    if of.fidelity == "compressed" and of.amp == "fp16":
        mistakes.append("amp: fp16 leaves out updates that overflow, compressed would remember them; use bf16")
    if of.local_batch and of.accumulate:
        mistakes.append("accumulate: adds up what local_batch takes apart; leave one out")
    if of.local_overlap >= of.local_steps > 0:
        limit = f"less than local_steps, {of.local_steps}"
        mistakes.append(f"local_overlap: {of.local_overlap} is too large; {limit}")
    return mistakes


def _of_pipeline(of: Settings) -> list[str]:
    if of.strategy != "pipeline":
        return []
    mistakes = []
    if of.shares == "auto":
        mistakes.append("shares: auto moves samples from rank to rank, a pipeline's stages take all; use measured")
    if of.sync_bn:
        mistakes.append("sync_bn: a pipeline's BatchNorm sees a micro-batch; use accumulate=1, or ddp")
    if of.profile_s:
        mistakes.append("profile_s: measures each rank alone, a pipeline has none; use strategy ddp")
    if of.fidelity == "local":
        mistakes += _of_local_pipelines(of)
    return mistakes


def _of_local_pipelines(of: Settings) -> list[str]:
    mistakes = []
    if of.stages and "|" not in of.stages:
        mistakes.append(f"stages: {ALONE}")
    if of.local_batch:
        mistakes.append("local_batch: a pipeline's micro-batches make one update; use accumulate")
    if of.local_after:
        mistakes.append("local_after: pipelines average from the first update on; leave it out")
    if of.amp == "fp16":
        mistakes.append("amp: fp16 leaves out updates that overflow, of which each pipeline has its own; use bf16")
    return mistakes


def _of_tensor(of: Settings) -> list[str]:
    if of.strategy != "tensor":
        return []
    mistakes = []
    if of.shares == "auto":
        mistakes.append("shares: auto moves samples from rank to rank, tensor's ranks take all; use measured")
    if of.sync_bn:
        mistakes.append("sync_bn: tensor's ranks each see the whole batch already; leave it out")
    if of.profile_s:
        mistakes.append("profile_s: measures each rank alone, tensor's have slices; use strategy ddp")
    return mistakes


def _way(of: Settings) -> str:
    return "fidelity local" if of.fidelity == "local" else f"strategy {of.strategy}"
