// Kernels that read no weights: rounding of activations, norms, rotary positions, attention, router, sums.
// Rounding follows the reference of ggml (quantize_row_q8_0_ref, quantize_row_q8_K_ref in ggml-quants.c, MIT).

typedef unsigned char u8;
typedef long long i64;

constexpr float LARGEST = 3.402823466e38f;
#define ENDLESS __int_as_float(0x7F800000)

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
    for (int lane = 16; lane; lane >>= 1) value += __shfl_xor_sync(~0u, value, lane);
    return value;
}

__device__ __forceinline__ float warp_max(float value) {
#pragma unroll
    for (int lane = 16; lane; lane >>= 1) value = fmaxf(value, __shfl_xor_sync(~0u, value, lane));
    return value;
}

// Of magnitudes, by their bits: so that a NaN counts as larger than any number.
__device__ __forceinline__ bool is_larger(float magnitude, float other) {
    return __float_as_uint(magnitude) > __float_as_uint(other);
}

__device__ __forceinline__ float warp_max_magnitude(float magnitude) {
    unsigned bits = __float_as_uint(magnitude);
#pragma unroll
    for (int lane = 16; lane; lane >>= 1) bits = max(bits, __shfl_xor_sync(~0u, bits, lane));
    return __uint_as_float(bits);
}

__device__ __forceinline__ float limit_to_finite(float value) {
    return fabsf(value) == ENDLESS ? copysignf(LARGEST, value) : value;
}

__device__ __forceinline__ float through_half(float value) {
    float rounded;
    asm("{.reg .f16 half; cvt.rn.f16.f32 half, %1; cvt.f32.f16 %0, half;}" : "=f"(rounded) : "f"(value));
    return rounded;
}

// To bfloat16 and back: to the nearest, halves to even; what is no number stays none.
__device__ __forceinline__ float through_bfloat(float value) {
    const unsigned bits = __float_as_uint(value);
    if ((bits & 0x7FFFFFFF) > 0x7F800000) return __uint_as_float((bits | 0x00400000) & 0xFFFF0000);
    return __uint_as_float((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000);
}

// Blocks of 32, one a warp: scale = max|x| / 127, quants to the nearest with halves away from zero.
extern "C" __global__ void round_q8_0(const float *x, i64 columns, u8 *records, i64 record_bytes) {
    in_turn();
    const int lane = threadIdx.x & 31;
    const i64 block = (i64)blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5);
    if (32 * block >= columns) return;
    u8 *record = records + blockIdx.y * record_bytes;
    const float value = x[blockIdx.y * columns + 32 * block + lane];
    const float scale = __fdiv_rn(warp_max_magnitude(fabsf(value)), 127.0f);
    const float inverse = scale == 0 ? 0 : limit_to_finite(__fdiv_rn(1.0f, scale));
    ((signed char *)record)[32 * block + lane] = (signed char)__float2int_rz(roundf(__fmul_rn(value, inverse)));
    if (lane == 0) ((float *)(record + columns))[block] = through_half(scale);
}

// Blocks of 256, one a warp: the first x of the largest |x| becomes -127, quants to the nearest with halves to even.
extern "C" __global__ void round_q8_k(const float *x, i64 columns, u8 *records, i64 record_bytes) {
    in_turn();
    const int lane = threadIdx.x & 31;
    const i64 block = (i64)blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5);
    if (256 * block >= columns) return;
    u8 *record = records + blockIdx.y * record_bytes;
    const float *place = x + blockIdx.y * columns + 256 * block + 8 * lane;
    float values[8], extreme = 0;
#pragma unroll
    for (int k = 0; k < 8; ++k) {
        values[k] = place[k];
        if (is_larger(fabsf(values[k]), fabsf(extreme))) extreme = values[k];
    }
    const float magnitude = fabsf(extreme), largest = warp_max_magnitude(magnitude);
    const unsigned holders = __ballot_sync(~0u, __float_as_uint(magnitude) == __float_as_uint(largest));
    extreme = __shfl_sync(~0u, extreme, __ffs(holders) - 1);
    const float inverse = extreme == 0 ? 0 : limit_to_finite(__fdiv_rn(-127.0f, extreme));
    int sum = 0;
    u8 quants[8];
#pragma unroll
    for (int k = 0; k < 8; ++k) {
        const int quant = min(__float2int_rn(__fmul_rn(values[k], inverse)), 127);
        sum += quant;
        quants[k] = (u8)quant;
    }
    for (int k = 0; k < 8; ++k) record[256 * block + 8 * lane + k] = quants[k];
    sum += __shfl_xor_sync(~0u, sum, 1);
    if ((lane & 1) == 0) ((short *)(record + columns))[16 * block + (lane >> 1)] = (short)sum;
    if (lane == 0) ((float *)(record + columns + columns / 8))[block] = extreme == 0 ? 0 : __fdiv_rn(1.0f, inverse);
}

