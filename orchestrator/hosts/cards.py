"""Catalogue of graphics cards (`cards.json`): memory, its bandwidth, and published training speeds, by the names that
people and drivers use.

    find_card("Tesla V100-16GB").rate("fp16")       Rate(images_per_s=841, error=0.35, source="Lambda's logs ...")
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal

from orchestrator.errors import UsageError

FILE = Path(__file__).with_name("cards.json")
Precision = Literal["fp32", "half"]


@dataclass(frozen=True)
class Rule:
    """For cards without a rate of their own; see the file's notes."""

    images_per_gb: Mapping[Precision, float]
    layer_us: Mapping[Precision, float]
    launch_us: float
    error: float
    fixed_error: float


@dataclass(frozen=True)
class Rate:
    """images_per_s: ResNet-50 at 224 px. error: relative."""

    images_per_s: float
    error: float
    source: str


@dataclass(frozen=True)
class Card:
    """Published figures of one GPU model. unsure: names of estimated or unverified ones."""

    name: str
    gb_per_s: float
    memory_gib: float
    rule: Rule
    bf16: bool = True
    tensor_cores: bool = True
    small_maps: float = 1.0
    images_per_s: Mapping[Precision, tuple[float, float, str]] = field(default_factory=dict)
    unsure: tuple[str, ...] = ()

    @cached_property
    def words(self) -> frozenset[str]:
        """All of them are in the label of such a GPU."""
        return _words(self.name)

    def check_amp(self, amp: str) -> None:
        """Raises UsageError."""
        if amp == "bf16" and not self.bf16:
            raise UsageError(
                f"amp=bf16: a {self.name} only emulates bf16, so the trainer refuses it there",
                "use --set amp=fp16, or leave the host out with --nodes",
            )

    def rate(self, amp: str) -> Rate:
        """amp: the setting."""
        precision: Precision = "half" if amp != "none" and self.tensor_cores else "fp32"
        if known := self.images_per_s.get(precision):
            return Rate(*known)
        return Rate(self.rule.images_per_gb[precision] * self.gb_per_s, self.rule.error, "by memory bandwidth")


@dataclass(frozen=True)
class Cards:
    version: int
    rule: Rule
    cards: tuple[Card, ...]


def all_cards() -> Cards:
    return read_cards(FILE)


@lru_cache(maxsize=2)
def read_cards(file: Path) -> Cards:
    document = json.loads(file.read_text(encoding="utf-8"))
    entries: dict[str, dict[str, Any]] = document["cards"]
    rule = Rule(**document["rule"])
    return Cards(document["version"], rule, tuple(_card(name, entries, rule) for name in entries))


def _card(name: str, entries: dict[str, dict[str, Any]], rule: Rule) -> Card:
    own = dict(entries[name])
    return Card(**{**entries.get(own.pop("like", ""), {}), **own}, name=name, rule=rule)


def find_card(label: str) -> Card | None:
    """Accepts labels like `RTX A2000`, `Tesla V100-16GB`, `NVIDIA GeForce RTX 3090`."""
    words = _words(label)
    fitting = [card for card in all_cards().cards if card.words <= words]
    return max(fitting, key=lambda card: len(card.words), default=None)


def _words(label: str) -> frozenset[str]:
    joined = re.sub(r"(\d)\s+(ti|gb)\b", r"\1\2", label.lower())
    return frozenset(re.sub(r"^(rtx|gtx)(?=.)", "", word) for word in re.split(r"[^a-z0-9]+", joined))
