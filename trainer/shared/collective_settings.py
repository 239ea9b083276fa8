"""The settings of measuring collectives. Imports no torch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from trainer.shared.alpha_beta import BUS_FACTORS
from trainer.shared.fields import SettingsError, mistakes_of_value, not_among, setting


@dataclass(frozen=True, kw_only=True)
class CollectiveSettings:
    """Raises SettingsError with every mistake when a value is out of its bounds."""

    exp: str = setting("The named experiment that gave every value not set here.", choices=["collectives"])
    operations: str = setting(
        f"What to measure: all, or some of {', '.join(BUS_FACTORS)}, with commas between.", default="all"
    )
    min_bytes: int = setting(
        "The smallest size, rounded down to the same number of elements for each rank.", at_least=4, default=2**10
    )
    max_bytes: int = setting("The largest size.", at_least=4, default=2**28)
    factor: int = setting("From one size to the next.", at_least=2, default=4)
    budget_s: float = setting(
        "Seconds for all of it; what would take longer is left out, the largest sizes first.", above=0, default=60.0
    )
    links: bool = setting("Whether each path from one host to another is measured by itself, too.", default=True)
    iterations: int = setting(
        "Times that an operation of one size is timed, at most; 3 where it takes long.", at_least=1, default=50
    )
    dtype: str = setting("The type of the elements.", choices=["float32", "bfloat16"], default="float32")
    device: str = setting(
        "Where the elements lie; auto is a GPU where there is one. What gloo carries lies in the host's memory.",
        choices=["auto", "cuda", "cpu"],
        default="auto",
    )
    backend: str = setting(
        "What carries them; auto is nccl when every rank has a GPU of its own, else gloo.",
        choices=["auto", "nccl", "gloo"],
        default="auto",
    )
    seed: int = setting("Decides the elements.", at_least=0, default=0)

    def __post_init__(self) -> None:
        mistakes = [
            text for field in dataclasses.fields(self) for text in mistakes_of_value(field, getattr(self, field.name))
        ]
        unknown = [name for name in self.chosen_operations if name not in BUS_FACTORS]
        mistakes += [f"operations: {not_among(name, ['all', *BUS_FACTORS])}" for name in unknown]
        if self.max_bytes < self.min_bytes:
            mistakes.append(f"max_bytes: {self.max_bytes} is less than min_bytes, {self.min_bytes}")
        if mistakes:
            raise SettingsError(mistakes)

    @property
    def chosen_operations(self) -> tuple[str, ...]:
        """Each once, in the order in which they were named."""
        names = BUS_FACTORS if self.operations == "all" else [name.strip() for name in self.operations.split(",")]
        return tuple(dict.fromkeys(names))

    @property
    def sizes(self) -> tuple[int, ...]:
        """In bytes, the smallest first."""
        sizes = [self.min_bytes]
        while sizes[-1] * self.factor <= self.max_bytes:
            sizes.append(sizes[-1] * self.factor)
        return tuple(sizes)
