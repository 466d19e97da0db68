"""What `growth.py` measures: the stages of a run at growing sizes, on random weights.

The classes are those of a run: the engine, `Teacher` with its `HintScorer`, `Student.step`,
`EpisodeRollout`. Only the model is random instead of loaded, trajectories are synthetic, and no row
ends early.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from long_episode import byte_tokenizer, episode, spread_hints
from shapes import shape
from transformers import LlamaConfig, LlamaForCausalLM
from workload import SEED

from courtside.chat.incremental import IncrementalTemplate
from courtside.chat.template import ChatTemplate
from courtside.engines.base import SampleRequest, Sampling
from courtside.engines.local import LocalEngine
from courtside.recipe.hints import HintsConfig
from courtside.recipe.load import parse_recipe
from courtside.recipe.rollout import LimitsConfig, RolloutConfig
from courtside.rollout.episodes import EpisodeRollout
from courtside.teacher.hint_scoring import HintScorer
from courtside.teacher.teacher import Teacher, TeacherStage
from courtside.training import weights as student_weights
from courtside.training.kv_budget import device_bytes, kv_cache_tokens
from courtside.training.student import Student
from courtside.training.weights import StudentWeights
from courtside.types import Grade, Message, Observation, Sample, Task, Trajectory

NO_END = -1
"""In place of the end token once the parts are made."""
OBSERVED = "Next."
END = 1
"""The byte tokenizer's."""


