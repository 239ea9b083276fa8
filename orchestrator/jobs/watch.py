"""Frames from all hosts of a job: one stream per host, reconnected as often as necessary."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any

from orchestrator.errors import ConnectError, HostError
from orchestrator.jobs.frames import NODE_FILES, RANK_FILES, Beat, End, Frame, Held, read_frames
from orchestrator.planning.launch_plan import LaunchPlan
from orchestrator.transport import ask
from orchestrator.transport.ask import ConnectedHost

RETRY_S = 1.0
ALL_FILES = (*RANK_FILES, *NODE_FILES)
WAITING_FRAMES = 64
"""At most 256 KiB each. When full, the connections wait, never the job."""


def watch(
    plan: LaunchPlan,
    hosts: Mapping[str, ConnectedHost],
    *,
    offsets: Mapping[str, Mapping[str, Held]],
    follow: bool,
    limit_bytes: int | None = None,
    files: Sequence[str] = ALL_FILES,
    times: bool = False,
    reconnect: Callable[[str], ConnectedHost] | None = None,
) -> Generator[tuple[str, Frame | HostError], None, None]:
    """Yields (node, frame), or (node, error) for a broken connection.

    offsets: per node and file, the part that is here. files: kinds, like `metrics.jsonl`. times: pieces of logs carry
    the time of printing. reconnect: dials a broken connection until it works; no byte is lost or repeated.
    Yields ("", Beat) after a second without frames.
    """
    wanted = {"follow": follow, "files": list(files), "limit_bytes": limit_bytes, "times": times}
    return _Watch(plan, hosts, wanted, reconnect).items(offsets)


def watch_records(plan: LaunchPlan, hosts: Mapping[str, ConnectedHost]) -> Iterator[tuple[str, Frame | HostError]]:
    """Only the supervisors' records; broken connections are not dialled again."""
    wanted = {"follow": True, "files": [], "limit_bytes": None, "times": False}
    return _Watch(plan, hosts, wanted, None).items({})


class _Watch:
    """A thread per host, one queue. wanted: of the request to `remote/reader.py`."""

    def __init__(
        self,
        plan: LaunchPlan,
        hosts: Mapping[str, ConnectedHost],
        wanted: Mapping[str, Any],
        reconnect: Callable[[str], ConnectedHost] | None,
    ) -> None:
        self._plan, self._hosts, self._wanted, self._reconnect = plan, hosts, wanted, reconnect
        self._frames: queue.Queue[tuple[str, Frame | HostError | BaseException | None]] = queue.Queue(WAITING_FRAMES)
        self._leaving = threading.Event()

    def items(self, offsets: Mapping[str, Mapping[str, Held]]) -> Generator[tuple[str, Frame | HostError], None, None]:
        names = [node.name for node in self._plan.nodes if node.name in self._hosts]
        for name in names:
            words = (name, dict(offsets.get(name, {})))
            threading.Thread(target=self._listen, args=words, daemon=True, name=f"watch-{name}").start()
        open_hosts = len(names)
        try:
            while open_hosts:
                try:
                    name, item = self._frames.get(timeout=1.0)
                except queue.Empty:
                    yield "", Beat()  # lets the reader check its own deadlines
                    continue
                if item is None:
                    open_hosts -= 1
                elif isinstance(item, HostError) or not isinstance(item, BaseException):
                    yield name, item
                else:
                    raise item
        finally:
            self._leaving.set()

    def _listen(self, name: str, held: dict[str, Held]) -> None:
        try:
            self._to_its_end(self._hosts[name], held)
        except BaseException as error:  # a bug of ours: the main thread has to raise it
            self._put(name, error)
        self._put(name, None)

    def _put(self, name: str, item: Frame | HostError | BaseException | None) -> None:
        while not self._leaving.is_set():
            try:
                self._frames.put((name, item), timeout=1.0)
                return
            except queue.Full:
                continue

    def _to_its_end(self, host: ConnectedHost, held: dict[str, Held]) -> None:
        """Updates `held`. Without `follow` a broken connection is dialled again while it brings new bytes: after
        minutes hosts hang up on a slow reader, like a pager (`remote/watchdog.py`).
        """
        name, follow = host.node, self._wanted["follow"]
        while not self._leaving.is_set():
            before = _size(held)
            try:
                return self._read(host, held)
            except HostError as error:
                may_pass = self._reconnect is not None and isinstance(error, ConnectError)
                is_worth_another = may_pass and (follow or _size(held) > before)
                if follow or not is_worth_another:
                    self._put(name, error)
                if not is_worth_another:
                    return None
            try:
                host = self._dial(host)
            except HostError as error:
                return self._put(name, error)
        return None

    def _read(self, host: ConnectedHost, held: dict[str, Held]) -> None:
        """Raises HostError if the connection breaks before the last frame."""
        node = self._plan.node(host.node)
        marker, limit = ask.new_marker(), self._wanted["limit_bytes"]
        offsets = {file: have.request() for file, have in held.items()}
        ranks = list(node.rank_numbers)
        request = {"workdir": node.workdir, "job": self._plan.job, "ranks": ranks, **self._wanted, "offsets": offsets}
        with ask.open_stream(host, "reader", request, marker) as chunks:
            frames = read_frames(host.node, chunks, frozenset(ranks), held, marker=marker.encode(), limit_bytes=limit)
            for frame in frames:
                if self._leaving.is_set():
                    return
                self._put(host.node, frame)
                if isinstance(frame, End):
                    return
        raise ConnectError(host.node, "its answer ended too early")

    def _dial(self, host: ConnectedHost) -> ConnectedHost:
        """Raises HostError if a retry cannot help: a changed host key, a refused login."""
        assert self._reconnect  # noqa: S101 - for the type checker
        if not self._wanted["follow"]:
            return self._reconnect(host.node)
        while not self._leaving.wait(RETRY_S):
            try:
                return self._reconnect(host.node)
            except ConnectError:
                continue
        return host


def _size(held: Mapping[str, Held]) -> int:
    return sum(have.offset for have in held.values())
