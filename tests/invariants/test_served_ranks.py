"""Several ranks that sample on one server train what one process trains with it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.rank_runs import WEIGHT, compare_runs, outcomes, run_ranks
from support.small_runs import small_tree
from support.vllm_sampler import VllmSampler
from support.vllm_stand_in import GENERATE, Response, respond

from courtside.api import train
from courtside.errors import ServerError
from courtside.recipe.load import parse_recipe
from courtside.report.folder.folder import RunFolder
from courtside.training import checkpoints

pytestmark = pytest.mark.usefixtures("one_thread")
STEPS = 3
SAMPLES = 6
"""Of a step."""
LOAD = "/v1/load_lora_adapter"
SECOND = "-000002-2"
"""How weights of two steps are called that were not published before. After a resume from there
they are the second that the run publishes."""
FAULTS: dict[str, dict[str, Any]] = {
    "refused": {},
    "unsaved": {"full": [1, 2]},
    "adopted": {"raise_in_adopt": [1, 2]},
    "updated": {"raise_after_update": [1, 1]},
}
"""What fails beside weights of two steps, or in their place, and is tried twice."""


class Served:
    """A server and a recipe for each way that weights travel."""

    def __init__(self, student: Path, teacher: Path, folder: Path):
        self.folder = folder
        self.folders = student, teacher
        names = ("lora", "full", "stale", "restarted", "wrong", *FAULTS)
        self.servers = {name: VllmSampler(student) for name in names}
        self.by_ranks: dict[str, list[tuple[Any, ...]]] = {}
        """What two ranks sampled."""

    def tree(self, name: str) -> dict[str, Any]:
        student: dict[str, Any] = {"model": str(self.folders[0]), "dtype": "float32"}
        if name != "full":
            student["lora"] = {"rank": 4}
        server = {"urls": [self.servers[name].url], "model": "tiny",
                  "sync_folder": str(self.folder / f"sync-{name}")}  # fmt: skip
        if name == "stale":
            server["max_staleness"] = 1
        return small_tree(
            *self.folders,
            student=student,
            rollout={"samples_per_prompt": 2, "max_new_tokens": 6, "server": server},
            train={"steps": STEPS, "prompts_per_step": 3, "learning_rate": 1e-2},
            run={"checkpoint_every": 3},
            evaluate={"before": False, "teacher": False, "num_tasks": 2},
        )

    def restart_once(self, number: int, path: str, body: Any) -> Response | str:
        """A server that loses its adapters in the rollout of the second step."""
        server = self.servers["restarted"]
        if path == GENERATE and "logprobs" in body["sampling_params"]:
            self.num_samples += 1
            if self.num_samples == SAMPLES + 3:
                server.restart()
        return "none"

    num_samples = 0

    def sampled(self, name: str) -> list[tuple[Any, ...]]:
        """Prompts and seeds of all requests for samples; each start asks what a server can do with
        seed 0."""
        sampled = [
            (*body["token_ids"], body["sampling_params"]["seed"])
            for path, body in self.servers[name].bodies
            if path == GENERATE and "logprobs" in body["sampling_params"]
        ]
        return sorted(request for request in sampled if request[-1] != 0)


def refuse_second(number: int, path: str, body: Any) -> Response | str:
    """A server that does not take the weights of two steps, once."""
    if path == LOAD and body["lora_name"].endswith(SECOND):
        return respond({"error": {"message": "out of slots"}}, 400)
    return "none"


@pytest.fixture(scope="module")
def served(
    tiny_folder: Path, tiny_teacher_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    served = Served(tiny_folder, tiny_teacher_folder, tmp_path_factory.mktemp("served"))
    yield served
    for server in served.servers.values():
        server.close()


@pytest.fixture(scope="module")
def two_ranks(served: Served) -> Path:
    """One launch for all."""
    served.servers["restarted"].fault = served.restart_once
    # It answers with the log-probs of other weights.
    served.servers["wrong"]._start = served.folders[1]
    for name in ("refused", "unsaved"):
        served.servers[name].fault = refuse_second
    jobs = [{"recipe": served.tree(name), "folder": str(served.folder / f"two-{name}")}
            | FAULTS.get(name, {}) for name in served.servers]  # fmt: skip
    goes_on = {"recipe": served.tree("refused"), "folder": str(served.folder / "two-refused")}
    jobs.append(goes_on)
    assert run_ranks(served.folder, jobs, 2) == 0
    served.by_ranks = {name: served.sampled(name) for name in served.servers}
    return served.folder


def versions(folder: Path, step: int) -> set[int | None]:
    return {s.trajectory.policy_version for s in RunFolder.read(folder).trajectories(step)}


@pytest.mark.parametrize("name", ["lora", "full", "stale", "restarted"])
def test_ranks_train_the_batch_of_one_process(two_ranks: Path, served: Served, name: str) -> None:
    server = served.servers[name]
    by_ranks = {path: server.counts[path] for path in (LOAD, "/collective_rpc")}
    server.fault = lambda number, path, body: "none"
    server.restart()
    alone, together = two_ranks / f"one-{name}", two_ranks / f"two-{name}"
    train(parse_recipe(served.tree(name)), alone, quiet=True)
    compare_runs(alone, together)
    lag = int(name == "stale")
    for step in range(STEPS):
        assert versions(together, step) == {max(0, step - lag)} == versions(alone, step)
    loaded = by_ranks["/collective_rpc" if name == "full" else LOAD]
    if name == "restarted":
        assert loaded > STEPS + 1 and served.num_samples >= 9
    else:
        assert loaded == STEPS + 1, "once for each version, whatever the number of ranks"


def test_weights_that_do_not_arrive_end_all_ranks(two_ranks: Path) -> None:
    leader, other = outcomes(two_ranks / "two-wrong")
    assert (leader["reports"], other["reports"]) == (True, False)
    assert "does not sample with the student's weights of step 0" in leader["error"]
    assert "ServerError: rank 0: rollout.server.urls" in other["error"]


def test_a_step_whose_weights_are_refused_is_saved_by_all_ranks(
    two_ranks: Path, served: Served
) -> None:
    """Together they leave what one process leaves, and go on from there."""
    leader, other = outcomes(two_ranks / "two-refused")
    assert (leader["reports"], other["reports"]) == (True, False)
    assert "out of slots" in leader["error"] and "saved" not in leader["error"]
    assert other["error"].startswith("ServerError: rank 0: ")
    once, sampled = served.by_ranks["lora"], served.by_ranks["refused"]
    assert sampled == once, "nothing is sampled, or trained, twice"
    compare_runs(two_ranks / "two-lora", two_ranks / "two-refused")

    alone = two_ranks / "one-refused"
    recipe = parse_recipe(served.tree("refused"))
    with pytest.raises(ServerError, match="out of slots"):
        train(recipe, alone, quiet=True)
    assert saved_steps(alone) == [2]
    assert saved_steps(two_ranks / "two-refused") == [2, STEPS]
    first, second = (
        checkpoints.load(checkpoints.at(folder / "checkpoints", 2)).tensors
        for folder in (alone, two_ranks / "two-refused")
    )
    for name, tensor in first["weights"].items():
        assert torch.allclose(tensor, second["weights"][name], rtol=0, atol=WEIGHT), name
    train(recipe, alone, quiet=True)
    assert served.sampled("refused") == sorted(2 * once)
    compare_runs(alone, two_ranks / "two-refused")


def test_a_rank_whose_disk_is_full_does_not_hide_what_the_servers_said(two_ranks: Path) -> None:
    leader, other = outcomes(two_ranks / "two-unsaved")
    assert (leader["reports"], other["reports"]) == (True, False)
    assert other["error"].startswith("ServerError: rank 0: ") and "out of slots" in other["error"]
    first, second = leader["error"].split(". The step was not saved either: ")
    assert first.startswith("ServerError: ") or first.startswith("RefusedError: ")
    assert "out of slots" in first
    assert second.startswith("rank 1: ") and "No space left on device" in second
    assert saved_steps(two_ranks / "two-unsaved") == []


def test_a_step_whose_weights_fail_on_another_rank_is_saved(two_ranks: Path) -> None:
    leader, other = outcomes(two_ranks / "two-adopted")
    assert (leader["reports"], other["reports"]) == (True, False)
    assert leader["error"] == "ServerError: rank 1: nothing can be adopted"
    assert other["error"] == "ServerError: nothing can be adopted"
    assert saved_steps(two_ranks / "two-adopted") == [2]
    assert len(RunFolder.read(two_ranks / "two-adopted").metrics()) == 2


def test_a_step_that_is_not_done_on_all_ranks_is_not_saved(two_ranks: Path, served: Served) -> None:
    leader, other = outcomes(two_ranks / "two-updated")
    assert (leader["reports"], other["reports"]) == (True, False)
    assert leader["error"] == "ServerError: rank 1: nothing works after the update"
    assert saved_steps(two_ranks / "two-updated") == []
    assert len(RunFolder.read(two_ranks / "two-updated").metrics()) == 1
    assert served.servers["updated"].counts[LOAD] == 2, "nobody brings the weights of that step"


def saved_steps(folder: Path) -> list[int]:
    return sorted(checkpoints.num_steps_of(p) for p in (folder / "checkpoints").glob("step-*"))
