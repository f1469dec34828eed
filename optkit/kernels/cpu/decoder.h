// A model of the Llama family as decoding.py lays it out, and what decode steps and prompts compute of it beside products, in float32.
#pragma once

#include "matrix.h"

struct Layer {
  Matrix queries, keys, values, output, gate, up, down;
  const float* input_norm;    // [width]
  const float* output_norm;   // [width]
  const float* query_norm;    // [size]; may be null
  const float* key_norm;      // [size]; may be null
  float* key_cache;           // [batch, kv_heads, capacity, size]
  float* value_cache;
};

struct Model {
  const Layer* layers;
  Matrix embedding, head;
  const float* norm;     // [width]
  const float* cosines;  // [capacity, size / 2]
  const float* sines;
  int64_t count, heads, kv_heads, size, capacity, batch;
  float epsilon, scaling;
};

// e^x for x <= 0, to a relative error of 2e-7.
template <class Vector>
inline Vector exponential(Vector x) {
  using Whole = decltype(x < x);
  x = x < -87.0f ? Vector{} - 87.0f : x;
  const Whole power = __builtin_convertvector(x * 1.44269504f - 0.5f, Whole);
  const Vector whole = __builtin_convertvector(power, Vector), rest = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
  Vector sum = rest * 1.9875691500e-4f + 1.3981999507e-3f;
  sum = sum * rest + 8.3334519073e-3f;
  sum = sum * rest + 4.1665795894e-2f;
  sum = sum * rest + 1.6666665459e-1f;
  sum = sum * rest + 5.0000001201e-1f;
  return (sum * rest * rest + rest + 1.0f) * (Vector)((power + 127) << 23);
}

template <class Vector>
inline Vector silu(Vector x) {
  const Vector small = exponential(x < 0.0f ? x : -x);  // never overflows
  return (x < 0.0f ? x * small : x) / (small + 1.0f);
}

inline float dot(const float* left, const float* right, int64_t size) {
  WideFloats sum{};
  for (int64_t at = 0; at < size; at += WIDTH) sum += load<WideFloats>(left + at) * load<WideFloats>(right + at);
  return total(sum);
}

// Softmax of `length` scores, which are multiplied by `scaling`; 0 behind them, up to `padded`. Return 1 / their sum.
inline float soften(float* scores, int64_t length, int64_t padded, float scaling) {
  for (int64_t at = length; at < padded; at++) scores[at] = -INFINITY;
  WideFloats most = WideFloats{} - INFINITY, sum{};
  for (int64_t at = 0; at < padded; at += WIDTH) {
    const WideFloats held = load<WideFloats>(scores + at);
    most = held > most ? held : most;
  }
  const float highest = largest_of(most);
  for (int64_t at = 0; at < padded; at += WIDTH) {
    const WideFloats held = load<WideFloats>(scores + at), weight = exponential((held - highest) * scaling);
    store(scores + at, weight), sum += weight;
  }
  for (int64_t at = length; at < padded; at++) scores[at] = 0;
  return 1 / total(sum);
}

// x / sqrt(mean(x^2) + epsilon) * weight; `size` is a multiple of 16.
inline void normalize(const float* from, const float* weight, int64_t size, float epsilon, float* to) {
  const float factor = 1.0f / std::sqrt(dot(from, from, size) / size + epsilon);
  for (int64_t at = 0; at < size; at += WIDTH) store(to + at, load<WideFloats>(from + at) * factor * load<WideFloats>(weight + at));
}

// Norm (where there is one) and rotation of one head.
inline void rotate(const Model& model, const float* from, const float* norm, int64_t position, float* to) {
  const int64_t half = model.size / 2;
  const float *cosines = model.cosines + position * half, *sines = model.sines + position * half;
  if (norm) {
    normalize(from, norm, model.size, model.epsilon, to);
    from = to;
  }
  for (int64_t at = 0; at < half; at++) {
    const float first = from[at], second = from[at + half];
    to[at] = first * cosines[at] - second * sines[at];
    to[at + half] = second * cosines[at] + first * sines[at];
  }
}
