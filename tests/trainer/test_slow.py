"""The setting `slow`: one form, everything else refused in one sentence."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.shared import PLACES, SettingsError, Slow, parse_settings, parse_slow


def test_an_empty_text_is_no_bottleneck() -> None:
    assert parse_slow("") is None
    assert parse_settings("mnist_lenet", {}).bottleneck is None


def test_the_parts_are_read_in_any_order() -> None:
    expected = Slow(rank=1, at="sync", ms=50.0)
    assert parse_slow("rank:1,at:sync,ms:50") == parse_slow("ms:50,rank:1,at:sync") == expected
    assert parse_settings("mnist_lenet", {"slow": "rank:1,at:sync,ms:50"}).bottleneck == expected


@given(st.integers(0, 10**6), st.sampled_from(PLACES), st.floats(0, 3_600_000, exclude_min=True))
def test_what_is_written_is_read_back(rank: int, at: str, ms: float) -> None:
    assert parse_slow(f"rank:{rank},at:{at},ms:{ms!r}") == Slow(rank, at, ms)


BAD = ["1", "rank:1", "rank:1,at:start", "rank:1,at:middle,ms:5", "rank:x,at:start,ms:5", "rank:1,at:start,ms:fast"]
BAD += ["rank:-1,at:start,ms:5", "rank:1.5,at:start,ms:5", "rank:1,at:start,ms:0", "rank:1,at:start,ms:-5"]
BAD += ["rank:1,at:start,ms:nan", "rank:1,at:start,ms:inf", "rank:1,at:start,ms:3600001", "rank:1,at:start,ms:5,"]
BAD += ["rank:1,rank:2,at:start,ms:5", "rank:1,at:start,ms:5,at:sync", "rank=1,at=start,ms=5", ",,", ":,:,:"]


@pytest.mark.parametrize("text", BAD)
def test_another_form_is_refused_with_the_one_expected(text: str) -> None:
    with pytest.raises(
        ValueError, match=r"expected rank:R,at:start\|backward\|sync\|call,ms:M|the rank counts from 0"
    ) as caught:
        parse_slow(text)
    assert repr(text) in str(caught.value)
    with pytest.raises(SettingsError) as settings_error:
        parse_settings("mnist_lenet", {"slow": text})
    assert settings_error.value.mistakes == (f"slow: {caught.value}",)


def test_what_exchanges_nothing_has_no_call_to_be_held_up_before() -> None:
    with pytest.raises(SettingsError, match="strategy none has no exchange"):
        parse_settings("mnist_lenet", {"slow": "rank:0,at:call,ms:5", "strategy": "none"})


PIECES = st.sampled_from(
    [*"rank:1,at:start,ms:50".replace(":", " : ").replace(",", " , ").split(), "nan", "-", "1e999"]
)


@given(st.text() | st.lists(PIECES).map("".join))
def test_whatever_is_given_is_a_bottleneck_or_a_value_error(text: str) -> None:
    try:
        slow = parse_slow(text)
    except ValueError:
        return
    assert (slow is None) == (text == "")
    assert slow is None or (slow.rank >= 0 and 0 < slow.ms <= 3_600_000 and slow.at in PLACES)
