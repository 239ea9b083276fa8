"""What an exchange of bytes costs: nccl-tests' bandwidths, and the line through measured times. Pure, no torch.

    >>> round(algorithm_gbps(2**20, 0.004), 3)          # bytes over time
    2.097
    >>> bus_factor("all_reduce", ranks=4)
    1.5
    >>> line = fit([(1_000, 0.002), (2_000, 0.003), (4_000, 0.005)])
    >>> round(line.alpha_s, 6), round(line.slope_s, 9)  # 1 ms, and 1 us a byte
    (0.001, 1e-06)

A bus bandwidth is the algorithm bandwidth times the operation's factor. It is what a link has to carry each way where
the work is spread over all ranks as well as can be, so that it compares with the link's own speed whatever the number
of ranks. Factors as in nccl-tests, doc/PERFORMANCE.md; those of gather, scatter and send/recv, which that page leaves
out, from src/gather.cu, src/scatter.cu and src/sendrecv.cu there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


def _one(ranks: int) -> float:
    """All bytes have to leave, or to reach, one rank."""
    return 1.0


def _others(ranks: int) -> float:
    """The part of an array that has to leave, or to reach, a rank: n-1 of n equal parts; its own stays."""
    return (ranks - 1) / ranks


def _others_twice(ranks: int) -> float:
    """Parts go out to be added up, and sums come back."""
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
"""By operation. Its bytes are those of the whole array, parts of all ranks together."""


def bus_factor(operation: str, ranks: int) -> float:
    return BUS_FACTORS[operation](ranks)


def algorithm_gbps(size_bytes: float, time_s: float) -> float:
    """In 10^9 bits a second, the unit in which links are declared."""
    return 8e-9 * size_bytes / time_s


@dataclass(frozen=True)
class Line:
    """time = alpha + slope * size, in bytes (whose slope is beta) or whatever else it was fitted over. worst_error:
    the largest difference to a measured time, as a part of that time.
    """

    alpha_s: float
    slope_s: float
    worst_error: float

    def time_s(self, size: float) -> float:
        return self.alpha_s + self.slope_s * size

    @property
    def gbps(self) -> float | None:
        """The algorithm bandwidth that ever larger sizes, in bytes, approach."""
        return 8e-9 / self.slope_s if self.slope_s else None


def fit(points: Sequence[tuple[float, float]]) -> Line | None:
    """points: (size, seconds), all above 0. None where they are of fewer than two sizes.

    Least squares of the relative error: a plain fit would only see the largest sizes, whose times are a thousand times
    longer. Neither alpha nor beta is ever negative: where the best line would have one, the best without it is taken.
    """
    if len({size for size, _ in points}) < 2:
        return None
    largest = max(size for size, _ in points)
    rows = [(1 / time, size / largest / time) for size, time in points]  # alpha*u + beta*v should be 1
    uu, uv, vv = sum(u * u for u, _ in rows), sum(u * v for u, v in rows), sum(v * v for _, v in rows)
    u1, v1 = sum(u for u, _ in rows), sum(v for _, v in rows)
    determinant = uu * vv - uv * uv
    if determinant <= 1e-12 * uu * vv:  # sizes too close to each other to separate the two costs
        return None
    alpha, beta = (u1 * vv - v1 * uv) / determinant, (v1 * uu - u1 * uv) / determinant
    if alpha < 0:
        alpha, beta = 0.0, v1 / vv
    elif beta < 0:
        alpha, beta = u1 / uu, 0.0
    worst = max(abs(alpha * u + beta * v - 1) for u, v in rows)
    return Line(alpha, beta / largest, worst)
