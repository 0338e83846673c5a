#include "collectives.h"

#include "memory.h"
#include "operators.h"

#include <ATen/core/ivalue.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>

namespace simgpu {
namespace {

using c10d::OpType;
using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr int kWatchMs = 20;  // NCCL's take 100 ms, nccl2's 1 s
constexpr int kDefaultHandling = 3;

// The elements in the order of memory: collectives know no shapes.
at::Tensor flat(const at::Tensor& tensor) {
  return host_alias(tensor).as_strided({tensor.numel()}, {1});
}

at::Tensor bytes(const at::Tensor& tensor) {
  return flat(tensor).view(at::kByte);
}

std::vector<at::Tensor> flat(const Tensors& tensors) {
  std::vector<at::Tensor> aliases;
  for (const at::Tensor& tensor : tensors) {
    aliases.push_back(flat(tensor));
  }
  return aliases;
}

std::vector<at::Tensor> bytes(const Tensors& tensors) {
  std::vector<at::Tensor> aliases;
  for (const at::Tensor& tensor : tensors) {
    aliases.push_back(bytes(tensor));
  }
  return aliases;
}

std::vector<int64_t> lengths(const std::vector<at::Tensor>& tensors) {
  std::vector<int64_t> result;
  for (const at::Tensor& tensor : tensors) {
    result.push_back(tensor.numel());
  }
  return result;
}

void fill(const std::vector<at::Tensor>& targets, const at::Tensor& values) {
  int64_t start = 0;
  for (const at::Tensor& target : targets) {
    target.copy_(values.narrow(0, start, target.numel()));
    start += target.numel();
  }
}

std::string described(const at::Tensor& tensor) {
  return std::to_string(tensor.numel()) + " elements of " + c10::toString(tensor.scalar_type());
}

std::string described(const c10d::ReduceOp& operation) {
  return " with operation " + std::to_string(static_cast<int>(operation.op_));
}

std::vector<at::Tensor> parts(const at::Tensor& tensor, const std::vector<int64_t>& sizes, int ranks) {
  if (tensor.numel() == 0) {
    return std::vector<at::Tensor>(ranks, tensor.flatten());
  }
  if (sizes.empty()) {
    TORCH_CHECK(tensor.size(0) % ranks == 0, "simccl: ", tensor.size(0), " rows do not divide into ", ranks, " parts");
    return tensor.split(tensor.size(0) / ranks);
  }
  return tensor.split_with_sizes(sizes);
}

class CollectiveWork final : public c10d::Work {
 public:
  CollectiveWork(int rank, OpType type, c10::Device device, std::shared_ptr<Outcome> outcome, Tensors outputs,
                 c10::intrusive_ptr<c10::ivalue::Future> future)
      : c10d::Work(rank, type),
        device_(device),
        outcome_(std::move(outcome)),
        outputs_(std::move(outputs)),
        future_(std::move(future)) {}

  bool isCompleted() override {
    return outcome_->end->is_complete() || outcome_->get_error() != nullptr;
  }

  bool isSuccess() const override {
    return outcome_->get_error() == nullptr;
  }

  std::exception_ptr exception() const override {
    return outcome_->get_error();
  }

  void synchronize() override {
    wait_on_stream(current_stream(device_.index()), outcome_->end);
    outcome_->release_tensors();
  }

  // Orders the current stream after the collective; the host waits for barriers only.
  bool wait(milliseconds /*timeout*/) override {
    synchronize();
    if (retrieveOpType() == OpType::BARRIER) {
      count("host wait: barrier");
      simgpu::synchronize(current_stream(device_.index()));
    }
    if (const std::exception_ptr error = outcome_->get_error()) {
      std::rethrow_exception(error);
    }
    return true;
  }

#ifdef C10D_BACKEND_HAS_HOOKS
  uint64_t getCompletionKey() const override {
    return outcome_->completion_key;
  }
#endif

