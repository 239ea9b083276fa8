"""Runs any program on the stand-in for CUDA.

    python -m tests.cuda run python -c 'import torch; print(torch.cuda.get_device_name())'
    python -m tests.cuda run --gpus 2 python -m trainer --spawn gpu --exp mnist_lenet --data synthetic --steps 20
    FAKE_GIB=6 python -m tests.cuda run python -m trainer --exp resnet152_cifar --profile_s 15

Kernels compute nothing: numbers mean nothing. README.md here says what the stand-in shows, and what it cannot.
"""

from __future__ import annotations

import argparse
import os
import sys

from tests.cuda.build import CannotBuild, libraries
from tests.cuda.environment import environment


def main() -> int:
    asked = _parser().parse_args()
    try:
        if asked.action == "build":
            print(*libraries(), sep="\n")
            return 0
        words = environment(asked.gpus)
    except CannotBuild as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    if not asked.command:
        sys.stderr.write("error: no program to run; for example: python -m tests.cuda run python train.py\n")
        return 2
    if asked.command[0] in ("python", "python3"):
        asked.command[0] = sys.executable  # that of this environment, which has torch
    try:
        os.execvpe(asked.command[0], asked.command, {**os.environ, **words})
    except OSError as error:
        sys.stderr.write(f"error: {asked.command[0]}: {error.strerror}\n")
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.cuda", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    actions = parser.add_subparsers(dest="action", required=True)
    run = actions.add_parser("run", help="run a program on the stand-in", description=__doc__,
                             formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    run.add_argument("--gpus", type=int, default=1, help="GPUs that this machine seems to have (default: 1)")
    run.add_argument("command", nargs=argparse.REMAINDER, help="the program and its arguments")
    actions.add_parser("build", help="build it if need be, and print the libraries to preload")
    return parser


if __name__ == "__main__":
    sys.exit(main())
