/* The queue and its thread.  The thread opens the backend itself: io_uring asks that one task does all. */
#include <errno.h>
#include <signal.h>
#include <stdlib.h>

#include "queue.h"

#define MAX_DEPTH 4096u
#define MAX_BLOCK (1u << 30)

static const aio_backend *const BACKENDS[] = {&aio_uring, &aio_libaio, &aio_threads, &aio_faults};
#define NUM_BACKENDS (sizeof BACKENDS / sizeof *BACKENDS)

static int open_backend(aio_queue *queue)
{
    int error = -EINVAL;
    for (size_t i = 0; i < NUM_BACKENDS; i++) {
        bool wanted = queue->config.backend == BACKENDS[i]->id;
        if (!wanted && (queue->config.backend != AIO_AUTO || BACKENDS[i]->id == AIO_FAULTS))
            continue;
        queue->backend = BACKENDS[i];
        error = BACKENDS[i]->open(queue->num_blocks, queue->config.num_threads, &queue->state);
        if (!error)
            break;
    }
    return error;
}

static bool idle(const aio_queue *queue)
{
    for (uint32_t lane = 0; lane < aio_num_lanes(queue); lane++)
        if (queue->in_flight[lane])
            return false;
    return true;
}

static bool waiting(const aio_queue *queue)
{
    for (uint32_t lane = 0; lane < aio_num_lanes(queue); lane++)
        if (queue->waiting[lane].count)
            return true;
    return false;
}

/* Do what aio_queue_do() waits for, with the lock held. */
static void do_chore(aio_queue *queue)
{
    aio_chore *wanted = queue->chore;
    if (!wanted)
        return;
    if (queue->broken)
        wanted->result = -queue->broken;
    else if (!wanted->base)
        queue->backend->forget_files(queue->state, wanted->fds);
    else if (!idle(queue))
        wanted->result = -EBUSY;
    else if (queue->backend->register_buffer)
        wanted->result = queue->backend->register_buffer(queue->state, wanted->base, wanted->bytes);
    wanted->done = true;
    queue->chore = NULL;
    pthread_cond_broadcast(&queue->changed);
}

/* Stage, start and wait, without the lock; then settle what ended. */
static void do_io(aio_queue *queue, aio_block *staged, bool nap)
{
    if (nap)
        aio_nap();
    while (staged) {
        aio_block *block = staged;
        staged = block->next; /* from here on the link is the backend's */
        queue->backend->stage(queue->state, block);
    }
    int count = queue->backend->wait(queue->state, queue->completed);
    pthread_mutex_lock(&queue->lock);
    queue->asleep = false;
    for (int i = 0; i < count; i++)
        aio_settle(queue, queue->completed[i].block, queue->completed[i].result);
    if (count < 0)
        aio_break(queue, -count);
}

/* With the lock held, which it gives up while it sleeps or works. */
static void turn(aio_queue *queue)
{
    do_chore(queue);
    if (queue->closing || queue->broken)
        aio_stop_waiting(queue, queue->broken ? queue->broken : ECANCELED);
    if (queue->ended_first) {
        aio_ticket *first = queue->ended_first;
        queue->ended_first = queue->ended_last = NULL;
        pthread_mutex_unlock(&queue->lock);
        aio_tickets_deliver(first);
        pthread_mutex_lock(&queue->lock);
        return; /* callbacks may have submitted */
    }
    queue->asleep = true;
    if (queue->broken) {
        while (queue->asleep)
            pthread_cond_wait(&queue->changed, &queue->lock);
        return;
    }
    aio_block *staged = aio_take_blocks(queue);
    bool nap = queue->nap;
    queue->nap = false;
    pthread_mutex_unlock(&queue->lock);
    do_io(queue, staged, nap);
}

static bool over(const aio_queue *queue)
{
    return queue->closing && !queue->ended_first && !queue->chore && idle(queue) && !waiting(queue);
}

static void *run(void *arg)
{
    aio_queue *queue = arg;
    int error = open_backend(queue);
    pthread_mutex_lock(&queue->lock);
    queue->broken = -error;
    queue->opened = true;
    pthread_cond_broadcast(&queue->changed);
    if (!error) {
        while (!over(queue))
            turn(queue);
        queue->asleep = false;
        queue->backend->close(queue->state);
    }
    pthread_mutex_unlock(&queue->lock);
    return NULL;
}

