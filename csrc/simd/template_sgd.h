/* Part of template.h: stochastic gradient descent, without and with momentum (torch.optim.SGD's).
 *
 *   row->beta1, one_minus_beta1   momentum and 1 - dampening; 0 and 1 in a tensor's first update
 *   row->beta2, one_minus_beta2   of the momentum and of the gradient in what is subtracted: 1 and 0, or with Nesterov
 *                                 momentum and 1 */

/* The order of operations is part of the promise N1: change it nowhere else.
 *   g = l2 * w + grad_scale * g
 *   w = w - step_size * g                       x * y + z: one rounding of the sum */
TARGET static void sgd_block(struct block *at, size_t n, const simd_row *row) {
    const struct adam_factors k = adam_factors(row);
    for (size_t i = 0; i < n; i += W) {
        const vf w = vf_load(at->w + i), g = vf_fma(k.l2, w, vf_mul(k.grad_scale, vf_load(at->g + i)));
        vf_store(at->w + i, vf_fnma(k.step_size, g, w));
    }
}

/*   g = l2 * w + grad_scale * g
 *   b = one_minus_beta1 * g + beta1 * b
 *   d = beta2 * b + one_minus_beta2 * g
 *   w = w - step_size * d */
TARGET static void momentum_block(struct block *at, size_t n, const simd_row *row) {
    const struct adam_factors k = adam_factors(row);
    for (size_t i = 0; i < n; i += W) {
        const vf w = vf_load(at->w + i), g = vf_fma(k.l2, w, vf_mul(k.grad_scale, vf_load(at->g + i)));
        const vf b = vf_fma(k.one_minus_beta1, g, vf_mul(k.beta1, vf_load(at->state[0] + i)));
        const vf d = vf_fma(k.beta2, b, vf_mul(k.one_minus_beta2, g));
        vf_store(at->state[0] + i, b);
        vf_store(at->w + i, vf_fnma(k.step_size, d, w));
    }
}
