"""Answers that a student began, as tasks: where they are cut, how graded, what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.small_runs import small_recipe
from support.stored_runs import make_trajectory, store

from courtside.api import train
from courtside.chat.template import ChatTemplate
from courtside.errors import RecipeError, TaskError
from courtside.hashing import split_of
from courtside.recipe.load import parse_recipe
from courtside.recipe.prefix_tasks import PrefixTasks
from courtside.tasks.graders import make_grader
from courtside.tasks.student_prefixes import cut_answer, read_prefix_tasks
from courtside.types import Grade, Message, Task

TEXT = "One and two\nmake three. Answer: 3"
GRADED = Task(
    id="sum-1", split="train", messages=(Message(role="user", content="1 + 2?"),),
    answer=TEXT, grader="exact", completion=TEXT, tags=("sum",),
)  # fmt: skip


def answer(id: str = "a", text: str = TEXT, **changes: Any) -> Any:
    return replace(make_trajectory(id, text), task=GRADED, **changes)


def config(path: Path = Path("run"), **fields: Any) -> PrefixTasks:
    return PrefixTasks(kind="prefixes", path=path, **fields)


def prefixes(tasks: Any) -> list[str]:
    return [task.messages[-1].content for task in tasks]


def test_answers_are_cut_at_ends_of_words_between_the_depths() -> None:
    every = prefixes(cut_answer(answer(), config(depths=(0.0, 1.0), cuts=99)))
    assert every == [
        "One", "One and", "One and two", "One and two\nmake", "One and two\nmake three.",
        "One and two\nmake three. Answer:",
    ]  # fmt: skip
    middle = prefixes(cut_answer(answer(), config(depths=(0.3, 0.7), cuts=99)))
    assert middle == every[2:5]
    assert list(cut_answer(answer(text="Three"), config())) == []


def test_a_cut_follows_from_the_answer_alone() -> None:
    texts = prefixes(cut_answer(answer(), config()))
    assert len(texts) == 1 and texts == prefixes(cut_answer(answer(id="b"), config()))
    cut_texts = {prefixes(cut_answer(answer(text=f"{n} {TEXT}"), config()))[0] for n in range(30)}
    assert len({len(text.split()) for text in cut_texts}) > 3


def test_a_task_is_the_stored_one_with_the_start_of_its_answer(tmp_path: Path) -> None:
    run = store(tmp_path / "run", [answer(str(n), f"{n} {TEXT}") for n in range(3)])
    tasks = read_prefix_tasks(config(run, cuts=2), [])
    assert len({task.id for task in tasks}) == len(tasks) == 6
    for task in tasks:
        assert task.messages[0] == GRADED.messages[0] and task.messages[1].role == "assistant"
        assert (task.answer, task.grader, task.completion) == (TEXT, "exact", None)
        assert task.split == split_of("sum-1") and task.tags == ("sum", "prefix")


def test_the_whole_answer_is_graded() -> None:
    grade = make_grader(config())
    task = next(cut_answer(answer(), config()))
    continuation = TEXT.removeprefix(task.messages[-1].content)
    whole, wrong = grade(task, continuation), grade(task, continuation + "!")
    assert whole is not None and whole.passed
    assert wrong is not None and not wrong.passed


def test_only_failed_answers_of_the_student(tmp_path: Path) -> None:
    passed = Grade(score=1.0, passed=True, feedback="")
    run = store(
        tmp_path / "run",
        [answer("a", f"1 {TEXT}"), answer("b", f"2 {TEXT}", grade=passed)],
        [answer("c", f"3 {TEXT}", source="teacher"), answer("d", "Short")],
    )
    notes: list[str] = []
    everything = read_prefix_tasks(config(run), notes)
    assert {text[0] for text in prefixes(everything)} == {"1", "2"}
    assert notes[0].startswith("1 of 3 answers have no word's end between 0.1 and 0.9")
    failed = read_prefix_tasks(config(run, select="failed"), [])
    assert {text[0] for text in prefixes(failed)} == {"1"}
    assert prefixes(read_prefix_tasks(config(run, steps=(0,)), [])) == prefixes(everything)


def test_what_cannot_be_continued_is_refused(tmp_path: Path) -> None:
    short = store(tmp_path / "short", [answer(text="Three")])
    with pytest.raises(TaskError, match=r"none of its 1 answers .* Widen tasks.depths"):
        read_prefix_tasks(config(short), [])
    begun = replace(GRADED, messages=(*GRADED.messages, Message(role="assistant", content="Well")))
    twice = store(tmp_path / "twice", [replace(answer(), task=begun)])
    with pytest.raises(TaskError, match="begins its answer already"):
        read_prefix_tasks(config(twice), [])
    turns = answer().turns
    episode = store(tmp_path / "episode", [replace(answer(), turns=(*turns, *turns[1:]))])
    with pytest.raises(TaskError, match=r"an episode of 3 turns.*\[takeover\]"):
        read_prefix_tasks(config(episode), [])
    with pytest.raises(TaskError, match=r"tasks.steps: .* has no trajectories of step 4"):
        read_prefix_tasks(config(short, steps=(4,)), [])
    with pytest.raises(RecipeError, match=r"depths = \[0.9, 0.1\]: the smaller one comes first"):
        parse_recipe(
            {
                "student": {"model": "m"},
                "tasks": {"kind": "prefixes", "path": "run", "depths": [0.9, 0.1]},
                "losses": [{"kind": "policy_gradient", "advantage": "reward"}],
            }
        )


def test_a_run_continues_what_another_run_began(
    tiny_folder: Path, tiny_teacher_folder: Path, tmp_path: Path
) -> None:
    tasks = {"kind": "arithmetic", "digits": 1}
    first = train(
        small_recipe(
            tiny_folder,
            tasks=tasks,
            rollout={"samples_per_prompt": 4, "max_new_tokens": 24},
            losses=[{"kind": "policy_gradient", "advantage": "reward"}],
            train={"steps": 3, "prompts_per_step": 16, "learning_rate": 1e-3},
        ),
        tmp_path / "first",
        quiet=True,
    )
    second = train(
        small_recipe(
            tiny_teacher_folder,
            tasks={"kind": "prefixes", "path": str(first.path), "depths": [0.0, 1.0]},
            losses=[{"kind": "policy_gradient", "advantage": "reward"}],
            evaluate={"num_tasks": 1, "suites": {"plain": tasks}},
        ),
        tmp_path / "second",
        quiet=True,
    )
    answers = {
        s.trajectory.response for step in first.trajectory_steps() for s in first.trajectories(step)
    }
    for stored in second.trajectories(0):
        prefix = stored.trajectory.task.messages[-1]
        assert prefix.role == "assistant"
        assert any(text.startswith(prefix.content) for text in answers)
        assert "\ufffd" not in prefix.content
        assert not any(stored.trajectory.turns[0].completion_mask), "a prefix does not train"
    plain = {e.policy for e in second.evaluations()}
    assert "student:plain" in plain


def test_the_embedded_tokenizer_gives_the_students_ids_again() -> None:
    from transformers import AutoTokenizer

    from courtside.engines.builtin_model import locate_builtin_model

    tokenizer = AutoTokenizer.from_pretrained(locate_builtin_model())
    template = ChatTemplate(tokenizer, name="smollm2-135m", eos_ids={tokenizer.eos_token_id})
    text = "12 + 345:\n2 + 5 = 7, carry 0.\n\nAnswer: 357. It's done, isn't it?"
    prompt = template.prompt_ids(GRADED.messages)
    whole = prompt + tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
    tasks = list(cut_answer(answer(text=text), config(depths=(0.0, 1.0), cuts=99)))
    assert len(tasks) > 10
    for task in tasks:
        ids = template.prompt_ids(task.messages)
        assert ids == whole[: len(ids)]
