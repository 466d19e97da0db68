# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""The pass over the words as a Triton kernel: one program a row, no temporary in memory.

First sweep: running softmax statistics of both rows at once. Second sweep: the gradient, written
over the student's logits. Mixtures need a sweep between the two, for sums over normalised
probabilities. The formulas are those of `fused_words`.

A row is cut into tiles [LANES, WIDTH] of neighbouring words. WIDTH words are what one thread loads
at once, so maxima and sums along WIDTH stay in its registers; each lane keeps running sums of its
own, and lanes meet once, at the end of the row.

Each sweep begins where the one before ended: what it read last is still in the cache.

Rows may begin past 2^31 elements. A vocabulary is compiled in: tiles without a mask are the rule.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-1.0e15)
"""Where running maxima start: below any logit, and finite, so that no difference is NaN."""
NOTHING = tl.constexpr(-1.0e18)
"""In place of a logit past the end of a row: its exponential is 0 against any maximum."""

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
    "shift", "top", "log_total", "teacher_shift", "teacher_top", "teacher_log_total", "centre",
    "student_logp", "teacher_logp", "student_entropy", "teacher_entropy", "reverse_kl", "value",
)  # fmt: skip
"""What the kernel leaves of each row: shift + top + log_total·ln 2 is the row's log-sum-exp."""
PER_ROW = ["ids", "temperatures", "weights", "coefficients", "outputs"]
"""Slices that start anywhere: one compiled kernel for all of them."""


@triton.jit
def _load(row, at, NUM_WORDS: tl.constexpr, MASKED: tl.constexpr):
    """The logits at the words `at` as the product left them."""
    if MASKED:
        raw = tl.load(row + at, mask=at < NUM_WORDS, other=-float("inf"))
    else:
        raw = tl.load(row + at)
    return raw.to(tl.float32)


@triton.jit
def over_temperature(raw, shift, scale, cap, temperature, CAPPED: tl.constexpr):
    """Logits over temperature, less `shift`."""
    if CAPPED:  # cap·tanh(z / cap)
        bent = 1.0 - 2.0 / (tl.exp2(raw * (2.0 * LOG2E * scale / cap)) + 1.0)
        return bent * (cap / temperature) - shift
    else:
        return raw * (scale / temperature) - shift


@triton.jit
def _tile(row, at, shift, scale, cap, temperature, NUM_WORDS: tl.constexpr, MASKED: tl.constexpr,
          CAPPED: tl.constexpr):  # fmt: skip
    raw = _load(row, at, NUM_WORDS, MASKED)
    return _scaled(raw, at, shift, scale, cap, temperature, NUM_WORDS, MASKED, CAPPED)


@triton.jit
def _scaled(raw, at, shift, scale, cap, temperature, NUM_WORDS: tl.constexpr, MASKED: tl.constexpr,
            CAPPED: tl.constexpr):  # fmt: skip
    x = over_temperature(raw, shift, scale, cap, temperature, CAPPED)
    if MASKED:
        x = tl.where(at < NUM_WORDS, x, NOTHING)
    return x


@triton.jit
def _log2_1p(t):
    """log2(1 + t) for t in [0, 1], off by 1.6e-7 at most: nine steps, where log2 as it comes has
    twenty, and mixtures wait for little else."""
    found = t * 0.0077675217762589455 - 0.043440788984298706
    found = found * t + 0.1142766997218132
    found = found * t - 0.1983216404914856
    found = found * t + 0.27620553970336914
    found = found * t - 0.3585521876811981
    found = found * t + 0.4807109534740448
    found = found * t - 0.721341073513031
    found = found * t + 1.4426950216293335
    return found * t


@triton.jit
def _mixed(first, second):
    """2^first, 2^second, and log2 of what each is of their sum."""
    gap = first - second
    less = tl.exp2(-tl.abs(gap))
    more = tl.exp2(tl.maximum(first, second))
    rest = _log2_1p(less)
    less = more * less
    ahead = gap > 0
    return (
        tl.where(ahead, more, less),
        tl.where(ahead, less, more),
        tl.minimum(gap, 0.0) - rest,
        tl.minimum(-gap, 0.0) - rest,
    )


