// MXFP8: blocks of 32 along a row. Four neighbouring lanes hold one block, eight elements each, and
// agree on its maximum by two shuffles; the element values never leave registers between load and store.

template <class T, int UNROLL>
__device__ __forceinline__ void mxfp8(const Job* jobs, const int* tile_job, u32* infinities) {
  const Job job = jobs[tile_job[blockIdx.x]];
  const Tile tile = tile_of(job);
  const u32 total = tile.rows * tile.across;  // a multiple of 4: lanes of a block end together
  for (u32 base = threadIdx.x; base - threadIdx.x < total; base += THREADS * UNROLL) {
    T eight[UNROLL];
    i64 at[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
      const u32 group = base + u * THREADS;
      const u32 down = tile.rows == 1 ? 0 : group / tile.across;
      const i64 row = tile.row + down;
      const i64 col = tile.col + (i64)(group - down * tile.across) * 8;
      at[u] = row * job.cols + col;
      if (group < total)
        eight[u].load(job.source + row * job.row_stride * T::size, col, 8, job.wide);
      else
        eight[u].clear();
    }
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
      u32 amax = checked_magnitude(eight[u], infinities + job.slot);
      amax = max(amax, __shfl_xor_sync(0xffffffffu, amax, 1));
      amax = max(amax, __shfl_xor_sync(0xffffffffu, amax, 2));
      // The exponent field is floor(log2(amax)) + 127; byte b means 2 ** (b - 127).
      const u32 byte = (u32)max((int)(amax >> 23) - 8, 1);
      if (base + u * THREADS < total) {
        store_cast(eight[u], __uint_as_float((254 - byte) << 23), job.value + at[u], 8, job.wide);
        if (threadIdx.x % 4 == 0) job.scale[at[u] >> 5] = (u8)byte;
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    mxfp8_bfloat16(const Job* jobs, const int* tile_job, u32* infinities) {
  mxfp8<Bfloat16, 4>(jobs, tile_job, infinities);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    mxfp8_float32(const Job* jobs, const int* tile_job, u32* infinities) {
  mxfp8<Float32, 2>(jobs, tile_job, infinities);
}
