"""Tickets of jobs that wait: real sockets and processes, also of another login."""

from __future__ import annotations

import getpass
import json
import os
import signal
import socket
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import contextmanager, suppress
from multiprocessing.sharedctypes import RawValue
from types import SimpleNamespace

import pytest

from orchestrator.errors import HostsError
from orchestrator.jobs import read_answer
from orchestrator.jobs.queue_place import number_after
from orchestrator.remote import gpu_queue
from orchestrator.remote.answer import Refused
from orchestrator.remote.gpu_queue import Ticket
from orchestrator.remote.layout import WorkFolder
from tests.support.local_job import gang

NOBODY = 65534
OWNER = "5f0c" * 8
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="acts as another user")


@pytest.fixture
def gpu():
    return f"GPU-{uuid.uuid4()}"


@contextmanager
def taken(job: str, number: int, *gpus: str, uid: int = os.getuid()):
    """A ticket of this login; taken in a child, as a host's program does. Afterwards its name is free again."""
    names_before = bound_names(job)
    child = os.fork()
    if not child:
        try:
            os.setuid(uid)
            gpu_queue.take(Ticket(job, number, gpus), "a", OWNER)
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    name = bound_names(job) - names_before
    try:
        yield
    finally:
        ask_as(uid, job, "leave")
        until = time.monotonic() + 10
        while name & bound_names(job) and time.monotonic() < until:
            time.sleep(0.01)


def bound_names(job: str) -> set[str]:
    return {*gpu_queue.names_of(job, "a", OWNER)} & {*gpu_queue.all_names()}


def ask_as(uid: int, job: str, do: str) -> bool:
    """Whether the holder obeyed this login."""
    child = os.fork()
    if not child:
        os.setuid(uid)
        os._exit(0 if gpu_queue.send(job, "a", {"do": do, "owner": OWNER}) else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


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
def test_another_login_or_another_home_can_neither_renew_nor_cancel_a_ticket(gpu):
    def leave_by_hand():
        (name,) = bound_names("mine")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as talk:
            talk.connect(name)
            talk.sendall(json.dumps({"do": "leave", "owner": OWNER}).encode())
            assert json.loads(talk.recv(4096))["accepted"] is False
        return True

    with taken("mine", 1, gpu):
        assert not ask_as(NOBODY, "mine", "leave")
        with stranger(leave_by_hand):
            pass
        assert gpu_queue.send("mine", "a", {"do": "leave", "owner": "another"}) is None
        assert [ticket.job for ticket in those_for(gpu)] == ["mine"]
    assert those_for(gpu) == []


@pytest.fixture
def clock(monkeypatch):
    """Its `value` in seconds is added to the clock of this process and of the holders that it forks."""
    added_s = RawValue("d", 0.0)
    monkeypatch.setattr(gpu_queue, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + added_s.value))
    return added_s


def test_a_ticket_that_nobody_renews_is_gone_after_its_lease(gpu, clock):
    with taken("dead", 1, gpu):
        clock.value = gpu_queue.LEASE_S / 2
        assert [ticket.job for ticket in those_for(gpu)] == ["dead"]
        clock.value = gpu_queue.LEASE_S
        began = time.monotonic()
        while those_for(gpu):
            assert time.monotonic() < began + 60


def test_a_renewed_ticket_stays_where_it_is(gpu, clock):
    with taken("kept", 1, gpu), taken("dead", 2, gpu):
        assert gpu_queue.send("kept", "a", {"do": "renew", "owner": OWNER, "lease_s": 600})
        assert gpu_queue.send("other", "a", {"do": "renew", "owner": OWNER}) is None
        clock.value = gpu_queue.LEASE_S
        while len(found := those_for(gpu)) == 2:
            time.sleep(0.05)
        assert [ticket.job for ticket in found] == ["kept"]


def test_a_second_ticket_of_a_job_is_refused(gpu):
    with taken("once", 1, gpu), pytest.raises(Refused, match="once waits already"):
        gpu_queue.take(Ticket("once", 2, (gpu,)), "a", OWNER)


def test_a_ticket_that_is_asked_for_again_is_the_same_one(gpu):
    """Its first answer was lost on the way."""
    asked = {"action": "take", "workdir": "/nowhere", "node": "a", "job": "again", "owner": OWNER, "gpus": [gpu]}
    with taken("again", 3, gpu):
        answer = gpu_queue.act({**asked, "number": 3})
        assert [row["number"] for row in answer["tickets"]] == [3] and answer["ahead"] == answer["held"] == []
        with pytest.raises(Refused):
            gpu_queue.act({**asked, "number": 4})


@needs_root
def test_a_ticket_with_the_largest_number_makes_no_later_ticket_invalid(gpu):
    with taken("absurd", (1 << 53) - 1, gpu, uid=NOBODY):
        number = number_after((ticket.number for ticket in those_for(gpu)), "low")
        with taken("later", number, gpu):
            assert [ticket.job for ticket in those_for(gpu)] == ["absurd", "later"]
            asked = {"action": "look", "workdir": "/nowhere", "node": "a", "job": "later", "gpus": [gpu]}
            answer = read_answer("a", gpu_queue.act(asked))
            assert [rival.job for rival in answer.ahead] == ["absurd"]


