/* What the queue asks of a way to do I/O.  Everything but wake() and forget() runs on the queue thread alone.
 *
 *   open -> { stage* -> wait }* -> close
 *
 * wait() starts what was staged and sleeps until a block has ended or wake() was called, so that a busy queue
 * costs one system call a turn.  Backends know nothing of tickets, deadlines or retries: they tell what the kernel said.
 */
#ifndef OFFLOAD_AIO_BACKEND_H
#define OFFLOAD_AIO_BACKEND_H

#include <stddef.h>
#include <stdint.h>
#include <time.h>

#include "aio.h"

/* One piece of a transfer, as it is handed to the kernel. */
typedef struct aio_block {
    char *buf;
    uint64_t offset;
    uint32_t bytes;
    int fd;
    int op;
    uint32_t index;          /* < max_blocks, its own for life: a backend may keep an array beside */
    uint32_t retries;        /* since the last progress */
    uint64_t started_ns;     /* statistics */
    aio_ticket *ticket;      /* the queue's; NULL: not in flight */
    struct aio_block *next;  /* of the list that holds it */
} aio_block;

typedef struct aio_completion {
    aio_block *block;
    int64_t result; /* bytes, or -errno */
} aio_completion;

typedef struct aio_backend {
    int id;
    int (*open)(uint32_t max_blocks, uint32_t num_threads, void **state);
    void (*stage)(void *state, aio_block *block); /* never more than max_blocks between stage and completion */
    /* `done` has room for max_blocks.  A count, 0 after wake(), or -errno: the backend is lost. */
    int (*wait)(void *state, aio_completion *done);
    void (*wake)(void *state);                                       /* any thread */
    int (*register_buffer)(void *state, void *base, size_t bytes);   /* may be NULL; nothing is in flight */
    int (*files)(void *state);                                       /* may be NULL; 0: registers them, or why not: -errno */
    void (*forget_files)(void *state, const int fds[2]);             /* may be NULL; nothing of theirs is in flight */
    void (*forget)(void *state);                                     /* may be NULL; in a child after fork */
    void (*close)(void *state);                                      /* nothing is in flight */
} aio_backend;

extern const aio_backend aio_uring, aio_libaio, aio_threads, aio_faults;

static inline uint64_t aio_now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* The kernel is short of something that time gives back. */
static inline void aio_nap(void)
{
    struct timespec millisecond = {0, 1000000};
    nanosleep(&millisecond, NULL);
}

#endif
