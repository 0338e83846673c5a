#include <Python.h>

#include "streams.h"

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <atomic>
#include <deque>
#include <exception>
#include <map>
#include <random>
#include <thread>
#include <vector>

namespace simgpu {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;

constexpr milliseconds kStopInterval{20};  // between checks for the process's exit while blocked
constexpr milliseconds kStopTimeout{1000};
constexpr int64_t kPoolSize = 32;
constexpr size_t kLaunchQueue = 1024;  // entries of a stream until a launch blocks, as in CUDA's driver

std::atomic<bool> stopping{false};
std::atomic<int> holds{0};

struct Task {
  std::string name;
  std::function<void()> work;
  Kind kind = Kind::kControl;
  microseconds delay{0};
};

class Queue {
 public:
  explicit Queue(c10::DeviceIndex device) : device_(device) {}

  void push(Task task) {
    if (PyGILState_Check() != 0) {
      count("enqueued while the GIL is held");
    }
    std::unique_lock<std::mutex> lock(mutex_);
    // The runtime frees memory without a launch, also in a stream's own thread.
    while (task.name.compare(0, 4, "free") != 0 && tasks_.size() >= kLaunchQueue && holds == 0 && !is_stopping()) {
      changed_.wait_for(lock, kStopInterval);
    }
    if (!is_started_) {
      std::thread([this] { run(); }).detach();
      is_started_ = true;
    }
    enqueued_work_ += task.kind != Kind::kControl;
    tasks_.push_back(std::move(task));
    ++enqueued_;
    changed_.notify_all();
  }

  bool is_idle() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return finished_ == enqueued_;
  }

  int64_t enqueued_work() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return enqueued_work_;
  }

  void synchronize() {
    std::unique_lock<std::mutex> lock(mutex_);
    const uint64_t target = enqueued_;
    while (finished_ < target && !is_stopping()) {
      changed_.wait_for(lock, kStopInterval);
    }
  }

  bool is_running() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return is_running_;
  }

 private:
  void run() {
    at::set_num_threads(1);  // a new thread would otherwise start a pool of its own
    set_current_device(device_);
    const c10::impl::ExcludeDispatchKeyGuard below_autograd(c10::autograd_dispatch_keyset_with_ADInplaceOrView);
    const at::NoGradGuard no_grad;
    while (true) {
      Task task = next();
      std::this_thread::sleep_for(task.delay);
      try {
        task.work();
      } catch (const std::exception& error) {
        fail(device_, task.name + " failed asynchronously: " + error.what());
      }
      task = Task();  // releases what the task holds before it counts as finished
      const std::lock_guard<std::mutex> lock(mutex_);
      is_running_ = false;
      ++finished_;
      changed_.notify_all();
    }
  }

  Task next() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return !tasks_.empty() && !is_stopping(); });
    Task task = std::move(tasks_.front());
    tasks_.pop_front();
    is_running_ = true;
    return task;
  }

  const c10::DeviceIndex device_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> tasks_;
  uint64_t enqueued_ = 0;
  uint64_t finished_ = 0;
  int64_t enqueued_work_ = 0;
  bool is_started_ = false;
  bool is_running_ = false;
};

class Queues {
 public:
  Queue& of(c10::Stream stream) {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto& queue = queues_[{stream.device_index(), stream.id()}];
    if (!queue) {
      queue = std::make_unique<Queue>(stream.device_index());
    }
    return *queue;
  }

  std::vector<Queue*> all(c10::DeviceIndex index = -1) {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::vector<Queue*> found;
    for (const auto& [key, queue] : queues_) {
      if (index < 0 || key.first == index) {
        found.push_back(queue.get());
      }
    }
    return found;
  }

 private:
  std::mutex mutex_;
  std::map<std::pair<c10::DeviceIndex, c10::StreamId>, std::unique_ptr<Queue>> queues_;
};

Queues& queues() {
  static auto* const instance = new Queues;  // never destroyed: threads use it until the process has exited
  return *instance;
}

class Delays {
 public:
  void set(uint64_t seed, int copy_us, int operation_us, int collective_us) {
    const std::lock_guard<std::mutex> lock(mutex_);
    random_.seed(seed);
    longest_ = {{Kind::kCopy, copy_us}, {Kind::kOperation, operation_us}, {Kind::kCollective, collective_us}};
  }

