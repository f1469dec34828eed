// What prompts need of a model of the Llama family beside products, in float32: called through ctypes with the structures of decoding.py.

#include "decoder.h"

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
  torch::stable::parallel_for(0, count / WIDTH, BYTES_OF_SHARE / WIDTH, [&](int64_t begin, int64_t end) {
    for (int64_t at = begin * WIDTH; at < end * WIDTH; at += WIDTH) store(gate + at, silu(load<WideFloats>(gate + at)) * load<WideFloats>(up + at));
  });
}

// queries [batch * length, heads * size], keys and values [batch * length, kv_heads * size] of prompts -> attended, like queries; keys and
// values go into the cache.
extern "C" void optkit_prompt_attend(const Model* given, int64_t index, int64_t length, const float* queries, const float* keys, const float* values, float* attended) {
  const Model& model = *given;
  const Layer& layer = model.layers[index];
  const int64_t size = model.size, shared = model.batch * model.kv_heads, shares = model.heads / model.kv_heads;
  const int64_t padded = (length + LANES - 1) / LANES * LANES, stride = spaced(padded), tiles = (length + TILE_ROWS - 1) / TILE_ROWS;
  const int64_t width = model.heads * size;
  std::vector<float> panels(shared * padded * size);
  torch::stable::parallel_for(0, shared, 1, [&](int64_t begin, int64_t end) {
    for (int64_t head = begin; head < end; head++) {
      float *held = layer.key_cache + head * model.capacity * size, *beside = layer.value_cache + head * model.capacity * size;
      for (int64_t at = 0; at < length; at++) {
        const int64_t from = ((head / model.kv_heads * length + at) * model.kv_heads + head % model.kv_heads) * size;
        rotate(model, keys + from, layer.key_norm, at, held + at * size);
        std::memcpy(beside + at * size, values + from, size * sizeof(float));
      }
      for (int64_t first = 0; first < length; first += LANES)
        transpose(held + first * size, std::min(LANES, length - first), size, panels.data() + (head * padded + first) * size);
    }
  });
  torch::stable::parallel_for(0, model.batch * model.heads * tiles, 1, [&](int64_t begin, int64_t end) {
    std::vector<float> rotated(TILE_ROWS * size), scores(TILE_ROWS * stride);
    for (int64_t tile = begin; tile < end; tile++) {
      const int64_t head = tile / tiles, first = tile % tiles * TILE_ROWS, rows = std::min(TILE_ROWS, length - first), seen = first + rows;
      const int64_t sequence = head / model.heads, kv = sequence * model.kv_heads + head % model.heads / shares;
      const int64_t place = (sequence * length + first) * width + head % model.heads * size;
      const float *seen_keys = panels.data() + kv * padded * size, *seen_values = layer.value_cache + kv * model.capacity * size;
      float factors[TILE_ROWS];
      Floats products[TILE_ROWS];
      for (int64_t row = 0; row < rows; row++) rotate(model, queries + place + row * width, layer.query_norm, first + row, rotated.data() + row * size);
      for (int64_t key = 0; key < seen; key += LANES) {
        tile_times(rotated.data(), size, rows, seen_keys + key * size, LANES, size, products);
        for (int64_t row = 0; row < rows; row++) store(scores.data() + row * stride + key, products[row]);
      }
      for (int64_t row = 0; row < rows; row++)
        factors[row] = soften(scores.data() + row * stride, first + row + 1, (seen + LANES - 1) / LANES * LANES, model.scaling);
      for (int64_t lane = 0; lane < size; lane += LANES) {
        tile_times(scores.data(), stride, rows, seen_values + lane, size, seen, products);
        for (int64_t row = 0; row < rows; row++) store(attended + place + row * width + lane, products[row] * factors[row]);
      }
    }
  });
}
