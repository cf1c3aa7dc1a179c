"""Which architectures of Transformers are exact: each class of a task that Transformers has a list of, made small.

    python scripts/sweep.py --head causal_lm --only llama --only mamba2
    python scripts/sweep.py --write

What is exact and what is refused is judged as in `coverage.py`. A config is made small by the names of its settings
alone (`shrinking.py`, `rarer_sizes.py`): where no model comes of that, nothing is said of the architecture.
"""

from __future__ import annotations

import logging
import os
import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from torch import nn
from transformers.models.auto import modeling_auto as auto

from hf_dp import still_batch_norm
from hf_dp.losses import own_losses, per_example_losses
from hf_dp.per_example.batch import LossFunction
from scripts import judging
from scripts.batches import batch_for
from scripts.shrinking import FAILURES, NotMadeError, small_model

HEADS = {
    "causal_lm": auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "sequence": auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    "token": auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
    "qa": auto.MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES,
    "masked_lm": auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "seq2seq": auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "image": auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    "segmentation": auto.MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING_NAMES,
    "audio": auto.MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES,
    "video": auto.MODEL_FOR_VIDEO_CLASSIFICATION_MAPPING_NAMES,
}
SHAPES = ((3, 12), (7, 12), (4, 12))
PAGE = Path(__file__).resolve().parents[1] / "docs" / "model_families.md"
_SECONDS = 300
NOT_MADE = "not made: "
# Of a decoder whose own loss does not shift the labels.
UNSHIFTED, TOLD = "does not shift the labels", "ForMaskedLM"
# Of a model with batch norms, which keep the statistics that they have.
BATCH_NORM, STILL = "is batch normalisation", "still"
# Of a model whose own loss of each example, by itself, is trained.
ALONE = "alone"
_SIGNS = {TOLD: "*", STILL: "†", ALONE: "‡"}
# Of what is refused, with what it is exact, or may be.
_LOOPED = " `hf_dp.losses.own_losses` gives its own loss of each example, and was not judged here."
_WAYS = {
    **dict.fromkeys(("lxmert", "prophetnet", "dpt"), _LOOPED),
    "rwkv": " Exact with `model.config.rescale_every = 0`, since it divides weights whenever it is evaluated.",
}
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class _TooLongError(BaseException):
    """No `Exception`: what is tried again in more bits, after any failure, would have no limit then."""


@contextmanager
def _limited() -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise _TooLongError

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)


