// Device memory, freed in the order of streams and poisoned, and pinned host memory.
#pragma once

#include "device.h"

#include <c10/core/Allocator.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>

#include <cstddef>

namespace simgpu {

constexpr int kPoison = 0xFF;  // NaN as a floating-point number of any width, -1 as an integer

c10::Allocator* device_allocator();
c10::Allocator* pinned_allocator();

// Keep the memory until the stream has finished what is enqueued when it is freed (Tensor.record_stream).
void record_use(const c10::DataPtr& pointer, c10::Stream stream);

bool is_pinned(const void* pointer);
// The same for pinned memory, which the host may free while a copy is enqueued.
void record_pinned_use(const void* pointer, c10::Stream stream);

// Change the size of a storage, and copy what fits, in the order of the current stream.
void resize_storage(const c10::Storage& storage, size_t size_bytes);

struct MemoryStatistics {
  size_t limit_bytes;
  size_t used_bytes;
  size_t peak_bytes;
};

// What a group's library allocates beside torch, in the memory that processes share by the file SIMGPU_MEMORY.
size_t take_group_memory(c10::DeviceIndex index);
void free_group_memory(c10::DeviceIndex index, size_t size_bytes);
void empty_cache(c10::DeviceIndex index);

MemoryStatistics memory_statistics(c10::DeviceIndex index);
int late_writes();  // number of blocks that were written to after they were freed
void limit_memory(c10::DeviceIndex index, size_t size_bytes);
void reset_peak_memory(c10::DeviceIndex index);

}  // namespace simgpu
