"""What an ordinary and a private fine-tuning on the same texts give away, as `hf-dp memorisation` finds it.

python scripts/memorisation.py ../shared/data/banking77 --output build/memorisation

A small GPT-2 learns the test questions, which are taken to be public, and then, once ordinarily and once with epsilon
8, 1,000 of the training questions and 16 secrets. The texts that were not in are 2,000 others of them, at random.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
import tempfile
from pathlib import Path
from typing import Any

import transformers
from rich.progress import Progress

from hf_dp import PrivacyConfig
from hf_dp.cli.common import texts_of
from hf_dp.cli.memorisation import memorisation
from hf_dp.demo.messages import generate
from hf_dp.demo.model import new_model, train_tokenizer
from hf_dp.demo.quiet import quiet
from hf_dp.demo.training import Schedule, TrainingSetup, evaluation_loss

MEMBERS, OTHERS, SECRETS, HELD_OUT, LONGEST, WIDTH, LAYERS = 1000, 2000, 16, 500, 60, 64, 2
PUBLIC = Schedule(epochs=4, learning_rate=2e-3, micro_batch=32)
ORDINARY = Schedule(epochs=20, learning_rate=5e-3, micro_batch=16)
PRIVATE = Schedule(epochs=10, learning_rate=3e-3, micro_batch=64, accumulation=4)


def prepared(data: Path, folder: Path, seed: int) -> tuple[Any, list[str], list[str], list[str]]:
    """A tokenizer of the public texts; these, the members, and held-out texts. What the command reads is written."""
    public = texts_of(data / "test.csv", "text")
    tokenizer = train_tokenizer(public)
    rng = random.Random(seed)

    def short(texts: list[str]) -> list[str]:
        # What is longer than the model's positions would be read in part.
        different = list(dict.fromkeys(texts))
        return [text for text in different if len(tokenizer(text)["input_ids"]) < LONGEST]

    private = short(texts_of(data / "train.csv", "text"))
    rng.shuffle(private)
    secrets = generate(public=0, private=SECRETS, evaluation=0, canaries=SECRETS, seed=seed).planted
    members, others = private[:MEMBERS] + [one.text for one in secrets], private[MEMBERS : MEMBERS + OTHERS]
    for name, texts in {"members": members, "others": others}.items():
        lines = [json.dumps({"text": text}) for text in texts]
        (folder / f"{name}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    with (folder / "secrets.csv").open("w", newline="", encoding="utf-8") as out:
        csv.writer(out).writerows([("prefix", "secret"), *((one.prefix, one.secret) for one in secrets)])
    known = {*members, *others}
    held_out = private[MEMBERS + OTHERS :][:HELD_OUT]
    return tokenizer, [text for text in short(public) if text not in known], members, held_out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="a folder with train.csv and test.csv")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1, help="of texts, weights and the ordinary training")
    given = parser.parse_args()
    given.output.mkdir(parents=True, exist_ok=True)
    tokenizer, public, members, held_out = prepared(given.data, given.output, given.seed)
    transformers.set_seed(given.seed)
    folders = {name: given.output / name for name in ("before", "ordinary", "private")}
    with quiet(), tempfile.TemporaryDirectory() as aside, Progress() as progress:
        setup = TrainingSetup(tokenizer, held_out, Path(aside), given.seed, progress)
        trainer = setup.ordinary(new_model(tokenizer, width=WIDTH, layers=LAYERS), public, PUBLIC, "before")
        trainer.save_model(str(folders["before"]))
        losses = {"before": evaluation_loss(trainer)}
        for name in ("ordinary", "private"):
            model = transformers.GPT2LMHeadModel.from_pretrained(folders["before"])
            model.loss_type = "ForCausalLM"
            if name == "ordinary":
                trainer = setup.ordinary(model, members, ORDINARY, name)
            else:
                trainer = setup.private(model, members, PRIVATE, PrivacyConfig(target_epsilon=8.0), name)
            trainer.save_model(str(folders[name]))
            losses[name] = evaluation_loss(trainer)
    print("loss of a token of texts held out:", ", ".join(f"{name} {loss:.2f}" for name, loss in losses.items()))
    memorisation(
        [str(folders["ordinary"]), str(folders["private"])], given.output / "members.jsonl",
        given.output / "others.jsonl", str(folders["before"]), given.output / "secrets.csv", output=given.output,
    )  # fmt: skip


if __name__ == "__main__":
    main()
