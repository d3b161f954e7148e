/* Memory for I/O.  4 KiB pages make a segment each, and drives are limited in segments: huge pages are several times faster. */
#include <errno.h>
#include <sys/mman.h>
#include <unistd.h>

#include "aio.h"

#define HUGE_PAGE ((size_t)2 << 20)
#define POPULATE_WRITE 23 /* MADV_POPULATE_WRITE, Linux 5.14 */

static void touch(char *base, size_t bytes)
{
    if (!madvise(base, bytes, POPULATE_WRITE))
        return;
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    for (size_t i = 0; i < bytes; i += page)
        ((volatile char *)base)[i] = 0;
}

/* The mapping without its ends, so that it starts on a huge page. */
static char *map_aligned(size_t bytes)
{
    size_t whole = bytes + HUGE_PAGE;
    char *raw = mmap(NULL, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (raw == MAP_FAILED)
        return NULL;
    size_t head = (HUGE_PAGE - (uintptr_t)raw % HUGE_PAGE) % HUGE_PAGE;
    if (head)
        munmap(raw, head);
    munmap(raw + head + bytes, whole - head - bytes);
    return raw + head;
}

static size_t rounded(size_t bytes)
{
    return (bytes + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
}

int aio_map(size_t bytes, void **base, int *hugetlb)
{
    if (!bytes || bytes > SIZE_MAX / 4)
        return -EINVAL;
    bytes = rounded(bytes);
    *hugetlb = 1; /* the mapping reserves its pages, so touching it cannot fail later */
    char *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_HUGETLB | (21 << MAP_HUGE_SHIFT), -1, 0);
    if (at == MAP_FAILED) {
        *hugetlb = 0;
        at = map_aligned(bytes);
        if (!at)
            return -errno;
        madvise(at, bytes, MADV_HUGEPAGE);
    }
    madvise(at, bytes, MADV_DONTFORK);
    touch(at, bytes);
    *base = at;
    return 0;
}

void aio_unmap(void *base, size_t bytes)
{
    munmap(base, rounded(bytes));
}
