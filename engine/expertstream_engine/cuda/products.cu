// Kernels over weights: products of rows with rounded activations, and single rows as floats. Every number that is not
// known when they are compiled is an argument of 64 bits; tables lie in device memory.

// A warp takes ROWS rows for each of its groups of LANES lanes. LANES depends on the types and the columns alone,
// because the order of a sum does on it, and not on ROWS or TOKENS.

constexpr int WARPS = 4, SHARED_BYTES = 48 * 1024;  // of a block

// Blocks that a multiprocessor has registers for, measured: with more of them a warp has too few to load ahead.
template <int TOKENS> constexpr int BLOCKS_AT_ONCE = TOKENS == 1 ? 5 : 4;

template <int LANES> __device__ __forceinline__ int lane() { return threadIdx.x % LANES; }

// Where row r of this thread's group is among those of its warp.
template <int LANES> __device__ __forceinline__ int place_of_row(int r) {
    return r * (32 / LANES) + threadIdx.x % 32 / LANES;
}

// The first row of this thread's warp.
template <int LANES, int ROWS> __device__ __forceinline__ int first_row() {
    return (blockIdx.x * WARPS + threadIdx.x / 32) * (32 / LANES * ROWS);
}

// 16 bytes to shared memory, without waiting for them where the device can do that.
__device__ __forceinline__ void fetch(u32 shared, const u8 *place) {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(place) : "memory");
#else
    const uint4 bytes = *(const uint4 *)place;
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};"
                 ::"r"(shared), "r"(bytes.x), "r"(bytes.y), "r"(bytes.z), "r"(bytes.w) : "memory");
#endif
}

__device__ __forceinline__ void end_piece() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Until all pieces have arrived but the last LEFT of those that were fetched, for every lane of the warp.
template <int LEFT> __device__ __forceinline__ void wait_for_pieces() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
#endif
    __syncwarp();
}

__device__ constexpr int smaller(int a, int b) { return a < b ? a : b; }

