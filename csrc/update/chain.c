/* The chain of one chunk: admit -> reads -> ready ... kernel -> writes -> slot free.
 *
 * These functions run on whatever thread made the step possible: the submitter, the releaser, the update thread, and
 * the I/O queue's thread in `transfer_done`.
 */
#include <errno.h>
#include <string.h>

#include "internal.h"

static uint32_t num_held_slots(const update_pipeline *pipeline)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < pipeline->num_slots; i++)
        count += pipeline->slots[i].state != SLOT_FREE && !slot_released(&pipeline->slots[i]);
    return count;
}

/* The most urgent waiting chunk.  Units that are not released never get the last slot: their release may depend on a
 * released unit's end (the next step's gradients need this step's weights), which must always find a way through. */
static struct heap *next_heap(update_pipeline *pipeline)
{
    struct heap *open = &pipeline->open, *held = &pipeline->held;
    if (held->size > 0 && (open->size == 0 || update_more_urgent(&held->items[0], &open->items[0])) &&
        num_held_slots(pipeline) + 1 < pipeline->num_slots)
        return held;
    return open->size > 0 ? open : NULL;
}

static struct slot *admit_one(update_pipeline *pipeline)
{
    struct heap *heap = pipeline->free_slots ? next_heap(pipeline) : NULL;
    if (!heap)
        return NULL;
    struct waiting item = update_heap_pop(heap);
    struct slot *slot = pipeline->free_slots;
    pipeline->free_slots = slot->next_free;
    slot->job = item.job;
    slot->chunk = item.chunk;
    slot->sequence = pipeline->num_admitted++;
    item.job->active++;
    item.job->order[item.job->num_admitted++] = item.chunk;
    return slot;
}

void update_drop_slot(struct slot *slot)
{
    update_pipeline *pipeline = slot->pipeline;
    if (--slot->job->active == 0)
        pthread_cond_broadcast(&pipeline->progress);
    slot->job = NULL;
    slot->state = SLOT_FREE;
    slot->next_free = pipeline->free_slots;
    pipeline->free_slots = slot;
}

static void chunk_written(struct slot *slot)
{
    update_job *job = slot->job;
    job->remaining--;
    if (--job->units[slot_chunk(slot)->unit].remaining == 0)
        pthread_cond_broadcast(&slot->pipeline->progress);
    update_drop_slot(slot);
}

void update_fail_job(update_job *job, const update_error *error)
{
    update_pipeline *pipeline = job->pipeline;
    if (job->error.error || job->remaining == 0)
        return;
    uint32_t nonfinite = job->error.nonfinite;
    job->error = *error;
    job->error.nonfinite = nonfinite;
    update_heap_move(&pipeline->open, job, UPDATE_ALL, NULL);
    update_heap_move(&pipeline->held, job, UPDATE_ALL, NULL);
    /* Slots with transfers in flight, or in the kernel, are dropped when those end. */
    for (uint32_t i = 0; i < pipeline->num_slots; i++)
        if (pipeline->slots[i].job == job && pipeline->slots[i].state == SLOT_READY)
            update_drop_slot(&pipeline->slots[i]);
    pthread_cond_broadcast(&pipeline->progress);
}

static void fail_transfer(const struct transfer *transfer, int op, int error, uint64_t done)
{
    const update_chunk *chunk = slot_chunk(transfer->slot);
    const update_stream *stream = &chunk->streams[transfer->role];
    update_error told = {
        .error = error,
        .op = op,
        .unit = chunk->unit,
        .role = transfer->role,
        .offset = op == AIO_READ ? stream->read_offset : stream->write_offset,
        .wanted = update_stream_bytes(chunk, transfer->role),
        .done = done,
    };
    update_fail_job(transfer->slot->job, &told);
}

/* The I/O queue's thread: one transfer has ended. */
static void transfer_done(void *arg, int error, uint64_t bytes_done)
{
    struct transfer *transfer = arg;
    struct slot *slot = transfer->slot;
    update_pipeline *pipeline = slot->pipeline;
    pthread_mutex_lock(&pipeline->lock);
    bool reading = slot->state == SLOT_READING;
    update_job *job = slot->job;
    *(reading ? &job->stats.read_bytes[transfer->role] : &job->stats.write_bytes[transfer->role]) += bytes_done;
    if (!error && bytes_done < update_stream_bytes(slot_chunk(slot), transfer->role))
        error = EIO;
    if (error)
        fail_transfer(transfer, reading ? AIO_READ : AIO_WRITE, error, bytes_done);
    if (--slot->pending == 0) {
        if (job->error.error) {
            update_drop_slot(slot);
        } else if (reading) {
            slot->state = SLOT_READY;
            pthread_cond_signal(&pipeline->work);
        } else {
            chunk_written(slot);
        }
    }
    update_admit(pipeline);
    pthread_mutex_unlock(&pipeline->lock);
}

static uint32_t build_requests(struct slot *slot, int op, aio_request *requests)
{
    const update_chunk *chunk = slot_chunk(slot);
    uint32_t count = 0;
    for (uint32_t role = 0; role < UPDATE_NUM_ROLES; role++) {
        const update_stream *stream = &chunk->streams[role];
        const aio_file *file = op == AIO_WRITE ? stream->write_file : stream->host ? NULL : stream->read_file;
        if (!file)
            continue;
        requests[count++] = (aio_request){
            .op = op,
            .file = file,
            .buf = update_stream_memory(slot, role),
            .offset = op == AIO_READ ? stream->read_offset : stream->write_offset,
            .bytes = update_stream_bytes(chunk, role),
            .deadline = chunk->deadline,
            .done = transfer_done,
            .arg = &slot->transfers[role],
        };
    }
    return count;
}

/* Give the slot to the I/O queue.  State and count are set before the lock is let go: the callbacks may come at once.
 * False: nothing to transfer. */
static bool start_transfers(struct slot *slot, int op)
{
    update_pipeline *pipeline = slot->pipeline;
    aio_request requests[UPDATE_NUM_ROLES];
    uint32_t count = build_requests(slot, op, requests);
    if (count == 0)
        return false;
    slot->pending = count;
    slot->state = op == AIO_READ ? SLOT_READING : SLOT_WRITING;
    pthread_mutex_unlock(&pipeline->lock);
    int rc = aio_submit(pipeline->queue, requests, count, NULL);
    pthread_mutex_lock(&pipeline->lock);
    if (rc < 0) { /* none was queued, so no callback comes: the slot is still ours */
        fail_transfer(requests[0].arg, op, -rc, 0);
        slot->pending = 0;
        update_drop_slot(slot);
    }
    return true;
}

void update_admit(update_pipeline *pipeline)
{
    struct slot *slot;
    while ((slot = admit_one(pipeline)) != NULL) {
        if (!start_transfers(slot, AIO_READ)) {
            slot->state = SLOT_READY;
            pthread_cond_signal(&pipeline->work);
        }
    }
}

void update_write_slot(struct slot *slot)
{
    if (!start_transfers(slot, AIO_WRITE))
        chunk_written(slot);
}
