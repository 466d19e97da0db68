"""Exports: what other programs read in them, and what is refused."""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support.small_runs import small_recipe
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from courtside.api import export, serving_command, train
from courtside.artifacts.serving import public_name
from courtside.engines.portability import add_legacy_fields, rename_tokenizer_class
from courtside.errors import ModelError, UserError
from courtside.report.folder.folder import RunFolder

IDS = torch.tensor([[5, 9, 33, 80, 7]])


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits.float()


def on_base(base: Path, adapter: Path) -> torch.Tensor:
    """Of an exported adapter on the base model's files, as PEFT users load it."""
    from peft import PeftModel

    return logits(PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter))


def make_run(tmp: Path, model: Path, /, **changes: Any) -> Path:
    recipe = small_recipe(
        model,
        **{
            "student": {"model": str(model), "lora": {"rank": 4}},
            "teacher": {"kind": "self", "weights": "frozen",
                        "context": {"kind": "system", "text": "be brief"}},
            "train": {"steps": 2, "prompts_per_step": 2, "learning_rate": 3e-2},
            **changes,
        },
    )  # fmt: skip
    return train(recipe, tmp / "run").path


@pytest.fixture(scope="module")
def run(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("lora"), tiny_folder)


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


# ── what is in the folder ────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("mask", "file", "folder"), [(0o022, 0o644, 0o755), (0o077, 0o600, 0o700)])
def test_permissions_are_those_of_new_files(run, tmp_path, mask, file, folder):
    with umask(mask):
        to = export(run, tmp_path / "model")
    assert {stat.S_IMODE(path.stat().st_mode) for path in to.iterdir()} == {file}
    assert stat.S_IMODE(to.stat().st_mode) == folder


@pytest.mark.parametrize("adapter", [False, True])
def test_the_tokenizer_class_is_one_that_all_versions_know(run, tmp_path, adapter):
    to = export(run, tmp_path / "model", adapter=adapter)
    config = json.loads((to / "tokenizer_config.json").read_text())
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert not config.keys() & {"is_local", "local_files_only", "backend"}
    assert AutoTokenizer.from_pretrained(to)("hello")["input_ids"]


