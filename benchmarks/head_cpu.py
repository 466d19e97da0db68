"""The output head on a CPU: time over the matmuls alone, and memory above the inputs.

8192 trained tokens, hidden size 576, vocabulary 49152, float32, forward and backward: courtside's
reverse KL over the vocabulary, its loss on sampled tokens, plain logits and TRL's version. Whole
logits would take 1.5 GiB for each of the several tensors involved; a chunked head must not hold
them. Each variant runs in a process of its own and reports its time and how far its resident memory
rose above the inputs.

    python benchmarks/head_cpu.py --python-trl .venv-bench/bin/python
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from opd_step import hardware, run_process
from workload import BENCHMARKS, GIB, SEED, peak_rss, provenance, store

if TYPE_CHECKING:
    from torch import Tensor

HIDDEN = 576
VOCAB_SIZE = 49152
ROWS = 256
"""Of logits at a time, for the matmuls alone."""
ALIKE = ("full", "plain", "trl_full")
"""Variants with the same loss and gradients."""


# ── the variants: forward and backward, gradients left in `.grad`; each returns the loss ─────────


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    hidden_TD: Tensor
    weight_VD: Tensor
    teacher_hidden_TD: Tensor
    teacher_VD: Tensor
    ids_T: Tensor


def gradients(inputs: Inputs) -> float:
    """No head at all: only the gradients that every variant must produce. The floor of memory."""
    loss = inputs.hidden_TD.sum() + inputs.weight_VD.sum()
    loss.backward()
    return float(loss.detach())


def matmuls(inputs: Inputs, *, num_rows: int = ROWS) -> float:
    """The four matmuls of a divergence and nothing else, no loss. The floor of time."""
    import torch

    with torch.no_grad():
        gradient_VD, gradient_TD = (
            torch.zeros_like(tensor) for tensor in (inputs.weight_VD, inputs.hidden_TD)
        )
        buffers = [inputs.hidden_TD.new_empty(num_rows, len(inputs.weight_VD)) for _ in range(2)]
        for start in range(0, len(inputs.hidden_TD), num_rows):
            rows = slice(start, start + num_rows)
            hidden_ND, teacher_ND = inputs.hidden_TD[rows], inputs.teacher_hidden_TD[rows]
            logits_NV, of_teacher_NV = (buffer[: len(hidden_ND)] for buffer in buffers)
            torch.mm(hidden_ND, inputs.weight_VD.T, out=logits_NV)
            torch.mm(teacher_ND, inputs.teacher_VD.T, out=of_teacher_NV)
            torch.mm(logits_NV, inputs.weight_VD, out=gradient_TD[rows])
            gradient_VD.addmm_(logits_NV.T, hidden_ND)
    inputs.hidden_TD.grad, inputs.weight_VD.grad = gradient_TD, gradient_VD
    return 0.0


def sampled(inputs: Inputs) -> float:
    """courtside's chunked head with the loss on sampled tokens."""
    from courtside.recipe.losses import PolicyGradientLoss

    return _courtside(inputs, PolicyGradientLoss(kind="policy_gradient", ratio="none"))


def full(inputs: Inputs) -> float:
    """courtside's chunked head with the reverse KL over the vocabulary."""
    from courtside.recipe.losses import DivergenceLoss

    return _courtside(inputs, DivergenceLoss(kind="divergence", divergence="reverse_kl"))


def _courtside(inputs: Inputs, loss: Any) -> float:
    import torch

    from courtside.engines.lm_head import LMHead
    from courtside.training.head import backward_through_head
    from courtside.training.loss_terms import LossTerm
    from courtside.training.metrics import MetricAccumulator, record_losses
    from courtside.training.token_batch import TokenBatch

    def head(weight_VD: Tensor) -> LMHead:
        module: Any = SimpleNamespace(weight=weight_VD, bias=None)
        return LMHead(module, vocab_size=len(weight_VD), softcap=None, scale=1.0)

    num_tokens = len(inputs.ids_T)
    # Any log-probs will do: they change the numbers of the sampled loss, not its memory.
    logp_T = torch.full((num_tokens,), -math.log(len(inputs.weight_VD)))
    rows = TokenBatch(
        hidden_ND=inputs.hidden_TD,
        ids_N=inputs.ids_T,
        temperature_N=torch.ones(num_tokens),
        sampler_logp_N=logp_T,
        by_student_N=torch.ones(num_tokens, dtype=torch.bool),
        teacher_logp_N=logp_T - 1.0,
        reference_logp_N=torch.full_like(logp_T, math.nan),
        teacher_hidden_ND=inputs.teacher_hidden_TD,
        reference_hidden_ND=None,
        weight_CN={"loss": torch.ones(num_tokens)},
        advantage_CN={},
        teacher_head=head(inputs.teacher_VD),
        reference_head=None,
    )
    component = LossTerm(name="loss", loss=loss, weight={}, denominator=num_tokens, advantage={})
    metrics = MetricAccumulator()
    gradient_TD, _, losses = backward_through_head(
        rows, head(inputs.weight_VD), [component], chunk=None
    )
    record_losses(losses, metrics)
    inputs.hidden_TD.grad = gradient_TD
    return metrics.losses["loss"]


def trl_full(inputs: Inputs) -> float:
    """The peer: TRL's tiled reverse KL."""
    from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

    divergence_T, _ = ChunkedDivergenceFunction.apply(
        inputs.hidden_TD, inputs.weight_VD, None, inputs.teacher_hidden_TD, inputs.teacher_VD, None,
        1.0,
    )  # fmt: skip
    loss = divergence_T.mean()
    loss.backward()
    return float(loss.detach())