def make_model(name: str) -> Any:
    """A model of a known shape; `small` is for a CPU: enough weights to decode on shadow copies as
    larger models do, and a vocabulary so small that the logits of 256 rows are 4 MiB."""
    if name != "small":
        return shape(name)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=4096, hidden_size=512, intermediate_size=2304, num_hidden_layers=2,
        num_attention_heads=8, num_key_value_heads=2, max_position_embeddings=131072,
        tie_word_embeddings=True))  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """The floor of a job: floating-point operations, or bytes loaded."""

    weights: float
    """With weights: linear in tokens."""
    attention: float
    """With the KV cache of the tokens before."""

    @property
    def total(self) -> float:
        return self.weights + self.attention


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What is done at one size."""

    call: Callable[[], Any]
    num_tokens: int
    counts: dict[str, Count]
    """Operations, and bytes in decoding."""


class Parts:
    """One model and the stages around it."""

    def __init__(self, model: str, device: str):
        self.recipe = recipe = parse_recipe(
            {
                "student": {"model": model, "device": device},
                "tasks": {"kind": "arithmetic"},
                "teacher": {"kind": "model", "model": model},
                "losses": [{"kind": "divergence", "support": {"kind": "full"}}],
            }
        )

        def draw(name: str, *, dtype: torch.dtype, device: torch.device, **_: Any) -> Any:
            torch.manual_seed(SEED)
            with device:
                return make_model(name).to(dtype).eval()

        with patch.object(student_weights, "load_model", draw):
            self.weights = StudentWeights(recipe.student, seed=SEED)
        self.tokenizer = byte_tokenizer()
        self.renderer = ChatTemplate(self.tokenizer, name=model, eos_ids={END})
        self.template = IncrementalTemplate(self.renderer)
        self.random = random.Random(SEED)
        self.renew()
        head, pad_id = self.engine.head, self.engine.pad_id
        self.student = Student(self.weights, recipe, vocab_size=head.vocab_size, pad_id=pad_id)
        layers = self.weights.model.base_model.layers
        self.num_weights = sum(p.numel() for p in (*layers.parameters(), head.parameters()[0]))
        """Those that every token is multiplied with."""

    def renew(self) -> None:
        """A new engine, without the KV cache and CUDA graphs of the batches before."""
        weights = self.weights
        self.engine = LocalEngine(
            weights.model, self.tokenizer, name="growth", autocast=weights.autocast,
            max_batch_tokens=kv_cache_tokens(
                self.recipe, weights, (), total=device_bytes(weights.device)
            ),
        )  # fmt: skip
        self.engine.eos_ids = frozenset({NO_END})

    def ids(self, count: int) -> tuple[int, ...]:
        return tuple(self.random.choices(range(END + 1, self.engine.head.vocab_size), k=count))

    def scoring(self, hints: HintScorer | None = None) -> TeacherStage:
        teacher = Teacher(
            name="self:live", engine=self.engine, renderer=self.renderer, want="hidden", hints=hints
        )
        return TeacherStage(teacher, None, hinted=hints is not None)

    def trajectory(self, number: int, num_tokens: int) -> Trajectory:
        """One question and one answer, so many tokens together."""
        task = Task(id=str(number), split="train", messages=(user_message("Go."),))
        prompt = self.template.prompt_turn(task)
        ids = self.ids(num_tokens - len(prompt.token_ids))
        answer = Sample(token_ids=ids, logp=(-9.0,) * len(ids), stop="length", text="")
        return Trajectory(
            id=str(number), task=task, turns=(prompt, self.template.assistant_turn(answer)),
            source="student", policy_version=0, temperature=1.0, stop="length",
        )  # fmt: skip

    def operations(self, lengths: Sequence[int]) -> Count:
        """Of one forward pass over sequences of these lengths."""
        settings = self.weights.model.config
        width = settings.num_hidden_layers * settings.num_attention_heads * settings.head_dim
        num_seen = sum(length * (length + 1) // 2 for length in lengths)
        return Count(
            weights=2.0 * self.num_weights * sum(lengths), attention=4.0 * width * num_seen
        )

    def bytes_read(self, num_steps: int, rows: int, mean_length: float) -> Count:
        """By so many steps of decoding, with rows of that length on average."""
        settings = self.weights.model.config
        size = (self.weights.autocast or torch.float32).itemsize
        width = settings.num_hidden_layers * settings.num_key_value_heads * settings.head_dim
        return Count(
            weights=1.0 * size * self.num_weights * num_steps,
            attention=2.0 * size * width * rows * mean_length * num_steps,
        )


def user_message(text: str) -> Message:
    return Message(role="user", content=text)


class Echo:
    """An environment that always returns the same message."""

    def step(self, reply: str) -> Observation:
        return Observation(messages=(user_message(OBSERVED),))

    def grade(self) -> Grade:
        return Grade(score=1.0, passed=True, feedback="")


# ── the stages ───────────────────────────────────────────────────────────────────────────────────


def sampling(parts: Parts, *, rows: int, prompt: int, new: int) -> Work:
    requests = [SampleRequest(prompt_ids=parts.ids(prompt), seed=row) for row in range(rows)]
    how = Sampling(max_new_tokens=new)

    def call() -> None:
        samples = parts.engine.sample(requests, how)
        assert all(len(sample.token_ids) == new for sample in samples)

    counts = {
        "operations": parts.operations([prompt + new] * rows),
        "bytes": parts.bytes_read(new, rows, prompt + new / 2),
    }
    return Work(call=call, num_tokens=rows * (prompt + new), counts=counts)


def scoring(parts: Parts, *, sequences: int, length: int) -> Work:
    trajectories = [parts.trajectory(i, length) for i in range(sequences)]
    score = parts.scoring()
    return Work(
        call=lambda: score(trajectories),
        num_tokens=sequences * length,
        counts={"operations": parts.operations([length] * sequences)},
    )


def update(parts: Parts, *, sequences: int, length: int) -> Work:
    scored = parts.scoring()([parts.trajectory(i, length) for i in range(sequences)])

    def call() -> None:
        done = parts.student.step(0, scored)
        assert sum(done.num_tokens.values()) == sum(
            s.trajectory.num_completion_tokens for s in scored
        )

    # The backward pass is twice as much again, of both.
    counts = {"operations": parts.operations([length] * sequences)}
    return Work(call=call, num_tokens=sequences * length, counts=counts)


def episodes(parts: Parts, *, rows: int, turns: int, new: int) -> Work:
    # Different prompts: equal ones would be computed once.
    tasks = [
        Task(id=str(row), split="train", messages=(user_message(f"Go {row:04}."),))
        for row in range(rows)
    ]
    observation = parts.template.environment_turn((user_message(OBSERVED),), add_end_of_turn=True)
    length = len(parts.template.prompt_turn(tasks[0]).token_ids)
    length += turns * (new + len(observation.token_ids))
    rollout = EpisodeRollout(
        engine=parts.engine,
        template=parts.template,
        config=RolloutConfig(
            samples_per_prompt=1,
            max_new_tokens=new,
            limits=LimitsConfig(turns=turns, tokens=length),
        ),  # the capacity of the KV cache
        start=lambda task: Echo(),
        context_length=parts.engine.context_length,
        seed=SEED,
    )

    def call() -> None:
        trajectories = rollout(tasks, 0)
        num_turns = {
            sum(turn.role == "assistant" for turn in trajectory.turns)
            for trajectory in trajectories
        }
        assert num_turns == {turns} and len(trajectories) == rows

    counts = {
        "operations": parts.operations([length] * rows),
        "bytes": parts.bytes_read(turns * (new + 1), rows, length / 2),
    }
    return Work(call=call, num_tokens=rows * length, counts=counts)


def hints(parts: Parts, *, tokens: int, turns: int, hints: int) -> Work:
    trajectory = episode(parts.template, tokens, turns)
    hint_list = spread_hints(trajectory, hints)
    rules = HintsConfig(min_shift=-1e9, harmful="train")  # of random weights: none is dropped
    score = parts.scoring(HintScorer(parts.engine, parts.template, rules))

    def call() -> None:
        (scored,) = score([trajectory], hint_list)
        assert len(scored.hints) == hints and not any(j.drop_reason for j in scored.hints)

    # Of the trajectory alone, which is the same for any number of hints.
    counts = {"operations": parts.operations([len(trajectory.token_ids)])}
    return Work(call=call, num_tokens=len(trajectory.token_ids), counts=counts)


# ── the series ───────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One stage at growing sizes, each twice the one before."""

    name: str
    unit: str
    sizes: tuple[int, ...]
    job: Callable[[Parts, int], Work]
    panel_of: str | None = None
    """The series whose panel shows it: the same tokens, cut into short sequences."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How large everything is that does not grow, and how far the rest does."""

    sampled: tuple[int, int]
    """Rows of sampling, while they grow. On a GPU so many that the KV cache is freed between calls:
    below 1 GiB it stays, and graphs are captured once (a tenth of a second)."""
    rows: int
    """Of sampling, while the number of new tokens grows."""
    prompt: int
    new: int
    short: int
    """Tokens of a sequence, while the number of sequences grows."""
    sequences: tuple[int, int]
    lengths: tuple[int, int]
    update_lengths: tuple[int, int]
    piece: int
    """Tokens of a sequence, where the tokens of one long sequence are cut into several."""
    episode_rows: int
    trunk: int
    """Tokens of the trajectory with hints."""


