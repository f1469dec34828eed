// Sums and maxima over the GPUs of one host, one process each, without a barrier.
//
// Each GPU writes its share into the memory of every other one. A packet of 16 bytes is 14 of data and half a word of the number of the
// exchange; who waits for a packet in its own memory takes it when that number has come. 16 bytes are written at once, so no fence is
// needed. A block counts its exchanges itself, and covers the same packets in all of them: it sends all of its packets each time, so that
// none is left with a number that comes again after 65,536 exchanges. There are two places in turns: whoever sends exchange n + 1 has the
// others' n, so they have finished reading n - 1.
//
// Macros: BF16; RANKS; RANK; PACKETS (of a place and a rank); RESIDUAL (the sum is added to what is there); SCALED (vectors of a row, whose
//   numbers are products of codes: they are multiplied first).
#define MOST_TRIES (1u << 27)  // about a minute: a GPU whose process has ended sends nothing more

__device__ __forceinline__ void send(uint4* place, const uint4& packet) {
  asm volatile(
      "{\n.reg .b64 first, second;\n.reg .b128 all;\nmov.b64 first, {%1, %2};\nmov.b64 second, {%3, %4};\nmov.b128 all, {first, second};\n"
      "st.relaxed.sys.global.b128 [%0], all;\n}" ::"l"(place),
      "r"(packet.x), "r"(packet.y), "r"(packet.z), "r"(packet.w)
      : "memory");
}

__device__ __forceinline__ uint4 receive(const uint4* place, u32 number) {
  uint4 packet;
  u32 tries = 0;
  do {
    if (++tries == MOST_TRIES) asm volatile("trap;");
    asm volatile(
        "{\n.reg .b64 first, second;\n.reg .b128 all;\nld.relaxed.sys.global.b128 all, [%4];\nmov.b128 {first, second}, all;\n"
        "mov.b64 {%0, %1}, first;\nmov.b64 {%2, %3}, second;\n}"
        : "=r"(packet.x), "=r"(packet.y), "=r"(packet.z), "=r"(packet.w)
        : "l"(place)
        : "memory");
  } while (packet.w >> 16 != (number & 0xffff));
  return packet;
}

// Gives what the other ranks have as packet i, of which the upper half of w is not theirs to fill.
__device__ __forceinline__ void exchange(uint4* const* memories, uint4 mine, u32 number, int i, uint4 (&all)[RANKS]) {
  const size_t place = (size_t)(number & 1) * RANKS * PACKETS + i;
  mine.w = mine.w & 0xffff | number << 16;
  const uint4* own = memories[RANK] + place;
#pragma unroll
  for (int step = 1; step < RANKS; step++) send(memories[(RANK + step) % RANKS] + place + (size_t)RANK * PACKETS, mine);
#pragma unroll
  for (int rank = 0; rank < RANKS; rank++)
    if (rank != RANK) all[rank] = receive(own + (size_t)rank * PACKETS, number);
}

// 8 threads have 7 vectors of 8 numbers. The last thread's packet is the last number of each, which their own have no room for.
__device__ __forceinline__ uint4 packed(const uint4& vector, int lane) {
  u32 ends[7];
#pragma unroll
  for (int other = 0; other < 7; other++) ends[other] = __shfl_sync(0xffffffffu, vector.w >> 16, other, 8);
  return lane < 7 ? vector : make_uint4(ends[0] | ends[1] << 16, ends[2] | ends[3] << 16, ends[4] | ends[5] << 16, ends[6]);
}
__device__ __forceinline__ uint4 unpacked(uint4 packet, int lane) {
  uint4 ends;
  ends.x = __shfl_sync(0xffffffffu, packet.x, 7, 8), ends.y = __shfl_sync(0xffffffffu, packet.y, 7, 8);
  ends.z = __shfl_sync(0xffffffffu, packet.z, 7, 8), ends.w = __shfl_sync(0xffffffffu, packet.w, 7, 8);
  const u32 pair = word_of(ends, lane / 2);
  packet.w = packet.w & 0xffff | (lane % 2 ? pair & 0xffff0000u : pair << 16);
  return packet;
}

__device__ __forceinline__ void add(float (&sum)[8], const uint4& values) {
#pragma unroll
  for (int word = 0; word < 4; word++) sum[2 * word] += low(word_of(values, word)), sum[2 * word + 1] += high(word_of(values, word));
}

// y (RESIDUAL: +)= the ranks' x, each of `count` vectors of 8 numbers. They are added up in the order of ranks, so that all have the same.
extern "C" __global__ void __launch_bounds__(256)
    sum(uint4* const* memories, u32* numbers, const uint4* x, uint4* y, const float4* of_outputs, const float* of_rows, int count) {
  let_next_start();
  wait_for_previous();
  const u32 number = numbers[blockIdx.x] + 1;
  const int thread = blockIdx.x * 256 + threadIdx.x, lane = thread % 8, i = thread / 8 * 7 + lane;
  const bool there = lane < 7 && i < count;
  uint4 mine = there ? x[i] : make_uint4(0, 0, 0, 0);
  float sum[8] = {};
#ifdef SCALED
  if (there) {
    const float4 first = __ldg(of_outputs + i % SCALED * 2), second = __ldg(of_outputs + i % SCALED * 2 + 1);
    const float by = of_rows[i / SCALED];
    mine = make_uint4(narrow(low(mine.x) * (by * first.x), high(mine.x) * (by * first.y)),
                      narrow(low(mine.y) * (by * first.z), high(mine.y) * (by * first.w)),
                      narrow(low(mine.z) * (by * second.x), high(mine.z) * (by * second.y)),
                      narrow(low(mine.w) * (by * second.z), high(mine.w) * (by * second.w)));
  }
#endif
#ifdef RESIDUAL
  add(sum, there ? y[i] : make_uint4(0, 0, 0, 0));
#endif
  uint4 all[RANKS];
  exchange(memories, packed(mine, lane), number, thread, all);
#pragma unroll
  for (int rank = 0; rank < RANKS; rank++) add(sum, rank == RANK ? mine : unpacked(all[rank], lane));
  if (there) y[i] = make_uint4(narrow(sum[0], sum[1]), narrow(sum[2], sum[3]), narrow(sum[4], sum[5]), narrow(sum[6], sum[7]));
  __syncthreads();
  if (threadIdx.x == 0) numbers[blockIdx.x] = number;
}

// best [batch] of `choose`, of `share` tokens of the vocabulary -> that of all ranks; block 0 alone, with the last packets and number
extern "C" __global__ void __launch_bounds__(256) agree(uint4* const* memories, u32* numbers, u64* best, int batch, int share) {
  let_next_start();
  wait_for_previous();
  u32* counted = numbers + PACKETS / 256 - 1;
  const u32 number = *counted + 1;
  const int i = threadIdx.x;
  u64 found = i < batch ? best[i] - (u64)RANK * share : 0;  // its low half is ~index
  uint4 all[RANKS];
  exchange(memories, make_uint4((u32)found, (u32)(found >> 32), 0, 0), number, PACKETS - 256 + i, all);
#pragma unroll
  for (int rank = 0; rank < RANKS; rank++) {
    const u64 other = rank == RANK ? 0 : (u64)all[rank].y << 32 | all[rank].x;
    found = other > found ? other : found;
  }
  if (i < batch) best[i] = found;
  __syncthreads();
  if (threadIdx.x == 0) *counted = number;
}
