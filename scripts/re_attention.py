"""Re-Attention on and off, with controls, on a small language model from scratch and on a pretrained encoder.

    python scripts/re_attention.py language
    python scripts/re_attention.py lora --encoder ENCODER --arms off,on,accumulated
    python scripts/re_attention.py full --encoder ENCODER --arms off,on,accumulated,shuffled,constant

The recipes' own models, data and optimizers, in trainings of about a minute each. All arms of a seed have the same
first weights, batches and noise, so that what differs between them is not two draws (a seed that is known is no
privacy). The release of token frequencies is paid for from the same epsilon. "on" has the error of the paper,
"accumulated" the other; in the controls each row of the token table has the noise of another one, or all have that of
their root mean square. A run whose result is in the output directory is not repeated, and the table holds each
against plain attention from the same seed where that is there too.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
import yaml
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer, DataCollatorWithPadding, HfArgumentParser, TrainingArguments, set_seed

from hf_dp import DPTrainer, PrivacyConfig, ReAttentionConfig

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "recipes"))

import causal_lm  # noqa: E402
import classify  # noqa: E402
from common import classification  # noqa: E402
from common.comparison import VarianceControl, folder_of, refuse_unknown  # noqa: E402
from common.data import public_labels  # noqa: E402
from common.language_models import characters  # noqa: E402
from common.results import Scores, scored_by_label, scored_by_loss  # noqa: E402

TASKS, RESULT = ("language", "lora", "full"), "result.json"
ARMS = ("off", "on", "accumulated", "shuffled", "constant")
# Beside the recipes' own settings.
_LANGUAGE = {
    "passage_length": 64, "width": 64, "layers": 1, "max_steps": 200, "per_device_train_batch_size": 128,
    "gradient_accumulation_steps": 2, "learning_rate": 6e-3,
}  # fmt: skip
_PRETRAINED = {"max_steps": 10, "per_device_train_batch_size": 125, "gradient_accumulation_steps": 2}
_FULL = {**_PRETRAINED, "learning_rate": 3e-5}


@dataclass(frozen=True)
class Run:
    """One training."""

    task: str
    epsilon: float
    arm: str
    seed: int

    @property
    def name(self) -> str:
        """The same for all seeds."""
        return f"{self.task}, epsilon {self.epsilon:g}, {self.arm}"

    def __str__(self) -> str:
        return f"{self.name}, seed {self.seed}"


def settings(file: str, kind: type, **others: Any) -> tuple[Any, TrainingArguments]:
    """The recipe's arguments and Transformers', from the recipe's YAML file and what is given beside it."""
    values = yaml.safe_load((ROOT / "recipes" / file).read_text(encoding="utf-8"))
    paths = {name: ROOT / value for name, value in values.items() if name.endswith("_file")}
    quiet = {"logging_steps": 1000, "disable_tqdm": True, "use_cpu": True}
    given = {**values, **paths, **quiet, **others}
    flags = [part for name, value in given.items() for part in (f"--{name}", str(value))]
    parser = HfArgumentParser((kind, TrainingArguments))  # type: ignore[arg-type]
    recipe, arguments, _ = parser.parse_args_into_dataclasses(flags, return_remaining_strings=True)
    return recipe, arguments


def promised(run: Run) -> PrivacyConfig:
    """What a run promises, if its seed were secret."""
    attention = None
    if run.arm != "off":
        attention = ReAttentionConfig(error="accumulated" if run.arm == "accumulated" else "paper")
    return PrivacyConfig(target_epsilon=run.epsilon, clipping_norm=1.0, seed=run.seed, re_attention=attention)


Task = Callable[[Run, Path], tuple[DPTrainer, Callable[[], Scores]]]


def language() -> Task:
    """Characters of TinyShakespeare, a GPT-2 from scratch."""
    recipe, arguments = settings("causal_lm.yaml", causal_lm.RecipeArguments, **_LANGUAGE)
    train, held_out, _ = causal_lm.read(recipe, characters().encode)

    def make(run: Run, folder: Path) -> tuple[DPTrainer, Callable[[], Scores]]:
        made = DPTrainer(
            model=causal_lm.build(recipe),
            args=replace(arguments, output_dir=str(folder)),
            privacy=promised(run),
            train_dataset=train,
            data_collator=causal_lm.collate,
        )
        return made, lambda: scored_by_loss(made, held_out)

    return make


