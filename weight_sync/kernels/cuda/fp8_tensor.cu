// FP8 with one float32 scale per matrix, in two launches: the maximum first, because every element
// needs it (and ranks that share the matrix must agree on it), then the cast.

template <class T, int UNROLL>
__device__ __forceinline__ void measure(const Job* jobs, const int* tile_job, u32* infinities,
                                        u32* amax) {
  const Job job = jobs[tile_job[blockIdx.x]];
  const Tile tile = tile_of(job);
  const u32 total = tile.rows * tile.across;
  u32 most = 0;
  for (u32 base = threadIdx.x; base < total; base += THREADS * UNROLL) {
    T eight[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
      const u32 group = base + u * THREADS;
      const u32 down = tile.rows == 1 ? 0 : group / tile.across;
      const u32 right = (group - down * tile.across) * 8;
      if (group < total)
        eight[u].load(job.source + (tile.row + down) * job.row_stride * T::size,
                      tile.col + right, min(tile.cols - right, 8u), job.wide);
      else
        eight[u].clear();
    }
#pragma unroll
    for (int u = 0; u < UNROLL; u++)
      most = max(most, checked_magnitude(eight[u], infinities + job.slot));
  }
  most = block_max(most);
  if (threadIdx.x == 0) atomicMax(amax + job.slot, most);
}

template <class T, int UNROLL>
__device__ __forceinline__ void cast(const Job* jobs, const int* tile_job, const u32* amax) {
  const Job job = jobs[tile_job[blockIdx.x]];
  const Tile tile = tile_of(job);
  const u32 total = tile.rows * tile.across;
  const float scale = float_scale(amax[job.slot]);
  const float factor = __fdiv_rn(1.0f, scale);
  for (u32 base = threadIdx.x; base < total; base += THREADS * UNROLL) {
    T eight[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
      const u32 group = base + u * THREADS;
      const u32 down = tile.rows == 1 ? 0 : group / tile.across;
      const u32 right = (group - down * tile.across) * 8;
      if (group < total)
        eight[u].load(job.source + (tile.row + down) * job.row_stride * T::size,
                      tile.col + right, min(tile.cols - right, 8u), job.wide);
    }
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
      const u32 group = base + u * THREADS;
      const u32 down = tile.rows == 1 ? 0 : group / tile.across;
      const u32 right = (group - down * tile.across) * 8;
      if (group < total)
        store_cast(eight[u], factor,
                   job.value + (tile.row + down) * job.cols + tile.col + right,
                   min(tile.cols - right, 8u), job.wide);
    }
  }
  if (threadIdx.x == 0 && (i64)blockIdx.x == job.first_tile) *(float*)job.scale = scale;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    measure_bfloat16(const Job* jobs, const int* tile_job, u32* infinities, u32* amax) {
  measure<Bfloat16, 4>(jobs, tile_job, infinities, amax);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    measure_float32(const Job* jobs, const int* tile_job, u32* infinities, u32* amax) {
  measure<Float32, 2>(jobs, tile_job, infinities, amax);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    cast_bfloat16(const Job* jobs, const int* tile_job, const u32* amax) {
  cast<Bfloat16, 4>(jobs, tile_job, amax);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    cast_float32(const Job* jobs, const int* tile_job, const u32* amax) {
  cast<Float32, 2>(jobs, tile_job, amax);
}
