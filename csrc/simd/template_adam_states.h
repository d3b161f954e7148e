/* Part of template.h: Adam over a split master and states in bf16 or eight bits, in registers.  The same bits as the blocks
 * of template_block.h, which spend half of their time on the way to the cache and back.
 *
 * Vectors come in pairs of 2 W elements, in the order into which 16-bit streams fall apart most cheaply (vh_low, vh_high);
 * it is undone when they are packed.  Eight bits take two passes over a block, for the scale follows from the largest. */
struct states_row {
    struct adam_factors k;
    vi turn_places[SIMD_BLOCK / W]; /* random_place of a block's elements, in the order of pairs */
    uint32_t step;
};

OP struct states_row states_row(const simd_row *row) {
    struct states_row made = {.k = adam_factors(row), .step = row->step};
    for (size_t i = 0; i < SIMD_BLOCK; i += 2 * W) {
        vf pair[2] = {vf_from_bits(random_place((uint32_t)i)), vf_from_bits(random_place((uint32_t)(i + W)))};
        pair_order(pair);
        made.turn_places[i / W] = vf_bits(pair[0]);
        made.turn_places[i / W + 1] = vf_bits(pair[1]);
    }
    return made;
}

/* Elements i to i + 2 W of a stream. */
OP void load_pair(const void *src, int format, size_t i, vf *pair) {
    if (format == SIMD_BF16) {
        const vh x = vh_load((const char *)src + 2 * i);
        pair[0] = vf_from_bits(vh_low(vh_set(0), x));
        pair[1] = vf_from_bits(vh_high(vh_set(0), x));
        return;
    }
    pair[0] = load_as_f32(src, format, i);
    pair[1] = load_as_f32(src, format, i + W);
    pair_order(pair);
}

/* The master of a turn: `hi` as the master's bits have it, not rounded. */
struct split_turn {
    vh hi[NUM_PAIRS], lo[NUM_PAIRS];
};

OP struct split_turn load_split_turn(const simd_streams *at, size_t start) {
    struct split_turn turn;
    EACH_PAIR(j) {
        const size_t i = start + 2 * j * W;
        turn.lo[j] = vh_load(at->lo + i);
        turn.hi[j] = vh_add(vh_load(at->hi + i), vh_sra15(turn.lo[j])); /* lo has a sign */
    }
    return turn;
}

/* Pack pair j; w: all of the turn.  Returns the larger of `largest` and the high halves of |w|, cut off. */
OP vh pack_master(struct split_turn *turn, size_t j, const vf *w, vh largest) {
    turn->lo[j] = vh_pack_low(vf_bits(w[2 * j]), vf_bits(w[2 * j + 1]));
    turn->hi[j] = vh_pack_high(vf_bits(w[2 * j]), vf_bits(w[2 * j + 1]));
    return vh_max(largest, vh_and(turn->hi[j], vh_set(0x7fff)));
}

OP void store_split_turn(const simd_streams *at, size_t start, const struct split_turn *turn) {
    EACH_PAIR(j) {
        const size_t i = start + 2 * j * W;
        vh_store(at->hi + i, vh_sub(turn->hi[j], vh_sra15(turn->lo[j])));
        vh_store(at->lo + i, turn->lo[j]);
    }
}

OP void adam_states_prefetch(const simd_streams *at, int grad_format, size_t state_bytes, size_t i) {
    prefetch(at->hi + i, 2);
    prefetch(at->lo + i, 2);
    prefetch((const char *)at->state[0] + state_bytes * i, state_bytes);
    prefetch((const char *)at->state[1] + state_bytes * i, state_bytes);
    prefetch((const char *)at->grad + simd_format_bytes(grad_format) * i, simd_format_bytes(grad_format));
}

