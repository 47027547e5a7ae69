// How each ggml weight type is unpacked, and the dot product of one row with a few tokens' activations.
// Sources of the layouts: ggml-common.h and ggml-quants.c of ggml (MIT), and the package gguf.
//
// A lane works on one part of a block at a time. Of every type there is a struct with the part's quants as signed
// bytes, four to a word, in groups that share an integer scale. Multiplications and additions of floats are written
// as intrinsics, so that no compilation contracts them differently and a token's result is the same in any company.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;

// Activations of one token, rounded: quants, then (superblocks of 256 alone) sums of sixteens, then scales.
struct Record {
    const signed char *quants;
    const short *sums;
    const float *scales;
};

// In assembly, so that no header of the toolkit is needed where this is compiled.
__device__ __forceinline__ float half_to_float(u16 half) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(half));
    return value;
}

__device__ __forceinline__ float half_at(const u8 *place) { return half_to_float(*(const u16 *)place); }

// Words at an address that is a multiple of 2, where blocks have such sizes: cut out of aligned ones.
template <int COUNT> __device__ __forceinline__ void words_at_2(const u8 *place, u32 (&words)[COUNT]) {
    const u32 *aligned = (const u32 *)((i64)place & ~3ll);
    const u32 shift = 8 * ((u32)(i64)place & 2);
    u32 whole[COUNT + 1];
#pragma unroll
    for (int k = 0; k < COUNT; ++k) whole[k] = aligned[k];
    whole[COUNT] = shift ? aligned[COUNT] : 0;  // it may lie past the end of all memory otherwise
#pragma unroll
    for (int k = 0; k < COUNT; ++k) words[k] = __funnelshift_r(whole[k], whole[k + 1], shift);
}

__device__ __forceinline__ u32 word_at_2(const u8 *place) {
    const u16 *halves = (const u16 *)place;
    return halves[0] | (u32)halves[1] << 16;
}

__device__ __forceinline__ u32 word_at_1(const u8 *place) {
    return place[0] | (u32)place[1] << 8 | (u32)place[2] << 16 | (u32)place[3] << 24;
}

// Bytes below 128, minus a number of at most 128, as signed bytes: the top bit keeps borrows inside their byte.
__device__ __forceinline__ int minus(u32 bytes, u32 number) {
    return (int)(((bytes | 0x80808080u) - number * 0x01010101u) ^ 0x80808080u);
}

// The entries of a table of 16 signed bytes for the 8 nibbles of a word: those of the low nibbles, of the high ones.
__device__ __forceinline__ void look_up(const u32 (&table)[4], u32 nibbles, int &low, int &high) {
    u32 found[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const u32 index = nibbles >> 16 * half;
        const u32 below = __byte_perm(table[0], table[1], index & 0x7777);
        const u32 above = __byte_perm(table[2], table[3], index & 0x7777);
        const u32 is_above = __byte_perm(0xFF00, 0, (index >> 3) & 0x1111);
        found[half] = (below & ~is_above) | (above & is_above);
    }
    low = (int)__byte_perm(found[0], found[1], 0x6420);
    high = (int)__byte_perm(found[0], found[1], 0x7531);
}

// Plain floats: the activations are floats too, rounded to the weights' precision.

struct F32 {
    static constexpr bool BLOCKS = false;
    static constexpr int BYTES = 4;
    static __device__ __forceinline__ float at(const u8 *row, int column) { return ((const float *)row)[column]; }
};

struct F16 {
    static constexpr bool BLOCKS = false;
    static constexpr int BYTES = 2;
    static __device__ __forceinline__ float at(const u8 *row, int column) { return half_at(row + 2 * column); }
};

struct BF16 {
    static constexpr bool BLOCKS = false;
    static constexpr int BYTES = 2;
    static __device__ __forceinline__ float at(const u8 *row, int column) {
        return __uint_as_float((u32)((const u16 *)row)[column] << 16);
    }
};

// Blocks of 32 quants with one scale. Four lanes share a block.

struct SmallBlock {
    static constexpr bool BLOCKS = true;
    static constexpr int COLUMNS = 32, PARTS = 4;
    static constexpr bool SCALED = false, HAS_MINIMUMS = false;
    float d;
};

