#include "communicator.h"

#include "device.h"
#include "streams.h"

#include <ATen/ops/cat.h>
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
constexpr int kOwnTag = 1 << 20;
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
  const at::ScalarType wide = at::isReducedFloatingType(dtype) ? at::kFloat : dtype == at::kBool ? at::kByte : dtype;
  const at::Tensor all = gathered(values.to(wide, false, true));
  switch (operation.op_) {
    case c10d::ReduceOp::SUM:
      return all.sum(0, false, wide);
    case c10d::ReduceOp::AVG:
      return all.sum(0, false, wide).div_(size_);
    case c10d::ReduceOp::PRODUCT:
      return all.prod(0, false, wide);
    case c10d::ReduceOp::MIN:
      return all.amin(0);
    case c10d::ReduceOp::MAX:
      return all.amax(0);
    default:
      TORCH_CHECK(false, "simccl: unsupported operation ", static_cast<int>(operation.op_));
  }
}

at::Tensor Communicator::gathered(const at::Tensor& values) {
  const int64_t count = values.numel();
  const std::vector<int64_t> parts(size_, count);
  std::vector<int64_t> sizes = values.sizes().vec();
  sizes.insert(sizes.begin(), size_);
  return exchanged(values.reshape({1, count}).expand({size_, count}).reshape({-1}), parts, parts).reshape(sizes);
}

at::Tensor Communicator::exchanged(const at::Tensor& values, const std::vector<int64_t>& sent,
                                   const std::vector<int64_t>& received) {
  const std::vector<at::Tensor> inputs = values.split_with_sizes(sent);
  std::vector<at::Tensor> outputs;
  for (const int64_t length : received) {
    outputs.push_back(at::empty({length}, values.options()));
  }
  outputs[rank_].copy_(inputs[rank_]);
  run([&] {
    Works works;
    for (int step = 1; step < size_; ++step) {
      const int to = (rank_ + step) % size_;
      const int from = (rank_ - step + size_) % size_;
      std::vector<at::Tensor> output = {outputs[from]};
      std::vector<at::Tensor> input = {inputs[to]};
      works.push_back(gloo_->recv(output, from, kOwnTag));
      works.push_back(gloo_->send(input, to, kOwnTag));
    }
    return works;
  });
  return at::cat(outputs);
}

void Communicator::broadcast(at::Tensor& values, int root) {
  std::vector<at::Tensor> tensors = {values};
  run([&] {
    Works works;
    for (int rank = 0; rank < size_; ++rank) {
      if (rank_ == root && rank != root) {
        works.push_back(gloo_->send(tensors, rank, kOwnTag));
      } else if (rank == rank_ && rank != root) {
        works.push_back(gloo_->recv(tensors, root, kOwnTag));
      }
    }
    return works;
  });
}

void Communicator::send(const at::Tensor& values, int rank, int tag) {
  std::vector<at::Tensor> tensors = {values};
  run([&] { return Works{gloo_->send(tensors, rank, tag)}; });
}

void Communicator::receive(at::Tensor& values, int rank, int tag) {
  std::vector<at::Tensor> tensors = {values};
  run([&] { return Works{gloo_->recv(tensors, rank, tag)}; });
}

void Communicator::abort() {
  is_aborted_ = true;
}

bool Communicator::is_aborted() const {
  return is_aborted_;
}

bool Communicator::has_lost_peer() const {
  return *has_lost_peer_ && setting("SIMGPU_REMOTE", 0) != 0;
}

// Gloo's work is waited for in a thread of its own, which an abort leaves behind. If a peer dies, Gloo reports an
// error; NCCL's kernels on the same host go on waiting, so this does, too.
void Communicator::run(const Start& start) {
  if (is_aborted_) {
    throw Aborted();
  }
  const auto success = std::make_shared<Recording>();
  const auto lose_peer = [has_lost_peer = has_lost_peer_] {
    count("collectives that lost a peer");
    *has_lost_peer = true;
  };
  try {
    std::thread([works = start(), success, lose_peer] {
      try {
        for (const auto& work : works) {
          work->wait(kNoLimit);
        }
        success->complete();
      } catch (const std::exception&) {
        lose_peer();
      }
    }).detach();
  } catch (const c10::Error&) {
    throw;  // torch's own, such as for a wrong argument
  } catch (const std::exception&) {
    lose_peer();  // the peer had ended before
  }
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
