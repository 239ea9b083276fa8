"""Chooses the device, joins the process group, checks NCCL, shares failures between ranks, and leaves in order."""

from __future__ import annotations

import base64
import contextlib
import functools
import hmac
import os
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from trainer.ranks.agreement import gather_lines, sum_over_ranks, together
from trainer.ranks.rank_info import RankInfo
from trainer.shared.errors import TrainError

_timeouts = [timedelta(minutes=10)]
_REASON = "orch/reason"
BY_ANOTHER = "another rank ended the run"
"""`orchestrator/remote/logs.py` does not treat such a rank as the first cause."""
_TIMED_OUT = ("Timed out waiting", "Timeout waiting", "timed out after")
"""Messages of Gloo, torch's store and NCCL."""
_partings: dict[str, Callable[[], object]] = {}


def join(info: RankInfo, backend: str, device: torch.device, timeout_s: float = 600.0) -> dist.ProcessGroup:
    """Returns the group for gradients. Raises TrainError. timeout_s: by default long enough to fetch a data set."""
    _timeouts[:] = [timedelta(seconds=timeout_s)]
    try:
        if info.master is None:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        else:
            dist.init_process_group(
                "gloo", store=_store(info), timeout=timeout(), rank=info.rank, world_size=info.world_size
            )
    except (RuntimeError, ValueError) as error:
        remedy = "check that the port is reachable and that every rank was started"
        if "already in use" in str(error):
            remedy = "give all ranks another MASTER_PORT"
        raise TrainError(
            f"{info.node}: rank {info.rank} cannot join {info.world_size} ranks at {info.master} "
            f"({_first_line(error)}): {remedy}"
        ) from error
    own_gpu = device.type == "cuda" and info.local_world_size <= torch.cuda.device_count()
    with together(info.node):
        if backend == "nccl" and device.type != "cuda":
            raise TrainError(f"backend nccl needs a GPU, rank {info.rank} is on {device}; use backend=gloo")
        if backend == "nccl" and not dist.is_nccl_available():
            raise TrainError(f"torch {torch.__version__} was built without NCCL; use backend=gloo")
    ranks_with_nccl = sum_over_ranks([float(own_gpu and dist.is_nccl_available())])[0]
    if backend == "nccl" or (backend == "auto" and ranks_with_nccl == info.world_size):
        return _nccl_group(info, device)
    return cast("dist.ProcessGroup", dist.group.WORLD)


def timeout() -> timedelta:
    """A rank's longest wait for another."""
    return _timeouts[0]


@contextlib.contextmanager
def for_all_ranks(info: RankInfo, doing: Callable[[], str]) -> Iterator[None]:
    """Passes one rank's TrainError on to all, which otherwise see only a closed connection. doing: for timeouts."""
    try:
        yield
    except TrainError as error:
        with contextlib.suppress(RuntimeError):  # the store ends with the rank that kept it
            store_of_all().set(_reason_key(), str(error)[:1000])
        raise
    except RuntimeError as error:
        if reason := _reason_of_others():
            raise TrainError(f"{BY_ANOTHER}: {reason}") from error
        if not any(words in str(error) for words in _TIMED_OUT):
            raise
        waited_s = timeout().total_seconds()
        line = (
            f"rank {info.rank} on {info.node} waited {waited_s:g} s for another rank in {doing()}: what one rank does "
            "by itself (an evaluation, an upload) has to take less than timeout_s; raise timeout_s, or do it on all "
            "ranks, like run.evaluate"
        )
        with contextlib.suppress(RuntimeError):
            store_of_all().set(_reason_key(), line)
        raise TrainError(line) from error


def _reason_of_others() -> str:
    with contextlib.suppress(RuntimeError, ValueError):
        store, key = store_of_all(), _reason_key()
        if store.check([key]):
            return store.get(key).decode(errors="replace")[:1000]
    return ""


