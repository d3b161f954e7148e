/* Eight bytes a turn, a table for each place in them. */
#include "variants.h"

static uint32_t load(const uint8_t *at)
{
    return (uint32_t)at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24;
}

uint32_t crc_portable_add(const struct crc_constants *constants, uint32_t raw, const uint8_t *data, size_t bytes)
{
    const uint32_t (*table)[256] = constants->table;
    for (; bytes >= 8; bytes -= 8, data += 8) {
        uint32_t first = raw ^ load(data), last = load(data + 4);
        raw = table[7][first & 0xff] ^ table[6][first >> 8 & 0xff] ^ table[5][first >> 16 & 0xff] ^
              table[4][first >> 24] ^ table[3][last & 0xff] ^ table[2][last >> 8 & 0xff] ^
              table[1][last >> 16 & 0xff] ^ table[0][last >> 24];
    }
    while (bytes--)
        raw = table[0][(raw ^ *data++) & 0xff] ^ raw >> 8;
    return raw;
}

static int runnable(void) { return 1; }

const struct crc_variant crc_portable = {"portable", crc_portable_add, runnable};
