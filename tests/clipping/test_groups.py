"""Clipping by groups: each group of parameters is cut to its own part of the norm, as the backward pass goes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from hf_dp import PrivacyConfig, PrivacyReport
from hf_dp.accounting import GroupClipping, Ledger
from hf_dp.accounting.terms import terms_from_dict
from hf_dp.clipping.groups import Groups
from hf_dp.clipping.rule import Group
from hf_dp.errors import ConfigurationError, LedgerError
from hf_dp.losses import per_example_losses
from hf_dp.per_example import Certificate, PerExampleGradients, RowSum, loop, record
from hf_dp.per_example.checks.survey import survey
from hf_dp.per_example.in_groups import InGroups
from hf_dp.per_example.rules import RULES
from hf_dp.per_example.sharding import all_names
from hf_dp.per_example.taken import GroupWatch
from hf_dp.step.clipped_sum import ClippedSum
from tests.clipping.contract import SETTINGS, ClippingRuleContract, largest_move, plan_of, promise
from tests.training.workbench import classifier, make, private
from tests.zoo import adapted, text_batch, tiny, with_dropout

TIED, TABLE = {"*attn*": 2.0, "*mlp*": 1.0, "*": 0.5}, "transformer.wte.weight"
# A model, its head, and weights that leave no group whole.
MODELS: dict[str, tuple[Callable[[], Any], str, dict[str, float]]] = {
    "tied": (lambda: tiny("gpt2", "causal_lm", n_layer=1), "causal_lm", TIED),
    "LoRA": (lambda: adapted("LoRA"), "causal_lm", {"*lora_A*": 1.0, "*lora_B*": 3.0}),
    "BERT": (lambda: tiny("bert", "sequence"), "sequence", {"*attention*": 1.0, "*embeddings*": 3.0, "*": 1.0}),
    "layers that share weights": (lambda: tiny("albert", "masked_lm"), "masked_lm", {"*ffn*": 1.0, "*": 1.0}),
    "relative positions": (lambda: tiny("t5", "seq2seq"), "seq2seq", {"encoder*": 1.0, "*": 2.0}),
}
KINDS = [pytest.param(kind, marks=[] if kind in ("tied", "LoRA") else [pytest.mark.slow]) for kind in MODELS]


class TestGroups(ClippingRuleContract):
    kind: ClassVar[Any] = "groups"
    written: ClassVar[dict[str, Any]] = {"norm": 0.5, **SETTINGS["groups"], "kind": "groups"}


def rule(norm: float, weights: dict[str, float]) -> Groups:
    return Groups(GroupClipping(norm=norm, groups=tuple(weights.items())))


def prepared(kind: str, size: int = 4) -> tuple[Any, dict[str, Tensor], Certificate, Groups]:
    """A model, a batch, what is known of its uses, and a rule that clips some examples in some groups."""
    make_model, head, weights = MODELS[kind]
    model, batch = make_model(), text_batch(head, size, 6)
    norms = loop(model, per_example_losses, batch).squared_norms().sqrt()
    return model, batch, survey(model, per_example_losses, batch, rules=RULES), rule(float(norms.median()), weights)


def summed(model: Any, clipping: Any, gradients: PerExampleGradients) -> ClippedSum:
    total = ClippedSum(model, clipping)
    total.add(gradients)
    return total


def by_hand(model: Any, clipping: Groups, truth: PerExampleGradients) -> tuple[dict[str, Tensor], Tensor]:
    """The sum of a loop's gradients, and whether each example is cut in any group."""
    found, cut = {}, torch.zeros(truth.batch_size, dtype=torch.bool)
    for names, share in clipping.groups(all_names(model)):
        each = {name: uses[0].values for name, uses in truth.factors.items() if name in names}  # type: ignore[union-attr]
        norms = sum(values.flatten(1).square().sum(1) for values in each.values()).sqrt()  # type: ignore[union-attr]
        scales = (clipping.sensitivity * share / norms).clamp(max=1)
        found |= {name: torch.tensordot(scales, values, 1) for name, values in each.items()}
        cut |= scales < 1
    return found, cut


