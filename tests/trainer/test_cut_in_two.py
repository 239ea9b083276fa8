"""What tests/gpu/test_pipeline.py asks of a GPU, asked of a CPU."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("torchvision")
import torch

from tests.support.cut_in_two import Case, assert_alike, gradients

CASES = [Case("lenet", channels_last, splits) for channels_last in (False, True) for splits in (False, True)]


@pytest.mark.parametrize("case", [*CASES, Case("resnet152", splits=True)], ids=str)
def test_two_stages_leave_the_gradients_of_the_whole_network(case: Case) -> None:
    assert_alike(*gradients(case, torch.device("cpu")))
