/* What a caller does with a job that runs: release units, wait, cancel, ask. */
#include <errno.h>
#include <time.h>

#include "internal.h"

int update_release(update_job *job, uint32_t unit)
{
    update_pipeline *pipeline = job->pipeline;
    if (unit != UPDATE_ALL && unit >= job->num_units)
        return -EINVAL;
    uint32_t first = unit == UPDATE_ALL ? 0 : unit;
    uint32_t stop = unit == UPDATE_ALL ? job->num_units : unit + 1;
    pthread_mutex_lock(&pipeline->lock);
    for (uint32_t i = first; i < stop; i++) {
        if (job->timed && !job->units[i].released)
            job->units[i].times.released_ns = update_now_ns();
        job->units[i].released = true;
    }
    update_heap_move(&pipeline->held, job, unit, &pipeline->open);
    update_read_late(job);
    pthread_cond_signal(&pipeline->work); /* chunks that were only waiting for this can run */
    update_admit(pipeline);               /* ... and others may have the slots that were kept from them */
    pthread_mutex_unlock(&pipeline->lock);
    return 0;
}

/* 1: not ended.  A failed job ends when nothing of it is in flight: its buffers are then the caller's again. */
static int job_status(const update_job *job, uint32_t unit)
{
    if ((unit == UPDATE_ALL ? job->remaining : job->units[unit].remaining) == 0)
        return 0;
    if (!job->error.error || job->active > 0)
        return 1;
    return job->error.error == ETIME ? -EIO : -job->error.error; /* drives have such an error too */
}

/* The same for kernels.  What has failed is lost, whatever was made before. */
static int made_status(const update_job *job, uint32_t unit)
{
    int status = job_status(job, unit);
    uint32_t unmade = unit == UPDATE_ALL ? job->unmade : job->units[unit].unmade;
    return status == 1 && unmade == 0 && !job->error.error ? 0 : status;
}

static struct timespec deadline_in(int64_t timeout_ns)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    time.tv_sec += timeout_ns / 1000000000;
    time.tv_nsec += timeout_ns % 1000000000;
    if (time.tv_nsec >= 1000000000) {
        time.tv_sec++;
        time.tv_nsec -= 1000000000;
    }
    return time;
}

static int wait_for(update_job *job, uint32_t unit, int64_t timeout_ns, int (*ask)(const update_job *, uint32_t))
{
    update_pipeline *pipeline = job->pipeline;
    if (unit != UPDATE_ALL && unit >= job->num_units)
        return -EINVAL;
    struct timespec deadline = timeout_ns > 0 ? deadline_in(timeout_ns) : (struct timespec){0};
    int status, late = timeout_ns == 0;
    pthread_mutex_lock(&pipeline->lock);
    job->waiters++;
    while ((status = ask(job, unit)) == 1 && !late) {
        if (timeout_ns < 0)
            pthread_cond_wait(&pipeline->progress, &pipeline->lock);
        else
            late = pthread_cond_timedwait(&pipeline->progress, &pipeline->lock, &deadline) == ETIMEDOUT;
    }
    if (--job->waiters == 0)
        pthread_cond_broadcast(&pipeline->progress); /* for update_job_free */
    pthread_mutex_unlock(&pipeline->lock);
    return status == 1 ? -ETIME : status;
}

int update_wait(update_job *job, uint32_t unit, int64_t timeout_ns)
{
    return wait_for(job, unit, timeout_ns, job_status);
}

int update_wait_made(update_job *job, uint32_t unit, int64_t timeout_ns)
{
    return wait_for(job, unit, timeout_ns, made_status);
}

int update_cancel(update_job *job)
{
    update_error error = {.error = ECANCELED};
    pthread_mutex_lock(&job->pipeline->lock);
    update_fail_job(job, &error);
    update_admit(job->pipeline); /* other jobs take the slots */
    pthread_mutex_unlock(&job->pipeline->lock);
    return 0;
}

void update_job_error(const update_job *job, update_error *out)
{
    pthread_mutex_lock(&job->pipeline->lock);
    *out = job->error;
    pthread_mutex_unlock(&job->pipeline->lock);
}

void update_job_stats(const update_job *job, update_stats *out)
{
    pthread_mutex_lock(&job->pipeline->lock);
    *out = job->stats;
    pthread_mutex_unlock(&job->pipeline->lock);
}

int update_job_times(const update_job *job, uint32_t unit, update_times *out)
{
    if (unit >= job->num_units)
        return -EINVAL;
    pthread_mutex_lock(&job->pipeline->lock);
    *out = job->units[unit].times;
    pthread_mutex_unlock(&job->pipeline->lock);
    return 0;
}

uint32_t update_job_order(const update_job *job, uint32_t *chunks, uint32_t capacity)
{
    pthread_mutex_lock(&job->pipeline->lock);
    uint32_t count = job->num_admitted;
    for (uint32_t i = 0; i < count && i < capacity; i++)
        chunks[i] = job->order[i];
    pthread_mutex_unlock(&job->pipeline->lock);
    return count;
}
