// Attention of one new token for each sequence: turns q and k by their position, keeps k and v, attends to all that is kept.
//
// qkv [batch, (HEADS + 2 KV_HEADS) SIZE]; keys, values [batch, KV_HEADS, capacity, SIZE]; cosines, sines float [positions, ROTARY / 2], for
// halves of the first ROTARY channels that are turned against each other (as Llama's); output [batch, HEADS * SIZE]. `window`: the newest
// keys that are attended to, 0 for all; `cap`: where CAPPED says so, scores end at -cap and cap (Gemma 2); `sinks` [HEADS], or none:
// scores of a key that has no value (gpt-oss). A block for each head of keys, share of the past,
// and sequence. Its 4 warps take 16 keys in turn, with a softmax of their own: scores [queries, keys] and sums [queries, channels] are
// products of 16 rows in tensor cores, the rows being the queries that share the head (FlashAttention-2, arXiv:2307.08691). Then all of
// them are joined. Macros: BF16, HEADS, KV_HEADS (at most 16 queries each), SIZE (a multiple of 16 up to 256), ROTARY, SHARES, QK_NORM,
// CAPPED, LINED (output lies as `wide.cu` reads it, so many sequences in a block).
//
// Fragments of mma.m16n8k16: lane l = 4 r + c has, of queries, row r (and r + 8); of scores, rows r, r + 8 and columns 2 c, 2 c + 1.
// Channels may be summed in any order, so a lane reads neighbouring ones of key r (lanes c take turns) and calls them what the fragment
// wants; likewise it reads neighbouring channels of the values of keys 2 c, 2 c + 1, 2 c + 8 and 2 c + 9 and pairs them.
#define GROUP (HEADS / KV_HEADS)
#define WARPS 4
#define KEYS 16  // of a warp at once
#define KEY_WORDS (SIZE % 32 ? 2 : 4)
#define KEY_READS (SIZE / 8 / KEY_WORDS)
#define VALUE_WORDS (SIZE % 64 == 0 ? 4 : SIZE % 32 == 0 ? 2 : 1)
#define VALUE_READS (SIZE / 16 / VALUE_WORDS)
#define ROWS (GROUP > 8 ? 2 : 1)  // of a lane
#define NOTHING -1e30f

template <int WORDS>
struct alignas(4 * WORDS) Vector {
  u32 word[WORDS];
};

// sums [queries, 8] += rows [queries, 16] * a matrix [16, 8]; where no lane has a second row, what comes of it is left.
__device__ __forceinline__ void product(float (&sums)[4], const u32 (&rows)[4], u32 first, u32 second) {
#if GROUP > 8
  asm volatile(MMA "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
               : "r"(rows[0]), "r"(rows[1]), "r"(rows[2]), "r"(rows[3]), "r"(first), "r"(second));
#else
  float none, nothing;
  asm volatile(MMA "{%0, %1, %2, %3}, {%4, %5, %6, %5}, {%7, %8}, {%0, %1, %9, %9};"
               : "+f"(sums[0]), "+f"(sums[1]), "=f"(none), "=f"(nothing)
               : "r"(rows[0]), "r"(0), "r"(rows[2]), "r"(first), "r"(second), "f"(0.f));
#endif
}