// A warp's rows of blocks on their way through shared memory. Where there is room for them they come as one piece, of
// a run of bytes for each matrix; or else a piece is what one step takes, of a run for each row, and DEPTH of them are
// under way. A run lies there as far behind a multiple of 16 as in device memory. At a step the lanes of a group take
// consecutive parts of their row.
template <class W, int COLUMNS, int LANES, int MATRICES, int ROWS> struct Stream {
    static constexpr int LEAD = 16 - W::ALIGNMENT;  // the most bytes by which a block is behind a multiple of 16
    static constexpr int BLOCKS = COLUMNS / W::COLUMNS, ROW_BYTES = BLOCKS * W::BYTES;
    static constexpr int STEP_BLOCKS = LANES / W::PARTS, STEPS = (BLOCKS + STEP_BLOCKS - 1) / STEP_BLOCKS;
    static constexpr int WARP_ROWS = 32 / LANES * ROWS, ROOM = SHARED_BYTES / WARPS / MATRICES;
    static constexpr bool IS_WHOLE = WARP_ROWS * ROW_BYTES + LEAD + 15 <= ROOM;
    static constexpr int PIECES = IS_WHOLE ? 1 : STEPS, PIECE_STEPS = STEPS / PIECES;
    static constexpr int PIECE_BYTES = IS_WHOLE ? ROW_BYTES : STEP_BLOCKS * W::BYTES;  // of a row
    static constexpr int RUNS = IS_WHOLE ? 1 : WARP_ROWS, RUN_BYTES = WARP_ROWS / RUNS * PIECE_BYTES;
    static constexpr int RUN_ROOM = RUN_BYTES + LEAD + 15 & ~15, ROW_ROOM = IS_WHOLE ? ROW_BYTES : RUN_ROOM;
    static constexpr int MATRIX_ROOM = RUNS * RUN_ROOM, PIECE_ROOM = MATRICES * MATRIX_ROOM;
    static constexpr int DEPTH = smaller(smaller(PIECES, 4), MATRICES * ROOM / PIECE_ROOM);
    static_assert(DEPTH >= 1, "there is room for a step");
    const u8 *const (&starts)[MATRICES];
    int count;  // of rows that there are from the first on
    u32 room;

    __device__ __forceinline__ Stream(const u8 *const (&starts)[MATRICES], int count) : starts(starts), count(count) {
        __shared__ uint4 rooms[WARPS * DEPTH * PIECE_ROOM / 16];
        room = (u32)__cvta_generic_to_shared(rooms) + threadIdx.x / 32 * (DEPTH * PIECE_ROOM);
        keep(room);
    }

    // Where a run of matrix m begins, and how far that is behind a multiple of 16.
    __device__ __forceinline__ const u8 *run(int m, int row, int piece) const {
        return starts[m] + (IS_WHOLE ? 0 : row * ROW_BYTES + piece * PIECE_BYTES);
    }
    __device__ __forceinline__ int lead(int m, int row, int piece) const {
        return LEAD ? (int)(i64)run(m, row, piece) & 15 : 0;
    }

    // A piece, if there are so many, to where nobody reads any more the one that was DEPTH pieces before it.
    __device__ __forceinline__ void fetch_piece(int piece) const {
        if (piece >= PIECES) return end_piece();
        const u32 to = room + piece % DEPTH * PIECE_ROOM;
        const int skip = threadIdx.x % 32 * 16;
#pragma unroll
        for (int m = 0; m < MATRICES; ++m)
#pragma unroll
            for (int row = 0; row < RUNS; ++row) {
                if (row >= count) break;
                const int whole = smaller(WARP_ROWS, count) * ROW_BYTES;
                const int bytes = IS_WHOLE ? whole : smaller(PIECE_BYTES, ROW_BYTES - piece * PIECE_BYTES);
                const int left = bytes + lead(m, row, piece) - skip;
                const u8 *from = run(m, row, piece) - lead(m, row, piece) + skip;
#pragma unroll
                for (int offset = 0; offset < RUN_BYTES + LEAD; offset += 16 * 32)
                    if (offset < left) fetch(to + (m * RUNS + row) * RUN_ROOM + skip + offset, from + offset);
            }
        end_piece();
    }

    // The block of row r of matrix m that this lane has a part of at a step of a piece that has arrived.
    __device__ __forceinline__ Bytes block(int m, int r, int piece, int step) const {
        const int row = place_of_row<LANES>(r);
        const int first = piece % DEPTH * PIECE_ROOM + m * MATRIX_ROOM + row * ROW_ROOM + lead(m, row, piece) +
                          (step * STEP_BLOCKS + lane<LANES>() / W::PARTS) * W::BYTES;
        return {(const u8 *)__cvta_shared_to_generic(room + (first & ~3)), W::ALIGNMENT % 4 ? first & 3 : 0};
    }
};

