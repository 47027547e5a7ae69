// How each ggml weight type is unpacked, and the dot product of one row with a few tokens' activations.
// Sources of the layouts: ggml-common.h and ggml-quants.c of ggml (MIT), and the package gguf.
//
// A lane works on one part of a block at a time. Of every type there is a struct with the part's quants as signed
// bytes, four to a word, in groups that share an integer scale and are APART columns from one to the next; OFFSET is
// what they have been left too large by. Addresses of rows are multiples of ALIGNMENT. Multiplications and additions of
// floats are written as intrinsics, so that no compilation contracts them differently and a token's result is the same
// in any company.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;

// Has a value stay in a register, rather than be computed again wherever it is used.
__device__ __forceinline__ void keep(u32 &value) { asm volatile("" : "+r"(value)); }

// In assembly, so that no header of the toolkit is needed where this is compiled.
__device__ __forceinline__ float half_to_float(u16 half) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(half));
    return value;
}

// Bytes that begin anywhere, as blocks of many types do: `skew` behind a multiple of 4.
struct Bytes {
    const u8 *aligned;
    int skew;

    // What lies at a multiple of its own size.
    template <class T> __device__ __forceinline__ T at(int offset) const {
        return *(const T *)(aligned + skew + offset);
    }
    __device__ __forceinline__ float half_at(int offset) const { return half_to_float(at<u16>(offset)); }

    __device__ __forceinline__ Bytes behind(int count) const {
        return {aligned + (skew + count & ~3), skew + count & 3};
    }

    // Words from a multiple of 4 on, cut out of aligned ones; none is touched that holds no byte of them.
    template <int COUNT> __device__ __forceinline__ void words_at(int offset, u32 (&words)[COUNT]) const {
        const u32 *whole = (const u32 *)(aligned + offset);
        u32 first = whole[0];
#pragma unroll
        for (int k = 0; k < COUNT; ++k) {
            const u32 second = whole[k + 1 < COUNT ? k + 1 : COUNT - (skew == 0)];
            words[k] = __funnelshift_r(first, second, 8 * skew);
            first = second;
        }
    }
};

// Bytes below 128, minus a number of at most 128, as signed bytes: the top bit keeps borrows inside their byte.
__device__ __forceinline__ u32 minus(u32 bytes, u32 number) {
    return ((bytes | 0x80808080u) - number * 0x01010101u) ^ 0x80808080u;
}

// The entries of a table of 16 signed bytes for the 8 nibbles of a word: those of the low nibbles, of the high ones.
__device__ __forceinline__ void look_up(const u32 (&table)[4], u32 nibbles, u32 &low, u32 &high) {
    u32 found[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const u32 index = nibbles >> 16 * half;
        const u32 below = __byte_perm(table[0], table[1], index & 0x7777);
        const u32 above = __byte_perm(table[2], table[3], index & 0x7777);
        const u32 is_above = __byte_perm(0xFF00, 0, (index >> 3) & 0x1111);
        found[half] = (below & ~is_above) | (above & is_above);
    }
    low = __byte_perm(found[0], found[1], 0x6420);
    high = __byte_perm(found[0], found[1], 0x7531);
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
    static __device__ __forceinline__ float at(const u8 *row, int column) {
        return half_to_float(((const u16 *)row)[column]);
    }
};

struct BF16 {
    static constexpr bool BLOCKS = false;
    static constexpr int BYTES = 2;
    static __device__ __forceinline__ float at(const u8 *row, int column) {
        return __uint_as_float((u32)((const u16 *)row)[column] << 16);
    }
};

// Blocks of 32 quants with one scale. Each is one part.

struct SmallBlock {
    static constexpr bool BLOCKS = true;
    static constexpr int COLUMNS = 32, PARTS = 1, APART = 16, ALIGNMENT = 2, OFFSET = 0;
    static constexpr bool SCALED = false, HAS_MINIMUMS = false;
    float d;
    static __device__ __forceinline__ int first_column(int part) { return 0; }
};

struct Q8_0 : SmallBlock {
    static constexpr int BYTES = 34, GROUPS = 1, WORDS = 8;
    u32 word[1][8];
    __device__ __forceinline__ void load(Bytes block, int part) {
        d = block.half_at(0);
        block.behind(2).words_at(0, word[0]);
    }
};

// The low nibbles of 16 bytes, then the high ones.
struct NibbleBlock : SmallBlock {
    static constexpr int GROUPS = 2, WORDS = 4;
    u32 word[2][4];
};

