"""Routers of a mixture of experts: what they select, and selections that are replayed.

A router selects experts with `torch.topk`, whatever it scores them by. For the length of its
forward pass that call is watched: its indices are recorded, or recorded ones take their place. The
router's own code then makes weights of the scores at these indices, so that normalization, scaling
and gradients are the model's. Nothing here knows a model by name; `find_routers` tries an example.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from courtside.engines.patches.patch import Patch, apply_patches, eval_mode
from courtside.engines.probe_inputs import PROBE_ERRORS, probe_ids

if TYPE_CHECKING:
    from courtside.engines.forward.batching import SequenceSpan

TOP_K = (torch.topk, torch.Tensor.topk)
ExpertRecord = Sequence[Tensor]
"""[n, L, K], concatenated: experts of the first tokens of a sequence; empty: of none."""
UNKNOWN = -1
"""In place of an expert where none is replayed: the router selects."""


# ── one pass ─────────────────────────────────────────────────────────────────────────────────────


class PassRouting:
    """What the routers of one forward pass select, or are to select.

    It stays in effect until the next pass: gradient checkpointing runs the routers again during the
    backward pass, and they must select the same.
    """

    def __init__(
        self, replayed_NLK: Tensor | None = None, *, counts_N: Tensor | None = None
    ) -> None:
        self.replayed_NLK = replayed_NLK
        """Experts of each position; `UNKNOWN` where the router selects. None: everywhere."""
        self.counts_N = counts_N
        """For how many sequences a position stands whose experts were recorded: several for a
        shared prefix, 0 for padding."""
        self.recorded_NLK: Tensor | None = None
        """As `replayed_NLK`, also where nothing is replayed."""
        self.selected: dict[int, Tensor] = {}
        """By layer, [N, K]: the experts that the router scores highest, replayed or not."""
        self.logits: dict[int, Tensor] = {}
        """By layer, [N, E], with their graph."""

    def stack_selected(self) -> Tensor:
        """[N, L, K]."""
        return torch.stack([self.selected[layer] for layer in sorted(self.selected)], dim=1)


class _WatchedTopK(TorchFunctionMode):
    """The last top-k of a router's forward pass, which selects the experts."""

    def __init__(self, num_topk: int, replayed_NK: Tensor | None):
        super().__init__()
        self.remaining, self.replayed_NK = num_topk, replayed_NK
        self.selected: Tensor | None = None

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if function not in TOP_K:
            return result
        self.remaining -= 1
        if self.remaining:
            return result
        self.selected = result.indices
        if self.replayed_NK is None:
            return result
        scores = args[0] if args else kwargs["input"]
        replayed = self.replayed_NK
        if len(replayed) > 1:  # else the same experts for all
            replayed = replayed.view(result.indices.shape)
        indices = torch.where(replayed == UNKNOWN, result.indices, replayed)
        return torch.return_types.topk((scores.gather(-1, indices), indices))


# ── the routers of a model ───────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Router:
    name: str
    module: Any
    num_experts: int
    top_k: int
    num_topk: int
    """Top-k calls of a forward pass."""
    logits_index: int | None
    """Of the router's logits among what it returns; None: it does not return them."""


