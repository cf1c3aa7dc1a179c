"""What TRL computes from several pairs at once, or from a reference that sees several, is refused by name."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import nn
from transformers import LlamaForCausalLM, OPTConfig, OPTForCausalLM

from hf_dp.errors import ConfigurationError, PreflightError, UnsupportedModelError
from hf_dp.losses import PREFERENCE_LOSSES
from hf_dp.training.trainer import DPTrainerMixin
from tests.per_example.checks.test_quantised import Linear8bitLt
from tests.training.answers import DPDPOTrainer, make, pairs
from tests.training.chats import WORDS, a_model, adapter, doubled, tokenizer
from tests.training.workbench import private

pytestmark = pytest.mark.usefixtures("checked_once")

trl = pytest.importorskip("trl")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"loss_type": "aot"}, "loss_type='aot'"),
        ({"loss_type": ["sigmoid", "aot_unpaired"]}, "loss_type='aot_unpaired'"),
        ({"f_divergence_type": "js_divergence"}, "f_divergence_type='js_divergence'"),
        ({"ld_alpha": 0.5}, "ld_alpha=0.5"),
        ({"use_weighting": True}, "use_weighting=True"),
        ({"sync_ref_model": True, "precompute_ref_log_probs": False}, "sync_ref_model=True"),
        ({"activation_offloading": True}, "activation_offloading=True"),
    ],
)
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_what_is_no_pairs_own(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    parts = {"ref_model": a_model()} if "sync_ref_model" in options else {}
    with pytest.raises(ConfigurationError) as caught:
        make(tmp_path, **options, **parts)
    assert words in caught.value.found
    assert caught.value.why
    assert caught.value.fix


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_a_reference_of_a_model_that_was_read_from_nowhere(tmp_path: Path) -> None:
    model = a_model()
    with pytest.raises(ConfigurationError, match="read from nowhere .*, without ref_model.") as caught:
        make(tmp_path, model=model, precompute_ref_log_probs=False)
    assert "ref_model=copy.deepcopy(model)" in caught.value.fix
    make(tmp_path, model=model, ref_model=copy.deepcopy(model), precompute_ref_log_probs=False).train()


def test_failure_81_references_of_pairs_of_other_widths(tmp_path: Path) -> None:
    privacy = private(equal_widths=True)
    with pytest.raises(ConfigurationError, match="equal_widths=True with references"):
        make(tmp_path, privacy=privacy)
    chosen = [
        make(
            tmp_path / str(n), privacy=private(equal_widths=n == 1), precompute_ref_batch_size=n, model=bf16()
        ).train_dataset["ref_chosen_logps"][:8]
        for n in (1, 8)
    ]
    make(tmp_path, privacy=privacy, precompute_ref_log_probs=False, peft_config=adapter())
    if torch.__version__ >= "2.13":  # in 2.11 rounding is the same here for all widths
        assert chosen[0] != chosen[1]  # of the same pairs, by rounding


def bf16() -> nn.Module:
    model: nn.Module = a_model().bfloat16()
    return model


@pytest.mark.parametrize(
    ("loss", "why"), [("kto", "the answer of the row before"), ("apo_zero_unpaired", "does not compute its losses")]
)
def test_losses_of_other_rows_and_of_the_batch(tmp_path: Path, loss: str, why: str) -> None:
    class Private(DPTrainerMixin, trl.KTOTrainer):
        pass

    rows = [{"prompt": row["prompt"], "completion": row["chosen"], "label": True} for row in pairs(8)]
    config = trl.KTOConfig(
        str(tmp_path), report_to="none", use_cpu=True, bf16=False, per_device_train_batch_size=2, loss_type=loss
    )
    with pytest.raises(ConfigurationError, match="KTOTrainer") as caught:
        Private(
            a_model(), args=config, train_dataset=Dataset.from_list(rows), processing_class=tokenizer(),
            ref_model=a_model(), privacy=private(),
        )  # fmt: skip
    assert why in caught.value.why


@pytest.mark.filterwarnings("ignore")  # TRL says that it is experimental
def test_trainers_of_trl_with_losses_of_their_own_are_told_which_are_known(tmp_path: Path) -> None:
    cpo = pytest.importorskip("trl.experimental.cpo")

    class Private(DPTrainerMixin, cpo.CPOTrainer):
        pass

    class Own(Private):
        def compute_per_example_loss(self, model: Any, inputs: Any) -> Any: ...

    def make_one(kind: Any) -> Any:
        values = {"report_to": "none", "use_cpu": True, "bf16": False, "loss_type": "simpo", "cpo_alpha": 0.0}
        return kind(
            a_model(), args=cpo.CPOConfig(str(tmp_path), per_device_train_batch_size=2, **values),
            train_dataset=pairs(8), processing_class=tokenizer(), privacy=private(),
        )  # fmt: skip

    with pytest.raises(ConfigurationError, match=r"CPOTrainer behind DPTrainerMixin") as refusal:
        make_one(Private)
    assert "SFTTrainer, DPOTrainer" in str(refusal.value)
    make_one(Own)


@pytest.mark.slow
def test_another_loss_than_trls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PREFERENCE_LOSSES, "sigmoid", PREFERENCE_LOSSES["hinge"])
    with pytest.raises(UnsupportedModelError, match="DPOTrainer computes .* as its loss of one pair"):
        make(tmp_path).train()


@pytest.mark.slow
def test_a_reference_that_sees_other_pairs(tmp_path: Path) -> None:
    """As one that counts padding as positions would; TRL computes it before there is a private step."""

    class Seeing(DPDPOTrainer):
        def compute_ref_log_probs(self, model: nn.Module, inputs: Any) -> Any:
            chosen, rejected = super().compute_ref_log_probs(model, inputs)
            return chosen + 10 * len(chosen), rejected

    for kind, beforehand in ((Seeing, True), (Seeing, False)):
        with pytest.raises(PreflightError):
            make(tmp_path, kind, peft_config=adapter(), precompute_ref_log_probs=beforehand).train()


class Noisy(LlamaForCausalLM):
    """In training mode it draws one number for all rows of a batch."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        found = super().forward(*args, **kwargs)
        if self.training:
            found.log_probs = found.log_probs * (1 + torch.rand(()))
        return found