// Adds to this thread's share of the sums, of which that of row r of matrix m and token t is number
// (m * ROWS + r) * TOKENS + t.
template <class W, int COLUMNS, int LANES, int MATRICES, int ROWS, int TOKENS>
__device__ __forceinline__ void add_blocks(
    const u8 *const (&starts)[MATRICES], int count, const u8 *records, const u32 (&taken)[TOKENS],
    float (&sums)[MATRICES * ROWS * TOKENS]
) {
    typedef Stream<W, COLUMNS, LANES, MATRICES, ROWS> S;
    constexpr int AHEAD = TOKENS == 1 ? smaller(S::PIECE_STEPS, 3) : 0;  // steps with activations on their way early
    constexpr bool IS_EVEN = S::PIECES * S::PIECE_STEPS * S::STEP_BLOCKS == S::BLOCKS;
    const S stream(starts, count);
#pragma unroll
    for (int piece = 0; piece < S::DEPTH; ++piece) stream.fetch_piece(piece);
    let_the_next_begin();
    wait_for_the_last();
#pragma unroll 1
    for (int piece = 0; piece < S::PIECES; ++piece) {
        const int first_block = piece * S::PIECE_STEPS * S::STEP_BLOCKS + lane<LANES>() / W::PARTS;
        const int part = lane<LANES>() % W::PARTS;
        const auto is_mine = [&](int step) { return IS_EVEN || first_block + step * S::STEP_BLOCKS < S::BLOCKS; };
        const auto load = [&](int step, int t, Activations<W> &activations) {
            activations.load(records + taken[t], COLUMNS, first_block + step * S::STEP_BLOCKS, part);
        };
        const auto add_step = [&](int step, const auto &activations_of) {
            if (!is_mine(step)) return;
#pragma unroll
            for (int i = 0; i < MATRICES * ROWS; ++i) {
                W weights;
                weights.load(stream.block(i / ROWS, i % ROWS, piece, step), part);
#pragma unroll
                for (int t = 0; t < TOKENS; ++t)
                    sums[i * TOKENS + t] = add_part(weights, activations_of(t), sums[i * TOKENS + t]);
            }
        };
        Activations<W> ahead[AHEAD > 0 ? AHEAD : 1];
#pragma unroll
        for (int step = 0; step < AHEAD; ++step)
            if (is_mine(step)) load(step, 0, ahead[step]);
        wait_for_pieces<S::DEPTH - 1>();
#pragma unroll
        for (int step = 0; step < AHEAD; ++step)
            add_step(step, [&](int t) -> const Activations<W> & { return ahead[step]; });
        if constexpr (TOKENS == 1) {
#pragma unroll 4
            for (int step = AHEAD; step < S::PIECE_STEPS; ++step) {
                Activations<W> activations;
                if (is_mine(step)) load(step, 0, activations);
                add_step(step, [&](int t) -> const Activations<W> & { return activations; });
            }
        } else {
#pragma unroll 1
            for (int step = 0; step < S::PIECE_STEPS; ++step)
                add_step(step, [&](int t) {
                    Activations<W> activations;
                    load(step, t, activations);
                    return activations;
                });
        }
        __syncwarp();  // every lane has read what is replaced now
        if (S::PIECES > 1) stream.fetch_piece(piece + S::DEPTH);
    }
}

template <class W, int COLUMNS, int LANES, int MATRICES, int ROWS, int TOKENS>
__device__ __forceinline__ void add_floats(
    const u8 *const (&starts)[MATRICES], int count, const u8 *records, const u32 (&taken)[TOKENS],
    float (&sums)[MATRICES * ROWS * TOKENS]
) {
    constexpr int ALL = MATRICES * ROWS;
    const u8 *rows[ALL];
#pragma unroll
    for (int i = 0; i < ALL; ++i)  // in place of rows past the last one the last one again, whose sums nobody takes
        rows[i] = starts[i / ROWS] + (i64)min(place_of_row<LANES>(i % ROWS), count - 1) * row_bytes<W>(COLUMNS);
    in_turn();
#pragma unroll(TOKENS == 1 ? 16 / ALL : 4)
    for (int column = lane<LANES>(); column < COLUMNS; column += LANES) {
        float weights[ALL];
#pragma unroll
        for (int i = 0; i < ALL; ++i) weights[i] = W::at(rows[i], column);
#pragma unroll
        for (int t = 0; t < TOKENS; ++t) {
            const float activation = ((const float *)(records + taken[t]))[column];
#pragma unroll
            for (int i = 0; i < ALL; ++i)
                sums[i * TOKENS + t] = __fmaf_rn(weights[i], activation, sums[i * TOKENS + t]);
        }
    }
}

// The sums of a warp's rows, which are the first from each of some addresses, times TOKENS records; for every lane of
// the group that has the row.
template <class W, int COLUMNS, int LANES, int MATRICES, int ROWS, int TOKENS>
__device__ __forceinline__ void multiply_rows(
    const u8 *const (&starts)[MATRICES], int count, const u8 *records, const u32 (&taken)[TOKENS],
    float (&sums)[MATRICES * ROWS * TOKENS]
) {
    constexpr int ALL = MATRICES * ROWS * TOKENS;
#pragma unroll
    for (int i = 0; i < ALL; ++i) sums[i] = 0;
    if constexpr (W::BLOCKS)
        add_blocks<W, COLUMNS, LANES, MATRICES, ROWS, TOKENS>(starts, count, records, taken, sums);
    else add_floats<W, COLUMNS, LANES, MATRICES, ROWS, TOKENS>(starts, count, records, taken, sums);
#pragma unroll
    for (int distance = LANES / 2; distance; distance /= 2)
#pragma unroll
        for (int i = 0; i < ALL; ++i) sums[i] = __fadd_rn(sums[i], __shfl_xor_sync(~0u, sums[i], distance));
}