/* Returns the largest as pack_master.  Where a master becomes NaN the states are anything: see settle_streams. */
OP vh adam_bf16_block(const simd_streams *at, int grad_format, struct random random, size_t n,
                      const struct states_row *row) {
    const vi *places = row->turn_places + at->first % SIMD_BLOCK / W;
    char *means = at->state[0], *squares = at->state[1];
    vh largest = vh_set(0);
    for (size_t start = 0; start < n; start += SIMD_TURN) {
        struct split_turn turn = load_split_turn(at, start);
        vf w[NUM_VECS], g[NUM_VECS], m[NUM_VECS], v[NUM_VECS];
        adam_states_prefetch(at, grad_format, 2, start);
        EACH_PAIR(j) load_pair(at->grad, grad_format, start + 2 * j * W, g + 2 * j);
        EACH_PAIR(j) load_pair(means, SIMD_BF16, start + 2 * j * W, m + 2 * j);
        EACH_PAIR(j) load_pair(squares, SIMD_BF16, start + 2 * j * W, v + 2 * j);
        EACH_PAIR(j) {
            vi mean[2], square[2];
            const vf old[] = {vf_from_bits(vh_low(turn.lo[j], turn.hi[j])), vf_from_bits(vh_high(turn.lo[j], turn.hi[j]))};
            EACH_HALF(half) {
                const size_t i = 2 * j + half;
                const vi number = random_number(&random, places[start / W + i]);
                w[i] = adam_formula(old[half], g[i], m + i, v + i, &row->k);
                mean[half] = vi_add(vf_bits(m[i]), random_low(number, 16));
                square[half] = vi_add(vf_bits(v[i]), random_high(number, 16));
            }
            largest = pack_master(&turn, j, w, largest);
            vh_store(means + 2 * start + 4 * j * W, vh_pack_high(mean[0], mean[1]));
            vh_store(squares + 2 * start + 4 * j * W, vh_pack_high(square[0], square[1]));
        }
        store_split_turn(at, start, &turn);
    }
    return largest;
}

/* ---- eight bits ---- */

OP vf decode_i8_line(vi line, vf scale, vf minus_two, vf two) {
    return vf_fma(vf_from_bits(line), scale, vf_signed(vf_from_bits(line), minus_two, two));
}

OP void decode_i8_pair(const void *src, vf scale, vf *pair) {
    const vh code = vh_load_s8(src), minus = vh_and(code, vh_set(0x8000));
    const vh line = vh_or(vh_or(vh_shl4(vh_abs(code)), vh_set(TWO_BITS >> 16)), minus);
    const vf minus_two = vf_mul(scale, vf_set(-2)), two = vf_mul(scale, vf_set(2));
    pair[0] = decode_i8_line(vh_low(vh_set(0), line), scale, minus_two, two);
    pair[1] = decode_i8_line(vh_high(vh_set(0), line), scale, minus_two, two);
}

OP void decode_u8_pair(const void *src, vf scale, vf *pair) {
    const vh line = vh_or(vh_shl4(vh_load_u8(src)), vh_set(TWO_BITS >> 16));
    const vf minus_two = vf_mul(scale, vf_set(-2));
    pair[0] = vf_fma(vf_from_bits(vh_low(vh_set(0), line)), scale, minus_two);
    pair[1] = vf_fma(vf_from_bits(vh_high(vh_set(0), line)), scale, minus_two);
}

struct largest {
    vh w; /* high halves, cut off */
    vi state[SIMD_STATES];
};

/* A block on its way: decoded and updated in the first pass, encoded in the second. */
struct open_block {
    float values[SIMD_STATES][SIMD_BLOCK] __attribute__((aligned(64))); /* the updated states, in the order of pairs */
    simd_streams at;
    struct largest largest;
    float factors[SIMD_STATES]; /* from here on: known between the passes */
    struct random random;
};

/* What a turn holds in registers. */
struct turn {
    struct split_turn master;
    vf w[NUM_VECS], g[NUM_VECS], m[NUM_VECS], v[NUM_VECS], q[NUM_VECS];
};

