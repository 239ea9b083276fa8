"""Tensors from rank to rank, in the order in which they are sent, while both compute.

    outgoing = Sender(group, to=1, tag=ACTIVATIONS)
    incoming = Receiver(group, source=0, tag=ACTIVATIONS, news=news, device=device)
    incoming.expect(shape, dtype)             one call for each tensor that will come, long before it does
    with news: news.wait_for(lambda: incoming.has_arrived)
    tensor = incoming.take()

Gloo says of an arrival only to who waits for it, so each link has a thread at either end; and what comes is received
into memory that lies ready, since Gloo holds back at its source what nobody asks for. This is so where NCCL carries
gradients, too: a receive that NCCL has been given in advance occupies the GPU until its data come. From and to a GPU
tensors pass through pinned memory.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

ACTIVATIONS, GRADIENTS, LABELS, LOSSES = 1, 2, 3, 4
"""Tags: what two ranks send each other."""
AHEAD = 8
"""Receives that wait for their data at a time: more than a stage's micro-batches in flight beyond its own."""


class Sender:
    """Sends in a thread of its own. Raises in `send` or `settle` what went wrong with an earlier tensor."""

    def __init__(self, group: dist.ProcessGroup, to: int, tag: int) -> None:
        self.group, self.to, self.tag = group, to, tag
        self._left: queue.Queue[tuple[Tensor, Any]] = queue.Queue()
        self._error: BaseException | None = None
        self._spans: deque[tuple[float, float]] = deque()
        threading.Thread(target=self._run, daemon=True, name=f"sends to rank {to}").start()

    def send(self, tensor: Tensor) -> None:
        """Nobody may change it afterwards."""
        self._raise()
        self._left.put(_staged(tensor) if tensor.is_cuda else (tensor.contiguous(), None))

    def settle(self) -> None:
        """Until all has left."""
        self._left.join()
        self._raise()

    def take_spans(self) -> list[tuple[float, float]]:
        """When tensors were being sent since the last call, begin and end of each by time.perf_counter."""
        return [self._spans.popleft() for _ in range(len(self._spans))]

    def _raise(self) -> None:
        if self._error:
            raise self._error

    def _run(self) -> None:
        while True:
            tensor, event = self._left.get()
            try:
                if not self._error:
                    if event:
                        event.synchronize()
                    begin_s = time.perf_counter()
                    dist.send(_bytes(tensor), self.to, group=self.group, tag=self.tag)
                    self._spans.append((begin_s, time.perf_counter()))
            except RuntimeError as error:  # a rank that has gone
                self._error = error
            finally:
                self._left.task_done()


def _bytes(tensor: Tensor) -> Tensor:
    """The same memory: Gloo knows some types only, and labels may be of any (bool)."""
    return tensor.view(torch.uint8)


def _staged(tensor: Tensor) -> tuple[Tensor, Any]:
    """A copy in the host's memory, and the event after which it holds the numbers. The computing stream makes it: by
    its order the tensor lives until then.
    """
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    copy.copy_(tensor, non_blocking=True)
    copied = torch.cuda.Event(blocking=True)  # not at the cost of a core
    copied.record()
    return copy, copied


class Receiver:
    """Receives in a thread of its own, up to AHEAD tensors before they are asked for. news: told of each arrival."""

    def __init__(
        self, group: dist.ProcessGroup, source: int, tag: int, news: threading.Condition, device: torch.device
    ) -> None:
        self.group, self.source, self.tag, self.news, self.device = group, source, tag, news, device
        self._expected: queue.Queue[tuple[Sequence[int], torch.dtype]] = queue.Queue()
        self._room = threading.Semaphore(AHEAD)
        self._here: deque[tuple[Tensor, float]] = deque()
        self._error: BaseException | None = None
        self._posted: queue.Queue[tuple[Tensor, Any]] = queue.Queue()
        for work in (self._post, self._wait):
            threading.Thread(target=work, daemon=True, name=f"receives from rank {source}").start()

    def expect(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        self._expected.put((shape, dtype))

    @property
    def has_arrived(self) -> bool:
        """Is the next one here? Raises what went wrong instead."""
        if not self._here and self._error:
            raise self._error
        return bool(self._here)

    @property
    def arrived_s(self) -> float:
        """When the next one came, by time.perf_counter."""
        return self._here[0][1]

    def take(self) -> Tensor:
        """The next one, on the device."""
        tensor, _ = self._here.popleft()
        self._room.release()
        return tensor.to(self.device, non_blocking=True)

    def wait(self) -> Tensor:
        """The next one, when it has come."""
        with self.news:
            self.news.wait_for(lambda: self.has_arrived)
        return self.take()

    def _post(self) -> None:
        pinned = self.device.type == "cuda"
        while True:
            shape, dtype = self._expected.get()
            self._room.acquire()
            tensor = torch.empty(tuple(shape), dtype=dtype, pin_memory=pinned)
            try:
                coming = dist.irecv(_bytes(tensor), self.source, group=self.group, tag=self.tag)
                self._posted.put((tensor, coming))
            except RuntimeError as error:
                self._fail(error)
                return

    def _wait(self) -> None:
        while True:
            tensor, coming = self._posted.get()
            try:
                coming.wait()
            except RuntimeError as error:  # a rank that has gone
                self._fail(error)
                return
            with self.news:
                self._here.append((tensor, time.perf_counter()))
                self.news.notify_all()

    def _fail(self, error: BaseException) -> None:
        with self.news:
            self._error = error
            self.news.notify_all()
