// Digest by the definition in kernels/mix.py: one block per tile, one atomic add per block.
// Tile table, 9 x int64: address, rows, elements per row, byte step of rows and of elements, flat
// index of the first element, its step per row and per element, slot.

#define C1 0x9E3779B1u
#define C2 0x85EBCA6Bu
#define C3 0xC2B2AE35u

// (u + 1) * weight(i), from the combined products of the index halves; T is the element's word.
template <typename T> __device__ __forceinline__ u64 mixed(T bits, u32 product) {
  u32 x = product;
  x ^= x >> 15;
  x *= C2;
  x ^= x >> 13;
  x |= 1;
  // Below 4 bytes u + 1 fits 32 bits, and the whole line is one multiply-add.
  return sizeof(T) < 4 ? (u64)((u32)bits + 1) * x : (u64)bits * x + x;
}
template <typename T> __device__ __forceinline__ u64 term(T bits, u64 index) {
  return mixed<T>(bits, ((u32)index * C1) ^ ((u32)(index >> 32) * C3));
}

// The elements of one 16-byte word with consecutive indices.
template <typename C>
__device__ __forceinline__ u64 word_terms(const uint4& word, u64 index) {
  typedef typename C::from S;
  constexpr int E = 16 / sizeof(S);
  const u32 part[4] = {word.x, word.y, word.z, word.w};
  const u32 low = (u32)index * C1;
  const u32 high = (u32)(index >> 32) * C3;
  u64 total = 0;
  if ((u32)index <= 0xFFFFFFFFu - (E - 1)) {
#pragma unroll
    for (int e = 0; e < E; ++e) {
      const u32 raw = part[e * sizeof(S) / 4] >> (8 * (e * sizeof(S) % 4));
      total += mixed(C::apply((S)raw), (low + (u32)e * C1) ^ high);
    }
    return total;
  }
  // Rare: the low half of the index wraps inside this word.
#pragma unroll 1
  for (int e = 0; e < E; ++e) {
    const u32 at = e * sizeof(S) / 4;
    const u32 whole = at == 0 ? word.x : at == 1 ? word.y : at == 2 ? word.z : word.w;
    total += term(C::apply((S)(whole >> (8 * (e * sizeof(S) % 4)))), index + e);
  }
  return total;
}

template <typename C>
__device__ __forceinline__ void run(const i64* __restrict__ tiles, u64* __restrict__ out) {
  typedef typename C::from S;
  constexpr u32 E = 16 / sizeof(S);
  constexpr u32 Z = sizeof(S);
  const i64* t = tiles + 9 * (i64)blockIdx.x;
  const u64 base = t[0];
  const u32 rows = (u32)t[1], inner = (u32)t[2];
  const i64 outer = t[3], step = t[4];
  const u64 index = t[5];
  const i64 index_outer = t[6], index_step = t[7];
  const u64 bits = base | (rows > 1 ? (u64)outer : 0);
  const bool words = step == Z && index_step == 1 && (bits & (Z - 1)) == 0;
  const u32 width = words ? inner / E : 0;
  const u32 count = rows * width;
  u64 total = 0;
  for (u32 i = threadIdx.x; i < count; i += 4 * THREADS) {
    uint4 v[4];
    u64 at[4];
    bool on[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const u32 j = i + k * THREADS;
      const u32 row = rows == 1 ? 0 : j / width;
      const u64 a = base + row * outer;
      const u32 head = ((u32)(-a) & 15) / Z;
      const u32 column = head + (j - row * width) * E;
      on[k] = j < count && column + E <= inner;
      at[k] = index + row * index_outer + column;
      v[k] = on[k] ? stream_load<uint4>(a + (u64)column * Z) : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int k = 0; k < 4; ++k)
      if (on[k]) total += word_terms<C>(v[k], at[k]);
  }
  // Elements before the first and after the last whole word of each row; all, without words.
  const u32 slack = words ? 2 * E : inner;
  const bool uneven = !words || (bits & 15) || inner % E;
  if (uneven) {
    for (u64 i = threadIdx.x; i < (u64)rows * slack; i += THREADS) {
      const u32 row = (u32)i / slack;
      const u32 k = (u32)i - row * slack;
      const u64 a = base + row * outer;
      u32 column = k;
      bool on = true;
      if (words) {
        u32 head = ((u32)(-a) & 15) / Z;
        if (head > inner) head = inner;
        const u32 tail = (inner - head) % E;
        on = k < E ? k < head : k - E < tail;
        column = k < E ? k : inner - tail + (k - E);
      }
      if (on)
        total += term(C::apply(load_any<S>(a + column * step)),
                      index + row * index_outer + column * index_step);
    }
  }
#pragma unroll
  for (int lane = 16; lane > 0; lane /= 2) total += __shfl_down_sync(0xFFFFFFFFu, total, lane);
  __shared__ u64 warps[THREADS / 32];
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = total;
  __syncthreads();
  if (threadIdx.x == 0) {
#pragma unroll
    for (int w = 1; w < THREADS / 32; ++w) total += warps[w];
    atomicAdd(out + t[8], total);
  }
}

#define KERNEL(NAME, ...)                                                                  \
  extern "C" __global__ void __launch_bounds__(THREADS) NAME(const i64* tiles, u64* out) { \
    run<__VA_ARGS__>(tiles, out);                                                          \
  }
KERNEL(digest_1, Same<u8>)
KERNEL(digest_2, Same<u16>)
KERNEL(digest_4, Same<u32>)
KERNEL(digest_float32_bfloat16, Cast<F32, BF16>)
KERNEL(digest_float32_float16, Cast<F32, F16>)
KERNEL(digest_bfloat16_float32, Cast<BF16, F32>)
KERNEL(digest_bfloat16_float16, Cast<BF16, F16>)
KERNEL(digest_float16_float32, Cast<F16, F32>)
KERNEL(digest_float16_bfloat16, Cast<F16, BF16>)