  microseconds draw(Kind kind) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = longest_.find(kind);
    if (found == longest_.end() || found->second == 0) {
      return microseconds(0);
    }
    return microseconds(std::uniform_int_distribution<int>(found->second / 2, found->second)(random_));
  }

 private:
  std::mutex mutex_;
  std::mt19937_64 random_;
  std::map<Kind, int> longest_;
};

Delays& delays() {
  static auto* const instance = new Delays;
  return *instance;
}

c10::Stream stream_of(c10::DeviceIndex index, c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kDeviceType, index), id);
}

thread_local std::map<c10::DeviceIndex, c10::StreamId> current_ids;

}  // namespace

void Recording::complete() {
  const std::lock_guard<std::mutex> lock(mutex_);
  completed_at_ = std::chrono::steady_clock::now();
  is_complete_ = true;
  completed_.notify_all();
}

void Recording::wait() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!is_complete_ && !is_stopping()) {
    completed_.wait_for(lock, kStopInterval);
  }
}

bool Recording::is_complete() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return is_complete_;
}

std::chrono::steady_clock::time_point Recording::completed_at() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return completed_at_;
}

c10::Stream default_stream(c10::DeviceIndex index) {
  return stream_of(index, 0);
}

c10::Stream new_stream(c10::DeviceIndex index) {
  static std::atomic<int64_t> created{0};
  touch(index);
  return stream_of(index, 1 + created++ % kPoolSize);
}

c10::Stream current_stream(c10::DeviceIndex index) {
  const auto found = current_ids.find(index);
  return stream_of(index, found == current_ids.end() ? 0 : found->second);
}

void set_current_stream(c10::Stream stream) {
  current_ids[stream.device_index()] = stream.id();
}

void enqueue(c10::Stream stream, Kind kind, const std::string& name, std::function<void()> work) {
  touch(stream.device_index());
  if (kind != Kind::kControl) {
    count("launched on stream " + std::to_string(stream.id()) + ": " + name);
  }
  queues().of(stream).push({name, std::move(work), kind, delays().draw(kind)});
}

void run_and_wait(c10::Stream stream, Kind kind, const std::string& name, std::function<void()> work) {
  std::exception_ptr error;
  enqueue(stream, kind, name, [&] {
    try {
      work();
    } catch (...) {
      error = std::current_exception();
    }
  });
  drain(stream);
  if (error) {
    std::rethrow_exception(error);
  }
  check_failure(stream.device_index());
}

RecordingPtr record(c10::Stream stream) {
  auto recording = std::make_shared<Recording>();
  enqueue(stream, Kind::kControl, "event", [recording] { recording->complete(); });
  return recording;
}

void wait_on_stream(c10::Stream stream, RecordingPtr recording) {
  enqueue(stream, Kind::kControl, "wait", [recording = std::move(recording)] { recording->wait(); });
}

void add_holds(int number) {
  holds += number;
}

bool is_idle(c10::Stream stream) {
  return queues().of(stream).is_idle();
}

int64_t enqueued_work(c10::Stream stream) {
  return queues().of(stream).enqueued_work();
}

void drain(c10::Stream stream) {
  queues().of(stream).synchronize();
}

void synchronize(c10::Stream stream) {
  drain(stream);
  check_failure(stream.device_index());
}

void synchronize_device(c10::DeviceIndex index) {
  for (Queue* queue : queues().all(index)) {
    queue->synchronize();
  }
  check_failure(index);
}

void set_delays(uint64_t seed, int copy_us, int operation_us, int collective_us) {
  delays().set(seed, copy_us, operation_us, collective_us);
}

bool is_stopping() {
  return stopping;
}

void stop() {
  stopping = true;
  if (is_forked_after_use()) {
    return;  // the threads are the parent's
  }
  const auto deadline = std::chrono::steady_clock::now() + kStopTimeout;
  for (Queue* queue : queues().all()) {
    while (queue->is_running() && std::chrono::steady_clock::now() < deadline) {
      std::this_thread::sleep_for(milliseconds(1));
    }
  }
}

}  // namespace simgpu
