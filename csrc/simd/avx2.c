/* AVX2 with FMA and F16C: eight elements a vector. */
#include "kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>

#define VARIANT "avx2"
#define KERNELS simd_kernels_avx2
#define TARGET __attribute__((target("avx2,fma,f16c")))
#define W 8
#define VEC TARGET static inline __attribute__((always_inline))
typedef __m256 vf;
typedef __m256i vi;
typedef __m256i vh;
typedef struct lanes {
    __m256d sum[4];
} lanes;

VEC vf vf_load(const void *at) { return _mm256_loadu_ps(at); }
VEC void vf_store(void *at, vf x) { _mm256_storeu_ps(at, x); }
VEC vf vf_set(float x) { return _mm256_set1_ps(x); }
VEC vf vf_add(vf a, vf b) { return _mm256_add_ps(a, b); }
VEC vf vf_mul(vf a, vf b) { return _mm256_mul_ps(a, b); }
VEC vf vf_div(vf a, vf b) { return _mm256_div_ps(a, b); }
VEC vf vf_sqrt(vf a) { return _mm256_sqrt_ps(a); }
VEC vf vf_fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
VEC vf vf_fnma(vf a, vf b, vf c) { return _mm256_fnmadd_ps(a, b, c); }
VEC vf vf_signed(vf x, vf plus, vf minus) {
    (void)minus; /* a blend would take the units that multiply */
    return _mm256_xor_ps(plus, _mm256_and_ps(x, _mm256_set1_ps(-0.0f)));
}
VEC vf vf_load_f16(const void *at) { return _mm256_cvtph_ps(_mm_loadu_si128(at)); }
VEC void vf_store_f16(void *at, vf x) { _mm_storeu_si128(at, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT)); }

VEC vi vi_load_u16(const void *at) { return _mm256_cvtepu16_epi32(_mm_loadu_si128(at)); }
VEC vi vi_load_s16(const void *at) { return _mm256_cvtepi16_epi32(_mm_loadu_si128(at)); }
VEC vi vi_load(const void *at) { return _mm256_loadu_si256(at); }
VEC void vi_store(void *at, vi x) { _mm256_storeu_si256(at, x); }
VEC vi vi_load_u8(const void *at) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64(at)); }
VEC vi vi_load_s8(const void *at) { return _mm256_cvtepi8_epi32(_mm_loadl_epi64(at)); }
VEC vi vi_set(uint32_t x) { return _mm256_set1_epi32((int)x); }
VEC vi vi_add(vi a, vi b) { return _mm256_add_epi32(a, b); }
VEC vi vi_abs(vi a) { return _mm256_abs_epi32(a); }
VEC vi vi_sign(vi a, vi b) { return _mm256_sign_epi32(a, b); }
VEC vi vi_and(vi a, vi b) { return _mm256_and_si256(a, b); }
VEC vi vi_xor(vi a, vi b) { return _mm256_xor_si256(a, b); }
VEC vi vi_mul(vi a, vi b) { return _mm256_mullo_epi32(a, b); }
VEC vi vi_max(vi a, vi b) { return _mm256_max_epi32(a, b); }
VEC vi vi_shl16(vi a) { return _mm256_slli_epi32(a, 16); }
VEC vi vi_shr16(vi a) { return _mm256_srli_epi32(a, 16); }
VEC vi vi_shr12(vi a) { return _mm256_srli_epi32(a, 12); }
VEC vi vi_shr15(vi a) { return _mm256_srli_epi32(a, 15); }
VEC vi vi_shl20(vi a) { return _mm256_slli_epi32(a, 20); }
VEC vi vi_shr20(vi a) { return _mm256_srli_epi32(a, 20); }
VEC vi vi_pick_gt(vi a, vi b, vi yes, vi no) { return _mm256_blendv_epi8(no, yes, _mm256_cmpgt_epi32(a, b)); }
VEC int vi_any_ge(vi a, int32_t limit) {
    return _mm256_movemask_epi8(_mm256_cmpgt_epi32(a, _mm256_set1_epi32(limit - 1))) != 0;
}
VEC uint32_t vi_most(vi a) {
    const __m128i four = _mm_max_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    const __m128i two = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return (uint32_t)_mm_cvtsi128_si32(_mm_max_epi32(two, _mm_shuffle_epi32(two, 0xb1)));
}
VEC vi vf_bits(vf x) { return _mm256_castps_si256(x); }
VEC vf vf_from_bits(vi x) { return _mm256_castsi256_ps(x); }
VEC void vi_store_16(void *at, vi x) {
    const vi low = _mm256_blend_epi16(x, _mm256_setzero_si256(), 0xaa); /* so that the pack does not saturate */
    const vi packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(low, low), 0xd8);
    _mm_storeu_si128(at, _mm256_castsi256_si128(packed));
}

