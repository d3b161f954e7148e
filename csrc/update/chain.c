/* The chain of one chunk: admit -> reads -> ready ... kernel -> writes -> slot free.
 *
 * These functions run on whatever thread made the step possible: the submitter, the releaser, the update thread, and
 * the I/O queue's thread in `transfer_done`.
 */
#include <errno.h>
#include <string.h>

#include "internal.h"

static uint32_t num_preread(const update_pipeline *pipeline)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < pipeline->num_slots; i++)
        count += pipeline->slots[i].state != SLOT_FREE && !slot_released(&pipeline->slots[i]);
    return count;
}

uint32_t update_num_writing(const update_pipeline *pipeline)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < pipeline->num_slots; i++)
        count += pipeline->slots[i].state == SLOT_WRITING;
    return count;
}

/* The most urgent waiting chunk.  Units that are not released get some of the slots, and never the last one: their
 * release may depend on a released unit's end (the next step's gradients need this step's weights), which must always
 * find a way through. */
static struct heap *next_heap(update_pipeline *pipeline)
{
    struct heap *open = &pipeline->open, *held = &pipeline->held;
    if (held->size > 0 && (open->size == 0 || update_more_urgent(&held->items[0], &open->items[0])) &&
        num_preread(pipeline) < pipeline->num_preread)
        return held;
    return open->size > 0 ? open : NULL;
}

static uint32_t reads_of(const update_chunk *chunk)
{
    uint32_t roles = 0;
    for (uint32_t role = 0; role < UPDATE_NUM_ROLES; role++)
        if (!chunk->streams[role].host && !chunk->streams[role].source && chunk->streams[role].read_file)
            roles |= 1u << role;
    return roles;
}

/* Of the slot's reads, those that may be submitted now. */
static uint32_t reads_allowed(const struct slot *slot)
{
    uint32_t roles = slot->unread;
    for (uint32_t role = 0; role < UPDATE_NUM_ROLES; role++)
        if (!slot_released(slot) && (slot_chunk(slot)->streams[role].flags & UPDATE_AFTER_RELEASE))
            roles &= ~(1u << role);
    return roles;
}

static uint32_t writes_of(const update_chunk *chunk)
{
    uint32_t roles = 0;
    for (uint32_t role = 0; role < UPDATE_NUM_ROLES; role++)
        if (chunk->streams[role].write_file)
            roles |= 1u << role;
    return roles;
}

static void raise_to(uint32_t *most, uint32_t count)
{
    if (*most < count)
        *most = count;
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
    slot->state = SLOT_READING;
    slot->unread = reads_of(slot_chunk(slot));
    item.job->active++;
    item.job->order[item.job->num_admitted++] = item.chunk;
    if (!slot_released(slot))
        raise_to(&item.job->stats.most_preread, num_preread(pipeline));
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
    pthread_cond_signal(&pipeline->work); /* one slot less in writing: another kernel may run */
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

/* One transfer less in flight, or a thread less at work on the slot's step; with the last one the step has ended. */
static void step_ended(struct slot *slot)
{
    if (--slot->pending > 0)
        return;
    if (slot->job->error.error) {
        update_drop_slot(slot);
    } else if (slot->state == SLOT_READING) {
        slot->state = SLOT_READY;
        pthread_cond_signal(&slot->pipeline->work);
    } else {
        chunk_written(slot);
    }
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
    update_mark(slot, reading ? update_read_times : update_write_times, 1);
    *(reading ? &job->stats.read_bytes[transfer->role] : &job->stats.write_bytes[transfer->role]) += bytes_done;
    if (!error && bytes_done < update_stream_bytes(slot_chunk(slot), transfer->role))
        error = EIO;
    if (error)
        fail_transfer(transfer, reading ? AIO_READ : AIO_WRITE, error, bytes_done);
    step_ended(slot);
    update_admit(pipeline);
    pthread_mutex_unlock(&pipeline->lock);
}

static uint32_t build_requests(struct slot *slot, int op, uint32_t roles, aio_request *requests)
{
    const update_chunk *chunk = slot_chunk(slot);
    uint32_t count = 0;
    for (uint32_t role = 0; role < UPDATE_NUM_ROLES; role++) {
        const update_stream *stream = &chunk->streams[role];
        if (!(roles & 1u << role))
            continue;
        requests[count++] = (aio_request){
            .op = op,
            .file = op == AIO_READ ? stream->read_file : stream->write_file,
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

/* While the drive writes, the processor has time. */
static void sum_slot(struct slot *slot)
{
    uint64_t start = update_now_ns();
    pthread_mutex_unlock(&slot->pipeline->lock);
    update_add_sums(slot);
    pthread_mutex_lock(&slot->pipeline->lock);
    slot->job->stats.checksum_ns += update_now_ns() - start;
}

/* Give the slot to the I/O queue.  State and count are set before the lock is let go: the callbacks may come at once,
 * and the slot must stay ours until we are through with it. */
static void start_transfers(struct slot *slot, int op, uint32_t roles)
{
    update_pipeline *pipeline = slot->pipeline;
    aio_request requests[UPDATE_NUM_ROLES];
    uint32_t count = build_requests(slot, op, roles, requests);
    slot->pending += count + 1;
    slot->state = op == AIO_READ ? SLOT_READING : SLOT_WRITING;
    if (count > 0) {
        update_mark(slot, op == AIO_READ ? update_read_times : update_write_times, 0);
        pthread_mutex_unlock(&pipeline->lock);
        int rc = aio_submit(pipeline->queue, requests, count, NULL);
        pthread_mutex_lock(&pipeline->lock);
        if (rc < 0) { /* none was queued, so no callback comes */
            fail_transfer(requests[0].arg, op, -rc, 0);
            slot->pending -= count;
        }
    }
    if (op == AIO_WRITE && slot->job->sums && !slot->job->error.error)
        sum_slot(slot);
    step_ended(slot);
}

static void start_reads(struct slot *slot)
{
    uint32_t roles = reads_allowed(slot);
    slot->unread &= ~roles;
    start_transfers(slot, AIO_READ, roles);
}

void update_admit(update_pipeline *pipeline)
{
    struct slot *slot;
    while ((slot = admit_one(pipeline)) != NULL)
        start_reads(slot);
}

void update_read_late(update_job *job)
{
    update_pipeline *pipeline = job->pipeline;
    for (uint32_t i = 0; i < pipeline->num_slots && !job->error.error; i++) {
        struct slot *slot = &pipeline->slots[i];
        if (slot->job == job && slot->unread && slot_released(slot))
            start_reads(slot);
    }
}

void update_write_slot(struct slot *slot)
{
    raise_to(&slot->job->stats.most_writing, update_num_writing(slot->pipeline) + 1);
    start_transfers(slot, AIO_WRITE, writes_of(slot_chunk(slot)));
}
