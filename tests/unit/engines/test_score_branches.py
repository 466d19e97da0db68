"""Tree scoring by the engine against one full forward pass and softmax per branch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.tiny_model import tiny_model
from support.varlen import make_branch
from torch import Tensor

from courtside.engines.base import BranchRequest, BranchScores, score_branches_separately
from courtside.engines.forward.tree_scoring import score_trees
from courtside.engines.local import LocalEngine
from courtside.errors import ModelError

Make = Callable[..., LocalEngine]


def trunk_ids(length: int, *, step: int = 7) -> tuple[int, ...]:
    return tuple(3 + (step * i * i + i) % 250 for i in range(length))


VARIOUS = [
    BranchRequest(
        token_ids=trunk_ids(40),
        scored=tuple(i in (1, 9, 30, 39) for i in range(40)),
        branches=(
            make_branch(40, (5, 6, 7, 8, 9)),  # at the end of the trunk
            make_branch(17, (9,) * 9, scored=(7, 8)),
            make_branch(17, (200, 31, 4)),  # another hint for the same turn
            make_branch(0, (4, 250, 6, 77)),  # instead of everything
            make_branch(3, (8, 1), scored=(0, 1)),  # its first token is predicted by the trunk
            make_branch(30, (8, 1, 3), scored=()),
        ),
        temperature=0.7,
    ),
    BranchRequest(
        token_ids=trunk_ids(9, step=3), branches=(make_branch(4, (6, 6, 7)),), temperature=1.6
    ),
    BranchRequest(token_ids=trunk_ids(23), branches=(), scored=(False,) * 22 + (True,)),
    BranchRequest(
        token_ids=trunk_ids(2), branches=(make_branch(0, trunk_ids(30)), make_branch(2, (7, 7)))
    ),
    BranchRequest(token_ids=trunk_ids(12), branches=()),
]


@torch.no_grad()
def reference_logps(
    engine: Any, ids: Sequence[int], scored: Sequence[bool], temperature: float
) -> Tensor:
    """Log-probs of the whole vocabulary at the scored tokens of one sequence."""
    logits_LV = engine.model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0]
    logp_LV = torch.log_softmax(logits_LV.double() / temperature, -1)
    return logp_LV[[i - 1 for i, is_scored in enumerate(scored) if is_scored]]


def check_scores(
    engine: Any, requests: Sequence[BranchRequest], scores_of: Sequence[BranchScores]
) -> None:
    """Log-probs, hidden states and top-k of every branch and trunk."""
    for r, scores in zip(requests, scores_of, strict=True):
        sequences = [
            (r.token_ids[: b.splice] + b.token_ids, (False,) * b.splice + b.scored)
            for b in r.branches
        ]
        results = list(scores.branches)
        assert (scores.trunk is None) == (r.scored is None)
        if r.scored is not None:
            sequences.append((r.token_ids, r.scored))
            results.append(scores.trunk)
        for (ids, scored), result in zip(sequences, results, strict=True):
            logp_TV = reference_logps(engine, ids, scored, r.temperature)
            ids_T = torch.tensor([i for i, is_scored in zip(ids, scored, strict=True) if is_scored])
            close = {"rtol": 1e-5, "atol": 1e-5}
            expected_T = logp_TV.gather(-1, ids_T.long()[:, None]).squeeze(-1)
            torch.testing.assert_close(result.logp_T.double(), expected_T, **close)
            if result.hidden_TD is not None and len(ids_T):
                head_logp_TV = torch.log_softmax(engine.head(result.hidden_TD) / r.temperature, -1)
                torch.testing.assert_close(head_logp_TV.double(), logp_TV, **close)
            if result.top_logp_TK is not None:
                top_TK = logp_TV.topk(result.top_logp_TK.shape[-1], dim=-1).values
                torch.testing.assert_close(result.top_logp_TK.double(), top_TK, **close)


@pytest.mark.parametrize("budget", [1, 60, 65536])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_scores_equal_separate_passes(make_engine: Make, attention: str, budget: int) -> None:
    model = tiny_model()
    model.set_attn_implementation(attention)
    engine = make_engine(model, max_batch_tokens=budget)
    scores = engine.score_branches(VARIOUS, want="hidden")
    assert all((s.note is None) == (attention == "sdpa") for s in scores)
    check_scores(engine, VARIOUS, scores)
    check_scores(engine, VARIOUS, engine.score_branches(VARIOUS, want="top_k", top_k=5))
    assert engine.score_branches([]) == []


def test_separate_branches_with_any_engine(make_engine: Make) -> None:
    engine = make_engine()
    check_scores(engine, VARIOUS, score_branches_separately(engine, VARIOUS, want="hidden"))
    check_scores(engine, VARIOUS, score_branches_separately(engine, VARIOUS, want="top_k", top_k=3))
    plain = engine.score_branches(VARIOUS)[0].branches[0]
    assert plain.hidden_TD is None and plain.top_ids_TK is None


def test_a_model_without_tree_scoring_says_why(make_engine: Make) -> None:
    engine = make_engine()
    engine.separate_branches_reason = "it ignores the cache"
    scores = engine.score_branches(VARIOUS, want="hidden")
    assert {s.note for s in scores} == {"it ignores the cache"}
    check_scores(engine, VARIOUS, scores)


trees = st.lists(
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
@given(trees=trees, budget=st.integers(1, 200), max_keys=st.integers(1, 3000))
def test_any_tree(
    make_engine: Make,
    trees: list[tuple[int, list[tuple[float, list[int]]]]],
    budget: int,
    max_keys: int,
) -> None:
    engine = make_engine(tiny_model(layers=2), max_batch_tokens=budget)
    requests = [
        BranchRequest(
            token_ids=trunk_ids(length),
            branches=tuple(
                make_branch(round(fraction * length), ids) for fraction, ids in branches
            ),
        )
        for length, branches in trees
    ]
    with engine.passes.patch_model():
        tree_scores = score_trees(
            engine.passes,
            engine.head,
            requests,
            want="hidden",
            top_k=0,
            max_tokens=engine.score_batch_tokens,
            max_shared_tokens=budget,
            max_keys=max_keys,
        )
    separate_scores = score_branches_separately(engine, requests, want="hidden")
    for ours, reference in zip(tree_scores, separate_scores, strict=True):
        for x, y in zip(ours.branches, reference.branches, strict=True):
            torch.testing.assert_close(x.logp_T, y.logp_T, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(x.hidden_TD, y.hidden_TD, rtol=1e-5, atol=1e-5)


@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    splices=st.lists(st.integers(0, 20), min_size=2, max_size=4),
    changed=st.integers(0, 3),
    position=st.integers(0, 19),
)
def test_a_branch_attends_neither_to_siblings_nor_to_later_tokens(
    make_engine: Make, splices: list[int], changed: int, position: int
) -> None:
    engine = make_engine(tiny_model(layers=2))
    changed %= len(splices)
    branches = [
        make_branch(splice, trunk_ids(4 + n, step=n + 2)) for n, splice in enumerate(splices)
    ]
    siblings = list(branches)
    siblings[changed] = make_branch(splices[changed], tuple(reversed(trunk_ids(4 + changed))))
    ids = trunk_ids(20)
    edited_ids = (*ids[:position], 255, *ids[position + 1 :])
    original, other_sibling, other_trunk = engine.score_branches(
        [
            BranchRequest(token_ids=ids, branches=tuple(branches)),
            BranchRequest(token_ids=ids, branches=tuple(siblings)),
            BranchRequest(token_ids=edited_ids, branches=tuple(branches)),
        ]
    )
    for n, splice in enumerate(splices):
        logp_T = original.branches[n].logp_T
        same_sibling = torch.allclose(logp_T, other_sibling.branches[n].logp_T, atol=1e-6)
        same_trunk = torch.allclose(logp_T, other_trunk.branches[n].logp_T, atol=1e-6)
        assert same_sibling == (n != changed)
        assert same_trunk == (position >= splice)


def record_passes(engine: Any) -> list[tuple[int, Any]]:
    """Number of tokens and attention mask of every pass from now on."""
    assert engine.separate_branches_reason is None  # the probe is over
    passes: list[tuple[int, Any]] = []

    def record(_: Any, args: Any, kwargs: Any) -> None:
        passes.append((kwargs["input_ids"].numel(), kwargs.get("attention_mask")))

    engine.model.base_model.register_forward_pre_hook(record, with_kwargs=True)
    return passes


def test_the_cost_is_the_trunk_up_to_the_last_splice_and_the_branches(make_engine: Make) -> None:
    engine = make_engine()
    passes = record_passes(engine)
    branches = (make_branch(100, trunk_ids(5)), make_branch(60, trunk_ids(11)))
    engine.score_branches([BranchRequest(token_ids=trunk_ids(300), branches=branches)])
    assert passes == [(100, None), (16, None)]


def test_trunks_share_their_prompt(make_engine: Make) -> None:
    engine = make_engine()
    requests = [
        BranchRequest(
            token_ids=(*trunk_ids(40), 90 + n, *trunk_ids(19)),
            scored=(False,) * 50 + (True,) * 10,
            branches=(
                make_branch(30, trunk_ids(7), scored=(0, 3)),  # inside the prompt
                make_branch(40, (5, 6, 7), scored=(0, 2)),  # where the answer begins
            ),
        )
        for n in range(2, 6)
    ]
    passes = record_passes(engine)
    scores = engine.score_branches(requests, want="hidden")
    assert [num_tokens for num_tokens, _ in passes] == [40 + 4 * 19, 4 * 10]
    check_scores(engine, requests, scores)


@pytest.mark.parametrize("adapter", ["on", "off"])
def test_with_lora(make_engine: Make, adapter: str) -> None:
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
    adapted = engine.score_branches(VARIOUS, want="hidden")
    if adapter == "on":
        check_scores(engine, VARIOUS, adapted)
        return
    with peft.disable_adapter():
        plain = engine.score_branches(VARIOUS, want="hidden")
        check_scores(engine, VARIOUS, plain)
    assert not torch.allclose(plain[0].branches[0].logp_T, adapted[0].branches[0].logp_T, atol=1e-2)


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_in_16_bits(autocast: torch.dtype | None) -> None:
    from support.tiny_model import tiny_tokenizer

    model = tiny_model() if autocast else tiny_model().to(torch.bfloat16)
    engine = LocalEngine(model, tiny_tokenizer(), name="tiny", autocast=autocast)
    tree_scores = engine.score_branches(VARIOUS, want="hidden")
    assert tree_scores[0].note is None
    separate_scores = score_branches_separately(engine, VARIOUS, want="hidden")
    for ours, reference in zip(tree_scores, separate_scores, strict=True):
        for x, y in zip(ours.branches, reference.branches, strict=True):
            x_TD, y_TD = x.hidden_TD.float(), y.hidden_TD.float()
            assert (x_TD - y_TD).norm() <= 0.02 * y_TD.norm()


def test_sequences_longer_than_the_context_are_refused(make_engine: Make) -> None:
    engine = make_engine(tiny_model(layers=1))
    ids = trunk_ids(600)
    fits = BranchRequest(token_ids=ids, branches=(make_branch(500, trunk_ids(12)),))
    engine.score_branches([fits])  # nothing after the last splice is computed
    too_long = BranchRequest(token_ids=ids, branches=(make_branch(500, trunk_ids(13)),))
    with pytest.raises(ModelError, match=r"513 tokens do not fit the context of tiny \(512\)"):
        engine.score_branches([fits, too_long])


def test_invalid_requests() -> None:
    with pytest.raises(AssertionError, match="leaves the trunk"):
        BranchRequest(token_ids=trunk_ids(3), branches=(make_branch(4, (5, 6)),))
    with pytest.raises(AssertionError, match="nothing predicts the first"):
        BranchRequest(token_ids=trunk_ids(3), branches=(make_branch(0, (5, 6), scored=(0,)),))
    with pytest.raises(AssertionError, match="without a token"):
        BranchRequest(token_ids=trunk_ids(3), branches=(make_branch(1, ()),))


def test_hidden_states_of_branches_do_not_hold_those_of_trunks(make_engine: Make) -> None:
    (scores,) = make_engine().score_branches(VARIOUS[:1], want="hidden")
    (num_bytes,) = {branch.hidden_TD.untyped_storage().nbytes() for branch in scores.branches}
    num_rows = sum(sum(branch.scored) for branch in VARIOUS[0].branches)
    assert num_bytes == num_rows * scores.branches[0].hidden_TD.shape[1] * 8
