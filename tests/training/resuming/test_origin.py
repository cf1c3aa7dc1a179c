"""Where a model was read from: whose data that was is asked, of that very training, and of nothing else."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import AdaLoraConfig, LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForSequenceClassification

from hf_dp import PrivacyConfig
from hf_dp.accounting import Ledger
from hf_dp.errors import LedgerError
from hf_dp.hub.record import PrivacyRecord
from hf_dp.step.plan import Plan
from hf_dp.training.resuming.copies import few_of
from hf_dp.training.resuming.origin import covers, refuse_unsaid_origin, warn_of_origin
from tests.crashes import killed_everywhere
from tests.training.workbench import classifier, make, trained

pytestmark = pytest.mark.usefixtures("checked_once")


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Two trainers of the same promise, saved."""
    folder = tmp_path_factory.mktemp("trained")
    trainers = [trained(folder / name, privacy=given(), max_steps=1) for name in ("one", "two")]
    for trainer in trainers:
        trainer.save_model()
    return trainers


@pytest.fixture(scope="module")
def first(two: list[Any]) -> Path:
    return Path(two[0].args.output_dir)


def given(**changes: Any) -> PrivacyConfig:
    return PrivacyConfig(**{"noise_multiplier": 2.0, "accountant": "rdp", **changes})


def read(folder: Path) -> Any:
    return AutoModelForSequenceClassification.from_pretrained(folder)


def lora(base: nn.Module) -> nn.Module:
    return get_peft_model(base, LoraConfig(task_type="SEQ_CLS", target_modules=["q_lin"], r=2))


def plan(path: Path, privacy: PrivacyConfig | None = None) -> Plan:
    trainer = make(path, privacy=privacy or given(), max_steps=1)
    trainer.get_train_dataloader()
    found: Plan = trainer._require_run().plan
    return found


@pytest.mark.slow
def test_of_a_checkpoint_only_the_trained_weights_were_asked_for(first: Path, tmp_path: Path) -> None:
    saved = object()
    refuse_unsaid_origin(read(first), Ledger(), saved, plan(tmp_path))
    half = read(first)
    half.distilbert.requires_grad_(False)
    for model in (half, lora(read(first))):
        with pytest.raises(LedgerError, match="the model was read from .* does not say whose data that was"):
            refuse_unsaid_origin(model, Ledger(), saved, plan(tmp_path))
    refuse_unsaid_origin(lora(read(first)), Ledger(), saved, plan(tmp_path, given(after=first)))


@pytest.mark.slow
def test_another_training_of_the_same_promise_is_another(two: list[Any], tmp_path: Path) -> None:
    one, other = two
    after = plan(tmp_path, given(after=one.args.output_dir))
    assert one.ledger == other.ledger
    assert [covers(after.earlier, trainer.ledger) for trainer in two] == [True, False]
    copied = shutil.copytree(one.args.output_dir, tmp_path / "copied")
    for folder in (one.args.output_dir, copied):
        refuse_unsaid_origin(read(folder), Ledger(), None, after)
    with pytest.raises(LedgerError, match=r"the promise of this one says after="):
        refuse_unsaid_origin(read(other.args.output_dir), Ledger(), None, after)


@pytest.mark.slow
def test_what_a_trainer_saved_itself_is_no_training_before(two: list[Any], tmp_path: Path) -> None:
    for trainer in two:
        refuse_unsaid_origin(read(trainer.args.output_dir), trainer.ledger, None, plan(tmp_path))
    with pytest.raises(LedgerError, match="the model was read from"):
        refuse_unsaid_origin(read(two[0].args.output_dir), two[1].ledger, None, plan(tmp_path))


