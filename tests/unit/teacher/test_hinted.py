"""Hinted turns: the right tokens in the right context, what a hint did, and which ones train."""

from __future__ import annotations

import math
from copy import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.tiny_model import tiny_model, tiny_tokenizer

from courtside.chat.incremental import IncrementalTemplate
from courtside.chat.template import ChatTemplate
from courtside.engines.base import SampleRequest, Sampling, Want
from courtside.engines.local import LocalEngine
from courtside.recipe.hints import HintsConfig
from courtside.seeds import seed_for
from courtside.teacher.hint_scoring import HintScorer, HintTrial
from courtside.teacher.judging import judge_hints, tokens_of_span
from courtside.teacher.routing import RoutedTeachers
from courtside.teacher.teacher import Teacher, TeacherStage
from courtside.types import Hint, HintOutcome, Message, Sample, Target, Task, Trajectory, Update

MODEL = tiny_model()
TOKENIZER = tiny_tokenizer()
ENGINE = LocalEngine(MODEL, TOKENIZER, name="tiny")
RENDERER = ChatTemplate(TOKENIZER, name="tiny", eos_ids=ENGINE.eos_ids)
TEMPLATE = IncrementalTemplate(RENDERER)


def ids_of(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER(text, add_special_tokens=False)["input_ids"])


def trajectory(id: str = "e", *, tags: tuple[str, ...] = ()) -> Trajectory:
    """Three answers, with what the environment said between them."""
    task = Task(
        id=f"task-{id}",
        split="train",
        messages=(Message(role="user", content="Weather in Rome?"),),
        tags=tags,
    )
    turns = [TEMPLATE.prompt_turn(task)]
    for number, answer in enumerate(("meteo(Rome)", "get_weather(Rome)", "sun")):
        if number:
            result = (Message(role="tool", content=f"Tool not found {number}"),)
            turns.append(TEMPLATE.environment_turn(result, add_end_of_turn=False))
        ids = (*ids_of(answer), 1)
        turns.append(
            TEMPLATE.assistant_turn(
                Sample(token_ids=ids, logp=(-1.0,) * len(ids), stop="eos", text=answer)
            )
        )
    return Trajectory(
        id=id, task=task, turns=tuple(turns), source="student", policy_version=0,
        temperature=0.8, stop="done",
    )  # fmt: skip


def hint(turn: int, text: str = "Use weather.", *, of: str = "e", **options: Any) -> Hint:
    return Hint(trajectory=of, turn=turn, text=text, source="rules", **options)


def engine_of(context_length: int) -> LocalEngine:
    engine = copy(ENGINE)
    engine.context_length = context_length
    return engine


def teacher(
    *,
    want: Want = "hidden",
    context_length: int = 512,
    defers_hints: bool = False,
    **settings: Any,
) -> Teacher:
    engine = ENGINE if context_length == 512 else engine_of(context_length)
    return Teacher(
        name="self:live",
        engine=engine,
        renderer=RENDERER,
        want=want,
        # A random model likes every other hint.
        hints=HintScorer(engine, TEMPLATE, HintsConfig(**({"harmful": "train"} | settings))),
        defers_hints=defers_hints,
    )


def score_hints(
    scorer: Teacher | RoutedTeachers, trajectories: list[Trajectory], hints: list[Hint]
) -> tuple[dict[str, Target], dict[str, tuple[HintOutcome, ...]]]:
    """Targets and outcomes by trajectory id."""
    results = scorer.score_hints(trajectories, hints)
    targets = {id: result.target for id, result in results.items() if result.target is not None}
    return targets, {id: result.hints for id, result in results.items()}


def naive_logps(before: str, answer: str, *, temperature: float = 0.8) -> torch.Tensor:
    """By hand: the text up to the answer, the answer, one plain forward pass."""
    context, ids = ids_of(before), (*ids_of(answer), 1)
    with torch.no_grad():
        logits = MODEL(input_ids=torch.tensor([context + ids])).logits[0] / temperature
    logp = logits.log_softmax(-1)
    return torch.stack([logp[len(context) + i - 1, token] for i, token in enumerate(ids)])


