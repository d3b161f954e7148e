/* The traffic of an update without its arithmetic: what the memory allows.  Plain loops, left to the compiler, with and
 * without asking for lines ahead; the benchmark takes the faster of the two in each round.
 *
 * n is a multiple of 32.  Values stay what they were, within a bit, so that weights remain weights.
 */
#include <stddef.h>
#include <stdint.h>

#define TURN 32
#define AHEAD 512
#define ASK(at) __builtin_prefetch((const void *)((uintptr_t)(at) + AHEAD * sizeof *(at)))

/* 26 bytes an element: two 16-bit and two 32-bit streams rewritten in place, one 16-bit stream read. */
void limit_split(uint16_t *restrict hi, int16_t *restrict lo, float *restrict m, float *restrict v,
                 const uint16_t *restrict g, size_t n) {
    for (size_t i = 0; i < n; i++) {
        hi[i] ^= g[i] & 1;
        lo[i] ^= g[i] & 1;
        m[i] *= 0.9999f;
        v[i] *= 0.9999f;
    }
}

void limit_split_ahead(uint16_t *restrict hi, int16_t *restrict lo, float *restrict m, float *restrict v,
                       const uint16_t *restrict g, size_t n) {
    for (size_t t = 0; t < n; t += TURN, hi += TURN, lo += TURN, m += TURN, v += TURN, g += TURN) {
        ASK(hi), ASK(lo), ASK(g), ASK(m), ASK(m + 16), ASK(v), ASK(v + 16);
        for (size_t i = 0; i < TURN; i++) {
            hi[i] ^= g[i] & 1;
            lo[i] ^= g[i] & 1;
            m[i] *= 0.9999f;
            v[i] *= 0.9999f;
        }
    }
}

/* The same with states of 16 bits (18 bytes an element) and of 8 (14). */
#define LIMIT_STATES(name, state_type)                                                                                 \
    void name(uint16_t *restrict hi, int16_t *restrict lo, state_type *restrict m, state_type *restrict v,             \
              const uint16_t *restrict g, size_t n) {                                                                  \
        for (size_t i = 0; i < n; i++) {                                                                               \
            hi[i] ^= g[i] & 1;                                                                                         \
            lo[i] ^= g[i] & 1;                                                                                         \
            m[i] ^= g[i] & 1;                                                                                          \
            v[i] ^= g[i] & 1;                                                                                          \
        }                                                                                                              \
    }                                                                                                                  \
    void name##_ahead(uint16_t *restrict hi, int16_t *restrict lo, state_type *restrict m, state_type *restrict v,     \
                      const uint16_t *restrict g, size_t n) {                                                          \
        for (size_t t = 0; t < n; t += TURN, hi += TURN, lo += TURN, m += TURN, v += TURN, g += TURN) {                \
            ASK(hi), ASK(lo), ASK(g), ASK(m), ASK(v);                                                                  \
            name(hi, lo, m, v, g, TURN);                                                                               \
        }                                                                                                              \
    }
LIMIT_STATES(limit_bf16, uint16_t)
LIMIT_STATES(limit_int8, uint8_t)

/* 28 bytes an element: three 32-bit streams rewritten in place, one read. */
void limit_f32(float *restrict w, float *restrict m, float *restrict v, const float *restrict g, size_t n) {
    for (size_t i = 0; i < n; i++) {
        w[i] *= 0.9999f;
        m[i] = m[i] * 0.9999f + g[i] * 1e-9f;
        v[i] *= 0.9999f;
    }
}

void limit_f32_ahead(float *restrict w, float *restrict m, float *restrict v, const float *restrict g, size_t n) {
    for (size_t t = 0; t < n; t += TURN, w += TURN, m += TURN, v += TURN, g += TURN) {
        ASK(w), ASK(w + 16), ASK(m), ASK(m + 16), ASK(v), ASK(v + 16), ASK(g), ASK(g + 16);
        for (size_t i = 0; i < TURN; i++) {
            w[i] *= 0.9999f;
            m[i] = m[i] * 0.9999f + g[i] * 1e-9f;
            v[i] *= 0.9999f;
        }
    }
}
