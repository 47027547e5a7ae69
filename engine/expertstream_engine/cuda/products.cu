// Kernels over weights: products of rows with rounded activations, the rounding itself, and single rows as floats.
// Every number that does not depend on the weights' type is an argument of 64 bits; tables lie in device memory.

// A block's warps share out its rows: 1 << split of them side by side take ROWS rows, so that long rows have enough
// threads. The order of a sum depends on the split, which depends on the columns alone, and not on ROWS or TOKENS.

constexpr int WARPS = 8;

// Where a thread stands in its block, and the first of the rows that are its.
struct Place {
    int lane, lanes, row;
    __device__ __forceinline__ Place(i64 split, int rows) {
        lanes = 32 << split;
        lane = threadIdx.x & (lanes - 1);
        row = (blockIdx.x * (WARPS >> split) + (threadIdx.x >> 5 + split)) * rows;
    }
};

// The sums over all warps that share rows, in the order of the warps: number i to lane i * 32 / COUNT of the first of
// them. Every thread of the block must come here.
template <int COUNT> __device__ __forceinline__ float joined(const Place &place, float (&sums)[COUNT]) {
    __shared__ float parts[WARPS][COUNT];
    constexpr int SHARE = 32 / COUNT;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    float sum = warp_sums(sums);
    if (place.lanes == 32) return sum;
    if (lane % SHARE == 0) parts[warp][lane / SHARE] = sum;
    __syncthreads();
    if (place.lane < 32)
        for (int other = 1; other < place.lanes >> 5; ++other) sum = __fadd_rn(sum, parts[warp + other][lane / SHARE]);
    __syncthreads();
    return sum;
}

// Which of COUNT sums the calling thread is to write; COUNT or more where none.
template <int COUNT> __device__ __forceinline__ int number_of(const Place &place) {
    constexpr int SHARE = 32 / COUNT;
    return place.lane < 32 && place.lane % SHARE == 0 ? place.lane / SHARE : COUNT;
}

// Where rows `first` and on begin; those past the last one are the last one again, and nobody takes their sums.
template <class W, int ROWS>
__device__ __forceinline__ void rows_from(const u8 *weights, int first, i64 count, int columns, const u8 **rows) {
    const i64 bytes = row_bytes<W>(columns);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) rows[r] = weights + min(first + r, (int)count - 1) * bytes;
}

template <class W, int ROWS, int TOKENS>
__device__ __forceinline__ float product(
    const Place &place, const u8 *weights, i64 row_count, int columns, const Record (&records)[TOKENS]
) {
    const u8 *rows[ROWS];
    float sums[ROWS * TOKENS];
    rows_from<W, ROWS>(weights, place.row, row_count, columns, rows);
    dot_rows<W, ROWS, TOKENS>(rows, columns, place.lane, place.lanes, records, sums);
    return joined(place, sums);
}

// Of two matrices of one type, with all loads of both before their first use: sums of the second one after those of
// the first one.
template <class W, int ROWS, int TOKENS>
__device__ __forceinline__ float two_products(
    const Place &place, const u8 *first, const u8 *second, i64 row_count, int columns, const Record (&records)[TOKENS]
) {
    const u8 *rows[2 * ROWS];
    float sums[2 * ROWS * TOKENS];
    rows_from<W, ROWS>(first, place.row, row_count, columns, rows);
    rows_from<W, ROWS>(second, place.row, row_count, columns, rows + ROWS);
    dot_rows<W, 2 * ROWS, TOKENS>(rows, columns, place.lane, place.lanes, records, sums);
    return joined(place, sums);
}

template <class First, class Second> constexpr bool SAME = false;
template <class Type> constexpr bool SAME<Type, Type> = true;

// Matrices of one type that take the same x. A matrix is three numbers: its address, its rows, and how many rows the
// matrices before it have, which is where its results begin: out holds (tokens, rows) of one matrix after the other.
template <class W, int ROWS, int TOKENS>
__global__ void __launch_bounds__(32 * WARPS, 3) multiply(
    const i64 *matrices, i64 split, const u8 *records, i64 record_bytes, i64 columns, i64 tokens, float *out
) {
    const Place place(split, ROWS);
    const i64 *matrix = matrices + 3 * blockIdx.z, rows = matrix[1], first = (i64)blockIdx.y * TOKENS;
    if (blockIdx.x * (WARPS >> split) * ROWS >= rows) return;  // the grid is as large as the largest matrix needs
    Record taken[TOKENS];
#pragma unroll
    for (int t = 0; t < TOKENS; ++t)
        taken[t] = record_at<W>(records + min(first + t, tokens - 1) * record_bytes, (int)columns);
    const float sum = product<W, ROWS, TOKENS>(place, (const u8 *)matrix[0], rows, (int)columns, taken);
    const int number = number_of<ROWS * TOKENS>(place);
    const i64 row = place.row + number / TOKENS, token = first + number % TOKENS;
    if (number < ROWS * TOKENS && row < rows && token < tokens) out[matrix[2] * tokens + token * rows + row] = sum;
}

