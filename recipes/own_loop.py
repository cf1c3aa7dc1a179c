"""Private text classification in a loop of one's own: plain PyTorch, accelerate, and `hf_dp.PrivateRun`.

To be read and copied. It needs a CSV file of texts and their labels, and nothing beside it:

    python recipes/own_loop.py TRAIN.csv --labels_file LABELS.json --model MODEL --output_dir out
    accelerate launch --num_processes 2 recipes/own_loop.py TRAIN.csv ...

Called again after a break, it goes on from its newest checkpoint, with what was spent.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from datasets import load_dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding

from hf_dp import PrivacyConfig, PrivateRun


def main() -> None:
    """Trains, and prints the privacy report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("train_file", help="CSV with the columns text and category.")
    parser.add_argument("--labels_file", required=True, help="JSON list of all labels, which is public.")
    parser.add_argument("--model", default="distilbert-base-uncased", help="A directory, or a name on the hub.")
    parser.add_argument("--output_dir", default="out/own_loop")
    parser.add_argument("--target_epsilon", type=float, default=8.0)
    parser.add_argument("--seed", type=int, help="For tests: the run can be repeated, and is not private.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch_size", type=int, default=512, help="Expected, of all processes together.")
    parser.add_argument("--micro_batch_size", type=int, default=32, help="Of each process.")
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--save_steps", type=int, default=50)
    given = parser.parse_args()

    accelerator = Accelerator()  # before all else: it makes the process group
    set_seed(given.seed or 0)  # the head's first weights, the same on all processes; noise and draws are none of this
    names = json.loads(Path(given.labels_file).read_text(encoding="utf-8"))
    labels = {name: i for i, name in enumerate(names)}
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    model = AutoModelForSequenceClassification.from_pretrained(
        given.model, label2id=labels, id2label=dict(enumerate(names))
    )

    def read(row: dict[str, str]) -> dict[str, object]:
        return {**tokenizer(row["text"], truncation=True, max_length=64), "labels": labels[row["category"]]}

    dataset = load_dataset("csv", data_files=given.train_file, split="train")
    run = PrivateRun(
        model.to(accelerator.device),
        dataset.map(read, remove_columns=dataset.column_names),
        PrivacyConfig(target_epsilon=given.target_epsilon, seed=given.seed),
        DataCollatorWithPadding(tokenizer),
        expected_batch_size=given.batch_size,
        micro_batch_size=given.micro_batch_size,
        steps=given.steps,
        tokenizer=tokenizer,
        output_dir=given.output_dir,
    )
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=given.learning_rate))
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer.optimizer, 1.0, 0.0, total_iters=given.steps)
    run.begin(optimizer, scheduler, resume_from_checkpoint=True)
    for batch in run.batches():
        run.step(batch)  # the noisy mean gradient is in .grad
        optimizer.step()
        scheduler.step()
        if run.global_step % given.save_steps == 0:
            run.save_checkpoint()
            accelerator.print(run.global_step, run.logs())
    run.save(given.output_dir)
    accelerator.print(run.report())


if __name__ == "__main__":
    main()
