#include "generator.h"

#include "device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/empty.h>

#include <cstring>
#include <vector>

namespace simgpu {
namespace {

constexpr uint64_t kOdd = 0x9E3779B97F4A7C15;  // 2**64 divided by the golden ratio: spreads consecutive offsets

struct State {
  uint64_t seed = c10::default_rng_seed_val;
  uint64_t offset = 0;
};

class Generator final : public c10::GeneratorImpl {
 public:
  explicit Generator(c10::DeviceIndex index)
      : c10::GeneratorImpl(c10::Device(kDeviceType, index), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}

  void set_current_seed(uint64_t seed) override {
    state_ = {seed, 0};
  }

  void set_offset(uint64_t offset) override {
    state_.offset = offset;
  }

  uint64_t get_offset() const override {
    return state_.offset;
  }

  uint64_t current_seed() const override {
    return state_.seed;
  }

  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return state_.seed;
  }

  void set_state(const c10::TensorImpl& bytes) override {
    TORCH_CHECK(bytes.numel() == sizeof(State), "simgpu: RNG state has ", bytes.numel(), " bytes, not ", sizeof(State));
    std::memcpy(&state_, bytes.data(), sizeof(State));
  }

  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    const at::Tensor bytes = at::empty({sizeof(State)}, at::TensorOptions().dtype(at::kByte).device(at::kCPU));
    std::memcpy(bytes.data_ptr(), &state_, sizeof(State));
    return bytes.getIntrusivePtr();
  }

  uint64_t next_seed() {
    return state_.seed ^ (kOdd * ++state_.offset);
  }

 private:
  Generator* clone_impl() const override {
    auto* copy = new Generator(device_.index());
    copy->state_ = state_;
    return copy;
  }

  State state_;
};

}  // namespace

at::Generator new_generator(c10::DeviceIndex index) {
  return at::make_generator<Generator>(resolve({kDeviceType, index}).index());
}

const at::Generator& default_generator(c10::DeviceIndex index) {
  static const auto* const generators = [] {
    auto* created = new std::vector<at::Generator>;
    for (int device = 0; device < kMaxDevices; ++device) {
      created->push_back(at::make_generator<Generator>(static_cast<c10::DeviceIndex>(device)));
    }
    return created;
  }();
  return generators->at(resolve({kDeviceType, index}).index());
}

at::Generator next_host_generator(const at::Generator& generator) {
  TORCH_CHECK(generator.device().type() == kDeviceType, "Expected a '", c10::Device(kDeviceType),
              "' device type for generator but found '", generator.device(), "'");
  auto* const source = static_cast<Generator*>(generator.unsafeGetGeneratorImpl());
  const std::lock_guard<std::mutex> lock(source->mutex_);
  return at::detail::createCPUGenerator(source->next_seed());
}

}  // namespace simgpu
