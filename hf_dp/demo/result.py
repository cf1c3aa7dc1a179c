"""What the demo measured, whether that is the contrast it set out to show, and the table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from hf_dp.audit.secrets import MEAN_EXPOSURE_BY_CHANCE, Secret, most_by_chance
from hf_dp.demo.messages import CANDIDATES, MOST_EXPOSURE
from hf_dp.figures import upper

_LEAST_LEAK = 3.0


@dataclass(frozen=True)
class Row:
    """One model and what was measured of it.

    Attributes:
        name: of the model.
        epsilon: of the planted messages: 0 for a model that never saw them, infinite without privacy.
        delta: with epsilon; None where epsilon is infinite.
        evaluation_loss: nats a token.
        planted: exposure of each planted secret, in bits.
        unplanted: exposure of each secret that was never planted, in bits.
        extracted: how many planted secrets the model says outright.
        said: what it says when it is asked for the first of them.
    """

    name: str
    epsilon: float
    delta: float | None
    evaluation_loss: float
    planted: list[float]
    unplanted: list[float]
    extracted: int
    said: tuple[str, ...] = ()


@dataclass(frozen=True)
class Result:
    """The three models of the demo, and the secrets that their `said` answers."""

    before: Row
    ordinary: Row
    private: Row
    asked: tuple[Secret, ...] = ()

    @property
    def rows(self) -> tuple[Row, Row, Row]:
        """In the order of the story."""
        return self.before, self.ordinary, self.private

    def shortcomings(self) -> list[str]:
        """What the demo claims but did not show this time; empty if it showed everything."""
        leak, kept = mean(self.ordinary.planted), mean(self.private.planted)
        claims = {
            f"the ordinary model exposes its secrets {_LEAST_LEAK:g} bits more than secrets that it never saw": leak
            >= mean(self.ordinary.unplanted) + _LEAST_LEAK,
            f"the ordinary model exposes its secrets {_LEAST_LEAK:g} bits more than the private one": leak
            >= kept + _LEAST_LEAK,
            "the private model exposes its secrets no more than chance would": kept
            <= most_by_chance(len(self.private.planted)),
            "the private model has learnt from the private data": self.private.evaluation_loss
            < self.before.evaluation_loss,
        }
        return [claim for claim, shown in claims.items() if not shown]

    def to_dict(self) -> dict[str, Any]:
        """The numbers of the table, by model, and whether they show what the demo is for."""
        models = {
            row.name: {
                "epsilon": row.epsilon,
                "delta": row.delta,
                "evaluation_loss": row.evaluation_loss,
                "exposure_mean": mean(row.planted),
                "exposure_max": max(row.planted),
                "control_mean": mean(row.unplanted),
                "pins_said": row.extracted,
                "said": list(row.said),
            }
            for row in self.rows
        }
        missing = self.shortcomings()
        return {"shown": not missing, "not_shown": missing, "secrets": len(self.private.planted), "models": models}

    def table(self) -> Table:
        """One row for each model."""
        secrets = len(self.private.planted)
        table = Table(
            title="The same model, the same messages",
            caption=f"Exposure: how far up a secret ranks among all {CANDIDATES:,} PINs, in bits; {secrets} secrets, "
            "each in one message. Control: secrets never planted. Said: greedily, when asked. "
            f"Chance: {MEAN_EXPOSURE_BY_CHANCE:.1f} on average. Fully known: {MOST_EXPOSURE:.1f}.",
        )
        # Two-line titles: the table fits a terminal of 80 columns.
        titles = ("epsilon", "delta", "eval.\nloss", "exposure\nmean", "exposure\nmax", "control\nmean", "PINs\nsaid")
        table.add_column("")
        for title in titles:
            table.add_column(title, justify="right", no_wrap=True)
        for row in self.rows:
            table.add_row(
                row.name,
                upper(row.epsilon, 3),
                "-" if row.delta is None else upper(row.delta, 2) if row.delta else "0",
                f"{row.evaluation_loss:.2f}",
                f"{mean(row.planted):.1f}",
                f"{max(row.planted):.1f}",
                f"{mean(row.unplanted):.1f}",
                f"{row.extracted}/{secrets}",
            )
        return table


def mean(values: Sequence[float]) -> float:
    """Their arithmetic mean."""
    return sum(values) / len(values)
