/* AArch64 Advanced SIMD: four elements a vector.  FMA, square root, division and half conversion are baseline there. */
#include "kernels.h"

#if defined(__aarch64__)
#include <arm_neon.h>

#define VARIANT "neon"
#define KERNELS simd_kernels_neon
#define TARGET
#define W 4
#define VEC static inline __attribute__((always_inline))
typedef float32x4_t vf;
typedef int32x4_t vi;
typedef int16x8_t vh;
typedef struct lanes {
    float64x2_t sum[8];
} lanes;

/* Byte loads and stores, because pointers need no alignment. */
VEC vi vi_load(const void *at) { return vreinterpretq_s32_u8(vld1q_u8(at)); }
VEC uint16x4_t load_16(const void *at) { return vreinterpret_u16_u8(vld1_u8(at)); }
VEC void store_16(void *at, uint16x4_t x) { vst1_u8(at, vreinterpret_u8_u16(x)); }

VEC vf vf_load(const void *at) { return vreinterpretq_f32_s32(vi_load(at)); }
VEC void vf_store(void *at, vf x) { vst1q_u8(at, vreinterpretq_u8_f32(x)); }
VEC vf vf_set(float x) { return vdupq_n_f32(x); }
VEC vf vf_add(vf a, vf b) { return vaddq_f32(a, b); }
VEC vf vf_mul(vf a, vf b) { return vmulq_f32(a, b); }
VEC vf vf_div(vf a, vf b) { return vdivq_f32(a, b); }
VEC vf vf_sqrt(vf a) { return vsqrtq_f32(a); }
VEC vf vf_fma(vf a, vf b, vf c) { return vfmaq_f32(c, a, b); }
VEC vf vf_fnma(vf a, vf b, vf c) { return vfmsq_f32(c, a, b); }
VEC vf vf_signed(vf x, vf plus, vf minus) { return vbslq_f32(vcltzq_s32(vreinterpretq_s32_f32(x)), minus, plus); }
VEC vf vf_load_f16(const void *at) { return vcvt_f32_f16(vreinterpret_f16_u16(load_16(at))); }
VEC void vf_store_f16(void *at, vf x) { store_16(at, vreinterpret_u16_f16(vcvt_f16_f32(x))); }

VEC vi vi_load_u16(const void *at) { return vreinterpretq_s32_u32(vmovl_u16(load_16(at))); }
VEC vi vi_load_s16(const void *at) { return vmovl_s16(vreinterpret_s16_u16(load_16(at))); }
VEC void vi_store_16(void *at, vi x) { store_16(at, vmovn_u32(vreinterpretq_u32_s32(x))); }
VEC void vi_store(void *at, vi x) { vst1q_u8(at, vreinterpretq_u8_s32(x)); }
VEC vi vi_load_u8(const void *at) {
    return vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(simd_load_u32(at))))));
}
VEC vi vi_load_s8(const void *at) { return vmovl_s16(vget_low_s16(vmovl_s8(vcreate_s8(simd_load_u32(at))))); }
VEC vi vi_set(uint32_t x) { return vreinterpretq_s32_u32(vdupq_n_u32(x)); }
VEC vi vi_add(vi a, vi b) { return vaddq_s32(a, b); }
VEC vi vi_abs(vi a) { return vabsq_s32(a); }
VEC vi vi_sign(vi a, vi b) { return vbslq_s32(vcltzq_s32(b), vnegq_s32(a), a); }
VEC vi vi_and(vi a, vi b) { return vandq_s32(a, b); }
VEC vi vi_xor(vi a, vi b) { return veorq_s32(a, b); }
VEC vi vi_mul(vi a, vi b) { return vmulq_s32(a, b); }
VEC vi vi_max(vi a, vi b) { return vmaxq_s32(a, b); }
VEC vi vi_shl16(vi a) { return vshlq_n_s32(a, 16); }
VEC vi vi_shr16(vi a) { return vreinterpretq_s32_u32(vshrq_n_u32(vreinterpretq_u32_s32(a), 16)); }
VEC vi vi_shr12(vi a) { return vreinterpretq_s32_u32(vshrq_n_u32(vreinterpretq_u32_s32(a), 12)); }
VEC vi vi_shr15(vi a) { return vreinterpretq_s32_u32(vshrq_n_u32(vreinterpretq_u32_s32(a), 15)); }
VEC vi vi_shl20(vi a) { return vshlq_n_s32(a, 20); }
VEC vi vi_shr20(vi a) { return vreinterpretq_s32_u32(vshrq_n_u32(vreinterpretq_u32_s32(a), 20)); }
VEC vi vi_pick_gt(vi a, vi b, vi yes, vi no) { return vbslq_s32(vcgtq_s32(a, b), yes, no); }
VEC int vi_any_ge(vi a, int32_t limit) { return vmaxvq_s32(a) >= limit; }
VEC uint32_t vi_most(vi a) { return (uint32_t)vmaxvq_s32(a); }
VEC vi vf_bits(vf x) { return vreinterpretq_s32_f32(x); }
VEC vf vf_from_bits(vi x) { return vreinterpretq_f32_s32(x); }

