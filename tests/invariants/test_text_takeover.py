"""Runs in which a chat server takes over: the update is the textbook's on the same texts, faults
are counted drops, and the tokens that train are those that the student would have sampled."""

from __future__ import annotations

import re
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.chat_server import ChatServer, completion, serving_chat
from support.foreign_environments import copy_examples, forget_examples
from support.gradients import accumulate, assert_equal_gradients, make_float64, take_gradients
from support.small_runs import small_recipe, without_clocks, write_jsonl
from support.textbook import naive_loss

from courtside.api import rescore, train
from courtside.assemble import assemble
from courtside.errors import DraftFailuresError, RecipeError, RunError, TaskError
from courtside.report.folder.folder import RunFolder
from courtside.training.loss_terms import preference_pairs
from courtside.types import Trajectory

IMITATE = {"kind": "cross_entropy", "on": "teacher"}
TEMPLATES = Path(__file__).parents[1] / "support" / "chat_templates"
PREFER = {"kind": "preference", "beta": 0.4}
CONTEXT = {"kind": "field", "field": "solution", "template": "The solution:\n{text}"}
WORLD = """
from courtside.hashing import split_of, task_id
from courtside.types import Event, Grade, Message, Observation, Task


class Doubling:
    size = 10_000

    def task(self, index):
        ask = Message(role="user", content=f"Double {index}.")
        return Task(id=task_id("double", str(index)), split=split_of(f"d {index}"),
                    messages=(ask,), grader_args={"index": index})

    def start(self, task):
        return Episode(task.grader_args["index"])


class Episode:
    def __init__(self, number):
        self.number, self.num_right, self.num = number, 0, 0

    def step(self, reply):
        is_right = reply == str(2 * self.number)
        self.number, self.num = self.number + 1, self.num + 1
        self.num_right += is_right
        if "boom" in reply:
            raise RuntimeError("no such reply")
        messages = (Message(role="tool", content="right" if is_right else "wrong"),
                    Message(role="user", content=f"Double {self.number}."))
        return Observation(messages=messages, done=self.num_right == 2,
                           events=() if is_right else (Event(kind="wrong"),))

    def grade(self):
        return Grade(score=self.num_right / 2, passed=self.num_right == 2)
"""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ChatServer]:
    with serving_chat(monkeypatch, solve) as server:
        yield server


def solve(_number: int, body: dict[str, Any]) -> Any:
    """The solution is in the teacher's context."""
    return completion(f"Answer: {find_solution(body)}")


def find_solution(body: dict[str, Any]) -> str:
    (text,) = (m["content"] for m in body["messages"] if "The solution" in m["content"])
    return str(re.findall(r"Answer: (\S+)", text)[-1])


def answers(student: Path, server: ChatServer, /, **changes: Any) -> Any:
    endpoint = {"base_url": server.url, "model": "big", "max_retries": 0, "timeout": 5.0}
    takeover = {"at": 0, "context": CONTEXT} | changes.pop("takeover", {})
    takeover = {name: value for name, value in takeover.items() if value is not None}
    tree: dict[str, Any] = {
        "tasks": {"kind": "arithmetic"},
        "rollout": {"samples_per_prompt": 2, "max_new_tokens": 14},
        "takeover": {"endpoint": endpoint | changes.pop("endpoint", {}), **takeover},
        "losses": [IMITATE],
        "run": {"trajectories_every": 1, "checkpoint_every": 1},
        "train": {"steps": 3, "prompts_per_step": 2, "learning_rate": 1e-3},
        "evaluate": {"num_tasks": 1},
    }
    return small_recipe(student, **(tree | changes))


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    (tmp_path / "doubling_world.py").write_text(WORLD)
    monkeypatch.syspath_prepend(str(tmp_path))
    return {
        "tasks": {"kind": "environment", "path": "doubling_world:Doubling"},
        "rollout": {"samples_per_prompt": 2, "max_new_tokens": 8, "limits": {"turns": 5}},
    }


RANDOM = {"at": "random", "context": None}


def double(_number: int, body: dict[str, Any]) -> Any:
    number = re.findall(r"Double (\d+)", body["messages"][-1]["content"])[-1]
    return completion(f"{2 * int(number)}")