class Routers:
    """All routers of a model, in the order of a forward pass. Its patches must be applied around
    passes that are recorded or replayed; in other passes the routers run as they are."""

    def __init__(self, routers: Sequence[Router]):
        self.routers = tuple(routers)
        self.current: PassRouting | None = None
        """Of the pass under way and its backward pass; None: nobody asks."""

    @property
    def num_layers(self) -> int:
        return len(self.routers)

    @property
    def top_k(self) -> int:
        return self.routers[0].top_k

    @property
    def shape(self) -> tuple[int, int]:
        """Of a token's record."""
        return self.num_layers, self.top_k

    @property
    def num_experts(self) -> int:
        return max(router.num_experts for router in self.routers)

    @property
    def dtype(self) -> torch.dtype:
        """Of records: a byte for each expert where that is enough."""
        return torch.uint8 if self.num_experts <= 256 else torch.int16

    def patches(self) -> list[Patch]:
        return [
            Patch(r.module, "forward", partial(self._route, layer, r, r.module.forward), nests=True)
            for layer, r in enumerate(self.routers)
        ]

    def _route(self, layer: int, router: Router, forward: Any, *args: Any, **kwargs: Any) -> Any:
        routing = self.current
        if routing is None:
            return forward(*args, **kwargs)
        replayed_NLK = routing.replayed_NLK
        watched = _WatchedTopK(
            router.num_topk, None if replayed_NLK is None else replayed_NLK[:, layer].long()
        )
        with watched:
            output = forward(*args, **kwargs)
        if layer not in routing.selected:  # not when it is recomputed
            assert watched.selected is not None, f"{router.name} selected no experts"
            routing.selected[layer] = watched.selected.detach().reshape(-1, router.top_k)
            if router.logits_index is not None:
                routing.logits[layer] = output[router.logits_index]
        return output

    @contextmanager
    def record(self) -> Iterator[PassRouting]:
        """The passes inside are one pass; the patches must be applied."""
        before, self.current = self.current, PassRouting()
        try:
            yield self.current
        finally:
            self.current = before

    @contextmanager
    def fix_experts(self) -> Iterator[None]:
        """All tokens of all passes go to the same experts, whatever their scores."""
        before = self.current
        device = next(self.routers[0].module.parameters()).device
        experts_1LK = torch.arange(self.top_k, device=device).expand(1, *self.shape)
        self.current = PassRouting(experts_1LK)
        try:
            with apply_patches(self.patches()):
                yield
        finally:
            self.current = before

    @contextmanager
    def suspend(self) -> Iterator[None]:
        """Passes inside are nobody's; afterwards the pass before them is in effect again."""
        before, self.current = self.current, None
        try:
            yield
        finally:
            self.current = before

    def start_pass(
        self,
        num_positions: int,
        spans: Sequence[SequenceSpan],
        records: Sequence[ExpertRecord],
        lengths: Sequence[int],
        *,
        replays: bool,
        device: torch.device,
    ) -> None:
        """The next pass is compared with `records`, one for each sequence. Where sequences share a
        prefix, its experts are those of the first of them that has a record; when they are
        replayed, all have the same (`make_sharing_keys`)."""
        shape = (num_positions, *self.shape)
        recorded_NLK = torch.full(shape, UNKNOWN, dtype=torch.int16)  # a copy to the device a pass
        counts_N = torch.zeros(num_positions, dtype=torch.long)
        rows = list(zip(spans, records, lengths, strict=True))
        for span, parts, length in reversed(rows):  # the first sequence has the last word
            if not parts:
                continue
            record = torch.cat(list(parts))
            assert record.shape[1:] == shape[1:], "a record of another model"
            count, start = min(len(record), length), 0
            for part in span.slices(count):
                end = start + part.stop - part.start
                recorded_NLK[part] = record[start:end].to(torch.int16)
                counts_N[part] += 1
                start = end
        recorded_NLK, counts_N = recorded_NLK.to(device), counts_N.to(device)
        self.current = PassRouting(recorded_NLK if replays else None, counts_N=counts_N)
        self.current.recorded_NLK = recorded_NLK


def make_sharing_keys(
    sequences: Sequence[Sequence[int]], records: Sequence[ExpertRecord]
) -> list[tuple[int, ...]]:
    """A number for each token: equal where the ids and the recorded experts are. Rounding may have
    sent the same prefix to other experts when it was sampled elsewhere."""
    numbers: dict[tuple[int, bytes], int] = {}
    keys = []
    for ids, parts in zip(sequences, records, strict=True):
        rows = [row.tobytes() for part in parts for row in part.numpy()]
        rows += [b""] * (len(ids) - len(rows))
        keys.append(
            tuple(numbers.setdefault(key, len(numbers)) for key in zip(ids, rows, strict=False))
        )
    return keys


# ── records of sampling ──────────────────────────────────────────────────────────────────────────


class RowRouting:
    """Experts of the cached tokens of a session's rows, at the positions of their keys."""

    def __init__(self, routers: Routers, experts_BNLK: Tensor):
        """`experts_BNLK`: rows × positions × `routers.shape`, in `routers.dtype`."""
        self.routers, self.experts_BNLK = routers, experts_BNLK

    def grow(self, capacity: int) -> None:
        before = self.experts_BNLK
        num_rows, num_positions, *shape = before.shape
        self.experts_BNLK = before.new_empty(num_rows, capacity, *shape)
        self.experts_BNLK[:, :num_positions] = before

    def load(self, experts_BNLK: Tensor) -> None:
        """Copy rows of fewer positions."""
        num_rows, num_positions = experts_BNLK.shape[:2]
        self.experts_BNLK[:num_rows, :num_positions] = experts_BNLK

    @contextmanager
    def record(self, index_B: Tensor, position_BN: Tensor) -> Iterator[None]:
        """Around a pass over new tokens of these rows."""
        with apply_patches(self.routers.patches()), self.routers.record() as routing:
            yield
        self.write(index_B, position_BN, routing)

    def write(self, index_B: Tensor, position_BN: Tensor, routing: PassRouting) -> None:
        """What a pass over new tokens of these rows has selected."""
        selected_BNLK = routing.stack_selected().unflatten(0, tuple(position_BN.shape))
        self.experts_BNLK[index_B[:, None], position_BN] = selected_BNLK.to(self.routers.dtype)

    def swap_rows(self, row: int, other: int, num_positions: int) -> None:
        part = self.experts_BNLK[:, :num_positions]
        part[[row, other]] = part[[other, row]]

    def copy_row(self, source: int | Tensor, target: int | Tensor, num_positions: int) -> None:
        self.experts_BNLK[target, :num_positions] = self.experts_BNLK[source, :num_positions]

    def read(self, row: int, start: int, end: int) -> Tensor:
        return self.experts_BNLK[row, start:end].cpu().clone()


