/* io_uring through raw system calls.
 *
 * One turn is one io_uring_enter(): it submits what is staged and waits for a completion.  The wake-up is a read of an
 * eventfd that lies in the ring like every other request.  Both rings are large enough for all blocks, so they never overflow.
 */
#include "backend.h"

#include <errno.h>

#if defined(__has_include)
#if __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#endif
#endif

#ifdef IORING_FEAT_RW_CUR_POS /* Linux 5.6: IORING_OP_READ and IORING_REGISTER_PROBE */

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#ifndef __NR_io_uring_setup
#define __NR_io_uring_setup 425
#define __NR_io_uring_enter 426
#define __NR_io_uring_register 427
#endif

/* Younger than some headers; refused with EINVAL by kernels that do not know them. */
#define COOP_TASKRUN (1u << 8)
#define SINGLE_ISSUER (1u << 12)
#define DEFER_TASKRUN (1u << 13)

#define REGION_BYTES ((size_t)1 << 30) /* the most that one registered buffer may hold */
#define MAX_NAPS 10000u
#define MAX_FILES 4096u /* a descriptor below this is its own place in the table of registered files */

typedef struct ring {
    int fd, wake_fd;
    bool armed;
    uint64_t wakes; /* where the eventfd is read to */
    uint32_t staged;
    char *rings; /* submission and completion ring in one mapping */
    size_t rings_bytes, sqes_bytes;
    struct io_uring_sqe *sqes;
    struct io_uring_cqe *cqes;
    uint32_t *sq_tail, *cq_head, *cq_tail;
    uint32_t sq_mask, cq_mask;
    struct iovec *regions; /* registered, in this order */
    uint32_t num_regions;
    uint32_t num_files; /* places in the table */
    int files_error;    /* why there is no table */
    uint64_t has_file[MAX_FILES / 64];
} ring;

static struct io_uring_sqe *next_sqe(ring *r)
{
    uint32_t tail = *r->sq_tail; /* only this thread writes it */
    struct io_uring_sqe *sqe = &r->sqes[tail & r->sq_mask];
    memset(sqe, 0, sizeof *sqe);
    __atomic_store_n(r->sq_tail, tail + 1, __ATOMIC_RELEASE); /* read by the kernel inside enter, after the entry is filled */
    r->staged++;
    return sqe;
}

/* The registered region that holds the block, or -1. */
static int region_of(const ring *r, const aio_block *block)
{
    uintptr_t start = (uintptr_t)block->buf;
    for (uint32_t i = 0; i < r->num_regions; i++) {
        uintptr_t base = (uintptr_t)r->regions[i].iov_base;
        if (start >= base && start + block->bytes <= base + r->regions[i].iov_len)
            return (int)i;
    }
    return -1;
}

static bool in_table(const ring *r, int fd)
{
    return fd >= 0 && (uint32_t)fd < r->num_files && (r->has_file[fd / 64] >> (fd % 64) & 1);
}

static bool put_in_table(ring *r, int place, int32_t fd)
{
    struct io_uring_files_update update = {.offset = (uint32_t)place, .fds = (uint64_t)(uintptr_t)&fd};
    return syscall(__NR_io_uring_register, (long)r->fd, (long)IORING_REGISTER_FILES_UPDATE, (long)&update, 1L) == 1;
}

/* Whether the descriptor is registered, from its first block on. */
static bool use_table(ring *r, int fd)
{
    if (in_table(r, fd))
        return true;
    if (fd < 0 || (uint32_t)fd >= r->num_files || !put_in_table(r, fd, fd))
        return false;
    r->has_file[fd / 64] |= (uint64_t)1 << (fd % 64);
    return true;
}

static void uring_forget_files(void *state, const int fds[2])
{
    ring *r = state;
    for (int i = 0; i < 2; i++)
        if (in_table(r, fds[i])) {
            put_in_table(r, fds[i], -1);
            r->has_file[fds[i] / 64] &= ~((uint64_t)1 << (fds[i] % 64));
        }
}

static int uring_files(void *state)
{
    return ((ring *)state)->files_error;
}

/* An empty table; everything works without. */
static void make_table(ring *r)
{
    struct rlimit limit;
    uint32_t count = MAX_FILES;
    if (!getrlimit(RLIMIT_NOFILE, &limit) && limit.rlim_cur < count)
        count = (uint32_t)limit.rlim_cur; /* a larger table is refused */
    int32_t empty[MAX_FILES];
    memset(empty, 0xff, sizeof empty);
    if (syscall(__NR_io_uring_register, (long)r->fd, (long)IORING_REGISTER_FILES, (long)empty, (long)count))
        r->files_error = -errno;
    else
        r->num_files = count;
}

