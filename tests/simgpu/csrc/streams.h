// Streams are threads that run tasks in order. An event is a task that marks its time.
#pragma once

#include "device.h"

#include <c10/core/Stream.h>

#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

namespace simgpu {

enum class Kind { kControl, kOperation, kCopy, kCollective };

// One recording of an event. An event that is recorded again gets a new one, so that earlier waits keep their target.
class Recording {
 public:
  void complete();
  void wait();  // blocks the calling thread
  bool is_complete();
  std::chrono::steady_clock::time_point completed_at();

 private:
  std::mutex mutex_;
  std::condition_variable completed_;
  bool is_complete_ = false;
  std::chrono::steady_clock::time_point completed_at_;
};

using RecordingPtr = std::shared_ptr<Recording>;

// Streams that are created take turns at 32 per device, as in torch.cuda. Stream 0 is the default one.
c10::Stream default_stream(c10::DeviceIndex index);
c10::Stream new_stream(c10::DeviceIndex index);
c10::Stream current_stream(c10::DeviceIndex index);  // of the calling thread
void set_current_stream(c10::Stream stream);

// Run `work` on the stream, after a delay drawn for its kind. If it throws, the device fails.
void enqueue(c10::Stream stream, Kind kind, const std::string& name, std::function<void()> work);

// Run `work` on the stream, block the calling thread until it has finished, and rethrow its exception.
void run_and_wait(c10::Stream stream, Kind kind, const std::string& name, std::function<void()> work);

RecordingPtr record(c10::Stream stream);
void wait_on_stream(c10::Stream stream, RecordingPtr recording);

// While a test holds a stream, its queue takes any number of launches.
void add_holds(int number);

bool is_idle(c10::Stream stream);
int64_t enqueued_work(c10::Stream stream);  // the number of its operations, copies and collectives so far
void drain(c10::Stream stream);        // waits for the tasks enqueued before this call
void synchronize(c10::Stream stream);  // the same, and throws if the device has failed
void synchronize_device(c10::DeviceIndex index);

// Delay each task of a kind by a random time between half of and the whole given duration, drawn when it is enqueued.
void set_delays(uint64_t seed, int copy_us, int operation_us, int collective_us);

// At exit, threads park before their next task: they must not use objects that are being destroyed.
bool is_stopping();
void stop();

}  // namespace simgpu
