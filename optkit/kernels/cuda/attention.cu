// Attention of one new token for each sequence: turns q and k by their position, keeps k and v, attends to all that is kept.
//
// qkv [batch, (HEADS + 2 KV_HEADS) SIZE]; keys, values [batch, KV_HEADS, capacity, SIZE]; cosines, sines float [positions, ROTARY / 2], for
// halves of the first ROTARY channels that are turned against each other (as Llama's); output [batch, HEADS * SIZE]. `window`: the newest
// keys that are attended to, 0 for all; `cap`: where CAPPED says so, scores end at -cap and cap (Gemma 2); `sinks` [HEADS], or none:
// scores of a key that has no value (gpt-oss). A block for each head of keys, share of the past, and sequence. Its 4 warps take 16 keys in
// turn, with a softmax of their own: scores [queries, keys] and sums [queries, channels] are products of 16 rows in tensor cores, the rows
// being the queries that share the head (FlashAttention-2, arXiv:2307.08691). Then all of them are joined. Macros: BF16, HEADS, KV_HEADS
// (at most 16 queries each), SIZE (a multiple of 16 up to 256), ROTARY, SHARES, STAGES (tiles that a warp asks for before it needs them),
// QK_NORM, CAPPED, SCALED (qkv are products of codes, of 16 bits, with scales of tokens and channels and a bias), LINED (output lies as
// `wide.cu` reads it, so many sequences in a block), CLUSTER (the blocks of all shares are a cluster, and each joins a part of the outputs
// of all, in shared memory; else the last block does, from global memory).
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
#define VECTORS (SIZE / 8)                 // of 16 bytes, of a key or value
#define SHIFTS ((VECTORS & -VECTORS) - 1 & 7)
#define TILE_BYTES (2 * KEYS * SIZE * 2)
#define TURNED ((ROTARY / 4 + 31) / 32)             // pairs of a lane that are turned against as many
#define UNTURNED (((SIZE - ROTARY) / 2 + 31) / 32)  // pairs of a lane that are not, which may be none

template <int WORDS>
struct alignas(4 * WORDS) Vector {
  u32 word[WORDS];
};

// Where bytes of a key lie in a tile: neighbours of a column are shifted against each other, so that lanes read different banks.
__device__ __forceinline__ int place_in_tile(int key, int byte) { return key * SIZE * 2 + ((byte / 16 ^ (key & SHIFTS)) * 16 + byte % 16); }

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

// The heads of q, k and v of a token, or the products that they are made of.
struct Heads {
  const u16* qkv;
#ifdef SCALED
  float by;
  const float* scales;
  const u16* bias;
#endif
  __device__ __forceinline__ u32 pair(int head, int i) const {
    const u32 pair = ((const u32*)qkv)[head * (SIZE / 2) + i];
#ifdef SCALED
    const float2 each = ((const float2*)scales)[head * (SIZE / 2) + i];
    const u32 more = bias ? ((const u32*)bias)[head * (SIZE / 2) + i] : 0;
    return narrow(low(pair) * (by * each.x) + low(more), high(pair) * (by * each.y) + high(more));
#else
    return pair;
#endif
  }
};
__device__ __forceinline__ Heads heads_of(const u16* qkv, int token, const float* token_scales, const float* scales, const u16* bias) {
  qkv += (size_t)token * (HEADS + 2 * KV_HEADS) * SIZE;
#ifdef SCALED
  return {qkv, token_scales[token], scales, bias};
#else
  return {qkv};
#endif
}

// What lanes hold of a head: pairs that are turned against each other, and those that are not turned.
struct Head {
  u32 first[TURNED], second[TURNED], rest[UNTURNED + 1];
};
__device__ __forceinline__ Head take(const Heads& heads, int head) {
  Head taken;
#pragma unroll
  for (int n = 0; n < TURNED; n++) {
    const int i = n * 32 + threadIdx.x % 32;
    taken.first[n] = i < ROTARY / 4 ? heads.pair(head, i) : 0, taken.second[n] = i < ROTARY / 4 ? heads.pair(head, i + ROTARY / 4) : 0;
  }
#pragma unroll
  for (int n = 0; n < UNTURNED; n++) {
    const int i = ROTARY / 2 + n * 32 + threadIdx.x % 32;
    taken.rest[n] = i < SIZE / 2 ? heads.pair(head, i) : 0;
  }
  return taken;
}

