"""What PowerSGD needs of its matrices: the same orthonormal columns on every kind of device, whatever a gradient is."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
import torch

from trainer.compute.compiler import ON_DEVICE
from trainer.strategies import PowerSgd, orthonormal

DIRECTIONS = torch.randn(40, 4, generator=torch.Generator().manual_seed(7), dtype=torch.float64) / 40**0.5


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def distance_to_orthonormal(q: torch.Tensor) -> float:
    return float((q.mT @ q - torch.eye(q.shape[2], dtype=q.dtype)).abs().max())


def test_it_is_the_q_of_the_decomposition_whose_r_has_a_positive_diagonal() -> None:
    matrices = drawn(3, 40, 4)
    q, r = torch.linalg.qr(matrices)
    signs = r.diagonal(dim1=1, dim2=2).sign()
    assert (orthonormal(matrices, DIRECTIONS) - q * signs[:, None, :]).abs().max() < 1e-12


@pytest.mark.parametrize("condition", [1e2, 1e4, 1e6])
def test_float32_stays_orthonormal_where_cholesky_would_not(condition: float) -> None:
    """LeNet's P came to 2e4 with two columns and 3e6 with four."""
    left, right = torch.linalg.qr(drawn(3, 40, 4)).Q, torch.linalg.qr(drawn(3, 4, 4)).Q
    sizes = torch.logspace(0, -float(torch.tensor(condition).log10()), 4, dtype=torch.float64)
    q = orthonormal(((left * sizes) @ right.mT).float(), DIRECTIONS.float())
    assert distance_to_orthonormal(q) < 2e-6


def test_columns_that_are_zero_or_say_nothing_new_become_the_given_directions() -> None:
    matrices = drawn(3, 40, 4).float()
    matrices[0] = 0  # a gradient of zeros
    matrices[1, :, 2] = matrices[1, :, 0] - 2 * matrices[1, :, 1]
    matrices[2, :, 3] = 0
    q = orthonormal(matrices, DIRECTIONS.float())
    again = orthonormal(matrices * (1 + 1e-7), DIRECTIONS.float())  # as another device might round
    assert distance_to_orthonormal(q) < 2e-6
    assert (q - again).abs().max() < 0.1


def test_numbers_that_are_not_finite_stay_so() -> None:
    matrices = drawn(1, 40, 4)
    matrices[0, 3, 1] = float("inf")
    assert not orthonormal(matrices, DIRECTIONS).isfinite().all()


def test_a_matrix_with_as_many_columns_as_rows_is_decomposed_too() -> None:
    q = orthonormal(drawn(1, 3, 3), DIRECTIONS[:3, :3])
    assert q.shape == (1, 3, 3)
    assert distance_to_orthonormal(q) < 1e-12


class OneRank:
    """Sums of a rank by itself."""

    executor = ON_DEVICE

    def sum(self, tensor: torch.Tensor) -> None:
        pass


def alone(gradient: torch.Tensor, memory: torch.Tensor, q: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """PowerSGD of one matrix, from its paper: what replaces the gradient, and the next memory and Q."""
    error = memory + gradient.flatten(1)
    p = torch.linalg.qr(error @ q).Q
    q = error.T @ p
    return (p @ q.T).view_as(gradient), error - p @ q.T, q


def test_matrices_that_share_calls_and_buffers_are_compressed_as_if_alone() -> None:
    """Equal shapes, other shapes with the same number of rows, channels last, and vectors."""
    shapes = ((9, 12), (7, 11), (5,), (9, 2, 3, 3), (9, 12), (9, 2, 3, 3), (7, 30), (2, 3))
    generator = torch.Generator().manual_seed(3)
    power_sgd = PowerSgd([torch.empty(shape, dtype=torch.float64) for shape in shapes], rank=2)
    kept = {
        position: (memory.clone(), q.clone())
        for stack in power_sgd.stacks
        for position, memory, q in zip(stack.positions, stack.memory, stack.q, strict=True)
    }
    assert kept.keys() == {0, 1, 3, 4, 5, 6} and len(power_sgd.sides) == 2
    for _ in range(3):
        before = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
        after = [gradient.clone() for gradient in before]
        after[5] = after[5].to(memory_format=torch.channels_last)
        power_sgd(after, OneRank())
        for position, (found, gradient) in enumerate(zip(after, before, strict=True)):
            wanted, *rest = alone(gradient, *kept[position]) if position in kept else (gradient,)
            assert (found - wanted).abs().max() < 1e-12
            kept |= {position: tuple(rest)} if rest else {}


def test_errors_are_kept_in_the_widest_type() -> None:
    """Also if the first tensor has 16 bits."""
    gradients = [torch.ones(9, 12, dtype=torch.bfloat16), torch.ones(9, 12)]
    power_sgd = PowerSgd(gradients, rank=2)
    power_sgd(gradients, OneRank())
    assert power_sgd.stacks[0].memory.dtype == torch.float32
    assert all((gradient.float() - 1).abs().max() < 2**-8 for gradient in gradients)
