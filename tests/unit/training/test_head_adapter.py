"""An adapter on the output head: rollout, scoring and update are those of PEFT's own forward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.float64 import double
from support.small_runs import small_recipe
from support.tiny_model import tiny_model, tiny_tokenizer
from torch import Tensor

from courtside.assemble import assemble
from courtside.engines.base import SampleRequest, Sampling, ScoreRequest
from courtside.errors import ModelError
from courtside.recipe.student import LoraConfig, StudentConfig
from courtside.runtime import Runtime
from courtside.training.loss_terms import make_loss_terms
from courtside.training.metrics import MetricAccumulator
from courtside.training.weights import StudentWeights
from courtside.types import Scored

LORA = {"rank": 3, "target_modules": ["q_proj", "up_proj", "lm_head"]}
TOP_K = {"kind": "divergence", "support": {"kind": "top_k", "k": 8, "of": "joint", "form": "tail"}}
LOSSES: dict[str, dict[str, Any]] = {
    "reverse": {"kind": "divergence"},
    "forward": {"kind": "divergence", "divergence": "forward_kl"},
    "JSD": {"kind": "divergence", "divergence": "jsd", "beta": 0.3},
    "top k": TOP_K,
    "sampled": {"kind": "policy_gradient", "advantage": "teacher_gap", "ratio": "none"},
    "by autograd": {"kind": "divergence", "clip": 0.2},
}


def untied(folder: Path) -> Path:
    model = tiny_model()
    model.config.tie_token_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(0.3 * torch.randn_like(model.lm_head.weight))
    model.all_tied_weights_keys = {}
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folders(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {"tied": tiny_folder, "untied": untied(tmp_path_factory.mktemp("untied"))}


def prepared(folder: Path, teacher: str, loss: dict[str, Any], **train: Any) -> Runtime:
    """In float64, with adapters that have moved."""
    context = {"kind": "system", "text": "be brief"}
    recipe = small_recipe(
        folder,
        student={"model": str(folder), "lora": LORA},
        teacher={"kind": "self", "weights": teacher, "context": context},
        losses=[loss],
        train={
            "steps": 2,
            "prompts_per_step": 2,
            "learning_rate": 1e-2,
            "logits_chunk_tokens": 5,
            **train,
        },
    )
    parts = assemble(recipe)
    double(parts.engine.model)
    for average in parts.averages.values():
        for name, tensor in average.shadow.items():
            average.shadow[name].data = tensor.double() + 0.1 * torch.randn_like(tensor)
    torch.manual_seed(5)
    for parameter in parts.student.weights.trained.values():
        parameter.data += 0.2 * torch.randn_like(parameter)
    return parts


def logp(parts: Runtime, ids: list[int], num: int, temperature: float) -> Tensor:
    """[num, V], by PEFT: the model's own forward."""
    logits_LV = parts.student.weights.model(input_ids=torch.tensor([ids])).logits[0]
    return (logits_LV[len(ids) - num - 1 : -1] / temperature).log_softmax(-1)


def teacher_logp(parts: Runtime, s: Scored) -> Tensor:
    t = s.trajectory
    system = "<|im_start|>system\nbe brief<|im_end|>\n"
    prompt = parts.renderer.tokenizer(system)["input_ids"] + list(t.turns[0].token_ids)
    ids = [*prompt, *t.completion_ids]
    weights = parts.student.weights
    with torch.no_grad():
        if parts.averages:
            (average,) = parts.averages.values()
            with weights.swap_in(average.shadow):
                return logp(parts, ids, t.num_completion_tokens, t.temperature)
        if parts.recipe.teacher.weights == "frozen":  # type: ignore[union-attr]
            with weights.without_adapter():
                return logp(parts, ids, t.num_completion_tokens, t.temperature)
        return logp(parts, ids, t.num_completion_tokens, t.temperature)


def naive(p_TV: Tensor, q_TV: Tensor, ids_T: Tensor, loss: dict[str, Any]) -> Tensor:
    """Sum over the tokens."""
    p_T, q_T = (x.gather(-1, ids_T[:, None])[:, 0] for x in (p_TV, q_TV))
    if loss["kind"] == "policy_gradient":
        return (p_T * (p_T - q_T).detach()).sum()
    if "support" in loss:
        total = p_TV.sum() * 0
        for p_V, q_V in zip(p_TV, q_TV, strict=True):
            support = sorted({*p_V.topk(8).indices.tolist(), *q_V.topk(8).indices.tolist()})
            p_S, q_S = p_V[support], q_V[support]
            p_S = torch.cat([p_S, torch.log1p(-p_S.exp().sum())[None]])
            q_S = torch.cat([q_S, torch.log1p(-q_S.exp().sum())[None]])
            total = total + (p_S.exp() * (p_S - q_S)).sum()
        return total
    if loss.get("divergence") == "forward_kl":
        return (q_TV.exp() * (q_TV - p_TV)).sum()
    if loss.get("divergence") == "jsd":
        m_TV = (0.3 * q_TV.exp() + 0.7 * p_TV.exp()).log()
        return (0.3 * q_TV.exp() * (q_TV - m_TV) + 0.7 * p_TV.exp() * (p_TV - m_TV)).sum()
    terms_TV = p_TV.exp() * (p_TV - q_TV)
    return (terms_TV.clamp(max=loss["clip"]) if "clip" in loss else terms_TV).sum()


