"""Preflight: examples that mix, misread axes and models that cannot be exact are refused before the first step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM

from hf_dp.errors import ConfigurationError, HfDpError, PreflightError, UnsupportedModelError
from hf_dp.losses import per_example_losses
from hf_dp.per_example import loop, oracle, preflight, record
from hf_dp.per_example.checks.independence import check_independence, check_shares
from hf_dp.per_example.checks.preflight import check_modules
from tests.architectures import VOCABULARY
from tests.per_example.small import Small, batch, parameter, relative_error, square, traced
from tests.zoo import text_batch, tiny

TINY: dict[str, tuple[Any, dict[str, Any]]] = {
    "t5": (AutoModelForSeq2SeqLM, {"d_model": 16, "d_kv": 4, "d_ff": 20, "num_layers": 1, "num_heads": 2,
                                   "dropout_rate": 0.0, "decoder_start_token_id": 0}),
    "mixtral": (AutoModelForCausalLM, {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 1,
                                       "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 3,
                                       "num_experts_per_tok": 2, "bos_token_id": 1, "eos_token_id": 2}),
    "qwen3_moe": (AutoModelForCausalLM, {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 1,
                                         "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 3,
                                         "num_experts_per_tok": 2, "moe_intermediate_size": 8, "head_dim": 4,
                                         "bos_token_id": 1, "eos_token_id": 2}),
    "albert": (AutoModelForMaskedLM, {"hidden_size": 16, "embedding_size": 8, "intermediate_size": 20,
                                      "num_hidden_layers": 3, "num_attention_heads": 4, "hidden_dropout_prob": 0.0,
                                      "attention_probs_dropout_prob": 0.0, "max_position_embeddings": 40}),
}  # fmt: skip


def architecture(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    make, values = TINY[name]
    config = AutoConfig.for_model(name, vocab_size=VOCABULARY, pad_token_id=0, **values)
    model: nn.Module = make.from_config(config).to(dtype).train()
    return model


def exact_or_refused(model: nn.Module, data: dict[str, Tensor]) -> str:
    try:
        found = record(model, per_example_losses, data)
    except HfDpError as refusal:
        return str(refusal)
    truth = loop(model, per_example_losses, data)
    norms = (found.squared_norms() - truth.squared_norms()).norm() / truth.squared_norms().norm()
    assert float(norms) <= (1e-10 if norms.dtype == torch.float64 else 1e-4)
    return "exact"


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow), 7])
def test_t5_is_exact_also_with_as_many_examples_as_positions(size: int) -> None:
    """Its relative positions are (T, T): a first axis as long as the batch, and nobody's."""
    model, data = architecture("t5"), text_batch("causal_lm", size=size, length=7)
    assert exact_or_refused(model, data) == "exact"
    certificate = preflight(model, per_example_losses, data)
    found = record(model, per_example_losses, data, certificate=certificate)
    assert relative_error(found, loop(model, per_example_losses, data)) <= 1e-12


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_sorted_experts_are_exact_also_when_frozen(name: str) -> None:
    model = architecture(name, torch.float32)
    assert exact_or_refused(model, text_batch("causal_lm")) == "exact"
    for key, p in model.named_parameters():
        p.requires_grad_(".mlp." not in key and "block_sparse_moe" not in key)
    assert exact_or_refused(model, text_batch("causal_lm")) == "exact"


@pytest.mark.parametrize(
    ("name", "size"),
    [
        pytest.param(name, size, marks=[pytest.mark.slow] * ((name, size) not in {("mixtral", 1), ("qwen3_moe", 7)}))
        for name in ("mixtral", "qwen3_moe")
        for size in (1, 3, 7, 14)
    ],
)
def test_experts_in_the_order_of_the_tokens_are_exact(name: str, size: int) -> None:
    """Transformers' batched implementation keeps each token's rows where the token is."""
    model = architecture(name)
    model.set_experts_implementation("batched_mm")
    certificate = preflight(model, per_example_losses, text_batch("causal_lm"))
    data = text_batch("causal_lm", size)
    found = record(model, per_example_losses, data, certificate=certificate)
    assert relative_error(found, loop(model, per_example_losses, data)) <= 1e-12


@pytest.mark.parametrize("size", [1, 3, 7])
def test_albert_shares_one_layer_and_is_exact(size: int) -> None:
    assert exact_or_refused(architecture("albert"), text_batch("masked_lm", size=size, length=7)) == "exact"


