from __future__ import annotations

import pytest
import torch
from support.kind_checks import InMemoryWeights
from support.model_kinds import ModelKind, build_model
from support.small_runs import small_recipe

from courtside.assemble import assemble
from courtside.errors import ModelError
from courtside.recipe.student import LoraConfig, StudentConfig
from courtside.training.weights import MovingAverage, StudentWeights

IDS = torch.tensor([[5, 9, 33, 80]])


def logits(weights: StudentWeights):
    with torch.no_grad():
        return weights.model(input_ids=IDS).logits


def one_step(parts):
    tasks = parts.tasks.batch(0, 2)
    parts.student.step(0, parts.teacher(parts.rollout(tasks, 0)))


def test_lora_trains_adapters_and_nothing_else(tiny_folder, tiny_teacher_folder):
    student = {
        "model": str(tiny_folder),
        "lora": {"rank": 4, "target_modules": ["q_proj", "down_proj"]},
    }
    parts = assemble(small_recipe(tiny_folder, tiny_teacher_folder, student=student))
    weights = parts.student.weights
    trained = weights.trained
    assert len(trained) == 2 * 2 * 2  # two layers, two targets, A and B
    assert all("lora_" in name for name in trained)
    in_optimizer = {id(p) for g in parts.student.optimizer.param_groups for p in g["params"]}
    assert in_optimizer == {id(p) for p in trained.values()}
    before = {name: p.detach().clone() for name, p in weights.model.named_parameters()}
    one_step(parts)
    for name, parameter in weights.model.named_parameters():
        # A moves from the second step on: its gradient goes through B, which starts at zero.
        assert torch.equal(parameter, before[name]) != ("lora_B" in name), name


def test_all_linear_layers_but_the_head_get_an_adapter(tiny_folder):
    weights = StudentWeights(StudentConfig(model=str(tiny_folder), lora=LoraConfig(rank=2)), seed=0)
    layers = {name.split(".lora_")[0] for name in weights.trained}
    assert len(layers) == 2 * 7
    assert not any("lm_head" in name or "embed" in name for name in layers)
    assert all(p.dtype == torch.float32 for p in weights.trained.values())


