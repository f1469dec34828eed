// What prompts need of a model of the Llama family beside products, in float32: called through ctypes with the structures of decoding.py.

#include "decoder.h"

namespace {

constexpr int64_t KEYS = 2 * WIDTH;                   // of a panel: as many scores of a query are computed together
constexpr int64_t QUERIES = WIDTH == 16 ? 8 : 4;      // whose scores are computed together, and mixed by halves
constexpr int64_t MIXED = 4 * WIDTH, HALF = QUERIES / 2;  // numbers of a value that are mixed together

// Keys of one head [length, size], transposed in panels [length / KEYS, size, KEYS].
void transpose(const float* keys, int64_t length, int64_t size, float* panels) {
  for (int64_t first = 0; first < length; first += KEYS)
    for (int64_t key = 0; key < std::min(KEYS, length - first); key++)
      for (int64_t at = 0; at < size; at++) panels[first * size + at * KEYS + key] = keys[(first + key) * size + at];
}

// Scores [QUERIES, stride] of queries [QUERIES, size] with the first `panels` panels.
void score(const float* queries, const float* panel, int64_t panels, int64_t size, int64_t stride, float* scores) {
  for (int64_t each = 0; each < panels; each++, panel += size * KEYS) {
    WideFloats sums[QUERIES][2]{};
    for (int64_t at = 0; at < size; at++) {
      const auto left = load<WideFloats>(panel + at * KEYS), right = load<WideFloats>(panel + at * KEYS + WIDTH);
#pragma GCC unroll 8
      for (int64_t query = 0; query < QUERIES; query++) {
        const float number = queries[query * size + at];
        sums[query][0] += number * left, sums[query][1] += number * right;
      }
    }
    for (int64_t query = 0; query < QUERIES; query++)
      for (int64_t half = 0; half < 2; half++) store(scores + query * stride + each * KEYS + half * WIDTH, sums[query][half]);
  }
}

// Softmax of `length` scores, which are multiplied by `scaling`; 0 behind them, up to `padded`. Return 1 / their sum.
float soften(float* scores, int64_t length, int64_t padded, float scaling) {
  for (int64_t at = length; at < padded; at++) scores[at] = -INFINITY;
  Floats most = Floats{} - INFINITY, sum{};
  for (int64_t at = 0; at < padded; at += LANES) {
    const Floats held = load<Floats>(scores + at);
    most = held > most ? held : most;
  }
  const float highest = largest_of(most);
  for (int64_t at = 0; at < padded; at += LANES) {
    const Floats held = load<Floats>(scores + at), weight = exponential((held - highest) * scaling);
    store(scores + at, weight), sum += weight;
  }
  for (int64_t at = length; at < padded; at++) scores[at] = 0;
  return 1 / total(sum);
}

// Sums of `length` values [length, size], weighted: weights [HALF, stride] -> mixed [HALF, mixed_stride], times `factors`.
void mix(const float* weights, int64_t stride, const float* values, int64_t length, int64_t size, const float* factors, float* mixed, int64_t mixed_stride) {
  for (int64_t first = 0; first < size; first += MIXED) {
    const int64_t parts = std::min<int64_t>(4, (size - first) / WIDTH);
    WideFloats sums[HALF][4]{};
    if (parts == 4)
      for (int64_t key = 0; key < length; key++) {
        const float* value = values + key * size + first;
#pragma GCC unroll 4
        for (int64_t part = 0; part < 4; part++) {
          const auto held = load<WideFloats>(value + part * WIDTH);
#pragma GCC unroll 4
          for (int64_t row = 0; row < HALF; row++) sums[row][part] += weights[row * stride + key] * held;
        }
      }
    else
      for (int64_t key = 0; key < length; key++)
        for (int64_t part = 0; part < parts; part++)
          for (int64_t row = 0; row < HALF; row++) sums[row][part] += weights[row * stride + key] * load<WideFloats>(values + key * size + first + part * WIDTH);
    for (int64_t row = 0; row < HALF; row++)
      for (int64_t part = 0; part < parts; part++) store(mixed + row * mixed_stride + first + part * WIDTH, sums[row][part] * factors[row]);
  }
}

}  // namespace

