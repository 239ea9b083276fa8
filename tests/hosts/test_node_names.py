"""--nodes: ranges and patterns beside names."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from orchestrator.errors import UsageError
from orchestrator.hosts import MOST_NAMES, NAME, names_in
from orchestrator.units import name_ranges

GPUS = [f"gpu{number:02d}" for number in range(1, 17)]
KNOWN = [*GPUS, "v100", "v100-b", "a2000"]
NAMES = st.from_regex(NAME, fullmatch=True)


def wanted(listed, known=KNOWN):
    return names_in(listed, known, "cluster rack")


@given(st.lists(st.tuples(st.sampled_from(["h", "gpu"]), st.integers(0, 130), st.integers(1, 3)), unique=True))
def test_ranges_that_stand_for_names_are_read_as_these(parts):
    names = list(dict.fromkeys(f"{word}{number:0{digits}d}" for word, number, digits in parts))
    assert wanted(",".join(name_ranges(names)), [*names, "other"]) == names


@pytest.mark.parametrize(
    ("listed", "found"),
    [
        ("a2000,v100", ["a2000", "v100"]),
        ("gpu[01-16]", GPUS),
        ("gpu[01-03,07]", ["gpu01", "gpu02", "gpu03", "gpu07"]),
        ("gpu[08-10],v100", ["gpu08", "gpu09", "gpu10", "v100"]),
        ("v100*", ["v100", "v100-b"]),
        ("*", KNOWN),
        ("gpu0?", GPUS[:9]),
        ("gpu1[0-9]*", GPUS[9:]),
        ("v100*, v100 ,gpu[0-1]1", ["v100", "v100-b", "gpu01", "gpu11"]),
        ("", []),
        (None, []),
    ],
)
def test_many_names_in_one_word(listed, found):
    assert wanted(listed) == found


def test_an_unknown_plain_name_stays_for_its_user_to_refuse():
    assert wanted("v1000,a2000") == ["v1000", "a2000"]


@pytest.mark.parametrize(
    ("listed", "words"),
    [
        ("x*", "x* matches no node of cluster rack"),
        ("gpu[17-18]*", "gpu[17-18]* matches no node of cluster rack"),
        ("gpu[15-18]", "gpu[15-18]: no gpu17, gpu18 in cluster rack"),
        ("gpu[1-2]", "gpu[1-2]: no gpu1, gpu2 in cluster rack"),
        ("gpu[01-16", "gpu[01-16: brackets do not match"),
        ("gpu[]", "gpu[]: '' is not a range"),
        ("gpu[a-c]", "gpu[a-c]: 'a-c' is not a range"),
        ("gpu[9-3]", "gpu[9-3]: '9-3' is not a range"),
        ("gpu[100-99]", "gpu[100-99]: '100-99' is not a range"),
        ("gpu[0-999999999]", f"stands for more than {MOST_NAMES} names"),
        ("gpu[0-999][0-999]", f"stands for more than {MOST_NAMES} names"),
        (",", "',' names no node of cluster rack"),
    ],
)
def test_a_pattern_that_is_wrong_or_fits_nothing_is_one_error(listed, words):
    with pytest.raises(UsageError) as caught:
        wanted(listed)
    assert words in caught.value.message
    assert caught.value.remedy.startswith(("its nodes: gpu01, gpu02", "write a"))


@given(st.lists(NAMES, min_size=1, unique=True), st.data())
def test_plain_names_are_what_they_always_were(known, data):
    listed = data.draw(st.lists(st.sampled_from(known) | NAMES, min_size=1))
    assert wanted(",".join(listed), known) == list(dict.fromkeys(listed))


@given(st.integers(0, 300), st.integers(0, 50), st.integers(1, 5), NAMES)
def test_a_range_is_all_its_names_with_the_digits_of_its_first(first, more, digits, prefix):
    assume(len(str(first)) >= digits or first)
    names = [f"{prefix}{number:0{digits}d}" for number in range(first, first + more + 1)]
    assert wanted(f"{prefix}[{first:0{digits}d}-{first + more:0{digits}d}]", [*names, "another"]) == names


@given(st.lists(NAMES, min_size=1, unique=True), st.data())
def test_a_star_is_whatever_stands_there_and_nothing_else_is_special(known, data):
    name = data.draw(st.sampled_from(known))
    begin = data.draw(st.integers(0, len(name)))
    end = data.draw(st.integers(begin, len(name)))
    found = wanted(f"{name[:begin]}*{name[end:]}", known)
    assert name in found
    assert found == [one for one in known if fits(one, name[:begin], name[end:])]


def fits(name, before, after):
    return len(name) >= len(before) + len(after) and name.startswith(before) and name.endswith(after)


@given(st.text("ab01[]-,*?. ", max_size=20))
def test_whatever_is_typed_gives_names_or_one_error(listed):
    try:
        found = wanted(listed, ["a0", "a1", "b01", "b"])
    except UsageError as error:
        assert error.remedy
    else:
        assert len(set(found)) == len(found)
        assert found or not listed.strip()
