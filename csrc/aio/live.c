/* All open queues of this process: a file that is closed must leave the tables of every queue that registered it, or the
 * kernel would keep it, and the next file of the same number would be taken for it. */
#include <errno.h>

#include "queue.h"

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* guards the list; taken before any queue's lock */
static aio_queue *first;
static pthread_once_t once = PTHREAD_ONCE_INIT;

/* A child has none of the threads, and may have copied the lock while it was held. */
static void start_anew(void)
{
    pthread_mutex_init(&lock, NULL);
    first = NULL;
}

static void watch_forks(void)
{
    pthread_atfork(NULL, NULL, start_anew);
}

void aio_queue_enlist(aio_queue *queue)
{
    pthread_once(&once, watch_forks);
    pthread_mutex_lock(&lock);
    queue->next_live = first;
    first = queue;
    pthread_mutex_unlock(&lock);
}

/* When this returns, nobody gives the queue another chore. */
void aio_queue_delist(aio_queue *queue)
{
    pthread_mutex_lock(&lock);
    for (aio_queue **at = &first; *at; at = &(*at)->next_live)
        if (*at == queue) {
            *at = queue->next_live;
            break;
        }
    pthread_mutex_unlock(&lock);
}

void aio_queues_forget_files(const int fds[2])
{
    pthread_mutex_lock(&lock);
    for (aio_queue *queue = first; queue; queue = queue->next_live)
        if (queue->backend->forget_files) {
            aio_chore chore = {.fds = {fds[0], fds[1]}};
            aio_queue_do(queue, &chore);
        }
    pthread_mutex_unlock(&lock);
}
