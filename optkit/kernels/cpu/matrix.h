// Rows of activations times a weight in codes of 2, 4 or 8 bits or in floats, 16 outputs at a time; sums are in float32.
#pragma once

#include "pairs.h"
#include "tiles.h"

// The codes of one place in words, less 2^(bits - 1), as floats.
template <int BITS>
inline WideFloats decode(WideWords words, int place) {
#ifdef __AVX512BW__
  if constexpr (BITS <= 4) {  // the low four bits of each lane choose one of 16 floats
    constexpr int COUNT = 1 << BITS;
    const auto entry = [](int code) { return static_cast<float>(code % COUNT - COUNT / 2); };
    const __m512 table = _mm512_setr_ps(entry(0), entry(1), entry(2), entry(3), entry(4), entry(5), entry(6), entry(7), entry(8), entry(9),
                                        entry(10), entry(11), entry(12), entry(13), entry(14), entry(15));
    return (WideFloats)_mm512_permutexvar_ps((__m512i)(words >> (place * BITS)), table);
  }
#endif
  constexpr int32_t MASK = (1 << BITS) - 1, MIDDLE = 1 << (BITS - 1);
  return __builtin_convertvector((WideIntegers)(words >> (place * BITS) & MASK) - MIDDLE, WideFloats);
}

// Outputs of a block from one on, `WIDTH` of them, for ROWS rows; `sums` [rows, groups] of the activations, where there are shifts.
template <int BITS, int ROWS>
void codes_times(const Matrix& matrix, int64_t block, int64_t first, const float* rows, const float* sums, float* products) {
  constexpr int PER_WORD = 32 / BITS, CHAINS = ROWS >= 4 ? 1 : 4 / ROWS;  // independent sums hide the latency of an addition
  const int64_t inputs = matrix.inputs, groups = matrix.groups, words = inputs / PER_WORD / groups;
  const auto* codes = static_cast<const uint32_t*>(matrix.weight) + block * (inputs / PER_WORD) * LANES + first;
  const float* scales = matrix.scales + block * groups * LANES + first;
  const int8_t* shifts = matrix.shifts ? matrix.shifts + block * groups * LANES + first : nullptr;
  WideFloats product[ROWS] = {};
  for (int64_t group = 0; group < groups; group++) {
    WideFloats sum[ROWS][CHAINS] = {};
    for (int64_t word = 0; word < words; word++, codes += LANES, rows += PER_WORD) {
      __builtin_prefetch(reinterpret_cast<const char*>(codes) + AHEAD);
      const WideWords held = load<WideWords>(codes);
#pragma GCC unroll 16
      for (int place = 0; place < PER_WORD; place++) {
        const WideFloats code = decode<BITS>(held, place);
#pragma GCC unroll 8
        for (int row = 0; row < ROWS; row++) sum[row][place % CHAINS] += code * rows[row * inputs + place];
      }
    }
    const WideFloats scale = load<WideFloats>(scales + group * LANES);
    const WideFloats shift = shifts ? __builtin_convertvector(widened(shifts + group * LANES), WideFloats) : WideFloats{};
#pragma GCC unroll 8
    for (int row = 0; row < ROWS; row++) {
      WideFloats whole = sum[row][0];
      for (int chain = 1; chain < CHAINS; chain++) whole += sum[row][chain];
      if (shifts) whole -= shift * sums[row * groups + group];
      product[row] += scale * whole;
    }
  }
  for (int row = 0; row < ROWS; row++) store(products + row * LANES, product[row]);
}

// The same for a whole block and up to ROWS rows.
template <int BITS, int ROWS = MOST_ROWS>
void block_of_codes_times(const Matrix& matrix, int64_t block, const float* rows, const float* sums, int64_t count, Floats* products) {
  if constexpr (ROWS > 1)
    if (count < ROWS) return block_of_codes_times<BITS, ROWS - 1>(matrix, block, rows, sums, count, products);
  for (int64_t first = 0; first < LANES; first += WIDTH)
    codes_times<BITS, ROWS>(matrix, block, first, rows, sums, reinterpret_cast<float*>(products) + first);
}

// Up to 16 outputs for ROWS rows, one output after the other: the weight is read in the order in which it lies in memory.
template <class Weight, int ROWS>
void floats_times(const Matrix& matrix, int64_t block, const float* rows, Floats* products) {
  constexpr int CHAINS = (ROWS == 1 || WIDTH == 16 ? 64 : 16) / WIDTH;  // as many sums as registers hold
  const int64_t inputs = matrix.inputs, width = std::min(LANES, matrix.outputs - block * LANES);
  const auto* weight = static_cast<const Weight*>(matrix.weight) + block * LANES * inputs;
  for (int64_t output = 0; output < width; output++, weight += inputs) {
    WideFloats sum[ROWS][CHAINS] = {};
    int64_t input = 0;
    for (; input + WIDTH * CHAINS <= inputs; input += WIDTH * CHAINS)
#pragma GCC unroll 8
      for (int chain = 0; chain < CHAINS; chain++) {
        __builtin_prefetch(reinterpret_cast<const char*>(weight + input + chain * WIDTH) + 4 * AHEAD);
        const WideFloats held = widened(weight + input + chain * WIDTH);
#pragma GCC unroll 4
        for (int row = 0; row < ROWS; row++) sum[row][chain] += held * load<WideFloats>(rows + row * inputs + input + chain * WIDTH);
      }
    for (int row = 0; row < ROWS; row++) {
      for (int chain = 1; chain < CHAINS; chain++) sum[row][0] += sum[row][chain];
      float product = total(sum[row][0]);
      for (int64_t rest = input; rest < inputs; rest++) product += static_cast<float>(weight[rest]) * rows[row * inputs + rest];
      products[row][output] = product;
    }
  }
}

