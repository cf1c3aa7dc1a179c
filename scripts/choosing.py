"""What docs/choosing.md says of settings, measured: adapters on a pretrained encoder, one setting changed at a time.

    python scripts/choosing.py --encoder ENCODER_DIRECTORY --data DIRECTORY_OF_BANKING77 --output out/choosing

Adapters alone are trained, in the last two layers of the encoder, and the output is frozen, as that of a language model
is: rows of the label names' embeddings. The layers below are computed once, of each text by itself. A ninth of the
training split is held out and scores; the test split is not read. A point is one setting and one seed, and is not
computed again where `points.jsonl` in the output folder has it; --sections chooses, --seconds ends early.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import statistics
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoTokenizer

from hf_dp import PrivacyConfig, PrivateRun
from hf_dp.accounting import calibrate_noise_multiplier
from hf_dp.randomness import Entropy

sys.path.insert(0, str(Path(__file__).parent.parent / "recipes"))
import classify
from common.classification import build, read
from common.data import public_labels
from common.plain_classifier import seen_from

TRAINED_LAYERS, LENGTH, HELD_OUT, DELTA, COMPUTE = 1, 16, 1000, 1e-5, 2048
BASE: dict[str, Any] = {
    "epsilon": 8.0, "batch": 128, "rank": 8, "norm": 1.0, "clipping": "flat", "rate": 2e-2, "schedule": "linear",
    "warmup": 0.0, "average": 0.0, "adam": "plain",
}  # fmt: skip


def _each(**values: Iterable[Any]) -> list[dict[str, Any]]:
    """BASE with every combination of these."""
    made: list[dict[str, Any]] = [{}]
    for name, some in values.items():
        made = [{**one, name: value} for one in made for value in some]
    return [{**BASE, **one} for one in made]


RATES = (2.5e-3, 5e-3, 1e-2, 2e-2, 4e-2)
SECTIONS: dict[str, list[dict[str, Any]]] = {
    "rate": _each(epsilon=(1.0, 8.0, math.inf), rate=RATES),
    "batch": _each(batch=(32, 64, 128, 256, 512), rate=(5e-3, 1e-2, 2e-2)),
    "epsilon": _each(epsilon=(1.0, 2.0, 4.0, 8.0, 16.0, math.inf)),
    "norm": _each(norm=(0.1, 0.3, 1.0, 3.0, 10.0)) + _each(clipping=("automatic",)),
    "adam": _each(epsilon=(1.0, 8.0), adam=("plain", "corrected"), rate=(2.5e-3, 5e-3, 1e-2)),
    "rank": _each(rank=(1, 2, 4, 8, 16, 32)),
    "schedule": _each(schedule=("linear", "constant"), warmup=(0.0, 0.25)),
    "average": _each(schedule=("linear", "constant"), average=(0.0, 0.5, 0.8)),
}


# What each section is drawn over, and what its lines differ in.
VARIED = {
    "rate": ("rate", "epsilon"), "batch": ("batch", "rate"), "epsilon": ("epsilon",), "norm": ("norm",),
    "adam": ("rate", "adam", "epsilon"), "rank": ("rank",), "schedule": ("warmup", "schedule"),
    "average": ("average", "schedule"),
}  # fmt: skip


class Corrected(torch.optim.Optimizer):
    """Adam whose second moment has the noise's variance subtracted (Tang et al. 2023, arXiv:2312.14334, algorithm 1).

    What is left is at least `floor` of that variance, for coordinates whose gradient the noise hides.
    """

    def __init__(self, parameters: Iterable[Tensor], lr: float, noise: float, floor: float) -> None:
        super().__init__(parameters, {"lr": lr})
        self.variance, self.floor, self.taken = noise**2, floor, 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.taken += 1
        for group in self.param_groups:
            for weight in (weight for weight in group["params"] if weight.grad is not None):
                state = self.state[weight]
                first = state.setdefault("exp_avg", torch.zeros_like(weight)).lerp_(weight.grad, 0.1)
                second = state.setdefault("exp_avg_sq", torch.zeros_like(weight)).lerp_(weight.grad.square(), 0.001)
                second = second / (1 - 0.999**self.taken) - self.variance
                divided = second.clamp_min(max(self.floor * self.variance, 1e-16)).sqrt()
                weight.sub_(group["lr"] / (1 - 0.9**self.taken) * first / divided)


class Given(nn.Module):
    """In place of an encoder's embeddings: states that were computed before."""

    def forward(self, inputs_embeds: Tensor, **_: Any) -> Tensor:
        """As they are."""
        return inputs_embeds


