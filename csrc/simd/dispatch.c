/* The only file that knows which processor this is: picks a variant once and forwards to it. */
#include "kernels.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>

#if defined(__x86_64__)
#include <cpuid.h>

/* A vector register set is usable when the processor has it and the operating system saves it (XCR0). */
static int has_registers(uint32_t wanted) {
    uint32_t eax, ebx, ecx, edx, low, high;
    if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx) || !(ecx & bit_OSXSAVE))
        return 0;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (low & wanted) == wanted;
}

static int has_avx2(void) {
    const uint32_t needed1 = bit_AVX | bit_FMA | bit_F16C;
    uint32_t eax, ebx, ecx, edx;
    if (!has_registers(0x6)) /* XMM, YMM */
        return 0;
    if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx) || (ecx & needed1) != needed1)
        return 0;
    return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) && (ebx & bit_AVX2);
}

static int has_avx512(void) {
    const uint32_t needed7 = bit_AVX512F | bit_AVX512DQ | bit_AVX512BW | bit_AVX512VL;
    uint32_t eax, ebx, ecx, edx;
    if (!has_avx2() || !has_registers(0xe6)) /* and mask registers, ZMM */
        return 0;
    return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) && (ebx & needed7) == needed7;
}
#endif

static int has_portable(void) { return 1; }

/* Best first. */
static const struct variant {
    const struct simd_kernels *kernels;
    int (*runnable)(void);
} variants[] = {
#if defined(__x86_64__)
    {&simd_kernels_avx512, has_avx512},
    {&simd_kernels_avx2, has_avx2},
#elif defined(__aarch64__)
    {&simd_kernels_neon, has_portable},
#endif
    {&simd_kernels_portable, has_portable},
};

static const struct simd_kernels *find(const char *name) {
    for (size_t i = 0; i < sizeof variants / sizeof *variants; i++)
        if ((!name || !strcmp(variants[i].kernels->name, name)) && variants[i].runnable())
            return variants[i].kernels;
    return NULL;
}

static _Atomic(const struct simd_kernels *) current;

const struct simd_kernels *simd_current(void) {
    const struct simd_kernels *kernels = atomic_load_explicit(&current, memory_order_acquire);
    if (!kernels) {
        simd_select(NULL); /* an environment that names no runnable variant: the best one stays */
        kernels = atomic_load_explicit(&current, memory_order_acquire);
    }
    return kernels;
}

const char *simd_variant(void) { return simd_current()->name; }

int simd_supported(const char *name) { return name && find(name) != NULL; }

int simd_select(const char *name) {
    const char *forced = name ? name : getenv("OFFLOAD_SIMD");
    const struct simd_kernels *found = find(forced && *forced ? forced : NULL);
    if (found || !name)
        atomic_store_explicit(&current, found ? found : find(NULL), memory_order_release);
    return found ? 0 : -EINVAL;
}

static int is_8_bits(int format) { return format == SIMD_I8 || format == SIMD_U8; }

static int streams_valid(const simd_streams *at, size_t n, const simd_row *row) {
    static const int states_of[SIMD_NUM_ALGORITHMS] = {
        [SIMD_ADAM] = 2, [SIMD_MOMENTUM] = 1, [SIMD_LION] = 1, [SIMD_ADAGRAD] = 1};
    if (!simd_format_valid(at->grad_format) || !simd_format_valid(at->weight_format))
        return 0;
    if (row->algorithm >= SIMD_NUM_ALGORITHMS)
        return 0;
    for (int i = 0; i < SIMD_STATES; i++) {
        if (!simd_state_format_valid(at->state_format[i]) || (n && i < states_of[row->algorithm] && !at->state[i]))
            return 0;
        if (at->state[i] && is_8_bits(at->state_format[i]) && (!at->scale[i] || at->first % SIMD_BLOCK))
            return 0;
    }
    return 1;
}

int simd_update(const simd_streams *at, size_t n, const simd_row *row) {
    if (!streams_valid(at, n, row))
        return -EINVAL;
    return n ? simd_current()->update(*at, n, row) : SIMD_OK;
}

int simd_pool_update(simd_pool *pool, const simd_streams *at, size_t n, const simd_row *row) {
    if (!streams_valid(at, n, row))
        return -EINVAL;
    return simd_pool_run_update(pool, at, n, row);
}

int simd_convert(const void *src, int src_format, void *dst, int dst_format, size_t n) {
    if (!simd_format_valid(src_format) || !simd_format_valid(dst_format))
        return -EINVAL;
    if (n && src_format == dst_format)
        memcpy(dst, src, n * simd_format_bytes(src_format));
    else if (n)
        simd_current()->convert(src, src_format, dst, dst_format, n);
    return 0;
}

int simd_join(const uint16_t *hi, const int16_t *lo, float *dst, size_t n) {
    simd_current()->join(hi, lo, dst, n);
    return 0;
}

int simd_split(const float *src, uint16_t *hi, int16_t *lo, size_t n) {
    simd_current()->split(src, hi, lo, n);
    return 0;
}