SCALES = {
    "cpu": Scale(
        sampled=(8, 256), rows=4, prompt=16, new=16, short=64, sequences=(4, 64),
        lengths=(128, 8192), update_lengths=(128, 2048), piece=256, episode_rows=2, trunk=2048,
    ),
    "cuda": Scale(
        sampled=(128, 1024), rows=128, prompt=64, new=64, short=256, sequences=(8, 256),
        lengths=(256, 8192), update_lengths=(256, 8192), piece=256, episode_rows=128, trunk=16384,
    ),
}  # fmt: skip
TURN_TOKENS = 8
"""New tokens in a turn of an episode."""


def doubled(first: int, last: int) -> tuple[int, ...]:
    return (first, *doubled(2 * first, last)) if first <= last else ()


def all_series(at: Scale) -> tuple[Series, ...]:
    cut = f"in sequences of {at.piece}"

    def cut_up(stage: Callable[..., Work]) -> Callable[[Parts, int], Work]:
        return lambda parts, n: stage(parts, sequences=n // at.piece, length=at.piece)

    return (
        Series(
            name="sampling: rows", unit="rows", sizes=doubled(*at.sampled),
            job=lambda p, n: sampling(p, rows=n, prompt=at.prompt, new=at.new),
        ),
        Series(
            name="sampling: new tokens", unit="new tokens a row", sizes=doubled(32, 512),
            job=lambda p, n: sampling(p, rows=at.rows, prompt=at.prompt, new=n),
        ),
        Series(
            name="scoring: sequences", unit=f"sequences of {at.short}",
            sizes=doubled(*at.sequences),
            job=lambda p, n: scoring(p, sequences=n, length=at.short),
        ),
        Series(
            name="scoring: length", unit="tokens of one sequence", sizes=doubled(*at.lengths),
            job=lambda p, n: scoring(p, sequences=1, length=n),
        ),
        Series(
            name=f"scoring: tokens {cut}", unit="tokens", sizes=doubled(at.piece, at.lengths[1]),
            job=cut_up(scoring), panel_of="scoring: length",
        ),
        Series(
            name="update: sequences", unit=f"sequences of {at.short}",
            sizes=doubled(*at.sequences),
            job=lambda p, n: update(p, sequences=n, length=at.short),
        ),
        Series(
            name="update: length", unit="tokens of one sequence",
            sizes=doubled(*at.update_lengths),
            job=lambda p, n: update(p, sequences=1, length=n),
        ),
        Series(
            name=f"update: tokens {cut}", unit="tokens",
            sizes=doubled(at.piece, at.update_lengths[1]),
            job=cut_up(update), panel_of="update: length",
        ),
        Series(
            name="episodes: turns", unit="turns", sizes=doubled(4, 64),
            job=lambda p, n: episodes(p, rows=at.episode_rows, turns=n, new=TURN_TOKENS),
        ),
        Series(
            name="hints", unit=f"hints on {at.trunk} tokens", sizes=doubled(1, 32),
            job=lambda p, n: hints(p, tokens=at.trunk, turns=32, hints=n),
        ),
    )  # fmt: skip
