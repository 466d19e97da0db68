"""What a teacher reads: its own context before, and behind it the student's very tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter

from courtside.chat.template import ChatTemplate
from courtside.engines.base import Sampling
from courtside.errors import TaskError
from courtside.recipe.context import Context
from courtside.teacher.teacher import Teacher, TeacherStage
from courtside.types import Task, Trajectory

Encode = Callable[[str], tuple[int, ...]]
Make = Callable[..., Any]

BEGIN = "<|im_start|>assistant\n"


def context(**options: str) -> Context:
    config: Context = TypeAdapter(Context).validate_python(options)
    return config


@pytest.fixture
def make_teacher(listener: Any, renderer: ChatTemplate) -> Callable[..., Teacher]:
    def make(**options: Any) -> Teacher:
        settings = {"want": "logp", **options}
        return Teacher(name="teacher", engine=listener, renderer=renderer, **settings)

    return make


# ── exact ids ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("config", "system", "expected"),
    [
        (
            context(kind="system", text="Be brief."),
            None,
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nAsk t<|im_end|>\n",
        ),
        (
            context(kind="system", text="Be brief."),
            "Kind.",
            "<|im_start|>system\nKind.\n\nBe brief.<|im_end|>\n<|im_start|>user\nAsk t<|im_end|>\n",
        ),
        (
            context(kind="field", field="rule"),
            None,
            "<|im_start|>system\nlower case<|im_end|>\n<|im_start|>user\nAsk t<|im_end|>\n",
        ),
        (
            context(kind="field", field="rule", position="user", template="[{text}] {text}"),
            "Kind.",
            "<|im_start|>system\nKind.<|im_end|>\n"
            "<|im_start|>user\nAsk t\n\n[lower case] lower case<|im_end|>\n",
        ),
        (
            context(kind="feedback", template="Wrong: {text}"),
            None,
            "<|im_start|>user\nAsk t\n\nWrong: upper case found<|im_end|>\n",
        ),
        (
            context(kind="feedback", template="Wrong: {text}", position="system"),
            None,
            "<|im_start|>system\nWrong: upper case found<|im_end|>\n"
            "<|im_start|>user\nAsk t<|im_end|>\n",
        ),
        (
            context(kind="sibling", template="Right: {text}"),
            None,
            "<|im_start|>user\nAsk t\n\nRight: done<|im_end|>\n",
        ),
        (None, "Kind.", None),
    ],
)
def test_the_prompt_gains_the_context_and_the_answer_nothing(
    make_teacher: Make,
    listener: Any,
    make_task: Make,
    make_trajectory: Make,
    encode: Encode,
    config: Context | None,
    system: str | None,
    expected: str | None,
) -> None:
    task = make_task(system=system, privileged={"rule": "lower case"})
    # A special token in the middle: no text renders to these ids, so they were not rendered.
    wrong = make_trajectory(
        "a", task, ids=(70, 0, 44, 1), passed=False, feedback="upper case found", temperature=0.6
    )
    right = make_trajectory("b", task, ids=(50, 1), text="done", passed=True)
    targets = make_teacher(context=config).score([wrong, right])
    request = listener.scored[0]
    prompt = wrong.turns[0].token_ids if expected is None else encode(expected + BEGIN)
    assert request.token_ids == (*prompt, 70, 0, 44, 1)
    assert request.scored == (False,) * len(prompt) + (True,) * 4
    assert request.temperature == 0.6
    target = targets["a"]
    assert target.logp_T.tolist() == [-70.0, -0.0, -44.0, -1.0]
    assert target.num_context_tokens == len(prompt) - len(wrong.turns[0].token_ids)
    assert target.teacher == "teacher"
    if config is None:
        assert target.context is None and target.num_context_tokens == 0
    else:
        assert target.context is not None and target.context in (expected or "")


def test_only_chosen_tokens_are_scored_also_between_turns(
    make_teacher: Make, listener: Any, make_trajectory: Make
) -> None:
    from dataclasses import replace

    from courtside.types import Turn

    t = make_trajectory("a")
    tool = Turn(role="environment", text="", token_ids=(80, 81), completion_mask=(False, False))
    longer = replace(t, turns=(*t.turns, tool, t.turns[1]))
    targets = make_teacher(context=context(kind="system", text="Hm.")).score([longer])
    (request,) = listener.scored
    assert request.token_ids[-8:] == (40, 41, 1, 80, 81, 40, 41, 1)
    assert request.scored[-8:] == (True, True, True, False, False, True, True, True)
    assert targets["a"].logp_T.tolist() == [-40.0, -41.0, -1.0, -40.0, -41.0, -1.0]


def test_hidden_states_and_head_come_only_where_a_loss_needs_them(
    make_teacher: Make, listener: Any, make_trajectory: Make
) -> None:
    t = make_trajectory("a")
    plain = make_teacher(want="logp").score([t])["a"]
    assert plain.hidden_TD is None and plain.head is None and listener.want == "logp"
    whole = make_teacher(want="hidden").score([t])["a"]
    assert torch.equal(whole.hidden_TD, torch.tensor([[40.0], [41.0], [1.0]]))
    assert whole.head is listener.head and listener.want == "hidden"


# ── who gets no teacher ──────────────────────────────────────────────────────────────────────────


def test_without_feedback_no_teacher_speaks(
    make_teacher: Make, make_trajectory: Make, listener: Any
) -> None:
    with_feedback = make_trajectory("a", passed=False, feedback="no")
    fine = make_trajectory("b", passed=True, feedback="")
    never_graded = make_trajectory("c")
    targets = make_teacher(context=context(kind="feedback")).score(
        [with_feedback, fine, never_graded]
    )
    assert set(targets) == {"a"}
    assert len(listener.scored) == 1


def test_a_sibling_is_another_passing_answer_to_the_same_task(
    make_teacher: Make, make_trajectory: Make, make_task: Make
) -> None:
    first_task, second_task = make_task("one"), make_task("two")
    batch = [
        make_trajectory("a", first_task, ids=(40, 1), text="A", passed=False),
        make_trajectory("b", first_task, ids=(40, 41, 42, 1), text="B", passed=True),
        make_trajectory("c", first_task, ids=(40, 41, 1), text="C", passed=True),
        make_trajectory("d", first_task, ids=(50, 51, 1), text="D", passed=True),
        make_trajectory("e", second_task, ids=(60, 1), text="E", passed=True),
        make_trajectory("f", make_task("three"), ids=(60, 1), text="F", passed=False),
    ]
    teacher = make_teacher(context=context(kind="sibling", template="{text}"))
    contexts = {id: target.context for id, target in teacher.score(batch).items()}
    # The shortest, by id where two are; never the trajectory itself, never another task's.
    assert contexts == {"a": "C", "b": "C", "c": "D", "d": "C"}
    assert teacher.score(batch[::-1]).keys() == contexts.keys()


def test_an_empty_passing_answer_is_no_context(make_teacher: Make, make_trajectory: Make) -> None:
    batch = [
        make_trajectory("a", ids=(40, 1), text="A", passed=False),
        make_trajectory("b", ids=(1,), text="", passed=True),
    ]
    assert make_teacher(context=context(kind="sibling")).score(batch) == {}


def test_a_missing_field_is_an_error_not_a_silence(
    make_teacher: Make, make_trajectory: Make, make_task: Make
) -> None:
    teacher = make_teacher(context=context(kind="field", field="rule"))
    t = make_trajectory("a", make_task("odd", privileged={"solution": "x", "hint": "y"}))
    with pytest.raises(TaskError, match=r"field = 'rule': task odd .*\(it has: hint, solution\)"):
        teacher.score([t])
    with pytest.raises(TaskError, match=r"it has: none"):
        teacher.write([make_task("bare")], Sampling(max_new_tokens=2), [0])


@pytest.mark.parametrize("overlong", ["error", "drop"])
def test_what_the_context_makes_too_long(
    make_teacher: Make, make_trajectory: Make, listener: Any, overlong: str
) -> None:
    short, long = make_trajectory("a", ids=(40, 1)), make_trajectory("b", ids=(40, 41, 1))
    config = context(kind="system", text="Be brief.")
    make_teacher(context=config).score([long])
    length = len(listener.scored.pop().token_ids)
    exact = make_teacher(context=config, overlong=overlong)
    exact.engine.context_length = length
    assert set(exact.score([short, long])) == {"a", "b"}, "the last token that fits"
    tight = make_teacher(context=config, overlong=overlong)
    tight.engine.context_length = length - 1
    if overlong == "drop":
        assert set(tight.score([short, long])) == {"a"}
    else:
        with pytest.raises(TaskError, match=rf"task t: .* has {length} tokens and teacher takes"):
            tight.score([short, long])


# ── weights, writing ─────────────────────────────────────────────────────────────────────────────


def test_its_weights_are_in_place_exactly_while_it_speaks(
    make_teacher: Make, make_trajectory: Make, make_task: Make, listener: Any
) -> None:
    log: list[str] = []

    @contextmanager
    def weights() -> Iterator[None]:
        log.append("in")
        try:
            yield
        finally:
            log.append("out")

    for name in ("score", "sample"):
        method = getattr(listener, name)

        def noted(*args: Any, _method: Any = method, **kwargs: Any) -> Any:
            log.append("speaks")
            return _method(*args, **kwargs)

        setattr(listener, name, noted)
    teacher = make_teacher(weights=weights)
    teacher.score([make_trajectory("a")])
    teacher.write([make_task()], Sampling(max_new_tokens=2), [0])
    assert log == ["in", "speaks", "out"] * 2


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (None, "<|im_start|>user\nAsk t<|im_end|>\n"),
        (
            context(kind="system", text="Be brief."),
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nAsk t<|im_end|>\n",
        ),
        (
            context(kind="field", field="rule", position="user"),
            "<|im_start|>user\nAsk t\n\nlower case<|im_end|>\n",
        ),
        # Before anything was written there is no feedback and no sibling.
        (context(kind="feedback"), "<|im_start|>user\nAsk t<|im_end|>\n"),
        (context(kind="sibling"), "<|im_start|>user\nAsk t<|im_end|>\n"),
    ],
)
def test_it_writes_with_what_is_known_before(
    make_teacher: Make,
    make_task: Make,
    listener: Any,
    encode: Encode,
    config: Context | None,
    expected: str,
) -> None:
    task: Task = make_task(privileged={"rule": "lower case"})
    samples = make_teacher(context=config).write([task, task], Sampling(max_new_tokens=2), [7, 8])
    assert [s.text for s in samples] == ["seed 7", "seed 8"]
    assert [r.prompt_ids for r in listener.sampled] == [encode(expected + BEGIN)] * 2


# ── the stage ────────────────────────────────────────────────────────────────────────────────────


def test_the_stage_brings_teacher_and_reference_together_by_id(
    make_teacher: Make, make_trajectory: Make
) -> None:
    teacher = make_teacher(context=context(kind="feedback"))
    batch: list[Trajectory] = [
        make_trajectory("a", passed=True),
        make_trajectory("b", ids=(60, 1), passed=False, feedback="no"),
    ]
    scored = TeacherStage(teacher, make_teacher())(batch)
    assert [s.trajectory for s in scored] == batch
    assert scored[0].target is None
    assert scored[1].target is not None and scored[1].target.logp_T.tolist() == [-60.0, -1.0]
    assert [s.reference.logp_T.tolist() for s in scored if s.reference] == [
        [-40.0, -41.0, -1.0],
        [-60.0, -1.0],
    ]
    bare = TeacherStage(None, None)
    assert all(s.target is None and s.reference is None for s in bare(batch))
