"""`--hosts MIN:MAX`: what is a range, and which of the hosts that are there it takes."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.errors import ConnectError, HostError, TooFewError, UsageError
from orchestrator.planning import (
    HostRange,
    Worth,
    check_range,
    choice_notes,
    choice_of,
    parse_hosts,
    ranked,
    run_line,
    spec_of,
    those_there,
)
from tests.support.plans import a2000_v100

NAMES = [f"gpu{number:02d}" for number in range(1, 9)]


def off(name: str) -> HostError:
    error = ConnectError(name, f"10.0.0.{name[-1]}:22: no SSH login within 10 s", "check that it is up")
    error.at = f"10.0.0.{name[-1]}"
    return error


@pytest.mark.parametrize(
    ("text", "expected"), [("2:4", (2, 4)), ("3", (3, 3)), ("1:1", (1, 1)), ("01:99999", (1, 99999))]
)
def test_a_range_or_one_number(text: str, expected: tuple[int, int]) -> None:
    assert parse_hosts(text) == HostRange(*expected)


@pytest.mark.parametrize(
    "text", ["", "0", "0:2", "3:2", "a:b", "2:", ":2", "-1:2", "2:3:4", "2 : 3", "1.5", "1:999999", "²:³", "٣", "2\n"]
)
def test_what_is_no_range_is_refused_with_the_form(text: str) -> None:
    with pytest.raises(UsageError, match="expected MIN:MAX or N, numbers of hosts, 1 <= MIN <= MAX"):
        parse_hosts(text)


def test_more_than_there_are_cannot_be_wanted() -> None:
    check_range(HostRange(8, 20), NAMES)
    with pytest.raises(UsageError, match="--hosts 9:9: 8 hosts to choose from, and 9 are needed: --hosts 8:9, or name"):
        check_range(HostRange(9, 9), NAMES)
    with pytest.raises(UsageError, match="0 hosts to choose from, and 1 is needed: name more"):
        check_range(HostRange(1, 2), [])


def test_with_too_few_each_that_is_missing_is_named_with_its_reason() -> None:
    away = {name: off(name) for name in NAMES[:5]} | {"gpu07": HostError("gpu07", "is released", "restore it")}
    with pytest.raises(TooFewError) as found:
        those_there(HostRange(4, 6), NAMES, away)
    assert found.value.exit_code == 3
    assert found.value.message.splitlines() == [
        "--hosts 4:6: 2 of 8 hosts can take part, and 4 are needed; nothing was started",
        "5 hosts (gpu[01-05]): no SSH login within 10 s: check that it is up",
        "gpu07: is released: restore it",
    ]
    assert "--hosts 2:6" in found.value.remedy


def test_of_one_host_is_spoken_as_of_one() -> None:
    with pytest.raises(TooFewError, match="0 of 1 host can take part, and 1 is needed"):
        those_there(HostRange(1, 2), NAMES[:1], {NAMES[0]: off(NAMES[0])})


NUMBERS = st.integers(1, len(NAMES))


@given(
    least=NUMBERS,
    more=NUMBERS,
    away=st.sets(st.sampled_from(NAMES)),
    figures=st.dictionaries(st.sampled_from(NAMES), st.sampled_from([0.0, 1.0, 2.5])),
    pin=st.none() | st.sampled_from(NAMES),
)
def test_the_best_are_taken_and_every_other_host_is_accounted_for(
    least: int, more: int, away: set[str], figures: dict[str, float], pin: str | None
) -> None:
    wanted, gone = HostRange(least, least + more), {name: off(name) for name in away}
    if len(NAMES) - len(away) < least:
        with pytest.raises(TooFewError):
            those_there(wanted, NAMES, gone)
        return
    there = those_there(wanted, NAMES, gone)
    best = ranked(there, Worth(figures, "the best"), pin)
    taken, spares = best[: wanted.max_hosts], best[wanted.max_hosts :]
    assert least <= len(taken) <= wanted.max_hosts and not away & {*taken}
    assert pin is None or pin in away or pin == best[0]
    worth = [figures.get(name, 0.0) for name in best if name != pin]
    assert worth == sorted(worth, reverse=True)
    for one, other in itertools.pairwise(best):  # the inventory's order breaks ties
        if pin not in (one, other) and figures.get(one, 0.0) == figures.get(other, 0.0):
            assert one < other
    choice = choice_of(wanted, gone, spares, NAMES)
    assert sorted([*taken, *choice.spares, *(each.node for each in choice.left_out)]) == NAMES
    assert all(each.reason == f"10.0.0.{each.node[-1]}:22: no SSH login within 10 s" for each in choice.left_out)
    assert len(choice_notes(choice, gone, Worth(figures, "the best"))) <= 3


def test_notes_name_who_is_left_out_and_why_others_are_spare() -> None:
    away = {name: off(name) for name in NAMES[2:6]}
    choice = choice_of(HostRange(1, 2), away, ["gpu08", "gpu01"], NAMES)
    assert choice_notes(choice, away, Worth({}, "the fastest alone by profile")) == (
        "left out: 4 hosts (gpu[03-06]): no SSH login within 10 s",
        "spare: gpu08, gpu01; the job takes 2 hosts at most, the fastest alone by profile",
    )
    assert choice_notes(choice, {**away}, None)[1:] == ()


def test_a_job_is_repeated_with_the_same_choice_among_the_same_hosts() -> None:
    choice = choice_of(HostRange(1, 3), {}, ["a16"], ["a16", "a2000", "v100", "k80"])
    plan = a2000_v100().model_copy(update={"hosts": choice})
    line = run_line(plan)
    assert "--nodes a16,a2000,v100,k80 --hosts 1:3" in line
    job = spec_of(plan)
    assert (job.nodes, job.hosts) == (["a16", "a2000", "v100", "k80"], "1:3")
    assert run_line(plan, ["v100"]).endswith("--nodes v100")  # these and no others


def test_a_job_whose_settings_name_hosts_is_repeated_on_these() -> None:
    choice = choice_of(HostRange(1, 3), {}, ["a16"], ["a16", "a2000", "v100"])
    plan = a2000_v100()
    settings = {**plan.settings, "strategy": "pipeline", "stages": "v100:0-31,a2000:32-51"}
    plan = plan.model_copy(update={"hosts": choice, "settings": settings})
    assert run_line(plan).endswith(f"--nodes {','.join(node.name for node in plan.nodes)}")
    assert spec_of(plan).hosts is None
