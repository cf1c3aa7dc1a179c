"""Classification as infilling: what a label scores before training is what the masked language model says."""

from __future__ import annotations

import csv
import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForMaskedLM, AutoTokenizer, set_seed

from hf_dp.errors import ConfigurationError, UnsupportedModelError

pytestmark = pytest.mark.usefixtures("checked_once")

# Where PEFT has no choice of its own.
TARGETS = {"distilbert": "q_lin,v_lin", "albert": "query,value", "mpnet": "q,v", "modernbert": "Wqkv"}
LABELS = ["card_lost", "cash_fee", "top_up"]


@pytest.fixture
def infilling(part):
    return part("classify_as_infilling")


def arguments(infilling, model, questions, **changes):
    files = {"train_file": str(questions / "train.csv"), "test_file": str(questions / "test.csv")}
    labels = {"labels_file": str(questions / "categories.json")}
    return infilling.RecipeArguments(model=str(model), **{**files, **labels, **changes})


@pytest.fixture(params=["bert", "roberta", "distilbert", "electra", "albert", "mpnet", "modernbert"])
def any_masked_directory(request, masked_directory, tmp_path):
    """A random masked language model of several kinds, with the same tokenizer."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    if request.param == "distilbert":
        sizes = {"dim": 32, "n_layers": 1, "n_heads": 2, "hidden_dim": 64}
    if request.param in ("electra", "albert"):
        sizes["embedding_size"] = 16
    tokenizer = AutoTokenizer.from_pretrained(masked_directory)
    set_seed(0)
    config = AutoConfig.for_model(request.param, vocab_size=len(tokenizer), pad_token_id=0, **sizes)
    model = AutoModelForMaskedLM.from_config(config)
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.few(6)
@pytest.mark.parametrize("method", ["lora", "full"])
def test_a_label_scores_the_mean_logit_of_its_tokens_at_the_mask(
    method, infilling, any_masked_directory, questions_directory
):
    targets = TARGETS.get(AutoConfig.from_pretrained(any_masked_directory).model_type)
    recipe = arguments(infilling, any_masked_directory, questions_directory, method=method, lora_targets=targets)
    tokenizer = AutoTokenizer.from_pretrained(any_masked_directory)
    oracle = AutoModelForMaskedLM.from_pretrained(any_masked_directory)
    words = infilling.verbalised(recipe, LABELS)
    model = infilling.build(recipe, tokenizer, words).eval()
    batch = tokenizer(["why is my card lost? it is about [MASK].", "[MASK] fee"], padding=True, return_tensors="pt")
    with torch.no_grad():
        found = model(**batch).logits
        logits = oracle.eval()(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    logits = logits[batch["input_ids"] == tokenizer.mask_token_id]
    expected = [logits[:, tokenizer(word, add_special_tokens=False)["input_ids"]].mean(1) for word in words]
    assert torch.allclose(found, torch.stack(expected, 1), atol=1e-5)
    assert found.std() > 0.1

    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    with torch.no_grad():
        trained = model(**batch).logits
        plain = infilling.as_masked_lm(model, recipe, tokenizer, LABELS)
        logits = plain(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    assert not torch.allclose(trained, found, atol=0.1)
    asked = tokenizer.convert_tokens_to_ids([f"<{label}>" for label in LABELS])
    assert torch.allclose(logits[batch["input_ids"] == tokenizer.mask_token_id][:, asked], trained, atol=1e-4)


def test_unknown_layers_are_refused_with_those_there_are(infilling, masked_directory, questions_directory):
    recipe = arguments(infilling, masked_directory, questions_directory, lora_targets="no_such")
    tokenizer = AutoTokenizer.from_pretrained(masked_directory)
    with pytest.raises(ConfigurationError, match=r"(?s)no layers to adapt in bert.*--lora_targets.*query.*value"):
        infilling.build(recipe, tokenizer, infilling.verbalised(recipe, LABELS))


def test_only_what_is_used_is_trained(infilling, any_masked_directory, questions_directory):
    tokenizer = AutoTokenizer.from_pretrained(any_masked_directory)
    recipe = arguments(infilling, any_masked_directory, questions_directory, method="full")
    model = infilling.build(recipe, tokenizer, infilling.verbalised(recipe, LABELS))
    model(**tokenizer(["it is [MASK]"], return_tensors="pt"), labels=torch.tensor([1])).loss.backward()
    assert [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None] == []


def test_an_encoder_without_the_head_is_refused(infilling, encoder_directory, questions_directory):
    recipe = arguments(infilling, encoder_directory, questions_directory, method="full")
    tokenizer = AutoTokenizer.from_pretrained(encoder_directory)
    with pytest.raises(UnsupportedModelError, match="has no trained masked language modelling head"):
        infilling.build(recipe, tokenizer, infilling.verbalised(recipe, LABELS))


def test_the_words_of_a_label_can_be_given(infilling, masked_directory, questions_directory, tmp_path):
    path = tmp_path / "words.json"
    path.write_text(json.dumps({"card_lost": "lost", "cash_fee": "fee", "top_up": "top"}), encoding="utf-8")
    recipe = arguments(infilling, masked_directory, questions_directory, verbaliser_file=str(path))
    assert infilling.verbalised(recipe, LABELS) == [" lost", " fee", " top"]
    path.write_text(json.dumps({"card_lost": "lost", "cash_fee": " "}), encoding="utf-8")
    with pytest.raises(infilling.ConfigurationError, match="no words for the label 'cash_fee'"):
        infilling.verbalised(recipe, LABELS)


def test_long_texts_are_cut_and_each_keeps_its_one_mask(
    infilling, masked_directory, questions_directory, tmp_path, capsys
):
    path = tmp_path / "long.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        texts = ["my card " * 50, "a [MASK] of my own", "", "{mask} {text}"]
        csv.writer(file).writerows([("text", "category"), *((text, "top_up") for text in texts)])
    recipe = arguments(infilling, masked_directory, questions_directory, max_length=32)
    tokenizer = AutoTokenizer.from_pretrained(masked_directory)
    rows = infilling.infilled(str(path), "train", recipe, tokenizer, LABELS)
    assert [ids.count(tokenizer.mask_token_id) for ids in rows["input_ids"]] == [1, 1, 1, 1]
    assert max(map(len, rows["input_ids"])) == 32
    tail = tokenizer("It was about [MASK].")["input_ids"][-4:]
    assert all(ids[-4:] == tail for ids in rows["input_ids"])
    assert f"{path}: 1 of 4 rows are cut off after " in capsys.readouterr().out
    recipe.max_length = 6
    with pytest.raises(ConfigurationError, match="what stands around a text takes 7 tokens"):
        infilling.infilled(str(path), "train", recipe, tokenizer, LABELS)
    with pytest.raises(ConfigurationError, match="an encoder of 128 positions"):
        infilling.build(recipe, tokenizer, infilling.verbalised(recipe, LABELS), 129)
