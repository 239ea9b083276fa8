"""torchrun, whose store listens where its supervisor says: on the training address, and for the job's hosts alone.

    ORCH_STORE=7 python -m orch_remote.launch <torchrun's arguments>        # 7: a socket that is bound

By itself torch listens on every address of the host. It takes a listening socket instead from torch 2.1 on; an older
one gets its port, and listens everywhere. Hosts other than the master are given no socket, and connect.
"""

from __future__ import annotations

import functools
import os
import socket
import sys

from torch._C._distributed_c10d import TCPStore
from torch.distributed.elastic.rendezvous import static_tcp_rendezvous
from torch.distributed.run import main

from .ports import listen


def listen_on(store: socket.socket) -> None:
    """Has torchrun's static rendezvous make its store on this socket."""
    if "master_listen_fd" not in (TCPStore.__init__.__doc__ or ""):
        store.close()
        return
    listen(store)
    listening = functools.partial(TCPStore, master_listen_fd=store.detach())
    vars(static_tcp_rendezvous)["TCPStore"] = listening  # it makes its store by this name, in every version


if __name__ == "__main__":
    if handle := os.environ.pop("ORCH_STORE", None):
        listen_on(socket.socket(fileno=int(handle)))
    main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # all ranks have ended well, and to take torch apart costs a fifth of what its start did
