/* A job: what was submitted is checked before anything starts, then copied, then its chunks wait for slots. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "internal.h"

static uint32_t format_bytes(uint32_t format)
{
    static const uint32_t bytes[] = {[SIMD_F32] = 4, [SIMD_BF16] = 2, [SIMD_F16] = 2, [SIMD_I8] = 1, [SIMD_U8] = 1};
    return format < sizeof bytes / sizeof *bytes ? bytes[format] : 0;
}

static bool is_8_bits(const update_stream *state) { return state->format == SIMD_I8 || state->format == SIMD_U8; }

/* Is `elem_bytes` what the role, or its format, takes? */
static bool width_is_valid(const update_chunk *chunk, uint32_t role)
{
    const update_stream *stream = &chunk->streams[role];
    switch (role) {
    case UPDATE_GRAD:
        return stream->format <= SIMD_F16 && stream->elem_bytes == format_bytes(stream->format);
    case UPDATE_STATE_0:
    case UPDATE_STATE_1:
        return stream->elem_bytes == 0 || (stream->format != SIMD_F16 && stream->elem_bytes == format_bytes(stream->format));
    case UPDATE_SCALE_0:
    case UPDATE_SCALE_1: {
        const update_stream *state = &chunk->streams[role - UPDATE_SCALE_0 + UPDATE_STATE_0];
        return stream->elem_bytes == (state->elem_bytes && is_8_bits(state) ? 4u : 0u);
    }
    case UPDATE_MASTER_LO:
        return stream->elem_bytes == (update_is_whole(chunk) ? 0u : 2u);
    case UPDATE_MASTER:
        return stream->elem_bytes == 0 || stream->elem_bytes == 4;
    default:
        return stream->elem_bytes == 2 && (!update_is_whole(chunk) || stream->format == SIMD_BF16 || stream->format == SIMD_F16);
    }
}

static bool stream_is_valid(const update_chunk *chunk, uint32_t role)
{
    const update_stream *stream = &chunk->streams[role];
    const void *here = stream->host ? stream->host : stream->source;
    if ((stream->flags & UPDATE_AFTER_RELEASE) && (here || !stream->read_file))
        return false;
    if (stream->elem_bytes == 0 && (here || stream->read_file || stream->write_file))
        return false;
    return width_is_valid(chunk, role);
}

static bool chunk_is_valid(const update_pipeline *pipeline, const update_work *work, const update_chunk *chunk)
{
    if (chunk->num_elems == 0 || chunk->unit >= work->num_units)
        return false;
    if ((uint64_t)chunk->first_segment + chunk->num_segments > work->num_segments)
        return false;
    for (uint32_t role = 0; role < UPDATE_NUM_ROLES; role++)
        if (!stream_is_valid(chunk, role))
            return false;
    if (update_slot_offset(chunk, UPDATE_NUM_ROLES) > pipeline->slot_bytes)
        return false;
    uint64_t end = 0; /* of the segment before */
    for (uint32_t i = 0; i < chunk->num_segments; i++) {
        const update_segment *segment = &work->segments[chunk->first_segment + i];
        if ((uint64_t)segment->start + segment->num_elems > chunk->num_elems)
            return false;
        if (update_is_whole(chunk) && segment->start < end)
            return false;
        end = (uint64_t)segment->start + segment->num_elems;
        if (segment->row != UPDATE_COPY && segment->row >= work->num_rows)
            return false;
    }
    return true;
}

static void *copy_of(const void *source, size_t bytes)
{
    void *copy = malloc(bytes ? bytes : 1);
    if (copy && bytes)
        memcpy(copy, source, bytes);
    return copy;
}

static void free_memory(update_job *job)
{
    free(job->chunks);
    free(job->segments);
    free(job->rows);
    free(job->units);
    free(job->order);
    free(job->starts);
    free(job->sums);
    free(job);
}