// A query or key turned by its position, by a warp; with QK_NORM divided by its root mean square and times `norm` before.
__device__ __forceinline__ void turn(const Head& taken, const u16* norm, float epsilon, const float* cosine, const float* sine, u16* turned) {
  const int lane = threadIdx.x % 32;
  const u32* norms = (const u32*)norm;
  float factor = 1;
#ifdef QK_NORM
  float squares = 0;
#pragma unroll
  for (int n = 0; n < TURNED; n++) squares += squares_of(taken.first[n]) + squares_of(taken.second[n]);
#pragma unroll
  for (int n = 0; n < UNTURNED; n++) squares += squares_of(taken.rest[n]);
  factor = rsqrtf(sum_of_warp(squares) / SIZE + epsilon);
#endif
#pragma unroll
  for (int n = 0; n < TURNED; n++) {
    const int i = n * 32 + lane;
    if (i >= ROTARY / 4) break;
    float a[2] = {low(taken.first[n]) * factor, high(taken.first[n]) * factor};
    float b[2] = {low(taken.second[n]) * factor, high(taken.second[n]) * factor};
#ifdef QK_NORM
    a[0] *= low(norms[i]), a[1] *= high(norms[i]), b[0] *= low(norms[i + ROTARY / 4]), b[1] *= high(norms[i + ROTARY / 4]);
#endif
    const float2 c = ((const float2*)cosine)[i], s = ((const float2*)sine)[i];
    ((u32*)turned)[i] = narrow(a[0] * c.x - b[0] * s.x, a[1] * c.y - b[1] * s.y);
    ((u32*)turned)[i + ROTARY / 4] = narrow(b[0] * c.x + a[0] * s.x, b[1] * c.y + a[1] * s.y);
  }
#pragma unroll
  for (int n = 0; n < UNTURNED; n++) {
    const int i = ROTARY / 2 + n * 32 + lane;
    if (i >= SIZE / 2) break;
#ifdef QK_NORM
    ((u32*)turned)[i] = normed(taken.rest[n], norms[i], factor);
#else
    ((u32*)turned)[i] = taken.rest[n];
#endif
  }
}

#ifdef CLUSTER  // of the blocks of all shares
#define PART ((GROUP * SIZE + SHARES - 1) / SHARES)  // of the outputs, that a block joins
// Writes where this block has `place`, in the shared memory of the block of a share.
__device__ __forceinline__ void give(const float* place, int share, float value) {
  u32 there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_place(place)), "r"(share));
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(there), "f"(value) : "memory");
}
__device__ __forceinline__ void arrive_at_shares() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ __forceinline__ void await_shares() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
#define TOGETHER __cluster_dims__(1, SHARES, 1)
#else
#define TOGETHER
#endif

