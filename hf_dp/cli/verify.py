"""`hf-dp verify`: is a published epsilon what its ledger says?"""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hf_dp.cli.common import AsJson, print_json, refusals
from hf_dp.figures import upper


def verify(
    repo_or_directory: Annotated[
        str, typer.Argument(metavar="REPO_OR_DIR", help="A repository OWNER/NAME on the hub, or a folder.")
    ],
    revision: Annotated[str | None, typer.Option(help="A branch, tag or commit of the repository.")] = None,
    token: Annotated[
        str | None, typer.Option(help="For a private repository; by default the one of `hf auth login`.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Recompute epsilon from the ledger alone, and hold the claim, the card and the weights against it.

    Examples:

        hf-dp verify someone/private-model
        hf-dp verify out/classify --json

    No model is loaded and no code of the repository is run; its files are
    downloaded to be hashed.

    Exit codes: 0, everything agrees and the model is private; 1, something
    does not agree, or it says itself that it is not private; 2, it could not
    be checked: no privacy.json, one of a future version, no access.
    """
    from hf_dp.hub.verify import NOT_PROVEN
    from hf_dp.hub.verify import verify as check

    with refusals():
        found = check(repo_or_directory, revision=revision, token=token)
    if as_json:
        print_json(
            {
                "source": found.source,
                "consistent": found.consistent,
                "private": found.private,
                "delta": found.report.delta,
                "claimed_epsilon": found.report.epsilon,
                "recomputed_epsilon": found.epsilons,
                "checks": [dataclasses.asdict(item) for item in found.checks],
                "notes": list(found.notes),
                "proven": list(found.proven),
                "not_proven": list(NOT_PROVEN),
            }
        )
    else:
        console = Console()
        table = Table(title=escape(found.source), title_justify="left")
        for column in ("", "what", "found"):
            table.add_column(column, overflow="fold")
        for item in found.checks:
            mark = "[green]agrees[/green]" if item.passed else "[bold red]DIFFERS[/bold red]"
            table.add_row(mark, escape(item.name), escape(item.found))
        console.print(table)
        for note in found.notes:
            console.print(f"Note: {note}", markup=False)
        epsilons = ", ".join(f"{upper(value, 5)} ({name.upper()})" for name, value in found.epsilons.items())
        if not found.consistent:
            failed = ", ".join(item.name for item in found.checks if not item.passed)
            console.print(f"\n[bold red]Not verified.[/bold red] These do not agree: {escape(failed)}.")
            console.print("Do not rely on the claim: something was changed after training, or was never true.")
        else:
            verdict = "[bold green]Verified" if found.private else "[bold red]Consistent, and not private"
            console.print(f"\n{verdict}[/]: epsilon {epsilons} at delta {upper(found.report.delta, 3)}.")
            console.print("Proven:")
            for line in found.proven:
                console.print(f"  - {line}", markup=False)
        console.print("Not proven, and not provable from files:")
        for line in NOT_PROVEN:
            console.print(f"  - {line}", markup=False)
    raise typer.Exit(0 if found.private else 1)