struct Q8_0 : SmallBlock {
    static constexpr int BYTES = 34, GROUPS = 1, WORDS = 2;
    int word[1][2];
    static __device__ __forceinline__ int column(int part, int group) { return 8 * part; }
    __device__ __forceinline__ void load(const u8 *block, int part) {
        u32 quants[2];
        words_at_2(block + 2 + 8 * part, quants);
        d = half_at(block);
        word[0][0] = (int)quants[0];
        word[0][1] = (int)quants[1];
    }
};

struct NibbleBlock : SmallBlock {
    static constexpr int GROUPS = 2, WORDS = 1;
    int word[2][1];
    static __device__ __forceinline__ int column(int part, int group) { return 4 * part + 16 * group; }
};

struct Q4_0 : NibbleBlock {
    static constexpr int BYTES = 18;
    __device__ __forceinline__ void load(const u8 *block, int part) {
        const u32 nibbles = word_at_2(block + 2 + 4 * part);
        d = half_at(block);
        word[0][0] = minus(nibbles & 0x0F0F0F0F, 8);
        word[1][0] = minus(nibbles >> 4 & 0x0F0F0F0F, 8);
    }
};

struct Q5_0 : NibbleBlock {
    static constexpr int BYTES = 22;
    __device__ __forceinline__ void load(const u8 *block, int part) {
        const u32 fifths = word_at_2(block + 2) >> 4 * part, nibbles = word_at_2(block + 6 + 4 * part);
        d = half_at(block);
        word[0][0] = minus((nibbles & 0x0F0F0F0F) | spread(fifths), 16);
        word[1][0] = minus((nibbles >> 4 & 0x0F0F0F0F) | spread(fifths >> 16), 16);
    }
    // Bit i of the lowest four to bit 4 of byte i.
    static __device__ __forceinline__ u32 spread(u32 bits) { return ((bits & 15) * 0x00204081u & 0x01010101u) << 4; }
};

struct MXFP4 : NibbleBlock {
    static constexpr int BYTES = 17;
    __device__ __forceinline__ void load(const u8 *block, int part) {
        const u32 table[4] = {0x03020100, 0x0C080604, 0xFDFEFF00, 0xF4F8FAFC};  // twice 0, 1/2, 1 ... and negated
        const u32 exponent = block[0];
        // Half of 2^(exponent - 127), because the table is doubled; the two smallest are subnormal.
        d = __uint_as_float(exponent < 2 ? 0x00200000u << exponent : (exponent - 1) << 23);
        look_up(table, word_at_1(block + 1 + 4 * part), word[0][0], word[1][0]);
    }
};

// Superblocks of 256 quants, whose groups have integer scales. Eight lanes share a superblock.

struct Superblock {
    static constexpr bool BLOCKS = true;
    static constexpr int COLUMNS = 256, PARTS = 8;
    static constexpr bool SCALED = true;
    float d;
};

// Four groups of 8 columns, 32 apart, in one half of the superblock.
struct QuarterGroups : Superblock {
    static constexpr int GROUPS = 4, WORDS = 2;
    int word[4][2], scale[4];
    static __device__ __forceinline__ int column(int part, int group) {
        return 128 * (part >> 2) + 32 * group + 8 * (part & 3);
    }
};

struct Q2_K : QuarterGroups {
    static constexpr int BYTES = 84;
    static constexpr bool HAS_MINIMUMS = true;
    int minimum[4];
    float dmin;
    __device__ __forceinline__ void load(const u8 *block, int part) {
        const int half = part >> 2, eight = part & 3;
        const u32 *quants = (const u32 *)(block + 16 + 32 * half + 8 * eight);
        const u32 packed[2] = {quants[0], quants[1]};
        d = half_at(block + 80);
        dmin = half_at(block + 82);
#pragma unroll
        for (int group = 0; group < 4; ++group) {
            const u8 both = block[8 * half + 2 * group + (eight >> 1)];
            scale[group] = both & 15;
            minimum[group] = both >> 4;
            word[group][0] = (int)(packed[0] >> 2 * group & 0x03030303);
            word[group][1] = (int)(packed[1] >> 2 * group & 0x03030303);
        }
    }
};

