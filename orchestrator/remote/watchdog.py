"""Ends a program of ours that nobody hears: on a link that swallows packets a write blocks for ever.

    wind()          # before each word: whoever does not come to say the next one within STUCK_S ends

The kernel's alarm ends the process whatever it is blocked in; nothing of it is inherited by what a program starts.
(While a program is still on its way here, the same is done by `orchestrator/transport/shell.py`, and for one with a
deadline by `loader`. What sshd keeps of such a connection is its own: ClientAliveInterval ends that.)
"""

from __future__ import annotations

import signal

STUCK_S = 120


def wind() -> None:
    signal.alarm(STUCK_S)
