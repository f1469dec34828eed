// Which rows go to which experts, and what comes back of them: before and behind `linear.cu` with CHOICES.
//
// Macros: BF16; EXPERTS (how many there are), CHOICES (of a token), MOST (rows of a group); WIDE (shares are float32); SHARED_OUT (shares
//   of a token add up to 1); RESIDUAL (sums are added to what is there).
// A choice that is no expert's number stands for none.
#define THREADS 512
#define INFINITE __int_as_float(0x7f800000)
#ifdef WIDE
#define SHARE(at) shares[at]
typedef float Share;
#else
#define SHARE(at) widen(shares[at])
typedef u16 Share;
#endif

// order [choices of all tokens]: those of each expert side by side, those of none behind them; ends [EXPERTS]: of each expert in it.
// groups [count]: expert, first of its places in the order, how many, 0; zeros behind the last.
__device__ __forceinline__ void sort(const u64* chosen, int4* groups, int* order, int* ends, int choices, int count) {
  __shared__ int counts[EXPERTS + 1], next[EXPERTS + 1], used;
  for (int e = threadIdx.x; e <= EXPERTS; e += THREADS) counts[e] = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < choices; i += THREADS) atomicAdd(counts + min(chosen[i], (u64)EXPERTS), 1);
  __syncthreads();
  for (int e = threadIdx.x; e <= EXPERTS; e += THREADS) {
    int start = 0, at = 0;
    for (int before = 0; before < e; before++) start += counts[before], at += (counts[before] + MOST - 1) / MOST;
    next[e] = start;
    if (e < EXPERTS) {
      ends[e] = start + counts[e];
      for (int done = 0; done < counts[e]; done += MOST) groups[at++] = make_int4(e, start + done, min(MOST, counts[e] - done), 0);
    } else {
      used = at;
    }
  }
  __syncthreads();
  for (int i = used + threadIdx.x; i < count; i += THREADS) groups[i] = make_int4(0, 0, 0, 0);
  for (int i = threadIdx.x; i < choices; i += THREADS) order[atomicAdd(next + min(chosen[i], (u64)EXPERTS), 1)] = i;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    group(const u64* chosen, int4* groups, int* order, int* ends, int choices, int count) {
  let_next_start();
  wait_for_previous();
  sort(chosen, groups, order, ends, choices, count);
}

// chosen, shares [tokens, CHOICES]: the experts of the largest logits [tokens, EXPERTS], and their softmax. A warp for each token.
// One block sorts them too; behind several `group` does.
extern "C" __global__ void __launch_bounds__(THREADS)
    route(const float* logits, u64* chosen, float* shares, int4* groups, int* order, int* ends, int tokens, int count) {
  const int lane = threadIdx.x % 32;
  let_next_start();
  wait_for_previous();
  for (int token = blockIdx.x * (THREADS / 32) + threadIdx.x / 32; token < tokens; token += gridDim.x * (THREADS / 32)) {
    float held[(EXPERTS + 31) / 32], largest = 0, sum = 0, among = 0, own = 0;
    int expert = EXPERTS;
#pragma unroll
    for (int i = 0; i < (EXPERTS + 31) / 32; i++) held[i] = i * 32 + lane < EXPERTS ? logits[token * EXPERTS + i * 32 + lane] : -INFINITE;
    for (int choice = 0; choice < CHOICES; choice++) {
      float best = -INFINITE;
      int at = EXPERTS;
#pragma unroll
      for (int i = 0; i < (EXPERTS + 31) / 32; i++)
        if (held[i] > best) best = held[i], at = i * 32 + lane;
#pragma unroll
      for (int step = 16; step; step >>= 1) {
        const float other = __shfl_xor_sync(0xffffffffu, best, step);
        const int there = __shfl_xor_sync(0xffffffffu, at, step);
        if (other > best || (other == best && there < at)) best = other, at = there;
      }
      if (choice == 0) {
        largest = best;
#pragma unroll
        for (int i = 0; i < (EXPERTS + 31) / 32; i++) sum += exp2f((held[i] - largest) * 1.442695041f);
        sum = sum_of_warp(sum);
      }
      const float share = exp2f((best - largest) * 1.442695041f) / sum;
      among += share;
      if (lane == choice) own = share, expert = at;
#pragma unroll
      for (int i = 0; i < (EXPERTS + 31) / 32; i++)
        if (at == i * 32 + lane) held[i] = -INFINITE;
    }
#ifdef SHARED_OUT
    own /= among;
#endif
    if (lane < CHOICES) chosen[token * CHOICES + lane] = expert, shares[token * CHOICES + lane] = own;
  }
  if (gridDim.x > 1) return;
  __syncthreads();
  sort(chosen, groups, order, ends, tokens * CHOICES, count);
}

// total [tokens, vectors] of made [tokens, CHOICES, vectors] times shares [tokens, CHOICES].
extern "C" __global__ void __launch_bounds__(256)
    weighted(const uint4* made, const Share* shares, const u64* chosen, uint4* total, int vectors) {
  let_next_start();
  wait_for_previous();
  const int vector = blockIdx.x * 256 + threadIdx.x, first = blockIdx.y * CHOICES;
  if (vector >= vectors) return;
  float sums[8] = {};
#pragma unroll
  for (int choice = first; choice < first + CHOICES; choice++) {
    if (chosen[choice] >= EXPERTS) continue;
    const uint4 values = made[(size_t)choice * vectors + vector];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      sums[2 * i] += SHARE(choice) * low(word_of(values, i));
      sums[2 * i + 1] += SHARE(choice) * high(word_of(values, i));
    }
  }
#ifdef RESIDUAL
  const uint4 before = total[(size_t)blockIdx.y * vectors + vector];
#pragma unroll
  for (int i = 0; i < 4; i++) sums[2 * i] += low(word_of(before, i)), sums[2 * i + 1] += high(word_of(before, i));
#endif
  total[(size_t)blockIdx.y * vectors + vector] =
      make_uint4(narrow(sums[0], sums[1]), narrow(sums[2], sums[3]), narrow(sums[4], sums[5]), narrow(sums[6], sums[7]));
}
