// The c10d backend "simccl": collectives on a stream of the group, with the semantics of ProcessGroupNCCL.
#pragma once

#include "communicator.h"
#include "device.h"
#include "streams.h"

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

namespace simgpu {

using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// What a collective's stream, its Work, and the watchdog share.
struct Outcome {
  std::string call;
  std::chrono::steady_clock::time_point enqueued_at;
  RecordingPtr end;
  uint64_t completion_key;

  std::mutex mutex;
  std::exception_ptr error;
  Tensors kept;  // until the work is waited for, or has finished: other streams may free them before

  void set_error(std::exception_ptr value);
  std::exception_ptr get_error();
  void release_tensors();
};

// Who wants to know which collectives have completed. torch's flight recorder does, as of nccl2.
class CompletionHooks {
 public:
  using Hook = std::function<void(uint64_t completion_key)>;

  void set(int64_t id, Hook hook) {
    const std::lock_guard<std::mutex> lock(mutex_);
    hooks_[id] = std::move(hook);
  }

  void remove(int64_t id) {
    const std::lock_guard<std::mutex> lock(mutex_);
    hooks_.erase(id);
  }

  void call(uint64_t completion_key);

 private:
  std::mutex mutex_;  // of its own: the recorder is removed with the GIL held
  std::map<int64_t, Hook> hooks_;
};

// Reports collectives that have completed, and fails those that take longer than the timeout from their call.
// TORCH_NCCL_ASYNC_ERROR_HANDLING decides what follows, as with NCCL: 0 nothing, 2 an abort, else the process ends.
// The same if a peer on another host is lost.
class Watchdog {
 public:
  Watchdog(std::shared_ptr<Communicator> communicator, std::shared_ptr<CompletionHooks> hooks, int rank,
           std::chrono::milliseconds timeout);
  ~Watchdog();

  void watch(std::shared_ptr<Outcome> outcome);

 private:
  void run();
  void check(const std::vector<std::shared_ptr<Outcome>>& outcomes);
  void check_peers();
  void handle(const std::string& message);

  const std::shared_ptr<Communicator> communicator_;
  const std::shared_ptr<CompletionHooks> hooks_;
  const int rank_;
  const std::chrono::milliseconds timeout_;
  const int handling_;
  std::mutex mutex_;
  std::condition_variable stopped_;
  bool is_stopped_ = false;
  bool has_reported_peer_ = false;
  std::deque<std::shared_ptr<Outcome>> outcomes_;
  std::thread thread_;
};

class Group final : public c10d::Backend {
 public:
  Group(c10::intrusive_ptr<c10d::Backend> gloo, int rank, int size, std::chrono::milliseconds timeout);

  const std::string getBackendName() const override {
    return "simccl";
  }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override;
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override;
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override;
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override;
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& options) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
                        std::vector<int64_t>& input_sizes, const c10d::AllToAllOptions& options) override;
  WorkPtr send(Tensors& tensors, int rank, int tag) override;
  WorkPtr recv(Tensors& tensors, int rank, int tag) override;
  WorkPtr barrier(const c10d::BarrierOptions& options) override;

  void setSequenceNumberForGroup() override {}

  uint64_t getSequenceNumberForGroup() override {
    return sequence_number_;
  }

#ifdef C10D_BACKEND_HAS_HOOKS  // torch 2.15
  bool supportsCompletionHooks() const override {
    return true;
  }

  void registerCompletionHook(int64_t id, c10d::CompletionHook hook) override {
    hooks_->set(id, [hook = std::move(hook)](uint64_t completion_key) { hook({completion_key, std::nullopt}); });
  }

  void unregisterCompletionHook(int64_t id) override {
    hooks_->remove(id);
  }
#endif

  bool supportsCoalescing() const override {
    return true;
  }

  void startCoalescing() override;
  WorkPtr endCoalescing() override;  // the last of the works, as the stream is in order; none if there is no work

  void shutdown() override;  // after all that is enqueued
  void abort() override;     // also if a collective is stuck

 private:
  using Body = std::function<void(Communicator&)>;
  WorkPtr launch(c10d::OpType type, const std::string& detail, const Tensors& inputs, const Tensors& outputs,
                 Body body);
  c10::Device bind(const Tensors& inputs, const Tensors& outputs);
  void close(const std::string& reason);

  std::shared_ptr<Communicator> communicator_;
  std::shared_ptr<CompletionHooks> hooks_ = std::make_shared<CompletionHooks>();
  std::unique_ptr<Watchdog> watchdog_;
  const std::chrono::milliseconds timeout_;

  std::mutex mutex_;  // calls of several threads reach the stream in one order
  std::string closed_;
  std::optional<c10::Device> device_;
  std::optional<c10::Stream> stream_;
  size_t own_bytes_ = 0;
  bool is_coalescing_ = false;
  WorkPtr last_work_;  // of those that are coalesced
  uint64_t sequence_number_ = 0;
  std::deque<std::shared_ptr<Outcome>> outstanding_;
};

}  // namespace simgpu
