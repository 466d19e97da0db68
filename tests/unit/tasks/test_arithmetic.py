import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from courtside.recipe.tasks import ArithmeticTasks
from courtside.tasks.arithmetic import arithmetic_task, work_out
from courtside.tasks.graders import grade
from courtside.tasks.loading import make_task_source
from courtside.types import Split

OPERATIONS = ("add", "subtract", "multiply")
SPLITS: tuple[Split, ...] = ("train", "validation", "test")


def config(operation: str = "add", digits: int = 3, **more: object) -> ArithmeticTasks:
    return ArithmeticTasks.model_validate(
        {"kind": "arithmetic", "operation": operation, "digits": digits, **more}
    )


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("digits", [1, 2, 3, 7, 12])
@pytest.mark.parametrize("scratchpad", [True, False])
def test_every_completion_passes_its_own_grader(
    operation: str, digits: int, scratchpad: bool
) -> None:
    source = make_task_source(config(operation, digits, scratchpad=scratchpad), seed=0)
    for task in (*source.batch(0, 20), *source.held_out("test", 5)):
        for text in (task.completion, task.privileged["solution"]):
            assert text is not None
            passed = grade(task, text)
            assert passed is not None and passed.passed, (task, passed)
            failed = grade(task, f"{text}0")
            assert task.answer == "0" or (failed is not None and not failed.passed)
        assert task.completion is not None
        assert task.completion.endswith(f"Answer: {task.answer}")
        assert ("carry" in task.completion or "borrow" in task.completion) == scratchpad
        assert "'Answer: N'" in task.messages[-1].content
        assert task.tags == ("arithmetic", operation, f"{digits}-digit")


def test_operands_have_the_asked_length() -> None:
    for task in make_task_source(config("subtract", 4), seed=1).batch(0, 50):
        operands = re.findall(r"\d+", task.messages[0].content)
        assert [len(operand) for operand in operands] == [4, 4]
        assert task.answer is not None and int(task.answer) >= 0


@given(st.integers(0, 10**12 - 1), st.integers(0, 10**12 - 1))
def test_every_line_of_a_solution_is_true(a: int, b: int) -> None:
    a, b = max(a, b), min(a, b)
    for operation in OPERATIONS:
        *lines, last = work_out(operation, a, b)
        expected = {"add": a + b, "subtract": a - b, "multiply": a * b}[operation]
        assert last == f"Answer: {expected}"
        for line in lines:
            if " = " not in line:
                continue
            expression, result = re.sub(r"carry |borrow ", "", line.split(", ")[0]).split(" = ")
            assert eval(expression) == int(result), line  # sums of our own digits
            wrapped = re.search(r"plus 10 is (\d)", line)
            value = int(wrapped[1]) if wrapped else int(result)
            passed_on = int(line[-1])
            assert f"write {value % 10}," in line
            assert passed_on == (1 if wrapped else value // 10)


def test_written_digits_spell_the_answer() -> None:
    for operation, a, b in (("add", 987, 654), ("subtract", 502, 468)):
        lines = list(work_out(operation, a, b))
        digits = [match[1] for line in lines if (match := re.search(r"write (\d)", line))]
        assert int("".join(reversed(digits))) == int(lines[-1].removeprefix("Answer: "))


def test_a_worked_sum_by_hand() -> None:
    assert list(work_out("add", 478, 356)) == [
        "8 + 6 + carry 0 = 14, write 4, carry 1",
        "7 + 5 + carry 1 = 13, write 3, carry 1",
        "4 + 3 + carry 1 = 8, write 8, carry 0",
        "Answer: 834",
    ]


def test_mirrored_problems_share_a_split_but_not_an_id() -> None:
    for a in range(10, 60):
        first, other = (arithmetic_task(config(digits=2), *pair) for pair in ((a, 77), (77, a)))
        assert first.split == other.split
        assert first.id != other.id


@pytest.mark.parametrize("operation", OPERATIONS)
def test_splits_never_overlap_over_thousands(operation: str) -> None:
    source = make_task_source(config(operation, 3), seed=0)
    held = {
        tuple(sorted(re.findall(r"\d+", task.messages[0].content)))
        for split in SPLITS[1:]
        for task in source.held_out(split, 500)
    }
    train = [task for step in range(40) for task in source.batch(step, 50)]
    operands = {tuple(sorted(re.findall(r"\d+", task.messages[0].content))) for task in train}
    assert len(operands) > 1900 and not operands & held


@pytest.mark.parametrize("operation", OPERATIONS)
def test_one_digit_problems_end_and_fill_every_split(operation: str) -> None:
    source = make_task_source(config(operation, 1), seed=0)
    held_out_tasks = [source.held_out(split, 1000) for split in SPLITS]
    assert all(held_out_tasks)
    assert sum(map(len, held_out_tasks)) == (55 if operation == "subtract" else 100)
    assert len(source.batch(0, 500)) == 500


def test_phrasings_vary() -> None:
    texts = [task.messages[0].content for task in make_task_source(config(), seed=0).batch(0, 60)]
    assert len({re.sub(r"\d+", "N", text) for text in texts}) >= 10
