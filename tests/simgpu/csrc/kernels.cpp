// Kernels that the fallback cannot provide: new tensors and views, and operations without meta kernels in C++.
#include "device.h"
#include "memory.h"
#include "operators.h"
#include "streams.h"

#include <ATen/EmptyTensor.h>
#include <ATen/AccumulateType.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/ConvUtils.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/native_batch_norm.h>
#include <ATen/ops/native_batch_norm_backward.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <array>
#include <optional>
#include <tuple>
#include <vector>

namespace simgpu {
namespace {

using at::IntArrayRef;
using at::Tensor;
using Three = std::tuple<Tensor, Tensor, Tensor>;

// --- New tensors and views

at::ScalarType supported(std::optional<at::ScalarType> dtype) {
  const at::ScalarType chosen = c10::dtype_or_default(dtype);
  TORCH_CHECK_TYPE(has_float64() || chosen != at::kDouble,
                   "Cannot convert a simgpu Tensor to float64 dtype as the device doesn't support float64. "
                   "Please use float32 instead.");
  return chosen;
}

Tensor empty(IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout> /*layout*/,
             std::optional<at::Device> device, std::optional<bool> /*pin_memory*/,
             std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(resolve(device.value_or(c10::Device(kDeviceType, -1))));
  return at::detail::empty_generic(sizes, device_allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   supported(dtype), format);
}

Tensor empty_strided(IntArrayRef sizes, IntArrayRef strides, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout> /*layout*/, std::optional<at::Device> device,
                     std::optional<bool> /*pin_memory*/) {
  const c10::DeviceGuard guard(resolve(device.value_or(c10::Device(kDeviceType, -1))));
  return at::detail::empty_strided_generic(sizes, strides, device_allocator(),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), supported(dtype));
}

Tensor as_strided(const Tensor& self, IntArrayRef sizes, IntArrayRef strides, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, sizes, strides, offset);
}

Tensor view(const Tensor& self, IntArrayRef sizes) {
  return at::native::view(self, sizes);
}

Tensor reshape_alias(const Tensor& self, IntArrayRef sizes, IntArrayRef strides) {
  return at::native::_reshape_alias(self, sizes, strides);
}

Tensor unfold(const Tensor& self, int64_t dimension, int64_t size, int64_t step) {
  std::vector<int64_t> sizes = self.sizes().vec();
  std::vector<int64_t> strides = self.strides().vec();
  const int64_t dim = c10::maybe_wrap_dim(dimension, self.dim());
  sizes.push_back(size);
  strides.push_back(strides[dim]);
  sizes[dim] = (sizes[dim] - size) / step + 1;
  strides[dim] *= step;
  return at::native::as_strided_tensorimpl(self, sizes, strides, self.storage_offset());
}

const Tensor& resize_(const Tensor& self, IntArrayRef sizes, std::optional<at::MemoryFormat> format) {
  auto* const changed = self.unsafeGetTensorImpl();
  changed->set_sizes_contiguous(sizes);
  if (format.has_value() && *format != at::MemoryFormat::Preserve) {
    changed->empty_tensor_restride(*format);
  }
  const size_t needed_bytes = (self.storage_offset() + changed->numel()) * self.itemsize();
  if (changed->numel() > 0 && needed_bytes > self.storage().nbytes()) {
    resize_storage(self.storage(), needed_bytes);
  }
  return self;
}

Tensor& set_storage(Tensor& self, at::Storage storage, int64_t offset, IntArrayRef sizes, IntArrayRef strides) {
  auto* const changed = self.unsafeGetTensorImpl();
  changed->set_storage_keep_dtype(std::move(storage));
  changed->set_storage_offset(offset);
  changed->set_sizes_and_strides(sizes, strides);
  return self;
}

