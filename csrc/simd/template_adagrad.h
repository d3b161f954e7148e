/* Part of template.h: Adagrad (Duchi et al. 2011, with torch.optim.Adagrad's eps and decay of the learning rate).
 *
 *   row->beta1, one_minus_beta1   1 and 0; in a tensor's first update 0 and the sum's initial value */

/* The order of operations is part of the promise N1: change it nowhere else.
 *   g = l2 * w + grad_scale * g
 *   s = g * g + (beta1 * s + one_minus_beta1)
 *   w = w - step_size * (g / (sqrt(s) + eps))   x * y + z: one rounding of the sum */
TARGET static void adagrad_block(struct block *at, size_t n, const simd_row *row) {
    const struct adam_factors k = adam_factors(row);
    for (size_t i = 0; i < n; i += W) {
        const vf w = vf_load(at->w + i), g = vf_fma(k.l2, w, vf_mul(k.grad_scale, vf_load(at->g + i)));
        const vf s = vf_fma(g, g, vf_fma(k.beta1, vf_load(at->state[0] + i), k.one_minus_beta1));
        vf_store(at->state[0] + i, s);
        vf_store(at->w + i, vf_fnma(k.step_size, vf_div(g, vf_add(vf_sqrt(s), k.eps)), w));
    }
}
