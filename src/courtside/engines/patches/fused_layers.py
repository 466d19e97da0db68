"""RMSNorm, RoPE, SwiGLU, KV-cache append and linear layers with one input as single operations.

They replace the `forward` of a model's modules, each after it was compared with the module on an
example, on the device at hand; a module that computes something else is left alone. On a GPU an
operation is one kernel (`kernels/layers.py`); elsewhere it is the same arithmetic in torch.

Whether a norm may output a lower precision, or two matmuls may be fused into one, depends on the
model's code, not on the names of its layers: a trace of one small forward pass observes every torch
call.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import signature
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from courtside.engines.lm_head import LMHead
from courtside.engines.patches.patch import Patch

ROTARY = "apply_rotary_pos_emb"
"""Name of the RoPE function in the modeling files of transformers."""
KERNEL_DTYPES = frozenset([torch.float16, torch.bfloat16, torch.float32])


def can_run_kernels(x: Tensor) -> bool:
    return x.is_cuda and x.dtype in KERNEL_DTYPES


# ── RMSNorm ──────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class RMSNormMatch:
    """A module that computes a plain RMSNorm."""

    module: Any
    eps: float
    output_dtypes: Mapping[torch.dtype, torch.dtype]
    """Output dtype for each input dtype that was probed."""
    rounds: bool
    """The normalized input is rounded to its dtype before the multiplication by the weight."""
    shift: float = 0.0
    """Added to the weight: 1 in Gemma 1 to 3."""

    def forward(self, x: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
        """`dtype` of the output, where all its consumers would cast it to that."""
        if x.dtype not in self.output_dtypes:
            output: Tensor = type(self.module).forward(self.module, x)
            return output
        return rms_norm(
            x, self.module.weight, eps=self.eps, dtype=dtype or self.output_dtypes[x.dtype],
            rounds=self.rounds, shift=self.shift,
        )  # fmt: skip


def rms_norm(
    x: Tensor,
    weight_D: Tensor,
    *,
    eps: float,
    dtype: torch.dtype,
    rounds: bool,
    shift: float = 0.0,
) -> Tensor:
    if can_run_kernels(x):
        from courtside.engines.kernels import layers_autograd  # needs Triton, absent on CPUs

        return layers_autograd.rms_norm(
            x, weight_D, eps=eps, dtype=dtype, rounds=rounds, shift=shift
        )
    y = x.to(torch.promote_types(x.dtype, torch.float32))
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    if shift:
        weight_D = weight_D.to(torch.promote_types(weight_D.dtype, torch.float32)) + shift
    return ((y.to(x.dtype) if rounds else y) * weight_D).to(dtype)


def takes_one_input(module: Any) -> bool:
    """Whether hidden states are all that a norm takes. Those of recurrent layers take a gate."""
    return len(signature(module.forward).parameters) == 1


def match_rms_norm(module: Any, dtype: torch.dtype | None) -> RMSNormMatch | None:
    """The RMSNorm that the module computes, probed in the dtype of its weight and in `dtype`."""
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if "RMSNorm" not in type(module).__name__ or eps is None:
        return None
    # A buffer may be a dummy that no forward pass multiplies, as in Falcon-Mamba.
    if not isinstance(weight, nn.Parameter) or weight.dim() != 1 or not takes_one_input(module):
        return None
    example = torch.linspace(-2, 3, 3 * len(weight), device=weight.device).view(3, -1)
    inputs = [example.to(d) for d in dict.fromkeys((weight.dtype, dtype or weight.dtype))]
    expected = [module(x) for x in inputs]
    output_dtypes = {x.dtype: y.dtype for x, y in zip(inputs, expected, strict=True)}
    matches = [
        RMSNormMatch(module, float(eps), output_dtypes, rounds, shift)
        for rounds, shift in ((True, 0.0), (False, 0.0), (False, 1.0))
    ]
    errors = [
        max(_relative_error(match.forward(x), y) for x, y in zip(inputs, expected, strict=True))
        for match in matches
    ]
    return matches[errors.index(min(errors))] if min(errors) < 1e-2 else None


# ── RoPE ─────────────────────────────────────────────────────────────────────────────────────────


def apply_rotary(
    query_BHND: Tensor,
    key_BKND: Tensor,
    cos_BND: Tensor,
    sin_BND: Tensor,
    *,
    keeps_dtype: bool = False,
) -> tuple[Tensor, Tensor]:
    """In the promoted dtype; under autocast in that to which attention would cast the result.
    `keeps_dtype`: in that of the queries and keys, where angles may be of a higher precision."""
    if can_run_kernels(query_BHND) and can_run_kernels(cos_BND):
        from courtside.engines.kernels import layers_autograd

        dtype = torch.promote_types(query_BHND.dtype, cos_BND.dtype)
        if torch.is_autocast_enabled(query_BHND.device.type):
            dtype = torch.get_autocast_dtype(query_BHND.device.type)
        elif keeps_dtype:
            dtype = query_BHND.dtype
        return layers_autograd.apply_rotary(query_BHND, key_BKND, cos_BND, sin_BND, dtype)
    cos, sin = cos_BND[:, None], sin_BND[:, None]
    query, key = (_rotate_halves(x, cos, sin) for x in (query_BHND, key_BKND))
    if keeps_dtype:
        return query.to(query_BHND.dtype), key.to(key_BKND.dtype)
    return query, key


def _rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat((-high, low), -1) * sin


def wrap_rotary(original: Callable[..., Any], *, keeps_dtype: bool) -> Callable[..., Any]:
    """`apply_rotary` for the arguments that it supports, `original` for all others."""

    def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Any:
        plain = not args and not kwargs and q.dim() == k.dim() == 4
        per_position = cos.shape[1:] == q.shape[2:] and len(cos) in (1, len(q))
        if not plain or k.shape[2:] != q.shape[2:] or cos.shape != sin.shape or not per_position:
            return original(q, k, cos, sin, *args, **kwargs)
        return apply_rotary(q, k, cos, sin, keeps_dtype=keeps_dtype)

    return rotary


def find_rotary_modules(model: Any) -> dict[ModuleType, bool]:
    """The modeling files of the model's layers whose RoPE computes what `apply_rotary` does, each
    with its `keeps_dtype`."""
    names = dict.fromkeys(type(module).__module__ for module in model.modules())
    modules = [sys.modules[name] for name in names if hasattr(sys.modules[name], ROTARY)]
    matches = {module: _match_rotary(getattr(module, ROTARY), model.device) for module in modules}
    return {module: keeps for module, keeps in matches.items() if keeps is not None}


def _match_rotary(function: Callable[..., Any], device: torch.device) -> bool | None:
    """Whether its results keep the dtype of its inputs (OLMo, Cohere); None: it is another
    function. The angles are in float32, as some models have them beside bfloat16."""
    values = torch.linspace(-3, 4, 2 * 3 * 8, device=device).sin()
    query, key = values.view(2, 3, 1, 8), values.flip(0)[:32].view(2, 2, 1, 8)
    cos, sin = (3 * values)[:16].view(2, 1, 8), (5 * values)[7:23].view(2, 1, 8)
    with torch.autocast(device.type, enabled=False):
        try:
            expected = function(query, key, cos, sin)
            rounded, _ = function(query.bfloat16(), key.bfloat16(), cos, sin)
        except (RuntimeError, TypeError):  # its angles have another shape
            return None
        rotated = apply_rotary(query, key, cos, sin)
    errors = [_relative_error(x, y) for x, y in zip(rotated, expected, strict=True)]
    return bool(rounded.dtype == torch.bfloat16) if max(errors) < 1e-5 else None


# ── SwiGLU ───────────────────────────────────────────────────────────────────────────────────────


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up."""
    if can_run_kernels(gate):
        from courtside.engines.kernels import layers_autograd

        return layers_autograd.swiglu(gate, up)
    return F.silu(gate) * up


