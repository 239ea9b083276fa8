"""Ends a program whose connection is dead: a write to a link that drops packets blocks for ever.

    wind()          # before each message: without the next one within STUCK_S the process ends

Uses the kernel's alarm, which ends a blocked process; child processes do not inherit it. While a program is starting,
`orchestrator/transport/shell.py` sets the alarm; `loader` sets it for programs with a deadline. sshd ends its own
process by ClientAliveInterval.
"""

from __future__ import annotations

import signal

STUCK_S = 120


def wind() -> None:
    signal.alarm(STUCK_S)