// The lanes of a group share out what is done with its rows' sums: take(r, t, i) is called for row r and token t with
// i = r * TOKENS + t where they are this lane's.
template <int LANES, int ROWS, int TOKENS, class Take> __device__ __forceinline__ void share_out(const Take &take) {
#pragma unroll
    for (int i = 0; i < ROWS * TOKENS; ++i)
        if (i % LANES == lane<LANES>()) take(i / TOKENS, i % TOKENS, i);
}

// Matrices of one type that take the same x. A matrix is three numbers: its address, its rows, and how many rows the
// matrices before it have, which is where its results begin: out holds (tokens, rows) of one matrix after the other.
template <class W, int COLUMNS, int LANES, int ROWS, int TOKENS>
__global__ void __launch_bounds__(32 * WARPS, BLOCKS_AT_ONCE<TOKENS>) multiply(
    const i64 *matrices, const u8 *records, i64 record_bytes, i64 tokens, float *out
) {
    const i64 *matrix = matrices + 3 * blockIdx.z, count = matrix[1];
    const int first = first_row<LANES, ROWS>(), first_token = blockIdx.y * TOKENS;
    if (first >= count) return;  // the grid is as large as the largest matrix needs
    const u8 *const starts[1] = {(const u8 *)matrix[0] + first * row_bytes<W>(COLUMNS)};
    u32 taken[TOKENS];
    float sums[ROWS * TOKENS];
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) taken[t] = (u32)(min((i64)first_token + t, tokens - 1) * record_bytes);
    multiply_rows<W, COLUMNS, LANES, 1, ROWS, TOKENS>(starts, (int)count - first, records, taken, sums);
    share_out<LANES, ROWS, TOKENS>([&](int r, int t, int i) {
        const i64 row = first + place_of_row<LANES>(r), token = first_token + t;
        if (row < count && token < tokens) out[matrix[2] * tokens + token * count + row] = sums[i];
    });
}

// Rows starts[e] to starts[e + 1] are expert e's, or where TOKENS is 1 row e is.
template <int TOKENS> struct Rows {
    int begin, end;
    __device__ __forceinline__ Rows(const i64 *starts) {
        if constexpr (TOKENS == 1) begin = blockIdx.y, end = begin + 1;
        else begin = (int)starts[blockIdx.y], end = (int)starts[blockIdx.y + 1];
    }
};

template <class First, class Second> constexpr bool SAME = false;
template <class Type> constexpr bool SAME<Type, Type> = true;

// hidden[i] = silu(gate) * up of the expert that row i belongs to, for token tokens[i].
template <class G, class U, int COLUMNS, int LANES, int ROWS, int TOKENS>
__global__ void __launch_bounds__(32 * WARPS, BLOCKS_AT_ONCE<TOKENS>) gate_up(
    const i64 *addresses, const i64 *starts, const i64 *tokens, const u8 *gate_records, i64 gate_record_bytes,
    const u8 *up_records, i64 up_record_bytes, i64 row_count, float *hidden
) {
    const int first = first_row<LANES, ROWS>(), count = (int)row_count - first;
    if (count <= 0) return;
    const u8 *const both[2] = {
        (const u8 *)addresses[3 * blockIdx.y] + first * row_bytes<G>(COLUMNS),
        (const u8 *)addresses[3 * blockIdx.y + 1] + first * row_bytes<U>(COLUMNS),
    };
    const Rows<TOKENS> mine(starts);
    for (int begin = mine.begin; begin < mine.end; begin += TOKENS) {
        u32 taken[TOKENS], taken_up[TOKENS];
#pragma unroll
        for (int t = 0; t < TOKENS; ++t) {
            const i64 token = tokens[min(begin + t, mine.end - 1)];
            taken[t] = (u32)(token * gate_record_bytes);
            taken_up[t] = (u32)(token * up_record_bytes);
        }
        constexpr int COUNT = ROWS * TOKENS;
        float gates[COUNT], ups[COUNT];
        if constexpr (SAME<G, U> && TOKENS == 1) {
            float sums[2 * COUNT];
            multiply_rows<G, COLUMNS, LANES, 2, ROWS, 1>(both, count, gate_records, taken, sums);
#pragma unroll
            for (int i = 0; i < COUNT; ++i) gates[i] = sums[i], ups[i] = sums[COUNT + i];
        } else {
            const u8 *const gate[1] = {both[0]}, *const up[1] = {both[1]};
            multiply_rows<G, COLUMNS, LANES, 1, ROWS, TOKENS>(gate, count, gate_records, taken, gates);
            multiply_rows<U, COLUMNS, LANES, 1, ROWS, TOKENS>(up, count, up_records, taken_up, ups);
        }
#pragma unroll
        for (int each = 0; each < COUNT; each += LANES) {  // a lane gates one of LANES sums, all of them at once
            float g = gates[each], u = ups[each];
#pragma unroll
            for (int i = each + 1; i < smaller(COUNT, each + LANES); ++i)
                if (i == each + lane<LANES>()) g = gates[i], u = ups[i];
            const int i = each + lane<LANES>(), where = begin + i % TOKENS, row = place_of_row<LANES>(i / TOKENS);
            if (i < COUNT && row < count && where < mine.end)
                hidden[where * row_count + first + row] = __fmul_rn(__fdiv_rn(g, __fadd_rn(1.0f, expf(-g))), u);
        }
    }
}