def test_an_adapter_starts_as_nothing_and_follows_the_seed(tiny_folder):
    plain = StudentWeights(StudentConfig(model=str(tiny_folder)), seed=0)
    config = StudentConfig(model=str(tiny_folder), lora=LoraConfig(rank=4))
    state = torch.random.get_rng_state()
    first, same, other = (StudentWeights(config, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(state, torch.random.get_rng_state())
    assert torch.equal(logits(first), logits(plain))
    a, b, c = (next(iter(w.trained.values())) for w in (first, same, other))
    assert torch.equal(a, b) and not torch.equal(a, c)


def test_dropout_acts_in_the_update_only(tiny_folder, tiny_teacher_folder):
    """Also in a process that has just loaded a trained adapter."""
    student = {"model": str(tiny_folder), "lora": {"rank": 4, "dropout": 0.5}}
    parts = assemble(small_recipe(tiny_folder, tiny_teacher_folder, student=student))
    weights = parts.student.weights
    for parameter in weights.trained.values():
        parameter.data.fill_(0.1)
    assert torch.equal(logits(weights), logits(weights))
    one_step(parts)
    assert torch.equal(logits(weights), logits(weights))
    weights.model.train()
    assert not torch.equal(logits(weights), logits(weights))


def test_alpha_defaults_to_twice_the_rank(tiny_folder):
    for alpha, scale in ((None, 2.0), (1.0, 0.25)):
        config = StudentConfig(model=str(tiny_folder), lora=LoraConfig(rank=4, alpha=alpha))
        weights = StudentWeights(config, seed=0)
        layer = weights.model.model.layers[0].mlp.up_proj
        assert layer.scaling["default"] == scale


def test_unknown_targets_are_named(tiny_folder):
    with pytest.raises(ModelError, match=r"student\.lora\.target_modules = \('qkv',\)"):
        StudentWeights(
            StudentConfig(model=str(tiny_folder), lora=LoraConfig(target_modules=("qkv",))), seed=0
        )


def moved_adapter(tiny_folder) -> StudentWeights:
    weights = StudentWeights(StudentConfig(model=str(tiny_folder), lora=LoraConfig(rank=4)), seed=0)
    torch.manual_seed(1)
    for parameter in weights.trained.values():
        parameter.data += 0.3 * torch.randn_like(parameter)
    return weights


def test_without_its_adapter_the_student_is_as_before(tiny_folder):
    plain = StudentWeights(StudentConfig(model=str(tiny_folder)), seed=0)
    weights = moved_adapter(tiny_folder)
    with_adapter = logits(weights)
    with weights.without_adapter():
        assert torch.equal(logits(weights), logits(plain))
    assert torch.equal(logits(weights), with_adapter)
    assert not torch.allclose(with_adapter, logits(plain))


def test_swapped_weights_are_restored_bit_by_bit_also_after_an_error(tiny_folder):
    weights = moved_adapter(tiny_folder)
    before = {name: p.detach().clone() for name, p in weights.trained.items()}
    zeros = {name: torch.zeros_like(p) for name, p in weights.trained.items()}
    with pytest.raises(KeyError), weights.swap_in(zeros):
        assert all(not p.any() for p in weights.trained.values())
        raise KeyError
    assert all(torch.equal(p, before[name]) for name, p in weights.trained.items())
    assert all(not tensor.any() for tensor in zeros.values())


def test_a_copy_does_not_change_with_the_student(tiny_folder):
    weights = StudentWeights(
        StudentConfig(model=str(tiny_folder), gradient_checkpointing=True), seed=0
    )
    copy = weights.copy()
    before = logits(weights)
    for parameter in weights.trained.values():
        parameter.data += 1.0
    with torch.no_grad():
        assert torch.equal(copy(input_ids=IDS).logits, before)
    assert not any(p.requires_grad for p in copy.parameters())
    assert not copy.is_gradient_checkpointing and weights.model.is_gradient_checkpointing
    # Tied as in the original, so that a moving average moves both.
    assert copy.lm_head.weight is copy.model.embed_tokens.weight


def test_moving_average_by_hand():
    trained = {"w": torch.nn.Parameter(torch.tensor([1.0, 2.0]))}
    average = MovingAverage(0.9, trained, {"w": torch.tensor([0.0, 0.0])})
    average.update()
    assert average.shadow["w"].tolist() == pytest.approx([0.1, 0.2])
    trained["w"].data.fill_(0.0)
    average.update()
    assert average.shadow["w"].tolist() == pytest.approx([0.09, 0.18])


@pytest.mark.parametrize("lora", [None, {"rank": 4}])
def test_a_moving_average_teacher_scores_with_its_own_weights(lora, tiny_folder):
    """At first as the student was; after each step (1 − d) of the way after it."""
    student = {"model": str(tiny_folder)} | ({"lora": lora} if lora else {})
    recipe = small_recipe(
        tiny_folder,
        student=student,
        teacher={"kind": "self", "weights": "ema", "ema_decay": 0.75,
                 "context": {"kind": "system", "text": "be brief"}},
        train={"learning_rate": 0.05},
    )  # fmt: skip
    parts = assemble(recipe)
    (average,) = parts.averages.values()
    start = {name: p.detach().clone() for name, p in parts.student.weights.trained.items()}
    trajectories = parts.rollout(parts.tasks.batch(0, 2), 0)
    first = parts.teacher(trajectories)
    parts.student.step(0, first)
    unchanged = parts.teacher(trajectories)
    assert torch.equal(first[0].target.logp_T, unchanged[0].target.logp_T)  # it has not moved yet
    for average in parts.averages.values():
        average.update()
    for name, parameter in parts.student.weights.trained.items():
        expected = 0.75 * start[name] + 0.25 * parameter.detach()
        torch.testing.assert_close(average.shadow[name], expected)
    averaged = parts.teacher(trajectories)
    assert not torch.allclose(first[0].target.logp_T, averaged[0].target.logp_T)
    parts.student.weights.model.load_state_dict(average.shadow, strict=False)
    (teacher,) = (parts.teacher.teacher,)
    teacher.weights, teacher.engine = _nothing, parts.engine
    with_student = parts.teacher(trajectories)
    torch.testing.assert_close(averaged[0].target.logp_T, with_student[0].target.logp_T)


def _nothing():
    from contextlib import nullcontext

    return nullcontext()


def test_a_missing_gpu_is_explained(tiny_folder, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ModelError, match=r"student\.device = 'cuda', but no GPU"):
        StudentWeights(StudentConfig(model=str(tiny_folder), device="cuda"), seed=0)


def test_bfloat16_arithmetic_keeps_trained_weights_in_float32(tiny_folder):
    for lora in (None, LoraConfig(rank=4)):
        config = StudentConfig(model=str(tiny_folder), dtype="bfloat16", lora=lora)
        weights = StudentWeights(config, seed=0)
        assert {p.dtype for p in weights.trained.values()} == {torch.float32}
        assert weights.autocast == torch.bfloat16
        base = weights.model.model.embed_tokens.weight.dtype
        assert base == (torch.bfloat16 if lora else torch.float32)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        # Its router returns a tuple, and is a linear layer by its class.
        ("phimoe", r"does not run \(AttributeError.* Name linear layers of its attention and MLP"),
        # These coefficients are clipped in training, and multiplied without their layer.
        ("gemma3n_text", r"training .* multiplies the bare weight of .*correction_coefs"),
    ],
)
def test_adapters_that_fail_or_would_never_train_are_refused(kind, message, monkeypatch):
    """As in code outside transformers, whose source is not searched for them."""
    model = build_model(ModelKind(model_type=kind))
    weights = InMemoryWeights(model, LoraConfig(rank=2))
    assert len(weights.trained) >= 2 * 2 * 4 and not weights.model.training
    monkeypatch.setattr("courtside.training.weights.find_bare_layers", lambda model: [])
    model = build_model(ModelKind(model_type=kind))
    with pytest.raises(ModelError, match=message):
        InMemoryWeights(model, LoraConfig(rank=2))