struct Q4_0 : NibbleBlock {
    static constexpr int BYTES = 18;
    __device__ __forceinline__ void load(Bytes block, int part) {
        u32 nibbles[4];
        d = block.half_at(0);
        block.behind(2).words_at(0, nibbles);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            word[0][k] = minus(nibbles[k] & 0x0F0F0F0F, 8);
            word[1][k] = minus(nibbles[k] >> 4 & 0x0F0F0F0F, 8);
        }
    }
};

struct Q5_0 : NibbleBlock {
    static constexpr int BYTES = 22;
    __device__ __forceinline__ void load(Bytes block, int part) {
        u32 fifths[1], nibbles[4];
        d = block.half_at(0);
        block.behind(2).words_at(0, fifths);
        block.behind(2).words_at(4, nibbles);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            word[0][k] = minus((nibbles[k] & 0x0F0F0F0F) | spread(fifths[0] >> 4 * k), 16);
            word[1][k] = minus((nibbles[k] >> 4 & 0x0F0F0F0F) | spread(fifths[0] >> (16 + 4 * k)), 16);
        }
    }
    // Bit i of the lowest four to bit 4 of byte i.
    static __device__ __forceinline__ u32 spread(u32 bits) { return ((bits & 15) * 0x00204081u & 0x01010101u) << 4; }
};

struct MXFP4 : NibbleBlock {
    static constexpr int BYTES = 17, ALIGNMENT = 1;
    __device__ __forceinline__ void load(Bytes block, int part) {
        const u32 table[4] = {0x03020100, 0x0C080604, 0xFDFEFF00, 0xF4F8FAFC};  // twice 0, 1/2, 1 ... and negated
        const u32 exponent = block.at<u8>(0);
        u32 nibbles[4];
        // Half of 2^(exponent - 127), because the table is doubled; the two smallest are subnormal.
        d = __uint_as_float(exponent < 2 ? 0x00200000u << exponent : (exponent - 1) << 23);
        block.behind(1).words_at(0, nibbles);
#pragma unroll
        for (int k = 0; k < 4; ++k) look_up(table, nibbles[k], word[0][k], word[1][k]);
    }
};

// Superblocks of 256 quants, whose groups have integer scales. Four parts each.

struct Superblock {
    static constexpr bool BLOCKS = true;
    static constexpr int COLUMNS = 256, PARTS = 4, GROUPS = 4, WORDS = 4, APART = 32, OFFSET = 0;
    static constexpr bool SCALED = true, HAS_MINIMUMS = false;
    float d;
};

// Four groups of 16 columns, 32 apart, in one half of the superblock.
struct SpreadGroups : Superblock {
    u32 word[4][4];
    int scale[4];
    static __device__ __forceinline__ int first_column(int part) { return 128 * (part >> 1) + 16 * (part & 1); }
};

struct Q2_K : SpreadGroups {
    static constexpr int BYTES = 84, ALIGNMENT = 4;
    static constexpr bool HAS_MINIMUMS = true;
    int minimum[4];
    float dmin;
    __device__ __forceinline__ void load(Bytes block, int part) {
        const int half = part >> 1, sixteen = part & 1;
        u32 packed[4];
        d = block.half_at(80);
        dmin = block.half_at(82);
        block.words_at(16 + 32 * half + 16 * sixteen, packed);
#pragma unroll
        for (int group = 0; group < 4; ++group) {
            const u32 both = block.at<u8>(8 * half + 2 * group + sixteen);
            scale[group] = both & 15;
            minimum[group] = both >> 4;
#pragma unroll
            for (int k = 0; k < 4; ++k) word[group][k] = packed[k] >> 2 * group & 0x03030303;
        }
    }
};

struct Q3_K : SpreadGroups {
    static constexpr int BYTES = 110, ALIGNMENT = 2, OFFSET = 4;
    __device__ __forceinline__ void load(Bytes block, int part) {
        const int half = part >> 1, sixteen = part & 1;
        u32 packed[4], thirds[4];
        d = block.half_at(108);
        block.words_at(32 + 32 * half + 16 * sixteen, packed);
        block.words_at(16 * sixteen, thirds);
#pragma unroll
        for (int group = 0; group < 4; ++group) {
            // Scale i has its lower 4 bits in nibble i/8 of byte i%8, its upper 2 in bits 2(i/4) of byte 8 + i%4.
            const int i = 2 * group + sixteen;
            const int low = block.at<u8>(96 + i) >> 4 * half & 15;
            const int high = block.at<u8>(104 + (i & 3)) >> 2 * (2 * half + (group >> 1)) & 3;
            scale[group] = (low | high << 4) - 32;
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const u32 third = thirds[k] >> (4 * half + group) & 0x01010101;
                word[group][k] = (packed[k] >> 2 * group & 0x03030303) | third << 2;
            }
        }
    }
};

