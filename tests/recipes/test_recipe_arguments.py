"""No recipe ignores what it is asked for: each is asked for every argument of the promise and of training."""

from __future__ import annotations

import csv
import dataclasses
import json
from pathlib import Path

import pytest
import yaml

from hf_dp import PrivacyConfig
from hf_dp.accounting import truncated
from hf_dp.accounting.risk import risk
from hf_dp.training.trainer import DPTrainerMixin
from tests.recipes.conftest import local as local_questions  # noqa: F401 - a fixture
from tests.recipes.running import ROOT
from tests.recipes.test_recipes_text import data  # noqa: F401 - a fixture
from tests.recipes.test_recipes_text import local as local_answers  # noqa: F401 - a fixture

RECIPES = sorted(path.stem for path in (ROOT / "recipes").glob("*.yaml"))
# Unlike the defaults, and unlike the files.
PROMISE = {
    "clipping": "automatic",
    "noise": "chacha20",
    "target_delta": 1e-6,
    "clipping_norm": 0.7,
    "accountant": "rdp",
    "withhold_non_private_logs": True,
    "sampling_probability": 0.05,
    "other_people": True,
    "passes": 2,
    "equal_widths": True,
}
FEW = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
# Not with the accountant above, nor with dp-accounting 0.5.
CAPPED = {} if truncated.EVENT is None else {"max_batch_size": 10_000}
OF_THE_PROMISE = {**PROMISE, "target_epsilon": 2.5, "privacy_seed": 5, "re_attention": {"budget_share": 0.3}}
OF_TRAINING = {"learning_rate": 0.0123, "seed": 7, "gradient_accumulation_steps": 3, "per_device_train_batch_size": 4}


@pytest.fixture(autouse=True)
def no_cipher(monkeypatch):
    """Plans are made, and no noise is drawn: the package of the cipher need not be there."""
    monkeypatch.setattr("hf_dp.noise.chacha20._cipher", object)


@pytest.fixture
def local(local_questions, local_answers):  # noqa: F811
    """For a recipe, the flags that make it read local models and data."""
    return lambda recipe: (
        local_answers
        if recipe in ("instruct", "table_to_text", "table_to_text_lora", "preferences")
        else local_questions
    )(recipe)


@pytest.fixture
def begun(train, monkeypatch):
    """The trainer of the first training that a recipe begins, which does not begin, and its plan."""

    def of(recipe: str, **given):
        found = []

        def begin(trainer, **_):
            trainer.get_train_dataloader()
            found.append((trainer, trainer._require_run().plan))
            raise SystemExit(0)

        monkeypatch.setattr(DPTrainerMixin, "train", begin)
        values = {k: json.dumps(v) if isinstance(v, dict) else str(v) for k, v in given.items()}
        train(recipe, "--smoke", "true", *(part for name, value in values.items() for part in (f"--{name}", value)))
        return found[0]

    return of


def test_what_is_asked_for_is_all_that_the_promise_has():
    by_other_flags = {"seed", "re_attention", "noise_multiplier", "target_epsilon", "max_batch_size"}
    by_other_flags |= {"unit", "max_examples_per_unit", "unit_sampling"}
    by_other_flags |= {"target_tpr", "at_fpr", "dataset_size", "after"}
    not_for_flags = {"sparse_embeddings", "output_bias", "groups"}
    assert PROMISE.keys() | by_other_flags | not_for_flags == {f.name for f in dataclasses.fields(PrivacyConfig)}
    assert all(getattr(PrivacyConfig(target_epsilon=1), name) != value for name, value in PROMISE.items())


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.slow
def test_every_argument_is_heeded(recipe, begun):
    decides_itself = {"re_attention"} if recipe == "sequential_recommendation" else set()
    asked = {name: value for name, value in OF_THE_PROMISE.items() if name not in decides_itself}
    if recipe.startswith("sparse_embeddings"):
        del asked["re_attention"]  # two ways to spend on the tables, which PrivacyConfig does not have together
    has_texts = not recipe.startswith(("sparse_embeddings", "sequential_recommendation"))
    asked |= {"max_tokens_per_micro_batch": 777} if has_texts else {}
    trainer, plan = begun(recipe, **asked, **OF_TRAINING, max_steps=3)
    assert trainer.max_tokens_per_micro_batch == (777 if has_texts else None)
    config = plan.config
    assert {name: getattr(config, name) for name in PROMISE} == PROMISE
    assert (config.target_epsilon, config.noise_multiplier, config.seed, plan.delta) == (2.5, None, 5, 1e-6)
    if "re_attention" in asked:
        assert config.re_attention.budget_share == 0.3
    assert (plan.steps, trainer.args.seed) == (3, 7)
    assert plan.sampler.expected_batch_size == 12
    rates = [group["lr"] for group in trainer.optimizer.param_groups] if trainer.optimizer else [None]
    own = {None: trainer.args.learning_rate, 3 * 0.0123: 0.0123}  # a rate for each label
    assert 0.0123 in [own.get(rate, rate) for rate in rates]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.slow
