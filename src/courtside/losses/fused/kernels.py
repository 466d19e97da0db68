# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""The pass over the vocabulary as a Triton kernel: one program per row, no temporary in memory.

First sweep: running softmax statistics of both rows at once. Second sweep: the gradient, stored
over the student's logits. Mixtures need a sweep between the two, for sums over normalized
probabilities. The formulas are those of `torch_backend`.

A row is cut into tiles [LANES, WIDTH] of neighboring tokens. WIDTH logits are what one thread loads
at once, so maxima and sums along WIDTH stay in its registers; each lane has running sums of its
own, which are combined once, at the end of the row. Each sweep starts where the one before ended:
what it loaded last is still in the cache.

Rows may start past 2^31 elements. The vocabulary size is compiled in, so that only the last tile
has a mask.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-1.0e15)
"""Where running maxima start: below any logit, and finite, so that no difference is NaN."""
PADDING = tl.constexpr(-1.0e18)
"""Instead of a logit past the end of a row: its exponential is 0 against any maximum."""

NONE = tl.constexpr(0)
REVERSE = tl.constexpr(1)
FORWARD = tl.constexpr(2)
JSD = tl.constexpr(3)
SKEW_FORWARD = tl.constexpr(4)
SKEW_REVERSE = tl.constexpr(5)
FORMS = {
    "reverse_kl": REVERSE,
    "forward_kl": FORWARD,
    "jsd": JSD,
    "skew_forward_kl": SKEW_FORWARD,
    "skew_reverse_kl": SKEW_REVERSE,
}
OUTPUTS = (
    "shift", "top", "log_total", "teacher_shift", "teacher_top", "teacher_log_total", "center",
    "student_logp", "teacher_logp", "student_entropy", "teacher_entropy", "reverse_kl", "value",
    "tail", "teacher_tail", "exponent",
)  # fmt: skip
"""Per row: shift + top + log_total·ln 2 is the row's log-sum-exp. The last three belong to top-k
supports: log-probs of all tokens outside S, and what the gradient there is multiplied with, as a
power of 2."""
PER_ROW = ["ids", "temperatures", "weights", "coefficients", "outputs"]
"""Slices with any alignment: one compiled kernel for all of them."""


@triton.jit
def load_logits(row, at, VOCAB_SIZE: tl.constexpr, MASKED: tl.constexpr):
    """The raw logits of the tokens `at`."""
    if MASKED:
        raw = tl.load(row + at, mask=at < VOCAB_SIZE, other=-float("inf"))
    else:
        raw = tl.load(row + at)
    return raw.to(tl.float32)


@triton.jit
def over_temperature(raw, shift, scale, cap, temperature, CAPPED: tl.constexpr):
    """Logits over temperature, less `shift`."""
    if CAPPED:  # cap·tanh(z / cap)
        tanh = 1.0 - 2.0 / (tl.exp2(raw * (2.0 * LOG2E * scale / cap)) + 1.0)
        return tanh * (cap / temperature) - shift
    else:
        return raw * (scale / temperature) - shift


@triton.jit
def _tile(row, at, shift, scale, cap, temperature, VOCAB_SIZE: tl.constexpr, MASKED: tl.constexpr,
          CAPPED: tl.constexpr):  # fmt: skip
    raw = load_logits(row, at, VOCAB_SIZE, MASKED)
    return _scaled(raw, at, shift, scale, cap, temperature, VOCAB_SIZE, MASKED, CAPPED)


@triton.jit
def _scaled(raw, at, shift, scale, cap, temperature, VOCAB_SIZE: tl.constexpr, MASKED: tl.constexpr,
            CAPPED: tl.constexpr):  # fmt: skip
    x = over_temperature(raw, shift, scale, cap, temperature, CAPPED)
    if MASKED:
        x = tl.where(at < VOCAB_SIZE, x, PADDING)
    return x


@triton.jit
def _finite(x):
    """0 in place of −inf."""
    return tl.where(x == -float("inf"), 0.0, x)


@triton.jit
def _gap(p, x, y):
    """x − y, and 0 where p is 0, whatever x and y are."""
    return tl.where(p == 0, 0.0, x - y)


