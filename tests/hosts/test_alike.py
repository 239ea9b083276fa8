"""Errors that many hosts share are said once, with the set of hosts."""

import errno

import pytest

from orchestrator.errors import AuthError, ConnectError, HostError, HostsError, StateError, UsageError
from orchestrator.hosts import Problem, host_set, together
from orchestrator.transport import Deadline, Hop, Peer, ssh_errors
from orchestrator.units import place
from orchestrator.views import console, job_table


def silent(node, host, port=22):
    error = ConnectError(node, f"{place(host, port)}: no SSH login within 10 s", "check that the host is up")
    error.at = host
    return error


def shown(error):
    return error.message, error.remedy


def test_fifty_silent_hosts_are_one_error():
    found = together(silent(f"gpu{n:02}", f"10.0.0.{n}") for n in range(1, 51))
    assert [shown(error) for error in found] == [
        ("50 hosts (gpu[01-50]): no SSH login within 10 s", "check that the host is up")
    ]


def test_what_differs_stays_apart_and_in_its_order():
    full = HostError("b", "its disk is full", "free space")
    found = together([silent("a", "10.0.0.1"), full, silent("c", "fd00::3", 2222), UsageError("x"), UsageError("x")])
    assert [shown(error) for error in found] == [
        ("2 hosts (a, c): no SSH login within 10 s", "check that the host is up"),
        ("b: its disk is full", "free space"),
        ("x", ""),
    ]
    fuller = [HostError("a", "3 GiB free", ""), HostError("b", "5 GiB free", "")]
    assert [error.message for error in together(fuller)] == ["a: 3 GiB free", "b: 5 GiB free"]


def test_a_remedy_for_many_hosts_names_the_first():
    def refused(node, host):
        error = AuthError(node, f"ubuntu@{host}:22 was refused; keys tried: none", f"`ssh ubuntu@{host}`, then {node}")
        error.at = host
        return error

    (found,) = together([refused("a", "10.0.0.1"), refused("b", "10.0.0.11")])
    assert shown(found) == (
        "2 hosts (a, b): ubuntu was refused; keys tried: none",
        "`ssh ubuntu@10.0.0.1`, then a; likewise for the others",
    )


def test_a_remembered_problem_is_alike_too():
    errors = [Problem(message=f"{host}:22: late", at=host).as_error(f"g{host}") for host in ("h1", "h2")]
    assert [error.message for error in together(errors)] == ["2 hosts (gh1, gh2): late"]


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["gpu2", "gpu10", "gpu1"], "gpu1, gpu2, gpu10"),
        (["n08", "n09", "n10", "n12"], "n[08-10], n12"),
        (["v100", "a2000"], "a2000, v100"),
        ([f"n{n}" for n in range(0, 60, 2)], ", ".join(f"n{n}" for n in range(0, 24, 2)) + " and 18 more"),
    ],
)
def test_a_set_of_hosts(names, words):
    assert host_set(names) == words


def test_the_console_prints_them_once(capsys):
    console.fail_each(HostsError([silent("a", "h1"), silent("b", "h2")]).errors)
    assert capsys.readouterr().err == (
        "error: 2 hosts (a, b): no SSH login within 10 s\n  try: check that the host is up\n"
    )
    console.print_answers({"a": silent("a", "h1"), "b": "fine", "c": silent("c", "h3")}, str)
    out, err = capsys.readouterr()
    assert out == "b: fine\n"
    assert err.startswith("error: 2 hosts (a, c): no SSH login")
    console.fail_each([StateError("one", "two")])
    assert capsys.readouterr().err == "error: one\n  try: two\n"


def hop(host):
    return Hop(Peer("v100", host), host, 22, "me", (), False, False)


def test_who_gave_no_answer_and_every_reason(capsys):
    full = HostError("v100", "its disk is full", "free space")
    job_table.warn_unheard({"job-1": {"a": silent("a", "h1"), "b": silent("b", "h2"), "v100": full}})
    reasons = "no SSH login within 10 s; its disk is full"
    assert f"note: job-1: no answer from a, b, v100 ({reasons}); its state" in capsys.readouterr().err


def test_a_connection_that_never_was_did_not_break():
    away = OSError(errno.ENETUNREACH, "Network is unreachable")
    made = ssh_errors.translate(hop("fd00::1"), away, is_up=False)
    assert made.message == "v100: [fd00::1]:22: cannot connect by SSH (Network is unreachable)"
    assert "the SSH connection broke" in ssh_errors.translate(hop("h"), away, is_up=True).message
    with (
        pytest.raises(ConnectError, match=r"h:22: cannot connect by SSH") as raised,
        ssh_errors.translated(hop("h"), "late", Deadline(5)),
    ):
        raise away
    assert raised.value.at == "h"


def test_an_ipv6_address_stands_in_brackets_before_a_port():
    assert place("fd00::1", 22) == "[fd00::1]:22"
    assert hop("fd00::1").login == "me@[fd00::1]:22"
    refused = ssh_errors.translate(hop("fd00::1"), ConnectionRefusedError(), is_up=False)
    assert refused.message == "v100: nothing listens at [fd00::1]:22"
