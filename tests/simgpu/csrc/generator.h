// Random numbers: a seed and an offset per generator, as on GPUs, so that a kernel's numbers depend only on the calls
// before.
#pragma once

#include <ATen/core/Generator.h>

namespace simgpu {

at::Generator new_generator(c10::DeviceIndex index);
const at::Generator& default_generator(c10::DeviceIndex index);

// A host generator for one operation; advances the given one.
at::Generator next_host_generator(const at::Generator& generator);

}  // namespace simgpu
