"""Sampling and scoring by a real vLLM server, against the same weights in this process."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.vllm_server import PYTHON

from courtside.assemble import assemble
from courtside.assemble.inputs import load_inputs
from courtside.assemble.servers import connect_servers
from courtside.engines.base import SampleRequest, Sampling, ScoreRequest
from courtside.engines.loading import load_model, load_tokenizer
from courtside.engines.local import LocalEngine
from courtside.engines.served.engine import ServedEngine
from courtside.engines.served.pool import ReplicaPool
from courtside.engines.served.probe import probe_servers
from courtside.engines.served.routes import CompletionsRoute, GenerateRoute
from courtside.engines.served.vocabulary import find_difference
from courtside.errors import RecipeError, RunError
from courtside.loop import train_loop
from courtside.recipe.load import parse_recipe
from courtside.recipe.server import ServerConfig
from courtside.report.console import RunConsole
from courtside.report.folder.folder import RunFolder
from courtside.run import Run
from courtside.types import VersionSpan

ROUNDING = 1e-3
"""Nats a token between float32 here and there."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason="no .venv-vllm: `make test` sets it up"),
]


@pytest.fixture(scope="module")
def engines(exports, merged_server):
    """The exported model in this process, and on the server."""
    folder = str(exports.by_name["merged"].folder)
    tokenizer = load_tokenizer(folder)
    model = load_model(folder, dtype=torch.float32, device=torch.device("cpu"))
    local = LocalEngine(model, tokenizer, name="merged")
    pool = ReplicaPool(
        ServerConfig(urls=(merged_server.url,), model="merged"), field="teacher.server"
    )
    facts = probe_servers(pool, probe_ids=exports.prompts[0][:5])
    served = ServedEngine(
        pool, facts, name="merged", tokenizer=tokenizer, eos_ids=local.eos_ids,
        vocab_size=local.head.vocab_size, context_length=local.context_length,
    )  # fmt: skip
    yield local, served
    pool.close()


def on_route(served: ServedEngine, route: Any) -> ServedEngine:
    return ServedEngine(
        served.pool, replace(served.facts, route=route), name="merged", tokenizer=served.tokenizer,
        eos_ids=served.eos_ids, vocab_size=served.vocab_size, context_length=8192,
    )  # fmt: skip


def test_what_the_server_can_do_is_probed(engines):
    _, served = engines
    facts = served.facts
    assert isinstance(facts.route, GenerateRoute)
    assert (facts.version, facts.context_length, facts.max_logprobs) == ("0.32.0", 512, 20)
    assert facts.logprobs == "processed"


