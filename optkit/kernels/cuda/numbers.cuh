// 16-bit floats without headers, so that NVRTC alone can compile this. BF16 chooses bfloat16, else float16; two of them are a word. GELU
// chooses what gated products go through, else SiLU.
typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;

#ifdef BF16
#define MMA "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
#define CODE_BASE 0x43004300u  // 128 + code: the 4 lowest bits of the mantissa count by ones
__device__ __forceinline__ float low(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
__device__ __forceinline__ float widen(u16 value) { return __uint_as_float((u32)value << 16); }
__device__ __forceinline__ u32 narrow(float first, float second) {
  u32 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  return pair;
}
#else
#define MMA "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
#define CODE_BASE 0x64006400u  // 1024 + code
__device__ __forceinline__ float widen(u16 value) {
  float wide;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(value));
  return wide;
}
__device__ __forceinline__ float low(u32 pair) { return widen((u16)pair); }
__device__ __forceinline__ float high(u32 pair) { return widen((u16)(pair >> 16)); }
__device__ __forceinline__ u32 narrow(float first, float second) {
  u32 pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  return pair;
}
#endif

// What the next kernel of the stream may do before this one has ended, and where it waits for that end (programmatic dependent launch).
__device__ __forceinline__ void let_next_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ uint4 load_once(const uint4* place) {
  uint4 value;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(place));  // volatile: it stays before the wait that it is meant to pass
  return value;
}

__device__ __forceinline__ float sum_of_warp(float value) {
#pragma unroll
  for (int step = 16; step; step >>= 1) value += __shfl_xor_sync(0xffffffffu, value, step);
  return value;
}
__device__ __forceinline__ float maximum_of_warp(float value) {
#pragma unroll
  for (int step = 16; step; step >>= 1) value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, step));
  return value;
}

__device__ __forceinline__ u32 word_of(const uint4& vector, int index) {
  return index == 0 ? vector.x : index == 1 ? vector.y : index == 2 ? vector.z : vector.w;
}

__device__ __forceinline__ float squares_of(const uint4& values) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const u32 pair = word_of(values, i);
    sum += low(pair) * low(pair) + high(pair) * high(pair);
  }
  return sum;
}

__device__ __forceinline__ u32 normed(u32 pair, u32 by, float factor) {
  return narrow(low(pair) * factor * low(by), high(pair) * factor * high(by));
}
__device__ __forceinline__ uint4 normed(const uint4& values, const uint4& by, float factor) {
  return make_uint4(normed(values.x, by.x, factor), normed(values.y, by.y, factor), normed(values.z, by.z, factor),
                    normed(values.w, by.w, factor));
}

__device__ __forceinline__ float activated(float value) {
#ifdef GELU
  return value / (1 + __expf(-1.5957691216057308f * (value + 0.044715f * value * value * value)));
#else
  return value / (1 + __expf(-value));
#endif
}

// The sum of a value over a block of COUNT warps; `partial` is free again behind it.
template <int COUNT>
__device__ __forceinline__ float sum_of_block(float value, float (&partial)[COUNT]) {
  value = sum_of_warp(value);
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = value;
  __syncthreads();
  value = 0;
#pragma unroll
  for (int w = 0; w < COUNT; w++) value += partial[w];
  __syncthreads();
  return value;
}

// What an RMS norm multiplies a row of vectors of 8 by, in a block of 256 threads.
__device__ __forceinline__ float norm_factor(const uint4* row, int vectors, float epsilon) {
  __shared__ float partial[8];
  float squares = 0;
  for (int vector = threadIdx.x; vector < vectors; vector += 256) squares += squares_of(row[vector]);
  return rsqrtf(sum_of_block(squares, partial) / (8 * vectors) + epsilon);
}
