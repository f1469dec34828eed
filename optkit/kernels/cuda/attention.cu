// Attention of one new token for each sequence: turns q and k by their position, keeps k and v, attends to all that is kept.
//
// qkv [batch, (HEADS + 2 KV_HEADS) SIZE]; keys, values [batch, KV_HEADS, capacity, SIZE]; cosines, sines float [positions, SIZE / 2], for
// halves that are turned against each other (as Llama's); output [batch, HEADS * SIZE]. A block for each head of keys, share of the past,
// and sequence: LANES threads hold a key, 8 channels each, and go over every AT_ONCE-th one with a softmax of their own; then all of them
// are joined. Macros: BF16, HEADS, KV_HEADS, SIZE (a power of two from 16 to 256), SHARES, QK_NORM.
#define GROUP (HEADS / KV_HEADS)
#define LANES (SIZE / 8)
#define AT_ONCE (128 / LANES)
#define BATCH 4  // keys of a thread that are on their way
#define NOTHING -1e30f

__device__ __forceinline__ void eight(const uint4& vector, float (&values)[8]) {
  values[0] = low(vector.x), values[1] = high(vector.x), values[2] = low(vector.y), values[3] = high(vector.y);
  values[4] = low(vector.z), values[5] = high(vector.z), values[6] = low(vector.w), values[7] = high(vector.w);
}

#ifdef QK_NORM
// x [SIZE] times the reciprocal of its root mean square, rounded and times the norm's weight, by the warp
__device__ __forceinline__ float scale_of(const u16* x, float epsilon) {
  float squares = 0;
  for (int i = threadIdx.x % 32; i < SIZE; i += 32) squares += widen(x[i]) * widen(x[i]);
  return rsqrtf(sum_of_warp(squares) / SIZE + epsilon);
}
#endif

extern "C" __global__ void __launch_bounds__(128)
    attend(const u16* qkv, u16* keys, u16* values, const float* cosines, const float* sines, const int* position_of, int capacity,
           float scaling, const u16* query_norm, const u16* key_norm, float epsilon, float* shared, unsigned int* arrived, u16* output) {
  __shared__ float query[GROUP][SIZE];
  __shared__ float sums[4][GROUP][SIZE];
  __shared__ float largests[4][GROUP], totals[4][GROUP];
  const int head = blockIdx.x, share = blockIdx.y, sequence = blockIdx.z, thread = threadIdx.x;
  const int lane = thread % LANES, slot = thread / LANES;
  const int position = *position_of, length = position + 1;  // written by the step before, which has ended
  const int each = (length + SHARES - 1) / SHARES, first = min(share * each, length), behind = min(first + each, length);
  const size_t kept = ((size_t)sequence * KV_HEADS + head) * capacity * SIZE;
  const uint4* past_keys = (const uint4*)(keys + kept) + lane;
  const uint4* past_values = (const uint4*)(values + kept) + lane;

  uint4 now_keys[BATCH], now_values[BATCH];
#pragma unroll
  for (int i = 0; i < BATCH; i++) {
    const int key = first + slot + i * AT_ONCE;
    if (key < behind && key < position) now_keys[i] = past_keys[(size_t)key * LANES], now_values[i] = past_values[(size_t)key * LANES];
  }
  let_next_start();
  wait_for_previous();

  const u16* row = qkv + (size_t)sequence * (HEADS + 2 * KV_HEADS) * SIZE;
  const float* cosine = cosines + (size_t)position * (SIZE / 2);
  const float* sine = sines + (size_t)position * (SIZE / 2);
  for (int g = thread / 32; g < GROUP; g += 4) {  // a warp for each query
    const u16* q = row + (head * GROUP + g) * SIZE;
    float factor = 1;
#ifdef QK_NORM
    factor = scale_of(q, epsilon);
#endif
    for (int i = thread % 32; i < SIZE / 2; i += 32) {
      float a = widen(q[i]) * factor, b = widen(q[i + SIZE / 2]) * factor;
#ifdef QK_NORM
      a *= widen(query_norm[i]), b *= widen(query_norm[i + SIZE / 2]);
#endif
      query[g][i] = (a * cosine[i] - b * sine[i]) * scaling;
      query[g][i + SIZE / 2] = (b * cosine[i] + a * sine[i]) * scaling;
    }
  }
  if (first <= position && position < behind && thread >= 96) {  // the share with the new token keeps it
    const u16* k = row + (HEADS + head) * SIZE;
    const u16* v = row + (HEADS + KV_HEADS + head) * SIZE;
    u16* new_key = keys + kept + (size_t)position * SIZE;
    u16* new_value = values + kept + (size_t)position * SIZE;
    float factor = 1;
#ifdef QK_NORM
    factor = scale_of(k, epsilon);
#endif
    for (int i = thread % 32; i < SIZE / 2; i += 32) {
      float a = widen(k[i]) * factor, b = widen(k[i + SIZE / 2]) * factor;
#ifdef QK_NORM
      a *= widen(key_norm[i]), b *= widen(key_norm[i + SIZE / 2]);
#endif
      new_key[i] = (u16)narrow(a * cosine[i] - b * sine[i], 0);
      new_key[i + SIZE / 2] = (u16)narrow(b * cosine[i] + a * sine[i], 0);
      new_value[i] = v[i];
      new_value[i + SIZE / 2] = v[i + SIZE / 2];
    }
  }
  __syncthreads();

  float part[GROUP][8], sum[GROUP][8] = {}, largest[GROUP], total[GROUP];
#pragma unroll
  for (int g = 0; g < GROUP; g++) {
    largest[g] = NOTHING, total[g] = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) part[g][i] = query[g][lane * 8 + i];
  }
  for (int start = first; start < behind; start += AT_ONCE * BATCH) {
    float scores[BATCH][GROUP], channels[8];
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
      const int key = start + slot + i * AT_ONCE;
      if (key == position) now_keys[i] = past_keys[(size_t)key * LANES], now_values[i] = past_values[(size_t)key * LANES];
      eight(now_keys[i], channels);
#pragma unroll
      for (int g = 0; g < GROUP; g++) {
        float product = 0;
#pragma unroll
        for (int c = 0; c < 8; c++) product += part[g][c] * channels[c];
#pragma unroll
        for (int step = LANES / 2; step; step >>= 1) product += __shfl_xor_sync(0xffffffffu, product, step);
        scores[i][g] = key < behind ? product : NOTHING;
      }
      const int next = key + AT_ONCE * BATCH;
      if (next < behind && next < position) now_keys[i] = past_keys[(size_t)next * LANES];
    }
