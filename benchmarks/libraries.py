"""Our offloaded AdamW and int8 linear layers against the libraries that do the same.

    python benchmarks/libraries.py --device cuda                      # a minute on an H200
    python benchmarks/libraries.py --model tiny --threads 1           # everything once, on a CPU

offload: seconds of one optimizer step over all weights of a model, GPU memory held between steps,
and whether the weights equal those of AdamW on the GPU bit by bit. torchao copies each gradient to
the host in a hook of the backward pass, so its backward pass is timed too, and what was clipped
after it has no effect.

quantization: seconds of a forward pass of the layers over packed tokens, GiB of weights, and the
relative error of the last hidden states against float32 weights. Libraries that cannot be imported
are left out and named.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from importlib.metadata import version
from importlib.util import find_spec
from statistics import median
from typing import Any

import torch
from gpu_machine import about, model_parser, parse_model_args, time_call
from gpu_peaks import free_memory
from shapes import NAMES, random_model
from torch import Tensor, nn
from workload import GIB, SEED, store

from courtside.engines.precision import quantize_linear_layers
from courtside.training.optimizer import OffloadedAdamW

ADAMW = {"lr": 1e-4, "betas": (0.9, 0.999), "weight_decay": 0.0}
OPTIMIZERS = ("adamw", "ours", "torchao", "bitsandbytes_paged")
QUANTIZATIONS = ("bfloat16", "ours_int8", "torchao_int8", "torchao_int4", "bnb_int8", "bnb_nf4")
LIBRARY_ERRORS = (
    AssertionError, AttributeError, ImportError, RuntimeError, TypeError, ValueError,
)  # fmt: skip
LIBRARIES = {"torchao": "torchao", "bnb": "bitsandbytes", "bitsandbytes": "bitsandbytes"}


# ── optimizer-state offload ──────────────────────────────────────────────────────────────────────


def make_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    parameters = list(model.parameters())
    if name == "adamw":
        return torch.optim.AdamW(parameters, fused=True, **ADAMW)
    if name == "ours":
        return OffloadedAdamW([{"params": parameters}], **ADAMW)
    if name == "torchao":
        from torchao.optim import CPUOffloadOptimizer

        return CPUOffloadOptimizer(parameters, torch.optim.AdamW, **ADAMW)
    from bitsandbytes.optim import PagedAdamW32bit

    return PagedAdamW32bit(parameters, **ADAMW)


def measure_optimizer(name: str, args: argparse.Namespace) -> tuple[dict[str, Any], list[Tensor]]:
    """Times of `repeats` steps after one that allocates, and the weights after all of them."""
    device = torch.device(args.device)
    model = random_model(args.optimizer_model or args.model, device, torch.float32)
    optimizer = make_optimizer(name, model)
    backward_seconds, step_seconds = [], []
    for repeat in range(1 + args.repeats):
        generator = torch.Generator(device).manual_seed(SEED + repeat)
        # Gradients reach the optimizer's hooks as they do in a backward pass.
        loss = sum(
            (p * torch.randn(p.shape, generator=generator, device=device)).sum()
            for p in model.parameters()
        )
        backward_seconds.append(time_call(loss.backward, device))
        step_seconds.append(time_call(optimizer.step, device))
        optimizer.zero_grad(set_to_none=True)
    del loss
    free_memory(args.device)
    held = torch.cuda.memory_allocated() / GIB if device.type == "cuda" else None
    weights = [p.detach().cpu() for p in model.parameters()]
    return {
        "optimizer": name,
        "step_seconds": median(step_seconds[1:]),
        "backward_seconds": median(backward_seconds[1:]),
        "held_gib": held,
    }, weights


# ── quantized linear layers ──────────────────────────────────────────────────────────────────────


def quantize(name: str, model: Any) -> Any:
    head = model.get_output_embeddings()
    if name == "ours_int8":
        return quantize_linear_layers(model)
    if name.startswith("torchao"):
        from torchao import quantization as torchao

        on_gpu = model.device.type == "cuda"
        config = {
            "torchao_int8": lambda: torchao.Int8WeightOnlyConfig(set_inductor_config=False),
            "torchao_int4": lambda: torchao.Int4WeightOnlyConfig(
                set_inductor_config=False,
                int4_packing_format="tile_packed_to_4d" if on_gpu else "opaque",
            ),
        }[name]()
        torchao.quantize_(model, config, lambda m, _: type(m) is nn.Linear and m is not head)
        return model
    for parent in list(model.modules()):
        for child_name, child in list(parent.named_children()):
            if type(child) is nn.Linear and child is not head:
                setattr(parent, child_name, make_bitsandbytes_linear(name, child))
    return model


def make_bitsandbytes_linear(name: str, linear: nn.Linear) -> nn.Module:
    """Quantized when it is moved to its device, as transformers' quantization_config does it."""
    import bitsandbytes as bnb

    size = (linear.in_features, linear.out_features)
    bias = linear.bias is not None
    if name == "bnb_int8":
        replacement: Any = bnb.nn.Linear8bitLt(*size, bias=bias, has_fp16_weights=False)
        replacement.weight = bnb.nn.Int8Params(
            linear.weight.data, has_fp16_weights=False, requires_grad=False
        )
    else:
        replacement = bnb.nn.Linear4bit(
            *size, bias=bias, compute_dtype=torch.bfloat16, quant_type="nf4"
        )
        replacement.weight = bnb.nn.Params4bit(
            linear.weight.data, requires_grad=False, quant_type="nf4"
        )
    return replacement.to(linear.weight.device)


