"""Trainings with sparse embeddings that the processes of a gang do together, or one process by itself."""

from __future__ import annotations

import json
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import hf_dp.ranks as ranks
from hf_dp import SparseEmbeddingConfig
from hf_dp.errors import HfDpError
from tests.distributed.tasks import MICRO, Collectives, built, fresh_accelerator, gathered, promise
from tests.training.workbench import Clicks, NoWholeTable, Recommender, clicks, make, pad, rows, stack

STEPS, EXPECTED = 5, 8
WORDS = "bert.embeddings.word_embeddings.weight"
#: What is trained, and the rows that are kept where they are public.
MODELS: dict[str, Any] = {
    "one table": {WORDS: [3, 4, 7, 9, 12, 20, 21, 30]},
    "several tables": {"items.weight": [0, 2, 5, 9], "users.weight": [1, 3, 8, 12, 900]},
}
PUBLIC = {"row_choice": "public"}
CHOSEN = {"method": "fest", "kept_rows": 9, "budget_share": 0.5}
METHODS: dict[str, dict[str, Any]] = {
    "adafest": {"method": "adafest", "threshold": 1.3},
    "fest": {"method": "fest", **PUBLIC},
    "adafest+": {"method": "adafest+", "threshold": 0.9, **PUBLIC},
}


def trainer(
    path: str,
    name: str,
    world: int,
    settings: dict[str, Any],
    privacy: dict[str, Any] | None = None,
    expected: int = EXPECTED,
    model: nn.Module | None = None,
    **changes: Any,
) -> Any:
    """A trainer of one of `MODELS` whose expected batch is `expected` on any number of processes."""
    fresh_accelerator()
    if settings.get("row_choice") == "public" and "public_rows" not in settings:
        # Of one name for all numbers of processes, since it is in the promise.
        file = Path(path).parent / f"{ranks.rank()}.json"
        file.write_text(json.dumps(MODELS[name]), encoding="utf-8")
        settings = {**settings, "public_rows": str(file.replace(file.with_name("rows.json")))}
    config = promise(sparse_embeddings=SparseEmbeddingConfig(**settings), **(privacy or {}))
    micro = min(MICRO, expected // world)
    values = {
        "per_device_train_batch_size": micro, "gradient_accumulation_steps": expected // (micro * world),
        "max_steps": STEPS, "logging_steps": 1, "learning_rate": 0.02,  # adaptive optimizers enlarge rounding
        **({"ddp_backend": "gloo"} if world > 1 else {}), **changes,
    }  # fmt: skip
    if name == "one table":
        parts = {"train_dataset": rows(), "data_collator": pad}
        return make(Path(path), model or built("bert"), config, parts=parts, **values)
    parts = {"train_dataset": clicks(59), "data_collator": stack}
    values["remove_unused_columns"] = False
    return make(Path(path), model or Recommender(), config, kind=Clicks, parts=parts, **values)


def trained(
    path: str,
    name: str,
    world: int,
    settings: dict[str, Any],
    privacy: dict[str, Any] | None = None,
    expected: int = EXPECTED,
    resume: str | None = None,
    **changes: Any,
) -> dict[str, Any]:
    """The parameters after training, the state of the rows' optimizer, what was chosen, charged and logged."""
    run = trainer(path, name, world, settings, privacy, expected, **changes)
    before = gathered(run.model)
    run.train(resume_from_checkpoint=None if resume is None else f"{path}/{resume}")
    logs = [entry for entry in run.state.log_history if "loss" in entry]
    loader = run.callback_handler.train_dataloader.batch_sampler
    draws = [run._plan.sampler.draw(step) for step in range(run.args.max_steps)]
    moved = {n: (p != before[n]).any(1).sum().item() for n, p in gathered(run.model).items() if n in run._run.by_rows}
    return {
        "parameters": gathered(run.model),
        "moved": moved,
        "optimizer": [
            torch.as_tensor(value)
            for state in run.optimizer.optimizer.rows.state.values()
            for _, value in sorted(state.items())
        ],
        "last": run._run.parts["sparse_embeddings"].rows.last.rows,
        "kept": run._run.parts["sparse_embeddings"].choice.kept,
        "ledger": run.ledger.to_dict(),
        "report": run.privacy_report(),
        "logs": [{k: v for k, v in entry.items() if k.startswith("sparse_embeddings/")} for entry in logs],
        "losses": [entry["loss"] for entry in logs],
        "sizes": [sum(i >= 0 for i in loader.share(draw)) for draw in draws],
        "wrapped": type(run.model_wrapped).__name__,
    }


def sent_in_each_step(path: str, settings: dict[str, Any], accumulation: int) -> list[dict[str, list[int]]]:
    """The elements of each collective of each private step of two processes, and how many rows were released."""
    run = trainer(path, "several tables", 2, settings, {"noise_multiplier": 1.0}, 4 * accumulation)
    honest, found = type(run).training_step, []

    def step(self: Any, *args: Any) -> Tensor:
        with Collectives() as counted:
            result: Tensor = honest(self, *args)
        sent: dict[str, list[int]] = {}
        for kind, elements in counted.sent:
            sent.setdefault(kind, []).append(elements)
        rows = self._run.parts["sparse_embeddings"].rows
        split = rows.tables.split(rows.last.rows)
        sent["released"] = [len(split["items.weight"]), len(split["users.weight"])]
        found.append(sent)
        return result

    with mock.patch.object(type(run), "training_step", step):
        run.train()
    return found


class LargeRecommender(Recommender):
    """With a table that is larger than any piece in which weights are compared."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(1_200_000, 4)


def whole_tables_made(path: str, settings: dict[str, Any], hidden: bool = True) -> set[str]:
    """The operations that made a dense tensor as large as the large table, wrapping and training in two processes."""
    model = LargeRecommender()
    run = trainer(path, "several tables", 2, settings, {"noise_multiplier": 1.0}, model=model, max_steps=2)
    with (
        NoWholeTable(model.items.weight) as watching,
        nullcontext() if hidden else mock.patch("hf_dp.parts.sparse_embeddings.part.hide_from_wrapper"),
        # accelerate moves the model to "cpu:0", for which torch copies what is there already.
        mock.patch.object(nn.Module, "to", lambda self, *args, **kwargs: self),
    ):
        run.train()
    assert type(run.model_wrapped).__name__ == "DistributedDataParallel"
    # A later training of the model without this one finds nothing hidden.
    assert not any("ddp" in name for name in vars(model))
    return watching.found


def trained_from_other_tables(path: str) -> dict[str, Tensor]:
    """The parameters after a training by two processes, of which the last one began with another table."""
    run = trainer(path, "several tables", 2, METHODS["adafest"])
    with torch.no_grad():
        run.model.items.weight += ranks.rank()
    run.train()
    return gathered(run.model)


def refused_rows(path: str, one_differs: bool) -> str:
    """The error of a run with public rows in a file of that name on each machine; on the last one it may differ."""
    here, home = Path(f"{path}.{ranks.rank()}"), Path.cwd()
    here.mkdir()
    (here / "rows.json").write_text(json.dumps([5, 9, 3 + ranks.rank() * one_differs]), encoding="utf-8")
    os.chdir(here)
    try:
        run = trainer(path, "one table", 2, {"method": "fest", **PUBLIC, "public_rows": "rows.json"}, max_steps=1)
        run.train()
    except HfDpError as error:
        assert not run.ledger.entries
        return str(error)
    finally:
        os.chdir(home)
    return "no error"
