"""Sizes of dense decoder models: parameters and KV cache, from the numbers in a config.

Nothing is loaded: a shape is a preset, or read from a model's config. Mixtures of experts and
models with other layers than attention and a gated MLP are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from courtside.errors import ModelError

ProjectionSizes = dict[str, tuple[int, int]]
"""Name of a linear layer of a decoder layer → its input and output size."""

FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "llama": {},
    "mistral": {},
    "smollm3": {},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"head_norms": True},
    "gemma": {},
    "gemma2": {"num_norms": 4},
    "gemma3_text": {"num_norms": 4, "head_norms": True},
}
"""By `model_type`: what its layers have in addition to llama's."""
EXPERT_FIELDS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Public facts of a model's config."""

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    tied: bool
    """Whether the LM head is the input embedding."""
    num_norms: int = 2
    """RMSNorms of a layer, those of queries and keys not counted."""
    head_norms: bool = False
    """RMSNorms of queries and keys."""
    qkv_bias: bool = False

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def projections(self) -> ProjectionSizes:
        width, inner = self.hidden_size, self.intermediate_size
        return {
            "q_proj": (width, self.query_size),
            "k_proj": (width, self.kv_size),
            "v_proj": (width, self.kv_size),
            "o_proj": (self.query_size, width),
            "gate_proj": (width, inner),
            "up_proj": (width, inner),
            "down_proj": (inner, width),
        }

    @property
    def num_linear_parameters(self) -> int:
        """Weights of all layers' matmuls, without the LM head."""
        return self.num_layers * sum(i * o for i, o in self.projections.values())

    @property
    def num_head_parameters(self) -> int:
        return self.vocab_size * self.hidden_size

    @property
    def num_parameters(self) -> int:
        per_layer = self.num_norms * self.hidden_size
        per_layer += 2 * self.head_dim if self.head_norms else 0
        per_layer += self.query_size + 2 * self.kv_size if self.qkv_bias else 0
        embeddings = (1 if self.tied else 2) * self.num_head_parameters
        vectors = self.num_layers * per_layer + self.hidden_size
        return self.num_linear_parameters + embeddings + vectors

    @property
    def kv_elements_per_token(self) -> int:
        """Keys and values of one token in all layers."""
        return 2 * self.num_layers * self.kv_size

    def num_lora_parameters(
        self, rank: int, targets: tuple[str, ...] | Literal["all-linear"]
    ) -> int:
        """`targets` as in `student.lora.target_modules`."""
        sizes = {**self.projections, "lm_head": (self.hidden_size, self.vocab_size)}
        names = tuple(self.projections) if targets == "all-linear" else targets
        unknown = [name for name in names if name not in sizes]
        if unknown:
            raise ModelError(
                f"student.lora.target_modules names {unknown[0]!r}, whose size is not known here. "
                f"Known: {', '.join(sizes)}, or 'all-linear'"
            )
        copies = {name: 1 if name == "lm_head" else self.num_layers for name in names}
        return sum(copies[name] * rank * sum(sizes[name]) for name in names)


def shape_from_config(name: str, config: Any) -> ModelShape:
    """`config`: what `AutoConfig` returns, or any object with the same attributes."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    kind = str(getattr(text, "model_type", ""))
    if any(getattr(text, field, None) for field in EXPERT_FIELDS) or kind not in FAMILIES:
        raise ModelError(
            f"model {name!r} is of type {kind or 'unknown'!r}, and estimates are for dense "
            f"decoders ({', '.join(FAMILIES)}). Give --shape or --teacher-shape a model of about "
            "its size, e.g. qwen3-8b"
        )
    num_heads = int(text.num_attention_heads)
    return ModelShape(
        name=name,
        num_layers=int(text.num_hidden_layers),
        hidden_size=int(text.hidden_size),
        num_heads=num_heads,
        num_kv_heads=int(getattr(text, "num_key_value_heads", None) or num_heads),
        head_dim=int(getattr(text, "head_dim", None) or text.hidden_size // num_heads),
        intermediate_size=int(text.intermediate_size),
        vocab_size=int(text.vocab_size),
        tied=bool(getattr(text, "tie_word_embeddings", False)),
        **FAMILIES[kind],
    )
