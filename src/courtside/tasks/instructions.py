"""Everyday requests with one instruction each, which a program can check.

Stated, the instruction is part of the user's message, in one of several wordings and with varying
parameters. Not stated, it is a rule that only a teacher sees: one wording per check, the same for
every task, because a student can internalise a shared rule but cannot guess a private one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from courtside.hashing import choose, split_of, task_id
from courtside.recipe.tasks import InstructionTasks
from courtside.tasks.base import TaskSpace
from courtside.tasks.request_templates import REQUESTS
from courtside.types import Message, Task


@dataclass(frozen=True, slots=True)
class Instruction:
    rule: str
    """The canonical wording, as a standing rule."""
    wordings: tuple[str, ...]
    """For one message."""
    parameters: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """What each slot may hold; the first is what the rule says."""


INSTRUCTIONS: Mapping[str, Instruction] = {
    "lower_case": Instruction(
        rule="Write every answer entirely in lower case, without a single capital letter.",
        wordings=(
            "Answer in lower case only.",
            "Use no capital letters in your answer.",
            "Please write everything in lowercase letters.",
            "Your whole answer must be in lower case.",
        ),
    ),
    "upper_case": Instruction(
        rule="Write every answer entirely in upper case, without a single small letter.",
        wordings=(
            "Answer in upper case only.",
            "Use capital letters for every word of your answer.",
            "Please write everything in uppercase letters.",
            "Your whole answer must be in capital letters.",
        ),
    ),
    "word_count": Instruction(
        rule="Use at most {limit} words in every answer.",
        wordings=(
            "Use at most {limit} words.",
            "Answer in no more than {limit} words.",
            "Keep your answer to {limit} words or fewer.",
            "Please do not use more than {limit} words.",
        ),
        parameters={"limit": (15, 5, 8, 10, 12, 20, 25, 30)},
    ),
    "json": Instruction(
        rule="Give every answer as one valid JSON object and nothing else.",
        wordings=(
            "Answer with one valid JSON object and nothing else.",
            "Your whole answer must be a JSON object.",
            "Please reply only with a valid JSON object.",
            "Give the answer as a JSON object, without any other text.",
        ),
    ),
    "bullets": Instruction(
        rule=(
            "Give every answer as a list of at least two lines that each start with '- ', and "
            "write nothing else."
        ),
        wordings=(
            "Answer only with a list of at least two lines that start with '- '.",
            "Write your answer as two or more bullet points, each line starting with '- '.",
            "Please reply with nothing but bullets: lines that start with '- ', at least two.",
            "Every line of your answer must start with '- ', and there must be two or more.",
        ),
    ),
    "forbidden_word": Instruction(
        rule='Never use the word "{word}" in an answer.',
        wordings=(
            'Do not use the word "{word}".',
            'Answer without the word "{word}".',
            'Please avoid the word "{word}" completely.',
            'Your answer must not contain the word "{word}".',
        ),
        parameters={"word": ("the", "and", "of", "it", "that", "people", "can", "with")},
    ),
    "ending": Instruction(
        rule='End every answer with exactly this phrase: "{phrase}"',
        wordings=(
            'End your answer with the exact phrase "{phrase}"',
            'The last words of your answer must be "{phrase}"',
            'Please finish with exactly "{phrase}"',
            'Close your answer with "{phrase}" and write nothing after it.',
        ),
        parameters={
            "phrase": (
                "Hope this helps!",
                "That is all.",
                "Over and out.",
                "Thanks for asking!",
                "And that is that.",
                "Have a nice day!",
                "Any questions?",
                "The end.",
            )
        },
    ),
    "starts_with": Instruction(
        rule='Start every answer with exactly this phrase: "{phrase}"',
        wordings=(
            'Start your answer with the exact phrase "{phrase}"',
            'The first words of your answer must be "{phrase}"',
            'Please begin with exactly "{phrase}"',
            'Open your answer with "{phrase}" and then go on.',
        ),
        parameters={
            "phrase": (
                "In short,",
                "Good question!",
                "Well, let me see.",
                "Here you go:",
                "Of course!",
                "My dear friend,",
                "As far as I know,",
                "Quick answer:",
            )
        },
    ),
    "one_sentence": Instruction(
        rule="Answer always in exactly one sentence.",
        wordings=(
            "Answer in exactly one sentence.",
            "Use one sentence only.",
            "Please reply with a single sentence.",
            "Your whole answer must be one sentence.",
        ),
    ),
}


def instruction_space(config: InstructionTasks) -> TaskSpace:
    checks = tuple(dict.fromkeys(config.checks))

    def task(index: int) -> Task:
        request, check = divmod(index, len(checks))
        return instruction_task(
            REQUESTS[request], checks[check], stated=config.instruction_in_prompt
        )

    return TaskSpace(
        name=f"tasks.checks = {list(checks)}",
        size=len(REQUESTS) * len(checks),
        # By the request alone: a held-out request is unseen with every instruction.
        split=lambda index: split_of(REQUESTS[index // len(checks)]),
        task=task,
    )


def instruction_task(request: str, check: str, *, stated: bool) -> Task:
    instruction = INSTRUCTIONS[check]
    key = f"{request}\n{check}"
    if stated:
        parameters = {
            name: choose(options, f"{name}\n{key}")
            for name, options in instruction.parameters.items()
        }
        wording = choose(instruction.wordings, f"wording\n{key}").format(**parameters)
        before = choose((True, False, False), f"place\n{key}")
        content = f"{wording} {request}" if before else f"{request} {wording}"
        privileged = {}
    else:
        parameters = {name: options[0] for name, options in instruction.parameters.items()}
        content = request
        privileged = {"rule": instruction.rule.format(**parameters)}
    identity = json.dumps([content, check, parameters, privileged], sort_keys=True)
    return Task(
        id=task_id("instructions", identity),
        split=split_of(request),
        messages=(Message(role="user", content=content),),
        privileged=privileged,
        tags=("instructions", check),
        grader="instruction",
        grader_args={"check": check, **parameters},
    )
