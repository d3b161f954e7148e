/* Part of template.h: any algorithm over any formats, in blocks that stay in the first-level cache.
 *
 *   streams --decode--> w, g, state[] (fp32) --formula--> w, state[] --encode--> streams
 *
 * An algorithm is a function over these arrays, and a row of `formulas`; a format is a branch of decode and encode.  A
 * block is the part of a tensor between two multiples of 256 elements, so its bits do not depend on how tensors are cut.
 */
struct block {
    float w[SIMD_BLOCK], g[SIMD_BLOCK], state[SIMD_STATES][SIMD_BLOCK];
    uint32_t random[SIMD_STATES][SIMD_BLOCK];
} __attribute__((aligned(64)));

TARGET static void adam_block(struct block *at, size_t n, const simd_row *row) {
    const struct adam_factors k = adam_factors(row);
    for (size_t i = 0; i < n; i += W) {
        vf m = vf_load(at->state[0] + i), v = vf_load(at->state[1] + i);
        vf_store(at->w + i, adam_formula(vf_load(at->w + i), vf_load(at->g + i), &m, &v, &k));
        vf_store(at->state[0] + i, m);
        vf_store(at->state[1] + i, v);
    }
}

#include "template_sgd.h"

#include "template_adagrad.h"
#include "template_lion.h"

/* By enum simd_algorithm. */
static void (*const formulas[])(struct block *at, size_t n, const simd_row *row) = {
    [SIMD_ADAM] = adam_block, [SIMD_SGD] = sgd_block,         [SIMD_MOMENTUM] = momentum_block,
    [SIMD_LION] = lion_block, [SIMD_ADAGRAD] = adagrad_block,
};

TARGET static void load_block(struct block *block, const simd_streams *at, size_t n) {
    if (at->hi)
        for (size_t i = 0; i < n; i += W)
            vf_store(block->w + i, load_split(at->hi + i, at->lo + i));
    else
        memcpy(block->w, at->master, 4 * n);
    if (at->grad_format == SIMD_BF16)
        convert_loop(at->grad, SIMD_BF16, block->g, SIMD_F32, n);
    else if (at->grad_format == SIMD_F16)
        convert_loop(at->grad, SIMD_F16, block->g, SIMD_F32, n);
    else
        memcpy(block->g, at->grad, 4 * n);
    for (int i = 0; i < SIMD_STATES; i++)
        if (at->state[i])
            decode_state(at->state[i], at->state_format[i], at->scale[i], block->state[i], n);
}

TARGET static int store_block(const struct block *block, const simd_streams *at, size_t n) {
    int status = SIMD_OK;
    if (at->hi)
        for (size_t i = 0; i < n; i += W)
            store_split(at->hi + i, at->lo + i, vf_load(block->w + i));
    else
        memcpy(at->master, block->w, 4 * n);
    if (!at->hi && at->weight_format == SIMD_BF16)
        convert_loop(block->w, SIMD_F32, at->weight, SIMD_BF16, n);
    else if (!at->hi && at->weight_format == SIMD_F16)
        convert_loop(block->w, SIMD_F32, at->weight, SIMD_F16, n);
    for (int i = 0; i < SIMD_STATES; i++)
        if (at->state[i])
            status |= encode_state(block->state[i], at->state[i], at->state_format[i], at->scale[i], block->random[i], n);
    return status;
}

/* As adam_settle_nan: every NaN becomes the same.  The states of a master that is NaN become NaN too. */
static __attribute__((noinline)) void settle_block(struct block *block, const simd_streams *at, size_t n) {
    for (size_t i = 0; i < n; i++)
        if (settle(block->w + i))
            for (int j = 0; j < SIMD_STATES; j++)
                if (at->state[j])
                    memcpy(block->state[j] + i, &(uint32_t){SIMD_F32_NAN}, 4);
}

TARGET static int check_block(struct block *block, const simd_streams *at, size_t n) {
    const uint32_t limit = master_limit((simd_adam_shape){at->hi != NULL, at->weight_format, 0});
    if (__builtin_expect(largest_bits(block->w, n) < limit, 1))
        return SIMD_OK;
    settle_block(block, at, n);
    return SIMD_NONFINITE;
}

/* n: a multiple of SIMD_TURN. */
TARGET static int update_block(const simd_streams *at, size_t n, const simd_row *row) {
    struct block block;
    load_block(&block, at, n);
    const uint64_t start[] = {simd_seed(at->key, at->first / SIMD_BLOCK), row->step, at->first % SIMD_BLOCK};
    for (int i = 0; i < SIMD_STATES; i++)
        if (at->state[i] && at->state_format[i] != SIMD_F32)
            fill_random(block.random[i], i, simd_random_bits(at->state_format[i]), start, n);
    formulas[row->algorithm](&block, n, row);
    const int status = check_block(&block, at, n);
    return status | store_block(&block, at, n);
}

