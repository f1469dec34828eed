// Many rows of floats times 16 columns of others: a tile of sums stays in registers.
#pragma once

#include "vectors.h"

constexpr int64_t TILE_ROWS = WIDTH == 16 ? 24 : 6;  // rows whose sums are in registers
constexpr int64_t DEPTH = 512;                       // products that are added up in one chain: longer ones lose digits

// How far apart rows of `count` numbers lie in memory: those that a multiple of 1 KiB lies between share few places of a cache.
inline int64_t spaced(int64_t count) { return count % 256 ? count : count + LANES; }

// products [ROWS] += rows [ROWS, depth] times columns [depth, 16]; `stride` and `apart` are numbers from one row of each to the next.
template <int ROWS>
inline void tile_times(const float* rows, int64_t stride, const float* columns, int64_t apart, int64_t depth, float* products) {
  constexpr int PARTS = LANES / WIDTH;
  for (int64_t first = 0; first < depth; first += DEPTH) {
    WideFloats sums[ROWS][PARTS]{};
    for (int64_t at = first; at < std::min(first + DEPTH, depth); at++) {
      WideFloats held[PARTS];
      for (int part = 0; part < PARTS; part++) held[part] = load<WideFloats>(columns + at * apart + part * WIDTH);
#pragma GCC unroll 24
      for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 2
        for (int part = 0; part < PARTS; part++) sums[row][part] += rows[row * stride + at] * held[part];
    }
    for (int row = 0; row < ROWS; row++)
      for (int part = 0; part < PARTS; part++) {
        float* to = products + row * LANES + part * WIDTH;
        store(to, load<WideFloats>(to) + sums[row][part]);
      }
  }
}

// The same for any number of rows; products [count, 16] are new.
template <int ROWS = TILE_ROWS>
void tile_times(const float* rows, int64_t stride, int64_t count, const float* columns, int64_t apart, int64_t depth, Floats* products) {
  for (; count >= ROWS; count -= ROWS, rows += ROWS * stride, products += ROWS) {
    std::fill_n(products, ROWS, Floats{});
    tile_times<ROWS>(rows, stride, columns, apart, depth, reinterpret_cast<float*>(products));
  }
  if constexpr (ROWS > 1) {
    if (count) tile_times<ROWS / 2>(rows, stride, count, columns, apart, depth, products);
  }
}

// Rows of `size` numbers, up to 16 -> columns [size, 16], zeros in those beyond.
inline void transpose(const float* rows, int64_t count, int64_t size, float* columns) {
  if (count < LANES) std::fill_n(columns, size * LANES, 0.0f);
  int64_t done = 0;
#ifdef __AVX2__
  for (; count == LANES && done + 8 <= size; done += 8)
    for (int64_t first = 0; first < LANES; first += 8) {
      __m256 from[8], mixed[8];
      for (int row = 0; row < 8; row++) {
        from[row] = _mm256_loadu_ps(rows + (first + row) * size + done);
        __builtin_prefetch(rows + (first + row + LANES) * size + done, 0, 2);  // the next 16 rows come from memory meanwhile
      }
      for (int row = 0; row < 8; row += 2) {
        mixed[row] = _mm256_unpacklo_ps(from[row], from[row + 1]);
        mixed[row + 1] = _mm256_unpackhi_ps(from[row], from[row + 1]);
      }
      for (int row = 0; row < 8; row += 4)
        for (int half = 0; half < 2; half++) {
          from[row + 2 * half] = _mm256_shuffle_ps(mixed[row + half], mixed[row + 2 + half], 0x44);
          from[row + 2 * half + 1] = _mm256_shuffle_ps(mixed[row + half], mixed[row + 2 + half], 0xee);
        }
      for (int row = 0; row < 4; row++) {
        _mm256_storeu_ps(columns + (done + row) * LANES + first, _mm256_permute2f128_ps(from[row], from[row + 4], 0x20));
        _mm256_storeu_ps(columns + (done + row + 4) * LANES + first, _mm256_permute2f128_ps(from[row], from[row + 4], 0x31));
      }
    }
#endif
  for (; done < size; done++)
    for (int64_t row = 0; row < count; row++) columns[done * LANES + row] = rows[row * size + done];
}
