// The inner loops of GPTQ and of coordinate descent (optkit/algorithms/column_kernels.py): one block of up to 128 inputs.
//
// Outputs do not depend on each other. A block of threads takes 32 of them, one a lane. Its first warp walks over 16 inputs, whose
// values are in registers; then all warps carry what these 16 changed to the inputs behind them, in shared memory. Matrices are
// [layers, inputs, outputs], float32.
//
// Macros: DESCEND (move codes to the best ones; else round weights). MANTISSA, SMALLEST, LOWEST: codes are numbers with so many bits of
// mantissa, the smallest exponent of a step and the lowest number, without zero points; `top` is the highest.
#define SIZE 128
#define PART 16
#define LANES 32
#define WARPS 4

__device__ __forceinline__ float nearest(float value, float top) {
#ifdef MANTISSA
  value = fminf(fmaxf(value, (float)(LOWEST)), top);
  const u32 exponent = __float_as_uint(fabsf(value)) >> 23;
  const float step = __uint_as_float(((exponent < SMALLEST ? SMALLEST : exponent) - MANTISSA) << 23);
  return ((value / step + 12582912.0f) - 12582912.0f) * step;  // 1.5 * 2^23 leaves no place for fractions
#else
  return fminf(fmaxf(floorf(value + 0.5f), 0.0f), top);
#endif
}

__device__ __forceinline__ u16 rounded(float value) {  // to bfloat16
  const u32 bits = __float_as_uint(value);
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

// values: weights that are left, or the gradient; zeros: zero points, or the codes so far; factor: [layers, inputs, inputs]; changed:
// errors, or what weights moved by, negative, as bfloat16 [layers, 3, 128, outputs]: the number, what that leaves of it, and again the
// number; start: the first input of the block.
extern "C" __global__ void __launch_bounds__(LANES* WARPS)
    columns(const float* values, const float* scales, const float* zeros, const float* factor, float* codes, u16* changed, int all,
            int outputs, float top, int start) {
  extern __shared__ float shared[];
  float(*tile)[SIZE] = (float(*)[SIZE])shared;                             // of the factor
  float(*rest)[LANES] = (float(*)[LANES])(shared + SIZE * SIZE);           // of the values
  float(*given)[LANES] = (float(*)[LANES])(shared + SIZE * (SIZE + LANES));  // what 16 inputs changed
  const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES, output = blockIdx.x * LANES + lane;
  const bool there = output < outputs;
  const size_t layer = blockIdx.y, first = (layer * all + start) * outputs + output;
  const int inputs = min(all - start, SIZE);
  values += first, scales += first, zeros += first, codes += first;
  changed += layer * 3 * SIZE * outputs + output;
  factor += (layer * all + start) * all + start;
  wait_for_previous();
#pragma unroll 16
  for (int i = warp; i < SIZE; i += WARPS)
#pragma unroll
    for (int j = lane; j < SIZE; j += LANES) tile[i][j] = i < inputs && j < inputs && j >= i ? factor[(size_t)i * all + j] : 0.0f;
#pragma unroll 16
  for (int i = warp; i < SIZE; i += WARPS) rest[i][lane] = there && i < inputs ? values[(size_t)i * outputs] : 0.0f;
  float scale[PART], zero[PART];
#pragma unroll
  for (int i = 0; i < PART; i++) {
    const bool here = !warp && there && i < inputs;
    scale[i] = here ? scales[(size_t)i * outputs] : 1.0f, zero[i] = here ? zeros[(size_t)i * outputs] : 0.0f;
  }
  __syncthreads();
  for (int part = 0; part < inputs; part += PART) {
    if (!warp) {
      float value[PART];
#pragma unroll
      for (int i = 0; i < PART; i++) value[i] = rest[part + i][lane];
#pragma unroll
      for (int i = 0; i < PART; i++) {
        const float own = part + i < inputs ? tile[part + i][part + i] : 1.0f;
#ifdef DESCEND
        const float code = nearest(value[i] / (scale[i] * own) + zero[i], top), off = (code - zero[i]) * scale[i];
#else
#ifdef MANTISSA
        const float code = nearest(value[i] / scale[i], top), off = (value[i] - code * scale[i]) / own;
#else
        const float code = nearest(value[i] / scale[i] + zero[i], top), off = (value[i] - (code - zero[i]) * scale[i]) / own;
#endif
#endif
        given[i][lane] = off;
#pragma unroll
        for (int j = i + 1; j < PART; j++) value[j] -= tile[part + i][part + j] * off;
        if (there && part + i < inputs) {
          codes[(size_t)(part + i) * outputs] = code;
          const size_t place = (size_t)(part + i) * outputs, all_places = (size_t)SIZE * outputs;
          const u16 high = rounded(-off);
          changed[place] = changed[place + 2 * all_places] = high;
          changed[place + all_places] = rounded(-off - __uint_as_float((u32)high << 16));
        }
      }
#pragma unroll
      for (int i = 0; i < PART; i++) {
        const bool here = there && part + PART + i < inputs;
        scale[i] = here ? scales[(size_t)(part + PART + i) * outputs] : 1.0f;
        zero[i] = here ? zeros[(size_t)(part + PART + i) * outputs] : 0.0f;
      }
    }
    __syncthreads();
    float off[PART];
#pragma unroll
    for (int i = 0; i < PART; i++) off[i] = given[i][lane];
    for (int row = part + PART + 4 * warp; row < inputs; row += 4 * WARPS) {
      float sums[4] = {rest[row][lane], rest[row + 1][lane], rest[row + 2][lane], rest[row + 3][lane]};
#pragma unroll
      for (int i = 0; i < PART; i++) {
        const float4 pull = *(const float4*)&tile[part + i][row];
        sums[0] -= pull.x * off[i], sums[1] -= pull.y * off[i], sums[2] -= pull.z * off[i], sums[3] -= pull.w * off[i];
      }
#pragma unroll
      for (int i = 0; i < 4; i++) rest[row + i][lane] = sums[i];
    }
    __syncthreads();
  }
}
