// y = x W^T for a few tokens: weights stream past once, tensor cores multiply them by 8 tokens at a time.
//
// A block goes over units of 16 ROW_TILES outputs, each warp over every WARPS-th span of chunks of 128 inputs; then its warps add up. The
// next spans are always on their way to the warp's slots in shared memory, those of the next unit too, and the first ones before the kernel
// before this one has ended. mma.m16n8k16 takes W as its 16 x 16 matrix and x as its 16 x 8. Which input sits in which of the 16 places
// does not matter as long as both agree: lane 4 g + t of chunk c holds, of rows g and g + 8, the eight inputs 128 c + 32 j + 8 t + {0..7},
// j = 0..3.
//
// 8 bits: x is rounded to 8 bits too, with a scale for each token or the given one, and products are sums of codes (m16n8k32).
//
// Macros: BF16; BITS 4, 8 (E4M3 floats; INTEGER: int8) or 16; INPUTS; GROUP (inputs of a scale: 32, 64 or a multiple of 128); ASYMMETRIC;
//   TOKEN_TILES; ROW_TILES; WARPS; DEPTH (slots of a warp); SPAN (chunks side by side in a slot); SHARED (x goes through shared memory,
//   normed where NORM says so; else it was put in order by `arrange`); GATED (outputs are silu(first half) * second half; GELU: gelu, by
//   tanh); RESIDUAL (y is added to what is there); WIDE (y is float32); ALONE (one token, which the compiler knows);
//   CHOICES (experts of a token; SHARED: blocks of one blockIdx.y multiply the rows of a group of `experts.cu` by
//   their expert's matrix; GATED ones find rows by the token of their choice and write them side by side, others the other way round).
#define CHUNKS ((INPUTS + 127) / 128)
#define THREADS (32 * WARPS)
#define SUBGROUPS (GROUP >= 128 ? 1 : 128 / GROUP)
#define WORDS_PER_SUBGROUP (BITS == 8 ? 2 : 4 / SUBGROUPS)
#define SPANS ((CHUNKS + SPAN - 1) / SPAN)
#define PLACES (CHUNKS * SUBGROUPS)                       // of which x is summed, each with a scale
#define VECTORS_PER_PLACE (16 / SUBGROUPS)
#define VECTORS_OF_LANE (((SPANS + WARPS - 1) / WARPS * SPAN + 1) / 2)  // of the inputs that a warp multiplies
#if BITS == 4 || defined(ALONE)
#define AT_ONCE 1
#else
#define AT_ONCE (VECTORS_OF_LANE > 4 ? 2 : 4)  // tokens whose inputs are asked for together, and for which warps wait together
#endif
#if defined(SHARED) && defined(NORM) && defined(BF16) && BITS != 8
#define NORM_LATER  // products are multiplied by what the norm divides by: no warp waits for the squares of others
#endif
#define ITEMS ((ROW_TILES * TOKEN_TILES * 128 + THREADS - 1) / THREADS)
#define X_BYTES (BITS == 8 ? 1 : 2)
#define STRIDE (CHUNKS * 128 * X_BYTES + 64)  // bytes of a token in shared memory: tokens start 64 apart, modulo the 128 of a row of banks
#define VECTORS (BITS == 4 ? 1 : BITS / 4)  // of 16 bytes, that a lane has of a chunk of an output
#ifdef INTEGER
typedef int Sum;
#else
typedef float Sum;
#endif

#if BITS == 4 && __CUDA_ARCH__ >= 900
#define BULK  // the copy engine fills slots, else threads do
#endif
#if BITS == 4
#define SCALE_BYTES (32 * SUBGROUPS)  // of a tile and chunk
#ifdef ASYMMETRIC
#define KINDS 3
#else
#define KINDS 2
#endif
#define SLOT_BYTES (ROW_TILES * SPAN * (1024 + (KINDS - 1) * SCALE_BYTES))  // codes [ROW_TILES, SPAN], then scales, then offsets
#else
#define ROW_BYTES (SPAN * 16 * BITS)
#define ROW_STRIDE (ROW_BYTES + 64)  // so that eight lanes read of all banks
#define SLOT_BYTES (ROW_TILES * 16 * ROW_STRIDE)
#endif

