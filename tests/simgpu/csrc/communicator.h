// The ranks of a group, connected by Gloo. Its calls run on the group's stream, and return at once after `abort`. All of
// them send and receive: torch's flight recorder keeps Gloo's collectives, but only the group's own belong there.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

namespace simgpu {

class Aborted : public std::runtime_error {
 public:
  Aborted() : std::runtime_error("simccl: the communicator was aborted") {}
};

class Communicator {
 public:
  Communicator(c10::intrusive_ptr<c10d::Backend> gloo, int rank, int size);
  ~Communicator();

  // Meet the other ranks, at the first collective. Refuses two ranks on one device, as NCCL does.
  void connect(c10::Device device);

  // Throw on each rank, with two of the calls, unless all ranks make the same one.
  void compare_calls(const std::string& call);

  // On contiguous host tensors, which these replace or fill.
  at::Tensor reduced(const at::Tensor& values, const c10d::ReduceOp& operation);
  at::Tensor gathered(const at::Tensor& values);  // [ranks, ...]
  at::Tensor exchanged(const at::Tensor& values, const std::vector<int64_t>& sent,
                       const std::vector<int64_t>& received);  // with numbers of elements, by rank
  void broadcast(at::Tensor& values, int root);
  void send(const at::Tensor& values, int rank, int tag);
  void receive(at::Tensor& values, int rank, int tag);

  // Let all calls, and later ones, throw `Aborted`. Peers that wait for this rank go on waiting.
  void abort();
  bool is_aborted() const;
  bool has_lost_peer() const;  // which only NCCL's network threads notice, so not for a peer on this host

 private:
  using Works = std::vector<c10::intrusive_ptr<c10d::Work>>;
  using Start = std::function<Works()>;
  void run(const Start& start);
  std::vector<std::string> exchange_texts(const std::string& text);

  c10::intrusive_ptr<c10d::Backend> gloo_;
  const int rank_;
  const int size_;
  std::mutex connecting_;
  bool is_connected_ = false;
  std::atomic<bool> is_aborted_{false};
  const std::shared_ptr<std::atomic<bool>> has_lost_peer_ = std::make_shared<std::atomic<bool>>(false);
};

}  // namespace simgpu
