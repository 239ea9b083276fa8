"""Stands in for torchrun where a test trains nothing: meets the other hosts' launchers at the rendezvous port, starts
the rank wrappers, ends them when one fails.

python gang_launcher.py RANKS FIRST_RANK WORLD_SIZE NODES MASTER_ADDRESS PORT JOB_DIR
"""

import os
import socket
import subprocess
import sys
import time

from orch_remote.ports import listen

MEET_S = 30.0


def meet(nodes, address, port, job):
    """As torchrun's static rendezvous: the first host listens, and nobody goes on before all are there."""
    if int(sys.argv[2]) == 0:
        server = socket.socket(fileno=int(os.environ.pop("ORCH_STORE")))
        listen(server)
        server.settimeout(MEET_S)
        guests = [server.accept()[0] for _ in range(nodes - 1)]
        if strangers := [said for guest in guests if (said := guest.recv(200).decode()) != job]:
            sys.exit(f"RuntimeError: met strangers: {strangers}")
        for guest in guests:
            guest.sendall(b"go")
        return
    deadline = time.monotonic() + MEET_S
    while True:
        try:
            with socket.create_connection((address, port), timeout=MEET_S) as host:
                host.sendall(job.encode())
                if host.recv(2) == b"go":
                    return
                sys.exit("RuntimeError: the meeting broke up")
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                sys.exit("RuntimeError: nobody to meet")
            time.sleep(0.02)


ranks, first, world, nodes = (int(word) for word in sys.argv[1:5])
job_dir = sys.argv[7]
meet(nodes, sys.argv[5], int(sys.argv[6]), os.path.basename(job_dir))
children = {}
for local in range(ranks):
    environment = {
        **os.environ,
        "RANK": str(first + local),
        "LOCAL_RANK": str(local),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(ranks),
    }
    child = subprocess.Popen(
        [sys.executable, "-m", "orch_remote.rank", job_dir], env=environment, start_new_session=True
    )
    children[child.pid] = child
failed = False
while children:
    pid, status = os.wait()
    children.pop(pid)
    if status != 0:
        failed = True
        for child in children.values():
            child.terminate()
sys.exit(1 if failed else 0)
