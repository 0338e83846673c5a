#include "memory.h"

#include "streams.h"

#include <c10/util/Exception.h>

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <vector>

namespace simgpu {
namespace {

constexpr size_t kAlignment = 64;
constexpr c10::StreamId kFreeingStream = -1;  // frees memory that several streams have used
constexpr size_t kDefaultLimit = size_t{8} << 30;
constexpr size_t kGroupShare = 20;  // a group takes 5 %
constexpr size_t kQuarantine = size_t{64} << 20;  // freed memory that stays mapped, so that late readers see poison

size_t rounded(size_t size_bytes) {
  return std::max(kAlignment, (size_bytes + kAlignment - 1) / kAlignment * kAlignment);
}

// The devices' memory that is in use by all processes that have mapped the same file. What a process has freed stays its
// own until it empties its cache, or ends.
class SharedMemory {
 public:
  SharedMemory() {
    if (const char* path = std::getenv("SIMGPU_MEMORY")) {
      const int file = open(path, O_RDWR | O_CREAT, 0600);
      TORCH_CHECK(file >= 0 && ftruncate(file, sizeof(Process) * kMaxProcesses) == 0, "simgpu: cannot write ", path);
      void* mapped = mmap(nullptr, sizeof(Process) * kMaxProcesses, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
      TORCH_CHECK(mapped != MAP_FAILED, "simgpu: cannot map ", path);
      processes_ = static_cast<Process*>(mapped);
      close(file);
    }
  }

  // Let the process have so many bytes; false if the others leave fewer.
  bool hold(c10::DeviceIndex index, int64_t size_bytes, int64_t limit_bytes) {
    if (processes_ == nullptr) {
      return true;
    }
    int64_t others = 0;
    for (int number = 0; number < kMaxProcesses; ++number) {
      const Process& process = processes_[number];
      const pid_t pid = process.pid;
      others += pid != 0 && pid != getpid() && kill(pid, 0) == 0 ? process.held_bytes[index].load() : 0;
    }
    if (others + size_bytes > limit_bytes) {
      return false;
    }
    own().held_bytes[index] = size_bytes;
    return true;
  }

 private:
  struct Process {
    std::atomic<pid_t> pid;
    std::array<std::atomic<int64_t>, kMaxDevices> held_bytes;
  };
  static constexpr int kMaxProcesses = 64;

  Process& own() {
    for (int number = 0; own_ == nullptr; ++number) {
      TORCH_CHECK(number < kMaxProcesses, "simgpu: more than ", kMaxProcesses, " processes share its memory");
      pid_t none = 0;
      if (processes_[number].pid.compare_exchange_strong(none, getpid())) {
        own_ = &processes_[number];
      }
    }
    return *own_;
  }

  Process* processes_ = nullptr;
  Process* own_ = nullptr;
};

struct Block {
  void* data;
  size_t size_bytes;
  c10::Stream owner;  // the stream that was current at the allocation
  std::set<c10::StreamId> users;
};

// The memory of all devices.
class Heap {
 public:
  Heap() {
    statistics_.fill({kDefaultLimit, 0, 0});
  }

  Block* allocate(size_t size_bytes) {
    const c10::DeviceIndex index = current_device();
    touch(index);
    const size_t size = rounded(size_bytes);
    if (!reserve(index, size)) {
      synchronize_device(index);  // memory that is being freed becomes available, as in the caching allocator
      if (!reserve(index, size)) {
        const MemoryStatistics now = memory_statistics(index);
        TORCH_CHECK_WITH(OutOfMemoryError, false, "simgpu out of memory. Tried to allocate ", size, " bytes. GPU ",
                         static_cast<int>(index), " has a total capacity of ", now.limit_bytes, " bytes of which ",
                         now.limit_bytes - now.used_bytes, " bytes are free.");
      }
    }
    void* data = std::aligned_alloc(kAlignment, size);
    TORCH_CHECK(data != nullptr, "simgpu: the host has no ", size, " bytes of memory left");
    std::memset(data, kPoison, size);
    return new Block{data, size, current_stream(index), {}};
  }

  void record_use(Block* block, c10::Stream stream) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (stream.id() != block->owner.id()) {
      block->users.insert(stream.id());
    }
  }

  // Poison the memory when the stream that owns it, and those that were recorded, have finished what is enqueued now.
  void free(Block* block) {
    if (is_stopping() || is_forked_after_use()) {
      return;  // the process ends, or the memory is the parent's
    }
    if (block->users.empty()) {
      release(block);  // the owner could reuse it at once
      enqueue(block->owner, Kind::kControl, "free", [this, block] { poison(block); });
      return;
    }
    std::vector<RecordingPtr> uses = {record(block->owner)};
    for (const c10::StreamId id : block->users) {
      uses.push_back(record(c10::Stream(c10::Stream::UNSAFE, block->owner.device(), id)));
    }
    // Not on the owner's stream, which must not wait for others.
    enqueue(c10::Stream(c10::Stream::UNSAFE, block->owner.device(), kFreeingStream), Kind::kControl, "free",
            [this, block, uses = std::move(uses)] {
              for (const RecordingPtr& use : uses) {
                use->wait();
              }
              release(block);
              poison(block);
            });
  }