// A head of a query or key [SIZE] turned by its position, by a warp; with QK_NORM divided by its root mean square and times `norm` before.
__device__ __forceinline__ void turn(const u16* x, const u16* norm, float epsilon, const float* cosine, const float* sine, u16* turned) {
  const int lane = threadIdx.x % 32;
  const u32 *pairs = (const u32*)x, *norms = (const u32*)norm;
  float factor = 1;
#ifdef QK_NORM
  float squares = 0;
  for (int i = lane; i < SIZE / 2; i += 32) squares += low(pairs[i]) * low(pairs[i]) + high(pairs[i]) * high(pairs[i]);
  factor = rsqrtf(sum_of_warp(squares) / SIZE + epsilon);
#endif
  for (int i = lane; i < ROTARY / 4; i += 32) {
    const u32 first = pairs[i], second = pairs[i + ROTARY / 4];
    float a[2] = {low(first) * factor, high(first) * factor}, b[2] = {low(second) * factor, high(second) * factor};
#ifdef QK_NORM
    a[0] *= low(norms[i]), a[1] *= high(norms[i]), b[0] *= low(norms[i + ROTARY / 4]), b[1] *= high(norms[i + ROTARY / 4]);
#endif
    const float2 c = ((const float2*)cosine)[i], s = ((const float2*)sine)[i];
    ((u32*)turned)[i] = narrow(a[0] * c.x - b[0] * s.x, a[1] * c.y - b[1] * s.y);
    ((u32*)turned)[i + ROTARY / 4] = narrow(b[0] * c.x + a[0] * s.x, b[1] * c.y + a[1] * s.y);
  }
  for (int i = ROTARY / 2 + lane; i < SIZE / 2; i += 32) {
#ifdef QK_NORM
    ((u32*)turned)[i] = narrow(low(pairs[i]) * factor * low(norms[i]), high(pairs[i]) * factor * high(norms[i]));
#else
    ((u32*)turned)[i] = pairs[i];
#endif
  }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
    attend(const u16* qkv, u16* keys, u16* values, const float* cosines, const float* sines, const int* position_of, int capacity,
           float scaling, const u16* query_norm, const u16* key_norm, float epsilon, int window, float cap, const u16* sinks, float* shared,
           unsigned int* arrived, u16* output) {
  __shared__ __align__(16) u16 query[ROWS * 8][SIZE];
  __shared__ float sums[WARPS][GROUP][SIZE];
  __shared__ float largests[WARPS][GROUP], totals[WARPS][GROUP];
  const int head = blockIdx.x, share = blockIdx.y, sequence = blockIdx.z, thread = threadIdx.x;
  const int warp = thread / 32, row = thread % 32 / 4, column = thread % 4;
  const int position = *position_of, length = position + 1;  // written by the step before, which has ended
  const int oldest = window ? max(0, length - window) : 0, each = (length - oldest + SHARES - 1) / SHARES;
  const int first = min(oldest + share * each, length), behind = min(first + each, length);
  const size_t kept = ((size_t)sequence * KV_HEADS + head) * capacity * SIZE;
  const Vector<KEY_WORDS>* past_keys = (const Vector<KEY_WORDS>*)(keys + kept) + column;
  const Vector<VALUE_WORDS>* past_values = (const Vector<VALUE_WORDS>*)(values + kept) + row;

  Vector<KEY_WORDS> now_keys[2][KEY_READS];
  Vector<VALUE_WORDS> now_values[4][VALUE_READS] = {};  // what is not there counts as 0
  const auto read_keys = [&](int start, int limit) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int key = start + half * 8 + row;
#pragma unroll
      for (int i = 0; i < KEY_READS; i++)
        if (key < limit) now_keys[half][i] = past_keys[(size_t)key * (4 * KEY_READS) + i * 4];
    }
  };
  const auto read_values = [&](int start, int limit) {
#pragma unroll
    for (int k = 0; k < 4; k++) {
      const int key = start + column * 2 + k % 2 + k / 2 * 8;
#pragma unroll
      for (int i = 0; i < VALUE_READS; i++)
        now_values[k][i] = key < limit ? past_values[(size_t)key * (8 * VALUE_READS) + i * 8] : Vector<VALUE_WORDS>{};
    }
  };
  const int begin = first + warp * KEYS;
  read_keys(begin, min(behind, position));
  read_values(begin, min(behind, position));
  let_next_start();
  wait_for_previous();

  const u16* now = qkv + (size_t)sequence * (HEADS + 2 * KV_HEADS) * SIZE;
  const float* cosine = cosines + (size_t)position * (ROTARY / 2);
  const float* sine = sines + (size_t)position * (ROTARY / 2);
  for (int g = warp; g < ROWS * 8; g += WARPS) {
    if (g < GROUP)
      turn(now + (head * GROUP + g) * SIZE, query_norm, epsilon, cosine, sine, query[g]);
    else
      for (int i = thread % 32; i < SIZE; i += 32) query[g][i] = 0;
  }
  if (first <= position && position < behind && warp == WARPS - 1) {  // the share with the new token keeps it
    turn(now + (HEADS + head) * SIZE, key_norm, epsilon, cosine, sine, keys + kept + (size_t)position * SIZE);
    const u16* v = now + (HEADS + KV_HEADS + head) * SIZE;
    for (int i = thread % 32; i < SIZE; i += 32) values[kept + (size_t)position * SIZE + i] = v[i];
  }
  __syncthreads();
  if (begin <= position && position < min(begin + KEYS, behind)) read_keys(begin, behind), read_values(begin, behind);

  Vector<KEY_WORDS> queries[ROWS][KEY_READS];
