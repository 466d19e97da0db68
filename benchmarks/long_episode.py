"""One whole step of targeted hints on one long episode: score with hints, update. Time and memory.

An episode of 32768 tokens in 100 turns of the assistant, 20 of which get a hint; the shape of
Qwen3-0.6B with random weights, all of them trained, the student itself as its teacher. The classes
are those of a run: `Teacher` with its `HintScorer`, then `Student.step` with the reverse KL over
the vocabulary on the hinted turns and the policy gradient on all turns. Only the model is random
instead of loaded, and the episode is made up. The first step compiles and is not counted.

    python benchmarks/long_episode.py --device cuda                 # less than a minute
    python benchmarks/long_episode.py --model tiny --tokens 1500 --turns 8 --hints 3
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from gpu_machine import header, measure_call
from shapes import random_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from workload import BENCHMARKS, GIB, SEED, peak_rss, store

from courtside.assemble.teachers import find_reason_to_score_first
from courtside.chat.incremental import IncrementalTemplate
from courtside.chat.template import ChatTemplate
from courtside.engines.local import LocalEngine
from courtside.recipe import Recipe
from courtside.recipe.load import parse_recipe
from courtside.teacher.hint_scoring import HintScorer
from courtside.teacher.teacher import Teacher, TeacherStage
from courtside.training import weights as student_weights
from courtside.training.student import Student
from courtside.training.weights import StudentWeights
from courtside.types import Grade, Hint, Message, Sample, Scored, Task, Trajectory

TEMPLATE = (
    "{% for m in messages %}{{ '<|begin|>' + m['role'] + '\n' + m['content'] + '<|end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|begin|>assistant\n' }}{% endif %}"
)
HINT = "Reminder: the tool of that name is not here. Read the list of tools again before you call."
ANSWER_SHARE = 0.4
"""The assistant's share of the tokens of a turn and the observation after it."""


