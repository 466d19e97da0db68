"""[[losses]]: objectives, and the tokens they apply to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from courtside.losses.divergences import divergence_names, find_divergence
from courtside.recipe.base import RefusedValue, Section

_DIVERGENCES = f"{', '.join(divergence_names())}, or `module:attribute` for one of your own."


class FullSupport(Section):
    kind: Literal["full"]


class TopKSupport(Section):
    kind: Literal["top_k"]
    k: PositiveInt = 64
    of: Literal["teacher", "student", "joint"] = "teacher"
    """Whose k most likely tokens. `student` is right only near the teacher: overlap is logged."""
    form: Literal["tail", "stop_gradient", "renormalized", "naive"] = "tail"
    """tail: all other tokens of both as one class. naive has a wrong fixed point (mass · 1/e)."""


class SampledSupport(RefusedValue):
    kind: Literal["sampled"]

    @model_validator(mode="after")
    def _refuse(self) -> SampledSupport:
        raise ValueError(
            "differentiating log π(y) − log q(y) at the sampled token directly gives a gradient "
            "whose expectation is zero, whatever the teacher says. Use a loss of kind = "
            "'policy_gradient' with advantage = 'teacher_gap' for sampled tokens, or "
            "support = { kind = 'full' } or { kind = 'top_k' } here"
        )


class EntropyAware(Section):
    threshold: NonNegativeFloat
    """In nats: positions where the teacher's entropy is higher also get a forward KL."""
    weight: PositiveFloat = 1.0


class GapGate(Section):
    """A weight for each token by the teacher's gap: σ(±(log q − log μ) / temperature), at most 1,
    without gradient, and ½ where teacher and sampler agree."""

    kind: Literal["sigmoid"] = "sigmoid"
    temperature: PositiveFloat = 1.0
    """In nats: the smaller, the more it is a switch."""
    direction: Literal["endorsed", "rejected"] = "endorsed"
    """endorsed: tokens that the teacher finds likelier than the student count more, rejected ones
    less. rejected: the other way around."""


class LossBase(Section):
    weight: PositiveFloat = 1.0
    on: Literal[
        "student", "dataset", "teacher", "all", "chosen", "hinted_turns", "unhinted_turns"
    ] = "all"
    """Trajectories of which source it applies to; the better ones of preference pairs (`chosen`);
    or only turns with a hint, or only those without."""
    normalize: Literal["token", "turn", "sequence", "constant"] = "token"
    """What the loss is averaged over, in a step. token: every trained token counts the same. turn:
    every turn does, however long it is. sequence: every trajectory does. constant: the sum is
    divided by normalize_tokens for each trajectory, so a token weighs the same in every step."""
    normalize_tokens: PositiveInt | None = None
    """With normalize = 'constant', which needs it: tokens that a trajectory counts for, e.g.
    rollout.max_new_tokens."""
    route_weights: Literal["equal"] | Mapping[str, PositiveFloat] | None = None
    """With teacher.kind = 'routes': the tasks of each route are averaged on their own, and their
    means with these weights (the same for all, or a table by route), over the routes that a step
    has. Unset: one mean over all, in which a route counts by its tokens."""
    name: str | None = None
    """Its name in the metrics. Unset: its kind."""

    @property
    def needs_teacher(self) -> bool:
        """Whether it compares with a teacher."""
        return False

    @model_validator(mode="after")
    def _check_constant(self) -> LossBase:
        if (self.normalize == "constant") != (self.normalize_tokens is not None):
            raise ValueError(
                "normalize = 'constant' and normalize_tokens belong together: the tokens that each "
                "trajectory counts for, e.g. rollout.max_new_tokens"
            )
        return self


