"""Switches of chat templates in a recipe: for the student, the teacher, evaluation and `show`."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Any

import pytest
import torch
from support.chat_templates import family_source, family_template, family_tokenizer
from support.small_runs import small_recipe
from support.tiny_model import tiny_model, tiny_tokenizer

from courtside.api import export, train
from courtside.assemble import assemble
from courtside.assemble.inputs import load_inputs
from courtside.assemble.preview import make_preview
from courtside.chat import template_variables
from courtside.chat.template import ChatTemplate
from courtside.errors import ModelError, RecipeError
from courtside.types import Message

OFF = {"enable_thinking": False}
EMPTY = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
FREE = "<|im_start|>assistant\n"
ASK = (Message(role="user", content="Is it?"),)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The tiny model under the chat templates of some families."""
    saved = {}
    for name in ("qwen3", "phi4"):
        folder = tmp_path_factory.mktemp(name)
        tiny_model().save_pretrained(folder)
        tiny_tokenizer(template=family_source(name)).save_pretrained(folder)
        saved[name] = folder
    return saved


def make_recipe(folder: Path, teacher: dict[str, Any] | None = None, **student: Any) -> Any:
    self_teacher: dict[str, Any] = {"kind": "self", "weights": "frozen"}
    return small_recipe(
        folder,
        student={"model": str(folder), **student},
        teacher=self_teacher | (teacher or {}),
        tasks={"kind": "arithmetic"},
    )


@pytest.mark.parametrize(
    ("teacher_args", "ending"), [(None, EMPTY), ({"enable_thinking": True}, FREE), ({}, FREE)]
)
def test_student_and_teacher_have_switches_of_their_own(
    folders: dict[str, Path], teacher_args: dict[str, Any] | None, ending: str
) -> None:
    """The same answer is scored after each one's prompt, as by plain passes."""
    extra = {} if teacher_args is None else {"chat_template_args": teacher_args}
    parts = assemble(make_recipe(folders["qwen3"], extra, chat_template_args=OFF))
    tasks = parts.tasks.batch(0, 2)
    trajectories = parts.rollout(tasks, 0)
    scored = parts.teacher(trajectories)
    tokenizer, model = parts.renderer.tokenizer, tiny_model()
    for s in scored:
        trajectory = s.trajectory
        prompt = trajectory.turns[0].token_ids
        assert tokenizer.decode(prompt).endswith(EMPTY)
        tree = [{"role": m.role, "content": m.content} for m in trajectory.task.messages]
        text = tokenizer.apply_chat_template(
            tree, add_generation_prompt=True, tokenize=False, enable_thinking=ending == FREE
        )
        assert text.endswith(ending)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        answer = trajectory.completion_ids
        with torch.no_grad():
            logits = model(torch.tensor([[*ids, *answer]])).logits[0]
        logp = logits.log_softmax(-1)[len(ids) - 1 : -1].gather(1, torch.tensor(answer)[:, None])
        assert s.target is not None
        torch.testing.assert_close(s.target.logp_T, logp[:, 0], rtol=1e-4, atol=1e-4)


def test_show_has_the_prompts_of_both(folders: dict[str, Path]) -> None:
    teacher = {"chat_template_args": {"enable_thinking": True}}
    preview = make_preview(make_recipe(folders["qwen3"], teacher, chat_template_args=OFF))
    texts = {s.title: "".join(token.text for token in s.tokens) for s in preview.sequences}
    assert texts["student: prompt"].endswith(EMPTY)
    assert texts["teacher self:frozen: prompt"].endswith(FREE)


def test_a_switch_that_does_not_exist_is_told_before_weights_are_read(
    folders: dict[str, Path],
) -> None:
    with pytest.raises(ModelError, match=r"student\.chat_template_args\.thinking: .*it reads: ena"):
        load_inputs(make_recipe(folders["qwen3"], chat_template_args={"thinking": True}))
    teacher = {"chat_template_args": {"thinking": True}}
    with pytest.raises(ModelError, match=r"teacher\.chat_template_args\.thinking: .*without it"):
        load_inputs(make_recipe(folders["qwen3"], teacher))
    with pytest.raises(ModelError, match=r"student\.chat_template_date = .* writes no date"):
        load_inputs(make_recipe(folders["qwen3"], chat_template_date="2026-11-18"))


def test_a_teacher_of_hints_has_no_switches(folders: dict[str, Path]) -> None:
    with pytest.raises(RecipeError, match=r"teacher\.chat_template_args: with a \[reader\]"):
        small_recipe(
            folders["qwen3"],
            tasks={"kind": "toolbox"},
            reader={"kind": "rules"},
            teacher={"kind": "self", "weights": "live", "chat_template_args": OFF},
            losses=[{"kind": "divergence", "on": "hinted_turns"}],
        )


def test_tools_without_a_role_are_told_before_weights_are_read(folders: dict[str, Path]) -> None:
    recipe = small_recipe(
        folders["phi4"],
        tasks={"kind": "toolbox"},
        teacher={"kind": "self", "weights": "frozen"},
    )
    with pytest.raises(RecipeError, match=r"tasks\.tool_role: .*Set tasks\.tool_role = false"):
        load_inputs(recipe)


@pytest.mark.parametrize("day", ["18 November", "2026-13-01"])
def test_a_date_is_a_date(folders: dict[str, Path], day: str) -> None:
    with pytest.raises(RecipeError, match="chat_template_date"):
        make_recipe(folders["qwen3"], chat_template_date=day)


def test_templates_write_one_date_for_a_whole_run(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = family_tokenizer("gpt-oss")
    options: dict[str, Any] = {"name": "gpt-oss", "eos_ids": [263, 264]}
    before = ChatTemplate(tokenizer, **options)
    text = before.text(before.prompt_ids(ASK))

    class Later(template_variables.datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return cls(2999, 1, 1)

    monkeypatch.setattr(template_variables, "datetime", Later)
    later = ChatTemplate(tokenizer, **options)
    assert later.text(later.prompt_ids(ASK)) == text
    assert later.date_note is not None and "student.chat_template_date" in later.date_note
    pinned = ChatTemplate(tokenizer, **options, day=date(2024, 2, 29))
    assert "Current date: 2024-02-29" in pinned.text(pinned.prompt_ids(ASK))
    assert pinned.date_note is None and family_template("qwen3").renderer.date_note is None


def test_the_model_card_names_the_switches(folders: dict[str, Path], tmp_path: Path) -> None:
    recipe = make_recipe(folders["qwen3"], chat_template_args=OFF)
    recipe = recipe.model_copy(update={"train": recipe.train.model_copy(update={"steps": 1})})
    train(recipe, tmp_path / "run")
    export(tmp_path / "run", tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert '`{"enable_thinking": false}`' in card and "chat_template_kwargs" in card
