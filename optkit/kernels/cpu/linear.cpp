// Linear layers for few rows of activations, in float32: weights as integer codes of 2, 4 or 8 bits, or as floats.
//
// Compiled at run time for the processor that it runs on (optkit/kernels/cpu_native.py), with torch's stable ABI. Vectors are those of GCC
// and clang, so that one source serves AVX-512, AVX2 and NEON.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>
#include <vector>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using BFloat16 = c10::BFloat16;
using Float16 = c10::Half;

namespace {

constexpr int64_t LANES = 16;     // outputs that are computed together
constexpr int64_t MOST_ROWS = 8;  // rows of activations that one pass over a block of codes serves
constexpr int64_t AHEAD = 1024;   // bytes that are fetched ahead

typedef float Floats __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef int32_t Integers __attribute__((vector_size(64)));
typedef int8_t Bytes __attribute__((vector_size(16)));
typedef uint16_t Halves __attribute__((vector_size(32)));

template <class Vector, class Scalar>
inline Vector load(const Scalar* from) {
  Vector loaded;
  std::memcpy(&loaded, from, sizeof(Vector));
  return loaded;
}

inline Floats broadcast(float value) { return Floats{} + value; }

inline float total(Floats vector) {
  float sum = 0;
  for (int lane = 0; lane < LANES; lane++) sum += vector[lane];
  return sum;
}

// Call `compute(float* rows, float* products)` for rows of any float type; the products have the same.
template <class Stored, class Compute>
void through_floats(const Stored* rows, int64_t read, Stored* products, int64_t written, const Compute& compute) {
  std::vector<float> from(rows, rows + read), into(written);
  compute(from.data(), into.data());
  std::copy(into.begin(), into.end(), products);
}

template <class Compute>
Tensor in_floats(const Tensor& given, int64_t outputs, const Compute& compute) {
  const Tensor rows = given.is_contiguous() ? given : torch::stable::contiguous(given);
  const int64_t count = rows.size(0), read = count * rows.size(1), written = count * outputs;
  Tensor products = torch::stable::new_empty(rows, {count, outputs});
  const void* from = rows.const_data_ptr();
  void* into = products.mutable_data_ptr();
  if (rows.scalar_type() == ScalarType::Float) compute(static_cast<const float*>(from), static_cast<float*>(into));
  else if (rows.scalar_type() == ScalarType::BFloat16)
    through_floats(static_cast<const BFloat16*>(from), read, static_cast<BFloat16*>(into), written, compute);
  else
    through_floats(static_cast<const Float16*>(from), read, static_cast<Float16*>(into), written, compute);
  return products;
}

// The codes of one place in 16 words, less 2^(bits - 1), as floats.
template <int BITS>
inline Floats decode(Words words, int place) {
#ifdef __AVX512F__
  if constexpr (BITS <= 4) {  // the low four bits of each lane choose one of 16 floats
    constexpr int COUNT = 1 << BITS;
    const __m512 table = _mm512_setr_ps(
        0 % COUNT - COUNT / 2, 1 % COUNT - COUNT / 2, 2 % COUNT - COUNT / 2, 3 % COUNT - COUNT / 2, 4 % COUNT - COUNT / 2,
        5 % COUNT - COUNT / 2, 6 % COUNT - COUNT / 2, 7 % COUNT - COUNT / 2, 8 % COUNT - COUNT / 2, 9 % COUNT - COUNT / 2,
        10 % COUNT - COUNT / 2, 11 % COUNT - COUNT / 2, 12 % COUNT - COUNT / 2, 13 % COUNT - COUNT / 2, 14 % COUNT - COUNT / 2,
        15 % COUNT - COUNT / 2);
    return (Floats)_mm512_permutexvar_ps((__m512i)(words >> (place * BITS)), table);
  }
#endif
  constexpr int32_t MASK = (1 << BITS) - 1, MIDDLE = 1 << (BITS - 1);
  return __builtin_convertvector((Integers)(words >> (place * BITS) & MASK) - MIDDLE, Floats);
}

// One block of 16 outputs for ROWS rows: codes [inputs / per word, 16], scales and shifts [groups, 16], sums [rows, groups].
template <int BITS, int ROWS>
void block(const uint32_t* codes, const float* scales, const int8_t* shifts, const float* rows, const float* sums, int64_t inputs,
           int64_t groups, Floats* products) {
  constexpr int PER_WORD = 32 / BITS, CHAINS = ROWS >= 4 ? 1 : 4 / ROWS;  // independent sums hide the latency of an addition
  const int64_t words = inputs / PER_WORD / groups;
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
void block_of_rows(int count, const uint32_t* codes, const float* scales, const int8_t* shifts, const float* rows, const float* sums,
                   int64_t inputs, int64_t groups, Floats* products) {
  switch (count) {
    case 1: return block<BITS, 1>(codes, scales, shifts, rows, sums, inputs, groups, products);
    case 2: return block<BITS, 2>(codes, scales, shifts, rows, sums, inputs, groups, products);
    case 3: return block<BITS, 3>(codes, scales, shifts, rows, sums, inputs, groups, products);
    case 4: return block<BITS, 4>(codes, scales, shifts, rows, sums, inputs, groups, products);
    case 5: return block<BITS, 5>(codes, scales, shifts, rows, sums, inputs, groups, products);
    case 6: return block<BITS, 6>(codes, scales, shifts, rows, sums, inputs, groups, products);
    case 7: return block<BITS, 7>(codes, scales, shifts, rows, sums, inputs, groups, products);
    default: return block<BITS, 8>(codes, scales, shifts, rows, sums, inputs, groups, products);
  }
}

// [rows, groups]: what the zero point of a group is multiplied with.
std::vector<float> sums_of_groups(const float* rows, int64_t count, int64_t groups, int64_t size) {
  std::vector<float> sums(count * groups);
  for (int64_t group = 0; group < count * groups; group++) {
    Floats sum{};
    int64_t input = 0;
    for (; input + LANES <= size; input += LANES) sum += load<Floats>(rows + group * size + input);
    sums[group] = total(sum);
    for (; input < size; input++) sums[group] += rows[group * size + input];
  }
  return sums;
}

template <int BITS>
void multiply(const float* rows, int64_t count, int64_t inputs, const uint32_t* codes, const float* scales, const int8_t* shifts,
              int64_t groups, int64_t outputs, float* products) {
  const std::vector<float> sums = sums_of_groups(rows, shifts ? count : 0, groups, inputs / groups);
  const int64_t words = inputs * BITS / 32;
  const int64_t blocks = (outputs + LANES - 1) / LANES;
  torch::stable::parallel_for(0, blocks, 1, [&](int64_t begin, int64_t end) {
    Floats found[MOST_ROWS];
    for (int64_t at = begin; at < end; at++) {
      const int64_t width = std::min(LANES, outputs - at * LANES);
      for (int64_t row = 0; row < count; row += MOST_ROWS) {
        const int64_t taken = std::min(MOST_ROWS, count - row);
        block_of_rows<BITS>(taken, codes + at * words * LANES, scales + at * groups * LANES,
                            shifts ? shifts + at * groups * LANES : nullptr, rows + row * inputs, shifts ? sums.data() + row * groups : nullptr, inputs, groups, found);
        for (int64_t each = 0; each < taken; each++)
          std::memcpy(products + (row + each) * outputs + at * LANES, &found[each], width * sizeof(float));
      }
    }
  });
}

// rows float [n, in], codes int32 [blocks, in * bits / 32, 16], scales float32 and shifts int8 [blocks, groups, 16] -> like rows, [n, out].
Tensor packed_linear(Tensor rows, Tensor codes, Tensor scales, std::optional<Tensor> shifts, int64_t bits, int64_t outputs) {
  const int64_t count = rows.size(0), inputs = rows.size(1), groups = scales.size(1);
  STD_TORCH_CHECK(codes.is_contiguous() && scales.is_contiguous() && (!shifts || shifts->is_contiguous()), "packed_linear: not contiguous");
  STD_TORCH_CHECK(codes.size(1) * 32 == inputs * bits && codes.size(0) * LANES >= outputs, "packed_linear: codes and rows differ");
  const auto* words = static_cast<const uint32_t*>(codes.const_data_ptr());
  const auto* steps = static_cast<const float*>(scales.const_data_ptr());
  const auto* zeros = shifts ? static_cast<const int8_t*>(shifts->const_data_ptr()) : nullptr;
  return in_floats(rows, outputs, [&](const float* from, float* into) {
    if (bits == 2) multiply<2>(from, count, inputs, words, steps, zeros, groups, outputs, into);
    else if (bits == 4) multiply<4>(from, count, inputs, words, steps, zeros, groups, outputs, into);
    else multiply<8>(from, count, inputs, words, steps, zeros, groups, outputs, into);
  });
}

inline Floats widened(const float* from) { return load<Floats>(from); }
inline Floats widened(const BFloat16* from) { return (Floats)(__builtin_convertvector(load<Halves>(from), Words) << 16); }

// ROWS rows times WIDTH outputs, weight [out, in].
template <int ROWS, int WIDTH, class Weight>
void dense_tile(const float* rows, const Weight* weight, int64_t inputs, int64_t outputs, float* products) {
  Floats sum[ROWS][WIDTH] = {};
  int64_t input = 0;
  for (; input + LANES <= inputs; input += LANES)
#pragma GCC unroll 4
    for (int output = 0; output < WIDTH; output++) {
      __builtin_prefetch(reinterpret_cast<const char*>(weight + output * inputs + input) + WIDTH * inputs * sizeof(Weight));
      const Floats held = widened(weight + output * inputs + input);
#pragma GCC unroll 4
      for (int row = 0; row < ROWS; row++) sum[row][output] += held * load<Floats>(rows + row * inputs + input);
    }
  for (int output = 0; output < WIDTH; output++)
    for (int row = 0; row < ROWS; row++) {
      float product = total(sum[row][output]);
      for (int64_t rest = input; rest < inputs; rest++) product += static_cast<float>(weight[output * inputs + rest]) * rows[row * inputs + rest];
      products[row * outputs + output] = product;
    }
}

template <int ROWS, class Weight>
void dense_rows(const float* rows, const Weight* weight, int64_t inputs, int64_t outputs, float* products) {
  torch::stable::parallel_for(0, (outputs + 3) / 4, 16, [&](int64_t begin, int64_t end) {
    int64_t output = begin * 4;
    const int64_t last = std::min(end * 4, outputs);
    for (; output + 4 <= last; output += 4) dense_tile<ROWS, 4>(rows, weight + output * inputs, inputs, outputs, products + output);
    for (; output < last; output++) dense_tile<ROWS, 1>(rows, weight + output * inputs, inputs, outputs, products + output);
  });
}

template <class Weight>
void dense(const float* rows, const Weight* weight, int64_t count, int64_t inputs, int64_t outputs, float* products) {
  for (int64_t row = 0; row < count;) {
    const float* from = rows + row * inputs;
    float* into = products + row * outputs;
    const int64_t left = count - row;
    if (left >= 4) dense_rows<4>(from, weight, inputs, outputs, into), row += 4;
    else if (left >= 2) dense_rows<2>(from, weight, inputs, outputs, into), row += 2;
    else dense_rows<1>(from, weight, inputs, outputs, into), row += 1;
  }
}

// rows float [n, in], weight float32 or bfloat16 [out, in] -> like rows, [n, out].
Tensor dense_linear(Tensor rows, Tensor weight) {
  const int64_t count = rows.size(0), inputs = rows.size(1), outputs = weight.size(0);
  STD_TORCH_CHECK(weight.is_contiguous() && weight.size(1) == inputs, "dense_linear: weight and rows differ, or weight is not contiguous");
  return in_floats(rows, outputs, [&](const float* from, float* into) {
    if (weight.scalar_type() == ScalarType::Float) dense(from, static_cast<const float*>(weight.const_data_ptr()), count, inputs, outputs, into);
    else dense(from, static_cast<const BFloat16*>(weight.const_data_ptr()), count, inputs, outputs, into);
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(optkit_cpu, library) {
  library.def("packed_linear(Tensor rows, Tensor codes, Tensor scales, Tensor? shifts, int bits, int outputs) -> Tensor");
  library.def("dense_linear(Tensor rows, Tensor weight) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(optkit_cpu, CPU, library) {
  library.impl("packed_linear", TORCH_BOX(&packed_linear));
  library.impl("dense_linear", TORCH_BOX(&dense_linear));
}
