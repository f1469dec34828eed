// The CPU kernels without torch, against double: compiled and run by test_cpu_architectures.py.

#include "decoding.cpp"
#include "prompts.cpp"

#include <cstdio>
#include <random>

extern "C" int torch_parallel_for(int64_t begin, int64_t end, int64_t, void (*call)(int64_t, int64_t, void*), void* context) {
  call(begin, end, context);
  return 0;
}

namespace {

std::mt19937 random_bits(0);

// The widest error of a product, beside the sum of the sizes of what it adds.
double error_of(int64_t bits, int64_t outputs, int64_t inputs, int64_t groups, int64_t count) {
  const int64_t blocks = (outputs + LANES - 1) / LANES, per_word = 32 / bits, size = inputs / groups;
  std::vector<uint32_t> codes(blocks * inputs / per_word * LANES);
  for (auto& word : codes) word = random_bits();
  std::vector<float> scales(blocks * groups * LANES), rows(count * inputs), found(count * outputs);
  for (auto& each : scales) each = (random_bits() % 1000 + 1) / 1000.0f;
  for (auto& each : rows) each = random_bits() % 2001 / 1000.0f - 1;
  std::vector<int8_t> shifts(scales.size());
  for (auto& each : shifts) each = random_bits() % 4 - 2;
  const Matrix matrix{codes.data(), scales.data(), shifts.data(), nullptr, bits, outputs, inputs, groups};
  multiply_into(matrix, rows.data(), count, found.data());
  double worst = 0;
  for (int64_t row = 0; row < count; row++)
    for (int64_t output = 0; output < outputs; output++) {
      const int64_t block = output / LANES, lane = output % LANES;
      double sum = 0, sizes = 1e-9;
      for (int64_t input = 0; input < inputs; input++) {
        const uint32_t word = codes[(block * (inputs / per_word) + input / per_word) * LANES + lane];
        const int64_t code = word >> (input % per_word * bits) & ((1 << bits) - 1), at = (block * groups + input / size) * LANES + lane;
        const double product = (code - (1 << (bits - 1)) - shifts[at]) * static_cast<double>(scales[at]) * rows[row * inputs + input];
        sum += product, sizes += std::abs(product);
      }
      worst = std::max(worst, std::abs(found[row * outputs + output] - sum) / sizes);
    }
  return worst;
}

std::vector<float> numbers(int64_t count) {
  std::vector<float> made(count);
  for (auto& each : made) each = random_bits() % 2001 / 1000.0f - 1;
  return made;
}

// The widest error of causal attention of prompts of `length`, with the rotation left out.
double error_of_attention(int64_t batch, int64_t length, int64_t heads, int64_t kv_heads, int64_t size) {
  const int64_t capacity = length + 3;
  const auto queries = numbers(batch * length * heads * size), keys = numbers(batch * length * kv_heads * size), values = numbers(keys.size());
  std::vector<float> cache[2], cosines(capacity * size / 2, 1.0f), sines(capacity * size / 2), found(queries.size());
  for (auto& each : cache) each.resize(batch * kv_heads * capacity * size);
  Layer layer{};
  layer.key_cache = cache[0].data(), layer.value_cache = cache[1].data();
  Model model{};
  model.layers = &layer, model.cosines = cosines.data(), model.sines = sines.data(), model.scaling = 0.3f;
  model.heads = heads, model.kv_heads = kv_heads, model.size = size, model.capacity = capacity, model.batch = batch;
  optkit_prompt_attend(&model, 0, length, queries.data(), keys.data(), values.data(), found.data());
  double worst = 0;
  for (int64_t row = 0; row < batch * length; row++)
    for (int64_t head = 0; head < heads; head++) {
      const int64_t first = row / length * length, shared = head / (heads / kv_heads);
      std::vector<double> mixed(size);
      double sum = 0;
      for (int64_t key = first; key <= row; key++) {
        double score = 0;
        for (int64_t at = 0; at < size; at++) score += queries[(row * heads + head) * size + at] * keys[(key * kv_heads + shared) * size + at];
        const double weight = std::exp(score * 0.3f);
        sum += weight;
        for (int64_t at = 0; at < size; at++) mixed[at] += weight * values[(key * kv_heads + shared) * size + at];
      }
      for (int64_t at = 0; at < size; at++) worst = std::max(worst, std::abs(found[(row * heads + head) * size + at] - mixed[at] / sum));
    }
  return worst;
}

}  // namespace

int main() {
  for (const int64_t length : {1, 9, 70}) {
    const double error = std::max(error_of_attention(2, length, 4, 2, 64), error_of_attention(1, length, 3, 1, 80));
    std::printf("attention of %d tokens: %.2g\n", static_cast<int>(length), error);
    if (!(error < 1e-5)) return 1;
  }
  for (const int64_t bits : {2, 4, 8})
    for (const int64_t count : {1, 5, 8, 41}) {
      const double error = error_of(bits, 40, 192, 3, count);
      std::printf("%d bits, %d rows: %.2g\n", static_cast<int>(bits), static_cast<int>(count), error);
      if (!(error < (count > STEP_ROWS && HAS_PAIRS ? 3e-5 : 1e-6))) return 1;
    }
  return 0;
}