def _reason_key() -> str:
    # Differs after each restart by torchrun, whose store keeps old keys.
    return f"{_REASON}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def _nccl_group(info: RankInfo, device: torch.device) -> dist.ProcessGroup:
    """Raises TrainError on every rank if NCCL's versions differ or its first sum hangs."""
    if wrong := unlike(gather_lines(f"{version()} {info.node}")):
        raise TrainError(wrong)
    group = cast("dist.ProcessGroup", dist.new_group(backend="nccl", timeout=timeout()))
    if info.world_size > 1:
        ended = first_sum(group, device, patience_s(info.world_size))
        if wrong := stuck(gather_lines(rank_line(ended, info.local_world_size, info.node))):
            raise TrainError(wrong)
    return group


def _store(info: RankInfo) -> dist.Store:
    # After torchrun restarts all ranks of a single host, its store still has the dead ranks' addresses.
    store, _, _ = next(dist.rendezvous("env://", info.rank, info.world_size, timeout=timeout()))
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(restarts, store) if info.local_world_size == info.world_size else store


def store_of_all() -> dist.Store:
    store: dist.Store = distributed_c10d._get_default_store()
    return store


def before_leaving(name: str, part: Callable[[], object]) -> None:
    """Registers a call for `leave`; replaces one of this name."""
    _partings[name] = part


def leave() -> None:
    """No rank closes its connections while another needs them."""
    dist.barrier()
    for part in _partings.values():
        part()
    dist.destroy_process_group()


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [error.__class__.__name__])[0][:300]


# NCCL before 2.23.4 does not compare versions. If it cannot reach a GPU's memory (behind an IOMMU) or a host (over a
# wrong interface), it waits as long as the process group allows: ten minutes by default. So we check before training.

FIRST_SUM_S = 60.0
A_RANK_S = 0.2
"""Large jobs take longer to connect."""


def version() -> str | None:
    """None if torch was built without NCCL."""
    return ".".join(str(part) for part in torch.cuda.nccl.version()) if dist.is_nccl_available() else None


def unlike(lines: Sequence[str]) -> str:
    """lines: version and node per rank. Returns a message if versions differ."""
    nodes = dict[str, list[str]]()
    for line in lines:
        found, _, node = line.partition(" ")
        nodes.setdefault(found, []).append(node)
    if len(nodes) < 2:
        return ""
    versions = "; ".join(f"{found} on {', '.join(dict.fromkeys(names))}" for found, names in nodes.items())
    return f"NCCL must be the same on all ranks, and is not ({versions}): install one build of torch everywhere"


def patience_s(ranks: int) -> float:
    return max(FIRST_SUM_S, A_RANK_S * ranks)


def first_sum(group: dist.ProcessGroup, device: torch.device, limit_s: float) -> bool:
    """Whether a sum of one element over all ranks ended in time. Raises torch's errors."""
    # In a thread, because a rank inside NCCL cannot watch the clock.
    failures: list[BaseException] = []

    def add_up() -> None:
        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)
            one = torch.ones(1, device=device)
            dist.all_reduce(one, group=group)
            one.item()  # waits for the device
        except BaseException as error:
            failures.append(error)

    adding = threading.Thread(target=add_up, daemon=True)
    adding.start()
    adding.join(limit_s)
    if failures:
        raise failures[0]
    return not adding.is_alive()


def rank_line(ended: bool, ranks_here: int, node: str) -> str:
    return f"{'ended' if ended else 'waits'} {ranks_here} {node}"


def stuck(lines: Sequence[str]) -> str:
    """lines: `rank_line` per rank. Returns a message if the sum did not end."""
    ranks = [line.split(" ", 2) for line in lines]
    waiting = [f"{rank} ({node})" for rank, (state, _, node) in enumerate(ranks) if state == "waits"]
    if not waiting:
        return ""
    shown = ", ".join(waiting[:8]) + (f" and {len(waiting) - 8} more" if len(waiting) > 8 else "")
    seen = f"a first sum of one number over NCCL did not end within {patience_s(len(ranks)):g} s on rank {shown}"
    if any(int(here) > 1 for _, here, _ in ranks):
        advice = "the GPUs of a host may not reach each other's memory (IOMMU, a split board): try NCCL_P2P_DISABLE=1"
    else:
        advice = (
            "the hosts may not reach each other over NCCL's interface: check NCCL_SOCKET_IFNAME, or NCCL_IB_DISABLE=1"
        )
    return f"{seen}; {advice} in the environment, and NCCL_DEBUG=INFO shows how far it came"