struct Q3_K : QuarterGroups {
    static constexpr int BYTES = 110;
    static constexpr bool HAS_MINIMUMS = false;
    __device__ __forceinline__ void load(const u8 *block, int part) {
        const int half = part >> 2, eight = part & 3;
        const u8 *scales = block + 96;
        u32 packed[2], third[2];
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            packed[k] = word_at_2(block + 32 + 32 * half + 8 * eight + 4 * k);
            third[k] = word_at_2(block + 8 * eight + 4 * k) >> 4 * half;
        }
        d = half_at(block + 108);
#pragma unroll
        for (int group = 0; group < 4; ++group) {
            // Scale i has its lower 4 bits in nibble i/8 of byte i%8, its upper 2 in bits 2(i/4) of byte 8 + i%4.
            const int i = 2 * group + (eight >> 1);
            const int low = scales[i] >> 4 * half & 15;
            const int high = scales[8 + (i & 3)] >> 2 * (2 * half + (group >> 1)) & 3;
            scale[group] = (low | high << 4) - 32;
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                const u32 bits = (packed[k] >> 2 * group & 0x03030303) | (third[k] >> group & 0x01010101) << 2;
                word[group][k] = minus(bits, 4);
            }
        }
    }
};

struct Q6_K : QuarterGroups {
    static constexpr int BYTES = 210;
    static constexpr bool HAS_MINIMUMS = false;
    __device__ __forceinline__ void load(const u8 *block, int part) {
        const int half = part >> 2, eight = part & 3;
        const u8 *low = block + 64 * half + 8 * eight, *high = block + 128 + 32 * half + 8 * eight;
        u32 first[2], second[2], top[2], scales[2];
        words_at_2(low, first);
        words_at_2(low + 32, second);
        words_at_2(high, top);
        words_at_2(block + 192 + 8 * half, scales);
        d = half_at(block + 208);
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            word[0][k] = minus((first[k] & 0x0F0F0F0F) | (top[k] << 4 & 0x30303030), 32);
            word[1][k] = minus((second[k] & 0x0F0F0F0F) | (top[k] << 2 & 0x30303030), 32);
            word[2][k] = minus((first[k] >> 4 & 0x0F0F0F0F) | (top[k] & 0x30303030), 32);
            word[3][k] = minus((second[k] >> 4 & 0x0F0F0F0F) | (top[k] >> 2 & 0x30303030), 32);
        }
#pragma unroll
        for (int group = 0; group < 4; ++group)  // signed byte 2 * group + eight / 2 of them
            scale[group] = (signed char)(scales[group >> 1] >> (16 * (group & 1) + 8 * (eight >> 1)));
    }
};

// Two groups of 16 columns, 32 apart: the low and the high nibbles of 16 bytes.
struct NibbleGroups : Superblock {
    static constexpr int GROUPS = 2, WORDS = 4;
    static constexpr bool HAS_MINIMUMS = true;
    int word[2][4], scale[2], minimum[2];
    float dmin;
    static __device__ __forceinline__ int column(int part, int group) {
        return 64 * (part >> 1) + 32 * group + 16 * (part & 1);
    }
    // Two half floats, then 8 scales and 8 minimums of 6 bits in 12 bytes.
    __device__ __forceinline__ void take_header(uint4 header, int part) {
        const u32 upper_scales = (header.w & 0x0F0F0F0F) | (header.y >> 2 & 0x30303030);
        const u32 upper_minimums = (header.w >> 4 & 0x0F0F0F0F) | (header.z >> 2 & 0x30303030);
        const u32 scales = part < 4 ? header.y & 0x3F3F3F3F : upper_scales;
        const u32 minimums = part < 4 ? header.z & 0x3F3F3F3F : upper_minimums;
        const int shift = 16 * (part >> 1 & 1);
        d = half_to_float((u16)header.x);
        dmin = half_to_float((u16)(header.x >> 16));
        scale[0] = scales >> shift & 255;
        scale[1] = scales >> (shift + 8) & 255;
        minimum[0] = minimums >> shift & 255;
        minimum[1] = minimums >> (shift + 8) & 255;
    }
};

