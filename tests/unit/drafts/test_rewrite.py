"""Repairs of drafts: which are made, which are used, and what trains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sampled_drafts import draft
from support.tiny_model import tiny_tokenizer

from courtside.chat.incremental import IncrementalTemplate
from courtside.chat.model_client import Reply
from courtside.chat.privileged_context import choose_contexts
from courtside.chat.reply_failures import FailureMonitor
from courtside.chat.template import ChatTemplate
from courtside.drafts.base import DraftOutcome
from courtside.drafts.criticize import Critic
from courtside.drafts.prompts import parse_whole
from courtside.drafts.queries import Answer, Failure, Interview, Query
from courtside.drafts.rewrite import ReplyCheck, Rewriter
from courtside.recipe.context import CritiqueContext, RepairContext
from courtside.recipe.drafts import CriticizeConfig, RewriteConfig
from courtside.recipe.losses import CrossEntropyLoss, DivergenceLoss
from courtside.training.loss_terms import make_loss_terms, preference_pairs
from courtside.types import Event, Grade, Message, Scored, Trajectory, Turn

TEMPLATE = IncrementalTemplate(ChatTemplate(tiny_tokenizer(), name="tiny", eos_ids=[1]))


class Model:
    """Replies with `text`, or with what a draft's id names."""

    def __init__(self, text: str = "4", **by_id: str) -> None:
        self.text, self.by_id = text, by_id
        self.queries: list[Query] = []

    def __call__(self, queries: Sequence[Query], *, max_failures: int) -> list[Answer | Failure]:
        self.queries += queries
        texts = [self.by_id.get(q.draft.id, self.text) for q in queries]
        return [Answer(reply=Reply(text=text, output_tokens=1), model="m") for text in texts]

    def ask(self) -> Interview[str]:
        monitor = FailureMonitor(name="drafts[0]", max_fraction=1.0)
        return Interview(client=self, parse=parse_whole, monitor=monitor)


def check_answer(_draft: Trajectory, _turn: int, reply: str) -> ReplyCheck:
    return ReplyCheck(grade=Grade(score=float(reply == "4"), passed=reply == "4"))


def rewrite(
    *drafts: Trajectory, model: Model | None = None, check: Any = check_answer, **fields: Any
) -> DraftOutcome:
    config = RewriteConfig(kind="rewrite", **fields)
    return Rewriter(
        config=config, ask=(model or Model()).ask(), template=TEMPLATE, check=check,
        context_length=fields.pop("context", 99),
    )(drafts)  # fmt: skip


def repairs_in(outcome: DraftOutcome) -> list[Trajectory]:
    return [t for t in outcome.trajectories if t.source == "teacher"]


def test_a_repair_follows_the_students_prompt() -> None:
    first = draft(2, 0)
    outcome = rewrite(first, draft(2, 1, 1.0))
    (repair,) = repairs_in(outcome)
    assert (repair.id, repair.draft, repair.correction) == (
        "000000-002-0+rewrite", first.id, "rewrite",
    )  # fmt: skip
    assert repair.turns[0] == first.turns[0], "the ids that the student saw"
    assert repair.completion_ids == TEMPLATE.renderer.completion_ids(first.task.messages, "4")
    assert repair.grade == Grade(score=1.0, passed=True) and repair.sampler_logp is None
    assert repair.policy_version is None and repair.temperature == first.temperature
    assert dict(outcome.counts) == {"skipped/passed": 1, "requests": 1, "repairs": 1}
    ids = [t.id for t in outcome.trajectories]
    assert ids == sorted(ids) and len(ids) == 3


def test_repairs_that_are_no_better_are_dropped_unless_the_recipe_says_otherwise() -> None:
    bad = Model("5")
    assert rewrite(draft(2, 0), model=bad).counts["dropped/no_better"] == 1
    unchecked = rewrite(draft(2, 0), model=bad, require_better=False)
    assert [t.response for t in repairs_in(unchecked)] == ["5"] and repairs_in(unchecked)[
        0
    ].grade is None
    ungraded = rewrite(draft(2, 0, None), model=bad, check=lambda *_: ReplyCheck())
    assert len(repairs_in(ungraded)) == 1, "nothing grades it"
    assert rewrite(draft(2, 0), model=Model("!")).counts["dropped/unchanged"] == 1


