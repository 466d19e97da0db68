"""Tree scoring over the forward pass of a training step, and on a real model."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.tiny_model import tiny_model, tiny_tokenizer
from support.varlen import make_branch
from torch import Tensor
from transformers.cache_utils import Cache

from courtside.engines.base import BranchRequest, score_branches_separately
from courtside.engines.forward.forward import ForwardPasses
from courtside.engines.forward.tree_scoring import TrunkCache, forward_branches
from courtside.engines.loading import load_model, load_tokenizer
from courtside.engines.local import LocalEngine
from courtside.errors import ModelError

SEQUENCES = [tuple(3 + (7 * i * i) % 250 for i in range(n)) for n in (25, 40, 12)]
BRANCHES = [
    (0, make_branch(25, (5, 6, 7, 8))),
    (0, make_branch(11, (9, 8, 7))),
    (0, make_branch(11, (4,) * 6)),
    (2, make_branch(3, (30, 40, 50, 60, 70))),
    (2, make_branch(0, (5, 6))),
]


def with_lora(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear"))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


def make_passes(model: Any) -> ForwardPasses:
    return ForwardPasses(model=model, pad_id=1, padding_reason=None)


def score_branches(passes: ForwardPasses, cache: Cache, spans: Any) -> list[Tensor]:
    return forward_branches(passes, cache, [(spans[trunk], branch) for trunk, branch in BRANCHES])


def training_gradients(
    passes: ForwardPasses, before_backward: Callable[[Cache, Any], None], *, autocast: bool
) -> dict[str, Tensor]:
    """Gradients of a loss on the trunks, whose cache is used before the backward pass."""
    passes.model.zero_grad()
    cache = TrunkCache()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast), passes.patch_model():
        hidden_ND, spans = passes.forward(SEQUENCES, cache=cache)
        before_backward(cache, spans)
        second_ND, _ = passes.forward(SEQUENCES[:1])
        (hidden_ND.square().mean() + second_ND.square().mean()).backward()
    return {n: p.grad.clone() for n, p in passes.model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("make", [tiny_model, lambda: with_lora(tiny_model())])
@pytest.mark.parametrize("autocast", [False, True])
def test_the_pass_of_a_training_step_serves_the_teacher_and_still_trains(
    make: Callable[[], Any], autocast: bool
) -> None:
    passes = make_passes(make())
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        cache = TrunkCache()
        with passes.patch_model():
            _, spans = passes.forward(SEQUENCES, cache=cache)
            expected = score_branches(passes, cache, spans)
    passes.model.train()
    hidden: list[Tensor] = []

    def score(cache: Cache, spans: Any) -> None:
        states = [state for layer in cache.layers for state in (layer.keys, layer.values)]
        copies, versions = [s.clone() for s in states], [s._version for s in states]
        hidden.extend(score_branches(passes, cache, spans))
        after = [state for layer in cache.layers for state in (layer.keys, layer.values)]
        assert all(a is b for a, b in zip(states, after, strict=True))
        assert [s._version for s in after] == versions
        assert all(torch.equal(a, b) for a, b in zip(after, copies, strict=True))

    without = training_gradients(passes, lambda cache, spans: None, autocast=autocast)
    with_branches = training_gradients(passes, score, autocast=autocast)
    assert without.keys() == with_branches.keys() and len(without) > 4
    assert all(torch.equal(without[name], with_branches[name]) for name in without)
    for x_ND, y_ND in zip(hidden, expected, strict=True):
        assert not x_ND.requires_grad
        torch.testing.assert_close(x_ND, y_ND, rtol=0, atol=0)


def test_the_cache_does_not_hold_the_graph() -> None:
    class Saved:
        def __init__(self, tensor: Tensor):
            self.tensor = tensor

    passes = make_passes(tiny_model())
    graph: list[weakref.ref[Saved]] = []

    def pack(tensor: Tensor) -> Saved:
        saved = Saved(tensor.detach())  # an output that held its own graph would be a cycle
        graph.append(weakref.ref(saved))
        return saved

    cache = TrunkCache()
    with passes.patch_model():
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved.tensor):
            hidden_ND, spans = passes.forward(SEQUENCES, cache=cache)
        hidden = score_branches(passes, cache, spans)
    assert all(ref() is not None for ref in graph) and graph
    del hidden_ND
    gc.collect()
    assert all(ref() is None for ref in graph)
    assert len(cache.layers) == 2 and len(hidden) == len(BRANCHES)  # still in use


def test_neither_dropout_nor_checkpointing_reaches_the_branches() -> None:
    model = tiny_model()
    model.config.attention_dropout = 0.5
    for layer in model.base_model.layers:
        layer.self_attn.attention_dropout = 0.5
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    passes, cache = make_passes(model), TrunkCache()
    with passes.patch_model():
        with torch.no_grad():
            _, spans = passes.forward(SEQUENCES, cache=cache)
        expected = score_branches(passes, cache, spans)
        model.train()
        model.base_model.layers[0].eval()
        modes = [module.training for module in model.modules()]
        rng_state = torch.get_rng_state()
        hidden = score_branches(passes, cache, spans)
    assert torch.equal(rng_state, torch.get_rng_state())
    assert modes == [module.training for module in model.modules()]
    assert all(torch.equal(x_ND, y_ND) for x_ND, y_ND in zip(hidden, expected, strict=True))
    model.train()
    empty = TrunkCache()
    with passes.patch_model():
        _, spans = passes.forward(SEQUENCES, cache=empty)
        with pytest.raises(ModelError, match="gradient checkpointing"):
            score_branches(passes, empty, spans)
    # The engine runs the trunk in eval mode too.
    model.eval()
    engine = LocalEngine(model, tiny_tokenizer(), name="tiny")
    branches = tuple(branch for trunk, branch in BRANCHES if trunk == 0)
    request = BranchRequest(token_ids=SEQUENCES[0], branches=branches)
    (in_eval_mode,) = engine.score_branches([request])
    model.train()
    (in_training_mode,) = engine.score_branches([request])
    assert torch.equal(in_eval_mode.branches[0].logp_T, in_training_mode.branches[0].logp_T)


def test_smollm2_scores_a_tree_as_separate_sequences() -> None:
    model = load_model("smollm2-135m", dtype=torch.float32, device=torch.device("cpu"))
    engine = LocalEngine(model, load_tokenizer("smollm2-135m"), name="smollm2-135m")
    chat = "<|im_start|>user\nAdd {0} and {1}.<|im_end|>\n<|im_start|>assistant\n{2}<|im_end|>\n"
    turns = [engine.tokenizer.encode(chat.format(n, 3 * n, 4 * n)) for n in range(14)]
    ids = tuple(i for turn in turns for i in turn)
    assert 250 < len(ids) < 350
    hints = ["Use the tool.", "Answer with one number.", "The sum is wrong, look again.", "No."]
    splices = [len(turns[0]), 60, 60, len(ids)]
    encode = engine.tokenizer.encode
    request = BranchRequest(
        token_ids=ids,
        scored=tuple(i > 250 for i in range(len(ids))),
        branches=tuple(
            make_branch(splice, encode(f"<|im_start|>user\n{hint}<|im_end|>\n") + turn)
            for splice, hint, turn in zip(splices, hints, turns, strict=False)
        ),
        temperature=0.8,
    )
    (tree,) = engine.score_branches([request], want="hidden")
    assert tree.note is None
    (separate,) = score_branches_separately(engine, [request], want="hidden")
    pairs = [*zip(tree.branches, separate.branches, strict=True), (tree.trunk, separate.trunk)]
    for x, y in pairs:
        assert x is not None and y is not None
        torch.testing.assert_close(x.logp_T, y.logp_T, rtol=1e-5, atol=5e-5)
        assert float((x.hidden_TD - y.hidden_TD).norm() / y.hidden_TD.norm()) < 1e-5
    first, second = tree.branches[1].logp_T.mean(), tree.branches[2].logp_T.mean()
    assert abs(float(first - second)) > 1e-3, "different hints are different contexts"
