/* A file's two descriptors: what O_DIRECT asks of them, and closing them under load. */
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "queue.h"

/* struct statx of the kernel's interface, as far as it matters here; headers of old build machines lack the last fields. */
#define STATX_DIOALIGN_BIT 0x2000u
#define STATX_BYTES 256
#define OFFSET_OF_MEM_ALIGN 152
#define OFFSET_OF_OFFSET_ALIGN 156

/* Some file systems take O_DIRECT at open and refuse it at the first transfer: -EOPNOTSUPP. */
static int try_direct(int fd)
{
    char room[2 * 4096];
    char *aligned = room + (4096 - (uintptr_t)room % 4096) % 4096;
    return pread(fd, aligned, 4096, 0) < 0 && errno == EINVAL ? -EOPNOTSUPP : 0;
}

int aio_direct_alignment(int fd, uint32_t *alignment)
{
    unsigned char raw[STATX_BYTES] = {0};
    uint32_t mask, memory, offset;
    *alignment = 4096;
    if (syscall(SYS_statx, (long)fd, (long)"", (long)AT_EMPTY_PATH, (long)STATX_DIOALIGN_BIT, (long)raw))
        return errno == ENOSYS || errno == EPERM ? try_direct(fd) : -errno; /* containers block young calls with EPERM */
    memcpy(&mask, raw, sizeof mask);
    if (!(mask & STATX_DIOALIGN_BIT))
        return try_direct(fd);
    memcpy(&memory, raw + OFFSET_OF_MEM_ALIGN, sizeof memory);
    memcpy(&offset, raw + OFFSET_OF_OFFSET_ALIGN, sizeof offset);
    uint32_t larger = memory > offset ? memory : offset;
    if (!memory || !offset)
        return -EOPNOTSUPP;
    for (*alignment = 512; *alignment < larger;)
        *alignment *= 2;
    return 0;
}

void aio_file_close(aio_file *file)
{
    const struct timespec moment = {0, 100000};
    int direct = __atomic_exchange_n(&file->direct_fd, -1, __ATOMIC_SEQ_CST);
    int buffered = __atomic_exchange_n(&file->buffered_fd, -1, __ATOMIC_SEQ_CST);
    while (__atomic_load_n(&file->in_flight, __ATOMIC_SEQ_CST))
        nanosleep(&moment, NULL);
    if (direct >= 0 || buffered >= 0)
        aio_queues_forget_files((int[]){direct, buffered});
    if (direct >= 0)
        close(direct);
    if (buffered >= 0)
        close(buffered);
}
