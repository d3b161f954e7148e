/* Threads that submit, wait, cancel and drop, and a chain of callbacks that submit: run under the sanitizers.
 * stress BACKEND FILE; exit status 0: all bytes were right and every ticket ended. */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../../csrc/aio/aio.h"

#define SPAN (64u * 1024)
#define NUM_THREADS 4
#define NUM_TURNS 60
#define NUM_LINKS 200

#define CHECK(condition) ((condition) ? (void)0 : abort())

static aio_queue *queue;
static aio_file file = {-1, -1, 512, 0, 0};

typedef struct chain {
    _Atomic int left;
    unsigned char *buf;
} chain;

static void next_link(void *arg, int error, uint64_t bytes_done)
{
    chain *c = arg;
    CHECK(!error && bytes_done == SPAN);
    if (atomic_fetch_sub(&c->left, 1) > 1) {
        aio_request request = {AIO_READ, &file, c->buf, 0, SPAN, 3, next_link, c};
        CHECK(!aio_submit(queue, &request, 1, NULL));
    }
}

static void one_turn(unsigned char *out, unsigned char *in, uint64_t base, unsigned *seed)
{
    unsigned start = (unsigned)rand_r(seed) % SPAN, size = 1 + (unsigned)rand_r(seed) % (SPAN - start);
    aio_ticket *tickets[3];
    aio_result result;
    memset(out + start, rand_r(seed), size);
    aio_request write = {AIO_WRITE, &file, out + start, base + start, size, (uint64_t)rand_r(seed) % 5, NULL, NULL};
    CHECK(!aio_submit(queue, &write, 1, tickets));
    CHECK(!aio_wait(tickets[0], -1, &result) && !result.error && result.bytes_done == size);
    aio_release(tickets[0]);
    aio_request reads[3];
    for (int i = 0; i < 3; i++)
        reads[i] = (aio_request){AIO_READ, &file, in + i * SPAN, base, SPAN, (uint64_t)i, NULL, NULL};
    CHECK(!aio_submit(queue, reads, 3, tickets));
    aio_cancel(tickets[2]);
    for (int i = 0; i < 3; i++) {
        CHECK(!aio_wait(tickets[i], -1, &result));
        CHECK(result.error == 0 || (i == 2 && result.error == ECANCELED));
        if (!result.error)
            CHECK(!memcmp(in + i * SPAN, out, SPAN));
        aio_release(tickets[i]);
    }
}

static void *work(void *arg)
{
    unsigned number = (unsigned)(uintptr_t)arg, seed = number;
    unsigned char *memory;
    CHECK(!posix_memalign((void **)&memory, 4096, 4 * SPAN));
    memset(memory, 0, 4 * SPAN);
    for (int turn = 0; turn < NUM_TURNS; turn++)
        one_turn(memory, memory + SPAN, (uint64_t)number * SPAN, &seed);
    free(memory);
    return NULL;
}

int main(int count, char **args)
{
    CHECK(count == 3);
    aio_config config = {atoi(args[1]), 4096, 3, 3, 0, 1, 1};
    CHECK(!aio_queue_open(&config, &queue));
    file.buffered_fd = open(args[2], O_RDWR | O_CREAT | O_TRUNC, 0600);
    file.direct_fd = open(args[2], O_RDWR | O_DIRECT);
    CHECK(file.buffered_fd >= 0 && !posix_fallocate(file.buffered_fd, 0, (NUM_THREADS + 1) * SPAN));

    pthread_t threads[NUM_THREADS];
    chain links = {NUM_LINKS, aligned_alloc(4096, SPAN)};
    atomic_fetch_add(&links.left, 1);
    next_link(&links, 0, SPAN);
    for (uintptr_t i = 0; i < NUM_THREADS; i++)
        CHECK(!pthread_create(&threads[i], NULL, work, (void *)(i + 1)));
    for (int i = 0; i < NUM_THREADS; i++)
        pthread_join(threads[i], NULL);

    aio_ticket *last[2]; /* closed in flight, released afterwards; one is not waited for */
    aio_request rest[2] = {{AIO_READ, &file, links.buf, 0, SPAN, 9, NULL, NULL}, {AIO_WRITE, &file, links.buf, 0, SPAN, 9, NULL, NULL}};
    while (atomic_load(&links.left) > 0)
        usleep(100);
    CHECK(!aio_submit(queue, rest, 2, last));
    aio_queue_close(queue);
    aio_result result;
    CHECK(!aio_wait(last[0], 0, &result) && (!result.error || result.error == ECANCELED));
    aio_release(last[0]);
    aio_release(last[1]);
    aio_file_close(&file);
    free(links.buf);
    return 0;
}
