"""What every private run begins with: data to draw from, ranks that have the same, and a plan with its loader."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from transformers.trainer_utils import seed_worker

import hf_dp.accounting as accounting
import hf_dp.ranks as ranks
from hf_dp.accounting.earlier import Earlier, check_same_people
from hf_dp.agreement import agree, warn_if_alone
from hf_dp.config import PrivacyConfig
from hf_dp.config.after import places_of
from hf_dp.config.asked import asked, promised
from hf_dp.config.secret import check_given_size
from hf_dp.config.units import drawn_are
from hf_dp.data.collate import LogicalBatchCollator
from hf_dp.data.loader import DrawnUnits, PoissonDataLoader, RankSampler
from hf_dp.data.overlapping_rows import warn_of_windows
from hf_dp.data.repeated import warn_of_repeated
from hf_dp.data.several_texts import warn_of_pieces
from hf_dp.errors import ConfigurationError
from hf_dp.hub import PrivacyRecord, read_earlier
from hf_dp.hub.earlier import check_other_people, trainings
from hf_dp.parts.table import settled
from hf_dp.per_example.checks.state import refuse_unshaped
from hf_dp.randomness import Entropy
from hf_dp.sampling.sampler import check_sizes
from hf_dp.sampling.table import sampler_of
from hf_dp.step.plan import Plan
from hf_dp.training.described import described_data, described_model, described_setup
from hf_dp.training.refusals import refuse_dataset
from hf_dp.training.resuming.output_lock import warn_of_later_than_before
from hf_dp.units.rows import UnitRows, taken, without_column

logger = logging.getLogger(__name__)


def check_privacy(privacy: object) -> None:
    """Refuses what is no promise (`ConfigurationError`)."""
    if not isinstance(privacy, PrivacyConfig):
        raise ConfigurationError(
            f"privacy={privacy!r}.",
            why="without a PrivacyConfig there is no promise to keep.",
            fix="pass privacy=PrivacyConfig(target_epsilon=8.0).",
        )


def records_before(privacy: PrivacyConfig) -> tuple[str, ...]:
    """The records of the trainings before, as `read_earlier` finds them, on the first rank; `planned` brings them to
    the others, which may not see where they lie. Raises as it does."""
    found = read_earlier(privacy.after) if ranks.rank() == 0 else ()
    for place, text in zip(places_of(privacy.after), found, strict=False):
        warn_of_later_than_before(place, PrivacyRecord.from_json(text).ledger)
    return found


def trainings_before(privacy: PrivacyConfig) -> tuple[Earlier, ...]:
    """The trainings before, on all ranks, which call it together; raises as `records_before` on the first one, and on
    the others `RanksError`."""
    with ranks.together():
        return trainings(privacy.after, _from_first(privacy, records_before(privacy)))


def _from_first(privacy: PrivacyConfig, earlier: tuple[str, ...]) -> tuple[str, ...]:
    """The records that the first rank has, on each."""
    return () if privacy.after is None else tuple(json.loads(ranks.text_from_first(json.dumps(earlier))))


def check_data(dataset: Any, expected_batch_size: int, privacy: PrivacyConfig, earlier: tuple[str, ...] = ()) -> None:
    """Refuses data that cannot be drawn from so, under this delta, or after these trainings (`ConfigurationError`)."""
    refuse_dataset(dataset)
    if not len(dataset):  # of which there is no unit
        check_sizes(0, expected_batch_size)
    units = units_of(dataset, privacy)
    unit = unit_of(dataset, privacy, units)
    drawn = drawn_from(dataset, privacy, units) if unit.drawn is None else unit.drawn
    check_sizes(drawn, expected_batch_size, is_secret=privacy.hides_n, of=drawn_are(privacy))
    _sampling(drawn, expected_batch_size, privacy)
    before = trainings(privacy.after, earlier)
    check_other_people(earlier, privacy.other_people)
    delta = accounting.promised_delta(privacy, number_of(dataset, units))
    check_same_people(before, unit)
    accounting.delta_after(before, delta, is_given=privacy.target_delta is not None)


def number_of(dataset: Any, units: UnitRows | None) -> int:
    """n, of units; `units` as in `unit_of`. Also where it is secret."""
    return len(dataset) if units is None else len(units)


def unit_of(dataset: Any, privacy: PrivacyConfig, units: UnitRows | None) -> accounting.UnitTerms:
    """Whose presence is hidden in this data, and of what steps are drawn; `units` are those of `units_of`."""
    drawn = None if units is None else drawn_from(dataset, privacy, units)
    return accounting.unit_terms(number_of(dataset, units), privacy, drawn)


def drawn_from(dataset: Any, privacy: PrivacyConfig, units: UnitRows | None) -> int:
    """Of how many a step draws: examples, units, or the chosen examples of units; `units` as in `unit_of`."""
    if units is None:
        return len(dataset)
    return len(units.chosen()) if privacy.unit_sampling == "examples" else len(units)


def units_of(dataset: Any, privacy: PrivacyConfig) -> UnitRows | None:
    """Whose rows are hidden together (`ConfigurationError` where the data does not say); None: each by itself."""
    if privacy.unit is None:
        return None
    most = privacy.max_examples_per_unit
    assert most is not None
    units = UnitRows.of(dataset, privacy.unit, most, several=privacy.unit_sampling == "examples")
    if units.has_shared and privacy.hides_n:
        raise ConfigurationError(
            f"training examples of several units (unit={privacy.unit!r}), whose number is secret.",
            why="without all examples of one, others would be chosen of those who share some with it, and of those who "
            "share some with these: no bound holds for that.",
            fix="give each row one value, or leave out sampling_probability and dataset_size, where whose each example "
            "is may be public.",
        )
    return units


def rows_and_units(dataset: Any, privacy: PrivacyConfig) -> tuple[Any, UnitRows | None]:
    """The dataset as models may see it, and `units_of` it. Called once for each training: what its rows are is said."""
    if (units := units_of(dataset, privacy)) is not None:
        return without_column(dataset, str(privacy.unit)), units
    if not warn_of_pieces(dataset):
        warn_of_windows(dataset)
    return dataset, None


def check_ranks(dataset: Any, model: nn.Module, facts: Mapping[str, Any], accelerator: Any = None) -> None:
    """Refuses ranks that differ, before the model is wrapped, which may overwrite what differs.

    Args:
        facts: the settings of the run, by the names that the error gives them.
        accelerator: whose settings must be the same, where there is one.

    Raises:
        ConfigurationError: with what differs, on all ranks.
        UnsupportedModelError: what has no shape yet, which cannot be told from others.
    """
    refuse_unshaped(model)
    warn_if_alone()
    data = described_data(dataset)
    agree({**facts, **described_setup(accelerator), **data, **described_model(model)})


def planned(
    privacy: PrivacyConfig,
    model: nn.Module,
    dataset: Any,
    collate: Callable[[list[Any]], Mapping[str, Any]],
    *,
    expected_batch_size: int,
    micro_batch_size: int,
    steps: Callable[[PoissonDataLoader], int],
    units: UnitRows | None = None,
    max_tokens_per_micro_batch: int | None = None,
    earlier: tuple[str, ...] = (),
    **options: Any,
) -> tuple[Plan, PoissonDataLoader]:
    """A loader whose items are logical batches, and the plan that goes with its sampler. All ranks call it together.

    Args:
        dataset: the training data, as `check_data` lets it pass, without the column of units.
        collate: the user's data collator.
        micro_batch_size: the most examples that a rank computes at once.
        steps: how many are planned, once there is a loader to ask how long an epoch is.
        units: of its rows; see `units_of`.
        max_tokens_per_micro_batch: padding included; None: any number.
        earlier: those of `records_before`.
        options: of `DataLoader`.
    """
    earlier = _from_first(privacy, earlier)
    if units is not None:
        agree({"whose the rows of train_dataset are": units.described})
    else:
        warn_of_repeated(dataset, is_told=not (privacy.hides_n or privacy.withhold_non_private_logs))
    entropy, rank = Entropy.of_all_ranks(privacy.seed), ranks.rank()
    drawn, unit = None, None
    if units is not None and privacy.unit_sampling == "examples":
        dataset = _chosen(dataset, units, privacy, entropy)
        unit = accounting.unit_terms(len(units), privacy, len(dataset))
    elif units is not None:
        drawn, unit = DrawnUnits(units, entropy), accounting.unit_terms(len(units), privacy)
    n = len(dataset if drawn is None else drawn.rows)
    sampler = sampler_of(_sampling(n, expected_batch_size, privacy), n, entropy, is_secret=privacy.hides_n, unit=unit)
    loader = PoissonDataLoader(
        dataset,
        batch_sampler=RankSampler(sampler, rank, ranks.world_size(), drawn),
        collate_fn=LogicalBatchCollator(
            micro_batch_size, collate, privacy.seed is not None, max_tokens_per_micro_batch, privacy.equal_widths
        ),
        worker_init_fn=functools.partial(seed_worker, num_workers=options.get("num_workers", 0), rank=rank),
        **options,
    )
    number, promise = int(steps(loader)), settled(privacy, model)
    how_many = number_of(dataset, units)
    return Plan.make(promise, sampler, number, entropy, *asked(promise, number), earlier=earlier, n=how_many), loader


def _chosen(dataset: Any, units: UnitRows, privacy: PrivacyConfig, entropy: Entropy) -> Any:
    """The examples to draw from; how many are left out is told to whoever trains."""
    rows = units.chosen(entropy if privacy.hides_n else None)
    if len(rows) < units.rows and not privacy.withhold_non_private_logs:
        ranks.warn(
            logger,
            "%d of %d examples are drawn from: the others would be more than max_examples_per_unit=%d with one value "
            "of %r.",
            *(len(rows), units.rows, privacy.max_examples_per_unit, privacy.unit),
        )
    return taken(dataset, rows)


def _sampling(n: int, expected_batch_size: int, privacy: PrivacyConfig) -> accounting.SamplingTerms:
    check_given_size(privacy.dataset_size, expected_batch_size)
    return accounting.sampling_terms(n, expected_batch_size, promised(privacy))
