/* The processor's own instruction for this polynomial. */
#if defined(__aarch64__)
#include <string.h>
#include <sys/auxv.h>

#include "variants.h"

#ifndef HWCAP_CRC32
#define HWCAP_CRC32 (1 << 7)
#endif

__attribute__((target("+crc"))) static uint32_t add(const struct crc_constants *constants, uint32_t raw,
                                                    const uint8_t *data, size_t bytes)
{
    (void)constants;
    for (; bytes >= 8; bytes -= 8, data += 8) {
        uint64_t value;
        memcpy(&value, data, sizeof value);
        raw = __builtin_aarch64_crc32x(raw, value);
    }
    while (bytes--)
        raw = __builtin_aarch64_crc32b(raw, *data++);
    return raw;
}

static int runnable(void) { return (getauxval(AT_HWCAP) & HWCAP_CRC32) != 0; }

const struct crc_variant crc_arm = {"arm", add, runnable};
#endif
