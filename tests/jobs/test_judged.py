"""Whose the cause of a failed job was: decided from its recorded first cause alone."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.jobs import FirstFailure, judge
from orchestrator.remote import attempts, messages
from tests.support.job_states import known

SILENT = "no word for 20 s: host down, frozen or cut off"
CAUSES = [
    # kind, what is known more of it                                                         whose, without which host
    ("lost", {"reason": SILENT}, "hosts", "b"),
    ("lost", {"reason": "its supervisor is gone: killed, or the host went down"}, "hosts", "b"),
    ("lost", {"reason": "b and c cannot reach each other (no connection), though both reach the master"}, "hosts", "b"),
    ("network", {"reason": "a cannot reach b at 10.0.0.2 port 4711"}, "hosts", "b"),
    ("supervisor", {"reason": "the supervisor was killed by SIGKILL", "signal": "SIGKILL"}, "hosts", "b"),
    ("supervisor", {"reason": "the supervisor was asked to end (SIGTERM, or its keeper died)"}, "hosts", "b"),
    ("port", {"reason": "no port to meet at: Address already in use"}, "hosts", None),
    ("rank", {"signal": "SIGKILL", "reason": "rank 1 was killed by SIGKILL"}, "hosts", None),
    ("rank", {"signal": "SIGTERM"}, "hosts", None),
    ("rank", {"exit_code": 137}, "hosts", None),
    ("rank", {"exit_code": 1, "log_line": "DataLoader worker (pid 7) is killed by signal: Killed."}, "hosts", None),
    ("rank", {"exit_code": 1, "secondary": True, "log_line": "RuntimeError: Connection closed by peer"}, "hosts", None),
    ("rank", {"signal": "SIGABRT", "secondary": True, "log_line": "ncclRemoteError"}, "hosts", None),
    ("rank", {"signal": "SIGABRT", "secondary": True, "log_line": "Watchdog caught collective"}, "script", None),
    ("rank", {"exit_code": 1, "secondary": True, "log_line": "Timed out waiting 1800000ms"}, "script", None),
    ("rank", {"exit_code": 1, "log_line": "CUDA error: uncorrectable ECC error encountered"}, "hosts", "b"),
    ("rank", {"exit_code": 1, "log_line": "GPU 0 has fallen off the bus"}, "hosts", "b"),
    ("rank", {"exit_code": 1, "reason": "rank 1 did not start: Resource temporarily unavailable"}, "hosts", None),
    ("torchrun", {"reason": "torchrun did not start: Cannot allocate memory"}, "hosts", None),
    ("torchrun", {"signal": "SIGKILL", "reason": "torchrun was killed by SIGKILL"}, "hosts", None),
    ("prepare", {"signal": "SIGKILL", "reason": "the `prepare` command was killed by SIGKILL"}, "hosts", None),
    ("rank", {"exit_code": 1, "log_line": "ValueError: lr must be positive"}, "script", None),
    ("rank", {"exit_code": 2, "log_line": "train.py: error: unrecognized arguments: --lrr"}, "script", None),
    ("rank", {"exit_code": 7}, "script", None),
    ("rank", {"exit_code": 1, "log_line": "torch.cuda.OutOfMemoryError: CUDA out of memory"}, "script", None),
    ("rank", {"exit_code": 1, "log_line": "OSError: [Errno 28] No space left on device"}, "script", None),
    ("rank", {"signal": "SIGSEGV"}, "script", None),
    ("rank", {"signal": "SIGABRT"}, "script", None),
    ("torchrun", {"exit_code": 1, "reason": "torchrun exited 1"}, "script", None),
    ("prepare", {"exit_code": 3, "reason": "the `prepare` command exited 3"}, "script", None),
    ("something newer", {"exit_code": 1}, "script", None),
    ("time", {"reason": "the time limit of 90 s is over"}, "person", None),
    ("folder", {"reason": "the job's folder was removed (~/.orch/jobs/j)"}, "person", None),
]  # fmt: skip


@pytest.mark.parametrize("most", [2, 30])
def test_attempts_without_a_controller_end(most: int) -> None:
    lost, earlier = messages.failure("lost", "b", SILENT), list[messages.Earlier]()
    while attempts.goes_on({"retries": {"most": most, "any_cause": False}}, earlier, lost) and len(earlier) < 2 * most:
        earlier = attempts.with_failed(earlier, lost)
    assert len(earlier) == most - 1


@pytest.mark.parametrize(("kind", "more", "whose", "without"), CAUSES)
def test_whose_the_first_cause_was(kind: str, more: dict[str, object], whose: str, without: str | None) -> None:
    cause: Any = {**messages.failure(kind, "b", "rank 1 exited"), **more}
    failure = FirstFailure.model_validate(attempts.judged(cause))
    found = judge(known("failed", first_failure=failure))
    assert found and (found.whose, found.without) == (whose, without)
    assert found.why == f"b: {failure.reason}"


@pytest.mark.parametrize(
    ("reason", "whose"),
    [("no supervisor and no final record on any host", "hosts"), ("its files are gone from every host", "person")],
)
def test_of_a_lost_job_all_hosts_went_down_or_somebody_has_removed_it(reason: str, whose: str) -> None:
    found = judge(known("lost", first_failure=FirstFailure(node="a", reason=reason)))
    assert found and (found.whose, found.without) == (whose, None)


@pytest.mark.parametrize("state", ["starting", "running", "succeeded", "cancelled"])
def test_what_did_not_fail_is_not_tried_again(state: str) -> None:
    assert judge(known(state, first_failure=FirstFailure(node="a", kind="lost", reason=SILENT))) is None


def test_two_attempts_have_two_tokens_and_the_pause_doubles_up_to_six_minutes() -> None:
    token = bytes(32)
    assert attempts.token_of(token, 1) == token
    assert len({attempts.token_of(token, number) for number in range(1, 5)}) == 4
    node = {"retries": {"most": 9, "any_cause": False, "wait_s": 10.0}}
    failed = [{"why": "", "ended": 0.0}]
    assert [attempts.pause_s(node, failed * count) for count in (0, 1, 2, 8)] == [0.0, 10.0, 20.0, 360.0]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "any_cause", "earlier", "goes_on"),
    [("lost", False, 0, True), ("lost", False, 1, True), ("lost", False, 2, False), ("torchrun", False, 0, False),
     ("torchrun", True, 0, True), ("time", True, 0, False), ("folder", True, 0, False)],
)  # fmt: skip
def test_the_hosts_go_on_by_the_same_rule(kind: str, any_cause: bool, earlier: int, goes_on: bool) -> None:
    node = {"retries": {"most": 3, "any_cause": any_cause, "wait_s": 10.0}}
    cause, failed = messages.failure(kind, "b", "as it is"), [messages.Earlier(why="", ended=0.0)]
    assert attempts.goes_on(node, failed * earlier, cause) is goes_on
    assert not attempts.goes_on({}, [], cause) and not attempts.goes_on(node, [], None)


def test_a_failure_without_a_known_cause_is_not_taken_for_the_hosts() -> None:
    found = judge(known("failed"))
    assert found and found.whose == "script"