@pytest.mark.parametrize("tied", ["tied", "untied"])
@pytest.mark.parametrize(
    ("teacher", "loss"),
    [("live", loss) for loss in LOSSES] + [("frozen", "reverse"), ("frozen", "by autograd"),
     ("ema", "reverse"), ("ema", "top k")],
)  # fmt: skip
def test_every_gradient_is_that_of_pefts_own_forward(
    teacher: str, loss: str, tied: str, folders: dict[str, Path]
) -> None:
    parts = prepared(folders[tied], teacher, LOSSES[loss])
    weights = parts.student.weights
    scored = parts.teacher(parts.rollout(parts.tasks.batch(0, 2), 0))
    chosen = make_loss_terms(parts.recipe.losses, parts.recipe.loss_names(), scored)
    parts.student.accumulate(0, scored, chosen, MetricAccumulator())
    gradients = {name: p.grad for name, p in weights.trained.items()}
    assert {name.split(".")[-4] for name in gradients} >= {"lm_head", "q_proj"}
    assert all(p.grad is None for p in weights.model.parameters() if not p.requires_grad)

    total, count = torch.zeros((), dtype=torch.float64), 0
    for s in scored:
        t = s.trajectory
        p_TV = logp(parts, list(t.token_ids), t.num_completion_tokens, t.temperature)
        q_TV = teacher_logp(parts, s)
        assert teacher == "live" or not torch.allclose(p_TV, q_TV, atol=1e-3)
        total = total + naive(p_TV, q_TV, torch.tensor(t.completion_ids), LOSSES[loss])
        count += t.num_completion_tokens
    right = torch.autograd.grad(total / count, list(weights.trained.values()))
    # Advantages come from log-probs that are kept in float32.
    limit = 1e-5 if loss == "sampled" else 1e-9
    for (name, ours), gradient in zip(gradients.items(), right, strict=True):
        assert float((ours - gradient).norm()) < limit * float(gradient.norm()), name


def test_samples_have_the_log_probs_of_scoring_them_and_of_peft(tiny_folder: Path) -> None:
    parts = prepared(tiny_folder, "live", LOSSES["reverse"])
    requests = [SampleRequest(prompt_ids=(5, 60 + n, 7), seed=n) for n in range(3)]
    for sample, request in zip(
        parts.engine.sample(requests, Sampling(max_new_tokens=9)), requests, strict=True
    ):
        ids = request.prompt_ids + sample.token_ids
        scored = (False,) * 3 + (True,) * len(sample.token_ids)
        (scores,) = parts.engine.score([ScoreRequest(token_ids=ids, scored=scored)])
        with torch.no_grad():
            logp_TV = logp(parts, list(ids), len(sample.token_ids), 1.0)
        peft_T = logp_TV.gather(-1, torch.tensor(sample.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(scores.logp_T.double(), peft_T, rtol=0, atol=1e-6)
        torch.testing.assert_close(torch.tensor(sample.logp).double(), peft_T, rtol=0, atol=1e-6)


def test_a_step_moves_the_adapter_and_never_the_embedding(tiny_folder: Path) -> None:
    parts = prepared(tiny_folder, "ema", LOSSES["reverse"])
    model = parts.student.weights.model
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    parts.student.step(0, parts.teacher(parts.rollout(parts.tasks.batch(0, 2), 0)))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) != ("lora_" in name), name


def test_an_adapter_on_the_head_starts_as_nothing(tiny_folder: Path) -> None:
    config = StudentConfig(
        model=str(tiny_folder), lora=LoraConfig(rank=4, target_modules=("lm_head",))
    )
    model = StudentWeights(config, seed=0).model
    ids = torch.tensor([[5, 9, 33]])
    with torch.no_grad():
        plain = tiny_model()(input_ids=ids).logits
        assert torch.equal(model(input_ids=ids).logits, plain)


def test_dropout_is_refused_with_the_head_and_only_then(tiny_folder: Path) -> None:
    config = StudentConfig(
        model=str(tiny_folder), lora=LoraConfig(dropout=0.1, target_modules=("q_proj", "lm_head"))
    )
    with pytest.raises(ModelError, match=r"student\.lora\.dropout = 0\.1: the output head"):
        StudentWeights(config, seed=0)
    config = StudentConfig(
        model=str(tiny_folder), lora=LoraConfig(dropout=0.1, target_modules=("q_proj",))
    )
    assert StudentWeights(config, seed=0).trained
