"""What recipes share: which arguments win, averages of weights, ordinary trainers beside private ones, saved forms."""

import copy
import functools
import json
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, TrainingArguments

from hf_dp import ReAttentionConfig
from hf_dp.errors import ConfigurationError
from hf_dp.parts.re_attention import ReAttention
from hf_dp.parts.re_attention.deviations import one_step, relative_counts
from tests.zoo import tiny

pytestmark = pytest.mark.usefixtures("checked_once")


@pytest.fixture
def parsed(part, tmp_path, monkeypatch):
    """Arguments of `classify` with these changes."""

    def parse(*flags, **changes):
        encoder = tmp_path / "encoder"
        encoder.mkdir(exist_ok=True)
        for name in ("config.json", "tokenizer.json"):
            (encoder / name).touch()
        files = {"train_file": "a.csv", "test_file": "a.csv", "labels_file": "a.json", "output_dir": tmp_path / "out"}
        values = {**files, "encoder": encoder, "use_cpu": 1, "target_epsilon": 3, **changes}
        monkeypatch.chdir(tmp_path)
        path = Path("a.yaml")
        path.write_text(json.dumps({k: v if isinstance(v, int) or v is None else str(v) for k, v in values.items()}))
        monkeypatch.setattr(sys, "argv", ["recipe", str(path), *flags])
        return part("common.arguments").parse(part("classify").RecipeArguments)

    return parse


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_examples": 0}, "--max_examples 0"),
        ({"max_examples": -3}, "--max_examples -3"),
        ({"max_length": -1}, "--max_length -1"),
        ({"lora_rank": 0}, "--lora_rank 0"),
        ({"temperature": "nan"}, "--temperature nan"),
        ({"head_noise": -1}, "--head_noise -1"),
        ({"average": 2}, "--average 2"),
        ({"learning_rate": -1}, "learning_rate=-1"),
        ({"fp16": 1}, "fp16=True"),
        ({"encoder": "/nowhere/at/all"}, "--encoder: there is no folder '/nowhere/at/all'"),
        ({"encoder": ""}, "--encoder: there is no folder ''"),
    ],
)
def test_arguments_with_which_nothing_could_be_learnt_are_refused(changes, words, parsed):
    with pytest.raises(ConfigurationError, match=words):
        parsed(**changes)


@pytest.mark.parametrize(
    ("flags", "changes", "words"),
    [
        (("--no_such_flag", "3"), {}, "no such flag: --no_such_flag. "),
        (("--lerning-rate=3",), {}, "no such flag: --lerning-rate; the nearest: --learning_rate, "),
        ((), {"lerning_rate": 3}, "no such setting: lerning_rate (in a.yaml); the nearest: --learning_rate, "),
        (("--max_steps", "3", "4"), {}, "'4' belongs to no flag. "),
        (("--optim", "adamw_torsh"), {}, "--optim: no such value: 'adamw_torsh'; the nearest: adamw_torch, "),
        ((), {"method": "loraa"}, "--method: no such value: 'loraa'; the nearest: lora. "),
        (("--clipping", "none"), {}, "no such value: 'none'; there are: flat, automatic, groups. "),
        (("--target_eps", "3"), {}, "no such flag: --target_eps; the nearest: --target_epsilon. "),
        ((), {"target_eps": 3}, "no such setting: target_eps (in a.yaml); the nearest: --target_epsilon. "),
        (("--max_steps", "three"), {}, "argument --max_steps/--max-steps: invalid int value: 'three'. "),
        (("--max_steps",), {}, "argument --max_steps/--max-steps: expected one argument. "),
        (("--smoke", "x"), {}, "--smoke: Truthy value expected: got x but expected one of yes/no"),
    ],
)
def test_a_flag_or_value_that_is_none_is_said_in_one_line(flags, changes, words, parsed, capsys):
    with pytest.raises(SystemExit) as end:
        parsed(*flags, **changes)
    said = capsys.readouterr()
    assert (end.value.code, said.out) == (2, "")
    assert said.err.startswith("recipe: error: ")
    assert words in said.err
    assert said.err.endswith(" All flags: --help\n")
    assert (said.err.count("\n"), len(said.err) < 300) == (1, True)


def test_places_that_cannot_be_used_are_refused_before_training(parsed, tmp_path):
    made, _, _ = parsed(group_column=None)
    assert made.group_column is None, "null in YAML is the default"
    (tmp_path / "file").touch()
    for output in ("file", "file/below"):
        with pytest.raises(ConfigurationError, match="is a file, or lies below one"):
            parsed(output_dir=tmp_path / output)
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "config.json").touch()
    with pytest.raises(ConfigurationError, match="no directory with a tokenizer"):
        parsed(encoder=tmp_path / "half")


