"""Runs that were started on the page and wait for their GPUs, each in a thread of its own, as long as it is served.

in_turn = InTurn(home)
in_turn.begin(plan, blob)           what to say of it
in_turn.failed                      why others did not start, in sentences
"""

from __future__ import annotations

import threading
from collections import deque

from orchestrator.controller import opened
from orchestrator.errors import OrchError
from orchestrator.paths import Home
from orchestrator.planning.launch_plan import LaunchPlan

MOST = 8


class InTurn:
    def __init__(self, home: Home) -> None:
        self._home = home
        self.failed = deque[str](maxlen=MOST)

    def begin(self, plan: LaunchPlan, blob: bytes) -> str:
        threading.Thread(target=self._wait, args=(plan, blob), daemon=True, name=f"turn-{plan.job}").start()
        return f"{plan.job} starts when its GPUs are free, if this page is served until then"

    def _wait(self, plan: LaunchPlan, blob: bytes) -> None:
        try:
            with opened(self._home) as controller:
                controller.launch_in_turn(plan, blob)
        except OrchError as error:
            self.failed.append(f"{plan.job} was not started: {error}")
        except Exception as error:  # a full disk, a mistake of ours: the page has promised a start
            self.failed.append(f"{plan.job} was not started: {error.__class__.__name__}: {error}")
