/* The update's chain, out of the interpreter: admit -> read -> wait for the unit's release -> kernel -> write -> free the slot.
 *
 *   submit(job) --> waiting chunks, earliest deadline first
 *        | a free slot                     (slots bound the memory; a slot is held from admission to the end of its writes)
 *        v
 *   reads in flight --> ready, unit released? --> update thread: kernel per segment --> writes in flight --> slot free
 *                         late reads --^                                    checksums of what is being written --^
 *
 * Reads and writes run on the caller's aio_queue; completions arrive on its thread, kernels run on the pipeline's own
 * update thread (with `num_threads` simd threads in all).  The first error stops admission of the job: in-flight transfers end, and
 * the job reports that error with its unit and role.
 *
 * Several jobs may be alive: they share the slots, in deadline order over all of them.  The caller submits a unit again
 * only when the job that updates it has ended for that unit: nothing here orders two jobs on the same bytes.
 *
 * A job may be submitted before its gradients exist: units that are not released read ahead, most urgent first, into
 * `num_preread` slots at most and never into the last one, so a released unit always gets through, whatever the order of
 * releases.  Until its release the memory that a unit uses (`host`, `source`) and the files that it reads late
 * (UPDATE_AFTER_RELEASE) may still be filled; from then until its end nobody else writes them, or reads what it updates.
 * The release orders the two: what the releasing thread has written or waited for, the unit reads.
 *
 * Threads: every function of a job may be called from any thread until update_job_free; update_open, update_submit and
 * update_close from one at a time.  The pipeline is closed before its I/O queue.  A job may be freed after the pipeline.
 */
#ifndef OFFLOAD_UPDATE_H
#define OFFLOAD_UPDATE_H

#include <stddef.h>
#include <stdint.h>

#include "../aio/aio.h"
#include "../simd/simd.h"

/* A chunk has a split master (param, master_lo), or a whole one beside its weight (param, master): the weight is then only
 * written, the master rounded.  States: an algorithm's first and second, for Adam exp_avg and exp_avg_sq.  Scales: of states
 * in eight bits, 4 bytes for each SIMD_BLOCK elements. */
enum update_role { UPDATE_PARAM = 0, UPDATE_MASTER_LO = 1, UPDATE_MASTER = 2, UPDATE_STATE_0 = 3, UPDATE_STATE_1 = 4,
                   UPDATE_SCALE_0 = 5, UPDATE_SCALE_1 = 6, UPDATE_GRAD = 7, UPDATE_NUM_ROLES = 8 };

/* Where one role of one chunk comes from and goes to.  Exactly one of `host` / a slot holds it while the kernel runs. */
typedef struct update_stream {
    void *host;                 /* resident: the kernel works here, in place, nothing is read; NULL: in a slot.
                                   Holds at least the bytes of the elements, rounded up to 4096.  Not looked at before
                                   the unit's release. */
    const void *source;         /* other memory, as large, which stays as it is: copied to where the kernel works when that is
                                   about to run; NULL: none.  Not looked at before the release either. */
    const aio_file *read_file;  /* read where neither is; NULL too: zero-filled (moments known to be zero), or made from the
                                   master */
    uint64_t read_offset;
    const aio_file *write_file; /* NULL: not written */
    uint64_t write_offset;
    uint32_t elem_bytes;        /* 1, 2 or 4; of a scale: 4 a block; 0: the chunk has no such role */
    uint16_t format;            /* enum simd_format, of the gradient, of states and of the weight of a whole master; 0
                                   elsewhere */
    uint16_t flags;             /* enum update_stream_flags */
} update_stream;

enum update_stream_flags {
    UPDATE_AFTER_RELEASE = 1 /* `read_file` is read when the unit is released, not before: it is still being written */
};

typedef struct update_chunk {
    uint64_t deadline;      /* smaller is more urgent: the unit's next use */
    uint32_t unit;          /* 0 <= unit < num_units of the job; the chunks of a unit stand in the order of its bytes */
    uint32_t num_elems;     /* >= 1; transfers are rounded up to 4096 bytes; what is not in `host` must fit a slot */
    uint32_t first_segment;
    uint32_t num_segments;
    update_stream streams[UPDATE_NUM_ROLES];
} update_chunk;

/* A chunk x tensor piece.  Elements that no segment covers, and segments with row == UPDATE_COPY, are copied through.
 * With a whole master the segments of a chunk stand in the order of its elements. */
#define UPDATE_COPY 0xffffffffu
typedef struct update_segment {
    uint32_t start; /* elements from the chunk's first */
    uint32_t num_elems;
    uint32_t row; /* into the job's rows */
    uint32_t reserved;
    uint64_t key;   /* of the tensor, and the element of it with which the segment begins: they choose the numbers with */
    uint64_t first; /* which state is rounded (simd.h) */
} update_segment;