def test_what_answers_nonsense_under_a_tickets_name_is_no_ticket():
    for said in (b"", b"[]", b'{"job": 1}', b"\xff" * 100, b'{"job": "x", "number": -1, "gpus": [], "since_s": 0}'):
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


def test_a_cancelled_ticket_is_in_nobodys_way_and_its_controller_hears_of_it(gpu):
    with taken("given-up", 1, gpu):
        gpu_queue.send("given-up", "a", {"do": "cancel", "owner": OWNER})
        assert those_for(gpu) == []
        answer = gpu_queue.send("given-up", "a", {"do": "renew", "owner": OWNER})
        assert answer and answer["cancelled"] is True


def test_a_host_reports_which_job_has_a_gpu_and_for_how_long(tmp_path, gpu):
    with gang(tmp_path, "import time; time.sleep(600)", ranks=(1,)) as job:
        nodes = tuple(node.model_copy(update={"gpu_uuids": (gpu,)}) for node in job.plan.nodes)
        job.plan = job.plan.model_copy(update={"nodes": nodes})
        job.launch()
        (holder,) = gpu_queue.held(WorkFolder(tmp_path / "none"), "other", [gpu])
        assert (holder["job"], holder["user"]) == (job.plan.job, getpass.getuser()) and 0 <= holder["since_s"] < 600
        assert gpu_queue.held(WorkFolder(tmp_path / "none"), job.plan.job, [gpu]) == []


def test_a_host_refuses_the_start_that_is_not_its_turn(tmp_path, gpu):
    with gang(tmp_path, "print('ran')", ranks=(1,)) as job, taken("before", 1, gpu):
        nodes = tuple(node.model_copy(update={"gpu_uuids": (gpu,)}) for node in job.plan.nodes)
        job.plan = job.plan.model_copy(update={"nodes": nodes})
        with pytest.raises(HostsError, match=f"GPU {gpu} is kept for {getpass.getuser()}'s job before, which waits"):
            job.launch()
        assert not job.folder("a").exists()
        with taken(job.plan.job, 2, gpu), pytest.raises(HostsError, match="is kept for"):
            job.launch()
        ask_as(os.getuid(), "before", "leave")
        with taken(job.plan.job, 3, gpu), taken("later", 4, gpu):
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
        asked = {"action": "look", "workdir": "/nowhere", "node": "a", "job": "j", "owner": OWNER, "gpus": [gpu]}
        assert gpu_queue.act(asked)["silent"] == [gpu_queue.user_name(NOBODY)]
        gpu_queue.refuse_before_turn("j", [gpu])
    assert gpu_queue.user_name(NOBODY) in capfd.readouterr().err


def connected(job: str, count: int) -> list[socket.socket]:
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
def test_connections_of_another_login_do_not_keep_a_controller_from_its_ticket(gpu):
    with taken("mine", 1, gpu), stranger(lambda: connected("mine", 600)):
        for _ in range(5):
            assert gpu_queue.send("mine", "a", {"do": "renew", "owner": OWNER})
        assert [ticket.job for ticket in those_for(gpu)] == ["mine"]
        asked = {"action": "take", "workdir": "/nowhere", "node": "a", "job": "mine", "owner": OWNER, "gpus": [gpu]}
        assert [row["job"] for row in gpu_queue.act({**asked, "number": 1})["tickets"]] == ["mine"]


@needs_root
@pytest.mark.parametrize("squat", [bound, lambda name: bound(name, None), full, None])
def test_another_login_with_the_name_of_a_ticket_is_not_believed(gpu, squat):
    lies = json.dumps({"accepted": True, "cancelled": True, "job": "mine", "number": 1, "gpus": [gpu], "since_s": 0})
    (name, *_) = gpu_queue.names_of("mine", "a", OWNER)
    squats = (lambda: squat(name)) if squat else answers_with(name, lies.encode(), b"", 0.01)
    with stranger(squats):
        if squat is full:  # nobody can see whose it is
            with pytest.raises(Refused, match="gives no answer"):
                gpu_queue.send("mine", "a", {"do": "renew", "owner": OWNER})
        else:
            assert gpu_queue.send("mine", "a", {"do": "renew", "owner": OWNER}) is None
        with taken("mine", 1, gpu):
            heard = gpu_queue.send("mine", "a", {"do": "renew", "owner": OWNER})
            assert heard and heard["cancelled"] is False


@needs_root
def test_a_login_that_has_all_names_of_a_ticket_is_named(gpu):
    job = f"mine-{gpu[-12:]}"  # its names are of this test: a holder of the one before may still be at its end
    taken_names = gpu_queue.names_of(job, "a", OWNER)
    named = pytest.raises(Refused, match=f"{gpu_queue.user_name(NOBODY)} took the names of {job}'s tickets")
    with stranger(lambda: [bound(name) for name in taken_names]), named:
        gpu_queue.take(Ticket(job, 1, (gpu,)), "a", OWNER)