// Rows starts[e] to starts[e + 1] are expert e's, or where TOKENS is 1 row e is.
template <int TOKENS> struct Rows {
    i64 begin, end;
    __device__ __forceinline__ Rows(const i64 *starts) {
        if constexpr (TOKENS == 1) begin = blockIdx.y, end = begin + 1;
        else begin = starts[blockIdx.y], end = starts[blockIdx.y + 1];
    }
};

// hidden[i] = silu(gate) * up of the expert that row i belongs to, for token tokens[i].
template <class G, class U, int ROWS, int TOKENS>
__global__ void __launch_bounds__(32 * WARPS, 3) gate_up(
    const i64 *addresses, const i64 *starts, const i64 *tokens, i64 split, const u8 *gate_records,
    i64 gate_record_bytes, const u8 *up_records, i64 up_record_bytes, i64 columns, i64 rows, float *hidden
) {
    const Place place(split, ROWS);
    const u8 *gate = (const u8 *)addresses[3 * blockIdx.y], *up = (const u8 *)addresses[3 * blockIdx.y + 1];
    const Rows<TOKENS> mine(starts);
    for (i64 first = mine.begin; first < mine.end; first += TOKENS) {
        Record taken[TOKENS], taken_up[TOKENS];
#pragma unroll
        for (int t = 0; t < TOKENS; ++t) {
            const i64 token = tokens[min(first + t, mine.end - 1)];
            taken[t] = record_at<G>(gate_records + token * gate_record_bytes, (int)columns);
            taken_up[t] = record_at<U>(up_records + token * up_record_bytes, (int)columns);
        }
        constexpr int COUNT = SAME<G, U> ? 2 * ROWS * TOKENS : ROWS * TOKENS;
        float g, u;
        if constexpr (SAME<G, U>) {
            g = two_products<G, ROWS, TOKENS>(place, gate, up, rows, (int)columns, taken);
            u = __shfl_down_sync(~0u, g, 16);
        } else {
            g = product<G, ROWS, TOKENS>(place, gate, rows, (int)columns, taken);
            u = product<U, ROWS, TOKENS>(place, up, rows, (int)columns, taken_up);
        }
        const int number = number_of<COUNT>(place);
        const i64 row = place.row + number / TOKENS, i = first + number % TOKENS;
        if (number < ROWS * TOKENS && row < rows && i < mine.end)
            hidden[i * rows + row] = __fmul_rn(__fdiv_rn(g, __fadd_rn(1.0f, expf(-g))), u);
    }
}

// out[i] = down of the expert that row i belongs to, applied to hidden row i.
template <class W, int ROWS, int TOKENS>
__global__ void __launch_bounds__(32 * WARPS, 3) down(
    const i64 *addresses, const i64 *starts, i64 split, const u8 *records, i64 record_bytes, i64 columns, i64 rows,
    float *out
) {
    const Place place(split, ROWS);
    const u8 *weights = (const u8 *)addresses[3 * blockIdx.y + 2];
    const Rows<TOKENS> mine(starts);
    for (i64 first = mine.begin; first < mine.end; first += TOKENS) {
        Record taken[TOKENS];
#pragma unroll
        for (int t = 0; t < TOKENS; ++t)
            taken[t] = record_at<W>(records + min(first + t, mine.end - 1) * record_bytes, (int)columns);
        const float sum = product<W, ROWS, TOKENS>(place, weights, rows, (int)columns, taken);
        const int number = number_of<ROWS * TOKENS>(place);
        const i64 row = place.row + number / TOKENS, i = first + number % TOKENS;
        if (number < ROWS * TOKENS && row < rows && i < mine.end) out[i * rows + row] = sum;
    }
}

// Rows ids[i] of a table as floats, with the multiplications and subtractions in the order of the package gguf.
template <class W> __global__ void embed(const u8 *table, const i64 *ids, i64 columns, float *out) {
    const u8 *row = table + ids[blockIdx.y] * row_bytes<W>((int)columns);
    out += blockIdx.y * columns;
    const int place = blockIdx.x * blockDim.x + threadIdx.x;
    if constexpr (W::BLOCKS) {
        const int block = place / W::PARTS, part = place % W::PARTS;
        if (block >= columns / W::COLUMNS) return;
        W weights;
        weights.load(row + (i64)block * W::BYTES, part);
        for (int group = 0; group < W::GROUPS; ++group) {
            float *values = out + block * W::COLUMNS + W::column(part, group), scale = weights.d;
            if constexpr (W::SCALED) scale = __fmul_rn(weights.d, (float)weights.scale[group]);
            for (int k = 0; k < 4 * W::WORDS; ++k) {
                const float quant = (float)(signed char)(weights.word[group][k / 4] >> 8 * (k % 4));
                values[k] = __fmul_rn(scale, quant);
                if constexpr (W::HAS_MINIMUMS)
                    values[k] = __fsub_rn(values[k], __fmul_rn(weights.dmin, (float)weights.minimum[group]));
            }
        }
    } else if (place < columns) {
        out[place] = W::at(row, place);
    }
}
