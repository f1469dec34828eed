// y = x W^T for tens to hundreds of tokens, W in 4 bits, on Hopper's tensor cores (compute capability 9.0).
//
// A cluster of SPLIT blocks makes 64 WARPGROUPS outputs of TOKENS tokens; its blocks share the inputs, and add up through each other's shared
// memory in a fixed order. x comes to shared memory by the copy engine, 128 inputs at a time and STAGES ahead; codes come to registers, DEPTH
// ahead. There they become floats, which wgmma takes as its left matrix [64 outputs, 16 inputs], beside x [16 inputs, TOKENS] in shared memory.
// They lie as in linear.cu: a warp's 16 rows of wgmma's fragment are those of mma.m16n8k16.
//
// Macros: BF16; GROUP (inputs of a scale: 32, 64 or a multiple of 128); ASYMMETRIC; TOKENS (32, 64 or 128); WARPGROUPS; SPLIT; STAGES;
//   DEPTH; GATED (outputs are silu(first half) * second half; GELU: gelu, by tanh); RESIDUAL (y is added to what is there);
//   WIDE (y is float32); LINED (y is
//   the x of another product, of so many tokens in a block); of `line_up`: NORM, ROUNDS.
#define SUBGROUPS (GROUP >= 128 ? 1 : 128 / GROUP)
#define TILES (4 * WARPGROUPS)
#define THREADS (128 * WARPGROUPS)
#define X_BYTES (TOKENS * 256)
#define PITCH (16 * TILES + 4)  // floats of a token's sums in shared memory: lanes of a warp write to different banks
#ifdef GATED
#define OUTPUTS (8 * TILES)
#else
#define OUTPUTS (16 * TILES)
#endif
#ifdef BF16
#define PAIR "bf16x2"
#define EIGHT 0x43084308u  // 128 + 8, the usual zero point
#define KIND "f32.bf16.bf16"
#else
#define PAIR "f16x2"
#define EIGHT 0x64086408u
#define KIND "f32.f16.f16"
#endif
#ifndef ROUNDS
#define ROUNDS 1
#endif

struct Held {  // what a lane needs of 128 inputs
  uint4 words[2];
  u32 scales[SUBGROUPS];
#ifdef ASYMMETRIC
  u32 zeros[SUBGROUPS];
#endif
};
__device__ __forceinline__ u32 counted(u32 word) {  // two codes as floats from CODE_BASE on
  u32 pair;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(pair) : "r"(word), "r"(0x000f000f), "r"(CODE_BASE));
  return pair;
}
__device__ __forceinline__ u32 twice(u32 pair, bool upper) { return __byte_perm(pair, pair, upper ? 0x3232 : 0x1010); }
__device__ __forceinline__ u32 scaled(u32 pair, u32 offset, u32 scale) {
  u32 value;
  asm("sub." PAIR " %0, %1, %2;" : "=r"(value) : "r"(pair), "r"(offset));
  asm("mul." PAIR " %0, %1, %2;" : "=r"(value) : "r"(value), "r"(scale));
  return value;
}

#define SUMS_8(at) "+f"(sum[at]), "+f"(sum[at + 1]), "+f"(sum[at + 2]), "+f"(sum[at + 3]), "+f"(sum[at + 4]), "+f"(sum[at + 5]), \
    "+f"(sum[at + 6]), "+f"(sum[at + 7])
#define SUMS_16(at) SUMS_8(at), SUMS_8(at + 8)
#define SUMS_32(at) SUMS_16(at), SUMS_16(at + 16)
#define NAMES_16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define NAMES_32 NAMES_16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define NAMES_64 NAMES_32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define A_AND_X "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(x)

// sum [64 outputs, TOKENS] += a [64, 16] x [16, TOKENS]
__device__ __forceinline__ void multiply(float (&sum)[TOKENS / 2], const u32 (&a)[4], u64 x) {
#if TOKENS == 32
  asm volatile("{\n.reg .pred p;\nsetp.eq.b32 p, 0, 0;\nwgmma.mma_async.sync.aligned.m64n32k16." KIND " {" NAMES_16 "}, {%16, %17, %18, %19}, %20, p, 1, 1, 0;\n}" : SUMS_16(0) : A_AND_X);
#elif TOKENS == 64
  asm volatile("{\n.reg .pred p;\nsetp.eq.b32 p, 0, 0;\nwgmma.mma_async.sync.aligned.m64n64k16." KIND " {" NAMES_32 "}, {%32, %33, %34, %35}, %36, p, 1, 1, 0;\n}" : SUMS_32(0) : A_AND_X);
#else
  asm volatile("{\n.reg .pred p;\nsetp.eq.b32 p, 0, 0;\nwgmma.mma_async.sync.aligned.m64n128k16." KIND " {" NAMES_64 "}, {%64, %65, %66, %67}, %68, p, 1, 1, 0;\n}"
               : SUMS_32(0), SUMS_32(32)
               : A_AND_X);
#endif
}