#pragma unroll
    for (int g = 0; g < GROUP; g++) {
      float highest = largest[g];
#pragma unroll
      for (int i = 0; i < BATCH; i++) highest = fmaxf(highest, scores[i][g]);
      const float factor = __expf(largest[g] - highest);
      largest[g] = highest, total[g] *= factor;
#pragma unroll
      for (int c = 0; c < 8; c++) sum[g][c] *= factor;
#pragma unroll
      for (int i = 0; i < BATCH; i++) {
        scores[i][g] = start + slot + i * AT_ONCE < behind ? __expf(scores[i][g] - highest) : 0;
        total[g] += scores[i][g];
      }
    }
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
      const int key = start + slot + i * AT_ONCE, next = key + AT_ONCE * BATCH;
      if (key < behind) {
        eight(now_values[i], channels);
#pragma unroll
        for (int g = 0; g < GROUP; g++)
#pragma unroll
          for (int c = 0; c < 8; c++) sum[g][c] += scores[i][g] * channels[c];
      }
      if (next < behind && next < position) now_values[i] = past_values[(size_t)next * LANES];
    }
  }

#pragma unroll
  for (int g = 0; g < GROUP; g++) {  // the slots of a warp, then the warps
    float highest = largest[g];
#pragma unroll
    for (int step = 16; step >= LANES; step >>= 1) highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, step));
    const float factor = __expf(largest[g] - highest);
    total[g] *= factor;
#pragma unroll
    for (int step = 16; step >= LANES; step >>= 1) total[g] += __shfl_xor_sync(0xffffffffu, total[g], step);
#pragma unroll
    for (int c = 0; c < 8; c++) {
      sum[g][c] *= factor;
#pragma unroll
      for (int step = 16; step >= LANES; step >>= 1) sum[g][c] += __shfl_xor_sync(0xffffffffu, sum[g][c], step);
      if (thread % 32 < LANES) sums[thread / 32][g][lane * 8 + c] = sum[g][c];
    }
    if (thread % 32 == 0) largests[thread / 32][g] = highest, totals[thread / 32][g] = total[g];
  }
  __syncthreads();

  const int place = sequence * KV_HEADS + head;
  u16* outputs = output + ((size_t)sequence * HEADS + head * GROUP) * SIZE;
#if SHARES > 1
  float* theirs = shared + (size_t)place * SHARES * GROUP * (SIZE + 2);  // [SHARES, GROUP, SIZE] sums, [SHARES, GROUP, 2] largest and total
  float2* ends = (float2*)(theirs + SHARES * GROUP * SIZE);
#endif
#pragma unroll
  for (int i = thread; i < GROUP * SIZE; i += 128) {
    const int g = i / SIZE, c = i % SIZE;
    const float highest = fmaxf(fmaxf(largests[0][g], largests[1][g]), fmaxf(largests[2][g], largests[3][g]));
    float all = 0, value = 0;
#pragma unroll
    for (int w = 0; w < 4; w++) {
      const float factor = __expf(largests[w][g] - highest);
      all += totals[w][g] * factor, value += sums[w][g][c] * factor;
    }
#if SHARES == 1
    outputs[i] = (u16)narrow(value / all, 0);
#else
    theirs[(share * GROUP + g) * SIZE + c] = value;
    if (c == 0) ends[share * GROUP + g] = make_float2(highest, all);
#endif
  }
#if SHARES > 1
  __threadfence();
  __syncthreads();
  __shared__ bool last;
  if (thread == 0) {
    last = atomicAdd(arrived + place, 1) == SHARES - 1;
    if (last) arrived[place] = 0;
  }
  __syncthreads();
  if (!last) return;
  __threadfence();
  __shared__ float factors[SHARES][GROUP];
  for (int g = thread / 32; g < GROUP; g += 4) {
    const int s = thread % 32;
    const float2 end = s < SHARES ? __ldcg(ends + s * GROUP + g) : make_float2(NOTHING, 0);
    const float factor = __expf(end.x - maximum_of_warp(end.x)), all = sum_of_warp(end.y * factor);
    if (s < SHARES) factors[s][g] = factor / all;
  }
  __syncthreads();
#pragma unroll
  for (int i = thread; i < GROUP * SIZE / 4; i += 128) {
    float4 value = make_float4(0, 0, 0, 0);
#pragma unroll
    for (int s = 0; s < SHARES; s++) {
      const float4 one = __ldcg((const float4*)theirs + s * (GROUP * SIZE / 4) + i);
      const float factor = factors[s][i / (SIZE / 4)];
      value.x += one.x * factor, value.y += one.y * factor, value.z += one.z * factor, value.w += one.w * factor;
    }
    ((uint2*)outputs)[i] = make_uint2(narrow(value.x, value.y), narrow(value.z, value.w));
  }
#endif
}
