#include "device.h"

#include <c10/util/Exception.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <mutex>

namespace simgpu {
namespace {

struct Failure {
  std::string message;
  bool is_reported = false;
};

struct Records {
  std::mutex mutex;
  std::set<int> contexts;
  std::map<std::string, int64_t> counts;
  std::vector<int64_t> event_waits;
  std::array<Failure, kMaxDevices> failures;
};

// Never destroyed: streams' threads outlive static objects at exit.
Records& records() {
  static auto* const instance = new Records;
  return *instance;
}

std::atomic<int> available_devices{2};
std::atomic<bool> float64_is_supported{true};
std::atomic<pid_t> user{0};  // the process that used a device first
thread_local c10::DeviceIndex current = 0;

}  // namespace

void set_device_count(int count) {
  TORCH_CHECK(count >= 1 && count <= kMaxDevices, "simgpu: ", count, " devices: expected 1 to ", kMaxDevices);
  available_devices = count;
}

void set_float64(bool is_supported) {
  float64_is_supported = is_supported;
}

bool has_float64() noexcept {
  return float64_is_supported;
}

c10::DeviceIndex device_count() noexcept {
  return static_cast<c10::DeviceIndex>(available_devices.load());
}

c10::DeviceIndex current_device() noexcept {
  return current;
}

void set_current_device(c10::DeviceIndex index) noexcept {
  current = index;
}

c10::Device resolve(c10::Device device) {
  const c10::DeviceIndex index = device.index() < 0 ? current : device.index();
  TORCH_CHECK(index < device_count(), "simgpu error: invalid device ordinal ", static_cast<int>(index));
  return {kDeviceType, index};
}

void touch(c10::DeviceIndex index) {
  TORCH_CHECK(!is_forked_after_use(), "Cannot re-initialize simgpu in forked subprocess");
  pid_t expected = 0;
  user.compare_exchange_strong(expected, getpid());
  const std::lock_guard<std::mutex> lock(records().mutex);
  records().contexts.insert(index);
}

bool has_context(c10::DeviceIndex index) {
  const std::lock_guard<std::mutex> lock(records().mutex);
  return records().contexts.count(index) > 0;
}

std::set<int> contexts() {
  const std::lock_guard<std::mutex> lock(records().mutex);
  return records().contexts;
}

bool is_forked_after_use() {
  const pid_t first = user.load();
  return first != 0 && first != getpid();
}

int setting(const char* name, int otherwise) {
  const char* value = std::getenv(name);
  return value == nullptr ? otherwise : std::atoi(value);
}

void count(const std::string& what) {
  const std::lock_guard<std::mutex> lock(records().mutex);
  ++records().counts[what];
}

std::map<std::string, int64_t> counts() {
  const std::lock_guard<std::mutex> lock(records().mutex);
  return records().counts;
}

void reset_counts() {
  const std::lock_guard<std::mutex> lock(records().mutex);
  records().counts.clear();
  records().event_waits.clear();
}

void note_event_wait(int64_t work_behind) {
  const std::lock_guard<std::mutex> lock(records().mutex);
  records().event_waits.push_back(work_behind);
}

std::vector<int64_t> event_waits() {
  const std::lock_guard<std::mutex> lock(records().mutex);
  return records().event_waits;
}

void fail(c10::DeviceIndex index, const std::string& message) {
  count("failed operations");
  const std::lock_guard<std::mutex> lock(records().mutex);
  Failure& failure = records().failures.at(index);
  if (failure.message.empty()) {  // later failures are consequences
    failure.message = message;
  }
}

void check_failure(c10::DeviceIndex index) {
  std::string message;
  {
    const std::lock_guard<std::mutex> lock(records().mutex);
    Failure& failure = records().failures.at(index);
    message = failure.message;
    failure.is_reported = !message.empty();
  }
  TORCH_CHECK(message.empty(), "simgpu error on device ", static_cast<int>(index), ": ", message);
}

std::string unreported_failure() {
  const std::lock_guard<std::mutex> lock(records().mutex);
  for (const Failure& failure : records().failures) {
    if (!failure.message.empty() && !failure.is_reported) {
      return failure.message;
    }
  }
  return {};
}

}  // namespace simgpu
