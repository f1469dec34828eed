// Sums and maxima over the GPUs of one host, one process each, without a barrier.
//
// Each GPU writes its share into the memory of every other one. A packet of 16 bytes is two words of data, each with the number of the
// exchange beside it; who waits for a packet in its own memory takes it when both numbers have come. 8 bytes are written at once, so no
// fence is needed. A block counts its exchanges itself, and covers the same packets in all of them. There are two places in turns: whoever
// sends exchange n + 1 has the others' n, so they have finished reading n - 1.
//
// Macros: BF16; RANKS; RANK; PACKETS (of a place and a rank); RESIDUAL (the sum is added to what is there).
#define MOST_TRIES (1u << 27)  // about a minute: a GPU whose process has ended sends nothing more

typedef u64 Packet[2];

__device__ __forceinline__ void send(Packet* place, uint2 words, u32 number) {
  const u64 first = (u64)number << 32 | words.x, second = (u64)number << 32 | words.y;
  asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(place), "l"(first), "l"(second) : "memory");
}

__device__ __forceinline__ uint2 receive(const Packet* place, u32 number) {
  u64 first, second;
  u32 tries = 0;
  do {
    if (++tries == MOST_TRIES) asm volatile("trap;");
    asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];" : "=l"(first), "=l"(second) : "l"(place) : "memory");
  } while (first >> 32 != number || second >> 32 != number);
  return make_uint2((u32)first, (u32)second);
}

// Gives what each rank has as packet i: `all` in the order of ranks, so that every rank adds up the same way.
__device__ __forceinline__ void exchange(Packet* const* memories, uint2 mine, u32 number, int i, uint2 (&all)[RANKS]) {
  const size_t place = (size_t)(number & 1) * RANKS * PACKETS + i;
#pragma unroll
  for (int step = 1; step < RANKS; step++) send(memories[(RANK + step) % RANKS] + place + (size_t)RANK * PACKETS, mine, number);
#pragma unroll
  for (int rank = 0; rank < RANKS; rank++)
    all[rank] = rank == RANK ? mine : receive(memories[RANK] + place + (size_t)rank * PACKETS, number);
}

// y (RESIDUAL: +)= the ranks' x, each of `count` groups of 4 numbers
extern "C" __global__ void __launch_bounds__(256) sum(Packet* const* memories, u32* numbers, const uint2* x, uint2* y, int count) {
  let_next_start();
  wait_for_previous();
  const u32 number = numbers[blockIdx.x] + 1;
  const int i = blockIdx.x * 256 + threadIdx.x;
  if (i < count) {
    uint2 all[RANKS];
    const uint2 mine = x[i];
#ifdef RESIDUAL
    const uint2 old = y[i];
    float sum[4] = {low(old.x), high(old.x), low(old.y), high(old.y)};
#else
    float sum[4] = {0, 0, 0, 0};
#endif
    exchange(memories, mine, number, i, all);
#pragma unroll
    for (int rank = 0; rank < RANKS; rank++) {
      sum[0] += low(all[rank].x), sum[1] += high(all[rank].x);
      sum[2] += low(all[rank].y), sum[3] += high(all[rank].y);
    }
    y[i] = make_uint2(narrow(sum[0], sum[1]), narrow(sum[2], sum[3]));
  }
  __syncthreads();
  if (threadIdx.x == 0) numbers[blockIdx.x] = number;
}

// best [batch] of `choose`, of `share` tokens of the vocabulary -> that of all ranks; block 0 alone, with the last packets and number
extern "C" __global__ void __launch_bounds__(256) agree(Packet* const* memories, u32* numbers, u64* best, int batch, int share) {
  let_next_start();
  wait_for_previous();
  u32* counted = numbers + PACKETS / 256 - 1;
  const u32 number = *counted + 1;
  const int i = threadIdx.x;
  if (i < batch) {
    uint2 all[RANKS];
    const u64 mine = best[i] - (u64)RANK * share;  // its low half is ~index
    exchange(memories, make_uint2((u32)mine, (u32)(mine >> 32)), number, PACKETS - 256 + i, all);
    u64 found = 0;
#pragma unroll
    for (int rank = 0; rank < RANKS; rank++) {
      const u64 other = (u64)all[rank].y << 32 | all[rank].x;
      found = other > found ? other : found;
    }
    best[i] = found;
  }
  __syncthreads();
  if (threadIdx.x == 0) *counted = number;
}
