"""Next item from the items before it, privately and from scratch on long-tailed data, with and without Re-Attention.

The privacy unit is a user: one sequence of items, of which the last is the test and the `--targets` before it are
learnt, in one loss that is their mean. Item embeddings are tied. By default the data is generated, with a known long
tail.

What is learnt is what differs from popularity: how often each item is a target is released once, with noise and out of
the same budget, and the scores begin as its logarithm (`--start released`). The learning rate is that of at most 120
steps, and of more it is divided by sqrt(steps / 120), so that noise alone carries no score far from where it began.

Each run has a folder of its own in the output directory, with its model, whether each test user was hit
(`hits.json`), and the report by group.
"""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
from transformers import GPT2Config, TrainingArguments, set_seed

from common.arguments import parse
from common.comparison import VarianceControl, collate, folder_of, percent, refuse_unknown, trainer
from common.groups import report_by_group
from common.next_item import NEAR_NOTHING, Beginning, NextItem, as_language_model, gains, measures
from common.next_item_results import Measures, check_same_settings, draw, show
from common.rates import in_many_steps, planned_steps, within
from common.results import save
from common.sequences import PADDING, SequenceData, Sequences, item_tokenizer, load, popularity
from hf_dp import OutputBiasConfig, PrivacyConfig, ReAttentionConfig
from hf_dp.errors import ConfigurationError

ARMS = ("off", "on", "shuffled", "constant")
FREQUENCIES = ("released", "uniform", "true")
_BEFORE = "before training: "
# What the learning rate was measured with.
_STEPS = 120
USAGE = """from transformers import pipeline
next_item = pipeline("text-generation", DIRECTORY, max_new_tokens=1, return_full_text=False)
print(next_item("ITEMS"))"""


@dataclass(kw_only=True)
class RecipeArguments(SequenceData):
    """The model, and what is compared."""

    IN_PLACE_OF: ClassVar = {
        "epsilons": ("target_epsilon", "noise_multiplier", "target_tpr", "at_fpr"),
        "seeds": ("seed",),
        "paired": ("privacy_seed",),
    }
    DECIDES_ITSELF: ClassVar = {"re_attention": "--arms, --error, --fidelity, --scales and others say it here"}

    width: int = 64
    start: Literal["released", "random"] = field(
        default="released",
        metadata={"help": "Where scores begin: at released popularity (needs a budget to pay for it), or anywhere."},
    )
    start_share: float = field(default=0.2, metadata={"help": "Of the budget, for the release that scores start from."})
    arms: str = field(default="off", metadata={"help": "Of off, on, shuffled and constant, with commas between."})
    epsilons: str | None = field(
        default=None,
        metadata={
            "help": "Target epsilons, with commas between, in place of one; inf for the same steps without noise."
        },
    )
    compare_without_privacy: bool = field(
        default=False, metadata={"help": "Train from each seed with the ordinary Trainer too, for the gap to it."}
    )
    seeds: str | None = field(
        default=None, metadata={"help": "Of the model's first weights, with commas between, in place of one."}
    )
    error: Literal["paper", "accumulated"] = "paper"
    fidelity: Literal["isotropic", "per_feature"] = "isotropic"
    token_frequencies: str = field(
        default="released",
        metadata={"help": "Of released, uniform and true (not private, to study their effect), with commas between."},
    )
    budget_share: float = 0.2
    presence_clipping_norm: float = 4.0
    scales: str = field(default="1", metadata={"help": "Of the noise's standard deviations, with commas between."})
    paired: bool = field(
        default=False,
        metadata={"help": "Batches and noise from the seed, the same for all arms: to compare them. Not private."},
    )
    figure: str | None = field(default=None, metadata={"help": "Where to draw NDCG@10 over scales."})

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_unknown("arms", self.arms.split(","), ARMS)
        refuse_unknown("token_frequencies", self.token_frequencies.split(","), FREQUENCIES)
        for text in (self.epsilons, self.scales, self.seeds):
            for value in text.split(",") if text is not None else ():
                float(value)