struct Stage {
  uint4 weight[ROW_TILES][2][VECTORS];
#if BITS == 4
  u32 scale[ROW_TILES][SUBGROUPS];
#ifdef ASYMMETRIC
  u32 offset[ROW_TILES][SUBGROUPS];
#endif
#endif
};

#ifdef INTEGER
__device__ __forceinline__ void multiply(int (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(sum[0]), "+r"(sum[1]), "+r"(sum[2]), "+r"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
#else
#if BITS == 8
#undef MMA
#define MMA "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 "
#endif
__device__ __forceinline__ void multiply(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm(MMA "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
#endif

__device__ __forceinline__ void tiles_of(int (&tile)[ROW_TILES], int unit, int rows, int second_half) {
#pragma unroll
  for (int r = 0; r < ROW_TILES; r++)
#ifdef GATED
    tile[r] = min(unit * (ROW_TILES / 2) + r / 2, second_half - 1) + (r % 2) * second_half;
#else
    tile[r] = min(unit * ROW_TILES + r, (rows + 15) / 16 - 1);
#endif
}

// The weight on its way to a warp. 4 bits: codes [tiles, chunks, 2, 32] uint4; scales, offsets [tiles, chunks, SUBGROUPS, 8] words: those
// of rows g and g + 8. 8 and 16 bits: [rows, INPUTS].
struct Ring {
  const char *weight, *scales, *offsets;
  int rows, second_half, units, warp, lane, turns;
  char* slots;
#ifdef BULK
  u32 full;
#endif
  int unit, turn = 0, slot = 0;  // of what is asked for next
  int taken = 0, phase = 0;      // the slot that is read next

  __device__ __forceinline__ void ask() {
    const int first = (turn * WARPS + warp) * SPAN;
    if (unit < units && turn < turns) {
      int tile[ROW_TILES];
      tiles_of(tile, unit, rows, second_half);
      const int chunks = CHUNKS % SPAN == 0 ? SPAN : min(SPAN, CHUNKS - first);
      char* to = slots + slot * SLOT_BYTES;
#ifdef BULK
      const u32 barrier = full + 8 * slot, place = shared_place(to);
      if (lane == 0) expect(barrier, ROW_TILES * chunks * (1024 + (KINDS - 1) * SCALE_BYTES));
      __syncwarp();
      const int r = lane % ROW_TILES, kind = lane / ROW_TILES;
      const size_t from = (size_t)(r ? tile[ROW_TILES - 1] : tile[0]) * CHUNKS + first;
      if (kind == 0)
        copy_all(place + r * SPAN * 1024, weight + from * 1024, chunks * 1024, barrier);
      else if (kind < KINDS)
        copy_all(place + ROW_TILES * SPAN * 1024 + ((kind - 1) * ROW_TILES + r) * SPAN * SCALE_BYTES,
                 (kind == 1 ? scales : offsets) + from * SCALE_BYTES, chunks * SCALE_BYTES, barrier);
#else
#if BITS == 4
#pragma unroll
      for (int r = 0; r < ROW_TILES; r++) {
        const size_t from = (size_t)tile[r] * CHUNKS + first;
#pragma unroll
        for (int i = 0; i < SPAN * 2; i++)
          if (i < chunks * 2) copy_16(to + (r * SPAN * 2 + i) * 512 + lane * 16, weight + from * 1024 + i * 512 + lane * 16);
#pragma unroll
        for (int kind = 1; kind < KINDS; kind++)
          if (lane * 16 < chunks * SCALE_BYTES)
            copy_16(to + ROW_TILES * SPAN * 1024 + ((kind - 1) * ROW_TILES + r) * SPAN * SCALE_BYTES + lane * 16,
                    (kind == 1 ? scales : offsets) + from * SCALE_BYTES + lane * 16);
      }
#else
#pragma unroll
      for (int i = 0; i < ROW_TILES * ROW_BYTES / 32; i++) {
        const int vector = i * 32 + lane, row = vector / (ROW_BYTES / 16), at = vector % (ROW_BYTES / 16) * 16;
        const int from = min((row < 16 ? tile[0] : tile[ROW_TILES - 1]) * 16 + row % 16, rows - 1);
        if (INPUTS % (128 * SPAN) == 0 || first * 16 * BITS + at < INPUTS * BITS / 8)
          copy_16(to + row * ROW_STRIDE + at, weight + (size_t)from * (INPUTS * BITS / 8) + first * 16 * BITS + at);
      }
#endif
#endif
    }
#ifndef BULK
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
    slot = slot + 1 < DEPTH ? slot + 1 : 0;
    if (++turn >= turns) turn = 0, unit += gridDim.x;
  }

  __device__ __forceinline__ void await() const {
#ifdef BULK
    wait(full + 8 * taken, phase);
#else
    asm volatile("cp.async.wait_group %0;" ::"n"(DEPTH - 1) : "memory");
    __syncwarp();
#endif
  }
  __device__ __forceinline__ Stage read(int chunk) const {
    const char* from = slots + taken * SLOT_BYTES;
    Stage stage;
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++) {
#pragma unroll
      for (int half = 0; half < 2; half++)
#pragma unroll
        for (int j = 0; j < VECTORS; j++)
#if BITS == 4
          stage.weight[r][half][j] = *(const uint4*)(from + (r * SPAN + chunk) * 1024 + half * 512 + lane * 16);
#else
          stage.weight[r][half][j] =
              *(const uint4*)(from + (r * 16 + half * 8 + lane / 4) * ROW_STRIDE + (chunk * VECTORS + j) * 64 + lane % 4 * 16);
#endif
#if BITS == 4
      const char* of_scales = from + ROW_TILES * SPAN * 1024 + (r * SPAN + chunk) * SCALE_BYTES + lane / 4 * 4;
#pragma unroll
      for (int s = 0; s < SUBGROUPS; s++) {
        stage.scale[r][s] = *(const u32*)(of_scales + s * 32);
#ifdef ASYMMETRIC
        stage.offset[r][s] = *(const u32*)(of_scales + ROW_TILES * SPAN * SCALE_BYTES + s * 32);
#endif
      }
#endif
    }
    return stage;
  }
  __device__ __forceinline__ void next() {  // the slot that was read is free again
    __syncwarp();
    ask();
    if (++taken == DEPTH) taken = 0, phase ^= 1;
  }
};

#if BITS == 4
// Eight inputs in the order in which the codes of a word come out: 0, 4, 1, 5, 2, 6, 3, 7.
__device__ __forceinline__ uint4 in_order(const uint4& values) {
  return make_uint4(__byte_perm(values.x, values.z, 0x5410), __byte_perm(values.x, values.z, 0x7632),
                    __byte_perm(values.y, values.w, 0x5410), __byte_perm(values.y, values.w, 0x7632));
}

// The sum of the inputs that share a scale, which lie in lanes side by side.
__device__ __forceinline__ float sum_of_place(const uint4& values) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < 4; i++) sum += low(word_of(values, i)) + high(word_of(values, i));
#pragma unroll
  for (int step = VECTORS_PER_PLACE / 2; step; step >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  return sum;
}
#else
__device__ __forceinline__ uint4 in_order(const uint4& values) { return values; }
#endif

extern "C" __global__ void __launch_bounds__(THREADS)
    linear(const uint4* weight, const u32* scales, const u32* offsets, const u16* bias, const uint4* x, const float* sums_of_x,
           const uint4* norm, float epsilon, u16* y, int rows, int tokens, int second_half
#ifdef CHOICES
           ,
           const int4* groups, const int* order
#endif
    ) {
  extern __shared__ uint4 memory[];
#ifdef CHOICES
  wait_for_previous();
  const int4 group = groups[blockIdx.y];  // expert, first of its places in the order, how many
  if (group.z == 0) return;
#if BITS == 4
  const size_t tiles = (size_t)group.x * ((rows + 15) / 16) * CHUNKS;
  weight += tiles * 64, scales += tiles * SUBGROUPS * 8;
#ifdef ASYMMETRIC
  offsets += tiles * SUBGROUPS * 8;
#endif
#else
  weight += (size_t)group.x * rows * INPUTS * BITS / 128, scales += (size_t)group.x * rows;
#endif
  if (bias) bias += (size_t)group.x * rows;
  order += group.y, tokens = group.z;
#ifdef GATED
  y += (size_t)group.y * second_half * 16;
#define SOURCE(token) (order[token] / CHOICES)
#define WRITTEN(token) (token)
#else
  x += (size_t)group.y * (INPUTS / 8);
#define SOURCE(token) (token)
#define WRITTEN(token) (order[token])
#endif
#else
#define SOURCE(token) (token)
#define WRITTEN(token) (token)
#endif
#ifdef BULK
  __shared__ __align__(8) u64 barriers[WARPS * DEPTH];
#endif
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#ifdef ALONE
  tokens = 1;
#endif
#ifdef GATED
  const int units = (second_half + ROW_TILES / 2 - 1) / (ROW_TILES / 2);
#else
  const int units = ((rows + 15) / 16 + ROW_TILES - 1) / ROW_TILES;
#endif

  const int turns = SPANS % WARPS == 0 ? SPANS / WARPS : (SPANS - warp + WARPS - 1) / WARPS;
  Ring ring{(const char*)weight, (const char*)scales, (const char*)offsets, rows, second_half, units, warp, lane, turns,
            (char*)memory + warp * DEPTH * SLOT_BYTES,
#ifdef BULK
            shared_place(barriers + warp * DEPTH),
#endif
            (int)blockIdx.x};
#ifdef BULK
  if (lane < DEPTH) prepare(ring.full + 8 * lane, 1);
  prepared();
#endif
#if BITS != 4 && INPUTS % 128
  for (int i = lane; i < DEPTH * SLOT_BYTES / 16; i += 32) ((uint4*)ring.slots)[i] = make_uint4(0, 0, 0, 0);  // as behind the inputs
#endif
  __syncwarp();
  for (int d = 0; d < DEPTH; d++) ring.ask();
#ifdef SHARED
  const auto vector_of = [&](int v) {  // a warp brings what it multiplies
    const int place = v * 32 + lane;
    return (place / (SPAN * 16) * WARPS + warp) * (SPAN * 16) + place % (SPAN * 16);
  };
#ifdef NORM
  uint4 norms[VECTORS_OF_LANE];
#pragma unroll
  for (int v = 0; v < VECTORS_OF_LANE; v++) norms[v] = vector_of(v) < INPUTS / 8 ? norm[vector_of(v)] : make_uint4(0, 0, 0, 0);
#endif
#endif
  let_next_start();
  wait_for_previous();

#if BITS == 4
  const u32 mask = 0x000f000fu | threadIdx.y;  // which is 0: a constant would be moved to a register anew for each use
#endif
#ifdef SHARED
  char* held = (char*)memory + WARPS * DEPTH * SLOT_BYTES;
  float* x_sums = (float*)(held + tokens * STRIDE);  // 4 bits: [PLACES, TOKEN_TILES * 8]; 8 bits: the scales of tokens [TOKEN_TILES * 8]
#ifdef NORM
  __shared__ float squares[8][WARPS];
  const auto factor_of = [&](int token) {
    float all = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) all += squares[token][w];
    return rsqrtf(all / INPUTS + epsilon);
  };
#endif
#if BITS == 8
  __shared__ float largest[8][WARPS];
#endif
  for (int first = 0; first < tokens; first += AT_ONCE) {
    uint4 values[AT_ONCE][VECTORS_OF_LANE];
#pragma unroll
    for (int t = 0; t < AT_ONCE; t++)
#pragma unroll
      for (int v = 0; v < VECTORS_OF_LANE; v++) {
        const bool there = first + t < tokens && vector_of(v) < INPUTS / 8;
        values[t][v] = there ? x[(size_t)SOURCE(first + t) * (INPUTS / 8) + vector_of(v)] : make_uint4(0, 0, 0, 0);
      }
#ifdef NORM
#pragma unroll
    for (int t = 0; t < AT_ONCE; t++) {
      const float own = sum_of_warp(squares_of(values[t]));
      if (lane == 0) squares[first + t][warp] = own;
    }
#ifndef NORM_LATER
    __syncthreads();
#endif
#pragma unroll
    for (int t = 0; t < AT_ONCE; t++) {
#ifdef NORM_LATER
      const float factor = 1;
#else
      const float factor = factor_of(first + t);
#endif
#pragma unroll
      for (int v = 0; v < VECTORS_OF_LANE; v++) values[t][v] = normed(values[t][v], norms[v], factor);
    }
#endif
#if BITS == 8
#pragma unroll
    for (int t = 0; t < AT_ONCE; t++) {
      float own = 0;
#pragma unroll
      for (int v = 0; v < VECTORS_OF_LANE; v++) own = fmaxf(own, largest_of(values[t][v]));
      own = maximum_of_warp(own);
      if (lane == 0) largest[first + t][warp] = own;
    }
    __syncthreads();
#endif
#pragma unroll
    for (int t = 0; t < AT_ONCE; t++) {
      const int token = first + t;
      if (token >= tokens) break;
#if BITS == 8
      const float scale = scale_of((const float*)offsets, largest[token]), by = 1 / scale;
      if (threadIdx.x == 0) x_sums[token] = scale;
#endif
#pragma unroll
      for (int v = 0; v < VECTORS_OF_LANE; v++) {
        const int vector = vector_of(v);
#if BITS == 4
        const float sum = sum_of_place(values[t][v]);
        if (vector < CHUNKS * 16 && vector % VECTORS_PER_PLACE == 0) x_sums[vector / VECTORS_PER_PLACE * (TOKEN_TILES * 8) + token] = sum;
#endif
#if BITS == 8
        if (vector < CHUNKS * 16) *(uint2*)(held + token * STRIDE + vector * 8) = codes_of(values[t][v], by);
#else
        if (vector < CHUNKS * 16) *(uint4*)(held + token * STRIDE + vector * 16) = in_order(values[t][v]);
#endif
      }
    }
  }
  __syncwarp();
#endif

#ifdef SHARED
  float* shares = x_sums + (BITS == 4 ? PLACES : BITS == 8) * TOKEN_TILES * 8;
#else
  const float* x_sums = sums_of_x;
  float* shares = (float*)((char*)memory + WARPS * DEPTH * SLOT_BYTES);
#endif
  bool turned = false;
  for (int unit = blockIdx.x; unit < units; unit += gridDim.x) {
#ifdef RESIDUAL
    float before[ITEMS];
#pragma unroll
    for (int item = 0; item < ITEMS; item++) {
      const int index = item * THREADS + threadIdx.x, token = index / 16 % (TOKEN_TILES * 8);
      const int row = (unit * ROW_TILES + index / 16 / (TOKEN_TILES * 8)) * 16 + index % 16;
      before[item] = index < ROW_TILES * TOKEN_TILES * 128 && token < tokens && row < rows ? widen(y[(size_t)token * rows + row]) : 0;
    }
#endif
#if BITS == 8
    float2 row_scales[ITEMS];
#pragma unroll
    for (int item = 0; item < ITEMS; item++) {
      const int index = item * THREADS + threadIdx.x, r = index / 16 / (TOKEN_TILES * 8);
#ifdef GATED
      const int row = min((unit * (ROW_TILES / 2) + r / 2) * 16 + index % 16, second_half * 16 - 1);
      row_scales[item] = make_float2(__ldg((const float*)scales + row), __ldg((const float*)scales + row + second_half * 16));
#else
      row_scales[item].x = __ldg((const float*)scales + min((unit * ROW_TILES + r) * 16 + index % 16, rows - 1));
#endif
    }
#endif
    Sum sums[ROW_TILES][TOKEN_TILES][4] = {};
    for (int turn = 0; turn < turns; turn++) {
      ring.await();
#pragma unroll
      for (int inside_span = 0; inside_span < SPAN; inside_span++) {
        const int chunk = (turn * WARPS + warp) * SPAN + inside_span;
        if (CHUNKS % SPAN && chunk >= CHUNKS) break;
        const Stage stage = ring.read(inside_span);
#pragma unroll
        for (int s = 0; s < SUBGROUPS; s++) {
#if BITS == 4
          // codes count from CODE_BASE in the products; what that and the zero point add is known beforehand
          float parts[ROW_TILES][TOKEN_TILES][4];
#pragma unroll
          for (int n = 0; n < TOKEN_TILES; n++) {
            const float2 sum = *(const float2*)(x_sums + (chunk * SUBGROUPS + s) * (TOKEN_TILES * 8) + n * 8 + lane % 4 * 2);
#pragma unroll
            for (int r = 0; r < ROW_TILES; r++) {
#ifdef ASYMMETRIC
              const float upper = low(stage.offset[r][s]), lower = high(stage.offset[r][s]);
#else
              const float upper = low(CODE_BASE) + 8, lower = upper;
#endif
              parts[r][n][0] = -upper * sum.x, parts[r][n][1] = -upper * sum.y;
              parts[r][n][2] = -lower * sum.x, parts[r][n][3] = -lower * sum.y;
            }
          }
#endif
#pragma unroll
          for (int inside = 0; inside < WORDS_PER_SUBGROUP; inside++) {
            const int j = s * WORDS_PER_SUBGROUP + inside;
            u32 a[ROW_TILES][2][4];
#pragma unroll
            for (int r = 0; r < ROW_TILES; r++)
#pragma unroll
              for (int half = 0; half < 2; half++) {
#if BITS == 4
                u32 word = word_of(stage.weight[r][half][0], j);
#pragma unroll
                for (int pair = 0; pair < 4; pair++) a[r][pair / 2][pair % 2 * 2 + half] = (word >> (4 * pair) & mask) | CODE_BASE;
#else
                a[r][0][half] = stage.weight[r][half][j].x;
                a[r][0][2 + half] = stage.weight[r][half][j].y;
                a[r][1][half] = stage.weight[r][half][j].z;
                a[r][1][2 + half] = stage.weight[r][half][j].w;
#endif
              }
#pragma unroll
            for (int n = 0; n < TOKEN_TILES; n++) {
#ifdef SHARED
              int token = n * 8 + lane / 4;
              uint4 b = *(uint4*)(held + (token < tokens ? token : 0) * STRIDE + chunk * 128 * X_BYTES + j * 64 + lane % 4 * 16);
#else
              uint4 b = x[(((size_t)n * CHUNKS + chunk) * (2 * X_BYTES) + j) * 32 + lane];  // no __ldg: written while this kernel waits
#endif
#pragma unroll
              for (int r = 0; r < ROW_TILES; r++) {
#if BITS == 4
                multiply(parts[r][n], a[r][0], b.x, b.y);
                multiply(parts[r][n], a[r][1], b.z, b.w);
#else
                multiply(sums[r][n], a[r][0], b.x, b.y);
                multiply(sums[r][n], a[r][1], b.z, b.w);
#endif
              }
            }
          }
#if BITS == 4
#pragma unroll
          for (int r = 0; r < ROW_TILES; r++) {
            const float upper = low(stage.scale[r][s]), lower = high(stage.scale[r][s]);
#pragma unroll
            for (int n = 0; n < TOKEN_TILES; n++) {
              sums[r][n][0] += parts[r][n][0] * upper;
              sums[r][n][1] += parts[r][n][1] * upper;
              sums[r][n][2] += parts[r][n][2] * lower;
              sums[r][n][3] += parts[r][n][3] * lower;
            }
          }
#endif
        }
      }
      ring.next();
    }

    // [WARPS][ROW_TILES][tokens][16], in two places in turns: who writes one has seen all threads behind the reading of the other
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++)
#pragma unroll
      for (int n = 0; n < TOKEN_TILES; n++) {
        const int token = n * 8 + lane % 4 * 2;
        float* start = shares + ((warp * ROW_TILES + r) * tokens + token) * 16 + lane / 4;
        if (token < tokens) start[0] = sums[r][n][0], start[8] = sums[r][n][2];
        if (token + 1 < tokens) start[16] = sums[r][n][1], start[24] = sums[r][n][3];
      }
    __syncthreads();
    const int columns = TOKEN_TILES * 8;
#pragma unroll
    for (int item = 0; item < ITEMS; item++) {
      const int index = item * THREADS + threadIdx.x;
      if (index >= ROW_TILES * columns * 16) break;
      int row_in_tile = index % 16, token = index / 16 % columns, r = index / 16 / columns;
      if (token >= tokens) continue;
      float value = 0;
#pragma unroll
      for (int w = 0; w < WARPS; w++) value += shares[((w * ROW_TILES + r) * tokens + token) * 16 + row_in_tile];
#ifdef GATED
      if (r % 2) continue;
      const int row = (unit * (ROW_TILES / 2) + r / 2) * 16 + row_in_tile;
      if (row >= second_half * 16) continue;
#else
      const int row = (unit * ROW_TILES + r) * 16 + row_in_tile;
      if (row >= rows) continue;
#endif
#if BITS == 8
      value *= x_sums[token] * row_scales[item].x;
#endif
#ifdef NORM_LATER
      const float factor = factor_of(token);
      value *= factor;
#endif
      if (bias) value += widen(bias[row]);
#ifdef GATED
      float other = 0;
#pragma unroll
      for (int w = 0; w < WARPS; w++) other += shares[((w * ROW_TILES + r + 1) * tokens + token) * 16 + row_in_tile];
#if BITS == 8
      other *= x_sums[token] * row_scales[item].y;
#endif
#ifdef NORM_LATER
      other *= factor;
#endif
      if (bias) other += widen(bias[row + second_half * 16]);
      value = activated(value) * other;
      y[(size_t)WRITTEN(token) * (second_half * 16) + row] = (u16)narrow(value, 0);
#else
      size_t place = (size_t)WRITTEN(token) * rows + row;
#ifdef RESIDUAL
      value += before[item];
#endif
#ifdef WIDE
      ((float*)y)[place] = value;
#else
      y[place] = (u16)narrow(value, 0);
#endif
#endif
    }
    shares += (turned ? -1 : 1) * WARPS * ROW_TILES * 16 * tokens;
    turned = !turned;
  }
}

