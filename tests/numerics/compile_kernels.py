"""Compiles the kernels of the fused head, of layers and of decoding for a GPU, without having one.

    python tests/numerics/compile_kernels.py [--all]

What the interpreter lets pass (types, registers) fails here. Prints a line of resources a kernel;
exit status 1 where one spills registers. Decode attention in float32, the rare case, may spill.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from courtside.engines.kernels import decode, layers, layers_autograd, prefix_gather
from courtside.engines.kernels.layers_autograd import BACKWARD_REGISTERS
from courtside.losses.fused.kernels import FORMS, PER_ROW, vocabulary_kernel
from courtside.losses.fused.tail_kernel import tail_kernel
from courtside.losses.fused.topk_kernels import JOINT, select_kernel, support_kernel

HOPPER = GPUTarget("cuda", 90, 32)
FEW = [
    {"form": form.value, "vocab_size": vocab_size}
    for form, vocab_size in zip(FORMS.values(), (151936, 151669, 49152, 50257, 300), strict=True)
]
MANY = [
    *FEW,
    {"form": 0},
    {"form": 0, "teacher": False},
    {"dtype": "fp32"},
    {"form": 3, "dtype": "fp32"},
    {"capped": True},
    {"statistics": False},
    {"gradient": False},
    {"form": 0, "gradient": False, "maxima": True},
    *({"warps": warps, "lanes": lanes} for warps in (4, 16, 32) for lanes in (1, 2)),
]


def resources(
    *,
    form: int = 1,
    dtype: str = "bf16",
    vocab_size: int = 151936,
    warps: int = 8,
    lanes: int = 1,
    teacher: bool = True,
    capped: bool = False,
    statistics: bool = True,
    gradient: bool = True,
    maxima: bool = False,
) -> str:
    constants = {
        "FORM": form,
        "TEACHER": teacher,
        "STATISTICS": statistics,
        "GRADIENT": gradient,
        "GROUP_MAXIMA": maxima,
        "STUDENT_CAPPED": capped,
        "TEACHER_CAPPED": capped,
        "VOCAB_SIZE": vocab_size,
        "LANES": 32 * warps * lanes,
        "WIDTH": 8 if dtype == "bf16" else 4,
    }
    types = {name: "fp32" for name in vocabulary_kernel.arg_names} | {
        name: "*fp32" for name in PER_ROW
    }
    types |= {"ids": "*i64", "student": f"*{dtype}", "teacher": f"*{dtype}", "num_rows": "i32"}
    types |= {"student_stride": "i32", "teacher_stride": "i32"}
    types |= {"maxima": f"*{dtype}", "teacher_maxima": f"*{dtype}"}
    aligned = ("student", "teacher", "student_stride", "teacher_stride")
    return count_resources(vocabulary_kernel, types, constants, aligned, warps)


def select_resources(*, dtype: str = "bf16", vocab_size: int = 151936, warps: int = 8) -> str:
    constants = {"VOCAB_SIZE": vocab_size, "CAPACITY": 256, "LANES": 32 * warps,
                 "WIDTH": 8 if dtype == "bf16" else 4}  # fmt: skip
    types = dict.fromkeys(("stride", "other_stride", "k"), "i32")
    types |= {"values": f"*{dtype}", "other_values": f"*{dtype}", "ids": "*i64", "scratch": "*i64"}
    types |= {"logits": "*fp32", "other_logits": "*fp32", "counts": "*i32"}
    types["maxima"] = f"*{dtype}"
    aligned = tuple(name for name in types if name != "k")
    return count_resources(select_kernel, types, constants, aligned, warps)


def support_resources(*, padded: int = 64, capped: bool = False, warps: int = 1) -> str:
    constants = {"OF": JOINT.value, "TAIL": True, "STUDENT_CAPPED": capped,
                 "TEACHER_CAPPED": capped, "PADDED": padded}  # fmt: skip
    pointers = (
        "student_raw teacher_raw teacher_top_raw teacher_top_student_raw temperatures weights "
        "coefficients outputs support_outputs"
    )
    types = dict.fromkeys(support_kernel.arg_names, "fp32") | dict.fromkeys(
        pointers.split(), "*fp32"
    )
    types |= {"ids": "*i64", "teacher_ids": "*i64", "sampled_ids": "*i64", "values": "*bf16"}
    types |= dict.fromkeys(("num_rows", "stride", "k", "width"), "i32")
    types = {name: kind for name, kind in types.items() if name not in constants}
    return count_resources(support_kernel, types, constants, (), warps)


def tail_resources(*, dtype: str = "bf16", capped: bool = False, warps: int = 8) -> str:
    constants = {"FIRST": 3, "TAIL": 14, "CAPPED": capped, "VOCAB_SIZE": 151669,
                 "LANES": 32 * warps, "WIDTH": 8 if dtype == "bf16" else 4}  # fmt: skip
    types = {"values": f"*{dtype}", "temperatures": "*fp32", "outputs": "*fp32", "stride": "i32",
             "num_rows": "i32", "scale": "fp32", "cap": "fp32"}  # fmt: skip
    return count_resources(tail_kernel, types, constants, ("values", "stride"), warps)


LAYERS: list[tuple[Any, str, str, dict[str, Any], int]] = [
    (layers._rms_norm, "x=fp32 out=bf16 weight=fp32 scales=fp32",
     "outer_stride inner_stride num_inner num_rows",
     {"SIZE": 2048, "PADDED": 2048, "ROWS": 1, "ROUNDS": True, "STORES_SCALES": True}, 8),
    (layers._rms_norm, "x=bf16 out=fp32 weight=fp32 scales=fp32",
     "outer_stride inner_stride num_inner num_rows",
     {"SIZE": 128, "PADDED": 128, "ROWS": 8, "ROUNDS": False, "STORES_SCALES": True}, 4),
    (layers_autograd._rms_norm_backward,
     "gradient=bf16 x=fp32 weight=fp32 scales=fp32 x_gradient=fp32 partials=fp32",
     "outer_stride inner_stride num_inner num_rows",
     {"SIZE": 2048, "PADDED": 2048, "ROWS": 1, "WEIGHT_GRAD": True}, 8),
    (layers_autograd._rms_norm_backward,
     "gradient=bf16 x=fp32 weight=fp32 scales=fp32 x_gradient=fp32 partials=fp32",
     "outer_stride inner_stride num_inner num_rows",
     {"SIZE": 1024, "PADDED": 1024, "ROWS": 2, "WEIGHT_GRAD": True}, 8),
    (layers_autograd._rms_norm_backward,
     "gradient=fp32 x=bf16 weight=fp32 scales=fp32 x_gradient=bf16 partials=fp32",
     "outer_stride inner_stride num_inner num_rows",
     {"SIZE": 128, "PADDED": 128, "ROWS": 16, "WEIGHT_GRAD": True}, 8),
    (layers_autograd._sum_partials, "partials=fp32 out=fp32", "num_partials",
     {"SIZE": 1024, "BLOCK": 32, "PADDED": 512}, 8),
    *(
        (layers._apply_rotary,
         "query=fp32 key=fp32 cos=fp32 sin=fp32 query_out=bf16 key_out=bf16",
         "query_row query_head query_position key_row key_head key_position cos_row cos_position "
         "sin_row sin_position num_positions",
         {"QUERIES": 16, "KEYS": 8, "SIZE": 128, "PADDED": 64, "HEADS": heads, "ROUNDS": False,
          "BACKWARD": backward}, warps)
        for backward in (False, True) for heads, warps in ((1, 1), (8, 4))
    ),
    (layers_autograd._swiglu_backward,
     "gradient=bf16 gate=bf16 up=bf16 gate_gradient=bf16 up_gradient=bf16", "gate_row up_row",
     {"SIZE": 3072, "BLOCK": 1024}, 4),
    *(
        (prefix_gather.sum_rows_kernel,
         f"gradient={kind} output={kind} targets=i32 offsets=i32", "",
         {"WIDTH": 1024, "BLOCK": 1024, "IS_FLOAT64": kind == "fp64"}, 4)
        for kind in ("bf16", "fp32", "fp64")
    ),
    (layers._append_kv, "key=fp32 value=bf16 keys=bf16 values=bf16 lengths=i64",
     "key_row key_head value_row value_head keys_row keys_head values_row values_head capacity",
     {"SIZE": 192, "PADDED": 256, "VALUE_SIZE": 128, "VALUE_PADDED": 128}, 1),
    (layers._swiglu, "gate=bf16 up=bf16 out=bf16", "gate_row up_row",
     {"SIZE": 3072, "BLOCK": 1024}, 4),
    (decode._sum_blocks, "logits=bf16 maxima=fp32 totals=fp32",
     "vocab_size row_stride num_blocks", {"BLOCK": 4096, "SCALE_PER_ROW": False}, 4),
    (decode._sum_blocks, "logits=fp32 maxima=fp32 totals=fp32 scale=fp32",
     "vocab_size row_stride num_blocks", {"BLOCK": 4096, "SCALE_PER_ROW": True}, 4),
    (decode._sample, "logits=bf16 maxima=fp32 totals=fp32 uniforms=fp64 ids=i64 logps=fp32",
     "vocab_size row_stride num_blocks", {"BLOCK": 4096, "BLOCKS": 64}, 4),
]  # fmt: skip
"""Kernel, the numbers behind its pointers, its integers, its constants and warps."""


def attention_resources(
    *,
    dtype: str = "bf16",
    size: int = 128,
    value_size: int | None = None,
    group: int = 2,
    splits: int = 1,
    windowed: bool = False,
    capped: bool = False,
    sinks: bool = False,
) -> str:
    """Of a decode step, as `decode.decode_attention` starts it for heads of this size."""
    value_size = size if value_size is None else value_size
    padded, value_padded = (max(triton.next_power_of_2(n), 16) for n in (size, value_size))
    num_bytes = 2 if dtype == "bf16" else 4
    constants = {
        "KEY_POSITION": size, "VALUE_POSITION": value_size, "SHARES_PREFIXES": True,
        "HAS_WINDOW": windowed, "HAS_SOFTCAP": capped, "HAS_SINKS": sinks,
        "GROUP": group, "SPLITS": splits, "SIZE": size, "PADDED": padded, "VALUE_SIZE": value_size,
        "VALUE_PADDED": value_padded,
        "QUERIES": triton.next_power_of_2(max(group, 16)),
        "POSITIONS": min(decode.BLOCK_POSITIONS, decode.MAX_BLOCK_BYTES // (padded * num_bytes)),
        "EXACT": dtype == "fp32",
    }  # fmt: skip
    states = f"query={dtype} keys={dtype} values={dtype} out={dtype}"
    pointers = f"{states} lengths=i64 prefix_rows=i64 prefix_lengths=i64 sinks=fp32"
    integers = "window key_row key_head value_row value_head"
    return layer_resources(
        decode._attend, f"{pointers} parts=fp32 maxima=fp32 totals=fp32", integers, constants, 4
    )


def merge_resources(*, sinks: bool = False, splits: int = 16) -> str:
    constants = {"HAS_SINKS": sinks, "SPLITS": splits, "SIZE": 96, "PADDED": 128}
    pointers = "parts=fp32 maxima=fp32 totals=fp32 sinks=fp32 out=bf16"
    return layer_resources(decode._merge, pointers, "num_heads", constants, 4)


ATTENTION: list[dict[str, Any]] = [
    {},
    {"windowed": True, "splits": 4},
    {"windowed": True, "sinks": True, "size": 64, "group": 8},  # gpt-oss
    {"windowed": True, "size": 256, "group": 4},  # Gemma 3
    {"capped": True, "windowed": True, "size": 256, "splits": 16},  # Gemma 2
    {"size": 192, "value_size": 128, "group": 1},  # multi-head latent attention
    {"dtype": "fp32", "size": 80, "group": 1, "splits": 2},
]


def layer_resources(
    kernel: Any, pointers: str, integers: str, constants: dict[str, Any], warps: int
) -> str:
    types = dict.fromkeys(kernel.arg_names, "fp32") | dict.fromkeys(integers.split(), "i32")
    types |= {name: f"*{kind}" for name, kind in (p.split("=") for p in pointers.split())}
    types = {name: kind for name, kind in types.items() if name not in constants}
    limited = kernel is layers_autograd._rms_norm_backward
    aligned = tuple(n for n in types if types[n] != "fp32" and not n.startswith("num_"))
    return count_resources(
        kernel, types, constants, aligned, warps, BACKWARD_REGISTERS if limited else None
    )


def count_resources(
    kernel: Any,
    types: dict[str, str],
    constants: dict[str, Any],
    aligned: tuple[str, ...],
    warps: int,
    registers: int | None = None,
) -> str:
    names = kernel.arg_names
    source = ASTSource(
        fn=kernel,
        signature=types | dict.fromkeys(constants, "constexpr"),
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    options = {"num_warps": warps, "maxnreg": registers}
    compiled = triton.compile(source, target=HOPPER, options=options)
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder) / "kernel.cubin"
        binary.write_bytes(compiled.asm["cubin"])
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        command = [str(tool), "-res-usage", str(binary)]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return next(line.strip() for line in report.splitlines() if "REG:" in line)


def main() -> None:
    spills = 0
    options: dict[str, Any]
    for options in MANY if "--all" in sys.argv else FEW:
        usage = resources(**options)
        spills += "STACK:0" not in usage or "LOCAL:0" not in usage
        print(f"{options}: {usage}")
    for options in ({}, {"dtype": "fp32", "vocab_size": 151669}):
        usage = select_resources(**options)
        spills += "STACK:0" not in usage or "LOCAL:0" not in usage
        print(f"select_kernel, {options}: {usage}")
    for options in ({}, {"padded": 256, "capped": True, "warps": 4}):
        usage = support_resources(**options)
        spills += "STACK:0" not in usage or "LOCAL:0" not in usage
        print(f"support_kernel, {options}: {usage}")
    for options in ({}, {"dtype": "fp32", "capped": True, "warps": 4}):
        usage = tail_resources(**options)
        spills += "STACK:0" not in usage or "LOCAL:0" not in usage
        print(f"tail_kernel, {options}: {usage}")
    for options in ATTENTION:
        usage = attention_resources(**options)
        spills += options.get("dtype") != "fp32" and "STACK:0" not in usage
        print(f"_attend, {options}: {usage}")
    for options in ({}, {"sinks": True, "splits": 2}):
        usage = merge_resources(**options)
        spills += "STACK:0" not in usage or "LOCAL:0" not in usage
        print(f"_merge, {options}: {usage}")
    for kernel, pointers, integers, constants, warps in LAYERS:
        usage = layer_resources(kernel, pointers, integers, constants, warps)
        spills += "STACK:0" not in usage or "LOCAL:0" not in usage
        print(f"{kernel.__name__}, {pointers}: {usage}")
    sys.exit(1 if spills else 0)


if __name__ == "__main__":
    main()
