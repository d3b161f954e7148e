/* One turn of the queue thread: hand out blocks while there is a share left, settle those that ended.  The lock is held. */
#include <errno.h>

#include "queue.h"

#define MAX_RETRIES 128u   /* of EAGAIN and EINTR in a row, then the error is told */
#define QUICK_RETRIES 8u   /* of these without a pause */

static void count_use(const aio_file *file, uint32_t change)
{
    /* The one field of a file that is the queue's.  Sequentially consistent with the descriptors: a block either sees
     * them closed or is seen by aio_file_close(). */
    __atomic_fetch_add((uint32_t *)&file->in_flight, change, __ATOMIC_SEQ_CST);
}

static aio_block *take_block(aio_queue *queue, uint32_t lane)
{
    aio_ticket *ticket = queue->waiting[lane].items[0];
    aio_block *block = queue->free_blocks;
    queue->free_blocks = block->next;
    block->ticket = ticket;
    block->retries = 0;
    block->started_ns = queue->config.keep_stats ? queue->stats_ns : 0;
    count_use(ticket->request.file, 1);
    aio_cut(ticket, queue->config.block_bytes, block);
    ticket->next += block->bytes;
    ticket->in_flight++;
    queue->in_flight[lane]++;
    if (ticket->next == ticket->request.bytes)
        aio_heap_remove(&queue->waiting[lane], ticket);
    return block;
}

/* The blocks to stage now: those to be tried again, then the most urgent of each lane up to its share. */
aio_block *aio_take_blocks(aio_queue *queue)
{
    aio_block *first = NULL, **end = &first;
    aio_stats_depth(queue);
    for (uint32_t lane = 0; lane < aio_num_lanes(queue); lane++) {
        while (queue->waiting[lane].count && aio_has_share(queue, lane)) {
            aio_block *block = take_block(queue, lane);
            *end = block;
            end = &block->next;
        }
    }
    *end = NULL;
    if (queue->again) {
        aio_block *last = queue->again;
        while (last->next)
            last = last->next;
        last->next = first;
        first = queue->again;
        queue->again = NULL;
    }
    return first;
}

static void finish(aio_queue *queue, aio_block *block)
{
    aio_ticket *ticket = block->ticket;
    count_use(ticket->request.file, UINT32_MAX); /* minus one */
    aio_stats_block(queue, block);
    aio_stats_depth(queue);
    queue->in_flight[aio_lane_of(queue, &ticket->request)]--;
    block->ticket = NULL;
    block->next = queue->free_blocks;
    queue->free_blocks = block;
    if (--ticket->in_flight == 0 && ticket->position == AIO_NOT_WAITING)
        aio_ticket_end(queue, ticket);
}

#define AGAIN (-1)

/* 0: done; AGAIN: what is left must be tried again; else the error. */
static int judge(aio_block *block, int64_t result)
{
    if (result > 0) {
        block->retries = 0;
        block->ticket->result.bytes_done += (uint64_t)result;
        block->ticket->queue->stats.bytes[block->op] += (uint64_t)result;
        return aio_advance(block->ticket, block, (uint32_t)result) ? AGAIN : 0;
    }
    if (result == 0) /* a read meets the end of the file; a write that does nothing would go on for ever */
        return block->op == AIO_READ ? ENODATA : EIO;
    if ((result == -EAGAIN || result == -EINTR) && block->retries++ < MAX_RETRIES)
        return AGAIN;
    return (int)-result;
}

void aio_settle(aio_queue *queue, aio_block *block, int64_t result)
{
    aio_ticket *ticket = block->ticket;
    int error = judge(block, result);
    if (error == AGAIN && !ticket->result.error && !queue->broken) {
        queue->nap |= block->retries > QUICK_RETRIES;
        block->next = queue->again;
        queue->again = block;
        return;
    }
    if (error > 0)
        aio_ticket_stop(queue, ticket, error, block->offset);
    finish(queue, block);
}

/* Nothing more is handed out: every waiting transfer ends with `error`. */
void aio_stop_waiting(aio_queue *queue, int error)
{
    for (uint32_t lane = 0; lane < aio_num_lanes(queue); lane++)
        while (queue->waiting[lane].count) {
            aio_ticket *ticket = queue->waiting[lane].items[0];
            aio_ticket_stop(queue, ticket, error, ticket->request.offset + ticket->next);
        }
}

/* The backend is lost: everything in flight fails, and from now on everything that comes. */
void aio_break(aio_queue *queue, int error)
{
    queue->broken = error;
    queue->again = NULL;
    for (uint32_t i = 0; i < queue->num_blocks; i++)
        if (queue->blocks[i].ticket)
            aio_settle(queue, &queue->blocks[i], -error);
}
