"""The command `hf-dp`. Imports no torch: a plan is answered, and a claim verified, before there is a model."""

from __future__ import annotations

from typing import Annotated

import typer

from hf_dp.cli.audit import audit
from hf_dp.cli.common import PLAN_SPELLINGS, SPELLINGS
from hf_dp.cli.demo import demo
from hf_dp.cli.memorisation import memorisation
from hf_dp.cli.plan import plan
from hf_dp.cli.recipes import recipes
from hf_dp.cli.report import report
from hf_dp.cli.size import size
from hf_dp.cli.train import train
from hf_dp.cli.verify import verify

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)


def _show_version(wanted: bool) -> None:
    if wanted:
        from hf_dp.versions import library_versions

        typer.echo(" ".join(f"{name.replace('_', '-')} {version}" for name, version in library_versions().items()))
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", help="Print the versions and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Differentially private fine-tuning of Hugging Face models.

    New here? `hf-dp demo` shows what it is for; `hf-dp plan` what a budget
    costs; `hf-dp --install-completion` lets the tab key finish commands. Each
    command's --help has an example.

    Exit codes: 0 for yes or done; 1 for no (the demo did not show it, a claim
    does not hold, or an attack shows more) or an error inside a recipe; 2 for
    input that is refused, or a question that could not be answered.
    """


app.command(context_settings=SPELLINGS)(demo)
app.command(context_settings=PLAN_SPELLINGS)(plan)
app.command(context_settings=SPELLINGS)(size)
# Its own --help would hide those of the recipes.
app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True}, add_help_option=False)(train)
app.add_typer(recipes, name="recipes")
app.command(context_settings=SPELLINGS)(report)
app.command(context_settings=SPELLINGS)(verify)
app.command(context_settings=SPELLINGS)(audit)
app.command(context_settings=SPELLINGS)(memorisation)
