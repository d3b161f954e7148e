/* CRC-32 as zlib and the store compute it (IEEE 802.3, reflected), with the processor's instructions where it has them.
 *
 * A crc of joined pieces is the exclusive or of what each piece contributes, so pieces may be computed in any order:
 *
 *   crc(A B C) = crc_shift(crc(A), bytes of B and C) ^ crc_shift(crc(B), bytes of C) ^ crc(C)
 *
 * All variants give the same value.  Any thread may call anything; nothing fails.
 */
#ifndef OFFLOAD_CRC_H
#define OFFLOAD_CRC_H

#include <stddef.h>
#include <stdint.h>

/* The crc of what `crc` is the crc of (0: nothing), followed by `data`.  No alignment is required. */
uint32_t crc_add(uint32_t crc, const void *data, size_t bytes);
/* What a piece with this crc contributes when `bytes` more follow it; about a microsecond, whatever `bytes`. */
uint32_t crc_shift(uint32_t crc, uint64_t bytes);

/* The variant in use: "portable", "pclmul", "vpclmul", "arm".  Resolved at the first call, from the processor; the
 * environment variable OFFLOAD_SIMD with the value "portable" forces that one here too. */
const char *crc_variant(void);
/* Force a variant from now on (tests, benchmarks); -EINVAL: unknown or not runnable here.  NULL: resolve again. */
int crc_select(const char *name);

#endif
