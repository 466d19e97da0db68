"""Several ranks that sample on one server train what one process trains with it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.rank_runs import compare_runs, outcomes, run_ranks
from support.small_runs import small_tree
from support.vllm_sampler import VllmSampler
from support.vllm_stand_in import GENERATE, Response

from courtside.api import train
from courtside.recipe.load import parse_recipe
from courtside.report.folder.folder import RunFolder

STEPS = 3
LOAD = "/v1/load_lora_adapter"


class Served:
    """A server and a recipe for each way that weights travel."""

    def __init__(self, student: Path, teacher: Path, folder: Path):
        self.folder = folder
        self.folders = student, teacher
        names = ("lora", "full", "stale", "restarted", "wrong")
        self.servers = {name: VllmSampler(student) for name in names}

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
            if self.num_samples == 9:  # of six a step
                server.restart()
        return "none"

    num_samples = 0


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
    jobs = [{"recipe": served.tree(name), "folder": str(served.folder / f"two-{name}")}
            for name in served.servers]  # fmt: skip
    assert run_ranks(served.folder, jobs, 2) == 0
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
