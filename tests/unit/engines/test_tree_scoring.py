"""Branches off one trunk against one full forward pass and one full softmax per branch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny import tiny_model
from torch import Tensor

from courtside.engines import local
from courtside.engines.base import BranchRequest, BranchScores
from courtside.engines.forward import padded_tree_scoring as module
from courtside.engines.forward import tree_scoring as kept
from courtside.engines.local import LocalEngine
from courtside.engines.stateless import score_branches_separately
from courtside.errors import ModelError
from courtside.types import Branch

Make = Callable[..., LocalEngine]
ways = pytest.mark.parametrize("padded", [None, "asked for"])
"""Trunks packed into a row, as they are where the model can be read so, and padded."""


def branch(splice: int, ids: Sequence[int], scored: Sequence[int] | None = None) -> Branch:
    """All but the first token scored, unless said otherwise."""
    where = range(1, len(ids)) if scored is None else scored
    return Branch(
        trajectory="t",
        turn=1,
        splice=splice,
        token_ids=tuple(ids),
        scored=tuple(i in where for i in range(len(ids))),
    )


def trunk(length: int, *, step: int = 7) -> tuple[int, ...]:
    return tuple(3 + (step * i * i + i) % 250 for i in range(length))


VARIOUS = [
    BranchRequest(
        token_ids=trunk(40),
        scored=tuple(i in (1, 9, 30, 39) for i in range(40)),
        branches=(
            branch(40, (5, 6, 7, 8, 9)),  # at the end of the trunk
            branch(17, (9,) * 9, scored=(7, 8)),
            branch(17, (200, 31, 4)),  # another hint for the same turn
            branch(0, (4, 250, 6, 77)),  # instead of everything
            branch(3, (8, 1), scored=(0, 1)),  # its first token is predicted by the trunk
            branch(30, (8, 1, 3), scored=()),
        ),
        temperature=0.7,
    ),
    BranchRequest(token_ids=trunk(9, step=3), branches=(branch(4, (6, 6, 7)),), temperature=1.6),
    BranchRequest(token_ids=trunk(23), branches=(), scored=(False,) * 22 + (True,)),
    BranchRequest(token_ids=trunk(2), branches=(branch(0, trunk(30)), branch(2, (7, 7)))),
    BranchRequest(token_ids=trunk(12), branches=()),
]


@torch.no_grad()
def naive(engine: Any, ids: Sequence[int], scored: Sequence[bool], temperature: float) -> Tensor:
    """Log-probs of all words at the scored tokens of one sequence."""
    logits_LV = engine.model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0]
    logp_LV = torch.log_softmax(logits_LV.double() / temperature, -1)
    return logp_LV[[i - 1 for i, wanted in enumerate(scored) if wanted]]


def check(engine: Any, requests: Sequence[BranchRequest], found: Sequence[BranchScores]) -> None:
    """Log-probs, hidden states and best words of every branch and trunk."""
    for r, scores in zip(requests, found, strict=True):
        sequences = [
            (r.token_ids[: b.splice] + b.token_ids, (False,) * b.splice + b.scored)
            for b in r.branches
        ]
        parts = list(scores.branches)
        assert (scores.trunk is None) == (r.scored is None)
        if r.scored is not None:
            sequences.append((r.token_ids, r.scored))
            parts.append(scores.trunk)
        for (ids, scored), part in zip(sequences, parts, strict=True):
            logp_TV = naive(engine, ids, scored, r.temperature)
            ids_T = torch.tensor([i for i, wanted in zip(ids, scored, strict=True) if wanted])
            close = {"rtol": 1e-5, "atol": 1e-5}
            expected_T = logp_TV.gather(-1, ids_T.long()[:, None]).squeeze(-1)
            torch.testing.assert_close(part.logp_T.double(), expected_T, **close)
            if part.hidden_TD is not None and len(ids_T):
                mine_TV = torch.log_softmax(engine.head(part.hidden_TD) / r.temperature, -1)
                torch.testing.assert_close(mine_TV.double(), logp_TV, **close)
            if part.top_logp_TK is not None:
                best_TK = logp_TV.topk(part.top_logp_TK.shape[-1], dim=-1).values
                torch.testing.assert_close(part.top_logp_TK.double(), best_TK, **close)


@pytest.mark.parametrize("budget", [1, 60, 65536])
@pytest.mark.parametrize(
    ("attention", "padded"), [("sdpa", None), ("sdpa", "asked for"), ("eager", "'eager' was asked")]
)
def test_scores_are_those_of_a_pass_for_each_branch(
    make_engine: Make, attention: str, padded: str | None, budget: int
) -> None:
    model = tiny_model()
    model.set_attn_implementation(attention)
    engine = make_engine(model, max_batch_tokens=budget)
    if attention == "sdpa":
        assert engine.tree_padding_reason is None
        engine.tree_padding_reason = padded
    assert padded is None or padded in str(engine.tree_padding_reason)
    found = engine.score_branches(VARIOUS, want="hidden")
    assert all(scores.note is None for scores in found)
    check(engine, VARIOUS, found)
    check(engine, VARIOUS, engine.score_branches(VARIOUS, want="top_k", top_k=5))
    assert engine.score_branches([]) == []


def test_the_reference_gives_the_same_with_any_engine(make_engine: Make) -> None:
    engine = make_engine()
    check(engine, VARIOUS, score_branches_separately(engine, VARIOUS, want="hidden"))
    check(engine, VARIOUS, score_branches_separately(engine, VARIOUS, want="top_k", top_k=3))
    plain = engine.score_branches(VARIOUS)[0].branches[0]
    assert plain.hidden_TD is None and plain.top_ids_TK is None


layouts = st.lists(
    st.tuples(
        st.integers(1, 30),
        st.lists(
            st.tuples(st.floats(0, 1), st.lists(st.integers(2, 257), min_size=1, max_size=9)),
            max_size=5,
        ),
    ),
    min_size=1,
    max_size=4,
)


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    layout=layouts, budget=st.integers(1, 200), entries=st.integers(1, 3000),
    padded=st.sampled_from([None, "asked for"]),
)  # fmt: skip
def test_any_layout(
    make_engine: Make,
    monkeypatch: pytest.MonkeyPatch,
    layout: list[tuple[int, list[tuple[float, list[int]]]]],
    budget: int,
    entries: int,
    padded: str | None,
) -> None:
    monkeypatch.setattr(module, "mask_entries", lambda device: entries)
    monkeypatch.setattr(kept, "default_max_keys", lambda device: entries)
    engine = make_engine(tiny_model(layers=2), max_batch_tokens=budget)
    engine.tree_padding_reason = padded
    requests = [
        BranchRequest(
            token_ids=trunk(length),
            branches=tuple(branch(round(where * length), ids) for where, ids in its),
        )
        for length, its in layout
    ]
    one = engine.score_branches(requests, want="hidden")
    other = score_branches_separately(engine, requests, want="hidden")
    for a, b in zip(one, other, strict=True):
        for x, y in zip(a.branches, b.branches, strict=True):
            torch.testing.assert_close(x.logp_T, y.logp_T, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(x.hidden_TD, y.hidden_TD, rtol=1e-5, atol=1e-5)


@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    splices=st.lists(st.integers(0, 20), min_size=2, max_size=4),
    changed=st.integers(0, 3),
    at=st.integers(0, 19),
)
@ways
def test_a_branch_sees_neither_its_siblings_nor_what_came_later(
    make_engine: Make, splices: list[int], changed: int, at: int, padded: str | None
) -> None:
    engine = make_engine(tiny_model(layers=2))
    engine.tree_padding_reason = padded
    changed %= len(splices)
    its = [branch(splice, trunk(4 + n, step=n + 2)) for n, splice in enumerate(splices)]
    others = list(its)
    others[changed] = branch(splices[changed], tuple(reversed(trunk(4 + changed))))
    ids = trunk(20)
    bent = (*ids[:at], 255, *ids[at + 1 :])
    as_was, sibling, later = engine.score_branches(
        [
            BranchRequest(token_ids=ids, branches=tuple(its)),
            BranchRequest(token_ids=ids, branches=tuple(others)),
            BranchRequest(token_ids=bent, branches=tuple(its)),
        ]
    )
    for n, splice in enumerate(splices):
        was_T = as_was.branches[n].logp_T
        assert torch.allclose(was_T, sibling.branches[n].logp_T, atol=1e-6) == (n != changed)
        assert torch.allclose(was_T, later.branches[n].logp_T, atol=1e-6) == (at >= splice)


def passes_of(engine: Any) -> list[tuple[int, Any]]:
    """Tokens and mask of every pass from now on."""
    assert engine.branching_problem is None and engine.tree_padding_reason is None  # tried before
    seen: list[tuple[int, Any]] = []

    def note(_: Any, args: Any, kwargs: Any) -> None:
        seen.append((kwargs["input_ids"].numel(), kwargs.get("attention_mask")))

    engine.model.base_model.register_forward_pre_hook(note, with_kwargs=True)
    return seen


EARLY = BranchRequest(token_ids=trunk(300), branches=(branch(100, trunk(5)), branch(60, trunk(11))))
"""The trunk goes on long after its last splice."""


def test_the_cost_is_the_trunk_up_to_the_last_splice_and_the_branches(make_engine: Make) -> None:
    engine = make_engine()
    seen = passes_of(engine)
    engine.score_branches([EARLY])
    assert seen == [(100, None), (16, None)]


def test_samples_of_a_prompt_share_it_under_hints_too(make_engine: Make) -> None:
    engine = make_engine()
    requests = [
        BranchRequest(
            token_ids=(*trunk(40), 90 + n, *trunk(19)),
            scored=(False,) * 50 + (True,) * 10,
            # One leaves within the prompt, one where the answer begins.
            branches=(branch(30, trunk(7), scored=(0, 3)), branch(40, (5, 6, 7), scored=(0, 2))),
        )
        for n in range(2, 6)
    ]
    seen = passes_of(engine)
    check(engine, requests, found := engine.score_branches(requests, want="hidden"))
    assert len(found) == 4 and [tokens for tokens, _ in seen[:2]] == [40 + 4 * 19, 4 * 10]


def test_padded_trunks_cost_hardly_more(make_engine: Make) -> None:
    engine = make_engine()
    seen = passes_of(engine)
    engine.tree_padding_reason = "asked for"
    engine.score_branches([EARLY])
    (trunk_tokens, no_mask), (branch_tokens, mask) = seen
    assert trunk_tokens == 100 and no_mask is None
    assert 16 <= branch_tokens < 16 + 8
    assert mask.shape == (1, 1, branch_tokens, 100 + branch_tokens)
    assert mask.shape[-1] % 8 == 0, "attention kernels would copy it"


def test_a_mask_too_large_for_memory_is_taken_in_parts(
    make_engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    assert engine.branching_problem is None
    engine.tree_padding_reason = "asked for"
    monkeypatch.setattr(module, "mask_entries", lambda device: 1000)
    masks: list[torch.Size] = []
    original = module.branch_mask

    def noted(*args: Any, **kwargs: Any) -> Tensor:
        mask = original(*args, **kwargs)
        masks.append(mask.shape)
        return mask

    monkeypatch.setattr(module, "branch_mask", noted)
    request = BranchRequest(
        token_ids=trunk(40), branches=tuple(branch(35 - 5 * n, trunk(8, step=n)) for n in range(8))
    )
    check(engine, [request], engine.score_branches([request], want="hidden"))
    assert len(masks) > 2
    assert max(shape.numel() for shape in masks) < 1600  # up to 7 more places make rows even
    assert masks[0][-1] < masks[-1][-1], "early branches are spared the end of the trunk"


@ways
@pytest.mark.parametrize("adapter", ["on", "off"])
def test_with_lora(make_engine: Make, adapter: str, padded: str | None) -> None:
    from peft import LoraConfig, get_peft_model

    model = tiny_model()
    peft = get_peft_model(
        model, LoraConfig(task_type="CAUSAL_LM", r=4, lora_dropout=0.3, target_modules="all-linear")
    ).eval()
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    engine = make_engine(model)
    engine.tree_padding_reason = padded
    adapted = engine.score_branches(VARIOUS, want="hidden")
    if adapter == "on":
        check(engine, VARIOUS, adapted)
        return
    with peft.disable_adapter():
        bare = engine.score_branches(VARIOUS, want="hidden")
        check(engine, VARIOUS, bare)
    assert not torch.allclose(bare[0].branches[0].logp_T, adapted[0].branches[0].logp_T, atol=1e-2)


@ways
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_in_sixteen_bits(autocast: torch.dtype | None, padded: str | None) -> None:
    from tiny import tiny_tokenizer

    model = tiny_model() if autocast else tiny_model().to(torch.bfloat16)
    engine = LocalEngine(model, tiny_tokenizer(), name="tiny", autocast=autocast)
    engine.tree_padding_reason = padded
    one = engine.score_branches(VARIOUS, want="hidden")
    assert one[0].note is None
    other = score_branches_separately(engine, VARIOUS, want="hidden")
    for a, b in zip(one, other, strict=True):
        for x, y in zip(a.branches, b.branches, strict=True):
            x_TD, y_TD = x.hidden_TD.float(), y.hidden_TD.float()
            assert (x_TD - y_TD).norm() <= 0.02 * y_TD.norm()


def test_what_does_not_fit_the_context_is_refused(make_engine: Make) -> None:
    engine = make_engine(tiny_model(layers=1))
    long = trunk(600)
    fits = BranchRequest(token_ids=long, branches=(branch(500, trunk(12)),))
    engine.score_branches([fits])  # what follows the splice is never read
    over = BranchRequest(token_ids=long, branches=(branch(500, trunk(13)),))
    with pytest.raises(ModelError, match=r"513 tokens do not fit the context of tiny \(512\)"):
        engine.score_branches([fits, over])


def test_requests_that_make_no_sense() -> None:
    with pytest.raises(AssertionError, match="leaves the trunk"):
        BranchRequest(token_ids=trunk(3), branches=(branch(4, (5, 6)),))
    with pytest.raises(AssertionError, match="nothing predicts the first"):
        BranchRequest(token_ids=trunk(3), branches=(branch(0, (5, 6), scored=(0,)),))
    with pytest.raises(AssertionError, match="without a token"):
        BranchRequest(token_ids=trunk(3), branches=(branch(1, ()),))


@ways
def test_hidden_states_of_branches_do_not_keep_those_of_trunks(
    make_engine: Make, padded: str | None
) -> None:
    engine = make_engine()
    engine.tree_padding_reason = padded
    (found,) = engine.score_branches(VARIOUS[:1], want="hidden")
    (kept,) = {part.hidden_TD.untyped_storage().nbytes() for part in found.branches}
    rows = sum(sum(branch.scored) for branch in VARIOUS[0].branches)
    assert kept == rows * found.branches[0].hidden_TD.shape[1] * 8


def test_a_model_whose_branches_cannot_be_read_off_a_packed_row_has_padded_ones(
    make_engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "probe_tree_scoring", lambda model: "it does not")
    engine = make_engine()
    assert engine.passes.padding_reason is None and engine.tree_padding_reason == "it does not"
    monkeypatch.setattr(local, "score_packed_branches", None)
    check(engine, VARIOUS, engine.score_branches(VARIOUS, want="hidden"))
