"""Scoring n hinted turns of one trajectory: one pass over its KV cache against n passes.

The trunk is a trajectory of assistant turns and environment turns of one length each. A hint and
its turn (a branch) leave it right before a turn; the turns are spread evenly, in an order where
n hints are the first n of any larger number. Timed, on random weights of a given shape:

    training   the student's forward and backward pass on the trunk, all weights or LoRA trained
    branches   all n branches, with the log-probs of their turns, on a KV cache that exists
    before     the trunk and all n branches, by the engine: a pass of the teacher's own
    separate   each branch as a sequence of its own

With a teacher that is the live student, `branches` is all that hints cost: the update's pass keeps
its KV cache, and hints are scored over it (`training/hint_branches.py`). With other weights, or
where hints are dropped by their shift, it is `before`. Log-probs of all three ways are
compared before anything is timed.

    python benchmarks/hint_scoring.py                                     # on a CPU
    python benchmarks/hint_scoring.py --device cuda --model qwen3-0.6b    # 16384 ids, bfloat16
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from gpu_machine import about, measure_call, model_parser, parse_model_args
from shapes import NAMES, gradient_of_sampled, random_engine
from torch import Tensor
from transformers.cache_utils import Cache
from workload import SEED, store

from courtside.engines.base import BranchRequest, ScoreRequest, score_branches_separately
from courtside.engines.forward.batching import SequenceSpan
from courtside.engines.forward.forward import score_positions
from courtside.engines.forward.tree_scoring import TrunkCache, forward_branches
from courtside.types import Branch


class Job:
    """The model, the trunk and the branches, and the four things that are timed."""

    def __init__(self, args: argparse.Namespace):
        self.device = torch.device(args.device)
        self.engine = random_engine(args)
        generator = torch.Generator().manual_seed(SEED)
        vocab_size = self.engine.model.config.vocab_size
        ids = torch.randint(1, vocab_size, (args.tokens,), generator=generator).tolist()
        turns = range(args.turn_tokens, args.tokens - args.turn_tokens + 1, 2 * args.turn_tokens)
        if len(turns) < max(args.hints):
            raise SystemExit(f"--tokens {args.tokens}: only {len(turns)} turns for the hints")
        branches = []
        for number in range(max(args.hints)):
            splice = turns[int(_spread(number) * len(turns))]
            hint = torch.randint(1, vocab_size, (args.hint_tokens,), generator=generator).tolist()
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
        with self.engine.autocast_context(), self.engine.passes.patch_model():
            hidden_LD, _ = self.engine.passes.forward([self.request.token_ids])
            hidden_ND = hidden_LD[self.chosen_N - 1]
            ids_N = self.ids_1L[0, self.chosen_N]
            hidden_ND.backward(gradient_of_sampled(self.engine, hidden_ND.detach(), ids_N))
        model.zero_grad(set_to_none=True)
        model.eval()

    @torch.no_grad()
    def trunk(self) -> Cache:
        """The KV cache of a training pass."""
        cache = TrunkCache()
        with self.engine.autocast_context(), self.engine.passes.patch_model():
            self.engine.passes.forward([self.request.token_ids], cache=cache)
        return cache

    @torch.no_grad()
    def branches(self, cache: Cache, num_hints: int) -> list[Tensor]:
        branches = self.first(num_hints)
        with self.engine.autocast_context(), self.engine.passes.patch_model():
            hidden = forward_branches(
                self.engine.passes, cache, [(SequenceSpan(start=0), branch) for branch in branches],
                max_tokens=self.engine.score_batch_tokens,
            )  # fmt: skip
            requests = [ScoreRequest(token_ids=b.token_ids, scored=b.scored) for b in branches]
            starts = [SequenceSpan(start=n) for n in [0, *accumulate(map(len, hidden))][:-1]]
            scores = score_positions(
                self.engine.head, torch.cat(hidden), starts, requests, want="hidden"
            )
        return [score.logp_T for score in scores]

    def before(self, num_hints: int) -> list[Tensor]:
        request = BranchRequest(token_ids=self.request.token_ids, branches=self.first(num_hints))
        (scores,) = self.engine.score_branches([request], want="hidden")
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
            for logps in (self.branches(self.trunk(), number), self.before(number))
            for a, b in zip(logps, alone, strict=True)
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


def measure(job: Job, args: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    runs: dict[str, list[dict[str, float]]] = {}

    def note(name: str, call: Callable[[], Any]) -> None:
        runs.setdefault(name, []).append(measure_call(call, job.device)[1])

    for number in range(args.warmup + args.repeats):
        if number == args.warmup:
            runs.clear()
        note("training", job.training)
        cache = job.trunk()
        for n in args.hints:
            note(f"branches-{n}", partial(job.branches, cache, n))
        del cache
        for n in args.hints:
            note(f"before-{n}", partial(job.before, n))
    for _ in range(args.separate_repeats):
        for number, branch in enumerate(job.request.branches):
            note(f"separate-{number}", partial(job.separate, branch))
    return runs


def summary(args: argparse.Namespace, runs: dict[str, Any]) -> list[dict[str, Any]]:
    """Ratios of the fastest runs, which other programs and first uses disturbed least."""
    seconds = {name: [run["seconds"] for run in repeats] for name, repeats in runs.items()}
    training = min(seconds["training"])
    rows = []
    for n in args.hints:
        branches, before = (min(seconds[f"{name}-{n}"]) for name in ("branches", "before"))
        separate = sum(min(seconds[f"separate-{i}"]) for i in range(n))
        rows.append({
            "hints": n,
            "branches_s": branches,
            "branches_max_s": max(seconds[f"branches-{n}"]),
            "before_s": before,
            "separate_s": separate,
            "of_training": branches / training,
            "before_of_training": before / training,
            "separate_over_branches": separate / branches,
            "separate_over_before": separate / before,
        })  # fmt: skip
    return rows


def table(runs: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    lines = []
    seconds = [run["seconds"] for run in runs["training"]]
    lines.append(f"training: {min(seconds):.3f} s (up to {max(seconds):.3f})")
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
    parser = model_parser(__doc__, models=NAMES)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--tokens", type=int, help="of the trunk; 16384 on a GPU, 2048 on a CPU")
    parser.add_argument("--hints", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--hint-tokens", type=int, help="64 on a GPU, 32 on a CPU")
    parser.add_argument("--turn-tokens", type=int, help="128 on a GPU, 32 on a CPU")
    parser.add_argument("--separate-repeats", type=int, default=1)
    args = parse_model_args(parser, "hint_scoring")
    large = args.device == "cuda"
    args.tokens = args.tokens or (16384 if large else 2048)
    args.hint_tokens = args.hint_tokens or (64 if large else 32)
    args.turn_tokens = args.turn_tokens or (128 if large else 32)
    return args


def main() -> None:
    args = parse()
    result = about("hint_scoring", args)
    job = Job(args)
    result["largest_logp_difference"] = job.check()
    runs = measure(job, args)
    rows = summary(args, runs)
    print(table(runs, rows))
    store(args.out, {**result, "rows": rows, "runs": runs})


if __name__ == "__main__":
    main()
