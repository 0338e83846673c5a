// What torch asks of a device's runtime: the current device and stream, events, and waiting.
#include "device.h"
#include "memory.h"
#include "streams.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>

namespace simgpu {
namespace {

struct Event {
  RecordingPtr recording;
  bool has_timing;
  c10::Stream stream;
  int64_t work_before = 0;
};

RecordingPtr recording_of(void* event) {
  return event == nullptr ? nullptr : static_cast<Event*>(event)->recording;
}

// CUDA switches to the event's device and back, and switching back creates a context on the thread's current device.
void note_other_device(c10::DeviceIndex index) {
  if (current_device() != index) {
    touch(current_device());
    count("events used by a thread on another device");
  }
}

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override {
    return kDeviceType;
  }

  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device previous = getDevice();
    set_current_device(device.index());
    return previous;
  }

  c10::Device getDevice() const override {
    return {kDeviceType, current_device()};
  }

  void setDevice(c10::Device device) const override {
    const c10::DeviceIndex index = resolve(device).index();
    if (index != current_device()) {
      touch(index);
    }
    set_current_device(index);
  }

  void uncheckedSetDevice(c10::Device device) const noexcept override {
    set_current_device(device.index());
  }

  c10::DeviceIndex deviceCount() const noexcept override {
    return device_count();
  }

  c10::Stream getStream(c10::Device device) const override {
    return current_stream(resolve(device).index());
  }

  c10::Stream getDefaultStream(c10::Device device) const override {
    return default_stream(resolve(device).index());
  }

  c10::Stream getStreamFromGlobalPool(c10::Device device, bool /*isHighPriority*/) const override {
    return new_stream(resolve(device).index());
  }

  c10::Stream getNewStream(c10::Device device, int /*priority*/) const override {
    return new_stream(resolve(device).index());
  }

  c10::Stream exchangeStream(c10::Stream stream) const override {
    const c10::Stream previous = current_stream(stream.device_index());
    set_current_stream(stream);
    return previous;
  }

  bool queryStream(const c10::Stream& stream) const override {
    const bool result = is_idle(stream);
    check_failure(stream.device_index());
    return result;
  }

  void synchronizeStream(const c10::Stream& stream) const override {
    count("host wait: stream");
    synchronize(stream);
  }

  void synchronizeDevice(const c10::DeviceIndex index) const override {
    count("host wait: device");
    touch(index);
    synchronize_device(index);
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex /*device_index*/,
              const c10::EventFlag flag) const override {
    note_other_device(stream.device_index());
    if (*event == nullptr) {
      *event = new Event{nullptr, flag == c10::EventFlag::BACKEND_DEFAULT, stream};
    }
    auto* const recorded = static_cast<Event*>(*event);
    recorded->recording = simgpu::record(stream);
    recorded->stream = stream;
    recorded->work_before = enqueued_work(stream);
  }

  void block(void* event, const c10::Stream& stream) const override {
    if (const RecordingPtr recording = recording_of(event)) {
      note_other_device(stream.device_index());
      wait_on_stream(stream, recording);
    }
  }

  bool queryEvent(void* event) const override {
    const RecordingPtr recording = recording_of(event);
    return recording == nullptr || recording->is_complete();
  }

  void synchronizeEvent(void* event) const override {
    count("host wait: event");
    if (const RecordingPtr recording = recording_of(event)) {
      const auto* const awaited = static_cast<Event*>(event);
      note_event_wait(enqueued_work(awaited->stream) - awaited->work_before);
      recording->wait();
      check_failure(current_device());
    }
  }

  void destroyEvent(void* event, const c10::DeviceIndex device_index) const noexcept override {
    if (event != nullptr) {
      if (!is_forked_after_use() && !is_stopping()) {
        note_other_device(device_index);
      }
      delete static_cast<Event*>(event);
    }
  }

  double elapsedTime(void* start, void* end, const c10::DeviceIndex /*device_index*/) const override {
    const auto* first = static_cast<Event*>(start);
    const auto* second = static_cast<Event*>(end);
    TORCH_CHECK(first->has_timing && second->has_timing, "simgpu error: both events need enable_timing=True");
    TORCH_CHECK(queryEvent(start) && queryEvent(end), "simgpu error: device not ready: an event is not complete");
    const auto duration = second->recording->completed_at() - first->recording->completed_at();
    return std::chrono::duration<double, std::milli>(duration).count();
  }

  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& stream) const override {
    record_use(pointer, stream);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

}  // namespace
}  // namespace simgpu