struct Q6_K : SpreadGroups {
    static constexpr int BYTES = 210, ALIGNMENT = 2, OFFSET = 32;
    __device__ __forceinline__ void load(Bytes block, int part) {
        const int half = part >> 1, sixteen = part & 1;
        u32 first[4], second[4], top[4];
        d = block.half_at(208);
        block.words_at(64 * half + 16 * sixteen, first);
        block.words_at(64 * half + 32 + 16 * sixteen, second);
        block.words_at(128 + 32 * half + 16 * sixteen, top);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            word[0][k] = (first[k] & 0x0F0F0F0F) | (top[k] << 4 & 0x30303030);
            word[1][k] = (second[k] & 0x0F0F0F0F) | (top[k] << 2 & 0x30303030);
            word[2][k] = (first[k] >> 4 & 0x0F0F0F0F) | (top[k] & 0x30303030);
            word[3][k] = (second[k] >> 4 & 0x0F0F0F0F) | (top[k] >> 2 & 0x30303030);
        }
#pragma unroll
        for (int group = 0; group < 4; ++group)
            scale[group] = block.at<signed char>(192 + 8 * half + 2 * group + sixteen);
    }
};

// Two groups of 32 columns: the low and the high nibbles of 32 bytes.
struct NibbleGroups : Superblock {
    static constexpr int GROUPS = 2, WORDS = 8, ALIGNMENT = 16;
    static constexpr bool HAS_MINIMUMS = true;
    u32 word[2][8];
    int scale[2], minimum[2];
    float dmin;
    static __device__ __forceinline__ int first_column(int part) { return 64 * part; }
    // Two half floats, then 8 scales and 8 minimums of 6 bits in 12 bytes.
    __device__ __forceinline__ void take_header(uint4 header, int part) {
        const u32 upper_scales = (header.w & 0x0F0F0F0F) | (header.y >> 2 & 0x30303030);
        const u32 upper_minimums = (header.w >> 4 & 0x0F0F0F0F) | (header.z >> 2 & 0x30303030);
        const int shift = 16 * (part & 1);
        const u32 scales = (part < 2 ? header.y & 0x3F3F3F3F : upper_scales) >> shift;
        const u32 minimums = (part < 2 ? header.z & 0x3F3F3F3F : upper_minimums) >> shift;
        d = half_to_float((u16)header.x);
        dmin = half_to_float((u16)(header.x >> 16));
        scale[0] = scales & 255;
        scale[1] = scales >> 8 & 255;
        minimum[0] = minimums & 255;
        minimum[1] = minimums >> 8 & 255;
    }
};

struct Q4_K : NibbleGroups {
    static constexpr int BYTES = 144;
    __device__ __forceinline__ void load(Bytes block, int part) {
        take_header(block.at<uint4>(0), part);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const uint4 packed = block.at<uint4>(16 + 32 * part + 16 * half);
            const u32 nibbles[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                word[0][4 * half + k] = nibbles[k] & 0x0F0F0F0F;
                word[1][4 * half + k] = nibbles[k] >> 4 & 0x0F0F0F0F;
            }
        }
    }
};

struct Q5_K : NibbleGroups {
    static constexpr int BYTES = 176;
    __device__ __forceinline__ void load(Bytes block, int part) {
        take_header(block.at<uint4>(0), part);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const uint4 packed = block.at<uint4>(48 + 32 * part + 16 * half), bits = block.at<uint4>(16 + 16 * half);
            const u32 nibbles[4] = {packed.x, packed.y, packed.z, packed.w};
            const u32 fifths[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const u32 two = fifths[k] >> 2 * part;
                word[0][4 * half + k] = (nibbles[k] & 0x0F0F0F0F) | (two << 4 & 0x10101010);
                word[1][4 * half + k] = (nibbles[k] >> 4 & 0x0F0F0F0F) | (two << 3 & 0x10101010);
            }
        }
    }
};