static update_job *copy_job(update_pipeline *pipeline, const update_work *work)
{
    update_job *job = calloc(1, sizeof *job);
    if (!job)
        return NULL;
    job->pipeline = pipeline;
    job->chunks = copy_of(work->chunks, work->num_chunks * sizeof *work->chunks);
    job->segments = copy_of(work->segments, work->num_segments * sizeof *work->segments);
    job->rows = copy_of(work->rows, work->num_rows * sizeof *work->rows);
    job->units = calloc(work->num_units + 1u, sizeof *job->units);
    job->order = calloc(work->num_chunks + 1u, sizeof *job->order);
    job->starts = calloc(work->num_chunks + 1u, sizeof *job->starts);
    if (!job->chunks || !job->segments || !job->rows || !job->units || !job->order || !job->starts) {
        free_memory(job);
        return NULL;
    }
    job->num_chunks = job->remaining = job->unmade = work->num_chunks;
    job->num_segments = work->num_segments;
    job->num_rows = work->num_rows;
    job->num_units = work->num_units;
    job->timed = (work->flags & UPDATE_TIMES) != 0;
    for (uint32_t unit = 0; unit < work->num_units; unit++) {
        job->units[unit].released = work->released[unit] != 0;
        if (job->timed && job->units[unit].released)
            job->units[unit].times.released_ns = update_now_ns();
    }
    for (uint32_t i = 0; i < work->num_chunks; i++) {
        struct unit *unit = &job->units[job->chunks[i].unit];
        unit->remaining++;
        unit->unmade++;
        for (uint32_t role = 0; role < UPDATE_GRAD; role++) {
            job->starts[i][role] = unit->num_bytes[role];
            unit->num_bytes[role] += update_data_bytes(&job->chunks[i], role);
        }
    }
    if ((work->flags & UPDATE_CHECKSUMS) && !update_init_sums(job)) {
        free_memory(job);
        return NULL;
    }
    return job;
}

/* Room for every waiting chunk in either heap, so that no later step can fail for memory. */
static int enqueue(update_pipeline *pipeline, update_job *job)
{
    size_t room = pipeline->open.size + pipeline->held.size + job->num_chunks;
    if (pipeline->stopping)
        return -ESHUTDOWN;
    if (update_heap_reserve(&pipeline->open, room) || update_heap_reserve(&pipeline->held, room))
        return -ENOMEM;
    for (uint32_t i = 0; i < job->num_chunks; i++) {
        struct waiting item = {job->chunks[i].deadline, pipeline->num_submitted++, job, i};
        update_heap_push(job->units[job->chunks[i].unit].released ? &pipeline->open : &pipeline->held, item);
    }
    job->next = pipeline->jobs;
    if (job->next)
        job->next->previous = job;
    pipeline->jobs = job;
    return 0;
}

int update_submit(update_pipeline *pipeline, const update_work *work, update_job **out)
{
    for (uint32_t i = 0; i < work->num_chunks; i++)
        if (!chunk_is_valid(pipeline, work, &work->chunks[i]))
            return -EINVAL;
    update_job *job = copy_job(pipeline, work);
    if (!job)
        return -ENOMEM;
    pthread_mutex_lock(&pipeline->lock);
    int rc = enqueue(pipeline, job);
    if (rc == 0) {
        *out = job;
        update_admit(pipeline);
    }
    pthread_mutex_unlock(&pipeline->lock);
    if (rc)
        free_memory(job);
    return rc;
}

void update_job_free(update_job *job)
{
    if (!job)
        return;
    update_pipeline *pipeline = job->pipeline;
    update_cancel(job);
    pthread_mutex_lock(&pipeline->lock);
    while (job->active || job->waiters)
        pthread_cond_wait(&pipeline->progress, &pipeline->lock);
    if (job->next)
        job->next->previous = job->previous;
    *(job->previous ? &job->previous->next : &pipeline->jobs) = job->next;
    free_memory(job);
    update_unref(pipeline);
}