#define ROUNDS ((CHUNKS * 16 + 255) / 256)  // of 256 threads over the vectors of a row, which they hold meanwhile

// Puts x [tokens, INPUTS], normed where NORM says so, in the order in which `linear` reads it: [TOKEN_TILES, chunks, 4, 8 tokens, 4]
// vectors of 8; sums_of_x [PLACES, 8 TOKEN_TILES]. 8 bits: codes, 2 times 16 of them in place of 4 vectors (PLAIN: as torch has them), and
// in place of sums the scales of tokens; `given` is the scale of all of them, or none.
extern "C" __global__ void __launch_bounds__(256)
    arrange(const uint4* x, const uint4* norm, float epsilon, uint4* ordered, float* sums_of_x, int tokens, const float* given) {
  __shared__ float partial[8];
  const int token = blockIdx.x;
  uint4 held[ROUNDS];
  take_row(held, x + (size_t)token * (INPUTS / 8), token < tokens, norm, INPUTS / 8, epsilon, partial);
#if BITS == 8
  float largest = 0;
#pragma unroll
  for (int r = 0; r < ROUNDS; r++) largest = fmaxf(largest, largest_of(held[r]));
  const float scale = scale_of(largest, given, partial), by = 1 / scale;
  if (threadIdx.x == 0) sums_of_x[token] = scale;
#endif
#pragma unroll
  for (int r = 0; r < ROUNDS; r++) {
    const int vector = r * 256 + threadIdx.x;
    const uint4& values = held[r];
#ifdef PLAIN
    if (vector < INPUTS / 8) ((uint2*)ordered)[(size_t)token * (INPUTS / 8) + vector] = codes_of(values, by);
#elif BITS == 8
    const int chunk = vector / 16, j = vector / 8 % 2, t = vector / 2 % 4;
    const size_t place = ((((size_t)(token / 8) * CHUNKS + chunk) * 2 + j) * 8 + token % 8) * 4 + t;
    if (vector < CHUNKS * 16) ((uint2*)ordered)[2 * place + vector % 2] = codes_of(values, by);
#else
    const int chunk = vector / 16, j = vector / 4 % 4, t = vector % 4;
#if BITS == 4
    const float sum = sum_of_place(values);
    if (vector < CHUNKS * 16 && vector % VECTORS_PER_PLACE == 0) sums_of_x[vector / VECTORS_PER_PLACE * gridDim.x + token] = sum;
#endif
    if (vector < CHUNKS * 16) ordered[((((size_t)(token / 8) * CHUNKS + chunk) * 4 + j) * 8 + token % 8) * 4 + t] = in_order(values);
#endif
  }
}

