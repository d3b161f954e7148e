/* Statistics.  Counting costs nothing worth a switch; clocks are read only where `keep_stats` asks for it. */
#include "queue.h"

#define BUCKETS (int)(sizeof((aio_stats *)0)->latency[0] / sizeof(uint64_t))

/* The depth is about to change: add the time that it lasted. */
void aio_stats_depth(aio_queue *queue)
{
    if (!queue->config.keep_stats)
        return;
    uint64_t now = aio_now_ns(), lasted = now - queue->stats_ns;
    uint32_t depth[2] = {0};
    for (uint32_t lane = 0; lane < aio_num_lanes(queue); lane++)
        depth[lane % 2] += queue->in_flight[lane];
    for (int op = AIO_READ; op <= AIO_WRITE; op++) {
        queue->stats.busy_ns[op] += depth[op] ? lasted : 0;
        queue->stats.depth_ns[op] += lasted * depth[op];
    }
    queue->stats_ns = now;
}

void aio_stats_block(aio_queue *queue, const aio_block *block)
{
    queue->stats.blocks[block->op]++;
    if (!queue->config.keep_stats)
        return;
    uint64_t us = (aio_now_ns() - block->started_ns) / 1000;
    int bucket = us ? 63 - __builtin_clzll(us) : 0;
    queue->stats.latency[block->op][bucket < BUCKETS ? bucket : BUCKETS - 1]++;
}

void aio_queue_stats(aio_queue *queue, aio_stats *out)
{
    pthread_mutex_lock(&queue->lock);
    aio_stats_depth(queue);
    *out = queue->stats;
    pthread_mutex_unlock(&queue->lock);
}
