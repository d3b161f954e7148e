/* Every formula, once.  Included by a variant file that defines, for vectors of W elements (W divides SIMD_TURN):
 *
 *   TARGET                      function attribute of the instruction set
 *   vf vi                       W floats, W 32-bit integers
 *   vf_load vf_store vf_set vf_add vf_mul vf_div vf_sqrt
 *   vf_fma(a, b, c) = a * b + c    vf_fnma(a, b, c) = -a * b + c    one rounding each
 *   vf_load_f16 vf_store_f16    IEEE half, to nearest even, NaN kept (quiet, high payload bits)
 *   vi_load_u16 vi_load_s16 vi_store_16 (low halves) vi_set vi_add vi_and vi_max (signed) vi_shl16 vi_shr16 (logical)
 *   vi_pick_gt(a, b, yes, no)   a > b ? yes : no, signed
 *   vi_any_ge(a, limit)         any element >= limit, signed
 *   vf_bits vf_from_bits        reinterpretation
 *   lanes, lanes_load lanes_store lanes_add_squares(lanes, const void *)   SIMD_NORM_LANES doubles += x * x
 *
 * Loads and stores take any alignment.  A loop runs in turns of SIMD_TURN elements: all loads, then arithmetic, then
 * all stores; the last, shorter turn goes through the same code on a padded copy.
 */
#define OP TARGET static inline __attribute__((always_inline))
#define NUM_VECS (SIMD_TURN / W)
#if defined(__clang__)
#define EACH_VEC(j) _Pragma("unroll") for (size_t j = 0; j < NUM_VECS; j++)
#else
#define EACH_VEC(j) _Pragma("GCC unroll 32") for (size_t j = 0; j < NUM_VECS; j++)
#endif

/* ---- formats: everything is fp32 in registers ---- */

OP vf load_as_f32(const void *src, int format, size_t i) {
    const char *at = (const char *)src + i * (format == SIMD_F32 ? 4 : 2);
    if (format == SIMD_F32)
        return vf_load(at);
    return format == SIMD_F16 ? vf_load_f16(at) : vf_from_bits(vi_shl16(vi_load_u16(at)));
}

/* To nearest even, as torch rounds; every NaN becomes 0x7fc0. */
OP vi bf16_round(vf x) {
    vi bits = vf_bits(x);
    vi odd = vi_and(vi_shr16(bits), vi_set(1));
    vi rounded = vi_shr16(vi_add(bits, vi_add(odd, vi_set(0x7fff))));
    return vi_pick_gt(vi_and(bits, vi_set(SIMD_F32_ABS)), vi_set(SIMD_F32_INF), vi_set(SIMD_F32_NAN >> 16), rounded);
}

OP void store_from_f32(void *dst, int format, size_t i, vf x) {
    char *at = (char *)dst + i * (format == SIMD_F32 ? 4 : 2);
    if (format == SIMD_F32)
        vf_store(at, x);
    else if (format == SIMD_F16)
        vf_store_f16(at, x);
    else
        vi_store_16(at, bf16_round(x));
}

/* ---- split master: bits = (hi << 16) + sign_extend(lo) mod 2^32 ---- */

OP vf load_split(const uint16_t *hi, const int16_t *lo) {
    return vf_from_bits(vi_add(vi_shl16(vi_load_u16(hi)), vi_load_s16(lo)));
}

OP void store_split(uint16_t *hi, int16_t *lo, vf master) {
    vi bits = vf_bits(master);
    vi_store_16(hi, vi_shr16(vi_add(bits, vi_set(0x8000))));
    vi_store_16(lo, bits);
}

/* ---- the short turn at the end ---- */

/* The padding repeats the last element, so that it cannot raise a flag of its own. */
static inline void pad(void *to, const void *from, size_t n, size_t elem_bytes) {
    memcpy(to, from, n * elem_bytes);
    for (size_t i = n; i < SIMD_TURN; i++)
        memcpy((char *)to + i * elem_bytes, (const char *)from + (n - 1) * elem_bytes, elem_bytes);
}

/* ---- Adam ---- */

struct adam_factors {
    vf grad_scale, l2, decay, beta1, one_minus_beta1, beta2, one_minus_beta2, step_size, inv_sqrt_bias2, eps;
};

