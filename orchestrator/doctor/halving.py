"""Finds the smallest set of hosts with which something fails, by trying it on fewer and fewer of them. Pure.

    guilty(["a", "b", "c", "d"], fails)      # ("c",): it fails with that host, and not without it
                                             # ("a", "c"): it fails with both of them, and not without either

`fails` tries it on some hosts, which costs its time: with n hosts it is asked some 2 log n times where one is guilty.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Fails = Callable[[Sequence[str]], bool]


def guilty(names: Sequence[str], fails: Fails) -> tuple[str, ...]:
    """names: those with which it failed. Of one set of them at a time at the most it is the smallest."""
    half = _smaller(list(names), fails)
    if len(half) != 2:
        return tuple(half)
    first, second = half
    rest = [name for name in names if name not in half]
    if not rest:
        return tuple(half)
    blamed = [name for name, other in ((first, second), (second, first)) if not fails([*rest, other])]
    return (blamed[0],) if len(blamed) == 1 else tuple(half)


def _smaller(names: list[str], fails: Fails, beside: Sequence[str] = ()) -> list[str]:
    """Those of the names without which, beside the others, it does not fail. It fails with all of them."""
    if len(names) == 1:
        return names
    left, right = names[: len(names) // 2], names[len(names) // 2 :]
    for part in (left, right):
        if len(part) + len(beside) > 0 and fails([*beside, *part]):
            return _smaller(part, fails, beside)
    kept = _smaller(left, fails, [*beside, *right])  # a part of each is needed
    return [*kept, *_smaller(right, fails, [*beside, *kept])]
