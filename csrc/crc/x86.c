/* Carry-less multiplication: a register of 16 bytes is carried a stride ahead by two products and added there.
 *
 *   ahead(r) = first 8 bytes of r * x^(stride + 64)  +  last 8 bytes of r * x^stride      each modulo the polynomial
 *
 * Enough registers are folded side by side to hide the latency of a product.  What is left of the message at the end
 * is one stride of bytes with the same remainder, and goes through the tables.
 * (Method: V. Gopal et al., Fast CRC computation for generic polynomials using PCLMULQDQ, Intel 2009.)
 */
#if defined(__x86_64__)
#include <immintrin.h>

#include "variants.h"

#define NUM_REGISTERS 8

__attribute__((target("pclmul,sse4.1"))) static uint32_t add_pclmul(const struct crc_constants *constants, uint32_t raw,
                                                                     const uint8_t *data, size_t bytes)
{
    if (bytes < 2 * CRC_PCLMUL_STRIDE)
        return crc_portable_add(constants, raw, data, bytes);
    const __m128i fold = _mm_loadu_si128((const __m128i *)constants->fold[CRC_PCLMUL]);
    __m128i sum[NUM_REGISTERS];
    for (int i = 0; i < NUM_REGISTERS; i++)
        sum[i] = _mm_loadu_si128((const __m128i *)data + i);
    sum[0] = _mm_xor_si128(sum[0], _mm_cvtsi32_si128((int)raw));
    for (data += CRC_PCLMUL_STRIDE, bytes -= CRC_PCLMUL_STRIDE; bytes >= CRC_PCLMUL_STRIDE;
         data += CRC_PCLMUL_STRIDE, bytes -= CRC_PCLMUL_STRIDE) {
#pragma GCC unroll 8
        for (int i = 0; i < NUM_REGISTERS; i++) {
            __m128i ahead = _mm_xor_si128(_mm_clmulepi64_si128(sum[i], fold, 0x00),
                                          _mm_clmulepi64_si128(sum[i], fold, 0x11));
            sum[i] = _mm_xor_si128(ahead, _mm_loadu_si128((const __m128i *)data + i));
        }
    }
    raw = crc_portable_add(constants, 0, (const uint8_t *)sum, sizeof sum);
    return crc_portable_add(constants, raw, data, bytes);
}

__attribute__((target("vpclmulqdq,avx2"))) static uint32_t add_vpclmul(const struct crc_constants *constants,
                                                                        uint32_t raw, const uint8_t *data, size_t bytes)
{
    if (bytes < 2 * CRC_VPCLMUL_STRIDE)
        return crc_portable_add(constants, raw, data, bytes);
    const __m256i fold = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)constants->fold[CRC_VPCLMUL]));
    __m256i sum[NUM_REGISTERS];
    for (int i = 0; i < NUM_REGISTERS; i++)
        sum[i] = _mm256_loadu_si256((const __m256i *)data + i);
    sum[0] = _mm256_xor_si256(sum[0], _mm256_zextsi128_si256(_mm_cvtsi32_si128((int)raw)));
    for (data += CRC_VPCLMUL_STRIDE, bytes -= CRC_VPCLMUL_STRIDE; bytes >= CRC_VPCLMUL_STRIDE;
         data += CRC_VPCLMUL_STRIDE, bytes -= CRC_VPCLMUL_STRIDE) {
#pragma GCC unroll 8
        for (int i = 0; i < NUM_REGISTERS; i++) {
            __m256i ahead = _mm256_xor_si256(_mm256_clmulepi64_epi128(sum[i], fold, 0x00),
                                             _mm256_clmulepi64_epi128(sum[i], fold, 0x11));
            sum[i] = _mm256_xor_si256(ahead, _mm256_loadu_si256((const __m256i *)data + i));
        }
    }
    raw = crc_portable_add(constants, 0, (const uint8_t *)sum, sizeof sum);
    return crc_portable_add(constants, raw, data, bytes);
}

static int has_pclmul(void) { return __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1"); }

/* The compiler's answer for avx2 includes that the operating system saves the registers. */
static int has_vpclmul(void) { return __builtin_cpu_supports("vpclmulqdq") && __builtin_cpu_supports("avx2"); }

const struct crc_variant crc_pclmul = {"pclmul", add_pclmul, has_pclmul};
const struct crc_variant crc_vpclmul = {"vpclmul", add_vpclmul, has_vpclmul};
#endif
