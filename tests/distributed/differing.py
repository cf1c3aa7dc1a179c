"""Ranks that differ or drift, and secrets: what the processes of a gang try."""

from __future__ import annotations

import functools
import logging
import secrets
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import TrainerCallback

import hf_dp.randomness as randomness
import hf_dp.ranks as ranks
import hf_dp.training.described as described
import tests.distributed.tasks as tasks
from hf_dp import DPTrainer, PrivacyConfig
from hf_dp.accounting import Ledger
from hf_dp.errors import HfDpError
from hf_dp.losses import per_example_losses
from hf_dp.randomness import Entropy
from hf_dp.sampling.poisson import PoissonBatchSampler
from hf_dp.step.plan import Plan
from hf_dp.step.private_gradient import private_gradient
from tests.distributed.tasks import SHARDS, STEPS, device, fsdp2_on_cpu, promise, trainer
from tests.training.workbench import Rows, make, pad_for_language, rows
from tests.zoo import with_dropout

CHANGES: dict[str, dict[str, Any]] = {
    "another learning rate": {"learning_rate": 0.2},
    "another seed": {"seed": 5},
    "another length": {"max_steps": 4},
    "another accumulation": {"gradient_accumulation_steps": 1},
    "another schedule": {"lr_scheduler_kwargs": {"num_cycles": 2}},
    "another precision": {"bf16": True},
    "other shards": {"fsdp_config": {"version": 2, **SHARDS, "reshard_after_forward": False}},
}
PROMISES: dict[str, dict[str, Any]] = {
    "another clipping norm": {"clipping_norm": 0.6},
    "another seed of the draws": {"seed": 4},
}


@contextmanager
def surroundings(what: str) -> Iterator[None]:
    """What is not in the script: versions, and settings of the process."""
    precision = torch.get_float32_matmul_precision()
    if what == "another precision of torch":
        torch.set_float32_matmul_precision("medium")
    try:
        is_older = what == "another version"
        with mock.patch.object(described, "installed", return_value="0") if is_older else nullcontext():
            yield
    finally:
        torch.set_float32_matmul_precision(precision)


def shortened(examples: Rows) -> dict[str, Tensor]:
    """A collator that cuts rows."""
    return pad_for_language([{**row, "input_ids": row["input_ids"][:2]} for row in examples])


def refused_by(path: str, what: str, shards: bool = False) -> str:
    """The error of a run in which the last rank differs in `what`."""
    is_odd = dist.get_rank() == dist.get_world_size() - 1
    data = {"fewer rows": rows()[:-1], "another row": [*rows()[:-1], rows(seed=5)[-1]]}.get(what) if is_odd else None
    changes: dict[str, Any] = CHANGES.get(what, {}) if is_odd else {}
    privacy: dict[str, Any] = PROMISES.get(what, {}) if is_odd else {}
    kept = {"fsdp": True, "fsdp_config": {"version": 2, **SHARDS}} if shards else {}
    with fsdp2_on_cpu() if shards else nullcontext(), surroundings(what if is_odd else "nothing"):
        run = trainer(path, "tied gpt2", dist.get_world_size(), privacy, data, **{**kept, **changes})
        if is_odd and what == "another collator":
            run.data_collator = shortened
        with torch.no_grad():
            if is_odd and what == "another frozen layer":
                run.model.transformer.h[0].requires_grad_(False)
            if is_odd and what == "other weights":
                run.model.transformer.h[0].mlp.c_fc.weight[0, 0] += 1e-3
            if is_odd and what == "another activation":
                run.model.transformer.h[0].mlp.act = nn.ReLU()
            if is_odd and what == "another number of heads":
                run.model.config.n_head = 1
            if what == "another buffer":
                run.model.register_buffer("scale", torch.full((2,), 1.0 + is_odd))
            if what == "another state of the optimizer":
                run.optimizer = torch.optim.SGD(run.model.parameters(), lr=0.1, momentum=0.9)
                for p in run.model.parameters():
                    run.optimizer.state[p]["momentum_buffer"] = torch.full_like(p, float(is_odd))
            if is_odd and what == "another optimizer":
                run.optimizer = torch.optim.SGD(run.model.parameters(), lr=0.1, momentum=0.9)
        try:
            run.train()
        except HfDpError as error:
            assert run.ledger.steps == 0
            return f"{type(error).__name__}: {error}"
    return "no error"