OP void adam_8_decode(const simd_streams *at, int grad_format, size_t start, struct turn *turn) {
    const vf mean_scale = vf_set(simd_load_f32(at->scale[0])), square_scale = vf_set(simd_load_f32(at->scale[1]));
    turn->master = load_split_turn(at, start);
    EACH_PAIR(j) {
        const size_t i = start + 2 * j * W;
        load_pair(at->grad, grad_format, i, turn->g + 2 * j);
        decode_i8_pair((const char *)at->state[0] + i, mean_scale, turn->m + 2 * j);
        decode_u8_pair((const char *)at->state[1] + i, square_scale, turn->v + 2 * j);
        turn->w[2 * j] = vf_from_bits(vh_low(turn->master.lo[j], turn->master.hi[j]));
        turn->w[2 * j + 1] = vf_from_bits(vh_high(turn->master.lo[j], turn->master.hi[j]));
    }
}

/* The second pass over a turn, in two halves. */
OP void adam_8_encode_means(const struct open_block *from, size_t start, const vi *places) {
    const vf factor = vf_set(from->factors[0]);
    vh code[NUM_PAIRS];
    EACH_PAIR(j) {
        vi line[2];
        EACH_HALF(half) {
            const size_t i = start + (2 * j + half) * W;
            const vi number = random_number(&from->random, places[i / W]);
            line[half] = rounded_i8_line(vf_load(from->values[0] + i), factor, random_low(number, 20));
        }
        const vh signed_line = vh_pack_high(line[0], line[1]);
        code[j] = vh_sign(vh_and(vh_shr4(signed_line), vh_set(0x7f)), signed_line);
    }
    turn_store_s8((char *)from->at.state[0] + start, code);
}

OP void adam_8_encode_squares(const struct open_block *from, size_t start, const vi *places) {
    const vf factor = vf_set(from->factors[1]);
    vh code[NUM_PAIRS];
    EACH_PAIR(j) {
        vi line[2];
        EACH_HALF(half) {
            const size_t i = start + (2 * j + half) * W;
            const vi number = random_number(&from->random, places[i / W]);
            line[half] = rounded_u8_line(vf_load(from->values[1] + i), factor, random_high(number, 20));
        }
        code[j] = vh_max(vh_and(vh_shr4(vh_pack_high(line[0], line[1])), vh_set(0xff)), vh_set(1));
    }
    turn_store_u8((char *)from->at.state[1] + start, code);
}

/* The first pass over a turn of `open`, and the second one over the same turn of `last`, if there is one.  The second pass
 * stands where the first one waits for square roots and for quotients: the processor alone does not look ahead that far. */
OP struct largest adam_8_turn(struct open_block *open, const struct open_block *last, int grad_format, size_t start,
                              struct largest largest, const struct states_row *row) {
    struct turn turn;
    adam_states_prefetch(&open->at, grad_format, 1, start);
    adam_8_decode(&open->at, grad_format, start, &turn);
    EACH_VEC(j) {
        adam_moments(turn.w[j], turn.g[j], turn.m + j, turn.v + j, &row->k);
        turn.q[j] = vf_sqrt(turn.v[j]);
        largest.state[0] = vi_max(largest.state[0], magnitude_bits(turn.m[j]));
        largest.state[1] = vi_max(largest.state[1], vf_bits(turn.v[j])); /* never negative; NaN tells through w */
        vf_store(open->values[0] + start + j * W, turn.m[j]);
        vf_store(open->values[1] + start + j * W, turn.v[j]);
    }
    if (last)
        adam_8_encode_means(last, start, row->turn_places);
    EACH_VEC(j) turn.q[j] = adam_direction(turn.m[j], turn.q[j], &row->k);
    if (last)
        adam_8_encode_squares(last, start, row->turn_places);
    EACH_VEC(j) turn.w[j] = adam_weight(turn.w[j], turn.q[j], &row->k);
    EACH_PAIR(j) largest.w = pack_master(&turn.master, j, turn.w, largest.w);
    store_split_turn(&open->at, start, &turn.master);
    return largest;
}
