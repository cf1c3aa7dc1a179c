"""A training that is killed at any moment, and again where it goes on: on the disk no ledger is behind its weights."""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import TrainerCallback

from hf_dp.errors import LedgerError
from hf_dp.hub import PrivacyRecord, verify
from hf_dp.hub.card_file import without_claim
from hf_dp.training.resuming.checkpoints import what_lacks
from hf_dp.training.resuming.resume import SavedRun
from tests.crashes import killed_after
from tests.distributed.tasks import fresh_accelerator
from tests.training.own_loops import begun
from tests.training.workbench import classifier, make, private, rows

pytestmark = pytest.mark.usefixtures("checked_once")

STEPS = 5
Say = Callable[[str], None]


def told(steps: int, tensors: dict[str, Tensor]) -> str:
    """What a training says of its weights, before anybody else can see them."""
    digest = sha256()
    for name in sorted(tensors):
        digest.update(name.encode() + tensors[name].detach().numpy().tobytes())
    return f"{steps} {digest.hexdigest()}"


def steps_of(said: list[str]) -> dict[str, int]:
    """What was said, by the digest of the weights."""
    return {digest: int(steps) for steps, digest in map(str.split, said)}


class Says(TrainerCallback):
    """How many steps the weights have taken."""

    def __init__(self, say: Say) -> None:
        self.say = say

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.on_step_end(args, state, control, model)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if args.process_index == 0:
            self.say(told(state.global_step, dict(getattr(model, "module", model).named_parameters())))


BEST = {
    "eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True, "metric_for_best_model": "loss",
    "save_total_limit": 1,
}  # fmt: skip
ARGUMENTS: dict[str, dict[str, Any]] = {
    "all are kept": {},
    "one is kept": {"save_total_limit": 1},
    "with the best": BEST,
    "with the worst": {**BEST, "greater_is_better": True, "save_total_limit": 2},
    "written over": {},
    "two processes": {"save_total_limit": 2, "ddp_backend": "gloo", "gradient_accumulation_steps": 1},
}


def by_trainer(path: Path, case: str, resume: bool, say: Say) -> None:
    values = {"save_strategy": "steps", "save_steps": 1, "max_steps": STEPS, "optim": "adamw_torch", **ARGUMENTS[case]}
    run = make(path, classifier(), private(seed=None), parts={"eval_dataset": rows(8, seed=5)}, **values)
    run.add_callback(Says(say))
    run.train(resume_from_checkpoint=str(path / "checkpoint-1") if case == "written over" and resume else resume)
    run.save_model(str(path / "final"))


def in_an_own_loop(path: Path, case: str, resume: bool, say: Say) -> None:
    model = classifier()
    run, optimizer, scheduler = begun(model, private(seed=None), resume, steps=STEPS, output_dir=path)
    say(told(run.global_step, dict(model.named_parameters())))
    for batch in run.batches():
        run.step(batch)
        optimizer.step()
        scheduler.step()
        say(told(run.global_step, dict(model.named_parameters())))
        run.save_checkpoint()
        run.save(path / "final")
    run.save(path / "final")


def of_rank(rank: int, port: int, path: Path, case: str, resume: bool, say: Say) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true"}
    fresh_accelerator()
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    by_trainer(path, case, resume, say)


def acts_of(path: Path, case: str, resume: bool) -> list[Callable[[Say], None]]:
    if case == "two processes":
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        return [lambda say, rank=rank: of_rank(rank, port, path, case, resume, say) for rank in range(2)]
    act = in_an_own_loop if case == "own loop" else by_trainer
    return [lambda say: act(path, case, resume, say)]


def steps_on_disk(path: Path, known: dict[str, int]) -> dict[str, int]:
    """Of each checkpoint that can be gone on from, how many steps its weights have taken.

    No ledger beside any weights has fewer, also where nobody is meant to look.
    """
    found = {}
    for file in path.rglob("model.safetensors"):
        try:
            tensors = load_file(file)
        except (SafetensorError, OSError):
            continue  # half a file
        steps, folder = known[told(0, tensors).split()[1]], file.parent
        with suppress(OSError, LedgerError):
            record = PrivacyRecord.from_json((folder / "privacy.json").read_bytes())
            assert record.ledger.steps >= steps, file
        with suppress(OSError, ValueError):
            state = json.loads((folder / "trainer_state.json").read_bytes())
            saved = state["stateful_callbacks"]["PrivacyCallback"]["attributes"]["saved_ledger"]
            assert sum(entry["count"] for entry in saved["ledger"]["entries"]) >= steps, file
        if folder.parent in (path, path / "_saved") and what_lacks(folder) is None:
            assert folder.name == f"checkpoint-{steps}"
            assert SavedRun.read(folder).ledger.steps == steps
            found[folder.name] = steps
    if (path / "final" / "privacy.json").exists():
        failed = {check.name for check in verify(path / "final").checks if not check.passed}
        # A model that is saved over takes its claim off the card before its record goes.
        card = (path / "final" / "README.md").read_bytes()
        assert not failed or (failed == {"card, text", "card, metadata"} and without_claim(card) == card)
    return found


def kills(path: Path, case: str, number: int) -> None:
    """So often a training is killed that goes on from where the one before was killed."""
    draw, met, begin, start = random.Random(case), 0, time.monotonic(), path.with_name("start")
    said, acts = list[str](), acts_of(path, case, False)
    if len(acts) == 1:
        acts[0](said.append)  # in this process, whose forks then know what the check before the first step has found
    else:
        _, said = killed_after(acts, [300.0] * len(acts))
    longest, known = time.monotonic() - begin, steps_of(said)
    path.rename(start)
    while met < number:
        if case == "written over" and not path.exists():
            shutil.copytree(start, path)  # a finished one, of which all but its beginning is trained again
        newest = max(steps_on_disk(path, known).values(), default=0)
        acts = acts_of(path, case, newest > 0)
        first = draw.uniform(0, longest)
        was_killed, said = killed_after(acts, [first + 0.1 * rank for rank, _ in enumerate(acts)])
        known |= steps_of(said)
        steps_on_disk(path, known)
        met, longest = met + was_killed, longest * (1.1 if was_killed else 0.8)
        if said and case != "written over":
            assert said[0].startswith(f"{newest} "), "it goes on from the newest whole checkpoint"
        if not was_killed:
            assert verify(path / "final").report.steps == STEPS
            shutil.rmtree(path)


@pytest.mark.slow
@pytest.mark.parametrize("case", [*ARGUMENTS, "own loop"])
def test_killed_at_random_moments_it_goes_on_from_what_its_ledger_counts(tmp_path: Path, case: str) -> None:
    kills(tmp_path / "out", case, 5 if case == "two processes" else 17)
