"""Variances: tracked ones agree with drawn ones, and the correction undoes what noise does to attention."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from hf_dp import ReAttentionConfig
from hf_dp.accounting import Ledger
from hf_dp.config import PrivacyConfig
from hf_dp.config.asked import asked
from hf_dp.errors import ConfigurationError
from hf_dp.parts.re_attention import ReAttention
from hf_dp.parts.re_attention.attention import OWNERS, KeyNoise, re_attention_forward
from hf_dp.parts.re_attention.deviations import one_step, relative_counts
from hf_dp.parts.token_frequencies import LABEL, release_token_frequencies
from hf_dp.randomness import Entropy
from hf_dp.sampling.poisson import PoissonBatchSampler
from hf_dp.step.plan import Plan

DRAWS, VOCABULARY = 160, 100
MODELS: dict[str, dict[str, int]] = {
    "gpt2": {"n_embd": 64, "n_layer": 4, "n_head": 2, "vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0},
    "llama": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 2,
              "num_key_value_heads": 1, "vocab_size": VOCABULARY},
    "gemma2": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 2,
               "num_key_value_heads": 1, "head_dim": 32, "vocab_size": VOCABULARY},
}  # fmt: skip

# With little noise most of that in deep keys comes through attention outputs, where positions share it.


def frequencies() -> Tensor:
    """A long tail."""
    return 1 / (torch.arange(VOCABULARY) + 2.0)


@functools.cache
def tracked_and_drawn(family: str, fidelity: Any, deviation: float) -> list[tuple[Tensor, Tensor]]:
    """For each layer the variances of the keys over draws of the noisy parameters, and the mean of the tracked ones.

    They are tracked where training tracks them: in passes whose parameters have the noise in them.
    """
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **MODELS[family])).eval()
    ids = torch.randint(1, VOCABULARY, (2, 16))  # 0 is padding in some families, a row of zeros
    attention = noisy_attention(model, fidelity, deviation)
    seen: list[tuple[Tensor, Tensor]] = []
    ask = attention.key_noise

    def listen(module: nn.Module, query: Tensor, key: Tensor, value: Tensor) -> Any:
        noise = ask(module, query, key, value)
        assert noise is not None
        seen.append((noise.keys.double(), key.detach().double()))
        return noise

    attention.key_noise = listen  # type: ignore[method-assign]
    layers: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(4)]
    for _ in drawn(model, attention.errors, DRAWS):
        seen.clear()
        model(ids)
        for layer, pair in zip(layers, seen, strict=True):
            layer.append(pair)
    found = []
    for layer in layers:
        tracked, variance = (
            torch.stack([noise for noise, _ in layer]).mean(0),
            torch.stack([k for _, k in layer]).var(0),
        )
        found.append((tracked, variance if fidelity == "per_feature" else variance.mean(-1, keepdim=True)))
    return found


def noisy_attention(model: Any, fidelity: Any, deviation: float) -> ReAttention:
    attention = ReAttention(model, ReAttentionConfig(fidelity=fidelity, token_frequencies="uniform"))
    attention.errors = one_step(relative_counts(model, 64, frequencies()), deviation)
    return attention


def drawn(model: Any, errors: dict[str, Tensor], draws: int) -> Iterator[None]:
    """The model with other noise in its parameters each time."""
    means = {name: p.detach().clone() for name, p in model.named_parameters()}
    for _ in range(draws):
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(means[name] + torch.randn_like(p) * errors[name])
            yield


@pytest.mark.parametrize(
    ("family", "deviation"),
    [
        ("gpt2", 1e-3),
        ("gemma2", 1e-4),
        *(("llama", deviation) for deviation in (1e-3, 1e-4)),
    ],
)
@pytest.mark.slow
def test_tracked_variances_agree_with_drawn_ones(family: str, deviation: float) -> None:
    layers = tracked_and_drawn(family, "per_feature", deviation)
    ratios = [float(tracked.sum() / drawn.sum()) for tracked, drawn in layers]
    assert ratios[0] == pytest.approx(1, abs=0.1)
    assert ratios[3] == pytest.approx(1, abs=0.3)


@pytest.mark.slow
def test_through_gates_much_noise_is_not_counted_twice() -> None:
    """The numbers of a pass have it in them."""
    for tracked, drawn in tracked_and_drawn("gemma2", "per_feature", 1e-3):
        assert 0.8 < float(tracked.sum() / drawn.sum()) < 2


@pytest.mark.slow
@pytest.mark.parametrize(("family", "deviation"), [("gpt2", 1e-3), ("llama", 1e-4), ("llama", 1e-3)])
def test_one_variance_for_each_token_is_within_a_factor_of_two_in_the_right_order(
    family: str, deviation: float
) -> None:
    for tracked, drawn in tracked_and_drawn(family, "isotropic", deviation):
        ratios = (tracked / drawn).flatten()
        assert float(ratios.min()) > 0.5
        assert float(ratios.max()) < 2
        ranks = torch.stack([values.flatten().argsort().argsort().double() for values in (tracked, drawn)])
        assert float(torch.corrcoef(ranks)[0, 1]) > 0.9


@pytest.mark.slow
def test_variances_that_are_two_thirds_are_noticed() -> None:
    """The negative control of the two tests above."""
    tracked, drawn = tracked_and_drawn("gpt2", "per_feature", 1e-3)[0]
    assert abs(float((2 / 3) ** 2 * tracked.sum() / drawn.sum()) - 1) > 0.3


class Known:
    """An owner that knows the noise of the keys beforehand."""

    before, listener = "sdpa", None

    def __init__(self, variance: Tensor) -> None:
        self.noise = KeyNoise(variance[None, None, :, None], None)

    def key_noise(self, *args: Any) -> KeyNoise:
        return self.noise

    def note_correction(self, *args: Any) -> None: ...

    def unfollowed(self) -> Any:
        return nullcontext()


@pytest.mark.slow
def test_the_correction_brings_noisy_attention_closer_to_the_noise_free() -> None:
    """KL of the mean attention over draws, to that without noise, halves at least on long-tailed tokens."""
    torch.manual_seed(0)
    queries, keys, width = 8, 200, 16
    q, k = torch.randn(1, 1, queries, width), torch.randn(1, 1, keys, width)
    deviation = 1 / (1 + torch.arange(keys).float().flip(0) / 10)  # a few keys are noisy
    one_hot, everything = torch.eye(keys)[None, None], torch.ones(1, 1, queries, keys, dtype=torch.bool)

    def attention(module: nn.Module, key: Tensor) -> Tensor:
        return re_attention_forward(module, q, key, one_hot, everything)[0][0, :, 0]

    plain, corrected = nn.Identity(), nn.Identity()
    OWNERS[corrected] = Known(deviation.square())
    truth = attention(plain, k)
    means = {plain: torch.zeros_like(truth), corrected: torch.zeros_like(truth)}
    for _ in range(2000):
        noisy = k + deviation[:, None] * torch.randn(keys, width)
        for module, mean in means.items():
            mean += attention(module, noisy) / 2000
    divergences = [float((truth * (truth / mean).log()).sum(-1).mean()) for mean in means.values()]
    assert divergences[1] < 0.5 * divergences[0]


@pytest.mark.parametrize("is_normalised", [False, True])
@pytest.mark.slow
def test_noise_draws_attention_to_keys_of_any_length_and_not_to_normalised_ones(is_normalised: bool) -> None:
    """A normalised key with noise is one more normalised key; the correction then hides it."""
    torch.manual_seed(0)
    queries, keys, width = 200, 400, 16
    q, k = 1.5 * torch.randn(1, 1, queries, width), torch.randn(1, 1, keys, width)
    k = F.normalize(k, dim=-1) * width**0.5
    values = torch.arange(keys)[None, None, :, None].ge(keys // 2).float().expand(1, 1, keys, width)
    everything = torch.ones(1, 1, queries, keys, dtype=torch.bool)
    deviation = values[0, 0, :, :1]  # of the keys of the second half, as large as they are

    def share(module: nn.Module, key: Tensor) -> float:
        return float(re_attention_forward(module, q, key, values, everything)[0].mean())

    plain, corrected = nn.Identity(), nn.Identity()
    OWNERS[corrected] = Known(deviation[:, 0].square() / (2 if is_normalised else 1))
    shares = {plain: 0.0, corrected: 0.0}
    for _ in range(100):
        noisy = k + deviation * torch.randn(keys, width)
        noisy = F.normalize(noisy, dim=-1) * width**0.5 if is_normalised else noisy
        for module in shares:
            shares[module] += share(module, noisy) / share(plain, k) / 100
    if is_normalised:
        assert shares[plain] == pytest.approx(1, abs=0.05)
        assert shares[corrected] < 0.8
    else:
        assert shares[plain] > 1.3
        assert shares[corrected] == pytest.approx(1, abs=0.05)


def plan(target: float = 3.0, n: int = 1000, **own: Any) -> Plan:
    config = PrivacyConfig(target_epsilon=target, re_attention=ReAttentionConfig(), seed=3, **own)
    entropy = Entropy(3)
    sampler = PoissonBatchSampler.of(n, 50, entropy, sampling_probability=config.sampling_probability)
    return Plan.make(config, sampler, 20, entropy, *asked(config, 20))


@pytest.mark.slow
def test_released_frequencies_are_noisy_shares_and_are_charged() -> None:
    made, ledger = plan(), Ledger()
    examples = [torch.tensor([[0, 0, 1, -100]]) for _ in range(1000)]
    found = release_token_frequencies(examples, 50, 4.0, made, ledger)
    assert [(label, count) for _, count, label in ledger.entries] == [(LABEL, 1)]
    deviation = made.noise_multiplier_of(LABEL) * 4.0 / 1000
    assert float((found[:2] - 1).abs().max()) < 5 * deviation
    assert float(found.min()) >= 1 / 1000
    # What does not stand out from the noise shares one number.
    assert len(found.unique()) <= 4


@pytest.mark.slow
def test_where_n_is_secret_frequencies_do_not_follow_from_it() -> None:
    examples = [torch.tensor([[0, 0, 1, -100]]) for _ in range(900)]
    own: dict[str, Any] = {"sampling_probability": 0.05, "target_delta": 1e-6, "accountant": "rdp"}
    # What a token's shares are of is the public 50 / 0.05, and not n.
    found = [release_token_frequencies(examples, 50, 4.0, plan(n=n, **own), Ledger()) for n in (999, 900, 300)]
    assert all(torch.equal(found[0], other) for other in found[1:])
    assert float(found[0].min()) >= 1 / 1000
    # Negative control: where n is public they are divided by it.
    by_n = [release_token_frequencies(examples, 50, 4.0, plan(n=n, accountant="rdp"), Ledger()) for n in (999, 900)]
    assert not torch.equal(*by_n)


def test_the_noise_of_the_release_has_the_planned_deviation(monkeypatch: Any) -> None:
    made, seen = plan(), []
    monkeypatch.setattr(type(made.noise), "add_", lambda _, tensors, deviation, step: seen.append((deviation, step)))
    release_token_frequencies([torch.tensor([1])] * 1000, 50, 4.0, made, Ledger())
    assert seen == [(pytest.approx(4.0 * made.noise_multiplier_of(LABEL)), -1)]


def test_one_example_moves_the_histogram_by_the_clipping_norm_at_most(monkeypatch: Any) -> None:
    made = plan()
    sums = []
    monkeypatch.setattr(type(made.noise), "add_", lambda _, tensors, *__: sums.append(tensors[0].clone()))
    examples = [torch.randint(0, 40, (1, 60)) for _ in range(1000)]
    everything = [torch.arange(2000)[None]]
    for rows in (examples, examples[1:], [*examples[1:], *everything]):
        release_token_frequencies(rows, 2000, 2.0, made, Ledger())
    whole, without, huge = sums
    assert 0 < float((whole - without).norm()) <= 2.0 + 1e-9
    assert float((huge - without).norm()) == pytest.approx(2.0)


def test_an_id_beyond_the_embedding_is_refused_and_charges_nothing() -> None:
    ledger = Ledger()
    with pytest.raises(ConfigurationError, match="token id 60"):
        release_token_frequencies([torch.tensor([60])], 50, 2.0, plan(), ledger)
    assert not ledger.entries


@pytest.mark.parametrize(
    "values",
    [
        {"error": "other"},
        {"fidelity": 1},
        {"token_frequencies": "raw"},
        {"budget_share": 0.0},
        {"budget_share": 1.0},
        {"presence_clipping_norm": -1.0},
        {"scale": float("inf")},
        {"token_frequencies": "public"},
        {"public_frequencies": "file.json"},
    ],
)
def test_values_out_of_range_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        ReAttentionConfig(**values)


def test_the_config_goes_to_json_and_back() -> None:
    config = PrivacyConfig(target_epsilon=3.0, re_attention=ReAttentionConfig(scale=0.5, error="accumulated"))
    assert PrivacyConfig.from_json(config.to_json()) == config
    with pytest.raises(ConfigurationError, match="unknown"):
        PrivacyConfig.from_json('{"target_epsilon": 1, "re_attention": {"unknown": 1}}')
