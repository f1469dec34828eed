// From logits to the next token and from the token to its embedding; both ends of a decode step.
// Macros: BF16, WIDTH (of an embedding, a multiple of 8), VOCABULARY.
#define AT_ONCE (VOCABULARY % 4 ? 1 : 4)  // logits of a thread

// best [batch]: the largest logit (its order as an unsigned integer) above ~its index, so that the first of equals is taken
extern "C" __global__ void __launch_bounds__(256) choose(const float* logits, u64* best) {
  let_next_start();
  wait_for_previous();
  const float* row = logits + (size_t)blockIdx.y * VOCABULARY;
  u64 mine = 0;
  for (int i = (blockIdx.x * 256 + threadIdx.x) * AT_ONCE; i < VOCABULARY; i += gridDim.x * 256 * AT_ONCE) {
    alignas(4 * AT_ONCE) u32 read[AT_ONCE];
    if (AT_ONCE == 4)
      *(uint4*)read = *(const uint4*)(row + i);
    else
      read[0] = __float_as_uint(row[i]);
#pragma unroll
    for (int j = 0; j < AT_ONCE; j++) {
      const u32 bits = read[j] >> 31 ? ~read[j] : read[j] | 0x80000000u;
      const u64 candidate = (u64)bits << 32 | (u32) ~(i + j);
      mine = candidate > mine ? candidate : mine;
    }
  }
#pragma unroll
  for (int step = 16; step; step >>= 1) {
    u64 other = __shfl_xor_sync(0xffffffffu, mine, step);
    mine = other > mine ? other : mine;
  }
  if (threadIdx.x % 32 == 0) atomicMax(best + blockIdx.y, mine);
}

// tokens [positions + 1, batch]: the chosen ones go behind those of the position, which moves on; `best` is cleared for the next step
extern "C" __global__ void __launch_bounds__(256) keep(u64* best, long long* tokens, int* position, int batch) {
  let_next_start();
  wait_for_previous();
  const int next = *position + 1;
  __syncthreads();
  for (int i = threadIdx.x; i < batch; i += 256) {
    tokens[(size_t)next * batch + i] = (long long)(u32) ~(u32)best[i];
    best[i] = 0;
  }
  if (threadIdx.x == 0) *position = next;
}

extern "C" __global__ void __launch_bounds__(256)
    embed(const uint4* embedding, const long long* tokens, const int* position, uint4* hidden, float scale) {
  let_next_start();
  wait_for_previous();
  const uint4* row = embedding + (size_t)tokens[(size_t)*position * gridDim.x + blockIdx.x] * (WIDTH / 8);
  for (int i = threadIdx.x; i < WIDTH / 8; i += 256) {
    uint4 values = row[i];
    if (scale != 1)
      values = make_uint4(narrow(low(values.x) * scale, high(values.x) * scale), narrow(low(values.y) * scale, high(values.y) * scale),
                          narrow(low(values.z) * scale, high(values.z) * scale), narrow(low(values.w) * scale, high(values.w) * scale));
    hidden[(size_t)blockIdx.x * (WIDTH / 8) + i] = values;
  }
}
