"""Load models by name: the built-in model, a hub id or a folder. Only safetensors are loaded.

On a CPU weights stay memory-mapped where the file has the requested dtype: processes share the
pages, and training copies a page when it first writes to it.
"""

from __future__ import annotations

import json
import logging
import math
import os
import socket
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from courtside.engines.builtin_model import BUILTIN_MODEL, locate_builtin_model
from courtside.engines.precision import average_in_place
from courtside.engines.rope import find_original_length, find_rope_types
from courtside.errors import ModelError
from courtside.recipe.builtin import find_adapter_folder

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# PEFT imports bitsandbytes wherever it is installed, which then warns of a kernel that 4-bit
# layers on a CPU could have.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
# `dequantize` names its dtype, which is asked for.
logging.getLogger("transformers.integrations.bitsandbytes").setLevel(logging.ERROR)

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def resolve_model(name: str) -> str:
    """The folder or hub id of a model name; converts the built-in model at first use."""
    if name == BUILTIN_MODEL:
        return str(locate_builtin_model())
    folder = Path(name).expanduser()
    if folder.is_file():
        raise ModelError(
            f"model {name!r}: is a file. Give the folder with config.json, tokenizer and "
            "*.safetensors; a GGUF or a single weights file cannot be trained"
        )
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
    average_with: tuple[str, float] | None = None,
    in_4_bits: bool = False,
) -> PreTrainedModel:
    """A causal language model in eval mode, on `device`; a LoRA `adapter` is merged into it.

    `average_with`: another model and its share of every weight.
    `in_4_bits`: bitsandbytes quantizes every linear layer but the LM head to NF4 while it loads."""
    from transformers import AutoModelForCausalLM

    model: Any
    quantization = _nf4_arguments(name, dtype, device) if in_4_bits else {}
    # Merged in float32: in bfloat16 small updates of the adapter would be rounded away.
    load_dtype = dtype if adapter is None and average_with is None else torch.float32
    model, loading_info = _load(AutoModelForCausalLM, name, dtype=load_dtype, use_safetensors=True,
                          trust_remote_code=trust_remote_code, output_loading_info=True,
                          ignore_mismatched_sizes=True, **quantization)  # fmt: skip
    _unpack_narrow_layers(model)
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
        model = merge_adapter(load_adapter(model, adapter, name)).to(dtype)
        model.requires_grad_(True)  # PEFT froze the base model
    if average_with is not None:
        _average(model, name, *average_with, trust_remote_code=trust_remote_code)
        model.to(dtype)
    if keep_layers is not None:
        _prune(model, keep_layers)
    _check_finite(model, name)
    _keep_soft_cap(model)
    return model.to(device).eval()


def _keep_soft_cap(model: Any) -> None:
    """transformers runs Gemma 2 by torch's SDPA, which leaves out the soft cap of its attention:
    another model than it was trained as, and than vLLM serves."""
    config = model.config.get_text_config()
    capped = getattr(config, "attn_logit_softcapping", None) is not None
    if capped and config._attn_implementation == "sdpa":
        model.set_attn_implementation("eager")


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


def _unpack_narrow_layers(model: Any) -> None:
    """On CPUs with avx512_bf16, bitsandbytes packs 4-bit weights for inference, and fails where a
    row is no multiple of its blocks."""
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            block = module.weight.blocksize
            module.support_avx512bf16_for_cpu &= module.in_features % block == 0


