/* Part of template.h: the formats of an optimizer's state, decoded and encoded in blocks of <= 256 elements.
 *
 *   SIMD_F32          as it is
 *   SIMD_BF16         the high half
 *   SIMD_I8, SIMD_U8  x = (F(code) - 2) * scale, with a sign in I8; F(code): the float with the bits 0x40000000 +
 *                     (code << 20), that is 2 * 2^(code / 8) with straight lines in between; scale: what makes the largest
 *                     |x| of the block the last code, 127 or 255.  Steps are 6 to 12 % of x, and near zero 2e-6 (I8) or
 *                     3e-11 (U8) of the largest
 *
 * All of them are straight lines in the bits of a float, so adding a random number to the bits that are cut off rounds to
 * either neighbour with the probability that makes the expected value x.  What is encoded as U8 is never 0, but at least
 * code 1, for its square root is a divisor (a block of zeros has the scale 0). */
#define TWO_BITS 0x40000000u
#define I8_SPAN 122878.0f     /* F(127) - 2 */
#define U8_SPAN 8053063680.0f /* F(255) - 2, rounded */

/* ---- the numbers of random rounding ----
 * Element i of a block has the number a * T(i) + b mod 2^32: the first state rounds with its low bits, the second with its
 * high ones.  T(i) is fixed, 24 mixed bits (C. Wellons' lowbias32) before i itself; a and b are a hash of the tensor's key
 * and of the block, a odd.  For random a and b that is multiply-shift hashing (Dietzfelbinger 1996): the numbers of any two
 * elements of a block are pairwise independent but for their last few bits, and those of two blocks are unrelated.
 *
 * Each step adds RANDOM_STEP to b, so over the steps of one element the numbers fill the interval evenly (a Weyl sequence):
 * what rounding adds to a slowly moving average stays within a few steps of its format, where independent numbers would let
 * it walk away.  The price is a lag.  Measured on v = 0.999 v + 0.001 x (tests/simd/test_rounding.py):
 * bf16 0.7 % off (mean -0.4 %) against 5 %, U8 9 % (-3 %) against 22 %.  RANDOM_STEP was searched for evenness of its low
 * 16, its low 20 and all of its bits at once (0.9 % and 9 % with the golden section itself). */
