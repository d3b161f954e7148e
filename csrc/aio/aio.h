/* Asynchronous direct I/O over io_uring, libaio or threads.
 *
 * One queue has one thread.  aio_submit() puts whole transfers into two heaps a drive (reads, writes), ordered
 * by deadline, then by submission; the queue thread cuts them into blocks, keeps `read_depth` and
 * `write_depth` blocks in flight on each drive, re-queues the rest of a short transfer, retries EINTR and EAGAIN,
 * and completes the ticket when the last block is done.  A more urgent transfer waits for at most
 * the blocks already in flight on its drive.
 *
 * Every function returns 0 or a count, or -errno.  Nothing prints, nothing exits.
 * Any thread may call anything at any time, with two exceptions: aio_queue_close() ends the right to use the queue
 * (its tickets stay valid), and neither it nor aio_wait() may be called from a `done` callback.
 */
#ifndef OFFLOAD_AIO_H
#define OFFLOAD_AIO_H

#include <stddef.h>
#include <stdint.h>

enum aio_op { AIO_READ = 0, AIO_WRITE = 1 };
enum aio_backend_id { AIO_AUTO = 0, AIO_URING = 1, AIO_LIBAIO = 2, AIO_THREADS = 3, AIO_FAULTS = 4 };

/* Two descriptors of one file.  `direct_fd` is -1 where O_DIRECT is refused; then everything goes through
 * `buffered_fd`.  `alignment` (bytes, power of two, >= 512) is what O_DIRECT asks of address, offset and length;
 * the unaligned ends of a transfer are cut at max(alignment, 4096) and go through `buffered_fd`. */
typedef struct aio_file {
    int direct_fd;
    int buffered_fd;
    uint32_t alignment;
    uint32_t in_flight; /* blocks that use a descriptor now: the queue counts, aio_file_close() waits; start with 0 */
    uint32_t drive;     /* whose shares its blocks use, modulo the queue's num_drives */
} aio_file;

typedef struct aio_queue aio_queue;
typedef struct aio_ticket aio_ticket;

#define AIO_MAX_DRIVES 16u

typedef struct aio_config {
    int backend;          /* enum aio_backend_id; AIO_AUTO probes in the order of the enum */
    uint32_t block_bytes; /* multiple of 4096 */
    uint32_t read_depth;  /* blocks in flight on each drive, >= 1 */
    uint32_t write_depth;
    uint32_t num_threads; /* of the threads backend; 0: as many as blocks in flight, at most 16 */
    uint32_t keep_stats;  /* 0: aio_queue_stats() tells bytes and counts only */
    uint32_t num_drives;  /* 1 to AIO_MAX_DRIVES: a slow one never holds up another */
} aio_config;

/* Called on the queue thread when a transfer has ended.  May submit; must not block or wait.
 * `error`: 0 or errno (positive). */
typedef void (*aio_done_fn)(void *arg, int error, uint64_t bytes_done);

typedef struct aio_request {
    int op;
    const aio_file *file; /* must outlive the transfer */
    void *buf;            /* must outlive the transfer */
    uint64_t offset;
    uint64_t bytes;
    uint64_t deadline; /* smaller is more urgent */
    aio_done_fn done;  /* may be NULL */
    void *arg;
} aio_request;

/* A finished transfer, as its ticket tells it. */
typedef struct aio_result {
    int error;           /* 0 or errno (positive); ECANCELED after aio_cancel, ENODATA: the file ended, EBADF: closed */
    uint64_t bytes_done; /* of the transfer */
    uint64_t offset;     /* where the first failed block started */
} aio_result;

/* What O_DIRECT asks of address, offset and length on this descriptor; 4096 where the kernel does not say;
 * -EOPNOTSUPP: no direct I/O here. */
int aio_direct_alignment(int fd, uint32_t *alignment);
/* Close both descriptors.  Blocks in flight end first (their descriptor's number must not be given to another file);
 * what is not yet submitted fails with EBADF.  Twice is allowed.  Not from a `done` callback. */
void aio_file_close(aio_file *file);

