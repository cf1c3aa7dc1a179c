"""What each recipe saves, with its own YAML file, loads in Transformers alone and gives the recipe's own answers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hf_dp.hub import verify
from hf_dp.training.trainer import DPTrainerMixin
from tests.recipes.test_recipe_arguments import RECIPES, data, local, local_answers, local_questions  # noqa: F401 - fixtures

pytestmark = pytest.mark.usefixtures("checked_once")

READER = Path(__file__).with_name("plain_reader.py")
QUESTION = "my card was lost, why is it?"
# The class, what it is given, and what of its logits is the answer.
FORMS = {
    "classify": ("AutoModelForSequenceClassification", QUESTION, "logits[0]"),
    "classify_as_infilling": (
        "AutoModelForMaskedLM",
        f"{QUESTION} It was about [MASK].",
        "logits[0, inputs['input_ids'][0].tolist().index(tokenizer.mask_token_id), "
        "tokenizer.convert_tokens_to_ids([f'<{label}>' for label in model.config.id2label.values()])]",
    ),
    "classify_as_answers": ("AutoModelForCausalLM", QUESTION, "logits[0]"),
    "causal_lm": ("AutoModelForCausalLM", "my card was", "logits[0]"),
    "instruct": ("AutoModelForCausalLM", "my card was", "logits[0]"),
    "synthetic_text": ("AutoModelForCausalLM", "card lost\nmy card was", "logits[0]"),
    "preferences": ("AutoModelForCausalLM", "name[my] ||", "logits[0]"),
    "table_to_text": ("AutoModelForCausalLM", "name[my] ||", "logits[0]"),
    "sequential_recommendation": ("AutoModelForCausalLM", "3 5 7 11", "logits[0, -1]"),
    "sparse_embeddings_banking77": ("AutoModelForSequenceClassification", QUESTION, "logits[0]"),
    "sparse_embeddings_table": ("AutoModelForSequenceClassification", {"input_ids": [list(range(16))]}, "logits[0]"),
}
FORMS |= {f"{recipe}_lora": FORMS[recipe] for recipe in ("causal_lm", "synthetic_text", "table_to_text")}
FORMS |= {f"classify_{method}": FORMS["classify"] for method in ("full", "lora")}


@pytest.fixture(scope="module")
def plainly():
    """Asks a process that cannot import hf_dp, and knows no recipe."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, str(READER)], **pipes, cwd="/", env=environment)

    def ask(**question):
        process.stdin.write(json.dumps(question) + "\n")
        process.stdin.flush()
        return json.loads(process.stdout.readline())

    yield ask
    process.stdin.close()
    process.wait(60)


@pytest.fixture
def own(monkeypatch):
    """What the trained model answers, in the recipe's own form, at the end of its last training."""
    answers = {}

    def of(given):
        real = DPTrainerMixin.train

        def then_asked(trainer, *args, **kwargs):
            real(trainer, *args, **kwargs)
            model, tokenizer = trainer.model.eval(), trainer.processing_class
            inputs = tokenizer(given, return_tensors="pt") if isinstance(given, str) else given
            inputs = {name: torch.as_tensor(value) for name, value in inputs.items() if name != "token_type_ids"}
            with torch.no_grad():
                found = model(**inputs)
            answers["own"] = getattr(found, "logits", found)[0]

        monkeypatch.setattr(DPTrainerMixin, "train", then_asked)
        return answers

    return of


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.slow
def test_what_a_recipe_saves_is_loaded_without_it(recipe, train, own, plainly):
    kind, given, answer = FORMS.get(recipe, (None, {"features": [[1, 2, 3]]}, None))
    found = own(given)
    # One training where there may be several; Re-Attention's correction is not in the plain model.
    arms = {"sequential_recommendation": ("--arms", "off"), "sparse_embeddings_banking77": ("--arms", "adafest")}
    printed, out = train(recipe, "--smoke", "true", *arms.get(recipe, ()))
    record, *_ = sorted(out.rglob("privacy.json"), key=lambda path: len(path.parts))  # a corpus has one too
    assert json.loads(record.read_text(encoding="utf-8"))["report"]["steps"] == 2
    folder = record.parent
    usage = printed.split("loads without this recipe:\n\n")[-1].split("\n\n")[0]
    assert len(usage.splitlines()) == (9 if recipe == "classify_as_answers" else 3)
    assert usage.replace(str(folder), "OWNER/NAME") in (folder / "README.md").read_text(encoding="utf-8")
    said = plainly(directory=str(folder), kind=kind, given=given, answer=answer, usage=usage)
    assert "error" not in said, said["error"]
    wanted = found["own"].tolist()
    # These train in 16 bits, and what they save is asked in 32.
    in_16_bits = ("causal_lm_lora", "classify_as_answers", "preferences", "synthetic_text_lora", "table_to_text_lora")
    rounding = 3e-2 if recipe in in_16_bits else 2e-3
    torch.testing.assert_close(torch.tensor(said["answer"]), torch.tensor(wanted), rtol=1e-3, atol=rounding)
    assert said["printed"]
    checked = verify(folder)
    assert checked.private, checked.checks


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["classify", "classify_lora", "classify_as_infilling"])
def test_checkpoints_in_the_form_that_trains_are_taken_for_no_plain_model(recipe, train, plainly):
    flags = ("--smoke", "true", "--save_strategy", "steps", "--save_steps", "1")
    _, out = train(recipe, *flags)
    kind, given, answer = FORMS[recipe]
    for number in (1, 2):
        usage = f"from transformers import {kind}\n{kind}.from_pretrained({str(out / f'checkpoint-{number}')!r})\n"
        said = plainly(directory=str(out), kind=kind, given=given, answer=answer, usage=usage + "print('loaded')")
        assert "form_for_training" in said.get("error", "it loads"), said
    shutil.rmtree(out / "checkpoint-2")
    (out / "privacy.json").unlink()
    train(recipe, *flags, "--resume_from_checkpoint", "true")
    assert verify(out).private
