// y = x W^T for tens to hundreds of tokens, W in 4 bits, on Hopper's tensor cores (compute capability 9.0).
//
// A cluster of SPLIT blocks makes 64 WARPGROUPS outputs of TOKENS tokens; its blocks share the inputs, and add up through each other's shared
// memory in a fixed order. Chunks of 128 inputs come to shared memory STAGES ahead: of x by the copy engine, of codes by the warp that reads
// them (small copies by the engine cost more than all else). Codes become floats in registers, which wgmma takes as its left matrix [64
// outputs, 16 inputs], beside x [16 inputs, TOKENS] in shared memory. They lie as in linear.cu: a warp's 16 rows of wgmma's fragment are those
// of mma.m16n8k16.
//
// Macros: BF16; GROUP (inputs of a scale: 32, 64 or a multiple of 128); ASYMMETRIC; TOKENS (32, 64 or 128); WARPGROUPS; SPLIT; STAGES;
//   GATED (outputs are silu(first half) * second half; GELU: gelu, by tanh); RESIDUAL (y is added to what is there); WIDE (y is float32); NORM (of `line_up`).
#define SUBGROUPS (GROUP >= 128 ? 1 : 128 / GROUP)
#define TILES (4 * WARPGROUPS)
#define THREADS (128 * WARPGROUPS)
#define X_BYTES (TOKENS * 256)
#define CODE_BYTES (TILES * 1024)
#define SCALE_BYTES (TILES * SUBGROUPS * 32)
#ifdef ASYMMETRIC
#define STAGE_BYTES (X_BYTES + CODE_BYTES + 2 * SCALE_BYTES)
#else
#define STAGE_BYTES (X_BYTES + CODE_BYTES + SCALE_BYTES)
#endif
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

__device__ __forceinline__ u32 shared_place(const void* pointer) { return (u32)__cvta_generic_to_shared(pointer); }
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
template <int BYTES>
__device__ __forceinline__ void copy(u32 to, const void* from) {
  if (BYTES == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(BYTES) : "memory");
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
#define A_AND_X "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(x), "r"(keep)

// sum [64 outputs, TOKENS] += a [64, 16] x [16, TOKENS]
__device__ __forceinline__ void multiply(float (&sum)[TOKENS / 2], const u32 (&a)[4], u64 x, int keep) {
#if TOKENS == 32
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %21, 0;\nwgmma.mma_async.sync.aligned.m64n32k16." KIND " {" NAMES_16 "}, {%16, %17, %18, %19}, %20, p, 1, 1, 0;\n}" : SUMS_16(0) : A_AND_X);
#elif TOKENS == 64
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\nwgmma.mma_async.sync.aligned.m64n64k16." KIND " {" NAMES_32 "}, {%32, %33, %34, %35}, %36, p, 1, 1, 0;\n}" : SUMS_32(0) : A_AND_X);
#else
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\nwgmma.mma_async.sync.aligned.m64n128k16." KIND " {" NAMES_64 "}, {%64, %65, %66, %67}, %68, p, 1, 1, 0;\n}"
               : SUMS_32(0), SUMS_32(32)
               : A_AND_X);
#endif
}