OP struct adam_factors adam_factors(const simd_adam_row *row) {
    return (struct adam_factors){
        vf_set(row->grad_scale),      vf_set(row->l2),    vf_set(row->decay),           vf_set(row->beta1),
        vf_set(row->one_minus_beta1), vf_set(row->beta2), vf_set(row->one_minus_beta2), vf_set(row->step_size),
        vf_set(row->inv_sqrt_bias2),  vf_set(row->eps),
    };
}

/* THE formula.  The order of operations and each rounding is part of the promise N1: change it nowhere else.
 *   g   = l2 * w + grad_scale * g
 *   m   = (1 - beta1) * g + beta1 * m
 *   v   = ((1 - beta2) * g) * g + beta2 * v
 *   den = sqrt(v) * inv_sqrt_bias2 + eps
 *   w   = decay * w - step_size * (m / den)          x * y + z: one rounding of the sum */
OP vf adam_formula(vf w, vf g, vf *m, vf *v, const struct adam_factors *k) {
    g = vf_fma(k->l2, w, vf_mul(k->grad_scale, g));
    *m = vf_fma(k->one_minus_beta1, g, vf_mul(k->beta1, *m));
    *v = vf_fma(vf_mul(k->one_minus_beta2, g), g, vf_mul(k->beta2, *v));
    vf den = vf_fma(vf_sqrt(*v), k->inv_sqrt_bias2, k->eps);
    return vf_fnma(k->step_size, vf_div(*m, den), vf_mul(k->decay, w));
}

/* Instruction sets and operand orders differ in the NaN they produce, so after a turn with one, every NaN becomes the same. */
static __attribute__((noinline)) void adam_settle_nan(simd_adam_streams at) {
    const uint32_t nan = SIMD_F32_NAN;
    for (size_t i = 0; i < SIMD_TURN; i++) {
        char *m = (char *)at.exp_avg + 4 * i, *v = (char *)at.exp_avg_sq + 4 * i;
        char *hi = (char *)at.hi + 2 * i, *lo = (char *)at.lo + 2 * i;
        uint32_t w = ((uint32_t)simd_load_u16(hi) << 16) + (uint32_t)(int16_t)simd_load_u16(lo);
        if ((simd_load_u32(m) & SIMD_F32_ABS) > SIMD_F32_INF)
            memcpy(m, &nan, sizeof nan);
        if ((simd_load_u32(v) & SIMD_F32_ABS) > SIMD_F32_INF)
            memcpy(v, &nan, sizeof nan);
        if ((w & SIMD_F32_ABS) > SIMD_F32_INF) {
            memcpy(hi, &(uint16_t){SIMD_F32_NAN >> 16}, 2);
            memcpy(lo, &(int16_t){0}, 2);
        }
    }
}

OP int adam_turn(simd_adam_streams at, int grad_format, const struct adam_factors *k) {
    vf w[NUM_VECS], g[NUM_VECS], m[NUM_VECS], v[NUM_VECS];
    vi largest = vi_set(0);
    EACH_VEC(j) {
        w[j] = load_split(at.hi + j * W, at.lo + j * W);
        g[j] = load_as_f32(at.grad, grad_format, j * W);
        m[j] = vf_load(at.exp_avg + j * W);
        v[j] = vf_load(at.exp_avg_sq + j * W);
    }
    EACH_VEC(j) {
        w[j] = adam_formula(w[j], g[j], &m[j], &v[j], k);
        largest = vi_max(largest, vi_and(vf_bits(w[j]), vi_set(SIMD_F32_ABS)));
    }
    EACH_VEC(j) {
        store_split(at.hi + j * W, at.lo + j * W, w[j]);
        vf_store(at.exp_avg + j * W, m[j]);
        vf_store(at.exp_avg_sq + j * W, v[j]);
    }
    if (__builtin_expect(!vi_any_ge(largest, SIMD_MASTER_LIMIT), 1))
        return SIMD_OK;
    adam_settle_nan(at);
    return SIMD_NONFINITE;
}

