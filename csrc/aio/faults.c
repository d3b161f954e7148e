/* The backend for tests: a slow, single-file drive that misbehaves on demand.  Everything that it does is determined by the
 * order of submissions, never by a clock. */
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "queue.h"

typedef struct drive {
    pthread_mutex_t lock; /* guards all that follows */
    pthread_cond_t changed;
    aio_block *first, *last; /* held, in the order of submission */
    uint64_t num_staged, num_logged, log_room;
    aio_fault_block *log;
    uint64_t *numbers, *delays; /* by block index */
    aio_fault *faults;
    uint32_t num_faults;
    uint64_t allowed;
    bool woken, skip_io;
} drive;

static const aio_fault *fault_of(const drive *d, uint64_t number)
{
    for (uint32_t i = 0; i < d->num_faults; i++)
        if (d->faults[i].nth == number)
            return &d->faults[i];
    return NULL;
}

static void append_log(drive *d, const aio_block *block)
{
    if (d->num_logged == d->log_room) {
        aio_fault_block *log = realloc(d->log, (d->log_room + 1024) * sizeof *log);
        if (!log)
            return;
        d->log = log;
        d->log_room += 1024;
    }
    d->log[d->num_logged++] = (aio_fault_block){block->op, block->offset, block->bytes};
}

static void faults_stage(void *state, aio_block *block)
{
    drive *d = state;
    pthread_mutex_lock(&d->lock);
    const aio_fault *fault = fault_of(d, d->num_staged);
    d->delays[block->index] = fault && fault->kind == AIO_FAULT_DELAY ? fault->value : 0;
    d->numbers[block->index] = d->num_staged++;
    append_log(d, block);
    block->next = NULL;
    if (d->first)
        d->last->next = block;
    else
        d->first = block;
    d->last = block;
    pthread_cond_broadcast(&d->changed);
    pthread_mutex_unlock(&d->lock);
}

/* The oldest block that is not delayed, else the oldest; those that it overtakes have one less to wait for. */
static aio_block *take_next(drive *d)
{
    aio_block **link = &d->first;
    while (*link && d->delays[(*link)->index])
        link = &(*link)->next;
    if (!*link)
        link = &d->first;
    aio_block *taken = *link, *before = NULL;
    for (aio_block *older = d->first; older != taken; older = older->next) {
        d->delays[older->index]--;
        before = older;
    }
    *link = taken->next;
    if (d->last == taken)
        d->last = before;
    return taken;
}

static int64_t transfer(const drive *d, const aio_block *block)
{
    const aio_fault *fault = fault_of(d, d->numbers[block->index]);
    size_t bytes = block->bytes;
    int fd = block->fd;
    if (fault && fault->kind == AIO_FAULT_ERROR)
        return -(int64_t)fault->value;
    if (fault && fault->kind == AIO_FAULT_SHORT && fault->value < bytes) {
        bytes = fault->value;
        fd = block->ticket->request.file->buffered_fd; /* O_DIRECT would refuse the size */
    }
    if (d->skip_io || !bytes)
        return (int64_t)bytes;
    int64_t result = block->op == AIO_READ ? pread(fd, block->buf, bytes, (off_t)block->offset)
                                           : pwrite(fd, block->buf, bytes, (off_t)block->offset);
    return result < 0 ? -errno : result;
}

static int faults_wait(void *state, aio_completion *done)
{
    drive *d = state;
    int count = 0;
    pthread_mutex_lock(&d->lock);
    while (!d->woken && !(d->first && d->allowed))
        pthread_cond_wait(&d->changed, &d->lock);
    if (d->first && d->allowed) {
        d->allowed -= d->allowed != UINT64_MAX;
        done[0].block = take_next(d);
        done[0].result = transfer(d, done[0].block);
        count = 1;
    }
    d->woken = false;
    pthread_mutex_unlock(&d->lock);
    return count;
}

static void faults_wake(void *state)
{
    drive *d = state;
    pthread_mutex_lock(&d->lock);
    d->woken = true;
    pthread_cond_broadcast(&d->changed);
    pthread_mutex_unlock(&d->lock);
}

static void faults_close(void *state)
{
    drive *d = state;
    pthread_mutex_destroy(&d->lock);
    pthread_cond_destroy(&d->changed);
    free(d->log);
    free(d->numbers);
    free(d->delays);
    free(d->faults);
    free(d);
}

static int faults_open(uint32_t max_blocks, uint32_t num_threads, void **state)
{
    (void)num_threads;
    drive *d = calloc(1, sizeof *d);
    if (!d)
        return -ENOMEM;
    pthread_mutex_init(&d->lock, NULL);
    pthread_cond_init(&d->changed, NULL);
    d->allowed = UINT64_MAX;
    d->numbers = calloc(max_blocks, sizeof *d->numbers);
    d->delays = calloc(max_blocks, sizeof *d->delays);
    if (!d->numbers || !d->delays) {
        faults_close(d);
        return -ENOMEM;
    }
    *state = d;
    return 0;
}

const aio_backend aio_faults = {
    .id = AIO_FAULTS,
    .open = faults_open,
    .stage = faults_stage,
    .wait = faults_wait,
    .wake = faults_wake,
    .close = faults_close,
};

/* ---- what tests call, from any thread ---- */

static drive *drive_of(aio_queue *queue)
{
    return queue->backend == &aio_faults ? queue->state : NULL;
}

int aio_faults_inject(aio_queue *queue, const aio_fault *faults, uint32_t count)
{
    drive *d = drive_of(queue);
    aio_fault *copy = calloc(count + 1, sizeof *copy);
    if (!d || !copy) {
        free(copy);
        return d ? -ENOMEM : -EINVAL;
    }
    memcpy(copy, faults, count * sizeof *copy);
    pthread_mutex_lock(&d->lock);
    free(d->faults);
    d->faults = copy;
    d->num_faults = count;
    pthread_mutex_unlock(&d->lock);
    return 0;
}

int aio_faults_allow(aio_queue *queue, uint64_t blocks)
{
    drive *d = drive_of(queue);
    if (!d)
        return -EINVAL;
    pthread_mutex_lock(&d->lock);
    d->allowed = blocks;
    pthread_cond_broadcast(&d->changed);
    pthread_mutex_unlock(&d->lock);
    return 0;
}

int aio_faults_skip_io(aio_queue *queue, int skip)
{
    drive *d = drive_of(queue);
    if (!d)
        return -EINVAL;
    pthread_mutex_lock(&d->lock);
    d->skip_io = skip != 0;
    pthread_mutex_unlock(&d->lock);
    return 0;
}

int aio_faults_wait(aio_queue *queue, uint64_t blocks)
{
    drive *d = drive_of(queue);
    if (!d)
        return -EINVAL;
    pthread_mutex_lock(&d->lock);
    while (d->num_staged < blocks)
        pthread_cond_wait(&d->changed, &d->lock);
    pthread_mutex_unlock(&d->lock);
    return 0;
}

int64_t aio_faults_log(aio_queue *queue, aio_fault_block *out, uint32_t room)
{
    drive *d = drive_of(queue);
    if (!d)
        return -EINVAL;
    pthread_mutex_lock(&d->lock);
    int64_t count = (int64_t)d->num_logged;
    const size_t copied = d->num_logged < room ? d->num_logged : room;
    if (copied) /* else one of the pointers may be NULL, which memcpy() forbids even then */
        memcpy(out, d->log, copied * sizeof *out);
    pthread_mutex_unlock(&d->lock);
    return count;
}
