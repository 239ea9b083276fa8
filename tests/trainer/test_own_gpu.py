"""Each rank's own GPU becomes the first that its process sees, where the GPUs are listed."""

import os

import pytest

from trainer.ranks import VISIBLE, own_gpu_first


@pytest.mark.parametrize(
    ("listed", "local_rank", "seen"),
    [
        ("GPU-a,GPU-b,GPU-c", 0, "GPU-a,GPU-b,GPU-c"),
        ("GPU-a,GPU-b,GPU-c", 2, "GPU-c,GPU-a,GPU-b"),
        ("3,5", 3, "5,3"),  # two ranks a GPU
    ],
)
def test_its_own_comes_first_and_the_others_follow_in_their_order(monkeypatch, listed, local_rank, seen):
    own_gpu_first.cache_clear()
    monkeypatch.setenv(VISIBLE, listed)
    assert own_gpu_first(local_rank)
    assert own_gpu_first(local_rank)  # asked again it moves nothing
    assert os.environ[VISIBLE] == seen


@pytest.mark.parametrize("listed", [None, "", "GPU-a"])
def test_without_a_list_of_several_nothing_changes(monkeypatch, listed):
    own_gpu_first.cache_clear()
    monkeypatch.delenv(VISIBLE, raising=False)
    if listed is not None:
        monkeypatch.setenv(VISIBLE, listed)
    assert not own_gpu_first(1)
    assert os.environ.get(VISIBLE) == listed