# ── which routers a model has ────────────────────────────────────────────────────────────────────


@torch.no_grad()
def find_routers(model: Any) -> Routers | str | None:
    """None: the model has no experts. A text: why its routing can be neither recorded nor replayed.

    Every router is tried: it must select with a top-k once a pass, repeat the same numbers where
    its own selection is replayed, and compute others where other experts are.
    """
    innermost = {
        name: module
        for name, module in model.named_modules()
        if _may_select(module)
        and not any(_may_select(m) for m in module.modules() if m is not module)
    }
    if not innermost:
        experts = next((_kind(m) for m in model.modules() if "Expert" in _kind(m)), None)
        return None if experts is None else f"no router belongs to its {experts}"
    ids = torch.tensor([probe_ids(model, 12, 0)], device=model.device)
    try:
        with eval_mode(model):
            routers = _watch_modules(model, innermost, ids)
            return routers if isinstance(routers, str) else _try_replay(model, routers, ids)
    except torch.OutOfMemoryError:
        raise
    except PROBE_ERRORS as error:
        return f"a small example fails ({type(error).__name__}: {error})"


def _may_select(module: Any) -> bool:
    """By what such modules of transformers have in common; some blocks route without a router."""
    return isinstance(getattr(module, "top_k", None), int) or _kind(module).endswith("Router")


def _kind(module: Any) -> str:
    return type(module).__name__


class _CountedTopK(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[int, int]] = []
        """Size of the last dimension, and k."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if function in TOP_K:
            scores = args[0] if args else (kwargs or {})["input"]
            self.calls.append((scores.shape[-1], result.indices.shape[-1]))
        return result


def _watch_modules(model: Any, modules: Mapping[str, Any], ids: Tensor) -> Routers | str:
    routers: dict[str, Router] = {}
    problems: list[str] = []

    def watch(name: str, forward: Any, *args: Any, **kwargs: Any) -> Any:
        module, kind = modules[name], _kind(modules[name])
        with _CountedTopK() as counted:
            output = forward(*args, **kwargs)
        if name in routers:
            problems.append(f"{kind} runs several times in a pass")
        if not counted.calls:
            problems.append(f"{kind} selects experts without a top-k")
            return output
        num_experts, top_k = counted.calls[-1]
        routers[name] = Router(
            name=name, module=module, num_experts=num_experts, top_k=top_k,
            num_topk=len(counted.calls), logits_index=_find_logits(output, num_experts),
        )  # fmt: skip
        return output

    patches = [
        Patch(m, "forward", partial(watch, name, m.forward), nests=True)
        for name, m in modules.items()
    ]
    with apply_patches(patches):
        model.base_model(input_ids=ids, use_cache=False)
    if problems:
        return problems[0]
    if len({router.top_k for router in routers.values()}) != 1:
        return "its layers select different numbers of experts"
    return Routers(list(routers.values()))


def _find_logits(output: Any, num_experts: int) -> int | None:
    for index, value in enumerate(output if isinstance(output, tuple) else ()):
        is_score = isinstance(value, Tensor) and value.is_floating_point()
        if is_score and value.shape[-1] == num_experts:
            return index
    return None


def _try_replay(model: Any, routers: Routers, ids: Tensor) -> Routers | str:
    with apply_patches(routers.patches()):

        def run(replayed_NLK: Tensor | None) -> tuple[Tensor, PassRouting]:
            with routers.record() as routing:
                routing.replayed_NLK = replayed_NLK
                hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
            return hidden, routing

        plain, routing = run(None)
        selected_NLK = routing.stack_selected()
        if len(selected_NLK) != ids.numel():
            return "its routers do not select once for each token"
        same, _ = run(selected_NLK)
        rounding = float((plain - same).norm())  # some kernels of a GPU add in any order
        if not rounding <= 1e-2 * float(plain.norm()):
            return "replaying its own experts changes what it computes"
        for layer, router in enumerate(routers.routers):
            if router.top_k < router.num_experts:
                other_NLK = selected_NLK.clone()
                other_NLK[:, layer] = _other_experts(selected_NLK[:, layer], router.num_experts)
                if not float((plain - run(other_NLK)[0]).norm()) > 4 * rounding:
                    return f"replaying other experts in {router.name} changes nothing"
    return routers


def _other_experts(selected_NK: Tensor, num_experts: int) -> Tensor:
    """As many, at least one of them not selected: those after the last, around the end."""
    is_selected_NE = torch.zeros(len(selected_NK), num_experts, device=selected_NK.device)
    is_selected_NE.scatter_(1, selected_NK, 1.0)
    return is_selected_NE.argsort(dim=-1, stable=True)[:, : selected_NK.shape[1]]