// The lower half of what describes x in shared memory: pieces of 8 tokens x 16 bytes (no swizzle), those of the next 8 inputs TOKENS * 16 bytes
// on. The address of shared memory has the block's rank in its cluster above these 18 bits.
__device__ __forceinline__ u32 described(u32 place) { return (place & 0x3ffff) >> 4 | TOKENS << 16; }
__device__ __forceinline__ u64 whole(u32 lower) { return (u64)8 << 32 | lower; }

// The tile of 16 outputs that is the `index`-th of a block.
__device__ __forceinline__ int tile_of(int unit, int index, int tiles, int second_half) {
#ifdef GATED
  return index < TILES / 2 ? min(unit * (TILES / 2) + index, second_half - 1)
                           : min(unit * (TILES / 2) + index - TILES / 2, second_half - 1) + second_half;
#else
  return min(unit * TILES + index, tiles - 1);
#endif
}

// codes [tiles, chunks, 1024 bytes]; scales, offsets [tiles, chunks, SUBGROUPS, 32 bytes]; x as `line_up` leaves it; y [tokens, outputs]
extern "C" __global__ void __cluster_dims__(SPLIT, 1, 1) __launch_bounds__(THREADS, 4 / WARPGROUPS)
    wide(const uint4* codes, const u32* scales, const u32* offsets, const u16* bias, const unsigned char* x, u16* y,
         int rows, int tokens, int second_half, int chunks) {
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ __align__(8) u64 barriers[2 * STAGES];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, rank = blockIdx.x % SPLIT;
  // blocks of the same outputs are side by side: codes are read once
  const int parts = (tokens + TOKENS - 1) / TOKENS, unit = blockIdx.x / SPLIT / parts, part = blockIdx.x / SPLIT % parts;
  const int first = chunks * rank / SPLIT, turns = chunks * (rank + 1) / SPLIT - first;
  const u32 full = shared_place(barriers), empty = full + 8 * STAGES, base = shared_place(memory);
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; s++) prepare(full + 8 * s, 1), prepare(empty + 8 * s, 4 * WARPGROUPS);
    prepared();
  }
  __syncthreads();
  let_next_start();
  const size_t own = (size_t)tile_of(unit, warp, (rows + 15) / 16, second_half) * chunks + first;
  const uint4* next_codes = codes + own * 64 + lane;
  const u32* next_scales = scales + own * (SUBGROUPS * 8) + lane / 4;
#ifdef ASYMMETRIC
  const u32* next_offsets = offsets + own * (SUBGROUPS * 8) + lane / 4;
#endif
  const auto fetch = [&](Held& held) {
    held.words[0] = load_once(next_codes), held.words[1] = load_once(next_codes + 32);
    next_codes += 64;
#pragma unroll
    for (int s = 0; s < SUBGROUPS; s++) held.scales[s] = __ldg(next_scales + s * 8);
    next_scales += SUBGROUPS * 8;
#ifdef ASYMMETRIC
#pragma unroll
    for (int s = 0; s < SUBGROUPS; s++) held.zeros[s] = __ldg(next_offsets + s * 8);
    next_offsets += SUBGROUPS * 8;
#endif
  };
  const unsigned char* next_x = x + ((size_t)part * chunks + first) * X_BYTES;
  const auto fetch_x = [&](int stage) {
    expect(full + stage * 8, X_BYTES);
    copy_all(base + stage * X_BYTES, next_x, X_BYTES, full + stage * 8);
    next_x += X_BYTES;
  };
  Held held[DEPTH];
#pragma unroll
  for (int turn = 0; turn < DEPTH; turn++)
    if (turn < turns) fetch(held[turn]);
  wait_for_previous();
  if (threadIdx.x == 0)
    for (int turn = 0; turn < min(turns, STAGES); turn++) fetch_x(turn);

  float sum[TOKENS / 2] = {};
  u32 a[2][2][4], right = described(base);
  int stage = 0, parity = 0;
  for (int start = 0; start < turns; start += DEPTH) {
#pragma unroll
    for (int d = 0; d < DEPTH; d++) {
      const int turn = start + d;
      if (turn >= turns) break;
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const int s = j * SUBGROUPS / 4;
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const u32 word = word_of(held[d].words[half], j), by = twice(held[d].scales[s], half);
#ifdef ASYMMETRIC
          const u32 from = twice(held[d].zeros[s], half);
#else
          const u32 from = EIGHT;
#endif
#pragma unroll
          for (int pair = 0; pair < 4; pair++) a[j % 2][pair / 2][pair % 2 * 2 + half] = scaled(counted(word >> (4 * pair)), from, by);
        }
        if (j == 3 && turn + DEPTH < turns) fetch(held[d]);
        if (j == 0) wait(full + stage * 8, parity);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
        multiply(sum, a[j % 2][0], whole(right + j * 4 * TOKENS));
        multiply(sum, a[j % 2][1], whole(right + j * 4 * TOKENS + 2 * TOKENS));
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
        if (j == 0 && turn && lane == 0) arrive(empty + (stage ? stage - 1 : STAGES - 1) * 8);
      }
      if (threadIdx.x == 0 && turn > 1 && turn - 2 + STAGES < turns) {  // all warps left that stage a while ago
        const int left = stage < 2 ? stage + STAGES - 2 : stage - 2;
        wait(empty + left * 8, stage < 2 ? parity ^ 1 : parity);
        fetch_x(left);
      }
      __syncwarp();
      stage++, right += X_BYTES / 16;
      if (stage == STAGES) stage = 0, parity ^= 1, right -= STAGES * (X_BYTES / 16);
    }
  }
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  __syncthreads();

  float* sums = (float*)memory;  // [TOKENS][PITCH]
