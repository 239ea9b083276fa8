"""What a rank does in a round: prints numbered lines until it is asked to end, and misbehaves as CHAOS says."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

asked = json.loads(os.environ["CHAOS"])
rank = os.environ["RANK"]
if asked["ignores"]:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
if asked["daemons"]:
    # Its own session, no parent, and in one of the two nothing of our environment.
    for scrubbed in (["env", "-i"], []):
        subprocess.run([*scrubbed, "setsid", "-f", "bash", "-c", f"exec -a '{os.environ['ORCH_JOB']} stray' sleep 900"])
after_s, how, last_words = asked["exits"].get(rank, (None, 0, ""))
is_over = pathlib.Path("end").exists
if asked["gloo"]:
    import torch
    from torch import distributed

    distributed.init_process_group("gloo")

    def is_over():
        """Together, so that nobody waits in a collective for one who has left."""
        end = torch.tensor([float(pathlib.Path("end").exists())])
        distributed.all_reduce(end)
        return bool(end)


started = time.monotonic()
number = 0
while not is_over():
    print(f"{rank} {number}", flush=True)
    number += 1
    if after_s is not None and time.monotonic() - started > after_s:
        print(last_words, file=sys.stderr, flush=True)
        if isinstance(how, str):
            os.kill(os.getpid(), signal.Signals[how])
        os._exit(how)
    time.sleep(0.05)
if asked["gloo"]:
    distributed.destroy_process_group()  # with threads of it alive, the interpreter's own end may abort
