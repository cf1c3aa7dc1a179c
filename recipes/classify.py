"""Private text classification: an encoder with mean pooling and a head that starts from the labels' own names.

The head's rows start as the embeddings of the label names, which are public, so that the first private step improves
on a classifier that already works. `method: lora` trains adapters and the head, `method: full` everything.
"""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from arguments import parse
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModel,
    AutoTokenizer,
    DataCollatorWithPadding,
    PreTrainedModel,
)
from transformers.modeling_outputs import SequenceClassifierOutput

from hf_dp import DPTrainer


@dataclass
class RecipeArguments:
    """What the recipe trains on, and how."""

    encoder: str = field(metadata={"help": "A hub name or a directory with an encoder and its tokenizer."})
    train_file: str = field(metadata={"help": "CSV with a text column and a label column; this is the private data."})
    test_file: str = field(metadata={"help": "CSV of the same form, for the reported accuracy."})
    labels_file: str = field(metadata={"help": "JSON list of all label names; they are public."})
    text_column: str = "text"
    label_column: str = "category"
    method: str = field(default="lora", metadata={"help": "lora or full."})
    lora_rank: int = 8
    head_learning_rate: float = field(default=1e-2, metadata={"help": "The head's; learning_rate is the encoder's."})
    temperature: float = field(default=0.05, metadata={"help": "Logits are cosine similarities over this."})
    head_scale: float = field(
        default=1.0,
        metadata={"help": "Gradients of the head count this much more in the clipping norm, beside the encoder's."},
    )
    max_length: int = 64


class MeanPoolingForSequenceClassification(PreTrainedModel):
    """Logits from the normalised mean of the last hidden states."""

    _supports_sdpa = True

    def __init__(self, encoder: PreTrainedModel, label_embeddings: torch.Tensor, recipe: RecipeArguments) -> None:
        encoder.config.num_labels = len(label_embeddings)
        encoder.config.problem_type = "single_label_classification"
        super().__init__(encoder.config)
        self.encoder = encoder
        self.classifier = torch.nn.Linear(label_embeddings.shape[1], len(label_embeddings), bias=False)
        self.classifier.weight.data.copy_(label_embeddings / recipe.head_scale)
        self.scale = recipe.head_scale / recipe.temperature

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor | None = None, **_: Any
    ) -> SequenceClassifierOutput:
        """(B, T) ids to (B, labels) logits."""
        pooled = mean_pooled(self.encoder, input_ids, attention_mask)
        logits = self.classifier(pooled) * self.scale
        loss = None if labels is None else F.cross_entropy(logits, labels)
        return SequenceClassifierOutput(loss=loss, logits=logits)


def mean_pooled(encoder: torch.nn.Module, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
    """(B, T) to (B, d): the mean over real tokens, of unit length."""
    hidden = encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
    return F.normalize((hidden * attention_mask.unsqueeze(-1)).sum(1), dim=1)


def read(path: str, recipe: RecipeArguments, tokenizer: Any, names: list[str]) -> Dataset:
    """A CSV as token ids and label numbers."""
    with Path(path).open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    texts = [row[recipe.text_column] for row in rows]
    encoded = tokenizer(texts, truncation=True, max_length=recipe.max_length)
    return Dataset.from_dict({**encoded, "labels": [names.index(row[recipe.label_column]) for row in rows]})


def build(recipe: RecipeArguments, tokenizer: Any, names: list[str]) -> torch.nn.Module:
    """The model, its head made of the label names' embeddings."""
    encoder = AutoModel.from_pretrained(recipe.encoder).eval()
    batch = tokenizer([name.replace("_", " ").lower() for name in names], padding=True, return_tensors="pt")
    with torch.no_grad():
        embeddings = mean_pooled(encoder, batch["input_ids"], batch["attention_mask"])
    if getattr(encoder, "pooler", None) is not None:
        encoder.pooler = None  # unused here; it would only collect noise
    model = MeanPoolingForSequenceClassification(encoder, embeddings, recipe)
    if recipe.method == "full":
        return model
    lora = LoraConfig(
        r=recipe.lora_rank,
        lora_alpha=2 * recipe.lora_rank,
        target_modules=["query", "value"],
        modules_to_save=["classifier"],
    )
    return get_peft_model(model, lora)


def main() -> None:
    """Trains, then prints test accuracy and the privacy report."""
    recipe, arguments, privacy = parse(RecipeArguments)
    tokenizer = AutoTokenizer.from_pretrained(recipe.encoder)
    names = json.loads(Path(recipe.labels_file).read_text(encoding="utf-8"))
    train, test = (read(path, recipe, tokenizer, names) for path in (recipe.train_file, recipe.test_file))
    model = build(recipe, tokenizer, names)
    head = [p for n, p in model.named_parameters() if p.requires_grad and "classifier" in n]
    body = [p for n, p in model.named_parameters() if p.requires_grad and "classifier" not in n]
    optimizer = torch.optim.Adam(
        [
            {"params": body, "lr": arguments.learning_rate},
            {"params": head, "lr": recipe.head_learning_rate / recipe.head_scale},
        ]
    )
    trainer = DPTrainer(
        model=model,
        args=arguments,
        train_dataset=train,
        eval_dataset=test,
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=lambda p: {"accuracy": float((p.predictions.argmax(-1) == p.label_ids).mean())},
        optimizers=(optimizer, None),
        privacy=privacy,
    )
    print("accuracy before:", trainer.evaluate()["eval_accuracy"])
    trainer.train()
    print("accuracy after:", trainer.evaluate()["eval_accuracy"])
    print(trainer.privacy_report())
    trainer.save_model()


if __name__ == "__main__":
    main()