  int late_writes() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return late_writes_ + static_cast<int>(std::count_if(quarantine_.begin(), quarantine_.end(), &was_written));
  }

  MemoryStatistics statistics(c10::DeviceIndex index) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return statistics_.at(index);
  }

  void set_limit(c10::DeviceIndex index, size_t size_bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    statistics_.at(index).limit_bytes = size_bytes;
  }

  size_t take_for_group(c10::DeviceIndex index) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const size_t size_bytes = statistics_.at(index).limit_bytes / kGroupShare;
    TORCH_CHECK_WITH(DistBackendError, hold(index, held_.at(index) + size_bytes),
                     "NCCL error in: simgpu, unhandled cuda error (run with NCCL_DEBUG=INFO for details)\n"
                     "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nFailed to CUDA calloc ",
                     size_bytes, " bytes");
    group_bytes_.at(index) += size_bytes;
    return size_bytes;
  }

  void free_of_group(c10::DeviceIndex index, size_t size_bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    group_bytes_.at(index) -= size_bytes;
    hold(index, held_.at(index) - size_bytes);
  }

  void empty_cache(c10::DeviceIndex index) {
    const std::lock_guard<std::mutex> lock(mutex_);
    hold(index, statistics_.at(index).used_bytes + group_bytes_.at(index));
  }

  void reset_peak(c10::DeviceIndex index) {
    const std::lock_guard<std::mutex> lock(mutex_);
    statistics_.at(index).peak_bytes = statistics_.at(index).used_bytes;
  }

 private:
  bool reserve(c10::DeviceIndex index, size_t size_bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    MemoryStatistics& now = statistics_.at(index);
    const size_t needed_bytes = now.used_bytes + size_bytes + group_bytes_.at(index);
    if (now.used_bytes + size_bytes > now.limit_bytes || !hold(index, std::max(needed_bytes, held_.at(index)))) {
      return false;
    }
    now.used_bytes += size_bytes;
    now.peak_bytes = std::max(now.peak_bytes, now.used_bytes);
    return true;
  }

  bool hold(c10::DeviceIndex index, size_t size_bytes) {
    const bool is_free = shared_.hold(index, size_bytes, statistics_.at(index).limit_bytes);
    held_.at(index) = is_free ? size_bytes : held_.at(index);
    return is_free;
  }

  void release(Block* block) {
    const std::lock_guard<std::mutex> lock(mutex_);
    statistics_.at(block->owner.device_index()).used_bytes -= block->size_bytes;
  }

  void poison(Block* block) {
    std::memset(block->data, kPoison, block->size_bytes);
    const std::lock_guard<std::mutex> lock(mutex_);
    quarantine_.push_back(block);
    quarantined_bytes_ += block->size_bytes;
    while (quarantined_bytes_ > kQuarantine) {
      Block* oldest = quarantine_.front();
      quarantine_.pop_front();
      quarantined_bytes_ -= oldest->size_bytes;
      late_writes_ += was_written(oldest);
      std::free(oldest->data);
      delete oldest;
    }
  }

  static bool was_written(const Block* block) {
    // Equal to its successor, each byte is the first; std::any_of, compiled without optimization, is far slower.
    const auto* bytes = static_cast<const unsigned char*>(block->data);
    return bytes[0] != kPoison || std::memcmp(bytes, bytes + 1, block->size_bytes - 1) != 0;
  }

  std::mutex mutex_;
  std::array<MemoryStatistics, kMaxDevices> statistics_;
  std::array<size_t, kMaxDevices> group_bytes_{};
  std::array<size_t, kMaxDevices> held_{};  // with what is freed but kept
  SharedMemory shared_;
  std::deque<Block*> quarantine_;
  size_t quarantined_bytes_ = 0;
  int late_writes_ = 0;  // to blocks that are unmapped
};

Heap& heap() {
  static auto* const instance = new Heap;
  return *instance;
}

void free_block(void* block) {
  heap().free(static_cast<Block*>(block));
}

class DeviceAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t size_bytes) override {
    const c10::Device device(kDeviceType, current_device());
    if (size_bytes == 0) {
      return {nullptr, device};
    }
    Block* block = heap().allocate(size_bytes);
    return {block->data, block, &free_block, device};
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return nullptr;  // an address alone does not identify a block
  }

  void copy_data(void* destination, const void* source, std::size_t size_bytes) const override {
    synchronize_device(current_device());
    std::memcpy(destination, source, size_bytes);
  }
};

