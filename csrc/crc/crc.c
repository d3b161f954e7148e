/* Constants, choice of a variant, and the arithmetic of joined pieces. */
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "variants.h"

static const struct crc_variant *const variants[] = { /* best first */
#if defined(__x86_64__)
    &crc_vpclmul, &crc_pclmul,
#elif defined(__aarch64__)
    &crc_arm,
#endif
    &crc_portable,
};

static _Atomic(const struct crc_variant *) current;
static struct crc_constants constants; /* written once, before `current` */
static pthread_once_t once = PTHREAD_ONCE_INIT;

static uint32_t times_x(uint32_t a) { return (a >> 1) ^ (a & 1 ? CRC_POLYNOMIAL : 0); }

static uint32_t multiply(uint32_t a, uint32_t b)
{
    uint32_t product = 0;
    for (uint32_t bit = 0x80000000u; bit; bit >>= 1) { /* x^0, x^1, ... of a */
        product ^= a & bit ? b : 0;
        b = times_x(b);
    }
    return product;
}

/* x^(8 * bytes) */
static uint32_t power_of(uint64_t bytes)
{
    uint32_t result = 0x80000000u; /* 1 */
    for (int i = 0; bytes; i++, bytes >>= 1)
        if (bytes & 1)
            result = multiply(result, constants.power[i]);
    return result;
}

/* A carry-less product of two reflected 64-bit values is x times the product, hence the - 1; the constants have 32 bits
 * and stand in the upper half.  The first 8 of 16 bytes are 64 bits further ahead. */
static void init_folds(void)
{
    static const uint32_t strides[CRC_NUM_FOLDS] = {CRC_PCLMUL_STRIDE, CRC_VPCLMUL_STRIDE};
    for (int i = 0; i < CRC_NUM_FOLDS; i++)
        for (int half = 0; half < 2; half++) {
            uint32_t value = power_of(strides[i] + (half == 0 ? 8 : 0) - 1); /* x^(n - 8) */
            for (int bit = 0; bit < 7; bit++)
                value = times_x(value);
            constants.fold[i][half] = (uint64_t)value << 32;
        }
}

static void init_constants(void)
{
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t value = byte;
        for (int k = 0; k < 8; k++) {
            for (int bit = 0; bit < 8; bit++)
                value = times_x(value);
            constants.table[k][byte] = value;
        }
    }
    constants.power[0] = 0x00800000u; /* x^8 */
    for (int i = 1; i < 64; i++)
        constants.power[i] = multiply(constants.power[i - 1], constants.power[i - 1]);
    init_folds();
}

static const struct crc_variant *find(const char *name)
{
    for (size_t i = 0; i < sizeof variants / sizeof *variants; i++)
        if ((!name || !strcmp(variants[i]->name, name)) && variants[i]->runnable())
            return variants[i];
    return NULL;
}

int crc_select(const char *name)
{
    const char *forced = getenv("OFFLOAD_SIMD");
    if (!name && forced && !strcmp(forced, "portable"))
        name = forced;
    const struct crc_variant *found = find(name);
    if (!found)
        return -EINVAL;
    pthread_once(&once, init_constants);
    atomic_store_explicit(&current, found, memory_order_release);
    return 0;
}

static const struct crc_variant *resolve(void)
{
    if (!atomic_load_explicit(&current, memory_order_acquire))
        crc_select(NULL);
    return atomic_load_explicit(&current, memory_order_acquire);
}

const char *crc_variant(void) { return resolve()->name; }

uint32_t crc_add(uint32_t crc, const void *data, size_t bytes)
{
    return ~resolve()->add(&constants, ~crc, data, bytes);
}

uint32_t crc_shift(uint32_t crc, uint64_t bytes)
{
    resolve();
    return multiply(crc, power_of(bytes));
}
