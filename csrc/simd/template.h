/* Every formula, once, in three parts.  Included by a variant file that defines, for vectors of W elements (W divides SIMD_TURN):
 *
 *   TARGET                      function attribute of the instruction set
 *   vf vi                       W floats, W 32-bit integers
 *   vf_load vf_store vf_set vf_add vf_mul vf_div vf_sqrt
 *   vf_fma(a, b, c) = a * b + c    vf_fnma(a, b, c) = -a * b + c    one rounding each
 *   vf_load_f16 vf_store_f16    IEEE half, to nearest even, NaN kept (quiet, high payload bits)
 *   vi_load vi_store vi_load_u8 vi_load_s8 vi_load_u16 vi_load_s16 vi_store_16 (low half)
 *   vi_set vi_add vi_mul (low half) vi_abs vi_sign(a, b) (b < 0 ? -a : a; a = 0 where b = 0) vi_and vi_xor vi_max vi_min (signed) vi_shl16 vi_shl20 vi_shr12 vi_shr15 vi_shr16 vi_shr20 (logical)
 *   vi_pick_gt(a, b, yes, no)   a > b ? yes : no, signed
 *   vi_any_ge(a, limit)         any element >= limit, signed
 *   vf_bits vf_from_bits        reinterpretation
 *   turn_store_16 turn_store_8  of SIMD_TURN / W vectors, whose values fit
 *   lanes, lanes_load lanes_store lanes_add_squares(lanes, const void *)   SIMD_NORM_LANES doubles += x * x
 *
 * Loads and stores take any alignment.  A loop runs in turns of SIMD_TURN elements: all loads, then arithmetic, then
 * all stores; the last, shorter turn goes through the same code on a padded copy.
 */
#define OP TARGET static inline __attribute__((always_inline))
#define NUM_VECS (SIMD_TURN / W)
#if W == 1
#define EACH_VEC(j) for (size_t j = 0; j < NUM_VECS; j++)
#elif defined(__clang__)
#define EACH_VEC(j) _Pragma("unroll") for (size_t j = 0; j < NUM_VECS; j++)
#else
#define EACH_VEC(j) _Pragma("GCC unroll 32") for (size_t j = 0; j < NUM_VECS; j++)
#endif

#include "template_formats.h"

#include "template_adam.h"
#include "template_states.h"
#include "template_adam_states.h"
#include "template_block.h"
#include "template_gradient.h"

const struct simd_kernels KERNELS = {
    .name = VARIANT,
    .update = update,
    .fill_random = fill_random,
    .decode_state = decode_state,
    .encode_state = encode_state,
    .convert = convert,
    .accumulate = accumulate,
    .sum_squares = sum_squares,
    .join = join,
    .split = split,
};
