/* Part of template.h: the Adam update, one pass over all streams. */

struct adam_factors {
    vf grad_scale, l2, decay, beta1, one_minus_beta1, beta2, one_minus_beta2, step_size, inv_sqrt_bias2, eps;
};

OP struct adam_factors adam_factors(const simd_row *row) {
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
OP void adam_moments(vf w, vf g, vf *m, vf *v, const struct adam_factors *k) {
    g = vf_fma(k->l2, w, vf_mul(k->grad_scale, g));
    *m = vf_fma(k->one_minus_beta1, g, vf_mul(k->beta1, *m));
    *v = vf_fma(vf_mul(k->one_minus_beta2, g), g, vf_mul(k->beta2, *v));
}

OP vf adam_direction(vf m, vf root, const struct adam_factors *k) {
    return vf_div(m, vf_fma(root, k->inv_sqrt_bias2, k->eps));
}

OP vf adam_weight(vf w, vf direction, const struct adam_factors *k) {
    return vf_fnma(k->step_size, direction, vf_mul(k->decay, w));
}

OP vf adam_formula(vf w, vf g, vf *m, vf *v, const struct adam_factors *k) {
    adam_moments(w, g, m, v, k);
    return adam_weight(w, adam_direction(*m, vf_sqrt(*v), k), k);
}

/* ---- the loop of an update; `shape` is a constant in each instance ---- */

OP vf load_master(simd_adam_streams at, simd_adam_shape shape, size_t i) {
    return shape.is_split ? load_split(at.hi + i, at.lo + i) : vf_load(at.master + i);
}

OP void store_master(simd_adam_streams at, simd_adam_shape shape, size_t i, vf w) {
    if (shape.is_split) {
        store_split(at.hi + i, at.lo + i, w);
        return;
    }
    vf_store(at.master + i, w);
    if (shape.weight_format != SIMD_F32)
        store_from_f32(at.weight, shape.weight_format, i, w);
}

/* The least magnitude that the weight cannot hold. */
OP uint32_t master_limit(simd_adam_shape shape) {
    if (shape.is_split || shape.weight_format == SIMD_BF16)
        return SIMD_BF16_LIMIT;
    return shape.weight_format == SIMD_F16 ? SIMD_F16_LIMIT : SIMD_F32_INF;
}

static inline int settle(void *at) {
    const int is_nan = (simd_load_u32(at) & SIMD_F32_ABS) > SIMD_F32_INF;
    if (is_nan)
        memcpy(at, &(uint32_t){SIMD_F32_NAN}, 4);
    return is_nan;
}

/* Instruction sets and operand orders differ in the NaN they produce, so after a turn with one, every NaN becomes the same. */
static __attribute__((noinline)) void adam_settle_nan(simd_adam_streams at, simd_adam_shape shape) {
    const uint16_t nan16 = shape.is_split || shape.weight_format == SIMD_BF16 ? 0x7fc0 : 0x7e00;
    for (size_t i = 0; i < SIMD_TURN; i++) {
        settle((char *)at.exp_avg + 4 * i);
        settle((char *)at.exp_avg_sq + 4 * i);
        if (!shape.is_split) {
            if (settle((char *)at.master + 4 * i) && shape.weight_format != SIMD_F32)
                memcpy((char *)at.weight + 2 * i, &nan16, 2);
            continue;
        }
        char *hi = (char *)at.hi + 2 * i, *lo = (char *)at.lo + 2 * i;
        uint32_t w = ((uint32_t)simd_load_u16(hi) << 16) + (uint32_t)(int16_t)simd_load_u16(lo);
        if (settle(&w)) {
            memcpy(hi, &nan16, 2);
            memcpy(lo, &(int16_t){0}, 2);
        }
    }
}

OP int adam_turn(simd_adam_streams at, simd_adam_shape shape, const struct adam_factors *k) {
    vf w[NUM_VECS], g[NUM_VECS], m[NUM_VECS], v[NUM_VECS];
    vi largest = vi_set(0);
    EACH_VEC(j) {
        w[j] = load_master(at, shape, j * W);
        g[j] = load_as_f32(at.grad, shape.grad_format, j * W);
        m[j] = vf_load(at.exp_avg + j * W);
        v[j] = vf_load(at.exp_avg_sq + j * W);
    }
    EACH_VEC(j) {
        w[j] = adam_formula(w[j], g[j], &m[j], &v[j], k);
        largest = vi_max(largest, vi_and(vf_bits(w[j]), vi_set(SIMD_F32_ABS)));
    }
    EACH_VEC(j) {
        store_master(at, shape, j * W, w[j]);
        vf_store(at.exp_avg + j * W, m[j]);
        vf_store(at.exp_avg_sq + j * W, v[j]);
    }
    if (__builtin_expect(!vi_any_ge(largest, (int32_t)master_limit(shape)), 1))
        return SIMD_OK;
    adam_settle_nan(at, shape);
    return SIMD_NONFINITE;
}

OP int adam_last_turn(simd_adam_streams at, simd_adam_shape shape, size_t n, const struct adam_factors *k) {
    uint16_t hi[SIMD_TURN], weight[SIMD_TURN];
    int16_t lo[SIMD_TURN];
    float master[SIMD_TURN], m[SIMD_TURN], v[SIMD_TURN], grad[SIMD_TURN];
    if (shape.is_split) {
        pad(hi, at.hi, n, 2);
        pad(lo, at.lo, n, 2);
    } else {
        pad(master, at.master, n, 4);
    }
    pad(m, at.exp_avg, n, 4);
    pad(v, at.exp_avg_sq, n, 4);
    pad(grad, at.grad, n, simd_format_bytes(shape.grad_format));
    const int status = adam_turn((simd_adam_streams){hi, lo, master, weight, m, v, grad}, shape, k);
    if (shape.is_split) {
        memcpy(at.hi, hi, 2 * n);
        memcpy(at.lo, lo, 2 * n);
    } else {
        memcpy(at.master, master, 4 * n);
        if (shape.weight_format != SIMD_F32)
            memcpy(at.weight, weight, 2 * n);
    }
    memcpy(at.exp_avg, m, 4 * n);
    memcpy(at.exp_avg_sq, v, 4 * n);
    return status;
}

/* Ask for a turn's cache lines of one stream, `SIMD_AHEAD` elements on.  Beyond the end it is a hint without effect, so
 * the address is computed as a number. */
OP void prefetch(const void *at, size_t elem_bytes) {
    const uintptr_t ahead = (uintptr_t)at + SIMD_AHEAD * elem_bytes;
    for (size_t i = 0; i < SIMD_TURN * elem_bytes; i += 64)
        __builtin_prefetch((const void *)(ahead + i));
}

OP void adam_prefetch(simd_adam_streams at, simd_adam_shape shape) {
    if (shape.is_split) {
        prefetch(at.hi, 2);
        prefetch(at.lo, 2);
    } else {
        prefetch(at.master, 4);
        if (shape.weight_format != SIMD_F32)
            prefetch(at.weight, 2);
    }
    prefetch(at.exp_avg, 4);
    prefetch(at.exp_avg_sq, 4);
    prefetch(at.grad, simd_format_bytes(shape.grad_format));
}

OP int adam_loop(simd_adam_streams at, simd_adam_shape shape, size_t n, const simd_row *row) {
    const struct adam_factors k = adam_factors(row);
    int status = SIMD_OK;
    for (; n >= SIMD_TURN; n -= SIMD_TURN) {
        adam_prefetch(at, shape);
        status |= adam_turn(at, shape, &k);
        at = simd_adam_from(at, shape, SIMD_TURN);
    }
    return n ? status | adam_last_turn(at, shape, n, &k) : status;
}

OP int adam_grad(simd_adam_streams at, int is_split, int weight_format, int grad_format, size_t n,
                 const simd_row *row) {
    if (grad_format == SIMD_BF16)
        return adam_loop(at, (simd_adam_shape){is_split, weight_format, SIMD_BF16}, n, row);
    if (grad_format == SIMD_F16)
        return adam_loop(at, (simd_adam_shape){is_split, weight_format, SIMD_F16}, n, row);
    return adam_loop(at, (simd_adam_shape){is_split, weight_format, SIMD_F32}, n, row);
}

TARGET static int adam(simd_adam_streams at, simd_adam_shape shape, size_t n, const simd_row *row) {
    if (shape.is_split)
        return adam_grad(at, 1, SIMD_BF16, shape.grad_format, n, row);
    if (shape.weight_format == SIMD_BF16)
        return adam_grad(at, 0, SIMD_BF16, shape.grad_format, n, row);
    if (shape.weight_format == SIMD_F16)
        return adam_grad(at, 0, SIMD_F16, shape.grad_format, n, row);
    return adam_grad(at, 0, SIMD_F32, shape.grad_format, n, row);
}
