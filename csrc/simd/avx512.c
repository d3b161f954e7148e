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
typedef __m512i vh;
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
VEC vf vf_signed(vf x, vf plus, vf minus) {
    return _mm512_mask_mov_ps(plus, _mm512_movepi32_mask(_mm512_castps_si512(x)), minus);
}
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
VEC vi vi_shl16(vi a) { return _mm512_slli_epi32(a, 16); }
VEC vi vi_shr16(vi a) { return _mm512_srli_epi32(a, 16); }
VEC vi vi_shr12(vi a) { return _mm512_srli_epi32(a, 12); }
VEC vi vi_shr15(vi a) { return _mm512_srli_epi32(a, 15); }
VEC vi vi_shl20(vi a) { return _mm512_slli_epi32(a, 20); }
VEC vi vi_shr20(vi a) { return _mm512_srli_epi32(a, 20); }
VEC vi vi_pick_gt(vi a, vi b, vi yes, vi no) { return _mm512_mask_mov_epi32(no, _mm512_cmpgt_epi32_mask(a, b), yes); }
VEC int vi_any_ge(vi a, int32_t limit) { return _mm512_cmpge_epi32_mask(a, _mm512_set1_epi32(limit)) != 0; }
VEC uint32_t vi_most(vi a) { return (uint32_t)_mm512_reduce_max_epi32(a); }
VEC vi vf_bits(vf x) { return _mm512_castps_si512(x); }
VEC vf vf_from_bits(vi x) { return _mm512_castsi512_ps(x); }

VEC vh vh_load(const void *at) { return _mm512_loadu_si512(at); }
VEC void vh_store(void *at, vh x) { _mm512_storeu_si512(at, x); }
VEC vh vh_load_u8(const void *at) { return _mm512_cvtepu8_epi16(_mm256_loadu_si256(at)); }
VEC vh vh_load_s8(const void *at) { return _mm512_cvtepi8_epi16(_mm256_loadu_si256(at)); }
VEC vh vh_set(uint16_t x) { return _mm512_set1_epi16((int16_t)x); }
VEC vh vh_add(vh a, vh b) { return _mm512_add_epi16(a, b); }
VEC vh vh_sub(vh a, vh b) { return _mm512_sub_epi16(a, b); }
VEC vh vh_and(vh a, vh b) { return _mm512_and_si512(a, b); }
VEC vh vh_or(vh a, vh b) { return _mm512_or_si512(a, b); }
VEC vh vh_max(vh a, vh b) { return _mm512_max_epi16(a, b); }
VEC vh vh_abs(vh a) { return _mm512_abs_epi16(a); }
VEC vh vh_sign(vh a, vh b) { return _mm512_mask_sub_epi16(a, _mm512_movepi16_mask(b), _mm512_setzero_si512(), a); }
VEC vh vh_shl4(vh a) { return _mm512_slli_epi16(a, 4); }
VEC vh vh_shr4(vh a) { return _mm512_srli_epi16(a, 4); }
VEC vh vh_sra15(vh a) { return _mm512_srai_epi16(a, 15); }
VEC int vh_any_ge(vh a, int16_t limit) { return _mm512_cmpge_epi16_mask(a, _mm512_set1_epi16(limit)) != 0; }
/* What these instructions do in each quarter of a register is the order of a pair: 0-3, 8-11, ... and 4-7, 12-15, ... */
VEC vi vh_low(vh low, vh high) { return _mm512_unpacklo_epi16(low, high); }
VEC vi vh_high(vh low, vh high) { return _mm512_unpackhi_epi16(low, high); }
VEC vh vh_pack_low(vi a, vi b) {
    return _mm512_packus_epi32(_mm512_and_si512(a, vi_set(0xffff)), _mm512_and_si512(b, vi_set(0xffff)));
}
VEC vh vh_pack_high(vi a, vi b) { return _mm512_packus_epi32(vi_shr16(a), vi_shr16(b)); }
VEC void pair_order(vf pair[2]) {
    const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27);
    const vf first = pair[0], second = pair[1];
    pair[0] = _mm512_permutex2var_ps(first, low, second);
    pair[1] = _mm512_permutex2var_ps(first, _mm512_add_epi32(low, vi_set(4)), second);
}
VEC void turn_store_s8(void *at, const vh x[1]) { _mm256_storeu_si256(at, _mm512_cvtepi16_epi8(x[0])); }
VEC void turn_store_u8(void *at, const vh x[1]) { turn_store_s8(at, x); }

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
