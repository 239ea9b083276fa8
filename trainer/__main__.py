"""The command line: `torchrun --standalone --nproc-per-node 2 -m trainer --exp mnist_lenet [--key value]...`

Without torchrun: `python -m trainer --spawn 2 --exp mnist_lenet`. Exit codes: 0 done; 1 failed; 2 wrong usage; 130 and
143 ended by SIGINT and SIGTERM.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from trainer.ranks.ending import leave
from trainer.run_rank import run, say
from trainer.shared.config import help_text, parse_arguments
from trainer.shared.setting_fields import SettingsError


def main(arguments: Sequence[str]) -> int:
    if "--help" in arguments or "-h" in arguments:
        print(f"{help_text()}\n\n{_STARTING}")
        return 0
    try:
        ranks, arguments = starting(arguments)
        settings = parse_arguments(arguments)
    except SettingsError as error:
        for mistake in error.mistakes:
            say(f"error: {mistake}")
        return 2
    if ranks is None:
        return run(settings)
    from trainer.spawn import spawn

    return spawn(ranks, settings)


_STARTING = """starting, besides torchrun:
  --spawn N
      Starts N ranks on this machine without torchrun; gpu: one per GPU.
  --local_rank N
      Added by torch.distributed.launch; ignored, LOCAL_RANK in the environment counts.

example: python -m trainer --spawn 2 --exp mnist_lenet --checkpoint_every 500
         python -m trainer --spawn 2 --exp mnist_lenet --checkpoint_every 500 --resume checkpoints"""


def starting(arguments: Sequence[str]) -> tuple[int | None, list[str]]:
    """Returns the ranks to start (None if this process is a rank), and the other arguments. Raises SettingsError."""
    options: dict[str, str] = {}
    left: list[str] = []
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        key = name.replace("-", "_")
        if key not in ("__spawn", "__local_rank"):
            left.append(word)
            continue
        options[key] = value if equals or not rest else rest.pop(0)
    if not options.get("__local_rank", "0").isdecimal():
        raise SettingsError([f"local_rank: {options['__local_rank']!r} is not a number"])
    if "__spawn" not in options:
        return None, left
    if "RANK" in os.environ:
        raise SettingsError(["spawn: torchrun has started this rank already; leave --spawn out"])
    return _how_many(options["__spawn"]), left


def _how_many(text: str) -> int:
    if text == "gpu":
        from trainer.spawn import gpu_count

        if not (found := gpu_count()):
            raise SettingsError(["spawn: torch finds no GPU here; give a number of ranks, and --device cpu"])
        return found
    if not text.isdecimal() or not 1 <= int(text) <= 1024:
        raise SettingsError([f"spawn: {text!r} is neither gpu nor a number of ranks from 1 to 1024"])
    return int(text)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
