"""Models by name: complete and intact ones are loaded, all others refused with a reason."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.small_runs import digest
from support.tiny_model import save_tiny, tiny_model

from courtside.engines import builtin_model
from courtside.engines.base import SampleRequest, Sampling
from courtside.engines.loading import load_model, load_tokenizer, resolve_model
from courtside.engines.local import LocalEngine
from courtside.errors import ModelError
from courtside.recipe import builtin

IDS = torch.tensor([[5, 80, 33, 120, 7, 7, 200]])


def load(name: str | Path, **options: Any) -> Any:
    return load_model(str(name), dtype=torch.float32, device=torch.device("cpu"), **options)


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(input_ids=IDS).logits  # type: ignore[no-any-return]


@pytest.fixture
def folder(tiny_folder: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(tiny_folder, tmp_path / "model"))


def edit_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


# ── names ────────────────────────────────────────────────────────────────────────────────────────


def test_a_folder_is_loaded_as_it_was_saved(tiny_folder: Path) -> None:
    model = load(tiny_folder)
    assert torch.equal(logits(model), logits(tiny_model()))
    assert not model.training
    assert load_tokenizer(str(tiny_folder)).eos_token_id == 1


def test_a_tilde_means_home(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder.parent))
    assert resolve_model("~/model") == str(folder)


@pytest.mark.parametrize(
    "name",
    [
        "nobody/no-such-model",
        "no-such-model",
        "models/of/mine",
        "a b",
        "a--b",
        "https://host/model",
    ],
)
def test_an_unknown_name_is_refused_without_waiting(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    timeouts = []

    def no_network(where: Any, timeout: float) -> Any:
        timeouts.append(timeout)
        raise OSError("no route")

    for key in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY"):
        monkeypatch.delenv(key, raising=False)
    monkeypatch.setattr(socket, "create_connection", no_network)
    with pytest.raises(ModelError, match=r"Give a folder with config\.json") as error:
        load(name)
    assert repr(name) in str(error.value)
    assert len(timeouts) <= 1 and all(timeout <= 5 for timeout in timeouts)


@pytest.mark.parametrize("name", ["./nothing", "/nothing/here", "~/nothing-here", "../nothing"])
def test_a_missing_path_is_no_hub_id(name: str) -> None:
    with pytest.raises(ModelError, match="no such folder"):
        resolve_model(name)


def private_kib(model: Any, file: Path) -> list[int]:
    """KiB of private memory in each mapping of the file that holds a parameter."""
    bounds, anonymous = [], {}
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            start, end = (int(part, 16) for part in line.split()[0].split("-"))
            bounds = [start, end] if line.endswith(str(file)) else []
        elif line.startswith("Anonymous:") and bounds:
            anonymous[range(*bounds)] = int(line.split()[1])
    addresses = {p.data_ptr(): p for p in model.parameters()}
    return [anonymous[span] for address in addresses for span in anonymous if address in span]


@pytest.mark.skipif(
    not Path("/proc/self/smaps").is_file(), reason="needs /proc/self/smaps of Linux"
)
def test_a_frozen_model_stays_memory_mapped(tmp_path: Path) -> None:
    file = save_tiny(tmp_path / "large", vocab_size=100_000).resolve() / "model.safetensors"
    before, model = digest(file.read_bytes()), load(file.parent)
    logits(model)
    private = private_kib(model, file)
    assert len(private) == len(list(model.parameters())), "every tensor is mapped from the file"
    assert max(private) < file.stat().st_size / 1024 / 20, "nothing was copied"
    for parameter in model.parameters():
        parameter.data.mul_(2.0)
    assert min(private_kib(model, file)) > 0.9 * file.stat().st_size / 1024, (
        "training copies a page when it writes"
    )
    assert digest(file.read_bytes()) == before


# ── damaged folders ──────────────────────────────────────────────────────────────────────────────


def test_a_folder_without_config_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        load(tmp_path)


def test_pickled_weights_are_not_loaded(folder: Path) -> None:
    torch.save(tiny_model().state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"no file named model\.safetensors"):
        load(folder)


def test_a_truncated_file_is_refused(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(ModelError, match="cannot be loaded"):
        load(folder)


@pytest.mark.parametrize(
    ("changes", "missing"),
    [({"num_hidden_layers": 3}, r"layers\.2"), ({"vocab_size": 300}, "embed_tokens")],
)
def test_missing_weights_are_never_initialized(
    folder: Path, changes: dict[str, int], missing: str
) -> None:
    edit_config(folder, **changes)
    with pytest.raises(ModelError, match=missing):
        load(folder)


@pytest.mark.parametrize("text", ["{", "[]", "not json"])
def test_an_invalid_config_is_refused(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(ModelError, match="cannot be loaded"):
        load(folder)


@pytest.mark.parametrize("changes", [{"hidden_size": "big"}, {"layer_types": ["full_attention"]}])
def test_a_config_that_contradicts_itself_is_refused(folder: Path, changes: dict[str, Any]) -> None:
    edit_config(folder, **changes)
    with pytest.raises(ModelError, match="cannot be loaded"):
        load(folder)


def test_a_model_of_an_unknown_kind_is_refused(folder: Path) -> None:
    edit_config(folder, model_type="never-heard-of")
    with pytest.raises(ModelError, match="never-heard-of"):
        load(folder)


def test_a_folder_without_tokenizer_is_refused(folder: Path) -> None:
    for file in folder.glob("*token*"):
        file.unlink()
    with pytest.raises(ModelError, match=r"the folder has no tokenizer \(tokenizer\.json"):
        load_tokenizer(str(folder))


# ── pruning ──────────────────────────────────────────────────────────────────────────────────────


def by_hand(model: Any, keep: tuple[int, ...]) -> Any:
    """A smaller model of the same kind, filled layer by layer."""
    changes: dict[str, Any] = {"num_hidden_layers": len(keep)}
    if getattr(model.config, "layer_types", None):
        changes["layer_types"] = [model.config.layer_types[i] for i in keep]
    small = type(model)(type(model.config)(**{**model.config.to_dict(), **changes})).eval()
    small.set_attn_implementation(model.config._attn_implementation)
    renamed = {}
    for name, tensor in model.state_dict().items():
        layer = name.split(".")[2] if name.startswith("model.layers.") else None
        if layer is None:
            renamed[name] = tensor
        elif int(layer) in keep:
            new = name.replace(f"layers.{layer}.", f"layers.{keep.index(int(layer))}.", 1)
            renamed[new] = tensor
    small.load_state_dict(renamed)
    return small


@pytest.mark.parametrize("keep", [(0,), (2,), (0, 2), (1, 2), (0, 1, 2)])
def test_a_pruned_model_is_the_model_without_those_layers(
    tiny_teacher_folder: Path, keep: tuple[int, ...], tmp_path: Path
) -> None:
    pruned = load(tiny_teacher_folder, keep_layers=keep)
    expected = by_hand(load(tiny_teacher_folder), keep)
    assert torch.equal(logits(pruned), logits(expected))
    # With a cache, which is addressed by the layers' numbers.
    tokenizer, how = load_tokenizer(str(tiny_teacher_folder)), Sampling(max_new_tokens=6)
    requests = [SampleRequest(prompt_ids=(9, 10, 11), seed=4)]
    ours = LocalEngine(pruned, tokenizer, name="a").sample(requests, how)
    assert ours == LocalEngine(expected, tokenizer, name="b").sample(requests, how)
    pruned.save_pretrained(tmp_path / "saved")
    assert torch.equal(logits(load(tmp_path / "saved")), logits(expected))


@pytest.mark.parametrize("keep", [(1,), (0, 3), (1, 2)])
def test_layers_of_different_kinds_keep_their_kind(keep: tuple[int, ...], tmp_path: Path) -> None:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=258, hidden_size=32, intermediate_size=64, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, sliding_window=2,
        initializer_range=0.3, eos_token_id=1, pad_token_id=1, attn_logit_softcapping=2.0,
    )  # fmt: skip
    model = Gemma2ForCausalLM(config).eval()
    model.set_attn_implementation("eager")  # loading does so: SDPA leaves out the soft cap
    assert len(set(model.config.layer_types)) == 2
    model.save_pretrained(tmp_path)
    pruned = load(tmp_path, keep_layers=keep)
    assert torch.equal(logits(pruned), logits(by_hand(model, keep)))


@pytest.mark.parametrize("keep", [(), (0, 2), (1, 0), (0, 0), (-1, 0), (5,)])
def test_missing_layers_cannot_be_selected(tiny_folder: Path, keep: tuple[int, ...]) -> None:
    with pytest.raises(ModelError, match=r"student\.keep_layers = .*from 0 to 1"):
        load(tiny_folder, keep_layers=keep)


def test_an_unsupported_architecture_cannot_be_pruned(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    GPT2LMHeadModel(
        GPT2Config(vocab_size=20, n_embd=8, n_layer=2, n_head=2, n_positions=8)
    ).save_pretrained(tmp_path)
    load(tmp_path)
    with pytest.raises(ModelError, match=r"student\.keep_layers: the layers of GPT2LMHeadModel"):
        load(tmp_path, keep_layers=(0,))


# ── the embedded model ───────────────────────────────────────────────────────────────────────────


@pytest.fixture
def gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for the embedded file, in a cache of its own."""
    file = tmp_path / "model.gguf"
    file.write_bytes(b"weights")
    monkeypatch.setenv("COURTSIDE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COURTSIDE_SMOLLM2_GGUF", str(file))
    monkeypatch.setattr(builtin_model, "GGUF_SHA256", hashlib.sha256(b"weights").hexdigest())
    return file