extern "C" __global__ void round_f16(const float *x, i64 count, float *out) {
    in_turn();
    const i64 place = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (place < count) out[place] = through_half(x[place]);
}

extern "C" __global__ void round_bf16(const float *x, i64 count, float *out) {
    in_turn();
    const i64 place = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (place < count) out[place] = through_bfloat(x[place]);
}

// One block a row; the order of the sum depends on the columns alone.
extern "C" __global__ void rms_norm(const float *x, const float *weight, i64 columns, double epsilon, float *out) {
    in_turn();
    __shared__ float parts[32];
    x += blockIdx.x * columns;
    out += blockIdx.x * columns;
    float sum = 0;
    for (i64 column = threadIdx.x; column < columns; column += blockDim.x) sum = fmaf(x[column], x[column], sum);
    sum = warp_sum(sum);
    if ((threadIdx.x & 31) == 0) parts[threadIdx.x >> 5] = sum;
    __syncthreads();
    sum = 0;
    for (int warp = 0; warp < blockDim.x >> 5; ++warp) sum += parts[warp];
    const float root = sqrtf(sum / (float)columns + (float)epsilon);
    for (i64 column = threadIdx.x; column < columns; column += blockDim.x)
        out[column] = __fdiv_rn(x[column], root) * weight[column];
}

// One thread a pair.
extern "C" __global__ void rope(
    float *x, const float *cosines, const float *sines, i64 tokens, i64 heads, i64 head_size, i64 pairs, i64 interleaved
) {
    in_turn();
    const i64 number = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (number >= tokens * heads * pairs) return;
    const i64 pair = number % pairs, head = number / pairs, angle = head / heads * pairs + pair;
    float *first = x + head * head_size + (interleaved ? 2 * pair : pair), *second = first + (interleaved ? 1 : pairs);
    const float c = cosines[angle], s = sines[angle], a = *first, b = *second;
    *first = __fsub_rn(__fmul_rn(a, c), __fmul_rn(b, s));
    *second = __fadd_rn(__fmul_rn(a, s), __fmul_rn(b, c));
}

// The position of the first token lies in device memory, so that what is launched can be replayed at another one.

// out[i] = table[first + i].
extern "C" __global__ void rows(const float *table, const i64 *first, i64 count, i64 columns, float *out) {
    in_turn();
    const i64 number = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (number < count * columns) out[number] = table[*first * columns + number];
}

// cache[head, first + token] = rows[token, head].
extern "C" __global__ void append(
    float *cache, const float *rows, i64 tokens, i64 heads, i64 head_size, i64 capacity, const i64 *first
) {
    in_turn();
    const i64 number = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (number >= tokens * heads * head_size) return;
    const i64 element = number % head_size, head = number / head_size % heads, token = number / head_size / heads;
    cache[(head * capacity + *first + token) * head_size + element] = rows[number];
}

// One block a head and token, along the context in tiles; the order of the sums depends on positions alone.
constexpr int TILE = 256;

template <int HEAD> __global__ void __launch_bounds__(TILE) attention(
    const float *queries, const float *keys, const float *values, float *out, i64 heads, i64 kv_heads, i64 capacity,
    const i64 *first, double scale
) {
    in_turn();
    constexpr int SLICES = TILE / HEAD;
    __shared__ float query[HEAD], weights[TILE], parts[TILE], sums[TILE / 32], peaks[TILE / 32];
    const int thread = threadIdx.x, warp = thread >> 5, element = thread % HEAD, slice = thread / HEAD;
    const i64 row = blockIdx.y * heads + blockIdx.x, seen = *first + blockIdx.y + 1;
    const i64 cache = blockIdx.x / (heads / kv_heads) * capacity * HEAD;
    keys += cache;
    values += cache;
    for (int i = thread; i < HEAD; i += TILE) query[i] = queries[row * HEAD + i];
    __syncthreads();
    float total = 0, peak = -ENDLESS, sum = 0;
    for (i64 tile = 0; tile < seen; tile += TILE) {
        const int count = (int)min((i64)TILE, seen - tile);
        for (int position = thread / 8; position < TILE; position += TILE / 8) {  // 8 lanes a position
            float score = 0;
            if (position < count) {
                const float *key = keys + (tile + position) * HEAD;
                if constexpr (HEAD % 32 == 0) {
#pragma unroll
                    for (int i = 4 * (thread & 7); i < HEAD; i += 32) {
                        const float4 four = *(const float4 *)(key + i);
                        score = fmaf(query[i], four.x, score);
                        score = fmaf(query[i + 1], four.y, score);
                        score = fmaf(query[i + 2], four.z, score);
                        score = fmaf(query[i + 3], four.w, score);
                    }
                } else {
                    for (int i = thread & 7; i < HEAD; i += 8) score = fmaf(query[i], key[i], score);
                }
            }
            for (int lane = 4; lane; lane >>= 1) score += __shfl_xor_sync(~0u, score, lane);
            if ((thread & 7) == 0) weights[position] = position < count ? score * (float)scale : -ENDLESS;
        }
        __syncthreads();
        const float score = weights[thread], highest = warp_max(score);
        if ((thread & 31) == 0) peaks[warp] = highest;
        __syncthreads();
        float above = peak;
        for (int i = 0; i < TILE / 32; ++i) above = fmaxf(above, peaks[i]);
        const float weight = expf(score - above), correction = expf(peak - above), warps = warp_sum(weight);
        weights[thread] = weight;
        if ((thread & 31) == 0) sums[warp] = warps;
        __syncthreads();
        peak = above;
        sum *= correction;
        for (int i = 0; i < TILE / 32; ++i) sum += sums[i];
        total *= correction;
        if (slice < SLICES)
#pragma unroll 8
            for (int position = slice; position < count; position += SLICES)
                total = fmaf(weights[position], values[(tile + position) * HEAD + element], total);
        __syncthreads();
    }
    parts[thread] = total;
    __syncthreads();
    if (slice == 0) {
        for (int i = 1; i < SLICES; ++i) total += parts[i * HEAD + element];
        out[row * HEAD + element] = total / sum;
    }
}

