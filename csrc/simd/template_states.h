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
 * either neighbour with the probability that makes the expected value x.  A positive U8 never becomes zero: its square root
 * is a divisor. */
#define TWO_BITS 0x40000000u
#define I8_TOP_BITS (TWO_BITS + (127u << 20))
#define U8_TOP_BITS (TWO_BITS + (255u << 20))
#define I8_SPAN 122878.0f     /* F(127) - 2 */
#define U8_SPAN 8053063680.0f /* F(255) - 2, rounded */

/* ---- the numbers of random rounding ----
 * An element has 32 mixed bits, of its tensor's key and its place: the first state rounds with the low ones, the second with
 * the high ones.  Each step adds the same odd number, the golden section of the interval.  So over elements the numbers are
 * independent, so each rounding is unbiased, and over the steps of one element they fill the interval evenly (a Weyl
 * sequence): what rounding adds to a slowly moving average stays within a few steps of its format, where independent
 * numbers would let it walk away.  The price is a lag.  Measured on v = 0.999 v + 0.001 x (tests/simd/test_rounding.py):
 * bf16 0.8 % off (mean -0.4 %) against 5 %, U8 10 % (-6 %) against 22 %.
 * Mixing: C. Wellons' lowbias32; half of the block's seed goes in front, half into its middle. */
#define RANDOM_STEP 0x9e3779b9u
static const uint32_t random_ramp[16] = {
    0 * RANDOM_STEP,  1 * RANDOM_STEP,  2 * RANDOM_STEP,  3 * RANDOM_STEP,  4 * RANDOM_STEP,  5 * RANDOM_STEP,
    6 * RANDOM_STEP,  7 * RANDOM_STEP,  8 * RANDOM_STEP,  9 * RANDOM_STEP,  10 * RANDOM_STEP, 11 * RANDOM_STEP,
    12 * RANDOM_STEP, 13 * RANDOM_STEP, 14 * RANDOM_STEP, 15 * RANDOM_STEP};

struct random {
    vi counter, seed, low_turn, high_turn;
};

/* `start`: the place in its block of the first element.  `bits` of a number: 16 for bf16, 20 for eight bits. */
OP struct random random_from(uint64_t seed, uint32_t step, uint32_t start, int bits) {
    return (struct random){vi_add(vi_load(random_ramp), vi_set((uint32_t)seed + start * RANDOM_STEP)),
                           vi_set((uint32_t)(seed >> 32)), vi_set(step * (bits == 16 ? 40503u : 648055u)),
                           vi_set(step * 0x9e3779b9u)};
}

OP vi random_mixed(struct random *random) {
    vi x = random->counter;
    random->counter = vi_add(x, vi_set(W * RANDOM_STEP));
    x = vi_xor(x, vi_shr16(x));
    x = vi_mul(x, vi_set(0x7feb352du));
    x = vi_add(vi_xor(x, vi_shr15(x)), random->seed);
    x = vi_mul(x, vi_set(0x846ca68bu));
    return vi_xor(x, vi_shr16(x));
}

OP vi random_low(const struct random *random, vi mixed, int bits) {
    return vi_and(vi_add(mixed, random->low_turn), vi_set((1u << bits) - 1));
}

OP vi random_high(const struct random *random, vi mixed, int bits) {
    const vi turned = vi_add(mixed, random->high_turn);
    return bits == 16 ? vi_shr16(turned) : vi_shr12(turned);
}

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

/* `factor`: 1 / scale.  random: 20 bits.  The code is in the low byte, or seven bits, of what this returns. */
OP vi rounded_line(vf x, vf factor, vi random, uint32_t top_bits) {
    const vf line = vf_fma(vf_from_bits(magnitude_bits(x)), factor, vf_set(2));
    return vi_shr20(vi_min(vi_add(vf_bits(line), random), vi_set(top_bits)));
}

OP vi code_i8(vf x, vf factor, vi random) {
    const vi code = vi_and(rounded_line(x, factor, random, I8_TOP_BITS), vi_set(0x7f));
    return vi_and(vi_sign(code, vf_bits(x)), vi_set(0xff));
}

OP vi code_u8(vf x, vf factor, vi random) {
    const vi code = vi_and(rounded_line(x, factor, random, U8_TOP_BITS), vi_set(0xff));
    return vi_max(code, vi_min(magnitude_bits(x), vi_set(1)));
}

/* Of anything but NaN, which may become anything. */
OP vi bf16_code(vf x, vi random) { return vi_shr16(vi_add(vf_bits(x), random)); }

/* ---- a block ---- */

OP uint32_t most_of(vi bits) {
    float found[W];
    uint32_t most = 0;
    vf_store(found, vf_from_bits(bits));
    for (size_t i = 0; i < W; i++)
        most = simd_load_u32(found + i) > most ? simd_load_u32(found + i) : most;
    return most;
}

OP uint32_t largest_bits(const float *src, size_t n) {
    vi largest = vi_set(0);
    for (size_t i = 0; i < n; i += W)
        largest = vi_max(largest, magnitude_bits(vf_load(src + i)));
    return most_of(largest);
}

/* The scale of a block whose largest |x| has these bits; returns 1 / scale, or 0 where there is nothing to encode: the block
 * is zero, or it holds Inf or NaN and becomes NaN as a whole.  No scale is smaller than a normal number. */
static inline float choose_scale(uint32_t bits, float span, float *scale) {
    uint32_t kept = bits >= SIMD_F32_INF ? SIMD_F32_NAN : bits;
    float chosen = simd_load_f32(&kept);
    if (bits && bits < SIMD_F32_INF) {
        chosen /= span;
        chosen = chosen < 0x1p-126f ? 0x1p-126f : chosen;
    }
    memcpy(scale, &chosen, sizeof chosen);
    return bits && bits < SIMD_F32_INF ? 1 / chosen : 0;
}

OP int encode_block_8(const float *src, void *dst, int is_signed, float *scale, const uint32_t *random, size_t n) {
    const uint32_t bits = largest_bits(src, n);
    const float factor = choose_scale(bits, is_signed ? I8_SPAN : U8_SPAN, scale);
    for (size_t start = 0; start < n; start += SIMD_TURN) {
        vi code[NUM_VECS];
        EACH_VEC(j) {
            const vf x = factor ? vf_load(src + start + j * W) : vf_set(0);
            const vi number = vi_load(random + start + j * W);
            code[j] = is_signed ? code_i8(x, vf_set(factor), number) : code_u8(x, vf_set(factor), number);
        }
        turn_store_8((char *)dst + start, code);
    }
    return bits < SIMD_F32_INF ? SIMD_OK : SIMD_NONFINITE;
}

/* The numbers of a state, 0 or 1. */
TARGET static void fill_random(uint32_t *out, int state, int bits, const uint64_t *seed_step_start, size_t n) {
    struct random random = random_from(seed_step_start[0], (uint32_t)seed_step_start[1], (uint32_t)seed_step_start[2], bits);
    for (size_t i = 0; i < n; i += W) {
        const vi mixed = random_mixed(&random);
        vi_store(out + i, state ? random_high(&random, mixed, bits) : random_low(&random, mixed, bits));
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