def alike(one: dict[str, Tensor], two: dict[str, Tensor], tolerance: float = 1e-10) -> bool:
    size = max(float(value.norm()) for value in two.values())
    return one.keys() == two.keys() and all(
        torch.allclose(one[n], two[n], rtol=tolerance, atol=tolerance * size) for n in two
    )


@pytest.mark.parametrize("kind", KINDS)
def test_the_sum_is_that_of_a_loop_over_single_examples(kind: str) -> None:
    model, batch, certificate, clipping = prepared(kind)
    expected, cut = by_hand(model, clipping, loop(model, per_example_losses, batch))
    assert cut.any()
    kept = record(model, per_example_losses, batch, certificate=certificate)
    dropped = InGroups(model, per_example_losses, batch, certificate=certificate)
    for gradients in (kept, dropped):
        total = summed(model, clipping, gradients)
        assert alike(total.gradients, expected)
        assert (total.clipped, total.non_finite, total.examples) == (int(cut.sum()), 0, 4)
        assert total.loss == pytest.approx(float(kept.losses.sum()))
    assert not any(dropped.factors.values())
    with pytest.raises(ValueError, match="summed by groups"):
        dropped.squared_norms()


@pytest.mark.parametrize("reentrant", [None, False, pytest.param(True, marks=pytest.mark.slow)])
def test_with_dropout_checkpoints_and_units(reentrant: bool | None) -> None:
    model, batch, certificate, clipping = prepared("tied")
    if reentrant is not None:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    with_dropout(model)
    sums = []
    for owners in (None, [1, 0, 1, 1]):
        torch.manual_seed(3)
        kept = record(model, per_example_losses, batch, certificate=certificate)
        sums.append(summed(model, clipping, kept if owners is None else kept.grouped(owners)))
        torch.manual_seed(3)
        dropped = InGroups(model, per_example_losses, batch, certificate=certificate, owners=owners)
        sums.append(summed(model, clipping, dropped))
    assert [total.examples for total in sums] == [4, 4, 2, 2]
    assert alike(sums[0].gradients, sums[1].gradients)
    assert alike(sums[2].gradients, sums[3].gradients)
    assert not alike(sums[0].gradients, sums[2].gradients)


def test_no_more_is_kept_than_the_factors_of_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = tiny("llama", "causal_lm"), text_batch("causal_lm", 4, 6)
    certificate = survey(model, per_example_losses, batch, rules=RULES)
    weights = {"model.layers.0.*": 1.0, "model.layers.1.*": 1.0, "*": 1.0}
    groups = [group.names for group in rule(1.0, weights).groups(all_names(model))]
    held: list[set[str]] = []

    class Seen(GroupWatch):
        def _hand_on_group(self, number: int) -> None:
            held.append({name for name, uses in self.factors.items() if uses})
            super()._hand_on_group(number)

    monkeypatch.setattr("hf_dp.per_example.in_groups.GroupWatch", Seen)
    InGroups(model, per_example_losses, batch, certificate=certificate).by_groups(groups, lambda number, group: None)
    others, first, last = groups
    # Of the others those that are used behind the last layer wait for the embedding.
    waiting = others - {"model.embed_tokens.weight"}
    assert held == [last | waiting, first | waiting, others]


def square_roots(model: Any, batch: Any) -> Tensor:
    """A loss that is 0 where its input is, with a gradient that is no number there."""
    return model["first"](batch["x"]).square().sum(1) + model["second"](batch["x"]).square().sum(1).sqrt()


@pytest.mark.parametrize("is_dropped", [False, True])
def test_failure_14_what_is_not_finite_in_one_group_adds_nothing_there(is_dropped: bool) -> None:
    """And in the others no more than their budgets; of a loss that is not finite, nothing at all."""
    torch.manual_seed(0)
    model = nn.ModuleDict({name: nn.Linear(3, 2, bias=name == "first").double() for name in ("first", "second")})
    batch = {"x": torch.randn(4, 3, dtype=torch.float64)}
    batch["x"][1], batch["x"][2] = 0, math.inf
    clipping = rule(0.1, {"first*": 1.0, "second*": 1.0})
    certificate = survey(model, square_roots, batch, rules=RULES)
    make_gradients = InGroups if is_dropped else record
    found = summed(model, clipping, make_gradients(model, square_roots, batch, certificate=certificate))
    assert (found.examples, found.non_finite) == (4, 2)
    good = [0, 3]
    others = {"x": batch["x"][good]}
    without = summed(model, clipping, record(model, square_roots, others, certificate=certificate)).gradients
    for name, gradient in found.gradients.items():
        difference = gradient - without[name]
        assert difference.isfinite().all()
        # Of zeros the bias alone has a gradient.
        assert (float(difference.norm()) > 1e-12) == (name == "first.bias")
        assert float(difference.norm()) <= 0.1 * 0.5**0.5 * (1 + 1e-9)


