"""What users, disks and forgers come with: right, wrong, and nearly right. Strategies for tests of every room.

`make test` tries about 300 cases, always the same, and `make slow` 10,000: `cases` says how many of them a test has.
"""

from __future__ import annotations

import copy
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from hf_dp import OutputBiasConfig, ReAttentionConfig, SparseEmbeddingConfig
from hf_dp.errors import HfDpError


def cases(number: int) -> settings:
    """So many in `make test`, and in `make slow` as many more as its profile (tests/conftest.py) says."""
    times = settings.default.max_examples / 100
    return settings(max_examples=round(number * times), suppress_health_check=list(HealthCheck))


T = TypeVar("T")


def unless_refused(make: Callable[[], T]) -> T | None:
    """What is made; None where it is refused by an error of this library, which says why, and what to do."""
    try:
        return make()
    except HfDpError as error:
        told = error
    assert all((told.found, told.why, told.fix))
    assert len(str(told).encode()) < 20_000
    assert len(str(told)) < 6000
    return None


# --- values -----------------------------------------------------------------------------------------------------------

NUMBERS = (0, 1, -1, 0.5, 1e-6, -0.0, math.inf, -math.inf, math.nan, 5e-324, 1e308, 2**53 + 1, 2**63, 10**400)
TEXTS = ("", "inf", "nan", "1", "pld", "units", "\x00", "\x1b[2J", "\u202e", "\ud800", "é" * 70, "a" * 5000)
in_json: st.SearchStrategy[Any] = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 99), st.floats(), st.text(max_size=4),
    st.sampled_from([*NUMBERS, *TEXTS, [], {}, [[]], {"a": None}, [None], ["inf"]]),
)  # fmt: skip
odd: st.SearchStrategy[Any] = in_json | st.sampled_from(
    [b"x", np.float32(1), np.float64(2), np.int64(3), np.array([1, 2]), np.array(1.0), torch.tensor(1), (), ("a",),
     set(), 1j, object(), Path("x")]
)  # fmt: skip

# --- promises ---------------------------------------------------------------------------------------------------------

_RIGHT: dict[str, st.SearchStrategy[Any]] = {
    "target_epsilon": st.floats(0.1, 10),
    "noise_multiplier": st.floats(0.3, 10) | st.just(0),
    "target_tpr": st.floats(0.05, 0.9),
    "at_fpr": st.floats(1e-6, 0.5),
    "target_delta": st.none() | st.floats(1e-9, 0.01),
    "clipping_norm": st.floats(1e-3, 1e3) | st.just(math.inf),
    "accountant": st.sampled_from(["pld", "rdp"]),
    "withhold_non_private_logs": st.booleans(),
    "seed": st.none() | st.integers(0, 9),
    "re_attention": st.sampled_from([None, {}, ReAttentionConfig(), ReAttentionConfig(token_frequencies="uniform")]),
    "sparse_embeddings": st.sampled_from([None, {}, SparseEmbeddingConfig(), {"method": "fest", "kept_rows": 3}]),
    "output_bias": st.sampled_from([None, {}, OutputBiasConfig(budget_share=0.1)]),
    "clipping": st.sampled_from(["flat", "automatic", "groups"]),
    "noise": st.sampled_from(["gaussian", "chacha20", "grid"]),
    "sampling_probability": st.none() | st.floats(1e-12, 1),
    "max_batch_size": st.none() | st.integers(8, 48),
    "unit": st.sampled_from([None, "user", "inf"]),
    "max_examples_per_unit": st.none() | st.integers(1, 4),
    "unit_sampling": st.sampled_from(["units", "examples"]),
    "dataset_size": st.none() | st.integers(2, 1000),
    "after": st.sampled_from([None, "out", "inf", ["a", "b"], [], Path("x")]),
    "other_people": st.booleans(),
    "passes": st.sampled_from([1, 2]),
    "equal_widths": st.booleans(),
}


@st.composite
def arguments_of_configs(draw: st.DrawFn, values: st.SearchStrategy[Any] = odd) -> dict[str, Any]:
    """Of PrivacyConfig: a budget or a noise, and some more, of which now and then one is odd."""
    names = {draw(st.sampled_from(["target_epsilon", "noise_multiplier", "target_tpr"]))}
    names |= draw(st.sets(st.sampled_from(sorted(_RIGHT)), max_size=4))
    given = {name: draw(_RIGHT[name]) for name in sorted(names)}
    if given.get("clipping") == "groups":
        given["groups"] = draw(st.sampled_from([{"*": 1}, {"*weight": 1e-6, "*": 3}, {"a[bc]*?.-x": 2.5}]))
    if draw(st.booleans()):
        given[draw(st.sampled_from([*sorted(_RIGHT), "groups"]))] = draw(values)
    return given


# --- JSON that was changed --------------------------------------------------------------------------------------------


def _places(values: Any, place: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inside = values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list) else ()
    return [place, *(found for name, value in inside for found in _places(value, (*place, name)))][not place :]


