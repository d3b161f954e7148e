/* One state between its format and fp32: what readers, editors and importers need outside of an update. */
#include "kernels.h"

#include <errno.h>

static size_t padded(size_t n) { return (n + SIMD_TURN - 1) / SIMD_TURN * SIMD_TURN; }

int simd_state_decode(const void *src, const float *scale, int format, float *dst, size_t n) {
    const char *from = src;
    if (!simd_state_format_valid(format))
        return -EINVAL;
    while (n) {
        const size_t piece = n < SIMD_BLOCK ? n : SIMD_BLOCK;
        float codes[SIMD_BLOCK] = {0}, decoded[SIMD_BLOCK];
        memcpy(codes, from, simd_format_bytes(format) * piece);
        simd_current()->decode_state(codes, format, scale, decoded, padded(piece));
        memcpy(dst, decoded, 4 * piece);
        from += simd_format_bytes(format) * piece;
        scale += scale != NULL;
        dst += piece;
        n -= piece;
    }
    return 0;
}

int simd_random(uint64_t key, uint64_t first, uint32_t step, int format, int state, uint32_t *out, size_t n) {
    if (!simd_state_format_valid(format) || state < 0 || state >= SIMD_STATES)
        return -EINVAL;
    while (n) {
        const size_t space = SIMD_BLOCK - first % SIMD_BLOCK, piece = n < space ? n : space;
        const uint64_t start[] = {simd_seed(key, first / SIMD_BLOCK), step, first % SIMD_BLOCK};
        uint32_t numbers[SIMD_BLOCK + SIMD_TURN];
        simd_current()->fill_random(numbers, state, simd_random_bits(format), start, padded(piece));
        memcpy(out, numbers, 4 * piece);
        out += piece;
        first += piece;
        n -= piece;
    }
    return 0;
}

int simd_state_encode(const float *src, void *dst, float *scale, int format, size_t n, uint64_t key, uint64_t first,
                      uint32_t step, int state) {
    int status = SIMD_OK;
    char *to = dst;
    if (!simd_state_format_valid(format) || state < 0 || state >= SIMD_STATES)
        return -EINVAL;
    if (format >= SIMD_I8 && (first % SIMD_BLOCK || (n && !scale)))
        return -EINVAL;
    while (n) {
        const size_t space = SIMD_BLOCK - first % SIMD_BLOCK, piece = n < space ? n : space;
        float values[SIMD_BLOCK] = {0}, codes[SIMD_BLOCK];
        uint32_t numbers[SIMD_BLOCK] = {0};
        memcpy(values, src, 4 * piece);
        simd_random(key, first, step, format, state, numbers, piece);
        status |= simd_current()->encode_state(values, codes, format, scale, numbers, padded(piece));
        memcpy(to, codes, simd_format_bytes(format) * piece);
        src += piece;
        to += simd_format_bytes(format) * piece;
        scale += scale != NULL;
        first += piece;
        n -= piece;
    }
    return status;
}
