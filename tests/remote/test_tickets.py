"""Tickets of jobs that wait: real sockets and processes, also of another login."""

from __future__ import annotations

import getpass
import os
import select
import signal
import socket
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from orchestrator.errors import HostsError
from orchestrator.jobs import read_answer
from orchestrator.remote import gpu_queue
from orchestrator.remote.answer import Refused
from orchestrator.remote.gpu_queue import Ticket
from orchestrator.remote.layout import WorkFolder
from tests.support.local_job import gang

NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="acts as another user")


@pytest.fixture
def gpu():
    return f"GPU-{uuid.uuid4()}"


@contextmanager
def taken(job: str, number: int, *gpus: str, uid: int = os.getuid()):
    """A ticket of this login, held by a process of its own, as by a supervisor."""

    def held() -> object:
        holder = gpu_queue.hold(Ticket(job, number, gpus))

        def serve() -> None:
            while True:
                select.select([holder], [], [], 1.0)
                holder.turn()

        threading.Thread(target=serve, daemon=True).start()
        return holder

    with stranger(held, uid):
        yield


def those_for(gpu: str) -> list[Ticket]:
    return [ticket for ticket in gpu_queue.all_tickets()[0] if gpu in ticket.gpus]


@pytest.mark.parametrize("uid", [os.getuid(), pytest.param(NOBODY, marks=needs_root)])
def test_whoever_waits_is_seen_with_the_login_that_the_kernel_knows(gpu, uid):
    with taken("second", 2, gpu), taken("first", 1, gpu, uid=uid):
        first, second = those_for(gpu)
        assert (first.job, first.number, first.user) == ("first", 1, gpu_queue.user_name(uid))
        assert (second.job, second.user) == ("second", getpass.getuser())
    assert those_for(gpu) == []


@needs_root
def test_a_ticket_with_the_largest_number_makes_no_later_ticket_invalid(gpu):
    with taken("absurd", (1 << 53) - 1, gpu, uid=NOBODY):
        number = gpu_queue.number_after((ticket.number for ticket in those_for(gpu)), "low")
        with taken("later", number, gpu):
            assert [ticket.job for ticket in those_for(gpu)] == ["absurd", "later"]
            answer = read_answer("a", gpu_queue.look(WorkFolder(Path("/nowhere")), "later", [gpu]))
            assert [rival.job for rival in answer.ahead] == ["absurd"]


def test_what_answers_nonsense_under_a_tickets_name_is_no_ticket():
    ticket = '{"job": "x", "number": %s, "gpus": [], "since_s": %s}'
    figures = (("-1", "0"), ("1", "NaN"), ("1", "1e400"), ("1", "9" * 400), ("1", "-1"), ("1", '"7"'), ("NaN", "0"))
    for said in (b"", b"[]", b'{"job": 1}', b"\xff" * 100, *((ticket % each).encode() for each in figures)):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as squatter:
            name = f"\0orch-wait-{uuid.uuid4().hex}"
            squatter.bind(name)
            squatter.listen(8)
            if not (child := os.fork()):
                talk, _ = squatter.accept()
                talk.recv(100)
                talk.sendall(said)
                os._exit(0)
            found, _ = gpu_queue.all_tickets()
            os.waitpid(child, 0)
        assert [ticket for ticket in found if ticket.job == "x"] == []


def test_a_host_reports_which_job_has_a_gpu_and_for_how_long(tmp_path, gpu):
    with gang(tmp_path, "import time; time.sleep(600)", ranks=(1,)) as job:
        nodes = tuple(node.model_copy(update={"gpu_uuids": (gpu,)}) for node in job.plan.nodes)
        job.plan = job.plan.model_copy(update={"nodes": nodes})
        job.launch()
        (holder,) = gpu_queue.held(WorkFolder(tmp_path / "none"), "other", [gpu])
        assert (holder["job"], holder["user"]) == (job.plan.job, getpass.getuser()) and 0 <= holder["since_s"] < 600
        assert gpu_queue.held(WorkFolder(tmp_path / "none"), job.plan.job, [gpu]) == []


def test_a_host_refuses_the_start_that_is_not_its_turn(tmp_path, gpu):
    with gang(tmp_path, "print('ran')", ranks=(1,)) as job:
        nodes = tuple(node.model_copy(update={"gpu_uuids": (gpu,)}) for node in job.plan.nodes)
        job.plan = job.plan.model_copy(update={"nodes": nodes})
        with (
            taken("before", 1, gpu),
            pytest.raises(HostsError, match=f"GPU {gpu} is kept for {getpass.getuser()}'s job before, which waits"),
        ):
            job.launch()
        assert not job.folder("a").exists()
        with taken("before", 1, f"{gpu}-2"):
            job.launch()
            assert job.wait().state == "succeeded"