// Twice the low and the high nibbles of 16 bytes.
struct IQ4_XS : Superblock {
    static constexpr int BYTES = 136, APART = 16, ALIGNMENT = 8;
    u32 word[4][4];
    int scale[4];
    static __device__ __forceinline__ int first_column(int part) { return 64 * part; }
    __device__ __forceinline__ void load(Bytes block, int part) {
        const u32 table[4] = {0xBFAD9881, 0xF6EADDCF, 0x26190D01, 0x71594535};  // -127 -104 -83 -65 ... 69 89 113
        const uint2 head = block.at<uint2>(0);  // d, then 8 upper pairs of bits, then 8 lower nibbles of scales
        d = half_to_float((u16)head.x);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int i = 2 * part + half;
            const int both = (int)((head.y >> 4 * i & 15) | (head.x >> (16 + 2 * i) & 3) << 4) - 32;
            scale[2 * half] = scale[2 * half + 1] = both;
#pragma unroll
            for (int pair = 0; pair < 2; ++pair) {
                const uint2 packed = block.at<uint2>(8 + 16 * i + 8 * pair);
                look_up(table, packed.x, word[2 * half][2 * pair], word[2 * half + 1][2 * pair]);
                look_up(table, packed.y, word[2 * half][2 * pair + 1], word[2 * half + 1][2 * pair + 1]);
            }
        }
    }
};

// What all block types share.

// A part of one token's record: quants, then (superblocks alone) sums of sixteens, then scales of blocks.
template <class W> struct Activations {
    static constexpr bool SUMMED = W::HAS_MINIMUMS || W::OFFSET;
    u32 word[W::GROUPS][W::WORDS];
    int sum[W::GROUPS];
    float scale;
    __device__ __forceinline__ void load(const u8 *record, u32 columns, u32 block, u32 part) {
        const u32 column = block * W::COLUMNS + W::first_column(part);
        const u8 *quants = record + column, *sums = record + (columns + column / 8);
#pragma unroll
        for (int group = 0; group < W::GROUPS; ++group) {
#pragma unroll
            for (int k = 0; k < W::WORDS; k += 4) {
                const uint4 four = *(const uint4 *)(quants + group * W::APART + 4 * k);
                word[group][k] = four.x, word[group][k + 1] = four.y;
                word[group][k + 2] = four.z, word[group][k + 3] = four.w;
            }
            if constexpr (SUMMED && W::WORDS == 4) {
                sum[group] = *(const short *)(sums + group * W::APART / 8);
            } else if constexpr (SUMMED) {
                const int two = *(const int *)(sums + group * W::APART / 8);
                sum[group] = (short)two + (two >> 16);
            }
        }
        scale = *(const float *)(record + (columns + (W::COLUMNS == 256 ? columns / 8 : 0) + 4 * block));
    }
};

// total + the products of four bytes with four. The intrinsic __dp4a is this instruction, but NVRTC 12.0 to 12.2 leave
// it unresolved.
__device__ __forceinline__ int dot_of_four(u32 a, u32 b, int total) {
    asm("dp4a.s32.s32 %0, %1, %2, %0;" : "+r"(total) : "r"(a), "r"(b));
    return total;
}

// total + the product of one part with a token's activations.
template <class W>
__device__ __forceinline__ float add_part(const W &weights, const Activations<W> &activations, float total) {
    int dot = 0, below = 0;
#pragma unroll
    for (int group = 0; group < W::GROUPS; ++group) {
        int group_dot = 0;
        if constexpr (W::OFFSET != 0) group_dot = -W::OFFSET * activations.sum[group];
#pragma unroll
        for (int k = 0; k < W::WORDS; ++k)
            group_dot = dot_of_four(weights.word[group][k], activations.word[group][k], group_dot);
        if constexpr (W::SCALED) dot += weights.scale[group] * group_dot;
        else dot += group_dot;
        if constexpr (W::HAS_MINIMUMS) below += weights.minimum[group] * activations.sum[group];
    }
    total = __fmaf_rn(__fmul_rn(weights.d, activations.scale), (float)dot, total);
    if constexpr (W::HAS_MINIMUMS)
        total = __fmaf_rn(-__fmul_rn(weights.dmin, activations.scale), (float)below, total);
    return total;
}

template <class W> __device__ __forceinline__ i64 row_bytes(int columns) {
    if constexpr (W::BLOCKS) return (i64)(columns / W::COLUMNS) * W::BYTES;
    else return (i64)columns * W::BYTES;
}