@triton.jit
def _log2_1p(t):
    """log2(1 + t) for t in [0, 1], off by 1.6e-7 at most: nine steps, where log2 has twenty, and
    mixtures are bound by it."""
    polynomial = t * 0.0077675217762589455 - 0.043440788984298706
    polynomial = polynomial * t + 0.1142766997218132
    polynomial = polynomial * t - 0.1983216404914856
    polynomial = polynomial * t + 0.27620553970336914
    polynomial = polynomial * t - 0.3585521876811981
    polynomial = polynomial * t + 0.4807109534740448
    polynomial = polynomial * t - 0.721341073513031
    polynomial = polynomial * t + 1.4426950216293335
    return polynomial * t


@triton.jit
def _mixed(first, second):
    """2^first, 2^second, and log2 of the share that each has of their sum."""
    gap = first - second
    less = tl.exp2(-tl.abs(gap))
    more = tl.exp2(tl.maximum(first, second))
    log_sum_tail = _log2_1p(less)
    less = more * less
    ahead = gap > 0
    return (
        tl.where(ahead, more, less),
        tl.where(ahead, less, more),
        tl.minimum(gap, 0.0) - log_sum_tail,
        tl.minimum(-gap, 0.0) - log_sum_tail,
    )


@triton.jit
def _mixture_sums(
    row, teacher_row, shift, teacher_shift, norm, teacher_norm, temperature, student_scale,
    teacher_scale, student_cap, teacher_cap, student_share, teacher_share, FORM: tl.constexpr,
    STUDENT_CAPPED: tl.constexpr, TEACHER_CAPPED: tl.constexpr, VOCAB_SIZE: tl.constexpr,
    LANES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """(sum that the gradient is centered on, sum of the value); x and y less their norms are log2 π
    and log2 q."""
    offsets = tl.arange(0, LANES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    BLOCK: tl.constexpr = LANES * WIDTH
    TILES: tl.constexpr = VOCAB_SIZE // BLOCK
    for_center = tl.zeros([LANES, WIDTH], tl.float32)
    for_value = tl.zeros([LANES, WIDTH], tl.float32)
    for WHOLE in tl.static_range(2):
        for tile in range(0, TILES if WHOLE else 1):
            at = (TILES - WHOLE - tile) * BLOCK + offsets
            x = _tile(row, at, shift, student_scale, student_cap, temperature,
                      VOCAB_SIZE, not WHOLE, STUDENT_CAPPED)  # fmt: skip
            y = _tile(teacher_row, at, teacher_shift, teacher_scale, teacher_cap, temperature,
                      VOCAB_SIZE, not WHOLE, TEACHER_CAPPED)  # fmt: skip
            x, y = tl.maximum(x, PADDING), tl.maximum(y, PADDING)
            p, q, p_part, q_part = _mixed(
                x * LOG2E - (norm - student_share), y * LOG2E - (teacher_norm - teacher_share)
            )
            if FORM == JSD:
                for_center += p * p_part
                for_value += q * q_part
            if FORM == SKEW_FORWARD:
                for_center += q * tl.exp2(p_part)
                for_value += q * q_part
            if FORM == SKEW_REVERSE:
                for_center += p * (p_part * LN2 - tl.exp2(p_part))
                for_value += p * p_part
    # The sums have the shares of the mixture in them.
    center, value = tl.sum(for_center), tl.sum(for_value)
    center *= tl.exp2(-(teacher_share if FORM == SKEW_FORWARD else student_share))
    value *= tl.exp2(-(student_share if FORM == SKEW_REVERSE else teacher_share))
    return center, value


@triton.jit
def _write_gradient(
    row, teacher_row, token, weight, trains, at_token, pull, shift, teacher_shift, norm,
    teacher_norm, temperature, student_scale, teacher_scale, student_cap, teacher_cap,
    student_share, teacher_share, FORM: tl.constexpr, STUDENT_CAPPED: tl.constexpr,
    TEACHER_CAPPED: tl.constexpr, VOCAB_SIZE: tl.constexpr, LANES: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """weight·g − pull·π, and `at_token` more at the sampled token, over the student's logits."""
    offsets = tl.arange(0, LANES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    BLOCK: tl.constexpr = LANES * WIDTH
    TILES: tl.constexpr = VOCAB_SIZE // BLOCK
    # Mixtures have come back to the start of the row; the others start with its last tile.
    FORWARDS: tl.constexpr = FORM >= JSD
    if FORM >= JSD:
        weight *= tl.exp2(-(teacher_share if FORM == SKEW_FORWARD else student_share))
        pull *= tl.exp2(-student_share)
    for phase in tl.static_range(2):
        for tile in range(0, 1 if phase == FORWARDS else TILES):
            if phase == FORWARDS:
                at = TILES * BLOCK + offsets
            elif FORWARDS:
                at = tile * BLOCK + offsets
            else:
                at = (TILES - 1 - tile) * BLOCK + offsets
            x = _tile(row, at, shift, student_scale, student_cap, temperature,
                      VOCAB_SIZE, phase == FORWARDS, STUDENT_CAPPED)  # fmt: skip
            if FORM == NONE:
                g = -pull * tl.exp2(x * LOG2E - norm)
            else:
                y = _tile(teacher_row, at, teacher_shift, teacher_scale, teacher_cap, temperature,
                          VOCAB_SIZE, phase == FORWARDS, TEACHER_CAPPED)  # fmt: skip
                y = tl.where(trains, y, x)
                if FORM == REVERSE:
                    p = tl.exp2(x * LOG2E - norm)
                    g = p * (weight * _gap(p, x, y) - pull)
                elif FORM == FORWARD:
                    p = tl.exp2(x * LOG2E - norm)
                    g = -pull * p - weight * tl.exp2(y * LOG2E - teacher_norm)
                else:  # p and q have their shares in them, weight and pull the inverse
                    x, y = tl.maximum(x, PADDING), tl.maximum(y, PADDING)
                    p, q, p_part, _ = _mixed(
                        x * LOG2E - (norm - student_share),
                        y * LOG2E - (teacher_norm - teacher_share),
                    )
                    if FORM == JSD:
                        g = p * (weight * LN2 * p_part - pull)
                    elif FORM == SKEW_REVERSE:
                        g = p * (weight * (p_part * LN2 - tl.exp2(p_part)) - pull)
                    else:
                        g = -pull * p - weight * q * tl.exp2(p_part)
            g = tl.where(at == token, g + at_token, g)
            if STUDENT_CAPPED:
                tanh = (x + shift) * (temperature / student_cap)
                g = g * (1.0 - tanh * tanh)
            if phase == FORWARDS:
                tl.store(row + at, g.to(row.dtype.element_ty), mask=at < VOCAB_SIZE)
            else:
                tl.store(row + at, g.to(row.dtype.element_ty))


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=PER_ROW)
def vocabulary_kernel(
    student, teacher, ids, temperatures, weights, coefficients, outputs, maxima, teacher_maxima,
    student_stride, teacher_stride, num_rows,
    student_scale, teacher_scale, student_cap, teacher_cap,
    student_share, teacher_share, beta,
    FORM: tl.constexpr, TEACHER: tl.constexpr, STATISTICS: tl.constexpr, GRADIENT: tl.constexpr,
    GROUP_MAXIMA: tl.constexpr, STUDENT_CAPPED: tl.constexpr, TEACHER_CAPPED: tl.constexpr,
    VOCAB_SIZE: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One row. `outputs` [16, rows] is `OUTPUTS`; shares of a mixture are in log2; `weights` of the
    form NONE are the pull on tokens outside a support. GROUP_MAXIMA: store the largest of each
    WIDTH logits, too, for `topk_kernels`.

    A logit may be −inf: a token that its side excludes. It has a finite logit where it only adds 0,
    and −inf where the value may be infinite."""
    n = tl.program_id(0)
    row = student + n.to(tl.int64) * student_stride
    teacher_row = teacher + n.to(tl.int64) * teacher_stride
    out = outputs + n
    temperature = tl.load(temperatures + n)
    weight = tl.load(weights + n)
    token = tl.load(ids + n).to(tl.int32)
    offsets = tl.arange(0, LANES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    BLOCK: tl.constexpr = LANES * WIDTH
    # Tokens in tiles without a mask; only the last tile has one.
    WHOLE: tl.constexpr = VOCAB_SIZE // BLOCK * BLOCK
    GROUPS: tl.constexpr = (VOCAB_SIZE + BLOCK - 1) // BLOCK * LANES

    if STATISTICS:
        # x and y are logits over temperature, less those of the sampled token: an offset common to
        # a row costs no digits of the sums below.
        in_vocabulary = (token >= 0) & (token < VOCAB_SIZE)
        first = tl.where(in_vocabulary, token, 0)
        token_logit = _tile(row, first, 0.0, student_scale, student_cap, temperature, VOCAB_SIZE,
                            False, STUDENT_CAPPED)  # fmt: skip
        shift = _finite(token_logit)
        top = tl.full([LANES], LOWEST, tl.float32)
        total = tl.zeros([LANES], tl.float32)
        sum_x = tl.zeros([LANES], tl.float32)
        teacher_shift = 0.0
        if TEACHER:
            teacher_token_logit = _tile(
                teacher_row, first, 0.0, teacher_scale, teacher_cap, temperature, VOCAB_SIZE, False,
                TEACHER_CAPPED,
            )  # fmt: skip
            teacher_shift = _finite(teacher_token_logit)
            teacher_top = tl.full([LANES], LOWEST, tl.float32)
            teacher_total = tl.zeros([LANES], tl.float32)
            sum_y = tl.zeros([LANES], tl.float32)
            sum_gap = tl.zeros([LANES], tl.float32)
            sum_forward = tl.zeros([LANES], tl.float32)
        for MASKED in tl.static_range(2):
            for start in range(MASKED * WHOLE, WHOLE + MASKED * (VOCAB_SIZE - WHOLE), BLOCK):
                at = start + offsets
                raw = load_logits(row, at, VOCAB_SIZE, MASKED)
                if GROUP_MAXIMA:
                    group = n.to(tl.int64) * GROUPS + start // WIDTH + tl.arange(0, LANES)
                    tl.store(maxima + group, tl.max(raw, 1).to(maxima.dtype.element_ty))
                x = _scaled(raw, at, shift, student_scale, student_cap, temperature,
                            VOCAB_SIZE, MASKED, STUDENT_CAPPED)  # fmt: skip
                new_top = tl.maximum(top, tl.max(x, 1))
                shrink = tl.exp2((top - new_top) * LOG2E)
                e = tl.exp2((x - new_top[:, None]) * LOG2E)
                total = total * shrink + tl.sum(e, 1)
                sum_x = sum_x * shrink + tl.sum(e * tl.maximum(x, PADDING), 1)
                top = new_top
                if TEACHER:
                    raw = load_logits(teacher_row, at, VOCAB_SIZE, MASKED)
                    if GROUP_MAXIMA:
                        most = tl.max(raw, 1).to(teacher_maxima.dtype.element_ty)
                        tl.store(teacher_maxima + group, most)
                    y = _scaled(raw, at, teacher_shift, teacher_scale, teacher_cap, temperature,
                                VOCAB_SIZE, MASKED, TEACHER_CAPPED)  # fmt: skip
                    sum_gap = sum_gap * shrink + tl.sum(e * _gap(e, x, y), 1)
                    new_top = tl.maximum(teacher_top, tl.max(y, 1))
                    shrink = tl.exp2((teacher_top - new_top) * LOG2E)
                    e = tl.exp2((y - new_top[:, None]) * LOG2E)
                    teacher_total = teacher_total * shrink + tl.sum(e, 1)
                    sum_y = sum_y * shrink + tl.sum(e * tl.maximum(y, PADDING), 1)
                    if FORM == FORWARD:
                        sum_forward = sum_forward * shrink + tl.sum(e * _gap(e, y, x), 1)
                    teacher_top = new_top
        # Lanes are combined: every warp has loaded all before any goes on, so storing is safe.
        row_top = tl.max(top, 0)
        share = tl.exp2((top - row_top) * LOG2E)
        row_total = tl.sum(total * share, 0)
        log_total = tl.log2(row_total)
        log_sum = row_top + log_total * LN2
        tl.store(out, shift)
        tl.store(out + num_rows, row_top)
        tl.store(out + 2 * num_rows, log_total)
        token_logp = token_logit - shift - log_sum  # −log_sum, or −inf where it is excluded
        tl.store(out + 7 * num_rows, tl.where(in_vocabulary, token_logp, float("nan")))
        tl.store(out + 9 * num_rows, log_sum - tl.sum(sum_x * share, 0) / row_total)
        if TEACHER:
            center = tl.sum(sum_gap * share, 0) / row_total
            teacher_row_top = tl.max(teacher_top, 0)
            share = tl.exp2((teacher_top - teacher_row_top) * LOG2E)
            row_total = tl.sum(teacher_total * share, 0)
            teacher_log_total = tl.log2(row_total)
            teacher_log_sum = teacher_row_top + teacher_log_total * LN2
            value = center - log_sum + teacher_log_sum
            tl.store(out + 3 * num_rows, teacher_shift)
            tl.store(out + 4 * num_rows, teacher_row_top)
            tl.store(out + 5 * num_rows, teacher_log_total)
            token_logp = teacher_token_logit - teacher_shift - teacher_log_sum
            tl.store(out + 8 * num_rows, tl.where(in_vocabulary, token_logp, float("nan")))
            mean_y = tl.sum(sum_y * share, 0) / row_total
            tl.store(out + 10 * num_rows, teacher_log_sum - mean_y)
            tl.store(out + 11 * num_rows, value)
            if FORM == FORWARD:
                value = tl.sum(sum_forward * share, 0) / row_total - teacher_log_sum + log_sum
            if FORM >= JSD:
                center, value = _mixture_sums(
                    row, teacher_row, shift, teacher_shift, row_top * LOG2E + log_total,
                    teacher_row_top * LOG2E + teacher_log_total, temperature, student_scale,
                    teacher_scale, student_cap, teacher_cap, student_share, teacher_share, FORM,
                    STUDENT_CAPPED, TEACHER_CAPPED, VOCAB_SIZE, LANES, WIDTH,
                )  # fmt: skip
                if FORM == JSD:
                    value = beta * (value - teacher_share) + (1 - beta) * (center - student_share)
                    value = value * LN2
                    center = center * LN2
                if FORM == SKEW_FORWARD:
                    value = (value - teacher_share) * LN2
                if FORM == SKEW_REVERSE:
                    value = (value - student_share) * LN2
            tl.store(out + 6 * num_rows, center)
            if FORM != NONE:
                tl.store(out + 12 * num_rows, tl.where(weight != 0, value, 0.0))

    if GRADIENT:
        if not STATISTICS:
            shift = tl.load(out)
            row_top = tl.load(out + num_rows)
            log_total = tl.load(out + 2 * num_rows)
            if TEACHER:
                teacher_shift = tl.load(out + 3 * num_rows)
                teacher_row_top = tl.load(out + 4 * num_rows)
                teacher_log_total = tl.load(out + 5 * num_rows)
                center = tl.load(out + 6 * num_rows)
        factor = student_scale / temperature
        at_token = tl.load(coefficients + n) * factor
        weight = weight * factor
        trains = weight != 0
        log_scale = 0.0
        if FORM == NONE:
            pull = weight + at_token
            log_scale = tl.load(out + 15 * num_rows)
        else:
            # A row without weight must not use its teacher, which may be NaN.
            center = tl.where(trains, center, 0.0)
            teacher_row_top = tl.where(trains, teacher_row_top, row_top)
            teacher_log_total = tl.where(trains, teacher_log_total, log_total)
            if FORM == JSD:
                weight = weight * (1 - beta)
            pull = at_token + weight * center
            if FORM == FORWARD:
                pull = at_token - weight
            if FORM == SKEW_FORWARD:
                pull = at_token - weight * center
        if not TEACHER:
            teacher_shift, teacher_row_top, teacher_log_total = 0.0, 0.0, 0.0
        _write_gradient(
            row, teacher_row, token, weight, trains, at_token, pull, shift, teacher_shift,
            row_top * LOG2E + log_total - log_scale, teacher_row_top * LOG2E + teacher_log_total,
            temperature, student_scale, teacher_scale, student_cap, teacher_cap, student_share,
            teacher_share, FORM, STUDENT_CAPPED, TEACHER_CAPPED, VOCAB_SIZE, LANES, WIDTH,
        )  # fmt: skip
