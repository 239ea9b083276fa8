"""The port that the ranks meet at, on the master: claimed for the job.

rendezvous = Rendezvous("10.0.0.1", 29500)
port = rendezvous.claim()                       # raises OSError
rendezvous.listen()                             # so that the members can try the way there
rendezvous.admit(["10.0.0.2"])                  # then only they get in, and we no longer listen there
"""

from __future__ import annotations

import socket
from collections.abc import Iterable

from .ports import Claim, admit, claim_port, listen, own_source, shut_out


class Rendezvous:
    """wanted: the port that the plan names."""

    def __init__(self, address: str, wanted: int) -> None:
        self._address, self._wanted = address, wanted
        self._claim: Claim | None = None

    def claim(self) -> int:
        """The port that the plan names if nobody has it, else another, ours until the job ends. Raises OSError."""
        self._claim = claim_port(self._address, self._wanted)
        return self._claim.number

    @property
    def port(self) -> int | None:
        """None where none could be claimed."""
        return self._claim.number if self._claim else None

    @property
    def store(self) -> socket.socket | None:
        """The socket that torchrun's store is to listen on. Who hands it over closes it."""
        return self._claim.store if self._claim else None

    def listen(self) -> socket.socket:
        """Lets the ways there be tried; a socket of the caller's own, which listens. Raises OSError."""
        assert self._claim
        listen(self._claim.store)
        return self._claim.store.dup()

    def admit(self, addresses: Iterable[str]) -> None:
        """The hosts of the job, beside this one."""
        assert self._claim
        admit(self._claim.store, {own_source(self._claim.store), *addresses})
        shut_out(self._claim.store)  # who still waits there is no host of ours: those have tried it