def test_a_repair_must_fit_the_student() -> None:
    outcome = rewrite(draft(2, 0), model=Model("4" * 200), require_better=False)
    assert not repairs_in(outcome) and outcome.counts["dropped/too_long_for_student"] == 1


def test_the_lowest_graded_drafts_are_repaired_first() -> None:
    group = [draft(2, 0, 0.5), draft(2, 1, 0.0), draft(2, 2, 0.2), draft(3, 0, 0.9)]
    outcome = rewrite(*group, max_per_prompt=1)
    assert [t.draft for t in repairs_in(outcome)] == [group[1].id, group[3].id]
    assert outcome.counts["skipped/budget"] == 2


def test_the_prompt_of_a_rewriter() -> None:
    model = Model()
    graded = replace(
        draft(2, 0), grade=Grade(score=0.0, passed=False, feedback="off by one"), critique="Count."
    )
    graded = replace(graded, task=replace(graded.task, privileged={"rule": "carry"}))
    rewrite(graded, model=model, reference="rule")
    rewrite(graded, model=model, feedback=False)
    texts = [query.prompt.content for query in model.queries]
    for word in ("user: ?", "\n!\n", "off by one\nCount.", "carry", "<answer>"):
        assert word in texts[0]
    assert not any(word in texts[1] for word in ("off by one", "Count.", "carry"))
    rewrite(graded, model=model, prompt="Fix {draft}!")
    assert model.queries[-1].prompt.content == "Fix !!"


def test_pairs_of_draft_and_repair() -> None:
    group = [draft(2, 0), draft(2, 1), draft(2, 2)]
    model = Model(**{group[1].id: "5"})
    outcome = rewrite(*group, model=model, pairs=True)
    scored = [Scored(trajectory=t, target=None) for t in outcome.trajectories]
    pairs = {(b.trajectory.id, w.trajectory.id) for b, w in preference_pairs(scored)}
    assert pairs == {(f"{t.id}+rewrite", t.id) for t in (group[0], group[2])}
    assert {t.id: t for t in outcome.trajectories}[group[1].id].preference is None


# ── episodes ─────────────────────────────────────────────────────────────────────────────────────


def episode(*events: str, number: int = 0) -> Trajectory:
    """Turns 1, 3 and 5 are the student's; `events` names those with an error."""
    single = draft(2, number)
    turns = [single.turns[0]]
    for n in range(3):
        kinds = tuple(Event(kind="typo") for name in events if name == str(2 * n + 1))
        turns.append(
            Turn(
                role="assistant",
                text=f"do {n}",
                token_ids=(5 + n, 1),
                completion_mask=(True, True),
                sampler_logp=(-1.0, -1.0),
                events=kinds,
            )
        )
        turns.append(TEMPLATE.environment_turn([Message(role="user", content=f"saw {n}")],
                                               add_end_of_turn=False))  # fmt: skip
    return replace(single, turns=tuple(turns))