class DivergenceLoss(LossBase):
    kind: Literal["divergence"]
    divergence: str = Field(default="reverse_kl", description=_DIVERGENCES)
    beta: float | None = None
    """Of jsd: M = β·teacher + (1−β)·student. 0 and 1 are the forward and reverse KL."""
    alpha: float | None = None
    """Of the skewed forms: forward KL(q ‖ α·q + (1−α)·π), reverse KL(π ‖ α·π + (1−α)·q)."""
    parameters: Mapping[str, float] = {}
    """Of any other divergence: its parameters by name."""
    support: Annotated[FullSupport | TopKSupport | SampledSupport, Field(discriminator="kind")] = (
        FullSupport(kind="full")
    )
    against: Literal["teacher", "reference"] = "teacher"
    """reference: the student before training, to keep the student close to it."""
    clip: PositiveFloat | None = None
    """Cap on the term of one token at one position, so that single tokens do not dominate."""
    entropy_aware: EntropyAware | None = None
    extrapolate: PositiveFloat = 1.0
    """λ: the target is q^λ · ref^(1−λ), normalized; above 1 it extrapolates beyond the teacher."""
    contrast: PositiveFloat | None = None
    """γ, with hints.contrast: the target is q(·|hint) · (q(·|hint) / q(·|wrong hint))^γ,
    normalized, which strengthens what this hint says and another does not."""
    gate: GapGate | None = None
    """Weigh the student's sampled tokens by the teacher's gap. Unset: all count the same."""

    @model_validator(mode="after")
    def _parameters_belong(self) -> DivergenceLoss:
        if self.against == "reference" and self.extrapolate != 1.0:
            raise ValueError(
                "extrapolate goes from the reference through the teacher; use against "
                "= 'teacher' with it"
            )
        if self.against == "reference" and self.gate is not None:
            raise ValueError("gate is by the teacher's gap; use against = 'teacher' with it")
        if self.contrast is not None and (
            self.extrapolate != 1.0 or self.against == "reference" or self.support.kind == "top_k"
        ):
            raise ValueError(
                "contrast needs the teacher's whole distributions under two hints; use it with "
                "against = 'teacher' and support = { kind = 'full' }, and without extrapolate"
            )
        for name, value in (("beta", self.beta), ("alpha", self.alpha)):
            if value is not None and name in self.parameters:
                raise ValueError(f"{name} is set twice; remove it from `parameters`")
        if ":" not in self.divergence:  # One from outside is imported when the run starts.
            divergence = find_divergence(self.divergence)
            divergence.check_parameters(self.divergence_parameters)
            if self.support.kind == "top_k":
                divergence.check_form(self.support.form)
        if self.support.kind == "top_k" and (self.entropy_aware or self.extrapolate != 1.0):
            raise ValueError(
                "entropy_aware and extrapolate need the whole distribution; use "
                "support = { kind = 'full' }"
            )
        return self

    @property
    def needs_teacher(self) -> bool:
        return self.against == "teacher"

    @property
    def divergence_parameters(self) -> dict[str, float]:
        fields = {"beta": self.beta, "alpha": self.alpha}
        return {**{k: v for k, v in fields.items() if v is not None}, **self.parameters}


