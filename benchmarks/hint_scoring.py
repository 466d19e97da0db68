"""Scoring n hinted turns of one trajectory: one pass over its keys and values against n passes.

The trunk is a trajectory of assistant turns and environment turns of one length each. A hint and
its turn (a branch) leave it right above a turn; the places are spread evenly, in an order in which
n hints are the first n of any larger number. Timed, on random weights of a given shape:

    training   the student's forward and backward pass on the trunk, all weights or LoRA trained
    branches   all n branches, with the log-probs of their turns, on keys and values that exist
    before     the trunk and all n branches, by the engine: a pass of the teacher's own
    separate   each branch as a sequence of its own

With a teacher that is the live student, `branches` is all that hints cost: the update's pass keeps
its keys and values, and hints are read over them inside it (`student/live_hints.py`). With other
weights, or where hints are dropped by their shift, it is `before`. Log-probs of all three ways are
compared before anything is timed.

    python benchmarks/hint_scoring.py                                     # on a CPU
    python benchmarks/hint_scoring.py --device cuda --model qwen3-0.6b    # 16384 ids, bfloat16
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from gpu_machine import GIB, HERE, header
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.cache_utils import Cache
from workload import SEED

from courtside.engines.base import BranchRequest, ScoreRequest
from courtside.engines.branches import score_branches_separately
from courtside.engines.kept import keeping, kept_branch_hidden
from courtside.engines.prefixes import Place
from courtside.engines.scoring import scores_of
from courtside.engines.transformers import TransformersEngine
from courtside.losses.fused import divergence_head
from courtside.losses.fused_records import Asked, HeadGradient, Projection
from courtside.types import Branch


def shape(kind: str) -> Any:
    """A model of a known shape; its weights do not matter to the clock."""
    longest = {"max_position_embeddings": 131072, "tie_word_embeddings": True}
    if kind == "smollm2-135m":
        return LlamaForCausalLM(LlamaConfig(
            vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
            num_attention_heads=9, num_key_value_heads=3, **longest))  # fmt: skip
    if kind == "llama-1b":
        return LlamaForCausalLM(LlamaConfig(
            vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16,
            num_attention_heads=32, num_key_value_heads=8, **longest))  # fmt: skip
    if kind == "tiny":
        return Qwen3ForCausalLM(Qwen3Config(
            vocab_size=512, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, head_dim=16, **longest))  # fmt: skip
    assert kind == "qwen3-0.6b"
    return Qwen3ForCausalLM(Qwen3Config(
        vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28,
        num_attention_heads=16, num_key_value_heads=8, head_dim=128, **longest))  # fmt: skip


class Job:
    """The model, the trunk and the branches, and the four things that are timed."""

    def __init__(self, args: argparse.Namespace):
        self.device = torch.device(args.device)
        torch.manual_seed(SEED)
        with self.device:  # drawn where they stay: a CPU takes its time over half a billion numbers
            model = shape(args.model)
        if args.lora:
            from peft import LoraConfig, get_peft_model

            settings = LoraConfig(task_type="CAUSAL_LM", r=args.lora, target_modules="all-linear")
            # As the student does: only weights that are stepped stay in float32.
            model = model.to(torch.bfloat16) if self.device.type == "cuda" else model
            get_peft_model(model, settings)
        self.engine = TransformersEngine(
            model.eval(),
            SimpleNamespace(eos_token_id=0),
            name=args.model,
            autocast=torch.bfloat16 if self.device.type == "cuda" else None,
        )
        generator = torch.Generator().manual_seed(SEED)
        num_words = model.config.vocab_size
        ids = torch.randint(1, num_words, (args.tokens,), generator=generator).tolist()
        turns = range(args.turn_tokens, args.tokens - args.turn_tokens + 1, 2 * args.turn_tokens)
        if len(turns) < max(args.hints):
            raise SystemExit(f"--tokens {args.tokens}: only {len(turns)} turns for the hints")
        branches = []
        for number in range(max(args.hints)):
            splice = turns[int(_spread(number) * len(turns))]
            hint = torch.randint(1, num_words, (args.hint_tokens,), generator=generator).tolist()
            turn = ids[splice : splice + args.turn_tokens]
            scored = (False,) * len(hint) + (True,) * len(turn)
            branches.append(Branch(trajectory="t", turn=1, splice=splice,
                                   token_ids=(*hint, *turn), scored=scored))  # fmt: skip
        self.request = BranchRequest(token_ids=tuple(ids), branches=tuple(branches))
        self.ids_1L = torch.tensor([ids], device=self.device)
        chosen = [t + i for t in turns for i in range(args.turn_tokens)]
        self.chosen_N = torch.tensor(chosen, device=self.device)

    def first(self, num_hints: int) -> tuple[Branch, ...]:
        return self.request.branches[:num_hints]

    def training(self) -> None:
        model = self.engine.model
        model.train()
        with self.engine.casting(), self.engine.passes.attention():
            hidden_LD, _ = self.engine.passes.hidden([self.request.token_ids])
            hidden_ND = hidden_LD[self.chosen_N - 1]
            hidden_ND.backward(self._through_head(hidden_ND.detach()))
        model.zero_grad(set_to_none=True)
        model.eval()

    def _through_head(self, hidden_ND: Tensor) -> Tensor:
        """A loss on the sampled tokens of all turns, as the student's step has it."""
        weight_VD, _ = self.engine.head.parameters()
        into = None
        if weight_VD.requires_grad:
            into = HeadGradient(weight_VD=torch.zeros_like(weight_VD, dtype=torch.float32))
        dtype = self.engine.autocast or weight_VD.dtype
        ones_N = torch.ones(len(hidden_ND), device=self.device)
        found = divergence_head(
            Projection(hidden_ND=hidden_ND, weight_VD=weight_VD.detach().to(dtype)),
            None,
            Asked(ids_N=self.ids_1L[0, self.chosen_N], temperature_N=ones_N, sampled=-ones_N),
            into=into,
        )
        return found.hidden_gradient_ND

    @torch.no_grad()
    def trunk(self) -> Cache:
        """The keys and values that a training pass would leave behind."""
        kept = keeping()
        with self.engine.casting(), self.engine.passes.attention():
            self.engine.passes.hidden([self.request.token_ids], kept=kept)
        return kept

    @torch.no_grad()
    def branches(self, kept: Cache, num_hints: int) -> list[Tensor]:
        its = self.first(num_hints)
        with self.engine.casting(), self.engine.passes.attention():
            found = kept_branch_hidden(
                self.engine.model, kept, [(Place(start=0), branch) for branch in its],
                max_tokens=self.engine.score_batch_tokens,
            )  # fmt: skip
            requests = [ScoreRequest(token_ids=b.token_ids, scored=b.scored) for b in its]
            starts = [Place(start=n) for n in [0, *accumulate(map(len, found))][:-1]]
            scores = scores_of(
                self.engine.head, torch.cat(found), starts, requests, hidden=True, top_k=0
            )
        return [score.logp_T for score in scores]

    def before(self, num_hints: int) -> list[Tensor]:
        request = BranchRequest(token_ids=self.request.token_ids, branches=self.first(num_hints))
        (scores,) = self.engine.score_branches([request], hidden=True)
        assert scores.note is None
        return [score.logp_T for score in scores.branches]

    def separate(self, branch: Branch) -> Tensor:
        request = BranchRequest(token_ids=self.request.token_ids, branches=(branch,))
        (scores,) = score_branches_separately(self.engine, [request])
        return scores.branches[0].logp_T

    def check(self) -> float:
        """The largest difference in a log-prob between the three ways, on three branches."""
        number = min(3, len(self.request.branches))
        alone = [self.separate(branch) for branch in self.first(number)]
        worst = max(
            float((a - b).abs().max())
            for found in (self.branches(self.trunk(), number), self.before(number))
            for a, b in zip(found, alone, strict=True)
        )
        limit = 0.2 if self.device.type == "cuda" else 1e-3
        if not worst < limit:
            raise SystemExit(f"one pass and separate passes differ by {worst}: nothing to compare")
        return worst


