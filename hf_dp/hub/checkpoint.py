"""All places of a checkpoint that say what was spent must say the same: a ledger by itself is easily changed."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hf_dp.accounting import Ledger, in_words, promised_unit, sampling_terms
from hf_dp.config.ranges import is_number
from hf_dp.config.secret import GIVEN_SIZE
from hf_dp.errors import LedgerError
from hf_dp.figures import logged, upper
from hf_dp.hub.charged import same, steps_are
from hf_dp.hub.claim import check_claim, check_promise, recomputed
from hf_dp.hub.earlier import check_earlier
from hf_dp.hub.files import ABOUT_LOADING, check_files
from hf_dp.hub.record import RECORD_FILE
from hf_dp.hub.source import open_source
from hf_dp.versions import library_versions

# Of how many epsilon is logged, rounded up: four significant ones, and four decimals by earlier versions.
_LOGGED_DIGITS, _LOGGED_DECIMALS = 1e-3, 1e-4
_UNSEALED = ("stateful_callbacks", "log_history")
_COUNTS = ("max_steps", "num_train_epochs", "total_flos", "num_input_tokens_seen")
_INTERVALS = ("logging_steps", "eval_steps", "save_steps", "train_batch_size")


def seal(
    key: bytes,
    ledger: Mapping[str, Any],
    data: Mapping[str, Any] | None,
    state: Mapping[str, Any],
    values: Mapping[str, str] | None = None,
) -> str:
    """A keyed digest of what trainer_state.json says of its training: who has no key can change none of that unseen.

    Not sealed are the logs, which callbacks may write again and whose epsilons are held against the ledger, and the
    checkpoint's other files, but for the checksums of the weights and of the optimizer's state.

    Args:
        key: of the output directory; see `hf_dp.data.fingerprint`.
        ledger, data: as they are saved.
        state: the fields of Trainer's state.
        values: the checksums, where there are any.
    """
    # Where the best checkpoint lies may be learnt later; the others' states hold this seal.
    kept = {name: value for name, value in state.items() if name not in _UNSEALED and not name.startswith("best")}
    # As it will be read: there keys that are numbers are texts, and have another order.
    sealed = [ledger, data, kept] if values is None else [ledger, data, kept, values]
    text = json.dumps(json.loads(json.dumps(sealed)), sort_keys=True)
    return hashlib.blake2b(text.encode(), key=key, digest_size=32, person=b"hf_dp ledger").hexdigest()


def refuse_disagreement(checkpoint: str | Path, state: Mapping[str, Any], ledger: Ledger) -> None:
    """Refuses a checkpoint whose parts do not agree on what was spent.

    Args:
        checkpoint: the folder.
        state: its trainer_state.json.
        ledger: the one in `state`.

    Raises:
        LedgerError: with everything that differs, or with what cannot be read.
    """
    checkpoint = Path(checkpoint)
    found = [*_of_promise(ledger), *_of_name(checkpoint, state), *_of_numbers(state)]
    found += _of_record(checkpoint, ledger)
    # Epsilon is computed only of a ledger that is otherwise sound.
    found += [] if found else _of_logs(state, ledger)
    if found:
        raise LedgerError(
            f"the checkpoint {str(checkpoint)!r} contradicts itself: {'; '.join(found)}.",
            why="one of these was changed after it was saved, and what was really spent is unknown.",
            fix="resume from a checkpoint that is as it was saved, or start a new run on new data.",
        )


def missing_files(checkpoint: Path) -> Iterator[str]:
    """What is not there, of what its weights and its record say that it has: where it was deleted halfway."""
    source = open_source(checkpoint)
    if RECORD_FILE not in source.names:
        if any(re.fullmatch(r"(adapter_)?model[^/]*\.safetensors", name) for name in source.names):
            yield f"it has weights, and no {RECORD_FILE}"
        return
    with contextlib.suppress(LedgerError):  # one that cannot be read is refused by who reads it
        gone = sorted(source.record().files.keys() - source.names)
        yield from (f"it has no {name}, which {RECORD_FILE} names" for name in gone)


def _of_promise(ledger: Ledger) -> Iterator[str]:
    promise = ledger.promise
    try:
        noise, n = promise["calibrated_noise_multiplier"], promise["dataset_size"]
        given, size = promise.get("sampling_probability"), promise.get(GIVEN_SIZE)
        one_stage, is_secret = promise["noise_multiplier"] is None, given is not None or size is not None
        unit = promised_unit(n, promise, promise.get("drawn_from"))
        sampling = sampling_terms(unit.drawn, promise["expected_batch_size"], promise)
        q, drawn = sampling.probability, size or unit.drawn
        agree = (n is None) == is_secret and steps_are(ledger, sampling, noise, unit, drawn, one_stage=one_stage)
    except (KeyError, TypeError, ValueError, ArithmeticError):
        yield "the ledger's promise has no noise multiplier, batch size and dataset size"
    else:
        if not agree:
            yield f"steps in the ledger are not those of its promise (noise multiplier {noise}, probability {q:.6g})"


def _of_name(checkpoint: Path, state: Mapping[str, Any]) -> Iterator[str]:
    named = re.fullmatch(r"checkpoint-(\d{1,18})", checkpoint.name)
    if named and int(named[1]) != state["global_step"]:
        yield f"trainer_state.json is of step {state['global_step']}, the folder's name of step {named[1]}"


def _of_numbers(state: Mapping[str, Any]) -> Iterator[str]:
    """What Trainer goes on counting with; some of it not before the end of the training."""
    for name in (*_COUNTS, *_INTERVALS):
        value = state.get(name, 0)
        if value is None and name in _INTERVALS:
            continue
        if not (is_number(value) and abs(value) < math.inf):
            yield f"{name} in trainer_state.json is {value!r}"
    logs = state.get("log_history", [])
    if not isinstance(logs, list) or not all(isinstance(entry, dict) for entry in logs):
        yield "log_history in trainer_state.json is no list of entries"


def _of_record(checkpoint: Path, ledger: Ledger) -> Iterator[str]:
    source = open_source(checkpoint)
    if RECORD_FILE not in source.names:
        yield from missing_files(checkpoint)
        return
    record = source.record()
    if record.ledger != ledger:
        here, there = _told(ledger, in_words), _told(record.ledger, in_words)
        if here == there:  # words round
            here, there = _told(ledger, repr), _told(record.ledger, repr)
        yield f"the ledger in trainer_state.json ({here}) is not that in {RECORD_FILE} ({there}), or its promise is not"
        return
    checks = [*check_promise(record), *check_earlier(record), *check_files(source, record)]
    checks += check_claim(record, recomputed(record, source.title))
    for check in checks:
        # Another version may compute another epsilon from the same ledger.
        is_computed = check.name == "budget" or check.name.startswith("epsilon")
        is_of_others = is_computed and record.report.versions != library_versions()
        if check.passed or check.name in ABOUT_LOADING or is_of_others:
            continue
        yield f"{check.name}: {check.found}"


def _of_logs(state: Mapping[str, Any], ledger: Ledger) -> Iterator[str]:
    """Epsilon only grows, so that no earlier one is above the ledger's."""
    for entry in state.get("log_history", []):
        step, spent, noise = (entry.get(name) for name in ("step", "epsilon", "noise_multiplier"))
        if isinstance(step, int) and step > state["global_step"]:
            yield f"log_history goes on to step {step}, trainer_state.json to {state['global_step']}"
        if noise is not None and not _is_logged(noise, ledger.promise["calibrated_noise_multiplier"]):
            yield f"log_history has noise multiplier {noise} at step {step}"
        if isinstance(spent, float) and not spent <= _epsilon(ledger) * (1 + _LOGGED_DIGITS) + _LOGGED_DECIMALS:
            follows = upper(_epsilon(ledger), 5)
            yield f"log_history has epsilon {spent} at step {step}, and {follows} follows from the ledger"


def _is_logged(noise: Any, calibrated: Any) -> bool:
    """As it is, as earlier versions logged it, or rounded down."""
    told = logged(0.0, calibrated)["noise_multiplier"] if is_number(calibrated) else calibrated
    return same(noise, calibrated) or same(noise, told)


def _epsilon(ledger: Ledger) -> float:
    return ledger.epsilon(ledger.promise["delta"], ledger.promise["accountant"])


def _told(ledger: Ledger, say: Callable[[Any], str]) -> str:
    parts = [f"{count} x {label}: {say(event)}" for event, count, label in ledger.entries]
    return ", ".join(parts) or "empty"
