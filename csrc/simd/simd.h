/* Update, gradient and conversion kernels: one formula, one variant a file, one dispatcher.
 *
 * All variants give the same bits: explicit FMA, IEEE sqrt and divide, no contraction.
 * No alignment is required of any pointer; element order never depends on the number of threads.
 *
 * Split master (DESIGN T2): bits(master) = (hi << 16) + sign_extend(lo) mod 2^32, where hi is the bf16 weight and lo the
 * low 16 bits read as int16; splitting rounds half away in magnitude: hi = (bits + 0x8000) >> 16.
 */
#ifndef OFFLOAD_SIMD_H
#define OFFLOAD_SIMD_H

#include <stddef.h>
#include <stdint.h>

enum simd_format { SIMD_F32 = 0, SIMD_BF16 = 1, SIMD_F16 = 2,
                   SIMD_I8 = 3, SIMD_U8 = 4 }; /* of states only, with a scale per SIMD_BLOCK; U8: of what is never negative */
enum simd_status { SIMD_OK = 0, SIMD_NONFINITE = 1 }; /* SIMD_NONFINITE: some updated master is Inf or NaN, or a state in
                                                         eight bits is */
enum simd_algorithm { SIMD_ADAM = 0, SIMD_SGD = 1, SIMD_MOMENTUM = 2, SIMD_LION = 3, SIMD_ADAGRAD = 4,
                      SIMD_NUM_ALGORITHMS = 5 };

/* The variant in use: "portable", "avx2", "avx512", "neon".  Resolved once, at the first call, from the CPU and the
 * operating system's saved state, or forced by the environment variable OFFLOAD_SIMD. */
const char *simd_variant(void);
/* Force a variant from now on (tests, benchmarks); -EINVAL: unknown or not runnable here.  NULL: resolve again. */
int simd_select(const char *name);
int simd_supported(const char *name);

/* One row of hyper-parameters: everything that is equal for all elements of a tensor in a step.
 * Computed in double by the caller and rounded once.  Adam's use of it (template_adam.h has the formula;
 * template_sgd.h, template_lion.h and template_adagrad.h say how the other algorithms use the same fields): */
typedef struct simd_row {
    uint32_t algorithm;       /* enum simd_algorithm */
    uint32_t step;            /* of the tensor: one of the keys of random rounding */
    float grad_scale;         /* g = grad_scale * (float)grad: unscale x clip factor */
    float l2;                 /* L2 decay: g += l2 * w; 0 for none */
    float decay;              /* decoupled decay: w *= decay (1 - lr * weight_decay); 1 for none */
    float beta1;              /* m = beta1 * m + one_minus_beta1 * g */
    float one_minus_beta1;
    float beta2;              /* v = beta2 * v + one_minus_beta2 * g * g */
    float one_minus_beta2;
    float step_size;          /* lr / (1 - beta1^t) */
    float inv_sqrt_bias2;     /* 1 / sqrt(1 - beta2^t) */
    float eps;                /* w -= step_size * m / (sqrt(v) * inv_sqrt_bias2 + eps) */
} simd_row;

/* What an update works on, in place.  The master is split (hi, lo), or whole; then `weight` is written: the master rounded
 * to nearest even as `weight_format` (SIMD_F32: there is none, `weight` is not looked at).
 *
 * A state that is absent is NULL.  States in SIMD_BF16, SIMD_I8, SIMD_U8 are rounded with numbers that depend on `key`, the
 * element's place in its tensor and the row's step, and on nothing else (template_states.h).  With SIMD_I8 and SIMD_U8
 * `first` is a multiple of SIMD_BLOCK, and scale[i] has an entry for each block of SIMD_BLOCK elements. */
#define SIMD_BLOCK 256
typedef struct simd_streams {
    uint16_t *hi;         /* NULL: the master is whole */
    int16_t *lo;
    float *master;
    void *weight;
    void *state[2];       /* Adam: exp_avg, exp_avg_sq */
    float *scale[2];      /* NULL where the format needs none */
    const void *grad;     /* read only */
    uint64_t key;         /* of the tensor: a hash of its name */
    uint64_t first;       /* the element of the tensor that stands at 0 here */
    int32_t weight_format, grad_format;
    int32_t state_format[2];
} simd_streams;

/* Update `n` elements in one pass.  Returns enum simd_status (SIMD_NONFINITE also when a weight overflows its format), or
 * -EINVAL for formats, an algorithm or a `first` that do not fit. */
int simd_update(const simd_streams *at, size_t n, const simd_row *row);

/* One state between its format and fp32.  state: 0 or 1; it, key, first and step choose the numbers of the rounding. */
int simd_state_decode(const void *src, const float *scale, int format, float *dst, size_t n);
int simd_state_encode(const float *src, void *dst, float *scale, int format, size_t n, uint64_t key, uint64_t first,
                      uint32_t step, int state);
/* The numbers themselves, for tests: 16 (SIMD_BF16) or 20 bits for each of n elements. */
int simd_random(uint64_t key, uint64_t first, uint32_t step, int format, int state, uint32_t *out, size_t n);

/* Running sum of squares of one tensor (DESIGN 5b "Norm"): blocks of 1024 elements from the tensor's first one, fixed
 * lanes in fp64, blocks in order.  Zero-initialise; feed the tensor's pieces in order, cut anywhere. */
#define SIMD_NORM_BLOCK 1024
#define SIMD_NORM_LANES 16
typedef struct simd_norm {
    double lanes[16]; /* SIMD_NORM_LANES of the open block */
    double total;                  /* of the closed blocks */
    uint64_t count;                /* elements so far */
    uint64_t nonfinite;            /* elements that were Inf or NaN */
} simd_norm;
double simd_norm_value(const simd_norm *norm); /* the sum; NaN when an element was not finite */

/* Take a gradient contribution off the device: x = round(src) to `round_format`, then dst = x, or dst += x in fp32 when
 * `accumulate` is set, and add the *result's* squares to `norm` (may be NULL).  dst_format is SIMD_F32, or round_format
 * when not accumulating; else -EINVAL. */
int simd_grad_take(const void *src, int src_format, int round_format, void *dst, int dst_format, int accumulate,
                   size_t n, simd_norm *norm);
/* Sum of squares of what is kept already. */
int simd_norm_add(const void *src, int format, size_t n, simd_norm *norm);

int simd_convert(const void *src, int src_format, void *dst, int dst_format, size_t n); /* round to nearest even */
int simd_join(const uint16_t *hi, const int16_t *lo, float *dst, size_t n);              /* exact fp32 master */
int simd_split(const float *src, uint16_t *hi, int16_t *lo, size_t n);

/* The same call on `num_threads` threads (>= 1, explicit, the caller's own included): pieces are multiples of
 * 4096 elements, so the bits do not depend on the count. */
typedef struct simd_pool simd_pool;
/* One caller at a time (else -EBUSY).  After a fork the child's calls give -EPERM; it may close. */
int simd_pool_open(uint32_t num_threads, simd_pool **out);
void simd_pool_close(simd_pool *pool);
int simd_pool_update(simd_pool *pool, const simd_streams *at, size_t n, const simd_row *row);
int simd_pool_convert(simd_pool *pool, const void *src, int src_format, void *dst, int dst_format, size_t n);
int simd_pool_join(simd_pool *pool, const uint16_t *hi, const int16_t *lo, float *dst, size_t n);

#endif