def pretrained(method: str, encoder: str) -> Task:
    """Intents of banking77, a pretrained encoder; every fourth test question is scored."""
    light = {**(_FULL if method == "full" else _PRETRAINED), **({"encoder": encoder} if encoder else {})}
    recipe, arguments = settings(f"classify_{method}.yaml", classify.RecipeArguments, **light)
    tokenizer = AutoTokenizer.from_pretrained(recipe.encoder)
    names = public_labels(recipe)
    files = {"train": recipe.train_file, "test": recipe.test_file}
    train, test = (
        classification.by_length(classification.read(path, split, recipe, tokenizer, names))
        for split, path in files.items()
    )
    test = test.select(range(0, len(test), 4))

    def make(run: Run, folder: Path) -> tuple[DPTrainer, Callable[[], Scores]]:
        model, privacy = classification.build(recipe, tokenizer, names), promised(run)
        made = DPTrainer(
            model=model,
            args=replace(arguments, output_dir=str(folder)),
            privacy=privacy,
            train_dataset=train,
            data_collator=DataCollatorWithPadding(tokenizer),
            optimizers=(classify.make_optimizer(model, recipe, arguments, privacy, len(train)), None),
        )
        return made, lambda: scored_by_label(made, test)

    return make


def trained(run: Run, task: Task, folder: Path) -> dict[str, float]:
    """The measures after a training."""
    set_seed(run.seed)
    trainer, score = task(run, folder)
    trainer.add_callback(VarianceControl(run.arm))
    trainer.train()
    return score().measures


def read(path: Path) -> dict[str, float] | None:
    """The measures of a run that was made."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None  # type: ignore[no-any-return]


def spread(values: list[float], sign: str = "") -> str:
    """Mean and standard deviation."""
    return f"{np.mean(values):{sign}.4f} ± {np.std(values):.4f}"


def show(results: dict[Run, dict[str, float]], plain: dict[Run, dict[str, float] | None]) -> None:
    """Mean and standard deviation over seeds, of the measures and of their difference to plain attention."""
    measures = list(next(iter(results.values())))
    table = Table("", *measures, *(f"{measure}, less plain" for measure in measures), "seeds")
    for name in sorted({run.name for run in results}):
        found = [(one, plain[run]) for run, one in results.items() if run.name == name]
        pairs = [(one, off) for one, off in found if off is not None]
        row = [spread([one[m] for one, _ in found]) for m in measures]
        row += [spread([one[m] - off[m] for one, off in pairs], "+") if pairs else "" for m in measures]
        table.add_row(name, *row, str(len(found)))
    Console().print(table)


def main(
    task: Annotated[str, typer.Argument(help="language, lora or full.")],
    encoder: Annotated[str, typer.Option(help="With lora and full: a directory or a name on the hub.")] = "",
    arms: Annotated[str, typer.Option(help="Of off, on, accumulated, shuffled, constant.")] = "off,on",
    epsilons: Annotated[str, typer.Option(help="Target epsilons.")] = "3,5,8",
    seeds: Annotated[str, typer.Option(help="Of first weights, batches and noise.")] = "0,1,2,3,4",
    output: Annotated[Path, typer.Option(help="A folder for each run.")] = Path("out/re_attention"),
) -> None:
    """Trains what is not there yet, one after the other, and prints a table."""
    refuse_unknown("task", [task], TASKS)
    refuse_unknown("arms", arms.split(","), ARMS)
    make = language() if task == "language" else pretrained(task, encoder)
    results, plain = {}, {}
    for seed, epsilon, arm in itertools.product(seeds.split(","), epsilons.split(","), arms.split(",")):
        run = Run(task, float(epsilon), arm, int(seed))
        folder = folder_of(output, run)
        found = read(folder / RESULT)
        if found is None:
            found = trained(run, make, folder)
            (folder / RESULT).write_text(json.dumps(found, indent=2), encoding="utf-8")
            print(run, found, flush=True)
        results[run] = found
        plain[run] = read(folder_of(output, replace(run, arm="off")) / RESULT)
    show(results, plain)


if __name__ == "__main__":
    typer.run(main)
