// Copies between host and device, on a device, and between devices.
#include "device.h"
#include "memory.h"
#include "operators.h"
#include "streams.h"

#include <ATen/core/Tensor.h>
#include <torch/library.h>

namespace simgpu {
namespace {

void copy_on_device(const at::Tensor& source, const at::Tensor& target) {
  launch(source, "copy", [from = host_alias(source), to = host_alias(target)] { to.copy_(from); });
}

// On the source's stream, ordered after and before the work on the target's.
void copy_between_devices(const at::Tensor& source, const at::Tensor& target) {
  const c10::Stream stream = current_stream(source.device().index());
  const c10::Stream other = current_stream(target.device().index());
  wait_on_stream(stream, record(other));
  enqueue(stream, Kind::kCopy, "copy", [from = host_alias(source), to = host_alias(target)] { to.copy_(from); });
  wait_on_stream(other, record(stream));
}

// Whether the copy needs no temporary host tensor, which is never pinned: for a change of layout, or of the dtype on
// the way to the device.
bool is_direct(const at::Tensor& source, const at::Tensor& target) {
  const bool keeps_dtype = is_on_device(source) || source.scalar_type() == target.scalar_type();
  return keeps_dtype && source.is_non_overlapping_and_dense() && source.strides() == target.strides();
}

void copy_between_host_and_device(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  const at::Tensor& on_device = is_on_device(source) ? source : target;
  const at::Tensor& on_host = is_on_device(source) ? target : source;
  const c10::Stream stream = current_stream(on_device.device().index());
  const void* const memory = on_host.storage().data();
  const auto work = [from = host_alias(source), to = host_alias(target)] { to.copy_(from); };
  if (non_blocking && is_pinned(memory) && is_direct(source, target)) {
    record_pinned_use(memory, stream);
    count("copies enqueued");
    enqueue(stream, Kind::kCopy, "copy", work);
    return;
  }
  count("host wait: copy");
  run_and_wait(stream, Kind::kCopy, "copy", work);
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  check_failure((is_on_device(source) ? source : target).device().index());
  if (source.numel() == 0) {
    return target;
  }
  if (source.device() == target.device()) {
    copy_on_device(source, target);
  } else if (is_on_device(source) && is_on_device(target)) {
    copy_between_devices(source, target);
  } else {
    copy_between_host_and_device(source, target, non_blocking);
  }
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  target.resize_(source.sizes());
  return copy_from(source, target, false);
}

at::Scalar local_scalar_dense(const at::Tensor& tensor) {
  count("host wait: item");
  at::Scalar value;
  run_and_wait(current_stream(tensor.device().index()), Kind::kCopy, "item",
               [&] { value = host_alias(tensor).item(); });
  return value;
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("_local_scalar_dense", local_scalar_dense);
}

}  // namespace
}  // namespace simgpu