def stand_in(
    monkeypatch: pytest.MonkeyPatch, during: Callable[[], None] = lambda: None
) -> list[str]:
    """A conversion that takes no time. Returns the calls."""
    calls: list[str] = []

    def convert(gguf: Path, target: Path) -> None:
        calls.append(str(gguf))
        (target / "model.safetensors").write_bytes(b"converted")
        (target / "config.json").write_text("{}")
        during()
        sums = {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in target.iterdir()}
        (target / "sums.json").write_text(json.dumps(sums))

    monkeypatch.setattr(builtin_model, "_convert", convert)
    return calls


def test_the_builtin_model_is_converted_once(gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = stand_in(monkeypatch)
    folder = Path(resolve_model("smollm2-135m"))
    assert (folder / "model.safetensors").read_bytes() == b"converted"
    assert resolve_model("smollm2-135m") == str(folder)
    assert calls == [str(gguf)]
    assert [path.name for path in folder.parent.iterdir()] == [folder.name], "no leftovers"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("model.safetensors", b"convertee"),
        ("model.safetensors", None),
        ("config.json", b"{ }"),
        ("config.json", None),
        ("sums.json", b"{"),
    ],
)
def test_damage_is_detected_before_loading(
    gguf: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: bytes | None
) -> None:
    calls = stand_in(monkeypatch)
    file = Path(resolve_model("smollm2-135m")) / name
    if content is None:
        file.unlink()
    else:
        file.write_bytes(content)
    with pytest.raises(ModelError, match="damaged") as error:
        resolve_model("smollm2-135m")
    assert name in str(error.value) and f"Delete the folder {file.parent}" in str(error.value)
    shutil.rmtree(file.parent)
    resolve_model("smollm2-135m")
    assert len(calls) == 2


