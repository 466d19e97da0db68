"""Everything that an engine and an update compute with one model, against plain separate passes.

A plain pass is transformers' own model over one whole sequence, without a cache, mask or batch.
"""

from __future__ import annotations

import copy
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from support.gradients import flatten_gradients, take_gradients
from support.hybrids import plain_logp
from support.model_kinds import ModelKind, build_model
from support.small_runs import small_recipe
from support.tiny_model import tiny_tokenizer
from support.varlen import make_branch
from torch import Tensor

from courtside.engines.base import BranchRequest, SampleRequest, Sampling, ScoreRequest
from courtside.engines.local import LocalEngine
from courtside.errors import ModelError
from courtside.recipe.student import LoraConfig
from courtside.training.metrics import MetricAccumulator
from courtside.training.student import Student
from courtside.training.weights import StudentWeights, _with_adapter
from courtside.types import Message, Scored, Task, Trajectory, Turn

MAX_ERROR = 2e-4
"""In nats, of float32 log-probs. Models whose own rounding is large may differ by
`ROUNDING_FACTOR` of it."""
ROUNDING_FACTOR = 20
MAX_GRADIENT_ERROR = 1e-3
"""Relative, of the whole gradient."""
NEW_TOKENS = 12
LENGTHS = (3, 9, 20, 44)
"""Of prompts and sequences: they cross every threshold of `support.model_kinds`."""

Ids = tuple[int, ...]


def make_ids(length: int, seed: int) -> Ids:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(2, 250, (length,), generator=generator).tolist())


@dataclass(frozen=True, slots=True, kw_only=True)
class KindResult:
    """A row of the table."""

    name: str
    status: str
    """`right`, `right without LoRA`, `refused`, `WRONG`, `traceback`, `not built`."""
    paths: dict[str, str] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    """By check: the largest error in nats; of `gradient` the relative one."""
    problems: dict[str, str] = field(default_factory=dict)
    """By check: why it was refused, or where it raised."""


def largest_error(logp_T: Tensor, expected_T: Tensor) -> float:
    assert logp_T.shape == expected_T.shape and len(logp_T)
    error = float((logp_T.detach().float() - expected_T).abs().max())
    return error if error == error else float("inf")


# ── checks ───────────────────────────────────────────────────────────────────────────────────────