#pragma unroll
  for (int r = 0; r < ROWS; r++)
#pragma unroll
    for (int i = 0; i < KEY_READS; i++) queries[r][i] = ((const Vector<KEY_WORDS>*)query[r * 8 + row])[i * 4 + column];
  const float to_powers_of_two = scaling * 1.4426950408889634f;
  float sum[VALUE_READS][2 * VALUE_WORDS][4] = {}, largest[ROWS], total[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; r++) largest[r] = NOTHING, total[r] = 0;

  for (int start = begin; start < behind; start += WARPS * KEYS) {
    float scores[2][4] = {};
#pragma unroll
    for (int i = 0; i < KEY_READS; i++)
#pragma unroll
      for (int w = 0; w < KEY_WORDS; w += 2) {
        const u32 rows[4] = {queries[0][i].word[w], ROWS > 1 ? queries[ROWS - 1][i].word[w] : 0, queries[0][i].word[w + 1],
                             ROWS > 1 ? queries[ROWS - 1][i].word[w + 1] : 0};
#pragma unroll
        for (int half = 0; half < 2; half++) product(scores[half], rows, now_keys[half][i].word[w], now_keys[half][i].word[w + 1]);
      }
    read_keys(start + WARPS * KEYS, behind);

    u32 chances[4] = {};
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      float highest = largest[r];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        float& score = scores[i / 2][2 * r + i % 2];
#ifdef CAPPED
        score = cap * tanhf(score * scaling / cap) / scaling;
#endif
        score = start + i / 2 * 8 + column * 2 + i % 2 < behind ? score * to_powers_of_two : NOTHING;
        highest = fmaxf(highest, score);
      }
      highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, 1));
      highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, 2));
      const float factor = exp2f(largest[r] - highest);
      largest[r] = highest, total[r] *= factor;
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const float one = exp2f(scores[half][2 * r] - highest), other = exp2f(scores[half][2 * r + 1] - highest);
        total[r] += one + other;
        chances[2 * half + r] = narrow(one, other);
      }
#pragma unroll
      for (int i = 0; i < VALUE_READS; i++)
#pragma unroll
        for (int j = 0; j < 2 * VALUE_WORDS; j++) sum[i][j][2 * r] *= factor, sum[i][j][2 * r + 1] *= factor;
    }
#pragma unroll
    for (int i = 0; i < VALUE_READS; i++)
#pragma unroll
      for (int j = 0; j < 2 * VALUE_WORDS; j++) {
        const u32 which = j % 2 ? 0x7632 : 0x5410;  // the high or the low halves of two words
        product(sum[i][j], chances, __byte_perm(now_values[0][i].word[j / 2], now_values[1][i].word[j / 2], which),
                __byte_perm(now_values[2][i].word[j / 2], now_values[3][i].word[j / 2], which));
      }
    read_values(start + WARPS * KEYS, behind);
  }

#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    total[r] += __shfl_xor_sync(0xffffffffu, total[r], 1);
    total[r] += __shfl_xor_sync(0xffffffffu, total[r], 2);
    const int g = r * 8 + row;
    if (g < GROUP) {
#pragma unroll
      for (int i = 0; i < VALUE_READS; i++)
#pragma unroll
        for (int j = 0; j < 2 * VALUE_WORDS; j++)
#pragma unroll
          for (int side = 0; side < 2; side++) sums[warp][g][(i * 8 + column * 2 + side) * (2 * VALUE_WORDS) + j] = sum[i][j][2 * r + side];
      if (column == 0) largests[warp][g] = largest[r], totals[warp][g] = total[r];
    }
  }
  __syncthreads();

  const int place = sequence * KV_HEADS + head;
  u16* outputs = output + ((size_t)sequence * HEADS + head * GROUP) * SIZE;
