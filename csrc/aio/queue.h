/* Inside of the queue: who holds a transfer, and what the lock guards.
 *
 *   aio_submit --> waiting[lane] (heap) --cut--> blocks in flight --settle--> ended (list) --deliver--> ticket
 *
 * A lane is a drive x direction, with a share of its own.  A transfer is in its heap while bytes are left to hand out, and has `in_flight` blocks out at the same time.  It ends when
 * it is in no heap and has no block out; then it goes to `ended` once, and the queue thread delivers it.
 */
#ifndef OFFLOAD_AIO_QUEUE_H
#define OFFLOAD_AIO_QUEUE_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "backend.h"

#define AIO_NOT_WAITING UINT32_MAX
#define AIO_MAX_LANES (2 * AIO_MAX_DRIVES)

enum aio_ticket_state { AIO_PENDING = 0, AIO_WAITED_FOR = 1, AIO_ENDED = 2 };

struct aio_ticket {
    aio_queue *queue;
    aio_request request;
    uint64_t sequence; /* of submission: breaks ties of the deadline */
    uint64_t next;     /* bytes handed out in blocks */
    uint32_t in_flight;
    uint32_t position; /* in its heap */
    aio_result result;
    struct aio_ticket *link;      /* of the free or the ended list */
    _Atomic uint32_t state;       /* enum aio_ticket_state; a futex */
    _Atomic uint32_t references;  /* the user's and the queue's */
};

typedef struct aio_heap {
    aio_ticket **items;
    uint32_t count, room;
} aio_heap;

typedef struct aio_slab aio_slab;

/* What only the queue thread may ask of the backend: register a buffer, or (`base` is NULL) forget two descriptors. */
typedef struct aio_chore {
    void *base;
    size_t bytes;
    int fds[2];
    int result;
    bool done;
} aio_chore;

struct aio_queue {
    aio_config config;
    const aio_backend *backend;
    void *state; /* the backend's */
    pthread_t thread;
    uint32_t num_blocks;       /* (read_depth + write_depth) * num_drives */
    aio_block *blocks;
    aio_completion *completed; /* as many; the queue thread's */

    pthread_mutex_t lock; /* guards all that follows; never held in a callback, a wait or a transfer */
    pthread_cond_t changed;
    aio_heap waiting[AIO_MAX_LANES];
    uint32_t in_flight[AIO_MAX_LANES];
    aio_block *free_blocks;
    aio_block *again; /* in flight, to be staged once more: the rest of a short transfer, EINTR, EAGAIN */
    aio_ticket *ended_first, *ended_last;
    aio_ticket *free_tickets;
    aio_slab *slabs;
    uint64_t sequence;
    uint64_t live_tickets; /* not on the free list */
    bool opened, asleep, closing, closed, nap;
    int broken; /* errno: the backend is lost, everything fails with it */
    aio_chore *chore; /* for the queue thread to do; on the stack of the thread that waits for it */
    aio_queue *next_live; /* live.c's */
    aio_stats stats;
    uint64_t stats_ns; /* when the depth last changed */
};

static inline uint32_t aio_num_lanes(const aio_queue *queue) { return 2 * queue->config.num_drives; }
static inline uint32_t aio_lane_of(const aio_queue *queue, const aio_request *request)
{
    return 2 * (request->file->drive % queue->config.num_drives) + (uint32_t)request->op;
}
static inline bool aio_has_share(const aio_queue *queue, uint32_t lane)
{
    return queue->in_flight[lane] < (lane % 2 == AIO_READ ? queue->config.read_depth : queue->config.write_depth);
}

/* queue.c: have the queue thread do it; -ESHUTDOWN while closing */
int aio_queue_do(aio_queue *queue, aio_chore *chore);

/* live.c */
void aio_queue_enlist(aio_queue *queue);
void aio_queue_delist(aio_queue *queue);
void aio_queues_forget_files(const int fds[2]); /* returns when no queue's table holds them */

/* heap.c */
int aio_heap_reserve(aio_heap *heap, uint32_t more);
void aio_heap_push(aio_heap *heap, aio_ticket *ticket);
void aio_heap_remove(aio_heap *heap, aio_ticket *ticket);

/* cut.c */
void aio_cut(const aio_ticket *ticket, uint32_t block_bytes, aio_block *block);
bool aio_advance(const aio_ticket *ticket, aio_block *block, uint32_t bytes);

/* ticket.c, all with the lock held */
int aio_tickets_reserve(aio_queue *queue, uint32_t count);
aio_ticket *aio_ticket_take(aio_queue *queue);
void aio_ticket_end(aio_queue *queue, aio_ticket *ticket);
void aio_ticket_stop(aio_queue *queue, aio_ticket *ticket, int error, uint64_t offset);
void aio_queue_wake(aio_queue *queue);
/* ticket.c, without the lock */
void aio_tickets_deliver(aio_ticket *first);
void aio_queue_free(aio_queue *queue);

/* turn.c: what the queue thread does with the lock held */
aio_block *aio_take_blocks(aio_queue *queue);
void aio_settle(aio_queue *queue, aio_block *block, int64_t result);
void aio_stop_waiting(aio_queue *queue, int error);
void aio_break(aio_queue *queue, int error);

/* stats.c */
void aio_stats_depth(aio_queue *queue);
void aio_stats_block(aio_queue *queue, const aio_block *block);

#endif
