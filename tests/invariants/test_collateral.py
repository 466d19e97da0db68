"""Collateral: the KL over the whole vocabulary, by hand in float64, and that it costs no memory."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.small_runs import small_recipe
from support.tiny_model import tiny_model, tiny_tokenizer

from courtside.api import train
from courtside.chat.template import ChatTemplate
from courtside.engines.base import ScoreRequest
from courtside.engines.local import LocalEngine
from courtside.errors import ModelError
from courtside.evaluate import collateral
from courtside.evaluate.collateral import (
    PROMPTS,
    collateral_kl,
    collateral_kl_on_prompts,
    kl_by_token,
    measure_collateral,
)
from courtside.types import Message, Task, Trajectory, Turn

TASK = Task(id="t", split="test", messages=(Message(role="user", content="Go."),))


def engine(model: Any) -> LocalEngine:
    return LocalEngine(model, tiny_tokenizer(), name="tiny")


def perturbed(seed: int = 0) -> Any:
    """The model of seed 0, somewhat trained."""
    model = tiny_model()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return model


def naive_kl(first: Any, second: Any, ids: tuple[int, ...], temperature: float) -> torch.Tensor:
    """KL(first ‖ second) of the next token, after each prefix; in float64."""
    inputs = torch.tensor([ids])
    with torch.no_grad():
        p, q = ((m.double()(input_ids=inputs).logits[0] / temperature).softmax(-1)
                for m in (first, second))  # fmt: skip
    return (p * (p / q).log()).sum(-1)


def made_turn(ids: tuple[int, ...], decision: str | None) -> Turn:
    return Turn(
        role="assistant", text="x", token_ids=ids, completion_mask=(True,) * len(ids),
        sampler_logp=(-1.0,) * len(ids), decision=decision,
    )  # fmt: skip


def prompt_turn(*ids: int) -> Turn:
    return Turn(role="environment", text="", token_ids=ids, completion_mask=(False,) * len(ids))


def played(*turns: Turn, temperature: float = 1.0) -> Trajectory:
    return Trajectory(
        id="e", task=TASK, turns=turns, source="student", policy_version=0,
        temperature=temperature, stop="done",
    )  # fmt: skip


EPISODES = [
    played(
        replace(prompt_turn(5, 6, 7), role="prompt"),
        made_turn((8, 9, 10), "date/habit_wrong"),
        prompt_turn(11, 12),
        made_turn((13, 14), None),
    ),
    played(
        replace(prompt_turn(5), role="prompt"),
        made_turn((20,), "date/habit_wrong"),
        prompt_turn(21),
        made_turn((22, 23, 24, 25), "filler"),
    ),
    played(replace(prompt_turn(5, 6), role="prompt")),
]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_kl_by_token_is_that_of_whole_distributions(
    temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collateral, "NUM_SCORED", 2)  # several parts and chunks
    monkeypatch.setattr(collateral, "CHUNK", 2)
    lengths = (9, 4, 6, 5, 7)
    requests = [
        ScoreRequest(
            token_ids=tuple(range(n, n + length)),
            scored=tuple(i > 0 and (i + n) % 3 > 0 for i in range(length)),
            temperature=temperature,
        )
        for n, length in enumerate(lengths, start=4)
    ]
    values = kl_by_token(requests, engine(tiny_model()), engine(perturbed()))
    for request, kl_T in zip(requests, values, strict=True):
        naive = naive_kl(tiny_model(), perturbed(), request.token_ids, temperature)
        positions = [i - 1 for i, scored in enumerate(request.scored) if scored]
        torch.testing.assert_close(kl_T, naive[positions], rtol=1e-3, atol=1e-5)
        assert (kl_T > 1e-4).all(), "else this would compare nothing"


def test_means_are_over_tokens_of_all_turns_and_of_each_decision() -> None:
    metrics = collateral_kl(EPISODES, engine(tiny_model()), engine(perturbed()))
    tokens: dict[str, list[float]] = {"turns": [], "date/habit_wrong": [], "filler": []}
    for episode in EPISODES[:2]:
        naive = naive_kl(tiny_model(), perturbed(), episode.token_ids, 1.0)
        position = 0
        for turn in episode.turns:
            for is_completion in turn.completion_mask:
                if is_completion:
                    tokens["turns"].append(float(naive[position - 1]))
                    if turn.decision is not None:
                        tokens[turn.decision].append(float(naive[position - 1]))
                position += 1
    assert [len(values) for values in tokens.values()] == [10, 4, 4]
    assert metrics == {
        f"collateral/{name}": pytest.approx(sum(values) / len(values), rel=1e-3)
        for name, values in tokens.items()
    }


def test_an_untrained_student_has_changed_nothing() -> None:
    metrics = collateral_kl(EPISODES, engine(tiny_model()), engine(tiny_model()))
    assert set(metrics) == {"collateral/turns", "collateral/date/habit_wrong", "collateral/filler"}
    assert all(abs(value) < 1e-6 for value in metrics.values())
    template = ChatTemplate(tiny_tokenizer(), name="tiny", eos_ids=frozenset({1}))
    same = collateral_kl_on_prompts(engine(tiny_model()), engine(tiny_model()), template, seed=0)
    assert abs(same["collateral/prompts"]) < 1e-6


def test_answers_to_prompts_are_those_of_the_untrained_student() -> None:
    """Whatever the trained one is; they follow the seed."""
    template = ChatTemplate(tiny_tokenizer(), name="tiny", eos_ids=frozenset({1}))
    untrained, trained = engine(tiny_model()), engine(perturbed())
    requests: list[ScoreRequest] = []

    def recording(score: Callable[..., Any]) -> Callable[..., Any]:
        def score_and_record(batch: Any, **options: Any) -> Any:
            requests.extend(batch)
            return score(batch, **options)

        return score_and_record

    trained.score = recording(trained.score)  # type: ignore[method-assign]
    metrics = [
        collateral_kl_on_prompts(untrained, trained, template, seed=seed) for seed in (0, 0, 1)
    ]
    assert metrics[0] == metrics[1] != metrics[2]
    values = []
    for request in requests[: len(PROMPTS)]:
        naive = naive_kl(tiny_model(), perturbed(), request.token_ids, 1.0)
        values += [float(naive[i - 1]) for i, scored in enumerate(request.scored) if scored]
    assert metrics[0]["collateral/prompts"] == pytest.approx(sum(values) / len(values), rel=1e-3)


def test_the_untrained_student_is_given_back() -> None:
    template = ChatTemplate(tiny_tokenizer(), name="tiny", eos_ids=frozenset({1}))
    loaded: list[weakref.ref[Any]] = []

    def load() -> LocalEngine:
        model = tiny_model()
        model.itself = [model]  # a circle, as CUDA graphs make them
        loaded.append(weakref.ref(model))
        return engine(model)

    gc.disable()
    try:
        trained = engine(perturbed())
        measure_collateral(EPISODES, load, trained, template, seed=0)
        assert [reference() for reference in loaded] == [None]
    finally:
        gc.enable()


# ── in a run ─────────────────────────────────────────────────────────────────────────────────────

BOARD: dict[str, Any] = {
    "tasks": {"kind": "switchboard", "turns": 8},
    "rollout": {"samples_per_prompt": 2, "max_new_tokens": 4},
    "reader": {"kind": "rules", "rules": [{"detect": "no_call", "hint": "Call something."}]},
    "teacher": {"kind": "self", "weights": "live"},
    "losses": [{"kind": "divergence", "on": "hinted_turns"}],
    "train": {"steps": 2, "prompts_per_step": 2, "learning_rate": 1e-2},
    "evaluate": {"num_tasks": 2, "collateral": True, "suites": {"other": {"cues": "held_out"}}},
}
SINGLE_TURN: dict[str, Any] = {
    "tasks": {"kind": "instructions", "instruction_in_prompt": False},
    "teacher": {"kind": "self", "context": {"kind": "system", "text": "Be brief."}},
    "train": {"steps": 2, "prompts_per_step": 2, "learning_rate": 1e-2},
    "evaluate": {"num_tasks": 2, "collateral": True},
}


def last_metrics(run: Any, policy: str = "student") -> dict[str, float]:
    rows = [e for e in run.evaluations() if e.policy == policy and e.split == "test"]
    assert [e.step for e in rows] == [0, 2]
    assert not any(name.startswith("collateral/") for name in rows[0].metrics)
    return dict(rows[1].metrics)


@pytest.mark.parametrize("lora", [None, {"rank": 2}])
def test_a_run_measures_it_after_training(
    lora: dict[str, int] | None, roomy_folder: Path, tmp_path: Path
) -> None:
    student = {"model": str(roomy_folder)} | ({} if lora is None else {"lora": lora})
    recipe = small_recipe(roomy_folder, **BOARD, student=student)
    metrics = last_metrics(run := train(recipe, tmp_path / "run"))
    decisions = {name.removeprefix("decisions/") for name in metrics if "decisions/" in name}
    assert decisions >= {"filler"} and len(decisions) > 3
    names = {f"collateral/{name}" for name in (*decisions, "turns", "prompts")}
    assert {name for name in metrics if name.startswith("collateral/")} == names
    assert all(metrics[name] > 0 for name in names), "training changed something"
    assert "logp_drop/error_turns" in metrics
    assert not any("collateral" in name for name in last_metrics(run, "student:other"))


def test_without_learning_nothing_changes(roomy_folder: Path, tmp_path: Path) -> None:
    train_section = BOARD["train"] | {"learning_rate": 1e-30}
    recipe = small_recipe(roomy_folder, **(BOARD | {"train": train_section}))
    metrics = last_metrics(train(recipe, tmp_path / "run"))
    values = [value for name, value in metrics.items() if name.startswith("collateral/")]
    assert values and all(abs(value) < 1e-6 for value in values)


def test_a_resumed_run_compares_with_the_student_before_all_steps(
    roomy_folder: Path, tmp_path: Path
) -> None:
    whole = train(small_recipe(roomy_folder, **BOARD), tmp_path / "whole")
    part = BOARD | {"train": BOARD["train"] | {"steps": 1}}
    train(small_recipe(roomy_folder, **part), tmp_path / "parts")
    resumed = train(small_recipe(roomy_folder, **BOARD), tmp_path / "parts")
    whole_metrics, resumed_metrics = (
        {
            name: value
            for e in run.evaluations()
            if (e.step, e.policy) == (2, "student")
            for name, value in e.metrics.items()
            if name.startswith("collateral/")
        }
        for run in (whole, resumed)
    )
    assert len(whole_metrics) > 3
    assert resumed_metrics == pytest.approx(whole_metrics, rel=1e-4)


def test_tasks_of_one_turn_have_it_as_well(tiny_folder: Path, tmp_path: Path) -> None:
    metrics = last_metrics(train(small_recipe(tiny_folder, **SINGLE_TURN), tmp_path / "run"))
    names = {name for name in metrics if name.startswith("collateral/")}
    assert names == {"collateral/turns", "collateral/prompts"}


@pytest.fixture
def broken_loading(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Exception]]:
    """What `load_untrained` raises."""
    errors: dict[str, Exception] = {}

    def load(*_: Any) -> None:
        if errors:
            raise errors["error"]

    monkeypatch.setattr("courtside.run_evaluation.measure_collateral", lambda *_, **__: load())
    yield errors


@pytest.mark.filterwarnings("ignore:Traceback")
@pytest.mark.parametrize("error", [ModelError("gone"), torch.OutOfMemoryError("too little")])
def test_what_cannot_be_measured_does_not_cost_the_evaluation(
    error: Exception,
    broken_loading: dict[str, Exception],
    roomy_folder: Path,
    tmp_path: Path,
) -> None:
    broken_loading["error"] = error
    run = train(small_recipe(roomy_folder, **BOARD), tmp_path / "run")
    metrics = last_metrics(run)
    assert "logp_drop/error_turns" in metrics and "error_rate" in metrics
    assert not any(name.startswith("collateral/") for name in metrics)
    (alarm,) = [row for row in run.alarms() if "collateral" in row["message"]]
    assert alarm["message"].startswith("not measured after training: collateral (")


def test_greedy_evaluations_measure_the_drop(roomy_folder: Path, tmp_path: Path) -> None:
    """At temperature 0 the sampler's own log-probs are 0 and would give NaN."""
    greedy = BOARD | {"evaluate": {"num_tasks": 2, "temperature": 0}}
    recipe = small_recipe(roomy_folder, **greedy)
    drops = [
        value
        for name, value in last_metrics(train(recipe, tmp_path / "run")).items()
        if name.startswith("logp_drop/")
    ]
    assert drops and all(0 < abs(drop) < 10 for drop in drops)