// One warp a token. The next best is the largest after the last one, in the order (logit down, id up). A NaN among the
// logits makes all shares NaN.
extern "C" __global__ void top_k(const float *logits, i64 experts, i64 k, i64 normalize, i64 *ids, float *shares) {
    in_turn();
    logits += blockIdx.x * experts;
    ids += blockIdx.x * k;
    shares += blockIdx.x * k;
    const int lane = threadIdx.x;
    float last = ENDLESS, highest = 0, chosen_sum = 0;
    i64 last_id = -1;
    bool has_nan = false;
    for (i64 expert = lane; expert < experts; expert += 32) has_nan |= logits[expert] != logits[expert];
    for (i64 place = 0; place < k; ++place) {
        float best = -ENDLESS;
        i64 best_id = experts;
        for (i64 expert = lane; expert < experts; expert += 32) {
            const float logit = fmaxf(logits[expert], -ENDLESS);  // of a NaN and a number, that is the number
            const bool is_left = logit < last || (logit == last && expert > last_id);
            if (is_left && (logit > best || best_id == experts)) best = logit, best_id = expert;
        }
        for (int other = 16; other; other >>= 1) {
            const float theirs = __shfl_xor_sync(~0u, best, other);
            const i64 their_id = __shfl_xor_sync(~0u, best_id, other);
            if (their_id < experts && (best_id == experts || theirs > best || (theirs == best && their_id < best_id)))
                best = theirs, best_id = their_id;
        }
        if (place == 0) highest = best;
        const float share = expf(best - highest);
        chosen_sum += share;
        if (lane == 0) ids[place] = best_id, shares[place] = share;
        last = best, last_id = best_id;
    }
    float sum = __any_sync(~0u, has_nan) ? __int_as_float(0x7FC00000) : chosen_sum;
    if (!normalize) {
        sum = 0;
        for (i64 expert = lane; expert < experts; expert += 32) sum += expf(logits[expert] - highest);
        sum = warp_sum(sum);
    }
    __syncwarp();
    for (i64 place = lane; place < k; place += 32) shares[place] = __fdiv_rn(shares[place], sum);
}

extern "C" __global__ void add(float *total, const float *addend, i64 count) {
    in_turn();
    const i64 place = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (place < count) total[place] += addend[place];
}

// total[tokens[s]] += weights[i] * rows[i] for i = order[starts[s]] to order[starts[s + 1]], in this order.
extern "C" __global__ void add_weighted(
    float *total, const float *rows, const i64 *tokens, const i64 *starts, const i64 *order, const float *weights,
    i64 columns
) {
    in_turn();
    const i64 column = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (column >= columns) return;
    float *place = total + tokens[blockIdx.y] * columns + column, sum = *place;
    for (i64 i = starts[blockIdx.y]; i < starts[blockIdx.y + 1]; ++i)
        sum = __fadd_rn(sum, __fmul_rn(weights[order[i]], rows[order[i] * columns + column]));
    *place = sum;
}

// total += the sum of weights[i] * rows[i], summed in the order of i.
extern "C" __global__ void add_routed(float *total, const float *rows, const float *weights, i64 count, i64 columns) {
    in_turn();
    const i64 column = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (column >= columns) return;
    float sum = 0;
    for (i64 i = 0; i < count; ++i) sum = __fadd_rn(sum, __fmul_rn(weights[i], rows[i * columns + column]));
    total[column] = __fadd_rn(total[column], sum);
}

// out[places[i]] = rows[i].
extern "C" __global__ void scatter(float *out, const i64 *places, const float *rows, i64 columns) {
    in_turn();
    const i64 column = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (column < columns) out[places[blockIdx.y] * columns + column] = rows[blockIdx.y * columns + column];
}