#if BITS == 4
// The weight as 16-bit floats [rows, INPUTS]; a warp for each tile and chunk.
extern "C" __global__ void __launch_bounds__(256)
    dequantize(const uint4* codes, const u32* scales, const u32* offsets, uint4* weight, int rows) {
  const int lane = threadIdx.x % 32;
  const size_t place = (size_t)blockIdx.x * 8 + threadIdx.x / 32;
  const int tile = place / CHUNKS, chunk = place % CHUNKS;
  let_next_start();
  wait_for_previous();  // it may still read what the memory of the weight held
  if (tile * 16 >= rows) return;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int row = tile * 16 + half * 8 + lane / 4;
    uint4 words = load_once(codes + place * 64 + half * 32 + lane);
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const int vector = chunk * 16 + j * 4 + lane % 4;
      const size_t group = (place * SUBGROUPS + j / WORDS_PER_SUBGROUP) * 8 + lane / 4;
      u32 both = __ldg(scales + group);
      const float scale = half ? high(both) : low(both);
#ifdef ASYMMETRIC
      both = __ldg(offsets + group);
      const float zero = (half ? high(both) : low(both)) - low(CODE_BASE);
#else
      const float zero = 8;
#endif
      u32 word = word_of(words, j), pairs[4];
#pragma unroll
      for (int i = 0; i < 4; i++)
        pairs[i] = narrow(((float)(word >> (8 * i) & 15) - zero) * scale, ((float)(word >> (8 * i + 4) & 15) - zero) * scale);
      if (row < rows && vector < INPUTS / 8)
        weight[(size_t)row * (INPUTS / 8) + vector] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    }
  }
}
#endif