# --- examples that mix ----------------------------------------------------------------------------------------------


def centred(model: Any, x: Tensor) -> Tensor:
    return model.linear(x - x.mean(0)).cos()


def centred_behind_autograd(model: Any, x: Tensor) -> Tensor:
    return model.linear(x - x.mean(0).detach()).cos()


def centred_when_training(model: Any, x: Tensor) -> Tensor:
    return model.linear(x - x.mean(0).detach() if model.training else x).cos()


def centred_amid_noise(model: Any, x: Tensor) -> Tensor:
    noisy = x * (1 + 0.1 * torch.rand_like(x)) if model.training else x
    return centred_when_training(model, noisy)


def near_its_like(model: Any, x: Tensor) -> Tensor:
    """In training with noise, and near the row that is most like it."""
    if model.training:
        rows = x.detach().flatten(1)
        apart = torch.cdist(rows, rows) + 1e9 * torch.eye(len(rows), dtype=x.dtype)
        x = x + 0.1 * x.detach()[apart.argmin(1)] + 0.1 * torch.randn_like(x)
    return model.linear(x).cos()


def largest_scales_all(model: Any, x: Tensor) -> Tensor:
    return nn.functional.linear(x, model.linear.weight * x.abs().max().detach())


def capacity(model: Any, x: Tensor) -> Tensor:
    """Only the two largest rows of the batch get through."""
    chosen = x.flatten(1).norm(dim=1).topk(2).indices
    mask = torch.zeros(len(x), 1, 1, dtype=x.dtype).index_fill_(0, chosen, 1.0)
    return model.linear(x).cos() * mask


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "function",
    [
        centred, centred_behind_autograd, centred_when_training, centred_amid_noise, near_its_like, largest_scales_all,
        capacity,
    ],
)  # fmt: skip
def test_mixing_examples_are_refused(function: Any, training: bool) -> None:
    model = Small(function, linear=nn.Linear(4, 4)).train(training)
    if not training and function in (centred_when_training, centred_amid_noise, near_its_like):
        preflight(model, square, batch(3, 5, 4))
        return
    with pytest.raises(UnsupportedModelError, match=r"neighbours|losses of others|not one of each, in order"):
        preflight(model, square, batch(3, 5, 4))
    assert model.training is training


@pytest.mark.parametrize("kind", ["mean", "number of tokens", "contrastive"])
def test_failure_03_losses_that_see_the_batch_are_refused(kind: str) -> None:
    def loss(model: nn.Module, data: Any) -> Tensor:
        own = square(model, data)
        if kind == "mean":
            return own / own.mean()
        if kind == "number of tokens":
            return own * len(own) / data["x"].gt(0).sum()
        pooled = model(data["x"]).mean(1)
        return nn.functional.cross_entropy(pooled @ pooled.T, torch.arange(len(pooled)), reduction="none")

    model = Small(lambda m, x: m.linear(x).cos(), linear=nn.Linear(4, 4))
    with pytest.raises(PreflightError, match="an example's loss depends on its neighbours"):
        preflight(model, loss, batch(3, 5, 4))


def test_noise_and_dropout_in_training_are_not_mixing() -> None:
    def noisy(model: Any, x: Tensor) -> Tensor:
        x = x * (1 + 0.1 * torch.rand_like(x)) if model.training else x
        return model.linear(nn.functional.dropout(x, 0.5, model.training)).cos()

    preflight(Small(noisy, linear=nn.Linear(4, 4)), square, batch(3, 5, 4))


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(5), nn.SyncBatchNorm(5)])
def test_batch_norm_is_refused_by_name(norm: nn.Module) -> None:
    model = Small(lambda m, x: m.norm(m.linear(x)), linear=nn.Linear(4, 4), norm=norm)
    with pytest.raises(UnsupportedModelError, match=rf"norm is batch normalisation \({type(norm).__name__}\)"):
        preflight(model, square, batch(3, 5, 4))
    model.norm.requires_grad_(False)
    with pytest.raises(UnsupportedModelError, match="norm is batch normalisation"):
        check_modules(model)


def test_batch_norm_that_stays_in_eval_mode_is_accepted() -> None:
    class Frozen(nn.BatchNorm1d):
        def train(self, mode: bool = True) -> Frozen:
            return super().train(False)

    norm = Frozen(5).requires_grad_(False)
    model = Small(lambda m, x: m.norm(m.linear(x)).cos(), linear=nn.Linear(4, 4), norm=norm)
    preflight(model.train(), square, batch(3, 5, 4))
    check_modules(model)