PROMPT = "<|im_start|>user\nWeather in Rome?<|im_end|>\n"
OPEN = "<|im_start|>assistant\n"
FIRST = f"{PROMPT}{OPEN}meteo(Rome)<|im_end|>\n<|im_start|>tool\nTool not found 1<|im_end|>\n"
SECOND = f"{FIRST}{OPEN}get_weather(Rome)<|im_end|>\n<|im_start|>tool\nTool not found 2<|im_end|>\n"


def hint_text(text: str = "Use weather.", role: str = "user") -> str:
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


def test_a_target_is_the_turn_under_its_hint() -> None:
    targets, hint_outcomes = score_hints(teacher(role="system"), [trajectory()], [hint(3), hint(1)])
    target = targets["e"]
    role = "system"
    first = naive_logps(f"{PROMPT}{hint_text(role=role)}{OPEN}", "meteo(Rome)")
    # The first hint is nowhere in the context of the second.
    third = naive_logps(f"{FIRST}{hint_text(role=role)}{OPEN}", "get_weather(Rome)")
    assert target.token_indices == tuple(range(12 + 18))
    assert torch.allclose(target.logp_T, torch.cat([first, third]), atol=1e-4)
    assert target.hidden_TD is not None and target.head is ENGINE.head
    rebuilt = (target.head(target.hidden_TD) / 0.8).log_softmax(-1)
    chosen = torch.tensor(trajectory().completion_ids[:30])
    assert torch.allclose(rebuilt.gather(-1, chosen[:, None])[:, 0], target.logp_T, atol=1e-5)
    was = naive_logps(f"{PROMPT}{OPEN}", "meteo(Rome)")
    assert hint_outcomes["e"][0].shift == pytest.approx(float((was - first).sum()), abs=1e-3)
    assert [j.hint.turn for j in hint_outcomes["e"]] == [1, 3]


def test_cumulative_hints_stay_in_view() -> None:
    targets, hint_outcomes = score_hints(
        teacher(cumulative=True), [trajectory()], [hint(1), hint(3)]
    )
    hinted_first = FIRST.replace(PROMPT, PROMPT + hint_text())
    third = naive_logps(f"{hinted_first}{hint_text()}{OPEN}", "get_weather(Rome)")
    assert torch.allclose(targets["e"].logp_T[12:], third, atol=1e-4)
    was = naive_logps(f"{FIRST}{OPEN}", "get_weather(Rome)")
    assert hint_outcomes["e"][1].shift == pytest.approx(float((was - third).sum()), abs=1e-3)


def test_where_counts_chosen_tokens() -> None:
    targets, _ = score_hints(teacher(), [trajectory()], [hint(5)])
    assert targets["e"].token_indices == tuple(range(30, 34))
    last = naive_logps(f"{SECOND}{hint_text()}{OPEN}", "sun")
    assert torch.allclose(targets["e"].logp_T, last, atol=1e-4)


def test_a_hint_that_does_too_little_is_dropped_and_stays_in_the_report() -> None:
    hints = [hint(1), hint(3, "Really, use weather."), hint(5, "Hm.")]
    _, hint_outcomes = score_hints(teacher(), [trajectory()], hints)
    shifts = [j.shift for j in hint_outcomes["e"]]
    assert all(shift is not None for shift in shifts)
    middle = sorted(s for s in shifts if s is not None)[1]
    targets, outcomes = score_hints(teacher(min_shift=middle), [trajectory()], hints)
    assert [j.drop_reason for j in outcomes["e"]] == [
        "shift" if (j.shift or 0) < middle else None for j in hint_outcomes["e"]
    ]
    trained_turns = {j.hint.turn for j in outcomes["e"] if j.drop_reason is None}
    assert len(trained_turns) == 2
    turns = trajectory().turn_of
    assert {turns[i] for i in targets["e"].token_indices or ()} == trained_turns
    nothing, all_dropped = score_hints(teacher(min_shift=1e9), [trajectory()], hints)
    assert not nothing and [j.drop_reason for j in all_dropped["e"]] == ["shift"] * 3


