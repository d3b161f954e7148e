/* Prints the variant, then a checksum of every kernel's results over pseudo-random bit patterns of many sizes.  Built for
 * two processors, the same variant-independent bits must come out of both. */
#include "simd.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#define MOST 2100

static uint64_t state = 1;

static uint32_t next_bits(void) { /* xorshift64* */
    state ^= state >> 12;
    state ^= state << 25;
    state ^= state >> 27;
    return (uint32_t)((state * 0x2545f4914f6cdd1dull) >> 32);
}

static void fill(void *at, size_t num_bytes) {
    for (size_t i = 0; i < num_bytes; i++)
        ((unsigned char *)at)[i] = (unsigned char)next_bits();
}

/* Exponents near one another, so that most results are finite. */
static void fill_floats(float *at, size_t n, int positive) {
    for (size_t i = 0; i < n; i++) {
        const uint32_t bits = (next_bits() & (positive ? 0x07ffffffu : 0x87ffffffu)) + 0x3a000000u;
        memcpy(at + i, &bits, 4);
    }
}

static uint64_t sum_of(uint64_t sum, const void *at, size_t num_bytes) { /* FNV-1a */
    for (size_t i = 0; i < num_bytes; i++)
        sum = (sum ^ ((const unsigned char *)at)[i]) * 0x100000001b3ull;
    return sum;
}

static float f32[4][MOST];
static uint16_t u16[4][MOST];
static uint64_t sum;

static float scales[32];

static void update(uint32_t algorithm, size_t n, int format, int wild, const int *state_formats) {
    const simd_row row = {algorithm, 5, .37f, .01f, .999f, .9f, .1f, .999f, .001f, 3e-4f, 1.25f, 1e-8f};
    fill(u16, sizeof u16);
    fill(f32, sizeof f32);
    fill(scales, sizeof scales);
    if (!wild) {
        fill_floats(scales, sizeof scales / sizeof *scales, 1);
        fill_floats(f32[0], n, 0);
        fill_floats(f32[1], n, 1);
        fill_floats(f32[2], n, 0);
        simd_split(f32[2], u16[0], (int16_t *)u16[1], n);
        fill_floats(f32[2], n, 0);
        if (format != SIMD_F32)
            simd_convert(f32[2], SIMD_F32, f32[3], format, n);
        memcpy(f32[2], format == SIMD_F32 ? f32[2] : f32[3], 4 * n);
    }
    const simd_streams at = {.hi = u16[0], .lo = (int16_t *)u16[1], .state = {f32[0], f32[1]}, .scale = {scales, scales + 16},
                             .grad = f32[2], .grad_format = format, .key = 77, .first = 512,
                             .state_format = {state_formats[0], state_formats[1]}};
    const int status = simd_update(&at, n, &row);
    sum = sum_of(sum, &status, sizeof status);
    sum = sum_of(sum, u16, sizeof u16);
    sum = sum_of(sum, f32, sizeof f32);
    sum = sum_of(sum, scales, sizeof scales);
}

static void adam_whole(size_t n, int format, int weight_format) {
    const simd_row row = {SIMD_ADAM, 5, .37f, .01f, .999f, .9f, .1f, .999f, .001f, 3e-4f, 1.25f, 1e-8f};
    fill(f32, sizeof f32);
    const simd_streams at = {.master = f32[0], .weight = u16[0], .weight_format = weight_format, .state = {f32[1], f32[2]},
                             .grad = f32[3], .grad_format = format};
    const int status = simd_update(&at, n, &row);
    sum = sum_of(sum, &status, sizeof status);
    sum = sum_of(sum, u16[0], sizeof u16[0]);
    sum = sum_of(sum, f32, sizeof f32);
}

static void formats(size_t n) {
    for (int from = SIMD_F32; from <= SIMD_F16; from++)
        for (int to = SIMD_F32; to <= SIMD_F16; to++) {
            fill(f32, sizeof f32);
            simd_convert(f32[0], from, f32[1], to, n);
            sum = sum_of(sum, f32[1], sizeof f32[1]);
        }
    simd_split(f32[2], u16[0], (int16_t *)u16[1], n);
    simd_join(u16[0], (int16_t *)u16[1], f32[3], n);
    sum = sum_of(sum, u16, sizeof u16);
    sum = sum_of(sum, f32[3], 4 * n);
}

static void gradients(size_t n, int format, int wild) {
    simd_norm norm = {.count = 0};
    fill(f32, sizeof f32);
    fill_floats(f32[0], n, 0);
    if (!wild)
        fill_floats(f32[1], n, 0);
    simd_grad_take(f32[1], format, SIMD_BF16, f32[0], SIMD_F32, !wild, n, &norm);
    simd_norm_add(f32[2], format, n / 3, &norm);
    const double value = simd_norm_value(&norm);
    sum = sum_of(sum, &norm, sizeof norm);
    sum = sum_of(sum, &value, norm.nonfinite ? 0 : sizeof value);
    if (!wild)
        sum = sum_of(sum, f32[0], sizeof f32[0]);
}

int main(void) {
    static const size_t sizes[] = {0, 1, 2, 15, 16, 17, 31, 32, 33, 63, 97, 1023, 1024, 1025, 2089};
    static const int state_formats[][2] = {{SIMD_F32, SIMD_F32}, {SIMD_BF16, SIMD_BF16}, {SIMD_I8, SIMD_U8}};
    printf("%s\n", simd_variant());
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        sum = 0xcbf29ce484222325ull;
        for (int format = SIMD_F32; format <= SIMD_F16; format++)
            for (int wild = 0; wild < 2; wild++) {
                for (uint32_t algorithm = 0; algorithm < SIMD_NUM_ALGORITHMS; algorithm++)
                    for (int state = 0; state < 3; state++)
                        update(algorithm, sizes[i], format, wild, state_formats[state]);
                printf("%zu update %d %d %016" PRIx64 "\n", sizes[i], format, wild, sum);
                gradients(sizes[i], format, wild);
                printf("%zu gradients %d %d %016" PRIx64 "\n", sizes[i], format, wild, sum);
            }
        for (int format = SIMD_F32; format <= SIMD_F16; format++)
            for (int weight_format = SIMD_F32; weight_format <= SIMD_F16; weight_format++)
                adam_whole(sizes[i], format, weight_format);
        formats(sizes[i]);
        printf("%zu formats %016" PRIx64 "\n", sizes[i], sum);
    }
    return 0;
}
