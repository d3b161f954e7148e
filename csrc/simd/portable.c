/* Plain C, one element a vector: the reference of the other variants and the way out on unknown processors. */
#include "kernels.h"

#include <math.h>

#define VARIANT "portable"
#define KERNELS simd_kernels_portable
#define TARGET
#define W 1
typedef float vf;
typedef int32_t vi;
typedef struct vh {
    int16_t x[2];
} vh;
typedef struct lanes {
    double sum[SIMD_NORM_LANES];
} lanes;

static inline vf vf_load(const void *at) { return simd_load_f32(at); }
static inline void vf_store(void *at, vf x) { memcpy(at, &x, sizeof x); }
static inline vf vf_set(float x) { return x; }
static inline vf vf_add(vf a, vf b) { return a + b; }
static inline vf vf_mul(vf a, vf b) { return a * b; }
static inline vf vf_div(vf a, vf b) { return a / b; }
static inline vf vf_sqrt(vf a) { return sqrtf(a); }
static inline vf vf_fma(vf a, vf b, vf c) { return fmaf(a, b, c); }
static inline vf vf_fnma(vf a, vf b, vf c) { return fmaf(-a, b, c); }
static inline vf vf_signed(vf x, vf plus, vf minus) { return simd_load_u32(&x) >> 31 ? minus : plus; }

static inline vi vi_load_u16(const void *at) { return simd_load_u16(at); }
static inline vi vi_load_s16(const void *at) { return (int16_t)simd_load_u16(at); }
static inline void vi_store_16(void *at, vi x) { memcpy(at, &(uint16_t){(uint16_t)x}, 2); }
static inline vi vi_load(const void *at) { return (vi)simd_load_u32(at); }
static inline void vi_store(void *at, vi x) { memcpy(at, &x, sizeof x); }
static inline vi vi_load_u8(const void *at) { return *(const uint8_t *)at; }
static inline vi vi_load_s8(const void *at) { return *(const int8_t *)at; }
static inline vi vi_set(uint32_t x) { return (vi)x; }
static inline vi vi_add(vi a, vi b) { return (vi)((uint32_t)a + (uint32_t)b); }
static inline vi vi_abs(vi a) { return a < 0 ? -a : a; }
static inline vi vi_sign(vi a, vi b) { return b < 0 ? -a : a; }
static inline vi vi_and(vi a, vi b) { return a & b; }
static inline vi vi_xor(vi a, vi b) { return a ^ b; }
static inline vi vi_mul(vi a, vi b) { return (vi)((uint32_t)a * (uint32_t)b); }
static inline vi vi_max(vi a, vi b) { return a > b ? a : b; }
static inline vi vi_shl16(vi a) { return (vi)((uint32_t)a << 16); }
static inline vi vi_shr16(vi a) { return (vi)((uint32_t)a >> 16); }
static inline vi vi_shr12(vi a) { return (vi)((uint32_t)a >> 12); }
static inline vi vi_shr15(vi a) { return (vi)((uint32_t)a >> 15); }
static inline vi vi_shl20(vi a) { return (vi)((uint32_t)a << 20); }
static inline vi vi_shr20(vi a) { return (vi)((uint32_t)a >> 20); }
static inline vi vi_pick_gt(vi a, vi b, vi yes, vi no) { return a > b ? yes : no; }
static inline int vi_any_ge(vi a, int32_t limit) { return a >= limit; }
static inline uint32_t vi_most(vi a) { return (uint32_t)a; }
static inline vi vf_bits(vf x) { return (vi)simd_load_u32(&x); }
static inline vf vf_from_bits(vi x) { return simd_load_f32(&x); }

