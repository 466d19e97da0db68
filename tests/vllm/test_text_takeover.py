"""Take-overs by a real vLLM server's chat completions: it goes on with an answer, and says so."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support.vllm_server import PYTHON

from courtside.api import train
from courtside.assemble.inputs import load_inputs
from courtside.chat.openai_client import OpenAIClient
from courtside.recipe.load import parse_recipe
from courtside.recipe.takeover import TakeoverConfig
from courtside.rollout.text_teacher import TextTeacher

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason="no .venv-vllm: `make test` sets it up"),
]

NEW = 24


def make_recipe(exports: Any, server: Any, **takeover: Any) -> Any:
    endpoint = {"base_url": f"{server.url}/v1", "model": "merged"}
    return parse_recipe(
        {
            "student": {"model": str(exports.by_name["merged"].folder), "context_length": 512},
            "tasks": {"kind": "arithmetic"},
            "rollout": {"samples_per_prompt": 2, "max_new_tokens": NEW},
            "takeover": {"endpoint": endpoint, "can_continue": True, "select": "all",
                         "require": "none", "max_failure_fraction": 1.0} | takeover,
            "losses": [{"kind": "cross_entropy", "on": "teacher"}],
            "train": {"steps": 1, "prompts_per_step": 4},
            "evaluate": {"num_tasks": 1},
        }
    )  # fmt: skip


def test_greedy_answers_go_on_as_they_would_have(exports: Any, merged_server: Any) -> None:
    """From any token of its own answer a model goes on with the same one."""
    recipe = make_recipe(exports, merged_server)
    inputs, config = load_inputs(recipe), recipe.takeover
    assert isinstance(config, TakeoverConfig) and config.endpoint is not None
    client = OpenAIClient(
        config.endpoint, field="takeover.endpoint", max_new_tokens=NEW, temperature=0.0, shorten=""
    )
    teacher = TextTeacher(client=client, context=None, template=inputs.incremental)
    task = inputs.tasks.batch(0, 1)[0]
    (whole,) = client([teacher.make_prompt(task, ())])
    assert whole.text and whole.input_tokens == len(inputs.template.prompt_ids(task.messages))
    ids = inputs.template.tokenizer(whole.text, add_special_tokens=False)["input_ids"]
    for num in range(1, min(len(ids), 12)):
        prefix = teacher.find_prefix(ids[:num])
        assert prefix is not None
        (reply,) = client([teacher.make_prompt(task, (), prefix)])
        assert reply.text.startswith(prefix), "echo"
        assert reply.text.startswith(whole.text) or whole.text.startswith(reply.text)
        assert whole.is_truncated or reply.output_tokens <= whole.output_tokens - num + 1


def test_a_run(exports: Any, merged_server: Any, tmp_path: Path) -> None:
    recipe = make_recipe(exports, merged_server, max_new_tokens=200)
    for number in range(5):  # the small model ends an answer by chance, sometimes none of eight
        run = train(recipe, tmp_path / f"run-{number}")
        row = Counter(run.metrics()[0])
        assert row["takeover/drafts"] == 8
        if row["takeover/trained"]:
            break
    assert row["takeover/trained"] > 0
    assert not row["takeover/dropped/not_continued"] and not row["takeover/dropped/no_answer"]
    stored = run.trajectories(0)
    drafts = {s.trajectory.id: s.trajectory for s in stored}
    for s in stored:
        if (draft := drafts.get(s.trajectory.draft or "")) is not None:
            num = s.trajectory.completion_mask.index(True)
            assert s.trajectory.token_ids[:num] == draft.token_ids[:num]
