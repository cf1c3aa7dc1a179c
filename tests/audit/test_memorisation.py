"""What a model gives away of texts and secrets: against counting by hand, of one that has learnt them and one not."""

from __future__ import annotations

import inspect
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from hf_dp.audit import Secret, exposure, random_texts
from hf_dp.audit.guessed import Guesses
from hf_dp.audit.memorisation import Memorisation, Reader
from hf_dp.audit.secrets import MEAN_EXPOSURE_BY_CHANCE, candidates, most_by_chance
from hf_dp.audit.texts import Completion, completions, read
from hf_dp.errors import ConfigurationError
from tests.zoo import tiny

RNG = np.random.default_rng(0)
MEMBERS, OTHERS = random_texts(40, 12, RNG), random_texts(160, 12, RNG)
PLANTED = [Secret(f"The code of {name} is ", code) for name, code in (("Ada", "471"), ("Ben", "081"))]


def a_tokenizer() -> PreTrainedTokenizerFast:
    """In which one token may be several digits, and a secret of three digits one to three tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    texts = ["The code of Ada is ", "The code of Ben is ", *(str(n) for n in range(100, 1000, 3))]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=340, initial_alphabet=alphabet))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


TOKENIZER = a_tokenizer()


def a_model(seed: int = 0, **settings: int) -> Any:
    torch.manual_seed(seed)
    ids = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    return tiny("llama", "causal_lm", torch.float32, vocab_size=len(TOKENIZER), **ids, **settings)


@pytest.fixture(scope="module")
def learnt() -> Any:
    """A model that knows the members, and the secrets, by heart."""
    model = a_model(hidden_size=64, intermediate_size=128)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    ids = [torch.tensor(TOKENIZER(text)["input_ids"]) for text in [*MEMBERS, *(one.text for one in PLANTED)]]
    rows = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
    labels = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=-100)
    for _ in range(60):
        optimizer.zero_grad()
        model(input_ids=rows, attention_mask=(labels >= 0).long(), labels=labels).loss.backward()
        optimizer.step()
    return model


@pytest.mark.slow
def test_a_model_that_learnt_by_heart_is_exposed(learnt: Any) -> None:
    reader = Reader(MEMBERS, OTHERS, PLANTED)
    found = reader.memorisation(learnt, TOKENIZER, reader.losses(a_model(), TOKENIZER))
    assert found.by_reference is not None
    for told in (found.by_loss, found.by_reference):
        assert told.auc > 0.99
        assert told.at[0.001] is None
        assert told.at[0.01] is not None
        assert told.at[0.01].true_positives[0] > 0.8
    assert found.members.found > 30
    assert found.others.found == 0
    assert found.members.drawn > 0.9 > 0.1 > found.others.drawn
    assert found.secrets is not None
    assert found.secrets.written.found == 2
    assert not found.secrets.by_chance
    assert found.to_dict()["by_loss"]["at"]["0.001"] is None


@pytest.mark.slow
def test_a_model_that_saw_nothing_gives_nothing_away() -> None:
    """The control: whatever the seed, but for one in twenty."""
    reader, missed = Reader(MEMBERS, OTHERS, PLANTED), 0
    for seed in range(3):
        found = reader.memorisation(a_model(seed), TOKENIZER, reader.losses(a_model(9), TOKENIZER))
        assert isinstance(found, Memorisation)
        assert found.by_reference is not None
        missed += not (found.by_loss.by_chance and found.by_reference.by_chance)
        assert found.members.found == found.others.found == 0
        assert found.secrets is not None
        assert found.secrets.by_chance
        assert found.secrets.written.found == 0
    assert missed <= 1


def test_losses_are_those_of_each_text_alone_also_where_all_are_as_long() -> None:
    model = a_model()
    for texts in (["ab", "abcdef", "The code of Ada is 17"], ["abcd", "bcda", "dcba"]):
        found = read(model, TOKENIZER, texts, 6)
        assert found.cut == sum(len(ids) > 6 for ids in TOKENIZER(texts)["input_ids"])
        for text, loss, half in zip(texts, found.losses, found.second_halves, strict=True):
            ids = torch.tensor([TOKENIZER(text)["input_ids"][:6]])
            with torch.no_grad():
                assert loss == pytest.approx(model(input_ids=ids, labels=ids).loss.item(), rel=1e-5)
                logs = model(input_ids=ids).logits[0].log_softmax(-1)
            start = math.ceil(ids.shape[1] / 2)
            own = [-logs[i - 1, ids[0, i]].item() for i in range(start, ids.shape[1])]
            assert half.loss == pytest.approx(sum(own), rel=1e-5)


@pytest.mark.slow
def test_a_completion_is_what_the_model_would_generate(learnt: Any) -> None:
    wrong = replace(PLANTED[0], secret="472")
    greedy = []
    for one in (*PLANTED, wrong):
        ids = TOKENIZER(one.text)["input_ids"]
        start = len(TOKENIZER(one.prefix)["input_ids"])
        said = learnt.generate(
            input_ids=torch.tensor([ids[:start]]), max_new_tokens=len(ids) - start, do_sample=False, eos_token_id=None
        )
        greedy.append(TOKENIZER.decode(said[0, start:]) == one.secret)
    assert (
        [one.greedy for one in completions(learnt, TOKENIZER, [*PLANTED, wrong], 64)] == greedy == [True, True, False]
    )


def test_a_secret_that_is_one_token_with_what_stands_before_it_is_read_as_it_was_learnt() -> None:
    def ids(text: str) -> list[int]:
        return list(TOKENIZER(text)["input_ids"])

    pair = next(f"{n}" for n in range(10, 100) if len(ids(f"a{n}")) == len(ids("a")) + 1)
    whole, cut = Secret(f"The code of Ada is {pair[0]}", pair[1]), Secret("The code of Ada is ", pair)
    assert len(ids(whole.text)) == len(ids(whole.prefix))
    # The model is given what stands before that token.
    found = completions(a_model(), TOKENIZER, [whole, cut], 64)
    assert found[0] == found[1]


def test_the_end_that_a_tokenizer_appends_is_no_part_of_a_secret() -> None:
    ending, model = a_tokenizer(), a_model()
    ending.add_special_tokens({"eos_token": "a"})
    ending.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="$A a", special_tokens=[("a", ending.eos_token_id)]
    )
    assert ending(PLANTED[0].text)["input_ids"] == [*TOKENIZER(PLANTED[0].text)["input_ids"], ending.eos_token_id]
    assert completions(model, ending, PLANTED, 64) == completions(model, TOKENIZER, PLANTED, 64)
    assert Guesses.of(ending, PLANTED[0], 30) == Guesses.of(TOKENIZER, PLANTED[0], 30)


def test_draws_find_what_is_likely() -> None:
    assert Completion(True, 0.0).within(1) == 1
    assert Completion(False, math.log(2)).within(2) == pytest.approx(0.75)
    assert Completion(False, 1000.0).within(100) == 0


def read_alone(model: Any, guesses: Guesses, text: str) -> float:
    ids = torch.tensor([TOKENIZER(text)["input_ids"]])
    with torch.no_grad():
        logs = model(input_ids=ids, use_cache=False).logits.double().log_softmax(-1)[0]
    return -sum(logs[i - 1, ids[0, i]].item() for i in range(len(guesses.begin), ids.shape[1]))


@pytest.mark.parametrize("most", [1000, 300])
@pytest.mark.slow
def test_ranks_are_those_of_whole_texts_read_one_by_one(learnt: Any, most: int) -> None:
    guesses = Guesses.of(TOKENIZER, PLANTED[0], most)
    texts = [PLANTED[0].prefix + one for one in candidates("471", most)]
    assert len({len(rest) for rest in guesses.rest}) > 1
    fast = guesses.losses(learnt)
    assert fast.shape == (most,)
    for at in (0, 1, 2, most // 2, most - 1):
        assert fast[at] == pytest.approx(read_alone(learnt, guesses, texts[at]), rel=1e-4)
    assert exposure(fast, 0) == math.log2(most)


@pytest.mark.parametrize("kind", ["mamba", "adapters"])
def test_ranks_of_recurrent_states_and_of_adapters(kind: str) -> None:
    guesses, text = Guesses.of(TOKENIZER, PLANTED[0], 9), PLANTED[0].text
    if kind == "mamba":
        model: Any = tiny("mamba", "causal_lm", torch.float32, vocab_size=len(TOKENIZER))
    else:
        model = get_peft_model(a_model(), LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    if kind == "mamba" and "cache" not in inspect.signature(model.forward).parameters:
        with pytest.raises(ConfigurationError, match="Mamba.* keeps no keys and values"):  # before Transformers 5.24
            guesses.losses(model)
    else:
        assert guesses.losses(model)[0] == pytest.approx(read_alone(model, guesses, text), rel=1e-4)


def test_exposure_of_known_ranks() -> None:
    losses = np.arange(1024.0)
    assert [exposure(losses, secret) for secret in (0, 1, 511, 1023)] == [10, 9, 1, 0]
    # Of a model that tells no candidate from another: the middle rank, a bit below chance's mean.
    assert exposure(np.zeros(1000), 7) == pytest.approx(1.0, abs=0.01)


def test_exposure_by_chance() -> None:
    """A uniform rank, here every rank once, has the stated mean; the stated limit is exceeded about once in 1000."""
    chance = math.log2(10_000) - np.log2(np.arange(10_000) + 1)
    assert chance.mean() == pytest.approx(MEAN_EXPOSURE_BY_CHANCE, abs=0.01)
    draws = chance[RNG.integers(10_000, size=(200_000, 16))].mean(1)
    assert (draws > most_by_chance(16)).mean() == pytest.approx(0.001, abs=0.0005)


def test_candidates_have_the_shape_of_the_secret() -> None:
    assert candidates("1") == [str(digit) for digit in (1, 0, *range(2, 10))]
    many = candidates("Ab-9z", 500)
    assert len(set(many)) == len(many) == 500
    assert many[0] == "Ab-9z"
    for one in many:
        assert one[0].isupper()
        assert one[1].islower()
        assert one[2:4] == f"-{one[3]}"
        assert one[3].isdigit()
    assert len({one[0] for one in many}) == 26
    assert candidates("Ab-9z", 500) == many


NAN = a_model()
torch.nn.init.constant_(NAN.lm_head.weight, math.nan)


@pytest.mark.parametrize(
    ("ask", "found"),
    [
        (lambda: read(NAN, TOKENIZER, MEMBERS, 9), "40 texts whose loss is NaN"),
        (lambda: completions(NAN, TOKENIZER, PLANTED, 99), "2 texts whose loss is NaN"),
        (lambda: exposure(Guesses.of(TOKENIZER, PLANTED[0], 9).losses(NAN), 0), "losses of candidates with 9 NaN"),
        (lambda: read(a_model(), TOKENIZER, ["long enough", "a"], 9), "1 texts of fewer than two tokens, such as 'a'"),
        (lambda: completions(a_model(), TOKENIZER, [Secret("", "ab")], 9), "0 of them before the secret"),
        (lambda: completions(a_model(), TOKENIZER, [Secret("ab", "")], 9), "2 of them before the secret"),
        (lambda: completions(a_model(), TOKENIZER, PLANTED, 3), "3 fit"),
        (lambda: read(a_model(max_position_embeddings=5), TOKENIZER, MEMBERS, 9), "9 tokens for a model that reads 5"),
        (lambda: candidates("-?"), "'-\\?', of which it alone could be true"),
        (lambda: candidates("12", 1), "most=1"),
        (lambda: Guesses.of(TOKENIZER, Secret("", "x")), "in no token alike"),
        (lambda: Reader(["a b", "c d"], ["c d"]), "1 texts that were in and were not, such as 'c d'"),
        (lambda: Reader(MEMBERS, OTHERS, [PLANTED[0], Secret("Once more: ", "471")]), "1 secrets that are there twice"),
        (
            lambda: Guesses.of(TOKENIZER, PLANTED[0], 9).losses(a_model(max_position_embeddings=5)),
            "tokens for a model that reads 5",
        ),
        (lambda: Reader([], OTHERS).memorisation(a_model(), TOKENIZER), "no texts"),
        (lambda: Reader(MEMBERS, []).memorisation(a_model(), TOKENIZER), "no texts"),
    ],
)
def test_what_nothing_follows_from_is_refused(ask: Any, found: str) -> None:
    with pytest.raises(ConfigurationError, match=found):
        ask()


def test_a_model_without_a_cache_is_refused_where_it_is_needed() -> None:
    class Forgetful(torch.nn.Module):
        device = torch.device("cpu")

        def forward(self, **inputs: Any) -> Any:
            return type("Said", (), {"logits": torch.zeros(1, 3, 400)})

    with pytest.raises(ConfigurationError, match="Forgetful, which keeps no keys and values"):
        Guesses.of(TOKENIZER, PLANTED[0], 9).losses(Forgetful())