class TooMuchEach(Groups):
    """Each group has all of the norm."""

    def groups(self, names: Any) -> tuple[Group, ...]:
        return tuple(Group(group.names, 1.0) for group in super().groups(names))


def test_negative_control_budgets_that_do_not_sum_in_squares_let_one_example_move_the_sum_by_more() -> None:
    weights = {"weight": 1.0, "bias": 1.0}
    assert 0.99 < largest_move(rule(0.5, weights)) <= 1 + 1e-9
    assert largest_move(TooMuchEach(rule(0.5, weights).terms)) > 1.4


@pytest.mark.parametrize("is_restricted", [False, True])
def test_rows_of_tables_are_summed_by_rows(is_restricted: bool) -> None:
    model, batch = tiny("gpt2", "causal_lm", n_layer=1, tie_word_embeddings=False), text_batch("causal_lm", 4, 6)
    certificate = survey(model, per_example_losses, batch, rules=RULES)
    kept = torch.arange(model.transformer.wte.weight.shape[0]).fmod(3).ne(0)
    clipping, found = rule(1.0, TIED), []
    groups = clipping.groups(all_names(model))
    for make_gradients in (record, InGroups):
        gradients: Any = make_gradients(model, per_example_losses, batch, certificate=certificate, tables=[TABLE])
        gradients = gradients.restricted({TABLE: kept}) if is_restricted else gradients
        rows, sums = RowSum(TABLE, model.transformer.wte.weight), {}

        def add(number: int, group: PerExampleGradients, rows: RowSum = rows, sums: dict[str, Tensor] = sums) -> None:
            own = {name: value for name, value in group.zeros(besides=[TABLE]).items() if name in group.factors}
            scales = clipping.coefficients(group.squared_norms(), group.rounding(), groups[number].share)
            group.add_weighted_sum_(own, scales, {TABLE: rows})
            sums.update(own)

        gradients.by_groups([group.names for group in groups], add)
        assert [*gradients.factors] == [TABLE] or make_gradients is record
        found.append({**sums, TABLE: rows.of(torch.arange(len(kept)))})
    assert alike(*found)
    assert bool(found[0][TABLE][~kept].any()) is not is_restricted


REFUSED = {
    "*nothing*": ({"*nothing*": 1, "*": 1}, r"'\*nothing\*' in groups matches no parameter that is trained"),
    "no other": ({"*.bias": 1, "*.weight": 1, "*": 1}, r"'\*' in groups matches no parameter that no other"),
    "none": ({"*.bias": 1}, "weight is matched by no pattern of groups"),
    "two": ({"*.bias": 1, "*attention*": 1, "*": 1}, r"bias is matched by '\*.bias' and by '\*attention\*' of groups"),
}


@pytest.mark.usefixtures("checked_once")
@pytest.mark.parametrize("kind", REFUSED)
def test_groups_that_are_not_the_models_are_refused_before_anything_is_spent(kind: str, tmp_path: Path) -> None:
    weights, message = REFUSED[kind]
    trainer = make(tmp_path, classifier(), private(clipping="groups", groups=weights))
    with pytest.raises(ConfigurationError, match=message):
        trainer.train()
    assert not trainer.ledger.entries


def test_modules_that_lie_in_one_another_have_no_end_of_names() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].outer = model
    with pytest.raises(RecursionError, match=r"without end: 0\.outer\.0\.outer"):
        all_names(model)


