// Batched copy of dense rows: one block per tile, the widest words both addresses allow.
// Tile table, 6 x int64: source, destination, rows, bytes per row, source step, destination step.

// Memory that nobody writes while the kernel runs, past the first cache, which keeps nothing of it.
template <typename T> __device__ __forceinline__ T load_once(u64 address) {
  return stream_load<T>(address);
}
template <> __device__ __forceinline__ uint4 load_once<uint4>(u64 address) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(address));
  return v;
}

template <int W>
__device__ __forceinline__ void one_row(u64 src, u64 dst, u32 nbytes) {
  typedef typename Bytes<W>::word V;
  const u32 count = nbytes / W;
  u32 i = threadIdx.x;
  // Eight independent loads per thread before the first store keep enough bytes in flight.
  for (; i + 7 * THREADS < count; i += 8 * THREADS) {
    V v[8];
#pragma unroll
    for (int k = 0; k < 8; ++k) v[k] = load_once<V>(src + (u64)(i + k * THREADS) * W);
#pragma unroll
    for (int k = 0; k < 8; ++k) stream_store<V>(dst + (u64)(i + k * THREADS) * W, v[k]);
  }
  for (; i < count; i += THREADS) stream_store<V>(dst + (u64)i * W, stream_load<V>(src + (u64)i * W));
}

template <int W>
__device__ __forceinline__ void many_rows(u64 src, u64 dst, u32 rows, u32 nbytes, i64 src_step,
                                          i64 dst_step) {
  typedef typename Bytes<W>::word V;
  const u32 width = nbytes / W;
  const u32 count = rows * width;
  for (u32 i = threadIdx.x; i < count; i += 4 * THREADS) {
    V v[4];
    u64 to[4];
    bool on[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const u32 j = i + k * THREADS;
      const u32 row = j / width;
      const u64 d = dst + row * dst_step;
      const u32 head = (u32)(-d) & (W - 1);
      // A row that starts off a word boundary holds one word less.
      on[k] = j < count && head + (j - row * width + 1) * W <= nbytes;
      const u64 skip = head + (j - row * width) * W;
      to[k] = d + skip;
      if (on[k]) v[k] = stream_load<V>(src + row * src_step + skip);
    }
#pragma unroll
    for (int k = 0; k < 4; ++k)
      if (on[k]) stream_store<V>(to[k], v[k]);
  }
}

// The bytes before the first and after the last whole word of each row.
template <int W>
__device__ __forceinline__ void edges(u64 src, u64 dst, u32 rows, u32 nbytes, i64 src_step,
                                      i64 dst_step) {
  for (u32 i = threadIdx.x; i < rows * (2 * W); i += THREADS) {
    const u32 row = i / (2 * W);
    const u32 k = i % (2 * W);
    const u64 d = dst + row * dst_step;
    u32 head = (u32)(-d) & (W - 1);
    if (head > nbytes) head = nbytes;
    const u32 tail = (nbytes - head) % W;
    const u32 at = k < W ? k : nbytes - tail + (k - W);
    if (k < W ? k < head : k - W < tail)
      stream_store<u8>(d + at, stream_load<u8>(src + row * src_step + at));
  }
}

template <int W>
__device__ __forceinline__ void tile(u64 src, u64 dst, u32 rows, u32 nbytes, i64 src_step,
                                     i64 dst_step) {
  const u32 head = (u32)(-dst) & (W - 1);
  if (rows == 1) {
    if (head < nbytes) one_row<W>(src + head, dst + head, nbytes - head);
  } else {
    many_rows<W>(src, dst, rows, nbytes, src_step, dst_step);
  }
  const u32 uneven = head | (nbytes & (W - 1)) | (rows > 1 ? (u32)dst_step & (W - 1) : 0);
  if (W > 1 && uneven) edges<W>(src, dst, rows, nbytes, src_step, dst_step);
}

extern "C" __global__ void __launch_bounds__(THREADS) copy_rows(const i64* __restrict__ tiles) {
  const i64* t = tiles + 6 * (i64)blockIdx.x;
  const u64 src = t[0], dst = t[1];
  const u32 rows = (u32)t[2], nbytes = (u32)t[3];
  const i64 src_step = t[4], dst_step = t[5];
  // Words of W bytes fit when source and destination are misaligned alike, in every row.
  const u32 apart = (u32)(src - dst) | (rows > 1 ? (u32)(src_step - dst_step) : 0);
  if ((apart & 15) == 0)
    tile<16>(src, dst, rows, nbytes, src_step, dst_step);
  else if ((apart & 7) == 0)
    tile<8>(src, dst, rows, nbytes, src_step, dst_step);
  else if ((apart & 3) == 0)
    tile<4>(src, dst, rows, nbytes, src_step, dst_step);
  else if ((apart & 1) == 0)
    tile<2>(src, dst, rows, nbytes, src_step, dst_step);
  else
    tile<1>(src, dst, rows, nbytes, src_step, dst_step);
}
