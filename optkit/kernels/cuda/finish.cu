// What is behind a dense product [tokens, rows]: scales, bias, gates, the sum with what is there.
//
// Macros: BF16; BITS; SCALED (products are sums of products of codes, in 16 bits if BF16 and not INTEGER, else in 32); GATED (outputs
//   are silu(first half) * second half; GELU: gelu, by tanh); RESIDUAL (y is added to what is there); BIASED; WIDE (y is float32); of
//   `finish_coded`: WIDTH (inputs of the next product), THREADS, ROUNDS, NORM.
#if defined(SCALED) && (defined(INTEGER) || !defined(BF16))
#define LONG_PRODUCTS
#define WORDS 2
#else
#define WORDS 1
#endif
#ifdef GATED
#define HALVES 2
#else
#define HALVES 1
#endif

__device__ __forceinline__ void expect_line(const uint4* place) { asm volatile("prefetch.global.L2 [%0];" ::"l"(place)); }

// The products that eight outputs from `row` on are made of.
struct Products {
  uint4 words[HALVES][WORDS];
  __device__ __forceinline__ void read(const uint4* products, int token, int row, int rows) {
#pragma unroll
    for (int half = 0; half < HALVES; half++)
#pragma unroll
      for (int i = 0; i < WORDS; i++)
        words[half][i] = load_once(products + ((size_t)token * rows + row + half * (rows / HALVES)) / 8 * WORDS + i);
  }
  __device__ __forceinline__ static void expect(const uint4* products, int token, int row, int rows) {
#pragma unroll
    for (int half = 0; half < HALVES; half++)
      expect_line(products + ((size_t)token * rows + row + half * (rows / HALVES)) / 8 * WORDS);
  }
};

// Eight outputs from `row` on of `written`, and what they are multiplied by.
struct Outputs {
  int row, rows, written;
  float by[HALVES][8];
  __device__ __forceinline__ Outputs(int row, int rows, const float* scales) : row(row), rows(rows), written(rows / HALVES) {
#ifdef SCALED
#pragma unroll
    for (int half = 0; half < HALVES; half++)
#pragma unroll
      for (int i = 0; i < 2; i++) *(float4*)(by[half] + 4 * i) = __ldg((const float4*)(scales + row + half * written) + i);
#endif
  }
  __device__ __forceinline__ void make(float (&made)[8], const Products& products, float token_scale, const u16* bias) const {
    float other[8];
#pragma unroll
    for (int half = HALVES - 1; half >= 0; half--) {
#pragma unroll
      for (int i = 0; i < 8; i++) {
#ifdef INTEGER
        float value = (int)word_of(products.words[half][i / 4], i % 4);
#elif !defined(LONG_PRODUCTS)
        const u32 pair = word_of(products.words[half][0], i / 2);
        float value = i % 2 ? high(pair) : low(pair);
#else
        float value = __uint_as_float(word_of(products.words[half][i / 4], i % 4));
#endif
#ifdef SCALED
        value *= token_scale * by[half][i];
#endif
#ifdef BIASED
        value += widen(bias[row + half * written + i]);
#endif
        (half ? other : made)[i] = value;
      }
    }
#ifdef GATED
#pragma unroll
    for (int i = 0; i < 8; i++) made[i] = activated(made[i]) * other[i];
#endif
  }
};

__device__ __forceinline__ void widen(float (&made)[8], const uint4& values) {
#pragma unroll
  for (int i = 0; i < 8; i++) made[i] = i % 2 ? high(word_of(values, i / 2)) : low(word_of(values, i / 2));
}
__device__ __forceinline__ void add(float (&made)[8], const uint4& before) {
  float values[8];
  widen(values, before);
#pragma unroll
  for (int i = 0; i < 8; i++) made[i] += values[i];
}
__device__ __forceinline__ uint4 narrow(const float (&made)[8]) {
  return make_uint4(narrow(made[0], made[1]), narrow(made[2], made[3]), narrow(made[4], made[5]), narrow(made[6], made[7]));
}

// A thread for 8 outputs, of several tokens in turn.
extern "C" __global__ void __launch_bounds__(256) finish(const uint4* products, const float* scales, const float* token_scales, const u16* bias,
                                                         u16* y, int rows, int tokens) {
  let_next_start();
  wait_for_previous();
  const int row = (blockIdx.y * 256 + threadIdx.x) * 8;
  if (row >= rows / HALVES) return;
  const Outputs outputs(row, rows, scales);
  for (int token = blockIdx.x; token < tokens; token += gridDim.x) {
    float made[8];
    Products of_token;
    of_token.read(products, token, row, rows);
    outputs.make(made, of_token, token_scales ? token_scales[token] : 1, bias);
    const size_t place = (size_t)token * outputs.written + row;
#ifdef WIDE
    float4* target = (float4*)((float*)y + place);
    target[0] = make_float4(made[0], made[1], made[2], made[3]), target[1] = make_float4(made[4], made[5], made[6], made[7]);
#else
    uint4* target = (uint4*)(y + place);
#ifdef RESIDUAL
    add(made, *target);
#endif
    *target = narrow(made);
#endif
  }
}