class OneTokenDiffers:
    """A tokenizer in which the ids 5000 and 5001 have changed places."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self.get_vocab = tokenizer.get_vocab

    def decode(self, ids: list[int]) -> str:
        swapped = {5000: 5001, 5001: 5000}
        return self.tokenizer.decode([swapped.get(id, id) for id in ids])


def test_vocabularies_are_compared_token_by_token(engines):
    _, served = engines
    assert find_difference(served.pool, served.tokenizer) is None
    difference = find_difference(served.pool, OneTokenDiffers(served.tokenizer))
    assert difference is not None and difference.startswith("the id 5000 is ")


@pytest.mark.parametrize(
    "route", [GenerateRoute(), CompletionsRoute()], ids=["generate", "completions"]
)
def test_scores_are_those_of_the_local_engine(route, engines, exports):
    """Several sequences at a time, with gaps between what is scored."""
    local, served = engines[0], on_route(engines[1], route)
    requests = [
        ScoreRequest(token_ids=ids, scored=(False, *(i % 3 != 0 for i in range(1, len(ids)))))
        for ids in (*exports.prompts, *(p[:n] for p in exports.prompts for n in (4, 7)))
    ]
    ours = local.score(requests, want="top_k", top_k=8)
    from_server = served.score(requests, want="top_k", top_k=8)
    for a, b in zip(ours, from_server, strict=True):
        torch.testing.assert_close(b.logp_T, a.logp_T, atol=ROUNDING, rtol=0)
        torch.testing.assert_close(b.top_logp_TK, a.top_logp_TK, atol=ROUNDING, rtol=0)
        same = (a.top_ids_TK == b.top_ids_TK).float().mean()  # near ties may change places
        assert same > 0.98
    plain = served.score(requests)
    for a, b in zip(plain, from_server, strict=True):
        assert a.top_ids_TK is None
        torch.testing.assert_close(a.logp_T, b.logp_T, atol=1e-4, rtol=0)


def test_samples_have_the_local_distribution(engines, exports):
    """Proportions of 240 one-token answers under fixed seeds; |z| > 4 is 1 in 15,000."""
    local, served = engines
    prompt, n, temperature = exports.prompts[2][:9], 240, 0.8
    (scores,) = local.score(
        [ScoreRequest(token_ids=(*prompt, 0), scored=(False,) * len(prompt) + (True,))],
        want="hidden",
    )
    p_V = (local.head(scores.hidden_TD)[0] / temperature).softmax(-1)
    sampling = Sampling(max_new_tokens=1, temperature=temperature)
    requests = [SampleRequest(prompt_ids=prompt, seed=seed) for seed in range(n)]
    samples = served.sample(requests, sampling)
    for sample in samples:  # also: the log-prob of what was sampled, temperature included
        assert sample.logp[0] == pytest.approx(p_V[sample.token_ids[0]].log().item(), abs=ROUNDING)
    counts = torch.bincount(torch.tensor([s.token_ids[0] for s in samples]), minlength=len(p_V))
    top = p_V.topk(3).indices.tolist()
    groups = [*([i] for i in top), [i for i in range(len(p_V)) if i not in top]]
    for ids in groups:
        p, share = p_V[ids].sum().item(), counts[ids].sum().item() / n
        assert 0.01 < p < 0.99, "nothing to test"
        assert abs(share - p) < 4 * math.sqrt(p * (1 - p) / n), (ids[:3], share, p)
    assert served.sample(requests[:4], sampling) == samples[:4], "a sample follows from its seed"


@pytest.mark.parametrize(
    "route", [GenerateRoute(), CompletionsRoute()], ids=["generate", "completions"]
)
def test_samples_end_as_those_of_the_local_engine(route, engines, exports):
    local, served = engines[0], on_route(engines[1], route)
    prompts = exports.prompts
    greedy = Sampling(max_new_tokens=24, temperature=0.0)
    requests = [SampleRequest(prompt_ids=ids, seed=i) for i, ids in enumerate(prompts)]
    ours, from_server = local.sample(requests, greedy), served.sample(requests, greedy)
    assert from_server == ours
    (text,) = {s.text for s in ours[:1]}
    stop = text.split()[1]
    sampling = replace(greedy, stop=(stop,))
    ours, from_server = local.sample(requests[:1], sampling), served.sample(requests[:1], sampling)
    assert from_server == ours and ours[0].stop == "stop_string"


# ── runs ─────────────────────────────────────────────────────────────────────────────────────────


def recipe_with(teacher: Any, **changes: Any) -> Any:
    tree = {
        "student": {"model": "smollm2-135m", "lora": {"rank": 4}, "dtype": "float32"},
        "tasks": {"kind": "arithmetic"},
        "rollout": {"samples_per_prompt": 2, "max_new_tokens": 12},
        "losses": [
            {"kind": "divergence", "support": {"kind": "top_k", "k": 16, "of": "teacher"}},
            {"kind": "policy_gradient", "advantage": "teacher_gap", "weight": 0.1},
        ],
        "train": {"steps": 1, "prompts_per_step": 2, "learning_rate": 1e-3},
        "evaluate": {"num_tasks": 1, "before": True, "teacher": False},
    } | changes
    return parse_recipe(tree | ({"teacher": teacher} if teacher else {}))


def served_teacher(server: Any, **more: Any) -> dict[str, Any]:
    return {"kind": "server", "server": {"urls": [server.url], "model": "merged"}, **more}


def take_step(recipe: Any) -> tuple[Any, Any, dict[str, torch.Tensor]]:
    """Update of the first batch, and the gradient that AdamW had."""
    parts = assemble(recipe)
    tasks = parts.tasks.batch(0, recipe.train.prompts_per_step)
    trajectories = parts.rollout(tasks, 0)
    reading = parts.reader(trajectories)
    scored = parts.teacher(trajectories, reading.hints)
    update = parts.student.step(0, scored)
    state = parts.student.optimizer.state
    moments = {n: state[p]["exp_avg"].clone() for n, p in parts.student.weights.trained.items()}
    return scored, update, moments


def assert_same_update(local: Any, served: Any) -> None:
    """Loss, gradient norm, and the whole gradient."""
    assert served[1].loss == pytest.approx(local[1].loss, rel=1e-3)
    assert local[1].metrics["grad_norm"] > 1e-3
    ours, from_server = (
        torch.cat([moment.flatten() for _, moment in sorted(side[2].items())])
        for side in (local, served)
    )
    assert (from_server - ours).norm() < 2e-3 * ours.norm()


def test_a_served_teacher_gives_the_update_of_the_local_one(exports, merged_server):
    model = {"kind": "model", "model": str(exports.by_name["merged"].folder), "dtype": "float32"}
    local = take_step(recipe_with(model, losses=[
        {"kind": "divergence", "support": {"kind": "top_k", "k": 16, "of": "teacher"}},
        {"kind": "policy_gradient", "advantage": "teacher_gap", "weight": 0.1},
    ]))  # fmt: skip
    served = take_step(recipe_with(served_teacher(merged_server)))
    for a, b in zip(local[0], served[0], strict=True):
        assert a.trajectory.token_ids == b.trajectory.token_ids
        torch.testing.assert_close(b.target.logp_T, a.target.logp_T, atol=ROUNDING, rtol=0)
    assert_same_update(local, served)


def test_hints_scored_by_a_server(exports, merged_server):
    changes: dict[str, Any] = {
        "tasks": {"kind": "toolbox", "turns": 2, "num_tools": 2},
        "reader": {"kind": "rules"},
        "rollout": {"samples_per_prompt": 2, "max_new_tokens": 10},
        "losses": [
            {"kind": "divergence", "on": "hinted_turns",
             "support": {"kind": "top_k", "k": 16, "of": "teacher"}},
        ],
        "train": {"steps": 1, "prompts_per_step": 1, "learning_rate": 1e-3},
    }  # fmt: skip
    model = {"kind": "model", "model": str(exports.by_name["merged"].folder), "dtype": "float32"}
    local = take_step(recipe_with(model, **changes))
    served = take_step(recipe_with(served_teacher(merged_server), **changes))
    hints = [(a, b) for a, b in zip(local[0], served[0], strict=True) if a.hints]
    assert hints, "no turn went wrong"
    for a, b in hints:
        assert [o.drop_reason for o in a.hints] == [o.drop_reason for o in b.hints]
        for ours, from_server in zip(a.hints, b.hints, strict=True):
            assert from_server.shift == pytest.approx(ours.shift, abs=ROUNDING)
    assert any(s.target is not None for s in local[0])
    assert_same_update(local, served)


def test_what_does_not_fit_the_server_is_refused(exports, merged_server):
    def connect(teacher: Any, **changes: Any) -> None:
        recipe = recipe_with(teacher, **changes)
        connect_servers(recipe, load_inputs(recipe))

    large = [{"kind": "divergence", "support": {"kind": "top_k", "k": 21, "of": "teacher"}}]
    with pytest.raises(RecipeError, match=r"losses\[0\].support.k = 21.*--max-logprobs 21"):
        connect(served_teacher(merged_server), losses=large)
    recipe = recipe_with(served_teacher(merged_server))
    inputs = load_inputs(recipe)
    inputs.tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    with pytest.raises(RecipeError, match=r"teacher.server: 'merged' has another chat template"):
        connect_servers(recipe, inputs)
    wrong = {"kind": "server", "server": {"urls": [merged_server.url], "model": "mergd"}}
    with pytest.raises(
        RecipeError, match=r"teacher.server.model = 'mergd': .* serves \['merged'\]"
    ):
        connect(wrong)


def test_rollouts_follow_the_student(exports, adapter_server, tmp_path, monkeypatch):
    """An adapter for each step, whose log-probs are the trainer's; a sync that does nothing, and a
    server that lost its adapters."""
    base = adapter_server.model_names()[0]
    monkeypatch.setenv("SERVER_KEY", key := "sk-secret-0123456789")
    rollout = {
        "samples_per_prompt": 2, "max_new_tokens": 10, "temperature": 0.9,
        "server": {"urls": [adapter_server.url], "model": base, "sync_folder": str(tmp_path / "a"),
                   "api_key_env": "SERVER_KEY", "max_difference": ROUNDING},
    }  # fmt: skip
    prompted = {"kind": "self", "context": {"kind": "system", "text": "Answer in one word."}}
    recipe = recipe_with(
        prompted, rollout=rollout, losses=[{"kind": "policy_gradient"}],
        train={"steps": 2, "prompts_per_step": 2, "learning_rate": 1e-2},
    )  # fmt: skip
    with RunFolder.open(tmp_path / "run", recipe) as folder:
        parts = assemble(recipe)
        train_loop(parts, Run(parts, folder, RunConsole()))
    read = RunFolder.read(tmp_path / "run")
    for step, row in enumerate(read.metrics()):
        assert row["sampler/logp_diff"] < ROUNDING
        assert row["grad_norm"] > 0
        for scored in read.trajectories(step):
            assert scored.trajectory.policy_version == step
    for file in (path for path in (tmp_path / "run").rglob("*") if path.is_file()):
        assert key.encode() not in file.read_bytes(), file
    engine: Any = parts.engine
    assert engine.sync.current.version == 2
    assert [p.name for p in (tmp_path / "a").iterdir()] == [engine.sync.current.name]
    requests = [SampleRequest(prompt_ids=exports.prompts[0][:6], seed=1)]
    (sample,) = engine.sample(requests, Sampling(max_new_tokens=4))
    assert sample.policy_versions == (VersionSpan(0, len(sample.token_ids), 2),)

    adapter_server.post("/v1/unload_lora_adapter", {"lora_name": engine.model})  # as a restart does
    assert engine.sample(requests, Sampling(max_new_tokens=4)) == [sample]

    adapter = tmp_path / "a" / engine.sync.current.name
    stale = {file.name: file.read_bytes() for file in adapter.iterdir()}
    with torch.no_grad():
        for name, parameter in parts.student.weights.trained.items():
            if "lora_B" in name:
                parameter.add_(1e-4 * torch.randn_like(parameter))

    def save_stale(folder: Any) -> None:
        for name, content in stale.items():
            (folder / name).write_bytes(content)

    engine.sync.max_difference = 10.0
    engine.sync.transport._save = save_stale
    with pytest.raises(
        RunError,
        match=r"weights of step 3: the trainer.* and theirs changed by \d+% of that",
    ):
        engine.load_weights(3)


def test_rollouts_run_ahead_of_the_update(exports, adapter_server, tmp_path):
    """While the student trains, the next step is sampled with the adapter that it had before."""
    # Few tokens: sampled before the next weights are checked, beside which vLLM ends on a CPU.
    rollout = {
        "samples_per_prompt": 2, "max_new_tokens": 4, "temperature": 0.9,
        "server": {"urls": [adapter_server.url], "model": adapter_server.model_names()[0],
                   "sync_folder": str(tmp_path / "a"), "max_difference": ROUNDING,
                   "max_staleness": 1},
    }  # fmt: skip
    prompted = {"kind": "self", "context": {"kind": "system", "text": "Answer in one word."}}
    recipe = recipe_with(
        prompted, rollout=rollout, losses=[{"kind": "policy_gradient", "truncate": 2.0}],
        train={"steps": 3, "prompts_per_step": 2, "learning_rate": 1e-2},
    )  # fmt: skip
    with RunFolder.open(tmp_path / "run", recipe) as folder:
        parts = assemble(recipe, trains=True)
        train_loop(parts, Run(parts, folder, RunConsole()))
    read = RunFolder.read(tmp_path / "run")
    samples = [[s.trajectory for s in read.trajectories(step)] for step in range(3)]
    assert [{t.policy_version for t in step} for step in samples] == [{0}, {0}, {1}]
    assert [row.get("sampler/staleness", 0.0) for row in read.metrics()] == [0.0, 1.0, 1.0]
    assert len({t.id for step in samples for t in step}) == 12, "each trajectory once"
    start = parts.load_untrained()
    for trajectory, scores in zip(
        samples[1], start.score([ScoreRequest.of_trajectory(t) for t in samples[1]]), strict=True
    ):
        assert trajectory.sampler_logp == pytest.approx(scores.logp_T.tolist(), abs=ROUNDING)
    assert read.metrics()[1]["sampler/logp_diff"] > ROUNDING, "the student has moved since"
    retained = {weights.name for weights in parts.engine.sync.retained}
    assert {folder.name for folder in (tmp_path / "a").iterdir()} == retained and len(retained) == 2


def test_all_weights_follow_the_student(exports, untied, full_server, tmp_path):
    """Each step's weights, whose log-probs are the trainer's; a prefix that was cached under older
    ones, a reload that does nothing, and a server that was restarted."""
    rollout = {
        "samples_per_prompt": 2, "max_new_tokens": 10, "temperature": 0.9,
        "server": {"urls": [full_server.url], "model": "full", "sync_folder": str(tmp_path / "w"),
                   "max_difference": ROUNDING},
    }  # fmt: skip
    prompted = {"kind": "self", "context": {"kind": "system", "text": "Answer in one word."}}
    recipe = recipe_with(
        prompted, rollout=rollout, losses=[{"kind": "policy_gradient"}],
        student={"model": str(untied), "dtype": "float32"},
        train={"steps": 2, "prompts_per_step": 2, "learning_rate": 1e-4},
    )  # fmt: skip
    with RunFolder.open(tmp_path / "run", recipe) as folder:
        parts = assemble(recipe)
        engine: Any = parts.engine
        # Two blocks and more, which the server keeps in its prefix cache.
        long_prompt = SampleRequest(prompt_ids=exports.prompts[2] * 9, seed=1)
        sampling = Sampling(max_new_tokens=4, temperature=0.0)
        (before,) = engine.sample([long_prompt], replace(sampling, temperature=1.0))
        train_loop(parts, Run(parts, folder, RunConsole()))
    read = RunFolder.read(tmp_path / "run")
    for step, row in enumerate(read.metrics()):
        assert row["sampler/logp_diff"] < ROUNDING
        assert row["grad_norm"] > 0
        for scored in read.trajectories(step):
            assert scored.trajectory.policy_version == step
    (current,) = (tmp_path / "w").iterdir()
    assert current.name == engine.sync.current.name and engine.sync.current.version == 2

    def trainer_logps(sample: Any) -> torch.Tensor:
        ids = (*long_prompt.prompt_ids, *sample.token_ids)
        scored = (False,) * len(long_prompt.prompt_ids) + (True,) * len(sample.token_ids)
        (scores,) = parts.local_engine.score([ScoreRequest(token_ids=ids, scored=scored)])
        return scores.logp_T

    (after,) = engine.sample([long_prompt], replace(sampling, temperature=1.0))
    ours = trainer_logps(after)
    torch.testing.assert_close(torch.tensor(after.logp), ours, atol=ROUNDING, rtol=0)
    change = (trainer_logps(before) - torch.tensor(before.logp)).abs().max()
    assert change > 3 * ROUNDING, "the step was too small to show a stale cache"

    # A restart: the weights of the start, and vLLM's own name for them.
    reload = {"method": "reload_weights",
              "kwargs": {"weights_path": str(untied)}}  # fmt: skip
    full_server.post("/collective_rpc", reload)
    full_server.post("/reset_prefix_cache", {})
    full_server.post("/update_weight_version", {"new_version": "default"})
    assert engine.sample([long_prompt], replace(sampling, temperature=1.0)) == [after]
    assert after.policy_versions == (VersionSpan(0, 4, 2),)

    def save_stale(folder: Any) -> int:
        stale = tmp_path / "w" / engine.sync.current.name
        for file in stale.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        return 1

    engine.sync.max_difference = 10.0
    engine.sync.transport.carrier._save = save_stale
    with torch.no_grad():
        parts.student.weights.trained["model.norm.weight"].mul_(1.002)
    with pytest.raises(RunError, match=r"weights of step 3: the trainer"):
        engine.load_weights(3)
