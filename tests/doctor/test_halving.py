"""Who is guilty of a failure, by trying fewer: every single host and every pair of up to nine."""

from __future__ import annotations

from itertools import combinations

import pytest

from orchestrator.doctor import guilty

NAMES = "abcdefghi"


def tried(names, bad):
    """bad: it fails with all of these (and somebody beside them). Returns who is blamed, and how often it was tried."""
    asked = []

    def fails(some):
        asked.append(tuple(some))
        assert len(some) == len(set(some))
        return len(some) > 1 and set(bad) <= set(some)

    return guilty(names, fails), len(asked)


@pytest.mark.parametrize("count", range(3, 10))
def test_one_host_with_which_all_others_fail_is_found_whoever_it_is(count):
    for bad in NAMES[:count]:
        found, tries = tried(list(NAMES[:count]), bad)
        assert found == (bad,)
        assert tries <= 16


@pytest.mark.parametrize("count", range(3, 10))
def test_two_hosts_that_fail_together_alone_are_found_as_a_pair(count):
    for bad in combinations(NAMES[:count], 2):
        found, tries = tried(list(NAMES[:count]), bad)
        assert set(found) == set(bad)
        assert tries <= 16


def test_of_two_hosts_nobody_can_tell_which():
    assert tried(["a", "b"], "a")[0] == ("a", "b")
