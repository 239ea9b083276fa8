"""CUDA graphs on a CPU, with numbers: a capture notes every call below autograd, and a replay makes them again, on the
same memory. As on a GPU, a capture itself changes nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

PLENTY = 1 << 40


class _Capture(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self.made: set[int] = set()
        """Storages of the capture's own memory."""
        self.before: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tensor in _tensors((args, kwargs)):
            if _storage(tensor) not in self.made:
                self.before.setdefault(id(tensor), (tensor, tensor.detach().clone()))
        given = {_storage(tensor) for tensor in _tensors((args, kwargs))}
        output = function(*args, **kwargs)
        self.made |= {_storage(tensor) for tensor in _tensors(output)} - given
        self.calls.append((function, args, kwargs, output))
        return output


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, Tensor)]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


class CpuGraph:
    replays = 0
    """Of all graphs."""

    def capture_begin(self, **_: Any) -> None:
        self.random = torch.get_rng_state()
        self.capture = _Capture()
        self.capture.__enter__()

    def capture_end(self) -> None:
        self.capture.__exit__(None, None, None)
        for tensor, before in self.capture.before.values():
            tensor.data.copy_(before)
        torch.set_rng_state(self.random)

    def replay(self) -> None:
        CpuGraph.replays += 1
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            for function, args, kwargs, output in self.capture.calls:
                for known, found in zip(_tensors(output), _tensors(function(*args, **kwargs)), strict=True):
                    known.data.copy_(found)


@contextlib.contextmanager
def cpu_graphs() -> Iterator[type[CpuGraph]]:
    CpuGraph.replays = 0
    with mock.patch.multiple(
        torch.cuda,
        CUDAGraph=CpuGraph,
        Stream=lambda: None,
        stream=lambda _: contextlib.nullcontext(),
        graph_pool_handle=lambda: None,
        synchronize=lambda: None,
        empty_cache=lambda: None,
        mem_get_info=lambda _: (PLENTY, PLENTY),
        memory_allocated=lambda _: 0,
        max_memory_allocated=lambda _: 0,
        memory_reserved=lambda _: 0,
    ):
        yield CpuGraph