def test_a_flag_takes_the_place_of_what_the_file_says_in_another_way(recipe, begun):
    given = yaml.safe_load((ROOT / "recipes" / f"{recipe}.yaml").read_text(encoding="utf-8"))
    assert {"target_epsilon", "max_steps"} <= given.keys()
    # With noise that is given there is no budget for releases.
    arms = {"arms": "off", "start": "random"} if recipe == "sequential_recommendation" else {}
    _, plan = begun(recipe, noise_multiplier=1.3, num_train_epochs=2, **arms, **CAPPED)
    assert plan.config.max_batch_size == CAPPED.get("max_batch_size")
    assert plan.sampler.terms.kind == ("truncated_poisson" if CAPPED else "poisson")
    assert (plan.config.target_epsilon, plan.noise_multiplier) == (None, 1.3)
    assert plan.steps == 2 * len(plan.sampler)
    assert plan.config.target_delta == (None if "target_delta" not in given else float(given["target_delta"]))


@pytest.mark.slow
def test_a_budget_of_attacks_takes_the_place_of_the_epsilon_in_the_file(begun):
    _, plan = begun("classify", target_tpr=0.3, at_fpr=0.2, max_steps=2)
    assert (plan.config.target_epsilon, plan.config.target_tpr, plan.config.at_fpr) == (None, 0.3, 0.2)
    found = risk(plan.mechanism.event, (0.2,)).true_positive_rates[0.2]
    assert 0.299 < found <= 0.3


@pytest.mark.parametrize("way", ["units", "examples"])
@pytest.mark.slow
def test_the_rate_of_a_head_follows_from_the_noise_of_units(begun, questions_directory, tmp_path, way):
    rows = list(csv.DictReader((questions_directory / "train.csv").open(encoding="utf-8")))
    texts = [{**row, "who": [i % 20] if i % 2 else [i % 20, i % 7]} for i, row in enumerate(rows[:60])]
    texts = texts if way == "examples" else [{**row, "who": row["who"][0]} for row in texts]
    (tmp_path / "train.json").write_text(json.dumps(texts), encoding="utf-8")
    by_user = {"unit": "who", "max_examples_per_unit": 2, "unit_sampling": way, "max_steps": 2}
    trainer, plan = begun("classify", train_file=tmp_path / "train.json", head_noise=1e-3, **by_user)
    assert (plan.mechanism.unit.number, plan.mechanism.unit.drawn > 20) == (20, way == "examples")
    rate, n = trainer.optimizer.param_groups[0]["lr"], plan.sampler.expected_batch_size
    assert rate == pytest.approx(1e-3 / (plan.noise_multiplier / n * 2**0.5), rel=1e-6)


