// What is behind a dense product [tokens, rows]: scales, bias, gates, the sum with what is there.
//
// Macros: BF16; BITS (8: products are sums of products of codes, in 16 bits if BF16 and not INTEGER, else in 32); GATED (outputs are
//   silu(first half) * second half; GELU: gelu, by tanh); RESIDUAL (y is added to what is there); WIDE (y is float32).
#if defined(INTEGER) || (BITS == 8 && !defined(BF16))
#define LONG_PRODUCTS
#endif
#ifdef GATED
#define HALVES 2
#else
#define HALVES 1
#endif

// Eight outputs from `row` on of `written`, and what they are multiplied by.
struct Outputs {
  int row, rows, written;
  float by[HALVES][8];
  __device__ __forceinline__ Outputs(int row, int rows, const float* scales) : row(row), rows(rows), written(rows / HALVES) {
#if BITS == 8
#pragma unroll
    for (int half = 0; half < HALVES; half++)
#pragma unroll
      for (int i = 0; i < 2; i++) *(float4*)(by[half] + 4 * i) = __ldg((const float4*)(scales + row + half * written) + i);
#endif
  }
  __device__ __forceinline__ void make(float (&made)[8], const uint4* products, int token, const float* token_scales, const u16* bias) const {
    float other[8];
#pragma unroll
    for (int half = HALVES - 1; half >= 0; half--) {
      const int at = row + half * written;
      const size_t place = ((size_t)token * rows + at) / 8;
#ifdef LONG_PRODUCTS
      const uint4 words[2] = {products[2 * place], products[2 * place + 1]};
#else
      const uint4 pairs = products[place];
#endif
#pragma unroll
      for (int i = 0; i < 8; i++) {
#ifdef INTEGER
        float value = (int)word_of(words[i / 4], i % 4);
#elif !defined(LONG_PRODUCTS)
        float value = i % 2 ? high(word_of(pairs, i / 2)) : low(word_of(pairs, i / 2));
#else
        float value = __uint_as_float(word_of(words[i / 4], i % 4));
#endif
#if BITS == 8
        value *= token_scales[token] * by[half][i];
#endif
        if (bias) value += widen(bias[at + i]);
        (half ? other : made)[i] = value;
      }
    }
#ifdef GATED
#pragma unroll
    for (int i = 0; i < 8; i++) made[i] = activated(made[i]) * other[i];
#endif
  }
};

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
    outputs.make(made, products, token, token_scales, bias);
    const size_t place = (size_t)token * outputs.written + row;
#ifdef WIDE
    float4* target = (float4*)((float*)y + place);
    target[0] = make_float4(made[0], made[1], made[2], made[3]), target[1] = make_float4(made[4], made[5], made[6], made[7]);
#else
    uint4* target = (uint4*)(y + place);
#ifdef RESIDUAL
    const uint4 before = *target;
#pragma unroll
    for (int i = 0; i < 8; i++) made[i] += i % 2 ? high(word_of(before, i / 2)) : low(word_of(before, i / 2));
#endif
    *target = narrow(made);
#endif
  }
}
