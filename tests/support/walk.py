"""Lists the functions of ours that a command calls: `python tests/support/walk.py FOLDER plan|train|orch WORD...`.

plan: `orch plan --exp resnet152_cifar` on a remembered cluster of two hosts. train: `python -m trainer`, one rank on
the CPU, two steps. orch: this command line, here and in the caller's $ORCH_HOME. FOLDER: the checkout whose code runs.
Prints a JSON list of [module, function], in the order of first calls in the main thread, without lambdas,
comprehensions and calls made while a module is imported.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType

TRAIN = "--exp mnist_lenet --data synthetic --samples 32 --batch 8 --steps 2 --eval_every 0 --device cpu"


class Walk:
    """A profile function for `sys.setprofile`."""

    def __init__(self, root: Path) -> None:
        self.calls: list[tuple[str, str]] = []
        self._root = root
        self._folders = (f"{root}/orchestrator/", f"{root}/trainer/")
        self._seen: set[CodeType] = set()
        self._imports = 0

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if code.co_name == "<module>":
            self._imports += {"call": 1, "return": -1}.get(event, 0)
        elif event == "call" and not self._imports and code not in self._seen and code.co_name[0] != "<":
            self._seen.add(code)
            if code.co_filename.startswith(self._folders):
                module = Path(code.co_filename).relative_to(self._root).with_suffix("")
                self.calls.append((".".join(module.parts), code.co_name))


def plan() -> Callable[[], object]:
    from tests.support.plan_command import orch, remember

    os.environ["ORCH_HOME"] = str(Path.cwd() / "home")
    remember(Path.cwd(), "lab_a2000_v100.yaml", gpus=0)
    return lambda: orch("plan", "--exp", "resnet152_cifar")


def train() -> Callable[[], object]:
    from trainer.__main__ import main

    def run() -> None:
        os._exit = sys.exit  # a rank ends by it; this process goes on
        with contextlib.suppress(SystemExit):
            main(TRAIN.split())

    return run


def orch() -> Callable[[], object]:
    from orchestrator.cli import main

    def run() -> None:
        sys.argv = sys.argv[2:]
        with contextlib.suppress(SystemExit):
            main()

    return run


def main() -> None:
    root, name = Path(sys.argv[1]).resolve(), sys.argv[2]
    sys.path[0] = str(root)
    walk = Walk(root)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        if name != "orch":
            os.chdir(folder)
        run = {"plan": plan, "train": train, "orch": orch}[name]()
        sys.setprofile(walk)
        try:
            run()
        finally:
            sys.setprofile(None)
            os.chdir("/")
    print(json.dumps(walk.calls))


if __name__ == "__main__":
    main()