DeviceAllocator the_device_allocator;
REGISTER_ALLOCATOR(kDeviceType, &the_device_allocator);

struct PinnedBlock {
  size_t size_bytes;
  std::map<std::pair<c10::DeviceIndex, c10::StreamId>, c10::Stream> users;
};

class PinnedHeap {
 public:
  void* allocate(size_t size_bytes) {
    const size_t size = rounded(size_bytes);
    void* data = std::aligned_alloc(kAlignment, size);
    TORCH_CHECK(data != nullptr, "simgpu: the host has no ", size, " bytes of memory left");
    const std::lock_guard<std::mutex> lock(mutex_);
    blocks_[data] = {size, {}};
    return data;
  }

  bool contains(const void* pointer) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return find(pointer) != blocks_.end();
  }

  void record_use(const void* pointer, c10::Stream stream) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = find(pointer);
    if (found != blocks_.end()) {
      found->second.users.emplace(std::make_pair(stream.device_index(), stream.id()), stream);
    }
  }

  void free(void* data) {
    if (is_stopping() || is_forked_after_use()) {
      return;
    }
    PinnedBlock block;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      block = blocks_.at(data);
      blocks_.erase(data);
    }
    const std::shared_ptr<void> last_use(data, [](void* memory) { std::free(memory); });
    for (const auto& [key, stream] : block.users) {
      enqueue(stream, Kind::kControl, "free pinned memory", [last_use] {});
    }
  }

 private:
  std::map<const void*, PinnedBlock>::iterator find(const void* pointer) {
    auto next = blocks_.upper_bound(pointer);
    if (next == blocks_.begin()) {
      return blocks_.end();
    }
    --next;
    const auto* end = static_cast<const char*>(next->first) + next->second.size_bytes;
    return static_cast<const char*>(pointer) < end ? next : blocks_.end();
  }

  std::mutex mutex_;
  std::map<const void*, PinnedBlock> blocks_;
};

PinnedHeap& pinned_heap() {
  static auto* const instance = new PinnedHeap;
  return *instance;
}

void free_pinned(void* data) {
  pinned_heap().free(data);
}

class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t size_bytes) override {
    void* data = pinned_heap().allocate(size_bytes);
    return {data, data, &free_pinned, c10::Device(c10::DeviceType::CPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return &free_pinned;
  }

  void copy_data(void* destination, const void* source, std::size_t size_bytes) const override {
    std::memcpy(destination, source, size_bytes);
  }
};

PinnedAllocator the_pinned_allocator;

}  // namespace

c10::Allocator* device_allocator() {
  return &the_device_allocator;
}

c10::Allocator* pinned_allocator() {
  return &the_pinned_allocator;
}

void record_use(const c10::DataPtr& pointer, c10::Stream stream) {
  if (pointer.get_deleter() == &free_block) {
    heap().record_use(static_cast<Block*>(pointer.get_context()), stream);
  }
}

bool is_pinned(const void* pointer) {
  return pinned_heap().contains(pointer);
}

void record_pinned_use(const void* pointer, c10::Stream stream) {
  pinned_heap().record_use(pointer, stream);
}

void resize_storage(const c10::Storage& storage, size_t size_bytes) {
  const c10::DeviceIndex index = storage.device().index();
  const c10::DeviceIndex previous = current_device();
  set_current_device(index);
  c10::DataPtr resized = device_allocator()->allocate(size_bytes);
  set_current_device(previous);
  const size_t kept_bytes = std::min(size_bytes, storage.nbytes());
  if (kept_bytes > 0) {
    void* to = resized.get();
    const void* from = storage.data();
    enqueue(current_stream(index), Kind::kOperation, "resize",
            [to, from, kept_bytes] { std::memcpy(to, from, kept_bytes); });
  }
  auto* changed = storage.unsafeGetStorageImpl();
  changed->set_data_ptr_noswap(std::move(resized));
  changed->set_nbytes(size_bytes);
}

MemoryStatistics memory_statistics(c10::DeviceIndex index) {
  return heap().statistics(index);
}

int late_writes() {
  return heap().late_writes();
}

void limit_memory(c10::DeviceIndex index, size_t size_bytes) {
  heap().set_limit(index, size_bytes);
}

size_t take_group_memory(c10::DeviceIndex index) {
  return heap().take_for_group(index);
}

void free_group_memory(c10::DeviceIndex index, size_t size_bytes) {
  heap().free_of_group(index, size_bytes);
}

void empty_cache(c10::DeviceIndex index) {
  heap().empty_cache(index);
}

void reset_peak_memory(c10::DeviceIndex index) {
  heap().reset_peak(index);
}

}  // namespace simgpu
