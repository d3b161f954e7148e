/* Waiting chunks, earliest deadline first, then in order of submission. */
#include <errno.h>
#include <stdlib.h>

#include "internal.h"

bool update_more_urgent(const struct waiting *a, const struct waiting *b)
{
    return a->deadline != b->deadline ? a->deadline < b->deadline : a->sequence < b->sequence;
}

int update_heap_reserve(struct heap *heap, size_t more)
{
    size_t capacity = heap->size + more;
    if (capacity <= heap->capacity)
        return 0;
    if (capacity < 2 * heap->capacity)
        capacity = 2 * heap->capacity;
    struct waiting *items = realloc(heap->items, capacity * sizeof *items);
    if (!items)
        return -ENOMEM;
    heap->items = items;
    heap->capacity = capacity;
    return 0;
}

static void sift_up(struct heap *heap, size_t at)
{
    struct waiting item = heap->items[at];
    while (at > 0 && update_more_urgent(&item, &heap->items[(at - 1) / 2])) {
        heap->items[at] = heap->items[(at - 1) / 2];
        at = (at - 1) / 2;
    }
    heap->items[at] = item;
}

static void sift_down(struct heap *heap, size_t at)
{
    struct waiting item = heap->items[at];
    for (;;) {
        size_t child = 2 * at + 1;
        if (child >= heap->size)
            break;
        if (child + 1 < heap->size && update_more_urgent(&heap->items[child + 1], &heap->items[child]))
            child++;
        if (!update_more_urgent(&heap->items[child], &item))
            break;
        heap->items[at] = heap->items[child];
        at = child;
    }
    heap->items[at] = item;
}

void update_heap_push(struct heap *heap, struct waiting item)
{
    heap->items[heap->size++] = item;
    sift_up(heap, heap->size - 1);
}

struct waiting update_heap_pop(struct heap *heap)
{
    struct waiting first = heap->items[0];
    heap->items[0] = heap->items[--heap->size];
    if (heap->size > 0)
        sift_down(heap, 0);
    return first;
}

void update_heap_move(struct heap *heap, const update_job *job, uint32_t unit, struct heap *into)
{
    size_t kept = 0;
    for (size_t i = 0; i < heap->size; i++) {
        struct waiting item = heap->items[i];
        bool taken = item.job == job && (unit == UPDATE_ALL || job->chunks[item.chunk].unit == unit);
        if (!taken)
            heap->items[kept++] = item;
        else if (into)
            update_heap_push(into, item);
    }
    if (kept == heap->size)
        return;
    heap->size = kept;
    for (size_t i = kept / 2; i-- > 0;)
        sift_down(heap, i);
}
