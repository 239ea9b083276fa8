"""`orch_remote.launch` says here on which socket the store is to listen."""

from torch._C._distributed_c10d import TCPStore

__all__ = ["TCPStore"]