def noisy() -> Any:
    torch.manual_seed(0)
    return Noisy(a_model().config).train()


@pytest.mark.slow
def test_a_reference_draws_nothing(tmp_path: Path) -> None:
    """No check of the losses sees what it draws, and beforehand it would be by a public seed."""
    kinds: tuple[dict[str, Any], ...] = (
        {"ref_model": noisy(), "precompute_ref_log_probs": False},
        {"model": noisy()},
    )
    for parts in kinds:
        trainer = make(tmp_path, **parts)
        rows = [trainer.train_dataset[i] for i in range(2)]
        batch = trainer._behind.collator(trainer.data_collator)(rows)
        found = {"ref_chosen_logps": None, **trainer._behind.prepared(trainer.model.train(), batch)}
        reference = parts.get("ref_model", trainer.model).eval()
        expected, _ = trainer.compute_ref_log_probs(reference, dict(trainer.data_collator(rows)))
        torch.testing.assert_close(found["ref_chosen_logps"], expected)
    make(tmp_path, ref_model=noisy(), precompute_ref_log_probs=False).train()
    with pytest.raises(ConfigurationError, match="by a ref_model in training mode"):
        make(tmp_path, ref_model=noisy()).train()


def test_failure_37_a_reference_in_8_bits(tmp_path: Path) -> None:
    reference = a_model()
    reference.model.extra = Linear8bitLt(6.0)
    with pytest.raises(UnsupportedModelError, match=r"ref_model\.model\.extra computes in 8 bits, but for outliers"):
        make(tmp_path, ref_model=reference, precompute_ref_log_probs=False).train()


@pytest.mark.slow
def test_dropout_is_no_other_loss(tmp_path: Path) -> None:
    """OPT draws its masks without a module that TRL could switch off."""
    config = OPTConfig(
        vocab_size=len(WORDS), hidden_size=16, ffn_dim=32, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=64, word_embed_proj_dim=16, pad_token_id=0, bos_token_id=1, eos_token_id=2, dropout=0.5,
    )  # fmt: skip
    make(tmp_path, model=OPTForCausalLM(config)).train()


@pytest.mark.slow
def test_a_reference_that_rounds(tmp_path: Path) -> None:
    """As in 16 bits, where numbers are rounded otherwise beside others: that is no influence of theirs."""

    class Rounding(DPDPOTrainer):
        def compute_ref_log_probs(self, model: nn.Module, inputs: Any) -> Any:
            by = 1 + len(inputs["input_ids"]) / 3
            return tuple(
                (by * values).bfloat16().float() / by for values in super().compute_ref_log_probs(model, inputs)
            )

    make(tmp_path, Rounding, peft_config=adapter(), precompute_ref_log_probs=False, beta=5.0).train()


@pytest.mark.slow
def test_a_subclass_with_another_loss_says_so_pair_by_pair(tmp_path: Path) -> None:
    unsaid, said = doubled(trl.DPOTrainer)
    with pytest.raises(ConfigurationError, match=r"Doubled\.compute_loss gives one loss"):
        make(tmp_path, unsaid)
    make(tmp_path, said, loss_type="sigmoid").train()