@st.composite
def changed(draw: st.DrawFn, values: Any) -> Any:
    """A copy of JSON values in which something is gone, another, doubled, elsewhere, deeper, or unchanged after all."""
    values = copy.deepcopy(values)
    *path, last = draw(st.sampled_from(_places(values)))
    place = values
    for name in path:
        place = place[name]
    match draw(st.sampled_from(["value", "value", "gone", "number", "more", "deeper", "exchanged"])):
        case "value":
            place[last] = draw(in_json)
        case "gone":
            del place[last]
        case "number" if isinstance(place[last], (int, float)) and not isinstance(place[last], bool):
            change = draw(
                st.sampled_from([lambda x: x * 2, lambda x: x / 2, lambda x: -x, lambda x: x + 1, float, int])
            )
            place[last] = change(place[last]) if abs(place[last]) < 1e300 else 1
        case "more" if isinstance(place, dict):
            place[draw(st.sampled_from(["x", *TEXTS, *place]))] = draw(in_json)
        case "more":
            place.insert(last, copy.deepcopy(place[last]))
        case "deeper":
            place[last] = [place[last]] if draw(st.booleans()) else {"type": place[last]}
        case "exchanged" if isinstance(place, dict):
            other = draw(st.sampled_from(sorted(place)))
            place[last], place[other] = place[other], place[last]
    return values


@st.composite
def as_text(draw: st.DrawFn, values: Any) -> bytes:
    """JSON, as the strict and the less strict write it, and perhaps cut, spoilt, or with a name twice."""
    text = json.dumps(values, indent=draw(st.sampled_from([None, 2]))).encode()
    return draw(spoilt(text)) if draw(st.integers(0, 3)) == 0 else text


@st.composite
def spoilt(draw: st.DrawFn, content: bytes) -> bytes:
    """A file that was cut, of which a bit was flipped, or into which something was written; or that is as it was."""
    at = draw(st.integers(0, max(0, len(content) - 1)))
    match draw(st.sampled_from(["cut", "flipped", "more", "empty", "zeros", "as it was"])):
        case "cut":
            return content[:at]
        case "flipped" if content:
            return content[:at] + bytes([content[at] ^ 1 << draw(st.integers(0, 7))]) + content[at + 1 :]
        case "more":
            return content[:at] + draw(st.sampled_from([b"\xff", b"{", b'"', b"0", b",", b"[" * 2000])) + content[at:]
        case "empty":
            return b""
        case "zeros":
            return content[:at] + bytes(len(content) - at)
    return content


# --- data -------------------------------------------------------------------------------------------------------------

# Of a cell; as in tables that were joined, parsed or exported by somebody else.
_CELLS = st.one_of(
    st.integers(-200, 500), st.floats(), st.text(max_size=3), st.lists(st.integers(-200, 500), max_size=4),
    st.sampled_from([None, math.nan, 10**30, 2**63, True, b"x", [], [None], [1.5], [[1, 2], [3]], {}, {"a": 1}, "",
                     np.int64(1), np.array([1, 2, 3]), np.zeros((2, 2)), torch.tensor([1, 2]), torch.tensor(0.5)]),
)  # fmt: skip


@st.composite
def rows_of(draw: st.DrawFn, right: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of which one or two have a cell that is odd, missing or new; or that are one row, or all alike, or none."""
    rows = [dict(row) for row in right]
    for _ in range(draw(st.integers(0, 2))):
        row, name = rows[draw(st.integers(0, len(rows) - 1))], draw(st.sampled_from([*right[0], "new"]))
        if draw(st.integers(0, 5)):
            row[name] = draw(_CELLS)
        else:
            row.pop(name, None)
    match draw(st.integers(0, 9)):
        case 0:
            return rows[:1]
        case 1:
            return rows[-1:] * len(rows)
        case 2:
            return draw(st.sampled_from([[], rows[:2], [row | {} for row in rows * 2]]))
    return rows


# --- checkpoints ------------------------------------------------------------------------------------------------------

Damage = Callable[[Path], None]


@st.composite
def damages(draw: st.DrawFn, output_dir: Path, others: Path) -> Damage:
    """What becomes of an output directory with checkpoints: files are removed, spoilt, edited, or those of another
    checkpoint or of another training; or whole checkpoints change places.

    Args:
        output_dir: as it was written; what is done is done to copies of it.
        others: of another training.
    """
    files = sorted(path.relative_to(output_dir) for path in output_dir.rglob("*") if path.is_file())
    file = draw(st.sampled_from(files))
    folders = sorted(path.name for path in output_dir.glob("checkpoint-*"))
    match draw(
        st.sampled_from(["removed", "spoilt", "edited", "edited", "exchanged", "another's", "folders", "folder"])
    ):
        case "removed":
            return lambda path: (path / file).unlink(missing_ok=True)
        case "spoilt":
            content = draw(spoilt((output_dir / file).read_bytes()))
            return lambda path: _write(path / file, content)
        case "edited":
            file = draw(st.sampled_from([name for name in files if name.suffix == ".json"]))
            text = draw(as_text(draw(changed(json.loads((output_dir / file).read_bytes())))))
            return lambda path: _write(path / file, text)
        case "exchanged":
            other = draw(st.sampled_from([name for name in files if name.name == file.name]))
            return lambda path: _write(path / file, (output_dir / other).read_bytes())
        case "another's" if (others / file).exists():
            return lambda path: _write(path / file, (others / file).read_bytes())
        case "folders":
            one, other = draw(st.permutations(folders))[:2]
            return lambda path: _exchange(path / one, path / other)
        case "folder":
            name = draw(st.sampled_from(folders))
            return lambda path: shutil.rmtree(path / name) or shutil.copytree(others / name, path / name)
    return lambda path: None


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def _exchange(one: Path, other: Path) -> None:
    if one.exists() and other.exists():
        for source, target in ((one, one.with_name("_aside")), (other, one), (one.with_name("_aside"), other)):
            source.rename(target)
