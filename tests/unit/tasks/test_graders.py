from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from courtside.errors import TaskError
from courtside.tasks.graders import GRADERS, grade
from courtside.types import Grade, Message, Task


def task(grader: str | None, answer: str | None = None, **args: Any) -> Task:
    return Task(
        id="test-1",
        split="train",
        messages=(Message(role="user", content="?"),),
        answer=answer,
        grader=grader,
        grader_args=args,
    )


def graded(task: Task, response: str) -> Grade:
    result = grade(task, response)
    assert result is not None
    assert result.score == float(result.passed)
    assert bool(result.feedback) != result.passed
    return result


def test_a_task_without_a_grader_has_no_grade() -> None:
    assert grade(task(None), "anything") is None


@pytest.mark.parametrize(
    ("answer", "response"),
    [
        ("834", "Answer: 834"),
        ("834", "8 + 6 = 14, so 14.\nAnswer: 834."),
        ("834", "It is 834"),
        ("1234", "Answer: 1,234"),
        ("1234", "Answer: $1,234.00"),
        ("1,234", "Answer: 1234"),
        ("-7", "Answer: -7"),
        ("-7", "Answer: −7"),
        ("3", "That is 5-3"),
        ("4", "It is one of 3,4"),
        ("5", "Answer: 4. No wait. Answer: 5"),
        ("7", "Answer: **7**"),
        ("25", "Answer: 12 + 13 = 25"),
        ("9" * 5000, "9" * 5000),
    ],
)
def test_number_passes(answer: str, response: str) -> None:
    assert graded(task("number", answer), response).passed


@pytest.mark.parametrize(
    ("answer", "response", "reason"),
    [
        ("834", "Answer: 843", "must be 834, but the response says 843."),
        ("4", "Answer: 83.4", "says 83.4"),
        ("834", "Answer: 8340", "says 8340"),
        ("834", "834\nAnswer: 1", "says 1."),
        ("7", "Answer: -7", "says -7"),
        ("834", "I do not know.", "contains no number"),
        ("834", "", "contains no number"),
        ("3", "\u0663", "contains no number"),
    ],
)
def test_number_fails_with_the_reason(answer: str, response: str, reason: str) -> None:
    assert reason in graded(task("number", answer), response).feedback


@pytest.mark.parametrize(
    ("answer", "response", "passed"),
    [
        ("1/2", "So the result is $\\frac{1}{2}$.", True),
        ("\\frac{1}{2}", "The answer is \\boxed{0.5}", True),
        ("x^2+1", "It is $1 + x^2$.", True),
        ("72", "Half of 144 is 72.", True),
        ("72", "Half of 144 is 71.", False),
        ("72", "I do not know.", False),
        ("72", "", False),
        ("what?", "72", False),
    ],
)
def test_math(answer: str, response: str, passed: bool) -> None:
    assert graded(task("math", answer), response).passed == passed


def test_math_works_outside_the_main_thread() -> None:
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(graded, task("math", "1/3"), "It is $\\frac{2}{6}$").result().passed
        assert not pool.submit(graded, task("math", "1/3"), "It is 3").result().passed


def test_math_feedback() -> None:
    feedback = graded(task("math", "72"), "It is 71.").feedback
    assert feedback == "The answer must be 72, but the response says 71."
    assert "no mathematical answer" in graded(task("math", "72"), "no idea").feedback


def test_exact_and_contains() -> None:
    assert graded(task("exact", "Paris"), " Paris\n").passed
    assert not graded(task("exact", "Paris"), "paris").passed
    assert graded(task("exact", "Paris", ignore_case=True), "PARIS").passed
    assert "must be exactly 'Paris'" in graded(task("exact", "Paris"), "Rome").feedback
    assert graded(task("contains", "Paris"), "It is Paris, of course.").passed
    assert not graded(task("contains", "Paris"), "It is paris.").passed
    assert graded(task("contains", "Paris", ignore_case=True), "It is paris.").passed
    assert "must contain 'Paris'" in graded(task("contains", "Paris"), "").feedback


def test_regex() -> None:
    assert graded(task("regex", pattern=r"^\d+ apples"), "12 apples are left").passed
    assert "pattern" in graded(task("regex", pattern=r"^\d+ apples"), "apples").feedback


def test_instruction() -> None:
    assert graded(task("instruction", check="word_count", limit=3), "Hot molten rock").passed
    result = graded(task("instruction", check="word_count", limit=3), "It is hot molten rock")
    assert result.feedback == "The answer must have at most 3 words, but it has 5."


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (task("numbr", "4"), r"grader = 'numbr' is not known; use one of \['contains', 'exact'"),
        (task("number"), "`answer`, which the task lacks"),
        (task("exact", "  "), "`answer`, which the task lacks"),
        (task("number", "four"), "holds no number"),
        (task("exact", "a", ignore_cas=True), r"unknown grader_args \['ignore_cas'\]"),
        (task("exact", "a", ignore_case="yes"), "must be true or false"),
        (task("regex"), r"needs grader_args \['pattern'\]"),
        (task("regex", pattern="("), "does not compile"),
        (task("instruction"), "check = None is not known"),
        (task("instruction", check=["json"]), "is not known; use one of"),
        (task("instruction", check="word_count"), r"needs grader_args \['limit'\]"),
        (task("instruction", check="word_count", limit=0), "can never hold"),
        (task("instruction", check="word_count", limit=True), "must be a whole number"),
        (task("instruction", check="ending", phrase=""), "can never hold"),
        (task("instruction", check="json", limit=3), "unknown grader_args"),
    ],
)
def test_a_task_that_cannot_be_graded_is_refused(broken: Task, reason: str) -> None:
    with pytest.raises(TaskError, match=reason):
        grade(broken, "anything")


TASKS: Mapping[str, Task] = {
    "number": task("number", "17"),
    "math": task("math", "17"),
    "exact": task("exact", "17", ignore_case=True),
    "contains": task("contains", "17"),
    "regex": task("regex", pattern="17"),
    "instruction": task("instruction", check="one_sentence"),
    "maze": task("maze", "B0", map_seed=1, start="A0", is_continued=False, max_moves=9),
}


@given(st.text())
@example("$\\frac{1}{0}$ \\boxed{")
@example("-" * 50 + "1,,2,..3")
@example("Answer:")
@example("\x00\u202e$x$")
def test_no_text_breaks_a_grader(text: str) -> None:
    assert TASKS.keys() == GRADERS.keys()
    for name in TASKS.keys() - {"math"}:
        graded(TASKS[name], text)


def test_an_endless_expression_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("courtside.tasks.graders.MATH_SECONDS", 1)
    assert not graded(TASKS["math"], "It is $10^{10^{10^{10}}} + x$ or 10**10**10").passed


@settings(max_examples=40, deadline=None)
@given(st.text(st.sampled_from("0123456789+-*/^(){}$\\=.,% xfracsqtboed"), max_size=30))
@example("$\\frac{1}{0}$ \\boxed{")
@example("\\boxed{" * 50)
def test_no_text_breaks_the_math_grader(text: str) -> None:
    graded(TASKS["math"], text)