def test_what_is_compiled_and_trained_is_refused_when_a_trainer_is_made() -> None:
    """Before Trainer looks for the names of its arguments, or for its parameters, which ends in errors of its own."""
    for inner in (torch.compile(nn.Linear(4, 4), backend="eager"), traced(nn.Linear(4, 4))):
        model = Small(lambda m, x: m.inner(m.linear(x)), linear=nn.Linear(4, 4), inner=inner)
        with pytest.raises(UnsupportedModelError, match="inner is compiled"):
            check_modules(model)
        inner.requires_grad_(False)
        check_modules(model)


def test_nothing_to_train_is_refused() -> None:
    model = Small(lambda m, x: m.linear(x), linear=nn.Linear(4, 4).requires_grad_(False))
    with pytest.raises(UnsupportedModelError, match="no trainable parameter"):
        preflight(model, square, batch(3, 5, 4))


# --- axes that are misread, and gradients that are hidden ------------------------------------------------------------


def behind_a_gate(model: Any, x: Tensor) -> Tensor:
    # Time first, where nobody follows it.
    folded = torch.from_numpy(x.numpy().transpose(1, 0, 2).reshape(-1, x.shape[2]))
    return x.cos() + model.gate * model.linear(folded).view(x.shape[1], -1, 4).transpose(0, 1).cos()


def test_a_zero_gate_hides_nothing() -> None:
    model = Small(behind_a_gate, gate=parameter(4), linear=nn.Linear(4, 4))
    with torch.no_grad():
        model.gate.zero_()
    with pytest.raises(PreflightError, match="linear"):
        preflight(model, square, batch(3, 5, 4))
    assert not bool(model.gate.any())


@pytest.mark.parametrize("positions", [3, 5, 6, 10, 15])
def test_token_types_of_all_positions_are_seen_through(positions: int) -> None:
    """zeros(T) looks the same in every row, also where there are as many positions as examples."""
    model = Small(
        lambda m, x: torch.tanh(x + m.table(torch.zeros(x.shape[1], dtype=torch.long))), table=nn.Embedding(2, 4)
    )
    data = batch(3, positions, 4)
    found = record(model, square, data, certificate=preflight(model, square, data))
    assert relative_error(found, loop(model, square, data)) <= 1e-12


def test_shares_sees_a_misread_axis_that_rows_do_not_show() -> None:
    model = Small(lambda m, x: torch.tanh(x + m.linear(torch.ones(5, 2, dtype=torch.float64))), linear=nn.Linear(2, 4))
    data = batch(5, 5, 4)
    check_independence(model, square, data)
    with pytest.raises(PreflightError, match="the gradient of linear.weight for one example"):
        check_shares(model, square, data)


def test_what_is_wrong_in_float32_is_said_of_a_model_that_does_not_compute_in_float64() -> None:
    """As where activations are held in 8 bits, with one scale for all examples."""

    def mixing(model: Any, x: Tensor) -> Tensor:
        assert x.dtype != torch.float64, "Unsupported input dtype: torch.float64"
        return model.linear(x - x.mean(0)).cos()

    model, data = Small(mixing, linear=nn.Linear(4, 4)).float(), {"x": batch(3, 5, 4)["x"].float()}
    with pytest.raises(PreflightError, match="depends on"):
        preflight(model, square, data)


def test_shares_leaves_correct_models_alone_under_dropout() -> None:
    model = tiny("bert", "sequence", torch.float32, hidden_dropout_prob=0.3, attention_probs_dropout_prob=0.3)
    state = torch.get_rng_state()
    check_shares(model, per_example_losses, text_batch("sequence", size=9))
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("data", [{"x": torch.ones(3, 5, 4).double()}, batch(1, 5, 4)])
def test_two_different_examples_are_needed(data: dict[str, Tensor]) -> None:
    model = Small(lambda m, x: m.linear(x).cos(), linear=nn.Linear(4, 4))
    with pytest.raises(ConfigurationError, match="check before the first step, .* no two differ"):
        preflight(model, square, data)


def test_a_batch_of_one_example_repeated_is_recorded_all_the_same() -> None:
    model, data = tiny("gpt2", "causal_lm"), text_batch("causal_lm", size=1, length=4)
    repeated = {k: v.expand(4, -1).clone() for k, v in data.items()}
    found, truth = (method(model, per_example_losses, repeated) for method in (record, loop))
    assert torch.allclose(found.squared_norms(), truth.squared_norms(), rtol=1e-10)


