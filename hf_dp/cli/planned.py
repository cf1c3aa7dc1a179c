"""The table of `hf-dp plan`: what a plan costs, by accountant."""

from __future__ import annotations

from typing import Any

from rich.markup import escape
from rich.table import Table

from hf_dp.config import AccountantName
from hf_dp.figures import percent, upper

ACCOUNTANTS: tuple[AccountantName, ...] = ("pld", "rdp")


def answered(answer: dict[str, Any]) -> list[str]:
    """The accountants that have an epsilon for this plan."""
    return [name for name in ACCOUNTANTS if name in answer]


def risk_table(rows: dict[str, str]) -> Table:
    """How well membership can be told, of `Risk.rows`."""
    table = Table(title="How well membership can be told", title_justify="left")
    table.add_column("an attack")
    table.add_column("at most", justify="right")
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def start_table(rules: list[dict[str, str]]) -> Table:
    """What to start from with a proposed batch, and why."""
    table = Table(title="What to start from", title_justify="left", caption="More in docs/choosing.md.")
    for column in ("setting", "start", "why"):
        table.add_column("" if column == "setting" else column)
    for rule in rules:
        table.add_row(*rule.values())
    return table


def plan_table(answer: dict[str, Any]) -> Table:
    """What `hf-dp plan` prints."""
    wanted, found = answer["target_epsilon"], answer["target_tpr"]
    title = "What this noise costs" if wanted is None else f"Noise for epsilon {wanted:g}"
    if found is not None:
        title = f"Noise for at most {percent(found)} found at {percent(answer['at_fpr'])} false positives"
    names, most = answered(answer), answer["max_batch_size"]
    caption = "PLD is tight and the default in training; RDP is a looser cross-check."
    if names == ["pld"]:
        caption = "PLD is tight and the default in training; RDP, which is looser, shows no noise for this."
    if "after" in answer:
        caption = f"With what was spent on the same people before ({', '.join(answer['after'])}), by PLD."
    if found is not None:
        caption = "What an attack may find is computed by PLD."
    if most is not None:
        caption = "Of truncated batches PLD gives an upper bound, and RDP is not offered."
    if "max_examples_per_unit" in answer and names == ["pld"]:
        caption = "RDP is not offered for mixtures of Gaussians."
    table = Table(title=title, caption=caption)
    table.add_column("")
    for name in names:
        table.add_column(name.upper(), justify="right")
    table.add_row("noise multiplier", *(f"{answer[name]['noise_multiplier']:.4f}" for name in names))
    per_coordinate = (f"{answer[name]['noise_per_coordinate']:.3g}" for name in names)
    table.add_row(f"noise per coordinate (C = {answer['clipping_norm']:g})", *per_coordinate)
    table.add_row("epsilon", *(upper(answer[name]["epsilon"], 4) for name in names))
    if "after" in answer:
        table.add_row("of that spent before", *(upper(answer[name]["spent_before"], 4) for name in names))
    table.add_section()
    for label, value in {
        "delta": upper(answer["delta"], 3),
        "expected batch size": f"{answer['expected_batch_size']:g}" + (" (proposed)" if answer["proposed"] else ""),
        **({} if most is None else {"largest batch": f"{most}"}),
        **_of_units(answer),
        "steps": str(answer["steps"]),
        "sampling probability": f"{answer['sampling_probability']:.4g}",
        **{
            f"clipping norm of {escape(name)}": f"{norm:.4g}"
            for name, norm in answer.get("clipping_groups", {}).items()
        },
        f"{answer['counts']} processed": f"{answer['examples_processed']:,.0f}",
        "of epsilon for other releases": ", ".join(f"{share:g}" for share in answer["shares"]) or "nothing (--share)",
    }.items():
        table.add_row(label, *[value] * len(names))
    return table


def notes(answer: dict[str, Any]) -> list[str]:
    """What should be known of a plan's numbers."""
    # Here, as every command imports this module.
    from hf_dp.accounting.events import large_delta_in_words

    said = large_delta_in_words(answer["delta"])
    return [] if said is None else [said]


def _of_units(answer: dict[str, Any]) -> dict[str, str]:
    if "max_examples_per_unit" not in answer:
        return {}
    how_many = f"{answer['drawn_from']} of {answer['dataset_size']}" if "drawn_from" in answer else "a secret number"
    return {"examples of units": f"{how_many}, at most {answer['max_examples_per_unit']} of one"}
