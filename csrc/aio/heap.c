/* A binary heap of transfers: earliest deadline first, then first in first out.  Each ticket knows its place, so that
 * cancelling needs no search. */
#include <errno.h>
#include <stdlib.h>

#include "queue.h"

static bool before(const aio_ticket *a, const aio_ticket *b)
{
    if (a->request.deadline != b->request.deadline)
        return a->request.deadline < b->request.deadline;
    return a->sequence < b->sequence;
}

static void place(aio_heap *heap, uint32_t position, aio_ticket *ticket)
{
    heap->items[position] = ticket;
    ticket->position = position;
}

static void sift_up(aio_heap *heap, uint32_t position, aio_ticket *ticket)
{
    while (position > 0) {
        uint32_t parent = (position - 1) / 2;
        if (!before(ticket, heap->items[parent]))
            break;
        place(heap, position, heap->items[parent]);
        position = parent;
    }
    place(heap, position, ticket);
}

static void sift_down(aio_heap *heap, uint32_t position, aio_ticket *ticket)
{
    for (;;) {
        uint32_t child = 2 * position + 1;
        if (child >= heap->count)
            break;
        if (child + 1 < heap->count && before(heap->items[child + 1], heap->items[child]))
            child++;
        if (!before(heap->items[child], ticket))
            break;
        place(heap, position, heap->items[child]);
        position = child;
    }
    place(heap, position, ticket);
}

/* Room for `more` pushes, which then cannot fail. */
int aio_heap_reserve(aio_heap *heap, uint32_t more)
{
    if (more > UINT32_MAX / 2 - heap->count)
        return -ENOMEM;
    uint32_t need = heap->count + more, room = heap->room ? heap->room : 64;
    while (room < need)
        room *= 2;
    if (room == heap->room)
        return 0;
    aio_ticket **items = realloc(heap->items, room * sizeof *items);
    if (!items)
        return -ENOMEM;
    heap->items = items;
    heap->room = room;
    return 0;
}

void aio_heap_push(aio_heap *heap, aio_ticket *ticket)
{
    sift_up(heap, heap->count++, ticket);
}

void aio_heap_remove(aio_heap *heap, aio_ticket *ticket)
{
    uint32_t hole = ticket->position;
    aio_ticket *last = heap->items[--heap->count];
    ticket->position = AIO_NOT_WAITING;
    if (last == ticket)
        return;
    if (hole > 0 && before(last, heap->items[(hole - 1) / 2]))
        sift_up(heap, hole, last);
    else
        sift_down(heap, hole, last);
}
