// 16-bit floats without headers, so that NVRTC alone can compile this. BF16 chooses bfloat16, else float16; two of them are a word. GELU
// chooses what gated products go through, else SiLU. BITS 8: codes are E4M3 floats, INTEGER: int8.
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

__device__ __forceinline__ u32 shared_place(const void* pointer) { return (u32)__cvta_generic_to_shared(pointer); }
__device__ __forceinline__ void copy_16(const void* to, const void* from, bool there = true) {  // else zeros
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_place(to)), "l"(from), "r"(there ? 16 : 0) : "memory");
}
#if __CUDA_ARCH__ >= 900
// Barriers in shared memory, and the copy engine that arrives at them.
__device__ __forceinline__ void prepare(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void prepared() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ __forceinline__ void arrive(u32 barrier) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory"); }
__device__ __forceinline__ void expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void wait(u32 barrier, u32 parity) {
  u32 done;
  do {
    asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                 : "=r"(done)
                 : "r"(barrier), "r"(parity)
                 : "memory");
  } while (!done);
}
__device__ __forceinline__ void copy_all(u32 to, const void* from, u32 bytes, u32 barrier) {  // by the copy engine
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from), "r"(bytes),
               "r"(barrier)
               : "memory");
}
#endif

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

__device__ __forceinline__ float squares_of(u32 pair) { return low(pair) * low(pair) + high(pair) * high(pair); }
__device__ __forceinline__ float squares_of(const uint4& values) {
  return squares_of(values.x) + squares_of(values.y) + squares_of(values.z) + squares_of(values.w);
}

__device__ __forceinline__ u32 normed(u32 pair, u32 by, float factor) {
  return narrow(low(pair) * factor * low(by), high(pair) * factor * high(by));
}
__device__ __forceinline__ uint4 normed(const uint4& values, const uint4& by, float factor) {
  return make_uint4(normed(values.x, by.x, factor), normed(values.y, by.y, factor), normed(values.z, by.z, factor),
                    normed(values.w, by.w, factor));
}

// SiLU, or GELU by tanh: the value over 1 + e^-power, by instructions that need no care for subnormal numbers.
__device__ __forceinline__ float activated(float value) {
#ifdef GELU
  float power = -2.302208198f * (value + 0.044715f * value * value * value);
#else
  float power = -1.442695041f * value;
#endif
  asm("ex2.approx.ftz.f32 %0, %0;\nadd.f32 %0, %0, 0f3F800000;\nrcp.approx.ftz.f32 %0, %0;" : "+f"(power));
  return value * power;
}

#ifdef LINED
// Where an input of a token lies in what `wide.cu` reads, LINED tokens in a block: see its `line_up`.
__device__ __forceinline__ size_t lined_place(int token, int input, int inputs) {
  const int unit = input / 32 * 4 + input % 4, word = input / 8 % 4, half = input / 4 % 2;
  return (size_t)(token / LINED) * LINED * inputs + ((unit * LINED + token % LINED) * 4 + word) * 2 + half;
}
// Four inputs, from a multiple of 4 on.
__device__ __forceinline__ void put_lined(u16* lined, int token, int input, int inputs, const float4& value) {
  u16* place = lined + lined_place(token, input, inputs);
  const u32 first = narrow(value.x, value.y), second = narrow(value.z, value.w);
  place[0] = (u16)first, place[8 * LINED] = first >> 16, place[16 * LINED] = (u16)second, place[24 * LINED] = second >> 16;
}
#endif

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

template <int VECTORS>
__device__ __forceinline__ float squares_of(const uint4 (&held)[VECTORS]) {
  float squares = 0;
#pragma unroll
  for (int v = 0; v < VECTORS; v++) squares += squares_of(held[v]);
  return squares;
}

// What an RMS norm multiplies a row of `size` inputs by, of which each thread of a block holds some.
template <int VECTORS, int COUNT>
__device__ __forceinline__ float norm_factor(const uint4 (&held)[VECTORS], int size, float epsilon, float (&partial)[COUNT]) {
  return rsqrtf(sum_of_block(squares_of(held), partial) / size + epsilon);
}

// A row of vectors in a block of 256 threads, normed where NORM says so; zeros behind it, and where it is not there. The kernel before
// this one ends meanwhile.
template <int COUNT>
__device__ __forceinline__ void take_row(uint4 (&held)[COUNT], const uint4* row, bool there, const uint4* norm, int vectors, float epsilon,
                                         float (&partial)[8]) {
#ifdef NORM
  uint4 norms[COUNT];
#pragma unroll
  for (int r = 0; r < COUNT; r++) norms[r] = r * 256 + threadIdx.x < vectors ? norm[r * 256 + threadIdx.x] : make_uint4(0, 0, 0, 0);
#endif
  let_next_start();
  wait_for_previous();
#pragma unroll
  for (int r = 0; r < COUNT; r++)
    held[r] = there && r * 256 + threadIdx.x < vectors ? row[r * 256 + threadIdx.x] : make_uint4(0, 0, 0, 0);
#ifdef NORM
  const float factor = norm_factor(held, 8 * vectors, epsilon, partial);
#pragma unroll
  for (int r = 0; r < COUNT; r++) held[r] = normed(held[r], norms[r], factor);
#endif
}

#if BITS == 8
#ifdef INTEGER
#define REACH 127.5f
__device__ __forceinline__ u32 code(float value) { return (u32)__float2int_rn(fminf(fmaxf(value, -128.f), 127.f)) & 255; }
__device__ __forceinline__ u32 codes_of(float a, float b, float c, float d) {
  return code(a) | code(b) << 8 | code(c) << 16 | code(d) << 24;
}
#else
#define REACH 448.f
__device__ __forceinline__ u32 codes_of(float a, float b, float c, float d) {
  u32 codes;
  asm("{.reg .b16 few, rest; cvt.rn.satfinite.e4m3x2.f32 few, %2, %1; cvt.rn.satfinite.e4m3x2.f32 rest, %4, %3; mov.b32 %0, {few, rest};}"
      : "=r"(codes)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return codes;
}
#endif
__device__ __forceinline__ uint2 codes_of(const uint4& values, float by) {
  return make_uint2(codes_of(low(values.x) * by, high(values.x) * by, low(values.y) * by, high(values.y) * by),
                    codes_of(low(values.z) * by, high(values.z) * by, low(values.w) * by, high(values.w) * by));
}

__device__ __forceinline__ float largest_of(const uint4& values) {
  float largest = 0;
#pragma unroll
  for (int i = 0; i < 4; i++) largest = fmaxf(largest, fmaxf(fabsf(low(word_of(values, i))), fabsf(high(word_of(values, i)))));
  return largest;
}

// The scale of a token, of which the warps of a block know the largest input among their own.
template <int COUNT>
__device__ __forceinline__ float scale_of(const float* given, const float (&largest)[COUNT]) {
  if (given) return *given;
  float most = 0;
#pragma unroll
  for (int w = 0; w < COUNT; w++) most = fmaxf(most, largest[w]);
  return fmaxf(most / REACH, 0x1p-100f);
}
// The same where threads do; `partial` is free again behind it.
template <int COUNT>
__device__ __forceinline__ float scale_of(float largest, const float* given, float (&partial)[COUNT]) {
  largest = maximum_of_warp(largest);
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = largest;
  __syncthreads();
  const float scale = scale_of(given, partial);
  __syncthreads();
  return scale;
}
#endif
