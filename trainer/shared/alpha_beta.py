"""The cost of an exchange: nccl-tests' bandwidths, and a line through measured times. Pure, no torch.

>>> line = fit([(1_000, 0.002), (2_000, 0.003), (4_000, 0.005)])
>>> round(line.alpha_s, 6), round(line.slope_s, 9)  # 1 ms, and 1 us per byte
(0.001, 1e-06)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


def _one(ranks: int) -> float:
    return 1.0


def _others(ranks: int) -> float:
    return (ranks - 1) / ranks


def _others_twice(ranks: int) -> float:
    return 2 * (ranks - 1) / ranks


BUS_FACTORS: dict[str, Callable[[int], float]] = {
    "send_recv": _one,
    "broadcast": _one,
    "reduce": _one,
    "all_reduce": _others_twice,
    "gather": _others,
    "all_gather": _others,
    "scatter": _others,
    "reduce_scatter": _others,
    "all_to_all": _others,
}
"""Bus bandwidth by algorithm bandwidth, with bytes of the whole array (nccl-tests, doc/PERFORMANCE.md)."""
# It compares with a link's own speed for any number of ranks. Factors of gather, scatter and send/recv: src/gather.cu,
# src/scatter.cu and src/sendrecv.cu of nccl-tests.


def bus_factor(operation: str, ranks: int) -> float:
    return BUS_FACTORS[operation](ranks)


def algorithm_gbps(size_bytes: float, time_s: float) -> float:
    """In 10^9 bits per second."""
    return 8e-9 * size_bytes / time_s


@dataclass(frozen=True)
class Line:
    """time = alpha + slope * size. worst_error: largest difference to a measured time, as a part of it."""

    alpha_s: float
    slope_s: float
    worst_error: float

    def time_s(self, size: float) -> float:
        return self.alpha_s + self.slope_s * size

    @property
    def gbps(self) -> float | None:
        """The limit for large sizes in bytes."""
        return 8e-9 / self.slope_s if self.slope_s else None


def fit(points: Sequence[tuple[float, float]]) -> Line | None:
    """points: (size, seconds), all above 0. None for fewer than two sizes. Neither alpha nor slope is negative."""
    # Least squares of the relative error: otherwise only the largest sizes would count.
    if len({size for size, _ in points}) < 2:
        return None
    largest = max(size for size, _ in points)
    rows = [(1 / time, size / largest / time) for size, time in points]  # alpha*u + beta*v should be 1
    uu, uv, vv = sum(u * u for u, _ in rows), sum(u * v for u, v in rows), sum(v * v for _, v in rows)
    u1, v1 = sum(u for u, _ in rows), sum(v for _, v in rows)
    determinant = uu * vv - uv * uv
    if determinant <= 1e-12 * uu * vv:  # sizes too close to separate the two costs
        return None
    alpha, beta = (u1 * vv - v1 * uv) / determinant, (v1 * uu - u1 * uv) / determinant
    if alpha < 0:
        alpha, beta = 0.0, v1 / vv
    elif beta < 0:
        alpha, beta = u1 / uu, 0.0
    worst = max(abs(alpha * u + beta * v - 1) for u, v in rows)
    return Line(alpha, beta / largest, worst)