template <class Weight>
void floats_times(const Matrix& matrix, int64_t block, const float* rows, int64_t count, Floats* products) {
  for (; count >= 4; count -= 4, rows += 4 * matrix.inputs, products += 4) floats_times<Weight, 4>(matrix, block, rows, products);
  for (; count > 0; count--, rows += matrix.inputs, products++) floats_times<Weight, 1>(matrix, block, rows, products);
}

// Rows of activations as a matrix multiplies them: many in 16 bits if it holds codes, in tiles if it holds float32, else as they are.
struct Activations {
  const Matrix& matrix;
  const float* rows;
  int64_t count;
  std::vector<float> sums;  // [rows, groups]: what the zero point of a group is multiplied with; empty where there are none
  PairedRows paired;
  const bool tiled;
  int64_t stride;              // numbers from one row to the next
  std::vector<float> apart;    // the rows of tiles, if they lie farther apart than they were given

  Activations(const Matrix& of, const float* given, int64_t number) : matrix(of), rows(given), count(number), tiled(of.bits == 32 && number > STEP_ROWS), stride(of.inputs) {
    if (tiled) space();
    else if (HAS_PAIRS && count > STEP_ROWS && matrix.bits <= 8) paired = PairedRows(matrix, rows, count);
    else if (matrix.shifts) sum_groups();
  }

  void sum_groups() {
    const int64_t size = matrix.inputs / matrix.groups;
    sums.resize(count * matrix.groups);
    for (size_t group = 0; group < sums.size(); group++) {
      Floats sum{};
      int64_t input = 0;
      for (; input + LANES <= size; input += LANES) sum += load<Floats>(rows + group * size + input);
      sums[group] = total(sum);
      for (; input < size; input++) sums[group] += rows[group * size + input];
    }
  }

  void space() {
    stride = spaced(matrix.inputs);
    if (stride == matrix.inputs) return;
    apart.resize(count * stride);
    torch::stable::parallel_for(0, count, std::max<int64_t>(1, BYTES_OF_SHARE / stride), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; row++) std::memcpy(apart.data() + row * stride, rows + row * matrix.inputs, matrix.inputs * sizeof(float));
    });
    rows = apart.data();
  }

  int64_t together() const { return paired.inputs ? PAIR_ROWS : tiled ? TILE_ROWS : MOST_ROWS; }  // rows that one pass over a block serves

  // What tiles read of a block, in a place that is used for one block after the other.
  void lay_out(int64_t block, std::vector<float>& columns) const {
    if (!tiled) return;
    columns.resize(matrix.inputs * LANES);
    const auto* weight = static_cast<const float*>(matrix.weight) + block * LANES * matrix.inputs;
    transpose(weight, std::min(LANES, matrix.outputs - block * LANES), matrix.inputs, columns.data());
  }
};

constexpr int64_t MOST_TAKEN = std::max({MOST_ROWS, PAIR_ROWS, TILE_ROWS});

// 16 outputs for the rows from one on that are taken together, with the bias; return how many they are.
inline int64_t block_times(const Activations& given, const std::vector<float>& columns, int64_t block, int64_t row, Floats* products) {
  const Matrix& matrix = given.matrix;
  const int64_t count = std::min(given.together(), given.count - row);
  const float *rows = given.rows + row * given.stride, *sums = given.sums.data() + (given.sums.empty() ? 0 : row * matrix.groups);
  if (given.paired.inputs) {
    pairs_times(matrix, block, given.paired, row / PAIR_ROWS, products);
  } else if (given.tiled) {
    tile_times(rows, given.stride, count, columns.data(), LANES, matrix.inputs, products);
  } else {
    switch (matrix.bits) {
      case 2: block_of_codes_times<2>(matrix, block, rows, sums, count, products); break;
      case 4: block_of_codes_times<4>(matrix, block, rows, sums, count, products); break;
      case 8: block_of_codes_times<8>(matrix, block, rows, sums, count, products); break;
      case 16: floats_times<BFloat16>(matrix, block, rows, count, products); break;
      default: floats_times<float>(matrix, block, rows, count, products);
    }
  }
  if (!matrix.bias) return count;
  const auto bias = some<Floats>(matrix.bias + block * LANES, matrix.outputs - block * LANES);
  for (int64_t each = 0; each < count; each++) products[each] += bias;
  return count;
}

// Call `keep(block, first row, count, products)` for all blocks of outputs and all rows, on torch's threads.
template <class Keep>
void multiply(const Matrix& matrix, const float* rows, int64_t count, const Keep& keep) {
  const Activations given(matrix, rows, count);
  torch::stable::parallel_for(0, matrix.blocks(), matrix.share(), [&](int64_t begin, int64_t end) {
    Floats products[MOST_TAKEN];
    std::vector<float> columns;
    for (int64_t block = begin; block < end; block++) {
      given.lay_out(block, columns);
      for (int64_t row = 0; row < count; row += given.together()) {
        const int64_t taken = block_times(given, columns, block, row, products);
        keep(block, row, taken, products);
      }
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