// out[i] = down of the expert that row i belongs to, applied to hidden row i.
template <class W, int COLUMNS, int LANES, int ROWS, int TOKENS>
__global__ void __launch_bounds__(32 * WARPS, BLOCKS_AT_ONCE<TOKENS>) down(
    const i64 *addresses, const i64 *starts, const u8 *records, i64 record_bytes, i64 row_count, float *out
) {
    const int first = first_row<LANES, ROWS>(), count = (int)row_count - first;
    if (count <= 0) return;
    const u8 *const rows[1] = {(const u8 *)addresses[3 * blockIdx.y + 2] + first * row_bytes<W>(COLUMNS)};
    const Rows<TOKENS> mine(starts);
    for (int begin = mine.begin; begin < mine.end; begin += TOKENS) {
        u32 taken[TOKENS];
        float sums[ROWS * TOKENS];
#pragma unroll
        for (int t = 0; t < TOKENS; ++t) taken[t] = (u32)(min(begin + t, mine.end - 1) * record_bytes);
        multiply_rows<W, COLUMNS, LANES, 1, ROWS, TOKENS>(rows, count, records, taken, sums);
        share_out<LANES, ROWS, TOKENS>([&](int r, int t, int i) {
            const int row = place_of_row<LANES>(r), where = begin + t;
            if (row < count && where < mine.end) out[where * row_count + first + row] = sums[i];
        });
    }
}

// Rows ids[i] of a table as floats, with the multiplications and subtractions in the order of the package gguf.
template <class W> __global__ void embed(const u8 *table, const i64 *ids, i64 columns, float *out) {
    in_turn();
    const u8 *row = table + ids[blockIdx.y] * row_bytes<W>((int)columns);
    out += blockIdx.y * columns;
    const int place = blockIdx.x * blockDim.x + threadIdx.x;
    if constexpr (W::BLOCKS) {
        const int block = place / W::PARTS, part = place % W::PARTS;
        if (block >= columns / W::COLUMNS) return;
        W weights;
        row += (i64)block * W::BYTES;
        weights.load({row - ((i64)row & 3), (int)(i64)row & 3}, part);
#pragma unroll
        for (int group = 0; group < W::GROUPS; ++group) {
            float *values = out + block * W::COLUMNS + W::first_column(part) + group * W::APART, scale = weights.d;
            if constexpr (W::SCALED) scale = __fmul_rn(weights.d, (float)weights.scale[group]);
#pragma unroll
            for (int k = 0; k < 4 * W::WORDS; ++k) {
                const int quant = (signed char)(weights.word[group][k / 4] >> 8 * (k % 4)) - W::OFFSET;
                values[k] = __fmul_rn(scale, (float)quant);
                if constexpr (W::HAS_MINIMUMS)
                    values[k] = __fsub_rn(values[k], __fmul_rn(weights.dmin, (float)weights.minimum[group]));
            }
        }
    } else if (place < columns) {
        out[place] = W::at(row, place);
    }
}
