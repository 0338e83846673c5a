// Operations on the device's tensors run on host tensors that alias the same memory, in the order of the current
// stream.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>

namespace simgpu {

bool is_on_device(const at::Tensor& tensor);
bool is_half(const at::Tensor& tensor);  // float16 or bfloat16

// A host tensor over the same memory of the device or of the host, which it does not keep alive: on a GPU, an enqueued
// kernel does not either.
at::Tensor host_alias(const at::Tensor& tensor);

// Enqueue `work` on the tensor's device, on the current stream, and count it.
void launch(const at::Tensor& tensor, const std::string& name, std::function<void()> work);

}  // namespace simgpu
