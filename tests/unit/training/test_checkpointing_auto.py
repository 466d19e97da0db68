"""What a pass keeps, and when it is too much."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import small_recipe
from tiny import tiny_model
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from courtside.assemble import assemble
from courtside.engines.forward.batching import default_pass_tokens
from courtside.engines.forward.forward import ForwardPasses
from courtside.runtime import Runtime
from courtside.training.memory.checkpointing_auto import (
    MARGIN,
    free_bytes,
    kept_bytes,
    kept_bytes_per_token,
    largest_pass,
    needs_checkpointing,
    reserved_bytes,
    student_bytes_per_token,
)

CPU = torch.device("cpu")
CONTEXT = 512
"""Of the tiny student."""


def ask_nobody(device: torch.device) -> int | None:
    raise AssertionError("the recipe has decided")


def made(folder: Path, free: int | None, /, **student: Any) -> Runtime:
    recipe = small_recipe(folder, folder, student={"model": str(folder), **student})
    return assemble(recipe, free=lambda device: free)


# ── measured ─────────────────────────────────────────────────────────────────────────────────────

D, H, V = 24, 40, 64


class Perceptron(nn.Module):
    """Small enough to say by hand what it keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(V, D)
        self.into = nn.Linear(D, H)
        self.out = nn.Linear(H, D)

    def forward(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        ids_N = torch.tensor([token for ids in sequences for token in ids])
        found: Tensor = self.out(self.into(self.words(ids_N)).relu())
        return found


@pytest.mark.parametrize("length", [4, 32, 256])
def test_by_hand(length: int) -> None:
    model = Perceptron()
    # Ids of the embedding; what each layer reads, of which the second is what relu gave.
    assert kept_bytes_per_token(model, vocab_size=V, length=length) == 8 + 4 * D + 4 * H
    with torch.autocast("cpu", dtype=torch.bfloat16):  # rounded weights are kept, too, but once
        assert kept_bytes_per_token(model, vocab_size=V, length=length) == 8 + 2 * D + 2 * H
    model.requires_grad_(False)
    model.out.requires_grad_()
    assert kept_bytes_per_token(model, vocab_size=V, length=length) == 4 * H


def test_what_nobody_goes_back_through_is_not_kept() -> None:
    weight = torch.ones(8, requires_grad=True)

    def forward() -> Tensor:
        watched = (weight * torch.ones(1000, 8)).exp().sum()
        assert watched.requires_grad
        return weight.exp()

    assert kept_bytes(forward) == (32, 8)


def test_nothing_outlives_the_measuring() -> None:
    weight = torch.ones(8, requires_grad=True)
    stores: list[StorageWeakRef] = []

    def forward() -> Tensor:
        out = weight.exp()
        stores.append(StorageWeakRef(out.untyped_storage()))
        return out

    kept_bytes(forward)
    assert stores[0].expired()


def test_a_gradient_is_what_it_is_after_measuring() -> None:
    weight = torch.ones(8, requires_grad=True)
    kept_bytes(lambda: weight.exp())
    assert weight.grad is None
    with torch.no_grad():  # whatever is around it
        assert kept_bytes(lambda: weight.exp()) == (32, 8)


@pytest.mark.parametrize("lora", [None, {"rank": 4}], ids=["all weights", "lora"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_tried_lengths_do_not_matter(
    dtype: str, lora: dict[str, Any] | None, tiny_folder: Path
) -> None:
    student = made(tiny_folder, None, dtype=dtype, lora=lora).student
    assert student.passes.padding_reason is None
    read: Callable[[Any], Tensor] = lambda sequences: student.passes.forward(sequences)[0]  # noqa: E731
    with student.training(0):
        for samples, slack in ((1, 0.02), (4, 0.1)):  # masks of the CPU's attention are small
            found = [
                kept_bytes_per_token(read, vocab_size=258, samples=samples, length=length)
                for length in (32, 64, 128, 256)
            ]
            assert max(found) < (1 + slack) * min(found)
        # And it says what a large pass keeps.
        several = [[(3 * n + 5 * i) % 258 for i in range(200)] for n in range(20)]
        whole, num_tokens = kept_bytes(lambda: read(several))
    weights = sum(p.numel() * (4 + 2) for p in student.weights.model.parameters())
    alone = kept_bytes_per_token_of(student, samples=1)
    assert num_tokens == 4000
    assert alone * num_tokens * 0.98 < whole < alone * num_tokens * 1.02 + weights


def kept_bytes_per_token_of(student: Any, samples: int) -> float:
    with student.training(0):
        return kept_bytes_per_token(
            lambda sequences: student.passes.forward(sequences)[0], vocab_size=258, samples=samples
        )


def test_adapters_are_counted(tiny_folder: Path) -> None:
    kept = {
        rank: student_bytes_per_token(
            made(tiny_folder, None, lora={"rank": rank}).student, 1000, CONTEXT
        )
        for rank in (2, 10)
    }
    # Each of 7 layers in 2 blocks keeps what its lower half gave, in float32; what the one behind
    # the gate keeps has hooks of its own on a CPU (`layer_memory`), where the number is not used.
    assert kept[10] - kept[2] == 12 * 8 * 4


def test_dropout_is_counted(tiny_folder: Path) -> None:
    kept = [
        kept_bytes_per_token_of(
            made(tiny_folder, None, lora={"rank": 2, "dropout": dropout}).student, samples=1
        )
        for dropout in (0.0, 0.5)
    ]
    assert kept[1] > 1.2 * kept[0]


def test_where_attention_keeps_scores_a_long_sequence_keeps_more_of_each_token() -> None:
    model = tiny_model()
    model.set_attn_implementation("eager")
    passes = ForwardPasses(model=model, pad_id=1, padding_reason="asked for")
    found = [
        kept_bytes_per_token(
            lambda sequences: passes.forward(sequences)[0],
            vocab_size=258,
            longest=400,
            length=length,
        )
        for length in (32, 64)
    ]
    (once, few), (twice, more) = (
        kept_bytes(lambda n=n: passes.forward([[5] * 400] * n)[0]) for n in (1, 2)
    )
    assert found == [pytest.approx((twice - once) / (more - few), rel=0.05)] * 2  # and one mask
    short = kept_bytes_per_token(lambda sequences: passes.forward(sequences)[0], vocab_size=258)
    assert found[0] > 1.5 * short


# ── decided ──────────────────────────────────────────────────────────────────────────────────────


def test_the_boundary() -> None:
    # 1000 bytes and a tenth of what is left fit into what 100 reserved bytes leave.
    assert MARGIN == 0.1
    assert not needs_checkpointing(10.0, 90, 1100, 100)
    assert needs_checkpointing(10.0, 91, 1100, 100)
    assert needs_checkpointing(10.0, 90, 1099, 100)
    assert needs_checkpointing(10.0, 90, 1100, 101)
    assert needs_checkpointing(1.0, 1, 10, 100), "nothing is left"


EPISODES = {"tasks": {"kind": "toolbox"}}
LONG_CONTEXT = 2 * default_pass_tokens(CPU)


@pytest.mark.parametrize(
    ("changes", "tokens"),
    [
        ({}, default_pass_tokens(CPU)),
        ({"train": {"micro_batch_tokens": 77}}, 77),
        ({"rollout": {"max_new_tokens": 700}}, 700),
        ({**EPISODES, "rollout": {"max_new_tokens": 300, "limits": {"tokens": 600}}}, 600),
        ({**EPISODES, "rollout": {"limits": {"tokens": 9000}}}, LONG_CONTEXT),
        ({**EPISODES}, default_pass_tokens(CPU)),
        ({"train": {"micro_batch_tokens": 1000}, "rollout": {"max_new_tokens": 300}}, 1000),
    ],
)
def test_how_large_a_pass_can_be(changes: dict[str, Any], tokens: int, tiny_folder: Path) -> None:
    recipe = small_recipe(tiny_folder, tiny_folder, **changes)
    assert largest_pass(recipe, CPU, LONG_CONTEXT) == tokens


def test_a_pair_shares_a_pass(tiny_folder: Path) -> None:
    recipe = small_recipe(
        tiny_folder,
        tasks={"kind": "jsonl", "path": "pairs.jsonl"},
        losses=[{"kind": "preference"}],
        rollout={"max_new_tokens": 300, "student_fraction": 0.0},
    )
    assert largest_pass(recipe, CPU, CONTEXT) == 600
    assert largest_pass(recipe, torch.device("cuda"), CONTEXT) == 16384


def test_auto_by_what_is_free(tiny_folder: Path) -> None:
    student, tokens = made(tiny_folder, None).student, default_pass_tokens(CPU)
    assert not student.weights.recomputes
    kept = student_bytes_per_token(student, tokens, CONTEXT)
    reserved = reserved_bytes(student, tokens)
    needed = reserved + kept * tokens / (1 - MARGIN)
    enough = made(tiny_folder, int(1.001 * needed))
    assert not enough.student.weights.recomputes
    assert not any("activations" in note for note in enough.notes)
    for free in (int(0.999 * needed), reserved, 0):
        little = made(tiny_folder, free)
        assert little.student.weights.recomputes
        (note,) = (note for note in little.notes if "activations" in note)
        assert note.startswith(
            f"activations are computed again: a pass of {tokens} tokens would keep"
        )
        assert f"{kept * tokens / 2**30:.3g} GiB" in note
        assert f"and {max(0, free - reserved) / 2**30:.3g} GiB are free" in note
        assert not little.engine.model.training


def test_a_recipe_that_decides_is_not_measured(tiny_folder: Path) -> None:
    for choice in (True, False):
        recipe = small_recipe(
            tiny_folder,
            tiny_folder,
            student={"model": str(tiny_folder), "gradient_checkpointing": choice},
        )
        parts = assemble(recipe, free=ask_nobody)
        assert parts.student.weights.recomputes == choice
        assert not any("activations" in note for note in parts.notes)


def test_a_cpu_keeps_everything(tiny_folder: Path) -> None:
    assert free_bytes(CPU) is None
    parts = assemble(small_recipe(tiny_folder, tiny_folder))
    assert parts.recipe.student.gradient_checkpointing == "auto"
    assert not parts.student.weights.recomputes
    assert "passes" not in vars(parts.student), "nothing was tried"


def test_a_model_that_cannot_is_told_what_helps(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import LlamaForCausalLM

    monkeypatch.setattr(LlamaForCausalLM, "supports_gradient_checkpointing", False)
    parts = made(tiny_folder, 0)
    assert not parts.student.weights.recomputes
    assert any(note.endswith("lower train.micro_batch_tokens") for note in parts.notes)


# ── reserved ─────────────────────────────────────────────────────────────────────────────────────


def test_what_a_step_will_make_counts_until_it_exists(tiny_folder: Path) -> None:
    parts = made(tiny_folder, None)
    size = sum(p.nbytes for p in parts.student.weights.trained().values())
    before = reserved_bytes(parts.student, 256)
    scored = parts.teacher(parts.rollout(parts.tasks.batch(0, 2), 0))
    parts.student.step(0, scored)
    assert before - reserved_bytes(parts.student, 256) == 2 * size, "the moments are there now"


def test_copies_that_will_be_made_are_reserved(tiny_folder: Path) -> None:
    def reserved(**changes: Any) -> int:
        parts = assemble(small_recipe(tiny_folder, **changes))
        return reserved_bytes(parts.student, 256)

    context = {"kind": "system", "text": "Be short."}
    live: dict[str, Any] = {"teacher": {"kind": "self", "weights": "live", "context": context}}
    parts = assemble(small_recipe(tiny_folder, **live))
    size = sum(p.nbytes for p in parts.student.weights.trained().values())
    plain = reserved(**live)
    assert reserved(teacher={"kind": "self", "weights": "ema", "context": context}) == plain + size
    extrapolated = [{"kind": "divergence", "extrapolate": 1.5}]
    assert reserved(**live, losses=extrapolated) == plain + size
    # Of float32 weights two copies in half the bytes, of a bfloat16 base one.
    rounded = {"model": str(tiny_folder), "dtype": "bfloat16"}
    vectors = sum(p.nbytes for p in parts.engine.model.parameters() if p.ndim < 2)
    smaller = {"logits_chunk_tokens": 1}
    assert (
        reserved(**live, student=rounded, train=smaller) - reserved(**live, train=smaller)
        == size - vectors
    )