def takeovers_of(items: Any) -> list[Trajectory]:
    whole = [s.trajectory for s in items if s.trajectory.correction == "takeover"]
    return [t for t in whole if not t.is_pair_copy]


# ── the update ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("budget", [1, 8192])
@pytest.mark.parametrize("kind", ["answers", "episodes"])
@pytest.mark.parametrize("name", ["imitation", "dpo", "both"])
def test_an_update_is_the_textbooks(
    name: str, kind: str, budget: int, roomy_folder: Path, server: ChatServer, world: Any
) -> None:
    losses = {"imitation": [IMITATE], "dpo": [PREFER], "both": [IMITATE, PREFER]}[name]
    takeover = {} if kind == "answers" else RANDOM | {"require": "none"}
    server.answer = solve if kind == "answers" else double
    recipe = answers(
        roomy_folder, server, losses=losses, takeover=takeover | {"pair": name != "imitation"},
        train={"micro_batch_tokens": budget}, **(world if kind == "episodes" else {}),
    )  # fmt: skip
    parts = make_float64(assemble(recipe))
    scored = parts.teacher(parts.rollout(parts.tasks.batch(0, 3), 0))
    whole = [s for s in scored if s.trajectory.correction == "takeover"]
    whole = [s for s in whole if s.trajectory.preference is None]
    assert len(whole) == 6 and all(s.target is None for s in whole), "text has no log-probs"
    gradients, metrics = accumulate(parts, scored)
    model, reference = parts.student.weights.model, parts.teacher.reference
    pairs = [s for pair in preference_pairs(scored) for s in pair]
    assert len(pairs) == (0 if name == "imitation" else 12)
    base = reference.engine.model if reference else model  # type: ignore[attr-defined]
    values: dict[str, float] = {}
    for loss in losses:  # members of pairs train by preferences alone
        items = whole if loss is IMITATE else pairs
        total, value = naive_loss([loss], items, model, {}, base)
        total.backward()
        values |= value
    assert_equal_gradients(gradients, take_gradients(parts.student.weights.trained))
    assert metrics.losses == pytest.approx(values, rel=1e-9)


def test_a_teacher_scores_what_the_endpoint_writes(
    tiny_folder: Path, tiny_teacher_folder: Path, server: ChatServer
) -> None:
    losses = [
        {"kind": "divergence", "divergence": "forward_kl", "on": "teacher"},
        {"kind": "divergence", "name": "own", "on": "student"},
    ]
    teacher = {"kind": "model", "model": str(tiny_teacher_folder)}
    recipe = answers(tiny_folder, server, losses=losses, teacher=teacher)
    parts = make_float64(assemble(recipe))
    scored = parts.teacher(parts.rollout(parts.tasks.batch(0, 3), 0))
    assert len(takeovers_of(scored)) == 6 and all(s.target for s in scored)
    gradients, metrics = accumulate(parts, scored)
    model, scorer = parts.student.weights.model, parts.teacher.teacher
    engines = {scorer.name: scorer.engine.model}  # type: ignore[union-attr]
    total, values = naive_loss(losses, scored, model, engines, model)
    total.backward()
    assert_equal_gradients(gradients, take_gradients(parts.student.weights.trained))
    assert metrics.losses == pytest.approx(values, rel=1e-9)


# ── runs ─────────────────────────────────────────────────────────────────────────────────────────


