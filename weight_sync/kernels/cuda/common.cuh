// Types, unaligned loads and float casts that every kernel here shares. No includes: NVRTC builds
// this text alone, put in front of one of the .cu files.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

// Threads per block of every kernel; kernels/cuda_module.py launches with the same number.
#define THREADS 256

template <int N> struct Bytes;
template <> struct Bytes<1> { typedef u8 word; };
template <> struct Bytes<2> { typedef u16 word; };
template <> struct Bytes<4> { typedef u32 word; };
template <> struct Bytes<8> { typedef uint2 word; };
template <> struct Bytes<16> { typedef uint4 word; };

// Every byte is used once: stream it through the caches instead of keeping it.
template <typename T> __device__ __forceinline__ T stream_load(u64 address) {
  return __ldcs(reinterpret_cast<const T*>(address));
}
template <typename T> __device__ __forceinline__ void stream_store(u64 address, T value) {
  __stcs(reinterpret_cast<T*>(address), value);
}

// One integer of any alignment.
template <typename T> __device__ __forceinline__ T load_any(u64 address) {
  if ((address & (sizeof(T) - 1)) == 0) return stream_load<T>(address);
  T value = 0;
#pragma unroll
  for (int k = 0; k < (int)sizeof(T); ++k)
    value |= (T)((T)stream_load<u8>(address + k) << (8 * k));
  return value;
}
template <typename T> __device__ __forceinline__ void store_any(u64 address, T value) {
  if ((address & (sizeof(T) - 1)) == 0) {
    stream_store<T>(address, value);
    return;
  }
#pragma unroll
  for (int k = 0; k < (int)sizeof(T); ++k) stream_store<u8>(address + k, (u8)(value >> (8 * k)));
}

// Casts on bit patterns by the rule of kernels/casts.py: nearest even, one NaN per type.
struct F32 {
  typedef u32 word;
  static __device__ __forceinline__ float widen(u32 bits) { return __uint_as_float(bits); }
  static __device__ __forceinline__ u32 narrow(float x) {
    return x != x ? 0x7FC00000u : __float_as_uint(x);
  }
};
struct BF16 {
  typedef u16 word;
  static __device__ __forceinline__ float widen(u16 bits) {
    return __uint_as_float((u32)bits << 16);
  }
  static __device__ __forceinline__ u16 narrow(float x) {
    u16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return x != x ? (u16)0x7FC0 : bits;
  }
};
struct F16 {
  typedef u16 word;
  static __device__ __forceinline__ float widen(u16 bits) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
  }
  static __device__ __forceinline__ u16 narrow(float x) {
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return x != x ? (u16)0x7E00 : bits;
  }
};

template <typename S, typename D> struct Cast {
  typedef typename S::word from;
  typedef typename D::word to;
  static __device__ __forceinline__ to apply(from bits) { return D::narrow(S::widen(bits)); }
};
template <typename T> struct Same {
  typedef T from;
  typedef T to;
  static __device__ __forceinline__ T apply(T bits) { return bits; }
};
