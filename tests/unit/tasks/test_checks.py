"""Every check has answers that pass and answers that fail, and says why they fail."""

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from courtside.tasks.checks import CHECKS, find_violation

PARAMETERS: Mapping[str, Mapping[str, Any]] = {
    "word_count": {"limit": 4},
    "forbidden_word": {"word": "the"},
    "ending": {"phrase": "Hope this helps!"},
    "starts_with": {"phrase": "In short,"},
}

PASSING = [
    ("lower_case", "a volcano is a mountain, e.g. mount etna (3,300 m)."),
    ("lower_case", "grün, ß and ñ"),
    ("upper_case", "A VOLCANO IS A MOUNTAIN. 3 OF THEM!"),
    ("word_count", "Hot rock, very hot"),
    ("word_count", "One - two - three."),
    ("json", '{"answer": "A mountain.", "sure": true}'),
    ("json", ' {\n"a": [1, 2.5, null]}\n'),
    ("bullets", "- Hot rock\n- Ash"),
    ("bullets", "- a\n\n- b\n- c\n"),
    ("forbidden_word", "Other mountains breathe; they theorise."),
    ("ending", "It is a mountain. Hope this helps!"),
    ("ending", "It is a mountain.\n\nHope this helps!  "),
    ("starts_with", "In short, a mountain."),
    ("one_sentence", "A volcano is a mountain, e.g. Mt. Etna in Italy."),
    ("one_sentence", "Pi is 3.14, more or less!"),
    ("one_sentence", 'Dr. J. Smith called it "a hot hill" (really).'),
    ("one_sentence", "Well... it is hot?!"),
    ("one_sentence", "It is hot (very hot!)"),
]

FAILING = [
    ("lower_case", "a Volcano", "'V'"),
    ("lower_case", "123", "no letters"),
    ("lower_case", "\u01c5", "capital letters such as"),  # a title-case letter is neither
    ("upper_case", "A VOLCANo", "'o'"),
    ("upper_case", "\u01c5A", "small letters such as"),
    ("word_count", "It is very hot rock", "at most 4 words, but it has 5"),
    ("json", "A mountain.", "not valid JSON: Expecting value at character 0"),
    ("json", '```json\n{"a": 1}\n```', "code fence"),
    ("json", '["a"]', "it is a list"),
    ("json", "17", "it is a number"),
    ("json", '{"a": NaN}', "not valid JSON"),
    ("json", '{"a": ' + "1" * 5000 + "}", "not valid JSON"),
    ("json", "[1," * 100_000, "not valid JSON"),
    ("json", '{"a": 1} Done.', "not valid JSON"),
    ("bullets", "Here:\n- a\n- b", "one line is 'Here:'"),
    ("bullets", "* a\n* b", "one line is '* a'"),
    ("bullets", "- a", "at least two"),
    ("bullets", "- \n- a", "one of them is empty"),
    ("forbidden_word", "On The hill", "must not contain the word 'the'"),
    ("ending", "It is a mountain. Hope this helps", "must end with exactly 'Hope this helps!'"),
    ("ending", "Hope this helps!", "says nothing else"),
    ("starts_with", "A mountain, in short.", "it starts with 'A mountai'"),
    ("starts_with", "In short,", "says nothing else"),
    ("one_sentence", "It is hot. It is big.", "2 sentences"),
    ("one_sentence", "it is hot. it is big.", "2 sentences"),
    ("one_sentence", "It is hot", "does not end with"),
    ("one_sentence", "It is hot. It is", "does not end with"),
    ("one_sentence", "It is\nhot.", "several lines"),
    ("one_sentence", "I have 5. You have 3.", "2 sentences"),
]


@pytest.mark.parametrize(("name", "text"), PASSING)
def test_passes(name: str, text: str) -> None:
    assert find_violation(name, text, PARAMETERS.get(name, {})) is None


@pytest.mark.parametrize(("name", "text", "reason"), FAILING)
def test_fails_with_the_reason(name: str, text: str, reason: str) -> None:
    violation = find_violation(name, text, PARAMETERS.get(name, {}))
    assert violation is not None and reason in violation
    assert violation.startswith("The answer must") and violation.endswith(".")


def test_every_check_has_passing_and_failing_answers() -> None:
    assert {name for name, _ in PASSING} == {name for name, _, _ in FAILING} == set(CHECKS)


def test_the_feedback_reads_well() -> None:
    assert find_violation("lower_case", "a Volcano", {}) == (
        "The answer must be in lower case, but it contains capital letters such as 'V'."
    )


@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.parametrize("text", ["", " \n\t", "...", "- \n- ", "{}", "\u200b", "!?"])
def test_saying_nothing_follows_no_instruction(name: str, text: str) -> None:
    assert find_violation(name, text, PARAMETERS.get(name, {})) is not None


@given(st.sampled_from(sorted(CHECKS)), st.text())
def test_no_text_breaks_a_check(name: str, text: str) -> None:
    violation = find_violation(name, text, PARAMETERS.get(name, {}))
    assert violation is None or violation.endswith(".")


@pytest.mark.parametrize("name", CHECKS)
def test_long_runs_are_read_in_no_time(name: str) -> None:
    for text in ("a" * 200_000, "." * 200_000 + "a", "a. " * 60_000, "\n" * 100_000 + "x"):
        find_violation(name, text, PARAMETERS.get(name, {}))