extern "C" __global__ void TOGETHER __launch_bounds__(32 * WARPS)
    attend(const u16* qkv, u16* keys, u16* values, const float* cosines, const float* sines, const int* position_of, int capacity,
           float scaling, const u16* query_norm, const u16* key_norm, float epsilon, int window, float cap, const u16* sinks, float* shared,
           unsigned int* arrived, u16* output, const float* token_scales, const float* scales, const u16* bias) {
  extern __shared__ uint4 memory[];
  __shared__ __align__(16) u16 query[ROWS * 8][SIZE];
  __shared__ __align__(16) u16 newest[2 * SIZE];  // the key and the value
  __shared__ float largests[WARPS][GROUP], totals[WARPS][GROUP];
  const int head = blockIdx.x, share = blockIdx.y, sequence = blockIdx.z, thread = threadIdx.x;
  const int warp = thread / 32, row = thread % 32 / 4, column = thread % 4;
  const int position = *position_of, length = position + 1;  // written by the step before, which has ended
  const int oldest = window ? max(0, length - window) : 0, each = (length - oldest + SHARES - 1) / SHARES;
  const int first = min(oldest + share * each, length), behind = min(first + each, length);
  const size_t kept = ((size_t)sequence * KV_HEADS + head) * capacity * SIZE;
  const char* tiles = (const char*)memory + warp * STAGES * TILE_BYTES;
  const auto ask_for = [&](int start, int stage) {  // 16 keys and values; zeros for those that are not there, or not yet
    for (int i = thread % 32; i < KEYS * VECTORS && start < behind; i += 32) {
      const int key = i / VECTORS, vector = i % VECTORS;
      const bool there = start + key < min(behind, position);
      const size_t from = kept / 8 + (there ? (size_t)(start + key) * VECTORS + vector : 0);
      const char* to = tiles + stage * TILE_BYTES + place_in_tile(key, vector * 16);
      copy_16(to, (const uint4*)keys + from, there), copy_16(to + KEYS * SIZE * 2, (const uint4*)values + from, there);
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  };
  const int begin = first + warp * KEYS;
#pragma unroll
  for (int s = 0; s < STAGES; s++) ask_for(begin + s * WARPS * KEYS, s);
  const float* cosine = cosines + (size_t)position * (ROTARY / 2);
  const float* sine = sines + (size_t)position * (ROTARY / 2);
  if (thread < ROTARY / 2) asm volatile("prefetch.global.L2 [%0];" ::"l"((thread % 2 ? sine : cosine) + thread));
  let_next_start();
#ifdef CLUSTER
  arrive_at_shares();  // others may write in this block from now on
#endif
  wait_for_previous();

  const Heads now = heads_of(qkv, sequence, token_scales, scales, bias);
  const bool keeps = first <= position && position < behind && warp == WARPS - 1;  // the share with the new token keeps it
  Head key;
  u32 value_pairs[(SIZE / 2 + 31) / 32];  // asked for before queries are turned
  if (keeps) {
    key = take(now, HEADS + head);
#pragma unroll
    for (int n = 0; n < (SIZE / 2 + 31) / 32; n++)
      value_pairs[n] = now.pair(HEADS + KV_HEADS + head, min(n * 32 + thread % 32, SIZE / 2 - 1));
  }
  for (int g = warp; g < ROWS * 8; g += WARPS) {
    if (g < GROUP)
      turn(take(now, head * GROUP + g), query_norm, epsilon, cosine, sine, query[g]);
    else
      for (int i = thread % 32; i < SIZE; i += 32) query[g][i] = 0;
  }
  if (keeps) {
    turn(key, key_norm, epsilon, cosine, sine, newest);
#pragma unroll
    for (int n = 0; n < (SIZE / 2 + 31) / 32; n++)
      if (n * 32 + thread % 32 < SIZE / 2) ((u32*)newest)[SIZE / 2 + n * 32 + thread % 32] = value_pairs[n];
    __syncwarp();
    for (int i = thread % 32; i < 2 * VECTORS; i += 32)
      ((uint4*)((i < VECTORS ? keys : values) + kept + (size_t)position * SIZE))[i % VECTORS] = ((const uint4*)newest)[i];
  }
  __syncthreads();

  Vector<KEY_WORDS> queries[ROWS][KEY_READS];
#pragma unroll
  for (int r = 0; r < ROWS; r++)
#pragma unroll
    for (int i = 0; i < KEY_READS; i++) queries[r][i] = ((const Vector<KEY_WORDS>*)query[r * 8 + row])[i * 4 + column];
  const float to_powers_of_two = scaling * 1.4426950408889634f;
  float sum[VALUE_READS][2 * VALUE_WORDS][4] = {}, largest[ROWS], total[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; r++) largest[r] = NOTHING, total[r] = 0;

  int stage = 0;
  for (int start = begin; start < behind; start += WARPS * KEYS) {
    asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 1) : "memory");
    __syncwarp();
    const char* tile = tiles + stage * TILE_BYTES;
    if (start <= position && position < min(start + KEYS, behind)) {  // only this share turned it; 0 times what others hold may be NaN
      for (int i = thread % 32; i < 2 * VECTORS; i += 32)
        *(uint4*)(tile + i / VECTORS * KEYS * SIZE * 2 + place_in_tile(position - start, i % VECTORS * 16)) = ((const uint4*)newest)[i];
      __syncwarp();
    }
    float scores[2][4] = {};
#pragma unroll
    for (int i = 0; i < KEY_READS; i++) {
      Vector<KEY_WORDS> now[2];
#pragma unroll
      for (int half = 0; half < 2; half++)
        now[half] = *(const Vector<KEY_WORDS>*)(tile + place_in_tile(half * 8 + row, (i * 4 + column) * (4 * KEY_WORDS)));
#pragma unroll
      for (int w = 0; w < KEY_WORDS; w += 2) {
        const u32 rows[4] = {queries[0][i].word[w], ROWS > 1 ? queries[ROWS - 1][i].word[w] : 0, queries[0][i].word[w + 1],
                             ROWS > 1 ? queries[ROWS - 1][i].word[w + 1] : 0};
#pragma unroll
        for (int half = 0; half < 2; half++) product(scores[half], rows, now[half].word[w], now[half].word[w + 1]);
      }
    }

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
    for (int i = 0; i < VALUE_READS; i++) {
      Vector<VALUE_WORDS> now[4];
#pragma unroll
      for (int k = 0; k < 4; k++)
        now[k] = *(const Vector<VALUE_WORDS>*)(tile + KEYS * SIZE * 2 +
                                               place_in_tile(column * 2 + k % 2 + k / 2 * 8, (i * 8 + row) * (4 * VALUE_WORDS)));
#pragma unroll
      for (int j = 0; j < 2 * VALUE_WORDS; j++) {
        const u32 which = j % 2 ? 0x7632 : 0x5410;  // the high or the low halves of two words
        product(sum[i][j], chances, __byte_perm(now[0].word[j / 2], now[1].word[j / 2], which),
                __byte_perm(now[2].word[j / 2], now[3].word[j / 2], which));
      }
    }
    __syncwarp();
    ask_for(start + STAGES * WARPS * KEYS, stage);
    stage = stage + 1 < STAGES ? stage + 1 : 0;
  }

  const auto sums_of = [&](int warp, int g) { return (float*)(memory + warp * STAGES * TILE_BYTES / 16) + g * SIZE; };  // where its tiles were
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
          for (int side = 0; side < 2; side++) sums_of(warp, g)[(i * 8 + column * 2 + side) * (2 * VALUE_WORDS) + j] = sum[i][j][2 * r + side];
      if (column == 0) largests[warp][g] = largest[r], totals[warp][g] = total[r];
    }
  }
  __syncthreads();

  const int place = sequence * KV_HEADS + head;
  u16* outputs = output + ((size_t)sequence * HEADS + head * GROUP) * SIZE;
