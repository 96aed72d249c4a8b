// FP8 with one float32 scale per 128x128 block: a thread block per scale, its elements in registers,
// so that memory is read once.

#define PASSES 8  // 16 rows of 128 columns each

template <class T>
__device__ __forceinline__ void fp8_block(const Job* jobs, const int* tile_job, u32* infinities) {
  const Job job = jobs[tile_job[blockIdx.x]];
  const Tile tile = tile_of(job);
  const i64 col = tile.col + threadIdx.x % 16 * 8;
  const u32 count = (u32)max(min(job.cols - col, (i64)8), (i64)0);
  T eight[PASSES];
  u32 amax = 0;
#pragma unroll
  for (int p = 0; p < PASSES; p++) {
    const u32 down = p * 16 + threadIdx.x / 16;
    if (count && down < tile.rows)
      eight[p].load(job.source + (tile.row + down) * job.row_stride * T::size, col, count,
                    job.wide);
    else
      eight[p].clear();
  }
#pragma unroll
  for (int p = 0; p < PASSES; p++)
    amax = max(amax, checked_magnitude(eight[p], infinities + job.slot));
  const float scale = float_scale(block_max(amax));
  const float factor = __fdiv_rn(1.0f, scale);
#pragma unroll
  for (int p = 0; p < PASSES; p++) {
    const u32 down = p * 16 + threadIdx.x / 16;
    if (count && down < tile.rows)
      store_cast(eight[p], factor, job.value + (tile.row + down) * job.cols + col, count, job.wide);
  }
  if (threadIdx.x == 0) ((float*)job.scale)[(i64)blockIdx.x - job.first_tile] = scale;
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    fp8_block_bfloat16(const Job* jobs, const int* tile_job, u32* infinities) {
  fp8_block<Bfloat16>(jobs, tile_job, infinities);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    fp8_block_float32(const Job* jobs, const int* tile_job, u32* infinities) {
  fp8_block<Float32>(jobs, tile_job, infinities);
}
