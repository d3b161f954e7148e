/* Checksums of what is being written: one for each store block of a role of a unit.
 *
 *   block      |--------------|--------------|--------|        1 MiB, the last one ends with the data
 *   chunk    |----------|----------|----------|-------|        end in any order
 *   piece      |--------|-----|----|---------|-|------|        each shifted to the end of its block, then exclusive or
 */
#include <errno.h>
#include <stdlib.h>

#include "../crc/crc.h"
#include "internal.h"

static uint32_t num_blocks(const struct unit *unit, uint32_t role)
{
    return (uint32_t)((unit->num_bytes[role] + UPDATE_CHECKSUM_BYTES - 1) / UPDATE_CHECKSUM_BYTES);
}

/* Roles of which every chunk that has them is written; what a job leaves as it is in part cannot be told from here. */
static void find_written(const update_job *job, uint8_t *written)
{
    for (uint32_t unit = 0; unit < job->num_units; unit++)
        written[unit] = (1u << UPDATE_GRAD) - 1;
    for (uint32_t i = 0; i < job->num_chunks; i++)
        for (uint32_t role = 0; role < UPDATE_GRAD; role++)
            if (!job->chunks[i].streams[role].write_file && job->chunks[i].streams[role].elem_bytes)
                written[job->chunks[i].unit] &= (uint8_t)~(1u << role);
}

bool update_init_sums(update_job *job)
{
    size_t count = 0;
    uint8_t *written = malloc(job->num_units + 1u);
    if (!written)
        return false;
    find_written(job, written);
    for (uint32_t unit = 0; unit < job->num_units; unit++)
        for (uint32_t role = 0; role < UPDATE_GRAD; role++)
            count += num_blocks(&job->units[unit], role);
    job->sums = calloc(count + 1, sizeof *job->sums);
    uint32_t *next = job->sums;
    for (uint32_t unit = 0; job->sums && unit < job->num_units; unit++)
        for (uint32_t role = 0; role < UPDATE_GRAD; role++)
            if (written[unit] & 1u << role) {
                job->units[unit].sums[role] = next;
                next += num_blocks(&job->units[unit], role);
            }
    free(written);
    return job->sums != NULL;
}

static void add_role(struct slot *slot, uint32_t role)
{
    const update_job *job = slot->job;
    const struct unit *unit = &job->units[slot_chunk(slot)->unit];
    const uint8_t *data = update_stream_memory(slot, role);
    uint64_t at = job->starts[slot->chunk][role], stop = at + update_data_bytes(slot_chunk(slot), role);
    uint64_t unit_stop = unit->num_bytes[role];
    while (at < stop) {
        uint64_t block = at / UPDATE_CHECKSUM_BYTES, block_stop = (block + 1) * UPDATE_CHECKSUM_BYTES;
        if (block_stop > unit_stop)
            block_stop = unit_stop;
        uint64_t piece_stop = block_stop < stop ? block_stop : stop;
        unit->sums[role][block] ^= crc_shift(crc_add(0, data, piece_stop - at), block_stop - piece_stop);
        data += piece_stop - at;
        at = piece_stop;
    }
}

void update_add_sums(struct slot *slot)
{
    for (uint32_t role = 0; role < UPDATE_GRAD; role++)
        if (slot->job->units[slot_chunk(slot)->unit].sums[role])
            add_role(slot, role);
}

int update_job_checksums(const update_job *job, uint32_t unit, uint32_t role, uint64_t *out, uint32_t capacity)
{
    if (unit >= job->num_units || role >= UPDATE_NUM_ROLES)
        return -EINVAL;
    if (!job->sums)
        return -ENODATA;
    pthread_mutex_lock(&job->pipeline->lock);
    bool ended = job->units[unit].remaining == 0;
    pthread_mutex_unlock(&job->pipeline->lock);
    if (!ended)
        return -EAGAIN;
    const uint32_t *sums = role < UPDATE_GRAD ? job->units[unit].sums[role] : NULL;
    uint32_t count = sums ? num_blocks(&job->units[unit], role) : 0;
    for (uint32_t i = 0; i < count && i < capacity; i++)
        out[i] = sums[i];
    return (int)count;
}
