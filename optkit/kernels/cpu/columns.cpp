// The inner loops of GPTQ, of coordinate descent and of scales that are searched or refitted, as optkit/algorithms/column_kernels.py names them.
//
// Outputs do not depend on each other: a strip of them walks over the inputs of a block, and what it needs stays in the first cache.

#include <cfloat>
#include <tuple>

#include "vectors.h"

using torch::stable::Tensor;

namespace {

constexpr int64_t STRIP = 64, PARTS = STRIP / WIDTH;  // outputs that are walked together

inline void store_some(float* to, WideFloats held, int64_t count) {
  if (count >= WIDTH) store(to, held);
  else std::memcpy(to, &held, std::max<int64_t>(count, 0) * sizeof(float));
}

// The nearest whole number from `low` to `high`, to even between two; these are smaller than 2^21.
inline WideFloats nearest(WideFloats x, WideFloats low, WideFloats high) {
  x = x > low ? x : low;
  x = x < high ? x : high;
  return (x + 12582912.0f) - 12582912.0f;
}

inline const float* floats_of(const Tensor& tensor) {
  STD_TORCH_CHECK(tensor.is_contiguous() && tensor.scalar_type() == torch::headeronly::ScalarType::Float, "columns: not contiguous float32");
  return static_cast<const float*>(tensor.const_data_ptr());
}

// values [..., inputs, outputs], in turn less what the moves of the inputs before them make of it by `factors` [..., inputs, inputs].
// `step` makes of one and its place a code and its move; both are returned.
template <class Step>
std::tuple<Tensor, Tensor> in_turn(const Tensor& values, const Tensor& factors, const Step& step) {
  const int64_t inputs = values.size(-2), outputs = values.size(-1), size = inputs * outputs, strips = (outputs + STRIP - 1) / STRIP;
  const int64_t matrices = values.numel() / std::max<int64_t>(1, size);
  const float *given = floats_of(values), *square = floats_of(factors);
  Tensor codes = torch::stable::empty_like(values), moves = torch::stable::empty_like(values);
  auto* to = static_cast<float*>(codes.mutable_data_ptr());
  auto* moved_to = static_cast<float*>(moves.mutable_data_ptr());
  torch::stable::parallel_for(0, matrices * strips, 1, [&](int64_t begin, int64_t end) {
    std::vector<float> moved(inputs * STRIP), before(inputs);
    for (int64_t strip = begin; strip < end; strip++) {
      const int64_t matrix = strip / strips, first = strip % strips * STRIP;
      const float* factor = square + matrix * inputs * inputs;
      for (int64_t input = 0; input < inputs; input++) {
        const int64_t place = matrix * size + input * outputs + first, left = outputs - first;
        for (int64_t other = 0; other < input; other++) before[other] = factor[other * inputs + input];
        WideFloats value[PARTS];
        for (int64_t part = 0; part < PARTS; part++) value[part] = some(given + place + part * WIDTH, left - part * WIDTH);
        for (int64_t other = 0; other < input; other++)
#pragma GCC unroll 8
          for (int64_t part = 0; part < PARTS; part++) value[part] -= before[other] * load<WideFloats>(moved.data() + other * STRIP + part * WIDTH);
        for (int64_t part = 0; part < PARTS; part++) {
          const int64_t count = left - part * WIDTH, at = place + part * WIDTH;
          if (count <= 0) break;
          const auto [code, move] = step(value[part], at, count, factor[input * inputs + input]);
          store(moved.data() + input * STRIP + part * WIDTH, move);
          store_some(to + at, code, count), store_some(moved_to + at, move, count);
        }
      }
    }
  });
  return {codes, moves};
}

// GPTQ of one block: codes and errors; `factor` is upper.
std::tuple<Tensor, Tensor> round_block(Tensor values, Tensor scales, Tensor zeros, Tensor factor, int64_t top) {
  const float *steps = floats_of(scales), *middles = floats_of(zeros);
  const WideFloats most = WideFloats{} + static_cast<float>(top);
  return in_turn(values, factor, [&](WideFloats value, int64_t at, int64_t count, float diagonal) {
    const WideFloats scale = some(steps + at, count), zero = some(middles + at, count), code = nearest(value / scale + zero, WideFloats{}, most);
    return std::tuple{code, (value - (code - zero) * scale) / diagonal};
  });
}

// Coordinate descent on one block: new codes and each weight's move; `hessian` is symmetric.
std::tuple<Tensor, Tensor> descend_block(Tensor gradient, Tensor codes, Tensor scales, Tensor hessian, int64_t top) {
  const float *held = floats_of(codes), *steps = floats_of(scales);
  const WideFloats most = WideFloats{} + static_cast<float>(top);
  return in_turn(gradient, hessian, [&](WideFloats ahead, int64_t at, int64_t count, float diagonal) {
    const WideFloats scale = some(steps + at, count), code = some(held + at, count);
    const WideFloats better = nearest(ahead / (scale * diagonal) + code, WideFloats{}, most);
    return std::tuple{better, (better - code) * scale};
  });
}

// The weights of a group, and what an error of each counts, in whole vectors.
struct Group {
  std::vector<float> weights, counts;
};

// The least squared error of a scale over SHIFTS zero points near `exact`, and the best of them.
template <int SHIFTS>
inline std::pair<float, float> least_error(const Group& group, float scale, float exact, float top) {
  constexpr float SHIFTED[] = {0, -1, 1};
  const float middle = (top + 1) / 2;
  WideFloats sums[SHIFTS]{}, off[SHIFTS];
  for (int shift = 0; shift < SHIFTS; shift++) off[shift] = WideFloats{} + (std::clamp(exact + SHIFTED[shift], 0.0f, top) - middle);
  for (size_t at = 0; at < group.weights.size(); at += WIDTH) {
    const auto weight = load<WideFloats>(group.weights.data() + at), counts = load<WideFloats>(group.counts.data() + at), place = weight / scale;
#pragma GCC unroll 3
    for (int shift = 0; shift < SHIFTS; shift++) {
      const WideFloats code = nearest(place + off[shift], WideFloats{} - middle, WideFloats{} + (top - middle));
      const WideFloats error = (code - off[shift]) * scale - weight;
      sums[shift] += error * error * counts;
    }
  }
  std::pair<float, float> least{INFINITY, exact};
  for (int shift = 0; shift < SHIFTS; shift++) {
    float sum = 0;
    for (int64_t lane = 0; lane < WIDTH; lane++) sum += sums[shift][lane];
    if (sum < least.first) least = {sum, off[shift][0] + middle};
  }
  return least;
}

// grouped [out, groups, size], importance [1, groups, size], tried scales [candidates, out, groups], exact zero points [out, groups], of
// which the first `shifts` (1 or 3) of +0, -1 and +1 are tried -> scales and zero points [out, groups] with the least squared error.
std::tuple<Tensor, Tensor> search_groups(Tensor grouped, Tensor importance, Tensor tried, Tensor exact, int64_t shifts, int64_t top) {
  const int64_t groups = grouped.size(1), size = grouped.size(2), count = exact.numel(), candidates = tried.size(0);
  const float *weights = floats_of(grouped), *counted = floats_of(importance), *steps = floats_of(tried), *middles = floats_of(exact);
  Tensor scales = torch::stable::empty_like(exact), zeros = torch::stable::empty_like(exact);
  auto* best_scale = static_cast<float*>(scales.mutable_data_ptr());
  auto* best_zero = static_cast<float*>(zeros.mutable_data_ptr());
  torch::stable::parallel_for(0, count, std::max<int64_t>(1, BYTES_OF_SHARE / (size * candidates)), [&](int64_t begin, int64_t end) {
    const int64_t padded = (size + WIDTH - 1) / WIDTH * WIDTH;
    Group held{std::vector<float>(padded), std::vector<float>(padded)};
    for (int64_t group = begin; group < end; group++) {
      std::copy_n(weights + group * size, size, held.weights.begin());
      std::copy_n(counted + group % groups * size, size, held.counts.begin());
      float least = INFINITY;
      best_scale[group] = steps[group], best_zero[group] = middles[group];
      for (int64_t candidate = 0; candidate < candidates; candidate++) {
        const float scale = steps[candidate * count + group];
        const auto [error, zero] = (shifts == 1 ? least_error<1> : least_error<3>)(held, scale, middles[group], static_cast<float>(top));
        if (error < least) least = error, best_scale[group] = scale, best_zero[group] = zero;
      }
    }
  });
  return {scales, zeros};
}

// Steps [inputs, STRIP] of some outputs, and a symmetric matrix [inputs, inputs] -> steps^T matrix steps of each, summed over the inputs of
// each group: the lower triangle, [groups * (groups + 1) / 2, STRIP].
void normal_equations(const float* square, const float* steps, int64_t inputs, int64_t groups, float* normal) {
  constexpr int64_t ROWS = WIDTH == 16 ? 4 : 1;  // whose sums are in registers
  const int64_t width = inputs / groups;
  for (int64_t row = 0; row < groups; row++)
    for (int64_t column = 0; column <= row; column++, normal += STRIP) {
      WideFloats sums[PARTS]{};
      const auto add = [&]<int64_t COUNT>(std::integral_constant<int64_t, COUNT>, int64_t input) {
        WideFloats pulled[COUNT][PARTS]{};
        const float* from = square + input * inputs;
        for (int64_t each = 0; each < COUNT; each++)  // what the next column needs
          for (int64_t ahead = 0; ahead < width; ahead += LANES) __builtin_prefetch(from + each * inputs + (column + 1) * width + ahead);
        for (int64_t other = column * width; other < (column + 1) * width; other++) {
          WideFloats held[PARTS];
#pragma GCC unroll 8
          for (int64_t part = 0; part < PARTS; part++) held[part] = load<WideFloats>(steps + other * STRIP + part * WIDTH);
#pragma GCC unroll 4
          for (int64_t each = 0; each < COUNT; each++)
#pragma GCC unroll 8
            for (int64_t part = 0; part < PARTS; part++) pulled[each][part] += from[each * inputs + other] * held[part];
        }
#pragma GCC unroll 4
        for (int64_t each = 0; each < COUNT; each++)
#pragma GCC unroll 8
          for (int64_t part = 0; part < PARTS; part++) sums[part] += pulled[each][part] * load<WideFloats>(steps + (input + each) * STRIP + part * WIDTH);
      };
      int64_t input = row * width;
      for (; input + ROWS <= (row + 1) * width; input += ROWS) add(std::integral_constant<int64_t, ROWS>{}, input);
      for (; input < (row + 1) * width; input++) add(std::integral_constant<int64_t, 1>{}, input);
      for (int64_t part = 0; part < PARTS; part++) store(normal + part * WIDTH, sums[part]);
    }
}

// Solve equations as above, an output in each lane, by Cholesky factors in their place: `solved` [groups, STRIP] holds what is wanted, and
// then the solution. Return the lanes whose equations are positive definite.
WideIntegers solve(float* normal, int64_t groups, WideFloats ridge, float* solved) {
  const auto at = [&](int64_t row, int64_t column) { return normal + (row * (row + 1) / 2 + column) * STRIP; };
  WideIntegers definite = WideIntegers{} - 1;
  for (int64_t row = 0; row < groups; row++) {
    auto wanted = load<WideFloats>(solved + row * STRIP);
    for (int64_t column = 0; column <= row; column++) {
      auto sum = load<WideFloats>(at(row, column));
      for (int64_t before = 0; before < column; before++) sum -= load<WideFloats>(at(row, before)) * load<WideFloats>(at(column, before));
      if (column < row) {
        sum *= load<WideFloats>(at(column, column));  // the reciprocal of the factor's
        wanted -= sum * load<WideFloats>(solved + column * STRIP);
      } else {
        sum += ridge;
        definite &= sum > 0.0f;
        for (int64_t lane = 0; lane < WIDTH; lane++) sum[lane] = 1 / std::sqrt(sum[lane]);
        wanted *= sum;
      }
      store(at(row, column), sum);
    }
    store(solved + row * STRIP, wanted);
  }
  for (int64_t row = groups - 1; row >= 0; row--) {
    auto found = load<WideFloats>(solved + row * STRIP);
    for (int64_t after = row + 1; after < groups; after++) found -= load<WideFloats>(at(after, row)) * load<WideFloats>(solved + after * STRIP);
    store(solved + row * STRIP, found * load<WideFloats>(at(row, row)));
  }
  return definite;
}

// pull and steps [..., inputs, outputs], hessian [..., inputs, inputs], scales [..., groups, outputs] -> scales with the least error for codes
// that stay, as optkit/algorithms/refinement.py has them; `ridge` holds them to where they were.
Tensor refit_scales(Tensor pull, Tensor hessian, Tensor steps, Tensor scales, double ridge) {
  const int64_t inputs = steps.size(-2), outputs = steps.size(-1), groups = scales.size(-2), width = inputs / groups;
  const int64_t size = inputs * outputs, strips = (outputs + STRIP - 1) / STRIP, matrices = steps.numel() / std::max<int64_t>(1, size);
  const float *pulled = floats_of(pull), *square = floats_of(hessian), *moved = floats_of(steps), *present = floats_of(scales);
  Tensor found = torch::stable::empty_like(scales);
  auto* to = static_cast<float*>(found.mutable_data_ptr());
  torch::stable::parallel_for(0, matrices * strips, 1, [&](int64_t begin, int64_t end) {
    std::vector<float> held(inputs * STRIP), normal(groups * (groups + 1) / 2 * STRIP), solved(groups * STRIP);
    for (int64_t strip = begin; strip < end; strip++) {
      const int64_t matrix = strip / strips, first = strip % strips * STRIP;
      for (int64_t input = 0; input < inputs; input++)
        for (int64_t part = 0, left = outputs - first; part < PARTS; part++, left -= WIDTH)
          store(held.data() + input * STRIP + part * WIDTH, left > 0 ? some(moved + matrix * size + input * outputs + first + part * WIDTH, left) : WideFloats{});
      normal_equations(square + matrix * inputs * inputs, held.data(), inputs, groups, normal.data());
      for (int64_t part = 0, left = outputs - first; part < PARTS && left > 0; part++, left -= WIDTH) {
        const int64_t column = first + part * WIDTH, place = matrix * groups * outputs + column;
        WideFloats mean{};
        for (int64_t group = 0; group < groups; group++) mean += load<WideFloats>(normal.data() + (group * (group + 3) / 2) * STRIP + part * WIDTH);
        const WideFloats held_by = mean * static_cast<float>(ridge / groups) + FLT_MIN;
        for (int64_t group = 0; group < groups; group++) {
          WideFloats wanted = held_by * some(present + place + group * outputs, left);
          for (int64_t input = group * width; input < (group + 1) * width; input++)
            wanted += some(pulled + matrix * size + input * outputs + column, left) * load<WideFloats>(held.data() + input * STRIP + part * WIDTH);
          store(solved.data() + group * STRIP + part * WIDTH, wanted);
        }
        const WideIntegers definite = solve(normal.data() + part * WIDTH, groups, held_by, solved.data() + part * WIDTH);
        for (int64_t group = 0; group < groups; group++) {
          const WideFloats before = some(present + place + group * outputs, left), now = load<WideFloats>(solved.data() + group * STRIP + part * WIDTH);
          const WideFloats size_now = now < 0.0f ? -now : now, size_before = before < 0.0f ? -before : before;
          const WideIntegers usable = definite & (size_now < INFINITY) & (size_now > 1e-3f * size_before);
          store_some(to + place + group * outputs, usable ? now : before, left);
        }
      }
    }
  });
  return found;
}

#ifdef __AVX512BF16__
constexpr int64_t PANEL = 32, TOGETHER = 8, TOKEN_PAIRS = 256;  // inputs of a panel, those of another it is multiplied with at once, and tokens / 2

inline __m512i rounded_up(WideFloats numbers) {  // bfloat16 in the upper half
  const __m512i bits = (__m512i)numbers, odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  return _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
}

// Two tokens of a panel's inputs, times a factor each, in bfloat16.
inline void pack_pair(const float* one, const float* two, const float* factors, int64_t count, uint32_t* to) {
  for (int64_t at = 0; at < PANEL; at += LANES) {
    const __m512i low = _mm512_srli_epi32(rounded_up(some(one + at, count - at) * factors[0]), 16);
    const __m512i high = two ? rounded_up(some(two + at, count - at) * factors[1]) : _mm512_setzero_si512();
    _mm512_storeu_si512(to + at, _mm512_or_si512(low, _mm512_and_si512(high, _mm512_set1_epi32(0xffff0000))));
  }
}

// One panel of rows, beginning with `row`, and one of columns of sum [inputs, inputs].
void add_tile(const uint32_t* left, const uint32_t* right, int64_t pairs, int64_t row, int64_t column, int64_t inputs, float* sum) {
  for (int64_t first = 0; first < PANEL && row + first < inputs; first += TOGETHER) {
    __m512 found[TOGETHER][2] = {};
    for (int64_t pair = 0; pair < pairs; pair++) {
      const auto one = (__m512bh)_mm512_loadu_si512(right + pair * PANEL), two = (__m512bh)_mm512_loadu_si512(right + pair * PANEL + LANES);
#pragma GCC unroll 8
      for (int64_t each = 0; each < TOGETHER; each++) {
        const auto held = (__m512bh)_mm512_set1_epi32(left[pair * PANEL + first + each]);
        found[each][0] = _mm512_dpbf16_ps(found[each][0], held, one), found[each][1] = _mm512_dpbf16_ps(found[each][1], held, two);
      }
    }
    for (int64_t each = 0; each < std::min(TOGETHER, inputs - row - first); each++)
      for (int64_t half = 0; half < 2; half++) {
        float* to = sum + (row + first + each) * inputs + column + half * LANES;
        const int64_t count = inputs - column - half * LANES;
        store_some(to, some(to, count) + (WideFloats)found[each][half], count);
      }
  }
}

// Add x x^T over rows x, float32 [tokens, inputs] rounded to bfloat16, to a sum [inputs, inputs]: its lower triangle, and more of no meaning.
// `equal`: each is divided by its root mean square first.
void add_gram_(Tensor sum, Tensor rows, bool equal) {
  const int64_t tokens = rows.size(0), inputs = rows.size(1), panels = (inputs + PANEL - 1) / PANEL;
  const float* given = floats_of(rows);
  floats_of(sum);
  auto* total = static_cast<float*>(sum.mutable_data_ptr());
  std::vector<std::pair<int64_t, int64_t>> tiles;
  for (int64_t row = 0; row < panels; row++)
    for (int64_t column = 0; column <= row; column++) tiles.emplace_back(row, column);
  std::vector<float> factors(tokens + 1, 1.0f);
  if (equal)
    torch::stable::parallel_for(0, tokens, std::max<int64_t>(1, BYTES_OF_SHARE / inputs), [&](int64_t begin, int64_t end) {
      for (int64_t token = begin; token < end; token++) {
        WideFloats squares{};
        for (int64_t at = 0; at < inputs; at += WIDTH) {
          const WideFloats held = some(given + token * inputs + at, inputs - at);
          squares += held * held;
        }
        factors[token] = 1 / std::sqrt(std::max(::total((Floats)squares) / inputs, FLT_MIN));
      }
    });
  std::vector<uint32_t> packed(panels * TOKEN_PAIRS * PANEL);
  for (int64_t token = 0; token < tokens; token += 2 * TOKEN_PAIRS) {
    const int64_t pairs = std::min(TOKEN_PAIRS, (tokens - token + 1) / 2);
    torch::stable::parallel_for(0, panels, 8, [&](int64_t begin, int64_t end) {
      for (int64_t panel = begin; panel < end; panel++)
        for (int64_t pair = 0; pair < pairs; pair++) {
          const int64_t at = token + 2 * pair;
          const float* one = given + at * inputs + panel * PANEL;
          pack_pair(one, at + 1 < tokens ? one + inputs : nullptr, factors.data() + at, std::min(PANEL, inputs - panel * PANEL), packed.data() + (panel * TOKEN_PAIRS + pair) * PANEL);
        }
    });
    torch::stable::parallel_for(0, tiles.size(), 16, [&](int64_t begin, int64_t end) {
      for (int64_t tile = begin; tile < end; tile++) {
        const auto [row, column] = tiles[tile];
        add_tile(packed.data() + row * TOKEN_PAIRS * PANEL, packed.data() + column * TOKEN_PAIRS * PANEL, pairs, row * PANEL, column * PANEL, inputs, total);
      }
    });
  }
}
#endif

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(optkit_cpu, library) {
  library.def("round_block(Tensor values, Tensor scales, Tensor zeros, Tensor factor, int top) -> (Tensor, Tensor)");
  library.def("descend_block(Tensor gradient, Tensor codes, Tensor scales, Tensor hessian, int top) -> (Tensor, Tensor)");
  library.def("search_groups(Tensor grouped, Tensor importance, Tensor tried, Tensor exact, int shifts, int top) -> (Tensor, Tensor)");
  library.def("refit_scales(Tensor pull, Tensor hessian, Tensor steps, Tensor scales, float ridge) -> Tensor");
#ifdef __AVX512BF16__
  library.def("add_gram_(Tensor(a!) sum, Tensor rows, bool equal) -> ()");
#endif
}

STABLE_TORCH_LIBRARY_IMPL(optkit_cpu, CPU, library) {
  library.impl("round_block", TORCH_BOX(&round_block));
  library.impl("descend_block", TORCH_BOX(&descend_block));
  library.impl("search_groups", TORCH_BOX(&search_groups));
  library.impl("refit_scales", TORCH_BOX(&refit_scales));
#ifdef __AVX512BF16__
  library.impl("add_gram_", TORCH_BOX(&add_gram_));
#endif
}