def test_a_run_of_answers(tiny_folder: Path, tmp_path: Path, server: ChatServer) -> None:
    run = train(answers(tiny_folder, server), tmp_path / "run")
    rows = run.metrics()
    assert [row["takeover/trained"] for row in rows] == [4, 4, 4]
    assert [row["takeover/requests"] for row in rows] == [4, 4, 4]
    assert rows[-1]["loss/cross_entropy"] < rows[0]["loss/cross_entropy"]
    assert rows[0]["reward/mean"] == 0 and rows[0]["takeover/pass_rate"] == 1
    costs = run.read_costs()
    assert (costs["teacher"].input_tokens, costs["teacher"].output_tokens) == (12 * 11, 12 * 5)
    stored = [s for step in range(3) for s in run.trajectories(step)]
    students = [s.trajectory for s in stored if s.trajectory.source == "student"]
    assert costs["rollout"].output_tokens == sum(t.num_completion_tokens for t in students)
    template = assemble(run.recipe()).renderer
    for t in takeovers_of(stored):
        task = t.task
        assert t.source == "teacher" and t.policy_version is None and t.sampler_logp is None
        assert t.response == f"Answer: {task.answer}" and t.grade and t.grade.passed
        whole = (
            template.prompt_ids(task.messages),
            template.completion_ids(task.messages, t.response),
        )
        assert t.token_ids == whole[0] + whole[1], "the student's prompt, without the context"
        assert t.token_ids[-1] in template.eos_ids and t.completion_ids == whole[1]
    request = server.bodies[0]
    assert (
        request["model"] == "big" and request["temperature"] == 1.0 and request["max_tokens"] == 14
    )
    assert [m["role"] for m in request["messages"]] == ["system", "user"] and "tools" not in request
    assert len(rescore(tmp_path / "run", quiet=True)) == 3 and len(server.bodies) == 12


def test_a_run_of_episodes(
    roomy_folder: Path, tmp_path: Path, server: ChatServer, world: Any
) -> None:
    server.answer = double
    recipe = answers(roomy_folder, server, takeover=RANDOM, **world)
    run = train(recipe, tmp_path / "run")
    template = assemble(recipe).renderer
    num_requests = 0
    for row in run.metrics():
        stored = run.trajectories(row["step"])
        drafts = {s.trajectory.id: s.trajectory for s in stored if not s.trajectory.draft}
        corrections = takeovers_of(stored)
        num_requests += row["takeover/requests"]
        assert (
            row["takeover/drafts"]
            == 4
            == row["takeover/trained"] + row.get("takeover/dropped/not_passed", 0)
        )
        for t in corrections:
            draft = drafts[t.draft or ""]
            authors = [t.author_of(i) for i, turn in enumerate(t.turns) if turn.role == "assistant"]
            assert authors == sorted(authors), "the student's turns come first"
            fork = next(i for i, turn in enumerate(t.turns) if any(turn.completion_mask))
            for turn, drafted in zip(t.turns[:fork], draft.turns[:fork], strict=True):
                assert turn.token_ids == drafted.token_ids
            for turn in t.turns[fork:]:
                if turn.role == "assistant":
                    ids = template.completion_ids(t.task.messages, turn.text)
                    assert turn.token_ids == ids and turn.text.isdecimal()
            assert t.stop == "done" and t.grade and t.grade.passed
    assert num_requests == len(server.bodies)
    later = next(b for b in server.bodies if len(b["messages"]) > 1)
    assert [m["role"] for m in later["messages"][:3]] == ["user", "assistant", "user"]
    assert re.match(r"(right|wrong)\n\nDouble \d+", later["messages"][2]["content"])


def buy(number: int, body: dict[str, Any]) -> Any:
    """By the protocol's calls: the price first, then one of it."""
    names = [tool["function"]["name"] for tool in body["tools"]]
    assert names == ["buy", "get_price"] or names == ["get_price", "buy"]
    item = re.findall(r"Buy one (\w+)", str(body["messages"]))[0]
    asked_price = any("get_price" in str(m.get("tool_calls")) for m in body["messages"])
    name = "buy" if asked_price else "get_price"
    for message, result in zip(body["messages"], body["messages"][1:], strict=False):
        if result["role"] == "tool":
            assert result["tool_call_id"] == message["tool_calls"][0]["id"]
    function = {"name": name, "arguments": f'{{"item": "{item}"}}'}
    call = {"id": f"call_{number}", "type": "function", "function": function}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    choice = {"message": message, "finish_reason": "tool_calls"}
    return completion("", choices=[choice])