/* Signals are for the program's own threads. */
static int start_thread(aio_queue *queue)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(&queue->thread, NULL, run, queue);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error)
        return -error;
    pthread_mutex_lock(&queue->lock);
    while (!queue->opened)
        pthread_cond_wait(&queue->changed, &queue->lock);
    error = queue->broken;
    pthread_mutex_unlock(&queue->lock);
    if (error)
        pthread_join(queue->thread, NULL);
    return -error;
}

static aio_queue *allocate(const aio_config *config)
{
    aio_queue *queue = calloc(1, sizeof *queue);
    if (!queue)
        return NULL;
    queue->config = *config;
    queue->num_blocks = (config->read_depth + config->write_depth) * config->num_drives;
    pthread_mutex_init(&queue->lock, NULL);
    pthread_cond_init(&queue->changed, NULL);
    queue->blocks = calloc(queue->num_blocks, sizeof *queue->blocks);
    queue->completed = calloc(queue->num_blocks, sizeof *queue->completed);
    if (!queue->blocks || !queue->completed || aio_tickets_reserve(queue, 1)) {
        aio_queue_free(queue);
        return NULL;
    }
    for (uint32_t i = queue->num_blocks; i-- > 0;) {
        queue->blocks[i].index = i;
        queue->blocks[i].next = queue->free_blocks;
        queue->free_blocks = &queue->blocks[i];
    }
    queue->stats_ns = aio_now_ns();
    return queue;
}

static bool sane(const aio_config *config)
{
    return config->block_bytes && config->block_bytes % 4096 == 0 && config->block_bytes <= MAX_BLOCK &&
           config->read_depth && config->write_depth && config->num_drives && config->num_drives <= AIO_MAX_DRIVES &&
           config->read_depth <= MAX_DEPTH && config->write_depth <= MAX_DEPTH &&
           (config->read_depth + config->write_depth) * config->num_drives <= 2 * MAX_DEPTH;
}

int aio_queue_open(const aio_config *config, aio_queue **out)
{
    *out = NULL;
    if (!sane(config))
        return -EINVAL;
    aio_queue *queue = allocate(config);
    if (!queue)
        return -ENOMEM;
    int error = start_thread(queue);
    if (error) {
        aio_queue_free(queue);
        return error;
    }
    aio_queue_enlist(queue);
    *out = queue;
    return 0;
}

void aio_queue_close(aio_queue *queue)
{
    aio_queue_delist(queue);
    pthread_mutex_lock(&queue->lock);
    queue->closing = true;
    aio_queue_wake(queue);
    pthread_mutex_unlock(&queue->lock);
    pthread_join(queue->thread, NULL);
    pthread_mutex_lock(&queue->lock);
    queue->closed = true;
    bool last = queue->live_tickets == 0;
    pthread_mutex_unlock(&queue->lock);
    if (last)
        aio_queue_free(queue);
}

int aio_queue_do(aio_queue *queue, aio_chore *chore)
{
    pthread_mutex_lock(&queue->lock);
    while (queue->chore) /* another thread's */
        pthread_cond_wait(&queue->changed, &queue->lock);
    if (queue->closing) {
        chore->result = -ESHUTDOWN;
    } else {
        queue->chore = chore;
        aio_queue_wake(queue);
        while (!chore->done)
            pthread_cond_wait(&queue->changed, &queue->lock);
    }
    pthread_mutex_unlock(&queue->lock);
    return chore->result;
}

int aio_queue_backend(const aio_queue *queue)
{
    return queue->backend->id;
}

void aio_queue_forget(aio_queue *queue)
{
    if (queue->backend->forget)
        queue->backend->forget(queue->state);
}

int aio_register(aio_queue *queue, void *base, size_t bytes)
{
    if (!base || !bytes)
        return -EINVAL;
    aio_chore wanted = {.base = base, .bytes = bytes};
    return aio_queue_do(queue, &wanted);
}

int aio_queue_registers_files(aio_queue *queue)
{
    return queue->backend->files ? queue->backend->files(queue->state) : -EOPNOTSUPP;
}