OP int adam_last_turn(simd_adam_streams at, int grad_format, size_t n, const struct adam_factors *k) {
    uint16_t hi[SIMD_TURN];
    int16_t lo[SIMD_TURN];
    float m[SIMD_TURN], v[SIMD_TURN], grad[SIMD_TURN];
    pad(hi, at.hi, n, 2);
    pad(lo, at.lo, n, 2);
    pad(m, at.exp_avg, n, 4);
    pad(v, at.exp_avg_sq, n, 4);
    pad(grad, at.grad, n, simd_format_bytes(grad_format));
    int status = adam_turn((simd_adam_streams){hi, lo, m, v, grad}, grad_format, k);
    memcpy(at.hi, hi, 2 * n);
    memcpy(at.lo, lo, 2 * n);
    memcpy(at.exp_avg, m, 4 * n);
    memcpy(at.exp_avg_sq, v, 4 * n);
    return status;
}

OP int adam_loop(simd_adam_streams at, int grad_format, size_t n, const simd_adam_row *row) {
    const struct adam_factors k = adam_factors(row);
    int status = SIMD_OK;
    for (; n >= SIMD_TURN; n -= SIMD_TURN) {
        status |= adam_turn(at, grad_format, &k);
        at = (simd_adam_streams){at.hi + SIMD_TURN, at.lo + SIMD_TURN, at.exp_avg + SIMD_TURN, at.exp_avg_sq + SIMD_TURN,
                                 (const char *)at.grad + SIMD_TURN * simd_format_bytes(grad_format)};
    }
    return n ? status | adam_last_turn(at, grad_format, n, &k) : status;
}

TARGET static int adam_split(simd_adam_streams at, int grad_format, size_t n, const simd_adam_row *row) {
    if (grad_format == SIMD_BF16)
        return adam_loop(at, SIMD_BF16, n, row);
    return grad_format == SIMD_F16 ? adam_loop(at, SIMD_F16, n, row) : adam_loop(at, SIMD_F32, n, row);
}

/* ---- conversions ---- */

OP void convert_turn(const void *src, int src_format, void *dst, int dst_format) {
    vf x[NUM_VECS];
    EACH_VEC(j) x[j] = load_as_f32(src, src_format, j * W);
    EACH_VEC(j) store_from_f32(dst, dst_format, j * W, x[j]);
}

OP void convert_loop(const void *src, int src_format, void *dst, int dst_format, size_t n) {
    const size_t src_bytes = simd_format_bytes(src_format), dst_bytes = simd_format_bytes(dst_format);
    const char *from = src;
    char *to = dst;
    for (; n >= SIMD_TURN; n -= SIMD_TURN) {
        convert_turn(from, src_format, to, dst_format);
        from += SIMD_TURN * src_bytes;
        to += SIMD_TURN * dst_bytes;
    }
    if (n) {
        float padded[SIMD_TURN], converted[SIMD_TURN];
        pad(padded, from, n, src_bytes);
        convert_turn(padded, src_format, converted, dst_format);
        memcpy(to, converted, n * dst_bytes);
    }
}

TARGET static void convert(const void *src, int src_format, void *dst, int dst_format, size_t n) {
    if (src_format == SIMD_F32 && dst_format == SIMD_BF16)
        convert_loop(src, SIMD_F32, dst, SIMD_BF16, n);
    else if (src_format == SIMD_F32)
        convert_loop(src, SIMD_F32, dst, SIMD_F16, n);
    else if (src_format == SIMD_BF16 && dst_format == SIMD_F32)
        convert_loop(src, SIMD_BF16, dst, SIMD_F32, n);
    else if (src_format == SIMD_BF16)
        convert_loop(src, SIMD_BF16, dst, SIMD_F16, n);
    else if (dst_format == SIMD_F32)
        convert_loop(src, SIMD_F16, dst, SIMD_F32, n);
    else
        convert_loop(src, SIMD_F16, dst, SIMD_BF16, n);
}