def measure_quantization(
    name: str, args: argparse.Namespace, reference_ND: Tensor | None
) -> tuple[dict[str, Any], Tensor]:
    device = torch.device(args.device)
    dtype = torch.float32 if name == "float32" else torch.bfloat16
    model = random_model(args.model, device, dtype)
    if name not in ("float32", "bfloat16"):
        model = quantize(name, model)
    free_memory(args.device)
    generator = torch.Generator().manual_seed(SEED)
    size = (args.rows, args.length)
    ids_BT = torch.randint(0, model.config.vocab_size, size, generator=generator).to(device)

    @torch.no_grad()
    def forward() -> Tensor:
        return model.base_model(input_ids=ids_BT, use_cache=False).last_hidden_state

    hidden_ND = forward()[0].float().cpu()
    times = [time_call(forward, device) for _ in range(args.repeats)]
    result: dict[str, Any] = {"quantization": name, "seconds": median(times), "all_seconds": times}
    if device.type == "cuda":
        result["held_gib"] = torch.cuda.memory_allocated() / GIB
    if reference_ND is not None:
        result["relative_error"] = float((hidden_ND - reference_ND).norm() / reference_ND.norm())
    return result, hidden_ND


def attempts(
    names: tuple[str, ...], args: argparse.Namespace, result: dict[str, Any]
) -> Iterator[str]:
    """The variants whose library is installed; the others are noted in `result`."""
    for name in (name for name in names if name in args.only):
        library = LIBRARIES.get(name.split("_")[0])
        if library is None or find_spec(library) is not None:
            yield name
        else:
            result["left_out"].append(name)


def main() -> None:
    parser = model_parser(__doc__, models=NAMES)
    parser.set_defaults(model="qwen3-8b")
    parser.add_argument("--optimizer-model", choices=NAMES, help="default: the model")
    parser.add_argument("--only", nargs="+", choices=(*OPTIMIZERS, *QUANTIZATIONS),
                        default=(*OPTIMIZERS, *QUANTIZATIONS))  # fmt: skip
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--length", type=int, default=1024)
    args = parse_model_args(parser, "libraries")
    result: dict[str, Any] = {**about("libraries", args), "left_out": [], "failed": {}}
    libraries = {library for library in LIBRARIES.values() if find_spec(library)}
    result["versions"] |= {library: version(library) for library in libraries}

    def attempt(name: str, job: Callable[[], Any]) -> Any:
        """A library that does not run on this machine is named with its error."""
        try:
            return job()
        except LIBRARY_ERRORS as error:
            result["failed"][name] = f"{type(error).__name__}: {error}"[:300]
            print(name, "failed:", result["failed"][name], flush=True)
            return None
        finally:
            free_memory(args.device)

    reference: list[Tensor] | None = None
    result["offload"] = []
    for name in attempts(OPTIMIZERS, args, result):
        measured = attempt(name, lambda name=name: measure_optimizer(name, args))
        if measured is None:
            continue
        row, weights = measured
        reference = reference or weights
        row["equals_adamw"] = all(map(torch.equal, weights, reference))
        result["offload"].append(row)
        print(row, flush=True)
        store(args.out, result)
    del reference

    result["quantization"] = []
    _, reference_ND = measure_quantization("float32", args, None)
    free_memory(args.device)
    for name in attempts(QUANTIZATIONS, args, result):
        measured = attempt(name, lambda name=name: measure_quantization(name, args, reference_ND))
        if measured is None:
            continue
        result["quantization"].append(measured[0])
        print(measured[0], flush=True)
        store(args.out, result)


if __name__ == "__main__":
    main()