def match_swiglu_mlp(module: Any) -> Callable[[Tensor], Tensor] | None:
    """The forward of a module that is a SwiGLU MLP, whatever its linear layers are."""
    activation = getattr(module, "act_fn", getattr(module, "activation_fn", None))
    if activation is None or not hasattr(module, "down_proj"):
        return None
    is_separate = hasattr(module, "gate_proj") and hasattr(module, "up_proj")
    if not is_separate and not hasattr(module, "gate_up_proj"):
        return None

    def forward(x: Tensor) -> Tensor:
        if is_separate:
            gate, up = module.gate_proj(x), module.up_proj(x)
        else:
            gate, up = module.gate_up_proj(x).chunk(2, -1)
        output: Tensor = module.down_proj(swiglu(gate, up))
        return output

    size = getattr(module.down_proj, "out_features", None)
    # Quantized weights are integers, and have no dtype that activations could have.
    weight = next((p for p in module.parameters() if p.is_floating_point()), None)
    device = next((p.device for p in module.parameters()), None)
    if size is None or device is None:
        return None
    dtype = torch.float32 if weight is None else weight.dtype
    # The activation is compared separately, too: with small weights any of them is nearly linear.
    z = torch.linspace(-6, 6, 101, device=device)
    x = torch.linspace(-2, 3, 3 * size, device=device).sin().view(3, size).to(dtype)
    is_silu = _relative_error(activation(z), F.silu(z)) < 1e-4
    return forward if is_silu and _relative_error(forward(x), module(x)) < 1e-2 else None


