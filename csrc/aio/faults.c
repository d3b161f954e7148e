#include "backend.h"
#include <errno.h>
static int faults_open(uint32_t max_blocks, uint32_t num_threads, void **state)
{
    (void)max_blocks, (void)num_threads, (void)state;
    return -ENOSYS;
}
const aio_backend aio_faults = {.id = AIO_FAULTS, .open = faults_open};
