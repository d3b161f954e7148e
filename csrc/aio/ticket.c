/* The user's side of the queue: submit, wait, cancel, release.  Tickets come from slabs that live as long as the queue,
 * and the queue's memory lives until it is closed and its last ticket is released. */
#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "queue.h"

#define SLAB_TICKETS 128u

struct aio_slab {
    aio_slab *next;
    aio_ticket tickets[SLAB_TICKETS];
};

static int grow(aio_queue *queue)
{
    aio_slab *slab = calloc(1, sizeof *slab);
    if (!slab)
        return -ENOMEM;
    slab->next = queue->slabs;
    queue->slabs = slab;
    for (uint32_t i = 0; i < SLAB_TICKETS; i++) {
        slab->tickets[i].queue = queue;
        slab->tickets[i].link = queue->free_tickets;
        queue->free_tickets = &slab->tickets[i];
    }
    return 0;
}

/* `count` calls of aio_ticket_take() cannot fail after this. */
int aio_tickets_reserve(aio_queue *queue, uint32_t count)
{
    uint32_t found = 0;
    for (aio_ticket *ticket = queue->free_tickets; ticket && found < count; ticket = ticket->link)
        found++;
    for (; found < count; found += SLAB_TICKETS) {
        int error = grow(queue);
        if (error)
            return error;
    }
    return 0;
}

aio_ticket *aio_ticket_take(aio_queue *queue)
{
    aio_ticket *ticket = queue->free_tickets;
    queue->free_tickets = ticket->link;
    queue->live_tickets++;
    ticket->link = NULL;
    ticket->next = 0;
    ticket->in_flight = 0;
    ticket->position = AIO_NOT_WAITING;
    ticket->result = (aio_result){0};
    atomic_store_explicit(&ticket->state, AIO_PENDING, memory_order_relaxed);
    return ticket;
}

/* To the list of the ended, for the queue thread to deliver. */
void aio_ticket_end(aio_queue *queue, aio_ticket *ticket)
{
    ticket->link = NULL;
    if (queue->ended_last)
        queue->ended_last->link = ticket;
    else
        queue->ended_first = ticket;
    queue->ended_last = ticket;
}

/* Hand out no more blocks; the first error stays.  The transfer ends when its last block in flight does. */
void aio_ticket_stop(aio_queue *queue, aio_ticket *ticket, int error, uint64_t offset)
{
    if (!ticket->result.error) {
        ticket->result.error = error;
        ticket->result.offset = offset;
    }
    if (ticket->position == AIO_NOT_WAITING)
        return;
    aio_heap_remove(&queue->waiting[aio_lane_of(queue, &ticket->request)], ticket);
    if (!ticket->in_flight)
        aio_ticket_end(queue, ticket);
}

/* Under the lock, so that the backend cannot be closed meanwhile. */
void aio_queue_wake(aio_queue *queue)
{
    if (!queue->asleep)
        return;
    queue->asleep = false; /* one wake-up a sleep */
    if (queue->broken)
        pthread_cond_broadcast(&queue->changed);
    else
        queue->backend->wake(queue->state);
}

static bool valid(const aio_request *request)
{
    return (request->op == AIO_READ || request->op == AIO_WRITE) && request->file && (request->buf || !request->bytes) &&
           request->offset <= INT64_MAX && request->bytes <= INT64_MAX - request->offset;
}

static aio_ticket *enqueue(aio_queue *queue, const aio_request *request, uint32_t references)
{
    aio_ticket *ticket = aio_ticket_take(queue);
    ticket->request = *request;
    ticket->sequence = queue->sequence++;
    atomic_store_explicit(&ticket->references, references, memory_order_relaxed);
    if (request->bytes)
        aio_heap_push(&queue->waiting[aio_lane_of(queue, request)], ticket);
    else
        aio_ticket_end(queue, ticket);
    return ticket;
}

static int reserve(aio_queue *queue, const aio_request *requests, uint32_t count)
{
    uint32_t more[AIO_MAX_LANES] = {0};
    for (uint32_t i = 0; i < count; i++)
        more[aio_lane_of(queue, &requests[i])]++;
    for (uint32_t lane = 0; lane < aio_num_lanes(queue); lane++) {
        int error = more[lane] ? aio_heap_reserve(&queue->waiting[lane], more[lane]) : 0;
        if (error)
            return error;
    }
    return aio_tickets_reserve(queue, count);
}

