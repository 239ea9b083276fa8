"""torchrun with a store that listens only on the training address and only for the job's hosts.

    ORCH_STORE=7 python -m orch_remote.launch <torchrun's arguments>        # 7: a bound socket

torch itself listens on every address. From 2.1 on it accepts a listening socket; older versions get only the port.
Hosts other than the master get no socket, and connect.
"""

from __future__ import annotations

import functools
import os
import socket
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

from torch._C._distributed_c10d import TCPStore
from torch.distributed.elastic.rendezvous import static_tcp_rendezvous
from torch.distributed.run import main

from .ports import listen


def listen_on(store: socket.socket) -> None:
    """Makes torchrun's static rendezvous create its store on this socket."""
    if "master_listen_fd" not in (TCPStore.__init__.__doc__ or ""):
        store.close()
        return
    listen(store)
    listening = functools.partial(TCPStore, master_listen_fd=store.detach())
    vars(static_tcp_rendezvous)["TCPStore"] = listening  # the name by which every version creates its store


def run(arguments: Sequence[str], store: socket.socket | None) -> NoReturn:
    """Ends the process at once: all ranks have ended, and taking torch down takes a fifth of its start."""
    code: object = 0
    try:
        if store:
            listen_on(store)
        main([*arguments])
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


if __name__ == "__main__":
    handle = os.environ.pop("ORCH_STORE", None)
    run(sys.argv[1:], socket.socket(fileno=int(handle)) if handle else None)
