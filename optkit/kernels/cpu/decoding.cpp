// One decode step of a model of the Llama family, greedy, in float32: called through ctypes with the structures of decoding.py.

#include "decoder.h"

namespace {

// Softmax of the products with `length` keys, times the values, for one head.
inline void attend(const Model& model, const float* query, const float* keys, const float* values, int64_t length, float* scores, float* to) {
  for (int64_t at = 0; at < length; at++) scores[at] = dot(query, keys + at * model.size, model.size);
  const float factor = soften(scores, length, (length + LANES - 1) / LANES * LANES, model.scaling);
  for (int64_t lane = 0; lane < model.size; lane += WIDTH) {
    WideFloats mixed{};
    for (int64_t at = 0; at < length; at++) mixed += scores[at] * load<WideFloats>(values + at * model.size + lane);
    store(to + lane, mixed * factor);
  }
}

// Several matrices times the same rows as one list of blocks; all have outputs in multiples of 16.
void multiply_together(const std::vector<const Matrix*>& matrices, const float* rows, int64_t count, const std::vector<float*>& products) {
  std::vector<Activations> given;
  given.reserve(matrices.size());
  std::vector<int64_t> starts{0};
  for (const Matrix* matrix : matrices) {
    given.emplace_back(*matrix, rows, count);
    starts.push_back(starts.back() + matrix->blocks());
  }
  torch::stable::parallel_for(0, starts.back(), matrices[0]->share(), [&](int64_t begin, int64_t end) {
    Floats found[MOST_TAKEN];
    std::vector<float> columns;
    size_t which = 0;
    for (int64_t each = begin; each < end; each++) {
      while (each >= starts[which + 1]) which++;
      const int64_t block = each - starts[which], outputs = matrices[which]->outputs;
      given[which].lay_out(block, columns);
      for (int64_t row = 0; row < count; row += given[which].together()) {
        const int64_t taken = block_times(given[which], columns, block, row, found);
        for (int64_t at = 0; at < taken; at++) store(products[which] + (row + at) * outputs + block * LANES, found[at]);
      }
    }
  });
}

// silu(gate) * up.
void multiply_gated(const Matrix& gate, const Matrix& up, const float* rows, int64_t count, float* products) {
  multiply_into(gate, rows, count, products);
  multiply(up, rows, count, [&](int64_t block, int64_t row, int64_t taken, const Floats* found) {
    for (int64_t at = 0; at < taken; at++) {
      float* to = products + (row + at) * up.outputs + block * LANES;
      store(to, silu(load<Floats>(to)) * found[at]);
    }
  });
}

void multiply_and_add(const Matrix& matrix, const float* rows, int64_t count, float* hidden) {
  multiply(matrix, rows, count, [&](int64_t block, int64_t row, int64_t taken, const Floats* found) {
    for (int64_t at = 0; at < taken; at++) {
      float* to = hidden + (row + at) * matrix.outputs + block * LANES;
      store(to, load<Floats>(to) + found[at]);
    }
  });
}

int64_t largest(const float* logits, int64_t count) {
  WideFloats most = WideFloats{} - INFINITY;
  int64_t at = 0;
  for (; at + WIDTH <= count; at += WIDTH) {
    const WideFloats held = load<WideFloats>(logits + at);
    most = held > most ? held : most;
  }
  float best = largest_of(most);
  for (; at < count; at++) best = std::max(best, logits[at]);
  return std::min<int64_t>(std::find(logits, logits + count, best) - logits, count - 1);
}

void take_row(const Matrix& embedding, int64_t row, float* to) {
  const int64_t width = embedding.inputs;
  for (int64_t at = 0; at < width; at += WIDTH)
    store(to + at, embedding.bits == 32 ? widened(static_cast<const float*>(embedding.weight) + row * width + at)
                                        : widened(static_cast<const BFloat16*>(embedding.weight) + row * width + at));
}

}  // namespace

// tokens int64 [batch] at `position` -> the next ones, in their place, and logits float32 [batch, vocabulary].
extern "C" void optkit_decode_step(const Model* given, int64_t position, int64_t* tokens, float* logits) {
  const Model& model = *given;
  const int64_t batch = model.batch, size = model.size, width = model.embedding.inputs, length = position + 1;
  const int64_t of_queries = model.heads * size, of_keys = model.kv_heads * size, inner = model.layers[0].gate.outputs;
  std::vector<float> hidden(batch * width), normed(batch * width), queries(batch * of_queries), keys(batch * of_keys),
      values(batch * of_keys), attended(batch * of_queries), gated(batch * inner);
  for (int64_t row = 0; row < batch; row++) take_row(model.embedding, tokens[row], hidden.data() + row * width);
  const auto norm = [&](const float* weight) {
    for (int64_t row = 0; row < batch; row++) normalize(hidden.data() + row * width, weight, width, model.epsilon, normed.data() + row * width);
  };
  for (int64_t index = 0; index < model.count; index++) {
    const Layer& layer = model.layers[index];
    norm(layer.input_norm);
    multiply_together({&layer.queries, &layer.keys, &layer.values}, normed.data(), batch, {queries.data(), keys.data(), values.data()});
    for (int64_t head = 0; head < batch * model.kv_heads; head++) {
      const int64_t place = (head * model.capacity + position) * size;
      rotate(model, keys.data() + head * size, layer.key_norm, position, layer.key_cache + place);
      std::memcpy(layer.value_cache + place, values.data() + head * size, size * sizeof(float));
    }
    const int64_t grain = std::max<int64_t>(1, BYTES_OF_SHARE / (length * size * sizeof(float)));
    torch::stable::parallel_for(0, batch * model.heads, grain, [&](int64_t begin, int64_t end) {
      std::vector<float> query(size), scores(length + LANES);
      for (int64_t head = begin; head < end; head++) {
        const int64_t row = head / model.heads, shared = head % model.heads / (model.heads / model.kv_heads);
        const int64_t place = (row * model.kv_heads + shared) * model.capacity * size;
        rotate(model, queries.data() + head * size, layer.query_norm, position, query.data());
        attend(model, query.data(), layer.key_cache + place, layer.value_cache + place, length, scores.data(), attended.data() + head * size);
      }
    });
    multiply_and_add(layer.output, attended.data(), batch, hidden.data());
    norm(layer.output_norm);
    multiply_gated(layer.gate, layer.up, normed.data(), batch, gated.data());
    multiply_and_add(layer.down, gated.data(), batch, hidden.data());
  }
  norm(model.norm);
  multiply_into(model.head, normed.data(), batch, logits);
  for (int64_t row = 0; row < batch; row++) tokens[row] = largest(logits + row * model.head.outputs, model.head.outputs);
}
