"""Two vLLM servers at once, and one of them killed in the middle of a run."""

from __future__ import annotations

import math
import threading
import time
from pathlib import Path

import pytest
import torch
from support.vllm_server import PYTHON, run_vllm

from courtside.api import serving_command, train
from courtside.engines.base import SampleRequest, Sampling, ScoreRequest
from courtside.engines.loading import load_model, load_tokenizer
from courtside.engines.local import LocalEngine
from courtside.engines.served.engine import ServedEngine
from courtside.engines.served.pool import ReplicaPool
from courtside.engines.served.probe import probe_servers
from courtside.recipe.load import parse_recipe
from courtside.recipe.server import ServerConfig
from courtside.report.folder.folder import RunFolder

ROUNDING = 1e-3

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason="no .venv-vllm: `make test` sets it up"),
]


def test_two_servers_are_one_distribution_and_one_is_enough(
    exports, merged_server, tmp_path
) -> None:
    """First both sample; then one is killed while they score for a run."""
    export = exports.by_name["merged"]
    model = load_model(str(export.folder), dtype=torch.float32, device=torch.device("cpu"))
    tokenizer = load_tokenizer(str(export.folder))
    local = LocalEngine(model, tokenizer, name="merged")
    command = serving_command(export.run, export.folder)
    serving = ("--enable-scale-out", "--generation-config", "vllm",
               "--logprobs-mode", "processed_logprobs")  # fmt: skip
    with run_vllm(command, tmp_path / "log", *serving) as second:
        config = ServerConfig(urls=(merged_server.url, second.url), model="merged")
        pool = ReplicaPool(config, field="teacher.server")
        served = ServedEngine(
            pool, probe_servers(pool, probe_ids=exports.prompts[0][:5]), name="merged",
            tokenizer=tokenizer, eos_ids=local.eos_ids, vocab_size=local.head.vocab_size,
            context_length=local.context_length,
        )  # fmt: skip
        check_proportions(local, served, exports.prompts[2][:9])
        shares = [replica.num_answered for replica in pool.replicas]
        assert sum(shares) == 240 and min(shares) >= 60

        run_with_a_kill(local, (merged_server.url, second), tmp_path / "run")

        requests = [SampleRequest(prompt_ids=exports.prompts[0], seed=i) for i in range(12)]
        samples = served.sample(requests, Sampling(max_new_tokens=4))
        for request, sample in zip(requests, samples, strict=True):
            check_logps(local, request.prompt_ids, sample)
        pool.close()


def check_proportions(local: LocalEngine, served: ServedEngine, prompt: tuple[int, ...]) -> None:
    """Of 240 one-token answers; |z| > 4 is 1 in 15,000."""
    n = 240
    request = ScoreRequest(token_ids=(*prompt, 0), scored=(False,) * len(prompt) + (True,))
    (scores,) = local.score([request], want="hidden")
    p_V = local.head(scores.hidden_TD)[0].softmax(-1)
    requests = [SampleRequest(prompt_ids=prompt, seed=seed) for seed in range(n)]
    samples = served.sample(requests, Sampling(max_new_tokens=1))
    counts = torch.bincount(torch.tensor([s.token_ids[0] for s in samples]), minlength=len(p_V))
    top = p_V.topk(3).indices.tolist()
    for ids in [*([i] for i in top), [i for i in range(len(p_V)) if i not in top]]:
        p, share = p_V[ids].sum().item(), counts[ids].sum().item() / n
        assert 0.01 < p < 0.99, "nothing to test"
        assert abs(share - p) < 4 * math.sqrt(p * (1 - p) / n), (ids[:3], share, p)


def check_logps(local: LocalEngine, prompt: tuple[int, ...], sample) -> None:
    request = ScoreRequest(
        token_ids=prompt + sample.token_ids,
        scored=(False,) * len(prompt) + (True,) * len(sample.token_ids),
    )
    (scores,) = local.score([request])
    torch.testing.assert_close(torch.tensor(sample.logp), scores.logp_T, atol=ROUNDING, rtol=0)


def run_with_a_kill(local: LocalEngine, servers: tuple, folder: Path) -> None:
    """Three steps; the second server dies as soon as the first is recorded. Every trajectory is
    there once, with the teacher's log-probs."""
    first_url, second = servers
    recipe = parse_recipe(
        {
            "student": {"model": "smollm2-135m", "lora": {"rank": 4}, "dtype": "float32"},
            "tasks": {"kind": "arithmetic"},
            "rollout": {"samples_per_prompt": 3, "max_new_tokens": 8},
            "teacher": {
                "kind": "server",
                "server": {"urls": [first_url, second.url], "model": "merged"},
            },
            "losses": [
                {"kind": "divergence", "support": {"kind": "top_k", "k": 16, "of": "teacher"}}
            ],
            "train": {"steps": 3, "prompts_per_step": 4, "learning_rate": 1e-4},
            "evaluate": {"num_tasks": 1, "before": True, "teacher": False},
        }
    )
    killer = threading.Thread(target=kill_after_a_step, args=(second, folder))
    killer.start()
    train(recipe, folder, quiet=True)
    killer.join()
    run = RunFolder.read(folder)
    assert [row["step"] for row in run.metrics()] == [0, 1, 2]
    for step in range(3):
        stored = run.trajectories(step)
        assert len({s.trajectory.id for s in stored}) == len(stored) == 12
        for s in stored:
            assert s.teacher_logp is not None and s.student_logp is not None
            (scores,) = local.score([ScoreRequest.of_trajectory(s.trajectory)])
            ours = torch.tensor(s.teacher_logp)
            torch.testing.assert_close(ours, scores.logp_T, atol=ROUNDING, rtol=0)


def kill_after_a_step(server, folder: Path) -> None:
    end = time.monotonic() + 600
    while time.monotonic() < end:
        if (folder / "metrics.jsonl").exists() and (folder / "metrics.jsonl").read_text():
            server.kill()
            return
        time.sleep(0.05)
