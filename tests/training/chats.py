"""Small chats, a tokenizer and a model for them, and TRL's SFTTrainer behind the mixin; skips where TRL is absent."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hf_dp import PrivacyConfig
from hf_dp.training.trainer import DPTrainerMixin
from tests.training.workbench import exact, parameters, private

trl = pytest.importorskip("trl")

ROOT = Path(__file__).resolve().parents[2]
ROWS, MICRO, EXPECTED = 40, 3, 9
WORDS = ["[PAD]", "[UNK]", "</s>", "<system>", "<user>", "<assistant>", "<end>", *(f"w{i}" for i in range(30))]
# An answer, its end included, is between the marks.
TEMPLATE = (
    "{% for m in messages %}{{ ' <' + m.role + '> ' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content + ' <end>' }}{% endgeneration %}"
    "{% else %}{{ m.content + ' <end>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ ' <assistant> ' }}{% endif %}"
)


class DPSFTTrainer(DPTrainerMixin, trl.SFTTrainer):
    pass


def tokenizer(template: str = TEMPLATE) -> PreTrainedTokenizerFast:
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, chat_template=template, **names)


def said(draw: random.Random) -> str:
    return " ".join(draw.choices(WORDS[7:], k=draw.randint(1, 6)))


def conversations(n: int = ROWS, turns: int = 2) -> Dataset:
    """Of one to `turns` turns: a message of the user and an answer each."""
    draw = random.Random(0)
    rows = []
    for _ in range(n):
        roles = ["user", "assistant"] * draw.randint(1, turns)
        rows.append({"messages": [{"role": role, "content": said(draw)} for role in roles]})
    return Dataset.from_list(rows)


def completions(n: int = ROWS) -> Dataset:
    draw = random.Random(0)
    return Dataset.from_list([{"prompt": said(draw), "completion": " " + said(draw)} for _ in range(n)])


def a_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(WORDS), hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=0, bos_token_id=None, eos_token_id=2, initializer_range=0.3,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def settings(path: Path, **changes: Any) -> Any:
    values: dict[str, Any] = {
        "per_device_train_batch_size": MICRO, "gradient_accumulation_steps": EXPECTED // MICRO, "max_steps": 2,
        "optim": "sgd", "learning_rate": 1.0, "lr_scheduler_type": "constant", "weight_decay": 0.0, "logging_steps": 1,
        "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "use_cpu": True, "bf16": False,
        "assistant_only_loss": True,
    }  # fmt: skip
    return trl.SFTConfig(str(path), **{**values, **changes})


def make(path: Path, kind: Any = DPSFTTrainer, privacy: PrivacyConfig | None = None, **parts: Any) -> Any:
    """A trainer of `kind`; `parts` are the trainer's arguments or SFTConfig's."""
    own = ("model", "train_dataset", "eval_dataset", "processing_class", "peft_config", "compute_loss_func")
    given = {name: parts.pop(name) for name in own if name in parts}
    if issubclass(kind, DPTrainerMixin):
        given["privacy"] = privacy or private()
    values = {"model": a_model(), "train_dataset": conversations(), "processing_class": tokenizer(), **given}
    return kind(args=settings(path, **parts), **values)


def doubled(kind: Any) -> tuple[Any, Any]:
    """Two trainers behind the mixin with twice the loss of TRL's `kind`: of a batch alone, and example by example."""

    class Doubled(kind):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return 2 * super().compute_loss(*args, **kwargs)

    class Unsaid(DPTrainerMixin, Doubled):
        pass

    class Said(DPTrainerMixin, kind):
        def compute_per_example_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
            return 2 * super().compute_per_example_loss(model, inputs)

    return Unsaid, Said


def gradients_of_single(trainer: Any, chosen: Iterable[int]) -> Iterator[dict[str, Tensor]]:
    """TRL's own loss and torch's own backward, on batches of one."""
    trainer.model.train()
    for i in chosen:
        trainer.model.zero_grad()
        batch = trainer.data_collator([trainer.train_dataset[i]])
        trainer.compute_loss(trainer.model, dict(batch)).backward()
        yield {
            name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
            for name, p in trainer.model.named_parameters()
            if p.requires_grad
        }


def assert_step_is_that_of_single(
    gradients: list[dict[str, Tensor]], made: Callable[[PrivacyConfig], Any], expected: int = EXPECTED, **unit: Any
) -> Any:
    """A step without noise is the sum of these gradients, each clipped to their median norm. The trainer."""
    norms = [float(torch.stack([g.norm() for g in one.values()]).norm()) for one in gradients]
    bound = sorted(norms)[len(norms) // 2]
    assert min(norms) < bound < max(norms)
    trainer = made(exact(clipping_norm=bound, **unit))
    before = parameters(trainer.model)
    trainer.train()
    after = parameters(trainer.model)
    for name in gradients[0]:
        total = sum(min(1.0, bound / max(norm, 1e-30)) * one[name] for one, norm in zip(gradients, norms, strict=True))
        moved = (before[name] - after[name]) * expected
        torch.testing.assert_close(moved, total, rtol=1e-4, atol=1e-4 * min(1.0, bound))
    return trainer


def adapter() -> LoraConfig:
    return LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)


def from_docs(language: str, word: str) -> str:
    page = (ROOT / "docs" / "trl.md").read_text(encoding="utf-8")
    (snippet,) = [text for text in re.findall(rf"^```{language}\n(.*?)^```$", page, re.M | re.S) if word in text]
    return snippet
