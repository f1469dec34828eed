// A few rows of activations times a weight in codes of 2, 4 or 8 bits or in floats, 16 outputs at a time; sums are in float32.
//
// Vectors are those of GCC and clang, so that one source serves AVX-512, AVX2 and NEON.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

using BFloat16 = c10::BFloat16;
using Float16 = c10::Half;

constexpr int64_t LANES = 16;             // outputs that are computed together
constexpr int64_t MOST_ROWS = 8;          // rows of activations that one pass over a block of codes serves
constexpr int64_t AHEAD = 1024;           // bytes that are fetched ahead
constexpr int64_t BYTES_OF_SHARE = 1 << 15;  // fewer are not worth a thread

typedef float Floats __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef int32_t Integers __attribute__((vector_size(64)));
typedef int8_t Bytes __attribute__((vector_size(16)));
typedef uint16_t Halves __attribute__((vector_size(32)));

// A linear layer's weight, as optkit/kernels/cpu/native.py lays it out.
struct Matrix {
  const void* weight;    // bits 2, 4, 8: uint32 [blocks, inputs * bits / 32, 16]; 16 (bfloat16) and 32 (float): [outputs, inputs]
  const float* scales;   // [blocks, groups, 16]
  const int8_t* shifts;  // [blocks, groups, 16]: zero points less 2^(bits - 1); may be null
  const float* bias;     // [outputs]; may be null
  int64_t bits, outputs, inputs, groups;

  int64_t blocks() const { return (outputs + LANES - 1) / LANES; }
  int64_t share() const { return std::max<int64_t>(1, BYTES_OF_SHARE / (inputs * LANES * bits / 8)); }  // blocks that are worth a thread
};

template <class Vector, class Scalar>
inline Vector load(const Scalar* from) {
  Vector loaded;
  std::memcpy(&loaded, from, sizeof(Vector));
  return loaded;
}

template <class Vector, class Scalar>
inline void store(Scalar* to, Vector vector) {
  std::memcpy(to, &vector, sizeof(Vector));
}

inline float total(Floats vector) {
#ifdef __AVX512F__
  return _mm512_reduce_add_ps((__m512)vector);
#else
  float sum = 0;
  for (int lane = 0; lane < LANES; lane++) sum += vector[lane];
  return sum;
#endif
}

// The codes of one place in 16 words, less 2^(bits - 1), as floats.
template <int BITS>
inline Floats decode(Words words, int place) {
#ifdef __AVX512F__
  if constexpr (BITS <= 4) {  // the low four bits of each lane choose one of 16 floats
    constexpr int COUNT = 1 << BITS;
    const auto entry = [](int code) { return static_cast<float>(code % COUNT - COUNT / 2); };
    const __m512 table = _mm512_setr_ps(entry(0), entry(1), entry(2), entry(3), entry(4), entry(5), entry(6), entry(7), entry(8), entry(9),
                                        entry(10), entry(11), entry(12), entry(13), entry(14), entry(15));
    return (Floats)_mm512_permutexvar_ps((__m512i)(words >> (place * BITS)), table);
  }
#endif
  constexpr int32_t MASK = (1 << BITS) - 1, MIDDLE = 1 << (BITS - 1);
  return __builtin_convertvector((Integers)(words >> (place * BITS) & MASK) - MIDDLE, Floats);
}

// 16 outputs for ROWS rows; `sums` [rows, groups] of the activations, where there are shifts.
template <int BITS, int ROWS>
void codes_times(const Matrix& matrix, int64_t block, const float* rows, const float* sums, Floats* products) {
  constexpr int PER_WORD = 32 / BITS, CHAINS = ROWS >= 4 ? 1 : 4 / ROWS;  // independent sums hide the latency of an addition
  const int64_t inputs = matrix.inputs, groups = matrix.groups, words = inputs / PER_WORD / groups;
  const auto* codes = static_cast<const uint32_t*>(matrix.weight) + block * (inputs / PER_WORD) * LANES;
  const float* scales = matrix.scales + block * groups * LANES;
  const int8_t* shifts = matrix.shifts ? matrix.shifts + block * groups * LANES : nullptr;
  Floats product[ROWS] = {};
  for (int64_t group = 0; group < groups; group++) {
    Floats sum[ROWS][CHAINS] = {};
    for (int64_t word = 0; word < words; word++, codes += LANES, rows += PER_WORD) {
      __builtin_prefetch(reinterpret_cast<const char*>(codes) + AHEAD);
      const Words held = load<Words>(codes);
#pragma GCC unroll 16
      for (int place = 0; place < PER_WORD; place++) {
        const Floats code = decode<BITS>(held, place);
#pragma GCC unroll 8
        for (int row = 0; row < ROWS; row++) sum[row][place % CHAINS] += code * rows[row * inputs + place];
      }
    }
    const Floats scale = load<Floats>(scales + group * LANES);
    const Floats shift = shifts ? __builtin_convertvector(load<Bytes>(shifts + group * LANES), Floats) : Floats{};
#pragma GCC unroll 8
    for (int row = 0; row < ROWS; row++) {
      Floats whole = sum[row][0];
      for (int chain = 1; chain < CHAINS; chain++) whole += sum[row][chain];
      if (shifts) whole -= shift * sums[row * groups + group];
      product[row] += scale * whole;
    }
  }
  for (int row = 0; row < ROWS; row++) products[row] = product[row];
}