def test_tools_of_the_chat_template_are_those_of_the_protocol(
    roomy_folder: Path, tmp_path: Path, server: ChatServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A class with tools whose schemas the student's template lists."""
    student, template = tmp_path / "student", TEMPLATES / "qwen2.5.jinja"
    shutil.copytree(roomy_folder, student)
    shutil.copy(template, student / "chat_template.jinja")
    copy_examples(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    forget_examples()
    rows = [
        {"prompt": f"Buy one {item}. ({n})", "item": item, "budget": 9}
        for n in range(20)
        for item in ("apple", "bread", "dates")
    ]
    write_jsonl(tmp_path / "shop.jsonl", rows)
    server.answer = buy
    recipe = answers(
        student,
        server,
        tasks={"kind": "environment", "path": "trl_store:Store", "rows": "shop.jsonl"},
        rollout={"samples_per_prompt": 1, "max_new_tokens": 90, "limits": {"turns": 4}},
        takeover=RANDOM | {"at": 0, "pair": True},
        losses=[IMITATE, PREFER],
        train={"steps": 1, "prompts_per_step": 3},
    )
    run = train(recipe, tmp_path / "run")
    row = run.metrics()[0]
    assert row["takeover/trained"] == row["takeover/drafts"] == 3
    assert row["takeover/requests"] == len(server.bodies) == 6
    for t in takeovers_of(run.trajectories(0)):
        assert t.stop == "done" and t.grade and t.grade.passed
        replies = [turn.text for turn in t.turns if turn.role == "assistant"]
        assert [reply.partition('"name": ')[2][:6] for reply in replies] == ['"get_p', '"buy",']
        assert all(reply.startswith("<tool_call>\n") for reply in replies)


def test_the_student_learns(tmp_path: Path, tiny_folder: Path, server: ChatServer) -> None:
    """One word for all: it is soon the student's."""
    server.answer = lambda n, body: completion("yes")
    rows = [{"prompt": f"say {n}", "grader": "contains", "answer": "yes"} for n in range(40)]
    recipe = answers(
        tiny_folder, server,
        tasks={"kind": "jsonl", "path": str(write_jsonl(tmp_path / "tasks.jsonl", rows))},
        takeover={"context": None},
        train={"steps": 30, "prompts_per_step": 4, "learning_rate": 1e-2},
        run={"checkpoint_every": 99},
    )  # fmt: skip
    rewards = [row["reward/mean"] for row in train(recipe, tmp_path / "run").metrics()]
    assert rewards[0] == 0 and sum(rewards[-3:]) > 1.5
    assert len(server.bodies) < 30 * 8, "drafts that pass are not taken over"


# ── what goes wrong ──────────────────────────────────────────────────────────────────────────────


def garbage(number: int, body: dict[str, Any]) -> Any:
    """One reply of each kind, then a good one."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    truncated = {"choices": [{"message": {"content": "x"}, "finish_reason": "length"}]}
    return [
        completion(""),
        completion(None),
        completion("", choices=[{"message": {"content": None, "reasoning_content": "hm"}}]),
        completion("half a pair \ud800"),
        completion("", choices=[{"message": {"content": "", "tool_calls": [call, "no call"]}}]),
        completion("", **truncated),
        (200, {}, b"<html>"),
        (500, {}, b"out of memory"),
        (400, {}, b"too long"),
        completion("<think>Answer: 1"),
        completion("Answer: 1234"),
        completion("Answer: " + "9" * 30),
        completion(f"<think>It is 7.</think>\n\nAnswer: {find_solution(body)}  "),
    ][number % 13]


def count_all(rows: Any) -> Counter[str]:
    counts: Counter[str] = Counter()
    for row in rows:
        counts.update({k.removeprefix("takeover/"): n for k, n in row.items() if "takeover/" in k})
    return counts


def test_garbage_is_dropped_and_counted(
    tiny_folder: Path, tmp_path: Path, server: ChatServer
) -> None:
    server.answer = garbage
    recipe = answers(
        tiny_folder, server, takeover={"max_failure_fraction": 1.0},
        endpoint={"max_concurrency": 1}, train={"steps": 1, "prompts_per_step": 13},
    )  # fmt: skip
    run = train(recipe, tmp_path / "run")
    counts = count_all(run.metrics())
    dropped = {k.removeprefix("dropped/"): n for k, n in counts.items() if "dropped/" in k}
    assert dropped == {
        "empty": 8, "not_rendered": 4, "truncated": 2, "no_answer": 6, "not_passed": 2,
        "too_long_for_student": 2,
    }  # fmt: skip
    assert counts["drafts"] == counts["requests"] == 26 and counts["trained"] == 2
    corrections = takeovers_of(run.trajectories(0))
    assert len(corrections) == 2
    assert all(t.response == f"Answer: {t.task.answer}" for t in corrections), (
        "without its thoughts"
    )
    assert "chat template cannot say it" in (run.path / "report.html").read_text()


def test_a_server_without_usage_costs_what_the_student_would_count(
    tiny_folder: Path, tmp_path: Path, server: ChatServer
) -> None:
    server.answer = lambda n, body: completion(f"Answer: {find_solution(body)}", usage=None)
    run = train(answers(tiny_folder, server, train={"steps": 1}), tmp_path / "run")
    sampled = sum(t.num_completion_tokens for t in takeovers_of(run.trajectories(0)))
    assert run.metrics()[0]["takeover/sampled_tokens"] == sampled
    assert run.read_costs()["teacher"].output_tokens == sampled


def test_a_server_that_fails_stops_the_run_with_its_steps_saved(
    tiny_folder: Path, tmp_path: Path, server: ChatServer
) -> None:
    server.answer = lambda n, body: solve(n, body) if n < 4 else (500, {}, b"out of memory")
    recipe = answers(
        tiny_folder, server, takeover={"max_failure_fraction": 0.3}, run={"checkpoint_every": 99}
    )
    with pytest.raises(DraftFailuresError, match=r"takeover: .*no_answer.*out of memory"):
        train(recipe, tmp_path / "run")
    assert len(RunFolder.read(tmp_path / "run").metrics()) == 1
    server.answer = solve
    resumed = train(recipe, tmp_path / "run")
    whole = train(recipe, tmp_path / "whole")
    assert without_clocks(resumed) == without_clocks(whole)


def test_a_slow_server_is_a_drop(tiny_folder: Path, tmp_path: Path, server: ChatServer) -> None:
    def answer(number: int, body: dict[str, Any]) -> Any:
        if number == 1:
            time.sleep(1.6)
        return solve(number, body)

    server.answer = answer
    recipe = answers(tiny_folder, server, endpoint={"timeout": 1.0}, train={"steps": 1})
    counts = count_all(train(recipe, tmp_path / "run").metrics())
    # On a busy machine an answer that is not delayed may be late, too.
    dropped = counts["dropped/no_answer"]
    assert 1 <= dropped < counts["drafts"] == counts["trained"] + dropped


def test_episodes_that_never_end_or_break_are_counted(
    roomy_folder: Path, tmp_path: Path, server: ChatServer, world: Any
) -> None:
    server.answer = lambda n, body: completion("boom" if n % 2 else "0")
    recipe = answers(
        roomy_folder,
        server,
        takeover=RANDOM | {"at": 1},
        train={"steps": 2, "prompts_per_step": 2},
        **world,
    )
    run = train(recipe, tmp_path / "run")
    counts = count_all(run.metrics())
    assert counts["dropped/fault"] > 0 and counts["trained"] == 0
    assert counts["dropped/fault"] + counts["dropped/not_passed"] == counts["drafts"]
    server.answer = lambda n, body: completion("0")  # again and again
    run = train(recipe, tmp_path / "repeats")
    counts = count_all(run.metrics())
    assert counts["limited"] == counts["dropped/not_passed"] == counts["drafts"] == 8
    assert counts["requests"] == 8 * 4, "one turn is the student's, of five"
    (alarm,) = (row for row in run.alarms() if row["kind"] == "nothing_trained")
    assert "No draft that was taken over trains: not_passed 8" in alarm["message"]


def test_an_alarm_where_hardly_any_trains(
    tiny_folder: Path, tmp_path: Path, server: ChatServer
) -> None:
    server.answer = lambda n, body: completion("Answer: 0") if n % 16 else solve(n, body)
    recipe = answers(tiny_folder, server, train={"steps": 2, "prompts_per_step": 16})
    run = train(recipe, tmp_path / "run")
    (alarm,) = (row for row in run.alarms() if row["kind"] == "few_takeovers")
    assert re.search(r"4 of the last 64 drafts .*\(not_passed 60\)", alarm["message"])
    server.answer = solve
    run = train(recipe, tmp_path / "good")
    assert not [row for row in run.alarms() if row["kind"] == "few_takeovers"]


# ── forks inside an answer ───────────────────────────────────────────────────────────────────────


def continue_answer(number: int, body: dict[str, Any]) -> Any:
    """As vLLM does: the reply begins with the last message."""
    last = body["messages"][-1]
    if last["role"] != "assistant":
        return solve(number, body)
    assert body["continue_final_message"] and body["echo"] and not body["add_generation_prompt"]
    return completion(f"{last['content']} Answer: {find_solution(body)}")


def test_a_server_goes_on_with_an_answer(
    tiny_folder: Path, tmp_path: Path, server: ChatServer
) -> None:
    server.answer = continue_answer
    changes: dict[str, Any] = {
        "takeover": {"at": "random", "can_continue": True},
        "rollout": {"samples_per_prompt": 4, "max_new_tokens": 30},
        "train": {"steps": 2, "prompts_per_step": 4},
    }
    run = train(answers(tiny_folder, server, **changes), tmp_path / "run")
    counts = count_all(run.metrics())
    assert counts["trained"] >= 3 and counts["dropped/no_text"] > 0, "bytes of a random model"
    assert "dropped/not_continued" not in counts and "dropped/not_rendered" not in counts
    for step in range(2):
        stored = run.trajectories(step)
        drafts = {s.trajectory.id: s.trajectory for s in stored}
        for t in takeovers_of(stored):
            num = t.completion_mask.index(True)
            assert t.token_ids[:num] == drafts[t.draft or ""].token_ids[:num]
            assert t.response.endswith(f"Answer: {t.task.answer}")
            text = run_template(tiny_folder).text(t.completion_ids)
            assert text.strip() == f"Answer: {t.task.answer}", "what the server added trains"


def test_a_server_that_begins_anew_is_noticed(
    tiny_folder: Path, tmp_path: Path, server: ChatServer
) -> None:
    server.answer = solve
    changes: dict[str, Any] = {
        "takeover": {"at": 1, "can_continue": True, "select": "all", "require": "none"},
        "rollout": {"samples_per_prompt": 8, "max_new_tokens": 30},
    }
    with pytest.raises(DraftFailuresError, match=r"not_continued.*can_continue says"):
        train(answers(tiny_folder, server, **changes), tmp_path / "run")


def run_template(student: Path) -> Any:
    from support.tiny_model import tiny_tokenizer

    from courtside.chat.template import ChatTemplate

    return ChatTemplate(tiny_tokenizer(), name="tiny", eos_ids=[1])


# ── what is refused before anything runs ─────────────────────────────────────────────────────────


def test_what_the_tasks_lack_is_told_at_once(
    tiny_folder: Path, tmp_path: Path, server: ChatServer
) -> None:
    rows = [{"prompt": f"say {n}", "grader": "contains", "answer": "a"} for n in range(40)]
    tasks = {"kind": "jsonl", "path": str(write_jsonl(tmp_path / "tasks.jsonl", rows))}
    with pytest.raises(TaskError, match=r"takeover.context.field = 'solution'"):
        assemble(answers(tiny_folder, server, tasks=tasks))
    rows = [{**row, "response_prefix": "It is"} for row in rows]
    tasks = {"kind": "jsonl", "path": str(write_jsonl(tmp_path / "prefixes.jsonl", rows))}
    with pytest.raises(RecipeError, match="ends with the beginning of the answer"):
        assemble(answers(tiny_folder, server, tasks=tasks, takeover={"context": None}))
    with pytest.raises(RecipeError, match=r"takeover.endpoint.api_key_env = 'NO_SUCH_KEY'"):
        assemble(answers(tiny_folder, server, endpoint={"api_key_env": "NO_SUCH_KEY"}))
    assert not server.bodies


def test_a_first_step_in_which_nothing_was_written_stops(
    tiny_folder: Path, tmp_path: Path, server: ChatServer
) -> None:
    server.answer = lambda n, body: (500, {}, b"")
    recipe = answers(tiny_folder, server, takeover={"max_failure_fraction": 1.0})
    with pytest.raises(RunError, match=r"took over none of 4 drafts \(no_answer\)"):
        train(recipe, tmp_path / "run")
