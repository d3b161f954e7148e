/* Part of template.h: Adam over a split master and states in bf16 or eight bits, in registers.  The same bits as the blocks
 * of template_block.h, which spend half of their time on the way to the cache and back. */

struct turn {
    vf m[NUM_VECS], v[NUM_VECS];
};

/* Update the master of a turn and its decoded states; returns the largest |w| of each lane. */
OP vi split_adam_turn(const simd_streams *at, int grad_format, size_t start, struct turn *turn, vi largest,
                      const struct adam_factors *k) {
    vi high[NUM_VECS], low[NUM_VECS];
    EACH_VEC(j) {
        const size_t i = start + j * W;
        const vf w = load_split(at->hi + i, at->lo + i), g = load_as_f32(at->grad, grad_format, i);
        const vf updated = adam_formula(w, g, &turn->m[j], &turn->v[j], k);
        largest = vi_max(largest, magnitude_bits(updated));
        high[j] = vi_shr16(vi_add(vf_bits(updated), vi_set(0x8000)));
        low[j] = vi_and(vf_bits(updated), vi_set(0xffff));
    }
    turn_store_16(at->hi + start, high);
    turn_store_16(at->lo + start, low);
    return largest;
}

OP void adam_states_prefetch(const simd_streams *at, int grad_format, size_t state_bytes, size_t i) {
    prefetch(at->hi + i, 2);
    prefetch(at->lo + i, 2);
    prefetch((const char *)at->state[0] + state_bytes * i, state_bytes);
    prefetch((const char *)at->state[1] + state_bytes * i, state_bytes);
    prefetch((const char *)at->grad + simd_format_bytes(grad_format) * i, simd_format_bytes(grad_format));
}

/* Returns the bits of the largest |w|.  Where that is NaN the states are anything: see settle_streams. */
OP uint32_t adam_bf16_block(const simd_streams *at, int grad_format, struct random random, size_t n,
                            const struct adam_factors *k) {
    char *means = at->state[0], *squares = at->state[1];
    vi largest = vi_set(0);
    for (size_t start = 0; start < n; start += SIMD_TURN) {
        struct turn turn;
        vi mean[NUM_VECS], square[NUM_VECS];
        adam_states_prefetch(at, grad_format, 2, start);
        EACH_VEC(j) turn.m[j] = load_as_f32(means, SIMD_BF16, start + j * W);
        EACH_VEC(j) turn.v[j] = load_as_f32(squares, SIMD_BF16, start + j * W);
        largest = split_adam_turn(at, grad_format, start, &turn, largest, k);
        EACH_VEC(j) {
            const vi mixed = random_mixed(&random);
            mean[j] = bf16_code(turn.m[j], random_low(&random, mixed, 16));
            square[j] = bf16_code(turn.v[j], random_high(&random, mixed, 16));
        }
        turn_store_16(means + 2 * start, mean);
        turn_store_16(squares + 2 * start, square);
    }
    return most_of(largest);
}

struct largest {
    vi w, m, v;
};

OP struct largest adam_8_decode(const simd_streams *at, int grad_format, float *means, float *squares, size_t n,
                                const struct adam_factors *k) {
    const vf mean_scale = vf_set(simd_load_f32(at->scale[0])), square_scale = vf_set(simd_load_f32(at->scale[1]));
    struct largest largest = {vi_set(0), vi_set(0), vi_set(0)};
    for (size_t start = 0; start < n; start += SIMD_TURN) {
        struct turn turn;
        adam_states_prefetch(at, grad_format, 1, start);
        EACH_VEC(j) turn.m[j] = decode_i8((const char *)at->state[0] + start + j * W, mean_scale);
        EACH_VEC(j) turn.v[j] = decode_u8((const char *)at->state[1] + start + j * W, square_scale);
        largest.w = split_adam_turn(at, grad_format, start, &turn, largest.w, k);
        EACH_VEC(j) {
            largest.m = vi_max(largest.m, magnitude_bits(turn.m[j]));
            largest.v = vi_max(largest.v, magnitude_bits(turn.v[j]));
            vf_store(means + start + j * W, turn.m[j]);
            vf_store(squares + start + j * W, turn.v[j]);
        }
    }
    return largest;
}

OP int adam_8_encode(const simd_streams *at, float *means, float *squares, struct largest largest, struct random random,
                     size_t n) {
    const uint32_t mean_bits = most_of(largest.m), square_bits = most_of(largest.v);
    const float mean_factor = choose_scale(mean_bits, I8_SPAN, at->scale[0]);
    const float square_factor = choose_scale(square_bits, U8_SPAN, at->scale[1]);
    if (__builtin_expect(!mean_factor, 0))
        memset(means, 0, 4 * n);
    if (__builtin_expect(!square_factor, 0))
        memset(squares, 0, 4 * n);
    for (size_t start = 0; start < n; start += SIMD_TURN) {
        vi mean[NUM_VECS], square[NUM_VECS];
        EACH_VEC(j) {
            const size_t i = start + j * W;
            const vi mixed = random_mixed(&random);
            mean[j] = code_i8(vf_load(means + i), vf_set(mean_factor), random_low(&random, mixed, 20));
            square[j] = code_u8(vf_load(squares + i), vf_set(square_factor), random_high(&random, mixed, 20));
        }
        turn_store_8((char *)at->state[0] + start, mean);
        turn_store_8((char *)at->state[1] + start, square);
    }
    return mean_bits < SIMD_F32_INF && square_bits < SIMD_F32_INF ? SIMD_OK : SIMD_NONFINITE;
}
