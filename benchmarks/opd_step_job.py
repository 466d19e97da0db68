"""The job of the step benchmark on a GPU: shapes of Qwen3, random weights, random prompts.

Nothing is downloaded. A folder describes the job to every side (`write_folder`): settings and a
tokenizer for both models, the prompts, one small batch with given answers (to compare losses and
gradients), and episodes that begin with the same prompts (`fixed_episodes` runs them). Weights are
random, from a seed on the device (`load_random_model`), so every side has the same ones.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from workload import SEED

TEMPLATE = (
    "{% for m in messages %}{{ '<|begin|>' + m['role'] + ' ' + m['content'] + '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|begin|>assistant ' }}{% endif %}"
)
BEGIN, END, UNKNOWN = SPECIAL = ("<|begin|>", "<|end|>", "<|unknown|>")
ROLES = ("system", "user", "assistant", "tool")
NUM_FIXED = len(SPECIAL) + len(ROLES)
PROMPT_FRAME = 5
"""Begin, role and end of the message, and the begin and role of the answer to it."""
TOOL_FRAME = 6
"""The same around a tool's message between two turns, and the end of the turn before, which the
assistant never samples."""

NO_END = -1
"""In place of the end token once the parts are made: no row ends early, on any side. Weights are
random, so any real token would be sampled now and then."""

QWEN3 = {"num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
         "head_dim": 128}  # fmt: skip
LARGE_QWEN3 = {**QWEN3, "num_hidden_layers": 36, "num_attention_heads": 32}
SHAPES: dict[str, dict[str, int]] = {
    "0.6b": {**QWEN3, "hidden_size": 1024, "intermediate_size": 3072},
    "1.7b": {**QWEN3, "hidden_size": 2048, "intermediate_size": 6144},
    "4b": {**LARGE_QWEN3, "hidden_size": 2560, "intermediate_size": 9728},
    "8b": {**LARGE_QWEN3, "hidden_size": 4096, "intermediate_size": 12288},
    "tiny": {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
             "head_dim": 16, "hidden_size": 32, "intermediate_size": 64},
    "tiny-teacher": {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
                     "head_dim": 16, "hidden_size": 48, "intermediate_size": 96},
}  # fmt: skip
TEACHERS = {"0.6b": "1.7b", "1.7b": "1.7b", "4b": "4b", "8b": "8b", "tiny": "tiny-teacher"}
"""By the student's shape."""
UNTIED = ("8b",)
"""Shapes whose LM head is not the input embedding."""

SEEDS = {"student": SEED, "teacher": SEED + 1}
NUM_TURNS = 4
"""Of the assistant, in an episode."""
HINTS_PER_EPISODE = 2
"""In as many of its turns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    device: str
    dtype: str
    """bfloat16 (autocast over float32 weights; the teacher's weights are bfloat16) or float32."""
    vocab_size: int
    prompts: int
    samples: int
    """Of each prompt."""
    prompt_tokens: int
    new_tokens: int
    tool_tokens: int
    """Of a tool's message between two turns of an episode."""
    hint_tokens: int
    checked: int
    """Sequences of the batch on which losses and gradients are compared."""
    learning_rate: float = 1e-5

    def __post_init__(self) -> None:
        assert self.new_tokens % NUM_TURNS == 0, "an episode samples as much as an answer"

    @property
    def rows(self) -> int:
        return self.prompts * self.samples

    @property
    def tokens_per_step(self) -> int:
        return self.rows * self.new_tokens

    @property
    def turn_tokens(self) -> int:
        """Of each of the assistant's turns in an episode."""
        return self.new_tokens // NUM_TURNS

    @property
    def episode_tokens(self) -> int:
        between_turns = (NUM_TURNS - 1) * (self.tool_tokens + TOOL_FRAME)
        return self.prompt_tokens + self.new_tokens + between_turns

    @property
    def hints_per_step(self) -> int:
        return self.rows * HINTS_PER_EPISODE

    @property
    def hinted_tokens_per_step(self) -> int:
        return self.hints_per_step * self.turn_tokens


FULL = Job(
    device="cuda", dtype="bfloat16", vocab_size=151936, prompts=64, samples=4,
    prompt_tokens=128, new_tokens=512, tool_tokens=16, hint_tokens=32, checked=8,
)  # fmt: skip
TINY = Job(
    device="cpu", dtype="float32", vocab_size=512, prompts=4, samples=2, prompt_tokens=16,
    new_tokens=60, tool_tokens=4, hint_tokens=6, checked=4,
)  # fmt: skip


# ── the folder ───────────────────────────────────────────────────────────────────────────────────


def write_folder(folder: Path, job: Job, shape: str) -> None:
    from transformers import Qwen3Config

    tokenizer = make_tokenizer(job.vocab_size)
    for role, model_shape in (("student", shape), ("teacher", TEACHERS[shape])):
        config = Qwen3Config(
            vocab_size=job.vocab_size, max_position_embeddings=4096,
            tie_word_embeddings=model_shape not in UNTIED,
            architectures=["Qwen3ForCausalLM"], **SHAPES[model_shape],
        )  # fmt: skip
        config.save_pretrained(folder / role)
        tokenizer.save_pretrained(folder / role)
    texts = RandomTexts(job.vocab_size)
    prompts = [texts.text(job.prompt_tokens - PROMPT_FRAME) for _ in range(job.prompts)]
    (folder / "job.json").write_text(json.dumps({"shape": shape, **asdict(job)}))
    _write_lines(folder / "prompts.jsonl", [{"prompt": p, "split": "train"} for p in prompts])
    _write_lines(
        folder / "batch.jsonl",
        [{"text": p, "completion": texts.ids(job.new_tokens)} for p in prompts[: job.checked]],
    )
    tool_message = texts.text(job.tool_tokens)
    _write_lines(
        folder / "episodes.jsonl",
        [
            {"prompt": p, "tool_message": tool_message, "advice": texts.text(job.hint_tokens)}
            for p in prompts
        ],
    )


def read_job(folder: Path) -> tuple[str, Job]:
    fields = json.loads((folder / "job.json").read_text())
    return fields.pop("shape"), Job(**fields)


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _write_lines(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


class RandomTexts:
    """Random texts of a given number of tokens: a word is a token."""

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size
        self.random = random.Random(SEED)

    def ids(self, size: int) -> list[int]:
        return [self.random.randrange(NUM_FIXED, self.vocab_size) for _ in range(size)]

    def text(self, size: int) -> str:
        return " ".join(f"w{i}" for i in self.ids(size))


def make_tokenizer(vocab_size: int) -> Any:
    """One token per word, so that the ids and lengths of texts are known."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = [*SPECIAL, *ROLES, *(f"w{i}" for i in range(NUM_FIXED, vocab_size))]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token=BEGIN, eos_token=END, pad_token=END, unk_token=UNKNOWN
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


# ── weights ──────────────────────────────────────────────────────────────────────────────────────


def load_random_model(folder: str, *, dtype: Any, device: Any, **_: Any) -> Any:
    """The model that a folder's settings describe, with random weights: the same on every side.

    Takes the arguments of `courtside.engines.loading.load_model`, in whose place it stands.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    torch.manual_seed(SEEDS[Path(folder).name])
    with torch.device(device):  # a CPU would take long for a billion random numbers
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.tie_weights()
    return model.to(dtype).eval()


def checked_tensors(shape: str) -> tuple[str, ...]:
    last = SHAPES[shape]["num_hidden_layers"] - 1
    return (
        "model.embed_tokens.weight",
        "model.layers.0.self_attn.q_proj.weight",
        f"model.layers.{last}.mlp.down_proj.weight",
    )
