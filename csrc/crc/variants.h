/* What a variant offers, and the constants that all of them share.
 *
 * Reflected: bit i of a 32-bit value is the coefficient of x^(31-i).  `raw` values are the register itself; a crc is
 * its complement.
 */
#ifndef OFFLOAD_CRC_VARIANTS_H
#define OFFLOAD_CRC_VARIANTS_H

#include "crc.h"

#define CRC_POLYNOMIAL 0xedb88320u /* without x^32 */
#define CRC_NUM_FOLDS 2

struct crc_constants {
    uint32_t table[8][256]; /* [k][b]: byte b with k bytes behind it, times x^32 */
    uint32_t power[64];     /* x^(8 * 2^i) */
    uint64_t fold[CRC_NUM_FOLDS][2]; /* crc_fold_bytes[i] ahead: for the first and the last 8 of 16 bytes */
};

struct crc_variant {
    const char *name;
    uint32_t (*add)(const struct crc_constants *constants, uint32_t raw, const uint8_t *data, size_t bytes);
    int (*runnable)(void);
};

enum { CRC_PCLMUL = 0, CRC_VPCLMUL = 1 }; /* index of fold */
#define CRC_PCLMUL_STRIDE 128u
#define CRC_VPCLMUL_STRIDE 256u

extern const struct crc_variant crc_portable;
#if defined(__x86_64__)
extern const struct crc_variant crc_pclmul, crc_vpclmul;
#elif defined(__aarch64__)
extern const struct crc_variant crc_arm;
#endif

uint32_t crc_portable_add(const struct crc_constants *constants, uint32_t raw, const uint8_t *data, size_t bytes);

#endif