def byte_tokenizer() -> Any:
    """A token a byte: texts have the lengths that they are given."""
    tokens = ["<|begin|>", "<|end|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    core = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token=tokens[0], eos_token=tokens[1], pad_token=tokens[1]
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def make_recipe(args: argparse.Namespace) -> Recipe:
    student: dict[str, Any] = {
        "model": args.model,
        "device": args.device,
        "gradient_checkpointing": not args.no_checkpointing,
    }
    if args.lora:
        student["lora"] = {"rank": args.lora}
    return parse_recipe(
        {
            "student": student,
            "tasks": {"kind": "toolbox"},
            "reader": {"kind": "rules"},
            "hints": {"harmful": "train"},  # of random weights: none is dropped
            "teacher": {"kind": "self", "weights": "live"},
            "losses": [
                {"kind": "divergence", "on": "hinted_turns"},
                {"kind": "policy_gradient", "advantage": "reward"},
            ],
        }
    )


class Job:
    """The parts of a run and an episode for them."""

    def __init__(self, args: argparse.Namespace):
        recipe = make_recipe(args)

        with patch.object(student_weights, "load_model", random_model):
            self.weights = StudentWeights(recipe.student, seed=SEED)
        tokenizer = byte_tokenizer()
        self.engine = LocalEngine(
            self.weights.model, tokenizer, name=args.model, autocast=self.weights.autocast
        )
        renderer = ChatTemplate(tokenizer, name=args.model, eos_ids=self.engine.eos_ids)
        template = IncrementalTemplate(renderer)
        self.student = Student(
            self.weights, recipe, vocab_size=self.engine.head.vocab_size, pad_id=self.engine.pad_id
        )
        self.scored_before = find_reason_to_score_first(recipe, self.student, self.engine)
        teacher = Teacher(
            name="self:live",
            engine=self.engine,
            renderer=renderer,
            want="hidden",
            hints=HintScorer(self.engine, template, recipe.hints),
            defers_hints=self.scored_before is None,
        )
        self.scoring = TeacherStage(teacher, None, hinted=True)
        self.trajectory = episode(template, args.tokens, args.turns)
        self.hints = spread_hints(self.trajectory, args.hints)

    def score(self) -> list[Scored]:
        scored = self.scoring([self.trajectory], self.hints)
        dropped = [j.drop_reason for s in scored for j in s.hints if j.drop_reason is not None]
        if dropped:
            raise SystemExit(f"hints were dropped ({dropped}): nothing to measure")
        return scored


def episode(template: IncrementalTemplate, num_tokens: int, num_turns: int) -> Trajectory:
    """About so many tokens, in so many turns of the assistant, by the real renderer."""
    draw = random.Random(SEED)

    def text(size: int) -> str:
        return "".join(draw.choice("abcdefghij klmnopqrs tuvwxyz .,") for _ in range(size))

    task = Task(id="long", split="train", messages=(Message(role="user", content=text(40)),))
    episode_turns = [template.prompt_turn(task)]
    frame = len(
        template.environment_turn(
            (Message(role="tool", content="x"),), add_end_of_turn=False
        ).token_ids
    )
    each = (num_tokens - len(episode_turns[0].token_ids)) // num_turns
    size = max(2, int(ANSWER_SHARE * each))
    if each - size - frame < 1:
        raise SystemExit(f"--tokens {num_tokens}: too few for {num_turns} turns")
    for number in range(num_turns):
        reply = text(size - 1)
        ids = (*template.renderer.tokenizer(reply, add_special_tokens=False)["input_ids"], 1)
        logp = tuple(draw.uniform(-6, -1) for _ in ids)
        episode_turns.append(
            template.assistant_turn(Sample(token_ids=ids, logp=logp, stop="eos", text=reply))
        )
        if number + 1 < num_turns:
            observation = (Message(role="tool", content=text(each - size - frame)),)
            episode_turns.append(template.environment_turn(observation, add_end_of_turn=False))
    return Trajectory(
        id="episode", task=task, turns=tuple(episode_turns), source="student", policy_version=0,
        temperature=1.0, stop="done", grade=Grade(score=1.0, passed=True, feedback=""),
    )  # fmt: skip


def spread_hints(trajectory: Trajectory, count: int) -> list[Hint]:
    """Hints on assistant turns, evenly spaced."""
    turns = [i for i, turn in enumerate(trajectory.turns) if turn.role == "assistant"]
    indices = [(2 * n + 1) * len(turns) // (2 * count) for n in range(count)]
    return [
        Hint(trajectory=trajectory.id, turn=turns[i], text=HINT, source="made up") for i in indices
    ]


def timed(device: torch.device, call: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    result, row = measure_call(call, device)
    return result, {"peak_gib": peak_rss() / GIB, **row}


def format_row(name: str, row: dict[str, float]) -> str:
    above = f", {row['memory_gib']:.2f} above what was held" if "memory_gib" in row else ""
    return f"{name:>7}: {row['seconds']:.3f} s, peak {row['peak_gib']:.2f} GiB{above}"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--model", choices=("qwen3-0.6b", "tiny"), default="qwen3-0.6b")
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--turns", type=int, default=100, help="of the assistant")
    parser.add_argument("--hints", type=int, default=20)
    parser.add_argument("--lora", type=int, default=0, help="rank; 0: all weights are trained")
    parser.add_argument(
        "--no-checkpointing", action="store_true", help="keep all activations of the forward pass"
    )
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if not 0 < args.hints <= args.turns:
        parser.error(f"--hints {args.hints}: at least one, at most one for each of the turns")
    args.out = args.out or BENCHMARKS / "results" / f"long_episode_{args.device}.json"
    return args


def main() -> None:
    args = parse()
    device = torch.device(args.device)
    job = Job(args)
    trajectory = job.trajectory
    num_read = len(trajectory.token_ids)
    print(
        f"{args.model}: {num_read} tokens, {trajectory.num_completion_tokens} of them in "
        f"completions, {args.turns} turns, {args.hints} hints",
        flush=True,
    )
    steps = []
    for number in range(args.repeats + 1):
        scored, scoring = timed(device, job.score)
        update, stepping = timed(
            device, lambda step=number, batch=scored: job.student.step(step, batch)
        )
        steps.append({"score": scoring, "update": stepping})
        print("first, not counted:" if not number else f"step {number}:")
        for name, row in steps[-1].items():
            print(format_row(name, row), flush=True)
    (target,) = (s.target or s.deferred for s in scored)
    assert target is not None
    best = {
        name: min((step[name] for step in steps[1:]), key=lambda row: row["seconds"])
        for name in steps[0]
    }
    whole = sum(row["seconds"] for row in best.values())
    share = best["score"]["seconds"] / whole
    print(
        f"best: {whole:.3f} s a step, {num_read / whole:.0f} tokens/s; {share:.0%} of it to score "
        f"{args.hints} hints ({target.num_context_tokens} tokens of branches); "
        f"peak {max(row['peak_gib'] for row in best.values()):.2f} GiB"
    )
    print(f"divergence {update.components['divergence']:.3g}, {update.num_tokens}")
    result = {
        **header("long_episode", device),
        "seed": SEED,
        "settings": {k: v for k, v in vars(args).items() if k != "out"},
        "num_tokens": num_read,
        "num_completion_tokens": trajectory.num_completion_tokens,
        "num_branch_tokens": target.num_context_tokens,
        "num_trained": dict(update.num_tokens),
        "dtype": str(job.weights.autocast or torch.float32),
        "hints_scored_before": job.scored_before,
        "steps": steps,
        "best": best,
    }
    store(args.out, result)


if __name__ == "__main__":
    main()