#pragma unroll
  for (int n = 0; n < TOKENS / 8; n++) {
    float* start = sums + (n * 8 + lane % 4 * 2) * PITCH + warp * 16 + lane / 4;
    start[0] = sum[4 * n];
    start[PITCH] = sum[4 * n + 1];
    start[8] = sum[4 * n + 2];
    start[PITCH + 8] = sum[4 * n + 3];
  }
#if SPLIT > 1
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
  __syncthreads();
#endif
  const auto added_up = [&](int token, int column) {
    float4 value = make_float4(0, 0, 0, 0);
    const u32 place = shared_place(sums + token * PITCH + column);
#pragma unroll
    for (int s = 0; s < SPLIT; s++) {
      float4 one;
#if SPLIT > 1
      u32 theirs;
      asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(theirs) : "r"(place), "r"(s));
      asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(one.x), "=f"(one.y), "=f"(one.z), "=f"(one.w) : "r"(theirs) : "memory");
#else
      one = *(const float4*)(sums + token * PITCH + column);
#endif
      value.x += one.x, value.y += one.y, value.z += one.z, value.w += one.w;
    }
    return value;
  };
  const auto biased = [&](float4 value, int row) {
    if (bias) value.x += widen(bias[row]), value.y += widen(bias[row + 1]), value.z += widen(bias[row + 2]), value.w += widen(bias[row + 3]);
    return value;
  };
#ifdef GATED
  const int made = second_half * 16;
#else
  const int made = rows;
#endif
  const int last = (rank + 1) * TOKENS / SPLIT;
  for (int item = rank * TOKENS / SPLIT * (OUTPUTS / 4) + threadIdx.x; item < last * (OUTPUTS / 4); item += THREADS) {
    const int held = item / (OUTPUTS / 4), column = item % (OUTPUTS / 4) * 4;
    const int token = part * TOKENS + held, row = unit * OUTPUTS + column;
    if (token >= tokens || row >= made) continue;
    float4 value = biased(added_up(held, column), row);
#ifdef GATED
    const float4 other = biased(added_up(held, column + OUTPUTS), row + made);
    value.x = activated(value.x) * other.x, value.y = activated(value.y) * other.y;
    value.z = activated(value.z) * other.z, value.w = activated(value.w) * other.w;
#endif
#ifdef LINED
    put_lined(y, token, row, made, value);
#else
    const size_t place = (size_t)token * made + row;
#ifdef WIDE
    *(float4*)((float*)y + place) = value;
#else
#ifdef RESIDUAL
    const uint2 before = *(const uint2*)(y + place);
    value.x += low(before.x), value.y += high(before.x), value.z += low(before.y), value.w += high(before.y);
#endif
    *(uint2*)(y + place) = make_uint2(narrow(value.x, value.y), narrow(value.z, value.w));
#endif
#endif
  }
#if SPLIT > 1
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// Puts x [tokens, 8 vectors], normed where NORM says so, in the order in which `wide` reads it: [tokens / TOKENS, units, TOKENS, 4 words]. A unit is
// a column of the pieces above: inputs 8 t + p and 8 t + 4 + p of 32 in word t, p = 0..3, which are neighbours in wgmma's left matrix. A block for
// a token, which holds ROUNDS of 256 vectors.
extern "C" __global__ void __launch_bounds__(256) line_up(const uint4* x, const uint4* norm, float epsilon, u32* lined, int vectors, int chunks) {
  __shared__ float partial[8];
  const int token = blockIdx.x;
  uint4 held[ROUNDS];
  take_row(held, x + (size_t)token * vectors, true, norm, vectors, epsilon, partial);
  u32* start = lined + (size_t)(token / TOKENS) * chunks * (X_BYTES / 4) + token % TOKENS * 4;
#pragma unroll
  for (int r = 0; r < ROUNDS; r++) {
    const int vector = r * 256 + threadIdx.x;
    const uint4& values = held[r];
    if (vector >= chunks * 16) break;
    u32* place = start + (size_t)(vector / 4 * 4) * (TOKENS * 4) + vector % 4;
    place[0] = __byte_perm(values.x, values.z, 0x5410), place[TOKENS * 4] = __byte_perm(values.x, values.z, 0x7632);
    place[TOKENS * 8] = __byte_perm(values.y, values.w, 0x5410), place[TOKENS * 12] = __byte_perm(values.y, values.w, 0x7632);
  }
}
