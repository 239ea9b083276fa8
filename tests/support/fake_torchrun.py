"""Stands in for torchrun where a test is not about it: meets the other hosts' launchers at the rendezvous port, starts
the rank wrappers, ends them when one fails.

python fake_torchrun.py RANKS NODE_RANK NODES MASTER_ADDRESS PORT JOB_DIR
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time

from orch_remote.ports import listen

MEET_S = 30.0


def main() -> None:
    ranks, node_rank, nodes, address, port, job_dir = sys.argv[1:]
    store = os.environ.pop("ORCH_STORE", None)
    server = socket.socket(fileno=int(store)) if store and node_rank == "0" else None
    if server:
        listen(server)
    met = meet(server, int(node_rank), int(ranks), int(nodes), (address, int(port)), os.path.basename(job_dir))
    sys.exit(run_ranks([sys.executable, "-m", "orch_remote.rank", job_dir], int(node_rank), *met))


def meet(
    server: socket.socket | None, node_rank: int, ranks: int, nodes: int, place: tuple[str, int], job: str
) -> tuple[list[int], tuple[str, int]]:
    """How many ranks each host has, and a free place on the first host where the ranks may meet.

    As torchrun's static rendezvous: the first host listens, at `place`, and nobody goes on before all are there.
    """
    if server is None:
        of_nodes, ranks_port = _ask({"node_rank": node_rank, "ranks": ranks, "job": job}, place)
        return of_nodes, (place[0], ranks_port)
    server.settimeout(MEET_S)
    guests, said = [], []
    while len(guests) < nodes - 1:
        guest = server.accept()[0]
        if text := guest.recv(1000):  # else somebody who looked at the port, or was ended
            guests.append(guest)
            said.append(json.loads(text))
    if strangers := [one for one in said if one["job"] != job]:
        sys.exit(f"RuntimeError: met strangers: {strangers}")
    found = {node_rank: ranks, **{one["node_rank"]: one["ranks"] for one in said}}
    of_nodes = [found[number] for number in range(nodes)]
    with socket.socket(server.family) as free:
        free.bind((place[0], 0))
        ranks_port = free.getsockname()[1]
    for guest in guests:
        guest.sendall(json.dumps([of_nodes, ranks_port]).encode())
    return of_nodes, (place[0], ranks_port)


def _ask(who: dict[str, object], place: tuple[str, int]) -> tuple[list[int], int]:
    deadline = time.monotonic() + MEET_S
    while True:
        try:
            with socket.create_connection(place, timeout=MEET_S) as host:
                host.sendall(json.dumps(who).encode())
                return json.loads(host.recv(10_000) or sys.exit("RuntimeError: the meeting broke up"))
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                sys.exit("RuntimeError: nobody to meet")
            time.sleep(0.02)


def run_ranks(command: list[str], node_rank: int, of_nodes: list[int], meeting: tuple[str, int]) -> int:
    """To their end: 1 where one of them failed, and the others were ended."""
    first, ranks = sum(of_nodes[:node_rank]), of_nodes[node_rank]
    everywhere = {"WORLD_SIZE": sum(of_nodes), "LOCAL_WORLD_SIZE": ranks}
    everywhere |= {"MASTER_ADDR": meeting[0], "MASTER_PORT": meeting[1]}
    children = {}
    for local in range(ranks):
        place = {"RANK": first + local, "LOCAL_RANK": local, **everywhere}
        environment = {**os.environ, **{name: str(value) for name, value in place.items()}}
        child = subprocess.Popen(command, env=environment, start_new_session=True)
        children[child.pid] = child
    failed = False
    while children:
        pid, status = os.wait()
        children.pop(pid)
        if status != 0:
            failed = True
            for child in children.values():
                child.terminate()
    return 1 if failed else 0


if __name__ == "__main__":
    main()