def test_weights_that_a_trainer_saves_without_their_record_are_said(
    first: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As by one that only evaluates: where they are read again nobody would ask whose data is in them."""

    def told(model: Any) -> list[str]:
        caplog.clear()
        make(tmp_path / "new", model, given()).save_model(str(tmp_path / "saved"))
        assert not (tmp_path / "saved" / "privacy.json").exists()
        return [one.getMessage() for one in caplog.records if "without a record" in one.getMessage()]

    assert told(classifier()) == []
    (said,) = told(read(first))
    assert f"came from {str(first)!r}" in said
    (said,) = told(copy.deepcopy(trained(tmp_path / "here", privacy=given(), max_steps=1).model))
    assert "came from a private training in this process" in said
    assert told(lora(read(first))) == []  # of which the adapter alone is saved


@pytest.mark.slow
def test_failure_132_weights_of_a_save_that_was_killed_are_known_without_their_record(
    two: list[Any], tmp_path: Path
) -> None:
    folder, model, seen = tmp_path / "saved", classifier(), []
    folder.mkdir()
    model.save_pretrained(folder)
    public, model.config._name_or_path = (folder / "model.safetensors").read_bytes(), str(folder)
    ask = plan(tmp_path / "new")
    for _ in killed_everywhere(folder, lambda: two[0].save_model(str(folder))):
        if (folder / "model.safetensors").read_bytes() == public:
            refuse_unsaid_origin(model, Ledger(), None, ask)
            continue
        seen.append((folder / "privacy.json").exists())
        said = "saved it" if seen[-1] else "a private training of 1 steps was saving it"
        with pytest.raises(LedgerError, match=said):
            refuse_unsaid_origin(model, Ledger(), None, ask)
    assert {*seen} == {False, True}


def test_a_save_that_was_broken_off_is_said_with_what_to_do(first: Path, tmp_path: Path) -> None:
    model, aside = classifier(), tmp_path / "saved" / "_saving-model"
    shutil.copytree(first, tmp_path / "saved")
    for folder in (aside / "0", aside):  # and as versions before left it
        shutil.rmtree(aside, ignore_errors=True)
        folder.mkdir(parents=True)
        shutil.copy(first / "privacy.json", folder)
        (tmp_path / "saved" / "privacy.json").unlink(missing_ok=True)
        model.config._name_or_path = str(tmp_path / "saved")
        with pytest.raises(LedgerError, match="was saving it, and was broken off") as refusal:
            refuse_unsaid_origin(model, Ledger(), None, plan(tmp_path / "new"))
        assert "save it again" in str(refusal.value)


def test_a_file_of_somebody_elses_is_no_record_and_a_damaged_one_may_be(first: Path, tmp_path: Path) -> None:
    model = classifier()
    model.config._name_or_path = str(tmp_path)
    file, ask = tmp_path / "privacy.json", lambda: refuse_unsaid_origin(model, Ledger(), None, plan(tmp_path / "new"))
    for others in ('{"policy": "https://example.org/privacy"}', "[1]"):
        file.write_text(others)
        ask()
    whole = (first / "privacy.json").read_text()
    for spoilt in (whole[:-9], whole.replace('"ledger"', '"leger"', 1), "\x00"):
        file.write_text(spoilt)
        with pytest.raises(LedgerError, match=r"cannot be read there: this is not a readable privacy\.json") as refusal:
            ask()
        assert "put back its privacy.json" in str(refusal.value)
        assert "PrivacyConfig(other_people=True)" in str(refusal.value)


def test_a_name_that_no_folder_can_have_is_none(tmp_path: Path) -> None:
    model = classifier()
    for name in ("x" * 300, "a\x00b"):
        model.config._name_or_path = name
        refuse_unsaid_origin(model, Ledger(), None, plan(tmp_path))


def test_a_folder_within_the_one_that_is_named_may_be_where_it_was_read(first: Path, tmp_path: Path) -> None:
    """Of subfolder= Transformers keeps the folder around it alone."""
    shutil.copytree(first, tmp_path / "out" / "first")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out", subfolder="first")
    with pytest.raises(LedgerError, match="private training") as refused:
        refuse_unsaid_origin(model, Ledger(), None, plan(tmp_path / "run"))
    assert f"after={str(tmp_path / 'out' / 'first')!r}" in refused.value.fix
    assert "without subfolder=" in refused.value.fix
    named = plan(tmp_path / "named", given(after=str(tmp_path / "out" / "first"), noise_multiplier=3.0))
    refuse_unsaid_origin(model, Ledger(), None, named)
    (tmp_path / "out" / "config.json").write_text("{}")  # a model of its own
    refuse_unsaid_origin(model, Ledger(), None, plan(tmp_path / "run"))


def test_a_folder_that_is_gone_is_warned_of(first: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shutil.copytree(first, tmp_path / "moved")
    model, mine = read(tmp_path / "moved"), plan(tmp_path / "run")
    warn_of_origin(model, None, Ledger(), mine)
    assert "no folder is any more" not in caplog.text
    shutil.rmtree(tmp_path / "moved")
    warn_of_origin(model, None, Ledger(), mine)
    assert "no folder is any more" in caplog.text
    caplog.clear()
    model.config._name_or_path = "somebody/a-repository"
    warn_of_origin(model, None, Ledger(), mine)
    warn_of_origin(read(first), None, Ledger(), plan(tmp_path / "other", given(other_people=True)))
    assert "no folder is any more" not in caplog.text


def test_a_model_of_the_config_alone_is_told_how_to_say_so(first: Path, tmp_path: Path) -> None:
    model = AutoModelForSequenceClassification.from_config(AutoConfig.from_pretrained(first))
    with pytest.raises(LedgerError, match=r"set\s+model\.config\._name_or_path\s+to ''"):
        refuse_unsaid_origin(model, Ledger(), None, plan(tmp_path))
    model.config._name_or_path = ""
    refuse_unsaid_origin(model, Ledger(), None, plan(tmp_path))


def test_the_digests_of_a_ledger_are_of_its_files(first: Path, two: list[Any]) -> None:
    record = PrivacyRecord.from_json((first / "privacy.json").read_bytes())
    assert record.ledger == two[0].ledger
    assert (len(two[0].ledger.written), len(record.ledger.written)) == (1, 0)


def test_a_tokenizer_from_beside_a_record_is_warned_of(
    two: list[Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = str(two[0].args.output_dir)
    tokenizer = SimpleNamespace(name_or_path=folder)
    for silent in (given(after=folder), given(other_people=True)):
        warn_of_origin(nn.Module(), tokenizer, Ledger(), plan(tmp_path, silent))
    for other in (None, SimpleNamespace(name_or_path=str(tmp_path)), SimpleNamespace(name_or_path="owner/name")):
        warn_of_origin(nn.Module(), other, Ledger(), plan(tmp_path))
    warn_of_origin(nn.Module(), tokenizer, two[0].ledger, plan(tmp_path))
    assert "tokenizer" not in caplog.text
    for of_model in (tokenizer, SimpleNamespace(tokenizer=tokenizer)):
        caplog.clear()
        warn_of_origin(nn.Module(), of_model, Ledger(), plan(tmp_path))
        assert f"The tokenizer was read from {folder!r}, where a private training saved it" in caplog.text


def test_failure_104_an_adapter_that_was_trained_before_is_warned_of(
    two: list[Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its folder has a record, and nothing in the model says which folder that is."""
    mine = plan(tmp_path / "run")
    warn_of_origin(lora(classifier()), None, Ledger(), mine)
    assert "trained before" not in caplog.text
    model = lora(classifier())
    with torch.no_grad():
        next(p for name, p in model.named_parameters() if "lora_B" in name).fill_(0.01)
    model.save_pretrained(tmp_path / "adapter")
    loaded = PeftModel.from_pretrained(classifier(), tmp_path / "adapter", is_trainable=True)
    for number, said in enumerate((given(after=str(two[0].args.output_dir)), given(other_people=True))):
        warn_of_origin(loaded, None, Ledger(), plan(tmp_path / f"said-{number}", said))
    warn_of_origin(loaded, None, two[0].ledger, mine)  # this trainer has made steps of its own
    assert "trained before" not in caplog.text
    warn_of_origin(loaded, None, Ledger(), mine)
    assert "An adapter in this model was trained before" in caplog.text


@pytest.mark.parametrize(
    ("config", "nothing"),
    [
        (LoraConfig(target_modules=["word_embeddings"], r=2), "lora_embedding_A"),
        (AdaLoraConfig(target_modules=["q_lin"], init_r=2, total_step=30, tinit=2, tfinal=5), "lora_E"),
    ],
    ids=["an embedding", "AdaLoRA"],
)
def test_adapters_that_begin_otherwise_were_not_trained_before(
    config: Any, nothing: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of these lora_B, or lora_embedding_B, is not zero from the start."""
    model, mine = get_peft_model(classifier(), config), plan(tmp_path)
    warn_of_origin(model, None, Ledger(), mine)
    assert "trained before" not in caplog.text
    with torch.no_grad():
        next(p for name, p in model.named_parameters() if nothing in name).fill_(0.01)
    warn_of_origin(model, None, Ledger(), mine)
    assert "An adapter in this model was trained before" in caplog.text


def test_of_weights_in_few_bits_no_numbers_are_compared() -> None:
    class Packed(Tensor):
        """As torchao's, which knows few operations."""

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is Tensor.flatten:
                raise NotImplementedError(func)
            return super().__torch_function__(func, types, args, kwargs or {})

    assert few_of(nn.Parameter(torch.ones(32))) is not None
    assert few_of(nn.Parameter(torch.ones(32).as_subclass(Packed))) is None
