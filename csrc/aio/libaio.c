/* Kernel AIO through raw system calls.  The wake-up is a poll on an eventfd inside the context (Linux 4.18), so that waiting
 * is one call.  Only O_DIRECT transfers are asynchronous here: the kernel does buffered ones inside io_submit. */
#include <errno.h>
#include <linux/aio_abi.h>
#include <poll.h>
#include <stdbool.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "backend.h"

#ifdef __NR_io_setup

#define CMD_POLL 5 /* IOCB_CMD_POLL, missing in old headers */
#define MAX_NAPS 10000u

typedef struct context {
    aio_context_t id;
    int wake_fd;
    bool armed;
    uint32_t max_blocks, num_staged, num_failed;
    struct iocb *iocbs;    /* one a block, the last for the poll */
    struct iocb **staged;
    aio_completion *failed; /* refused by io_submit */
    struct io_event *events;
} context;

static void libaio_close(void *state)
{
    context *c = state;
    if (c->id)
        syscall(__NR_io_destroy, (long)c->id);
    if (c->wake_fd >= 0)
        close(c->wake_fd);
    free(c->iocbs);
    free(c->staged);
    free(c->failed);
    free(c->events);
    free(c);
}

static void arm(context *c)
{
    struct iocb *iocb = &c->iocbs[c->max_blocks];
    *iocb = (struct iocb){0};
    iocb->aio_lio_opcode = CMD_POLL;
    iocb->aio_fildes = (uint32_t)c->wake_fd;
    iocb->aio_buf = POLLIN;
    c->staged[c->num_staged++] = iocb;
    c->armed = true;
}

static void libaio_stage(void *state, aio_block *block)
{
    context *c = state;
    struct iocb *iocb = &c->iocbs[block->index];
    *iocb = (struct iocb){0};
    iocb->aio_data = (uint64_t)(uintptr_t)block;
    iocb->aio_lio_opcode = block->op == AIO_READ ? IOCB_CMD_PREAD : IOCB_CMD_PWRITE;
    iocb->aio_fildes = (uint32_t)block->fd;
    iocb->aio_buf = (uint64_t)(uintptr_t)block->buf;
    iocb->aio_nbytes = block->bytes;
    iocb->aio_offset = (int64_t)block->offset;
    c->staged[c->num_staged++] = iocb;
}

/* The kernel refused the first one of a batch: that is its block's result.  0, or -errno if the poll cannot be. */
static int refuse(context *c, struct iocb *iocb, int error)
{
    if (!iocb->aio_data)
        return error;
    c->failed[c->num_failed++] = (aio_completion){(aio_block *)(uintptr_t)iocb->aio_data, error};
    return 0;
}

/* Give all that is staged to the kernel.  EAGAIN: it is short of something, which completions or time give back. */
static int flush(context *c)
{
    uint32_t sent = 0, naps = 0;
    int error = 0;
    while (sent < c->num_staged && !error) {
        long count = syscall(__NR_io_submit, (long)c->id, (long)(c->num_staged - sent), (long)(c->staged + sent));
        if (count > 0) {
            sent += (uint32_t)count;
        } else if (count == 0 || errno == EAGAIN) {
            if (naps++ == MAX_NAPS)
                error = -EBUSY;
            aio_nap();
        } else if (errno != EINTR) {
            error = refuse(c, c->staged[sent++], -errno);
        }
    }
    c->num_staged = 0;
    return error;
}

static int libaio_wait(void *state, aio_completion *done)
{
    context *c = state;
    if (!c->armed)
        arm(c);
    int error = flush(c);
    if (error)
        return error;
    uint32_t count = c->num_failed;
    for (uint32_t i = 0; i < count; i++)
        done[i] = c->failed[i];
    c->num_failed = 0;
    long events;
    do
        events = syscall(__NR_io_getevents, (long)c->id, count ? 0L : 1L, (long)(c->max_blocks + 1), (long)c->events, 0L);
    while (events < 0 && errno == EINTR);
    if (events < 0)
        return -errno;
    for (long i = 0; i < events; i++) {
        if (c->events[i].data) {
            done[count++] = (aio_completion){(aio_block *)(uintptr_t)c->events[i].data, c->events[i].res};
        } else {
            uint64_t wakes;
            c->armed = false;
            if (read(c->wake_fd, &wakes, sizeof wakes) < 0 && errno != EAGAIN && errno != EINTR)
                return -errno;
        }
    }
    return (int)count;
}

static void libaio_wake(void *state)
{
    context *c = state;
    uint64_t one = 1;
    while (write(c->wake_fd, &one, sizeof one) < 0 && errno == EINTR)
        ;
}

static void libaio_forget(void *state)
{
    close(((context *)state)->wake_fd);
}

static int libaio_open(uint32_t max_blocks, uint32_t num_threads, void **state)
{
    (void)num_threads;
    context *c = calloc(1, sizeof *c);
    if (!c)
        return -ENOMEM;
    c->max_blocks = max_blocks;
    c->iocbs = calloc(max_blocks + 1, sizeof *c->iocbs);
    c->staged = calloc(max_blocks + 1, sizeof *c->staged);
    c->failed = calloc(max_blocks + 1, sizeof *c->failed);
    c->events = calloc(max_blocks + 1, sizeof *c->events);
    int error = c->iocbs && c->staged && c->failed && c->events ? 0 : -ENOMEM;
    c->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (!error && (c->wake_fd < 0 || syscall(__NR_io_setup, (long)(max_blocks + 1), (long)&c->id)))
        error = -errno;
    if (!error) {
        arm(c); /* also tells whether this kernel can */
        error = flush(c);
    }
    if (error)
        libaio_close(c);
    else
        *state = c;
    return error;
}

#else

static int libaio_open(uint32_t max_blocks, uint32_t num_threads, void **state)
{
    (void)max_blocks, (void)num_threads, (void)state;
    return -ENOSYS;
}

#define libaio_stage NULL
#define libaio_wait NULL
#define libaio_wake NULL
#define libaio_forget NULL
#define libaio_close NULL
#endif

const aio_backend aio_libaio = {
    .id = AIO_LIBAIO,
    .open = libaio_open,
    .stage = libaio_stage,
    .wait = libaio_wait,
    .wake = libaio_wake,
    .forget = libaio_forget,
    .close = libaio_close,
};
