/* A job: what was submitted is checked before anything starts, then copied, then its chunks wait for slots. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "internal.h"

struct submission {
    const update_chunk *chunks;
    const update_segment *segments;
    const simd_adam_row *rows;
    const uint8_t *released;
    uint32_t num_chunks, num_segments, num_rows, num_units;
};

static bool stream_is_valid(const update_pipeline *pipeline, const update_stream *stream, uint32_t role)
{
    static const uint32_t widths[UPDATE_GRAD] = {2, 2, 4, 4};
    if (role != UPDATE_GRAD)
        return stream->elem_bytes == widths[role];
    if (stream->format > SIMD_F16 || stream->elem_bytes != (stream->format == SIMD_F32 ? 4u : 2u))
        return false;
    return stream->host || stream->elem_bytes <= pipeline->grad_elem_bytes;
}

static bool chunk_is_valid(const update_pipeline *pipeline, const struct submission *all, const update_chunk *chunk)
{
    if (chunk->num_elems == 0 || chunk->num_elems > pipeline->chunk_elems || chunk->unit >= all->num_units)
        return false;
    if ((uint64_t)chunk->first_segment + chunk->num_segments > all->num_segments)
        return false;
    for (uint32_t role = 0; role < UPDATE_NUM_ROLES; role++)
        if (!stream_is_valid(pipeline, &chunk->streams[role], role))
            return false;
    for (uint32_t i = 0; i < chunk->num_segments; i++) {
        const update_segment *segment = &all->segments[chunk->first_segment + i];
        if ((uint64_t)segment->start + segment->num_elems > chunk->num_elems)
            return false;
        if (segment->row != UPDATE_COPY && segment->row >= all->num_rows)
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
    free(job);
}

static update_job *copy_job(update_pipeline *pipeline, const struct submission *all)
{
    update_job *job = calloc(1, sizeof *job);
    if (!job)
        return NULL;
    job->pipeline = pipeline;
    job->chunks = copy_of(all->chunks, all->num_chunks * sizeof *all->chunks);
    job->segments = copy_of(all->segments, all->num_segments * sizeof *all->segments);
    job->rows = copy_of(all->rows, all->num_rows * sizeof *all->rows);
    job->units = calloc(all->num_units + 1u, sizeof *job->units);
    job->order = calloc(all->num_chunks + 1u, sizeof *job->order);
    if (!job->chunks || !job->segments || !job->rows || !job->units || !job->order) {
        free_memory(job);
        return NULL;
    }
    job->num_chunks = job->remaining = all->num_chunks;
    job->num_segments = all->num_segments;
    job->num_rows = all->num_rows;
    job->num_units = all->num_units;
    for (uint32_t unit = 0; unit < all->num_units; unit++)
        job->units[unit].released = all->released[unit] != 0;
    for (uint32_t i = 0; i < all->num_chunks; i++)
        job->units[job->chunks[i].unit].remaining++;
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

int update_submit(update_pipeline *pipeline, const update_chunk *chunks, uint32_t num_chunks,
                  const update_segment *segments, uint32_t num_segments, const simd_adam_row *rows, uint32_t num_rows,
                  const uint8_t *released, uint32_t num_units, update_job **out)
{
    struct submission all = {chunks, segments, rows, released, num_chunks, num_segments, num_rows, num_units};
    for (uint32_t i = 0; i < num_chunks; i++)
        if (!chunk_is_valid(pipeline, &all, &chunks[i]))
            return -EINVAL;
    update_job *job = copy_job(pipeline, &all);
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
