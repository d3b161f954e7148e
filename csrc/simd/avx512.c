/* AVX-512 F, BW, DQ, VL: sixteen elements a vector.  The conversion instructions of AVX512-BF16 flush denormals, so they
 * would not give the other variants' bits. */
#include "kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>

#define VARIANT "avx512"
#define KERNELS simd_kernels_avx512
#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")))
#define W 16
#define VEC TARGET static inline __attribute__((always_inline))
typedef __m512 vf;
typedef __m512i vi;
typedef struct lanes {
    __m512d low, high;
} lanes;

VEC vf vf_load(const void *at) { return _mm512_loadu_ps(at); }
VEC void vf_store(void *at, vf x) { _mm512_storeu_ps(at, x); }
VEC vf vf_set(float x) { return _mm512_set1_ps(x); }
VEC vf vf_add(vf a, vf b) { return _mm512_add_ps(a, b); }
VEC vf vf_mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
VEC vf vf_div(vf a, vf b) { return _mm512_div_ps(a, b); }
VEC vf vf_sqrt(vf a) { return _mm512_sqrt_ps(a); }
VEC vf vf_fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
VEC vf vf_fnma(vf a, vf b, vf c) { return _mm512_fnmadd_ps(a, b, c); }
VEC vf vf_load_f16(const void *at) { return _mm512_cvtph_ps(_mm256_loadu_si256(at)); }
VEC void vf_store_f16(void *at, vf x) { _mm256_storeu_si256(at, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT)); }

VEC vi vi_load_u16(const void *at) { return _mm512_cvtepu16_epi32(_mm256_loadu_si256(at)); }
VEC vi vi_load_s16(const void *at) { return _mm512_cvtepi16_epi32(_mm256_loadu_si256(at)); }
VEC vi vi_load(const void *at) { return _mm512_loadu_si512(at); }
VEC void vi_store(void *at, vi x) { _mm512_storeu_si512(at, x); }
VEC vi vi_load_u8(const void *at) { return _mm512_cvtepu8_epi32(_mm_loadu_si128(at)); }
VEC vi vi_load_s8(const void *at) { return _mm512_cvtepi8_epi32(_mm_loadu_si128(at)); }
VEC void vi_store_16(void *at, vi x) { _mm256_storeu_si256(at, _mm512_cvtepi32_epi16(x)); }
VEC vi vi_set(uint32_t x) { return _mm512_set1_epi32((int)x); }
VEC vi vi_add(vi a, vi b) { return _mm512_add_epi32(a, b); }
VEC vi vi_abs(vi a) { return _mm512_abs_epi32(a); }
VEC vi vi_sign(vi a, vi b) { return _mm512_mask_sub_epi32(a, _mm512_movepi32_mask(b), _mm512_setzero_si512(), a); }
VEC vi vi_and(vi a, vi b) { return _mm512_and_si512(a, b); }
VEC vi vi_xor(vi a, vi b) { return _mm512_xor_si512(a, b); }
VEC vi vi_mul(vi a, vi b) { return _mm512_mullo_epi32(a, b); }
VEC vi vi_max(vi a, vi b) { return _mm512_max_epi32(a, b); }
VEC vi vi_min(vi a, vi b) { return _mm512_min_epi32(a, b); }
VEC vi vi_shl16(vi a) { return _mm512_slli_epi32(a, 16); }
VEC vi vi_shr16(vi a) { return _mm512_srli_epi32(a, 16); }
VEC vi vi_shr12(vi a) { return _mm512_srli_epi32(a, 12); }
VEC vi vi_shr15(vi a) { return _mm512_srli_epi32(a, 15); }
VEC vi vi_shl20(vi a) { return _mm512_slli_epi32(a, 20); }
VEC vi vi_shr20(vi a) { return _mm512_srli_epi32(a, 20); }
VEC vi vi_pick_gt(vi a, vi b, vi yes, vi no) { return _mm512_mask_mov_epi32(no, _mm512_cmpgt_epi32_mask(a, b), yes); }
VEC int vi_any_ge(vi a, int32_t limit) { return _mm512_cmpge_epi32_mask(a, _mm512_set1_epi32(limit)) != 0; }
VEC vi vf_bits(vf x) { return _mm512_castps_si512(x); }
VEC vf vf_from_bits(vi x) { return _mm512_castsi512_ps(x); }

VEC void turn_store_16(void *at, const vi x[2]) {
    for (size_t i = 0; i < 2; i++)
        _mm256_storeu_si256((__m256i *)at + i, _mm512_cvtepi32_epi16(x[i]));
}
VEC void turn_store_8(void *at, const vi x[2]) {
    for (size_t i = 0; i < 2; i++)
        _mm_storeu_si128((__m128i *)at + i, _mm512_cvtepi32_epi8(x[i]));
}

VEC lanes lanes_load(const double *sums) { return (lanes){_mm512_loadu_pd(sums), _mm512_loadu_pd(sums + 8)}; }
VEC void lanes_store(double *sums, lanes open) {
    _mm512_storeu_pd(sums, open.low);
    _mm512_storeu_pd(sums + 8, open.high);
}
VEC __m512d add_squares(__m512d sum, const float *at) {
    const __m512d x = _mm512_cvtps_pd(_mm256_loadu_ps(at));
    return _mm512_fmadd_pd(x, x, sum);
}
VEC lanes lanes_add_squares(lanes open, const void *src) {
    const float *at = src;
    return (lanes){add_squares(open.low, at), add_squares(open.high, at + 8)};
}

#include "template.h"
#endif