VEC vh vh_load(const void *at) { return vreinterpretq_s16_u8(vld1q_u8(at)); }
VEC void vh_store(void *at, vh x) { vst1q_u8(at, vreinterpretq_u8_s16(x)); }
VEC vh vh_load_u8(const void *at) { return vreinterpretq_s16_u16(vmovl_u8(vld1_u8(at))); }
VEC vh vh_load_s8(const void *at) { return vmovl_s8(vld1_s8(at)); }
VEC vh vh_set(uint16_t x) { return vreinterpretq_s16_u16(vdupq_n_u16(x)); }
VEC vh vh_add(vh a, vh b) { return vaddq_s16(a, b); }
VEC vh vh_sub(vh a, vh b) { return vsubq_s16(a, b); }
VEC vh vh_and(vh a, vh b) { return vandq_s16(a, b); }
VEC vh vh_or(vh a, vh b) { return vorrq_s16(a, b); }
VEC vh vh_max(vh a, vh b) { return vmaxq_s16(a, b); }
VEC vh vh_abs(vh a) { return vabsq_s16(a); }
VEC vh vh_sign(vh a, vh b) { return vbslq_s16(vcltzq_s16(b), vnegq_s16(a), a); }
VEC vh vh_shl4(vh a) { return vshlq_n_s16(a, 4); }
VEC vh vh_shr4(vh a) { return vreinterpretq_s16_u16(vshrq_n_u16(vreinterpretq_u16_s16(a), 4)); }
VEC vh vh_sra15(vh a) { return vshrq_n_s16(a, 15); }
VEC int vh_any_ge(vh a, int16_t limit) { return vmaxvq_s16(a) >= limit; }
VEC vi vh_low(vh low, vh high) { return vreinterpretq_s32_s16(vzip1q_s16(low, high)); }
VEC vi vh_high(vh low, vh high) { return vreinterpretq_s32_s16(vzip2q_s16(low, high)); }
VEC vh vh_pack_low(vi a, vi b) { return vuzp1q_s16(vreinterpretq_s16_s32(a), vreinterpretq_s16_s32(b)); }
VEC vh vh_pack_high(vi a, vi b) { return vuzp2q_s16(vreinterpretq_s16_s32(a), vreinterpretq_s16_s32(b)); }
VEC void pair_order(vf pair[2]) { (void)pair; } /* the natural one */
VEC void turn_store_s8(void *at, const vh x[4]) {
    for (size_t i = 0; i < 2; i++)
        vst1q_u8((uint8_t *)at + 16 * i, vuzp1q_u8(vreinterpretq_u8_s16(x[2 * i]), vreinterpretq_u8_s16(x[2 * i + 1])));
}
VEC void turn_store_u8(void *at, const vh x[4]) { turn_store_s8(at, x); }

VEC lanes lanes_load(const double *sums) {
    lanes open;
    for (size_t i = 0; i < 8; i++)
        open.sum[i] = vld1q_f64(sums + 2 * i);
    return open;
}
VEC void lanes_store(double *sums, lanes open) {
    for (size_t i = 0; i < 8; i++)
        vst1q_f64(sums + 2 * i, open.sum[i]);
}
VEC lanes lanes_add_squares(lanes open, const void *src) {
    for (size_t i = 0; i < 4; i++) {
        const vf x = vf_load((const char *)src + 16 * i);
        const float64x2_t low = vcvt_f64_f32(vget_low_f32(x)), high = vcvt_high_f64_f32(x);
        open.sum[2 * i] = vfmaq_f64(open.sum[2 * i], low, low);
        open.sum[2 * i + 1] = vfmaq_f64(open.sum[2 * i + 1], high, high);
    }
    return open;
}

#include "template.h"
#endif
