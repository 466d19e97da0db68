"""The student's model: loading, LoRA adapter, and other weights swapped in for a teacher."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from courtside.engines.compatibility import (
    disable_activation_checkpointing,
    enable_activation_checkpointing,
    uses_activation_checkpointing,
)
from courtside.engines.lm_head import LMHead
from courtside.engines.loading import load_model, silence_tied_weight_warnings
from courtside.engines.patches.experts import apply_autocast_to_experts
from courtside.engines.precision import average_in_place, resolve_dtype
from courtside.errors import ModelError
from courtside.recipe.student import LoraConfig, StudentConfig
from courtside.seeds import seed_for
from courtside.training.adapter_targets import check_targets, find_bare_layers
from courtside.training.shards import local_rows


def pick_device(config: StudentConfig) -> torch.device:
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ModelError("student.device = 'cuda', but no GPU is visible. Use device = 'auto'")
    return torch.device(config.device)


class StudentWeights:
    """The causal LM (`model`), with a LoRA adapter in its layers or all its weights trained."""

    def __init__(self, config: StudentConfig, *, seed: int, dequantizes: bool = False):
        """`dequantizes`: a base in 4 bits is replaced by the weights that it multiplies with."""
        device = pick_device(config)
        dtype, average = resolve_dtype(config.dtype, device), config.average_with
        in_4_bits = config.lora is not None and config.lora.in_4_bits
        # Trained weights stay float32: steps of 1e-5 vanish in bfloat16's three digits. An
        # adapter's base is frozen, so it may have the dtype of the matmuls.
        self.model: Any = load_model(
            config.model,
            dtype=dtype if config.lora else torch.float32,
            device=device,
            trust_remote_code=config.trust_remote_code,
            adapter=config.adapter,
            keep_layers=config.keep_layers,
            average_with=None if average is None else (average.model, average.weight),
            in_4_bits=in_4_bits,
        )
        if in_4_bits and dequantizes:
            self.model.dequantize(dtype)
        _keep_differentiable(self.model)
        self.autocast = torch.bfloat16 if dtype == torch.bfloat16 else None
        if self.autocast is not None:
            apply_autocast_to_experts(self.model)
        self.adapter: Any = None
        if config.lora:
            self.adapter = _with_adapter(self.model, config.lora, seed)
            self.model.eval()  # new layers are in train mode: dropout would act on rollouts
        if config.gradient_checkpointing:
            if not self.model.supports_gradient_checkpointing:
                raise ModelError(
                    f"student.gradient_checkpointing: transformers has none for "
                    f"{type(self.model).__name__}. Set it to false and lower "
                    "train.micro_batch_tokens"
                )
            enable_activation_checkpointing(self.model)
        self.device = device

    @property
    def uses_gradient_checkpointing(self) -> bool:
        return uses_activation_checkpointing(self.model)

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    @contextmanager
    def without_adapter(self) -> Iterator[None]:
        """The model as it was before training, for free."""
        assert self.adapter is not None
        with self.adapter.disable_adapter():
            yield

    @contextmanager
    def swap_in(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """`tensors` in place of the trained weights: pointers are exchanged, nothing is copied."""
        before = {name: p.data for name, p in self.trained.items()}
        for name, parameter in self.trained.items():
            parameter.data = tensors[name]
        try:
            yield
        finally:
            for name, parameter in self.trained.items():
                parameter.data = before[name]

    # ── whole on this process; `sharding.ShardedWeights` overrides these ────────────────────────

    def gather_head(self) -> AbstractContextManager[None]:
        """Around the forward and backward passes of a step."""
        return nullcontext()

    def gather_layers(self) -> AbstractContextManager[None]:
        """Around what looks at the parameters of layers."""
        return nullcontext()

    def start_pass(self, head: LMHead, *, is_last: bool) -> None:
        """Before each forward and backward pass of a step."""

    def publish(self) -> None:
        """Give trained weights to the model that samples, where it is another one."""

    def copy(self) -> Any:
        """A separate frozen model with the current weights."""
        model = copy.deepcopy(self.model).eval()
        disable_activation_checkpointing(model)
        return model.requires_grad_(False)

    def copy_trained(self) -> tuple[Any, dict[str, Tensor]]:
        """`copy`, and those of its weights that are trained here, for a moving average."""
        model = self.copy()
        return model, {n: p.data for n, p in model.named_parameters() if n in self.trained}


def save_all_weights(weights: StudentWeights, folder: Path) -> tuple[int, ...]:
    """As safetensors that other programs load, in the dtype of the matmuls. Returns their
    fingerprint."""
    dtype = weights.autocast or torch.float32
    tensors = {
        name: tensor.detach().to("cpu", dtype if tensor.is_floating_point() else None)
        for name, tensor in weights.model.state_dict().items()
    }
    weights.model.save_pretrained(folder, state_dict=tensors)
    return fingerprint_weights(tensors.values())


def fingerprint_weights(tensors: Iterable[Tensor]) -> tuple[int, ...]:
    """Sums over the bits of weights, which those of another step do not have."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tuple(
        int(tensor.detach().contiguous().view(bits[tensor.element_size()]).sum(dtype=torch.int64))
        for tensor in tensors
    )