@triton.jit
def _mixture_sums(
    row, teacher_row, shift, teacher_shift, norm, teacher_norm, temperature, student_scale,
    teacher_scale, student_cap, teacher_cap, student_share, teacher_share, FORM: tl.constexpr,
    STUDENT_CAPPED: tl.constexpr, TEACHER_CAPPED: tl.constexpr, NUM_WORDS: tl.constexpr,
    LANES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """(what the gradient is centred on, what the value is made of), from normalised words: x and y
    less their norms are log2 π and log2 q."""
    here = tl.arange(0, LANES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    BLOCK: tl.constexpr = LANES * WIDTH
    TILES: tl.constexpr = NUM_WORDS // BLOCK
    for_centre = tl.zeros([LANES, WIDTH], tl.float32)
    for_value = tl.zeros([LANES, WIDTH], tl.float32)
    for WHOLE in tl.static_range(2):
        for tile in range(0, TILES if WHOLE else 1):
            at = (TILES - WHOLE - tile) * BLOCK + here
            x = _tile(row, at, shift, student_scale, student_cap, temperature,
                      NUM_WORDS, not WHOLE, STUDENT_CAPPED)  # fmt: skip
            y = _tile(teacher_row, at, teacher_shift, teacher_scale, teacher_cap, temperature,
                      NUM_WORDS, not WHOLE, TEACHER_CAPPED)  # fmt: skip
            p, q, p_part, q_part = _mixed(
                x * LOG2E - (norm - student_share), y * LOG2E - (teacher_norm - teacher_share)
            )
            if FORM == JSD:
                for_centre += p * p_part
                for_value += q * q_part
            if FORM == SKEW_FORWARD:
                for_centre += q * tl.exp2(p_part)
                for_value += q * q_part
            if FORM == SKEW_REVERSE:
                for_centre += p * (p_part * LN2 - tl.exp2(p_part))
                for_value += p * p_part
    # What was summed has the shares of the mixture in it.
    centre, value = tl.sum(for_centre), tl.sum(for_value)
    centre *= tl.exp2(-(teacher_share if FORM == SKEW_FORWARD else student_share))
    value *= tl.exp2(-(student_share if FORM == SKEW_REVERSE else teacher_share))
    return centre, value


@triton.jit
def _write_gradient(
    row, teacher_row, word, weight, trains, at_word, pull, shift, teacher_shift, norm,
    teacher_norm, temperature, student_scale, teacher_scale, student_cap, teacher_cap,
    student_share, teacher_share, FORM: tl.constexpr, STUDENT_CAPPED: tl.constexpr,
    TEACHER_CAPPED: tl.constexpr, NUM_WORDS: tl.constexpr, LANES: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """weight·g − pull·π, and `at_word` more at the sampled word, over the student's logits."""
    here = tl.arange(0, LANES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    BLOCK: tl.constexpr = LANES * WIDTH
    TILES: tl.constexpr = NUM_WORDS // BLOCK
    # Mixtures have come back to the beginning of the row; the others begin with its last tile.
    FORWARDS: tl.constexpr = FORM >= JSD
    if FORM >= JSD:
        weight *= tl.exp2(-(teacher_share if FORM == SKEW_FORWARD else student_share))
        pull *= tl.exp2(-student_share)
    for turn in tl.static_range(2):
        for tile in range(0, 1 if turn == FORWARDS else TILES):
            if turn == FORWARDS:
                at = TILES * BLOCK + here
            elif FORWARDS:
                at = tile * BLOCK + here
            else:
                at = (TILES - 1 - tile) * BLOCK + here
            x = _tile(row, at, shift, student_scale, student_cap, temperature,
                      NUM_WORDS, turn == FORWARDS, STUDENT_CAPPED)  # fmt: skip
            if FORM == NONE:
                g = -pull * tl.exp2(x * LOG2E - norm)
            else:
                y = _tile(teacher_row, at, teacher_shift, teacher_scale, teacher_cap, temperature,
                          NUM_WORDS, turn == FORWARDS, TEACHER_CAPPED)  # fmt: skip
                y = tl.where(trains, y, x)
                if FORM == REVERSE:
                    g = tl.exp2(x * LOG2E - norm) * (weight * (x - y) - pull)
                elif FORM == FORWARD:
                    p = tl.exp2(x * LOG2E - norm)
                    g = -pull * p - weight * tl.exp2(y * LOG2E - teacher_norm)
                else:  # p and q have their shares in them, weight and pull the inverse
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
            g = tl.where(at == word, g + at_word, g)
            if STUDENT_CAPPED:
                bent = (x + shift) * (temperature / student_cap)
                g = g * (1.0 - bent * bent)
            if turn == FORWARDS:
                tl.store(row + at, g.to(row.dtype.element_ty), mask=at < NUM_WORDS)
            else:
                tl.store(row + at, g.to(row.dtype.element_ty))


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=PER_ROW)
def vocabulary_kernel(
    student, teacher, ids, temperatures, weights, coefficients, outputs, tops, teacher_tops,
    student_stride, teacher_stride, num_rows,
    student_scale, teacher_scale, student_cap, teacher_cap,
    student_share, teacher_share, beta,
    FORM: tl.constexpr, TEACHER: tl.constexpr, STATISTICS: tl.constexpr, GRADIENT: tl.constexpr,
    TOPS: tl.constexpr, STUDENT_CAPPED: tl.constexpr, TEACHER_CAPPED: tl.constexpr,
    NUM_WORDS: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One row. `outputs` [13, rows] is `OUTPUTS`; shares of a mixture are in log2; `weights` of the
    form NONE are Σ_S h of a support. TOPS: the largest of each WIDTH words is wanted, too, for
    `fused_select`."""
    n = tl.program_id(0)
    row = student + n.to(tl.int64) * student_stride
    teacher_row = teacher + n.to(tl.int64) * teacher_stride
    out = outputs + n
    temperature = tl.load(temperatures + n)
    weight = tl.load(weights + n)
    word = tl.load(ids + n).to(tl.int32)
    here = tl.arange(0, LANES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    BLOCK: tl.constexpr = LANES * WIDTH
    # Words in tiles without a mask; only the last tile has one.
    WHOLE: tl.constexpr = NUM_WORDS // BLOCK * BLOCK
    GROUPS: tl.constexpr = (NUM_WORDS + BLOCK - 1) // BLOCK * LANES

    if STATISTICS:
        # x and y are logits over temperature, less those of the sampled word: what is common to a
        # row takes no digits from the sums below.
        known = (word >= 0) & (word < NUM_WORDS)
        shift = _tile(row, tl.where(known, word, 0), 0.0, student_scale, student_cap, temperature,
                      NUM_WORDS, False, STUDENT_CAPPED)  # fmt: skip
        top = tl.full([LANES], LOWEST, tl.float32)
        total = tl.zeros([LANES], tl.float32)
        sum_x = tl.zeros([LANES], tl.float32)
        teacher_shift = 0.0
        if TEACHER:
            teacher_shift = _tile(
                teacher_row, tl.where(known, word, 0), 0.0, teacher_scale, teacher_cap, temperature,
                NUM_WORDS, False, TEACHER_CAPPED,
            )  # fmt: skip
            teacher_top = tl.full([LANES], LOWEST, tl.float32)
            teacher_total = tl.zeros([LANES], tl.float32)
            sum_y = tl.zeros([LANES], tl.float32)
            sum_gap = tl.zeros([LANES], tl.float32)
            sum_forward = tl.zeros([LANES], tl.float32)
        for MASKED in tl.static_range(2):
            for start in range(MASKED * WHOLE, WHOLE + MASKED * (NUM_WORDS - WHOLE), BLOCK):
                at = start + here
                raw = _load(row, at, NUM_WORDS, MASKED)
                if TOPS:
                    group = n.to(tl.int64) * GROUPS + start // WIDTH + tl.arange(0, LANES)
                    tl.store(tops + group, tl.max(raw, 1).to(tops.dtype.element_ty))
                x = _scaled(raw, at, shift, student_scale, student_cap, temperature,
                            NUM_WORDS, MASKED, STUDENT_CAPPED)  # fmt: skip
                new_top = tl.maximum(top, tl.max(x, 1))
                shrink = tl.exp2((top - new_top) * LOG2E)
                e = tl.exp2((x - new_top[:, None]) * LOG2E)
                total = total * shrink + tl.sum(e, 1)
                sum_x = sum_x * shrink + tl.sum(e * x, 1)
                top = new_top
                if TEACHER:
                    raw = _load(teacher_row, at, NUM_WORDS, MASKED)
                    if TOPS:
                        most = tl.max(raw, 1).to(teacher_tops.dtype.element_ty)
                        tl.store(teacher_tops + group, most)
                    y = _scaled(raw, at, teacher_shift, teacher_scale, teacher_cap, temperature,
                                NUM_WORDS, MASKED, TEACHER_CAPPED)  # fmt: skip
                    sum_gap = sum_gap * shrink + tl.sum(e * (x - y), 1)
                    new_top = tl.maximum(teacher_top, tl.max(y, 1))
                    shrink = tl.exp2((teacher_top - new_top) * LOG2E)
                    e = tl.exp2((y - new_top[:, None]) * LOG2E)
                    teacher_total = teacher_total * shrink + tl.sum(e, 1)
                    sum_y = sum_y * shrink + tl.sum(e * y, 1)
                    if FORM == FORWARD:
                        sum_forward = sum_forward * shrink + tl.sum(e * (y - x), 1)
                    teacher_top = new_top
        # Lanes meet. Every warp is done reading before any goes on, so overwriting is safe below.
        row_top = tl.max(top, 0)
        share = tl.exp2((top - row_top) * LOG2E)
        row_total = tl.sum(total * share, 0)
        log_total = tl.log2(row_total)
        log_sum = row_top + log_total * LN2
        tl.store(out, shift)
        tl.store(out + num_rows, row_top)
        tl.store(out + 2 * num_rows, log_total)
        tl.store(out + 7 * num_rows, tl.where(known, -log_sum, float("nan")))
        tl.store(out + 9 * num_rows, log_sum - tl.sum(sum_x * share, 0) / row_total)
        if TEACHER:
            centre = tl.sum(sum_gap * share, 0) / row_total
            teacher_row_top = tl.max(teacher_top, 0)
            share = tl.exp2((teacher_top - teacher_row_top) * LOG2E)
            row_total = tl.sum(teacher_total * share, 0)
            teacher_log_total = tl.log2(row_total)
            teacher_log_sum = teacher_row_top + teacher_log_total * LN2
            value = centre - log_sum + teacher_log_sum
            tl.store(out + 3 * num_rows, teacher_shift)
            tl.store(out + 4 * num_rows, teacher_row_top)
            tl.store(out + 5 * num_rows, teacher_log_total)
            tl.store(out + 8 * num_rows, tl.where(known, -teacher_log_sum, float("nan")))
            mean_y = tl.sum(sum_y * share, 0) / row_total
            tl.store(out + 10 * num_rows, teacher_log_sum - mean_y)
            tl.store(out + 11 * num_rows, value)
            if FORM == FORWARD:
                value = tl.sum(sum_forward * share, 0) / row_total - teacher_log_sum + log_sum
            if FORM >= JSD:
                centre, value = _mixture_sums(
                    row, teacher_row, shift, teacher_shift, row_top * LOG2E + log_total,
                    teacher_row_top * LOG2E + teacher_log_total, temperature, student_scale,
                    teacher_scale, student_cap, teacher_cap, student_share, teacher_share, FORM,
                    STUDENT_CAPPED, TEACHER_CAPPED, NUM_WORDS, LANES, WIDTH,
                )  # fmt: skip
                if FORM == JSD:
                    value = beta * (value - teacher_share) + (1 - beta) * (centre - student_share)
                    value = value * LN2
                    centre = centre * LN2
                if FORM == SKEW_FORWARD:
                    value = (value - teacher_share) * LN2
                if FORM == SKEW_REVERSE:
                    value = (value - student_share) * LN2
            tl.store(out + 6 * num_rows, centre)
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
                centre = tl.load(out + 6 * num_rows)
        factor = student_scale / temperature
        at_word = tl.load(coefficients + n) * factor
        weight = weight * factor
        trains = weight != 0
        if FORM == NONE:
            pull = weight + at_word
        else:
            # Without weight a row does not look at its teacher, whose numbers may be NaN.
            centre = tl.where(trains, centre, 0.0)
            teacher_row_top = tl.where(trains, teacher_row_top, row_top)
            teacher_log_total = tl.where(trains, teacher_log_total, log_total)
            if FORM == JSD:
                weight = weight * (1 - beta)
            pull = at_word + weight * centre
            if FORM == FORWARD:
                pull = at_word - weight
            if FORM == SKEW_FORWARD:
                pull = at_word - weight * centre
        if not TEACHER:
            teacher_shift, teacher_row_top, teacher_log_total = 0.0, 0.0, 0.0
        _write_gradient(
            row, teacher_row, word, weight, trains, at_word, pull, shift, teacher_shift,
            row_top * LOG2E + log_total, teacher_row_top * LOG2E + teacher_log_total, temperature,
            student_scale, teacher_scale, student_cap, teacher_cap, student_share, teacher_share,
            FORM, STUDENT_CAPPED, TEACHER_CAPPED, NUM_WORDS, LANES, WIDTH,
        )  # fmt: skip