/* Zeroed, touched memory for I/O: hugetlb pages if enough are free, else 2 MiB aligned and advised to be huge.
 * Not inherited by fork: device transfers must never meet copy-on-write.  `bytes` is rounded up to 2 MiB. */
int aio_map(size_t bytes, void **base, int *hugetlb);
void aio_unmap(void *base, size_t bytes);

/* Since the queue was opened; index: enum aio_op. */
typedef struct aio_stats {
    uint64_t bytes[2];
    uint64_t blocks[2];                       /* ended, with or without an error */
    uint64_t latency[2][32]; /* blocks that took [2^i, 2^(i+1)) us; the first also less, the last also more */
    uint64_t busy_ns[2];                      /* with at least one block in flight */
    uint64_t depth_ns[2];                     /* integral of the blocks in flight over time; / busy_ns: the mean depth */
} aio_stats;

int aio_queue_open(const aio_config *config, aio_queue **out);
/* Cancel what is not submitted, wait for what is in flight, join the thread.  All tickets stay valid until released. */
void aio_queue_close(aio_queue *queue);
int aio_queue_backend(const aio_queue *queue); /* the backend that was chosen */
void aio_queue_stats(aio_queue *queue, aio_stats *out);
/* In a child after fork, instead of any other call: close the descriptors that it inherited. */
void aio_queue_forget(aio_queue *queue);

/* Requests whose block lies inside a registered region use fixed buffers (io_uring; other backends accept and ignore).
 * While nothing is queued (-EBUSY).  -ENOMEM, -EPERM ... where memory may not be locked: everything works without. */
int aio_register(aio_queue *queue, void *base, size_t bytes);

/* Whether descriptors are registered too, each with its first block: 0, or why not: -EOPNOTSUPP (another backend), -EMFILE ... */
int aio_queue_registers_files(aio_queue *queue);

/* Queue `count` transfers, all or none (-EINVAL, -ENOMEM, -ESHUTDOWN: closing).  tickets[i] (one reference each, released by aio_release) may be NULL as a whole
 * when completion is told through `done`. */
int aio_submit(aio_queue *queue, const aio_request *requests, uint32_t count, aio_ticket **tickets);
int aio_wait(aio_ticket *ticket, int64_t timeout_ns, aio_result *result); /* -ETIME: not ended yet; timeout < 0: for ever */
/* Drop what is not yet submitted; in-flight blocks end normally, then the ticket ends with ECANCELED.
 * -EALREADY: nothing was left to drop. */
int aio_cancel(aio_ticket *ticket);
void aio_release(aio_ticket *ticket);

/* ---- Tests only: the faults backend ----
 * It does one block after the other, in the order of their submission, with pread and pwrite, and on demand fails them,
 * cuts them short, lets others overtake them, or holds them.  The calls return -EINVAL on a queue of another backend. */
enum aio_fault_kind {
    AIO_FAULT_ERROR = 0, /* nothing is done; `value`: errno */
    AIO_FAULT_SHORT = 1, /* `value` bytes are done */
    AIO_FAULT_DELAY = 2  /* `value` younger blocks end first, as far as there are any */
};

typedef struct aio_fault {
    uint64_t nth; /* block, counted from 0 over the life of the queue; a retry counts again */
    int kind;
    uint64_t value;
} aio_fault;

typedef struct aio_fault_block {
    int op;
    uint64_t offset;
    uint64_t bytes;
} aio_fault_block;

int aio_faults_inject(aio_queue *queue, const aio_fault *faults, uint32_t count); /* replaces what was injected */
int aio_faults_allow(aio_queue *queue, uint64_t blocks); /* so many more may end, UINT64_MAX: all; starts with all */
int aio_faults_skip_io(aio_queue *queue, int skip);      /* succeed without touching file or memory */
int aio_faults_wait(aio_queue *queue, uint64_t blocks);  /* until so many have been submitted */
int64_t aio_faults_log(aio_queue *queue, aio_fault_block *out, uint32_t room); /* how many; the first `room` of them */

#endif
