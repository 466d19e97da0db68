"""One optimiser step from scored trajectories, whatever the losses are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from courtside.config import Recipe
from courtside.engines.base import Head
from courtside.engines.batching import batches_by_length, pad_right
from courtside.errors import NotFiniteError, RunError
from courtside.losses.preference import dpo, dpo_token_weights
from courtside.seeds import seed_for
from courtside.student.components import Component, components
from courtside.student.head import backward_through_head, chunk_size
from courtside.student.optimiser import learning_rate_at, make_optimiser
from courtside.student.rows import Rows, rows_of
from courtside.student.tally import Tally
from courtside.student.weights import StudentWeights
from courtside.types import Scored, Update


class Student:
    def __init__(self, weights: StudentWeights, head: Head, recipe: Recipe, *, pad_id: int):
        self.weights = weights
        self.head = head
        self.recipe = recipe
        self.pad_id = pad_id
        self.optimiser = make_optimiser(weights.trained(), recipe)
        self.chunk = recipe.train.chunk_tokens or chunk_size(head.num_words, weights.device)

    def step(self, step: int, scored: Sequence[Scored]) -> Update:
        """Forward, backward and update over all of `scored`, in micro-batches that do not matter."""
        parts = components(self.recipe.losses, self.recipe.loss_names(), scored)
        if not any(part.denominator for part in parts):
            raise RunError(
                f"step {step}: no trajectory has anything to train on (of {len(scored)}, "
                f"{sum(s.target is None for s in scored)} have no teacher). An empty batch is not a "
                "zero loss. Look at the tasks, the teacher's context and each loss's `on`"
            )
        rate = learning_rate_at(step, self.recipe)
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        tally = Tally()
        student_logp = self.accumulate(step, scored, parts, tally)
        norm = self._clip(step, tally)
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        values = {p.name: tally.values.get(p.name, float("nan")) for p in parts}
        weights = {p.name: p.loss.weight for p in parts}
        return Update(
            step=step,
            loss=sum(weights[name] * value for name, value in values.items() if value == value),
            components=values,
            metrics={**tally.metrics(), "grad_norm": norm, "learning_rate": rate},
            num_tokens={p.name: p.denominator for p in parts},
            student_logp=student_logp,
        )

    def accumulate(
        self, step: int, scored: Sequence[Scored], parts: Sequence[Component], tally: Tally
    ) -> dict[str, tuple[float, ...]]:
        """Add this step's gradients to the weights; returns the student's log-probs by id."""
        student_logp: dict[str, tuple[float, ...]] = {}
        self.weights.model.train()
        try:
            with torch.random.fork_rng(devices=_devices(self.weights.device)):
                # Dropout, the only random thing here, follows from the step as everything does.
                torch.manual_seed(seed_for(self.recipe.seed, "dropout", step))
                for micro in self._micro_batches(scored):
                    student_logp.update(self._micro_batch(micro, parts, tally))
        finally:
            self.weights.model.eval()
        return student_logp

    def _micro_batches(self, scored: Sequence[Scored]) -> list[list[Scored]]:
        """Of similar length; the two members of a preference pair stay together."""
        units: dict[str, list[Scored]] = {}
        for s in scored:
            paired = s.trajectory.preference is not None
            units.setdefault(s.trajectory.task.id if paired else s.trajectory.id, []).append(s)
        groups = list(units.values())
        lengths = [len(unit) * max(len(s.trajectory.token_ids) for s in unit) for unit in groups]
        return [
            # One teacher after the other, so that each teacher's rows lie together.
            sorted((s for i in batch for s in groups[i]), key=_head_order)
            for batch in batches_by_length(lengths, self.recipe.train.micro_batch_tokens)
        ]

    def _micro_batch(
        self, micro: Sequence[Scored], parts: Sequence[Component], tally: Tally
    ) -> dict[str, tuple[float, ...]]:
        autocast = self.weights.autocast
        with torch.autocast(
            self.weights.device.type, dtype=autocast or torch.bfloat16, enabled=autocast is not None
        ):
            hidden_ND = self._hidden(micro)
            gradients, logps, start = [], [], 0
            for group in _by_head(micro):
                end = start + sum(s.trajectory.num_chosen for s in group)
                rows = rows_of(group, parts, hidden_ND[start:end])
                for part in parts:
                    if part.loss.kind == "preference" and part.on:
                        rows = self._with_preferences(rows, group, part, tally)
                gradient_ND, logp_N = backward_through_head(
                    rows, self.head, parts, chunk=self.chunk, tally=tally
                )
                gradients.append(gradient_ND)
                logps.append(logp_N)
                start = end
            hidden_ND.backward(torch.cat(gradients))
        counts = [s.trajectory.num_chosen for s in micro]
        by_trajectory = torch.cat(logps).float().cpu().split(counts)
        return {
            s.trajectory.id: tuple(part.tolist())
            for s, part in zip(micro, by_trajectory, strict=True)
        }

    def _hidden(self, micro: Sequence[Scored]) -> Tensor:
        """Hidden states that predict the chosen tokens, in order, with their graph."""
        ids_BL = pad_right(
            [s.trajectory.token_ids for s in micro], self.pad_id, self.weights.device
        )
        out = self.weights.model.base_model(input_ids=ids_BL, use_cache=False)
        rows, before = [], []
        for row, s in enumerate(micro):
            for position, chosen in enumerate(s.trajectory.chosen):
                if chosen:
                    rows.append(row)
                    before.append(position - 1)
        assert min(before, default=0) >= 0, "nothing predicts the first token"
        hidden: Tensor = out.last_hidden_state[rows, before]
        return hidden

    @torch.no_grad()
    def _with_preferences(
        self, rows: Rows, group: Sequence[Scored], part: Component, tally: Tally
    ) -> Rows:
        """DPO as a stream of per-token coefficients: its gradient, without a graph across chunks."""
        logps = [
            (self.head(r.hidden_ND.detach()) / r.temperature_N[:, None])
            .log_softmax(-1)
            .gather(-1, r.ids_N[:, None])
            .squeeze(-1)
            for r in rows.split(self.chunk)
        ]
        counts = [s.trajectory.num_chosen for s in group]
        sums = [float(x.double().sum()) for x in torch.cat(logps).split(counts)]
        pairs: dict[str, dict[str, tuple[float, float]]] = {}
        for s, total in zip(group, sums, strict=True):
            if s.trajectory.id in part.on:
                assert s.reference is not None
                reference = float(s.reference.logp_T.double().sum())
                side = str(s.trajectory.preference)
                pairs.setdefault(s.trajectory.task.id, {})[side] = (total, reference)
        assert part.loss.kind == "preference"
        coefficient: dict[str, float] = {}
        for task_id, sides in pairs.items():
            (better, reference_better), (worse, reference_worse) = sides["better"], sides["worse"]
            numbers = [
                torch.tensor([x], dtype=torch.float64)
                for x in (better, worse, reference_better, reference_worse)
            ]
            coefficient[task_id] = float(dpo_token_weights(*numbers, beta=part.loss.beta))
            tally.value(part.name, dpo(*numbers, beta=part.loss.beta) / part.denominator)
            won = numbers[0] - numbers[2] > numbers[1] - numbers[3]
            tally.mean(f"{part.name}/accuracy", won.double())
        stream: list[float] = []
        for s, count in zip(group, counts, strict=True):
            sign = {"better": -1.0, "worse": 1.0}.get(str(s.trajectory.preference), 0.0)
            stream += [sign * coefficient.get(s.trajectory.task.id, 0.0)] * count
        values = torch.tensor(stream, dtype=torch.float32, device=rows.ids_N.device)
        return replace(rows, advantage_CN={**rows.advantage_CN, part.name: values})

    def _clip(self, step: int, tally: Tally) -> float:
        norm = float(
            torch.nn.utils.clip_grad_norm_(
                self.weights.trained().values(), self.recipe.train.clip_norm
            )
        )
        bad = [name for name, value in tally.values.items() if not math.isfinite(value)]
        if bad or not math.isfinite(norm):
            self.optimiser.zero_grad(set_to_none=True)
            what = f"loss {bad[0]!r}" if bad else "gradient"
            raise NotFiniteError(f"step {step}: the {what} is not finite; no weight was changed")
        return norm


def _head_order(s: Scored) -> int:
    return 0 if s.target is None or s.target.head is None else id(s.target.head)


def _by_head(micro: Sequence[Scored]) -> list[list[Scored]]:
    groups: list[list[Scored]] = []
    for s in micro:
        if groups and _head_order(groups[-1][-1]) == _head_order(s):
            groups[-1].append(s)
        else:
            groups.append([s])
    return groups


def _devices(device: torch.device) -> list[torch.device]:
    return [device] if device.type == "cuda" else []
