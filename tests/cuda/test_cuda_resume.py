"""Going on from a checkpoint with what each GPU has for itself."""

from __future__ import annotations

import os

from tests.cuda.machine import LENET, Host, Job, problems

LOCAL = ("--strategy", "ddp", "--fidelity", "local", "--local_steps", "2", "--amp", "fp16", "--backend", "nccl")


def scales_that_differ() -> None:
    """Where FIRST says so a rank's loss scale is kept as 64 + its number: kernels compute nothing here, and would leave
    0. What a rank resumes with is printed.
    """
    import torch

    from trainer.checkpoints import CheckpointKeeper
    from trainer.compute.arithmetic import Fp16

    resume = CheckpointKeeper.resume

    def resumed(self):
        found = resume(self)
        print("scale", self.run.precision.scaler.get_scale())
        return found

    CheckpointKeeper.resume = resumed
    if os.environ["FIRST"] == "yes":
        kept = torch.tensor([64.0 + int(os.environ["RANK"]), 3.0], dtype=torch.float64)
        Fp16.own_scale = lambda self: {"scale.own": kept}


def played(machine, hosts, first, *arguments):
    prelude = f"{__name__}:{scales_that_differ.__name__}"
    job = Job((*LENET, *LOCAL, *arguments), hosts=hosts, knobs={"FIRST": first}, prelude=prelude)
    ranks = machine.run(job)
    assert not (words := problems(ranks)), words
    return ranks


def test_each_rank_goes_on_with_its_own_loss_scale_and_others_with_the_least(machine, tmp_path):
    played(machine, (Host(2),), "yes", "--checkpoint_every", "3", "--checkpoint_dir", str(tmp_path))
    same = played(machine, (Host(2),), "no", "--resume", str(tmp_path))
    assert ["scale 64.0" in same[0].output, "scale 65.0" in same[1].output] == [True, True]
    others = played(machine, (Host(3),), "no", "--resume", str(tmp_path))
    assert all("scale 64.0" in rank.output for rank in others)
    assert "started fresh" not in same[0].output + others[0].output