@pytest.mark.parametrize(
    ("recipe", "flags", "words"),
    [
        ("causal_lm", {"target_epsilon": 1, "noise_multiplier": 1}, "--target_epsilon and --noise_multiplier"),
        ("causal_lm", {"target_epsilon": 1, "target_tpr": 0.1}, "--target_epsilon and --target_tpr"),
        ("causal_lm", {"max_steps": 1, "num_train_epochs": 1}, "--max_steps and --num_train_epochs"),
        ("causal_lm", {"unit": "user", "max_examples_per_unit": 2, **FEW}, "unit='user', and the training dataset"),
        ("sequential_recommendation", {"epsilons": 1, "target_epsilon": 2}, "--epsilons and --target_epsilon"),
        ("sequential_recommendation", {"epsilons": 1, "noise_multiplier": 2}, "--epsilons and --noise_multiplier"),
        ("sequential_recommendation", {"seeds": 1, "seed": 2}, "--seeds and --seed"),
        ("sequential_recommendation", {"paired": 1, "privacy_seed": 2}, "--paired and --privacy_seed"),
        ("sequential_recommendation", {"re_attention": "{}"}, "--re_attention with this recipe"),
        ("classify", {"weight_decay": 0.1}, "--weight_decay with this recipe"),
        ("classify", {"unit": "labels", "max_examples_per_unit": 2}, "has no column 'labels'"),
        ("sparse_embeddings", {"optim": "sgd"}, "--optim with this recipe"),
        ("causal_lm", {"load_in_4bit": 1}, "--load_in_4bit with --method full"),
        ("table_to_text", {"comparison_learning_rate": 1e-3}, "without --compare_without_privacy"),
        (
            "causal_lm",
            {"compare_without_privacy": 1, "withhold_non_private_logs": 1},
            "--withhold_non_private_logs and --compare_without_privacy",
        ),
    ],
)
@pytest.mark.slow
def test_what_contradicts_or_would_not_be_heeded_is_refused_by_name(recipe, flags, words, train):
    printed, out = train(recipe, *(part for name, value in flags.items() for part in (f"--{name}", str(value))), code=2)
    assert words in " ".join(printed.split())
    assert "What to do:" in printed
    assert not out.exists()


@pytest.mark.slow
def test_a_list_of_the_recipe_wins_over_the_file(begun):
    trainer, plan = begun(
        "sequential_recommendation", arms="on", epsilons=1.25, seeds=3, target_delta=1e-9, accountant="rdp"
    )
    assert (plan.config.target_epsilon, plan.delta, plan.config.accountant) == (1.25, 1e-9, "rdp")
    assert Path(trainer.args.output_dir).name == "epsilon_1.25_on_released_scale_1_seed_3"


def test_all_that_is_promised_stays_where_a_run_has_no_noise_and_true_shares_are_no_promise(part):
    recipe, given = part("sequential_recommendation"), PrivacyConfig(target_epsilon=3, **PROMISE, seed=4)
    asked = recipe.RecipeArguments(arms="on,off", epsilons="1.23456789,inf", token_frequencies="released,true")
    runs = recipe.planned(asked, given, 9)
    promises = {run: recipe.promise(given, run, asked, Path("shares.json")) for run in runs}
    for run, config in promises.items():
        assert {name: getattr(config, name) for name in PROMISE} == PROMISE
        assert (config.target_epsilon, config.noise_multiplier) in ((1.23456789, None), (None, 0.0))
        assert config.seed == (9 if run.token_frequencies == "true" and run.arm == "on" else 4)
    private = recipe.promise(given.replace(seed=None), runs[1], asked, Path("shares.json"))
    assert (runs[1].token_frequencies, private.seed) == ("true", 9)


@pytest.mark.slow
def test_the_record_says_what_was_asked_for(train):
    flags = ("--target_epsilon", "1", "--target_delta", "1e-9", "--arms", "off", "--accountant", "rdp")
    _, out = train("sequential_recommendation", "--smoke", "true", *flags)
    record = json.loads((out / "epsilon_1_off_seed_0" / "privacy.json").read_text(encoding="utf-8"))
    assert record["config"]["target_epsilon"] == 1
    assert record["report"]["delta"] == record["config"]["target_delta"] == 1e-9
    assert 0.99 < record["report"]["epsilon"] <= 1
    assert record["report"]["accountant"] == "rdp"
    assert record["report"]["steps"] == 2
    assert (out / "epsilon_1_off_seed_0" / "trainer_state.json").is_file()
