// Many rows of activations times a weight in codes: activations in 16 bits, products of pairs summed in 32 bits.
//
// An input is rounded by at most 1 / 65534 of the widest of its chunk; bfloat16 rounds each by up to 1 / 512 of itself.
#pragma once

#include "vectors.h"

#ifdef __AVX2__
constexpr bool HAS_PAIRS = true;
#else
constexpr bool HAS_PAIRS = false;  // elsewhere such products are no faster than those of floats
#endif
constexpr int64_t PAIR_ROWS = WIDTH == 16 ? 12 : 8;  // rows whose sums are in registers
constexpr int64_t STEP_ROWS = 32;       // decode steps of so many sequences compute in float32; more rows are a prompt's (native.py has it too)
constexpr int64_t MOST_TOGETHER = 128;  // inputs of a chunk: 128 * 255 * 32767 < 2^31

typedef int16_t Pairs __attribute__((vector_size(4 * WIDTH)));

// sum + the products of two neighbours, in each lane.
inline WideIntegers add_products(WideIntegers sum, Pairs left, Pairs right) {
#if defined(__AVX512VNNI__)
  return (WideIntegers)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)left, (__m512i)right);
#elif defined(__AVX512BW__)
  return sum + (WideIntegers)_mm512_madd_epi16((__m512i)left, (__m512i)right);
#elif defined(__AVX2__)
  return sum + (WideIntegers)_mm256_madd_epi16((__m256i)left, (__m256i)right);
#else
  for (int lane = 0; lane < WIDTH; lane++) sum[lane] += left[2 * lane] * right[2 * lane] + left[2 * lane + 1] * right[2 * lane + 1];
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
      WideFloats widest{}, zero{};  // not zero if an input is not finite, which spoils the chunk
      for (int64_t at = 0; at < chunk; at += WIDTH) {
        const WideFloats held = some(from + at, chunk - at), size = held < 0.0f ? -held : held;
        widest = size > widest ? size : widest;
        zero += held * 0.0f;
      }
      const float most = largest_of(widest), inverse = most > 0 ? 32767 / most : 0;
      for (int64_t at = 0; at < chunk; at += WIDTH)  // the sum rounds, and leaves the code in its low half
        store(codes + at, (WideIntegers)(some(from + at, chunk - at) * inverse + 12582912.0f));
      for (int64_t at = 0; at < chunk; at += WORD, to += PAIR_ROWS * HALF)
        for (int pair = 0; pair < HALF; pair++) to[pair] = (codes[at + pair] & 0xffff) | codes[at + HALF + pair] << 16;
      *scale = most / 32767 + total(zero);
    }
  }
};

// Outputs of a block from one on, `WIDTH` of them, for the rows of a tile; products are 16 floats apart.
template <int BITS>
void pairs_times(const Matrix& matrix, int64_t block, int64_t first, const PairedRows& rows, int64_t tile, float* products) {
  constexpr int PER_WORD = 32 / BITS, HALF = PER_WORD / 2, MASK = (1 << BITS) - 1, MIDDLE = 1 << (BITS - 1);
  const int64_t inputs = matrix.inputs, chunks = inputs / rows.chunk, parts = chunks / matrix.groups, words = rows.chunk / PER_WORD;
  const auto* codes = static_cast<const uint32_t*>(matrix.weight) + block * (inputs / PER_WORD) * LANES + first;
  const int32_t* pairs = rows.pairs.data() + tile * inputs / 2 * PAIR_ROWS;
  const float* steps = rows.scales.data() + tile * chunks * PAIR_ROWS;
  WideFloats product[PAIR_ROWS] = {};
  for (int64_t chunk = 0; chunk < chunks; chunk++, steps += PAIR_ROWS) {
    const int64_t group = (block * matrix.groups + chunk / parts) * LANES + first;
    WideWords zero = WideWords{} + MIDDLE;
    if (matrix.shifts) zero += (WideWords)widened(matrix.shifts + group);
    const Pairs zeros = (Pairs)((zero & 0xffff) | zero << 16);
    WideIntegers sum[PAIR_ROWS] = {};
    for (int64_t word = 0; word < words; word++, codes += LANES, pairs += PAIR_ROWS * HALF) {
      const WideWords held = load<WideWords>(codes);
#pragma GCC unroll 8
      for (int place = 0; place < HALF; place++) {
        const Pairs code = (Pairs)(held >> (place * BITS) & (MASK | MASK << 16)) - zeros;
#pragma GCC unroll 12
        for (int row = 0; row < PAIR_ROWS; row++)
          sum[row] = add_products(sum[row], code, (Pairs)(WideIntegers{} + pairs[row * HALF + place]));
      }
    }
    const WideFloats scale = load<WideFloats>(matrix.scales + group);
#pragma GCC unroll 12
    for (int row = 0; row < PAIR_ROWS; row++) product[row] += __builtin_convertvector(sum[row], WideFloats) * (scale * steps[row]);
  }
  for (int row = 0; row < PAIR_ROWS; row++) store(products + row * LANES, product[row]);
}

inline void pairs_times(const Matrix& matrix, int64_t block, const PairedRows& rows, int64_t tile, Floats* products) {
  for (int64_t first = 0; first < LANES; first += WIDTH) {
    float* to = reinterpret_cast<float*>(products) + first;
    switch (matrix.bits) {
      case 2: pairs_times<2>(matrix, block, first, rows, tile, to); break;
      case 4: pairs_times<4>(matrix, block, first, rows, tile, to); break;
      default: pairs_times<8>(matrix, block, first, rows, tile, to);
    }
  }
}