typedef struct update_stats {
    uint64_t read_bytes[UPDATE_NUM_ROLES];
    uint64_t write_bytes[UPDATE_NUM_ROLES];
    uint64_t elems;     /* through the kernel */
    uint64_t kernel_ns;   /* the update thread inside kernels, and while it copies for them */
    uint64_t checksum_ns; /* ... and inside checksums */
    uint32_t most_preread; /* the most slots that units which are not released held when this job got one of them */
    uint32_t most_writing; /* the most slots in writing when this job began one of them */
} update_stats;

/* Of a unit, by CLOCK_MONOTONIC in ns: when the first began and the last ended; 0: none has. */
typedef struct update_times {
    uint64_t released_ns;
    uint64_t read_ns[2];
    uint64_t kernel_ns[2];
    uint64_t write_ns[2];
} update_times;

typedef struct update_error {
    int error; /* 0 or errno (positive) */
    int op;    /* enum aio_op; -1: the kernel refused */
    uint32_t unit;
    uint32_t role;
    uint64_t offset;
    uint64_t wanted;
    uint64_t done;
    uint32_t nonfinite; /* segments whose updated master is not finite */
} update_error;

typedef struct update_pipeline update_pipeline;
typedef struct update_job update_job;

typedef struct update_config {
    uint64_t slot_bytes;      /* a multiple of 4096 */
    uint32_t num_slots;       /* >= 1 */
    uint32_t num_threads;     /* of the kernels, >= 1 */
    uint32_t num_preread;     /* slots that units which are not released may hold; 0: half of all.  Cut to num_slots - 1 */
    uint32_t num_writing;     /* slots whose writes may be in flight: the next kernel waits, so that reads find slots too;
                                 0: half of all, rounded up */
} update_config;

#define UPDATE_CHECKSUMS 1u /* in `flags`: offer update_job_checksums */
#define UPDATE_TIMES 2u     /* keep what update_job_times tells */
typedef struct update_work {
    const update_chunk *chunks;
    const update_segment *segments;
    const simd_row *rows;
    const uint8_t *released; /* num_units flags; a unit with 0 runs up to its kernel and waits for update_release */
    uint32_t num_chunks;
    uint32_t num_segments;
    uint32_t num_rows;
    uint32_t num_units;
    uint32_t flags;
} update_work;

/* `slots`: num_slots * slot_bytes, 4096-aligned, owned by the caller, outlives the pipeline. */
int update_open(aio_queue *queue, void *slots, const update_config *config, update_pipeline **out);
void update_close(update_pipeline *pipeline); /* cancels what is waiting, joins */

#define UPDATE_ALL 0xffffffffu /* in place of a unit: all of the job */
/* Copies the arrays of `work`. */
int update_submit(update_pipeline *pipeline, const update_work *work, update_job **out);
int update_release(update_job *job, uint32_t unit); /* UPDATE_ALL: every unit; twice is once */
/* unit < num_units: all chunks of that unit written; unit == UPDATE_ALL: the whole job.
 * 0; -ETIME: timeout_ns >= 0 and over; or another -errno: the job has failed, update_job_error tells how. */
int update_wait(update_job *job, uint32_t unit, int64_t timeout_ns);
/* The same for its kernels: what lies in host buffers is the next generation, and may still be written. */
int update_wait_made(update_job *job, uint32_t unit, int64_t timeout_ns);
void update_job_error(const update_job *job, update_error *out);
void update_job_stats(const update_job *job, update_stats *out);
int update_job_times(const update_job *job, uint32_t unit, update_times *out); /* all 0 without UPDATE_TIMES */
/* The job's chunks (indices) in the order in which they got a slot.  Returns how many did; writes at most `capacity`. */
uint32_t update_job_order(const update_job *job, uint32_t *chunks, uint32_t capacity);
/* Of a unit that has ended: the crc32 (zlib's) of each MiB of what was written of `role`, counted from the unit's first
 * element; the last block ends with the last element, not with its padding.  Returns the number of blocks, 0 for a role
 * that some chunk does not write, and writes at most `capacity`.
 * -ENODATA: submitted without UPDATE_CHECKSUMS; -EAGAIN: the unit has not ended. */
#define UPDATE_CHECKSUM_BYTES (1u << 20)
int update_job_checksums(const update_job *job, uint32_t unit, uint32_t role, uint64_t *out, uint32_t capacity);
/* Drop what has not started; in-flight transfers end.  The job then reports ECANCELED. */
int update_cancel(update_job *job);
void update_job_free(update_job *job); /* waits for the job's in-flight transfers */

#endif