def test_a_path_taken_for_some_batches_only_is_refused_when_it_is_taken() -> None:
    def long_path(model: Any, x: Tensor) -> Tensor:
        return model.extra(model.linear(x)).cos() if x.shape[1] > 5 else model.linear(x).cos()

    model = Small(long_path, linear=nn.Linear(4, 4), extra=nn.Linear(4, 4))
    certificate = preflight(model, square, batch(3, 5, 4))
    record(model, square, batch(6, 4, 4), certificate=certificate)
    with pytest.raises(PreflightError, match=r"extra.* is used by linear \(batch, 3 dimensions\), which preflight did"):
        record(model, square, batch(3, 6, 4), certificate=certificate)


@pytest.mark.parametrize("size", [3, 5, 7])
def test_failure_02_one_row_of_position_ids_for_all(size: int) -> None:
    """GPT-2 looks its (1, T) position ids up once for the whole batch."""
    model, data = tiny("gpt2", "causal_lm"), text_batch("causal_lm", size=size, length=7)
    name = "transformer.wpe.weight"
    found, truth = (method(model, per_example_losses, data) for method in (record, loop))
    for i in range(size):
        only = torch.eye(size, dtype=torch.float64)[i]
        assert torch.allclose(found.weighted_sum(only)[name], truth.weighted_sum(only)[name], rtol=1e-10, atol=1e-14)


def test_a_wrong_rule_is_found() -> None:
    from hf_dp.per_example import RULES, Rule

    right = RULES[nn.functional.linear]

    def doubled(*args: Any) -> Any:
        gradient, factors = right.backward(*args)
        return gradient, {role: f and f.scaled(2.0) for role, f in factors.items()}

    wrong = {**RULES, nn.functional.linear: Rule("linear", right.bind, right.forward, doubled)}
    model = Small(lambda m, x: m.linear(x).cos(), linear=nn.Linear(4, 4))
    with pytest.raises(PreflightError, match=r"per-example gradients of the norms are off by"):
        preflight(model, square, batch(3, 5, 4), rules=wrong)


OF_EACH_PRECISION = [("gpt2", torch.float64), ("bert", torch.float32), ("gpt2", torch.bfloat16)]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, dtype, marks=[pytest.mark.slow] * ((name, dtype) not in OF_EACH_PRECISION))
        for name in ("gpt2", "bert", "llama_tied")
        for dtype in (torch.float64, torch.float32, torch.bfloat16)
    ],
)
def test_good_models_pass_in_every_precision(name: str, dtype: torch.dtype) -> None:
    head = "masked_lm" if name == "bert" else "causal_lm"
    model, data = tiny(name, head, dtype), text_batch(head, size=5, length=12)
    certificate = preflight(model, per_example_losses, data)
    assert record(model, per_example_losses, data, certificate=certificate).uses <= certificate


# --- padding --------------------------------------------------------------------------------------------------------


def test_failure_16_extra_padding_leaves_norms_unchanged() -> None:
    model, data = tiny("gpt2", "causal_lm"), text_batch("causal_lm")
    wide = {k: nn.functional.pad(v, (0, 5), value=-100 if k == "labels" else 0) for k, v in data.items()}
    narrow, wider = (record(model, per_example_losses, b).squared_norms() for b in (data, wide))
    assert torch.allclose(narrow, wider, rtol=1e-10)


def test_relative_error_would_see_an_error() -> None:
    model, data = Small(lambda m, x: m.linear(x).cos(), linear=nn.Linear(4, 4)), batch(3, 5, 4)
    assert relative_error(loop(model, square, data), loop(model, square, batch(3, 4, 4))) > 0.01


def test_the_oracle_goes_through_examples_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """All at once its gradients would take more memory than the training."""
    sizes: list[int] = []

    def spied(model: nn.Module, loss_fn: Any, data: Any, **options: Any) -> Any:
        sizes.append(len(data["x"]))
        return loop(model, loss_fn, data, **options)

    monkeypatch.setattr(oracle, "loop", spied)
    preflight(Small(lambda m, x: m.linear(x).cos(), linear=nn.Linear(4, 4)), square, batch(3, 5, 4))
    assert sizes == [1] * 3
