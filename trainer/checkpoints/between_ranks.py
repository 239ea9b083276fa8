"""Exchanges checkpoint bytes between ranks over Gloo."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

_CHUNK = 1 << 26


def gather(own: Tensor) -> list[Tensor]:
    """Every rank's tensor on rank 0; lengths may differ. [] on other ranks."""
    own = own.cpu()
    lengths = [torch.zeros(1, dtype=torch.long) for _ in range(dist.get_world_size())]
    dist.all_gather(lengths, torch.tensor([own.numel()]))
    longest = max(int(length) for length in lengths)
    padded = torch.cat([own, own.new_zeros(longest - own.numel())])
    found = [torch.empty_like(padded) for _ in lengths] if dist.get_rank() == 0 else None
    dist.gather(padded, found)
    return [tensor[: int(length)].clone() for tensor, length in zip(found or (), lengths, strict=False)]


def broadcast(content: bytes) -> bytes:
    length = torch.tensor([len(content)])
    dist.broadcast(length, src=0)
    whole = torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
    if dist.get_rank() != 0:
        whole = torch.empty(int(length), dtype=torch.uint8)
    for part in whole.split(_CHUNK) if len(whole) else ():
        dist.broadcast(part, src=0)
    return content or whole.numpy().tobytes()


def flat_bytes(tensors: Iterable[Tensor]) -> Tensor:
    none = torch.empty(0, dtype=torch.uint8)
    return torch.cat([none, *(tensor.detach().flatten().cpu().view(torch.uint8) for tensor in tensors)])


def describe(tensors: Mapping[str, Tensor]) -> Tensor:
    """Names, shapes and types as JSON bytes."""
    rows = [[name, list(tensor.shape), str(tensor.dtype).partition(".")[2]] for name, tensor in tensors.items()]
    return torch.tensor(list(json.dumps(rows).encode()), dtype=torch.uint8)


def described_as(words: Tensor) -> dict[str, Tensor]:
    """The inverse of `describe`, on device "meta"."""
    rows = json.loads(bytes(words.tolist()))
    return {name: torch.empty(shape, dtype=getattr(torch, dtype), device="meta") for name, shape, dtype in rows}


def apart(flat: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Splits the bytes of `flat_bytes` into tensors with the names, shapes and types of `like`."""
    parts = flat.split([tensor.numel() * tensor.element_size() for tensor in like.values()]) if like else ()
    return {
        name: part.clone().view(like[name].dtype).view(like[name].shape) for name, part in zip(like, parts, strict=True)
    }
