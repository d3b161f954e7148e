/* Jobs from several threads on one pipeline, with releases, cancellations, errors and early ends: for the sanitizers.
 *
 * Each round updates units with rows that change nothing but the weight decay, and checks what was written, and its
 * checksums, wherever the job succeeded.  Some weights and gradients lie in memory that is filled just before the release.
 * Usage: stress FILE ROUNDS BACKEND(enum aio_backend_id)
 */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "crc/crc.h"
#include "update/update.h"

enum { CHUNK_ELEMS = 2048, NUM_SLOTS = 4, NUM_SUBMITTERS = 3, NUM_UNITS = 3, CHUNKS_A_UNIT = 3 };
enum { NUM_CHUNKS = NUM_UNITS * CHUNKS_A_UNIT, CHUNK_BYTES = CHUNK_ELEMS * 16 };

static update_pipeline *pipeline;
static aio_file file, closed_file = {.direct_fd = -1, .buffered_fd = -1, .alignment = 512};
static uint16_t host_weights[NUM_SUBMITTERS][NUM_CHUNKS][CHUNK_ELEMS] __attribute__((aligned(4096)));
static float host_gradients[NUM_SUBMITTERS][NUM_CHUNKS][CHUNK_ELEMS] __attribute__((aligned(4096)));
static int rounds;
static atomic_int failures, updated, cancelled, failed;

#define CHECK(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "line %d: %s\n", __LINE__, #condition);                                                    \
            atomic_fetch_add(&failures, 1);                                                                            \
        }                                                                                                              \
    } while (0)

/* Places of a chunk in the file: reads at `at`, writes CHUNK_BYTES * NUM_CHUNKS * NUM_SUBMITTERS later. */
static void place(update_chunk *chunk, uint64_t at)
{
    static const uint32_t widths[UPDATE_NUM_ROLES] = {2, 2, 0, 4, 4, 0, 0, 4};
    for (uint32_t role = 0; role < UPDATE_NUM_ROLES; role++) {
        if (!widths[role])
            continue;
        chunk->streams[role] = (update_stream){.read_file = &file, .read_offset = at, .elem_bytes = widths[role]};
        if (role != UPDATE_GRAD) {
            chunk->streams[role].write_file = &file;
            chunk->streams[role].write_offset = at + (uint64_t)CHUNK_BYTES * NUM_CHUNKS * NUM_SUBMITTERS;
        }
        at += (uint64_t)widths[role] * CHUNK_ELEMS;
    }
}

static uint64_t start_of(uint32_t submitter, uint32_t chunk)
{
    return (uint64_t)(submitter * NUM_CHUNKS + chunk) * CHUNK_BYTES;
}

/* Weights are 2.0 and the decay is 0.5: every updated weight is 1.0. */
static void fill_file(void)
{
    static uint16_t weights[CHUNK_BYTES / 2];
    for (uint32_t i = 0; i < CHUNK_ELEMS; i++)
        weights[i] = 0x4000;
    for (uint32_t chunk = 0; chunk < 2 * NUM_SUBMITTERS * NUM_CHUNKS; chunk++)
        CHECK(pwrite(file.buffered_fd, weights, CHUNK_BYTES, (off_t)chunk * CHUNK_BYTES) == CHUNK_BYTES);
}

static void check_written(uint32_t submitter)
{
    uint16_t weights[CHUNK_ELEMS];
    for (uint32_t chunk = 0; chunk < NUM_CHUNKS; chunk++) {
        off_t at = (off_t)(start_of(submitter, chunk) + (uint64_t)CHUNK_BYTES * NUM_CHUNKS * NUM_SUBMITTERS);
        CHECK(pread(file.buffered_fd, weights, sizeof weights, at) == sizeof weights);
        for (uint32_t i = 0; i < CHUNK_ELEMS; i++)
            if (weights[i] != 0x3f80) {
                CHECK(!"a weight is not 1.0");
                return;
            }
    }
}

