"""Private text classification in a loop of one's own: plain PyTorch, accelerate, and `hf_dp.PrivateRun`. To be copied.

    accelerate launch recipes/own_loop.py TRAIN.csv --labels_file LABELS.json --model MODEL --output_dir out

TRAIN.csv has the columns text and category, LABELS.json a list of all categories, which is public. Called again after a
break, it goes on from its newest checkpoint, with what was spent.
"""

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
    parser.add_argument("train_file")
    for name in ("--labels_file", "--model", "--output_dir"):
        parser.add_argument(name, required=True)
    for name, default in {"target_epsilon": 8.0, "steps": 200, "batch_size": 512, "micro_batch_size": 32}.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    parser.add_argument("--seed", type=int, help="For tests: the run can be repeated, and is not private.")
    given = parser.parse_args()

    accelerator = Accelerator()  # before all else: it makes the process group
    set_seed(given.seed or 0)  # the head's first weights, the same on all processes; noise and draws are none of this
    names = dict(enumerate(json.loads(Path(given.labels_file).read_text(encoding="utf-8"))))
    labels = {name: i for i, name in names.items()}
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    model = AutoModelForSequenceClassification.from_pretrained(given.model, label2id=labels, id2label=names)

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
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer.optimizer, 1.0, 0.0, total_iters=given.steps)
    run.begin(optimizer, scheduler, resume_from_checkpoint=True)
    for batch in run.batches():
        run.step(batch)  # the noisy mean gradient is in .grad
        optimizer.step()
        scheduler.step()
        if run.global_step % max(1, given.steps // 4) == 0:
            accelerator.print(run.save_checkpoint(), run.logs())
    run.save(given.output_dir)
    accelerator.print(run.report())


if __name__ == "__main__":
    main()