class Checks:
    def __init__(self, model: Any, plain: Any, engine: LocalEngine):
        self.model, self.plain, self.engine = model, plain, engine
        longest = min(engine.context_length, 256)
        self.lengths = [min(length, longest - NEW_TOKENS) for length in LENGTHS]
        self.longest = longest

    def sampling(self) -> float:
        """Groups of two per prompt, prompts of all lengths in one batch."""
        requests = [
            SampleRequest(prompt_ids=make_ids(length, length), seed=seed)
            for length in self.lengths
            for seed in (1, 2)
        ]
        samples = self.engine.sample(requests, Sampling(max_new_tokens=NEW_TOKENS))
        return max(
            largest_error(
                torch.tensor(sample.logp),
                plain_logp(self.plain, r.prompt_ids + sample.token_ids)[len(r.prompt_ids) - 1 :],
            )
            for r, sample in zip(requests, samples, strict=True)
        )

    def scoring(self) -> float:
        sequences = [make_ids(n + 4, n) for n in self.lengths] + [make_ids(self.lengths[-1], 1)]
        sequences += [sequences[-1][:20] + make_ids(5, 2)]
        requests = [
            ScoreRequest(token_ids=ids, scored=(False, *(True,) * (len(ids) - 1)))
            for ids in sequences
        ]
        return max(
            largest_error(scores.logp_T, plain_logp(self.plain, ids))
            for ids, scores in zip(sequences, self.engine.score(requests), strict=True)
        )

    def sessions(self) -> float:
        """Three turns of four rows; a row starts again, another sits a turn out."""
        session = self.engine.session(4)
        contexts: list[Ids] = [()] * 4
        errors = []
        for turn, rows in enumerate(([0, 1, 2, 3], [0, 1, 2, 3], [3, 1, 0])):
            if turn == 1:
                session.restart(1)
                contexts[1] = ()
            prompts = []
            for row in rows:
                length = (2, 11, 5, 21)[(row + turn) % 4]
                length = min(length, self.longest - len(contexts[row]) - 6)
                prompts.append(contexts[row][-1:] + make_ids(max(1, length), 10 * turn + row))
            requests = [
                SampleRequest(prompt_ids=ids, seed=seed) for seed, ids in enumerate(prompts)
            ]
            samples = session.sample(rows, requests, Sampling(max_new_tokens=4))
            for row, ids, sample in zip(rows, prompts, samples, strict=True):
                context = contexts[row][:-1] + ids
                contexts[row] = context + sample.token_ids
                expected_T = plain_logp(self.plain, contexts[row])[len(context) - 1 :]
                errors.append(largest_error(torch.tensor(sample.logp), expected_T))
        return max(errors)

    def tree_scoring(self) -> float:
        trunks = [make_ids(n, n) for n in self.lengths[1:]]
        requests = [
            BranchRequest(
                token_ids=ids,
                branches=tuple(
                    make_branch(splice, make_ids(length, splice + 1))
                    for splice, length in ((len(ids), 7), (len(ids) // 2, 9), (4, 12))
                ),
                scored=(False, *(True,) * (len(ids) - 1)),
            )
            for ids in trunks
        ]
        errors = []
        for request, scores in zip(requests, self.engine.score_branches(requests), strict=True):
            assert scores.trunk is not None
            errors.append(
                largest_error(scores.trunk.logp_T, plain_logp(self.plain, request.token_ids))
            )
            for branch, branch_scores in zip(request.branches, scores.branches, strict=True):
                sequence = request.token_ids[: branch.splice] + branch.token_ids
                # The branch's first token is not scored.
                expected_T = plain_logp(self.plain, sequence)[branch.splice :]
                errors.append(largest_error(branch_scores.logp_T, expected_T))
        return max(errors)

    def gradient(self) -> float:
        return gradient_error(InMemoryWeights(self.model), self.plain, self.lengths)


class InMemoryWeights(StudentWeights):
    """Of a model that was not loaded."""

    def __init__(self, model: Any, lora: LoraConfig | None = None):
        self.model, self.device = model, model.device
        self.autocast = self.adapter = None
        if lora is not None:
            self.adapter = _with_adapter(model, lora, seed=0)
            model.eval()
            with torch.no_grad():  # half of a new adapter is zero
                for name, parameter in self.trained.items():
                    if "lora_B" in name:
                        parameter += 0.05 * torch.randn_like(parameter)


def gradient_error(weights: StudentWeights, plain: Any, lengths: Sequence[int]) -> float:
    """Relative error of one update's gradient, of next-token cross-entropy over mixed lengths.
    `plain`: the same weights, of which those that train have the same names."""
    student = Student(
        weights,
        small_recipe(Path("unused"), losses=[IMITATION]),
        vocab_size=vocab_size_of(plain),
        pad_id=1,
    )
    scored = [Scored(trajectory=make_trajectory(n), target=None) for n in lengths]
    terms = student.make_terms(scored)
    student.accumulate(0, scored, terms, MetricAccumulator())
    gradients = take_gradients(weights.trained)
    names = {name for name, p in weights.model.named_parameters() if p.requires_grad}
    parameters = {name: p for name, p in plain.named_parameters() if name in names}
    assert parameters.keys() == weights.trained.keys()
    losses, num_tokens = [], 0
    for s in scored:
        ids = s.trajectory.token_ids
        with torch.enable_grad():
            logits_LV = plain(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()
        start = len(s.trajectory.turns[0].token_ids)
        logp_T = logits_LV[start - 1 : -1].log_softmax(-1)
        losses.append(-logp_T.gather(-1, torch.tensor(ids[start:])[:, None]).sum())
        num_tokens += len(ids) - start
    for parameter in plain.parameters():
        parameter.grad = None
    (sum(losses) / num_tokens).backward()  # type: ignore[union-attr]
    expected = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in parameters.items()}
    gradients |= {n: torch.zeros_like(p) for n, p in parameters.items() if n not in gradients}
    value, reference = flatten_gradients(gradients), flatten_gradients(expected)
    error = float((value - reference).norm() / reference.norm())
    return error if error == error else float("inf")


def vocab_size_of(model: Any) -> int:
    return int(model.get_output_embeddings().weight.shape[0])


IMITATION = {"kind": "cross_entropy", "on": "student", "self_imitation": True}


def make_trajectory(length: int) -> Trajectory:
    task = Task(id=f"task-{length}", split="train", messages=(Message(role="user", content="?"),))
    prompt, answer = (
        make_ids(max(2, length // 2), length),
        make_ids(max(2, length // 2), length + 1),
    )
    return Trajectory(
        id=f"{length}",
        task=task,
        turns=(
            Turn(role="prompt", text="", token_ids=prompt, completion_mask=(False,) * len(prompt)),
            Turn(role="assistant", text="", token_ids=answer,
                 completion_mask=(True,) * len(answer), sampler_logp=(-1.0,) * len(answer)),
        ),
        source="student",
        policy_version=0,
        temperature=1.0,
        stop="eos",
    )  # fmt: skip


# ── one kind ─────────────────────────────────────────────────────────────────────────────────────


def check_kind(kind: ModelKind, *, with_lora: bool = True) -> KindResult:
    try:
        model = build_model(kind)
        plain_logp(model, make_ids(20, 0))
    except Exception as error:
        return KindResult(name=kind.name, status="not built", problems={"build": describe(error)})
    plain = copy.deepcopy(model)
    errors: dict[str, float] = {}
    problems: dict[str, str] = {}
    refused: list[str] = []
    paths: dict[str, str] = {}

    def measure(name: str, compute: Callable[[], float]) -> None:
        try:
            errors[name] = compute()
        except ModelError as error:
            refused.append(name)
            problems[name] = str(error)
        except Exception as error:
            problems[name] = describe(error)

    def engine_of(model: Any) -> LocalEngine:
        return LocalEngine(model, tiny_tokenizer(), name=kind.name)

    try:
        engine = engine_of(model)
    except ModelError as error:
        return KindResult(name=kind.name, status="refused", problems={"engine": str(error)})
    except Exception as error:
        return KindResult(name=kind.name, status="traceback", problems={"engine": describe(error)})
    checks = Checks(model, plain, engine)
    for name in ("sampling", "scoring", "sessions", "tree_scoring", "gradient"):
        measure(name, getattr(checks, name))
    measure("paths", lambda: bool(paths.update(describe_paths(engine))))
    errors.pop("paths", None)
    if with_lora:
        measure("LoRA", lambda: lora_error(model, engine_of, checks.lengths))
    gradient = errors.get("gradient", 0.0)
    wrong = [] if gradient < MAX_GRADIENT_ERROR else ["gradient"]
    suspects = {name: e for name, e in errors.items() if name != "gradient" and not e < MAX_ERROR}
    if suspects:
        limit = ROUNDING_FACTOR * rounding_error(plain, checks.lengths)
        wrong += [name for name, error in suspects.items() if not error < limit]
    raised = problems.keys() - set(refused)
    status = "WRONG" if wrong else "traceback" if raised else "refused" if refused else "right"
    if status == "refused" and refused == ["LoRA"]:
        status = "right without LoRA"
    return KindResult(name=kind.name, status=status, paths=paths, errors=errors, problems=problems)


def rounding_error(plain: Any, lengths: Sequence[int]) -> float:
    """How much log-probs change, in nats, when every weight changes by about its rounding error."""
    rounded = copy.deepcopy(plain)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in rounded.parameters():
            parameter *= 1 + torch.finfo(torch.float32).eps * torch.randn_like(parameter)
    sequences = [make_ids(n, n) for n in lengths]
    return max(largest_error(plain_logp(plain, ids), plain_logp(rounded, ids)) for ids in sequences)


def lora_error(
    model: Any, engine_of: Callable[[Any], LocalEngine], lengths: Sequence[int]
) -> float:
    """Adapter on and off: scoring and sampling, and the gradient as a share of its limit."""
    plain_logp(model, make_ids(5, 0))  # some keep a state, of a graph that cannot be copied
    base = copy.deepcopy(model)
    weights = InMemoryWeights(model, LoraConfig(rank=4, alpha=8))
    adapted = copy.deepcopy(model)
    engine = engine_of(model)
    on = Checks(model, adapted, engine)
    errors = [on.scoring(), on.sampling()]
    with weights.without_adapter():
        off = Checks(model, base, engine)
        errors += [off.scoring(), off.sampling()]
    plain_logp(adapted, make_ids(5, 0))
    gradient = gradient_error(weights, adapted, lengths)
    return max(*errors, gradient * MAX_ERROR / MAX_GRADIENT_ERROR)


def describe_paths(engine: LocalEngine) -> dict[str, str]:
    passes = engine.passes
    how = "packed" if passes.unshared_reason is not None else "packed, prefixes shared"
    if passes.padding_reason is not None:
        how = "padded" if passes.separate_reason is None else "one at a time"
    sampling = "KV cache"
    if engine.state_passes is not None:
        sampling = "saved states"
    elif engine.stateless_reason is not None:
        sampling = engine.decode_path[0].replace("_", " ")
    hints = "tree" if engine.separate_branches_reason is None else "separate"
    return {"passes": how, "sampling": sampling, "hints": hints}


def describe(error: Exception) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    where = frame.filename.rpartition("site-packages/")[2].rpartition("src/")[2]
    first_line = (str(error).strip().splitlines() or [""])[0][:200]
    return f"{type(error).__name__}: {first_line} ({where}:{frame.lineno})"
