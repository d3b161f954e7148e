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
VEC vi vi_min(vi a, vi b) { return _mm256_min_epi32(a, b); }
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
VEC vi vf_bits(vf x) { return _mm256_castps_si256(x); }
VEC vf vf_from_bits(vi x) { return _mm256_castsi256_ps(x); }
VEC void vi_store_16(void *at, vi x) {
    const vi low = _mm256_blend_epi16(x, _mm256_setzero_si256(), 0xaa); /* so that the pack does not saturate */
    const vi packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(low, low), 0xd8);
    _mm_storeu_si128(at, _mm256_castsi256_si128(packed));
}
/* Four vectors of values that fit: one shuffle where single stores need three. */
VEC void turn_store_16(void *at, const vi x[4]) {
    for (size_t i = 0; i < 2; i++)
        _mm256_storeu_si256((vi *)at + i, _mm256_permute4x64_epi64(_mm256_packus_epi32(x[2 * i], x[2 * i + 1]), 0xd8));
}
VEC void turn_store_8(void *at, const vi x[4]) {
    const vi bytes = _mm256_packus_epi16(_mm256_packus_epi32(x[0], x[1]), _mm256_packus_epi32(x[2], x[3]));
    _mm256_storeu_si256(at, _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)));
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
