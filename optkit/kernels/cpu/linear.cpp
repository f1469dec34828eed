// The operators of optkit's CPU kernels, with torch's stable ABI.
//
// Compiled at run time for the processor that it runs on (optkit/kernels/cpu/native.py).

#include <optional>

#include "matrix.h"

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

namespace {

// Rows of a float type that is not float32; the products have the same.
template <class Stored>
void through_floats(const void* rows, int64_t count, const Matrix& matrix, void* products) {
  const auto* given = static_cast<const Stored*>(rows);
  std::vector<float> from(given, given + count * matrix.inputs), into(count * matrix.outputs);
  multiply_into(matrix, from.data(), count, into.data());
  std::copy(into.begin(), into.end(), static_cast<Stored*>(products));
}

Tensor product(const Tensor& given, const Matrix& matrix) {
  const Tensor rows = given.is_contiguous() ? given : torch::stable::contiguous(given);
  const int64_t count = rows.size(0);
  Tensor products = torch::stable::new_empty(rows, {count, matrix.outputs});
  const void* from = rows.const_data_ptr();
  void* into = products.mutable_data_ptr();
  if (rows.scalar_type() == ScalarType::Float) multiply_into(matrix, static_cast<const float*>(from), count, static_cast<float*>(into));
  else if (rows.scalar_type() == ScalarType::BFloat16) through_floats<BFloat16>(from, count, matrix, into);
  else through_floats<Float16>(from, count, matrix, into);
  return products;
}

// rows float [n, in], codes int32 [blocks, in * bits / 32, 16], scales float32 and shifts int8 [blocks, groups, 16] -> like rows, [n, out].
Tensor packed_linear(Tensor rows, Tensor codes, Tensor scales, std::optional<Tensor> shifts, int64_t bits, int64_t outputs) {
  STD_TORCH_CHECK(codes.is_contiguous() && scales.is_contiguous() && (!shifts || shifts->is_contiguous()), "packed_linear: not contiguous");
  STD_TORCH_CHECK(codes.size(1) * 32 == rows.size(1) * bits && codes.size(0) * LANES >= outputs, "packed_linear: codes and rows differ");
  const auto* zeros = shifts ? static_cast<const int8_t*>(shifts->const_data_ptr()) : nullptr;
  const auto* steps = static_cast<const float*>(scales.const_data_ptr());
  return product(rows, {codes.const_data_ptr(), steps, zeros, nullptr, bits, outputs, rows.size(1), scales.size(1)});
}

// rows float [n, in], weight float32 or bfloat16 [out, in] -> like rows, [n, out].
Tensor dense_linear(Tensor rows, Tensor weight) {
  STD_TORCH_CHECK(weight.is_contiguous() && weight.size(1) == rows.size(1), "dense_linear: weight and rows differ, or it is not contiguous");
  const int64_t bits = weight.scalar_type() == ScalarType::Float ? 32 : 16;
  return product(rows, {weight.const_data_ptr(), nullptr, nullptr, nullptr, bits, weight.size(0), weight.size(1), 0});
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(optkit_cpu, library) {
  library.def("packed_linear(Tensor rows, Tensor codes, Tensor scales, Tensor? shifts, int bits, int outputs) -> Tensor");
  library.def("dense_linear(Tensor rows, Tensor weight) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(optkit_cpu, CPU, library) {
  library.impl("packed_linear", TORCH_BOX(&packed_linear));
  library.impl("dense_linear", TORCH_BOX(&dense_linear));
}