def test_a_hint_that_makes_its_turn_more_likely_is_dropped() -> None:
    """It has a shift and no target, whether hints are scored alone or in one sequence."""
    hints = [hint(1), hint(3, "Really, use weather."), hint(5, "Hm.")]
    for cumulative in (False, True):
        settings: dict[str, Any] = {"harmful": "drop", "cumulative": cumulative}
        targets, outcomes = score_hints(teacher(**settings), [trajectory()], hints)
        reasons = {o.hint.turn: o.drop_reason for o in outcomes["e"]}
        assert {*reasons.values()} == {None, "harmful"}
        assert all(o.is_harmful == (o.drop_reason == "harmful") for o in outcomes["e"])
        turns = {trajectory().turn_of[i] for i in targets["e"].token_indices or ()}
        assert turns == {turn for turn, reason in reasons.items() if reason is None}


def test_hints_that_cannot_be_put_in_are_counted_not_fatal() -> None:
    hints = [hint(1), hint(2), hint(9), hint(3, "word " * 200), hint(5, "   ")]
    targets, hint_outcomes = score_hints(teacher(context_length=160), [trajectory()], hints)
    why = {j.hint.turn: j.drop_reason for j in hint_outcomes["e"]}
    assert why == {1: None, 2: "no_assistant_turn", 9: "no_assistant_turn", 3: "too_long",
                   5: "empty"}  # fmt: skip
    assert {trajectory().turn_of[i] for i in targets["e"].token_indices or ()} == {1}
    together, hint_outcomes = score_hints(
        teacher(context_length=160, cumulative=True), [trajectory()], hints
    )
    assert {j.hint.turn: j.drop_reason for j in hint_outcomes["e"]} == why
    assert torch.allclose(together["e"].logp_T, targets["e"].logp_T, atol=1e-4)


HINTS = [hint(5), hint(1, bad_span="meteo"), hint(2), hint(3, "   ")]


@pytest.mark.parametrize("want", ["hidden", "logp"])
def test_hints_can_be_deferred_to_the_update(want: Want, monkeypatch: pytest.MonkeyPatch) -> None:
    targets, outcomes = score_hints(teacher(want=want), [trajectory()], HINTS)
    monkeypatch.setattr(ENGINE, "score_branches", None)  # the engine is not asked
    results = teacher(want=want, defers_hints=True).score_hints([trajectory()], HINTS)
    result, target = results["e"], targets["e"]
    deferred = result.deferred
    assert deferred is not None and result.target is None
    assert (deferred.token_indices, result.hint_context, deferred.num_context_tokens) == (
        target.token_indices, target.context, target.num_context_tokens
    )  # fmt: skip
    assert deferred.teacher == target.teacher and deferred.needs_hidden == (want == "hidden")
    assert [b.turn for b in deferred.branches] == [1, 5] and len(deferred.token_indices) == 12 + 4
    assert deferred.bad_tokens == {1: (0, 1, 2, 3, 4), 5: ()}
    before = [
        ids_of(f"{PROMPT}{hint_text()}{OPEN}meteo(Rome)"),
        ids_of(f"{SECOND}{hint_text()}{OPEN}sun"),
    ]
    for branch, ids in zip(deferred.branches, before, strict=True):
        assert trajectory().token_ids[: branch.splice] + branch.token_ids == (*ids, 1)
    assert [(j.hint, j.drop_reason) for j in result.hints] == [
        (j.hint, j.drop_reason) for j in outcomes["e"]
    ]
    assert all(j.shift is None for j in result.hints)


def test_deferred_hints_are_judged_like_the_others() -> None:
    plain = naive_logps(f"{PROMPT}{OPEN}", "meteo(Rome)"), naive_logps(f"{SECOND}{OPEN}", "sun")
    (expected,) = TeacherStage(teacher(), None, hinted=True)([trajectory()], HINTS)
    stage = TeacherStage(teacher(defers_hints=True), None, hinted=True)
    scored = stage([trajectory(), trajectory("f")], HINTS)
    assert expected.target is not None and expected.deferred is None
    assert scored[0].target is None and scored[0].has_target and not scored[1].has_target
    assert scored[0].target_mask == expected.target_mask
    update = Update(
        step=0, loss=0.0, components={}, metrics={}, num_tokens={},
        student_logp={"e": (*plain[0].tolist(), *[math.nan] * 18, *plain[1].tolist())},
        teacher_logp={"e": tuple(expected.target.logp_T.tolist())},
    )  # fmt: skip
    judged, other = judge_hints(scored, update)
    assert judged.target is not None and judged.deferred is scored[0].deferred
    assert torch.equal(judged.target.logp_T, expected.target.logp_T)
    assert judged.target.token_indices == expected.target.token_indices
    for outcome, reference in zip(judged.hints, expected.hints, strict=True):
        assert (outcome.hint, outcome.drop_reason) == (reference.hint, reference.drop_reason)
        assert outcome.shift == pytest.approx(reference.shift, abs=1e-3)
        assert outcome.bad_span_shift == pytest.approx(reference.bad_span_shift, abs=1e-3)
    assert sum(j.bad_span_shift is not None for j in judged.hints) == 1
    assert other == scored[1]
    nothing = replace(update, student_logp={}, teacher_logp={})
    assert judge_hints(scored, nothing) == scored


