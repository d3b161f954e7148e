/* Every formula, once, in three parts.  Included by a variant file that defines, for vectors of W elements (W divides SIMD_TURN):
 *
 *   TARGET                      function attribute of the instruction set
 *   vf vi                       W floats, W 32-bit integers
 *   vf_load vf_store vf_set vf_add vf_mul vf_div vf_sqrt
 *   vf_fma(a, b, c) = a * b + c    vf_fnma(a, b, c) = -a * b + c    one rounding each
 *   vf_load_f16 vf_store_f16    IEEE half, to nearest even, NaN kept (quiet, high payload bits)
 *   vf_signed(x, plus, minus)   minus where x has a sign; minus = -plus
 *   vi_load vi_store vi_load_u8 vi_load_s8 vi_load_u16 vi_load_s16 vi_store_16 (low half)
 *   vi_set vi_add vi_mul (low half) vi_abs vi_sign(a, b) (b < 0 ? -a : a) vi_and vi_xor vi_max (signed)
 *   vi_shl16 vi_shl20 vi_shr12 vi_shr15 vi_shr16 vi_shr20 (logical)
 *   vi_pick_gt(a, b, yes, no)   a > b ? yes : no, signed
 *   vi_any_ge(a, limit)         any element >= limit, signed
 *   vf_bits vf_from_bits        reinterpretation
 *   vi_most(a)                  the largest, where none is negative
 *
 *   vh                          2 W 16-bit integers: a pair of vectors in the making
 *   vh_load vh_store vh_load_u8 vh_load_s8 (2 W bytes) vh_set vh_add vh_sub vh_and vh_or vh_max (signed)
 *   vh_abs vh_sign(a, b) (b < 0 ? -a : a; b not 0) vh_shl4 vh_shr4 (logical) vh_sra15 vh_any_ge(a, limit)
 *   vh_low(low, high) vh_high   the two vectors with these halves, in an order of the variant's own
 *   vh_pack_low(a, b) vh_pack_high   the halves of two such vectors, in the natural order
 *   pair_order(vf *)            two vectors in the natural order become a pair in the variant's
 *   turn_store_s8 turn_store_u8 the low bytes of SIMD_TURN / (2 W) vh, whose values fit
 *
 *   lanes, lanes_load lanes_store lanes_add_squares(lanes, const void *)   SIMD_NORM_LANES doubles += x * x
 *
 * Loads and stores take any alignment.  A loop runs in turns of SIMD_TURN elements: all loads, then arithmetic, then
 * all stores; the last, shorter turn goes through the same code on a padded copy.
 */
#define OP TARGET static inline __attribute__((always_inline))
#define NUM_VECS (SIMD_TURN / W)
#define NUM_PAIRS (NUM_VECS / 2)
#if W == 1
#define UNROLL
#elif defined(__clang__)
#define UNROLL _Pragma("unroll")
#else
#define UNROLL _Pragma("GCC unroll 32")
#endif
#define EACH_VEC(j) UNROLL for (size_t j = 0; j < NUM_VECS; j++)
#define EACH_PAIR(j) UNROLL for (size_t j = 0; j < NUM_PAIRS; j++)
#define EACH_HALF(j) UNROLL for (size_t j = 0; j < 2; j++)

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
