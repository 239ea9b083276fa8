"""torchrun, for what `orch` asks of it: a static rendezvous, and a command for each rank."""

import socket
import sys

import fake_torchrun

from .elastic.rendezvous import static_tcp_rendezvous


def main(words):
    end = words.index("--no-python")
    options = dict(zip(words[:end:2], words[1:end:2], strict=True))
    command = words[end + 1 :]
    nodes, node_rank, ranks = (int(options[name]) for name in ("--nnodes", "--node-rank", "--nproc-per-node"))
    given = getattr(static_tcp_rendezvous.TCPStore, "keywords", {})
    store = socket.socket(fileno=given["master_listen_fd"]) if given else None
    place = (options["--master-addr"], int(options["--master-port"]))
    met = fake_torchrun.meet(store, node_rank, ranks, nodes, place, command[-1].rpartition("/")[2])
    sys.exit(fake_torchrun.run_ranks(command, node_rank, *met))