def test_a_turn_without_a_chosen_token_leaves_nothing_to_score() -> None:
    """The update may end before it."""
    last = trajectory().turns[-1]
    silent = replace(last, completion_mask=(False,) * len(last.completion_mask))
    cut = replace(trajectory(), turns=(*trajectory().turns[:-1], silent))
    deferring = teacher(defers_hints=True)
    result = deferring.score_hints([cut], [hint(1), hint(5)])["e"]
    assert result.deferred is not None
    assert [b.turn for b in result.deferred.branches] == [1]
    assert [j.drop_reason for j in result.hints] == [None, None]
    assert deferring.score_hints([cut], [hint(5)])["e"].deferred is None


def test_the_bad_span_is_measured_apart() -> None:
    with_span = hint(3, bad_span="get_weather")
    _, hint_outcomes = score_hints(
        teacher(), [trajectory()], [with_span, hint(1, bad_span="no such words")]
    )
    was = naive_logps(f"{FIRST}{OPEN}", "get_weather(Rome)")
    now = naive_logps(f"{FIRST}{hint_text()}{OPEN}", "get_weather(Rome)")
    assert hint_outcomes["e"][1].bad_span_shift == pytest.approx(
        float((was - now)[:11].sum()), abs=1e-3
    )
    assert hint_outcomes["e"][0].bad_span_shift is None


def test_tokens_of_a_span() -> None:
    assert tokens_of_span(["call ", "get_", "wea", "ther", "()"], "get_weather") == (1, 2, 3)
    assert tokens_of_span(["call g", "et_weather()"], "get_weather") == (0, 1)
    assert tokens_of_span(["a", "", "b"], "b") == (2,)
    assert tokens_of_span(["abc"], "x") == ()


@pytest.mark.parametrize("place", ["before_turn", "last_message", "system"])
def test_every_place_gives_the_same_turn_another_context(place: str) -> None:
    targets, _ = score_hints(teacher(position=place), [trajectory()], [hint(3)])
    assert len(targets["e"].logp_T) == 18
    was = naive_logps(f"{FIRST}{OPEN}", "get_weather(Rome)")
    assert not torch.allclose(targets["e"].logp_T, was, atol=1e-3)
    before = {
        "before_turn": f"{FIRST}{hint_text()}{OPEN}",
        "last_message": FIRST.replace("found 1", "found 1\n\nUse weather.") + OPEN,
        "system": f"{hint_text(role='system')}{FIRST}{OPEN}",
    }[place]
    expected = naive_logps(before, "get_weather(Rome)")
    assert torch.allclose(targets["e"].logp_T, expected, atol=1e-4)


def test_sampled_losses_need_no_hidden_states() -> None:
    targets, _ = score_hints(teacher(want="logp"), [trajectory()], [hint(1)])
    assert targets["e"].hidden_TD is None and targets["e"].head is None


def test_scoring_marks_every_trajectory() -> None:
    batch = [trajectory("e"), trajectory("f")]
    scored = TeacherStage(teacher(), None, hinted=True)(batch, [hint(1)])
    assert [s.target is not None for s in scored] == [True, False]
    assert [len(s.hints) for s in scored] == [1, 0]
    assert all(
        not s.hints and s.target is None for s in TeacherStage(teacher(), None, hinted=True)(batch)
    )


def test_routes_score_their_own() -> None:
    routed = RoutedTeachers({"a": teacher(), "b": teacher(role="system")}, None)
    batch = [trajectory("e", tags=("a",)), trajectory("f", tags=("b",))]
    targets, hint_outcomes = score_hints(routed, batch, [hint(1), hint(1, of="f")])
    assert targets.keys() == hint_outcomes.keys() == {"e", "f"}
    for id, role in (("e", "user"), ("f", "system")):
        expected = naive_logps(f"{PROMPT}{hint_text(role=role)}{OPEN}", "meteo(Rome)")
        assert torch.allclose(targets[id].logp_T, expected, atol=1e-4)


