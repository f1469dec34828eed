// Many rows of activations times a weight in codes: activations in 16 bits, products of pairs summed in 32 bits.
//
// An input is rounded to 1 / 65534 of the widest of its chunk, which is less than what bfloat16 rounds it by.
#pragma once

#include "vectors.h"

#ifdef __AVX2__
#include <immintrin.h>
constexpr bool HAS_PAIRS = true;
#else
constexpr bool HAS_PAIRS = false;  // elsewhere such products are no faster than those of floats
#endif
#ifdef __AVX512F__
constexpr int64_t PAIR_ROWS = 12;  // their sums fill the registers
#else
constexpr int64_t PAIR_ROWS = 4;
#endif
constexpr int64_t STEP_ROWS = 32;       // decode steps of so many sequences compute in float32; more rows are a prompt's
constexpr int64_t MOST_TOGETHER = 128;  // inputs of a chunk: 128 * 255 * 32767 < 2^31

typedef int16_t Shorts __attribute__((vector_size(64)));

// sum + the products of two neighbours, for each of 16 lanes.
inline Integers add_products(Integers sum, Shorts left, Shorts right) {
#if defined(__AVX512VNNI__)
  return (Integers)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)left, (__m512i)right);
#elif defined(__AVX512BW__)
  return sum + (Integers)_mm512_madd_epi16((__m512i)left, (__m512i)right);
#elif defined(__AVX2__)
  __m256i sums[2], lefts[2], rights[2];
  std::memcpy(sums, &sum, sizeof sums), std::memcpy(lefts, &left, sizeof lefts), std::memcpy(rights, &right, sizeof rights);
  for (int half = 0; half < 2; half++) sums[half] = _mm256_add_epi32(sums[half], _mm256_madd_epi16(lefts[half], rights[half]));
  return load<Integers>(sums);
#else
  for (int lane = 0; lane < LANES; lane++) sum[lane] += left[2 * lane] * right[2 * lane] + left[2 * lane + 1] * right[2 * lane + 1];
  return sum;
#endif
}

// Rows in 16 bits, `PAIR_ROWS` beside each other.
struct PairedRows {
  int64_t inputs = 0, chunk = 0;  // inputs that share a scale: a group or a part of one
  std::vector<int32_t> pairs;     // [tiles, words of codes in a row, PAIR_ROWS, pairs of a word]: inputs that lie half a word apart
  std::vector<float> scales;      // [tiles, inputs / chunk, PAIR_ROWS]

  PairedRows() = default;

  PairedRows(const Matrix& matrix, const float* rows, int64_t count) : inputs(matrix.inputs), chunk(inputs / matrix.groups) {
    const int64_t word = 32 / matrix.bits, tiles = (count + PAIR_ROWS - 1) / PAIR_ROWS;
    int64_t parts = (chunk + MOST_TOGETHER - 1) / MOST_TOGETHER;
    while (chunk / word % parts) parts++;
    chunk /= parts;
    pairs.resize(tiles * inputs / 2 * PAIR_ROWS), scales.resize(tiles * inputs / chunk * PAIR_ROWS);
    torch::stable::parallel_for(0, count, std::max<int64_t>(1, BYTES_OF_SHARE / inputs), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; row++) switch (word) {
          case 16: code<16>(rows + row * inputs, row); break;
          case 8: code<8>(rows + row * inputs, row); break;
          default: code<4>(rows + row * inputs, row);
        }
    });
  }

  template <int WORD>
  void code(const float* from, int64_t row) {
    constexpr int HALF = WORD / 2;
    const int64_t tile = row / PAIR_ROWS, place = row % PAIR_ROWS;
    int32_t* to = pairs.data() + tile * inputs / 2 * PAIR_ROWS + place * HALF;
    float* scale = scales.data() + tile * inputs / chunk * PAIR_ROWS + place;
    for (const float* end = from + inputs; from < end; from += chunk, scale += PAIR_ROWS) {
      int32_t codes[MOST_TOGETHER + LANES];
      Floats widest{}, zero{};  // not zero if an input is not finite, which spoils the chunk
      for (int64_t at = 0; at < chunk; at += LANES) {
        const Floats held = some(from + at, chunk - at), size = held < 0.0f ? -held : held;
        widest = size > widest ? size : widest;
        zero += held * 0.0f;
      }
      const float most = largest_of(widest), inverse = most > 0 ? 32767 / most : 0;
      for (int64_t at = 0; at < chunk; at += LANES)  // the sum rounds, and leaves the code in its low half
        store(codes + at, (Integers)(some(from + at, chunk - at) * inverse + 12582912.0f));
      for (int64_t at = 0; at < chunk; at += WORD, to += PAIR_ROWS * HALF)
        for (int pair = 0; pair < HALF; pair++) to[pair] = (codes[at + pair] & 0xffff) | codes[at + HALF + pair] << 16;
      *scale = most / 32767 + total(zero);
    }
  }

  static Floats some(const float* from, int64_t count) {
    if (count >= LANES) return load<Floats>(from);
    Floats found{};
    std::memcpy(&found, from, count * sizeof(float));
    return found;
  }
};

// 16 outputs for the rows of a tile.
template <int BITS>
void pairs_times(const Matrix& matrix, int64_t block, const PairedRows& rows, int64_t tile, Floats* products) {
  constexpr int PER_WORD = 32 / BITS, HALF = PER_WORD / 2, MASK = (1 << BITS) - 1, MIDDLE = 1 << (BITS - 1);
  const int64_t inputs = matrix.inputs, chunks = inputs / rows.chunk, parts = chunks / matrix.groups, words = rows.chunk / PER_WORD;
  const auto* codes = static_cast<const uint32_t*>(matrix.weight) + block * (inputs / PER_WORD) * LANES;
  const int32_t* pairs = rows.pairs.data() + tile * inputs / 2 * PAIR_ROWS;
  const float* steps = rows.scales.data() + tile * chunks * PAIR_ROWS;
  Floats product[PAIR_ROWS] = {};
  for (int64_t chunk = 0; chunk < chunks; chunk++, steps += PAIR_ROWS) {
    const int64_t group = (block * matrix.groups + chunk / parts) * LANES;
    Words zero = Words{} + MIDDLE;
    if (matrix.shifts) zero += (Words)__builtin_convertvector(load<Bytes>(matrix.shifts + group), Integers);
    const Shorts zeros = (Shorts)((zero & 0xffff) | zero << 16);
    Integers sum[PAIR_ROWS] = {};
    for (int64_t word = 0; word < words; word++, codes += LANES, pairs += PAIR_ROWS * HALF) {
      const Words held = load<Words>(codes);
#pragma GCC unroll 8
      for (int place = 0; place < HALF; place++) {
        const Shorts code = (Shorts)(held >> (place * BITS) & (MASK | MASK << 16)) - zeros;
#pragma GCC unroll 12
        for (int row = 0; row < PAIR_ROWS; row++)
          sum[row] = add_products(sum[row], code, (Shorts)(Integers{} + pairs[row * HALF + place]));
      }
    }
    const Floats scale = load<Floats>(matrix.scales + group);
#pragma GCC unroll 12
    for (int row = 0; row < PAIR_ROWS; row++) product[row] += __builtin_convertvector(sum[row], Floats) * (scale * steps[row]);
  }
  for (int row = 0; row < PAIR_ROWS; row++) products[row] = product[row];
}
