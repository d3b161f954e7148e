/* Structures shared by the files of this folder.
 *
 *   submit.c    a job: checked, copied, its chunks queued           heap.c   waiting chunks, earliest deadline first
 *   chain.c     admit -> reads -> ready; writes -> slot free        worker.c the update thread: ready -> kernel -> writes
 *   job.c       release, wait, cancel, results                      pipeline.c open, close
 *   sums.c      checksums of what is being written
 *
 * One lock per pipeline guards all of it, jobs included.  It is never held during a kernel, nor while the I/O queue is
 * called: the queue's thread takes it in its callback.
 */
#ifndef OFFLOAD_UPDATE_INTERNAL_H
#define OFFLOAD_UPDATE_INTERNAL_H

#include <pthread.h>
#include <stdbool.h>

#include "update.h"

#define UPDATE_PAGE 4096u

/* Who owns a slot's memory. */
enum slot_state {
    SLOT_FREE,    /* nobody: on the free list */
    SLOT_READING, /* the I/O queue */
    SLOT_READY,   /* nobody: what may be read is there, the unit may still have to be released */
    SLOT_KERNEL,  /* the update thread */
    SLOT_WRITING, /* the I/O queue; the update thread reads it too, for the checksums */
};

struct slot;

/* The argument of a transfer's callback.  A role of a slot is read or written, never both at a time. */
struct transfer {
    struct slot *slot;
    uint32_t role;
};

struct slot {
    update_pipeline *pipeline;
    uint8_t *memory;
    struct slot *next_free;
    update_job *job; /* NULL when free */
    uint32_t chunk;
    uint32_t pending; /* transfers in flight, and one for each thread that is still at work on the slot's step */
    uint32_t unread;  /* bit i: role i is still to be read, after the release */
    uint64_t sequence; /* of the admission: breaks ties between equal deadlines */
    enum slot_state state;
    struct transfer transfers[UPDATE_NUM_ROLES];
};

struct waiting {
    uint64_t deadline;
    uint64_t sequence; /* of the submission: breaks ties between equal deadlines */
    update_job *job;
    uint32_t chunk;
};

struct heap {
    struct waiting *items;
    size_t size;
    size_t capacity;
};

struct unit {
    uint32_t remaining; /* chunks not yet written */
    uint32_t unmade;    /* chunks whose kernel has not ended */
    bool released;
    uint64_t num_bytes[UPDATE_GRAD];
    uint32_t *sums[UPDATE_GRAD]; /* one for each block of a role; NULL: none wanted */
    update_times times;
};

struct update_job {
    update_pipeline *pipeline;
    update_job *next, *previous; /* the pipeline's list */
    update_chunk *chunks;
    update_segment *segments;
    simd_row *rows;
    struct unit *units;
    uint32_t *order; /* chunks as they were admitted */
    uint64_t (*starts)[UPDATE_GRAD]; /* of each chunk, in bytes of each role of its unit */
    uint32_t *sums;   /* of all units: the update thread writes, others read when a unit has ended; NULL: none wanted */
    uint32_t num_chunks, num_segments, num_rows, num_units;
    uint32_t num_admitted;
    uint32_t remaining; /* chunks not yet written */
    uint32_t unmade;    /* chunks whose kernel has not ended */
    uint32_t active;    /* slots held */
    uint32_t waiters;   /* threads inside update_wait */
    bool timed;         /* `times` of its units are kept */
    update_error error;
    update_stats stats;
};

struct update_pipeline {
    pthread_mutex_t lock;
    pthread_cond_t work;     /* wakes the update thread: a chunk can run, or stop */
    pthread_cond_t progress; /* wakes waiters: a unit or a job has ended or is made, or a waiter has left */
    pthread_t thread;
    aio_queue *queue;
    simd_pool *pool;
    uint64_t slot_bytes;
    uint32_t num_slots, num_preread, num_writing;
    struct slot *slots;
    struct slot *free_slots;
    struct heap open; /* waiting chunks of released units */
    struct heap held; /* ... of units still to be released */
    uint64_t num_submitted, num_admitted;
    update_job *jobs;
    bool stopping, closed;
};

/* heap.c */
int update_heap_reserve(struct heap *heap, size_t more);
void update_heap_push(struct heap *heap, struct waiting item);
struct waiting update_heap_pop(struct heap *heap);
bool update_more_urgent(const struct waiting *a, const struct waiting *b);
/* Take the chunks of `unit` (UPDATE_ALL: of every unit) of `job` out, into `into` or away. */
void update_heap_move(struct heap *heap, const update_job *job, uint32_t unit, struct heap *into);

/* chain.c; the lock is held at the call and at the return */
void update_admit(update_pipeline *pipeline); /* lets go of the lock while it submits */
void update_read_late(update_job *job);       /* lets go of the lock while it submits */
void update_write_slot(struct slot *slot);    /* lets go of the lock while it submits and sums */
uint32_t update_num_writing(const update_pipeline *pipeline);
void update_drop_slot(struct slot *slot);
void update_fail_job(update_job *job, const update_error *error);

static inline const update_chunk *slot_chunk(const struct slot *slot) { return &slot->job->chunks[slot->chunk]; }
static inline bool slot_released(const struct slot *slot) { return slot->job->units[slot_chunk(slot)->unit].released; }

/* worker.c; the lock is held: something of the slot's unit begins (0) or ends (1) */
void update_mark(struct slot *slot, uint64_t *(*of)(update_times *), int end);
static inline uint64_t *update_read_times(update_times *times) { return times->read_ns; }
static inline uint64_t *update_kernel_times(update_times *times) { return times->kernel_ns; }
static inline uint64_t *update_write_times(update_times *times) { return times->write_ns; }

/* pipeline.c */
void *update_stream_memory(const struct slot *slot, uint32_t role); /* where the kernel works */
bool update_is_whole(const update_chunk *chunk); /* is the master whole? */
uint64_t update_data_bytes(const update_chunk *chunk, uint32_t role);   /* of the elements */
uint64_t update_stream_bytes(const update_chunk *chunk, uint32_t role); /* rounded up, as transfers are */
uint64_t update_slot_offset(const update_chunk *chunk, uint32_t role);  /* of a role; UPDATE_NUM_ROLES: what all need */
void update_unref(update_pipeline *pipeline); /* the lock is held at the call, gone at the return */

/* sums.c */
bool update_init_sums(update_job *job);  /* false: no memory */
void update_add_sums(struct slot *slot); /* without the lock */

/* worker.c */
uint64_t update_now_ns(void);
void *update_worker(void *pipeline);

#endif
