"""A rank's loss counts by its part of the batch, to the same bits however that is computed."""

from __future__ import annotations

import pytest
import torch

from trainer.strategies import backward_weighted, weighted


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_a_gradient_that_begins_with_the_weight_has_the_bits_of_a_division(dtype: torch.dtype) -> None:
    for batch in [*range(1, 600), 99_991, 1_281_167]:
        divided, given = (torch.ones((), dtype=dtype, requires_grad=True) for _ in range(2))
        weighted(divided * 0.3, batch).backward()
        backward_weighted(given * 0.3, batch)
        assert torch.equal(divided.grad, given.grad), batch