static void uring_stage(void *state, aio_block *block)
{
    ring *r = state;
    int region = region_of(r, block);
    struct io_uring_sqe *sqe = next_sqe(r);
    if (region >= 0) {
        sqe->opcode = block->op == AIO_READ ? IORING_OP_READ_FIXED : IORING_OP_WRITE_FIXED;
        sqe->buf_index = (uint16_t)region;
    } else {
        sqe->opcode = block->op == AIO_READ ? IORING_OP_READ : IORING_OP_WRITE;
    }
    sqe->flags = use_table(r, block->fd) ? IOSQE_FIXED_FILE : 0;
    sqe->fd = block->fd;
    sqe->off = block->offset;
    sqe->addr = (uint64_t)(uintptr_t)block->buf;
    sqe->len = block->bytes;
    sqe->user_data = (uint64_t)(uintptr_t)block;
}

/* The eventfd blocks (no O_NONBLOCK): the kernel then polls it for us. */
static void arm(ring *r)
{
    struct io_uring_sqe *sqe = next_sqe(r);
    sqe->opcode = IORING_OP_READ;
    sqe->fd = r->wake_fd;
    sqe->addr = (uint64_t)(uintptr_t)&r->wakes;
    sqe->len = sizeof r->wakes;
    r->armed = true;
}

static uint32_t ready(const ring *r)
{
    return __atomic_load_n(r->cq_tail, __ATOMIC_ACQUIRE) - *r->cq_head;
}

/* Submit and, unless something is ready, wait. */
static int enter(ring *r)
{
    for (uint32_t naps = 0; r->staged || !ready(r);) {
        long count = syscall(__NR_io_uring_enter, (long)r->fd, (long)r->staged, ready(r) ? 0L : 1L,
                             (long)IORING_ENTER_GETEVENTS, 0L, 0L);
        if (count >= 0) {
            r->staged -= (uint32_t)count;
        } else if (errno == EAGAIN || errno == EBUSY) {
            if (ready(r))
                break; /* reap first: that is what the kernel waits for */
            if (naps++ == MAX_NAPS)
                return -EBUSY;
            aio_nap();
        } else if (errno != EINTR) {
            return -errno;
        }
    }
    return 0;
}

static int uring_wait(void *state, aio_completion *done)
{
    ring *r = state;
    if (!r->armed)
        arm(r);
    int error = enter(r), count = 0;
    if (error)
        return error;
    uint32_t head = *r->cq_head;
    for (uint32_t left = ready(r); left > 0; left--, head++) {
        const struct io_uring_cqe *cqe = &r->cqes[head & r->cq_mask];
        if (cqe->user_data) {
            done[count++] = (aio_completion){(aio_block *)(uintptr_t)cqe->user_data, cqe->res};
        } else {
            r->armed = false;
            if (cqe->res < 0 && cqe->res != -EINTR && cqe->res != -EAGAIN)
                error = cqe->res;
        }
    }
    __atomic_store_n(r->cq_head, head, __ATOMIC_RELEASE); /* the kernel may overwrite the entries now */
    return error ? error : count;
}

static void uring_wake(void *state)
{
    ring *r = state;
    uint64_t one = 1;
    while (write(r->wake_fd, &one, sizeof one) < 0 && errno == EINTR)
        ;
}

/* All regions anew: incremental registration is younger than what we can count on. */
static int uring_register(void *state, void *base, size_t bytes)
{
    ring *r = state;
    uint32_t more = (uint32_t)((bytes + REGION_BYTES - 1) / REGION_BYTES);
    struct iovec *regions = realloc(r->regions, (r->num_regions + more) * sizeof *regions);
    if (!regions)
        return -ENOMEM;
    r->regions = regions;
    for (uint32_t i = 0; i < more; i++) {
        size_t start = i * REGION_BYTES, left = bytes - start;
        regions[r->num_regions + i] = (struct iovec){(char *)base + start, left < REGION_BYTES ? left : REGION_BYTES};
    }
    if (r->num_regions)
        syscall(__NR_io_uring_register, (long)r->fd, (long)IORING_UNREGISTER_BUFFERS, 0L, 0L);
    long error = syscall(__NR_io_uring_register, (long)r->fd, (long)IORING_REGISTER_BUFFERS, (long)regions,
                         (long)(r->num_regions + more));
    if (!error) {
        r->num_regions += more;
        return 0;
    }
    int result = -errno; /* what was registered before fitted, and does again */
    if (r->num_regions && syscall(__NR_io_uring_register, (long)r->fd, (long)IORING_REGISTER_BUFFERS, (long)regions,
                                  (long)r->num_regions))
        r->num_regions = 0;
    return result;
}

static void uring_forget(void *state)
{
    ring *r = state;
    close(r->fd);
    close(r->wake_fd);
}

/* The kernel tears a ring down later, on its own thread: leave it nothing that points into our memory. */
static void disarm(ring *r)
{
    uring_wake(r);
    while (r->armed) {
        if (enter(r))
            return;
        uint32_t head = *r->cq_head;
        r->armed = r->cqes[head & r->cq_mask].user_data != 0;
        __atomic_store_n(r->cq_head, head + 1, __ATOMIC_RELEASE);
    }
}

