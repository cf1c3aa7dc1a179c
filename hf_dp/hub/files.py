"""Are the files of a saved model those of its record, and would anything else be loaded with them?"""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Iterator
from pathlib import PurePosixPath

from hf_dp.hub.claim import Check
from hf_dp.hub.record import CARD_FILE, RECORD_FILE, PrivacyRecord, sha256
from hf_dp.hub.saved import may_be_published
from hf_dp.hub.source import Source

# Read by people, by git or by the hub; no library loads them with a model.
_HARMLESS = (
    "*.md", "*.png", "*.jpg", "*.jpeg", "*.gif", "*.svg", "*.webp", "*.pdf", "*.mp4", "*.webm", "*.wav", "*.mp3",
)  # fmt: skip
_HARMLESS_STEMS = {"license", "licence", "notice", "copying", "citation", "authors"}
# What Trainer and DPTrainer leave beside a model on the machine that trained it.
_LEFT = (
    "training_args.bin", "optimizer.pt", "optimizer.bin", "scheduler.pt", "scaler.pt", "rng_state*.pth",
    "pytorch_model_fsdp.bin", "trainer_state.json", "_hf_dp_fingerprint_key", "_hf_dp_lock",
)  # fmt: skip
# What recipes and people leave there; no library loads it with a model, where it is no vocabulary.
_OF_PEOPLE = (
    "events.out.tfevents.*", "*results.json", "metrics.json", "groups.json", "hits.json", "chosen_rows.json",
    "for_owner_only_*", "*.txt",
    "*.csv", "*.tsv", "*.xlsx", "*.jsonl", "*.parquet", "*.npy", "*.npz", "*.log", "*.out", "*.err", "*.html",
    "*.yaml", "*.yml", "*.ipynb", "*.sh",
)  # fmt: skip
_LOGS = {"runs", "wandb", "mlruns", "tensorboard", "logs"}
_SAVES = re.compile(r"checkpoint-[0-9]+|_saving|_saved|_saving-model")
# A configuration may name code anywhere below the model's folder, and so much is run when it is loaded.
_RUN = {".py", ".pyc", ".so", ".pkl", ".pickle", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".dll", ".dylib"}
# Weights in other formats than a record may name: the hub lists them, and their tools find them, in every folder.
_OTHER_FORMATS = {".gguf", ".ggml", ".onnx", ".msgpack", ".ot", ".tflite", ".mlmodel", ".keras", ".npz", ".nemo"}
# Folders of a model's own folder in which Transformers looks for code and for chat templates.
_LOADED_FOLDERS = ("custom_generate", "additional_chat_templates")
# In which `datasets` reads what to load.
_OF_DATA = {".huggingface.yaml"}
_VOCABULARIES = {"tokenizer.json", "vocab.json"}
_FEW = 10
_POINTER = b"version https://git-lfs.github.com/spec/"
# Checks of folders to publish: what is read for its ledger may have other files, and its weights in shards.
ABOUT_LOADING = ("other files", "weights")


def check_files(source: Source, record: PrivacyRecord) -> Iterator[Check]:
    """The digest of each file that the record names, and whether something else would be loaded."""
    if not record.weights and not record.corpus:
        yield Check("weights", False, "the record names neither safetensors weights nor a corpus")
    for name, digest in sorted(record.files.items()):
        if name not in source.names:
            yield Check(name, False, "named in the record, but not there")
        elif not may_be_published(name):
            yield Check(name, False, "named in the record, and no file of a model or a corpus")
        elif not source.is_regular(name):
            yield Check(name, False, "named in the record, and no file in this folder (a link, or no file at all)")
        else:
            found = sha256(source.path(name))
            said = f"SHA-256 {found[:12]}..." + ("" if found == digest else f", recorded {digest[:12]}...")
            yield Check(name, found == digest, said + ("" if found == digest else _of_a_pointer(source, name)))
    what = "corpus" if record.is_corpus else "model"
    strange = strange_files(source, record)
    said = f"nothing that loads with the {what}"
    if strange:
        listed = ", ".join(strange[:_FEW]) + (f" and {len(strange) - _FEW} more" if len(strange) > _FEW else "")
        said = f"not named in the record: {listed} (of an earlier save, or put there since: take out)"
    yield Check("other files", not strange, said)


def _of_a_pointer(source: Source, name: str) -> str:
    """What is said of a file that git has not fetched yet."""
    with open(source.path(name), "rb") as file:
        is_one = file.read(len(_POINTER)) == _POINTER
    return ": a pointer of git-lfs, which `git lfs pull` replaces by the file" if is_one else ""