@dataclass(frozen=True)
class Run:
    """One training; of the ordinary Trainer where there is no arm. Without an epsilon the noise is given."""

    seed: int
    epsilon: str = ""
    arm: str | None = None
    token_frequencies: str = ""
    scale: float = 0.0

    @property
    def name(self) -> str:
        """The same for all seeds."""
        if self.arm is None:
            return "without privacy"
        settings = "" if self.arm == "off" else f", {self.token_frequencies}, scale {self.scale:g}"
        return f"{f'epsilon {self.epsilon}' if self.epsilon else 'noise as given'}, {self.arm}{settings}"

    def __str__(self) -> str:
        return f"{self.name}, seed {self.seed}"


def planned(recipe: RecipeArguments, privacy: PrivacyConfig, seed: int) -> list[Run]:
    """All runs, at the epsilon (or noise) and from the seed that are given where the recipe's own lists are not; plain
    attention only once."""
    seeds = [seed] if recipe.seeds is None else list(map(int, recipe.seeds.split(",")))
    one = "" if privacy.target_epsilon is None else str(privacy.target_epsilon).removesuffix(".0")
    epsilons = [one] if recipe.epsilons is None else recipe.epsilons.split(",")
    scales, arms, sources = (text.split(",") for text in (recipe.scales, recipe.arms, recipe.token_frequencies))
    private = [
        Run(seed, epsilon, arm) if arm == "off" else Run(seed, epsilon, arm, *settings)
        for epsilon, seed, arm, *settings in itertools.product(epsilons, seeds, arms, sources, map(float, scales))
    ]
    return [*dict.fromkeys(private), *(Run(seed) for seed in seeds if recipe.compare_without_privacy)]


def promise(privacy: PrivacyConfig, run: Run, recipe: RecipeArguments, true_shares: Path) -> PrivacyConfig | None:
    """What one run promises; with an infinite epsilon there is no noise, and no release.

    Raises:
        ConfigurationError: a release, and no budget to pay for it.
    """
    if run.arm is None:
        return None
    if recipe.start == "released" and privacy.noise_multiplier is not None:
        raise ConfigurationError(
            f"--noise_multiplier {privacy.noise_multiplier:g} with --start released.",
            why="what scores start from is paid for with a share of the budget, and there is none.",
            fix="give --target_epsilon, or add --start random.",
        )
    is_true = run.arm != "off" and run.token_frequencies == "true"
    # Shares of private data without noise are no promise; a seed is what says so.
    privacy = privacy.replace(seed=run.seed if recipe.paired or is_true else privacy.seed)
    if run.epsilon and math.isinf(float(run.epsilon)):
        return privacy.replace(target_epsilon=None, noise_multiplier=0.0)
    if run.epsilon and float(run.epsilon) != privacy.target_epsilon:
        privacy = privacy.replace(target_epsilon=float(run.epsilon), noise_multiplier=None)
    if recipe.start == "released":
        privacy = privacy.replace(output_bias=OutputBiasConfig(budget_share=recipe.start_share))
    if run.arm == "off":
        return privacy
    attention = ReAttentionConfig(
        error=recipe.error,
        fidelity=recipe.fidelity,
        token_frequencies="public" if is_true else run.token_frequencies,  # type: ignore[arg-type]
        public_frequencies=str(true_shares) if is_true else None,
        budget_share=recipe.budget_share,
        presence_clipping_norm=recipe.presence_clipping_norm,
        scale=run.scale,
    )
    return privacy.replace(re_attention=attention)


def trained(
    run: Run,
    privacy: PrivacyConfig | None,
    recipe: RecipeArguments,
    arguments: TrainingArguments,
    data: Sequences,
    folder: Path,
) -> tuple[Measures, Measures | None]:
    """Trains, saves what is private, and measures, also what was released before it; the hits go into the folder."""
    set_seed(run.seed)
    begins = recipe.start == "released"
    config = GPT2Config(
        vocab_size=data.items + 1, n_positions=recipe.longest, n_embd=recipe.width, n_layer=1,
        n_head=recipe.width // 32, initializer_range=NEAR_NOTHING if begins else 0.05,
        bos_token_id=None, eos_token_id=None, pad_token_id=PADDING, embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0,
    )  # fmt: skip
    if privacy is None:
        arguments = replace(arguments, seed=run.seed)
    if begins:
        steps = planned_steps(arguments, len(data.train))
        arguments = replace(arguments, learning_rate=in_many_steps(arguments.learning_rate, steps, _STEPS))
    made = trainer(
        NextItem(config, with_bias=begins, only_new=recipe.new_items_only),
        arguments,
        folder,
        privacy,
        train_dataset=data.train,
        data_collator=collate,
        processing_class=item_tokenizer(data),
    )
    if run.arm is not None:
        made.add_callback(VarianceControl(run.arm))
    beginning = Beginning(data.test)
    if privacy is not None and privacy.output_bias is not None:
        made.add_callback(beginning)
    made.train()
    found = gains(made.model, data.test)
    if privacy is not None:
        made.model = made.model_wrapped = as_language_model(made.accelerator.unwrap_model(made.model))
        save(made, USAGE.replace("ITEMS", " ".join(data.names[:2])))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "hits.json").write_text(json.dumps(found.gt(0).double().tolist()), encoding="utf-8")
    return measures(found), beginning.found


