"""The master's rendezvous port: claim it, let members test it, then admit only them (uses `ports`).

rendezvous = Rendezvous("10.0.0.1", 29500)
port = rendezvous.claim()                       # raises OSError
rendezvous.listen()                             # members can test the connection
rendezvous.admit(["10.0.0.2"])                  # from now on only they get in
"""

from __future__ import annotations

import socket
from collections.abc import Iterable

from .ports import Claim, admit, claim_port, listen, own_source, shut_out


class Rendezvous:
    def __init__(self, address: str, wanted: int) -> None:
        self._address, self._wanted = address, wanted
        self._claim: Claim | None = None

    def claim(self) -> int:
        """The port in the plan if it is free, otherwise another, ours until the job ends. Raises OSError."""
        self._claim = claim_port(self._address, self._wanted)
        return self._claim.number

    @property
    def port(self) -> int | None:
        return self._claim.number if self._claim else None

    @property
    def store(self) -> socket.socket | None:
        """The socket for torchrun's store. The caller closes it after passing it on."""
        return self._claim.store if self._claim else None

    def listen(self) -> socket.socket:
        """Members can now test the connection. Returns a listening socket of the caller's own. Raises OSError."""
        assert self._claim
        listen(self._claim.store)
        return self._claim.store.dup()

    def admit(self, addresses: Iterable[str]) -> None:
        assert self._claim
        admit(self._claim.store, {own_source(self._claim.store), *addresses})
        shut_out(self._claim.store)  # still-waiting connections are foreign: the job's hosts have tested theirs