static void uring_close(void *state)
{
    ring *r = state;
    if (r->armed)
        disarm(r);
    if (r->num_regions)
        syscall(__NR_io_uring_register, (long)r->fd, (long)IORING_UNREGISTER_BUFFERS, 0L, 0L);
    if (r->num_files)
        syscall(__NR_io_uring_register, (long)r->fd, (long)IORING_UNREGISTER_FILES, 0L, 0L);
    if (r->sqes)
        munmap(r->sqes, r->sqes_bytes);
    if (r->rings)
        munmap(r->rings, r->rings_bytes);
    if (r->fd >= 0)
        close(r->fd);
    if (r->wake_fd >= 0)
        close(r->wake_fd);
    free(r->regions);
    free(r);
}

static void *map(const ring *r, size_t bytes, uint64_t what)
{
    void *base = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, r->fd, (off_t)what);
    if (base == MAP_FAILED)
        return NULL;
    madvise(base, bytes, MADV_DONTFORK);
    return base;
}

static int map_rings(ring *r, const struct io_uring_params *params)
{
    size_t sq_end = params->sq_off.array + params->sq_entries * sizeof(uint32_t);
    size_t cq_end = params->cq_off.cqes + params->cq_entries * sizeof(struct io_uring_cqe);
    if (!(params->features & IORING_FEAT_SINGLE_MMAP))
        return -ENOSYS;
    r->rings_bytes = sq_end > cq_end ? sq_end : cq_end;
    r->sqes_bytes = params->sq_entries * sizeof(struct io_uring_sqe);
    r->rings = map(r, r->rings_bytes, IORING_OFF_SQ_RING);
    r->sqes = map(r, r->sqes_bytes, IORING_OFF_SQES);
    if (!r->rings || !r->sqes)
        return -ENOMEM;
    r->sq_tail = (uint32_t *)(r->rings + params->sq_off.tail);
    r->cq_head = (uint32_t *)(r->rings + params->cq_off.head);
    r->cq_tail = (uint32_t *)(r->rings + params->cq_off.tail);
    r->cqes = (struct io_uring_cqe *)(r->rings + params->cq_off.cqes);
    r->sq_mask = *(uint32_t *)(r->rings + params->sq_off.ring_mask);
    r->cq_mask = *(uint32_t *)(r->rings + params->cq_off.ring_mask);
    for (uint32_t i = 0; i < params->sq_entries; i++) /* entry i always stands at place i */
        ((uint32_t *)(r->rings + params->sq_off.array))[i] = i;
    return 0;
}

/* With the fewest interrupts that this kernel offers. */
static int set_up(ring *r, uint32_t entries, struct io_uring_params *params)
{
    static const uint32_t FLAGS[] = {SINGLE_ISSUER | DEFER_TASKRUN, COOP_TASKRUN, 0};
    for (size_t i = 0; i < sizeof FLAGS / sizeof *FLAGS; i++) {
        *params = (struct io_uring_params){.flags = FLAGS[i]};
        r->fd = (int)syscall(__NR_io_uring_setup, (long)entries, (long)params);
        if (r->fd >= 0)
            return 0;
        if (errno != EINVAL)
            break;
    }
    return -errno;
}

static int check_operations(const ring *r)
{
    static const uint8_t NEEDED[] = {IORING_OP_READ, IORING_OP_WRITE, IORING_OP_READ_FIXED, IORING_OP_WRITE_FIXED};
    struct io_uring_probe *probe = calloc(1, sizeof *probe + 256 * sizeof(struct io_uring_probe_op));
    if (!probe)
        return -ENOMEM;
    int error = 0;
    if (syscall(__NR_io_uring_register, (long)r->fd, (long)IORING_REGISTER_PROBE, (long)probe, 256L))
        error = -errno;
    for (size_t i = 0; i < sizeof NEEDED && !error; i++)
        if (NEEDED[i] > probe->last_op || !(probe->ops[NEEDED[i]].flags & IO_URING_OP_SUPPORTED))
            error = -ENOSYS;
    free(probe);
    return error;
}

static int uring_open(uint32_t max_blocks, uint32_t num_threads, void **state)
{
    (void)num_threads;
    ring *r = calloc(1, sizeof *r);
    if (!r)
        return -ENOMEM;
    struct io_uring_params params;
    r->fd = -1;
    r->wake_fd = eventfd(0, EFD_CLOEXEC);
    int error = r->wake_fd < 0 ? -errno : set_up(r, max_blocks + 1, &params);
    if (!error)
        error = map_rings(r, &params);
    if (!error)
        error = check_operations(r);
    if (error) {
        uring_close(r);
        return error;
    }
    make_table(r);
    *state = r;
    return 0;
}

#else

static int uring_open(uint32_t max_blocks, uint32_t num_threads, void **state)
{
    (void)max_blocks, (void)num_threads, (void)state;
    return -ENOSYS;
}

#define uring_stage NULL
#define uring_wait NULL
#define uring_wake NULL
#define uring_register NULL
#define uring_files NULL
#define uring_forget_files NULL
#define uring_forget NULL
#define uring_close NULL
#endif

const aio_backend aio_uring = {
    .id = AIO_URING,
    .open = uring_open,
    .stage = uring_stage,
    .wait = uring_wait,
    .wake = uring_wake,
    .register_buffer = uring_register,
    .files = uring_files,
    .forget_files = uring_forget_files,
    .forget = uring_forget,
    .close = uring_close,
};
