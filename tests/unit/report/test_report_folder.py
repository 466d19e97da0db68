"""The run folder: who may write, what comes back, and what a kill or a full disk leaves."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from courtside.errors import RecipeError, RunError, UserError
from courtside.report.costs import PhaseCost
from courtside.report.folder.folder import RunFolder


@contextmanager
def unprivileged():
    """As a user who is not root, whom permissions do not bind."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


@pytest.fixture
def open_place():
    """A folder that other users may look into, unlike pytest's."""
    path = Path(tempfile.mkdtemp())
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


@pytest.fixture
def folder(tmp_path, recipe):
    with RunFolder.open(tmp_path / "run", recipe()) as opened:
        yield opened


def record(folder, step, batch, update, **metrics):
    scored = batch(step)
    return folder.record(
        step,
        scored,
        update(step, scored, **metrics),
        seconds={"rollout": 2.0, "update": 1.0},
        store_trajectories=True,
    )


# ── opening ──────────────────────────────────────────────────────────────────────────────────────


def test_a_new_folder_has_its_recipe_and_environment(folder, recipe):
    assert folder.recipe() == recipe()
    assert folder.checkpoints.is_dir()
    assert folder.environment()["python"].startswith("3.")
    assert folder.metrics() == [] and folder.evaluations() == [] and folder.alarms() == []
    assert not (folder.path / "alarms.jsonl").exists()
    assert RunFolder.read(folder.path).recipe() == recipe()


def test_the_same_recipe_goes_on_and_its_run_part_may_change(folder, recipe, batch, update):
    record(folder, 0, batch, update)
    folder.close()
    changed = recipe(run={"checkpoint_every": 3, "trackers": ["tensorboard"]})
    with RunFolder.open(folder.path, changed) as reopened:
        assert len(reopened.metrics()) == 1
        assert reopened.recipe().run.checkpoint_every == 3


def test_another_recipe_is_refused_with_the_fields_that_differ(folder, recipe):
    folder.close()
    other = recipe(
        train={"steps": 9}, student={"model": "smollm2-135m"}, run={"keep_checkpoints": 5}
    )
    with pytest.raises(RecipeError) as caught:
        RunFolder.open(folder.path, other)
    message = str(caught.value)
    assert "train.steps" not in message  # a run may become longer
    assert "student.lora: {'rank': 8" in message and "→ not set" in message
    assert "keep_checkpoints" not in message
    assert "another folder" in message
    # The refusal let go of the lock.
    RunFolder.open(folder.path, recipe()).close()


def test_a_folder_with_other_files_is_not_touched(tmp_path, recipe):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(UserError, match=r"thesis\.txt.*no recipe\.toml"):
        RunFolder.open(tmp_path, recipe())
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_first_start_that_was_killed_can_be_repeated(tmp_path, recipe):
    (tmp_path / ".lock").touch()
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "recipe.toml.tmp").write_text("[stud")
    RunFolder.open(tmp_path, recipe()).close()


def test_files_in_the_way_and_places_without_permission(tmp_path, open_place, recipe):
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(UserError, match="is a file"):
            RunFolder.open(path, recipe())
    (open_place / "run").mkdir(mode=0o555)
    with unprivileged():
        with pytest.raises(UserError, match=r"cannot be written to \(Permission denied\)"):
            RunFolder.open(open_place / "run", recipe())
        (open_place / "run").exists()
    with pytest.raises(UserError, match="cannot be created"):
        RunFolder.open(Path("/proc/no/run"), recipe())


def test_reading_wants_a_run_folder(tmp_path):
    with pytest.raises(UserError, match="not a run folder"):
        RunFolder.read(tmp_path)