def test_one_turn_of_an_episode_is_repaired_after_its_own_context() -> None:
    checked: list[tuple[int, str]] = []

    def check(_draft: Trajectory, turn: int, reply: str) -> ReplyCheck:
        checked.append((turn, reply))
        return ReplyCheck(events=() if reply == "4" else (Event(kind="typo"),))

    model = Model(**{draft(2, 1).id: "bad"})
    group = [episode("3", "5"), episode("3", number=1), episode(number=2)]
    outcome = rewrite(*group, model=model, check=check, pairs=True)
    (repair,) = repairs_in(outcome)
    assert checked == [(3, "4"), (3, "bad")]
    assert outcome.counts["dropped/not_passing"] == outcome.counts["skipped/no_event"] == 1
    assert [t.token_ids for t in repair.turns[:3]] == [t.token_ids for t in group[0].turns[:3]]
    assert [any(t.completion_mask) for t in repair.turns] == [False, False, False, True]
    prompt = model.queries[0].prompt.content
    assert "saw 0" in prompt and "Draft:\ndo 1" in prompt and "saw 1" not in prompt
    assert "typo" in prompt
    # The pair differs in that turn alone, and its worse member trains nothing else.
    scored = [Scored(trajectory=t, target=None) for t in outcome.trajectories]
    ((better, worse),) = preference_pairs(scored)
    assert better.trajectory is repair and worse.trajectory.id == f"{group[0].id}+draft"
    assert worse.trajectory.completion_ids == group[0].turns[3].token_ids
    losses = [CrossEntropyLoss(kind="cross_entropy", on="teacher"),
              DivergenceLoss(kind="divergence", against="reference", on="student")]  # fmt: skip
    scored = [replace(s, reference=object()) for s in scored]  # type: ignore[arg-type]
    imitation, regularization = make_loss_terms(losses, ["a", "b"], scored)
    assert imitation.weight.keys() == {repair.id}
    assert regularization.weight.keys() == {t.id for t in group}


def test_the_last_turn() -> None:
    def check(_draft: Trajectory, turn: int, reply: str) -> ReplyCheck:
        assert turn == 5
        return ReplyCheck(grade=Grade(score=0.5, passed=False))

    (repair,) = repairs_in(rewrite(episode(), check=check, turn="last"))
    assert len(repair.turns) == 6 and repair.grade == Grade(score=0.5, passed=False)


# ── contexts ─────────────────────────────────────────────────────────────────────────────────────


def test_a_repair_as_the_teachers_context() -> None:
    outcome = rewrite(draft(2, 0), draft(2, 1, 1.0))
    config = RepairContext(kind="repair", template="Better: {text}")
    chosen = draft(2, 2, draft="000000-002-1", correction="choose", preference="better")
    assert choose_contexts(config, [*outcome.trajectories, chosen])["000000-002-1"] is None
    texts = choose_contexts(config, outcome.trajectories)
    assert texts == {
        "000000-002-0": "Better: 4", "000000-002-0+rewrite": None, "000000-002-1": None,
    }  # fmt: skip


def test_critiques() -> None:
    model = Model("Count again.", **{draft(2, 2).id: "x" * 50})
    config = CriticizeConfig(kind="criticize", max_chars=40, reference="answer")
    group = [draft(2, 0), draft(2, 1, 1.0), draft(2, 2), draft(2, 3, source="teacher")]
    group[0] = replace(group[0], task=replace(group[0].task, answer="four"))
    outcome = Critic(config=config, ask=model.ask())(group)
    assert [t.critique for t in outcome.trajectories] == ["Count again.", None, None, None]
    assert dict(outcome.counts) == {
        "skipped/passed": 1, "requests": 2, "critiques": 1, "dropped/long_critique": 1,
    }  # fmt: skip
    assert "four" in model.queries[0].prompt.content
    texts = choose_contexts(CritiqueContext(kind="critique", template="{text}"), group)
    assert set(texts.values()) == {None}
    texts = choose_contexts(
        CritiqueContext(kind="critique", template="Said: {text}"), outcome.trajectories
    )
    assert texts[group[0].id] == "Said: Count again."


def test_repairs_are_no_drafts_for_later_stages() -> None:
    once = rewrite(draft(2, 0))
    critic = Critic(config=CriticizeConfig(kind="criticize"), ask=Model("Why?").ask())
    assert critic(once.trajectories).counts["requests"] == 1
    paired = rewrite(episode("3"), check=lambda *_: ReplyCheck(), pairs=True)
    assert [t.id[12:] for t in paired.trajectories] == ["", "+draft", "+rewrite"]
    assert critic(paired.trajectories).counts["requests"] == 1
