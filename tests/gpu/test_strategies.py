"""Every way for two ranks to stay together, on real NCCL: that it ends, and that the wire stays out of computing."""

import pytest

from trainer.shared import AFTER_BACKWARD

from .here import is_stand_in
from .network import shaped
from .parts.two import wire_in_compute
from .runs import LENET, RESNET

WAYS = {
    **{name: ("--strategy", name) for name in ("ddp", *AFTER_BACKWARD, "parameter_average", "fsdp")},
    "half": ("--fidelity", "half"),
    "local": ("--fidelity", "local", "--local_steps", "4", "--local_overlap", "2"),
    "fp16": ("--amp", "fp16"),
    "shares": ("--shares", "host0=3,host1=1"),
    "zero share": ("--shares", "host0=1,host1=0"),
    "auto shares": ("--shares", "auto"),
    "accumulate": ("--accumulate", "2"),
    "pipeline": ("--strategy", "pipeline", "--accumulate", "4"),
    "pipeline in 16 bits": ("--strategy", "pipeline", "--accumulate", "4", "--amp", "fp16"),
    "tensor": ("--strategy", "tensor"),
}
DONE = "done: 12 steps"
PLAYED = list(WAYS)[:2] if is_stand_in() else list(WAYS)
"""On the stand-in tests/cuda plays all of them."""


@pytest.mark.parametrize("way", PLAYED)
def test_two_ranks_end_with_done(runs, way):
    size = ("--samples", "2048", "--epochs", "1", "--steps", "12")
    done = runs.pair(f"way-{way.replace(' ', '-')}", *LENET, *size, "--backend", "nccl", *WAYS[way], limit_s=120)
    assert done.succeeded, done.cause
    assert DONE in done.ended.output
    assert [len(done.all("step", rank)) for rank in (0, 1)] == [12, 12]


def test_batch_norm_over_both_ranks_ends_with_done(runs):
    size = ("--batch", "16", "--samples", "256", "--epochs", "1", "--steps", "12", "--sync_bn", "true")
    done = runs.pair("way-sync_bn", *RESNET, *size, "--backend", "nccl", limit_s=180)
    assert done.succeeded, done.cause
    assert DONE in done.ended.output


def test_what_travels_beside_backward_does_not_count_as_computing(runs):
    prefix, why_not = shaped()
    if why_not:
        pytest.skip(f"needs a network of its own with 2.5 Gbps: {why_not}")
    found = {}
    for strategy in ("allreduce_flat", "ddp"):
        size = ("--samples", "2560", "--steps", "9", "--backend", "nccl", "--strategy", strategy)
        found[strategy] = runs.pair(f"beside-{strategy}", *RESNET, *size, limit_s=180, prefix=prefix)
        assert found[strategy].succeeded, found[strategy].cause
    (row,) = wire_in_compute(found)
    assert row.verdict == "as expected", row
