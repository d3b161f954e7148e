/* The update thread: the most urgent ready chunk of a released unit, kernel by segment, then its writes. */
#include <string.h>
#include <time.h>

#include "internal.h"

uint64_t update_now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

void update_mark(struct slot *slot, uint64_t *(*of)(update_times *), int end)
{
    uint64_t *span = of(&slot->job->units[slot_chunk(slot)->unit].times);
    if (slot->job->timed && (end || !span[0]))
        span[end] = update_now_ns();
}

static struct slot *next_ready(update_pipeline *pipeline)
{
    struct slot *best = NULL;
    if (update_num_writing(pipeline) >= pipeline->num_writing)
        return NULL;
    for (uint32_t i = 0; i < pipeline->num_slots; i++) {
        struct slot *slot = &pipeline->slots[i];
        if (slot->state != SLOT_READY || slot->unread || !slot_released(slot))
            continue;
        uint64_t deadline = slot_chunk(slot)->deadline;
        uint64_t best_deadline = best ? slot_chunk(best)->deadline : 0;
        if (!best || deadline < best_deadline || (deadline == best_deadline && slot->sequence < best->sequence))
            best = slot;
    }
    return best;
}

/* Here and not at admission, which may run on the I/O queue's thread, and may come before the unit's release. */
static void fill_slot(struct slot *slot)
{
    const update_chunk *chunk = slot_chunk(slot);
    for (uint32_t role = 0; role < UPDATE_NUM_ROLES; role++) {
        const update_stream *stream = &chunk->streams[role];
        void *memory = update_stream_memory(slot, role);
        if (stream->source)
            memcpy(memory, stream->source, update_stream_bytes(chunk, role));
        else if (!stream->host && !stream->read_file && !(role == UPDATE_PARAM && update_is_whole(chunk)))
            memset(memory, 0, update_stream_bytes(chunk, role));
    }
}

struct totals {
    uint64_t elems;
    uint32_t nonfinite;
    int error; /* -errno */
};

static void place_master(const struct slot *slot, size_t start, simd_streams *at)
{
    uint16_t *param = (uint16_t *)update_stream_memory(slot, UPDATE_PARAM) + start;
    if (update_is_whole(slot_chunk(slot))) {
        at->master = (float *)update_stream_memory(slot, UPDATE_MASTER) + start;
        at->weight = param;
        at->weight_format = slot_chunk(slot)->streams[UPDATE_PARAM].format;
    } else {
        at->hi = param;
        at->lo = (int16_t *)update_stream_memory(slot, UPDATE_MASTER_LO) + start;
    }
}

/* Weights of elements [start, stop) that are not updated: what is written must have them, and they were not read. */
static void round_master(const struct slot *slot, size_t start, size_t stop)
{
    simd_streams at = {0};
    place_master(slot, start, &at);
    if (at.master && stop > start)
        simd_convert(at.master, SIMD_F32, at.weight, at.weight_format, stop - start);
}

static void run_segment(struct slot *slot, const update_segment *segment, struct totals *totals)
{
    const update_stream *grad = &slot_chunk(slot)->streams[UPDATE_GRAD];
    const size_t start = segment->start;
    simd_streams at = {
        .grad = (uint8_t *)update_stream_memory(slot, UPDATE_GRAD) + start * grad->elem_bytes,
        .grad_format = grad->format,
        .key = segment->key,
        .first = segment->first,
    };
    place_master(slot, start, &at);
    for (uint32_t i = 0; i < 2; i++) {
        const update_stream *state = &slot_chunk(slot)->streams[UPDATE_STATE_0 + i];
        at.state_format[i] = state->format;
        if (state->elem_bytes)
            at.state[i] = (uint8_t *)update_stream_memory(slot, UPDATE_STATE_0 + i) + start * state->elem_bytes;
        if (slot_chunk(slot)->streams[UPDATE_SCALE_0 + i].elem_bytes)
            at.scale[i] = (float *)update_stream_memory(slot, UPDATE_SCALE_0 + i) + start / SIMD_BLOCK;
    }
    int rc = simd_pool_update(slot->pipeline->pool, &at, segment->num_elems, &slot->job->rows[segment->row]);
    totals->elems += segment->num_elems;
    totals->nonfinite += rc == SIMD_NONFINITE;
    if (rc < 0)
        totals->error = rc;
}

static struct totals run_kernels(struct slot *slot)
{
    const update_chunk *chunk = slot_chunk(slot);
    const update_segment *segments = slot->job->segments + chunk->first_segment;
    struct totals totals = {0};
    size_t done = 0; /* elements whose weights are made */
    for (uint32_t i = 0; i < chunk->num_segments && !totals.error; i++) {
        if (segments[i].row == UPDATE_COPY)
            continue;
        round_master(slot, done, segments[i].start);
        run_segment(slot, &segments[i], &totals);
        done = (size_t)segments[i].start + segments[i].num_elems;
    }
    round_master(slot, done, chunk->num_elems);
    return totals;
}

/* The slot is the update thread's own between the two changes of state, so the lock is free meanwhile. */
static void run_slot(struct slot *slot)
{
    update_job *job = slot->job;
    slot->state = SLOT_KERNEL;
    update_mark(slot, update_kernel_times, 0);
    pthread_mutex_unlock(&slot->pipeline->lock);
    uint64_t start = update_now_ns();
    fill_slot(slot);
    struct totals totals = run_kernels(slot);
    uint64_t spent = update_now_ns() - start;
    pthread_mutex_lock(&slot->pipeline->lock);
    update_mark(slot, update_kernel_times, 1);
    job->stats.kernel_ns += spent;
    job->stats.elems += totals.elems;
    job->error.nonfinite += totals.nonfinite;
    if (totals.error) {
        update_error error = {.error = -totals.error, .op = -1, .unit = slot_chunk(slot)->unit, .role = UPDATE_PARAM};
        update_fail_job(job, &error);
    }
    if (job->error.error) {
        update_drop_slot(slot);
        return;
    }
    job->unmade--;
    if (--job->units[slot_chunk(slot)->unit].unmade == 0)
        pthread_cond_broadcast(&slot->pipeline->progress);
    update_write_slot(slot);
}

void *update_worker(void *arg)
{
    update_pipeline *pipeline = arg;
    pthread_mutex_lock(&pipeline->lock);
    while (!pipeline->stopping) {
        struct slot *slot = next_ready(pipeline);
        if (slot) {
            run_slot(slot);
            update_admit(pipeline);
        } else {
            pthread_cond_wait(&pipeline->work, &pipeline->lock);
        }
    }
    pthread_mutex_unlock(&pipeline->lock);
    return NULL;
}
