"""Catalogue of graphics cards: memory and memory bandwidth by the names that people and drivers use. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

READ = "read: performance notes of this project, datasheet or log named there"
KNOWN = "remembered from the vendor's data sheet, not verified"


@dataclass(frozen=True)
class Card:
    """Published figures of one GPU model."""

    name: str
    gb_per_s: float
    memory_gib: float
    """As sold."""
    unsure: frozenset[str]
    """Estimated or unverified figures."""
    source: str


def _remembered(name: str, gb_per_s: float, memory_gib: float) -> Card:
    return Card(name, gb_per_s, memory_gib, frozenset({"gb_per_s", "memory_gib"}), KNOWN)


CARDS: tuple[Card, ...] = (
    Card("A2000", 288, 12, frozenset(), READ),
    Card("A2000 6GB", 288, 6, frozenset(), READ),
    Card("A16", 200, 16, frozenset({"gb_per_s"}), READ + "; one of the board's four GPUs"),
    Card("V100", 900, 16, frozenset(), READ + "; SXM2"),
    Card("3090", 936, 24, frozenset(), READ),
    _remembered("V100 32GB", 900, 32),
    _remembered("A100", 1555, 40),
    _remembered("A100 80GB", 2039, 80),
    _remembered("H100", 3350, 80),
    _remembered("H200", 4800, 141),
    _remembered("P100", 732, 16),
    _remembered("T4", 320, 16),
    _remembered("L4", 300, 24),
    _remembered("L40S", 864, 48),
    _remembered("A10", 600, 24),
    _remembered("A4000", 448, 16),
    _remembered("A5000", 768, 24),
    _remembered("A6000", 768, 48),
    _remembered("1080Ti", 484, 11),
    _remembered("2080Ti", 616, 11),
    _remembered("3080", 760, 10),
    _remembered("4090", 1008, 24),
    _remembered("A2", 200, 16),
    _remembered("A30", 933, 24),
    _remembered("A40", 696, 48),
    _remembered("L40", 864, 48),
    _remembered("2080", 448, 8),
    _remembered("5090", 1792, 32),
)


def find_card(label: str) -> Card | None:
    """Accepts labels like `RTX A2000`, `Tesla V100-16GB`, `NVIDIA GeForce RTX 3090`."""
    words = _words(label)
    fitting = [card for card in CARDS if _words(card.name) <= words]
    return max(fitting, key=lambda card: len(_words(card.name)), default=None)


def _words(label: str) -> frozenset[str]:
    joined = re.sub(r"(\d)\s+(ti|gb)\b", r"\1\2", label.lower())
    return frozenset(re.sub(r"^(rtx|gtx)(?=.)", "", word) for word in re.split(r"[^a-z0-9]+", joined))
