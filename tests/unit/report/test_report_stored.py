"""Trajectories on disk: episodes, hints and partial targets come back exactly; old files too."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.report.made_up import Logps, make_batch, make_evaluation
from unit.report.played import hinted, make_episode, make_hinted_batch, make_hinted_update

from courtside.report.folder.files import encode_json
from courtside.report.folder.folder import RunFolder
from courtside.report.folder.parquet import (
    parse_evaluation,
    read_hints,
    read_trajectories,
    serialize_evaluation,
    write_trajectories,
)
from courtside.types import (
    Event,
    Hint,
    HintOutcome,
    Message,
    Scored,
    Target,
    Turn,
    VersionSpan,
)  # fmt: skip

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
exact = st.floats(width=32)
"""Log-probs are stored as float32; NaN and the infinities among them."""
# A lone surrogate cannot be encoded, and a map of facts may hold one: a program's broken output.
facts = st.dictionaries(texts, st.text(max_size=6), max_size=3)
events = st.lists(st.builds(Event, kind=texts, details=facts), max_size=2)
messages = st.lists(
    st.builds(Message, role=st.sampled_from(["system", "user", "tool"]), content=texts), max_size=2
)


@st.composite
def turns(draw):
    size = draw(st.integers(0, 4))
    logps = st.lists(exact, min_size=size, max_size=size)
    return Turn(
        role=draw(st.sampled_from(["prompt", "assistant", "environment"])),
        text=draw(texts),
        token_ids=tuple(draw(st.lists(st.integers(0, 99), min_size=size, max_size=size))),
        completion_mask=tuple(draw(st.lists(st.booleans(), min_size=size, max_size=size))),
        sampler_logp=draw(st.none() | logps.map(tuple)),
        messages=tuple(draw(messages)),
        num_generation_prompt_tokens=draw(st.integers(0, size)),
        events=tuple(draw(events)),
        decision=draw(st.none() | texts),
        policy_versions=draw(st.sampled_from([(), (VersionSpan(0, size, 7),)])),
    )


@st.composite
def hint_outcomes(draw, trajectory):
    maybe = st.none() | st.floats()
    return HintOutcome(
        hint=Hint(
            trajectory=trajectory,
            turn=draw(st.integers(0, 5)),
            text=draw(texts),
            source=draw(texts),
            reason=draw(texts),
            confidence=draw(maybe),
            bad_span=draw(st.none() | texts),
        ),
        shift=draw(maybe),
        bad_span_shift=draw(maybe),
        pass_rate=draw(maybe),
        drop_reason=draw(st.none() | texts),
    )


@st.composite
def scored(draw):
    trajectory = replace(
        make_episode("0-0", num=1), turns=tuple(draw(st.lists(turns(), max_size=3)))
    )
    size = trajectory.num_completion_tokens
    where = draw(st.none() | st.sets(st.integers(0, max(size - 1, 0)), max_size=size))
    where = None if where is None else tuple(sorted(where))
    count = size if where is None else len(where)
    target = Target(
        teacher="self:live",
        context=None,
        logp_T=Logps(draw(st.lists(exact, min_size=count, max_size=count))),
        token_indices=where,
    )
    return Scored(
        trajectory=trajectory,
        target=draw(st.sampled_from([None, target])),
        hints=tuple(draw(st.lists(hint_outcomes(trajectory.id), max_size=2))),
    )


@settings(max_examples=40, deadline=None)
@given(scored())
def test_everything_comes_back(tmp_path_factory, example):
    path = tmp_path_factory.mktemp("stored") / "step-000003.parquet"
    write_trajectories(path, [example], {})
    [back] = read_trajectories(path, 3)
    # NaN is not equal to itself; repr tells None, NaN, 0 and -0 apart.
    assert repr(back.trajectory) == repr(example.trajectory)
    assert repr(back.hints) == repr(example.hints) == repr(tuple(read_hints(path)))
    if example.target is None:
        assert (back.teacher_logp, back.teacher_token_indices) == (None, None)
    else:
        assert repr(list(back.teacher_logp)) == repr(example.target.logp_T.tolist())
        assert back.teacher_token_indices == example.target.token_indices


@settings(max_examples=25, deadline=None)
@given(st.lists(turns(), max_size=3))
def test_episodes_of_evaluations_come_back(turn_list):
    # JSON knows no infinities: what was not finite is NaN again.
    turn_list = [replace(turn, sampler_logp=None) for turn in turn_list]
    sample = replace(make_episode("0-0", num=1), turns=tuple(turn_list))
    evaluation = replace(make_evaluation(0), samples=(sample,))
    tree = json.loads(encode_json(serialize_evaluation(evaluation)))
    assert parse_evaluation(tree, where="here") == evaluation


LATER = ("decision", "policy_versions")


def test_files_from_before_decisions_and_versions_can_be_read(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    episode = make_episode("0-0", num=2)
    later = {"decision": "date/right", "policy_versions": (VersionSpan(0, 1, 3),)}
    decided = replace(episode, turns=tuple(replace(turn, **later) for turn in episode.turns))
    path = tmp_path / "step-000000.parquet"
    write_trajectories(path, [Scored(trajectory=decided, target=None)], {})
    assert read_trajectories(path, 0)[0].trajectory == decided
    table = pq.read_table(path)
    rows = table.to_pylist()
    for row in rows:
        for turn in row["turns"]:
            for name in LATER:
                del turn[name]
    turn_type = table.schema.field("turns").type.value_type
    fields = [turn_type.field(i) for i in range(turn_type.num_fields)]
    earlier = pa.struct([field for field in fields if field.name not in LATER])
    place = table.schema.get_field_index("turns")
    schema = table.schema.set(place, pa.field("turns", pa.list_(earlier)))
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), path)
    assert read_trajectories(path, 0)[0].trajectory == episode
    evaluation = replace(make_evaluation(0), samples=(decided,))
    tree = json.loads(encode_json(serialize_evaluation(evaluation)))
    for turn in tree["samples"][0]["turns"]:
        for name in LATER:
            del turn[name]
    assert parse_evaluation(tree, where="here").samples == (episode,)


def test_a_teacher_that_spoke_on_some_tokens_is_aligned_with_the_others(tmp_path):
    episode = hinted(make_episode("0-0", wrong=(1, 2)))
    path = tmp_path / "step-000000.parquet"
    write_trajectories(path, [episode], {})
    [back] = read_trajectories(path, 0)
    by_token = back.teacher_logp_by_token
    assert len(by_token) == episode.trajectory.num_completion_tokens
    wrong = {i for i, turn in enumerate(episode.trajectory.turns) if turn.events}
    for turn, logp in zip(episode.trajectory.turn_of, by_token, strict=True):
        assert (logp is not None) == (turn in wrong)
    assert [logp for logp in by_token if logp is not None] == list(back.teacher_logp)


def test_a_teacher_that_spoke_on_all_tokens_or_none(tmp_path):
    path = tmp_path / "step-000000.parquet"
    write_trajectories(path, make_batch(0), {})
    stored = read_trajectories(path, 0)
    assert stored[0].teacher_logp_by_token == stored[0].teacher_logp
    assert stored[2].teacher is None and stored[2].teacher_logp_by_token == (None,) * 6


def test_a_hint_of_another_trajectory_is_a_mistake_of_ours(tmp_path):
    episode = hinted(make_episode("0-0"))
    other = replace(episode, trajectory=replace(episode.trajectory, id="0-1"))
    with pytest.raises(AssertionError):
        write_trajectories(tmp_path / "step-000000.parquet", [other], {})


def test_the_folder_reads_hints_alone(tmp_path, recipe):
    with RunFolder.open(tmp_path / "run", recipe()) as folder:
        for step in (0, 2):
            batch = make_hinted_batch(step)
            update = make_hinted_update(step, batch)
            folder.record(step, batch, update, seconds={}, store_trajectories=True)
        expected = tuple(hint_outcomes for s in make_hinted_batch(2) for hint_outcomes in s.hints)
        assert tuple(folder.hints(2)) == expected and len(expected) == 6