class Top(nn.Module):
    """The encoder's last layers with adapters, and the frozen output: states (B, T, d) to logits (B, labels)."""

    def __init__(self, whole: Any, rank: int) -> None:
        super().__init__()
        body = copy.deepcopy(whole.encoder)
        body.embeddings, body.encoder.layer = Given(), body.encoder.layer[-TRAINED_LAYERS:]
        self.body = get_peft_model(body, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear"))
        self.register_buffer("origin", whole.origin)
        self.register_buffer("rows", whole.classifier.weight.detach() * whole.scale)

    def forward(self, states: Tensor, attention_mask: Tensor) -> Tensor:
        """Logits (B, labels)."""
        found = self.body(inputs_embeds=states, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask.unsqueeze(-1)
        mean = F.layer_norm((found * mask).sum(1) / mask.sum(1), self.origin.shape)
        return F.linear(seen_from(self.origin, mean), self.rows)


class Texts(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Rows of states, as long as each text is, with their labels."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.rows[index]


def collate(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Padded to the longest."""
    states = nn.utils.rnn.pad_sequence([row["states"] for row in rows], batch_first=True).float()
    lengths = torch.tensor([len(row["states"]) for row in rows])
    mask = (torch.arange(states.shape[1]) < lengths[:, None]).long()
    return {"states": states, "attention_mask": mask, "labels": torch.tensor([row["labels"] for row in rows])}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Cross-entropy (B,)."""
    return F.cross_entropy(model(batch["states"], batch["attention_mask"]), batch["labels"], reduction="none")


@torch.no_grad()
def prepared(given: Any) -> tuple[Any, Texts, Texts]:
    """The whole model, and the texts to train on and to score, as states below the trained layers."""
    recipe = classify.RecipeArguments(
        encoder=given.encoder, train_file=str(given.data / "train.csv"), test_file="", center=True, temperature=0.05,
        labels_file=str(given.data / "categories.json"), max_length=LENGTH,
    )  # fmt: skip
    tokenizer, names = AutoTokenizer.from_pretrained(given.encoder), public_labels(recipe)
    whole = build(recipe, tokenizer, names)
    kept = given.output / "states.pt"
    if not kept.exists():
        texts = read(recipe.train_file, "train", recipe, tokenizer, names)
        below, found = copy.deepcopy(whole.encoder), []
        below.encoder.layer = below.encoder.layer[:-TRAINED_LAYERS]
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]["input_ids"]))
        for start in range(0, len(order), 100):
            chosen = [texts[i] for i in order[start : start + 100]]
            batch = tokenizer.pad([{"input_ids": row["input_ids"]} for row in chosen], return_tensors="pt")
            states = below(**batch).last_hidden_state.half()
            found += [
                {"states": one[: len(row["input_ids"])].clone(), "labels": row["labels"]}
                for one, row in zip(states, chosen, strict=True)
            ]
        torch.save(found, kept)
    rows = torch.load(kept)
    order = Entropy(0).generator("held out", 0).permutation(len(rows))
    return whole, Texts([rows[i] for i in order[HELD_OUT:]]), Texts([rows[i] for i in order[:HELD_OUT]])


@torch.no_grad()
def scored(model: nn.Module, texts: Texts) -> tuple[float, float]:
    """Accuracy in per cent, and mean loss."""
    model.eval()
    rows, right, lost = sorted(texts.rows, key=lambda row: len(row["states"])), 0, 0.0
    for start in range(0, len(rows), 100):
        batch = collate(rows[start : start + 100])
        logits = model(batch["states"], batch["attention_mask"])
        right += int((logits.argmax(-1) == batch["labels"]).sum())
        lost += float(F.cross_entropy(logits, batch["labels"], reduction="sum"))
    return 100 * right / len(rows), lost / len(rows)


def rate_at(point: dict[str, Any], step: int, steps: int) -> float:
    """Of step 0, 1, ...: rising over the warm-up, then constant or falling linearly towards 0."""
    rising = round(point["warmup"] * steps)
    if step < rising:
        return float(point["rate"] * (step + 1) / (rising + 1))
    return float(point["rate"] * ((steps - step) / (steps - rising) if point["schedule"] == "linear" else 1.0))


def trained(whole: Any, train: Texts, test: Texts, point: dict[str, Any], seed: int) -> dict[str, Any]:
    """One point: what the held-out texts say of it."""
    torch.manual_seed(seed)
    begun = time.process_time()
    model, batch_size = Top(whole, point["rank"]), point["batch"]
    steps = COMPUTE // batch_size
    noise = 0.0
    if point["epsilon"] < math.inf:
        noise = calibrate_noise_multiplier(
            target_epsilon=point["epsilon"], target_delta=DELTA, sampling_probability=batch_size / len(train),
            steps=steps, accountant="pld",
        )  # fmt: skip
    privacy = PrivacyConfig(
        noise_multiplier=noise, target_delta=DELTA, clipping_norm=point["norm"], clipping=point["clipping"], seed=seed
    )
    run = PrivateRun(
        model, train, privacy, collate, expected_batch_size=batch_size, micro_batch_size=64, steps=steps, loss=loss
    )
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer: torch.optim.Optimizer = torch.optim.Adam(weights, lr=point["rate"])
    if point["adam"] == "corrected":
        optimizer = Corrected(weights, point["rate"], noise * point["norm"] / batch_size, floor=0.01)
    run.begin(optimizer)
    average, clipped = [weight.detach().clone() for weight in weights], []
    for step, batch in enumerate(run.batches()):
        for group in optimizer.param_groups:
            group["lr"] = rate_at(point, step, steps)
        run.step(batch)
        optimizer.step()
        clipped.append(run.logs().get("clipped_fraction", math.nan))
        for mean, weight in zip(average, weights, strict=True):
            mean.lerp_(weight.detach(), 1 - point["average"])
    for mean, weight in zip(average, weights, strict=True):
        weight.data.copy_(mean)
    accuracy, lost = scored(model, test)
    spent = time.process_time() - begun
    return {"accuracy": accuracy, "loss": lost, "clipped": statistics.mean(clipped), "noise": noise, "seconds": spent}


def changed(section: str, point: dict[str, Any]) -> tuple[Any, str]:
    """Where a point lies on the section's axis, and on which line."""
    first, *others = VARIED[section]
    if point["clipping"] == "automatic":
        return "automatic", ""
    return point[first], ", ".join(
        f"{name} {point[name]:g}" if isinstance(point[name], float) else point[name] for name in others
    )


def lines_of(section: str, known: list[dict[str, Any]]) -> dict[str, dict[Any, list[dict[str, Any]]]]:
    """Of each line the points, each with what its seeds found."""
    made: dict[str, dict[Any, list[dict[str, Any]]]] = {}
    for point in SECTIONS[section]:
        at, line = changed(section, point)
        if found := [one for one in known if one["point"] == point]:
            made.setdefault(line, {})[at] = found
    return made


def table(section: str, known: list[dict[str, Any]]) -> str:
    """In Markdown: held-out loss of each seed and their mean accuracy."""
    first, *others = VARIED[section]
    rows = [f"| {first} | {' and '.join(others) or 'other'} | loss | accuracy, % | clipped, % | noise multiplier |"]
    rows.append("| --- " * 6 + "|")
    for line, points in lines_of(section, known).items():
        for at, found in points.items():
            losses = ", ".join(f"{one['loss']:.3f}" for one in found)
            right, clipped = (statistics.mean(one[name] for one in found) for name in ("accuracy", "clipped"))
            place = at if isinstance(at, str) else f"{at:g}"
            rows.append(
                f"| {place} | {line} | {losses} | {right:.1f} | {100 * clipped:.0f} | {found[0]['noise']:.3f} |"
            )
    return f"### {section}\n\n" + "\n".join(rows) + "\n"


def main() -> None:
    """Computes what is missing, and writes the tables of all that is there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--encoder", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--output", type=Path, default=Path("out/choosing"))
    parser.add_argument("--sections", nargs="*", default=list(SECTIONS), choices=list(SECTIONS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--seconds", type=float, default=math.inf, help="No point is begun after so many.")
    given = parser.parse_args()
    given.output.mkdir(parents=True, exist_ok=True)
    whole, train, test = prepared(given)
    path, begun = given.output / "points.jsonl", time.monotonic()
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    known = {json.dumps([line["point"], line["seed"]]): line for line in map(json.loads, lines)}
    print(f"{len(train)} to train on; before: {scored(Top(whole, 1), test)}")
    for seed in given.seeds:
        for point in (point for section in given.sections for point in SECTIONS[section]):
            key = json.dumps([point, seed])
            if key in known or time.monotonic() - begun > given.seconds:
                continue
            known[key] = {"point": point, "seed": seed, **trained(whole, train, test, point, seed)}
            with path.open("a", encoding="utf-8") as file:
                print(json.dumps(known[key]), file=file)
            print({name: value for name, value in point.items() if value != BASE[name]}, seed, known[key], flush=True)
    found = list(known.values())
    text = "\n".join(table(section, found) for section in SECTIONS)
    (given.output / "choosing.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