def hits(folder: Path) -> list[float]:
    """1.0 or 0.0 for each test user; empty where none are kept."""
    path = folder / "hits.json"
    return list(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else []


def main() -> None:
    """Trains each arm at each epsilon from each seed, and prints a table. Runs in `results.json` are not repeated."""
    recipe, arguments, privacy = parse(RecipeArguments)
    if privacy.withhold_non_private_logs and recipe.group_column == "rarity":
        raise ConfigurationError(
            "--group_column rarity with --withhold_non_private_logs.",
            why="which items are rare is counted in the private data, exactly.",
            fix="group by length or by a group of each user, or leave out one of the two.",
        )
    data, output = load(recipe), Path(str(arguments.output_dir))
    arguments = within(arguments, privacy, len(data.train))
    runs = planned(recipe, privacy, arguments.seed)
    true_shares = output / "for_owner_only_true_shares.json"
    # All before the first training: what is refused in one of them would come too late.
    promises = {run: promise(privacy, run, recipe, true_shares) for run in runs}
    folders = {run: folder_of(output, run) for run in runs}
    kept = output / "results.json"
    known: dict[str, Measures] = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else {}
    if data.groups is not None:
        lost = [run for run in runs if str(run) in known and len(hits(folders[run])) != len(data.test)]
        if lost:
            raise ConfigurationError(
                f"--group_column, and a result of '{lost[0]}' in {kept} without the hits of these users.",
                why="a run that is in it is not repeated, and a mean says nothing of groups.",
                fix="choose another output_dir; trained once more, its epsilon adds up with the first.",
            )
    check_same_settings(output, recipe, arguments, privacy)
    if any(run.token_frequencies == "true" for run in runs):
        counts = np.bincount([item for row in data.train for item in set(row["input_ids"])], minlength=data.items + 1)
        true_shares.write_text(json.dumps((counts / len(data.train)).tolist()), encoding="utf-8")
        print(f"{true_shares} has how often each item occurs in the private data, exactly: show it to nobody.")
    for run in runs:
        if str(run) in known:
            continue
        found, before = trained(run, promises[run], recipe, arguments, data, folders[run])
        known |= {str(run): found} if before is None else {f"{_BEFORE}{run}": before, str(run): found}
        kept.write_text(json.dumps(known, indent=2), encoding="utf-8")
        print(f"{run}: NDCG@10 {found[0]:.2f}, HIT@10 {found[1]:.2f}", flush=True)
    results: dict[str, list[Measures]] = {}
    for run in runs:
        for name, text in ((f"{_BEFORE}{run.name}", f"{_BEFORE}{run}"), (run.name, str(run))):
            if text in known:
                results.setdefault(name, []).append(known[text])
    if data.groups is not None:
        report(runs, folders, data.groups)
    if recipe.group_column == "rarity":
        print("Which items are rare is counted in the private data, without noise: show these groups to nobody.")
    show(results, None if privacy.withhold_non_private_logs else measures(popularity(data, recipe.new_items_only)))
    if recipe.figure is not None:
        draw(results, recipe.figure)


def report(runs: list[Run], folders: dict[Run, Path], groups: list[str]) -> None:
    """HIT@10 by group of each private run, beside the ordinary one from the same seed if there is one."""
    for run in (run for run in runs if run.arm is not None):
        beside = Run(run.seed)
        print(run)
        report_by_group(
            percent(hits(folders[run])),
            groups,
            measure="HIT@10, %",
            larger_is_better=True,
            directory=folders[run],
            without_privacy=percent(hits(folders[beside])) if beside in folders else None,
        )


if __name__ == "__main__":
    main()
