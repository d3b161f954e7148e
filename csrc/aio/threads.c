/* pread and pwrite on a few threads: works everywhere. */
#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <unistd.h>

#include "backend.h"

#define MAX_THREADS 16u

typedef struct pool {
    pthread_mutex_t lock; /* guards all that follows */
    pthread_cond_t work, news;
    aio_block *first, *last; /* to be done, in order */
    aio_completion *done;
    uint32_t num_done, num_threads, num_idle;
    bool woken, closing;
    pthread_t threads[MAX_THREADS];
} pool;

static int64_t transfer(const aio_block *block)
{
    ssize_t bytes = block->op == AIO_READ ? pread(block->fd, block->buf, block->bytes, (off_t)block->offset)
                                          : pwrite(block->fd, block->buf, block->bytes, (off_t)block->offset);
    return bytes < 0 ? -errno : bytes;
}

static aio_block *next_block(pool *p)
{
    p->num_idle++;
    while (!p->first && !p->closing)
        pthread_cond_wait(&p->work, &p->lock);
    p->num_idle--;
    aio_block *block = p->first;
    if (block)
        p->first = block->next;
    return block;
}

static void *work(void *arg)
{
    pool *p = arg;
    aio_block *block;
    pthread_mutex_lock(&p->lock);
    while ((block = next_block(p))) {
        pthread_mutex_unlock(&p->lock);
        int64_t result = transfer(block);
        pthread_mutex_lock(&p->lock);
        p->done[p->num_done++] = (aio_completion){block, result};
        pthread_cond_signal(&p->news);
    }
    pthread_mutex_unlock(&p->lock);
    return NULL;
}

static void threads_close(void *state)
{
    pool *p = state;
    pthread_mutex_lock(&p->lock);
    p->closing = true;
    pthread_cond_broadcast(&p->work);
    pthread_mutex_unlock(&p->lock);
    for (uint32_t i = 0; i < p->num_threads; i++)
        pthread_join(p->threads[i], NULL);
    pthread_cond_destroy(&p->work);
    pthread_cond_destroy(&p->news);
    pthread_mutex_destroy(&p->lock);
    free(p->done);
    free(p);
}

/* Started by the queue thread, which has all signals blocked; so have they. */
static int threads_open(uint32_t max_blocks, uint32_t num_threads, void **state)
{
    pool *p = calloc(1, sizeof *p);
    if (!p || !(p->done = calloc(max_blocks, sizeof *p->done))) {
        free(p);
        return -ENOMEM;
    }
    pthread_mutex_init(&p->lock, NULL);
    pthread_cond_init(&p->work, NULL);
    pthread_cond_init(&p->news, NULL);
    if (!num_threads || num_threads > max_blocks)
        num_threads = max_blocks;
    for (int error = 0; p->num_threads < num_threads && p->num_threads < MAX_THREADS; p->num_threads++) {
        error = pthread_create(&p->threads[p->num_threads], NULL, work, p);
        if (error && p->num_threads)
            break; /* fewer are enough */
        if (error) {
            threads_close(p);
            return -error;
        }
    }
    *state = p;
    return 0;
}

static void threads_stage(void *state, aio_block *block)
{
    pool *p = state;
    block->next = NULL;
    pthread_mutex_lock(&p->lock);
    if (p->first)
        p->last->next = block;
    else
        p->first = block;
    p->last = block;
    if (p->num_idle)
        pthread_cond_signal(&p->work);
    pthread_mutex_unlock(&p->lock);
}

static int threads_wait(void *state, aio_completion *done)
{
    pool *p = state;
    pthread_mutex_lock(&p->lock);
    while (!p->num_done && !p->woken)
        pthread_cond_wait(&p->news, &p->lock);
    uint32_t count = p->num_done;
    for (uint32_t i = 0; i < count; i++)
        done[i] = p->done[i];
    p->num_done = 0;
    p->woken = false;
    pthread_mutex_unlock(&p->lock);
    return (int)count;
}

static void threads_wake(void *state)
{
    pool *p = state;
    pthread_mutex_lock(&p->lock);
    p->woken = true;
    pthread_cond_signal(&p->news);
    pthread_mutex_unlock(&p->lock);
}

const aio_backend aio_threads = {
    .id = AIO_THREADS,
    .open = threads_open,
    .stage = threads_stage,
    .wait = threads_wait,
    .wake = threads_wake,
    .close = threads_close,
};
