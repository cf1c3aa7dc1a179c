"""Rules made of a function alone; and the code of docs/rules.md, which is run as it stands there."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_dp.errors import PreflightError, UnsupportedModelError
from hf_dp.per_example import RULES, Bound, instantiating, loop, preflight, record
from hf_dp.per_example.batch import Batch
from tests.per_example.small import Small, batch, parameter, relative_error, square

MODELS: dict[str, Small] = {
    "group norm": Small(
        lambda m, x: m.second(m.norm(m.first(x).mT).mT).cos(),
        first=nn.Linear(4, 6),
        norm=nn.GroupNorm(3, 6),
        second=nn.Linear(6, 4),
    ),
    "group norm of features, not of places": Small(
        lambda m, x: m.second(m.norm(m.first(x.flatten(1)))).cos(),
        first=nn.Linear(40, 6),
        norm=nn.GroupNorm(3, 6),
        second=nn.Linear(6, 4),
    ),
    "group norm of positions as rows": Small(
        lambda m, x: m.norm(m.first(x).flatten(0, 1)).view(len(x), -1).cos(),
        first=nn.Linear(4, 6),
        norm=nn.GroupNorm(2, 6),
    ),
    "group norm of features of data": Small(lambda m, x: m.norm(x[:, 0]).cos(), norm=nn.GroupNorm(2, 4)),
    "group norm of one place of data": Small(lambda m, x: m.norm(x[:, 0, :, None]).cos(), norm=nn.GroupNorm(2, 4)),
    "group norm on data, bias frozen": Small(lambda m, x: m.norm(x.mT).cos(), norm=nn.GroupNorm(2, 4)),
    "grouped and depthwise convolutions over time": Small(
        lambda m, x: m.two(torch.tanh(m.one(x.mT))),
        one=nn.Conv1d(4, 8, 3, groups=4, padding=1),
        two=nn.Conv1d(8, 4, 2, groups=2, stride=2),
    ),
    "padding='same'": Small(lambda m, x: m.conv(x.mT).cos(), conv=nn.Conv1d(4, 4, 3, padding="same")),
    "grouped convolutions of images": Small(
        lambda m, x: m.two(torch.tanh(m.one(x.view(len(x), 2, 5, 2)))),
        one=nn.Conv2d(2, 4, 2, groups=2, padding="same"),
        two=nn.Conv2d(4, 4, (2, 1), groups=4, bias=False),
    ),
}  # fmt: skip
MODELS["group norm on data, bias frozen"].norm.bias.requires_grad_(False)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 10])
@pytest.mark.parametrize("name", MODELS)
def test_exact(name: str, size: int) -> None:
    model, data = MODELS[name], batch(size, 5 if "images" in name else 10, 4)
    assert relative_error(record(model, square, data), loop(model, square, data)) <= 1e-12


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv1d(4, 4, 3, padding="same"),
        nn.Conv1d(4, 4, 4, groups=2, padding=2),
        nn.Conv1d(4, 6, 5, groups=2, padding="same"),
    ],
)
def test_convolutions_over_one_point_in_time(layer: nn.Module, size: int) -> None:
    """In float64 torch has no kernel for several of them at once."""
    model = Small(lambda m, x: m.layer(m.first(x).mT).cos(), first=nn.Linear(4, 4), layer=copy.deepcopy(layer))
    certificate, data = preflight(model, square, batch(4, 3, 4)), batch(size, 1, 4)
    assert relative_error(record(model, square, data, certificate=certificate), loop(model, square, data)) <= 1e-12


def code_of_the_tutorial() -> dict[str, Any]:
    text = (Path(__file__).resolve().parents[3] / "docs" / "rules.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", text, re.S):
        exec(block, names)
    return names


@pytest.mark.parametrize("name", ["multi_dot", "cheaper"])
def test_the_tutorial_is_right(name: str) -> None:
    model = Small(
        lambda m, x: torch.linalg.multi_dot([m.linear(x).flatten(0, 1), m.mixer]).view(len(x), -1, 6),
        mixer=parameter(4, 6),
        linear=nn.Linear(4, 4),
    )
    data = batch(3, 5, 4)
    with pytest.raises(UnsupportedModelError, match="parameter mixer is used by .*multi_dot"):
        record(model, square, data)
    names = code_of_the_tutorial()
    rules = {**names["MyTrainer"].per_example_rules, torch.linalg.multi_dot: names[name]}
    certificate = preflight(model, square, data, rules=rules)
    found = record(model, square, data, certificate=certificate, rules=rules)
    assert relative_error(found, loop(model, square, data)) <= 1e-12


def test_a_function_that_mixes_rows_is_found() -> None:
    centred = instantiating(
        "linear",
        lambda input, weight, bias=None: Bound(input, {"weight": weight, "bias": bias}, {}),
        lambda x, parameters, options: F.linear(x - x.mean(0), parameters["weight"], parameters["bias"]),
    )
    model = Small(lambda m, x: m.linear(x), linear=nn.Linear(4, 4))
    with pytest.raises(PreflightError, match="neighbours"):
        preflight(model, square, batch(3, 5, 4), rules={**RULES, F.linear: centred})


def test_a_function_that_draws_numbers_is_refused_and_not_drawn_again_in_the_backward_pass() -> None:
    random = instantiating(
        "linear",
        lambda input, weight, bias=None: Bound(input, {"weight": weight, "bias": bias}, {}),
        lambda x, parameters, options: F.linear(F.dropout(x, 0.5), parameters["weight"], parameters["bias"]),
    )
    model = Small(lambda m, x: m.linear(x).cos(), linear=nn.Linear(4, 4))
    with pytest.raises(UnsupportedModelError, match="random operation"):
        record(model, square, batch(3, 5, 4), rules={**RULES, F.linear: random})


@pytest.mark.parametrize(
    "layer", [nn.GroupNorm(2, 8), nn.Conv2d(8, 8, 3, groups=2), nn.Conv2d(8, 8, 3, padding="same"), nn.Conv2d(8, 4, 3)]
)
def test_layers_behind_others_under_autocast(layer: nn.Module) -> None:
    """Their input is in 16 bits, and their weights are not."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), copy.deepcopy(layer))

    def losses(model: nn.Module, given: Batch) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            found: Tensor = model(given["x"])
        return found.float().square().flatten(1).mean(1)

    given = {"x": torch.randn(3, 3, 9, 9)}
    preflight(model, losses, given)
    assert relative_error(record(model, losses, given), loop(model, losses, given)) < 1e-2
