"""What torch.compile would bring to the update: a forward and backward pass, compiled or not.

One packed pass of 32 sequences × 512 tokens through a model's layers (no head: it is ours in every
case), bfloat16 autocast over float32 weights on a GPU, all weights trained:

    own        transformers' layers as they are
    few        with norms, rotary embedding and gates in one launch each: what the student uses
    layers     each decoder layer of `own` by torch.compile, dynamic, because lengths differ from
               pass to pass; then passes of two further lengths, which may compile again
    parts      only MLPs and norms by torch.compile; measured where `layers` cannot be compiled
    liger      `own` with Liger's RMSNorm, RoPE and SwiGLU; last, because it patches for good

Of each: seconds of the first pass, of later ones (the median), and the peak of memory. Break-even
is how many passes it takes until the time of compiling is won back. Compiled code is not taken from
disk. Hidden states and the first layer's gradients are compared with those of `own`.

    python benchmarks/compiled.py --device cuda                                # 90 seconds
    python benchmarks/compiled.py --sequences 3 --length 40 --threads 1        # tiny, on a CPU
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from statistics import median
from typing import Any

import torch
import torch._dynamo
import torch._inductor.config
import torch._inductor.exc
from gpu_machine import about, measure_call, model_parser, parse_model_args
from gpu_peaks import free_memory
from shapes import NAMES, random_engine
from torch import Tensor
from torch._dynamo.utils import counters
from workload import SEED, store

from courtside.engines.forward.forward import ForwardPasses
from courtside.engines.patches.fused_layers import FusedLayers
from courtside.engines.patches.patch import Patch, apply_patches

VARIANTS = ("own", "few", "layers", "parts", "liger")
COMPILER_ERRORS = (
    torch._dynamo.exc.TorchDynamoException,
    torch._dynamo.exc.FailOnRecompileLimitHit,
    torch._inductor.exc.OperatorIssue,
    torch._inductor.exc.CppCompileError,
    torch._inductor.exc.InvalidCxxCompiler,
)
FAR = {"cpu": 1e-4, "cuda": 0.05}
"""Relative distance of a gradient from that of `own` at which it is another job."""
Sequences = list[list[int]]


class Job:
    def __init__(self, args: argparse.Namespace):
        self.args, self.size = args, (args.sequences, args.length)
        self.engine = random_engine(args)
        self.model = self.engine.model
        passes = self.engine.passes
        if passes.padding_reason is not None:
            raise SystemExit(f"{args.model} is not packed: {passes.padding_reason}")
        with self.engine.autocast_context():
            parts = FusedLayers(self.model, self.engine.head, self.engine.autocast)
        self.plain: ForwardPasses = replace(passes, fused_layers=None)
        self.few: ForwardPasses = replace(passes, fused_layers=parts)
        self.model.train()
        self.reference: dict[str, Tensor] | None = None

    def sequences(self, count: int, length: int) -> Sequences:
        generator = torch.Generator().manual_seed(SEED)
        vocab_size = self.model.config.vocab_size
        sequences: Sequences = torch.randint(
            1, vocab_size, (count, length), generator=generator
        ).tolist()
        return sequences

    def one_pass(self, passes: ForwardPasses, sequences: Sequences) -> Tensor:
        """Adds to the gradients; the last hidden states."""
        hidden_ND, _ = passes.forward(sequences)
        gradient_ND = torch.linspace(-1, 1, hidden_ND.numel(), device=hidden_ND.device).sin()
        hidden_ND.backward(gradient_ND.view_as(hidden_ND).to(hidden_ND.dtype))
        return hidden_ND.detach()

    # ── variants ─────────────────────────────────────────────────────────────────────────────────

    @contextmanager
    def variant(self, name: str) -> Iterator[ForwardPasses]:
        """A fresh start: no gradients, nothing compiled, weights rounded in the first pass only."""
        self.model.zero_grad(set_to_none=True)
        torch._dynamo.reset()
        counters.clear()
        free_memory(self.engine.device.type)
        if name == "liger":
            from liger_kernel.transformers import apply_liger_kernel_to_qwen3

            apply_liger_kernel_to_qwen3(
                fused_linear_cross_entropy=False, cross_entropy=False, model=self.model
            )
        modules = {"layers": self._layers, "parts": self._parts}.get(name, list)()
        compiled = [
            Patch(m, "forward", torch.compile(m.forward, dynamic=True, backend=self.args.backend))
            for m in modules
        ]
        passes = self.few if name == "few" else self.plain
        with apply_patches(compiled), self.engine.autocast_context(), passes.patch_model():
            yield passes

    def _layers(self) -> list[Any]:
        return list(self.model.base_model.layers)

    def _parts(self) -> list[Any]:
        names = ("mlp", "input_layernorm", "post_attention_layernorm")
        return [getattr(layer, name) for layer in self._layers() for name in names]

    def measure(self, name: str) -> dict[str, Any]:
        row: dict[str, Any] = {"variant": name}
        try:
            with self.variant(name) as passes:
                row |= self._timed(passes, self.sequences(*self.size))
                row["differs"] = self._differs(passes)
                if name == "layers":
                    row["further"] = self._further(passes)
        except COMPILER_ERRORS as error:
            row["failed"] = f"{type(error).__name__}: {str(error).strip()[:2000]}"
        row["graph_breaks"] = {why[:300]: n for why, n in counters["graph_break"].items()}
        return row

    def _timed(self, passes: ForwardPasses, sequences: Sequences) -> dict[str, Any]:
        device = self.engine.device
        measured = [
            measure_call(lambda: self.one_pass(passes, sequences), device)[1]
            for _ in range(1 + self.args.repeats)
        ]
        times = [row["seconds"] for row in measured]
        peaks = [row["peak_gib"] for row in measured[1:] if "peak_gib" in row]
        return {
            "sequences": len(sequences),
            "tokens": sum(map(len, sequences)),
            "first_seconds": times[0],
            "seconds": median(times[1:]),
            "all_seconds": times,
            "peak_gib": max(peaks, default=None),
            "graphs_compiled": counters["stats"]["unique_graphs"],
        }

    def _further(self, passes: ForwardPasses) -> list[dict[str, Any]]:
        """Other lengths, as many sequences; then other lengths and half as many sequences."""
        count, length = self.size
        shapes = ((count, length - length // 16), (max(1, count // 2), 2 * length - length // 8))
        rows = []
        for shape in shapes:
            before = counters["stats"]["unique_graphs"]
            row = self._timed(passes, self.sequences(*shape))
            rows.append({**row, "graphs_compiled": row["graphs_compiled"] - before})
        return rows

    def _differs(self, passes: ForwardPasses) -> dict[str, float]:
        """From the first variant, `own` if nothing else is asked for, in relative norms."""
        self.model.zero_grad(set_to_none=True)
        hidden_ND = self.one_pass(passes, self.sequences(*self.size))
        parameters = self.model.base_model.layers[0].parameters()
        gradient = torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])
        values = {"hidden": hidden_ND.float().cpu(), "gradient": gradient.float().cpu()}
        self.reference = reference = self.reference or values
        return {
            n: float((x - reference[n]).norm() / reference[n].norm()) for n, x in values.items()
        }


# ── all ──────────────────────────────────────────────────────────────────────────────────────────


def with_break_even(rows: Sequence[dict[str, Any]]) -> None:
    """Adds to compiled rows the passes after which they are ahead; None: never."""
    done = {row["variant"]: row for row in rows if "seconds" in row}
    for row in (done[name] for name in ("layers", "parts") if name in done):
        compiling = row["first_seconds"] - row["seconds"]
        saved = {o: done[o]["seconds"] - row["seconds"] for o in ("own", "few") if o in done}
        row["break_even_passes"] = {o: compiling / s if s > 0 else None for o, s in saved.items()}


def table(rows: Sequence[dict[str, Any]]) -> str:
    lines = ["| variant | tokens | first pass, s | later, s | of own | peak, GiB | graphs |"]
    lines.append("|---|---|---|---|---|---|---|")
    base_seconds = next((row["seconds"] for row in rows if row["variant"] == "own"), None)
    for row in rows:
        for r in [row] * ("seconds" in row) + row.get("further", []):
            same = base_seconds is not None and r is row
            cells = [row["variant"], str(r["tokens"]), f"{r['first_seconds']:.2f}",
                     f"{r['seconds']:.4f}", f"{r['seconds'] / base_seconds:.2f}" if same else "–",
                     "–" if r["peak_gib"] is None else f"{r['peak_gib']:.1f}",
                     str(r["graphs_compiled"])]  # fmt: skip
            lines.append(f"| {' | '.join(cells)} |")
        for other, passes in row.get("break_even_passes", {}).items():
            ahead = "never" if passes is None else f"after {passes:,.0f} passes"
            lines.append(f"{row['variant']}: ahead of {other} {ahead}.")
        if "failed" in row:
            lines.append(f"{row['variant']}: NOT COMPILED: {row['failed'].splitlines()[0]}")
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    parser = model_parser(__doc__, models=NAMES)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, help="parts only where needed")
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--length", type=int, default=512, help="tokens of each sequence")
    parser.add_argument("--backend", choices=("inductor", "aot_eager"), default="inductor")
    parser.add_argument("--seconds", type=float, default=90, help="after which none is begun")
    parser.set_defaults(model=None, repeats=5)
    args = parse_model_args(parser, "compiled")
    args.model = args.model or ("qwen3-0.6b" if args.device == "cuda" else "tiny")
    return args


def main() -> None:
    args = parse()
    began = time.perf_counter()
    # As in a new process on a new machine; and rather an error than layers that quietly stay eager.
    torch._inductor.config.force_disable_caches = True
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    rows: list[dict[str, Any]] = []
    result = {**about("compiled", args), "rows": rows}
    job = Job(args)
    has_liger = find_spec("liger_kernel") is not None and args.device == "cuda"
    waiting = list(args.variants or (*VARIANTS[:3], *(["liger"] if has_liger else [])))
    while waiting and time.perf_counter() - began < args.seconds:
        rows.append(job.measure(waiting.pop(0)))
        if "failed" in rows[-1] and rows[-1]["variant"] == "layers" and "parts" not in waiting:
            waiting.append("parts")
        with_break_even(rows)
        result |= {"not_begun": list(waiting), "wall_seconds": time.perf_counter() - began}
        store(args.out, result)  # what there is, if time runs out
    print(table(rows))
    skipped = f"; out of time for {', '.join(waiting)}" if waiting else ""
    print(f"{args.out}, {result['wall_seconds']:.0f} s in all{skipped}")
    limit = FAR[args.device]
    far = [row["variant"] for row in rows if not row.get("differs", {}).get("gradient", 0) <= limit]
    if far:
        raise SystemExit(f"gradients are not those of transformers' own layers: {far}")


if __name__ == "__main__":
    main()
