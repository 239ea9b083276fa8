import pytest

from orchestrator import errors
from orchestrator.errors import ConnectError, HostsError, InventoryError, Mistake, OrchError, UsageError

EXIT_CODES = {
    "OrchError": 1,
    "UsageError": 2,
    "InventoryError": 2,
    "HostError": 3,
    "ConnectError": 3,
    "LateError": 3,
    "HostKeyError": 3,
    "AuthError": 3,
    "ProbeError": 3,
    "HostsError": 3,
    "StateError": 1,
    "RefusedError": 3,
    "TooFewError": 3,
    "UnlikeError": 3,
    "NoJobError": 2,
}


def test_every_error_has_the_exit_code_that_the_manual_gives() -> None:
    found = {
        name: value.exit_code
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, OrchError)
    }
    assert found == EXIT_CODES


@pytest.mark.parametrize("name", EXIT_CODES)
def test_the_modules_drawing_shows_every_error(name: str) -> None:
    assert name in (errors.__doc__ or "")


def test_an_error_reads_as_what_is_wrong_and_what_to_try() -> None:
    assert str(UsageError("no job called x", "see `orch jobs`")) == "no job called x: see `orch jobs`"
    assert str(UsageError("no job called x")) == "no job called x"


def test_a_host_error_begins_with_the_node() -> None:
    error = ConnectError("v100", "no answer within 10 s", "is it on?")
    assert (error.node, str(error)) == ("v100", "v100: no answer within 10 s: is it on?")


def test_several_hosts_errors_stand_one_a_line() -> None:
    both = HostsError([ConnectError("a", "gone"), ConnectError("b", "gone too")])
    assert str(both).splitlines() == ["a: gone", "b: gone too"]
    assert [error.node for error in both.errors] == ["a", "b"]


def test_mistakes_stand_one_a_line_with_their_place() -> None:
    error = InventoryError([Mistake("x.yaml", 3, "bad port"), Mistake("x.yaml", 0, "is empty")])
    assert str(error).splitlines() == ["x.yaml:3: bad port", "x.yaml: is empty"]