def plain(inputs: Inputs) -> float:
    """What a textbook would write. Needs about eight times 1.5 GiB."""
    student_TV = (inputs.hidden_TD @ inputs.weight_VD.T).log_softmax(-1)
    teacher_TV = (inputs.teacher_hidden_TD @ inputs.teacher_VD.T).log_softmax(-1)
    loss = (student_TV.exp() * (student_TV - teacher_TV)).sum(-1).mean()
    loss.backward()
    return float(loss.detach())


RUN: dict[str, Callable[[Inputs], float]] = {
    "gradients": gradients,
    "matmuls": matmuls,
    "sampled": sampled,
    "full": full,
    "plain": plain,
    "trl_full": trl_full,
}


# ── one variant, in its own process ──────────────────────────────────────────────────────────────


def run_variant(args: argparse.Namespace) -> None:
    import torch

    torch.set_num_threads(args.threads)
    generator = torch.Generator().manual_seed(SEED)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*shape, generator=generator) * scale

    weight_VD = normal(VOCAB_SIZE, HIDDEN, scale=0.1)
    inputs = Inputs(
        hidden_TD=normal(args.tokens, HIDDEN).requires_grad_(),
        teacher_hidden_TD=normal(args.tokens, HIDDEN),
        teacher_VD=weight_VD + normal(VOCAB_SIZE, HIDDEN, scale=0.01),
        weight_VD=weight_VD.requires_grad_(),
        ids_T=torch.randint(VOCAB_SIZE, (args.tokens,), generator=generator),
    )
    run = RUN[args.variant]
    # Imports, threads and buffers of a first use are no part of the head: a few tokens go first.
    run(replace(inputs, **{k: getattr(inputs, k)[:8].detach().requires_grad_(k == "hidden_TD")
                           for k in ("hidden_TD", "teacher_hidden_TD", "ids_T")}))  # fmt: skip
    weight_VD.grad = None
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again from here
    before, start = peak_rss(), time.perf_counter()
    loss = run(inputs)
    seconds, after = time.perf_counter() - start, peak_rss()
    gradients = [inputs.hidden_TD.grad, inputs.weight_VD.grad]
    assert all(gradient is not None for gradient in gradients)
    record = {
        "variant": args.variant,
        "rise": after - before,
        "inputs_rss": before,
        "seconds": seconds,
        "loss": loss,
        "gradient_norm": float(torch.stack([g.norm() for g in gradients]).norm()),
        "torch": torch.__version__,
    }
    args.out.write_text(json.dumps(record))


# ── all of them ──────────────────────────────────────────────────────────────────────────────────


def run_all(args: argparse.Namespace) -> None:
    rows = []
    with tempfile.TemporaryDirectory(prefix="head-cpu-") as folder:
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
    problems = differences(rows)
    ratios = ratios_of(rows)
    print(table(rows, ratios))
    result = {
        **provenance("head_cpu"),
        "hardware": hardware(),
        "load_after": os.getloadavg()[0],
        "seed": SEED,
        "num_threads": args.threads,
        "shape": {
            "tokens": args.tokens,
            "hidden": HIDDEN,
            "vocab_size": VOCAB_SIZE,
            "dtype": "float32",
        },
        "rows": rows,
        "ratios": ratios,
        "problems": problems,
    }
    store(args.out, result)
    if problems:
        sys.exit("\n".join(problems))


def differences(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Between variants that compute the same."""
    alike = [row for row in rows if row["variant"] in ALIKE]
    return [
        f"{name} of {row['variant']} is {row[name]:.6g}, of {alike[0]['variant']} "
        f"{alike[0][name]:.6g}: not the same work"
        for row in alike[1:]
        for name in ("loss", "gradient_norm")
        if not math.isclose(row[name], alike[0][name], rel_tol=1e-4)
    ]


def ratios_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """By variant: time over the matmuls alone; time and memory over courtside's `full`."""
    by_name = {row["variant"]: row for row in rows}
    ratios: dict[str, dict[str, float]] = {name: {} for name in by_name}
    for name, row in by_name.items():
        for key, field, base in (
            ("time_over_matmuls", "seconds", "matmuls"),
            ("time_over_full", "seconds", "full"),
            ("memory_over_full", "rise", "full"),
        ):
            if base in by_name:
                ratios[name][key] = row[field] / by_name[base][field]
    return ratios


def table(rows: Sequence[Mapping[str, Any]], ratios: Mapping[str, Mapping[str, float]]) -> str:
    lines = [
        "| head | time, of the matmuls | memory above inputs, GiB | time, memory over `full` |",
        "|---|---|---|---|",
    ]
    for row in rows:
        row_ratios = ratios[row["variant"]]
        over = [f"{row_ratios[key]:.2f}" if key in row_ratios else "–" for key in (
            "time_over_matmuls", "time_over_full", "memory_over_full",
        )]  # fmt: skip
        lines.append(
            f"| {row['variant']} | {over[0]} | {row['rise'] / GIB:.2f} | {over[1]}, {over[2]} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--variants",
        nargs="+",
        choices=tuple(RUN),
        default=list(RUN),
    )
    parser.add_argument("--variant", choices=tuple(RUN), help="run this one here (internal)")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--python-trl", type=Path, default=Path(".venv-bench/bin/python"))
    parser.add_argument("--python-courtside", type=Path, default=Path(".venv/bin/python"))
    parser.add_argument("--out", type=Path, default=BENCHMARKS / "results" / "head_cpu.json")
    args = parser.parse_args()
    if args.variant is None:
        run_all(args)
    else:
        run_variant(args)


if __name__ == "__main__":
    main()