template <int BITS>
void codes_times(const Matrix& matrix, int64_t block, const float* rows, const float* sums, int64_t count, Floats* products) {
  switch (count) {
    case 1: return codes_times<BITS, 1>(matrix, block, rows, sums, products);
    case 2: return codes_times<BITS, 2>(matrix, block, rows, sums, products);
    case 3: return codes_times<BITS, 3>(matrix, block, rows, sums, products);
    case 4: return codes_times<BITS, 4>(matrix, block, rows, sums, products);
    case 5: return codes_times<BITS, 5>(matrix, block, rows, sums, products);
    case 6: return codes_times<BITS, 6>(matrix, block, rows, sums, products);
    case 7: return codes_times<BITS, 7>(matrix, block, rows, sums, products);
    default: return codes_times<BITS, 8>(matrix, block, rows, sums, products);
  }
}

inline Floats widened(const float* from) { return load<Floats>(from); }
inline Floats widened(const BFloat16* from) { return (Floats)(__builtin_convertvector(load<Halves>(from), Words) << 16); }

// Up to 16 outputs for ROWS rows, one output after the other: the weight is read in the order in which it lies in memory.
template <class Weight, int ROWS>
void floats_times(const Matrix& matrix, int64_t block, const float* rows, Floats* products) {
  constexpr int CHAINS = 4;
  const int64_t inputs = matrix.inputs, width = std::min(LANES, matrix.outputs - block * LANES);
  const auto* weight = static_cast<const Weight*>(matrix.weight) + block * LANES * inputs;
  for (int64_t output = 0; output < width; output++, weight += inputs) {
    Floats sum[ROWS][CHAINS] = {};
    int64_t input = 0;
    for (; input + LANES * CHAINS <= inputs; input += LANES * CHAINS)
#pragma GCC unroll 4
      for (int chain = 0; chain < CHAINS; chain++) {
        __builtin_prefetch(reinterpret_cast<const char*>(weight + input + chain * LANES) + 4 * AHEAD);
        const Floats held = widened(weight + input + chain * LANES);
#pragma GCC unroll 4
        for (int row = 0; row < ROWS; row++) sum[row][chain] += held * load<Floats>(rows + row * inputs + input + chain * LANES);
      }
    for (int row = 0; row < ROWS; row++) {
      float product = total((sum[row][0] + sum[row][1]) + (sum[row][2] + sum[row][3]));
      for (int64_t rest = input; rest < inputs; rest++) product += static_cast<float>(weight[rest]) * rows[row * inputs + rest];
      products[row][output] = product;
    }
  }
}

template <class Weight>
void floats_times(const Matrix& matrix, int64_t block, const float* rows, int64_t count, Floats* products) {
  for (int64_t row = 0; row < count; row++, products++) {
    *products = Floats{};
    const float* from = rows + row * matrix.inputs;
    if (count - row >= 4) {
      floats_times<Weight, 4>(matrix, block, from, products);
      row += 3, products += 3;
    } else {
      floats_times<Weight, 1>(matrix, block, from, products);
    }
  }
}

// [rows, groups]: what the zero point of a group is multiplied with; empty where there are none.
inline std::vector<float> sums_of_groups(const Matrix& matrix, const float* rows, int64_t count) {
  const int64_t all = matrix.shifts ? count * matrix.groups : 0, size = matrix.groups ? matrix.inputs / matrix.groups : 0;
  std::vector<float> sums(all);
  for (int64_t group = 0; group < all; group++) {
    Floats sum{};
    int64_t input = 0;
    for (; input + LANES <= size; input += LANES) sum += load<Floats>(rows + group * size + input);
    sums[group] = total(sum);
    for (; input < size; input++) sums[group] += rows[group * size + input];
  }
  return sums;
}

// 16 outputs for up to MOST_ROWS rows, with the bias.
inline void block_times(const Matrix& matrix, int64_t block, const float* rows, const float* sums, int64_t count, Floats* products) {
  switch (matrix.bits) {
    case 2: codes_times<2>(matrix, block, rows, sums, count, products); break;
    case 4: codes_times<4>(matrix, block, rows, sums, count, products); break;
    case 8: codes_times<8>(matrix, block, rows, sums, count, products); break;
    case 16: floats_times<BFloat16>(matrix, block, rows, count, products); break;
    default: floats_times<float>(matrix, block, rows, count, products);
  }
  if (!matrix.bias) return;
  Floats bias{};
  std::memcpy(&bias, matrix.bias + block * LANES, std::min(LANES, matrix.outputs - block * LANES) * sizeof(float));
  for (int64_t row = 0; row < count; row++) products[row] += bias;
}

// Call `keep(block, first row, count, products)` for all blocks of outputs and all rows, on torch's threads.
template <class Keep>
void multiply(const Matrix& matrix, const float* rows, int64_t count, const Keep& keep) {
  const std::vector<float> sums = sums_of_groups(matrix, rows, count);
  torch::stable::parallel_for(0, matrix.blocks(), matrix.share(), [&](int64_t begin, int64_t end) {
    Floats products[MOST_ROWS];
    for (int64_t block = begin; block < end; block++)
      for (int64_t row = 0; row < count; row += MOST_ROWS) {
        const int64_t taken = std::min(MOST_ROWS, count - row);
        block_times(matrix, block, rows + row * matrix.inputs, sums.data() + row * (sums.empty() ? 0 : matrix.groups), taken, products);
        keep(block, row, taken, products);
      }
  });
}

// products [rows, outputs].
inline void multiply_into(const Matrix& matrix, const float* rows, int64_t count, float* products) {
  multiply(matrix, rows, count, [&](int64_t block, int64_t row, int64_t taken, const Floats* found) {
    const int64_t width = std::min(LANES, matrix.outputs - block * LANES);
    for (int64_t each = 0; each < taken; each++)
      std::memcpy(products + (row + each) * matrix.outputs + block * LANES, found + each, width * sizeof(float));
  });
}
