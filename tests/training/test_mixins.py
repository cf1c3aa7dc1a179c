"""The mixin in front of other trainers, and rules for operations of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from transformers import DataCollatorForSeq2Seq, Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer

from hf_dp import DPTrainer
from hf_dp.errors import UnsupportedModelError
from hf_dp.per_example import RULES, Bound, instantiating
from hf_dp.training.trainer import DPTrainerMixin
from tests.architectures import VOCABULARY
from tests.training.workbench import (
    STEPS,
    a_tokenizer,
    arguments,
    last_log,
    make,
    parameters,
    private,
    rows,
    same,
    trained,
)

pytestmark = pytest.mark.usefixtures("checked_once")


@pytest.mark.slow
def test_the_mixin_in_front_of_seq2seq_trainer(tmp_path: Path) -> None:
    from transformers import BartConfig, BartForConditionalGeneration

    class DPSeq2SeqTrainer(DPTrainerMixin, Seq2SeqTrainer):
        pass

    torch.manual_seed(0)
    config = BartConfig(
        vocab_size=37, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, pad_token_id=0,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, max_position_embeddings=32, bos_token_id=1,
        eos_token_id=2, decoder_start_token_id=2, forced_eos_token_id=2,
    )  # fmt: skip
    model = BartForConditionalGeneration(config)
    tokenizer = a_tokenizer({f"w{i}" for i in range(35)})
    data = [{"input_ids": r["input_ids"], "attention_mask": [1] * len(r["input_ids"]), "labels": r["input_ids"][:3]}
            for r in rows(24)]  # fmt: skip
    base = arguments(tmp_path).to_dict()
    args = Seq2SeqTrainingArguments(
        **{k: base[k] for k in ("output_dir", "per_device_train_batch_size", "gradient_accumulation_steps", "max_steps",
                                "save_strategy", "use_cpu", "disable_tqdm")},
        report_to="none", predict_with_generate=True, generation_max_length=4,
    )  # fmt: skip
    trainer = DPSeq2SeqTrainer(
        model=model, args=args, train_dataset=data, eval_dataset=data[:4], processing_class=tokenizer,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model), privacy=private(),
    )  # fmt: skip
    start = parameters(model)
    trainer.train()
    assert not same(start, parameters(model))
    assert trainer.privacy_report().steps == STEPS
    predictions = trainer.predict(data[:4]).predictions
    assert predictions.shape[0] == 4


@pytest.mark.slow
def test_the_mixin_in_front_of_a_trainer_of_ones_own(tmp_path: Path) -> None:
    class Weighted(Trainer):
        logged = 0

        def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            return super().compute_loss(model, inputs, return_outputs, **kwargs)

        def log(self, *args: Any, **kwargs: Any) -> None:
            self.logged += 1
            super().log(*args, **kwargs)

    class Private(DPTrainerMixin, Weighted):
        def compute_per_example_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
            return 2 * super().compute_per_example_loss(model, inputs)

    trainer = make(tmp_path, kind=Private, logging_steps=1)
    trainer.train()
    assert trainer.logged == STEPS + 1
    doubled, single = last_log(trainer, "loss"), last_log(trained(tmp_path, logging_steps=1), "loss")
    assert doubled > 1.5 * single


class _Mixing(torch.nn.Module):
    """A classifier whose head is a multi_dot, for which there is no rule."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(VOCABULARY, 6)
        self.mixer = torch.nn.Parameter(torch.randn(6, 3))

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> Any:
        words = self.table(input_ids) * attention_mask[..., None]
        logits = torch.linalg.multi_dot([words.sum(1), self.mixer])
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


class _MixingTrainer(DPTrainer):
    def compute_per_example_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        logits = model(**inputs)["logits"]
        return torch.nn.functional.cross_entropy(logits, inputs["labels"], reduction="none")


class _WithARule(_MixingTrainer):
    per_example_rules: ClassVar = {
        **RULES,
        torch.linalg.multi_dot: instantiating(
            "multi_dot",
            lambda matrices: Bound(matrices[0], {"weight": matrices[1]}, {}),
            lambda x, parameters, options: torch.linalg.multi_dot([x, parameters["weight"]]),
        ),
    }


def test_a_rule_of_ones_own_trains_what_is_refused_without_it(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"mixer is used by operation .*multi_dot"):
        make(tmp_path, model=_Mixing(), kind=_MixingTrainer).train()
    model = _Mixing()
    before = model.mixer.detach().clone()
    trainer = make(tmp_path, model=model, kind=_WithARule)
    trainer.train()
    assert trainer.ledger.steps == STEPS
    assert not torch.equal(model.mixer, before)