  void abort() override {
    TORCH_CHECK(false, "simccl: abort the group instead of a work");
  }

  Tensors result() override {
    return outputs_;
  }

  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    return future_;
  }

 private:
  const c10::Device device_;
  const std::shared_ptr<Outcome> outcome_;
  const Tensors outputs_;
  const c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// Completed at once for the host; those who wait for it order their streams.
c10::intrusive_ptr<c10::ivalue::Future> future_on(c10::Stream stream, const Tensors& outputs) {
  const c10::StreamGuard guard(stream);
  auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                         std::vector<c10::Device>{stream.device()});
  future->markCompleted(c10::IValue(outputs));
  return future;
}

}  // namespace

void Outcome::set_error(std::exception_ptr value) {
  const std::lock_guard<std::mutex> lock(mutex);
  if (error == nullptr) {
    error = value;
  }
}

std::exception_ptr Outcome::get_error() {
  const std::lock_guard<std::mutex> lock(mutex);
  return error;
}

void Outcome::release_tensors() {
  Tensors released;
  const std::lock_guard<std::mutex> lock(mutex);
  released.swap(kept);
}

void CompletionHooks::call(uint64_t completion_key) {
  std::map<int64_t, Hook> hooks;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    hooks = hooks_;  // a hook may wait for a thread that removes it
  }
  for (const auto& [id, hook] : hooks) {
    hook(completion_key);
  }
}

Watchdog::Watchdog(std::shared_ptr<Communicator> communicator, std::shared_ptr<CompletionHooks> hooks, int rank,
                   milliseconds timeout)
    : communicator_(std::move(communicator)),
      hooks_(std::move(hooks)),
      rank_(rank),
      timeout_(timeout),
      handling_(setting("TORCH_NCCL_ASYNC_ERROR_HANDLING", kDefaultHandling)),
      thread_([this] { run(); }) {}

Watchdog::~Watchdog() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    is_stopped_ = true;
  }
  stopped_.notify_all();
  thread_.join();
}

void Watchdog::watch(std::shared_ptr<Outcome> outcome) {
  const std::lock_guard<std::mutex> lock(mutex_);
  outcomes_.push_back(std::move(outcome));
}

void Watchdog::run() {
  const milliseconds interval(setting("SIMGPU_WATCH_MS", kWatchMs));
  while (true) {
    std::vector<std::shared_ptr<Outcome>> completed, late;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      if (stopped_.wait_for(lock, interval, [this] { return is_stopped_; })) {
        return;
      }
      while (!outcomes_.empty() && outcomes_.front()->end->is_complete()) {
        completed.push_back(std::move(outcomes_.front()));
        outcomes_.pop_front();
      }
      for (const auto& outcome : outcomes_) {
        if (steady_clock::now() - outcome->enqueued_at > timeout_ && outcome->get_error() == nullptr) {
          late.push_back(outcome);
        }
      }
    }
    for (const auto& outcome : completed) {
      if (outcome->get_error() == nullptr) {
        hooks_->call(outcome->completion_key);
      }
    }
    check(late);
    check_peers();
  }
}

void Watchdog::check(const std::vector<std::shared_ptr<Outcome>>& late) {
  for (const auto& outcome : late) {
    const std::string message = "[Rank " + std::to_string(rank_) +
                                "] Watchdog caught collective operation timeout: " + outcome->call +
                                " ran longer than " + std::to_string(timeout_.count()) + " ms";
    outcome->set_error(std::make_exception_ptr(c10::DistBackendError({__func__, __FILE__, __LINE__}, message)));
    handle(message);
  }
}

void Watchdog::check_peers() {
  if (communicator_->is_aborted() || !communicator_->has_lost_peer()) {
    return;
  }
  const std::string message =
      "[Rank " + std::to_string(rank_) + "] NCCL error: remote process exited or there was a network error";
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& outcome : outcomes_) {
      outcome->set_error(std::make_exception_ptr(c10::DistBackendError({__func__, __FILE__, __LINE__}, message)));
    }
  }
  if (!has_reported_peer_) {
    has_reported_peer_ = true;
    handle(message);
  }
}

