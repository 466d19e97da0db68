import re
from collections import Counter
from typing import get_args

import pytest

from courtside.recipe.tasks import CheckName, InstructionTasks
from courtside.tasks.checks import CHECKS
from courtside.tasks.graders import require_gradable
from courtside.tasks.instructions import INSTRUCTIONS, instruction_task
from courtside.tasks.loading import make_task_source
from courtside.tasks.request_templates import ACTIVITIES, REQUESTS, SCENES, THINGS
from courtside.types import Task

NAMES = get_args(CheckName)
FAMILIES = (THINGS, ACTIVITIES, SCENES)


def config(*checks: str, stated: bool = True) -> InstructionTasks:
    return InstructionTasks.model_validate(
        {"kind": "instructions", "checks": checks or NAMES, "instruction_in_prompt": stated}
    )


def request_of(task: Task) -> str:
    return next(request for request in REQUESTS if request in task.messages[0].content)


def test_every_check_of_a_recipe_exists() -> None:
    assert set(NAMES) == set(CHECKS) == set(INSTRUCTIONS)
    for name, instruction in INSTRUCTIONS.items():
        assert instruction.parameters.keys() == CHECKS[name].parameters.keys()
        assert len(set(instruction.wordings)) >= 3


def test_the_space_of_requests_is_large_and_reads_as_english() -> None:
    assert sum(len(family.templates) for family in FAMILIES) >= 40
    assert sum(len(family.topics) for family in FAMILIES) >= 100
    assert len(REQUESTS) == len(set(REQUESTS)) >= 4000
    for request in REQUESTS:
        assert request[0].isupper() and request[-1] in ".?", request
        assert not re.search(r"\ba [aeiou]|\ban [^aeiou]|\b(a|an|the) (a|an|the)\b|[{}/]|  ",
                             request), request  # fmt: skip


def test_stated_instructions_are_in_the_message() -> None:
    source = make_task_source(config(), seed=0)
    requests: Counter[str] = Counter()
    for task in source.batch(0, 300):
        require_gradable(task)
        text = task.messages[0].content
        remainder = text.replace(request_of(task), "").strip()
        check = task.grader_args["check"]
        parameters = {name: value for name, value in task.grader_args.items() if name != "check"}
        wordings = [wording.format(**parameters) for wording in INSTRUCTIONS[check].wordings]
        assert remainder in wordings
        assert task.privileged == {}
        assert task.tags == ("instructions", check)
        requests[check] += 1
    assert set(requests) == set(NAMES)


def test_wordings_and_parameters_vary() -> None:
    tasks = make_task_source(config("word_count"), seed=0).batch(0, 200)
    assert len({task.grader_args["limit"] for task in tasks}) >= 6
    first = [task.messages[0].content.startswith(request_of(task)) for task in tasks]
    assert any(first) and not all(first)


def test_an_unstated_rule_is_shared_and_hidden() -> None:
    tasks = make_task_source(config(stated=False), seed=0).batch(0, 200)
    rules = {(task.grader_args["check"], task.privileged["rule"]) for task in tasks}
    assert len(rules) == len(NAMES)
    assert len({str(sorted(task.grader_args.items())) for task in tasks}) == len(NAMES)
    for task in tasks:
        require_gradable(task)
        assert task.messages[0].content in REQUESTS


@pytest.mark.parametrize("name", NAMES)
def test_rules_state_their_parameters(name: str) -> None:
    task = instruction_task("What is tea?", name, stated=False)
    for parameter in CHECKS[name].parameters:
        assert str(task.grader_args[parameter]) in task.privileged["rule"]


def test_a_held_out_request_is_unseen_with_every_check() -> None:
    source = make_task_source(config(), seed=0)
    train = {t.messages[0].content for step in range(20) for t in source.batch(step, 200)}
    for split in ("validation", "test"):
        held = source.held_out(split, 300)
        assert len({task.id for task in held}) == 300
        for request in {request_of(task) for task in held}:
            assert not any(request in text for text in train)
            assert {instruction_task(request, n, stated=s).split
                    for n in NAMES for s in (True, False)} == {split}  # fmt: skip


def test_ids_tell_tasks_apart() -> None:
    tasks = [
        instruction_task(request, name, stated=stated)
        for request in REQUESTS[:50] for name in NAMES for stated in (True, False)
    ]  # fmt: skip
    assert len({task.id for task in tasks}) == len(tasks)
