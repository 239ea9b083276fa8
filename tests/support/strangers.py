"""A crowd without the job's token: knocks so many times a second at a port, says nothing, and never hangs up by itself.

    python strangers.py ADDRESS PORT A_SECOND SECONDS

Prints a line for every 500 connections that it made. Ends with its standard input.
"""

from __future__ import annotations

import contextlib
import select
import signal
import socket
import sys
import time
from collections import deque

HELD = 900


def knock(address: str, port: int, a_second: float, seconds: float) -> None:
    held: deque[socket.socket] = deque()
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    began, made = time.monotonic(), 0
    with contextlib.suppress(KeyboardInterrupt):
        while (now := time.monotonic() - began) < seconds and not select.select([sys.stdin], [], [], 0)[0]:
            if made >= now * a_second:
                time.sleep(1 / a_second)
                continue
            one = socket.socket(family)
            with contextlib.suppress(OSError):
                one.settimeout(1.0)
                one.connect((address, port))
                made += 1
                if made % 500 == 0:
                    print(made, flush=True)
            held.append(one)
            if len(held) > HELD:
                held.popleft().close()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    knock(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4]))