static void pad_stream(void *to, const void *from, size_t n, size_t padded, size_t elem_bytes) {
    memcpy(to, from, n * elem_bytes);
    for (size_t i = n; i < padded; i++)
        memcpy((char *)to + i * elem_bytes, (const char *)from + (n - 1) * elem_bytes, elem_bytes);
}

/* Any n, on padded copies. */
TARGET static int update_short_block(const simd_streams *at, size_t n, const simd_row *row) {
    uint16_t hi[SIMD_BLOCK], weight[SIMD_BLOCK];
    int16_t lo[SIMD_BLOCK];
    float master[SIMD_BLOCK], grad[SIMD_BLOCK], state[SIMD_STATES][SIMD_BLOCK];
    const size_t padded = (n + SIMD_TURN - 1) / SIMD_TURN * SIMD_TURN;
    simd_streams copy = *at;
    copy.grad = grad;
    pad_stream(grad, at->grad, n, padded, simd_format_bytes(at->grad_format));
    if (at->hi) {
        pad_stream(hi, at->hi, n, padded, 2);
        pad_stream(lo, at->lo, n, padded, 2);
        copy.hi = hi;
        copy.lo = lo;
    } else {
        pad_stream(master, at->master, n, padded, 4);
        copy.master = master;
        copy.weight = weight;
    }
    for (int i = 0; i < SIMD_STATES; i++)
        if (at->state[i]) {
            pad_stream(state[i], at->state[i], n, padded, simd_format_bytes(at->state_format[i]));
            copy.state[i] = state[i];
        }
    const int status = update_block(&copy, padded, row);
    if (at->hi) {
        memcpy(at->hi, hi, 2 * n);
        memcpy(at->lo, lo, 2 * n);
    } else {
        memcpy(at->master, master, 4 * n);
        if (at->weight_format != SIMD_F32)
            memcpy(at->weight, weight, 2 * n);
    }
    for (int i = 0; i < SIMD_STATES; i++)
        if (at->state[i])
            memcpy(at->state[i], state[i], simd_format_bytes(at->state_format[i]) * n);
    return status;
}

static int update_any_block(const simd_streams *at, size_t n, const simd_row *row) {
    return n % SIMD_TURN ? update_short_block(at, n, row) : update_block(at, n, row);
}

TARGET static int update_blocks(simd_streams at, size_t n, const simd_row *row) {
    int status = SIMD_OK;
    while (n) {
        const size_t space = SIMD_BLOCK - at.first % SIMD_BLOCK, piece = n < space ? n : space;
        status |= update_any_block(&at, piece, row);
        at = simd_streams_from(at, piece);
        n -= piece;
    }
    return status;
}

/* ---- Adam on its own, where the streams are the usual ones ---- */

/* The same after an update in registers, where some |w| is at or near the limit.  Returns the bits of the largest. */
static __attribute__((noinline)) uint32_t settle_streams(const simd_streams *at, size_t n) {
    uint32_t largest = 0;
    for (size_t i = 0; i < n; i++) {
        uint32_t w = ((uint32_t)simd_load_u16(at->hi + i) << 16) + (uint32_t)(int16_t)simd_load_u16(at->lo + i);
        largest = (w & SIMD_F32_ABS) > largest ? w & SIMD_F32_ABS : largest;
        if (settle(&w)) {
            memcpy(at->hi + i, &(uint16_t){0x7fc0}, 2);
            memcpy(at->lo + i, &(int16_t){0}, 2);
            for (int j = 0; j < SIMD_STATES; j++)
                if (at->state_format[j] == SIMD_BF16)
                    memcpy((char *)at->state[j] + 2 * i, &(uint16_t){0x7fc0}, 2);
        }
    }
    return largest;
}

OP uint32_t checked_streams(const simd_streams *at, vh largest, size_t n) {
    return __builtin_expect(vh_any_ge(largest, SIMD_BF16_LIMIT >> 16), 0) ? settle_streams(at, n) : 0;
}

OP int adam_bf16_checked(const simd_streams *at, int grad_format, size_t n, const struct states_row *row) {
    const struct random random = random_of(simd_seed(at->key, at->first / SIMD_BLOCK), row->step);
    const vh largest = adam_bf16_block(at, grad_format, random, n, row);
    return checked_streams(at, largest, n) < SIMD_BF16_LIMIT ? SIMD_OK : SIMD_NONFINITE;
}

/* Between the passes: the scales of a block, and what to do if there is something that is not finite. */
OP int adam_8_between(struct open_block *open, uint32_t step) {
    const uint32_t largest = checked_streams(&open->at, open->largest.w, SIMD_BLOCK);
    int status = largest < SIMD_BF16_LIMIT ? SIMD_OK : SIMD_NONFINITE;
    for (int i = 0; i < SIMD_STATES; i++) {
        const uint32_t most = vi_most(open->largest.state[i]);
        const uint32_t bits = largest > SIMD_F32_INF ? SIMD_F32_NAN : most; /* eight bits have one NaN for a whole block */
        open->factors[i] = choose_scale(bits, i ? U8_SPAN : I8_SPAN, open->at.scale[i]);
        if (__builtin_expect(!open->factors[i], 0))
            memset(open->values[i], 0, sizeof open->values[i]);
        if (__builtin_expect(bits >= SIMD_F32_INF, 0))
            status = SIMD_NONFINITE;
    }
    open->random = random_of(simd_seed(open->at.key, open->at.first / SIMD_BLOCK), step);
    return status;
}

