"""Samples of one prompt in scoring and update: the prompt computed once or once per sample.

A group is a prompt and n answers of one length, on random weights of a given shape; there are as
many groups as `--tokens` asks for. Timed, with passes as the engine and the student cut them by
default:

    scoring    log-probs of all answers, by the engine
    update     forward and backward pass with the loss on the sampled tokens, all weights or LoRA

each with the prompt shared and with every sample computing its own. Log-probs and gradients of both
ways are compared before anything is timed.

    python benchmarks/prefix_sharing.py                                   # on a CPU, two minutes
    python benchmarks/prefix_sharing.py --device cuda --model qwen3-0.6b  # bfloat16
"""

from __future__ import annotations

import argparse
import ctypes
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from gpu_machine import about, measure_call, model_parser, parse_model_args, rise_of_rss
from shapes import NAMES, gradient_of_sampled, random_engine
from torch import Tensor
from workload import GIB, SEED, store

from courtside.engines.base import ScoreRequest
from courtside.engines.forward.batching import default_pass_tokens
from courtside.engines.forward.forward import ForwardPasses

M_MMAP_THRESHOLD = -3
WAYS = ("shared", "separate")


class Job:
    """One model, and groups of any shape for it."""

    def __init__(self, args: argparse.Namespace):
        self.device = torch.device(args.device)
        self.num_answer, self.num_tokens = args.answer, args.tokens
        self.engine = random_engine(args)
        passes = self.engine.passes
        assert passes.padding_reason is None and passes.unshared_reason is None
        self.passes = {"shared": passes, "separate": replace(passes, unshared_reason="asked for")}
        self.computed = 0
        self.engine.model.base_model.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, module: Any, args: Any, kwargs: Any) -> None:
        self.computed += kwargs["input_ids"].numel()

    def groups(self, num_prompt: int, num_samples: int) -> list[tuple[int, ...]]:
        """As many as have the wanted number of tokens with a prompt for each sample, at least one;
        the samples of all of them, one group after the other."""
        generator = torch.Generator().manual_seed(SEED)
        vocab_size = self.engine.model.config.vocab_size
        size = num_prompt + num_samples * self.num_answer
        sequences: list[tuple[int, ...]] = []
        for _ in range(max(1, self.num_tokens // (num_samples * (num_prompt + self.num_answer)))):
            ids = torch.randint(1, vocab_size, (size,), generator=generator).tolist()
            prompt, answers = ids[:num_prompt], ids[num_prompt:]
            starts = range(0, len(answers), self.num_answer)
            sequences += [(*prompt, *answers[start : start + self.num_answer]) for start in starts]
        return sequences

    def scoring(self, way: str, group: list[tuple[int, ...]]) -> list[Tensor]:
        vars(self.engine)["passes"] = self.passes[way]
        scored = (False,) * (len(group[0]) - self.num_answer) + (True,) * self.num_answer
        requests = [ScoreRequest(token_ids=ids, scored=scored) for ids in group]
        return [scores.logp_T for scores in self.engine.score(requests)]

    def update(self, way: str, group: list[tuple[int, ...]]) -> None:
        """Leaves its gradients in the weights."""
        passes: ForwardPasses = self.passes[way]
        inputs = [ids[:-1] for ids in group]
        self.engine.model.train()
        with self.engine.autocast_context(), passes.patch_model():
            for batch in passes.plan_batches(
                [[ids] for ids in inputs], default_pass_tokens(self.device)
            ):
                hidden_ND, spans = passes.forward([inputs[i] for i in batch])
                before = range(len(inputs[0]) - self.num_answer, len(inputs[0]))
                where = [i for span in spans for i in span.indices(before)]
                where_T = torch.tensor(where, device=self.device)
                hidden_TD = hidden_ND.index_select(0, where_T)
                answer_ids = [i for b in batch for i in group[b][-self.num_answer :]]
                ids_T = torch.tensor(answer_ids, device=self.device)
                hidden_TD.backward(gradient_of_sampled(self.engine, hidden_TD.detach(), ids_T))
        self.engine.model.eval()

    def forget(self) -> None:
        self.engine.model.zero_grad(set_to_none=True)

    def gradients(self, way: str, group: list[tuple[int, ...]]) -> Tensor:
        """All of them in one row, on the CPU."""
        self.update(way, group)
        parameters = self.engine.model.parameters()
        gradients = [p.grad.float().flatten().cpu() for p in parameters if p.grad is not None]
        self.forget()
        return torch.cat(gradients)

    def check(self) -> dict[str, float]:
        """How far the two ways are apart on small groups."""
        group = self.groups(64, 3)
        logps = [torch.cat(self.scoring(way, group)) for way in WAYS]
        shared, separate = (self.gradients(way, group) for way in WAYS)
        differences = {
            "largest_logp_difference": float((logps[0] - logps[1]).abs().max()),
            "gradient_difference": float((shared - separate).norm() / separate.norm()),
        }
        exact = self.device.type == "cpu"
        limits = (1e-3, 1e-4) if exact else (0.2, 0.05)
        if any(not v < limit for v, limit in zip(differences.values(), limits, strict=True)):
            raise SystemExit(
                f"shared and separate differ, so there is nothing to compare: {differences}"
            )
        return differences


# ── the clock ────────────────────────────────────────────────────────────────────────────────────


def once(job: Job, call: Callable[[], Any]) -> dict[str, float]:
    job.computed = 0
    _, row = measure_call(call, job.device)
    return {**row, "tokens": job.computed}


def clock_of(device: torch.device) -> str:
    """What is compared: on a CPU processor time, which other programs disturb less."""
    return "seconds" if device.type == "cuda" else "cpu_seconds"


def rise(job: Job, call: Callable[[], Any]) -> float:
    """GiB that memory rises by, at most, above what was held before."""
    if job.device.type == "cuda":
        return measure_call(call, job.device)[1]["memory_gib"]
    return rise_of_rss(call) / GIB


def measure(job: Job, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Ways in turn, several times over: what disturbs them comes and goes."""
    rows = []
    for num_prompt in args.prompts:
        for num_samples in args.samples:
            group = job.groups(num_prompt, num_samples)
            row: dict[str, Any] = {"prompt": num_prompt, "samples": num_samples}
            row["groups"] = len(group) // num_samples
            for stage, run in (("scoring", job.scoring), ("update", job.update)):
                runs_by_way: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
                for number in range(args.warmup + args.repeats):
                    for way in WAYS:
                        timing = once(job, partial(run, way, group))
                        job.forget()
                        runs_by_way[way] += [timing] if number >= args.warmup else []
                row[stage] = {way: {"runs": runs} for way, runs in runs_by_way.items()}
            rows.append(row)
            print(line(row, clock_of(job.device)), flush=True)
    if job.device.type == "cpu":
        # What is freed goes back to the system at once: else an allocator's habits were measured.
        # From here on nothing is timed, because that takes its time.
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 64 * 1024)
    for row in rows:
        group = job.groups(row["prompt"], row["samples"])
        for stage, run in (("scoring", job.scoring), ("update", job.update)):
            for way in WAYS:
                risen = rise(job, partial(run, way, group))
                row[stage][way]["memory_gib"] = risen
                job.forget()
    return rows


# ── the table ────────────────────────────────────────────────────────────────────────────────────


def fastest(row: dict[str, Any], stage: str, way: str, what: str) -> float:
    """Of the repeats, which other programs disturbed least."""
    return float(min(run[what] for run in row[stage][way]["runs"]))


def ratio(row: dict[str, Any], stage: str, what: str) -> float:
    return fastest(row, stage, "shared", what) / fastest(row, stage, "separate", what)


def line(row: dict[str, Any], clock: str) -> str:
    cells = [f"{row['prompt']:6d} | {row['samples']:7d} | {ratio(row, 'scoring', 'tokens'):6.2f}"]
    for stage in ("scoring", "update"):
        cells.append(f"{fastest(row, stage, 'shared', clock):9.3f}")
        cells.append(f"{ratio(row, stage, clock):6.2f}")
        memory = [row[stage][way].get("memory_gib") for way in WAYS]
        cells.append("     –" if None in memory else f"{memory[0] / max(memory[1], 1e-9):6.2f}")
    return " | ".join(cells)


HEADINGS = (
    "prompt | samples | tokens | scoring s | × time | × mem. | update s  | × time | × mem.\n"
    "(shared; × is shared over separate)"
)


def parse() -> argparse.Namespace:
    parser = model_parser(__doc__, models=NAMES)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--prompts", type=int, nargs="+", help="tokens; 128 512 2048 on a GPU")
    parser.add_argument("--samples", type=int, nargs="+", help="of a prompt; 4 16 on a GPU")
    parser.add_argument("--answer", type=int, help="tokens; 256 on a GPU, 64 on a CPU")
    parser.add_argument(
        "--tokens", type=int, help="of all groups, unshared; 65536 on a GPU, one group on a CPU"
    )
    args = parse_model_args(parser, "prefix_sharing")
    large = args.device == "cuda"
    args.prompts = args.prompts or ([128, 512, 2048] if large else [32, 128, 512])
    args.samples = args.samples or ([4, 16] if large else [4])
    args.answer = args.answer or (256 if large else 64)
    args.tokens = args.tokens or (65536 if large else 1)
    return args


def main() -> None:
    args = parse()
    result = about("prefix_sharing", args)
    job = Job(args)
    result |= job.check()
    print(HEADINGS)
    rows = measure(job, args)
    print("with memory:")
    print("\n".join(line(row, clock_of(job.device)) for row in rows))
    store(args.out, {**result, "rows": rows})


if __name__ == "__main__":
    main()
