// Vectors of 16 lanes, and a weight as these kernels read it.
//
// Vectors are those of GCC and clang, so that one source serves AVX-512, AVX2 and NEON.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <vector>
#ifdef __AVX2__
#include <immintrin.h>
#endif

using BFloat16 = c10::BFloat16;
using Float16 = c10::Half;

constexpr int64_t LANES = 16;             // outputs that are computed together
constexpr int64_t MOST_ROWS = 8;          // rows of activations that one pass over a block of codes serves
constexpr int64_t AHEAD = 1024;           // bytes that are fetched ahead
constexpr int64_t BYTES_OF_SHARE = 1 << 15;  // fewer are not worth a thread

#ifdef __AVX512BW__
constexpr int64_t WIDTH = 16;  // outputs that registers hold: GCC keeps wider vectors in memory
#else
constexpr int64_t WIDTH = 8;
#endif

typedef float Floats __attribute__((vector_size(64)));
typedef float Quarter __attribute__((vector_size(16)));
typedef float WideFloats __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t WideWords __attribute__((vector_size(4 * WIDTH)));
typedef int32_t WideIntegers __attribute__((vector_size(4 * WIDTH)));
typedef int8_t WideBytes __attribute__((vector_size(WIDTH)));
typedef uint16_t WideHalves __attribute__((vector_size(2 * WIDTH)));

// A linear layer's weight, as optkit/kernels/cpu/native.py lays it out.
struct Matrix {
  const void* weight;    // bits 2, 4, 8: uint32 [blocks, inputs * bits / 32, 16]; 16 (bfloat16) and 32 (float): [outputs, inputs]
  const float* scales;   // [blocks, groups, 16]
  const int8_t* shifts;  // [blocks, groups, 16]: zero points less 2^(bits - 1); may be null
  const float* bias;     // [outputs]; may be null
  int64_t bits, outputs, inputs, groups;

  int64_t blocks() const { return (outputs + LANES - 1) / LANES; }
  int64_t share() const { return std::max<int64_t>(1, BYTES_OF_SHARE / (inputs * LANES * bits / 8)); }  // blocks that are worth a thread
};

template <class Vector, class Scalar>
inline Vector load(const Scalar* from) {
  Vector loaded;
  std::memcpy(&loaded, from, sizeof(Vector));
  return loaded;
}

template <class Vector, class Scalar>
inline void store(Scalar* to, Vector vector) {
  std::memcpy(to, &vector, sizeof(Vector));
}

// The first `count` numbers of a vector, zeros in those beyond.
template <class Vector = WideFloats>
inline Vector some(const float* from, int64_t count) {
  if (count >= static_cast<int64_t>(sizeof(Vector) / sizeof(float))) return load<Vector>(from);
  Vector found{};
  std::memcpy(&found, from, std::max<int64_t>(count, 0) * sizeof(float));
  return found;
}

// Whole numbers of 8 bits in 32; GCC converts such vectors number by number.
inline WideIntegers widened(const int8_t* from) {
#if defined(__AVX512BW__)
  return (WideIntegers)_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#elif defined(__AVX2__)
  return (WideIntegers)_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
#else
  return __builtin_convertvector(load<WideBytes>(from), WideIntegers);
#endif
}

inline WideFloats widened(const float* from) { return load<WideFloats>(from); }
inline WideFloats widened(const BFloat16* from) {
#if defined(__AVX2__) && !defined(__AVX512BW__)
  return (WideFloats)((WideWords)_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))) << 16);
#else
  return (WideFloats)(__builtin_convertvector(load<WideHalves>(from), WideWords) << 16);
#endif
}

template <class Vector>
inline float total(Vector vector) {
#ifdef __AVX512F__
  if constexpr (sizeof(Vector) == 64) return _mm512_reduce_add_ps((__m512)vector);
#endif
  Quarter parts[sizeof(Vector) / sizeof(Quarter)];
  std::memcpy(parts, &vector, sizeof(Vector));
  for (size_t part = 1; part < std::size(parts); part++) parts[0] += parts[part];
  return (parts[0][0] + parts[0][1]) + (parts[0][2] + parts[0][3]);
}

inline float largest_of(WideFloats vector) {
#ifdef __AVX512F__
  return _mm512_reduce_max_ps((__m512)vector);
#else
  float most = vector[0];
  for (int lane = 1; lane < WIDTH; lane++) most = std::max(most, vector[lane]);
  return most;
#endif
}