void Watchdog::handle(const std::string& message) {
  if (handling_ == 0) {
    return;
  }
  std::fprintf(stderr, "%s\n", message.c_str());
  if (handling_ != 2) {
    std::fprintf(stderr, "[Rank %d] To avoid data inconsistency, the process is taken down.\n", rank_);
    std::abort();
  }
  communicator_->abort();
}

Group::Group(c10::intrusive_ptr<c10d::Backend> gloo, int rank, int size, milliseconds timeout)
    : c10d::Backend(rank, size),
      communicator_(std::make_shared<Communicator>(std::move(gloo), rank, size)),
      watchdog_(std::make_unique<Watchdog>(communicator_, hooks_, rank, timeout)),
      timeout_(timeout) {}

c10::Device Group::bind(const Tensors& inputs, const Tensors& outputs) {
  for (const Tensors* tensors : {&inputs, &outputs}) {
    for (const at::Tensor& tensor : *tensors) {
      TORCH_CHECK(tensor.device().type() == kDeviceType, "simccl: expected a tensor on simgpu, but it is on ",
                  tensor.device());
      if (!device_.has_value()) {
        device_ = tensor.device();
      }
      TORCH_CHECK(tensor.device() == *device_, "simccl: the group uses ", *device_, ", but a tensor is on ",
                  tensor.device());
      TORCH_CHECK(tensor.is_non_overlapping_and_dense(), "simccl: Tensors must be contiguous");
    }
  }
  return *device_;
}

WorkPtr Group::launch(OpType type, const std::string& detail, const Tensors& inputs, const Tensors& outputs,
                      Body body) {
  const std::lock_guard<std::mutex> lock(mutex_);
  TORCH_CHECK_WITH(DistBackendError, closed_.empty(), "simccl: ", closed_);
  const c10::Device device = bind(inputs, outputs);
  const c10::DeviceGuard guard(device);
  check_failure(device.index());
  touch(device.index());
  try {
    communicator_->connect(device);
  } catch (const Aborted& aborted) {
    TORCH_CHECK_WITH(DistBackendError, false, aborted.what());
  }
  if (own_bytes_ == 0) {
    own_bytes_ = take_group_memory(device.index());
  }
  if (!stream_.has_value()) {
    stream_ = new_stream(device.index());
  }
  while (!outstanding_.empty() && outstanding_.front()->end->is_complete()) {
    outstanding_.front()->release_tensors();
    outstanding_.pop_front();
  }

  count("collectives");
  const std::string call = c10d::opTypeToString(type) + " " + std::to_string(sequence_number_++) + " of " + detail;
  static std::atomic<uint64_t> next_completion_key{0};
  auto outcome = std::make_shared<Outcome>();
  outcome->call = call;
  outcome->completion_key = next_completion_key++;
  outcome->enqueued_at = steady_clock::now();
  outcome->kept = inputs;
  outcome->kept.insert(outcome->kept.end(), outputs.begin(), outputs.end());

  const bool is_compared = !c10d::isP2POp(type);
  wait_on_stream(*stream_, record(current_stream(device.index())));
  enqueue(*stream_, Kind::kCollective, call,
          [communicator = communicator_, outcome, call, is_compared, body = std::move(body)] {
            try {
              if (is_compared) {
                communicator->compare_calls(call);
              }
              body(*communicator);
            } catch (const Aborted&) {
              outcome->set_error(std::current_exception());  // the stream goes on, with incomplete outputs
            } catch (...) {
              outcome->set_error(std::current_exception());
              throw;
            }
          });
  outcome->end = record(*stream_);
  outstanding_.push_back(outcome);
  watchdog_->watch(outcome);
  WorkPtr work =
      c10::make_intrusive<CollectiveWork>(getRank(), type, device, outcome, outputs, future_on(*stream_, outputs));
  if (is_coalescing_) {
    last_work_ = work;
  }
  return work;
}

