/* Part of template.h: fp32, bf16, fp16 and the split master; everything is fp32 in registers. */

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