#if SHARES > 1
  float* theirs = shared + (size_t)place * SHARES * GROUP * SIZE;  // sums [places, SHARES, GROUP, SIZE], behind them largests and totals
  float2* ends = (float2*)(shared + (size_t)gridDim.z * KV_HEADS * SHARES * GROUP * SIZE) + (size_t)place * SHARES * GROUP;
#endif
#pragma unroll
  for (int i = thread; i < GROUP * SIZE; i += 32 * WARPS) {
    const int g = i / SIZE, c = i % SIZE;
    const float highest = fmaxf(fmaxf(largests[0][g], largests[1][g]), fmaxf(largests[2][g], largests[3][g]));
    float all = 0, value = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
      const float factor = exp2f(largests[w][g] - highest);
      all += totals[w][g] * factor, value += sums[w][g][c] * factor;
    }
#if SHARES == 1
    if (sinks) all += exp2f(widen(sinks[head * GROUP + g]) * 1.4426950408889634f - highest);
#ifdef LINED
    output[lined_place(sequence, head * GROUP * SIZE + i, HEADS * SIZE)] = (u16)narrow(value / all, 0);
#else
    outputs[i] = (u16)narrow(value / all, 0);
#endif
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
  for (int g = warp; g < GROUP; g += WARPS) {
    const int s = thread % 32;
    const float2 end = s < SHARES ? __ldcg(ends + s * GROUP + g) : make_float2(NOTHING, 0);
    const float highest = maximum_of_warp(end.x), factor = exp2f(end.x - highest);
    float all = sum_of_warp(end.y * factor);
    if (sinks) all += exp2f(widen(sinks[head * GROUP + g]) * 1.4426950408889634f - highest);
    if (s < SHARES) factors[s][g] = factor / all;
  }
  __syncthreads();
#pragma unroll
  for (int i = thread; i < GROUP * SIZE / 4; i += 32 * WARPS) {
    float4 value = make_float4(0, 0, 0, 0);
#pragma unroll
    for (int s = 0; s < SHARES; s++) {
      const float4 one = __ldcg((const float4*)theirs + s * (GROUP * SIZE / 4) + i);
      const float factor = factors[s][i / (SIZE / 4)];
      value.x += one.x * factor, value.y += one.y * factor, value.z += one.z * factor, value.w += one.w * factor;
    }
#ifdef LINED
    put_lined(output, sequence, head * GROUP * SIZE + 4 * i, HEADS * SIZE, value);
#else
    ((uint2*)outputs)[i] = make_uint2(narrow(value.x, value.y), narrow(value.z, value.w));
#endif
  }
#endif
}

// The heads of a prompt's token: queries are turned in place, keys and values go where `attend` keeps them. A block for each token, its
// warps take heads in turn.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
    turn_prompt(u16* qkv, u16* keys, u16* values, const float* cosines, const float* sines, int prompt, int capacity, const u16* query_norm,
                const u16* key_norm, float epsilon) {
  let_next_start();
  wait_for_previous();
  const int sequence = blockIdx.x / prompt, position = blockIdx.x % prompt, lane = threadIdx.x % 32;
  u16* now = qkv + (size_t)blockIdx.x * (HEADS + 2 * KV_HEADS) * SIZE;
  const float* cosine = cosines + (size_t)position * (ROTARY / 2);
  const float* sine = sines + (size_t)position * (ROTARY / 2);
  for (int head = threadIdx.x / 32; head < HEADS + 2 * KV_HEADS; head += WARPS) {
    u16* x = now + head * SIZE;
    const size_t kept = (((size_t)sequence * KV_HEADS + (head - HEADS) % KV_HEADS) * capacity + position) * SIZE;
    if (head < HEADS)
      turn(x, query_norm, epsilon, cosine, sine, x);
    else if (head < HEADS + KV_HEADS)
      turn(x, key_norm, epsilon, cosine, sine, keys + kept);
    else
      for (int i = lane; i < SIZE / 8; i += 32) ((uint4*)(values + kept))[i] = ((const uint4*)x)[i];
  }
}
