/* Part of template.h: Lion (Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", algorithm 2). */

/* -1, 0 or 1; NaN for what is not finite, so that the master tells of it. */
OP vf sign_of(vf x) {
    const vi bits = vf_bits(x), one = vi_set(0x3f800000);
    const vi size = vi_pick_gt(vi_and(bits, vi_set(SIMD_F32_ABS)), vi_set(0), one, vi_set(0));
    const vf sign = vf_from_bits(vi_xor(size, vi_and(bits, vi_set(0x80000000u))));
    return vf_add(sign, vf_fnma(x, vf_set(1.0f), x));
}

/* The order of operations is part of the promise N1: change it nowhere else.
 *   g = grad_scale * g
 *   c = (1 - beta1) * g + beta1 * m
 *   m = (1 - beta2) * g + beta2 * m
 *   w = decay * w - step_size * sign(c)         decay = 1 - lr * weight_decay; x * y + z: one rounding of the sum */
TARGET static void lion_block(struct block *at, size_t n, const simd_row *row) {
    const struct adam_factors k = adam_factors(row);
    for (size_t i = 0; i < n; i += W) {
        const vf g = vf_mul(k.grad_scale, vf_load(at->g + i)), m = vf_load(at->state[0] + i);
        const vf c = vf_fma(k.one_minus_beta1, g, vf_mul(k.beta1, m));
        vf_store(at->state[0] + i, vf_fma(k.one_minus_beta2, g, vf_mul(k.beta2, m)));
        vf_store(at->w + i, vf_fnma(k.step_size, sign_of(c), vf_mul(k.decay, vf_load(at->w + i))));
    }
}
