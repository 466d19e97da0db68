"""Peak memory of the output head: a divergence over all words against a loss on sampled tokens.

8192 trained tokens, hidden size 576, 49152 words, float32, forward and backward. Whole logits would
take 1.5 GiB for each of the several tensors involved; a chunked head must not hold them. Each
variant runs in a process of its own and reports how far its resident memory rose above the inputs.

    python benchmarks/head_memory.py --python-trl .venv-bench/bin/python
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opd_step import GIB, HERE, hardware, run_process
from workload import SEED, peak_rss

if TYPE_CHECKING:
    from torch import Tensor

VARIANTS = ("floor", "sampled", "full", "trl_full", "whole_logits")
HIDDEN = 576
WORDS = 49152


# ── the variants: each returns the scalar loss, a mean over tokens ───────────────────────────────


def floor(hidden_TD: Tensor, weight_VD: Tensor, **_: Any) -> Tensor:
    """No head at all: only the gradients that every variant must produce."""
    return hidden_TD.sum() + weight_VD.sum()


def sampled(hidden_TD: Tensor, weight_VD: Tensor, **inputs: Any) -> Tensor:
    """courtside's chunked head with the loss on sampled tokens."""
    return _courtside("sampled", hidden_TD, weight_VD, **inputs)


def full(hidden_TD: Tensor, weight_VD: Tensor, **inputs: Any) -> Tensor:
    """courtside's chunked head with the reverse KL over all words."""
    return _courtside("full", hidden_TD, weight_VD, **inputs)


def _courtside(kind: str, hidden_TD: Tensor, weight_VD: Tensor, **inputs: Any) -> Tensor:
    raise SystemExit(f"{kind}: courtside.student.head is not wired into this benchmark yet")


def trl_full(
    hidden_TD: Tensor, weight_VD: Tensor, *, teacher_hidden_TD: Tensor, teacher_VD: Tensor, **_: Any
) -> Tensor:
    """The peer: TRL's tiled reverse KL."""
    from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

    divergence_T, _entropy_T = ChunkedDivergenceFunction.apply(
        hidden_TD, weight_VD, None, teacher_hidden_TD, teacher_VD, None, 1.0
    )
    return divergence_T.mean()


def whole_logits(
    hidden_TD: Tensor, weight_VD: Tensor, *, teacher_hidden_TD: Tensor, teacher_VD: Tensor, **_: Any
) -> Tensor:
    """What a textbook would write. Needs about eight times 1.5 GiB."""
    student_TV = (hidden_TD @ weight_VD.T).log_softmax(-1)
    teacher_TV = (teacher_hidden_TD @ teacher_VD.T).log_softmax(-1)
    return (student_TV.exp() * (student_TV - teacher_TV)).sum(-1).mean()


# ── one variant, in its own process ──────────────────────────────────────────────────────────────


def run_variant(args: argparse.Namespace) -> None:
    import torch

    torch.set_num_threads(args.threads)
    generator = torch.Generator().manual_seed(SEED)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*shape, generator=generator) * scale

    hidden_TD = normal(args.tokens, HIDDEN).requires_grad_()
    weight_VD = normal(WORDS, HIDDEN, scale=0.1).requires_grad_()
    inputs = {
        "teacher_hidden_TD": normal(args.tokens, HIDDEN),
        "teacher_VD": weight_VD.detach() + normal(WORDS, HIDDEN, scale=0.01),
        "ids_T": torch.randint(WORDS, (args.tokens,), generator=generator),
    }
    # The threads and buffers that the first matrix product sets up are no part of the head.
    (hidden_TD[:8].detach() @ weight_VD.detach()[:8].T).sum()
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again from here
    before, start = peak_rss(), time.perf_counter()
    loss = globals()[args.variant](hidden_TD, weight_VD, **inputs)
    loss.backward()
    seconds, after = time.perf_counter() - start, peak_rss()
    assert hidden_TD.grad is not None and weight_VD.grad is not None
    record = {
        "variant": args.variant,
        "rise": after - before,
        "inputs_rss": before,
        "seconds": seconds,
        "loss": float(loss.detach()),
        "gradient_norm": float(torch.stack([hidden_TD.grad.norm(), weight_VD.grad.norm()]).norm()),
        "torch": torch.__version__,
    }
    args.out.write_text(json.dumps(record))


# ── all of them ──────────────────────────────────────────────────────────────────────────────────


def run_all(args: argparse.Namespace) -> None:
    rows = []
    with tempfile.TemporaryDirectory(prefix="head-memory-") as folder:
        for variant in args.variants:
            out = Path(folder) / f"{variant}.json"
            python = args.python_trl if variant == "trl_full" else args.python_courtside
            command = [str(python), str(Path(__file__).resolve()), "--variant", variant]
            command += ["--out", str(out), "--tokens", str(args.tokens)]
            command += ["--threads", str(args.threads)]
            run_process(command, threads=args.threads, log=out.with_suffix(".log"))
            rows.append(json.loads(out.read_text()))
            row = rows[-1]
            print(
                f"{variant:>12}: +{row['rise'] / GIB:.2f} GiB, {row['seconds']:.1f} s, "
                f"loss {row['loss']:.5g}, gradient norm {row['gradient_norm']:.5g}",
                flush=True,
            )
    rise = {row["variant"]: row["rise"] for row in rows}
    ratios = {
        f"{one}/{other}": rise[one] / rise[other]
        for one, other in (("full", "sampled"), ("trl_full", "full"), ("whole_logits", "full"))
        if one in rise and other in rise
    }
    for name, ratio in ratios.items():
        print(f"memory of {name}: {ratio:.2f}")
    result = {
        "benchmark": "head_memory",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", *sys.argv]),
        "hardware": hardware(),
        "load_after": os.getloadavg()[0],
        "seed": SEED,
        "num_threads": args.threads,
        "shape": {"tokens": args.tokens, "hidden": HIDDEN, "words": WORDS, "dtype": "float32"},
        "rows": rows,
        "ratios": ratios,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--variants", nargs="+", choices=VARIANTS, default=["floor", "sampled", "full", "trl_full"]
    )
    parser.add_argument("--variant", choices=VARIANTS, help="run this one here (internal)")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--python-trl", type=Path, default=Path(".venv-bench/bin/python"))
    parser.add_argument("--python-courtside", type=Path, default=Path(".venv/bin/python"))
    parser.add_argument("--out", type=Path, default=HERE / "results" / "head_memory_cpu.json")
    args = parser.parse_args()
    if args.variant is None:
        run_all(args)
    else:
        run_variant(args)


if __name__ == "__main__":
    main()
