"""A small config of every causal language model that transformers has.

Lengths at which a model changes (windows, chunks, compression blocks, the original length of RoPE)
are so small that the sequences of `support.kind_checks` cross them.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

UNSET = object()
"""A field of `COMMON` that a config refuses."""
COMMON: dict[str, Any] = {
    "vocab_size": 258, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 256, "initializer_range": 0.3,
    "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 1, "is_decoder": True,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
    "sliding_window": 8, "attention_chunk_size": 8,
}  # fmt: skip
"""A config gets those of them that it knows."""
VISION: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
    "image_size": 28, "patch_size": 14,
}  # fmt: skip
MLA: dict[str, Any] = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "n_group": 1, "topk_group": 1, "num_key_value_heads": 4,
}  # fmt: skip
DSA: dict[str, Any] = {**MLA, "index_topk": 6, "index_n_heads": 16, "index_head_dim": 16}
DELTA: dict[str, Any] = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "num_hidden_layers": 4,
}  # fmt: skip
QWEN4: dict[str, Any] = {
    **DELTA, "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8,
    "indexer_budget": 4, "indexer_compress_ratio": 2, "hc_lowrank": 8, "ple_embed_dim": 8,
    "ngram_vocab_size_base": 64, "split_ngram_parts": 1, "heads_per_ngram": 2,
}  # fmt: skip
MAMBA2: dict[str, Any] = {
    "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
}  # fmt: skip
SEQ2SEQ: dict[str, Any] = {
    "d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48,
    "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 48, "init_std": 0.3,
    "num_hidden_layers": UNSET, "num_attention_heads": UNSET, "hidden_size": UNSET,
}  # fmt: skip
NO_CHUNKS: dict[str, Any] = {"attention_chunk_size": UNSET}
MIXED_WINDOWS: dict[str, Any] = {
    "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2,
    "use_sliding_window": True, "attention_chunk_size": UNSET,
}  # fmt: skip
GEMMA4: dict[str, Any] = {
    **MIXED_WINDOWS, "global_head_dim": 8, "vocab_size_per_layer_input": 258,
    "hidden_size_per_layer_input": 8,
}  # fmt: skip
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 1.0, 1.1, 1.2],
    "long_factor": [1.0, 2.0, 4.0, 8.0], "original_max_position_embeddings": 48,
}  # fmt: skip
DYNAMIC: dict[str, Any] = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}

SETTINGS: dict[str, dict[str, Any]] = {
    "axk1": MLA,
    "axk2": DSA,
    "bamba": {**MAMBA2, "attn_layer_indices": [1]},
    "bart": SEQ2SEQ,
    "bigbird_pegasus": SEQ2SEQ,
    "blenderbot": SEQ2SEQ,
    "blenderbot-small": SEQ2SEQ,
    "blt": {
        "patcher_config": {}, "encoder_config": {"hidden_size_global": 32}, "global_config": {},
        "decoder_config": {"hidden_size_global": 32}, "patch_in_forward": False,
        "encoder_hash_byte_group_size": [3], "encoder_hash_byte_group_vocab": 64,
    },
    "codegen": {"rotary_dim": 8, "num_attention_heads": 4},
    "cohere_compass_text": {
        "layer_types": ["full_attention"] * 2,
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4,
                                               "mrope_section": [1, 1, 2]}},
    },
    "cpmant": {"dim_head": 8, "dim_ff": 48, "position_bias_num_buckets": 16},
    "ctrl": {"dff": 48},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 32}, "hidden_size": UNSET, "d_model": 32,
        "max_seq_len": 256, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
    "deepseek_v2": {**MLA, "topk_method": "greedy"},
    "deepseek_v3": MLA,
    "deepseek_v32": DSA,
    "deepseek_v4": {
        "num_key_value_heads": 1, "head_dim": 16, "q_lora_rank": 16, "o_groups": 2,
        "o_lora_rank": 16, "index_n_heads": 16, "index_head_dim": 16, "index_topk": 4,
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        "partial_rotary_factor": 0.5, "num_hidden_layers": 4,
    },
    "doge": {"keep_window_size": 48},
    "dots1": {"n_shared_experts": 1, "n_group": 1, "topk_group": 1},
    "emu3": {"text_config": {}, "vq_config": {
        "codebook_size": 16, "embed_dim": 8, "latent_channels": 8, "base_channels": 32,
        "channel_multiplier": [1], "num_res_blocks": 1, "attn_resolutions": [], "hidden_size": 32,
    }, "vocabulary_map": {}},
    "falcon": {"head_dim": UNSET},
    "falcon_h1": {**MAMBA2, "mamba_d_ssm": 64},
    "falcon_mamba": {"state_size": 8},
    "fuyu": {"text_config": {"model_type": "persimmon"}},
    "gemma2": {**MIXED_WINDOWS, "final_logit_softcapping": 3.0, "attn_logit_softcapping": 2.0,
               "attn_implementation": "eager"},  # as it is loaded: SDPA leaves out the cap
    "gemma3": {"text_config": MIXED_WINDOWS, "vision_config": {"model_type": "siglip_vision_model"},
               "mm_tokens_per_image": 4, "image_token_index": 255, "boi_token_index": 254,
               "eoi_token_index": 253},
    "gemma3_text": MIXED_WINDOWS,
    "gemma3n_text": {
        **MIXED_WINDOWS, "num_kv_shared_layers": 2, "vocab_size_per_layer_input": 258,
        "hidden_size_per_layer_input": 8, "laurel_rank": 8, "intermediate_size": [48] * 4,
        "activation_sparsity_pattern": [0.0] * 4,
    },
    "gemma4": {"text_config": GEMMA4, "vision_config": None, "audio_config": None},
    "gemma4_text": GEMMA4,
    "gemma4_unified": {"text_config": GEMMA4, "vision_config": None, "audio_config": None},
    "gemma4_unified_text": GEMMA4,
    "git": {"vision_config": {}},
    "glm4_moe_lite": MLA,
    "glm_moe_dsa": DSA,
    "got_ocr2": {"text_config": {"model_type": "qwen2"}, "vision_config": {
        "output_channels": 16, "mlp_dim": 48, "global_attn_indexes": [0], "window_size": 2,
        "image_size": 64, "patch_size": 16,
    }, "image_token_index": 255},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 8},
    "gptj": {"rotary_dim": 8},
    "granitemoehybrid": {**MAMBA2, "layer_types": ["linear_attention", "full_attention"],
                         "shared_intermediate_size": 48},
    "hy_v4": {**MLA, "index_topk": 6, "index_n_heads": 16, "index_head_dim": 16},
    "inkling_text": {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 8,
                     "sliding_window_size": 8, "d_rel": 4, "rel_extent": 16,
                     "num_hidden_layers": 6},
    "jamba": {"mamba_d_state": 8, "num_hidden_layers": 8},
    "kimi_linear": {"num_key_value_heads": 4, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
                    "qk_nope_head_dim": 8, "v_head_dim": 8, "linear_head_dim": 8,
                    "linear_num_heads": 4, "num_hidden_layers": 4},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "llama4": {"text_config": {"attention_chunk_size": 8, "num_hidden_layers": 4,
                               "intermediate_size_mlp": 48, "floor_scale": 8, "attn_scale": 0.5},
               "vision_config": {"vision_output_dim": 32, "projector_input_dim": 32,
                                 "projector_output_dim": 32}},
    "llama4_text": {"num_hidden_layers": 4, "intermediate_size_mlp": 48, "floor_scale": 8,
                    "attn_scale": 0.5},
    "longcat_flash": {**MLA, "ffn_hidden_size": 48, "expert_ffn_hidden_size": 16,
                      "num_layers": 2, "moe_topk": 2},
    "mamba": {"state_size": 8},
    "mamba2": {"state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 8},
    "marian": SEQ2SEQ,
    "mbart": SEQ2SEQ,
    "minicpm3": MLA,
    "ministral3": {"rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 16.0, "beta_fast": 32.0,
        "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5,
        "original_max_position_embeddings": 16,
    }},
    "minimax_m3_vl_text": {
        "index_n_heads": 2, "index_head_dim": 8, "index_block_size": 4, "index_topk_blocks": 2,
        "layer_types": ["minimax_m3_sparse", "full_attention"], "rotary_dim": 8,
    },
    "minimax": {"layer_types": ["full_attention", "linear_attention"], "block_size": 8},
    "mllama": {"text_config": {"cross_attention_layers": [1]}, "vision_config": {
        "num_global_layers": 1, "vision_output_dim": 64, "intermediate_layers_indices": [0],
        "supported_aspect_ratios": [[1, 1]], "attention_heads": 4,
    }},
    "moshi": {"num_codebooks": 4, "ffn_dim": 48},
    "musicgen": {"text_encoder": {"model_type": "t5", "d_model": 32, "d_kv": 8, "d_ff": 48,
                                  "num_layers": 1, "num_heads": 4, "vocab_size": 258},
                 "audio_encoder": {"model_type": "encodec"},
                 "decoder": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
                             "ffn_dim": 48, "vocab_size": 258}},
    "mvp": SEQ2SEQ,
    "nemotron_h": {"mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 1,
                   "chunk_size": 8, "num_hidden_layers": 4, "sliding_window": None,
                   "layers_block_type": ["mamba", "attention", "mamba", "moe"]},
    "olmo_hybrid": {"linear_num_value_heads": 4, "linear_num_key_heads": 4,
                    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "num_hidden_layers": 4},
    "pegasus": SEQ2SEQ,
    "phi4_multimodal": {
        "vision_config": {"crop_size": 28, "image_token_id": 255},
        "audio_config": {"hidden_size": 32, "intermediate_size": 48, "num_blocks": 1,
                         "num_attention_heads": 4, "ext_pw_out_channel": 32,
                         "depthwise_separable_out_channel": 32, "nemo_conv_channels": 8,
                         "audio_token_id": 254},
    },
    "phimoe": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "plbart": SEQ2SEQ,
    "prophetnet": {"num_encoder_layers": 1, "num_encoder_attention_heads": 4, "encoder_ffn_dim": 48,
                   "num_decoder_layers": 2, "num_decoder_attention_heads": 4, "decoder_ffn_dim": 48,
                   "num_hidden_layers": UNSET, "init_std": 0.3, "num_attention_heads": UNSET},
    "qwen3_5": {"text_config": DELTA, "vision_config": {"depth": 1, "num_heads": 4,
                "out_hidden_size": 32}},
    "qwen3_5_moe": {"text_config": DELTA, "vision_config": {"depth": 1, "num_heads": 4,
                    "out_hidden_size": 32}},
    "qwen3_5_moe_text": DELTA,
    "qwen3_5_text": DELTA,
    "qwen3_next": DELTA,
    "qwen4_exp": {"text_config": QWEN4, "vision_config": {"depth": 1, "num_heads": 4,
                  "out_hidden_size": 32}},
    "qwen4_exp_text": QWEN4,
    "reformer": {"axial_pos_embds": False, "attention_head_size": 8, "feed_forward_size": 48,
                 "attn_layers": ["local", "lsh"], "local_attn_chunk_length": 8,
                 "lsh_attn_chunk_length": 8, "num_buckets": 4},
    "rembert": {"input_embedding_size": 16, "output_embedding_size": 24},
    "roc_bert": {"enable_pronunciation": False, "enable_shape": False},
    "trocr": SEQ2SEQ,
    "vaultgemma": {"attn_implementation": "eager"},
    "whisper": {**SEQ2SEQ, "max_target_positions": 256},
    "xglm": {"ffn_dim": 48, "attention_heads": 4, "num_layers": 2, "d_model": 32},
    "xlm": {"causal": True},
    "xlnet": {"max_position_embeddings": UNSET, "d_model": 32, "n_layer": 2, "n_head": 4,
              "d_inner": 48},
    "xlstm": {"num_heads": 4, "qk_dim_factor": 0.5, "v_dim_factor": 1.0, "num_blocks": 2,
              "chunk_size": 8},
    "xmod": {"default_language": "en_XX"},
    "youtu": MLA,
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "mamba_d_state": 8,
              "num_hidden_layers": 4,
              "head_dim": UNSET},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "mamba_d_state": 8,
               "num_hidden_layers": 4,
               "head_dim": UNSET, "n_mamba_heads": 8, "chunk_size": 8, "adapter_rank": 4},
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16, "sliding_window": None},
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelKind:
    """A row of the sweep."""

    model_type: str
    variant: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.model_type} ({self.variant})" if self.variant else self.model_type


VARIANTS = tuple(
    ModelKind(model_type=model_type, variant=variant, settings=settings)
    for model_type, variant, settings in (
        ("bert", "bidirectional", {"is_decoder": False}),
        ("bert-generation", "bidirectional", {"is_decoder": False}),
        ("llama", "dynamic NTK", {"max_position_embeddings": 48, "rope_parameters": DYNAMIC}),
        ("llama", "longrope", {"rope_parameters": LONGROPE}),
        ("llama", "eager attention", {"attn_implementation": "eager"}),
        ("gpt_oss", "full attention", {"layer_types": ["full_attention"] * 2}),
        ("minimax", "no window", {"sliding_window": None}),
        ("mistral", "no window", {"sliding_window": None}),
        ("mixtral", "no window", {"sliding_window": None}),
        ("phi3", "longrope", {"rope_parameters": LONGROPE, "sliding_window": None,
                              "original_max_position_embeddings": 48}),
        ("phi3", "longrope and window", {"rope_parameters": LONGROPE,
                                         "original_max_position_embeddings": 48}),
        ("phi3", "no window", {"sliding_window": None}),
        ("phimoe", "longrope", {"rope_parameters": LONGROPE | {"short_mscale": 1.1,
                                                               "long_mscale": 1.3},
                                "sliding_window": None}),
        ("qwen2", "windows", MIXED_WINDOWS),
        ("qwen3", "windows", MIXED_WINDOWS),
        ("xlm", "bidirectional", {"causal": False}),
        ("zaya", "windows", {"layer_types": ["hybrid", "hybrid_sliding"], "sliding_window": 8}),
    )
)  # fmt: skip


def all_kinds() -> list[ModelKind]:
    kinds = [ModelKind(model_type=name) for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES]
    return sorted([*kinds, *VARIANTS], key=lambda kind: kind.name)


def build_model(kind: ModelKind, *, seed: int = 0) -> Any:
    """With random weights, in float32, in eval mode."""
    settings = {**SETTINGS.get(kind.model_type, {}), **kind.settings}
    attention = {k: settings.pop(k) for k in ("attn_implementation",) if k in settings}
    config_class = CONFIG_MAPPING[kind.model_type]
    merged = _with_common(config_class, settings)
    for name, nested in settings.items():
        nested_class = config_class.sub_configs.get(name)
        if nested_class is not None and isinstance(nested, Mapping):
            if "model_type" in nested:
                nested_class = CONFIG_MAPPING[nested["model_type"]]
            merged[name] = _with_common(nested_class, nested)
    torch.manual_seed(seed)
    config = AutoConfig.for_model(kind.model_type, **merged)
    _remove_dropout(config)
    model = AutoModelForCausalLM.from_config(config, **attention).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1 and float(parameter.std(correction=0)) == 0:
                # Norms of ones and biases of zeros would hide an error.
                parameter += 0.2 * torch.randn_like(parameter)
    return model


def _remove_dropout(config: Any) -> None:
    for name, value in list(vars(config).items()):
        if isinstance(value, PreTrainedConfig):
            _remove_dropout(value)
        elif isinstance(value, float) and ("drop" in name or "jitter" in name):
            setattr(config, name, 0.0)


def _with_common(config_class: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `COMMON` that a config knows, and `settings`. A config stores any other field
    as an attribute, which a cache or an engine may believe."""
    names = {*inspect.signature(config_class).parameters, *config_class.attribute_map}
    is_language = "vocab_size" in names
    common = {n: v for n, v in (COMMON if is_language else VISION).items() if n in names}
    merged = {**common, **settings}
    return {name: value for name, value in merged.items() if value is not UNSET}
