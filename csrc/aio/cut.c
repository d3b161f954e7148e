/* How a transfer is cut into blocks.
 *
 *   offset            page                                  page      end        page = max(alignment, 4096)
 *   |---- buffered ----|==== direct, block_bytes each ====|--- buffered ---|
 *
 * Direct and buffered pieces never share a page of the page cache, so the kernel's own write-back and invalidation
 * keep the two descriptors coherent.  A buffer that is not aligned as its offset goes through `buffered_fd` as a whole.
 */
#include "queue.h"

#define PAGE 4096u

static uint64_t min(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

static int descriptor(const int *fd)
{
    return __atomic_load_n(fd, __ATOMIC_SEQ_CST); /* aio_file_close() sets -1 from another thread */
}

/* Describe the next block of the transfer in `block`; its bytes are > 0. */
void aio_cut(const aio_ticket *ticket, uint32_t block_bytes, aio_block *block)
{
    const aio_request *request = &ticket->request;
    const aio_file *file = request->file;
    uint64_t page = file->alignment > PAGE ? file->alignment : PAGE;
    uint64_t offset = request->offset + ticket->next, left = request->bytes - ticket->next;
    uint64_t head = (page - offset % page) % page, body = left > head ? left - head : 0;
    char *buf = (char *)request->buf + ticket->next;
    int direct = descriptor(&file->direct_fd);

    body -= body % page;
    block_bytes = block_bytes > page ? block_bytes - block_bytes % page : page;
    if (direct < 0 || ((uintptr_t)buf + head) % file->alignment) {
        direct = -1;
        left = min(left, block_bytes);
    } else if (head || !body) {
        direct = -1;
        left = min(left, head ? head : page);
    } else {
        left = min(body, block_bytes);
    }
    block->buf = buf;
    block->offset = offset;
    block->bytes = (uint32_t)left;
    block->op = request->op;
    block->fd = direct >= 0 ? direct : descriptor(&file->buffered_fd);
}

/* Step over `bytes` that are done; false: nothing is left.  What O_DIRECT would refuse goes on buffered. */
bool aio_advance(const aio_ticket *ticket, aio_block *block, uint32_t bytes)
{
    const aio_file *file = ticket->request.file;
    block->buf += bytes;
    block->offset += bytes;
    block->bytes -= bytes;
    if (((uintptr_t)block->buf | block->offset | block->bytes) % file->alignment)
        block->fd = descriptor(&file->buffered_fd);
    return block->bytes > 0;
}