struct Q4_K : NibbleGroups {
    static constexpr int BYTES = 144;
    __device__ __forceinline__ void load(const u8 *block, int part) {
        const uint4 packed = *(const uint4 *)(block + 16 + 16 * part);
        const u32 nibbles[4] = {packed.x, packed.y, packed.z, packed.w};
        take_header(*(const uint4 *)block, part);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            word[0][k] = (int)(nibbles[k] & 0x0F0F0F0F);
            word[1][k] = (int)(nibbles[k] >> 4 & 0x0F0F0F0F);
        }
    }
};

struct Q5_K : NibbleGroups {
    static constexpr int BYTES = 176;
    __device__ __forceinline__ void load(const u8 *block, int part) {
        const uint4 packed = *(const uint4 *)(block + 48 + 16 * part);
        const uint4 bits = *(const uint4 *)(block + 16 + 16 * (part & 1));
        const u32 nibbles[4] = {packed.x, packed.y, packed.z, packed.w}, fifths[4] = {bits.x, bits.y, bits.z, bits.w};
        const int first = 2 * (part >> 1);
        take_header(*(const uint4 *)block, part);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            word[0][k] = (int)((nibbles[k] & 0x0F0F0F0F) | (fifths[k] >> first & 0x01010101) << 4);
            word[1][k] = (int)((nibbles[k] >> 4 & 0x0F0F0F0F) | (fifths[k] >> (first + 1) & 0x01010101) << 4);
        }
    }
};

struct IQ4_XS : Superblock {
    static constexpr int BYTES = 136, GROUPS = 2, WORDS = 4;
    static constexpr bool HAS_MINIMUMS = false;
    int word[2][4], scale[2];
    static __device__ __forceinline__ int column(int part, int group) { return 32 * part + 16 * group; }
    __device__ __forceinline__ void load(const u8 *block, int part) {
        const u32 table[4] = {0xBFAD9881, 0xF6EADDCF, 0x26190D01, 0x71594535};  // -127 -104 -83 -65 ... 69 89 113
        const uint2 head = *(const uint2 *)block;  // d, then 16 upper pairs of bits, then 8 lower nibbles of scales
        const uint2 *quants = (const uint2 *)(block + 8 + 16 * part);
        const uint2 packed[2] = {quants[0], quants[1]};
        d = half_to_float((u16)head.x);
        scale[0] = scale[1] = (int)((head.y >> 4 * part & 15) | (head.x >> (16 + 2 * part) & 3) << 4) - 32;
        look_up(table, packed[0].x, word[0][0], word[1][0]);
        look_up(table, packed[0].y, word[0][1], word[1][1]);
        look_up(table, packed[1].x, word[0][2], word[1][2]);
        look_up(table, packed[1].y, word[0][3], word[1][3]);
    }
};

// What all block types share.

template <int WORDS> __device__ __forceinline__ void load_words(const signed char *place, int (&words)[WORDS]) {
    if constexpr (WORDS == 4) {
        const int4 four = *(const int4 *)place;
        words[0] = four.x, words[1] = four.y, words[2] = four.z, words[3] = four.w;
    } else if constexpr (WORDS == 2) {
        const int2 two = *(const int2 *)place;
        words[0] = two.x, words[1] = two.y;
    } else {
        words[0] = *(const int *)place;
    }
}

// total + the product of one part with a token's activations.
template <class W>
__device__ __forceinline__ float add_part(const W &weights, const Record &record, int block, int part, float total) {
    int dot = 0, below = 0;
#pragma unroll
    for (int group = 0; group < W::GROUPS; ++group) {
        const int column = block * W::COLUMNS + W::column(part, group);
        int activations[W::WORDS], group_dot = 0;
        load_words(record.quants + column, activations);
#pragma unroll
        for (int k = 0; k < W::WORDS; ++k) group_dot = __dp4a(weights.word[group][k], activations[k], group_dot);
        if constexpr (W::SCALED) dot += weights.scale[group] * group_dot;
        else dot += group_dot;
        if constexpr (W::HAS_MINIMUMS) {
            int sum = 0;
            if constexpr (W::WORDS == 4) sum = record.sums[column >> 4];
            else
#pragma unroll
                for (int k = 0; k < W::WORDS; ++k) sum = __dp4a(0x01010101, activations[k], sum);
            below += weights.minimum[group] * sum;
        }
    }
    const float scale = record.scales[block];
    total = __fmaf_rn(__fmul_rn(weights.d, scale), (float)dot, total);
    if constexpr (W::HAS_MINIMUMS) total = __fmaf_rn(-__fmul_rn(weights.dmin, scale), (float)below, total);
    return total;
}