void Group::startCoalescing() {
  const std::lock_guard<std::mutex> lock(mutex_);
  is_coalescing_ = true;
}

WorkPtr Group::endCoalescing() {
  const std::lock_guard<std::mutex> lock(mutex_);
  is_coalescing_ = false;
  return std::move(last_work_);
}

WorkPtr Group::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  const std::string detail = described(tensors.at(0)) + described(options.reduceOp);
  return launch(OpType::ALLREDUCE, detail, tensors, tensors,
                [aliases = flat(tensors), operation = options.reduceOp](Communicator& communicator) {
                  for (const at::Tensor& alias : aliases) {
                    alias.copy_(communicator.reduced(alias, operation));
                  }
                });
}

WorkPtr Group::allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  return allreduce(tensors, options);
}

WorkPtr Group::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  const std::string detail = described(tensors.at(0)) + " from rank " + std::to_string(options.rootRank);
  return launch(OpType::BROADCAST, detail, tensors, tensors,
                [alias = bytes(tensors[0]), root = static_cast<int>(options.rootRank)](Communicator& communicator) {
                  at::Tensor staged = alias.clone();
                  communicator.broadcast(staged, root);
                  alias.copy_(staged);
                });
}

WorkPtr Group::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  const std::string detail =
      described(tensors.at(0)) + described(options.reduceOp) + " to rank " + std::to_string(options.rootRank);
  return launch(OpType::REDUCE, detail, tensors, tensors,
                [alias = flat(tensors[0]), operation = options.reduceOp,
                 is_root = options.rootRank == getRank()](Communicator& communicator) {
                  const at::Tensor total = communicator.reduced(alias, operation);
                  if (is_root) {
                    alias.copy_(total);
                  }
                });
}

WorkPtr Group::allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& /*options*/) {
  return launch(OpType::ALLGATHER, described(inputs.at(0)), inputs, outputs.at(0),
                [to = bytes(outputs[0]), from = bytes(inputs[0])](Communicator& communicator) {
                  fill(to, communicator.gathered(from.clone()).flatten());
                });
}

WorkPtr Group::_allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& /*options*/) {
  TORCH_CHECK(output.numel() == input.numel() * getSize(), "simccl: the output has ", output.numel(), " elements, not ",
              input.numel(), " for each of ", getSize(), " ranks");
  return launch(OpType::_ALLGATHER_BASE, described(input), {input}, {output},
                [to = bytes(output), from = bytes(input)](Communicator& communicator) {
                  to.copy_(communicator.gathered(from.clone()).flatten());
                });
}

WorkPtr Group::gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) {
  const Tensors own = outputs.empty() ? Tensors() : outputs[0];
  const std::string detail = described(inputs.at(0)) + " to rank " + std::to_string(options.rootRank);
  return launch(OpType::GATHER, detail, inputs, own,
                [to = bytes(own), from = bytes(inputs[0])](Communicator& communicator) {
                  fill(to, communicator.gathered(from.clone()).flatten());
                });
}

WorkPtr Group::scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) {
  const Tensors own = inputs.empty() ? Tensors() : inputs[0];
  const int root = static_cast<int>(options.rootRank);
  const std::string detail = described(outputs.at(0)) + " from rank " + std::to_string(root);
  return launch(OpType::SCATTER, detail, own, outputs,
                [to = bytes(outputs[0]), from = bytes(own), root, rank = getRank(),
                 size = getSize()](Communicator& communicator) {
                  at::Tensor all = from.empty() ? at::empty({size * to.numel()}, at::kByte) : at::cat(from);
                  communicator.broadcast(all, root);
                  to.copy_(all.narrow(0, rank * to.numel(), to.numel()));
                });
}

