// Copies element by element: strided neighbours, and casts. One block per tile.
// Tile table, 8 x int64: source, destination, rows, elements per row, then byte steps: source row,
// destination row, source element, destination element.

// Four neighbours; one vector access each way.
template <typename T> struct alignas(4 * sizeof(T)) Quad { T v[4]; };

template <typename C>
__device__ __forceinline__ void run(const i64* __restrict__ tiles) {
  typedef typename C::from S;
  typedef typename C::to D;
  const i64* t = tiles + 8 * (i64)blockIdx.x;
  const u64 src = t[0], dst = t[1];
  const u32 rows = (u32)t[2], inner = (u32)t[3];
  const i64 src_outer = t[4], dst_outer = t[5], src_inner = t[6], dst_inner = t[7];
  const u64 src_bits = src | (rows > 1 ? (u64)src_outer : 0);
  const u64 dst_bits = dst | (rows > 1 ? (u64)dst_outer : 0);
  const bool quads = src_inner == sizeof(S) && dst_inner == sizeof(D) &&
                     (src_bits & (4 * sizeof(S) - 1)) == 0 && (dst_bits & (4 * sizeof(D) - 1)) == 0;
  const u32 width = quads ? inner / 4 : 0;
  const u32 count = rows * width;
  for (u32 i = threadIdx.x; i < count; i += 4 * THREADS) {
    Quad<S> v[4];
    u64 to[4];
    bool on[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const u32 j = i + k * THREADS;
      const u32 row = rows == 1 ? 0 : j / width;
      const u64 column = (u64)(j - row * width) * 4;
      on[k] = j < count;
      to[k] = dst + row * dst_outer + column * sizeof(D);
      if (on[k])
        v[k] = *reinterpret_cast<const Quad<S>*>(src + row * src_outer + column * sizeof(S));
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      Quad<D> out;
#pragma unroll
      for (int e = 0; e < 4; ++e) out.v[e] = C::apply(v[k].v[e]);
      if (on[k]) *reinterpret_cast<Quad<D>*>(to[k]) = out;
    }
  }
  // What four-element words left over; everything, when they do not fit.
  const u32 from = width * 4;
  const u32 rest = inner - from;
  for (u32 i = threadIdx.x; i < rows * rest; i += THREADS) {
    const u32 row = i / rest;
    const u64 column = from + (i - row * rest);
    store_any<D>(dst + row * dst_outer + column * dst_inner,
                 C::apply(load_any<S>(src + row * src_outer + column * src_inner)));
  }
}

#define KERNEL(NAME, ...)                                                       \
  extern "C" __global__ void __launch_bounds__(THREADS) NAME(const i64* tiles) { \
    run<__VA_ARGS__>(tiles);                                                    \
  }
KERNEL(copy_1, Same<u8>)
KERNEL(copy_2, Same<u16>)
KERNEL(copy_4, Same<u32>)
KERNEL(copy_8, Same<u64>)
KERNEL(cast_float32_bfloat16, Cast<F32, BF16>)
KERNEL(cast_float32_float16, Cast<F32, F16>)
KERNEL(cast_bfloat16_float32, Cast<BF16, F32>)
KERNEL(cast_bfloat16_float16, Cast<BF16, F16>)
KERNEL(cast_float16_float32, Cast<F16, F32>)
KERNEL(cast_float16_bfloat16, Cast<F16, BF16>)