/* One block of a role: three chunks of ones. */
static void check_checksums(update_job *job)
{
    uint16_t ones[CHUNKS_A_UNIT * CHUNK_ELEMS];
    for (uint32_t i = 0; i < CHUNKS_A_UNIT * CHUNK_ELEMS; i++)
        ones[i] = 0x3f80;
    for (uint32_t unit = 0; unit < NUM_UNITS; unit++) {
        uint64_t sums[2];
        CHECK(update_job_checksums(job, unit, UPDATE_PARAM, sums, 2) == 1);
        CHECK(sums[0] == crc_add(0, ones, sizeof ones));
        CHECK(update_job_checksums(job, unit, UPDATE_GRAD, sums, 2) == 0);
    }
}

/* Chunk i of unit i % NUM_UNITS. */
static void fill_memory(uint32_t submitter, uint32_t unit)
{
    for (uint32_t chunk = unit; chunk < NUM_CHUNKS; chunk += NUM_UNITS)
        for (uint32_t i = 0; i < CHUNK_ELEMS; i++) {
            host_weights[submitter][chunk][i] = 0x4000;
            host_gradients[submitter][chunk][i] = (float)i;
        }
}

static void forget_memory(uint32_t submitter)
{
    for (uint32_t chunk = 0; chunk < NUM_CHUNKS; chunk++)
        for (uint32_t i = 0; i < CHUNK_ELEMS; i++)
            CHECK(host_weights[submitter][chunk][i] == 0x4000);
    memset(host_weights[submitter], 0xff, sizeof host_weights[submitter]);
    memset(host_gradients[submitter], 0xff, sizeof host_gradients[submitter]); /* NaN */
}

/* Weights and gradients of some chunks: in memory, or on disk and read late. */
static void place_late(update_chunk *chunk, uint32_t submitter, uint32_t index, uint32_t round)
{
    update_stream *weights = &chunk->streams[UPDATE_PARAM], *gradients = &chunk->streams[UPDATE_GRAD];
    if ((index + round) % 2) {
        weights->source = host_weights[submitter][index];
        weights->read_file = NULL;
    } else {
        weights->flags = UPDATE_AFTER_RELEASE;
    }
    if ((index + round) % 3 == 0)
        gradients->flags = UPDATE_AFTER_RELEASE;
    if ((index + round) % 3 == 1)
        gradients->host = host_gradients[submitter][index];
}

struct release {
    update_job *job;
    uint32_t submitter;
    uint32_t first; /* units first to NUM_UNITS - 1, from the last; those before have been released */
};

static void *release_units(void *arg)
{
    struct release *release = arg;
    for (uint32_t unit = NUM_UNITS; unit-- > release->first;) {
        fill_memory(release->submitter, unit);
        CHECK(update_release(release->job, unit) == 0);
    }
    CHECK(update_release(release->job, UPDATE_ALL) == 0);
    return NULL;
}

enum ending { WAIT, CANCEL, FREE, BAD_READ, BAD_WRITE, NUM_ENDINGS };

static update_job *submit(uint32_t submitter, uint32_t round, enum ending ending)
{
    update_chunk chunks[NUM_CHUNKS] = {0};
    update_segment segments[NUM_CHUNKS];
    simd_row row = {.decay = 0.5f, .eps = 1.0f, .inv_sqrt_bias2 = 1.0f};
    uint8_t released[NUM_UNITS] = {round % 2, 0, 0};
    if (round % 2)
        fill_memory(submitter, 0);
    for (uint32_t i = 0; i < NUM_CHUNKS; i++) {
        chunks[i] = (update_chunk){
            .deadline = (i * 7 + round) % 5, .unit = i % NUM_UNITS, .num_elems = CHUNK_ELEMS, .first_segment = i,
            .num_segments = 1};
        segments[i] = (update_segment){.num_elems = CHUNK_ELEMS};
        place(&chunks[i], start_of(submitter, i));
        place_late(&chunks[i], submitter, i, round);
    }
    if (ending == BAD_READ)
        chunks[round % NUM_CHUNKS].streams[UPDATE_STATE_0].read_file = &closed_file;
    if (ending == BAD_WRITE)
        chunks[round % NUM_CHUNKS].streams[UPDATE_STATE_0].write_file = &closed_file;
    update_job *job = NULL;
    update_work work = {chunks, segments, &row, released, NUM_CHUNKS, NUM_CHUNKS, 1, NUM_UNITS, UPDATE_CHECKSUMS};
    CHECK(update_submit(pipeline, &work, &job) == 0);
    return job;
}

