"""A GPU's numbers summed over Gloo: through pinned memory of the host, and back.

    staging = Staging(relay)
    staging.begin(bucket).wait()             in place, beside what the GPU computes meanwhile

Gloo takes a GPU's tensors, too, but its own thread stands on the host's first GPU, whichever one the rank has, so that
no mark can be set on the rank's own when a sum is there.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainer.strategies.relay import Relay


class Staging:
    """On the current GPU. Copies have a stream of their own: they neither wait for what is computed, nor hold it up."""

    def __init__(self, relay: Relay) -> None:
        self.relay = relay
        self.stream = torch.cuda.Stream()
        self.leaving: queue.SimpleQueue[WaitingTensor] = queue.SimpleQueue()
        threading.Thread(target=self._send_all, daemon=True).start()

    def begin(self, tensor: Tensor, arrived: Callable[[], None]) -> Any:
        """A future of the tensor, in the order in which all ranks begin them. arrived: called in the stream, and on the
        device, of the copy that brings the sum back.
        """
        computed = torch.cuda.Event(blocking=True)  # not at the cost of a core
        computed.record()
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[tensor.device])
        self.leaving.put(WaitingTensor(tensor, arrived, computed, future))
        return future

    def _send_all(self) -> None:
        torch.cuda.set_stream(self.stream)  # and with it the device: a new thread's is the host's first GPU
        while True:
            parcel = self.leaving.get()
            try:
                summed = self.relay.begin(self._fetched(parcel))
                summed.then(partial(self._deliver, parcel=parcel))
            except Exception as error:  # whoever waits for the sum shall have it
                parcel.future.set_exception(error)

    def _fetched(self, parcel: WaitingTensor) -> Tensor:
        """A copy in the host's memory, in the order of the elements: all ranks send the same, whatever theirs is."""
        parcel.computed.synchronize()
        copy = torch.empty(parcel.tensor.shape, dtype=parcel.tensor.dtype, pin_memory=True)
        copy.copy_(parcel.tensor, non_blocking=True)
        self.stream.synchronize()
        return copy

    def _deliver(self, summed: Any, parcel: WaitingTensor) -> None:
        """In the relay's last thread."""
        torch.cuda.set_stream(self.stream)
        try:
            parcel.tensor.copy_(summed.wait(), non_blocking=True)
            parcel.arrived()
            parcel.future.set_result(parcel.tensor)
        except Exception as error:
            parcel.future.set_exception(error)


class WaitingTensor(NamedTuple):
    """One tensor that waits to travel."""

    tensor: Tensor
    arrived: Callable[[], None]
    computed: torch.cuda.Event
    """After this event the tensor holds what shall travel."""
    future: Any
