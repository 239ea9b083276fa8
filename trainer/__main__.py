"""The command line: `torchrun --standalone --nproc-per-node 2 -m trainer --exp mnist_lenet [--key value]...`

Without torchrun: `python -m trainer --spawn 2 --exp mnist_lenet`, or `--srun 2` on a node of Slurm. Exit codes: 0 done;
1 failed; 2 wrong usage; 130 and 143 ended by SIGINT and SIGTERM.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from trainer.ranks.ending import leave
from trainer.ranks.slurm import become_srun, end_with_srun, is_task
from trainer.run_rank import run, say
from trainer.shared.config import help_text, parse_arguments
from trainer.shared.errors import TrainError
from trainer.shared.setting_fields import SettingsError


def main(arguments: Sequence[str]) -> int:
    if "--help" in arguments or "-h" in arguments:
        print(f"{help_text()}\n\n{_STARTING}")
        return 0
    try:
        way, ranks, arguments = starting(arguments)
        settings = parse_arguments(arguments)
    except SettingsError as error:
        for mistake in error.mistakes:
            say(f"error: {mistake}")
        return 2
    if way == "--srun":
        try:
            become_srun(ranks, arguments)
        except TrainError as error:
            say(f"error: {error}")
            return 1
    if not way:
        end_with_srun()
        return run(settings)
    from trainer.spawn import spawn

    return spawn(ranks, settings)


_STARTING = """starting, besides torchrun:
  --spawn N
      Starts N ranks on this machine without torchrun; gpu: one per GPU.
  --srun N
      Starts N ranks on this machine by Slurm's srun, one task each; gpu: one per GPU.
  --local_rank N
      Added by torch.distributed.launch; ignored, LOCAL_RANK in the environment counts.

example: python -m trainer --spawn 2 --exp mnist_lenet --checkpoint_every 500
         python -m trainer --spawn 2 --exp mnist_lenet --checkpoint_every 500 --resume checkpoints"""


def starting(arguments: Sequence[str]) -> tuple[str, int, list[str]]:
    """Returns `--spawn`, `--srun` or "" if this process is a rank, how many ranks to start, and the other arguments.
    Raises SettingsError.
    """
    options: dict[str, str] = {}
    left: list[str] = []
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        key = name.replace("-", "_")
        if key not in ("__spawn", "__srun", "__local_rank"):
            left.append(word)
            continue
        options[key] = value if equals or not rest else rest.pop(0)
    if not options.get("__local_rank", "0").isdecimal():
        raise SettingsError([f"local_rank: {options['__local_rank']!r} is not a number"])
    way = next((key[2:] for key in ("__spawn", "__srun") if key in options), "")
    if not way:
        return "", 0, left
    if "RANK" in os.environ or is_task(os.environ):
        raise SettingsError([f"{way}: torchrun or srun has started this rank already; leave --{way} out"])
    return f"--{way}", _how_many(way, options[f"__{way}"]), left


def _how_many(way: str, text: str) -> int:
    if text == "gpu":
        from trainer.spawn import gpu_count

        if not (found := gpu_count()):
            raise SettingsError([f"{way}: torch finds no GPU here; give a number of ranks, and --device cpu"])
        return found
    if not text.isdecimal() or not 1 <= int(text) <= 1024:
        raise SettingsError([f"{way}: {text!r} is neither gpu nor a number of ranks from 1 to 1024"])
    return int(text)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
