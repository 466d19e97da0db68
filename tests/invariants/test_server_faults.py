"""Whatever fails between a run and its servers, the run ends with the weights of one that nothing
happened to: each batch was sampled by the right weights, scored, and trained once.

The servers answer from this process, so that all is the same to the bit; real ones are in
tests/vllm/test_chaos.py.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.small_runs import small_recipe
from support.vllm_model import VllmModel
from support.vllm_sampler import VllmSampler
from transformers import AutoModelForCausalLM

from courtside.api import train
from courtside.engines.served.pool import ReplicaPool
from courtside.errors import ServerError
from courtside.report.console import RunConsole
from courtside.report.folder.folder import RunFolder
from courtside.seeds import trajectory_id
from courtside.training import checkpoints

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
from chaos_faults import Proxy

STEPS, PROMPTS, SAMPLES = 5, 2, 2
FAULT_AT = 1


class Cluster:
    """Two servers of the student and one of the teacher, each behind a network that may fail."""

    def __init__(self, student: Path, teacher: Path) -> None:
        def load(folder: Path) -> Any:
            return AutoModelForCausalLM.from_pretrained(folder).eval()

        self.students = [VllmSampler(student) for _ in range(2)]
        self.teacher = VllmModel(load(teacher))
        self.servers = [*self.students, self.teacher]
        self.proxies = [Proxy(server.http.server_address[1]) for server in self.servers]

    def close(self) -> None:
        for server in self.servers:
            server.close()


class ActsOnStep(RunConsole):
    """What happens once a step was recorded."""

    def __init__(self, act: Callable[[], object]) -> None:
        super().__init__()
        self.act: Callable[[], object] | None = act

    def step(self, row: Any) -> None:
        if row["step"] == FAULT_AT and self.act is not None:
            act, self.act = self.act, None
            act()

    def print_line(self, text: str) -> None:
        pass


@pytest.fixture(scope="module")
def cluster(tiny_folder: Path, tiny_teacher_folder: Path) -> Iterator[Cluster]:
    cluster = Cluster(tiny_folder, tiny_teacher_folder)
    yield cluster
    cluster.close()


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ReplicaPool.__init__.__kwdefaults__, "first_wait", 0.02)
    monkeypatch.setattr("courtside.engines.served.weight_sync.MIN_PATIENCE", 0.3)
    monkeypatch.setattr("courtside.engines.served.hedging.FLOOR", 0.3)
    monkeypatch.setattr("courtside.engines.served.pool.RECHECK_SECONDS", 0.1)


def make_recipe(cluster: Cluster, student: Path, sync: Path, *, max_staleness: int = 0) -> Any:
    urls = [proxy.url for proxy in cluster.proxies]
    faults = {"timeout": 20.0, "max_retries": 8}
    server = {"urls": urls[:2], "model": "tiny", "sync_folder": str(sync),
              "max_staleness": max_staleness, **faults}  # fmt: skip
    return small_recipe(
        student,
        student={"model": str(student), "lora": {"rank": 4}, "dtype": "float32"},
        rollout={"samples_per_prompt": SAMPLES, "max_new_tokens": 5, "server": server},
        teacher={"kind": "server", "server": {"urls": urls[2:], "model": "tiny", **faults}},
        losses=[{"kind": "divergence", "support": {"kind": "top_k", "k": 8, "of": "teacher"}}],
        train={"steps": STEPS, "prompts_per_step": PROMPTS, "learning_rate": 1e-2},
        evaluate={"num_tasks": 1, "before": False, "teacher": False},
        run={"checkpoint_every": 100},
    )


def run(
    recipe: Any,
    folder: Path,
    act: Callable[[], object] = lambda: None,
    mend: Callable[[], object] = lambda: None,
) -> list[str]:
    """Until it has finished; the messages with which it stopped before, each time to be mended."""
    console, messages = ActsOnStep(act), []
    while True:
        try:
            train(recipe, folder, console=console)
        except ServerError as error:
            messages.append(str(error))
            assert len(messages) < 4
            mend()
        else:
            return messages


def read_weights(folder: Path) -> Any:
    path = checkpoints.latest(folder / "checkpoints")
    assert path is not None and path.name == f"step-{STEPS:06d}"
    return checkpoints.load(path).tensors["weights"]


def check_trajectories(folder: Path, version_of: Callable[[int], int]) -> None:
    read = RunFolder.read(folder)
    assert [row["step"] for row in read.metrics()] == [*range(STEPS)]
    for step in range(STEPS):
        stored = read.trajectories(step)
        ids = [trajectory_id(step, i, n) for i in range(PROMPTS) for n in range(SAMPLES)]
        assert [s.trajectory.id for s in stored] == ids, "each once"
        assert {s.trajectory.policy_version for s in stored} == {version_of(step)}
        assert all(s.teacher_logp and s.student_logp for s in stored)


def fail_for(proxy: Proxy, mode: str, seconds: float, then: Callable[[], object]) -> None:
    def heal() -> None:
        proxy.set_mode("pass")
        then()

    proxy.set_mode(mode, 0.05)
    threading.Timer(seconds, heal).start()


@pytest.fixture(scope="module")
def calm(
    cluster: Cluster, tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int], Any]:
    """Weights of a run that nothing happened to, by its staleness."""
    weights: dict[int, Any] = {}

    def get(max_staleness: int) -> Any:
        if max_staleness not in weights:
            folder = tmp_path_factory.mktemp("calm")
            recipe = make_recipe(cluster, tiny_folder, folder / "w", max_staleness=max_staleness)
            assert run(recipe, folder / "run") == []
            weights[max_staleness] = read_weights(folder / "run")
        return weights[max_staleness]

    return get


@pytest.mark.parametrize(
    ("mode", "max_staleness"),
    [("delay", 1), ("silent", 0), ("silent", 1), ("reset", 1), ("cut", 0)],
)
def test_a_network_that_fails_changes_nothing(
    mode: str, max_staleness: int, cluster: Cluster, calm: Any, tiny_folder: Path, tmp_path: Path
) -> None:
    recipe = make_recipe(cluster, tiny_folder, tmp_path / "w", max_staleness=max_staleness)
    weights = calm(max_staleness)
    healed = threading.Event()
    messages = run(
        recipe, tmp_path / "run", lambda: fail_for(cluster.proxies[0], mode, 1.0, healed.set)
    )
    assert healed.wait(5)
    assert messages == []
    check_trajectories(tmp_path / "run", lambda step: max(0, step - max_staleness))
    ours = read_weights(tmp_path / "run")
    assert all(torch.equal(ours[name], weights[name]) for name in weights)


@pytest.mark.parametrize(
    ("mode", "index"), [("nan", 0), ("nan", 2), ("miscount", 0)],
    ids=["a sample", "a score", "an id too few"],
)  # fmt: skip
def test_spoiled_answers_stop_the_run_and_it_goes_on(
    mode: str, index: int, cluster: Cluster, calm: Any, tiny_folder: Path, tmp_path: Path
) -> None:
    weights = calm(0)
    recipe = make_recipe(cluster, tiny_folder, tmp_path / "w")
    proxy, spare = cluster.proxies[index], cluster.proxies[1]

    def spoil() -> None:
        proxy.set_mode(mode)
        if index == 0:
            spare.set_mode("reset")  # all samples come through the spoiled one

    def mend() -> None:
        proxy.set_mode("pass")
        spare.set_mode("pass")

    messages = run(recipe, tmp_path / "run", spoil, mend)
    assert len(messages) == 1
    assert messages and all("answered with" in word and "same command" in word for word in messages)
    check_trajectories(tmp_path / "run", lambda step: step)
    ours = read_weights(tmp_path / "run")
    assert all(torch.equal(ours[name], weights[name]) for name in weights)


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_servers_that_restart_with_old_weights_get_the_new_ones(
    max_staleness: int, cluster: Cluster, calm: Any, tiny_folder: Path, tmp_path: Path
) -> None:
    weights = calm(max_staleness)
    recipe = make_recipe(cluster, tiny_folder, tmp_path / "w", max_staleness=max_staleness)

    def restart() -> None:
        for server in cluster.students:
            server.restart()

    assert run(recipe, tmp_path / "run", restart) == []
    check_trajectories(tmp_path / "run", lambda step: max(0, step - max_staleness))
    ours = read_weights(tmp_path / "run")
    assert all(torch.equal(ours[name], weights[name]) for name in weights)
