"""`hf-dp demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from hf_dp.cli.common import NO, AsJson, print_json, refusals
from hf_dp.errors import ConfigurationError


def demo(
    context: typer.Context,
    output_dir: Annotated[
        Path,
        typer.Option(
            help="Where the private model, its privacy record and the figure go.", file_okay=False, writable=True
        ),
    ] = Path("hf-dp-demo"),
    quick: Annotated[bool, typer.Option("--quick", help="About a minute; a weaker contrast.")] = False,
    pretrained: Annotated[
        bool, typer.Option("--pretrained", help="Adapters (LoRA) on a real language model, which `make model` makes.")
    ] = False,
    model: Annotated[
        Path, typer.Option(help="With --pretrained: the folder of that model.", envvar="HF_DP_SMOLLM2")
    ] = Path("build/smollm2"),
    data_seed: Annotated[
        int,
        typer.Option(
            min=0, max=2**32 - 1, help="Seed of the generated messages and initial weights, not of the private noise."
        ),
    ] = 1,
    as_json: AsJson = False,
) -> None:
    """A model that leaks planted secrets, and one that does not: offline, on a CPU, in a few minutes.

    Pretrains a small GPT-2 on generated public messages, then fine-tunes it on
    private ones with secret codes among them, once ordinarily and once with
    differential privacy (epsilon 8).

    With --pretrained, both are done with LoRA on a pretrained model from a
    folder.

    Example, about a minute long:

        hf-dp demo --quick

    Exit codes: 0, the contrast showed; 1, it did not; 2, refused.
    """
    with refusals():
        # torch and transformers take seconds to import; the other commands should not wait for them.
        from hf_dp.demo.run import FULL, PRETRAINED, QUICK, run
        from hf_dp.hub import load_report

        if pretrained and quick:
            raise ConfigurationError(
                "--pretrained and --quick.",
                why="a minute is too short for a real language model to learn anything.",
                fix="leave one of them out.",
            )
        # The variable may be set for others, of which a demo without a model need not know.
        given = context.get_parameter_source("model")
        if not pretrained and given is not None and given.name == "COMMANDLINE":
            raise ConfigurationError(
                f"--model {str(model)!r} without --pretrained.",
                why="the demo would train a small model of its own, and not this one.",
                fix="give --pretrained too, or leave --model out.",
            )
        scale = PRETRAINED if pretrained else QUICK if quick else FULL
        result = run(output_dir, scale, data_seed, Console(stderr=as_json), model if pretrained else None)
        found = result.to_dict()
        if as_json:
            report = load_report(output_dir).to_dict()
            print_json({"source": str(output_dir), **found, "report": report})
    if not found["shown"]:
        raise typer.Exit(NO)
