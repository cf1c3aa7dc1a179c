"""The local hub, and the real client pointed at it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
import transformers.utils.hub
from huggingface_hub import constants

from hf_dp import PrivacyConfig
from hf_dp.hub.upload import _api
from tests.hub.server import TOKEN, Hub
from tests.training.workbench import saved_by


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A fresh hub; the owner is logged in. Retries of the client do not wait."""
    server = Hub()
    cache = tmp_path / "hub-cache"
    for name, value in {
        "ENDPOINT": server.endpoint,
        "HUGGINGFACE_CO_URL_TEMPLATE": server.endpoint + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_OFFLINE": False,
        "HF_HUB_DISABLE_XET": True,
        "HF_HUB_DISABLE_TELEMETRY": True,
        "HF_HUB_CACHE": str(cache),
    }.items():
        # The environment is read once, at import, which was long ago.
        monkeypatch.setattr(constants, name, value)
    monkeypatch.setattr(huggingface_hub.hf_api.api, "endpoint", server.endpoint)
    monkeypatch.setattr(transformers.utils.hub, "_hf_api", None, raising=False)
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    _api.cache_clear()
    yield server
    server.close()
    _api.cache_clear()


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that was trained and saved; to be copied and spoilt."""
    path = tmp_path_factory.mktemp("saved") / "out"
    return saved_by(path, privacy=PrivacyConfig(target_epsilon=3.0), save_strategy="steps", save_steps=2)


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "copy"))