class PolicyGradientLoss(LossBase):
    kind: Literal["policy_gradient"]
    advantage: str = "teacher_gap"
    """teacher_gap: log q − log μ of each token. reward: the grade against the group's mean.
    hint_contrast: log q(·|hint) − log q(·|wrong hint), on hinted turns with hints.contrast.
    unlikely: −1 for tokens that the student itself found unlikely, 0 for others; a control without
    any teacher (arXiv 2608.31046)."""
    ratio: Literal["importance", "none"] = "importance"
    """importance: π/μ, so that samples of a slightly different policy give an unbiased gradient."""
    truncate: PositiveFloat | None = None
    """Largest importance ratio. Unset: no limit."""
    ratio_gate: tuple[PositiveFloat, PositiveFloat] | None = None
    """(low, high): a token whose importance ratio is outside trains nothing, e.g. (0.5, 5). Unset:
    all train."""
    clip: tuple[PositiveFloat, PositiveFloat] | None = None
    """(low, high): the clipped surrogate, which stops at ratios 1 − low and 1 + high. high > low is
    clip-higher."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """c, with clip: where the advantage A is negative, the surrogate is bounded by c·A. Unset: not
    bounded."""
    baseline: bool = False
    """Subtract −KL(π‖q) at each position (detached): the same expected gradient, with smaller
    advantages; less variance where the student's entropy is high."""
    extrapolate: PositiveFloat = 1.0
    """λ of log q^λ·ref^(1−λ) in place of log q."""
    group_baseline: Literal["mean", "leave_one_out"] = "mean"
    """With advantage = 'reward': what a reward is compared with. mean: that of all samples of the
    prompt. leave_one_out: the mean of the others."""
    scale_by_std: bool = False
    """Divide group-relative rewards by their standard deviation."""
    zero_variance_groups: Literal["count", "drop"] = "count"
    """With advantage = 'reward': prompts whose samples have equal rewards, which train nothing.
    count: the mean is also over their tokens. drop: it is over the other prompts' only, and no
    forward pass is spent on them."""
    turn_penalty: NonNegativeFloat = 0.0
    """With advantage = 'reward', in an environment: the penalty of a turn with an error, relative
    to the mean of its group's turns, in addition to the episode's reward."""
    penalized_events: Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    """With turn_penalty: the kinds of events that count as an error. Unset: all."""
    gate: GapGate | None = None
    """With advantage = 'teacher_gap': weigh tokens by that gap. Unset: all count the same."""
    unlikely_below: Annotated[float, Field(gt=0, lt=1)] | None = None
    """With advantage = 'unlikely', which needs it: the sampler's probability below which a token
    is pushed down, e.g. 0.1."""

    @property
    def needs_teacher(self) -> bool:
        return self.advantage in ("teacher_gap", "hint_contrast")

    @property
    def bounds_ratio(self) -> bool:
        """Whether samples of an older policy cannot weigh without a limit."""
        return any(bound is not None for bound in (self.truncate, self.ratio_gate, self.clip))

    @field_validator("advantage")
    @classmethod
    def _check_advantage(cls, value: str) -> str:
        if value in ("teacher_gap", "reward", "hint_contrast", "unlikely"):
            return value
        if "top_k" in value or "divergence" in value or "kl" in value:
            raise ValueError(
                f"{value!r}: a divergence summed over the vocabulary does not depend on the "
                "sampled token, so as an advantage its expected gradient is zero. Use a loss of "
                "kind = 'divergence' to push on whole distributions, or advantage = 'teacher_gap'"
            )
        raise ValueError(
            f"{value!r} is not known; use 'teacher_gap', 'reward', 'hint_contrast' or 'unlikely'"
        )

    @model_validator(mode="after")
    def _combinations(self) -> PolicyGradientLoss:
        if self.advantage != "teacher_gap" and (self.baseline or self.extrapolate != 1.0):
            raise ValueError("baseline and extrapolate belong to advantage = 'teacher_gap'")
        if self.advantage != "teacher_gap" and self.gate is not None:
            raise ValueError("gate is by the teacher's gap; use advantage = 'teacher_gap' with it")
        if self.advantage != "reward" and (self.scale_by_std or self.turn_penalty):
            raise ValueError("scale_by_std and turn_penalty belong to advantage = 'reward'")
        if self.advantage != "reward" and (
            self.group_baseline != "mean" or self.zero_variance_groups != "count"
        ):
            raise ValueError(
                "group_baseline and zero_variance_groups belong to advantage = 'reward'"
            )
        if (self.advantage == "unlikely") != (self.unlikely_below is not None):
            raise ValueError(
                "advantage = 'unlikely' and unlikely_below belong together: the probability below "
                "which a token is pushed down, e.g. 0.1"
            )
        if self.penalized_events is not None and not self.turn_penalty:
            raise ValueError("penalized_events belongs to turn_penalty; set that, too")
        bounds = {
            name: getattr(self, name)
            for name in ("truncate", "ratio_gate", "clip")
            if getattr(self, name) is not None
        }
        if self.ratio == "none" and bounds:
            raise ValueError(f"{next(iter(bounds))} acts on the ratio; use ratio = 'importance'")
        if len(bounds) > 1:
            raise ValueError(f"{' and '.join(bounds)} exclude each other: choose one")
        if self.ratio_gate is not None and not self.ratio_gate[0] < 1 < self.ratio_gate[1]:
            low, high = self.ratio_gate
            raise ValueError(
                f"ratio_gate = [{low:g}, {high:g}] leaves out the ratio 1, which tokens of an "
                "unchanged student have; use e.g. [0.5, 5]"
            )
        if self.dual_clip is not None and self.clip is None:
            raise ValueError("dual_clip bounds the clipped surrogate; set clip, too")
        return self


class CrossEntropyLoss(LossBase):
    kind: Literal["cross_entropy"]
    self_imitation: bool = False
    """With on = 'student': train on the student's own samples, as a control. The expected gradient
    is zero; what is left is noise that narrows the student down."""

    @model_validator(mode="after")
    def _check_source(self) -> CrossEntropyLoss:
        if self.self_imitation and self.on != "student":
            raise ValueError(
                f"self_imitation is of the student's own samples, and on = {self.on!r}; set on = "
                "'student', or remove it"
            )
        return self


class PreferenceLoss(LossBase):
    kind: Literal["preference"]
    beta: PositiveFloat = 0.1
    """Strength of the pull towards the reference."""
    form: Literal["sigmoid", "ipo"] = "sigmoid"
    """sigmoid: DPO, −log σ(β·margin). ipo: (margin − 1/(2β))², which does not push pairs that are
    won already any further. The margin is summed over tokens."""

    @model_validator(mode="after")
    def _check_normalize(self) -> PreferenceLoss:
        if self.normalize != "token":
            raise ValueError(
                f"normalize = {self.normalize!r}: preferences are averaged over pairs; remove it"
            )
        if self.route_weights is not None:
            raise ValueError("route_weights: preferences are averaged over pairs; remove it")
        return self


Loss = Annotated[
    DivergenceLoss | PolicyGradientLoss | CrossEntropyLoss | PreferenceLoss,
    Field(discriminator="kind"),
]
