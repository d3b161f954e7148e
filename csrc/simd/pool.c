/* One call on several threads: workers that sleep between calls and take tiles from a shared counter.
 *
 *   caller: publish task --> wake --> take tiles until none is left --> wait for the last worker
 *   worker: sleep --> take tiles until none is left --> report --> sleep
 *
 * Tiles are multiples of PIECE elements and kernels are element-wise, so the bits do not depend on who took which.
 * One caller at a time.  After a fork the child has no workers: its calls fail with -EPERM, its close only frees.
 */
#include "kernels.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <unistd.h>

#define PIECE 4096u
#define LARGEST_TILE (16 * PIECE) /* balances threads that are not equally fast */
#define MOST_THREADS 1024u

struct task {
    int (*run)(const struct task *task, size_t first, size_t n);
    size_t n, tile;
    simd_streams streams;
    const simd_row *row;
    const void *src;
    void *dst;
    int src_format, dst_format;
};

struct simd_pool {
    pthread_mutex_t lock; /* guards everything up to `task`, which the workers only read while `running` > 0 */
    pthread_cond_t wake, idle;
    uint64_t generation; /* of the task; a worker runs each once */
    uint32_t running;
    int closing;
    struct task task;
    atomic_size_t next; /* first element that nobody took */
    atomic_int status;
    atomic_flag busy;
    pid_t owner;
    uint32_t num_workers;
    pthread_t workers[];
};

static void take_tiles(struct simd_pool *pool) {
    const struct task *task = &pool->task;
    for (;;) {
        const size_t first = atomic_fetch_add_explicit(&pool->next, task->tile, memory_order_relaxed);
        if (first >= task->n)
            return;
        const size_t left = task->n - first;
        const int status = task->run(task, first, left < task->tile ? left : task->tile);
        if (status)
            atomic_fetch_or_explicit(&pool->status, status, memory_order_relaxed);
    }
}

static void *worker(void *arg) {
    struct simd_pool *pool = arg;
    uint64_t seen = 0;
    pthread_mutex_lock(&pool->lock);
    for (;;) {
        while (!pool->closing && pool->generation == seen)
            pthread_cond_wait(&pool->wake, &pool->lock);
        if (pool->closing)
            break;
        seen = pool->generation;
        pthread_mutex_unlock(&pool->lock);
        take_tiles(pool);
        pthread_mutex_lock(&pool->lock);
        if (--pool->running == 0)
            pthread_cond_signal(&pool->idle);
    }
    pthread_mutex_unlock(&pool->lock);
    return NULL;
}

/* Signals stay with the program's own threads. */
static int start_workers(struct simd_pool *pool, uint32_t count) {
    sigset_t all, before;
    int error = 0;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (!error && pool->num_workers < count) {
        error = pthread_create(&pool->workers[pool->num_workers], NULL, worker, pool);
        pool->num_workers += !error;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return error;
}

int simd_pool_open(uint32_t num_threads, simd_pool **out) {
    *out = NULL;
    if (num_threads < 1 || num_threads > MOST_THREADS)
        return -EINVAL;
    struct simd_pool *pool = calloc(1, sizeof *pool + (num_threads - 1) * sizeof(pthread_t));
    if (!pool)
        return -ENOMEM;
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->wake, NULL);
    pthread_cond_init(&pool->idle, NULL);
    atomic_flag_clear(&pool->busy);
    pool->owner = getpid();
    const int error = start_workers(pool, num_threads - 1);
    if (error) {
        simd_pool_close(pool);
        return -error;
    }
    *out = pool;
    return 0;
}

void simd_pool_close(simd_pool *pool) {
    if (!pool)
        return;
    if (pool->owner == getpid()) {
        pthread_mutex_lock(&pool->lock);
        pool->closing = 1;
        pthread_cond_broadcast(&pool->wake);
        pthread_mutex_unlock(&pool->lock);
        for (uint32_t i = 0; i < pool->num_workers; i++)
            pthread_join(pool->workers[i], NULL);
        pthread_cond_destroy(&pool->wake);
        pthread_cond_destroy(&pool->idle);
        pthread_mutex_destroy(&pool->lock);
    }
    free(pool);
}

static size_t tile_elems(size_t n, uint32_t num_threads) {
    const size_t share = (n / num_threads + PIECE) / PIECE * PIECE;
    return share < LARGEST_TILE ? share : LARGEST_TILE;
}

static int pool_run(struct simd_pool *pool, struct task task) {
    if (pool->owner != getpid())
        return -EPERM;
    if (pool->num_workers == 0 || task.n <= PIECE)
        return task.run(&task, 0, task.n);
    if (atomic_flag_test_and_set(&pool->busy))
        return -EBUSY;
    task.tile = tile_elems(task.n, pool->num_workers + 1);
    pthread_mutex_lock(&pool->lock);
    pool->task = task;
    atomic_store_explicit(&pool->next, 0, memory_order_relaxed); /* the lock publishes it */
    atomic_store_explicit(&pool->status, 0, memory_order_relaxed);
    pool->running = pool->num_workers;
    pool->generation++;
    pthread_cond_broadcast(&pool->wake);
    pthread_mutex_unlock(&pool->lock);
    take_tiles(pool);
    pthread_mutex_lock(&pool->lock);
    while (pool->running)
        pthread_cond_wait(&pool->idle, &pool->lock);
    pthread_mutex_unlock(&pool->lock);
    const int status = atomic_load_explicit(&pool->status, memory_order_relaxed);
    atomic_flag_clear(&pool->busy);
    return status;
}

static int run_update(const struct task *task, size_t first, size_t n) {
    return simd_current()->update(simd_streams_from(task->streams, first), n, task->row);
}

int simd_pool_run_update(simd_pool *pool, const simd_streams *at, size_t n, const simd_row *row) {
    if (n == 0)
        return SIMD_OK;
    return pool_run(pool, (struct task){.run = run_update, .n = n, .streams = *at, .row = row});
}

static int run_convert(const struct task *task, size_t first, size_t n) {
    return simd_convert((const char *)task->src + first * simd_format_bytes(task->src_format), task->src_format,
                        (char *)task->dst + first * simd_format_bytes(task->dst_format), task->dst_format, n);
}

int simd_pool_convert(simd_pool *pool, const void *src, int src_format, void *dst, int dst_format, size_t n) {
    if (!simd_format_valid(src_format) || !simd_format_valid(dst_format))
        return -EINVAL;
    return pool_run(pool, (struct task){.run = run_convert,
                                        .n = n,
                                        .src = src,
                                        .src_format = src_format,
                                        .dst = dst,
                                        .dst_format = dst_format});
}

static int run_join(const struct task *task, size_t first, size_t n) {
    return simd_join(task->streams.hi + first, task->streams.lo + first, (float *)task->dst + first, n);
}

/* The halves are only read: `streams` is where a task keeps them. */
int simd_pool_join(simd_pool *pool, const uint16_t *hi, const int16_t *lo, float *dst, size_t n) {
    return pool_run(pool, (struct task){.run = run_join,
                                        .n = n,
                                        .streams = {.hi = (uint16_t *)(uintptr_t)hi, .lo = (int16_t *)(uintptr_t)lo},
                                        .dst = dst});
}
