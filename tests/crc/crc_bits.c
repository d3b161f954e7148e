/* Every variant that runs on this processor against the definition, bit by bit; pieces against the whole.
 * Prints the names of the variants that agree. */
#include <stdio.h>
#include <stdlib.h>

#include "crc/crc.h"

enum { BYTES = 1500 };

static uint32_t by_definition(const uint8_t *data, size_t bytes)
{
    uint32_t raw = 0xffffffffu;
    while (bytes--) {
        raw ^= *data++;
        for (int bit = 0; bit < 8; bit++)
            raw = raw & 1 ? raw >> 1 ^ 0xedb88320u : raw >> 1;
    }
    return ~raw;
}

int main(void)
{
    static const char *const names[] = {"portable", "pclmul", "vpclmul", "arm"};
    static uint8_t data[BYTES + 16];
    int wrong = 0;
    for (size_t i = 0; i < sizeof data; i++)
        data[i] = (uint8_t)(rand() >> 8);
    for (size_t name = 0; name < sizeof names / sizeof *names; name++) {
        if (crc_select(names[name]) < 0)
            continue;
        for (size_t bytes = 0; bytes <= BYTES; bytes++) {
            const uint8_t *from = data + bytes % 16;
            size_t cut = bytes ? (size_t)rand() % bytes : 0;
            uint32_t whole = by_definition(from, bytes);
            uint32_t first = crc_add(0, from, cut), last = crc_add(0, from + cut, bytes - cut);
            wrong += crc_add(0, from, bytes) != whole;
            wrong += crc_add(first, from + cut, bytes - cut) != whole;
            wrong += (crc_shift(first, bytes - cut) ^ last) != whole;
        }
        puts(crc_variant());
    }
    return wrong != 0;
}
