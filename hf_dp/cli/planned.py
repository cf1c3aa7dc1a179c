"""The table of `hf-dp plan`: what a plan costs, by accountant."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from hf_dp.config import AccountantName

ACCOUNTANTS: tuple[AccountantName, ...] = ("pld", "rdp")


def answered(answer: dict[str, Any]) -> list[str]:
    """The accountants that have an epsilon for this plan."""
    return [name for name in ACCOUNTANTS if name in answer]


def plan_table(answer: dict[str, Any]) -> Table:
    """What `hf-dp plan` prints."""
    wanted = answer["target_epsilon"]
    title = "What this noise costs" if wanted is None else f"Noise for epsilon {wanted:g}"
    names, most = answered(answer), answer["max_batch_size"]
    caption = "PLD is tight and the default in training; RDP is a looser cross-check."
    if most is not None:
        caption = "Of truncated batches PLD gives an upper bound, and RDP is not offered."
    table = Table(title=title, caption=caption)
    table.add_column("")
    for name in names:
        table.add_column(name.upper(), justify="right")
    table.add_row("noise multiplier", *(f"{answer[name]['noise_multiplier']:.4f}" for name in names))
    per_coordinate = (f"{answer[name]['noise_per_coordinate']:.3g}" for name in names)
    table.add_row(f"noise per coordinate (C = {answer['clipping_norm']:g})", *per_coordinate)
    table.add_row("epsilon", *(f"{answer[name]['epsilon']:.4g}" for name in names))
    table.add_section()
    for label, value in {
        "delta": f"{answer['delta']:.3g}",
        "expected batch size": f"{answer['expected_batch_size']:g}" + (" (proposed)" if answer["proposed"] else ""),
        **({} if most is None else {"largest batch": f"{most}"}),
        "steps": str(answer["steps"]),
        "sampling probability": f"{answer['sampling_probability']:.4g}",
        f"{answer['counts']} processed": f"{answer['examples_processed']:,.0f}",
        "of epsilon for other releases": ", ".join(f"{share:g}" for share in answer["shares"]) or "nothing (--share)",
    }.items():
        table.add_row(label, *[value] * len(names))
    return table
