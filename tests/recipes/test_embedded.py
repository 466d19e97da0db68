"""The embedded SmolLM2: converted, asked, scored, and moved by one step of the demo recipe."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from courtside.api import train
from courtside.chat.template import ChatTemplate
from courtside.engines.base import SampleRequest, Sampling, ScoreRequest
from courtside.engines.loading import load_model, load_tokenizer
from courtside.engines.local import LocalEngine
from courtside.recipe.load import load_recipe
from courtside.types import Message

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def engine() -> LocalEngine:
    model = load_model("smollm2-135m", dtype=torch.float32, device=torch.device("cpu"))
    return LocalEngine(model, load_tokenizer("smollm2-135m"), name="smollm2-135m")


@pytest.fixture(scope="module")
def renderer(engine: LocalEngine) -> ChatTemplate:
    return ChatTemplate(engine.tokenizer, name=engine.name, eos_ids=engine.eos_ids)


def test_it_is_a_working_chat_model(engine: LocalEngine, renderer: ChatTemplate) -> None:
    ask = (Message(role="user", content="Name three fruits."),)
    request = SampleRequest(prompt_ids=renderer.prompt_ids(ask), seed=0)
    (answer,) = engine.sample([request], Sampling(max_new_tokens=40, temperature=0.0))
    assert answer.stop == "eos"
    assert "banana" in answer.text.lower()
    assert renderer.completion_ids(ask, answer.text) == answer.token_ids


def test_sampler_and_scorer_agree_on_every_token(
    engine: LocalEngine, renderer: ChatTemplate
) -> None:
    asks = ["Hi!", "What is a volcano?", "List four rivers of Europe, one to a line, please."]
    prompts = [renderer.prompt_ids((Message(role="user", content=ask),)) for ask in asks]
    requests = [SampleRequest(prompt_ids=p, seed=s) for p in prompts for s in (1, 2)]
    samples = engine.sample(requests, Sampling(max_new_tokens=12, temperature=0.8))
    scores = engine.score(
        [
            ScoreRequest(
                token_ids=r.prompt_ids + s.token_ids,
                scored=(False,) * len(r.prompt_ids) + (True,) * len(s.token_ids),
                temperature=0.8,
            )
            for r, s in zip(requests, samples, strict=True)
        ]
    )
    for sample, score in zip(samples, scores, strict=True):
        assert score.logp_T.tolist() == pytest.approx(sample.logp, abs=1e-3)


def test_one_step_of_a_shared_rule(tmp_path: Path) -> None:
    small = [
        "train.steps=1",
        "train.prompts_per_step=2",
        "rollout.max_new_tokens=8",
        "evaluate.num_tasks=2",
    ]
    run = train(load_recipe(ROOT / "recipes/shared-rule/recipe.toml", small), tmp_path / "run")
    (row,) = run.metrics()
    assert row["kl"] > 0.001  # the rule changes what the teacher expects
    assert row["grad_norm"] > 0
    assert row["sampler/logp_diff"] < 1e-3  # sampling and training see the same model
    (stored, *_) = run.trajectories(0)
    assert stored.context == stored.trajectory.task.privileged["rule"]
    assert stored.teacher == "self:frozen"


def test_one_step_of_the_demo_recipe(tmp_path: Path) -> None:
    # No tool under its common name: a call by habit goes wrong for sure.
    small = [
        "train.steps=1",
        "train.prompts_per_step=4",
        "tasks.turns=2",
        "tasks.common_name_fraction=0.0",
    ]
    small += ["evaluate.num_tasks=1"]
    recipe = load_recipe(ROOT / "recipes/targeted-hints/recipe.toml", small)
    run = train(recipe, tmp_path / "run")
    (row,) = run.metrics()
    assert row["events/tool_not_found"] > 0, "the habit that was planted"
    assert row["hints/trained"] > 0 and row["hints/shift"] > 1.0
    assert row["kl"] > 0.001 and row["grad_norm"] > 0
    assert row["sampler/logp_diff"] < 1e-3
    hinted = [s for s in run.trajectories(0) if s.hints]
    for stored in hinted:
        for hint_outcomes in stored.hints:
            turn = stored.trajectory.turns[hint_outcomes.hint.turn]
            assert any(event.kind == "tool_not_found" for event in turn.events)
            assert hint_outcomes.hint.text.startswith("Reminder: the tools here are")
    who = {(e.policy, e.step) for e in run.evaluations()}
    assert who == {(suite, step) for suite in ("student", "student:held_out") for step in (0, 1)}
    assert "tool_not_found" in (tmp_path / "run" / "report.html").read_text()