def test_smoke_wins_over_the_file_and_flags_win_over_it(part, tmp_path, monkeypatch):
    arguments, recipe = part("common.arguments"), part("causal_lm").RecipeArguments
    path = tmp_path / "a.yaml"
    path.write_text("text_file: t.txt\nmax_steps: 500\nlearning_rate: 0.5\ntarget_epsilon: 3\n", encoding="utf-8")

    def parsed(*flags):
        monkeypatch.setattr(sys, "argv", ["recipe", str(path), "--output_dir", str(tmp_path), "--use_cpu", "1", *flags])
        return arguments.parse(recipe)

    made, training, privacy = parsed("--smoke", "true", "--per_device_train_batch_size", "4")
    assert (made.max_examples, training.max_steps, training.learning_rate, privacy.target_epsilon) == (64, 2, 0.5, 3)
    assert (training.per_device_train_batch_size, training.gradient_accumulation_steps) == (4, 2)
    assert training.save_strategy == "no"
    made, training, _ = parsed()
    assert (made.max_examples, training.max_steps) == (None, 500)
    assert parsed("--after", "out/sft")[2].after == "out/sft"
    path.write_text(f"{path.read_text(encoding='utf-8')}after: [a, b]\n", encoding="utf-8")
    ways = (), ("--after", "c", "d"), ("--after", "c", "--after", "d"), ("--after=c", "--after", "d", "e")
    assert [parsed(*flags)[2].after for flags in ways] == [("a", "b"), ("c", "d"), ("c", "d"), ("c", "d", "e")]


