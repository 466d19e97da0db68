"""Branches off the trunk of a training step, and on a real model: nothing moves or differs."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tiny import tiny_model, tiny_tokenizer
from torch import Tensor

from courtside.engines.base import BranchRequest
from courtside.engines.forward.padded_tree_scoring import branch_hidden, trunk_cache, trunk_layers
from courtside.engines.loading import load_model, load_tokenizer
from courtside.engines.local import LocalEngine
from courtside.engines.stateless import score_branches_separately
from courtside.errors import ModelError
from courtside.types import Branch


def branch(splice: int, ids: Sequence[int]) -> Branch:
    scored = (False,) + (True,) * (len(ids) - 1)
    return Branch(trajectory="t", turn=1, splice=splice, token_ids=tuple(ids), scored=scored)


ROWS = [tuple(3 + (7 * i * i) % 250 for i in range(n)) for n in (25, 40, 12)]
IDS_BL = torch.tensor([[*row, *(1,) * (40 - len(row))] for row in ROWS])
BRANCHES = [
    [branch(25, (5, 6, 7, 8)), branch(11, (9, 8, 7)), branch(11, (4,) * 6)],
    [],
    [branch(3, (30, 40, 50, 60, 70)), branch(0, (5, 6))],
]


def with_lora(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear"))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


def gradients(model: Any, between: Callable[[Any], None], *, narrow: bool) -> dict[str, Tensor]:
    """Of a loss on the trunk, with something done between its forward and its backward pass."""
    model.zero_grad()
    cache = trunk_cache()
    with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
        out = model.base_model(input_ids=IDS_BL, past_key_values=cache, use_cache=True)
        between(cache)
        again = model.base_model(input_ids=IDS_BL[:1], use_cache=False)
        loss = out.last_hidden_state.square().mean() + again.last_hidden_state.square().mean()
        loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("make", [tiny_model, lambda: with_lora(tiny_model())])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("narrow", [False, True])
def test_the_trunk_of_a_training_step_serves_the_teacher_and_still_trains(
    make: Callable[[], Any], attention: str, narrow: bool
) -> None:
    model = make()
    model.set_attn_implementation(attention)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=narrow):
        alone = trunk_cache()
        model.base_model(input_ids=IDS_BL, past_key_values=alone, use_cache=True)
        expected = branch_hidden(model, alone, [len(row) for row in ROWS], BRANCHES)
    model.train()
    found: list[list[Tensor]] = []

    def read(cache: Any) -> None:
        before = [t for layer in cache.layers for t in (layer.keys, layer.values)]
        copies, versions = [t.detach().clone() for t in before], [t._version for t in before]
        found.extend(branch_hidden(model, cache, [len(row) for row in ROWS], BRANCHES))
        after = [t for layer in cache.layers for t in (layer.keys, layer.values)]
        assert all(a is b for a, b in zip(before, after, strict=True))
        assert [t._version for t in after] == versions
        assert all(torch.equal(a, b) for a, b in zip(after, copies, strict=True))

    without = gradients(model, lambda cache: None, narrow=narrow)
    with_branches = gradients(model, read, narrow=narrow)
    assert without.keys() == with_branches.keys() and len(without) > 4
    assert all(torch.equal(without[name], with_branches[name]) for name in without)
    for row, other in zip(found, expected, strict=True):
        for x_ND, y_ND in zip(row, other, strict=True):
            assert not x_ND.requires_grad
            torch.testing.assert_close(x_ND, y_ND, rtol=0, atol=0)


def test_the_graph_lives_no_longer_for_it() -> None:
    class Kept:
        def __init__(self, tensor: Tensor):
            self.tensor = tensor

    model = tiny_model()
    graph: list[weakref.ref[Kept]] = []

    def pack(tensor: Tensor) -> Kept:
        kept = Kept(tensor.detach())  # an output that kept its own graph would be a circle
        graph.append(weakref.ref(kept))
        return kept

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept.tensor):
        cache = trunk_cache()
        out = model.base_model(input_ids=IDS_BL, past_key_values=cache, use_cache=True)
    layers = trunk_layers(cache)
    found = branch_hidden(model, layers, [len(row) for row in ROWS], BRANCHES)
    assert all(ref() is not None for ref in graph) and graph
    del out, cache
    gc.collect()
    assert all(ref() is None for ref in graph)
    assert len(layers) == 2 and len(found[0]) == 3  # these are still in use


def test_neither_dropout_nor_checkpointing_reaches_the_branches() -> None:
    model = tiny_model()
    model.config.attention_dropout = 0.5
    for layer in model.base_model.layers:
        layer.self_attn.attention_dropout = 0.5
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    lengths = [len(row) for row in ROWS]
    cache = trunk_cache()
    with torch.no_grad():
        model.base_model(input_ids=IDS_BL, past_key_values=cache, use_cache=True)
    expected = branch_hidden(model, cache, lengths, BRANCHES)
    model.train()
    model.base_model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    state = torch.get_rng_state()
    found = branch_hidden(model, cache, lengths, BRANCHES)
    assert torch.equal(state, torch.get_rng_state())
    assert modes == [module.training for module in model.modules()]
    assert torch.equal(found[0][0], expected[0][0])
    # The engine takes care of it for the trunk, too.
    model.eval()
    engine = LocalEngine(model, tiny_tokenizer(), name="tiny")
    request = BranchRequest(token_ids=ROWS[0], branches=tuple(BRANCHES[0]))
    (calm,) = engine.score_branches([request])
    model.train()
    (busy,) = engine.score_branches([request])
    assert torch.equal(calm.branches[0].logp_T, busy.branches[0].logp_T)
    # And a checkpointed pass leaves nothing to branch from, which is said.
    empty = trunk_cache()
    model.base_model(input_ids=IDS_BL, past_key_values=empty, use_cache=True)
    with pytest.raises(ModelError, match=r"gradient checkpointing.*score_branches"):
        branch_hidden(model, empty, lengths, BRANCHES)


def test_smollm2_says_the_same_in_one_pass_as_in_many() -> None:
    model = load_model("smollm2-135m", dtype=torch.float32, device=torch.device("cpu"))
    engine = LocalEngine(model, load_tokenizer("smollm2-135m"), name="smollm2-135m")
    talk = "<|im_start|>user\nAdd {0} and {1}.<|im_end|>\n<|im_start|>assistant\n{2}<|im_end|>\n"
    turns = [engine.tokenizer.encode(talk.format(n, 3 * n, 4 * n)) for n in range(14)]
    ids = tuple(i for turn in turns for i in turn)
    assert 250 < len(ids) < 350
    hints = ["Use the tool.", "Answer with one number.", "The sum is wrong, look again.", "No."]
    splices = [len(turns[0]), 60, 60, len(ids)]
    request = BranchRequest(
        token_ids=ids,
        scored=tuple(i > 250 for i in range(len(ids))),
        branches=tuple(
            branch(splice, engine.tokenizer.encode(f"<|im_start|>user\n{hint}<|im_end|>\n") + turn)
            for splice, hint, turn in zip(splices, hints, turns, strict=False)
        ),
        temperature=0.8,
    )
    (one,) = engine.score_branches([request], want="hidden")
    assert one.note is None
    (many,) = score_branches_separately(engine, [request], want="hidden")
    pairs = [*zip(one.branches, many.branches, strict=True), (one.trunk, many.trunk)]
    for x, y in pairs:
        assert x is not None and y is not None
        torch.testing.assert_close(x.logp_T, y.logp_T, rtol=1e-5, atol=5e-5)
        assert float((x.hidden_TD - y.hidden_TD).norm() / y.hidden_TD.norm()) < 1e-5
    first, second = one.branches[1].logp_T.mean(), one.branches[2].logp_T.mean()
    assert abs(float(first - second)) > 1e-3, "different hints are different contexts"