#if BITS == 8 && defined(WIDTH)
#define VECTORS (WIDTH / 8)
#define THERE(vector) (VECTORS == ROUNDS * THREADS || (vector) < VECTORS)
// The same as the codes and scales that the next product takes: outputs are gated, or what they are added to is kept in y and, where NORM says
// so, normed. A block for a token at a time, which holds ROUNDS of THREADS times 8 outputs. The scales of outputs stay in the L1 cache.
extern "C" __global__ void __launch_bounds__(THREADS, 1024 / THREADS)
    finish_coded(const uint4* products, const float* scales, const float* token_scales, const u16* bias, uint4* y, const uint4* norm, float epsilon,
                 uint2* codes, float* code_scales, const float* given, int tokens) {
  __shared__ float partial[THREADS / 32];
  let_next_start();
  wait_for_previous();
  for (int token = blockIdx.x; token < tokens; token += gridDim.x) {
    Products of_token[ROUNDS];
#ifdef RESIDUAL
    uint4 before[ROUNDS];
#endif
#pragma unroll
    for (int r = 0; r < ROUNDS; r++) {
      const int vector = r * THREADS + threadIdx.x;
      if (THERE(vector)) of_token[r].read(products, token, 8 * vector, HALVES * WIDTH);
#ifdef RESIDUAL
      if (THERE(vector)) before[r] = y[(size_t)token * VECTORS + vector];
#endif
    }
    const float token_scale = token_scales ? token_scales[token] : 1;
    const int next = token + gridDim.x;
    if (next < tokens && threadIdx.x % (8 / WORDS) == 0) {  // of each line of the next token
#pragma unroll
      for (int r = 0; r < ROUNDS; r++) {
        const int vector = r * THREADS + threadIdx.x;
        if (THERE(vector)) Products::expect(products, next, 8 * vector, HALVES * WIDTH);
#ifdef RESIDUAL
        if (THERE(vector)) expect_line(y + (size_t)next * VECTORS + vector);
#endif
      }
    }
    float held[ROUNDS][8] = {}, largest = 0;
#pragma unroll
    for (int r = 0; r < ROUNDS; r++) {
      const int vector = r * THREADS + threadIdx.x;
      if (!THERE(vector)) break;
      Outputs(8 * vector, HALVES * WIDTH, scales).make(held[r], of_token[r], token_scale, bias);
#ifdef RESIDUAL
      add(held[r], before[r]);
      const uint4 rounded = y[(size_t)token * VECTORS + vector] = narrow(held[r]);
      widen(held[r], rounded);
#endif
    }
#ifdef NORM
    float squares = 0;
#pragma unroll
    for (int r = 0; r < ROUNDS; r++)
#pragma unroll
      for (int i = 0; i < 8; i++) squares += held[r][i] * held[r][i];
    const float factor = rsqrtf(sum_of_block(squares, partial) / WIDTH + epsilon);
#pragma unroll
    for (int r = 0; r < ROUNDS; r++) {
      if (!THERE(r * THREADS + threadIdx.x)) break;
      float norms[8];
      widen(norms, __ldg(norm + r * THREADS + threadIdx.x));
#pragma unroll
      for (int i = 0; i < 8; i++) held[r][i] *= factor * norms[i];
    }
#endif
#pragma unroll
    for (int r = 0; r < ROUNDS; r++)
#pragma unroll
      for (int i = 0; i < 8; i++) largest = fmaxf(largest, fabsf(held[r][i]));
    const float scale = scale_of(largest, given, partial), by = 1 / scale;
    if (threadIdx.x == 0) code_scales[token] = scale;
#pragma unroll
    for (int r = 0; r < ROUNDS; r++) {
      const int vector = r * THREADS + threadIdx.x;
      if (!THERE(vector)) break;
#pragma unroll
      for (int i = 0; i < 8; i++) held[r][i] *= by;
      codes[(size_t)token * VECTORS + vector] = make_uint2(codes_of(held[r][0], held[r][1], held[r][2], held[r][3]),
                                                           codes_of(held[r][4], held[r][5], held[r][6], held[r][7]));
    }
  }
}
#endif
