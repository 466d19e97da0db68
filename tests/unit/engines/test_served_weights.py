"""All weights on servers: the order of the steps, and syncs that do not take effect."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.tiny_model import save_tiny, tiny_tokenizer
from support.vllm_stand_in import GENERATE, VllmStandIn, generated, respond

from courtside.engines.base import Capabilities, SampleRequest, Sampling, ScoreRequest
from courtside.engines.served.full_weights import FolderCarrier, FullWeightsTransport
from courtside.engines.served.pool import ReplicaPool
from courtside.engines.served.probe import probe_servers
from courtside.engines.served.shared_folder import SharedFolder
from courtside.engines.served.student import ServedStudent
from courtside.engines.served.weight_sync import WeightSync
from courtside.errors import RunError
from courtside.recipe.server import ServerConfig
from courtside.recipe.student import StudentConfig
from courtside.training.weights import StudentWeights, save_all_weights
from courtside.types import VersionSpan

SCORED = ScoreRequest(token_ids=(3, 4, 5), scored=(False, True, True))
SAMPLING = Sampling(max_new_tokens=4)
FILE = "model.safetensors"


def read_logp(folder: str) -> float:
    """What is in the folder that a server has read; -1 before."""
    return float(json.loads((Path(folder) / FILE).read_text())) if folder else -1.0


@pytest.fixture
def servers() -> Iterator[list[VllmStandIn]]:
    both = [VllmStandIn(), VllmStandIn()]
    for server in both:
        server.folder_logp = read_logp
    yield both
    for server in both:
        server.close()


class TrainerStandIn:
    context_length = 512
    capabilities = Capabilities(top_k=258, hidden_states=True, branches=True, weight_updates=True)

    def __init__(self) -> None:
        self.logp = -1.0
        self.bits = 0
        """Of the weights; they may change where the log-probs do not."""

    def save(self, folder: Path) -> int:
        (folder / FILE).write_text(json.dumps(self.logp))
        return self.bits


@pytest.fixture
def trainer() -> TrainerStandIn:
    return TrainerStandIn()


def make_student(
    servers: list[VllmStandIn], folder: Path, trainer: Any, **settings: Any
) -> ServedStudent:
    config = ServerConfig(urls=tuple(s.url for s in servers), model="tiny", **settings)
    pool = ReplicaPool(config, field="rollout.server", first_wait=0.01)
    facts = probe_servers(pool, probe_ids=(3, 4))
    assert facts.takes_weights
    shared = SharedFolder(folder, field="rollout.server")
    transport = FullWeightsTransport(pool, FolderCarrier(pool, shared, trainer.save))
    sync = WeightSync(
        pool, facts.route, transport, max_difference=0.05,
        score=lambda: (trainer.logp,) * 2, probes=[SCORED],
    )  # fmt: skip
    return ServedStudent(
        pool, facts, local=trainer, sync=sync, name="tiny", tokenizer=tiny_tokenizer(),
        eos_ids=frozenset({1}), vocab_size=258, context_length=512,
    )  # fmt: skip


def requests(n: int) -> list[SampleRequest]:
    return [SampleRequest(prompt_ids=(3, 4, i), seed=i) for i in range(n)]


def control_paths(server: VllmStandIn) -> list[str]:
    paths = [path for path, _ in server.bodies if path.startswith("/") and "/v1/" not in path]
    return paths[paths.index("/pause?mode=wait&clear_cache=true") :]


def test_every_replica_reads_each_version_while_it_is_paused(
    servers: list[VllmStandIn], trainer: TrainerStandIn, tmp_path: Path
) -> None:
    student = make_student(servers, tmp_path, trainer)
    for version in (1, 2):
        trainer.logp -= 0.01
        student.load_weights(version)
        (folder,) = tmp_path.iterdir()
        assert [s.folder for s in servers] == [str(folder)] * 2, "older folders are gone"
        assert {s.label for s in servers} == {folder.name} and not servers[0].is_paused
    for server in servers:
        order = [*control_paths(server)]
        assert order[:5] == [
            "/pause?mode=wait&clear_cache=true", "/collective_rpc", "/reset_prefix_cache",
            "/update_weight_version", "/resume",
        ]  # fmt: skip
    samples = student.sample(requests(6), SAMPLING)
    assert {s.policy_versions for s in samples} == {(VersionSpan(0, 4, 2),)}
    assert {body["model"] for s in servers for p, body in s.bodies if p == GENERATE} == {"tiny"}


def test_versions_of_spans_are_those_of_the_answer(
    servers: list[VllmStandIn], trainer: TrainerStandIn, tmp_path: Path
) -> None:
    """Weights that changed within an answer, and a stop string that cuts it in the second span."""
    student = make_student(servers[:1], tmp_path, trainer)
    before = servers[0].label
    student.load_weights(1)
    spans = [
        {"version": before, "start": 0, "end": 2},
        {"version": servers[0].label, "start": 2, "end": 4},
    ]

    def sample(number: int, path: str, body: Any) -> Any:
        if path != GENERATE:
            return "none"
        response = generated([ord("a") + 2] * 4, [-1.0] * 4)
        assert response is not None
        tree = json.loads(response[2])
        tree["choices"][0]["weight_versions"] = spans
        return respond(tree)

    servers[0].fault = sample
    (whole,) = student.sample(requests(1), SAMPLING)
    assert whole.policy_versions == (VersionSpan(0, 2, 0), VersionSpan(2, 4, 1))
    assert whole.oldest_version(9) == 0
    spans[0]["end"] = spans[1]["start"] = 3
    text = student.tokenizer.decode([ord("a") + 2])
    assert text, "a token with a text"
    (cut,) = student.sample(requests(1), Sampling(max_new_tokens=4, stop=(text * 2,)))
    assert len(cut.token_ids) == 2 and cut.policy_versions == (VersionSpan(0, 2, 0),)


def test_an_answer_of_a_restarted_server_is_not_used(
    servers: list[VllmStandIn], trainer: TrainerStandIn, tmp_path: Path
) -> None:
    """It answers well, with the weights that it started with."""
    student = make_student(servers, tmp_path, trainer)
    trainer.logp = -1.02
    student.load_weights(1)
    servers[0].restart()
    samples = student.sample(requests(8), SAMPLING)
    assert {s.policy_versions for s in samples} == {(VersionSpan(0, 4, 1),)}
    assert servers[0].label == servers[1].label and servers[0].folder == servers[1].folder


def test_two_runs_that_fight_over_a_server_end_with_a_word(
    servers: list[VllmStandIn], trainer: TrainerStandIn, tmp_path: Path
) -> None:
    student = make_student(servers[:1], tmp_path, trainer, max_retries=2)

    def relabel(number: int, path: str, body: Any) -> Any:
        servers[0].label = "courtside-other-000004-4"
        return "none"

    servers[0].fault = relabel
    with pytest.raises(RunError, match=r"no answer after 3 tries.*'courtside-other-000004-4', not"):
        student.sample(requests(1), SAMPLING)


def test_a_reload_that_did_nothing_stops_the_run(
    servers: list[VllmStandIn], trainer: TrainerStandIn, tmp_path: Path
) -> None:
    student = make_student(servers, tmp_path, trainer)

    def ignore(number: int, path: str, body: Any) -> Any:
        return respond({"results": [None]}) if path == "/collective_rpc" else "none"

    servers[1].fault = ignore
    trainer.logp = -1.001
    with pytest.raises(
        RunError, match=rf"{servers[1].url} does not sample.*of step 1: .* theirs changed by 0%"
    ):
        student.load_weights(1)


def test_checksums_tell_where_log_probs_cannot(
    servers: list[VllmStandIn], trainer: TrainerStandIn, tmp_path: Path
) -> None:
    """A step so small that rounding hides it: only the bits of the weights changed."""
    student = make_student(servers[:1], tmp_path, trainer)
    servers[0].folder_logp = lambda folder: -1.0  # checksums follow it
    student.load_weights(1)  # the same bits
    trainer.bits = 1
    with pytest.raises(RunError, match=r"of step 2: the trainer's weights changed, and the checks"):
        student.load_weights(2)


def test_without_checksums_log_probs_alone_decide(
    servers: list[VllmStandIn], trainer: TrainerStandIn, tmp_path: Path
) -> None:
    servers[0].fault = lambda n, path, body: (
        respond({"detail": "Not Found"}, 404) if path == "/weight_checker" else "none"
    )
    student = make_student(servers[:1], tmp_path, trainer)
    trainer.bits = 1
    student.load_weights(1)
    assert student.sync.current is not None and student.sync.current.version == 1


def test_a_prefix_cache_that_stays_stops_the_run(
    servers: list[VllmStandIn], trainer: TrainerStandIn, tmp_path: Path
) -> None:
    student = make_student(servers[:1], tmp_path, trainer)
    servers[0].fault = lambda n, path, body: (
        respond({"success": False}) if path == "/reset_prefix_cache" else "none"
    )
    with pytest.raises(RunError, match=r"did not empty its prefix cache"):
        student.load_weights(1)
    student.pool.close()
    assert not servers[0].is_paused, "others may use it"


def test_a_folder_that_a_server_does_not_see_is_named(
    servers: list[VllmStandIn], trainer: TrainerStandIn, tmp_path: Path
) -> None:
    """vLLM takes it for the name of a model on the hub, and its engine ends."""
    student = make_student(servers[:1], tmp_path, trainer)
    message = "Worker failed with error 'Repo id must be in the form 'repo_name' or"
    servers[0].fault = lambda n, path, body: (
        respond({"error": {"message": message}}, 500) if path == "/collective_rpc" else "none"
    )
    with pytest.raises(RunError, match=rf"rollout.server.sync_folder: .*does not see {tmp_path}"):
        student.load_weights(1)


@pytest.mark.parametrize("arrives", [True, False])
def test_a_lost_answer_to_a_reload_is_asked_for_again(
    arrives: bool, servers: list[VllmStandIn], trainer: TrainerStandIn, tmp_path: Path
) -> None:
    """The answer is lost, or the request itself."""
    student = make_student(servers[:1], tmp_path, trainer)
    lost = []

    def lose(number: int, path: str, body: Any) -> Any:
        if path != "/resume" or lost:
            return "none"
        lost.append(servers[0].answer(path, body) if arrives else None)
        return None

    servers[0].fault = lose
    student.load_weights(1)
    assert lost and len(student.sample(requests(2), SAMPLING)) == 2
    assert not servers[0].is_paused
    assert sum(path == "/collective_rpc" for path, _ in servers[0].bodies) == 2, "0 and 1"


def test_a_server_without_the_routes_is_told_how(
    servers: list[VllmStandIn], trainer: TrainerStandIn, tmp_path: Path
) -> None:
    """It was started again by hand, without the variable."""
    student = make_student(servers[:1], tmp_path, trainer)
    servers[0].fault = lambda n, path, body: (
        respond({"detail": "Not Found"}, 404) if path == "/weight_info" else "none"
    )
    with pytest.raises(RunError, match=r"start it with VLLM_SERVER_DEV_MODE=1"):
        student.load_weights(1)
    facts = probe_servers(student.pool, probe_ids=(3, 4))
    assert not facts.takes_weights


def test_saved_weights_are_those_of_the_model(tmp_path: Path) -> None:
    """All of them, in the dtype of the matmuls; sums of bits tell versions apart."""
    model = save_tiny(tmp_path / "tiny")
    for dtype in ("float32", "bfloat16"):
        config = StudentConfig(model=str(model), dtype=dtype, device="cpu")
        weights = StudentWeights(config, seed=0)
        first = save_all_weights(weights, tmp_path / f"{dtype}-0")
        assert first == save_all_weights(weights, tmp_path / f"{dtype}-0")
        saved = load_file(tmp_path / f"{dtype}-0" / "model.safetensors")
        for name, parameter in weights.trained.items():
            torch.testing.assert_close(
                saved[name], parameter.detach().to(getattr(torch, dtype)), rtol=0, atol=0
            )
        with torch.no_grad():
            next(iter(weights.trained.values()))[0, 0] += 0.01
        assert first != save_all_weights(weights, tmp_path / f"{dtype}-1")