def test_transformers_4_finds_the_rope_base(tiny_folder, tmp_path):
    """It ignores `rope_parameters` and would compute with 10,000 without a word."""
    base = Path(shutil.copytree(tiny_folder, tmp_path / "base"))
    config = json.loads((base / "config.json").read_text())
    scaled = {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}
    (base / "config.json").write_text(json.dumps(config | {"rope_parameters": scaled}))
    to = export(make_run(tmp_path, base), tmp_path / "model")
    legacy_config = json.loads((to / "config.json").read_text())
    assert legacy_config["rope_theta"] == 500.0
    assert legacy_config["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}
    assert AutoConfig.from_pretrained(to).rope_parameters == scaled


def test_fields_that_transformers_5_dropped_come_back_from_the_base() -> None:
    base = {"rotary_pct": 0.25, "torch_dtype": "float16", "vocab_size": 9, "_name_or_path": "/x"}
    config = {"vocab_size": 10, "dtype": "float32"}
    assert add_legacy_fields(config, base) == {
        "rotary_pct": 0.25, "vocab_size": 10, "dtype": "float32",
    }  # fmt: skip
    by_layer = {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}
    assert add_legacy_fields(by_layer, {}) == by_layer


def test_extra_special_tokens_have_the_name_of_transformers_4() -> None:
    config = {"tokenizer_class": "Qwen2Tokenizer", "extra_special_tokens": ["<a>"]}
    assert rename_tokenizer_class(config) == {
        "tokenizer_class": "Qwen2Tokenizer", "additional_special_tokens": ["<a>"],
    }  # fmt: skip


def test_the_dtype_can_be_chosen(run, tmp_path):
    exact = export(run, tmp_path / "exact")
    half = export(run, tmp_path / "half", dtype="bfloat16")
    size = [(folder / "model.safetensors").stat().st_size for folder in (exact, half)]
    assert size[1] < 0.6 * size[0]
    model = AutoModelForCausalLM.from_pretrained(half)
    assert model.dtype == torch.bfloat16
    exact_logits = logits(AutoModelForCausalLM.from_pretrained(exact))
    torch.testing.assert_close(logits(model), exact_logits, rtol=0.05, atol=0.05)


# ── merged = adapter on base ─────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_merged_weights_are_the_adapter_on_the_base(tiny_folder, tmp_path, dtype):
    """Also where the run multiplied in bfloat16: both start from the base model's files."""
    run = make_run(
        tmp_path,
        tiny_folder,
        student={"model": str(tiny_folder), "lora": {"rank": 4}, "dtype": dtype},
    )
    merged = logits(AutoModelForCausalLM.from_pretrained(export(run, tmp_path / "merged")))
    adapter = on_base(tiny_folder, export(run, tmp_path / "adapter", adapter=True))
    assert float((merged - adapter).abs().max()) < 1e-5
    base = logits(AutoModelForCausalLM.from_pretrained(tiny_folder))
    assert float((merged - base).abs().max()) > 1e-2


def test_an_adapter_on_an_adapter_becomes_one_on_the_base(run, tiny_folder, tmp_path):
    start = export(run, tmp_path / "start", adapter=True)
    lora = {"rank": 2, "alpha": 3.0, "target_modules": ["q_proj", "down_proj"]}
    second = make_run(
        tmp_path,
        tiny_folder,
        student={"model": str(tiny_folder), "adapter": str(start), "lora": lora},
    )
    merged = logits(AutoModelForCausalLM.from_pretrained(export(second, tmp_path / "merged")))
    to = export(second, tmp_path / "adapter", adapter=True)
    assert float((merged - on_base(tiny_folder, to)).abs().max()) < 1e-5
    assert float((merged - on_base(tiny_folder, start)).abs().max()) > 1e-2
    assert json.loads((to / "adapter_config.json").read_text())["r"] == 6
    assert {path.name for path in to.iterdir()} >= {"adapter_model.safetensors", "README.md"}
    assert not [path for path in to.iterdir() if path.is_dir()]


# ── names and commands ───────────────────────────────────────────────────────────────────────────


def test_public_names_of_base_models(tmp_path: Path) -> None:
    cached = tmp_path / "hub/models--ada--tiny-1.5B/snapshots/0123"
    cached.mkdir(parents=True)
    assert public_name("smollm2-135m") == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert public_name("ada/tiny-1.5B") == "ada/tiny-1.5B"
    assert public_name(str(cached)) == "ada/tiny-1.5B"
    assert public_name(str(tmp_path)) is None


def test_vllm_commands(run, tiny_folder, tmp_path):
    merged, adapter = tmp_path / "my model", tmp_path / "adapter"
    assert serving_command(run, export(run, merged)) == (
        f"vllm serve '{merged}' --served-model-name 'my model'"
    )
    assert serving_command(run, export(run, adapter, adapter=True)) == (
        f"vllm serve {tiny_folder} --enable-lora --max-lora-rank 8 --lora-modules adapter={adapter}"
    )
    config = json.loads((adapter / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(tiny_folder)
    (adapter / "adapter_config.json").write_text(
        json.dumps(config | {"target_modules": ["lm_head"]})
    )
    assert serving_command(run, adapter) is None


# ── the model card ───────────────────────────────────────────────────────────────────────────────


def test_the_card_says_what_was_done(run, tiny_folder, tmp_path):
    card = (export(run, tmp_path / "mine") / "README.md").read_text()
    before, after = (e for e in RunFolder.read(run).evaluations() if e.policy == "student")
    assert card.startswith("---\nlibrary_name: transformers\n")  # a folder has no hub id
    assert "# mine\n" in card and "optimizer step 2 of 2" in card
    for e in (before, after):
        assert f"{e.mean_score:.1%} ({e.ci_low:.1%} to {e.ci_high:.1%})" in card
    assert "Tasks of the kind `instructions`, instruction_in_prompt = `False`." in card
    assert "learning_rate = 0.03" in card and "vllm serve mine" in card
    assert str(tiny_folder.parent) not in card  # folders often have a user's name
    adapter = export(run, tmp_path / "lora", adapter=True)
    assert "library_name: peft" in (adapter / "README.md").read_text()


def test_a_step_without_evaluation_has_no_result(tiny_folder, tmp_path):
    run = make_run(tmp_path, tiny_folder, run={"checkpoint_every": 1})
    card = (export(run, tmp_path / "mine", step=1) / "README.md").read_text()
    assert "The student was not evaluated both before training and after step 1." in card


# ── refusals ─────────────────────────────────────────────────────────────────────────────────────


def test_a_place_that_cannot_be_written(run, tmp_path):
    (tmp_path / "file").write_text("mine")
    for to in (tmp_path / "file" / "model", Path("/proc/model")):
        with pytest.raises(UserError, match=r"model: cannot be written \(.*\)\. Name a folder"):
            export(run, to)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_failed_export_leaves_nothing(run, tmp_path):
    """Here the base model is gone."""
    run_copy = Path(shutil.copytree(run, tmp_path / "run"))
    recipe = (run_copy / "recipe.toml").read_text()
    model = RunFolder.read(run).recipe().student.model
    (run_copy / "recipe.toml").write_text(recipe.replace(model, "/gone/away"))
    with pytest.raises(ModelError, match="no such folder"):
        export(run_copy, tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_no_checkpoint(run, tmp_path):
    run_copy = Path(shutil.copytree(run, tmp_path / "run"))
    shutil.rmtree(run_copy / "checkpoints")
    with pytest.raises(UserError, match=r"has no checkpoint\. None was saved yet, or .*deleted"):
        export(run_copy, tmp_path / "model")


def test_adapters_that_fit_no_base(tiny_folder, tmp_path, run):
    student = {"model": str(tiny_folder), "lora": {"rank": 2}, "keep_layers": [1]}
    pruned = make_run(tmp_path, tiny_folder, student=student)
    with pytest.raises(UserError, match="--adapter: the adapter belongs to a pruned model"):
        export(pruned, tmp_path / "adapter", adapter=True)
    with pytest.raises(UserError, match="--dtype bfloat16: an adapter is stored in float32"):
        export(run, tmp_path / "adapter", adapter=True, dtype="bfloat16")
    assert not (tmp_path / "adapter").exists()


# ── damaged adapters ─────────────────────────────────────────────────────────────────────────────


class Bomb:
    def __reduce__(self) -> Any:
        return os.mkdir, ("exploded",)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("pickle", r"no adapter_model\.safetensors there\. Pickled weights .* are not loaded"),
        ("cut", r"damaged \(.*\)\. Copy or export it again"),
        ("empty", r"damaged \(.*\)\. Copy or export it again"),
        ("no JSON", r"damaged \(.*\)\. Copy or export it again"),
        ("unknown type", r"does not fit model .*"),
        ("other shapes", r"does not fit model .* Give the model that it was trained on"),
    ],
)
def test_damaged_adapters(run, tiny_folder, tmp_path, monkeypatch, damage, message):
    monkeypatch.chdir(tmp_path)
    adapter = export(run, tmp_path / "adapter", adapter=True)
    weights, config = adapter / "adapter_model.safetensors", adapter / "adapter_config.json"
    if damage == "pickle":
        weights.unlink()
        torch.save({"x": Bomb()}, adapter / "adapter_model.bin")
    elif damage == "cut":
        weights.write_bytes(weights.read_bytes()[:-7])
    elif damage == "empty":
        weights.write_bytes(b"")
    elif damage == "no JSON":
        config.write_text("{")
    else:
        tree = json.loads(config.read_text())
        change = {"peft_type": "MAGIC"} if damage == "unknown type" else {"r": 3}
        config.write_text(json.dumps(tree | change))
    student = {"model": str(tiny_folder), "adapter": str(adapter), "lora": {"rank": 2}}
    with pytest.raises(ModelError, match=message):
        make_run(tmp_path, tiny_folder, student=student)
    assert not (tmp_path / "exploded").exists()
