/* Open and close; where a stream of a chunk lies.
 *
 *   slot   [ param | master_lo or master | states | scales | grad ]     those that are not in host memory, each 4096-aligned
 */
#include <errno.h>
#include <signal.h>
#include <stdlib.h>

#include "internal.h"

bool update_is_whole(const update_chunk *chunk) { return chunk->streams[UPDATE_MASTER].elem_bytes != 0; }

uint64_t update_data_bytes(const update_chunk *chunk, uint32_t role)
{
    uint64_t count = chunk->num_elems;
    if (role == UPDATE_SCALE_0 || role == UPDATE_SCALE_1)
        count = (count + SIMD_BLOCK - 1) / SIMD_BLOCK;
    return count * chunk->streams[role].elem_bytes;
}

uint64_t update_stream_bytes(const update_chunk *chunk, uint32_t role)
{
    return (update_data_bytes(chunk, role) + UPDATE_PAGE - 1) / UPDATE_PAGE * UPDATE_PAGE;
}

uint64_t update_slot_offset(const update_chunk *chunk, uint32_t role)
{
    uint64_t offset = 0;
    for (uint32_t other = 0; other < role; other++)
        if (!chunk->streams[other].host)
            offset += update_stream_bytes(chunk, other);
    return offset;
}

void *update_stream_memory(const struct slot *slot, uint32_t role)
{
    const update_stream *stream = &slot_chunk(slot)->streams[role];
    return stream->host ? stream->host : slot->memory + update_slot_offset(slot_chunk(slot), role);
}

static void init_slots(update_pipeline *pipeline, uint8_t *memory)
{
    for (uint32_t i = 0; i < pipeline->num_slots; i++) {
        struct slot *slot = &pipeline->slots[i];
        slot->pipeline = pipeline;
        slot->memory = memory + i * pipeline->slot_bytes;
        slot->state = SLOT_FREE;
        slot->next_free = i + 1 < pipeline->num_slots ? slot + 1 : NULL;
        for (uint32_t role = 0; role < UPDATE_NUM_ROLES; role++)
            slot->transfers[role] = (struct transfer){slot, role};
    }
    pipeline->free_slots = pipeline->slots;
}

static void init_locks(update_pipeline *pipeline)
{
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_mutex_init(&pipeline->lock, NULL);
    pthread_cond_init(&pipeline->work, NULL);
    pthread_cond_init(&pipeline->progress, &monotonic);
    pthread_condattr_destroy(&monotonic);
}

static void destroy(update_pipeline *pipeline)
{
    pthread_cond_destroy(&pipeline->work);
    pthread_cond_destroy(&pipeline->progress);
    pthread_mutex_destroy(&pipeline->lock);
    simd_pool_close(pipeline->pool);
    free(pipeline->slots);
    free(pipeline->open.items);
    free(pipeline->held.items);
    free(pipeline);
}

/* Signals belong to the program's own threads. */
static int start_worker(update_pipeline *pipeline)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int rc = pthread_create(&pipeline->thread, NULL, update_worker, pipeline);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return -rc;
}

static bool config_is_valid(const update_config *config)
{
    return config->num_slots && config->num_threads && config->slot_bytes && config->slot_bytes % UPDATE_PAGE == 0;
}

static void set_counts(update_pipeline *pipeline, const update_config *config)
{
    uint32_t num_slots = config->num_slots;
    pipeline->num_slots = num_slots;
    pipeline->slot_bytes = config->slot_bytes;
    pipeline->num_preread = config->num_preread ? config->num_preread : num_slots / 2;
    if (pipeline->num_preread > num_slots - 1)
        pipeline->num_preread = num_slots - 1;
    pipeline->num_writing = config->num_writing ? config->num_writing : num_slots - num_slots / 2;
}

int update_open(aio_queue *queue, void *slots, const update_config *config, update_pipeline **out)
{
    if (!config_is_valid(config) || (uintptr_t)slots % UPDATE_PAGE)
        return -EINVAL;
    update_pipeline *pipeline = calloc(1, sizeof *pipeline);
    if (!pipeline)
        return -ENOMEM;
    pipeline->queue = queue;
    set_counts(pipeline, config);
    pipeline->slots = calloc(pipeline->num_slots, sizeof *pipeline->slots);
    int rc = pipeline->slots ? simd_pool_open(config->num_threads, &pipeline->pool) : -ENOMEM;
    if (rc) {
        free(pipeline->slots);
        free(pipeline);
        return rc;
    }
    init_slots(pipeline, slots);
    init_locks(pipeline);
    rc = start_worker(pipeline);
    if (rc)
        destroy(pipeline);
    else
        *out = pipeline;
    return rc;
}

/* A closed pipeline lives until its last job is freed, so that jobs can be asked for their results. */
void update_unref(update_pipeline *pipeline)
{
    bool last = pipeline->closed && !pipeline->jobs;
    pthread_mutex_unlock(&pipeline->lock);
    if (last)
        destroy(pipeline);
}

static bool has_active_slots(const update_pipeline *pipeline)
{
    for (uint32_t i = 0; i < pipeline->num_slots; i++)
        if (pipeline->slots[i].job)
            return true;
    return false;
}

void update_close(update_pipeline *pipeline)
{
    if (!pipeline)
        return;
    update_error cancelled = {.error = ECANCELED};
    pthread_mutex_lock(&pipeline->lock);
    for (update_job *job = pipeline->jobs; job; job = job->next)
        update_fail_job(job, &cancelled);
    pipeline->stopping = true; /* no job is submitted from here on: the caller's promise */
    while (has_active_slots(pipeline))
        pthread_cond_wait(&pipeline->progress, &pipeline->lock);
    pthread_cond_signal(&pipeline->work);
    pthread_mutex_unlock(&pipeline->lock);
    pthread_join(pipeline->thread, NULL);
    pthread_mutex_lock(&pipeline->lock);
    pipeline->closed = true;
    update_unref(pipeline);
}
