"""Does this folder notice a wrong formula? Each mutation below must make some test fail.

    python tests/numerics/mutants.py [--jobs 2] [--only WORD]

Every mutation is applied to a copy of the package, the numerics tests run against the copy, and a
mutation that no test notices is a survivor. Exit status: 0 all noticed, 1 survivors, 2 the list or
the set-up is broken. Takes minutes, so pytest does not collect it; `test_mutation_list.py` checks
in milliseconds that the list still fits the source.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGE = REPOSITORY / "src" / "courtside"
TESTS_IN_ORDER = (
    # Values and gradients first: they are quick and notice most mutations.
    "test_preference_loss.py",
    "test_denominators.py",
    "test_policy_gradient_losses.py",
    "test_divergences.py",
    "test_top_k_divergences.py",
    "test_linear_divergence.py",
    "test_small_tails.py",
    "test_excluded_tokens.py",
    "test_estimators.py",
    "test_fixed_points.py",
    "test_token_weights.py",
    "test_training_head.py",
)
PASSED, FAILED = 0, 1
"""Exit statuses of pytest; any other means that the tests did not run."""


class Mutation(NamedTuple):
    file: str
    old: str
    """Occurs exactly once in the file."""
    new: str


MUTATION_LIST = """
divergences/kl_terms.py
- (logp_TV - other_logp_TV)
+ (other_logp_TV - logp_TV)
- (logp_TV - other_logp_TV).masked_fill(p_TV == 0, 0.0)
+ logp_TV - other_logp_TV
- .masked_fill(p_TV == 0, 0.0)
+ .masked_fill(logp_TV == -math.inf, 0.0)
- return p_TV * log_ratio_TV
+ return p_TV.detach() * log_ratio_TV
+ return p_TV * log_ratio_TV.detach()
- first_logp_TV + (math.log(share)
+ first_logp_TV + (math.log1p(-share)
- second_logp_TV + (math.log1p(-share)
+ second_logp_TV + (math.log(share)
- math.log(share) if share > 0 else -math.inf
+ 0.0
- math.log1p(-share) if share < 1 else -math.inf
+ 0.0
- return mixed_TV.masked_fill(excluded_TV, -math.inf)
+ return mixed_TV
- (first_TV == -math.inf) & (second_TV == -math.inf)
+ first_TV != first_TV

divergences/reverse_kl.py
- terms=kl_terms,
+ terms=lambda s, t: kl_terms(t, s),
- (student_logp_TK - teacher_logp_TK).detach()
+ (student_logp_TK - teacher_logp_TK)
+ (teacher_logp_TK - student_logp_TK).detach()
- return p_TK * (
+ return p_TK.detach() * (

divergences/forward_kl.py
- kl_terms(teacher_logp_TV, student_logp_TV)
+ kl_terms(student_logp_TV, teacher_logp_TV)
+ -teacher_logp_TV.exp() * student_logp_TV
+ kl_terms(teacher_logp_TV, student_logp_TV.detach())

divergences/jsd.py
- if beta == 0:
+ if beta == 2:
+ if beta == 1:
- if beta == 1:
+ if beta == 2:
- mixture_TV = log_mixture(teacher_logp_TV, student_logp_TV, beta)
+ mixture_TV = log_mixture(student_logp_TV, teacher_logp_TV, beta)
+ mixture_TV = log_mixture(teacher_logp_TV, student_logp_TV, beta).detach()
- beta * kl_terms(teacher_logp_TV, mixture_TV)
+ (1 - beta) * kl_terms(teacher_logp_TV, mixture_TV)
- (1 - beta) * kl_terms(student_logp_TV, mixture_TV)
+ beta * kl_terms(student_logp_TV, mixture_TV)
+ (1 - beta) * kl_terms(mixture_TV, student_logp_TV)
- from_teacher_TV + (1 - beta)
+ from_teacher_TV - (1 - beta)

divergences/skewed.py
- log_mixture(teacher_logp_TV, student_logp_TV, alpha)
+ log_mixture(student_logp_TV, teacher_logp_TV, alpha)
- log_mixture(student_logp_TV, teacher_logp_TV, alpha)
+ log_mixture(teacher_logp_TV, student_logp_TV, alpha)
+ log_mixture(student_logp_TV.detach(), teacher_logp_TV, alpha)
- terms=_forward_terms
+ terms=_reverse_terms

divergences/total_variation.py
- return 0.5 * (
+ return (
- .abs()
+ .clamp(min=0)

divergences/registry.py
- if not parameter.low <= values[name] <= parameter.high:
+ if not parameter.low <= values[name]:

full_vocabulary.py
- teacher_logp_TV = teacher_logp_TV.detach()
+ pass
- terms(student_logp_TV, teacher_logp_TV).sum(-1)
+ terms(student_logp_TV, teacher_logp_TV).mean(-1)
- teacher_logp_TV) > clip
+ teacher_logp_TV) < clip
- terms_TV.masked_fill(capped_TV, clip).sum(-1)
+ terms_TV.sum(-1)
- student_logp_TV.masked_fill(capped_TV, 0.0), teacher_logp_TV.masked_fill(capped_TV, 0.0)
+ student_logp_TV, teacher_logp_TV
- (torch.float32, torch.float64)
+ (torch.float32, torch.float64, torch.bfloat16)
- student_logp_TV, teacher_logp_TV, clip)
+ student_logp_TV, teacher_logp_TV, None)
- return -kl_terms(logp_TV, torch.zeros_like(logp_TV))
+ return kl_terms(logp_TV, torch.zeros_like(logp_TV))

top_k.py
- torch.cat([all_TK, ~shared_TK], dim=-1), overlap_T
+ torch.cat([all_TK, all_TK], dim=-1), overlap_T
+ torch.cat([all_TK, shared_TK], dim=-1), overlap_T
- teacher_ids_TK if of == "teacher" else
+ teacher_ids_TK if of == "student" else
- student_logp_TK = student_logp_TK.masked_fill(~keep_TK, -math.inf)
+ pass
- teacher_logp_TK = teacher_logp_TK.masked_fill(~keep_TK, -math.inf)
+ pass
- _append_tail(student_logp_TK, student_tail_T)
+ _append_tail(student_logp_TK, student_tail_T.detach())
- _append_tail(teacher_logp_TK, teacher_tail_T)
+ _append_tail(teacher_logp_TK, student_tail_T)
- _excludes_all(student_logp_TK) | _excludes_all(teacher_logp_TK)
+ _excludes_all(student_logp_TK)
+ _excludes_all(teacher_logp_TK)
- logp_TV.scatter(-1, ids_TK, -math.inf)
+ logp_TV
- tail_T.masked_fill(is_empty_T1.squeeze(-1), -math.inf)
+ tail_T
- if form == "tail":
+ if form == "tail" and name == "jsd":
- student_logp_TK.masked_fill(is_empty_T1, 0.0).log_softmax(-1)
+ student_logp_TK.masked_fill(is_empty_T1, 0.0)
- teacher_logp_TK.masked_fill(is_empty_T1, 0.0).log_softmax(-1)
+ teacher_logp_TK.masked_fill(is_empty_T1, 0.0)
- return sum_terms(terms, student_logp_TK, teacher_logp_TK, clip)
+ return sum_terms(terms, student_logp_TK, teacher_logp_TK, None)
- mass_T = 1 - logp_TK.exp().sum(-1)
+ mass_T = 1 - logp_TK.exp().amax(-1)
- 8 * torch.finfo(logp_TK.dtype).eps
+ 0.01
+ 0.0
- (mass_T + (mass_T.clamp(min=floor) - mass_T).detach()).log()
+ mass_T.clamp(min=floor).log()
- logp_TK.exp().masked_fill(~keep_TK, 0.0).sum(-1)
+ logp_TK.exp().sum(-1)
- shared_TK.double().mean(-1)
+ shared_TK.double().sum(-1)

policy_gradient.py
- target_T - sampler_logp_T
+ target_T + sampler_logp_T
+ sampler_logp_T - target_T
- lam * teacher_logp_T + (1 - lam)
+ lam * teacher_logp_T + (lam - 1)
+ teacher_logp_T + (1 - lam)
- advantage_T - baseline_T
+ advantage_T + baseline_T
- (hinted_logp_T - wrong_logp_T).detach()
+ (wrong_logp_T - hinted_logp_T).detach()
+ hinted_logp_T - wrong_logp_T
- (-weight * (sampler_logp_T - reference_logp_T)).detach()
+ (weight * (sampler_logp_T - reference_logp_T)).detach()
+ -weight * (sampler_logp_T - reference_logp_T)
- (teacher_logp_T - sampler_logp_T).detach()
+ (sampler_logp_T - teacher_logp_T).detach()
+ teacher_logp_T - sampler_logp_T
- (sign * gap_T / temperature).sigmoid()
+ (sign * gap_T * temperature).sigmoid()
- 1.0 if direction == "endorsed" else -1.0
+ 1.0
- -(sampler_logp_T < math.log(below))
+ (sampler_logp_T < math.log(below))
+ -(sampler_logp_T > math.log(below))
+ -(sampler_logp_T < below)
- return advantage_T.detach()
+ return advantage_T
- advantage_T = advantage_T.detach()
+ pass
- return -advantage_T * student_logp_T
+ return advantage_T * student_logp_T
- (student_logp_T - sampler_logp_T.detach())
+ (sampler_logp_T.detach() - student_logp_T)
- sampler_logp_T.detach()
+ sampler_logp_T
- clamp(1 - low, 1 + high)
+ clamp(1 - high, 1 + low)
- (weight_T >= low) & (weight_T <= high)
+ (weight_T > low) & (weight_T <= high)
+ (weight_T >= low) & (weight_T < high)
+ (weight_T >= low)
+ (weight_T <= high)
- torch.minimum(ratio_T
+ torch.maximum(ratio_T
- torch.maximum(surrogate_T, dual_clip * advantage_T)
+ torch.minimum(surrogate_T, dual_clip * advantage_T)
+ torch.maximum(surrogate_T, dual_clip + advantage_T)
- torch.where(advantage_T < 0, bounded_T, surrogate_T)
+ bounded_T
+ torch.where(advantage_T > 0, bounded_T, surrogate_T)
- ratio_gate=self.ratio_gate, clip=self.clip
+ clip=self.clip
+ ratio_gate=self.ratio_gate
- dual_clip=self.dual_clip
+ dual_clip=None
- len(rewards_M) / (len(rewards_M) - 1)
+ (len(rewards_M) - 1) / len(rewards_M)
- clipped_T * advantage_T)
+ ratio_T * advantage_T)
- -weight_T * advantage_T * student_logp_T
+ -advantage_T * student_logp_T
+ -weight_T * advantage_T
- ratio_T.detach().clamp(max=limit)
+ ratio_T.clamp(max=limit)
+ ratio_T.detach()
- rewards_M - rewards_M.mean()
+ rewards_M - rewards_N.mean()
- centered_M.square().mean().sqrt()
+ centered_M.std()
- bool((rewards_M == rewards_M[0]).all())
+ len(rewards_M) == 1
- if scale_by_std else 1.0
+ if not scale_by_std else 1.0
- rewards_N = rewards_N.detach()
+ pass
- return torch.where(on_N, values_N, 0.0)
+ return values_N
- advantage_N + mask(reverse_kl_N)
+ advantage_N - mask(reverse_kl_N)
- (loss.weight_N * loss.per_token(leaf_N, reverse_kl_N)).sum()
+ loss.per_token(leaf_N, reverse_kl_N).sum()
- weight_N=self.weight_N[rows],
+ weight_N=self.weight_N[: rows.stop - rows.start],

preference.py
- (margin_N - 1 / (2 * beta)).square()
+ (margin_N - 1 / beta).square()
+ (margin_N + 1 / (2 * beta)).square()
+ (margin_N - 1 / (2 * beta)).abs()
- (1 / beta - 2 * margin_N).detach()
+ (1 / beta - margin_N).detach()
+ (2 * margin_N - 1 / beta).detach()
+ (1 / beta - 2 * margin_N)
- -logsigmoid(beta * margin_N)
+ -logsigmoid(-beta * margin_N)
+ -logsigmoid(margin_N)
- (-beta * margin_N).sigmoid()
+ (beta * margin_N).sigmoid()
- (beta * (-beta * margin_N)
+ ((-beta * margin_N)
- sigmoid()).detach()
+ sigmoid())
- reference_better_N.detach()) - (worse_N
+ reference_better_N.detach()) + (worse_N
- better_N - reference_better_N.detach()
+ better_N
- worse_N - reference_worse_N.detach()
+ worse_N - reference_worse_N

../training/metrics.py
- (value_N * weight_N).sum() / term.denominator
+ value_N.sum() / term.denominator
+ (value_N * weight_N).mean()
+ (value_N * weight_N).sum() / value_N.numel()
+ (value_N * weight_N).sum() / weight_N.sum()
+ (value_N * weight_N).sum() * term.denominator

../training/head.py
- * (loss.weight / term.denominator)
+ / max(1, len(batch))
+ * (loss.weight * term.denominator)

- lam=1 + contrast
+ lam=contrast
+ lam=1 - contrast

../training/token_batch.py
- torch.where(weight_N > 0, weight_N * gate_N, 0.0)
+ weight_N
+ weight_N * gate_N
- hint_contrast(self.teacher_logp_N, self.wrong_logp_N)
+ hint_contrast(self.wrong_logp_N, self.teacher_logp_N)
- weight_N = self.weight_CN[term.name] * (loss.weight / term.denominator)
+ weight_N = self.weight_CN[term.name] / max(1, len(self))
+ weight_N = torch.full_like(self.weight_CN[term.name], loss.weight / term.denominator)

../training/loss_terms.py
- assert self.denominator > 0
+ assert self.denominator >= 0
- loss.normalize_tokens * len(on)
+ loss.normalize_tokens
- 1 / sizes[unit] if trained
+ 1 / len(mask) if trained
- importance[route] / sum(importance.values()) * denominator / size
+ importance[route] * denominator / size
+ importance[route] / sum(importance.values())
- if s.trajectory.id not in compared.zero_variance
+ if s.trajectory.id in compared.zero_variance

fused/types.py
- else (shares[1], shares[0])
+ else shares
- self.support is not None or self.clip is not None
+ self.support is not None
- "forward_kl" if share == 0 else "reverse_kl"
+ "reverse_kl" if share == 0 else "forward_kl"
- "teacher": slice(0, k)
+ "teacher": slice(1, k + 1)
- slice(self.num_teacher, self.num_teacher + k)
+ slice(0, k)

fused/torch_backend.py
- reverse_kl_N=negative_N - block.dot(block.p_NV, block.logq_NV),
+ reverse_kl_N=block.dot(block.p_NV, block.logq_NV) - negative_N,
- teacher_entropy_N=-block.dot(block.q_NV, block.logq_NV),
+ teacher_entropy_N=-block.dot(block.p_NV, block.logq_NV),
- block.logp_NV[off_N] = block.p_NV[off_N] * -pull_N[off_N, None]
+ pass
- -(pull_N + gradient_NV.sum(-1))[:, None]
+ -pull_N[:, None]
- block.logp_NV.add_(gradient_NV)
+ pass
- inside_N = gradient.sum() + pull_N
+ inside_N = pull_N
- block.logp_NV.scatter_(-1, ids, half_NK)
+ pass
- mass_N < SMALLEST_SUM
+ mass_N < 0
- p_NV.scatter_(-1, ids_NK, p_NK)
+ pass
- .add_(exponent_N[scaled_N, None]).exp_()
+ .exp_()
- self.logp_NV.masked_fill_(self.p_NV == 0, 0.0)  # 0 · −inf is NaN
+ pass
- self.logp_NV.masked_fill_(excluded_NV, EXCLUDED)
+ pass
- factor_N = student.scale / temperature_N
+ factor_N = torch.ones_like(temperature_N)
- slope_NV = 1 - tanh_NV.square()
+ slope_NV = torch.ones_like(tanh_NV)
- -pull_N[:, None], out=block.logp_NV)
+ pull_N[:, None], out=block.logp_NV)
- -plain_N[:, None], out=block.logp_NV)
+ plain_N[:, None], out=block.logp_NV)
- logq_NV = torch.where((weight_N != 0)[:, None], logq_NV, logp_NV)
+ pass
- target.select(support.k, support.of)[1].to
+ target.select(support.k, "teacher")[1].to
- logq_NK.masked_fill(~keep_NK, -math.inf)
+ logq_NK
- block.logp_NV.sub_(block.logq_NV)
+ block.logp_NV.add_(block.logq_NV)
- value_N = -statistics.teacher_entropy_N - block.dot(block.q_NV, block.logp_NV)
+ value_N = -block.dot(block.q_NV, block.logp_NV)
- (weight_N - pull_N)[:, None], out=block.logp_NV)
+ (weight_N + pull_N)[:, None], out=block.logp_NV)
- block.logp_NV.addcmul_(block.q_NV, -weight_N[:, None])
+ block.logp_NV.addcmul_(block.q_NV, weight_N[:, None])
- value_N = block.dot(block.p_NV, logp_NV) - student_share
+ value_N = block.dot(block.p_NV, logp_NV)
- logp_NV.sub_(torch.exp(logp_NV, out=block.scratch_NV))
+ pass
- pull_N = pull_N - weight_N * pulled_NV.sum(-1)
+ pass
- pulled_NV.mul_(-weight_N[:, None])
+ pulled_NV.mul_(weight_N[:, None])
- block.set_centered(weight_N * (1 - beta), center_N, pull_N)
+ block.set_centered(weight_N * beta, center_N, pull_N)
+ block.set_centered(weight_N, center_N, pull_N)
- return beta * from_teacher_N + (1 - beta) * (center_N - student_share)
+ return (1 - beta) * from_teacher_N + beta * (center_N - student_share)
- sub_((weight_N * center_N + pull_N)[:, None])
+ sub_(pull_N[:, None])
+ sub_((weight_N * center_N - pull_N)[:, None])