# ── KV cache ─────────────────────────────────────────────────────────────────────────────────────


def append_kv(
    keys_BKLD: Tensor, values_BKLD: Tensor, key_BK1D: Tensor, value_BK1D: Tensor, length_B: Tensor
) -> None:
    """Store each row's new key and value at position `length_B` of its cache."""
    if can_run_kernels(keys_BKLD):
        from courtside.engines.kernels import layers

        layers.append_kv(keys_BKLD, values_BKLD, key_BK1D, value_BK1D, length_B)
        return
    row_B = torch.arange(len(length_B), device=length_B.device)
    for cache_BKLD, new_BK1D in ((keys_BKLD, key_BK1D), (values_BKLD, value_BK1D)):
        cache_BKLD[row_B, :, length_B] = new_BK1D[:, :, 0].to(cache_BKLD.dtype)


def _relative_error(actual: Tensor, expected: Tensor) -> float:
    """Largest difference over largest magnitude; infinite where shape or dtype differ."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return float("inf")
    scale = expected.double().abs().max().clamp(min=1e-6)
    return float((actual.double() - expected.double()).abs().max() / scale)


# ── linear layers ────────────────────────────────────────────────────────────────────────────────


FUSED_PROJECTIONS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers that may have the same input, in the order of their calls."""


class FusedLinear:
    """Linear layers with the same input: the first computes all, the others take their slice.

    A layer whose input is another tensor than the first one's takes its slice of that one's.
    """

    def __init__(self, compute: Callable[[Tensor], Tensor], sizes: Sequence[int]):
        self.compute, self.sizes = compute, list(sizes)
        self._input: Tensor | None = None
        self._slices: dict[int, Tensor] = {}
        """Outputs that their layers have not taken yet."""

    def forward(self, index: int, x: Tensor) -> Tensor:
        if index and x is self._input and index in self._slices:
            output = self._slices.pop(index)
            if not self._slices:
                self._input = None
            return output
        slices = self.compute(x).split(self.sizes, -1)
        if index == 0:
            self._slices = dict(enumerate(slices[1:], start=1))
            self._input = x if self._slices else None
        result: Tensor = slices[index]
        return result


def linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    return F.linear(x.to(weight_OI.dtype), weight_OI, bias_O)


# ── layers of a model ────────────────────────────────────────────────────────────────────────────


