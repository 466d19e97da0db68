"""Arithmetic with operands of a given length, and a worked solution of every problem.

The solution works as on paper: least significant digit first, with every carry written out, so
that each line follows from the one before and a small model can imitate it.
"""

from __future__ import annotations

from collections.abc import Iterator

from courtside.hashing import choose, split_of, task_id
from courtside.recipe.tasks import ArithmeticTasks
from courtside.tasks.base import TaskSpace
from courtside.types import Message, Split, Task

QUESTIONS = {
    "add": (
        "What is {a} + {b}?",
        "What is {a} plus {b}?",
        "Add {a} and {b}.",
        "Please compute {a} + {b}.",
        "What is the sum of {a} and {b}?",
    ),
    "subtract": (
        "What is {a} - {b}?",
        "What is {a} minus {b}?",
        "Subtract {b} from {a}.",
        "Please compute {a} - {b}.",
        "What is the difference of {a} and {b}?",
    ),
    "multiply": (
        "What is {a} * {b}?",
        "What is {a} times {b}?",
        "Multiply {a} by {b}.",
        "Please compute {a} * {b}.",
        "What is the product of {a} and {b}?",
    ),
}

REQUESTS = {
    True: (
        "Work digit by digit from the right and end with 'Answer: N'.",
        "Show your work digit by digit, starting from the right, and end with 'Answer: N'.",
        "Go through the digits from right to left, then end with 'Answer: N'.",
    ),
    False: (
        "Reply only with 'Answer: N'.",
        "Do not show your work; just write 'Answer: N'.",
        "Give the result alone, as 'Answer: N'.",
    ),
}


def arithmetic_space(config: ArithmeticTasks) -> TaskSpace:
    low = 0 if config.digits == 1 else 10 ** (config.digits - 1)
    count = 10**config.digits - low

    def operands(index: int) -> tuple[int, int]:
        a, b = low + index // count, low + index % count
        # Differences are never negative.
        return (max(a, b), min(a, b)) if config.operation == "subtract" else (a, b)

    return TaskSpace(
        name=f"tasks.operation = {config.operation!r} with tasks.digits = {config.digits}",
        size=count * count,
        split=lambda index: _split(config.operation, *operands(index)),
        task=lambda index: arithmetic_task(config, *operands(index)),
    )


def _split(operation: str, a: int, b: int) -> Split:
    """By the unordered pair: 12 + 34 in training and 34 + 12 in the test would be a leak."""
    return split_of(f"{operation} {min(a, b)} {max(a, b)}")


def arithmetic_task(config: ArithmeticTasks, a: int, b: int) -> Task:
    content = f"{config.operation} {a} {b}{' step by step' if config.scratchpad else ''}"
    question = choose(QUESTIONS[config.operation], f"question {content}").format(a=a, b=b)
    request = choose(REQUESTS[config.scratchpad], f"request {content}")
    answer = str(compute(config.operation, a, b))
    solution = "\n".join(work_out(config.operation, a, b))
    return Task(
        id=task_id("arithmetic", content),
        split=_split(config.operation, a, b),
        messages=(Message(role="user", content=f"{question} {request}"),),
        answer=answer,
        completion=solution if config.scratchpad else f"Answer: {answer}",
        privileged={"solution": solution},
        tags=("arithmetic", config.operation, f"{config.digits}-digit"),
        grader="number",
    )


def compute(operation: str, a: int, b: int) -> int:
    return {"add": a + b, "subtract": a - b, "multiply": a * b}[operation]


# ── worked solutions ─────────────────────────────────────────────────────────────────────────────


def work_out(operation: str, a: int, b: int) -> Iterator[str]:
    steps = {"add": _addition, "subtract": _subtraction, "multiply": _multiplication}
    yield from steps[operation](a, b)
    yield f"Answer: {compute(operation, a, b)}"


def _addition(a: int, b: int) -> Iterator[str]:
    carry = 0
    for x, y in _columns(a, b):
        total = x + y + carry
        yield f"{x} + {y} + carry {carry} = {total}, write {total % 10}, carry {total // 10}"
        carry = total // 10
    if carry:
        yield f"carry {carry}, write {carry}"


def _subtraction(a: int, b: int) -> Iterator[str]:
    assert a >= b
    borrow = 0
    for x, y in _columns(a, b):
        difference = x - y - borrow
        line = f"{x} - {y} - borrow {borrow} = {difference}"
        borrow = int(difference < 0)
        if borrow:
            line += f", plus 10 is {difference + 10}"
        yield f"{line}, write {difference % 10}, borrow {borrow}"


def _multiplication(a: int, b: int) -> Iterator[str]:
    total = 0
    for place, y in enumerate(_digits(b)):
        zeros = "0" * place
        yield f"{a} * {y}" + (f", then write {zeros} at the end" if place else "") + ":"
        carry = 0
        for x in _digits(a):
            product = x * y + carry
            yield f"{x} * {y} + carry {carry} = {product}, write {product % 10}, " + (
                f"carry {product // 10}"
            )
            carry = product // 10
        if carry:
            yield f"carry {carry}, write {carry}"
        row = a * y * 10**place
        yield f"row: {row}"
        if place:
            yield f"{total} + {row}:"
            yield from _addition(total, row)
            yield f"sum: {total + row}"
        total += row


def _digits(number: int) -> list[int]:
    return [int(digit) for digit in reversed(str(number))]


def _columns(a: int, b: int) -> Iterator[tuple[int, int]]:
    """Digits of both from the right, the shorter one filled up with zeros."""
    width = max(len(str(a)), len(str(b)))
    for x, y in zip(reversed(str(a).zfill(width)), reversed(str(b).zfill(width)), strict=True):
        yield int(x), int(y)
