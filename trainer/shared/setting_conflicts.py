"""Settings that exclude each other: `mistakes_of(settings)` gives one line for each. Imports no torch."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from trainer.shared.experiments import BYTES, LENET_PIXELS, MODEL_CHANNELS, OWN, TEXT_MODELS, TOKENS
from trainer.shared.setting_fields import declared, is_changed, without_effect
from trainer.shared.shares import PROFILED
from trainer.shared.stages import ALONE
from trainer.shared.strategy_table import FIDELITIES, NOT_WITH_FSDP, ONE_PROCESS, STRATEGIES

Settings = Any
"""A `trainer.shared.settings.Settings`; that module imports this one."""


def mistakes_of(of: Settings) -> list[str]:
    """Expects valid values, or values reported already."""
    exchange = [*_of_exchange(of), *_of_fidelity(of), *_of_pipeline(of), *_of_tensor(of)]
    recipe = [*_of_optimizer(of), *_of_clipping(of), *_of_ema(of), *_of_learning_rate(of)]
    return [*exchange, *without_effect(of), *recipe, *_of_the_rest(of), *_of_own(of)]


def mistakes_of_network(of: Settings) -> list[str]:
    """Only useful if nothing else is wrong."""
    if of.is_own:
        return [f"{name}: does nothing with data {of.data}; leave it out" for name in _changed_of_text(of)]
    if of.data_set.is_text or of.model in TEXT_MODELS:
        return _of_text(of)
    if changed := _changed_of_text(of):
        return [f"{name}: does nothing with data {of.data}; use exp=gpt_text" for name in changed]
    if of.model == "lenet" and of.data_set.shape[1] > LENET_PIXELS:
        return [f"model: lenet takes images of {LENET_PIXELS} pixels at most, not {of.data_set.shape[1]}; use resnet50"]
    if MODEL_CHANNELS[of.model] in (None, of.data_set.shape[0]):
        return []
    return [
        f"model: {of.model} takes images of {MODEL_CHANNELS[of.model]} channels, "
        f"not {of.data_set.shape[0]}; use data=cifar10 or exp=resnet152_cifar"
    ]


def _changed_of_text(of: Settings) -> list[str]:
    return [name for name, usual in (("tokens", TOKENS), ("vocabulary", 0)) if getattr(of, name) != usual]


def _of_text(of: Settings) -> list[str]:
    mistakes = []
    if 0 < of.vocabulary <= BYTES:
        mistakes.append(f"vocabulary: {of.vocabulary} leaves no token but the {BYTES} bytes; use 0, or 8192")
    if not of.data_set.is_text:
        mistakes.append(f"model: {of.model} takes text, not the images of {of.data}; use exp=gpt_text")
    elif of.model not in TEXT_MODELS:
        mistakes.append(f"model: {of.model} takes images, not text; use {', '.join(TEXT_MODELS)}")
    elif of.data not in ("text", "synthetic"):
        mistakes.append(f"data: {of.data} holds images; use text or synthetic")
    if of.augment != "none":
        mistakes.append("augment: varies images, not text; use none")
    if of.strategy == "tensor":
        mistakes.append("strategy: tensor cuts convolutions; use ddp or pipeline")
    if of.loader == "workers" or of.num_workers > 0:
        mistakes.append("loader: text is kept on the device; leave out loader and num_workers")
    return mistakes


def _of_exchange(of: Settings) -> list[str]:
    mistakes = []
    if of.shares not in ("equal", PROFILED) and of.strategy in ONE_PROCESS:
        mistakes.append(f"shares: strategy {of.strategy} is one process, which takes the whole batch; use shares=equal")
    if "at:call" in of.slow and of.strategy in ONE_PROCESS:
        mistakes.append(f"slow: strategy {of.strategy} has no exchange, so there is no call to delay; use at:sync")
    if of.shares == "auto" and (of.sync_bn or of.strategy == "fsdp"):
        mistakes.append(
            "shares: auto compares the ranks' computing times, in which they wait for each other with sync_bn or fsdp; "
            "use measured"
        )
    return mistakes


def _of_optimizer(of: Settings) -> list[str]:
    if of.optimizer != "adamw":
        return []
    mistakes = ["fused_sgd: does nothing with optimizer adamw; use sgd"] if of.fused_sgd == "on" else []
    if of.strategy == "parameter_average" and of.fidelity == "exact":
        mistakes.append(
            "optimizer: parameter_average is exact only if updates add up as gradients do, and adamw's do not; "
            "use ddp, sgd or fidelity=local"
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
        mistakes.append(
            f"ema: with {_synchronisation(of)} each rank has its own weights, without a common average; leave it out"
        )
    if of.sync_bn:
        mistakes.append(
            "ema: each rank estimates BatchNorm's statistics by itself, so sync_bn is impossible; leave sync_bn out"
        )
    return mistakes


def _of_learning_rate(of: Settings) -> list[str]:
    misses = of.lr_schedule == "step" and not of.lr_steps
    return ["lr_steps: name the epochs after which the rate falls, like lr_steps=30,60,80"] if misses else []


def _of_the_rest(of: Settings) -> list[str]:
    mistakes = []
    if of.strategy == "fsdp":
        asked = [name for name in NOT_WITH_FSDP if getattr(of, name) == "on"]
        mistakes += [
            f"{name}: strategy fsdp keeps weights in pieces and cannot use it; use auto or ddp" for name in asked
        ]
    if of.strategy == "fsdp" and of.unused_parameters != "refuse":
        mistakes.append("unused_parameters: with strategy fsdp all ranks use all parameters; use ddp")
    if of.profile_s and of.checkpoint_every:
        mistakes.append("checkpoint_every: does nothing with profile_s, which trains nothing; leave one out")
    if of.target_accuracy and not of.eval_every:
        mistakes.append("eval_every: is 0, but target_accuracy needs evaluations; use 1")
    averages = of.strategy == "parameter_average" and of.fidelity == "exact"
    if averages and of.shares == "auto" and of.momentum:
        mistakes.append(
            "shares: auto changes the weight of each rank's momentum, so parameter_average is not exact; "
            "use ddp, shares=measured, momentum=0 or fidelity=local"
        )
    if of.sync_bn and (of.strategy in ("parameter_average", "dp") or of.fidelity == "local"):
        mistakes.append(f"sync_bn: {_synchronisation(of)} has no single network that sees the whole batch; use ddp")
    return mistakes


def _of_own(of: Settings) -> list[str]:
    if not of.is_own:
        brought = [name for name in ("model", "data") if getattr(of, name) == OWN]
        return [f"{name}: {OWN} is only for a script that calls `import trainer`" for name in brought]
    brought = [field.name for field in fields(of) if declared(field).brought and is_changed(of, field)]
    return [f"{name}: is decided by the script; pass it as an argument of the script" for name in brought]


def _of_fidelity(of: Settings) -> list[str]:
    if of.fidelity not in FIDELITIES:
        return []  # reported already
    mistakes = []
    if of.strategy in STRATEGIES and of.strategy not in FIDELITIES[of.fidelity]:
        known = ", ".join(FIDELITIES[of.fidelity])
        mistakes.append(f"fidelity: {of.fidelity} goes with strategy {known}, not with {of.strategy}")
    fitting = {"exact": ("auto", "fp32"), "compressed": ("auto", "fp32"), "half": ("auto", "bf16", "fp16")}
    if of.wire not in fitting.get(of.fidelity, (of.wire,)):
        mistakes.append(f"wire: fidelity {of.fidelity} goes with {' or '.join(fitting[of.fidelity])}")
    if of.fidelity == "compressed" and of.amp == "fp16":
        mistakes.append("amp: fp16 skips updates that overflow, and compressed would keep them in its memory; use bf16")
    if of.local_batch and of.accumulate:
        mistakes.append("accumulate: joins the micro-batches that local_batch separates; leave one out")
    if of.local_overlap >= of.local_steps > 0:
        limit = f"less than local_steps, {of.local_steps}"
        mistakes.append(f"local_overlap: {of.local_overlap} is too large; {limit}")
    return mistakes


def _of_pipeline(of: Settings) -> list[str]:
    if of.strategy != "pipeline":
        return []
    mistakes = []
    if of.shares == "auto":
        mistakes.append(
            "shares: auto moves samples from rank to rank, but a pipeline's stages take all of them; use measured"
        )
    if of.sync_bn:
        mistakes.append("sync_bn: a pipeline's BatchNorm sees a micro-batch; use accumulate=1, or ddp")
    if of.profile_s:
        mistakes.append(
            "profile_s: measures the whole network on each rank, and a pipeline divides it; use strategy ddp"
        )
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
        mistakes.append("local_after: pipelines average from the first update; leave it out")
    if of.amp == "fp16":
        mistakes.append("amp: fp16 skips updates that overflow, which differ between pipelines; use bf16")
    return mistakes


def _of_tensor(of: Settings) -> list[str]:
    if of.strategy != "tensor":
        return []
    mistakes = []
    if of.shares == "auto":
        mistakes.append(
            "shares: auto moves samples from rank to rank, but tensor's ranks take all of them; use measured"
        )
    if of.sync_bn:
        mistakes.append("sync_bn: tensor's ranks each see the whole batch already; leave it out")
    if of.profile_s:
        mistakes.append("profile_s: measures the whole network on each rank, and tensor divides it; use strategy ddp")
    return mistakes


def _synchronisation(of: Settings) -> str:
    return "fidelity local" if of.fidelity == "local" else f"strategy {of.strategy}"