/* Blocks b, b - 1 and b - 2 at once: the first pass, what is between, and the second pass.  Neither pass fills the
 * processor on its own, and what is between is one chain of latencies.  middle, last: NULL at the start. */
OP int adam_8_step(int grad_format, struct open_block *open, struct open_block *middle, const struct open_block *last,
                   const struct states_row *row) {
    struct largest largest = {vh_set(0), {vi_set(0), vi_set(0)}};
    int status = SIMD_OK;
    for (size_t start = 0; start < SIMD_BLOCK / 2; start += SIMD_TURN)
        largest = adam_8_turn(open, last, grad_format, start, largest, row);
    if (middle)
        status = adam_8_between(middle, row->step);
    for (size_t start = SIMD_BLOCK / 2; start < SIMD_BLOCK; start += SIMD_TURN)
        largest = adam_8_turn(open, last, grad_format, start, largest, row);
    open->largest = largest;
    return status;
}

OP void adam_8_encode(const struct open_block *last, const struct states_row *row) {
    for (size_t start = 0; start < SIMD_BLOCK; start += SIMD_TURN) {
        adam_8_encode_means(last, start, row->turn_places);
        adam_8_encode_squares(last, start, row->turn_places);
    }
}

/* Whole blocks, at least two. */
OP int adam_8_blocks(simd_streams at, int grad_format, size_t n, const struct states_row *row) {
    struct open_block ring[3];
    struct open_block *open = ring, *middle = ring + 1, *last = ring + 2;
    int status = SIMD_OK;
    for (size_t i = 0; i < n; i += SIMD_BLOCK) {
        open->at = at;
        if (i == 0)
            status |= adam_8_step(grad_format, open, NULL, NULL, row);
        else if (i == SIMD_BLOCK)
            status |= adam_8_step(grad_format, open, middle, NULL, row);
        else
            status |= adam_8_step(grad_format, open, middle, last, row);
        struct open_block *free = last;
        last = middle;
        middle = open;
        open = free;
        at = simd_streams_from(at, SIMD_BLOCK);
    }
    adam_8_encode(last, row);
    status |= adam_8_between(middle, row->step);
    adam_8_encode(middle, row);
    return status;
}

OP int adam_states_loop(simd_streams at, int grad_format, int bits, size_t n, const simd_row *row) {
    const struct states_row made = states_row(row);
    int status = SIMD_OK;
    if (bits == 8) { /* starts at a block */
        const size_t whole = n < 2 * SIMD_BLOCK ? 0 : n / SIMD_BLOCK * SIMD_BLOCK;
        if (whole)
            status = adam_8_blocks(at, grad_format, whole, &made);
        return status | update_blocks(simd_streams_from(at, whole), n - whole, row);
    }
    while (n) {
        const size_t place = at.first % SIMD_BLOCK, space = SIMD_BLOCK - place, piece = n < space ? n : space;
        if (piece % SIMD_TURN || place % SIMD_TURN)
            status |= update_any_block(&at, piece, row);
        else
            status |= adam_bf16_checked(&at, grad_format, piece, &made);
        at = simd_streams_from(at, piece);
        n -= piece;
    }
    return status;
}

OP int adam_states_grad(simd_streams at, int bits, size_t n, const simd_row *row) {
    if (at.grad_format == SIMD_BF16)
        return adam_states_loop(at, SIMD_BF16, bits, n, row);
    if (at.grad_format == SIMD_F16)
        return adam_states_loop(at, SIMD_F16, bits, n, row);
    return adam_states_loop(at, SIMD_F32, bits, n, row);
}

TARGET static int adam_bf16(simd_streams at, size_t n, const simd_row *row) { return adam_states_grad(at, 16, n, row); }

TARGET static int adam_8(simd_streams at, size_t n, const simd_row *row) { return adam_states_grad(at, 8, n, row); }

TARGET static int update(simd_streams at, size_t n, const simd_row *row) {
    const int first = at.state_format[0], second = at.state_format[1];
    if (row->algorithm != SIMD_ADAM)
        return update_blocks(at, n, row);
    if (first == SIMD_F32 && second == SIMD_F32)
        return adam((simd_adam_streams){at.hi, at.lo, at.master, at.weight, at.state[0], at.state[1], at.grad},
                    (simd_adam_shape){at.hi != NULL, at.weight_format, at.grad_format}, n, row);
    if (at.hi && first == SIMD_BF16 && second == SIMD_BF16)
        return adam_bf16(at, n, row);
    if (at.hi && first == SIMD_I8 && second == SIMD_U8)
        return adam_8(at, n, row);
    return update_blocks(at, n, row);
}
