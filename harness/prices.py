"""What cards, lines and tokens cost: a dated sheet, kept in each run beside what it paid for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from harness import metrics
from harness.errors import ConfigError
from harness.record import OK
from harness.settings import number

_MILLION = 1e6


@dataclass(frozen=True)
class Prices:
    """A sheet of prices, all in one currency.

    `cards`: what a card costs an hour, by its role in a topology. `lines`: what the leased lines of
    a topology cost an hour, by the backend's name; one that is not named has none. `input`,
    `cached_input` and `output` are what users pay for a million tokens: an input token found in the
    prefill's cache counts as cached.
    """

    name: str
    currency: str
    as_of: str
    """YYYY-MM-DD"""
    source: str
    cards: Mapping[str, float]
    lines: Mapping[str, float]
    input: float
    cached_input: float
    output: float

    def __post_init__(self) -> None:
        for name in ("name", "currency", "source"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name):
                raise ConfigError(f"prices.{name} is {getattr(self, name)!r}: give some words")
        try:
            date.fromisoformat(str(self.as_of))
        except ValueError:
            raise ConfigError(
                f"prices.as_of is {self.as_of!r}: give the day of the prices, as 2026-12-02"
            ) from None
        for name in ("cards", "lines"):
            for key, price in getattr(self, name).items():
                number(f"prices.{name}.{key}", price, least=0, most=1e12)
        for name in ("input", "cached_input", "output"):
            number(f"prices.{name}", getattr(self, name), least=0, most=1e12)

    def hour(self, backend: str, cards: Mapping[str, float]) -> float:
        """What an hour of so many cards by role costs, lines included.

        Raises `ConfigError` where no card is known, or the price of a role is not.
        """
        if not cards:
            raise ConfigError(
                f"of {backend} no cards are known: give them, as in "
                f"backend.{backend}.cards={{P: 8, D: 8}}, to have its costs"
            )
        if unknown := [role for role in cards if role not in self.cards]:
            raise ConfigError(
                f"prices {self.name!r} have no price for a card of {', '.join(unknown)}: add "
                f"prices.cards.{unknown[0]}=... (they have {', '.join(self.cards)})"
            )
        return sum(count * self.cards[role] for role, count in cards.items()) + self.lines.get(
            backend, 0.0
        )

    def revenue(self, records: pa.Table) -> NDArray[np.float64]:
        """What users pay for each request, (rows,): NaN where the hit is not known.

        Whatever was not answered whole is not paid for.
        """
        tokens = {
            name: metrics.column(records, f"served_{name}_tokens")
            for name in ("input", "hit", "output")
        }
        paid = (
            (tokens["input"] - tokens["hit"]) * self.input
            + tokens["hit"] * self.cached_input
            + tokens["output"] * self.output
        ) / _MILLION
        return np.where(metrics.status_is(records, OK), paid, 0.0)
