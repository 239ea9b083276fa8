"""What an older card refuses, and what it runs."""

from __future__ import annotations

from tests.cuda.machine import LENET, Job, problems

V100 = {"FAKE_CC": 70, "FAKE_NAME": "Tesla V100-SXM2-16GB"}


def test_a_v100_runs_fp16_and_refuses_bf16(machine):
    """Newer torch emulates bf16 there, convolution by convolution and sample by sample."""
    assert not (words := problems(machine.run(Job((*LENET, "--strategy", "none", "--amp", "fp16"), knobs=V100)))), words
    (refused,) = machine.run(Job((*LENET, "--strategy", "none", "--amp", "bf16"), knobs=V100))
    assert refused.exit_code == 1
    assert "amp=fp16" in refused.output and "Traceback" not in refused.output
