"""Readers in order, budgets, and controls that are wrong in exactly the way they say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_trajectories import assistant, balanced, play, tool, tool_missing

from courtside.ranks import ALONE, Ranks
from courtside.reader.base import CombinedReader, ReaderOutput
from courtside.reader.controls import CONTROLS
from courtside.reader.loading import make_reader
from courtside.recipe.reader import CombinedReaderConfig, HumanReaderConfig, RuleReaderConfig
from courtside.recipe.rules import Rule
from courtside.report.folder.hints_file import append_hint
from courtside.types import Hint, Trajectory

OK = tool("fine")


def episode(id: str, num: int = 6) -> Trajectory:
    """`num` assistant turns: 1, 3, 5, …"""
    parts = [part for n in range(num) for part in (f"say {n}", OK)]
    return play(*parts[:-1], id=id)


def hint(trajectory: str, turn: int, text: str = "Hm.", source: str = "test") -> Hint:
    return Hint(trajectory=trajectory, turn=turn, text=text, source=source, bad_span="say")


class Says:
    """A reader that always says the same, and counts as readers do."""

    def __init__(self, *hints: Hint):
        self.hints = hints

    def __call__(self, trajectories: Sequence[Trajectory]) -> ReaderOutput:
        return ReaderOutput(hints=self.hints, counts={"rules/test": len(self.hints)})


def composed(
    *readers: Says, trajectories: Sequence[Trajectory], max_hints: int = 8, control: str = "none",
    seed: int = 1,
) -> ReaderOutput:  # fmt: skip
    whole = CombinedReader(
        readers=readers, max_hints=max_hints, control=CONTROLS.get(control), seed=seed
    )
    output = whole(trajectories)
    assert balanced(output.counts), output.counts
    return output


# ── order and budget ─────────────────────────────────────────────────────────────────────────────


def test_one_hint_a_turn_and_the_first_reader_wins() -> None:
    first = Says(hint("a", 1, "One.", "first"))
    second = Says(hint("a", 1, "Two.", "second"), hint("a", 3, "Three.", "second"))
    output = composed(first, second, trajectories=[episode("a")])
    assert [(h.turn, h.text, h.source) for h in output.hints] == [
        (1, "One.", "first"),
        (3, "Three.", "second"),
    ]
    assert output.counts == {"rules/test": 3, "dropped/duplicate": 1, "accepted": 2}
    other = composed(second, first, trajectories=[episode("a")])
    assert [h.text for h in other.hints] == ["Two.", "Three."]


def test_the_budget_is_a_trajectorys() -> None:
    hints = [hint(id, turn) for turn in (5, 1, 3) for id in "ab"]
    output = composed(Says(*hints), trajectories=[episode("a"), episode("b")], max_hints=2)
    selected = [(h.trajectory, h.turn) for h in output.hints]
    assert selected == [("a", 5), ("b", 5), ("a", 1), ("b", 1)], "the first ones, not the earliest"
    assert output.counts == {"rules/test": 6, "dropped/budget": 2, "accepted": 4}


def test_hints_that_fit_no_turn_are_dropped_whoever_wrote_them() -> None:
    trajectory = play(assistant("a"), OK, assistant("", num_tokens=0), OK, "b", id="a")
    bad = [hint("x", 1), hint("a", 99), hint("a", -1), hint("a", 2), hint("a", 0), hint("a", 3),
           hint("a", 1, " \n")]  # fmt: skip
    output = composed(Says(*bad, hint("a", 5)), trajectories=[trajectory])
    assert [h.turn for h in output.hints] == [5]
    assert output.counts == {
        "dropped/no_such_trajectory": 1, "dropped/no_such_turn": 2, "dropped/not_assistant": 2,
        "dropped/no_completion": 1, "dropped/empty_hint": 1, "accepted": 1, "rules/test": 8,
    }  # fmt: skip


def test_several_kinds_in_one_section(tmp_path: Path) -> None:
    path = tmp_path / "hints.jsonl"
    append_hint(path, hint("t", 1, "Mine."))
    append_hint(path, hint("t", 3, "Mine too."))
    rules = RuleReaderConfig(kind="rules", rules=(Rule(detect="tool_not_found", hint="Theirs."),))
    person = HumanReaderConfig(kind="human", path=path)
    bad = assistant("weather", tool_missing())
    trajectory = play(bad, OK, "b", OK, bad)
    config = CombinedReaderConfig(kind="combined", readers=(person, rules))
    output = make_reader(config, seed=0)([trajectory])
    assert [(h.turn, h.text, h.source) for h in output.hints] == [
        (1, "Mine.", "human"),
        (3, "Mine too.", "human"),
        (5, "Theirs.", "rules:tool_not_found"),
    ]
    assert output.counts == {
        "human/proposed": 2, "rules/tool_not_found": 2, "dropped/duplicate": 1, "accepted": 3,
    }  # fmt: skip
    tight = config.model_copy(update={"max_hints": 2})
    assert [h.turn for h in make_reader(tight, seed=0)([trajectory]).hints] == [1, 3]
    members = (person.model_copy(update={"max_hints": 1}), rules)
    output = make_reader(config.model_copy(update={"readers": members}), seed=0)([trajectory])
    assert [h.turn for h in output.hints] == [1, 5] and balanced(output.counts)


# ── controls ─────────────────────────────────────────────────────────────────────────────────────

BATCH = [episode(id) for id in "abcd"]
PROPOSED = [hint("a", 1, "A1"), hint("a", 5, "A5"), hint("b", 3, "B3"), hint("d", 11, "D11")]


def test_random_turn() -> None:
    output = composed(Says(*PROPOSED), trajectories=BATCH, control="random_turn")
    assert [(h.trajectory, h.text) for h in output.hints] == [
        ("a", "A1"), ("a", "A5"), ("b", "B3"), ("d", "D11"),
    ]  # fmt: skip
    for relocated, original in zip(output.hints, PROPOSED, strict=True):
        assert relocated.turn != original.turn and relocated.turn in (1, 3, 5, 7, 9, 11)
        assert (relocated.source, relocated.bad_span) == (original.source, None)
        assert f"meant for turn {original.turn}" in relocated.reason
    turns_of_a = {h.turn for h in output.hints if h.trajectory == "a"}
    assert len(turns_of_a) == 2 and not turns_of_a & {1, 5}, (
        "never on a turn that another hint was for"
    )


def test_random_turn_spreads_over_the_other_turns() -> None:
    turn_counts = Counter(
        composed(Says(hint("a", 5)), trajectories=[episode("a")], control="random_turn", seed=seed)
        .hints[0].turn
        for seed in range(500)
    )  # fmt: skip
    assert turn_counts.keys() == {1, 3, 7, 9, 11} and min(turn_counts.values()) > 60


def test_random_turn_avoids_turns_whose_hint_was_over_budget() -> None:
    hints = [hint("a", turn) for turn in (1, 3, 5, 7, 9)]
    output = composed(Says(*hints), trajectories=[episode("a")], control="random_turn", max_hints=1)
    assert [h.turn for h in output.hints] == [11]


def test_random_turn_without_another_turn() -> None:
    output = composed(
        Says(hint("a", 1), hint("a", 3)), trajectories=[episode("a", 3)], control="random_turn"
    )
    assert [h.turn for h in output.hints] == [5]
    assert output.counts == {"rules/test": 2, "dropped/no_other_turn": 1, "accepted": 1}


def test_random_hint() -> None:
    output = composed(Says(*PROPOSED), trajectories=BATCH, control="random_hint")
    assert [(h.trajectory, h.turn) for h in output.hints] == [
        (h.trajectory, h.turn) for h in PROPOSED
    ]
    assert sorted(h.text for h in output.hints) == sorted(h.text for h in PROPOSED)
    assert all(
        got.text != original.text for got, original in zip(output.hints, PROPOSED, strict=True)
    )
    assert all(h.bad_span is None and "random_hint" in h.reason for h in output.hints)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from("xyzw"), max_size=12), st.integers(0, 50))
def test_random_hint_never_gives_the_same_words(texts: list[str], seed: int) -> None:
    batch = [episode(f"e{i}", 1) for i in range(len(texts))]
    hints = [hint(f"e{i}", 1, text) for i, text in enumerate(texts)]
    output = composed(Says(*hints), trajectories=batch, control="random_hint", seed=seed)
    text_of = {h.trajectory: h.text for h in hints}
    assert all(h.text != text_of[h.trajectory] for h in output.hints)
    # A permutation among those that are left, and no more is dropped than must be.
    remaining = Counter(text_of[h.trajectory] for h in output.hints)
    assert Counter(h.text for h in output.hints) == remaining
    most = max(Counter(texts).values(), default=0)
    assert len(output.hints) == len(texts) - max(2 * most - len(texts), 0)


def test_all_turns() -> None:
    output = composed(Says(*PROPOSED), trajectories=BATCH, control="all_turns", max_hints=8)
    by_turn = {(h.trajectory, h.turn): h for h in output.hints}
    assert len(by_turn) == len(output.hints) == 18, "six turns in each of the three"
    assert {key[0] for key in by_turn} == {"a", "b", "d"}, "none where there was no hint"
    assert by_turn["a", 5] == PROPOSED[1], "where there was one it stays as it was"
    assert all(by_turn["a", turn].text == "A1" for turn in (1, 3, 7, 9, 11))
    assert by_turn["b", 1].bad_span is None
    assert output.counts == {"rules/test": 4, "control/added": 14, "accepted": 18}


@pytest.mark.parametrize("control", ["random_turn", "random_hint"])
def test_controls_follow_the_seed_and_nothing_else(control: str) -> None:
    hints = [hint(id, turn, f"{id}{turn}") for id in "abcd" for turn in (1, 5)]

    def controlled(trajectories: list[Trajectory], order: list[Hint], seed: int) -> set[Hint]:
        return set(
            composed(Says(*order), trajectories=trajectories, control=control, seed=seed).hints
        )

    once = controlled(BATCH, hints, 1)
    assert once == controlled(BATCH, hints, 1) != controlled(BATCH, hints, 2)
    assert {h.trajectory for h in once} == set("abcd")
    assert once == controlled(BATCH[::-1], hints, 1), "not on the order of the batch"
    other = [replace(t, id=f"{t.id}!") for t in BATCH]
    relocated = [replace(h, trajectory=f"{h.trajectory}!") for h in hints]
    turned = {replace(h, trajectory=h.trajectory[:-1]) for h in controlled(other, relocated, 1)}
    assert turned != once, "other trajectories, other numbers"


def test_without_hints_controls_do_nothing() -> None:
    for control in CONTROLS:
        assert composed(Says(), trajectories=BATCH, control=control) == ReaderOutput(
            hints=(), counts={}
        )


def test_other_kind() -> None:
    hints = [hint("a", 1, "A", "rules:x"), hint("b", 3, "B", "rules:x"), hint("d", 5, "D", "r:y")]
    for seed in range(20):
        output = composed(Says(*hints), trajectories=BATCH, control="other_kind", seed=seed)
        assert [(h.trajectory, h.turn, h.source) for h in output.hints] == [
            (h.trajectory, h.turn, h.source) for h in hints
        ]
        first, second, third = (h.text for h in output.hints)
        assert first == second == "D" and third in "AB"
        assert all(h.bad_span is None and "other_kind" in h.reason for h in output.hints)


def test_other_kind_where_all_hints_are_of_one() -> None:
    output = composed(Says(*PROPOSED), trajectories=BATCH, control="other_kind")
    assert output.counts == {"rules/test": len(PROPOSED), "dropped/no_other_kind": len(PROPOSED)}


def deciding(id: str, *decisions: str | None, wrong: Sequence[int] = ()) -> Trajectory:
    """Turns 1, 3, 5, … with these decisions; those in `wrong` have an event."""
    turns = []
    for n, decision in enumerate(decisions):
        events = [tool_missing()] if 2 * n + 1 in wrong else []
        turns += [replace(assistant(f"say {n}", *events), decision=decision), OK]
    return play(*turns[:-1], id=id)


SIDES = [
    deciding("a", "date/habit_wrong", "desk/habit_right", None, "filler", wrong=(1,)),
    deciding("b", "date/habit_right", "date/habit_right", "desk/habit_right", wrong=(3,)),
    deciding("c", "date/habit_wrong", "desk/habit_wrong", "date/habit_right", wrong=(3,)),
]


def test_other_kind_goes_by_decisions_where_turns_have_them() -> None:
    """A rule for the mistake and one for its mirror are of one kind."""
    hints = [hint("a", 1, "A", "rules:date"), hint("b", 3, "B", "rules:date_mirror"),
             hint("c", 3, "C", "rules:desk")]  # fmt: skip
    for seed in range(10):
        output = composed(Says(*hints), trajectories=SIDES, control="other_kind", seed=seed)
        first, second, third = (h.text for h in output.hints)
        assert first == second == "C" and third in "AB"


def test_mirror_turn() -> None:
    """Of b's two dates one went wrong itself, and c's first is on the same side."""
    targets = set()
    for seed in range(20):
        reader = Says(hint("a", 1, "Date."), hint("c", 3, "Desk."))
        output = composed(reader, trajectories=SIDES, control="mirror_turn", seed=seed)
        dates, desks = ({(h.trajectory, h.turn) for h in output.hints if h.text == text}
                        for text in ("Date.", "Desk."))  # fmt: skip
        assert len(dates) == len(desks) == 1
        assert dates <= {("b", 1), ("c", 5)} and desks <= {("a", 3), ("b", 5)}
        targets |= dates | desks
        reasons = {h.text: h.reason for h in output.hints}
        assert reasons["Date."] == "control mirror_turn: meant for turn 1 of a"
        assert all(h.bad_span is None for h in output.hints)
    assert targets == {("b", 1), ("c", 5), ("a", 3), ("b", 5)}


def test_mirror_turn_takes_each_turn_once_and_none_with_a_hint() -> None:
    reader = Says(hint("a", 1), hint("c", 1), hint("b", 1, "Meant for the mirror."), hint("a", 5))
    output = composed(reader, trajectories=SIDES, control="mirror_turn")
    # a:1 and c:1 both look for a right date: c:5 alone is left. b:1 finds a date on the other
    # side only where hints stand. a:5 made no decision.
    assert [(h.trajectory, h.turn) for h in output.hints] == [("c", 5)]
    assert output.counts == {"rules/test": 4, "dropped/no_mirror_turn": 3, "accepted": 1}


@pytest.mark.parametrize("control", ["mirror_turn", "other_kind"])
def test_controls_of_decisions_follow_the_seed_and_not_the_order(control: str) -> None:
    kinds = dict(zip("abcdef", ["date", "desk"] * 3, strict=True))
    batch = [
        deciding(id, f"{kind}/wrong", f"{kind}/right", f"{kind}/right", wrong=(1,))
        for id, kind in kinds.items()
    ]
    hints = [hint(id, 1, f"{id}1", f"rules:{id}") for id in "abcdef"]

    def controlled(order: int, seed: int) -> set[Hint]:
        reader = Says(*hints[::order])
        return set(composed(reader, trajectories=batch[::order], control=control, seed=seed).hints)

    assert len(controlled(1, 1)) == 6
    assert controlled(1, 1) == controlled(-1, 1) != controlled(1, 2)


@pytest.mark.parametrize("contrast", ["random_hint", "other_kind"])
def test_hints_get_a_wrong_one_of_the_batch(contrast: str) -> None:
    """Their own text and turn stay; without another text there is nothing to contrast with."""
    hints = [hint("a", 1, "A", "rules:one"), hint("c", 3, "B", "rules:other")]
    for seed in range(5):
        reader = make_reader(
            RuleReaderConfig(kind="rules"), seed=seed, contrast=cast(Any, contrast)
        )
        assert isinstance(reader, CombinedReader)
        output = replace(reader, readers=[Says(*hints)])(SIDES)
        assert [(h.trajectory, h.turn, h.text, h.wrong_text) for h in output.hints] == [
            ("a", 1, "A", "B"), ("c", 3, "B", "A"),
        ]  # fmt: skip
        alone = replace(reader, readers=[Says(hints[0], hint("b", 3, "A", "rules:one"))])(SIDES)
        assert alone.hints == () and alone.counts["rules/test"] == 2
        reason = "no_other_hint" if contrast == "random_hint" else "no_other_kind"
        assert alone.counts[f"dropped/{reason}"] == 2


class RankInThread(Ranks):
    """One of two ranks, each in a thread of its own."""

    size = 2

    def __init__(self, rank: int, values: list[Any], barrier: Barrier) -> None:
        self.rank, self.values, self.barrier = rank, values, barrier

    def exchange(self, value: Any) -> list[Any]:
        self.values[self.rank] = value
        self.barrier.wait(timeout=10)
        gathered = list(self.values)
        self.barrier.wait(timeout=10)
        return gathered


@pytest.mark.parametrize("setting", [*CONTROLS, "contrast"])
def test_two_ranks_exchange_hints_as_one_process_does(setting: str) -> None:
    """Each reads some of the trajectories; together they give the hints and counts of the batch."""
    kinds = dict(zip("abcdef", ["date", "desk"] * 3, strict=True))
    batch = [
        deciding(id, f"{kind}/wrong", f"{kind}/right", f"{kind}/right", wrong=(1,))
        for id, kind in kinds.items()
    ]
    hints = [hint(id, 1, "S" if id in "abcd" else id, f"rules:{kinds[id]}") for id in "abcdef"]

    def read(ids: str, ranks: Ranks) -> ReaderOutput:
        control = cast(Any, "none" if setting == "contrast" else setting)
        reader = make_reader(
            RuleReaderConfig(kind="rules", control=control),
            seed=3,
            contrast="random_hint" if setting == "contrast" else None,
            ranks=ranks,
        )
        assert isinstance(reader, CombinedReader)
        says = Says(*(h for h in hints if h.trajectory in ids))
        return replace(reader, readers=[says])([t for t in batch if t.id in ids])

    values, barrier = [None, None], Barrier(2)
    with ThreadPoolExecutor(2) as threads:
        ranks = [RankInThread(rank, values, barrier) for rank in range(2)]
        first, second = threads.map(read, ("ad", "bcef"), ranks)
    whole = read("abcdef", ALONE)
    assert {*first.hints, *second.hints} == {*whole.hints}
    assert len(first.hints) + len(second.hints) == len(whole.hints) > 0
    assert {h.trajectory for h in first.hints} <= {*"ad"}, "its own, also where a hint moved"
    assert Counter(first.counts) + Counter(second.counts) == Counter(whole.counts)