fused/support_gradient.py
- return self.h_NK.sum(-1) + self.h_tail_N
+ return self.h_NK.sum(-1)
- (log_ratio_N - exponent_N).exp()
+ log_ratio_N.exp()
- * (-exponent_N).exp() - ratio_N
+ - ratio_N
+ * (-exponent_N).exp() + ratio_N
- .abs().log() - self.tail_N
+ .abs().log()
- h_tail_N = tails[0].exp() * (tails[0] - tails[1])
+ h_tail_N = tails[0].exp() * (tails[1] - tails[0])
- h_NK.sum(-1) + h_tail_N, h_NK, h_tail_N
+ h_NK.sum(-1), h_NK, h_tail_N
- torch.where(on_N[:, None], logq_NK, logp_NK)
+ logq_NK
- torch.log1p(-mass_N), fill_empty_tails(tail_N))
+ fill_empty_tails(tail_N), fill_empty_tails(tail_N))

fused/linear_divergence.py
- vocab_size = min(len(side.weight_VD) for side in (student, *_projections(target)))
+ vocab_size = len(student.weight_VD)
- mixed_NV = lam * teacher_NV + (1 - lam) * reference_NV
+ mixed_NV = lam * teacher_NV + (lam - 1) * reference_NV
+ mixed_NV = (1 - lam) * teacher_NV + lam * reference_NV
- _multiply(gradient_VC, self._operand(rows), weight_VD, add=True)
+ pass
+ _multiply(gradient_VC, self._operand(rows), weight_VD, add=False)
- bias_V.add_(gradient_CV.sum(0, dtype=bias_V.dtype))
+ pass
- self.low_NR = torch.mm(self._operand(slice(None)), low.down_RD.t()) * low.scale
+ self.low_NR = torch.mm(self._operand(slice(None)), low.down_RD.t())
- _multiply(gradient_VC, self.low_NR[rows], up_VR, add=True)
+ pass
+ _multiply(gradient_VC, self.low_NR[rows], up_VR, add=False)
- gradient_NR = (self.low_gradient_NR * low.scale).to(low.down_RD.dtype)
+ gradient_NR = self.low_gradient_NR.to(low.down_RD.dtype)
- _multiply(gradient_NR, low.down_RD, gradient_ND, add=True)
+ pass
- _multiply(gradient_NR.t(), hidden_ND, head_gradient.down_RD, add=True)
+ pass
"""
"""A file, from `losses`; then as in a diff: a text that occurs exactly once, and what replaces it.
Each `+` is a mutation of its own."""


def _read(text: str) -> Iterator[Mutation]:
    file = old = ""
    for line in filter(None, text.splitlines()):
        mark, text = line[:2], line[2:]
        if mark == "+ ":
            yield Mutation(file, old, text)
        elif mark == "- ":
            old = text
        else:
            file = line


MUTATIONS = tuple(_read(MUTATION_LIST))


def mutated(source: str, mutation: Mutation) -> str:
    count = source.count(mutation.old)
    if count != 1:
        raise ValueError(f"{mutation.file}: {mutation.old!r} occurs {count} times, not once")
    return source.replace(mutation.old, mutation.new)


def run_tests(mutation: Mutation | None) -> tuple[int, str]:
    """(exit status of pytest, its output) against a copy of the package with that mutation."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        copy = Path(folder) / "courtside"
        shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
        if mutation is not None:
            path = copy / "losses" / mutation.file
            path.write_text(mutated(path.read_text("utf-8"), mutation), "utf-8")
        # An empty configuration: the repository's may put its own src in front of the copy.
        configuration = Path(folder) / "pytest.ini"
        configuration.write_text("[pytest]\n", "utf-8")
        tests = [str(Path(__file__).parent / name) for name in TESTS_IN_ORDER]
        command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", "-p", "no:cacheprovider",
                   "-c", str(configuration), "--rootdir", str(REPOSITORY), *tests]  # fmt: skip
        environment = os.environ | {
            "PYTHONPATH": folder,
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
            "COURTSIDE_LOSSES_UNDER_TEST": str(copy / "losses"),
        }
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300
        )
    return done.returncode, done.stdout + done.stderr