static inline vh vh_load(const void *at) {
    vh x;
    memcpy(x.x, at, sizeof x.x);
    return x;
}
static inline void vh_store(void *at, vh x) { memcpy(at, x.x, sizeof x.x); }
static inline vh vh_load_u8(const void *at) { return (vh){{((const uint8_t *)at)[0], ((const uint8_t *)at)[1]}}; }
static inline vh vh_load_s8(const void *at) { return (vh){{((const int8_t *)at)[0], ((const int8_t *)at)[1]}}; }
static inline vh vh_set(uint16_t x) { return (vh){{(int16_t)x, (int16_t)x}}; }
static inline vh vh_add(vh a, vh b) { return (vh){{(int16_t)(a.x[0] + b.x[0]), (int16_t)(a.x[1] + b.x[1])}}; }
static inline vh vh_sub(vh a, vh b) { return (vh){{(int16_t)(a.x[0] - b.x[0]), (int16_t)(a.x[1] - b.x[1])}}; }
static inline vh vh_and(vh a, vh b) { return (vh){{a.x[0] & b.x[0], a.x[1] & b.x[1]}}; }
static inline vh vh_or(vh a, vh b) { return (vh){{a.x[0] | b.x[0], a.x[1] | b.x[1]}}; }
static inline vh vh_max(vh a, vh b) {
    return (vh){{a.x[0] > b.x[0] ? a.x[0] : b.x[0], a.x[1] > b.x[1] ? a.x[1] : b.x[1]}};
}
static inline vh vh_sign(vh a, vh b) {
    return (vh){{(int16_t)(b.x[0] < 0 ? -a.x[0] : a.x[0]), (int16_t)(b.x[1] < 0 ? -a.x[1] : a.x[1])}};
}
static inline vh vh_abs(vh a) { return vh_sign(a, a); }
static inline vh vh_shl4(vh a) { return (vh){{(int16_t)((uint16_t)a.x[0] << 4), (int16_t)((uint16_t)a.x[1] << 4)}}; }
static inline vh vh_shr4(vh a) { return (vh){{(int16_t)((uint16_t)a.x[0] >> 4), (int16_t)((uint16_t)a.x[1] >> 4)}}; }
static inline vh vh_sra15(vh a) { return (vh){{a.x[0] < 0 ? -1 : 0, a.x[1] < 0 ? -1 : 0}}; }
static inline int vh_any_ge(vh a, int16_t limit) { return a.x[0] >= limit || a.x[1] >= limit; }
static inline vi halves(int16_t low, int16_t high) { return (vi)((uint32_t)(uint16_t)high << 16 | (uint16_t)low); }
static inline vi vh_low(vh low, vh high) { return halves(low.x[0], high.x[0]); }
static inline vi vh_high(vh low, vh high) { return halves(low.x[1], high.x[1]); }
static inline vh vh_pack_low(vi a, vi b) { return (vh){{(int16_t)a, (int16_t)b}}; }
static inline vh vh_pack_high(vi a, vi b) { return vh_pack_low(vi_shr16(a), vi_shr16(b)); }
static inline void pair_order(vf *pair) { (void)pair; } /* the natural one */
static inline void turn_store_u8(void *at, const vh *x) {
    for (size_t i = 0; i < SIMD_TURN; i++)
        ((uint8_t *)at)[i] = (uint8_t)x[i / 2].x[i % 2];
}
static inline void turn_store_s8(void *at, const vh *x) { turn_store_u8(at, x); }

/* Half precision by hand: exponent 5 bits (bias 15), fraction 10. */
static inline vf vf_load_f16(const void *at) {
    const uint32_t half = simd_load_u16(at), sign = (half & 0x8000u) << 16, magnitude = half & 0x7fffu;
    if (magnitude >= 0x7c00u) { /* Inf; NaN becomes quiet */
        const uint32_t quiet = magnitude > 0x7c00u ? 0x400000u : 0;
        return vf_from_bits((vi)(sign | SIMD_F32_INF | (magnitude & 0x3ffu) << 13 | quiet));
    }
    if (magnitude < 0x400u) { /* subnormal: fraction * 2^-24, exact */
        const float tiny = (float)magnitude * 0x1p-24f;
        return vf_from_bits((vi)(sign | simd_load_u32(&tiny)));
    }
    return vf_from_bits((vi)(sign | ((magnitude << 13) + (112u << 23))));
}

static inline uint16_t half_from_bits(uint32_t bits) {
    const uint32_t sign = bits >> 16 & 0x8000u, magnitude = bits & SIMD_F32_ABS;
    if (magnitude > SIMD_F32_INF)
        return (uint16_t)(sign | 0x7e00u | (magnitude >> 13 & 0x3ffu));
    if (magnitude >= 0x477ff000u) /* 65520: half way beyond the largest half */
        return (uint16_t)(sign | 0x7c00u);
    if (magnitude < 0x38800000u) { /* below 2^-14: adding 0.5 makes the hardware round at 2^-24 */
        const float shifted = vf_from_bits((vi)magnitude) + 0.5f;
        return (uint16_t)(sign | (simd_load_u32(&shifted) - 0x3f000000u));
    }
    const uint32_t odd = magnitude >> 13 & 1u;
    return (uint16_t)(sign | ((magnitude - (112u << 23) + 0xfffu + odd) >> 13));
}

static inline void vf_store_f16(void *at, vf x) { memcpy(at, &(uint16_t){half_from_bits(simd_load_u32(&x))}, 2); }

static inline lanes lanes_load(const double *sums) {
    lanes open;
    memcpy(open.sum, sums, sizeof open.sum);
    return open;
}
static inline void lanes_store(double *sums, lanes open) { memcpy(sums, open.sum, sizeof open.sum); }
static inline lanes lanes_add_squares(lanes open, const void *at) {
    for (size_t i = 0; i < SIMD_NORM_LANES; i++) {
        const double x = simd_load_f32((const char *)at + 4 * i);
        open.sum[i] += x * x;
    }
    return open;
}

#include "template.h"
