#include "communicator.h"

#include "device.h"
#include "streams.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <thread>

namespace simgpu {
namespace {

using std::chrono::microseconds;

constexpr int64_t kTextBytes = 256;
constexpr microseconds kShortestPoll{20};
constexpr microseconds kLongestPoll{1000};
constexpr auto kNoLimit = std::chrono::hours(24);  // the watchdog ends what takes too long

std::string host_name() {
  char name[kTextBytes / 2] = {};
  gethostname(name, sizeof(name) - 1);
  return name;
}

}  // namespace

Communicator::Communicator(c10::intrusive_ptr<c10d::Backend> gloo, int rank, int size)
    : gloo_(std::move(gloo)), rank_(rank), size_(size) {}

Communicator::~Communicator() {
  if (is_aborted_ || is_stopping()) {
    gloo_.release();  // Gloo's destructor would wait for the operation that is stuck
  }
}

void Communicator::connect(c10::Device device) {
  const std::lock_guard<std::mutex> lock(connecting_);
  if (is_connected_) {
    return;
  }
  const std::vector<std::string> devices = exchange_texts(host_name() + "/" + std::to_string(device.index()));
  for (int rank = 0; rank < size_; ++rank) {
    for (int other = 0; other < rank; ++other) {
      TORCH_CHECK_WITH(DistBackendError, devices[rank] != devices[other], "simccl: Duplicate GPU detected : rank ",
                       other, " and rank ", rank, " both on device ", devices[rank]);
    }
  }
  is_connected_ = true;
}

void Communicator::compare_calls(const std::string& call) {
  const std::vector<std::string> calls = exchange_texts(call);
  for (int rank = 1; rank < size_; ++rank) {
    TORCH_CHECK_WITH(DistBackendError, calls[rank] == calls[0],
                     "simccl: ranks call different collectives: rank 0 calls ", calls[0], ", rank ", rank, " calls ",
                     calls[rank]);
  }
}

at::Tensor Communicator::reduced(const at::Tensor& values, const c10d::ReduceOp& operation) {
  const at::ScalarType dtype = values.scalar_type();
  const bool is_half = dtype == at::kHalf || dtype == at::kBFloat16;
  const bool is_average = operation == c10d::ReduceOp::AVG;
  std::vector<at::Tensor> tensors = {values.to(is_half              ? at::kFloat
                                               : dtype == at::kBool ? at::kByte
                                                                    : dtype,
                                               false, true)};
  c10d::AllreduceOptions options;
  options.reduceOp = is_average ? c10d::ReduceOp(c10d::ReduceOp::SUM) : operation;
  options.timeout = kNoLimit;
  run([&] { return gloo_->allreduce(tensors, options); });
  if (is_average) {
    tensors[0].div_(size_);
  }
  return tensors[0];
}

at::Tensor Communicator::gathered(const at::Tensor& values) {
  std::vector<int64_t> sizes = values.sizes().vec();
  sizes.insert(sizes.begin(), size_);
  const at::Tensor result = at::empty(sizes, values.options());
  std::vector<std::vector<at::Tensor>> outputs = {result.unbind()};
  std::vector<at::Tensor> inputs = {values};
  c10d::AllgatherOptions options;
  options.timeout = kNoLimit;
  run([&] { return gloo_->allgather(outputs, inputs, options); });
  return result;
}

at::Tensor Communicator::exchanged(const at::Tensor& bytes, std::vector<int64_t> sent, std::vector<int64_t> received) {
  int64_t total = 0;
  for (const int64_t part : received) {
    total += part;
  }
  at::Tensor input = bytes;
  at::Tensor output = at::empty({total}, bytes.options());
  c10d::AllToAllOptions options;
  options.timeout = kNoLimit;
  run([&] { return gloo_->alltoall_base(output, input, received, sent, options); });
  return output;
}

void Communicator::broadcast(at::Tensor& values, int root) {
  std::vector<at::Tensor> tensors = {values};
  c10d::BroadcastOptions options;
  options.rootRank = root;
  options.timeout = kNoLimit;
  run([&] { return gloo_->broadcast(tensors, options); });
}

void Communicator::send(const at::Tensor& values, int rank, int tag) {
  std::vector<at::Tensor> tensors = {values};
  run([&] { return gloo_->send(tensors, rank, tag); });
}

void Communicator::receive(at::Tensor& values, int rank, int tag) {
  std::vector<at::Tensor> tensors = {values};
  run([&] { return gloo_->recv(tensors, rank, tag); });
}

void Communicator::abort() {
  is_aborted_ = true;
}

bool Communicator::is_aborted() const {
  return is_aborted_;
}

// Gloo's work is waited for in a thread of its own, which an abort leaves behind. If a peer dies, Gloo reports an
// error; NCCL's kernels on the same host go on waiting, so this does, too.
void Communicator::run(const Start& start) {
  if (is_aborted_) {
    throw Aborted();
  }
  const auto success = std::make_shared<Recording>();
  const auto work = start();
  std::thread([work, success] {
    try {
      work->wait(kNoLimit);
      success->complete();
    } catch (const std::exception&) {
      count("collectives that lost a peer");
    }
  }).detach();
  microseconds interval = kShortestPoll;
  while (!success->is_complete()) {
    if (is_aborted_ || is_stopping()) {
      throw Aborted();
    }
    std::this_thread::sleep_for(interval);
    interval = std::min(interval * 2, kLongestPoll);
  }
}

std::vector<std::string> Communicator::exchange_texts(const std::string& text) {
  const at::Tensor own = at::zeros({kTextBytes}, at::kByte);
  std::memcpy(own.data_ptr(), text.data(), std::min<size_t>(text.size(), kTextBytes - 1));
  const at::Tensor all = gathered(own);
  std::vector<std::string> texts;
  for (int rank = 0; rank < size_; ++rank) {
    texts.emplace_back(static_cast<const char*>(all.data_ptr()) + rank * kTextBytes);
  }
  return texts;
}

}  // namespace simgpu