int aio_submit(aio_queue *queue, const aio_request *requests, uint32_t count, aio_ticket **tickets)
{
    for (uint32_t i = 0; i < count; i++)
        if (!valid(&requests[i]))
            return -EINVAL;
    pthread_mutex_lock(&queue->lock);
    int error = queue->closing ? -ESHUTDOWN : reserve(queue, requests, count);
    bool startable = queue->ended_first || queue->broken;
    for (uint32_t i = 0; i < count && !error; i++) {
        aio_ticket *ticket = enqueue(queue, &requests[i], tickets ? 2 : 1);
        startable |= !requests[i].bytes || aio_has_share(queue, aio_lane_of(queue, &requests[i]));
        if (tickets)
            tickets[i] = ticket;
    }
    if (!error && startable) /* with a full share, the next completion turns the queue anyway */
        aio_queue_wake(queue);
    pthread_mutex_unlock(&queue->lock);
    return error;
}

/* ---- waiting ---- */

/* `deadline`: absolute, monotonic; NULL: for ever. */
static void futex_wait(_Atomic uint32_t *word, uint32_t expected, const struct timespec *deadline)
{
    syscall(SYS_futex, (long)word, (long)(FUTEX_WAIT_BITSET | FUTEX_PRIVATE_FLAG), (long)expected, (long)deadline, 0L,
            (long)FUTEX_BITSET_MATCH_ANY);
}

static bool ended(aio_ticket *ticket)
{
    return atomic_load_explicit(&ticket->state, memory_order_acquire) == AIO_ENDED;
}

int aio_wait(aio_ticket *ticket, int64_t timeout_ns, aio_result *result)
{
    uint64_t until = timeout_ns > 0 ? aio_now_ns() + (uint64_t)timeout_ns : 0;
    struct timespec deadline = {(time_t)(until / 1000000000u), (long)(until % 1000000000u)};
    while (!ended(ticket)) {
        if (timeout_ns == 0 || (timeout_ns > 0 && aio_now_ns() >= until))
            return -ETIME;
        uint32_t pending = AIO_PENDING; /* tell the queue thread that a wake-up is wanted */
        if (atomic_compare_exchange_strong(&ticket->state, &pending, AIO_WAITED_FOR) || pending == AIO_WAITED_FOR)
            futex_wait(&ticket->state, AIO_WAITED_FOR, timeout_ns > 0 ? &deadline : NULL);
    }
    *result = ticket->result;
    return 0;
}

/* On the queue thread.  The callback comes first: who waited for the ticket knows that it has run. */
void aio_tickets_deliver(aio_ticket *first)
{
    while (first) {
        aio_ticket *ticket = first;
        first = ticket->link;
        if (ticket->request.done)
            ticket->request.done(ticket->request.arg, ticket->result.error, ticket->result.bytes_done);
        if (atomic_exchange_explicit(&ticket->state, AIO_ENDED, memory_order_acq_rel) == AIO_WAITED_FOR)
            syscall(SYS_futex, (long)&ticket->state, (long)(FUTEX_WAKE | FUTEX_PRIVATE_FLAG), (long)INT_MAX, 0L, 0L, 0L);
        aio_release(ticket);
    }
}

int aio_cancel(aio_ticket *ticket)
{
    aio_queue *queue = ticket->queue;
    int error = 0;
    pthread_mutex_lock(&queue->lock);
    if (ticket->position == AIO_NOT_WAITING) {
        error = -EALREADY;
    } else {
        aio_ticket_stop(queue, ticket, ECANCELED, ticket->request.offset + ticket->next);
        aio_queue_wake(queue);
    }
    pthread_mutex_unlock(&queue->lock);
    return error;
}

/* ---- lifetime ---- */

void aio_queue_free(aio_queue *queue)
{
    while (queue->slabs) {
        aio_slab *slab = queue->slabs;
        queue->slabs = slab->next;
        free(slab);
    }
    for (uint32_t lane = 0; lane < AIO_MAX_LANES; lane++)
        free(queue->waiting[lane].items);
    free(queue->blocks);
    free(queue->completed);
    pthread_cond_destroy(&queue->changed);
    pthread_mutex_destroy(&queue->lock);
    free(queue);
}

void aio_release(aio_ticket *ticket)
{
    if (!ticket || atomic_fetch_sub_explicit(&ticket->references, 1, memory_order_acq_rel) != 1)
        return;
    aio_queue *queue = ticket->queue;
    pthread_mutex_lock(&queue->lock);
    ticket->link = queue->free_tickets;
    queue->free_tickets = ticket;
    bool last = --queue->live_tickets == 0 && queue->closed;
    pthread_mutex_unlock(&queue->lock);
    if (last)
        aio_queue_free(queue);
}