// hidden [rows, width] -> normed; `last`: by the norm in front of the MLP.
extern "C" void optkit_prompt_norm(const Model* model, int64_t layer, int64_t last, const float* hidden, int64_t rows, float* normed) {
  const int64_t width = model->embedding.inputs;
  const float* weight = last ? model->layers[layer].output_norm : model->layers[layer].input_norm;
  torch::stable::parallel_for(0, rows, std::max<int64_t>(1, BYTES_OF_SHARE / width), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) normalize(hidden + row * width, weight, width, model->epsilon, normed + row * width);
  });
}

// gate, up [count]: silu(gate) * up, in the place of gate.
extern "C" void optkit_prompt_gate(float* gate, const float* up, int64_t count) {
  torch::stable::parallel_for(0, count / LANES, BYTES_OF_SHARE / LANES, [&](int64_t begin, int64_t end) {
    for (int64_t at = begin * LANES; at < end * LANES; at += LANES) store(gate + at, silu(load<Floats>(gate + at)) * load<Floats>(up + at));
  });
}

// queries [batch * length, heads * size], keys and values [batch * length, kv_heads * size] of prompts -> attended, like queries; keys and
// values go into the cache.
extern "C" void optkit_prompt_attend(const Model* given, int64_t index, int64_t length, const float* queries, const float* keys, const float* values, float* attended) {
  const Model& model = *given;
  const Layer& layer = model.layers[index];
  const int64_t size = model.size, shared = model.batch * model.kv_heads, shares = model.heads / model.kv_heads;
  const int64_t padded = (length + KEYS - 1) / KEYS * KEYS, tiles = (length + QUERIES - 1) / QUERIES, width = model.heads * size;
  std::vector<float> panels(shared * padded * size);
  torch::stable::parallel_for(0, shared, 1, [&](int64_t begin, int64_t end) {
    for (int64_t head = begin; head < end; head++) {
      float *held = layer.key_cache + head * model.capacity * size, *beside = layer.value_cache + head * model.capacity * size;
      for (int64_t at = 0; at < length; at++) {
        const int64_t from = ((head / model.kv_heads * length + at) * model.kv_heads + head % model.kv_heads) * size;
        rotate(model, keys + from, layer.key_norm, at, held + at * size);
        std::memcpy(beside + at * size, values + from, size * sizeof(float));
      }
      transpose(held, length, size, panels.data() + head * padded * size);
    }
  });
  torch::stable::parallel_for(0, model.batch * model.heads * tiles, 1, [&](int64_t begin, int64_t end) {
    std::vector<float> rotated(QUERIES * size), scores(QUERIES * padded), mixed(QUERIES * size);
    for (int64_t tile = begin; tile < end; tile++) {
      const int64_t head = tile / tiles, first = tile % tiles * QUERIES, rows = std::min(QUERIES, length - first), seen = first + rows;
      const int64_t sequence = head / model.heads, kv = sequence * model.kv_heads + head % model.heads / shares, filled = (seen + KEYS - 1) / KEYS;
      const int64_t place = (sequence * length + first) * width + head % model.heads * size;
      for (int64_t row = 0; row < rows; row++) rotate(model, queries + place + row * width, layer.query_norm, first + row, rotated.data() + row * size);
      score(rotated.data(), panels.data() + kv * padded * size, filled, size, padded, scores.data());
      float factors[QUERIES]{};
      for (int64_t row = 0; row < rows; row++) factors[row] = soften(scores.data() + row * padded, first + row + 1, filled * KEYS, model.scaling);
      for (int64_t row = 0; row < QUERIES; row += HALF)
        mix(scores.data() + row * padded, padded, layer.value_cache + kv * model.capacity * size, seen, size, factors + row, mixed.data() + row * size, size);
      for (int64_t row = 0; row < rows; row++) std::memcpy(attended + place + row * width, mixed.data() + row * size, size * sizeof(float));
    }
  });
}