def strange_files(source: Source, record: PrivacyRecord) -> list[str]:
    """What the record does not name, and what is not known to be loaded by nothing."""
    # A folder of data is loaded with all that is in it.
    harmless = _is_harmless_to_data if record.is_corpus else _is_harmless
    others = source.names - {*record.files, CARD_FILE, RECORD_FILE}
    if source.is_local and not record.is_corpus:
        known = set(record.files.values())
        others -= {name for name in others if is_left_over(name) or _is_the_models_own_code(source, name, known)}
        others -= beside(source, record)
    own = folders_of_their_own(source, record)
    return sorted(name for name in others if not harmless(name) and not _is_in_one_of(own, name))


def folders_of_their_own(source: Source, record: PrivacyRecord) -> set[str]:
    """Folders with a record of their own, each a model to be verified for itself; not those that are loaded with what
    this record is about."""
    if record.is_corpus:
        return set()
    paths = [PurePosixPath(name) for name in source.names if name.endswith(f"/{RECORD_FILE}")]
    loaded = {*_LOADED_FOLDERS, *_folders_held(record)}
    return {path.parent.as_posix() for path in paths if path.parts[0].casefold() not in loaded}


def _folders_held(record: PrivacyRecord) -> set[str]:
    """In which files of the record lie: whoever loads these may load what lies beside them."""
    return {name.casefold().split("/")[0] for name in record.files if "/" in name}


def beside(source: Source, record: PrivacyRecord) -> set[str]:
    """Files of models in other folders of a local one, which only who names that folder loads."""
    names = source.names - record.files.keys() if source.is_local and not record.is_corpus else set()
    found = {name for name in names if _is_of_another_model(name)}
    named = _folders_named(source, record) if found else set()
    if named is None:
        return set()
    return {name for name in found if name.casefold().split("/")[0] not in named | _folders_held(record)}


def _is_of_another_model(name: str) -> bool:
    path = PurePosixPath(name.casefold())
    is_its_own = may_be_published(path.name) or _is_one_of(_LEFT, path.name)
    return len(path.parts) > 1 and path.parts[0] not in _LOADED_FOLDERS and is_its_own and path.suffix not in _RUN


def _folders_named(source: Source, record: PrivacyRecord) -> set[str] | None:
    """All parts of what could be a path in the model's own configuration; None if it cannot be read."""
    found: set[str] = set()
    for name in record.files.keys() & source.names:
        # Vocabularies name no files, and all words.
        if name.endswith(".json") and name not in _VOCABULARIES:
            try:
                level = [json.loads(source.path(name).read_bytes())] if source.is_regular(name) else []
            except (OSError, ValueError, RecursionError):
                return None
            while level:
                value = level.pop()
                if isinstance(value, dict):
                    level += [*value, *value.values()]
                elif isinstance(value, list):
                    level += value
                elif isinstance(value, str):
                    found.update(re.split(r"[\\/]", value.casefold()))
    return found


def is_left_over(name: str) -> bool:
    """Whether a training, or its user, leaves such a file on the machine; nothing loads it with the model."""
    path = PurePosixPath(name.casefold())
    top, *below = path.parts
    if top in _LOADED_FOLDERS:
        return False
    is_of_a_save = bool(below) and _SAVES.fullmatch(PurePosixPath(name).parts[0]) is not None
    if (is_of_a_save or not below) and _is_one_of(_LEFT, PurePosixPath(name).name):
        return True
    if path.suffix in _RUN:
        return False
    is_of_people = _is_one_of(_OF_PEOPLE, path.name) and not may_be_published(path.name)
    is_a_log = bool(below) and top in _LOGS and not may_be_published(f"logged{path.suffix}")
    return is_of_a_save or is_of_people or is_a_log


def _is_the_models_own_code(source: Source, name: str, known: set[str]) -> bool:
    """Of a checkpoint: code that the record names by its digest, a folder above."""
    folder, _, file = name.partition("/")
    is_code = file.endswith(".py") and _SAVES.fullmatch(folder) is not None and source.is_regular(name)
    return is_code and sha256(source.path(name)) in known


def _is_one_of(patterns: tuple[str, ...], name: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _is_a_dot_file(name: str) -> bool:
    kind = PurePosixPath(name.casefold()).suffix
    return name.startswith(".") and kind not in {".safetensors", *_RUN, *_OTHER_FORMATS}


def _is_harmless_to_data(name: str) -> bool:
    return _is_a_dot_file(name) and name.casefold() not in _OF_DATA


def _is_harmless(name: str) -> bool:
    path = PurePosixPath(name.casefold())
    # Where the case of letters is none, it takes the card's place.
    if path.suffix == ".py" or path == PurePosixPath(CARD_FILE.casefold()):
        return False
    is_text = path.stem in _HARMLESS_STEMS and path.suffix in ("", ".txt", ".cff")
    return _is_a_dot_file(name) or is_text or _is_one_of(_HARMLESS, path.name)


def _is_in_one_of(folders: set[str], name: str) -> bool:
    path = PurePosixPath(name)
    is_loaded = path.suffix.casefold() in _RUN | _OTHER_FORMATS and not _is_one_of(_LEFT, path.name)
    return not is_loaded and any(parent.as_posix() in folders for parent in path.parents)