def test_shifts_are_finite() -> None:
    _, hint_outcomes = score_hints(teacher(), [trajectory()], [hint(1), hint(3), hint(5)])
    assert all(j.shift is not None and math.isfinite(j.shift) for j in hint_outcomes["e"])


def test_replies_under_a_hint_are_checked() -> None:
    replies: list[tuple[str, int, str]] = []

    def passes(trajectory: Trajectory, turn: int, reply: str) -> bool:
        replies.append((trajectory.id, turn, reply))
        return turn == 3

    def judge(**settings: Any) -> Any:
        chosen = HintsConfig(resamples=3, **settings)
        trial = HintTrial(sampling=Sampling(max_new_tokens=4), passes=passes, num_replies=3, seed=0)
        scorer = HintScorer(ENGINE, TEMPLATE, chosen, trial=trial)
        return scorer.score([trajectory()], [hint(1), hint(3)], want="logp")["e"]

    scores = judge()
    assert [(j.hint.turn, j.pass_rate, j.drop_reason) for j in scores.outcomes] == [
        (1, 0, None),
        (3, 1, None),
    ]
    assert [turn for _, turn, _ in replies] == [1, 1, 1, 3, 3, 3]
    # What was tried is what the model writes behind the hint.
    ids = ids_of(f"{FIRST}{hint_text()}{OPEN}")
    seeds = [seed_for(0, "hint", "e", 3, n) for n in range(3)]
    requests = [SampleRequest(prompt_ids=ids, seed=seed) for seed in seeds]
    alone = ENGINE.sample(requests, Sampling(max_new_tokens=4))
    assert [reply for *_, reply in replies[3:]] == [sample.text for sample in alone]
    strict = judge(min_pass_rate=0.5)
    assert [j.drop_reason for j in strict.outcomes] == ["not_passed", None] and strict.turns == (3,)


def test_a_turn_is_scored_under_its_hint_and_under_the_wrong_one() -> None:
    """As two separate hints would be; outcomes are those of the right one."""
    batch = [trajectory("a"), trajectory("b")]
    right = [hint(1, "Use weather.", of="a"), hint(5, "Be brief.", of="a"), hint(3, of="b")]
    wrong = ["Be brief.", "Ask again.", "Sing."]
    paired = [replace(h, wrong_text=text) for h, text in zip(right, wrong, strict=True)]
    targets, outcomes = score_hints(teacher(), batch, paired)
    alone, alone_outcomes = score_hints(teacher(), batch, right)
    swapped, _ = score_hints(
        teacher(), batch, [replace(h, text=t) for h, t in zip(right, wrong, strict=True)]
    )
    for id, target in targets.items():
        torch.testing.assert_close(target.logp_T, alone[id].logp_T)
        torch.testing.assert_close(target.wrong_logp_T, swapped[id].logp_T)
        torch.testing.assert_close(target.wrong_hidden_TD, swapped[id].hidden_TD)
        shifts = [outcome.shift for outcome in outcomes[id]]
        assert shifts == pytest.approx([o.shift for o in alone_outcomes[id]], rel=1e-4)
        assert alone[id].wrong_logp_T is None
        assert target.num_context_tokens == (
            alone[id].num_context_tokens + swapped[id].num_context_tokens
        )
    only_last = targets["a"].without_turns(batch[0], {1})
    assert only_last is not None and only_last.wrong_logp_T is not None
    size = sum(batch[0].turns[5].completion_mask)
    torch.testing.assert_close(only_last.wrong_logp_T, targets["a"].wrong_logp_T[-size:])


def test_a_wrong_hint_that_does_not_fit_drops_the_pair() -> None:
    long = replace(hint(1), wrong_text="no " * 600)
    targets, outcomes = score_hints(teacher(), [trajectory()], [long, hint(3, wrong_text="Sing.")])
    assert [o.drop_reason for o in outcomes["e"]] == ["too_long", None]
    assert targets["e"].wrong_logp_T is not None
    assert len(targets["e"].wrong_logp_T) == len(targets["e"].logp_T)