// x in shared memory lies in pieces of 8 tokens x 16 bytes (no swizzle); pieces of the next 8 inputs are TOKENS * 16 bytes on. The address of
// shared memory has the block's rank in its cluster above these 18 bits.
__device__ __forceinline__ u64 described(u32 place) { return (u64)((place & 0x3ffff) >> 4) | (u64)TOKENS << 16 | (u64)8 << 32; }

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
    wide(const unsigned char* codes, const unsigned char* scales, const unsigned char* offsets, const u16* bias, const unsigned char* x, u16* y,
         int rows, int tokens, int second_half, int chunks) {
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ __align__(8) u64 barriers[2 * STAGES];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, unit = blockIdx.x / SPLIT, rank = blockIdx.x % SPLIT;
  const int first = chunks * rank / SPLIT, turns = chunks * (rank + 1) / SPLIT - first;
  const u32 full = shared_place(barriers), empty = full + 8 * STAGES, base = shared_place(memory);
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; s++) {
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(full + 8 * s) : "memory");
      asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(empty + 8 * s), "r"(4 * WARPGROUPS) : "memory");
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  let_next_start();
  const size_t fetched = (size_t)tile_of(unit, warp, (rows + 15) / 16, second_half) * chunks + first;
  const auto fetch_weights = [&](int turn) {  // of the warp's own tile
    const u32 stage = base + turn % STAGES * STAGE_BYTES + X_BYTES, held = warp * (SUBGROUPS * 32) + lane * 4;
    const size_t place = fetched + turn;
    if (turn < turns) {
      copy<16>(stage + warp * 1024 + lane * 16, codes + place * 1024 + lane * 16);
      copy<16>(stage + warp * 1024 + 512 + lane * 16, codes + place * 1024 + 512 + lane * 16);
      if (lane < 8 * SUBGROUPS) {
        copy<4>(stage + CODE_BYTES + held, scales + place * (SUBGROUPS * 32) + lane * 4);
#ifdef ASYMMETRIC
        copy<4>(stage + CODE_BYTES + SCALE_BYTES + held, offsets + place * (SUBGROUPS * 32) + lane * 4);
#endif
      }
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  };
  const auto fetch_x = [&](int turn) {
    expect(full + turn % STAGES * 8, X_BYTES);
    copy_all(base + turn % STAGES * STAGE_BYTES, x + ((size_t)blockIdx.y * chunks + first + turn) * X_BYTES, X_BYTES, full + turn % STAGES * 8);
  };
#pragma unroll
  for (int turn = 0; turn < STAGES - 1; turn++) fetch_weights(turn);
  wait_for_previous();
  if (threadIdx.x == 0)
    for (int turn = 0; turn < min(turns, STAGES); turn++) fetch_x(turn);

  float sum[TOKENS / 2];
  u32 a[2][2][4];
  for (int turn = 0; turn < turns; turn++) {
    const u32 offset = turn % STAGES * STAGE_BYTES;
    asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
    __syncwarp();
    fetch_weights(turn + STAGES - 1);
    const uint4* held = (const uint4*)(memory + offset + X_BYTES + warp * 1024) + lane;
    const uint4 words[2] = {held[0], held[32]};
    const u32* scale = (const u32*)(memory + offset + X_BYTES + CODE_BYTES + warp * (SUBGROUPS * 32)) + lane / 4;
    u32 both = 0, zeros = 0;
#pragma unroll
    for (int j = 0; j < 4; j++) {
      if (j % (4 / SUBGROUPS) == 0) {
        both = scale[j / (4 / SUBGROUPS) * 8];
#ifdef ASYMMETRIC
        zeros = scale[SCALE_BYTES / 4 + j / (4 / SUBGROUPS) * 8];
#endif
      }
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const u32 word = j == 0 ? words[half].x : j == 1 ? words[half].y : j == 2 ? words[half].z : words[half].w;
        const u32 by = twice(both, half);
#ifdef ASYMMETRIC
        const u32 from = twice(zeros, half);
#else
        const u32 from = EIGHT;
#endif
#pragma unroll
        for (int pair = 0; pair < 4; pair++)
          a[j % 2][pair / 2][pair % 2 * 2 + half] = scaled((word >> (4 * pair) & 0x000f000fu) | CODE_BASE, from, by);
      }
      if (j == 0) wait(full + turn % STAGES * 8, turn / STAGES % 2);
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
      const u64 right = described(base + offset + j * 4 * (TOKENS * 16));
      multiply(sum, a[j % 2][0], right, turn + j);
      multiply(sum, a[j % 2][1], right + 2 * TOKENS, 1);  // in 16 bytes
      asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
      asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
      if (j == 0 && turn && lane == 0) arrive(empty + (turn - 1) % STAGES * 8);
    }
    if (threadIdx.x == 0 && turn > 1 && turn - 2 + STAGES < turns) {  // all warps left that stage a while ago
      wait(empty + (turn - 2) % STAGES * 8, (turn - 2) / STAGES % 2);
      fetch_x(turn - 2 + STAGES);
    }
    __syncwarp();
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
  for (int item = threadIdx.x; item < TOKENS / SPLIT * (OUTPUTS / 4); item += THREADS) {
    const int held = rank * (TOKENS / SPLIT) + item / (OUTPUTS / 4), column = item % (OUTPUTS / 4) * 4;
    const int token = blockIdx.y * TOKENS + held, row = unit * OUTPUTS + column;
    if (token >= tokens || row >= made) continue;
    float4 value = biased(added_up(held, column), row);
#ifdef GATED
    const float4 other = biased(added_up(held, column + OUTPUTS), row + made);
    value.x = activated(value.x) * other.x, value.y = activated(value.y) * other.y;
    value.z = activated(value.z) * other.z, value.w = activated(value.w) * other.w;
#endif
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
  }
#if SPLIT > 1
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// Puts x [tokens, 8 vectors], normed where NORM says so, in the order in which `wide` reads it: [tokens / TOKENS, chunks, 4 x 32 inputs, 4,
// TOKENS, 8], the last being inputs 8 t + p and 8 t + 4 + p of 32 for t = 0..3, which are neighbours in wgmma's left matrix. A block for a token.
extern "C" __global__ void __launch_bounds__(256) line_up(const uint4* x, const uint4* norm, float epsilon, uint4* lined, int vectors, int chunks) {
  let_next_start();
  wait_for_previous();
  const int token = blockIdx.x;
  const uint4* source = x + (size_t)token * vectors;
#ifdef NORM
  const float factor = norm_factor(source, vectors, epsilon);
#endif
  uint4* start = lined + (size_t)(token / TOKENS) * chunks * (X_BYTES / 16) + token % TOKENS;
  for (int part = threadIdx.x; part < chunks * 4; part += 256) {
    u32 found[4][4];
#pragma unroll
    for (int t = 0; t < 4; t++) {
      const int vector = part * 4 + t;
      uint4 values = make_uint4(0, 0, 0, 0);
      if (vector < vectors) {
        values = source[vector];
#ifdef NORM
        values = normed(values, norm[vector], factor);
#endif
      }
      found[0][t] = __byte_perm(values.x, values.z, 0x5410), found[1][t] = __byte_perm(values.x, values.z, 0x7632);
      found[2][t] = __byte_perm(values.y, values.w, 0x5410), found[3][t] = __byte_perm(values.y, values.w, 0x7632);
    }
#pragma unroll
    for (int p = 0; p < 4; p++)
      start[(size_t)(part * 4 + p) * TOKENS] = make_uint4(found[p][0], found[p][1], found[p][2], found[p][3]);
  }
}