def _is_random(model: nn.Module, batch: dict[str, Any]) -> bool:
    """Whether it draws numbers in training, dropout apart: no two passes of such a model are alike."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    with torch.no_grad():
        losses = torch.stack([model.train()(**batch).loss for _ in range(8)])
    return bool(losses.ne(losses[0]).any())


def _is_finite(model: nn.Module, batch: dict[str, Any]) -> bool:
    """Whether it computes gradients of this batch, all of them finite; of some a mask is infinite in float64."""
    try:
        model(**batch).loss.backward()
    except RuntimeError:
        return False
    found = all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    model.zero_grad()
    return found


def judge_class(name: str, kind: str, head: str) -> str:
    """ "exact 3e-16", "refused: why", "WRONG ..." or "not made: why"; and after what it is not refused: which
    `loss_type`, that batch norms keep their statistics, or that its own losses of single examples are trained."""
    said = _judged(name, kind, head)
    if UNSHIFTED in said and (again := _judged(name, kind, head, loss_type=TOLD)).startswith("exact"):
        return f"{again} {TOLD}"
    if is_still := BATCH_NORM in said:
        said = _judged(name, kind, head, is_still=True)
        if said.startswith("exact"):
            return f"{said} {STILL}"
    if said.startswith("refused"):
        again = _judged(name, kind, head, is_still=is_still, loss_fn=own_losses)
        return f"{again} {ALONE}" if again.startswith("exact") else said
    return said


def _judged(
    name: str,
    kind: str,
    head: str,
    loss_type: str | None = None,
    is_still: bool = False,
    loss_fn: LossFunction = per_example_losses,
) -> str:
    try:
        with _limited(), judging.sorted_in_float64():
            made = getattr(transformers, kind)
            model: Any = small_model(made, made.config_class or transformers.CONFIG_MAPPING[name], head)
            model.config.use_cache = False  # as Trainer sets it
            if loss_type is not None:
                model.loss_type = loss_type
            if is_still:
                still_batch_norm(model)
            state = model.state_dict()
            is_random = _is_random(model, batch_for(head, model, 3))

            def build(dtype: torch.dtype) -> nn.Module:
                model.load_state_dict(state)
                torch.manual_seed(0)
                with torch.no_grad():
                    for p in model.parameters():
                        p.add_(0.05 * torch.randn_like(p))
                return model.to(dtype).train(not is_random)

            doubles = batch_for(head, model, 3, dtype=torch.float64)
            if is_widened := not _is_finite(build(torch.float64), doubles):
                with judging.widened(model, doubles):
                    if not _is_finite(model, doubles):
                        raise NotMadeError("its gradients in float64 are not finite")

            def make_batch(size: int, length: int, dtype: torch.dtype) -> dict[str, Any]:
                return batch_for(head, model, size, length, dtype)

            return judging.judge(build, make_batch, loss_fn, shapes=SHAPES, is_widened=is_widened)
    except NotMadeError as reason:
        return f"{NOT_MADE}{reason}"
    except _TooLongError:
        return f"{NOT_MADE}it takes more than {_SECONDS} s"
    except FAILURES as error:  # of the model itself, in float64 for one
        return f"{NOT_MADE}{type(error).__name__}: {error}".splitlines()[0][:160]


def classes_of(head: str) -> dict[str, str]:
    """Model type -> the class that has this head."""
    return {name: kind if isinstance(kind, str) else kind[0] for name, kind in HEADS[head].items()}


def page(found: dict[str, dict[str, str]]) -> str:
    """docs/model_families.md, of head -> model type -> what was found."""

    def of(head: str, beginning: str) -> list[str]:
        names = {name: said for name, said in found[head].items() if said.startswith(beginning)}
        return [
            name + next((s for e, s in _SIGNS.items() if said.endswith(e)), "") for name, said in sorted(names.items())
        ]

    lines = [
        "# Model families",
        "",
        f"Written by `python scripts/sweep.py --write` (torch {torch.__version__}, transformers",
        f"{transformers.__version__}): each architecture that Transformers lists for a task, with two layers or one of",
        "each type, and random weights. *Exact* are norms and sums of all parameters, and no example moves another, in",
        f"float64 within 1e-10 of a loop over single examples and in float32 within 1e-3, for {SHAPES[0][0]}, "
        f"{SHAPES[1][0]} and",
        f"{SHAPES[2][0]} examples. *Not made* says that no small model came of the names of a config's settings:",
        "nothing is known of it. Texts that may come with pictures or sounds come alone. In more depth, and with",
        "padding, shapes and precisions: [coverage](coverage.md).",
        "",
        "| task | exact | refused | not made |",
        "| --- | --- | --- | --- |",
    ]
    lines += [
        f"| {head} | {len(of(head, 'exact'))} | {len(of(head, 'refused'))} | {len(of(head, NOT_MADE))} |"
        for head in found
    ]
    stars = [
        f'A star: after `model.loss_type = "{TOLD}"`, since its own loss {UNSHIFTED}. A dagger: after',
        "`hf_dp.still_batch_norm(model)`, since batch norms compute each example's output from the whole batch. A",
        "double dagger: by its own loss of each example by itself (`hf_dp.losses.own_losses`;",
        "[how](faq.md#why-is-my-loss-refused)), since it is no known one, or the model mixes the examples of a batch,",
        "or hides which row is whose.",
        "",
    ]
    lines += [
        "",
        "## Exact",
        "",
        *(stars if any(said.endswith((*_SIGNS,)) for told in found.values() for said in told.values()) else []),
    ]
    lines += [f"- **{head}**: {', '.join(of(head, 'exact'))}" for head in found]
    lines += ["", "## Refused", ""]
    for head in found:
        for name in of(head, "refused"):
            first = found[head][name].removeprefix("refused: ").partition(";")[0]
            lines.append(f"- {name} ({head}): {first.rstrip('.')}.{_WAYS.get(name, '')}")
    lines += ["", "## Not made", ""]
    lines += [f"- **{head}**: {', '.join(of(head, NOT_MADE))}" for head in found if of(head, NOT_MADE)]
    return "\n".join(lines) + "\n"


@app.command()
def main(
    head: Annotated[list[str] | None, typer.Option(help="A task; may be given several times.")] = None,
    only: Annotated[list[str] | None, typer.Option(help="A model type; may be given several times.")] = None,
    write: Annotated[bool, typer.Option(help="Write docs/model_families.md.")] = False,
) -> None:
    """Judges them, and fails where anything is wrong."""
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    found: dict[str, dict[str, str]] = {}
    for task in head or HEADS:
        for name, kind in classes_of(task).items():
            if not only or name in only:
                found.setdefault(task, {})[name] = said = judge_class(name, kind, task)
                print(f"{task} {name}: {said}", flush=True)
    if write:
        PAGE.write_text(page(found), encoding="utf-8")
    if any(said.startswith("WRONG") for of in found.values() for said in of.values()):
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