def _spread(number: int) -> float:
    """0, 1/2, 1/4, 3/4, 1/8, … mirrored: the first places lie late, as most mistakes do."""
    value, scale = 0.0, 0.5
    while number:
        value, scale, number = value + scale * (number % 2), scale / 2, number // 2
    return 1 - value - 1e-9


def timed(device: torch.device, call: Callable[[], Any]) -> dict[str, float]:
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
    start, start_cpu = time.perf_counter(), time.process_time()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    record = {"seconds": time.perf_counter() - start}
    # Of all threads together; on a CPU less disturbed by other programs than the wall clock.
    record["cpu_seconds"] = time.process_time() - start_cpu
    if device.type == "cuda":
        record["memory_gib"] = (torch.cuda.max_memory_allocated() - held) / GIB
    return record


def measure(job: Job, args: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    runs: dict[str, list[dict[str, float]]] = {}

    def note(name: str, call: Callable[[], Any]) -> None:
        runs.setdefault(name, []).append(timed(job.device, call))

    for number in range(args.warmup + args.repeats):
        if number == args.warmup:
            runs.clear()
        note("training", job.training)
        kept = job.trunk()
        for n in args.hints:
            note(f"branches-{n}", partial(job.branches, kept, n))
        del kept
        for n in args.hints:
            note(f"before-{n}", partial(job.before, n))
    for _ in range(args.separate_repeats):
        for number, branch in enumerate(job.request.branches):
            note(f"separate-{number}", partial(job.separate, branch))
    return runs


def summary(args: argparse.Namespace, runs: dict[str, Any]) -> list[dict[str, Any]]:
    """Ratios of the fastest runs, which other programs and first uses disturbed least."""
    seconds = {name: [run["seconds"] for run in its] for name, its in runs.items()}
    training = min(seconds["training"])
    rows = []
    for n in args.hints:
        one, before = (min(seconds[f"{name}-{n}"]) for name in ("branches", "before"))
        separate = sum(min(seconds[f"separate-{i}"]) for i in range(n))
        rows.append({
            "hints": n,
            "branches_s": one,
            "branches_max_s": max(seconds[f"branches-{n}"]),
            "before_s": before,
            "separate_s": separate,
            "of_training": one / training,
            "before_of_training": before / training,
            "separate_over_branches": separate / one,
            "separate_over_before": separate / before,
        })  # fmt: skip
    return rows


def table(runs: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    lines = []
    its = [run["seconds"] for run in runs["training"]]
    lines.append(f"training: {min(its):.3f} s (up to {max(its):.3f})")
    lines.append(
        "hints | branches s | of training | before, of training | separate s | times less"
        " | times less before"
    )
    for row in rows:
        lines.append(
            f"{row['hints']:5d} | {row['branches_s']:10.3f} | {row['of_training']:10.1%}  | "
            f"{row['before_of_training']:19.1%} | {row['separate_s']:10.3f} | "
            f"{row['separate_over_branches']:10.1f} | {row['separate_over_before']:10.1f}"
        )
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--model",
        choices=("smollm2-135m", "qwen3-0.6b", "llama-1b", "tiny"),
        default="smollm2-135m",
    )
    parser.add_argument("--lora", type=int, default=0, help="rank; 0: all weights are trained")
    parser.add_argument("--tokens", type=int, help="of the trunk; 16384 on a GPU, 2048 on a CPU")
    parser.add_argument("--hints", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--hint-tokens", type=int, help="64 on a GPU, 32 on a CPU")
    parser.add_argument("--turn-tokens", type=int, help="128 on a GPU, 32 on a CPU")
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--separate-repeats", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    large = args.device == "cuda"
    args.tokens = args.tokens or (16384 if large else 2048)
    args.hint_tokens = args.hint_tokens or (64 if large else 32)
    args.turn_tokens = args.turn_tokens or (128 if large else 32)
    args.out = args.out or HERE / "results" / f"hint_scoring_{args.device}.json"
    return args


def main() -> None:
    args = parse()
    torch.set_num_threads(args.threads)
    job = Job(args)
    load = os.getloadavg()[0]
    worst = job.check()
    runs = measure(job, args)
    rows = summary(args, runs)
    print(table(runs, rows))
    result = {
        **header("hint_scoring", job.device),
        "load_before": load,
        "seed": SEED,
        "settings": {k: v for k, v in vars(args).items() if k != "out"},
        "arithmetic": "bfloat16" if args.device == "cuda" else "float32",
        "largest_logp_difference": worst,
        "rows": rows,
        "runs": runs,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
