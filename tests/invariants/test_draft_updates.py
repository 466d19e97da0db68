"""An update from corrected drafts is the textbook's update on the same data."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.chat_server import ChatServer, completion, serving_chat
from support.gradients import accumulate, assert_equal_gradients, make_float64, take_gradients
from support.small_runs import small_recipe, without_clocks, write_jsonl
from support.textbook import naive_loss

from courtside.api import rescore, train
from courtside.assemble import assemble
from courtside.chat.messages import insert_context
from courtside.errors import DraftFailuresError
from courtside.report.folder.folder import RunFolder
from courtside.runtime import Runtime
from courtside.training.loss_terms import preference_pairs
from courtside.types import Grade, Scored, Trajectory

LOSSES: dict[str, list[dict[str, Any]]] = {
    "dpo": [{"kind": "preference", "beta": 0.4}],
    "ipo": [{"kind": "preference", "beta": 0.4, "form": "ipo"}],
    "rejection sampling": [{"kind": "cross_entropy", "on": "chosen"}],
}


def with_rewards(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """Sample n of a prompt has the reward n/4: no random model solves anything."""
    return [
        replace(t, grade=Grade(score=int(t.id.rpartition("-")[2]) / 4, passed=False))
        for t in trajectories
    ]


def naive(parts: Runtime, scored: list[Scored], losses: list[dict[str, Any]]) -> Any:
    pairs = [s for pair in preference_pairs(scored) for s in pair]
    reference = parts.teacher.reference
    model = parts.student.weights.model
    total, values = naive_loss(
        losses, pairs, model, {}, reference.engine.model if reference else model
    )
    total.backward()
    return take_gradients(parts.student.weights.trained), values


@pytest.mark.parametrize("budget", [1, 8192])
@pytest.mark.parametrize("name", LOSSES)
def test_chosen_pairs(name: str, budget: int, tiny_folder: Path) -> None:
    losses = LOSSES[name]
    recipe = small_recipe(
        tiny_folder,
        tasks={"kind": "arithmetic"},
        rollout={"samples_per_prompt": 3, "max_new_tokens": 6},
        drafts=[{"kind": "choose"}],
        losses=losses,
        train={"micro_batch_tokens": budget},
    )
    parts = make_float64(assemble(recipe))
    tasks = parts.tasks.batch(0, 2)
    batch = with_rewards(parts.rollout([*tasks, tasks[0]], 0))  # a task twice
    drafts = parts.drafts(batch)
    scored = parts.teacher(drafts.trajectories)
    assert drafts.counts["choose/pairs"] == 3 and len(preference_pairs(scored)) == 3
    gradients, metrics = accumulate(parts, scored)
    expected, values = naive(parts, scored, losses)
    assert_equal_gradients(gradients, expected)
    assert metrics.losses == pytest.approx(values, rel=1e-9)


@pytest.mark.parametrize("name", LOSSES)
def test_the_student_learns_what_was_chosen(
    name: str, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    share = "sum(map(str.isascii, response)) / max(len(response), 1)"
    grader = f"def grade(response, task):\n    return {share}\n"
    (tmp_path / "ascii_grader.py").write_text(grader)
    monkeypatch.syspath_prepend(str(tmp_path))
    # A margin of 5 nats for IPO; with a β of 0.4 it is satisfied with 1.25.
    losses = [loss | ({"beta": 0.1} if "beta" in loss else {}) for loss in LOSSES[name]]
    rows = [{"prompt": f"say {n}", "grader": "ascii_grader:grade"} for n in range(40)]
    recipe = small_recipe(
        tiny_folder,
        tasks={"kind": "jsonl", "path": str(write_jsonl(tmp_path / "tasks.jsonl", rows))},
        rollout={"samples_per_prompt": 6, "max_new_tokens": 8},
        drafts=[{"kind": "choose"}],
        losses=losses,
        train={"steps": 25, "prompts_per_step": 6, "learning_rate": 3e-3},
        evaluate={"num_tasks": 1},
    )
    rewards = [row["reward/mean"] for row in train(recipe, tmp_path / "run").metrics()]
    assert sum(rewards[-5:]) > 1.1 * sum(rewards[:5])


def test_a_run_that_chooses_by_its_teacher(
    tiny_folder: Path, tiny_teacher_folder: Path, tmp_path: Path
) -> None:
    recipe = small_recipe(
        tiny_folder,
        tiny_teacher_folder,
        rollout={"samples_per_prompt": 4, "max_new_tokens": 6},
        drafts=[{"kind": "choose", "by": "teacher_logp"}],
        losses=[{"kind": "preference"}],
        train={"steps": 3, "prompts_per_step": 2, "learning_rate": 1e-3},
        run={"trajectories_every": 1},
    )
    run = train(recipe, tmp_path / "run")
    rows = run.metrics()
    assert [row["drafts/choose/pairs"] for row in rows] == [2, 2, 2]
    assert rows[0]["loss"] == pytest.approx(0.6931, abs=1e-3)
    assert run.read_costs()["drafts"].flops > 0
    stored = [item.trajectory for item in run.trajectories(2)]
    better = [t for t in stored if t.preference == "better"]
    assert len(better) == 2 and all(t.correction == "choose" for t in better)
    assert {t.draft for t in better} == {t.id for t in stored if t.preference == "worse"}
    frame = run.trajectories_frame(2)
    assert set(frame["correction"].dropna()) == {"choose"}
    assert {o.trajectory.draft for o in run.outlines(2)} == {None, *(t.draft for t in better)}


def test_a_batch_of_ties_is_no_step_and_the_run_says_so(tiny_folder: Path, tmp_path: Path) -> None:
    recipe = small_recipe(
        tiny_folder,
        tasks={"kind": "arithmetic"},
        drafts=[{"kind": "choose"}],
        losses=[{"kind": "cross_entropy", "on": "chosen"}],
        train={"steps": 2, "prompts_per_step": 2, "learning_rate": 1e-3},
    )
    run = train(recipe, tmp_path / "run")
    assert [row["drafts/choose/dropped/tie"] for row in run.metrics()] == [2, 2]
    assert any("choose/dropped/tie 4" in row["message"] for row in run.alarms())


# ── repairs and critiques of a server ────────────────────────────────────────────────────────────


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ChatServer]:
    with serving_chat(monkeypatch) as server:
        yield server


def solve(_number: int, body: dict[str, Any]) -> Any:
    """The answer is in the prompt, as its reference."""
    answer = re.findall(r"For reference:\n(.+)", body["messages"][0]["content"])[0]
    return completion(f"Sure. <answer>{answer}</answer>")


def repairing(student: Path, server: ChatServer, **changes: Any) -> Any:
    endpoint = {"base_url": server.url, "model": "big", "max_retries": 0}
    stage = {"kind": "rewrite", "reference": "answer", "endpoint": endpoint}
    tree: dict[str, Any] = {
        "tasks": {"kind": "arithmetic"},
        "rollout": {"samples_per_prompt": 2, "max_new_tokens": 6},
        "drafts": [stage | changes.pop("stage", {})],
        "losses": [{"kind": "cross_entropy", "on": "teacher"}],
        "run": {"trajectories_every": 1, "checkpoint_every": 1},
        "train": {"steps": 3, "prompts_per_step": 2, "learning_rate": 1e-3},
    }
    return small_recipe(student, **(tree | changes))


@pytest.mark.parametrize("budget", [1, 8192])
@pytest.mark.parametrize("name", ["imitation", "dpo", "both"])
def test_repairs(name: str, budget: int, tiny_folder: Path, server: ChatServer) -> None:
    imitate, prefer = (
        {"kind": "cross_entropy", "on": "teacher"},
        {"kind": "preference", "beta": 0.4},
    )
    losses: list[dict[str, Any]]
    losses = {"imitation": [imitate], "dpo": [prefer], "both": [imitate, prefer]}[name]
    server.answer = solve
    recipe = repairing(
        tiny_folder, server, losses=losses, stage={"pairs": name != "imitation"},
        train={"micro_batch_tokens": budget},
    )  # fmt: skip
    parts = make_float64(assemble(recipe))
    drafts = parts.drafts(parts.rollout(parts.tasks.batch(0, 3), 0))
    assert drafts.counts["rewrite/repairs"] == 6
    scored = parts.teacher(drafts.trajectories)
    gradients, metrics = accumulate(parts, scored)
    if name == "imitation":  # data that a textbook would call SFT
        model = parts.student.weights.model
        repairs = [s for s in scored if s.trajectory.source == "teacher"]
        assert all(s.trajectory.response == s.trajectory.task.answer for s in repairs)
        total, values = naive_loss(losses, repairs, model, {}, model)
        total.backward()
        expected = take_gradients(parts.student.weights.trained)
    else:
        assert len(preference_pairs(scored)) == 6
        expected, values = naive(parts, scored, losses)
    assert_equal_gradients(gradients, expected)
    assert metrics.losses == pytest.approx(values, rel=1e-9)


def test_a_run_with_repairs(tiny_folder: Path, tmp_path: Path, server: ChatServer) -> None:
    server.answer = solve
    run = train(repairing(tiny_folder, server), tmp_path / "run")
    rows = run.metrics()
    assert [row["drafts/rewrite/repairs"] for row in rows] == [4, 4, 4]
    assert rows[-1]["loss/cross_entropy"] < rows[0]["loss/cross_entropy"]
    assert rows[0]["reward/mean"] == 0, "repairs are not the student's reward"
    costs = run.read_costs()["drafts"]
    assert (costs.input_tokens, costs.output_tokens) == (12 * 11, 12 * 5)
    students = [s.trajectory for n in range(3) for s in run.trajectories(n)]
    num_sampled = sum(t.num_completion_tokens for t in students if t.source == "student")
    assert run.read_costs()["rollout"].output_tokens == num_sampled, "repairs cost elsewhere"
    repair = next(s.trajectory for s in run.trajectories(0) if s.trajectory.source == "teacher")
    assert repair.id == f"{repair.draft}+rewrite" and repair.correction == "rewrite"
    assert repair.grade is not None and repair.grade.passed
    assert len(rescore(tmp_path / "run", quiet=True)) == 3, "nobody is asked again"
    assert len(server.bodies) == 12


def test_a_server_that_fails_stops_the_run_with_its_steps_saved(
    tiny_folder: Path, tmp_path: Path, server: ChatServer
) -> None:
    def answer(number: int, body: dict[str, Any]) -> Any:
        return solve(number, body) if number < 4 else (500, {}, b"out of memory")

    server.answer = answer
    recipe = repairing(
        tiny_folder, server, stage={"max_failure_fraction": 0.3}, run={"checkpoint_every": 99}
    )
    with pytest.raises(DraftFailuresError, match=r"4 of the last 8 .*no_answer 4.*out of memory"):
        train(recipe, tmp_path / "run")
    assert len(RunFolder.read(tmp_path / "run").metrics()) == 1
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000001"]
    server.answer = solve
    resumed = train(recipe, tmp_path / "run")
    whole = train(recipe, tmp_path / "whole")
    assert without_clocks(resumed) == without_clocks(whole)


def test_garbage_is_dropped_and_counted(
    tiny_folder: Path, tmp_path: Path, server: ChatServer
) -> None:
    replies = ("<answer>4", "", "<answer>no number</answer>")
    server.answer = lambda n, body: completion(replies[n % 3]) if n % 4 else solve(n, body)
    recipe = repairing(tiny_folder, server, stage={"max_failure_fraction": 1.0})
    rows = train(recipe, tmp_path / "run").metrics()
    counts = {key: sum(row.get(key, 0) for row in rows) for row in rows for key in row}
    assert counts["drafts/rewrite/requests"] == 12 and counts["drafts/rewrite/repairs"] == 3
    assert (
        counts["drafts/rewrite/dropped/unparsed"] + counts["drafts/rewrite/dropped/no_better"] == 9
    )


@pytest.mark.parametrize("kind", ["repair", "critique"])
def test_a_draft_is_scored_again_under_what_was_written_about_it(
    kind: str, tiny_folder: Path, tiny_teacher_folder: Path, server: ChatServer
) -> None:
    server.answer = solve
    stage = {"skip_passed": False, "kind": "criticize"}
    if kind == "critique":
        server.answer = lambda n, body: completion("<critique>Add the tens.</critique>")
    recipe = repairing(
        tiny_folder,
        server,
        teacher={"kind": "model", "model": str(tiny_teacher_folder),
                 "context": {"kind": kind, "template": "Note: {text}"}},
        losses=[{"kind": "divergence", "on": "student"}],
        stage=stage if kind == "critique" else {},
    )  # fmt: skip
    parts = assemble(recipe)
    batch = parts.rollout(parts.tasks.batch(0, 2), 0)
    drafts = parts.drafts(batch)
    scored = {s.trajectory.id: s for s in parts.teacher(drafts.trajectories)}
    assert len(scored) == len(batch) * (2 if kind == "repair" else 1)
    for t in batch:
        text = f"Note: {t.task.answer if kind == 'repair' else 'Add the tens.'}"
        target = scored[t.id].target
        assert target is not None and target.context == text
        assert scored[t.id].trajectory.token_ids == t.token_ids, "nothing is sampled again"
        messages = insert_context(t.task.messages, text, "user")
        ids = torch.tensor([*parts.renderer.prompt_ids(messages), *t.completion_ids])
        with torch.no_grad():
            teacher: Any = parts.teacher.teacher
            logp_LV = teacher.engine.model(input_ids=ids[None]).logits[0].log_softmax(-1)
        n = len(t.completion_ids)
        expected = logp_LV[-n - 1 : -1].gather(-1, ids[-n:, None])[:, 0]
        torch.testing.assert_close(target.logp_T, expected, rtol=1e-4, atol=1e-4)
    repairs = [s for s in scored.values() if s.trajectory.correction == "rewrite"]
    assert all(s.target is None for s in repairs)


def test_a_judge_ranks(tiny_folder: Path, server: ChatServer) -> None:
    def score(_number: int, body: dict[str, Any]) -> Any:
        reply = re.findall(r"Reply:\n(.*)\n\nAnswer with", body["messages"][0]["content"], re.S)[0]
        return completion(json.dumps({"score": len(reply) % 7}))

    server.answer = score
    stage = {"kind": "choose", "by": "judge"}
    endpoint = {"base_url": server.url, "model": "big"}
    recipe = repairing(
        tiny_folder, server, losses=[{"kind": "preference"}],
        drafts=[stage | {"endpoint": endpoint}],
        rollout={"samples_per_prompt": 6, "max_new_tokens": 12},
    )  # fmt: skip
    parts = assemble(recipe)
    batch = parts.rollout(parts.tasks.batch(0, 2), 0)
    drafts = parts.drafts(batch)
    assert drafts.counts["choose/requests"] == 12 and drafts.counts["choose/pairs"] >= 1
    phase = parts.progress.phase
    assert phase is not None and (phase.finished, phase.total) == (12, 12)
    by_id = {t.id: t for t in drafts.trajectories}
    for better in (t for t in by_id.values() if t.preference == "better"):
        group = [len(t.response) % 7 for t in batch if t.id[:-1] == better.id[:-1]]
        assert len(better.response) % 7 == max(group)
        assert len(by_id[better.draft or ""].response) % 7 == min(group)


# ── the teacher in this process ──────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("teacher", ["live", "model"])
def test_the_teacher_itself_rewrites(
    teacher: str, tiny_folder: Path, tiny_teacher_folder: Path, tmp_path: Path
) -> None:
    section = {"kind": "model", "model": str(tiny_teacher_folder)}
    if teacher == "live":
        section = {"kind": "self", "weights": "live"}
    recipe = small_recipe(
        tiny_folder,
        teacher=section | {"context": {"kind": "system", "text": "Be brief."}},
        drafts=[{"kind": "rewrite", "reply": "whole", "prompt": "{draft}?", "max_new_tokens": 8,
                 "temperature": 1.0, "max_failure_fraction": 1.0, "require_better": False}],
        losses=[{"kind": "divergence", "on": "teacher"}],
        train={"steps": 2, "prompts_per_step": 3, "learning_rate": 1e-3},
        run={"trajectories_every": 1},
    )  # fmt: skip
    # A random model hardly ever ends by itself; a repair that is cut off is none.
    parts = assemble(recipe)
    drafts = parts.drafts(parts.rollout(parts.tasks.batch(0, 3), 0))
    assert drafts.counts["rewrite/requests"] == 6
    (name,) = drafts.usage
    assert name == ("self:live" if teacher == "live" else str(tiny_teacher_folder))
    assert 0 < drafts.usage[name].output_tokens <= 6 * 8
    second = parts.drafts(parts.rollout(parts.tasks.batch(0, 3), 0))
    assert second == drafts, "seeds follow from the drafts"
    rows = train(recipe, tmp_path / "run").metrics()
    assert [row["drafts/rewrite/requests"] for row in rows] == [6, 6]


# ── episodes ─────────────────────────────────────────────────────────────────────────────────────

WORLD = '''
from courtside.types import Event, Grade, Message, Observation, Task

class Doors:
    """Three doors; each wants the word on it, and says so when it hears another."""

    size = 40

    def task(self, index):
        split = "train" if index < 30 else "test"
        return Task(id=f"doors-{index}", split=split, grader_args={"number": index},
                    messages=(Message(role="user", content=f"door {index}"),))

    def start(self, task):
        return Walk()

class Walk:
    def __init__(self):
        self.opened, self.seen = 0, 0

    def step(self, reply):
        self.seen += 1
        if reply == "crash":
            raise ValueError("the door fell")
        right = self.seen == 1 or reply == f"word{self.seen}"
        self.opened += right
        events = () if right else (Event(kind="shut", details={"correct": f"word{self.seen}"}),)
        return Observation(messages=(Message(role="user", content="next"),), events=events,
                           done=self.seen == 3)

    def grade(self):
        return Grade(score=self.opened / 3, passed=self.opened == 3, feedback="shut doors")
'''


@pytest.mark.parametrize(("turn", "number"), [("first_event", 3), ("last", 5)])
def test_a_turn_of_an_episode_is_repaired_and_checked(
    turn: str,
    number: int,
    roomy_folder: Path,
    tmp_path: Path,
    server: ChatServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "doors.py").write_text(WORLD)
    monkeypatch.syspath_prepend(str(tmp_path))
    replies = [f"word{(number + 1) // 2}", "wrong", "crash"]
    server.answer = lambda n, body: completion(f"<answer>{replies[n % 3]}</answer>")
    losses = [{"kind": "cross_entropy", "on": "teacher"}, {"kind": "preference", "beta": 0.4}]
    recipe = repairing(
        roomy_folder,
        server,
        tasks={"kind": "environment", "path": "doors:Doors"},
        rollout={"samples_per_prompt": 3, "max_new_tokens": 4},
        stage={"turn": turn, "pairs": True, "reference": None},
        losses=losses,
    )
    parts = make_float64(assemble(recipe))
    batch = parts.rollout(parts.tasks.batch(0, 1), 0)
    assert all([bool(t.turns[i].events) for i in (1, 3, 5)] == [False, True, True] for t in batch)
    drafts = parts.drafts(batch)
    assert drafts.counts["rewrite/repairs"] == 1
    assert drafts.counts["rewrite/dropped/not_passing"] == 2
    (repair,) = [t for t in drafts.trajectories if t.source == "teacher"]
    assert repair.response == replies[0] and len(repair.turns) == number + 1
    assert (repair.grade and repair.grade.score) == (2 / 3 if turn == "last" else None)
    prompts = [body["messages"][0]["content"] for body in server.bodies]
    assert all("shut" in prompt and "word2" not in prompt for prompt in prompts)
    scored = parts.teacher(drafts.trajectories)
    gradients, metrics = accumulate(parts, scored)
    expected, values = naive(parts, scored, losses)
    assert_equal_gradients(gradients, expected)
    assert metrics.losses == pytest.approx(values, rel=1e-9)