Tensor& set_whole_storage(Tensor& self, at::Storage storage) {
  const auto count = static_cast<int64_t>(storage.nbytes() / self.itemsize());
  return set_storage(self, std::move(storage), 0, {count}, {1});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

void record_stream(Tensor& self, at::Stream stream) {
  count("streams recorded");
  record_use(self.storage().data_ptr(), stream);
}

// --- Layers. Half precision is computed in float, as tensor cores accumulate, and as CPU kernels lack combinations.

Tensor widened(const Tensor& tensor) {
  return tensor.defined() && is_half(tensor) ? tensor.to(at::kFloat) : tensor;
}

Tensor optional_alias(const std::optional<Tensor>& tensor) {
  return tensor.has_value() && tensor->defined() ? host_alias(*tensor) : Tensor();
}

void fill(const std::array<Tensor, 3>& targets, const Three& values) {
  const std::array<Tensor, 3> sources = {std::get<0>(values), std::get<1>(values), std::get<2>(values)};
  for (size_t i = 0; i < targets.size(); ++i) {
    if (targets[i].defined()) {
      targets[i].copy_(sources[i]);
    }
  }
}

std::array<Tensor, 3> aliases(const Three& tensors) {
  return {optional_alias(std::get<0>(tensors)), optional_alias(std::get<1>(tensors)),
          optional_alias(std::get<2>(tensors))};
}

std::vector<int64_t> convolution_sizes(const Tensor& input, const Tensor& weight, IntArrayRef stride,
                                       IntArrayRef padding, IntArrayRef dilation, bool transposed,
                                       IntArrayRef output_padding, int64_t groups) {
  if (transposed) {
    return at::native::conv_input_size(input.sizes(), weight.sizes(), padding, output_padding, stride, dilation,
                                       groups);
  }
  return at::native::conv_output_size(input.sizes(), weight.sizes(), padding, stride, dilation);
}

at::MemoryFormat convolution_format(const Tensor& input, const Tensor& weight) {
  const at::MemoryFormat format = input.suggest_memory_format();
  return format == at::MemoryFormat::Contiguous ? weight.suggest_memory_format() : format;
}

Tensor convolution(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias, IntArrayRef stride,
                   IntArrayRef padding, IntArrayRef dilation, bool transposed, IntArrayRef output_padding,
                   int64_t groups) {
  const c10::DeviceGuard guard(input.device());
  const auto sizes = convolution_sizes(input, weight, stride, padding, dilation, transposed, output_padding, groups);
  const Tensor output = at::empty(sizes, input.options(), convolution_format(input, weight));
  launch(input, "convolution",
         [to = host_alias(output), x = host_alias(input), w = host_alias(weight), b = optional_alias(bias),
          stride = stride.vec(), padding = padding.vec(), dilation = dilation.vec(), transposed,
          output_padding = output_padding.vec(), groups] {
           to.copy_(at::convolution(widened(x), widened(w), widened(b), stride, padding, dilation, transposed,
                                    output_padding, groups));
         });
  return output;
}

Three convolution_backward(const Tensor& gradient, const Tensor& input, const Tensor& weight, IntArrayRef stride,
                           IntArrayRef padding, IntArrayRef dilation, bool transposed, IntArrayRef output_padding,
                           int64_t groups, std::array<bool, 3> mask) {
  const c10::DeviceGuard guard(input.device());
  const at::MemoryFormat format = convolution_format(input, weight);
  const Three results = {mask[0] ? at::empty_like(input, input.options(), format) : Tensor(),
                         mask[1] ? at::empty_like(weight, weight.options(), format) : Tensor(),
                         mask[2] ? at::empty({gradient.size(1)}, weight.options()) : Tensor()};
  launch(input, "convolution_backward",
         [to = aliases(results), g = host_alias(gradient), x = host_alias(input), w = host_alias(weight),
          stride = stride.vec(), padding = padding.vec(), dilation = dilation.vec(), transposed,
          output_padding = output_padding.vec(), groups, mask] {
           const std::vector<int64_t> bias_sizes = {g.size(1)};
           fill(to, at::convolution_backward(widened(g), widened(x), widened(w), IntArrayRef(bias_sizes), stride,
                                             padding, dilation, transposed, output_padding, groups, mask));
         });
  return results;
}

Three batch_norm(const Tensor& input, const std::optional<Tensor>& weight, const std::optional<Tensor>& bias,
                 const std::optional<Tensor>& running_mean, const std::optional<Tensor>& running_variance,
                 bool training, double momentum, double epsilon) {
  const c10::DeviceGuard guard(input.device());
  const auto statistics = input.options().dtype(at::toAccumulateType(input.scalar_type(), /*is_cuda=*/true));
  const int64_t channels = training ? input.size(1) : 0;
  const Three results = {at::empty_like(input), at::empty({channels}, statistics), at::empty({channels}, statistics)};
  launch(
      input, "batch_norm",
      [to = aliases(results), x = host_alias(input), w = optional_alias(weight), b = optional_alias(bias),
       mean = optional_alias(running_mean), variance = optional_alias(running_variance), training, momentum, epsilon] {
        const Tensor wide_mean = widened(mean);
        const Tensor wide_variance = widened(variance);
        fill(to, at::native_batch_norm(widened(x), widened(w), widened(b), wide_mean, wide_variance, training, momentum,
                                       epsilon));
        if (training && mean.defined() && is_half(mean)) {
          mean.copy_(wide_mean);
          variance.copy_(wide_variance);
        }
      });
  return results;
}

Three batch_norm_backward(const Tensor& gradient, const Tensor& input, const std::optional<Tensor>& weight,
                          const std::optional<Tensor>& running_mean, const std::optional<Tensor>& running_variance,
                          const std::optional<Tensor>& mean, const std::optional<Tensor>& inverse_deviation,
                          bool training, double epsilon, std::array<bool, 3> mask) {
  const c10::DeviceGuard guard(input.device());
  const auto parameter = weight.has_value() && weight->defined() ? weight->options() : input.options();
  const Three results = {mask[0] ? at::empty_like(input) : Tensor(),
                         mask[1] ? at::empty({input.size(1)}, parameter) : Tensor(),
                         mask[2] ? at::empty({input.size(1)}, parameter) : Tensor()};
  launch(input, "batch_norm_backward",
         [to = aliases(results), g = host_alias(gradient), x = host_alias(input), w = optional_alias(weight),
          running_mean = optional_alias(running_mean), running_variance = optional_alias(running_variance),
          mean = optional_alias(mean), inverse_deviation = optional_alias(inverse_deviation), training, epsilon, mask] {
           fill(to, at::native_batch_norm_backward(widened(g), widened(x), widened(w), widened(running_mean),
                                                   widened(running_variance), mean, inverse_deviation, training,
                                                   epsilon, mask));
         });
  return results;
}

std::tuple<Tensor, Tensor> dropout(const Tensor& input, double probability, std::optional<bool> training) {
  if (!training.value_or(true)) {
    return {input.clone(), at::ones_like(input, input.options().dtype(at::kBool))};
  }
  const Tensor mask = at::empty_like(input, input.options().dtype(at::kBool)).bernoulli_(1 - probability);
  return {input.mul(mask).mul_(probability == 1 ? 0.0 : 1 / (1 - probability)), mask};
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("as_strided", as_strided);
  library.impl("view", view);
  library.impl("_reshape_alias", reshape_alias);
  library.impl("unfold", unfold);
  library.impl("resize_", resize_);
  library.impl("set_.source_Storage", set_whole_storage);
  library.impl("set_.source_Storage_storage_offset", set_storage);
  library.impl("set_.source_Tensor", set_tensor);
  library.impl("record_stream", record_stream);
  library.impl("convolution_overrideable", convolution);
  library.impl("convolution_backward_overrideable", convolution_backward);
  library.impl("native_batch_norm", batch_norm);
  library.impl("native_batch_norm_backward", batch_norm_backward);
  library.impl("native_dropout", dropout);
}

}  // namespace

}  // namespace simgpu