class Scaled(DPTrainer):
    """Divides all losses by that of the first batch."""

    scale: Any = None

    def compute_per_example_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        losses = per_example_losses(model, inputs)
        self.scale = losses.detach().mean() if self.scale is None else self.scale
        return losses / self.scale


class Numbering:
    """A collator that gives tokens numbers as they come."""

    def __init__(self) -> None:
        self.numbers: dict[int, int] = {}

    def __call__(self, examples: Rows) -> dict[str, Tensor]:
        batch = pad_for_language(examples)
        for name in ("input_ids", "labels"):
            for token in batch["input_ids"].unique().tolist():
                self.numbers.setdefault(token, len(self.numbers))
            batch[name] = batch[name].apply_(lambda token: self.numbers.get(token, token))
        return batch


def refused_of_first_rows(path: str, what: str, shards: bool = False) -> str:
    """What a run is refused that keeps something of the first rows that it sees."""
    kind = Scaled if what == "losses" else DPTrainer
    kept = {"fsdp": True, "fsdp_config": {"version": 2, **SHARDS}} if shards else {}
    patched = mock.patch.object(tasks, "make", functools.partial(make, kind=kind))
    with patched, fsdp2_on_cpu() if shards else nullcontext():
        run = trainer(path, "tied gpt2", ranks.world_size(), **kept)
        if what == "collator":
            run.data_collator = Numbering()
        try:
            run.train()
        except HfDpError as error:
            return str(error)
    return "no error"