def load_adapter(model: Any, adapter: Path, name: str, adapter_name: str = "default") -> Any:
    """A PEFT model of the base and the adapter in a folder. Only safetensors are loaded."""
    from peft import PeftModel

    folder = find_adapter_folder(adapter)
    if not (folder / "adapter_config.json").is_file():
        raise ModelError(
            f"adapter {str(adapter)!r}: no adapter_config.json there. Give the folder that "
            "`courtside export --adapter` wrote"
        )
    file = folder / "adapter_model.safetensors"
    if not file.is_file():
        raise ModelError(
            f"adapter {str(adapter)!r}: no {file.name} there. Pickled weights (*.bin) can run any "
            "code and are not loaded: save the adapter again with safe_serialization=True"
        )
    try:
        with safe_open(file, "pt") as opened:
            opened.keys()
        json.loads((folder / "adapter_config.json").read_bytes())
    except (OSError, SafetensorError, ValueError) as error:
        raise ModelError(
            f"adapter {str(adapter)!r}: damaged ({error}). Copy or export it again"
        ) from None
    try:
        return silence_tied_weight_warnings(
            PeftModel.from_pretrained, model, str(folder), adapter_name
        )
    except (KeyError, RuntimeError, TypeError, ValueError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelError(
            f"adapter {str(adapter)!r} does not fit model {name!r}: {reason}. Give the model that "
            "it was trained on"
        ) from None


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

    folder = Path(resolve_model(name))
    if folder.is_dir() and not any((folder / file).is_file() for file in TOKENIZER_FILES):
        raise ModelError(
            f"model {name!r}: the folder has no tokenizer ({', '.join(TOKENIZER_FILES)}). Copy the "
            "tokenizer files of its base model there: AutoTokenizer.from_pretrained(BASE)"
            ".save_pretrained(FOLDER)"
        )
    tokenizer: PreTrainedTokenizerBase = _load(
        AutoTokenizer, name, trust_remote_code=trust_remote_code
    )
    return tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """Of a model's files, without its weights."""

    context_length: int
    hidden_size: int | None
    generation_config: Any

    def eos_ids(self, tokenizer: Any) -> frozenset[int]:
        return find_eos_ids(self.generation_config, tokenizer)


def load_config(name: str, *, trust_remote_code: bool = False) -> Any:
    from transformers import AutoConfig

    return _load(AutoConfig, name, trust_remote_code=trust_remote_code)


def load_settings(
    name: str, *, trust_remote_code: bool = False, context_length: int | None = None
) -> ModelSettings:
    from transformers import GenerationConfig

    config = load_config(name, trust_remote_code=trust_remote_code)
    try:
        generation = GenerationConfig.from_pretrained(resolve_model(name))
    except OSError:  # most folders have none; so does `from_pretrained` of a model then
        generation = GenerationConfig.from_model_config(config)
    return ModelSettings(
        context_length=find_context_length(config, context_length),
        hidden_size=getattr(config.get_text_config(), "hidden_size", None),
        generation_config=generation,
    )


def expose_base_model(model: Any) -> None:
    """Some classes name another module as their base than the one that they have: `base_model` is
    then the model itself."""
    inner = getattr(model, "model", None)
    if model.base_model is model and isinstance(inner, nn.Module):
        model.base_model_prefix = "model"


def find_context_length(config: Any, requested: int | None = None) -> int:
    """Tokens of the longest sequence. Unless more is `requested`, a model whose RoPE factors depend
    on the length takes those that it was first trained with."""
    longest = int(getattr(config.get_text_config(), "max_position_embeddings", None) or 0)
    longest = longest if longest > 0 else 2**31  # XLNet has −1 for no limit
    # Doge masks dynamically once a sequence is longer: its last tokens change its first ones.
    longest = min(longest, getattr(config.get_text_config(), "keep_window_size", None) or longest)
    original = find_original_length(config)
    if requested is None:
        return longest if original is None else min(longest, original)
    scales = "dynamic" in find_rope_types(config)  # beyond the positions of its config
    if requested > longest and not scales:
        raise ModelError(
            f"context_length = {requested:,}: the model has {longest:,} positions "
            "(max_position_embeddings). Use at most that many"
        )
    return requested


def find_eos_ids(generation_config: Any, tokenizer: Any) -> frozenset[int]:
    """End-of-sequence ids of the generation config and the tokenizer."""
    config_ids = getattr(generation_config, "eos_token_id", None)
    ids = {*(config_ids if isinstance(config_ids, list) else [config_ids]), tokenizer.eos_token_id}
    ids.discard(None)
    if not ids:
        raise ModelError(
            "neither the tokenizer nor the generation config has an end-of-sequence token, so no "
            "sample would ever end. Set eos_token in tokenizer_config.json"
        )
    return frozenset(ids)


def read_config(name: str) -> dict[str, Any]:
    """The model's config.json as its authors wrote it."""
    from transformers.utils import cached_file

    file = cached_file(resolve_model(name), "config.json")
    config: dict[str, Any] = json.loads(Path(str(file)).read_text("utf-8"))
    return config


def _load(loader: Any, name: str, **options: Any) -> Any:
    from huggingface_hub.errors import StrictDataclassError
    from transformers.utils import logging

    logging.disable_progress_bar()  # a run has its own progress display
    source = resolve_model(name)
    _check_reachable(name, source)
    try:
        return loader.from_pretrained(source, **options)
    except (
        OSError, ValueError, KeyError, TypeError, SafetensorError, StrictDataclassError
    ) as error:  # fmt: skip
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


def _check_finite(model: Any, name: str) -> None:
    """The bias of an LM head may exclude tokens with −inf, as padding of the vocabulary."""
    head_bias = getattr(model.get_output_embeddings(), "bias", None)
    for key, parameter in model.named_parameters():
        if not parameter.is_floating_point() or not parameter.numel():
            continue  # quantized, or nothing
        values = parameter.detach()
        if parameter is head_bias:
            values = values[values != -math.inf]
        if not values.numel() or not all(extreme.isfinite() for extreme in values.aminmax()):
            raise ModelError(
                f"model {name!r}: {key} holds NaN or infinite values. Its training diverged, or "
                "its files are damaged: download or export it again"
            )


@torch.no_grad()
def _average(
    model: Any, name: str, other_name: str, weight: float, *, trust_remote_code: bool
) -> None:
    """(1 − weight) · model + weight · other in place, in float32."""
    other = load_model(
        other_name,
        dtype=torch.float32,
        device=torch.device("cpu"),
        trust_remote_code=trust_remote_code,
    )
    tensors, other_tensors = dict(model.named_parameters()), dict(other.named_parameters())
    different = sorted(
        key
        for key in tensors.keys() | other_tensors.keys()
        if key not in tensors
        or key not in other_tensors
        or tensors[key].shape != other_tensors[key].shape
    )
    if different:
        raise ModelError(
            f"student.average_with.model = {other_name!r} and student.model = {name!r} differ in "
            f"{len(different)} weights, such as {different[0]}. Average models of one architecture "
            "and size"
        )
    for key, tensor in tensors.items():
        average_in_place(tensor, other_tensors[key], weight)


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