def test_the_lock_holds_until_the_other_process_is_killed(folder, recipe):
    with pytest.raises(UserError, match="another process is training"):
        RunFolder.open(folder.path, recipe())
    folder.close()
    hold = (
        "import sys, pathlib; from courtside.report.folder.folder import RunFolder as R;"
        "p = pathlib.Path(sys.argv[1]); f = R.open(p, R.read(p).recipe());"
        "print('held', flush=True); sys.stdin.read()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", hold, str(folder.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        assert child.stdout.readline() == b"held\n"
        with pytest.raises(UserError, match="another process is training"):
            RunFolder.open(folder.path, recipe())
        assert RunFolder.read(folder.path).metrics() == []  # looking needs no lock
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
    RunFolder.open(folder.path, recipe()).close()


# ── what comes back ──────────────────────────────────────────────────────────────────────────────


def test_metrics_are_one_flat_row_a_step(folder, batch, update):
    row = record(folder, 0, batch, update, ratio=math.inf)
    assert row == {
        "step": 0,
        "loss": 1.5,
        "loss/divergence": 1.0,
        "without_teacher": 1,
        "loss/policy_gradient": 1.0,
        "tokens/divergence": 18,
        "tokens/policy_gradient": 24,
        "reward/mean": 0.75,
        "reward/pass_rate": 0.75,
        "reward/grader_errors": 0,
        "length/mean": 6.0,
        "length/max": 6,
        "length/truncated": 0.25,
        "seconds/rollout": 2.0,
        "seconds/update": 1.0,
        "tokens_per_second": 24 / 3.0,
        "kl": 0.9,
        "grad_norm": 0.5,
        "learning_rate": 1e-4,
        "ratio": None,
    }
    assert folder.metrics() == [row]
    text = (folder.path / "metrics.jsonl").read_text()
    assert "Infinity" not in text and "NaN" not in text


def test_trajectories_come_back_as_they_were(folder, batch, update):
    record(folder, 12, batch, update)
    assert folder.trajectory_steps() == [12]
    assert (folder.path / "trajectories" / "step-000012.parquet").exists()
    stored, scored = folder.trajectories(12), batch(12)
    for row, was in zip(stored, scored, strict=True):
        # NaN is not equal to itself; repr says whether all the rest is.
        assert repr(row.trajectory) == repr(was.trajectory)
        assert row.step == 12
        if was.target is None:
            assert (row.teacher, row.teacher_logp, row.context) == (None, None, None)
            assert row.student_logp is None  # never scored is not zero, and not empty
        else:
            assert row.teacher == "self:frozen" and row.context == was.target.context
            assert list(row.teacher_logp) == was.target.logp_T.tolist()
            assert row.student_logp == was.trajectory.sampler_logp


def test_rare_fields_of_trajectories_come_back_too(folder, batch, update):
    first, second = batch(0)[:2]
    bare = replace(
        first.trajectory, grade=None, policy_version=None, source="dataset", preference="worse",
        stop="dataset",
        turns=tuple(replace(turn, sampler_logp=None) for turn in first.trajectory.turns),
    )  # fmt: skip
    empty = replace(second.trajectory, turns=(replace(
        second.trajectory.turns[1], text="", token_ids=(), completion_mask=(), sampler_logp=()
    ),))  # fmt: skip
    scored = [replace(first, trajectory=bare), replace(second, trajectory=empty, target=None)]
    folder.record(
        0, scored, update(0, [], kl=0.0), seconds={}, store_trajectories=True
    )  # fmt: skip
    stored = folder.trajectories(0)
    assert [record.trajectory for record in stored] == [bare, empty]


def test_log_probs_are_stored_as_float32(folder, batch, update):
    scored = batch(0)[:1]
    scored[0].target.logp_T.values[0] = -0.1
    folder.record(0, scored, update(0, scored), seconds={}, store_trajectories=True)
    back = folder.trajectories(0)[0].teacher_logp[0]
    assert back != -0.1 and back == pytest.approx(-0.1, rel=2**-24)


def test_steps_without_trajectories_say_which_have_some(folder, batch, update):
    with pytest.raises(UserError, match="none are stored"):
        folder.trajectories(1)
    record(folder, 0, batch, update)
    with pytest.raises(UserError, match="stored are 1 steps, 0 to 0"):
        folder.trajectories(1)
    with pytest.raises(UserError, match="step = '0'; give an int"):
        folder.trajectories("0")


def test_a_newer_schema_is_refused(folder, batch, update, evaluation, monkeypatch):
    monkeypatch.setattr("courtside.report.folder.parquet.SCHEMA_VERSION", 99)
    record(folder, 0, batch, update)
    folder.record_evaluation(evaluation(0))
    monkeypatch.undo()
    with pytest.raises(UserError, match=r"step-000000\.parquet.*version 99.*Update courtside"):
        folder.trajectories(0)
    with pytest.raises(UserError, match=r"evaluations\.jsonl.*version 99"):
        folder.evaluations()


def test_damaged_parquet_is_named(folder):
    (folder.path / "trajectories" / "step-000000.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(UserError, match="cannot be read as Parquet"):
        folder.trajectories(0)


def test_evaluations_come_back(folder, evaluation):
    first = evaluation(0)
    nothing = replace(
        first, mean_score=math.nan, ci_low=math.nan, ci_high=math.nan, scores={}, samples=()
    )
    folder.record_evaluation(first)
    folder.record_evaluation(nothing)
    assert repr(folder.evaluations()) == repr([first, nothing])
    for line in (folder.path / "evaluations.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)


def test_costs_and_alarms_come_back(folder):
    assert folder.read_costs() == {}
    costs = {"rollout": PhaseCost(seconds=1.5, input_tokens=2, output_tokens=3, flops=1e18)}
    folder.write_costs(costs)
    folder.record_alarm({"step": 3, "message": "KL rises"})
    read = RunFolder.read(folder.path)
    assert read.read_costs() == costs
    assert read.alarms() == [{"step": 3, "message": "KL rises"}]


# ── kills, rewinds, full disks ───────────────────────────────────────────────────────────────────


def test_rewind_keeps_what_a_checkpoint_of_n_steps_has_seen(folder, batch, update, evaluation):
    folder.record_evaluation(evaluation(0))
    for step in range(4):
        record(folder, step, batch, update)
        folder.record_evaluation(evaluation(step + 1))
        folder.record_alarm({"step": step})
    folder.record_alarm({"message": "of the whole run"})
    folder.write_costs({"rollout": PhaseCost(seconds=9.0)})
    for name in ("metrics", "evaluations", "alarms"):
        with (folder.path / f"{name}.jsonl").open("ab") as file:
            file.write('{"step": 4, "text": "é'.encode()[:-1])  # killed inside a character
    (folder.path / "trajectories" / "step-000004.parquet.tmp").write_bytes(b"half")
    folder.rewind(2)
    assert [row["step"] for row in folder.metrics()] == [0, 1]
    assert [e.step for e in folder.evaluations()] == [0, 1, 2]
    assert folder.alarms() == [{"step": 0}, {"step": 1}, {"message": "of the whole run"}]
    assert folder.trajectory_steps() == [0, 1]
    assert folder.read_costs()["rollout"].seconds == 9.0
    record(folder, 2, batch, update)
    assert [row["step"] for row in folder.metrics()] == [0, 1, 2]


def test_rewound_and_repeated_is_the_same_as_uninterrupted(folder, batch, update):
    for step in range(4):
        record(folder, step, batch, update)
    files = [folder.path / "metrics.jsonl", *sorted((folder.path / "trajectories").iterdir())]
    before = [path.read_bytes() for path in files]
    folder.rewind(1)
    for step in range(1, 4):
        record(folder, step, batch, update)
    assert [path.read_bytes() for path in files] == before


def test_opening_heals_a_line_that_a_kill_cut_off(folder, recipe, batch, update):
    record(folder, 0, batch, update)
    folder.close()
    path = folder.path / "metrics.jsonl"
    whole = path.read_bytes()
    for content in (
        whole + whole[: len(whole) // 2],
        whole[:-1],
    ):  # half a row; only the \n missing
        path.write_bytes(content)
        assert len(RunFolder.read(folder.path).metrics()) == 1
        with RunFolder.open(folder.path, recipe()) as reopened:
            record(reopened, 1, batch, update)
            assert [row["step"] for row in reopened.metrics()] == [0, 1]


def test_a_bad_line_in_the_middle_is_named(folder, batch, update):
    record(folder, 0, batch, update)
    path = folder.path / "metrics.jsonl"
    path.write_bytes(b"{broken\n" + path.read_bytes())
    with pytest.raises(UserError, match=r"metrics\.jsonl, line 1: not valid JSON"):
        folder.metrics()


needs_dev_full = pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")


@needs_dev_full
def test_a_full_disk_says_what_is_lost_and_what_to_do(folder, batch, update):
    (folder.path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(RunError) as caught:
        record(folder, 0, batch, update)
    message = str(caught.value)
    assert "metrics.jsonl: could not be written (No space left on device)" in message
    assert "free some space" in message and "intact" in message


@needs_dev_full
def test_a_full_disk_leaves_the_old_file(folder):
    folder.write_costs({"rollout": PhaseCost(seconds=1.0)})
    temporary = folder.path / "costs.json.tmp"
    temporary.symlink_to("/dev/full")
    with pytest.raises(RunError, match="No space left"):
        folder.write_costs({"rollout": PhaseCost(seconds=2.0)})
    assert folder.read_costs()["rollout"].seconds == 1.0
    assert not temporary.is_symlink()


def test_half_a_line_is_taken_back_when_the_disk_fills_up(folder, batch, update, tmp_path):
    import resource

    record(folder, 0, batch, update)
    path = folder.path / "metrics.jsonl"
    whole = path.read_bytes()
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + 5, old[1]))
    try:
        with pytest.raises(RunError, match="could not be written"):
            folder.record_alarm({"text": "x" * (len(whole) + 10)})
        scored = batch(1)
        with pytest.raises(RunError, match="could not be written"):
            folder.record(1, scored, update(1, scored), seconds={}, store_trajectories=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert path.read_bytes() == whole
    assert folder.alarms() == []


def test_a_folder_that_became_read_only(open_place, recipe, batch, update):
    with RunFolder.open(open_place / "run", recipe()) as folder:
        record(folder, 0, batch, update)
        for path in (folder.path, *folder.path.rglob("*")):
            path.chmod(0o555 if path.is_dir() else 0o444)
        with unprivileged(), pytest.raises(RunError, match="make the folder writable"):
            record(folder, 1, batch, update)
        assert len(folder.metrics()) == 1
        for path in (folder.path, folder.path / "trajectories", folder.path / "checkpoints"):
            path.chmod(0o755)


def test_reading_and_writing_load_no_torch():
    check = (
        "import sys; import courtside.report.folder.folder, courtside.report.page.page;"
        "import courtside.report.console, courtside.report.trackers, courtside.report.costs;"
        "print(sorted({'torch', 'pyarrow', 'rich', 'matplotlib', 'numpy'} & set(sys.modules)))"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    out = subprocess.run(
        [sys.executable, "-c", check], capture_output=True, text=True, check=True, env=environment
    )
    assert out.stdout.strip() == "[]"