def test_a_tied_parameter_is_one_by_any_of_its_names() -> None:
    model = tiny("gpt2", "causal_lm", n_layer=1)
    names = all_names(model)
    assert names[TABLE] == {TABLE, "lm_head.weight"}
    (_, _), (head, _) = rule(1.0, {"lm_head*": 1, "*": 1}).groups(names)
    assert head == {TABLE}
    with pytest.raises(ConfigurationError, match=r"head.weight, .*wte.weight is matched by '\*wte\*' and"):
        rule(1.0, {"lm_head*": 1, "*wte*": 1, "*": 1}).groups(names)


@pytest.mark.parametrize(
    "groups",
    [
        *({}, [], "*", [1], [("*", 1), ("*", 2)], {str(i): 1 for i in range(257)}),
        *({name: 1} for name in ("a b", "", "](x)", "a|b", "a" * 101, 1)),
        *({"*": weight} for weight in (0, 1e-7, math.inf, math.nan, True, "1")),
    ],
)
def test_groups_that_are_none_are_refused(groups: Any) -> None:
    with pytest.raises(ConfigurationError, match="groups"):
        promise(clipping="groups", groups=groups)
    with pytest.raises(ConfigurationError, match="groups"):
        terms_from_dict("clipping", {"norm": 1.0, "groups": groups, "kind": "groups"})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"clipping": "groups"}, "clipping='groups' with groups=None"),
        ({"groups": {"*": 1}}, "clipping='flat' with groups="),
        ({"clipping": "automatic", "groups": {"*": 1}}, "clipping='automatic' with groups="),
        ({"clipping": "groups", "groups": {"*": 1}, "passes": 2}, "clipping='groups' with passes=2"),
    ],
)
def test_what_groups_do_not_go_with_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        promise(**changes)


def test_promise_and_report_say_groups_and_budgets() -> None:
    groups, flat = (plan_of(promise(**given)) for given in ({"clipping": "groups", **SETTINGS["groups"]}, {}))
    assert groups.promise == {**flat.promise, "clipping": "groups", **SETTINGS["groups"]}
    told, plain = (plan.report(Ledger(plan.promise)) for plan in (groups, flat))
    budgets = {"*weight": 0.5 * 0.75**0.5, "*": 0.25}
    assert told.clipping_groups == pytest.approx(budgets)
    assert told.to_dict() == {**plain.to_dict(), "clipping": "groups", "clipping_groups": told.clipping_groups}
    assert PrivacyReport.from_json(told.to_json()) == told
    for text in (str(told), str(groups)):
        assert "0.5 (in groups of parameters" in text
        assert "`*weight` 0.433, every other parameter 0.25" in text
    assert "group" not in str(flat) + plain.to_json()
    for wrong in ({}, {"*": 0}, {"a|b": 1.0}, None, [], {"*": "1"}):
        with pytest.raises(LedgerError, match="clipping_groups"):
            PrivacyReport.from_json(json.dumps({**told.to_dict(), "clipping_groups": wrong}))
    with pytest.raises(LedgerError, match="clipping_groups"):
        PrivacyReport.from_json(json.dumps({**plain.to_dict(), "clipping_groups": budgets}))


def test_order_is_no_part_of_the_promise_and_weights_are() -> None:
    one, two, other = (
        PrivacyConfig(target_epsilon=1, clipping="groups", groups=weights)
        for weights in ({"a": 1, "*": 2}, {"*": 2.0, "a": 1.0}, {"a": 2, "*": 1})
    )
    assert one == two != other
    assert one == one.replace() == PrivacyConfig.from_json(one.to_json())


@pytest.mark.usefixtures("checked_once")
def test_other_weights_are_another_run(tmp_path: Path) -> None:
    def trainer(**weights: float) -> Any:
        privacy = private(clipping="groups", groups={"*weight": 1.0, "*": 2.0} | weights)
        return make(tmp_path, privacy=privacy, save_strategy="steps", save_steps=1, max_steps=1, logging_steps=1)

    first = trainer()
    first.train()
    assert 0 < first.state.log_history[0]["clipped_fraction"] <= 1
    with pytest.raises(LedgerError, match="groups"):
        trainer(**{"*": 3.0}).train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