# ---- another login that means ill ----------------------------------------------------------------------------------


@contextmanager
def stranger(act: Callable[[], object], uid: int = NOBODY):
    """A process of another login, once `act` has returned there, until the block ends."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.setuid(uid)
            kept = act()
            os.write(write, b".")
            while kept is not None:
                signal.pause()
        finally:
            os._exit(1)
    os.close(write)
    try:
        assert os.read(read, 1) == b"."
        yield
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(read)


def bound(name: str, backlog: int | None = 128) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(name)
    if backlog is not None:
        listener.listen(backlog)
    return listener


def any_name() -> str:
    return f"\0orch-wait-{uuid.uuid4().hex}00000000"


def answers_with(name: str, first: bytes, then: bytes, every_s: float) -> Callable[[], object]:
    """Answers whoever connects, and goes on talking to them."""

    def serve() -> object:
        listener = bound(name)

        def talk() -> None:
            talks = list[socket.socket]()
            listener.settimeout(every_s)
            while True:
                with suppress(TimeoutError):
                    new = listener.accept()[0]
                    new.sendall(first)
                    talks.append(new)
                for one in talks:
                    with suppress(OSError):
                        one.sendall(then)

        thread = threading.Thread(target=talk, daemon=True)
        thread.start()
        return thread

    return serve


def full(name: str) -> socket.socket:
    listener = bound(name, 0)
    listener.setblocking(False)
    more = []
    with suppress(BlockingIOError):
        while True:
            one = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            one.setblocking(False)
            more.append(one)
            one.connect(name)
    globals()["kept"] = more
    return listener


ILL = {
    "one blank a second": lambda: answers_with(any_name(), b" ", b" ", 1.0)(),
    "a blank at once, for ever": lambda: answers_with(any_name(), b"", b" ", 0.01)(),
    "brackets within brackets": lambda: answers_with(any_name(), b"[" * 16_000, b"[" * 500, 0.01)(),
    "300 that say nothing": lambda: [bound(any_name()) for _ in range(300)],
    "300 that nobody listens at": lambda: [bound(any_name(), None) for _ in range(300)],
    "one whose line is full": lambda: full(any_name()),
}


@needs_root
@pytest.mark.parametrize("ill", ILL)
def test_no_socket_of_another_login_delays_or_stops_a_start(tmp_path, gpu, ill):
    with stranger(ILL[ill]), taken("own", 7, gpu):
        began = time.monotonic()
        assert [ticket.job for ticket in those_for(gpu)] == ["own"]
        with pytest.raises(Refused, match="own, which waits for it"):
            gpu_queue.refuse_before_turn("other", [gpu])
        assert time.monotonic() < began + 2 * gpu_queue.ANSWER_S + 60  # for ever if it is not cut off
    with stranger(ILL[ill]), gang(tmp_path, "print('ran')", ranks=(1,)) as job:
        nodes = tuple(node.model_copy(update={"gpu_uuids": (gpu,)}) for node in job.plan.nodes)
        job.plan = job.plan.model_copy(update={"nodes": nodes})
        job.launch()
        assert job.wait().state == "succeeded"


@needs_root
def test_a_login_whose_socket_says_nothing_is_named(gpu, capfd):
    with stranger(lambda: bound(any_name())):
        assert gpu_queue.act({"workdir": "/nowhere", "gpus": [gpu]})["silent"] == [gpu_queue.user_name(NOBODY)]
        gpu_queue.refuse_before_turn("j", [gpu])
    assert gpu_queue.user_name(NOBODY) in capfd.readouterr().err


def connected(count: int) -> list[socket.socket]:
    """Connections to every ticket there is, without a word."""
    found = []
    for _ in range(count):
        for name in gpu_queue.all_names():
            one = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            one.setblocking(False)
            with suppress(OSError):
                one.connect(name)
            found.append(one)
    return found


@needs_root
def test_connections_of_another_login_do_not_hide_a_ticket(gpu):
    with taken("mine", 1, gpu), stranger(lambda: connected(600)):
        for _ in range(5):
            assert [ticket.job for ticket in those_for(gpu)] == ["mine"]
