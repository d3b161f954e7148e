/* Part of template.h: what gradients need on their way out. */

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
