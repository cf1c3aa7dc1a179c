"""Several images of an example, of which models drop those that only fill up and put the others together as rows; and
windows of one image beside a text."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_dp.errors import PreflightError, UnsupportedModelError
from hf_dp.losses import per_example_losses
from hf_dp.per_example import Certificate, loop, preflight, record
from hf_dp.per_example.pictures import check_pictures
from tests.per_example.small import relative_error
from tests.zoo import image_text_batch, tiny


def batch_with(*counts: int, most: int = 2) -> dict[str, Tensor]:
    """So many images of each example, filled up with images that are all zero to `most`."""
    batch = image_text_batch("idefics3", len(counts), 9, images=most)
    for i, count in enumerate(counts):
        batch["input_ids"][i, count:most] = 5
        batch["pixel_values"][i, count:] = 0
    return batch


@functools.cache
def certified(*counts: int, frozen: bool = False) -> tuple[Any, Certificate]:
    model = tiny("idefics3", "image_text")
    for name, p in model.named_parameters():
        p.requires_grad_(not frozen or "text_model" in name)
    return model, preflight(model, per_example_losses, batch_with(*counts))


def losses_alone(model: Any, batch: Any) -> Tensor:
    """As a collator makes an example that has no image."""
    return per_example_losses(model, {k: v for k, v in batch.items() if k != "pixel_values" or bool(v.any())})


def assert_exact(model: Any, certificate: Certificate, *counts: int) -> None:
    batch = batch_with(*counts)
    found = record(model, per_example_losses, batch, certificate=certificate)
    assert torch.allclose(found.squared_norms(), loop(model, losses_alone, batch).squared_norms(), rtol=1e-10)


@pytest.mark.slow
def test_as_many_images_of_each() -> None:
    model, certificate = certified(1, 1, 1)
    for counts in ((2, 2), (2,)):
        assert_exact(model, certificate, *counts)


def test_other_numbers_of_images_are_refused_where_what_sees_them_is_trained() -> None:
    with pytest.raises(UnsupportedModelError, match="it may hold other numbers of images of each of"):
        certified(1, 2, 1)


@pytest.mark.slow
def test_failure_39_as_many_images_as_examples_are_not_taken_for_one_of_each() -> None:
    """After a check in which all examples had one, none and two look like that."""
    model, certificate = certified(1, 1, 1)
    with pytest.raises(PreflightError, match="vision_model.* depends on the losses of others"):
        record(model, per_example_losses, batch_with(0, 2), certificate=certificate)


@pytest.mark.slow
def test_any_number_of_images_where_what_sees_them_is_frozen() -> None:
    model, certificate = certified(1, 2, 1, frozen=True)
    for counts in ((0, 2), (1, 2, 2)):
        assert_exact(model, certificate, *counts)


@pytest.mark.parametrize("name", ["llava", "idefics3"])
def test_failure_39_a_picture_too_few_here_and_too_many_there_is_refused(name: str) -> None:
    """The model looks at the totals alone, which are right."""
    model = tiny(name, "image_text")
    token = model.config.image_token_id
    batch = image_text_batch(name, 2, 9)
    ids = batch["input_ids"]
    ids[0, ids[0].eq(token).nonzero()[-1]] = 5
    ids[1, ids[1].ne(token).nonzero()[0]] = token
    with pytest.raises(UnsupportedModelError, match="one row would see the pictures of another"):
        record(model, per_example_losses, batch)


@pytest.mark.parametrize(
    ("kind", "more"), [("image", {"image_sizes": torch.ones(2, 2)}), ("audio", {"input_features": torch.ones(2, 8, 4)})]
)
def test_places_that_follow_from_sizes_need_a_micro_batch_of_one(kind: str, more: dict[str, Tensor]) -> None:
    batch = {**image_text_batch("llava", 2, 9), **more}
    model = SimpleNamespace(config=SimpleNamespace(**{f"{kind}_token_id": 4}))
    batch["input_ids"][:, 0] = 4
    with pytest.raises(UnsupportedModelError, match="which take places by their sizes"):
        check_pictures(model, batch)  # type: ignore[arg-type]
    check_pictures(model, {name: value[:1] for name, value in batch.items()})  # type: ignore[arg-type]


class Described(nn.Module):
    """Pictures in windows, and a text of each; of the text it may take the tokens that are marked."""

    def __init__(self, is_chosen: bool) -> None:
        super().__init__()
        self.one, self.two, self.table, self.is_chosen = nn.Linear(4, 4), nn.Linear(4, 4), nn.Embedding(9, 4), is_chosen

    def forward(self, pictures: Tensor, text: Tensor) -> Tensor:
        rows, of_text = self.one(pictures.flatten(0, 1)).cos(), self.table(text)
        seen = self.two((rows @ rows.mT).softmax(-1) @ rows).unflatten(0, (-1, 4)).flatten(1).cos().sum(1)
        if self.is_chosen:
            owners = text.gt(4).nonzero()[:, 0]
            chosen = self.two(of_text[text.gt(4)].cos()).sum(1)
            return seen.index_add(0, owners, chosen)
        return seen + of_text.flatten(1).sin().sum(1)


def described(marked: list[int]) -> dict[str, Tensor]:
    text = torch.stack([torch.tensor([5] * n + [2] * (7 - n)) for n in marked])
    return {"pictures": torch.randn(len(marked), 4, 3, 4, dtype=torch.float64), "text": text}


def its_losses(model: nn.Module, data: Any) -> Tensor:
    found: Tensor = model(**data)
    return found.square()


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7])
def test_windows_of_pictures_beside_a_text(size: int) -> None:
    """As Donut has them; a mask of the text chooses no window."""
    model, data = Described(is_chosen=False).double(), described([4] * size)
    certificate = preflight(model, its_losses, described([4, 4, 4]))
    found = record(model, its_losses, data, certificate=certificate)
    assert relative_error(found, loop(model, its_losses, data)) <= 1e-12


def test_tokens_that_are_chosen_beside_as_many_windows_are_no_windows() -> None:
    model = Described(is_chosen=True).double()
    certificate = preflight(model, its_losses, described([4, 4, 4]))
    for marked in ([4, 4], [1, 7, 4], [3]):
        data = described(marked)
        assert (
            relative_error(record(model, its_losses, data, certificate=certificate), loop(model, its_losses, data))
            <= 1e-12
        )