WorkPtr Group::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                              const c10d::ReduceScatterOptions& options) {
  return launch(OpType::REDUCE_SCATTER, described(outputs.at(0)) + described(options.reduceOp), inputs.at(0), outputs,
                [to = flat(outputs[0]), from = flat(inputs[0]), operation = options.reduceOp,
                 rank = getRank()](Communicator& communicator) {
                  const at::Tensor total = communicator.reduced(at::cat(from), operation);
                  to.copy_(total.narrow(0, rank * to.numel(), to.numel()));
                });
}

WorkPtr Group::_reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) {
  return launch(OpType::_REDUCE_SCATTER_BASE, described(output) + described(options.reduceOp), {input}, {output},
                [to = flat(output), from = flat(input), operation = options.reduceOp,
                 rank = getRank()](Communicator& communicator) {
                  const at::Tensor total = communicator.reduced(from, operation);
                  to.copy_(total.narrow(0, rank * to.numel(), to.numel()));
                });
}

WorkPtr Group::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& /*options*/) {
  return launch(OpType::ALLTOALL, c10::toString(inputs.at(0).scalar_type()), inputs, outputs,
                [to = bytes(outputs), from = bytes(inputs)](Communicator& communicator) {
                  fill(to, communicator.exchanged(at::cat(from), lengths(from), lengths(to)));
                });
}

WorkPtr Group::alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
                             std::vector<int64_t>& input_sizes, const c10d::AllToAllOptions& options) {
  Tensors outputs = parts(output, output_sizes, getSize());
  Tensors inputs = parts(input, input_sizes, getSize());
  return alltoall(outputs, inputs, options);
}

WorkPtr Group::send(Tensors& tensors, int rank, int tag) {
  return launch(OpType::SEND, described(tensors.at(0)), tensors, {},
                [alias = bytes(tensors[0]), rank, tag](Communicator& communicator) {
                  communicator.send(alias.clone(), rank, tag);
                });
}

WorkPtr Group::recv(Tensors& tensors, int rank, int tag) {
  return launch(OpType::RECV, described(tensors.at(0)), {}, tensors,
                [alias = bytes(tensors[0]), rank, tag](Communicator& communicator) {
                  at::Tensor staged = alias.clone();
                  communicator.receive(staged, rank, tag);
                  alias.copy_(staged);
                });
}

WorkPtr Group::barrier(const c10d::BarrierOptions& options) {
  const c10::Device device = options.device.value_or(
      options.device_ids.empty()
          ? device_.value_or(getBoundDeviceId().value_or(c10::Device(kDeviceType, current_device())))
          : c10::Device(kDeviceType, static_cast<c10::DeviceIndex>(options.device_ids[0])));
  const at::Tensor token = at::ones({1}, at::TensorOptions().device(device));
  return launch(OpType::BARRIER, "all ranks", {token}, {}, [alias = flat(token)](Communicator& communicator) {
    communicator.reduced(alias, c10d::ReduceOp::SUM);
  });
}

void Group::shutdown() {
  if (stream_.has_value() && !communicator_->is_aborted()) {
    drain(*stream_);  // an error of the device is not the group's
  }
  close("the group was shut down");
}

void Group::abort() {
  communicator_->abort();  // first: a call that waits for a peer holds the lock
  std::this_thread::sleep_for(milliseconds(setting("SIMGPU_ABORT_MS", 0)));
  if (device_.has_value() && setting("SIMGPU_POISON", -1) == setting("LOCAL_RANK", 0)) {
    fail(device_->index(), "an illegal memory access was encountered");
  }
  close("the group was aborted");
}

void Group::close(const std::string& reason) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (closed_.empty()) {
    closed_ = reason;
    count(reason == "the group was aborted" ? "groups aborted" : "groups shut down");
    if (own_bytes_ > 0) {
      free_group_memory(device_->index(), own_bytes_);
    }
  }
  watchdog_.reset();
}

}  // namespace simgpu
