/* What a variant offers to the dispatcher: a table of kernels, each over one contiguous piece.
 *
 * A variant file defines a small vector vocabulary and includes template.h, which holds every formula once:
 *
 *   dispatch.c --> simd_kernels_avx2 --+
 *              --> simd_kernels_neon --+-- template.h (formulas, loops, tails) over vf, vi, vf_fma, ...
 *              --> ...               --+
 */
#ifndef OFFLOAD_SIMD_KERNELS_H
#define OFFLOAD_SIMD_KERNELS_H

#include "simd.h"

#include <string.h>

/* Elements that are loaded from every stream before any is stored: a full cache line of the 16-bit streams.  With less,
 * streams whose addresses differ by a large power of two run at a quarter of the speed. */
#define SIMD_TURN 32

/* Elements between what is asked for and what is used.  Measured on AVX-512 and AVX2 with state in memory: 9 % faster than
 * without, 128 and 1024 gain less. */
#define SIMD_AHEAD 512

#define SIMD_F32_ABS 0x7fffffffu
#define SIMD_F32_INF 0x7f800000u
#define SIMD_F32_NAN 0x7fc00000u
#define SIMD_BF16_LIMIT 0x7f7f8000u /* a master from here on would give an infinite weight */
#define SIMD_F16_LIMIT 0x477ff000u

#define SIMD_STATES 2  /* of simd_streams */

/* What Adam's own loop works on.  The master is split (hi, lo), or whole, then with a 16-bit copy of it as the weight or none. */
typedef struct simd_adam_streams {
    uint16_t *hi;
    int16_t *lo;
    float *master;
    void *weight;
    float *exp_avg;
    float *exp_avg_sq;
    const void *grad;
} simd_adam_streams;

typedef struct simd_adam_shape {
    int is_split;
    int weight_format; /* of a whole master's copy; SIMD_F32: there is none */
    int grad_format;
} simd_adam_shape;

struct simd_kernels {
    const char *name;
    int (*update)(simd_streams at, size_t n, const simd_row *row);
    /* Blocks of <= SIMD_BLOCK elements; n is a multiple of SIMD_TURN. */
    void (*fill_random)(uint32_t *out, int state, int bits, const uint64_t *seed_step_start, size_t n);
    void (*decode_state)(const void *src, int format, const float *scale, float *dst, size_t n);
    int (*encode_state)(const float *src, void *dst, int format, float *scale, const uint32_t *random, size_t n);
    void (*convert)(const void *src, int src_format, void *dst, int dst_format, size_t n); /* formats differ */
    void (*accumulate)(const float *src, void *dst, size_t n);                             /* dst += src, fp32 */
    /* Add squares to the lanes, the first element to lane `first`; returns how many were Inf or NaN (left out). */
    size_t (*sum_squares)(const void *src, size_t n, size_t first, double *lanes);
    void (*join)(const uint16_t *hi, const int16_t *lo, float *dst, size_t n);
    void (*split)(const float *src, uint16_t *hi, int16_t *lo, size_t n);
};

extern const struct simd_kernels simd_kernels_portable;
#if defined(__x86_64__)
extern const struct simd_kernels simd_kernels_avx2;
extern const struct simd_kernels simd_kernels_avx512;
#elif defined(__aarch64__)
extern const struct simd_kernels simd_kernels_neon;
#endif
const struct simd_kernels *simd_current(void);
int simd_pool_run_update(simd_pool *pool, const simd_streams *at, size_t n, const simd_row *row); /* pool.c; checked */

static inline int simd_random_bits(int format) { return format == SIMD_BF16 ? 16 : 20; }

static inline size_t simd_format_bytes(int format) { return format == SIMD_F32 ? 4 : format >= SIMD_I8 ? 1 : 2; }

static inline int simd_format_valid(int format) { return format >= SIMD_F32 && format <= SIMD_F16; }

static inline int simd_state_format_valid(int format) {
    return format == SIMD_F32 || format == SIMD_BF16 || format == SIMD_I8 || format == SIMD_U8;
}

static inline simd_adam_streams simd_adam_from(simd_adam_streams at, simd_adam_shape shape, size_t first) {
    if (shape.is_split) {
        at.hi += first;
        at.lo += first;
    } else {
        at.master += first;
        if (shape.weight_format != SIMD_F32)
            at.weight = (char *)at.weight + 2 * first;
    }
    at.exp_avg += first;
    at.exp_avg_sq += first;
    at.grad = (const char *)at.grad + simd_format_bytes(shape.grad_format) * first;
    return at;
}

/* The streams `elems` further on; in int8 formats a multiple of SIMD_BLOCK, or the end. */
static inline simd_streams simd_streams_from(simd_streams at, size_t elems) {
    if (at.hi) {
        at.hi += elems;
        at.lo += elems;
    } else {
        at.master += elems;
        if (at.weight_format != SIMD_F32)
            at.weight = (char *)at.weight + 2 * elems;
    }
    for (int i = 0; i < SIMD_STATES; i++) {
        if (at.state[i])
            at.state[i] = (char *)at.state[i] + simd_format_bytes(at.state_format[i]) * elems;
        if (at.scale[i])
            at.scale[i] += elems / SIMD_BLOCK;
    }
    at.grad = (const char *)at.grad + simd_format_bytes(at.grad_format) * elems;
    at.first += elems;
    return at;
}

/* What the numbers of one block of a tensor begin with: two rounds of SplitMix64's finalizer. */
static inline uint64_t simd_mix64(uint64_t x) {
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

static inline uint64_t simd_seed(uint64_t key, uint64_t block) {
    return simd_mix64(simd_mix64(key) + block * 0x9e3779b97f4a7c15u);
}

static inline float simd_load_f32(const void *at) {
    float value;
    memcpy(&value, at, sizeof value);
    return value;
}

static inline uint32_t simd_load_u32(const void *at) {
    uint32_t bits;
    memcpy(&bits, at, sizeof bits);
    return bits;
}

static inline uint16_t simd_load_u16(const void *at) {
    uint16_t bits;
    memcpy(&bits, at, sizeof bits);
    return bits;
}

#endif
