"""Names of hosts as Ansible's inventories write many at once. Pure.

hosts_of("gpu[01:03].lab:2222")      # (["gpu01.lab", "gpu02.lab", "gpu03.lab"], 2222)
"""

from __future__ import annotations

import ipaddress
import itertools
import re
from string import ascii_letters

from orchestrator.hosts import grammar
from orchestrator.hosts.forms.imported import MOST_HOSTS

_PORT = re.compile(r"(.*[^:]):([0-9]{1,5})")
_RANGE = re.compile(r"\[([^\[\]]*)\]")
_FORM = "write a range like gpu[01:16] or rack[a:f]"


def hosts_of(pattern: str) -> tuple[list[str], int | None]:
    """The names, and the port behind them. Raises ValueError in words for a person."""
    if is_ip6(pattern):
        return [pattern.strip("[]")], None
    match = _PORT.fullmatch(pattern)
    # A colon within brackets is a range's.
    head, port = (match[1], int(match[2])) if match and match[1].count("[") == match[1].count("]") else (pattern, None)
    if is_ip6(head):
        return [head.strip("[]")], port
    parts = _RANGE.split(head)
    if any(set("[]") & set(part) for part in parts[::2]):
        raise ValueError(f"{grammar.show(pattern)}: brackets do not match; {_FORM}")
    choices = [_range(part) if position % 2 else [part] for position, part in enumerate(parts)]
    names = ["".join(combined) for combined in itertools.islice(itertools.product(*choices), MOST_HOSTS + 1)]
    if len(names) > MOST_HOSTS:
        raise ValueError(f"{grammar.show(pattern)} stands for more than {MOST_HOSTS} hosts; write a shorter range")
    return names, port


def is_ip6(text: str) -> bool:
    try:
        return bool(ipaddress.IPv6Address(text[1:-1] if text.startswith("[") else text))
    except ValueError:
        return False


def _range(text: str) -> list[str]:
    """`01:16`, `1:9:2`, `a:f`; without a beginning from 0 on."""
    first, colon, rest = text.partition(":")
    last, _, step = rest.partition(":")
    wrong = ValueError(f"[{text[:40]}] is no range; {_FORM}")
    if not colon or not re.fullmatch("[0-9]{0,4}", step) or step.strip("0") == "" != step:
        raise wrong
    if re.fullmatch("[A-Za-z]:[A-Za-z]", f"{first}:{last}"):
        span = ascii_letters[ascii_letters.index(first) : ascii_letters.index(last) + 1 : int(step or 1)]
        numbers = list(span)
    elif re.fullmatch("[0-9]{0,9}:[0-9]{1,9}", f"{first}:{last}") and int(last) - int(first or 0) < 1_000_000:
        digits = len(first) if first.startswith("0") else 1
        if digits > 1 and len(last) != digits:
            raise ValueError(f"[{text}]: both ends of a range with leading zeros have equally many digits; {_FORM}")
        numbers = [f"{number:0{digits}d}" for number in range(int(first or 0), int(last) + 1, int(step or 1))]
    else:
        raise wrong
    if not numbers:
        raise ValueError(f"[{text}] holds nothing: its end comes before its beginning; {_FORM}")
    return numbers