class FusedLayers:
    """`dtype`: that of the matmuls under autocast; None: that of the weights."""

    @torch.no_grad()
    def __init__(self, model: Any, head: LMHead, dtype: torch.dtype | None):
        self.dtype = dtype
        head_modules = set(head.module.modules())
        self.linear = [m for m in model.modules() if type(m) is nn.Linear and m not in head_modules]
        norms = [n for m in model.modules() if (n := match_rms_norm(m, dtype)) is not None]
        self.norms = {norm.module: norm for norm in norms}
        is_16bit = dtype is not None and dtype.itemsize == 2
        with torch.autocast(model.device.type, dtype, enabled=is_16bit):
            self.trace = Trace(model, self.norms, self.linear)
        self.autocast_norms = self.trace.linear_only_norms if dtype is not None else set()
        """Norms that may output `dtype`: every consumer would cast the output to it."""
        self.mlps = {m: f for m in model.modules() if (f := match_swiglu_mlp(m)) is not None}
        self.rotary = find_rotary_modules(model)
        self.patches = tuple(self._make_patches())
        """They nest: student and engine may each patch the same layers, to the same effect."""

    def _make_patches(self) -> Iterator[Patch]:
        for module, norm in self.norms.items():
            dtype = self.dtype if module in self.autocast_norms else None
            yield Patch(module, "forward", partial(norm.forward, dtype=dtype), nests=True)
        for mlp, forward in self.mlps.items():
            yield Patch(mlp, "forward", forward, nests=True)
        for module, keeps_dtype in self.rotary.items():  # files, which models of one kind share
            rotary = wrap_rotary(vars(module)[ROTARY], keeps_dtype=keeps_dtype)
            yield Patch(module, ROTARY, rotary, nests=True)


def find_fused_layers(model: Any, head: LMHead, dtype: torch.dtype | None) -> FusedLayers | None:
    """None where no kernels run; the model's layers are as fast there."""
    if not can_run_kernels(model.get_input_embeddings().weight):
        return None
    return FusedLayers(model, head, dtype)


class Trace:
    """Which tensors flow between a model's norms and linear layers."""

    def __init__(self, model: Any, norms: Iterable[nn.Module], linear: Sequence[nn.Linear]):
        self.inputs: dict[nn.Linear, list[Tensor]] = {module: [] for module in linear}
        """Input of each call of a linear layer."""
        self._nonlinear_norms: set[nn.Module] = set()
        self._by_weight = {id(module.weight): module for module in linear}
        self._norm_outputs: dict[int, tuple[nn.Module, Tensor]] = {}
        """By id; the reference keeps the id from being reused."""
        hooks = [norm.register_forward_hook(self._record_output) for norm in norms]
        vocab_size = model.get_input_embeddings().weight.shape[0]
        ids = torch.arange(4, device=model.device)[None] % vocab_size
        try:
            with torch.no_grad(), _Observer(self._record_call):
                model.base_model(input_ids=ids, use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()
        input_ids = {id(x) for inputs in self.inputs.values() for x in inputs}
        self.linear_only_norms = {
            norm for output_id, (norm, _) in self._norm_outputs.items() if output_id in input_ids
        } - self._nonlinear_norms
        """Norms whose output only linear layers consume."""
        self._norm_outputs.clear()

    def share_input(self, modules: Sequence[nn.Linear]) -> bool:
        """Whether each module is called once, all with the same tensor."""
        inputs = [self.inputs[module] for module in modules]
        return all(len(each) == 1 and each[0] is inputs[0][0] for each in inputs)

    def _record_output(self, module: nn.Module, args: Any, output: Any) -> None:
        self._norm_outputs[id(output)] = module, output

    def _record_call(self, func: Any, args: Sequence[Any]) -> None:
        if func is F.linear and (module := self._by_weight.get(id(args[1]))) is not None:
            self.inputs[module].append(args[0])
            return
        for x in _tensors(args):
            if id(x) in self._norm_outputs:
                self._nonlinear_norms.add(self._norm_outputs[id(x)][0])


class _Observer(TorchFunctionMode):
    def __init__(self, record: Callable[[Any, Sequence[Any]], None]):
        super().__init__()
        self.record = record

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") != "__get__":  # .shape and the like consume nothing
            self.record(func, (*args, *kwargs.values()))
        return func(*args, **kwargs)


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