TARGET static void join(const uint16_t *hi, const int16_t *lo, float *dst, size_t n) {
    for (; n >= SIMD_TURN; n -= SIMD_TURN, hi += SIMD_TURN, lo += SIMD_TURN, dst += SIMD_TURN) {
        vf w[NUM_VECS];
        EACH_VEC(j) w[j] = load_split(hi + j * W, lo + j * W);
        EACH_VEC(j) vf_store(dst + j * W, w[j]);
    }
    if (n) {
        uint16_t padded_hi[SIMD_TURN];
        int16_t padded_lo[SIMD_TURN];
        float joined[SIMD_TURN];
        pad(padded_hi, hi, n, 2);
        pad(padded_lo, lo, n, 2);
        EACH_VEC(j) vf_store(joined + j * W, load_split(padded_hi + j * W, padded_lo + j * W));
        memcpy(dst, joined, 4 * n);
    }
}

TARGET static void split(const float *src, uint16_t *hi, int16_t *lo, size_t n) {
    for (; n >= SIMD_TURN; n -= SIMD_TURN, hi += SIMD_TURN, lo += SIMD_TURN, src += SIMD_TURN) {
        vf w[NUM_VECS];
        EACH_VEC(j) w[j] = vf_load(src + j * W);
        EACH_VEC(j) store_split(hi + j * W, lo + j * W, w[j]);
    }
    if (n) {
        uint16_t split_hi[SIMD_TURN];
        int16_t split_lo[SIMD_TURN];
        float padded[SIMD_TURN];
        pad(padded, src, n, 4);
        EACH_VEC(j) store_split(split_hi + j * W, split_lo + j * W, vf_load(padded + j * W));
        memcpy(hi, split_hi, 2 * n);
        memcpy(lo, split_lo, 2 * n);
    }
}

/* ---- gradients ---- */

TARGET static void accumulate(const float *src, void *dst, size_t n) {
    char *to = dst;
    for (; n >= SIMD_TURN; n -= SIMD_TURN, src += SIMD_TURN, to += 4 * SIMD_TURN) {
        vf x[NUM_VECS];
        EACH_VEC(j) x[j] = vf_add(vf_load(to + 4 * j * W), vf_load(src + j * W));
        EACH_VEC(j) vf_store(to + 4 * j * W, x[j]);
    }
    for (size_t i = 0; i < n; i++) {
        const float sum = simd_load_f32(to + 4 * i) + src[i];
        memcpy(to + 4 * i, &sum, sizeof sum);
    }
}

/* One element after the other: the reference of the vector loop, its head, its tail, and its way out of Inf and NaN. */
static inline size_t sum_squares_each(const char *src, size_t n, size_t first, double *lanes) {
    size_t nonfinite = 0;
    for (size_t i = 0; i < n; i++) {
        const double x = simd_load_f32(src + 4 * i);
        if ((simd_load_u32(src + 4 * i) & SIMD_F32_ABS) >= SIMD_F32_INF)
            nonfinite++;
        else
            lanes[(first + i) % SIMD_NORM_LANES] += x * x; /* the product of two floats is exact in fp64 */
    }
    return nonfinite;
}

TARGET static size_t sum_squares(const void *src, size_t n, size_t first, double *sums) {
    const char *at = src;
    size_t head = (SIMD_NORM_LANES - first % SIMD_NORM_LANES) % SIMD_NORM_LANES;
    head = head < n ? head : n;
    size_t nonfinite = sum_squares_each(at, head, first, sums);
    at += 4 * head;
    const size_t body = (n - head) / SIMD_NORM_LANES * SIMD_NORM_LANES;
    lanes open = lanes_load(sums);
    vi largest = vi_set(0);
    for (size_t i = 0; i < body; i += SIMD_NORM_LANES) {
        open = lanes_add_squares(open, at + 4 * i);
        for (size_t j = 0; j < SIMD_NORM_LANES; j += W)
            largest = vi_max(largest, vi_and(vf_bits(vf_load(at + 4 * (i + j))), vi_set(SIMD_F32_ABS)));
    }
    if (__builtin_expect(vi_any_ge(largest, SIMD_F32_INF), 0))
        nonfinite += sum_squares_each(at, body, 0, sums);
    else
        lanes_store(sums, open);
    return nonfinite + sum_squares_each(at + 4 * body, n - head - body, 0, sums);
}

const struct simd_kernels KERNELS = {
    .name = VARIANT,
    .adam_split = adam_split,
    .convert = convert,
    .accumulate = accumulate,
    .sum_squares = sum_squares,
    .join = join,
    .split = split,
};
