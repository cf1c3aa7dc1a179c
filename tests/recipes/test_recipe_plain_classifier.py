"""Mean pooling as one more layer of the encoder: the same answers, or a refusal before training."""

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModel, set_seed

from hf_dp.errors import ConfigurationError, UnsupportedModelError

pytestmark = pytest.mark.usefixtures("checked_once")

NAMES = ["lost", "found", "stolen"]
SIZES = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 50,
    "max_position_embeddings": 40,
}  # fmt: skip
DISTILBERT = {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48, "vocab_size": 50}


@pytest.fixture
def classifier(part):
    """One with random weights, trained far from where it began, around a random encoder of some kind."""

    def make(kind: str, **settings):
        set_seed(0)
        sizes = DISTILBERT if kind == "distilbert" else SIZES
        encoder = AutoModel.from_config(AutoConfig.for_model(kind, **sizes, initializer_range=0.2))
        if getattr(encoder, "pooler", None) is not None:
            encoder.pooler = None
        recipe = SimpleNamespace(center=True, temperature=0.1, head_scale=1.0, **settings)
        kind_of = part("common.classification").MeanPoolingForSequenceClassification
        made = kind_of(encoder, torch.randn(3, 32), recipe).eval()
        made.classifier.weight.data += torch.randn(3, 32)
        return made

    return make


def batch() -> dict[str, torch.Tensor]:
    """Three texts, two of them padded on the right."""
    ids = torch.randint(5, 50, (3, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, 4:] = mask[1, 7:] = 0
    return {"input_ids": ids * mask + 1 - mask, "attention_mask": mask}


@pytest.mark.parametrize("kind", ["bert", "roberta", "xlm-roberta", "camembert"])
def test_the_plain_form_gives_the_same_answers(kind, classifier, part):
    parts, made = part("common.plain_classifier"), classifier(kind)
    plain = parts.as_sequence_classification(made, NAMES)
    with torch.no_grad():
        wanted, found = made(**batch()).logits, plain(**batch()).logits
    assert wanted.std() > 1
    torch.testing.assert_close(found, wanted, atol=1e-3, rtol=1e-3)
    assert plain.config.id2label == dict(enumerate(NAMES))
    assert made.encoder.config.num_hidden_layers == 2, "the trained one is left as it is"
    parts.check_plain_form(made, NAMES, batch())


@pytest.mark.parametrize("kind", ["distilbert", "mpnet", "electra"])
def test_an_encoder_without_a_plain_form_is_refused(kind, classifier, part):
    with pytest.raises(UnsupportedModelError, match=f"on the mean of {kind}'s states has no form that Transformers"):
        part("common.plain_classifier").check_plain_form(classifier(kind), NAMES, batch())


def test_a_form_that_computes_something_else_is_refused(classifier, part, monkeypatch):
    parts = part("common.plain_classifier")
    monkeypatch.setattr(parts, "_SMALL", 1.0)  # tanh bends
    with pytest.raises(UnsupportedModelError, match="computes something else"):
        parts.check_plain_form(classifier("bert"), NAMES, batch())


@pytest.mark.slow
def test_a_saved_one_is_taken_over_whole_and_says_where_it_was(classifier, part, tmp_path):
    parts, made, fresh = part("common.plain_classifier"), classifier("bert"), classifier("bert")
    with torch.no_grad():
        for p in made.parameters():
            p += 0.05 * torch.randn_like(p)
    parts.as_sequence_classification(made, NAMES).save_pretrained(tmp_path)
    parts.take_over(fresh, str(tmp_path), NAMES, batch())
    with torch.no_grad():
        torch.testing.assert_close(fresh(**batch()).logits, made(**batch()).logits, atol=1e-4, rtol=1e-4)
    assert fresh.encoder.config._name_or_path == str(tmp_path)
    for names, other in ((NAMES[::-1], fresh), (NAMES, classifier("roberta"))):
        with pytest.raises(ConfigurationError, match="holds no classifier of this recipe on this encoder, with these"):
            parts.take_over(other, str(tmp_path), names, batch())
    made.encoder.save_pretrained(tmp_path / "encoder")
    with pytest.raises(ConfigurationError, match="--start_from"):
        parts.take_over(fresh, str(tmp_path / "encoder"), NAMES, batch())