class Stops(TrainerCallback):
    """Ends the training of its own rank after a step."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop |= state.global_step == 2


def stopped_alone(path: str, shards: bool) -> dict[str, Any]:
    """The error of a run that rank 0 leaves early, and who warned before."""
    kept = {"fsdp": True, "fsdp_config": {"version": 2, **SHARDS}} if shards else {}
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.name)  # type: ignore[method-assign]
    logging.getLogger("hf_dp").addHandler(handler)
    with fsdp2_on_cpu() if shards else nullcontext(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        PrivacyConfig(noise_multiplier=0)
        run = trainer(path, "tied gpt2", dist.get_world_size(), {"noise_multiplier": 1.0}, **kept)
        if dist.get_rank() == 0:
            run.add_callback(Stops())
        try:
            run.train()
        except HfDpError as error:
            said += [str(warning.message) for warning in caught if "not private" in str(warning.message)]
            return {"error": str(error), "said": said, "steps": run.privacy_report().steps}
        finally:
            logging.getLogger("hf_dp").removeHandler(handler)
    return {"error": "no error"}


class Faster(TrainerCallback):
    """Sets the rate of its own rank, of one step: the schedule sets it anew."""

    def on_step_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        if state.global_step == 2:
            optimizer.param_groups[0]["lr"] = 0.5


def faster_alone(path: str) -> tuple[str, int]:
    """The error of a run in which rank 0 has another learning rate for a step, and how many it had charged."""
    run = trainer(path, "tied gpt2", dist.get_world_size(), {"noise_multiplier": 1.0}, learning_rate=0.25)
    if dist.get_rank() == 0:
        run.add_callback(Faster())
    try:
        run.train()
    except HfDpError as error:
        return str(error), run.ledger.steps
    return "no error", run.ledger.steps


def told(what: str) -> str:
    """What a rank raises that waits for rank 1, which fails by itself, before they meet, is silent, or waits too."""
    with mock.patch.object(ranks, "_PATIENCE", 1.0 if what == "silent" else 20.0):
        try:
            with ranks.before_together():
                if dist.get_rank() == 1 and what == "fails before":
                    raise OSError("a row that cannot be read")
            with ranks.together():
                if dist.get_rank() == 1 and what == "fails":
                    raise OSError("a row that cannot be read")
                if dist.get_rank() == 1 and what == "silent":
                    return "nothing"
                raise RuntimeError("[/gloo/transport/tcp/pair.cc:537] Connection closed by peer")
        except (HfDpError, OSError) as error:
            return f"{type(error).__name__}: {error}"


def told_of_earlier(path: str) -> str:
    """What a rank raises where the first one, which alone looks for it, finds no record of an earlier training."""
    try:
        trainer(path, "bert", 2, {"noise_multiplier": 1.0, "after": f"{path}/none"})
        with ranks.together():
            raise RuntimeError("[/gloo/transport/tcp/pair.cc:537] Connection closed by peer")
    except HfDpError as error:
        return f"{type(error).__name__}: {error}"


def secrets_in_files(path: str) -> list[str]:
    """The files of a run with checkpoints that hold what draws, noise or dropout came from, on this rank."""
    given: list[int] = []

    def token_bytes(size: int) -> bytes:
        given.append(int.from_bytes(made := secrets.token_bytes(size), "little"))
        return made

    def randbits(size: int) -> int:
        given.append(made := secrets.randbits(size))
        return made

    with mock.patch.object(randomness, "secrets", SimpleNamespace(token_bytes=token_bytes, randbits=randbits)):
        run = trainer(path, "bert", 2, {"noise_multiplier": 1.0, "seed": None}, save_strategy="steps", save_steps=2)
        run.train()
        run.save_model(f"{path}/final")
    ranks.wait()  # the first rank moves the files to their place
    given.append(int.from_bytes(run._plan.entropy._key, "little"))
    # Fewer bits can be in a file by chance.
    given = [value for value in given if value >= 2**48]
    assert len(given) > STEPS
    forms = {form for value in given for form in spelled(value)}
    files = [p for p in Path(path).rglob("*") if p.is_file()]
    assert len(files) > 10
    return [str(p) for p in files if any(form in p.read_bytes() for form in forms)]


def spelled(value: int) -> Iterator[bytes]:
    """As bytes, in hexadecimal and in decimal."""
    size = -(-value.bit_length() // 8)
    yield from (made := value.to_bytes(size, "little"), made[::-1], made.hex().encode(), made[::-1].hex().encode())
    yield str(value).encode()


def generators_in_checkpoint(path: str) -> dict[str, Any]:
    """The states that a run with a secret leaves in its checkpoint for this rank, printed."""
    run = trainer(path, "bert", 2, {"noise_multiplier": 1.0, "seed": None}, save_strategy="steps", save_steps=2)
    with_dropout(run.model)
    run.train()
    states = torch.load(f"{path}/checkpoint-2/rng_state_{dist.get_rank()}.pth", weights_only=False)
    return {name: str(state.tolist() if isinstance(state, Tensor) else state) for name, state in states.items()}


def draws_of_all() -> dict[str, Any]:
    """What is the same on every rank, and what is not, without a seed."""
    entropy = Entropy.of_all_ranks(None)
    return {
        "draws": [PoissonBatchSampler.of(100, 10, entropy).draw(step) for step in range(5)],
        "noise": entropy.fresh("noise", 0),
        "key": entropy._key,
    }


def drifted() -> str:
    """The error of ranks that are at different steps."""
    model = nn.Linear(2, 2).to(device())
    entropy = Entropy(0)
    plan = Plan.make(promise(noise_multiplier=1.0), PoissonBatchSampler.of(100, 10, entropy), 9, entropy)
    ledger = Ledger()
    for _ in range(dist.get_rank()):
        ledger.charge(plan.event)
    try:
        private_gradient(model, lambda batch: pytest.fail("recorded"), [], plan, ledger)  # type: ignore[arg-type]
    except HfDpError as error:
        return str(error)
    return "no error"


def told_of_the_missing(late: float) -> list[str]:
    """What each rank says where rank 1 comes so many seconds late, the second time."""
    said: list[str] = []
    log = SimpleNamespace(warning=lambda words, *values: said.append(words % values))
    with mock.patch.object(ranks, "_SILENCE", 1.0):
        for seconds in (0.0, late):
            time.sleep(seconds * ranks.rank())
            ranks.warn_of_missing(log, "a_call()")
    return said