MOST_BYTES = 1 << 20
"""A rank's addresses take 136 bytes per rank."""
_POLL_S = 0.02


class LoopbackStore(ThreadingHTTPServer):
    """torch's store over HTTP on this host, for Horovod: PUT and GET of `/SECRET.../KEY`."""

    # Each rank runs a server for itself, and torch's store connects them, so no new port is open to the network. Values
    # are never run. Every user of the host can reach the loopback interface, so the path is a secret.

    daemon_threads = True

    def __init__(self, store: dist.Store) -> None:
        super().__init__(("127.0.0.1", 0), _Request)
        self.store, self.secret = store, secrets.token_urlsafe(24)

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    @property
    def address(self) -> str:
        """A client may append `:PORT`."""
        return f"127.0.0.1:{self.port}/{self.secret}"


@contextlib.contextmanager
def served(store: dist.Store) -> Iterator[LoopbackStore]:
    with LoopbackStore(store) as server:
        serving = threading.Thread(target=server.serve_forever, args=(_POLL_S,), daemon=True)
        serving.start()
        try:
            yield server
        finally:
            server.shutdown()
            serving.join()


class _Request(BaseHTTPRequestHandler):
    server: LoopbackStore
    timeout = 10

    def do_PUT(self) -> None:
        key, length = self._key(), self.headers.get("Content-Length", "")
        if not key or not length.isdecimal() or int(length) > MOST_BYTES:
            return self._answer(403)
        self.server.store.set(key, base64.b64encode(self.rfile.read(int(length))).decode())
        return self._answer(200)

    def do_GET(self) -> None:
        key = self._key()
        if not key:
            return self._answer(403)
        if not self.server.store.check([key]):
            return self._answer(404)
        return self._answer(200, base64.b64decode(self.server.store.get(key), validate=True))

    def do_DELETE(self) -> None:
        self._answer(200 if self._key() else 403)

    def _key(self) -> str:
        """ "" if the secret is wrong."""
        _, first, key = [*self.path.split("/", 2), "", ""][:3]
        secret = first.partition(":")[0]
        return key if hmac.compare_digest(secret.encode(), self.server.secret.encode()) else ""

    def _answer(self, status: int, body: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Silent: standard error belongs to the rank."""


# The device and threads that a rank computes with.


def choose_device(wanted: str, backend: str, info: RankInfo) -> torch.device:
    """Raises TrainError if a wanted GPU is missing."""
    is_first = wanted != "cpu" and backend == "gloo" and own_gpu_first(info.local_rank)
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus == 0:
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
        raise TrainError(f"{info.node}: no GPU is visible to torch {torch.__version__} ({built}); use device=cpu")
    if info.local_rank >= gpus and backend == "nccl":
        raise TrainError(
            f"{info.node}: local rank {info.local_rank} has no GPU of its own ({gpus} visible) and nccl cannot "
            "share one; start fewer ranks, or use backend=gloo"
        )
    device = torch.device("cuda", 0 if is_first else info.local_rank % gpus)
    torch.cuda.set_device(device)
    return device


def use_threads(info: RankInfo) -> None:
    # Ranks share the host's cores evenly.
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // info.local_world_size))


VISIBLE = "CUDA_VISIBLE_DEVICES"


@functools.cache  # a process has only one order
def own_gpu_first(local_rank: int) -> bool:
    """Moves this rank's GPU to the front of CUDA_VISIBLE_DEVICES, before CUDA reads it. False if impossible."""
    # Otherwise each rank takes some hundred MiB of the host's first GPU: Gloo's threads have no device set, so torch
    # switches to the rank's GPU and back when they free an event, and since CUDA 12 switching back creates a context on
    # the first GPU. NCCL has no such threads.
    gpus = os.environ.get(VISIBLE, "").split(",")
    if len(gpus) < 2 or torch.cuda.is_initialized():
        return False
    own = local_rank % len(gpus)
    os.environ[VISIBLE] = ",".join(gpus[own:] + gpus[:own])
    return True
