// The devices of this process: which one is current, which ones were touched, and what happened on them.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

namespace simgpu {

constexpr c10::DeviceType kDeviceType = c10::DeviceType::PrivateUse1;
constexpr int kMaxDevices = 16;

void set_device_count(int count);
c10::DeviceIndex device_count() noexcept;

// The calling thread's current device. A new thread starts with device 0, as with CUDA.
c10::DeviceIndex current_device() noexcept;
void set_current_device(c10::DeviceIndex index) noexcept;

// Whether the devices have float64, unlike Apple's; tensors of that dtype are refused otherwise.
void set_float64(bool is_supported);
bool has_float64() noexcept;

// `device` with its index, or the current device if the index is missing.
c10::Device resolve(c10::Device device);

// Note that this process has a context on the device, as the CUDA driver creates one at first use. Refuses the device
// in a forked child of a process that has used a device: the threads of its streams were not forked.
void touch(c10::DeviceIndex index);
bool has_context(c10::DeviceIndex index);
std::set<int> contexts();
bool is_forked_after_use();

// A setting of the process from its environment, for programs that a test starts.
int setting(const char* name, int otherwise);

// Tallies of events that tests ask for, by description.
void count(const std::string& what);
std::map<std::string, int64_t> counts();
void reset_counts();

// For each wait of the host for an event since the last reset: how much work was enqueued behind the event.
void note_event_wait(int64_t work_behind);
std::vector<int64_t> event_waits();

// An operation failed on a stream, after its call had returned. As after an error in a CUDA kernel, the device is
// unusable from then on: `check_failure` throws at each later synchronization and launch.
void fail(c10::DeviceIndex index, const std::string& message);
void check_failure(c10::DeviceIndex index);
std::string unreported_failure();

}  // namespace simgpu