class MovingAverage:
    """θ̄ ← d·θ̄ + (1 − d)·θ over the trained weights, starting from where they start. Of shards each
    rank averages its own rows."""

    def __init__(
        self,
        decay: float,
        trained: Mapping[str, nn.Parameter],
        shadow: dict[str, Tensor],
        *,
        publish: Callable[[], None] | None = None,
    ):
        """`publish` brings a changed average to the model that scores, where that is another one;
        all ranks call it together."""
        assert trained.keys() == shadow.keys()
        self.decay, self.trained, self.shadow = decay, trained, shadow
        self._publish = publish

    @torch.no_grad()
    def update(self) -> None:
        for name, average in self.shadow.items():
            trained = local_rows(self.trained[name].detach())
            average_in_place(local_rows(average), trained, 1 - self.decay)
        self.publish()

    @torch.no_grad()
    def publish(self) -> None:
        if self._publish is not None:
            self._publish()


def _keep_differentiable(model: Any) -> None:
    """On CPUs with avx512_bf16, bitsandbytes packs 4-bit weights for inference when a layer first
    runs without a gradient, and the packed ones have no backward pass."""
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def _with_adapter(model: Any, lora: LoraConfig, seed: int) -> Any:
    from peft import LoraConfig, get_peft_model

    head = model.get_output_embeddings()
    targets: Any = (
        lora.target_modules if lora.target_modules == "all-linear" else list(lora.target_modules)
    )
    bare_layers = find_bare_layers(model)
    settings = LoraConfig(
        task_type="CAUSAL_LM",
        r=lora.rank,
        lora_alpha=lora.alpha if lora.alpha is not None else 2 * lora.rank,
        lora_dropout=lora.dropout,
        target_modules=targets,
        exclude_modules=bare_layers if bare_layers and targets == "all-linear" else None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed_for(seed, "lora"))
        try:
            adapted = silence_tied_weight_warnings(get_peft_model, model, settings)
        except ValueError as error:
            raise ModelError(
                f"student.lora.target_modules = {lora.target_modules!r}: {error}. Use "
                "'all-linear', or names of "
                "linear layers of this model"
            ) from error
    check_targets(adapted.base_model.model, bare_layers, lora.target_modules)
    _check_adapter(model, lora)
    if lora.dropout and model.get_output_embeddings() is not head:
        raise ModelError(
            f"student.lora.dropout = {lora.dropout}: the output head is among the targets, and its "
            "adapter is multiplied in chunks, which have no dropout. Set dropout = 0, or leave the "
            "head out"
        )
    return adapted


@torch.no_grad()
def _check_adapter(model: Any, lora: LoraConfig) -> None:
    """PEFT puts adapters in all kinds of linear layers, also in those that compute more, and where
    a model multiplies the bare weight in training alone: such an adapter would act on samples only.
    """
    advice = "Name linear layers of its attention and MLP, such as ['q_proj', 'v_proj']"
    ids = torch.arange(4, device=model.device)[None]
    adapted = {name: m for name, m in model.named_modules() if hasattr(m, "lora_A")}
    called: dict[bool, set[str]] = {}
    training = model.training
    for mode in (False, True):
        called[mode] = set()
        hooks = [
            module.register_forward_hook(lambda *_, mode=mode, name=name: called[mode].add(name))
            for name, module in adapted.items()
        ]
        try:
            model.train(mode)(input_ids=ids, use_cache=False)
        except (AttributeError, RuntimeError, TypeError, ValueError) as error:
            raise ModelError(
                f"student.lora.target_modules = {lora.target_modules!r}: with these adapters "
                f"{type(model).__name__} does not run ({type(error).__name__}: {error}). {advice}"
            ) from error
        finally:
            model.train(training)
            for hook in hooks:
                hook.remove()
    # Routers send a token to other experts in training.
    missed = sorted(name for name in called[False] - called[True] if "expert" not in name)
    if missed:
        raise ModelError(
            f"student.lora.target_modules = {lora.target_modules!r}: in training "
            f"{type(model).__name__} multiplies the bare weight of {missed[0]}, so its adapter "
            f"would act on samples and never train. {advice}"
        )