def test_shards_that_accelerate_would_make_are_refused(part, tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    flags = ["--text_file", "t.txt", "--output_dir", str(tmp_path), "--use_cpu", "1", "--target_epsilon", "3"]
    monkeypatch.setattr(sys, "argv", ["recipe", *flags])
    with pytest.raises(ConfigurationError, match="a recipe under FSDP"):
        part("common.arguments").parse(part("causal_lm").RecipeArguments)


def test_training_ends_with_the_average_of_its_weights(part):
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    average = part("common.moving_average").MovingAverage(0.75)
    average.on_train_begin(model=model)
    for weight in (4.0, 8.0):
        torch.nn.init.constant_(model.weight, weight)
        average.on_step_end()
    average.on_train_end()
    assert model.weight.item() == 0.75 * (0.25 * 4) + 0.25 * 8


def test_the_ordinary_trainer_takes_the_mean_over_the_examples_of_a_whole_batch(part, tmp_path):
    model = torch.nn.Linear(3, 2)
    wanted = copy.deepcopy(model)
    draw = torch.Generator().manual_seed(0)
    rows = [{"input": torch.randn(3, generator=draw).tolist(), "labels": i % 2} for i in range(7)]
    arguments = TrainingArguments(
        str(tmp_path), per_device_train_batch_size=2, gradient_accumulation_steps=4, max_steps=1, max_grad_norm=0.0,
        lr_scheduler_type="constant", report_to="none", use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    comparison = part("common.comparison")
    optimizers = torch.optim.SGD(model.parameters(), lr=1.0), None
    folder = comparison.folder_of(tmp_path, "epsilon 1e+2, a/b")
    comparison.trainer(
        model, arguments, folder, None, train_dataset=rows, data_collator=comparison.collate, optimizers=optimizers
    ).train()
    batch = comparison.collate(rows)
    torch.nn.functional.cross_entropy(wanted(batch["input"]), batch["labels"]).backward()
    for mine, other in zip(model.parameters(), wanted.parameters(), strict=True):
        torch.testing.assert_close(mine, other - other.grad)
    assert folder == tmp_path / "epsilon_1e+2_a_b"
    assert not list(folder.iterdir())


def test_the_saved_form_of_the_next_item_gives_the_same_scores(part):
    from transformers import GPT2Config

    parts, ids, mask = (
        part("common.next_item"),
        torch.tensor([[3, 4, 5], [6, 2, 0]]),
        torch.tensor([[1, 1, 1], [1, 1, 0]]),
    )
    for with_bias in (False, True):
        config = GPT2Config(vocab_size=9, n_positions=5, n_embd=8, n_layer=1, n_head=2)
        model = parts.NextItem(config, with_bias).eval()
        if with_bias:
            torch.nn.init.normal_(model.output.bias)
        plain = parts.as_language_model(model)
        found = plain(input_ids=ids, attention_mask=mask).logits
        torch.testing.assert_close(found[[0, 1], [2, 1]], model(ids, mask))
        several = model(ids, mask, torch.tensor([[0, 2], [1, 0]]))
        torch.testing.assert_close(several, found[[[0], [1]], [[0, 2], [1, 0]]])
        model.only_new = True
        plain = parts.as_language_model(model)
        for row, length in ((0, 3), (1, 2)):
            said = plain.generate(ids[row : row + 1, :length], max_new_tokens=1, do_sample=False, pad_token_id=0)
            scores = model(ids, mask)[row]
            scores[0] = -1e9
            assert int(said[0, -1]) == int(scores.argmax()) not in ids[row]
        assert torch.equal(model(ids, mask, torch.tensor([[0], [1]]))[:, 0].eq(-1e4).sum(1), torch.tensor([2, 3]))


def test_the_loss_of_several_items_is_the_mean_of_those_that_there_are(part):
    losses = part("common.comparison")._losses
    logits, labels = torch.randn(2, 3, 5), torch.tensor([[1, 2, 3], [4, -100, -100]])
    each = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    torch.testing.assert_close(losses(logits, labels), torch.stack([each[0].mean(), each[1, 0]]))
    torch.testing.assert_close(losses(logits[:, 0], labels[:, 0]), each[:, 0])


@pytest.mark.parametrize("arm", ["on", "shuffled", "constant"])
def test_controls_of_re_attention_change_which_row_has_which_noise_and_nothing_else(part, arm, monkeypatch):
    def has_none(model):
        raise NotImplementedError  # as of a model of one's own around an encoder

    model = tiny("gpt2", "causal_lm")
    monkeypatch.setattr(type(model), "get_input_embeddings", has_none)
    attention = ReAttention(model, ReAttentionConfig(token_frequencies="uniform"))
    counts = relative_counts(model, 64, torch.linspace(0.1, 1, model.config.vocab_size))
    attention.errors, table = one_step(counts, 0.1), "transformer.wte.weight"
    before = copy.deepcopy(attention.errors)
    part("common.comparison").VarianceControl(arm).on_train_begin(None, None, None, model=model)
    others, rows = attention.errors, attention.errors.pop(table)
    expected = before.pop(table)
    torch.testing.assert_close(others, before)
    torch.testing.assert_close(rows.square().mean(), expected.square().mean())
    assert torch.equal(rows.flatten().sort().values, expected.flatten().sort().values) == (arm != "constant")
    assert torch.equal(rows, expected) == (arm == "on")
    assert bool((rows == rows[0]).all()) == (arm == "constant")


def test_generation_gives_the_output_layer_states_without_gaps_and_says_the_same(part):
    model = tiny("llama_tied", "causal_lm", num_hidden_layers=1).eval()
    asked, gaps, said = torch.tensor([[3, 4, 5], [6, 7, 8]]), [], []
    model.lm_head.register_forward_hook(lambda _, states, __: gaps.append(not states[0].is_contiguous()))
    for context in (nullcontext, part("common.base_models").generating):
        with context(model):
            said.append(model.generate(asked, attention_mask=torch.ones_like(asked), max_new_tokens=2, do_sample=False))
    assert gaps == [True, False, False, False]
    assert said[0].equal(said[1])
    assert not model.lm_head._forward_pre_hooks


def test_adapters_are_no_model_to_train_and_the_refusal_says_how_to_merge_them(part, tmp_path):
    tiny("llama", "causal_lm", torch.float32).save_pretrained(tmp_path / "base")
    read = functools.partial(part("common.hub_names").pretrained, AutoModelForCausalLM)
    adapted = get_peft_model(read(str(tmp_path / "base")), LoraConfig(target_modules=["q_proj"]))
    adapted.save_pretrained(folder := tmp_path / "adapter")
    with pytest.raises(ConfigurationError, match="is adapters over a base model") as refusal:
        read(str(folder))
    assert "from_pretrained(ADAPTERS).merge_and_unload().save_pretrained(MERGED)" in refusal.value.fix
    assert refusal.value.fix.endswith("--after ADAPTERS, since nothing of that is seen in a merged model.")


def test_a_base_in_4_bits_is_loaded_and_looked_at_before_it_is_copied(part, monkeypatch):
    base, models = tiny("llama", "causal_lm", torch.float32), part("common.base_models")
    base.lm_head.support_avx512bf16_for_cpu = True  # as of bitsandbytes, which need not be here
    asked = []
    monkeypatch.setattr(models, "BitsAndBytesConfig", dict)
    monkeypatch.setattr(models, "pretrained", lambda *_, **options: asked.append(options) or base)
    found = models.language_model("any", models.Trained(method="lora", load_in_4bit=True), bf16=True)
    assert asked[0]["quantization_config"]["load_in_4bit"]
    assert base.lm_head.support_avx512bf16_for_cpu is False
    assert found.peft_config


def test_a_refusal_that_ends_a_script_is_said_without_a_traceback(part, monkeypatch, capsys):
    arguments = part("common.arguments")
    monkeypatch.setattr("sys.argv", ["classify.py", "none.yaml"])
    monkeypatch.setattr("sys.excepthook", sys.__excepthook__)
    with pytest.raises(ConfigurationError) as refusal:
        arguments.parse(part("classify").RecipeArguments)
    with pytest.raises(SystemExit) as end:
        sys.excepthook(refusal.type, refusal.value, refusal.tb)
    assert end.value.code == 2
    assert capsys.readouterr().err == f"Refused: {refusal.value}\n"
    sys.excepthook(ValueError, ValueError("of another kind"), None)
    assert "ValueError: of another kind" in capsys.readouterr().err