static void end_job(update_job *job, uint32_t submitter, enum ending ending)
{
    update_error error;
    if (ending == CANCEL)
        CHECK(update_cancel(job) == 0);
    int status = ending == FREE ? -ECANCELED : update_wait(job, UPDATE_ALL, -1);
    update_job_error(job, &error);
    if (ending == WAIT)
        CHECK(status == 0);
    if (ending == BAD_READ || ending == BAD_WRITE) {
        CHECK(status == -error.error && error.role == UPDATE_STATE_0);
        CHECK(error.op == (ending == BAD_READ ? AIO_READ : AIO_WRITE));
    }
    atomic_fetch_add(status == 0 ? &updated : status == -ECANCELED ? &cancelled : &failed, 1);
    if (status == 0) {
        check_written(submitter);
        check_checksums(job);
    }
}

static void *run_jobs(void *arg)
{
    uint32_t submitter = (uint32_t)(uintptr_t)arg;
    for (uint32_t round = 0; round < (uint32_t)rounds; round++) {
        enum ending ending = (round + submitter) % NUM_ENDINGS;
        update_job *job = submit(submitter, round, ending);
        struct release release = {job, submitter, round % 2};
        pthread_t releaser;
        pthread_create(&releaser, NULL, release_units, &release);
        CHECK(update_wait(job, 0, 1000) <= 0); /* sometimes late, sometimes not: both must be sound */
        end_job(job, submitter, ending);
        pthread_join(releaser, NULL);
        update_job_free(job);
        forget_memory(submitter);
    }
    return NULL;
}

/* The pipeline is closed with a job alive, whose memory is freed afterwards. */
static void close_with_a_job_alive(void)
{
    update_job *job = submit(0, 1, WAIT);
    update_close(pipeline);
    int status = update_wait(job, UPDATE_ALL, -1);
    CHECK(status == -ECANCELED);
    update_job_free(job);
}

int main(int argc, char **argv)
{
    if (argc != 4)
        return 2;
    rounds = atoi(argv[2]);
    aio_config config = {.backend = atoi(argv[3]), .block_bytes = 4096, .read_depth = 4, .write_depth = 4, .num_drives = 1};
    aio_queue *queue;
    void *slots;
    file = (aio_file){.direct_fd = -1, .alignment = 4096};
    file.buffered_fd = open(argv[1], O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    fill_file();
    int rc = aio_queue_open(&config, &queue);
    if (rc) {
        fprintf(stderr, "no queue: %s\n", strerror(-rc));
        return 3;
    }
    CHECK(posix_memalign(&slots, 4096, NUM_SLOTS * CHUNK_BYTES) == 0);
    update_config update = {.num_slots = NUM_SLOTS, .slot_bytes = CHUNK_BYTES,
                            .num_threads = 2, .num_preread = 3, .num_writing = 1};
    CHECK(update_open(queue, slots, &update, &pipeline) == 0);
    pthread_t threads[NUM_SUBMITTERS];
    for (uintptr_t i = 0; i < NUM_SUBMITTERS; i++)
        pthread_create(&threads[i], NULL, run_jobs, (void *)i);
    for (int i = 0; i < NUM_SUBMITTERS; i++)
        pthread_join(threads[i], NULL);
    close_with_a_job_alive();
    aio_queue_close(queue);
    free(slots);
    printf("updated %d cancelled %d failed %d\n", updated, cancelled, failed);
    return failures ? 1 : 0;
}