VEC vh vh_load(const void *at) { return _mm256_loadu_si256(at); }
VEC void vh_store(void *at, vh x) { _mm256_storeu_si256(at, x); }
VEC vh vh_load_u8(const void *at) { return _mm256_cvtepu8_epi16(_mm_loadu_si128(at)); }
VEC vh vh_load_s8(const void *at) { return _mm256_cvtepi8_epi16(_mm_loadu_si128(at)); }
VEC vh vh_set(uint16_t x) { return _mm256_set1_epi16((int16_t)x); }
VEC vh vh_add(vh a, vh b) { return _mm256_add_epi16(a, b); }
VEC vh vh_sub(vh a, vh b) { return _mm256_sub_epi16(a, b); }
VEC vh vh_and(vh a, vh b) { return _mm256_and_si256(a, b); }
VEC vh vh_or(vh a, vh b) { return _mm256_or_si256(a, b); }
VEC vh vh_max(vh a, vh b) { return _mm256_max_epi16(a, b); }
VEC vh vh_abs(vh a) { return _mm256_abs_epi16(a); }
VEC vh vh_sign(vh a, vh b) { return _mm256_sign_epi16(a, b); }
VEC vh vh_shl4(vh a) { return _mm256_slli_epi16(a, 4); }
VEC vh vh_shr4(vh a) { return _mm256_srli_epi16(a, 4); }
VEC vh vh_sra15(vh a) { return _mm256_srai_epi16(a, 15); }
VEC int vh_any_ge(vh a, int16_t limit) {
    return _mm256_movemask_epi8(_mm256_cmpgt_epi16(a, _mm256_set1_epi16((int16_t)(limit - 1)))) != 0;
}
/* What these instructions do in each half of a register is the order of a pair: 0-3, 8-11 and 4-7, 12-15. */
VEC vi vh_low(vh low, vh high) { return _mm256_unpacklo_epi16(low, high); }
VEC vi vh_high(vh low, vh high) { return _mm256_unpackhi_epi16(low, high); }
VEC vh vh_pack_low(vi a, vi b) {
    return _mm256_packus_epi32(_mm256_and_si256(a, vi_set(0xffff)), _mm256_and_si256(b, vi_set(0xffff)));
}
VEC vh vh_pack_high(vi a, vi b) { return _mm256_packus_epi32(vi_shr16(a), vi_shr16(b)); }
VEC void pair_order(vf pair[2]) {
    const vf first = pair[0];
    pair[0] = _mm256_permute2f128_ps(first, pair[1], 0x20);
    pair[1] = _mm256_permute2f128_ps(first, pair[1], 0x31);
}
VEC void turn_store_s8(void *at, const vh x[2]) {
    _mm256_storeu_si256(at, _mm256_permute4x64_epi64(_mm256_packs_epi16(x[0], x[1]), 0xd8));
}
VEC void turn_store_u8(void *at, const vh x[2]) {
    _mm256_storeu_si256(at, _mm256_permute4x64_epi64(_mm256_packus_epi16(x[0], x[1]), 0xd8));
}

VEC lanes lanes_load(const double *sums) {
    return (lanes){{_mm256_loadu_pd(sums), _mm256_loadu_pd(sums + 4), _mm256_loadu_pd(sums + 8), _mm256_loadu_pd(sums + 12)}};
}
VEC void lanes_store(double *sums, lanes open) {
    for (size_t i = 0; i < 4; i++)
        _mm256_storeu_pd(sums + 4 * i, open.sum[i]);
}
VEC __m256d add_squares(__m256d sum, const float *at) {
    const __m256d x = _mm256_cvtps_pd(_mm_loadu_ps(at));
    return _mm256_fmadd_pd(x, x, sum);
}
VEC lanes lanes_add_squares(lanes open, const void *src) {
    const float *at = src;
    return (lanes){{add_squares(open.sum[0], at), add_squares(open.sum[1], at + 4), add_squares(open.sum[2], at + 8),
                    add_squares(open.sum[3], at + 12)}};
}

#include "template.h"
#endif