def test_checksums_are_verified_once_per_state_of_a_file(
    gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch)
    weights = Path(resolve_model("smollm2-135m")) / "model.safetensors"
    hashed: list[str] = []
    real = builtin_model._sha256

    def watched(path: Path) -> str:
        hashed.append(path.name)
        return real(path)

    monkeypatch.setattr(builtin_model, "_sha256", watched)
    resolve_model("smollm2-135m")
    assert sorted(hashed) == ["config.json", "model.safetensors"]
    resolve_model("smollm2-135m")
    assert len(hashed) == 2, "nothing changed"
    os.utime(weights, ns=(1, 1))
    resolve_model("smollm2-135m")
    assert hashed[2:] == ["model.safetensors"], "another time, the same content"
    about = weights.stat()
    weights.write_bytes(b"CONVERTED")
    with pytest.raises(ModelError, match="damaged"):
        resolve_model("smollm2-135m")
    assert about.st_size == weights.stat().st_size
    (weights.parent / "verified.json").write_text("{ no json")
    weights.write_bytes(b"converted")
    resolve_model("smollm2-135m")


def test_an_interrupted_conversion_leaves_nothing(
    gguf: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def die() -> None:
        raise KeyboardInterrupt

    stand_in(monkeypatch, die)
    with pytest.raises(KeyboardInterrupt):
        resolve_model("smollm2-135m")
    assert list((tmp_path / "cache").iterdir()) == []
    stand_in(monkeypatch)
    assert Path(resolve_model("smollm2-135m")).is_dir()


def test_two_conversions_at_once_end_with_one_model(
    gguf: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def another_is_faster() -> None:
        stand_in(monkeypatch)
        resolve_model("smollm2-135m")

    stand_in(monkeypatch, another_is_faster)
    folder = Path(resolve_model("smollm2-135m"))
    assert (folder / "model.safetensors").read_bytes() == b"converted"
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [folder.name]


def test_another_file_under_the_name_is_refused(gguf: Path) -> None:
    gguf.write_bytes(b"something else")
    with pytest.raises(ModelError, match="the checksum is not that of"):
        resolve_model("smollm2-135m")


def test_a_missing_gguf_file_is_refused(gguf: Path) -> None:
    gguf.unlink()
    with pytest.raises(ModelError, match="COURTSIDE_SMOLLM2_GGUF"):
        resolve_model("smollm2-135m")


def test_without_the_package_the_hub_is_used(gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COURTSIDE_SMOLLM2_GGUF")
    monkeypatch.setattr(builtin_model.importlib.util, "find_spec", lambda name: None)
    assert resolve_model("smollm2-135m") == builtin_model.HUB_ID


def test_a_merged_adapter_can_be_trained_and_may_be_relative_to_a_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from peft import LoraConfig, get_peft_model

    base = save_tiny(tmp_path / "base")
    config = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    adapted = get_peft_model(tiny_model(), config)
    adapted.save_pretrained(tmp_path / "recipes" / "some-recipe" / "warm")
    monkeypatch.setattr(builtin, "recipes_folder", lambda: tmp_path / "recipes")
    monkeypatch.chdir(tmp_path)
    ids = torch.tensor([[5, 6, 7]])
    expected = adapted.eval()(ids).logits
    for path in ("some-recipe/warm", "recipes/some-recipe/warm"):
        model = load(base, adapter=Path(path))
        torch.testing.assert_close(model(ids).logits, expected)
        assert all(parameter.requires_grad for parameter in model.parameters())


# ── odd machines ─────────────────────────────────────────────────────────────────────────────────


def test_a_file_is_no_model(folder: Path) -> None:
    with pytest.raises(ModelError, match=r"safetensors': is a file\. Give the folder with config"):
        load(folder / "model.safetensors")


@pytest.mark.parametrize("place", ["file/cache", "/proc/cache"])
def test_a_cache_that_cannot_be_written(
    gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    (tmp_path / "file").write_text("mine")
    monkeypatch.setenv("COURTSIDE_CACHE", str(tmp_path / place))
    with pytest.raises(ModelError, match=r"cache, which cannot be written .* Set COURTSIDE_CACHE"):
        resolve_model("smollm2-135m")


def test_the_cache_is_for_all_who_may_read_it(gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch)
    target = Path(resolve_model("smollm2-135m"))
    (target.parent / "new").touch()
    mode = (target.parent / "new").stat().st_mode
    assert {path.stat().st_mode for path in target.iterdir()} == {mode}
    assert target.stat().st_mode & 0o777 == (mode | (mode & 0o444) >> 2) & 0o777