// The sums of a warp's lanes, a power of two of them: sum number i to the 32 / COUNT lanes from i * 32 / COUNT on. What
// is added to what does not depend on COUNT.
template <int COUNT> __device__ __forceinline__ float warp_sums(float (&sums)[COUNT]) {
    const int lane = threadIdx.x & 31;
    int left = COUNT;
#pragma unroll
    for (int distance = 16; distance; distance >>= 1) {
        if (left > 1) {
            left /= 2;
            const bool upper = lane & distance;
#pragma unroll
            for (int i = 0; i < COUNT / 2; ++i)
                if (i < left) {
                    const float theirs = upper ? sums[i] : sums[i + left], mine = upper ? sums[i + left] : sums[i];
                    sums[i] = __fadd_rn(mine, __shfl_xor_sync(~0u, theirs, distance));
                }
        } else {
            sums[0] = __fadd_rn(sums[0], __shfl_xor_sync(~0u, sums[0], distance));
        }
    }
    return sums[0];
}

template <class W> __device__ __forceinline__ i64 row_bytes(int columns) {
    if constexpr (W::BLOCKS) return (i64)(columns / W::COLUMNS) * W::BYTES;
    else return (i64)columns * W::BYTES;
}

// The record at `place`, for weights of type W.
template <class W> __device__ __forceinline__ Record record_at(const u8 *place, int columns) {
    Record record;
    record.quants = (const signed char *)place;
    record.sums = (const short *)(place + columns);
    if constexpr (W::BLOCKS)
        record.scales = (const float *)(place + columns + (W::COLUMNS == 256 ? columns / 8 : 0));
    else record.scales = (const float *)place;
    return record;
}

// ROWS rows times TOKENS records, by `lanes` threads side by side that are whole warps, of which this is number `lane`:
// this thread's share of the sum of row r and token t at r * TOKENS + t. All loads of weights come before their first
// use, so that as many as possible are under way.
template <class W, int ROWS, int TOKENS>
__device__ __forceinline__ void dot_rows(
    const u8 *const (&rows)[ROWS], int columns, int lane, int lanes, const Record (&records)[TOKENS],
    float (&sums)[ROWS * TOKENS]
) {
#pragma unroll
    for (int i = 0; i < ROWS * TOKENS; ++i) sums[i] = 0;
    if constexpr (W::BLOCKS) {
        const int parts = columns / W::COLUMNS * W::PARTS;
        for (int number = lane; number < parts; number += lanes) {
            const int block = number / W::PARTS, part = number % W::PARTS;
            W weights[ROWS];
#pragma unroll
            for (int r = 0; r < ROWS; ++r) weights[r].load(rows[r] + block * W::BYTES, part);
#pragma unroll
            for (int r = 0; r < ROWS; ++r)
#pragma unroll
                for (int t = 0; t < TOKENS; ++t)
                    sums[r * TOKENS + t] = add_part(weights[r], records[t], block, part, sums[r * TOKENS + t]);
        }
    } else {
#pragma unroll 4
        for (int column = lane; column < columns; column += lanes) {
            float weights[ROWS];
#pragma unroll
            for (int r = 0; r < ROWS; ++r) weights[r] = W::at(rows[r], column);
#pragma unroll
            for (int r = 0; r < ROWS; ++r)
#pragma unroll
                for (int t = 0; t < TOKENS; ++t)
                    sums[r * TOKENS + t] = __fmaf_rn(weights[r], records[t].scales[column], sums[r * TOKENS + t]);
        }
    }
}