def main() -> int:
    parser = argparse.ArgumentParser(description="Do the numerics tests notice wrong formulas?")
    parser.add_argument("--jobs", type=int, choices=(1, 2), default=2)
    parser.add_argument("--only", default="", help="mutations whose file or text has this in it")
    arguments = parser.parse_args()
    chosen = [m for m in MUTATIONS if any(arguments.only in part for part in m)]
    started = time.monotonic()
    status, output = run_tests(None)
    if status != PASSED:
        print(f"the tests do not pass without a mutation (status {status}):\n{output}")
        return 2
    survivors, broken = [], []
    with ThreadPoolExecutor(arguments.jobs) as pool:
        results = zip(chosen, pool.map(run_tests, chosen), strict=True)
        for number, (mutation, (status, output)) in enumerate(results, start=1):
            verdict = {PASSED: "SURVIVED", FAILED: "noticed"}.get(status, f"BROKEN ({status})")
            change = f"{mutation.old}  →  {mutation.new}"
            print(f"{number}/{len(chosen)} {verdict}: {mutation.file}: {change}", flush=True)
            if status == PASSED:
                survivors.append(mutation)
            elif status != FAILED:
                broken.append(mutation)
                print(output)
    seconds = time.monotonic() - started
    counts = f"{len(survivors)} survivors, {len(broken)} broken"
    print(f"{len(chosen)} mutations, {counts}, {seconds:.0f} s")
    return 2 if broken else int(bool(survivors))


if __name__ == "__main__":
    sys.exit(main())
