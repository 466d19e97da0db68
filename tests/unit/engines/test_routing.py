"""Routers of mixtures of experts: which are found, what sampling records, what a pass replays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.mixtures import KINDS, NUM_EXPERTS, TOP_K, make_near_ties, mixture, routers_of
from support.model_kinds import ModelKind, build_model
from support.tiny_model import tiny_model, tiny_tokenizer

from courtside.engines.base import SampleRequest, Sampling, ScoreRequest
from courtside.engines.forward.batching import SequenceSpan, common_length
from courtside.engines.generation.continuous_batching import ContinuousBatchingSession
from courtside.engines.local import LocalEngine
from courtside.engines.routing import PassRouting, Routers, find_routers

RECORDED = Sampling(max_new_tokens=6, temperature=0.7, return_routed_experts=True)


@pytest.mark.parametrize("kind", KINDS)
def test_routers_come_in_the_order_of_a_pass(kind: str) -> None:
    model = mixture(kind)
    routers = find_routers(model)
    assert isinstance(routers, Routers)
    assert [r.module for r in routers.routers] == routers_of(model)
    assert routers.shape == (len(routers_of(model)), TOP_K)
    assert routers.num_experts == NUM_EXPERTS and routers.dtype == torch.uint8


@pytest.mark.parametrize(
    ("kind", "settings", "reason"),
    [
        ("phimoe", {}, "PhimoeTopKRouter selects experts without a top-k"),
        ("dbrx", {}, "DbrxRouter selects experts without a top-k"),
        ("deepseek_v4", {}, "DeepseekV4HashRouter selects experts without a top-k"),
    ],
)
def test_a_router_that_cannot_be_reached_has_a_reason(
    kind: str, settings: dict[str, Any], reason: str
) -> None:
    assert find_routers(build_model(ModelKind(model_type=kind, settings=settings))) == reason


def test_a_dense_model_has_no_routers() -> None:
    assert find_routers(tiny_model()) is None
    # A mixture whose layers are all dense.
    assert find_routers(mixture("deepseek_v3", first_k_dense_replace=3)) is None


class GraphEngine(LocalEngine):
    """As on a GPU; steps run eagerly here. Prefills of a shape by a step from the first time on."""

    num_eager_prefills = 0

    def _continuous_batching(self, num_rows: int, row_capacity: int) -> ContinuousBatchingSession:
        session = super()._continuous_batching(num_rows, row_capacity)
        session.num_eager_prefills = self.num_eager_prefills
        return session


class EagerPrefillEngine(GraphEngine):
    num_eager_prefills = 10**9


def make_engine(kind: str, engine_class: type[LocalEngine] = LocalEngine) -> LocalEngine:
    engine = engine_class(mixture(kind), tiny_tokenizer(), name=kind)
    if issubclass(engine_class, GraphEngine):
        engine.uses_continuous_batching = True
    return engine


def plain_experts(engine: LocalEngine, ids: tuple[int, ...]) -> torch.Tensor:
    """Of one pass over this sequence alone, by hooks on the routers."""
    selected: list[torch.Tensor] = []
    hooks = [
        router.register_forward_hook(lambda _, args, output: selected.append(output[2]))
        for router in routers_of(engine.model)
    ]
    with torch.no_grad():
        engine.model(input_ids=torch.tensor([ids]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return torch.stack(selected, dim=1)


def assert_same_experts(recorded: torch.Tensor, expected: torch.Tensor) -> None:
    assert recorded.dtype == torch.uint8
    torch.testing.assert_close(
        recorded.long().sort(-1).values, expected.sort(-1).values, rtol=0, atol=0
    )


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize("engine_class", [LocalEngine, GraphEngine, EagerPrefillEngine])
def test_turns_record_the_experts_of_a_plain_pass(
    kind: str, engine_class: type[LocalEngine]
) -> None:
    """Rows of other lengths, with shared prompts and prefixes, restarts, and growing buffers."""
    engine = make_engine(kind, engine_class)
    session = engine.session(4)
    shared = tuple(range(20, 60))
    script: list[dict[int, tuple[int, ...]]] = [
        {0: shared, 1: shared, 2: (*shared, 9, 8), 3: (5, 6, 7)},
        {1: (3, 4), 3: tuple(range(30, 180))},
        {0: (7, 7), 1: (2,), 2: (8,) * 9, 3: (4, 4)},
    ]
    contexts: dict[int, tuple[int, ...]] = {}
    last: dict[int, tuple[int, ...]] = {}
    for number, turn in enumerate(script):
        if number == 2:
            session.restart(0)
            contexts.pop(0)
            last.pop(0)
        prompts = {row: last.get(row, ()) + ids for row, ids in turn.items()}
        requests = [
            SampleRequest(prompt_ids=ids, seed=100 * number + row) for row, ids in prompts.items()
        ]
        samples = session.sample(list(prompts), requests, RECORDED)
        for row, sample in zip(prompts, samples, strict=True):
            before = contexts.get(row, ())
            processed = prompts[row] + sample.token_ids[:-1]
            assert sample.routed_experts is not None
            expected = plain_experts(engine, before + processed)[len(before) :]
            assert_same_experts(sample.routed_experts, expected)
            contexts[row], last[row] = before + processed, sample.token_ids[-1:]


@pytest.mark.parametrize("engine_class", [LocalEngine, GraphEngine])
def test_more_requests_than_rows_are_recorded(engine_class: type[LocalEngine]) -> None:
    engine = make_engine("qwen3_moe", engine_class)
    engine.max_batch_tokens = 200
    requests = [
        SampleRequest(prompt_ids=tuple(range(9, 12 + 5 * (n // 2))), seed=n) for n in range(14)
    ]
    samples = engine.sample(requests, RECORDED)
    plain = engine.sample(requests, replace(RECORDED, return_routed_experts=False))
    for request, sample, without in zip(requests, samples, plain, strict=True):
        assert without.routed_experts is None
        assert replace(sample, logp=()) == replace(without, logp=())
        assert sample.logp == pytest.approx(
            without.logp, abs=1e-5
        )  # threads share sums differently
        expected = plain_experts(engine, request.prompt_ids + sample.token_ids[:-1])
        assert sample.routed_experts is not None
        assert_same_experts(sample.routed_experts, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_scores_of_recorded_experts_are_the_sampler_s(kind: str) -> None:
    """Rounding decides between experts with nearly equal scores."""
    engine = LocalEngine(mixture(kind), tiny_tokenizer(), name=kind)
    assert engine.passes.unshared_reason is None and engine.stateless_reason is None
    assert engine.recorded_routers is not None
    make_near_ties(engine.model)
    prompts = [tuple(range(9, 40)), tuple(range(9, 33)), (3, 2), tuple(range(9, 140))]
    requests = [SampleRequest(prompt_ids=ids, seed=n) for n, ids in enumerate(prompts)]
    samples = engine.sample(requests, replace(RECORDED, max_new_tokens=40, temperature=1.0))
    make_near_ties(engine.model)  # other experts of each four score highest
    sequences = [r.prompt_ids + s.token_ids for r, s in zip(requests, samples, strict=True)]
    errors = []
    for replays in (True, False):
        scored = [
            ScoreRequest(
                token_ids=ids,
                scored=(False,) * len(r.prompt_ids) + (True,) * len(s.token_ids),
                routed_experts=(s.routed_experts,) if replays and s.routed_experts is not None
                else (),
            )
            for ids, r, s in zip(sequences, requests, samples, strict=True)
        ]  # fmt: skip
        scores = engine.score(scored)
        errors.append(
            max(
                float((score.logp_T - torch.tensor(s.logp)).abs().max())
                for score, s in zip(scores, samples, strict=True)
            )
        )
    assert errors[0] < 5e-4 and errors[1] > 0.05


def routing_of_pass(
    engine: LocalEngine, sequences: list[tuple[int, ...]], marks: list[int | None], *, replays: bool
) -> tuple[PassRouting, Sequence[SequenceSpan]]:
    """A pass of sequences whose records have the experts `mark`, `mark` + 1, … for every token."""
    routers, passes = engine.recorded_routers, engine.passes
    assert routers is not None
    records = [
        ()
        if mark is None
        else (
            torch.full((len(ids), *routers.shape), mark, dtype=torch.uint8) + torch.arange(TOP_K),
        )
        for mark, ids in zip(marks, sequences, strict=True)
    ]
    with torch.no_grad(), passes.patch_model():
        _, spans = passes.forward(sequences, records=records, replays=replays)
        routing = routers.current
    assert routing is not None and routers.current is None, "nobody replays after the passes"
    return routing, spans


PREFIX = tuple(range(20, 60))
SHARING = [(*PREFIX, 3), (*PREFIX, 4, 5), (6, 7)]


def first_experts(routing: PassRouting, span: SequenceSpan, ids: tuple[int, ...]) -> list[int]:
    assert routing.recorded_NLK is not None
    return routing.recorded_NLK[span.indices(range(len(ids)))][:, 0, 0].tolist()


def test_a_shared_prefix_is_compared_with_the_record_of_its_first_sequence() -> None:
    """The first sequence has no record: its prefix is that of the next, its own token has none."""
    engine = make_engine("qwen3_moe")
    routing, spans = routing_of_pass(engine, SHARING, [None, 4, 6], replays=False)
    assert spans[0].num_prefix == spans[1].num_prefix == len(PREFIX)
    experts = [first_experts(routing, s, ids) for s, ids in zip(spans, SHARING, strict=True)]
    assert experts == [[4] * 40 + [-1], [4] * 42, [6] * 2]
    assert routing.counts_N is not None
    assert routing.counts_N[spans[0].indices(range(41))].tolist() == [1] * 40 + [0]


@pytest.mark.parametrize(
    ("marks", "num_prefix"), [((4, 4, 6), 40), ((2, 4, 6), 0), ((None, 4, 6), 0)]
)
def test_replayed_sequences_share_what_went_to_the_same_experts(
    marks: tuple[int | None, ...], num_prefix: int
) -> None:
    engine = make_engine("qwen3_moe")
    routing, spans = routing_of_pass(engine, SHARING, list(marks), replays=True)
    assert spans[0].num_prefix == spans[1].num_prefix == num_prefix
    for mark, span, ids in zip(marks, spans, SHARING, strict=True):
        expected = -1 if mark is None else mark
        assert first_experts(routing, span, ids) == [expected] * len(ids)
    keys = engine.passes.sharing_keys(
        SHARING, [() if m is None else (torch.full((42, 2, 2), m),) for m in marks], replays=True
    )
    assert common_length(tuple(keys[0]), tuple(keys[1])) == num_prefix, "planned as it is packed"


@pytest.mark.parametrize("kind", KINDS)
def test_fast_paths_do_not_depend_on_which_experts_rounding_selects(kind: str) -> None:
    """A probe's example goes to other experts in another batch, and that is no fault of a path."""
    model = mixture(kind)
    make_near_ties(model)
    engine = LocalEngine(model, tiny_tokenizer(), name=kind)
    assert engine.passes.padding_reason is None and engine.passes.unshared_reason is None
    assert engine.stateless_reason is None and engine.separate_branches_reason is None
