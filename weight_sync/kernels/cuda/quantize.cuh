// Shared by the quantizing kernels: the job table, loads of eight elements, and the E4M3 cast.
// The rule they follow is in weight_sync/quantize/format.py; they are bit-equal to reference.py.
// Put between common.cuh and one of mxfp8.cu, fp8_block.cu, fp8_tensor.cu.

#define INFINITE 0x7f800000u
#define E4M3_NAN 0x7fu

// One matrix; 64-bit words in the order of weight_sync/quantize/table.py.
struct Job {
  const u8* source;  // address of element [0, 0]
  u8* value;         // row-major [rows, cols]
  u8* scale;
  i64 rows;
  i64 cols;
  i64 row_stride;  // elements between rows of the source
  i64 first_tile;
  i64 tiles_across;
  i64 tile_rows;
  i64 tile_cols;
  i64 slot;  // counter of infinities, and for FP8 per tensor the maximum
  i64 wide;  // 1 where every whole group of eight allows 16-byte loads and an 8-byte store
};

// The part of a matrix one thread block works on, in groups of eight columns.
struct Tile {
  i64 row;
  i64 col;
  u32 rows;
  u32 cols;
  u32 across;  // groups per row, the last one possibly short
};

__device__ __forceinline__ Tile tile_of(const Job& job) {
  const i64 tile = (i64)blockIdx.x - job.first_tile;
  Tile out;
  out.row = tile / job.tiles_across * job.tile_rows;
  out.col = tile % job.tiles_across * job.tile_cols;
  out.rows = (u32)max(min(job.tile_rows, job.rows - out.row), (i64)0);
  out.cols = (u32)max(min(job.tile_cols, job.cols - out.col), (i64)0);
  out.across = (out.cols + 7) / 8;
  return out;
}

// Eight neighbours of a row. magnitude() is the largest |x| as float32 bits: as integers these
// order like the numbers, with infinity above every number and NaN above infinity.
struct Bfloat16 {
  u32 word[4];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < 4; i++) word[i] = 0;
  }
  __device__ __forceinline__ void load(const u8* row, i64 col, u32 count, bool wide) {
    const u16* from = (const u16*)row + col;
    if (wide && count == 8) {
      const uint4 four = __ldcs((const uint4*)from);
      word[0] = four.x, word[1] = four.y, word[2] = four.z, word[3] = four.w;
    } else {
      clear();
#pragma unroll
      for (int i = 0; i < 8; i++)
        if (i < count) word[i / 2] |= (u32)from[i] << (i % 2 * 16);
    }
  }
  __device__ __forceinline__ u32 bits(int i) const {
    return i % 2 ? word[i / 2] & 0xffff0000u : word[i / 2] << 16;
  }
  __device__ __forceinline__ u32 magnitude() const {
    const u32 most = __vmaxu2(__vmaxu2(word[0] & 0x7fff7fffu, word[1] & 0x7fff7fffu),
                              __vmaxu2(word[2] & 0x7fff7fffu, word[3] & 0x7fff7fffu));
    return max(most << 16, most & 0xffff0000u);
  }
  static const int size = 2;
};

struct Float32 {
  u32 word[8];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < 8; i++) word[i] = 0;
  }
  __device__ __forceinline__ void load(const u8* row, i64 col, u32 count, bool wide) {
    const u32* from = (const u32*)row + col;
    if (wide && count == 8) {
      const uint4 low = __ldcs((const uint4*)from);
      const uint4 high = __ldcs((const uint4*)from + 1);
      word[0] = low.x, word[1] = low.y, word[2] = low.z, word[3] = low.w;
      word[4] = high.x, word[5] = high.y, word[6] = high.z, word[7] = high.w;
    } else {
      clear();
#pragma unroll
      for (int i = 0; i < 8; i++)
        if (i < count) word[i] = from[i];
    }
  }
  __device__ __forceinline__ u32 bits(int i) const { return word[i]; }
  __device__ __forceinline__ u32 magnitude() const {
    u32 most = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) most = max(most, word[i] & 0x7fffffffu);
    return most;
  }
  static const int size = 4;
};

// The magnitude over numbers only, for the rare group that holds something else.
template <class T>
__device__ __forceinline__ u32 finite_magnitude(const T& eight, u32* infinities) {
  u32 most = 0, infinite = 0;
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const u32 size = eight.bits(i) & 0x7fffffffu;
    if (size < INFINITE) most = max(most, size);
    infinite += size == INFINITE;
  }
  if (infinite) atomicAdd(infinities, infinite);
  return most;
}

template <class T>
__device__ __forceinline__ u32 checked_magnitude(const T& eight, u32* infinities) {
  const u32 most = eight.magnitude();
  return most < INFINITE ? most : finite_magnitude(eight, infinities);
}

__device__ __forceinline__ u32 cast_pair(float low, float high) {
  u16 out;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(out) : "f"(high), "f"(low));
  return out;
}

// Casts eight elements times factor and stores them. What is no number becomes 0x7f, whatever the
// hardware makes of its sign or of saturation.
template <class T>
__device__ __forceinline__ void store_cast(const T& eight, float factor, u8* to, u32 count,
                                           bool wide) {
  u32 half[2];
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const int i = 4 * h;
    half[h] = cast_pair(__uint_as_float(eight.bits(i)) * factor,
                        __uint_as_float(eight.bits(i + 1)) * factor) |
              cast_pair(__uint_as_float(eight.bits(i + 2)) * factor,
                        __uint_as_float(eight.bits(i + 3)) * factor)
                  << 16;
  }
  if (eight.magnitude() >= INFINITE) {
#pragma unroll
    for (int i = 0; i < 8; i++)
      if ((eight.bits(i) & 0x7fffffffu) >= INFINITE)
        half[i / 4] = half[i / 4] & ~(0xffu << (i % 4 * 8)) | E4M3_NAN << (i % 4 * 8);
  }
  if (wide && count == 8) {
    __stcs((uint2*)to, make_uint2(half[0], half[1]));
  } else {
#pragma unroll
    for (int i = 0; i < 8; i++)
      if (i < count) to[i] = (u8)(half[i / 4] >> (i % 4 * 8));
  }
}

// Largest value of all threads of the block, given to each of them.
__device__ __forceinline__ u32 block_max(u32 value) {
  __shared__ u32 of_warp[THREADS / 32];
  value = __reduce_max_sync(0xffffffffu, value);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = value;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < THREADS / 32; w++) value = max(value, of_warp[w]);
  return value;
}

// scale = max(amax / 448, 2 ** -126), every operation rounded to nearest.
__device__ __forceinline__ float float_scale(u32 amax) {
  return fmaxf(__fdiv_rn(__uint_as_float(amax), 448.0f), __uint_as_float(1u << 23));
}