#ifdef CLUSTER
  __shared__ float given[SHARES][PART], ends[SHARES][2][GROUP];  // by each share
  await_shares();
#elif SHARES > 1
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
      all += totals[w][g] * factor, value += sums_of(w, g)[c] * factor;
    }
#if SHARES == 1
    if (sinks) all += exp2f(widen(sinks[head * GROUP + g]) * 1.4426950408889634f - highest);
#ifdef LINED
    output[lined_place(sequence, head * GROUP * SIZE + i, HEADS * SIZE)] = (u16)narrow(value / all, 0);
#else
    outputs[i] = (u16)narrow(value / all, 0);
#endif
#elif defined(CLUSTER)
    give(&given[share][i % PART], i / PART, value);
    if (c < SHARES) give(&ends[share][0][g], c, highest), give(&ends[share][1][g], c, all);
#else
    theirs[(share * GROUP + g) * SIZE + c] = value;
    if (c == 0) ends[share * GROUP + g] = make_float2(highest, all);
#endif
  }
#ifdef CLUSTER
  arrive_at_shares(), await_shares();
  for (int i = thread; i < min(PART, GROUP * SIZE - share * PART); i += 32 * WARPS) {
    const int at = share * PART + i, g = at / SIZE;
    float highest = NOTHING, all = 0, value = 0;
#pragma unroll
    for (int s = 0; s < SHARES; s++) highest = fmaxf(highest, ends[s][0][g]);
#pragma unroll
    for (int s = 0; s < SHARES; s++) {
      const float factor = exp2f(ends[s][0][g] - highest);
      all += ends[s][1][g] * factor, value += given[s][i] * factor;
    }
    if (sinks) all += exp2f(widen(sinks[head * GROUP + g]) * 1.4426950408889634f - highest);
#ifdef LINED
    output[lined_place(sequence, head * GROUP * SIZE + at, HEADS * SIZE)] = (u16)narrow(value / all, 0);
#else
    outputs[at] = (u16)narrow(value / all, 0);
#endif
  }
#elif SHARES > 1
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
                const u16* key_norm, float epsilon, const float* token_scales, const float* scales, const u16* bias) {
  let_next_start();
  wait_for_previous();
  const int sequence = blockIdx.x / prompt, position = blockIdx.x % prompt, lane = threadIdx.x % 32;
  const Heads now = heads_of(qkv, blockIdx.x, token_scales, scales, bias);
  const float* cosine = cosines + (size_t)position * (ROTARY / 2);
  const float* sine = sines + (size_t)position * (ROTARY / 2);
  for (int head = threadIdx.x / 32; head < HEADS + 2 * KV_HEADS; head += WARPS) {
    const size_t kept = (((size_t)sequence * KV_HEADS + (head - HEADS) % KV_HEADS) * capacity + position) * SIZE;
    if (head < HEADS)
      turn(take(now, head), query_norm, epsilon, cosine, sine, (u16*)now.qkv + head * SIZE);
    else if (head < HEADS + KV_HEADS)
      turn(take(now, head), key_norm, epsilon, cosine, sine, keys + kept);
    else
      for (int i = lane; i < SIZE / 2; i += 32) ((u32*)(values + kept))[i] = now.pair(head, i);
  }
}
