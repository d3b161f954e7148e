/* Gradients on their way out: round, keep or accumulate, sum of squares, in blocks that stay in the first-level cache.
 *
 *   src --round--> x --keep or add--> dst --squares--> norm        one block of <= 1024 elements after the other
 */
#include "kernels.h"

#include <errno.h>
#include <math.h>

/* Sixteen lanes to one number, always in this order. */
static double reduce(const double *lanes) {
    double sum[SIMD_NORM_LANES];
    memcpy(sum, lanes, sizeof sum);
    for (size_t width = SIMD_NORM_LANES / 2; width; width /= 2)
        for (size_t i = 0; i < width; i++)
            sum[i] += sum[i + width];
    return sum[0];
}

double simd_norm_value(const simd_norm *norm) { return norm->nonfinite ? NAN : norm->total + reduce(norm->lanes); }

static size_t elems_to_block_end(const simd_norm *norm) {
    return SIMD_NORM_BLOCK - (norm ? norm->count % SIMD_NORM_BLOCK : 0);
}

/* Elements within one block. */
static void add_squares(const void *src, size_t n, simd_norm *norm) {
    norm->nonfinite += simd_current()->sum_squares(src, n, norm->count % SIMD_NORM_LANES, norm->lanes);
    norm->count += n;
    if (norm->count % SIMD_NORM_BLOCK)
        return;
    norm->total += reduce(norm->lanes);
    memset(norm->lanes, 0, sizeof norm->lanes);
}

int simd_norm_add(const void *src, int format, size_t n, simd_norm *norm) {
    float widened[SIMD_NORM_BLOCK];
    if (!simd_format_valid(format))
        return -EINVAL;
    for (const char *at = src; n;) {
        const size_t space = elems_to_block_end(norm), piece = n < space ? n : space;
        if (format != SIMD_F32)
            simd_convert(at, format, widened, SIMD_F32, piece);
        add_squares(format == SIMD_F32 ? (const void *)at : widened, piece, norm);
        at += piece * simd_format_bytes(format);
        n -= piece;
    }
    return 0;
}

struct take {
    int src_format, round_format, dst_format, accumulate;
};

static void take_block(struct take how, const void *src, void *dst, size_t n, simd_norm *norm) {
    uint16_t rounded[SIMD_NORM_BLOCK];
    float x[SIMD_NORM_BLOCK];
    const void *from = src;
    int format = how.src_format;
    if (how.round_format != SIMD_F32 && how.round_format != format) {
        simd_convert(from, format, rounded, how.round_format, n);
        from = rounded;
        format = how.round_format;
    }
    if (how.accumulate) {
        simd_convert(from, format, x, SIMD_F32, n);
        simd_current()->accumulate(x, dst, n);
    } else {
        simd_convert(from, format, dst, how.dst_format, n);
    }
    if (norm)
        simd_norm_add(dst, how.dst_format, n, norm);
}

int simd_grad_take(const void *src, int src_format, int round_format, void *dst, int dst_format, int accumulate,
                   size_t n, simd_norm *norm) {
    const struct take how = {src_format, round_format, dst_format, accumulate};
    if (!simd_format_valid(src_format) || !simd_format_valid(round_format))
        return -EINVAL;
    if (dst_format != SIMD_F32 && (dst_format != round_format || accumulate))
        return -EINVAL;
    const char *from = src;
    for (char *to = dst; n;) {
        const size_t space = elems_to_block_end(norm), piece = n < space ? n : space;
        take_block(how, from, to, piece, norm);
        from += piece * simd_format_bytes(src_format);
        to += piece * simd_format_bytes(dst_format);
        n -= piece;
    }
    return 0;
}