#define RANDOM_STEP 0xb896937du
static const uint32_t random_ramp[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

struct random {
    vi a, b;
};

OP struct random random_of(uint64_t seed, uint32_t step) {
    return (struct random){vi_set((uint32_t)(seed >> 32) | 1), vi_set((uint32_t)seed + step * RANDOM_STEP)};
}

/* T of a vector whose first element is the block's `first`. */
OP vi random_place(uint32_t first) {
    const vi place = vi_add(vi_load(random_ramp), vi_set(first));
    vi x = vi_mul(vi_xor(place, vi_shr16(place)), vi_set(0x7feb352du));
    x = vi_mul(vi_xor(x, vi_shr15(x)), vi_set(0x846ca68bu));
    return vi_add(vi_mul(vi_xor(x, vi_shr16(x)), vi_set(256)), place);
}

OP vi random_number(const struct random *random, vi place) { return vi_add(vi_mul(place, random->a), random->b); }

/* `bits`: 16 for bf16, 20 for eight bits. */
OP vi random_low(vi number, int bits) { return vi_and(number, vi_set((1u << bits) - 1)); }

OP vi random_high(vi number, int bits) { return bits == 16 ? vi_shr16(number) : vi_shr12(number); }

/* ---- one vector of a format ---- */

OP vf decode_i8(const void *src, vf scale) {
    const vi code = vi_load_s8(src), sign = vi_and(code, vi_set(0x80000000u));
    const vf line = vf_from_bits(vi_xor(vi_add(vi_shl20(vi_abs(code)), vi_set(TWO_BITS)), sign));
    return vf_fma(line, scale, vf_from_bits(vi_xor(vf_bits(vf_mul(scale, vf_set(-2))), sign)));
}

OP vf decode_u8(const void *src, vf scale) {
    const vf line = vf_from_bits(vi_add(vi_shl20(vi_load_u8(src)), vi_set(TWO_BITS)));
    return vf_fma(line, scale, vf_mul(scale, vf_set(-2)));
}

OP vi magnitude_bits(vf x) { return vi_and(vf_bits(x), vi_set(SIMD_F32_ABS)); }

/* `factor`: 1 / scale.  random: 20 bits.  The code is in seven or eight bits from bit 20 on, the sign on top: factors see to
 * it that the largest does not run over. */
OP vi rounded_i8_line(vf x, vf factor, vi random) {
    return vi_add(vf_bits(vf_fma(x, factor, vf_signed(x, vf_set(2), vf_set(-2)))), random);
}

OP vi rounded_u8_line(vf x, vf factor, vi random) { return vi_add(vf_bits(vf_fma(x, factor, vf_set(2))), random); }

OP vi code_i8(vf x, vf factor, vi random) {
    const vi line = rounded_i8_line(x, factor, random);
    return vi_and(vi_sign(vi_and(vi_shr20(line), vi_set(0x7f)), line), vi_set(0xff));
}

OP vi code_u8(vf x, vf factor, vi random) {
    return vi_max(vi_and(vi_shr20(rounded_u8_line(x, factor, random)), vi_set(0xff)), vi_set(1));
}

/* Of anything but NaN, which may become anything. */
OP vi bf16_code(vf x, vi random) { return vi_shr16(vi_add(vf_bits(x), random)); }

/* ---- a block ---- */

OP uint32_t largest_bits(const float *src, size_t n) {
    vi largest = vi_set(0);
    for (size_t i = 0; i < n; i += W)
        largest = vi_max(largest, magnitude_bits(vf_load(src + i)));
    return vi_most(largest);
}

/* The scale of a block whose largest |x| has these bits; returns 1 / scale, or 0 where there is nothing to encode: the block
 * is zero, or it holds Inf or NaN and becomes NaN as a whole.  No scale is smaller than a normal number.  1 / scale is
 * smaller by 2^-22, more than its roundings, so that the line of the largest ends at the last code and never beyond. */
static inline float choose_scale(uint32_t bits, float span, float *scale) {
    uint32_t kept = bits >= SIMD_F32_INF ? SIMD_F32_NAN : bits;
    float chosen = simd_load_f32(&kept);
    if (bits && bits < SIMD_F32_INF) {
        chosen /= span;
        chosen = chosen < 0x1p-126f ? 0x1p-126f : chosen;
    }
    memcpy(scale, &chosen, sizeof chosen);
    return bits && bits < SIMD_F32_INF ? (1 - 0x1p-22f) / chosen : 0;
}

OP int encode_block_8(const float *src, void *dst, int is_signed, float *scale, const uint32_t *random, size_t n) {
    const uint32_t bits = largest_bits(src, n);
    const float factor = choose_scale(bits, is_signed ? I8_SPAN : U8_SPAN, scale);
    for (size_t i = 0; i < n; i += W) {
        const vf x = factor ? vf_load(src + i) : vf_set(0);
        const vi number = vi_load(random + i);
        uint32_t code[W];
        vi_store(code, is_signed ? code_i8(x, vf_set(factor), number) : code_u8(x, vf_set(factor), number));
        for (size_t j = 0; j < W; j++)
            ((uint8_t *)dst)[i + j] = (uint8_t)code[j];
    }
    return bits < SIMD_F32_INF ? SIMD_OK : SIMD_NONFINITE;
}

/* The numbers of a state, 0 or 1. */
TARGET static void fill_random(uint32_t *out, int state, int bits, const uint64_t *seed_step_start, size_t n) {
    const struct random random = random_of(seed_step_start[0], (uint32_t)seed_step_start[1]);
    for (size_t i = 0; i < n; i += W) {
        const vi number = random_number(&random, random_place((uint32_t)(seed_step_start[2] + i)));
        vi_store(out + i, state ? random_high(number, bits) : random_low(number, bits));
    }
}

TARGET static void decode_state(const void *src, int format, const float *scale, float *dst, size_t n) {
    const vf by = vf_set(format >= SIMD_I8 ? simd_load_f32(scale) : 0);
    if (format == SIMD_BF16)
        convert_loop(src, SIMD_BF16, dst, SIMD_F32, n);
    else if (format == SIMD_I8)
        for (size_t i = 0; i < n; i += W)
            vf_store(dst + i, decode_i8((const char *)src + i, by));
    else if (format == SIMD_U8)
        for (size_t i = 0; i < n; i += W)
            vf_store(dst + i, decode_u8((const char *)src + i, by));
    else
        memcpy(dst, src, 4 * n);
}

TARGET static int encode_state(const float *src, void *dst, int format, float *scale, const uint32_t *random, size_t n) {
    if (format == SIMD_I8)
        return encode_block_8(src, dst, 1, scale, random, n);
    if (format == SIMD_U8)
        return encode_block_8(src, dst, 0, scale, random, n);
    if (format == SIMD_F32)
        memcpy(dst, src, 4 * n);
    else
        for (size_t i = 0; i < n; i += W) {
            const vf x = vf_load(src + i);
            const vi code = bf16_code(x, vi_load(random + i));
            const vi nan = vi_set(SIMD_F32_NAN >> 16);
            vi_store_16((char *)dst + 2 * i, vi_pick_gt(magnitude_bits(x), vi_set(SIMD_F32_INF), nan, code));
        }
    return SIMD_OK;
}
