"""A model by its name: from a folder or the hub's cache without asking the hub, which is else asked once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import HfHubHTTPError
from transformers import AutoConfig

from hf_dp.errors import ConfigurationError
from hf_dp.planning.named import config_of
from hf_dp.planning.sized import model_size
from tests.cli.typed import TINY


def no_network(*args: Any, **options: Any) -> Any:
    raise next(kind for kind in HfHubHTTPError.__bases__ if kind is not OSError)("Name or service not known")


def test_without_a_network_the_hub_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def absent(name: str, local_files_only: bool = False) -> Any:
        asked.append(local_files_only)
        raise OSError("couldn't find them in the cached files")

    monkeypatch.setattr(AutoConfig, "from_pretrained", absent)
    monkeypatch.setattr(huggingface_hub, "model_info", no_network)
    with pytest.raises(ConfigurationError, match=r"no folder 'no/such', and .*HTTPError: Name or service not known"):
        model_size("no/such")
    assert asked == [True], "Transformers would wait half a minute"


def test_of_a_folder_the_hub_is_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "model_info", no_network)
    with pytest.raises((OSError, ValueError), match=r"config\.json"):
        config_of(str(tmp_path))
    (tmp_path / "config.json").write_text(TINY)
    assert config_of(str(tmp_path)).model_type == "gpt2"
