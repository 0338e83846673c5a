// The fallback for all operations without a kernel here. Where meta kernels give the shapes of the outputs, and a GPU
// would not wait for the data either, the operation is enqueued; otherwise the host waits for it.
#include "operators.h"

#include "device.h"
#include "generator.h"
#include "memory.h"
#include "streams.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/stack.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <torch/library.h>

#include <optional>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace simgpu {
namespace {

using c10::IValue;

// On a GPU, too, the host waits for the data of these.
const std::unordered_set<std::string> kDataDependent = {"aten::nonzero",
                                                        "aten::masked_select",
                                                        "aten::equal",
                                                        "aten::_unique",
                                                        "aten::_unique2",
                                                        "aten::bincount",
                                                        "aten::unique_consecutive",
                                                        "aten::unique_dim",
                                                        "aten::repeat_interleave",
                                                        "aten::is_nonzero",
                                                        "aten::index",
                                                        "aten::index_put_",
                                                        "aten::_index_put_impl_",
                                                        "aten::histc"};
// Device tensors may be indexed by host tensors, which are copied.
const std::unordered_set<std::string> kIndexing = {"aten::index", "aten::index_put_", "aten::_index_put_impl_"};

// Computed in float for half precision, as on a GPU: CPU kernels accumulate products differently between versions of
// torch, and those of 2.8 do not update float16 parameters.
const std::unordered_set<std::string> kWidened = {
    "aten::mm",  "aten::addmm",       "aten::bmm",          "aten::baddbmm",       "aten::addmv",          "aten::mv",
    "aten::dot", "aten::_fused_sgd_", "aten::_fused_adam_", "aten::_fused_adamw_", "aten::_fused_adagrad_"};

// Apply a function to each defined tensor in a value.
template <typename Function>
IValue map_tensors(const IValue& value, const Function& function) {
  if (value.isTensor()) {
    return value.toTensor().defined() ? IValue(function(value.toTensor())) : value;
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> mapped;
    for (const at::Tensor& tensor : value.toTensorVector()) {
      mapped.push_back(tensor.defined() ? function(tensor) : tensor);
    }
    return mapped;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> mapped;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
      mapped.push_back(tensor && tensor->defined() ? std::optional<at::Tensor>(function(*tensor)) : tensor);
    }
    return mapped;
  }
  return value;
}

template <typename Function>
void for_each_tensor(const std::vector<IValue>& values, const Function& function) {
  for (const IValue& value : values) {
    map_tensors(value, [&](const at::Tensor& tensor) {
      function(tensor);
      return tensor;
    });
  }
}

at::Tensor meta_like(const at::Tensor& tensor) {
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta).pinned_memory(false));
}

// A Python number does not widen the dtype of a result, unlike a tensor without dimensions.
void keep_wrapped_number(const at::Tensor& from, const at::Tensor& to) {
  if (from.unsafeGetTensorImpl()->is_wrapped_number()) {
    to.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
}

// The value of a host scalar now: the caller may change it before the operation runs.
at::Tensor scalar_now(const at::Tensor& tensor) {
  at::Tensor copy = tensor.clone();
  keep_wrapped_number(tensor, copy);
  return copy;
}

// The arguments of a call with its tensors replaced, each always by the same one.
class Translation {
 public:
  Translation(c10::DeviceType target, std::function<at::Tensor(const at::Tensor&)> of_device_tensor)
      : target_(target), of_device_tensor_(std::move(of_device_tensor)) {}

  std::vector<IValue> operator()(const std::vector<IValue>& arguments) {
    std::vector<IValue> translated;
    for (const IValue& argument : arguments) {
      if (argument.isDevice() && argument.toDevice().type() == kDeviceType) {
        translated.emplace_back(c10::Device(target_));
      } else {
        translated.push_back(map_tensors(argument, [this](const at::Tensor& tensor) { return of(tensor); }));
      }
    }
    return translated;
  }

  at::Tensor of(const at::Tensor& tensor) {
    at::Tensor& known = known_[tensor.unsafeGetTensorImpl()];
    if (!known.defined()) {
      known = is_on_device(tensor) ? of_device_tensor_(tensor) : scalar_now(tensor);
    }
    return known;
  }

 private:
  c10::DeviceType target_;
  std::function<at::Tensor(const at::Tensor&)> of_device_tensor_;
  std::unordered_map<at::TensorImpl*, at::Tensor> known_;
};

std::vector<IValue> call(const c10::OperatorHandle& op, const std::vector<IValue>& arguments) {
  torch::jit::Stack stack(arguments.begin(), arguments.end());
  op.callBoxed(stack);
  return stack;
}

void assign(const at::Tensor& from, const at::Tensor& to) {
  if (to.defined()) {
    if (to.sizes() != from.sizes()) {
      to.resize_(from.sizes());
    }
    to.copy_(from);
  }
}

void assign(const IValue& from, const IValue& to) {
  if (to.isTensor()) {
    assign(from.toTensor(), to.toTensor());
    return;
  }
  const std::vector<at::Tensor> sources = from.toTensorVector();
  const std::vector<at::Tensor> targets = to.toTensorVector();
  for (size_t i = 0; i < targets.size(); ++i) {
    assign(sources[i], targets[i]);
  }
}

std::vector<IValue> call_widened(const c10::OperatorHandle& op, const std::vector<IValue>& arguments) {
  std::vector<IValue> widened;
  for (const IValue& argument : arguments) {
    widened.push_back(map_tensors(
        argument, [](const at::Tensor& tensor) { return is_half(tensor) ? tensor.to(at::kFloat) : tensor; }));
  }
  std::vector<IValue> results = call(op, widened);
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto* alias = op.schema().arguments()[i].alias_info();
    if (alias != nullptr && alias->isWrite()) {
      assign(widened[i], arguments[i]);
    }
  }
  return results;
}

bool has_half(const std::vector<IValue>& arguments) {
  bool found = false;
  for_each_tensor(arguments, [&](const at::Tensor& tensor) { found = found || is_half(tensor); });
  return found;
}

// CPU kernels lack some combinations of half and full precision that a GPU's have.
std::vector<IValue> compute(const c10::OperatorHandle& op, const std::vector<IValue>& arguments) {
  if (kWidened.count(op.schema().name()) == 0) {
    try {
      return call(op, arguments);
    } catch (const c10::Error&) {
      if (!has_half(arguments)) {
        throw;
      }
    }
  }
  return call_widened(op, arguments);
}

// One call of an operation that has no kernel for the device.
class Call {
 public:
  Call(const c10::OperatorHandle& op, std::vector<IValue> arguments)
      : op_(op),
        schema_(op.schema()),
        name_(schema_.name()),
        arguments_(std::move(arguments)),
        device_(find_device()) {}

  c10::Device device() const {
    return device_;
  }

  std::vector<IValue> run() {
    move_indices();
    check_devices();
    use_host_generator();
    check_failure(device_.index());
    std::vector<IValue> results;
    return plan(results) ? (enqueue_for(results), results) : run_at_once();
  }

 private:
  c10::Device find_device() const {
    std::optional<c10::Device> found;
    for_each_tensor(arguments_, [&](const at::Tensor& tensor) {
      if (!found && is_on_device(tensor)) {
        found = tensor.device();
      }
    });
    for (const IValue& argument : arguments_) {
      if (!found && argument.isDevice() && argument.toDevice().type() == kDeviceType) {
        found = argument.toDevice();
      }
    }
    return resolve(found.value_or(c10::Device(kDeviceType, -1)));
  }

  void move_indices() {
    if (kIndexing.count(name_) > 0) {
      for (IValue& argument : arguments_) {
        if (argument.isOptionalTensorList() || argument.isTensorList()) {
          argument = map_tensors(
              argument, [this](const at::Tensor& index) { return index.is_cpu() ? index.to(device_) : index; });
        }
      }
    }
  }

  void check_devices() const {
    for_each_tensor(arguments_, [this](const at::Tensor& tensor) {
      const bool is_host_scalar = tensor.is_cpu() && tensor.dim() == 0;
      TORCH_CHECK(tensor.device() == device_ || is_host_scalar,
                  "Expected all tensors to be on the same device, but found at least two devices, ", device_, " and ",
                  tensor.device(), "! (when checking arguments of ", name_, ")");
      TORCH_CHECK(tensor.layout() == at::kStrided, "simgpu does not simulate ", tensor.layout(), " tensors (", name_,
                  ")");
    });
  }

  void use_host_generator() {
    for (size_t i = 0; i < arguments_.size(); ++i) {
      const auto& type = *schema_.arguments()[i].type();
      if (type.isSubtypeOf(*c10::getTypePtr<std::optional<at::Generator>>())) {
        const bool is_given = arguments_[i].isGenerator();
        arguments_[i] =
            next_host_generator(is_given ? arguments_[i].toGenerator() : default_generator(device_.index()));
      }
    }
  }

  bool is_written(size_t argument) const {
    const auto* alias = schema_.arguments()[argument].alias_info();
    return alias != nullptr && alias->isWrite();
  }

  bool is_output(size_t argument) const {
    return is_written(argument) && schema_.arguments()[argument].kwarg_only();
  }

  // The results that are arguments, and empty values for those that are new.
  std::vector<IValue> returned_arguments() const {
    std::vector<IValue> results;
    for (const c10::Argument& result : schema_.returns()) {
      const auto* alias = result.alias_info();
      TORCH_CHECK(alias == nullptr || alias->isWrite(), "simgpu does not simulate ", name_, ", which returns a view");
      IValue returned;
      for (size_t i = 0; alias != nullptr && i < arguments_.size(); ++i) {
        if (is_written(i) && *schema_.arguments()[i].alias_info() == *alias) {
          returned = arguments_[i];
        }
      }
      results.push_back(returned);
    }
    return results;
  }

  // Whether the results can be made before the operation runs; makes them.
  bool plan(std::vector<IValue>& results) {
    if (kDataDependent.count(name_) > 0 && !is_plain_indexing()) {
      return false;
    }
    results = returned_arguments();
    Translation to_meta(c10::DeviceType::Meta, meta_like);
    std::vector<IValue> shapes;
    try {
      const c10::impl::ExcludeDispatchKeyGuard below_autograd(c10::autograd_dispatch_keyset_with_ADInplaceOrView);
      shapes = call(op_, to_meta(arguments_));
    } catch (const c10::NotImplementedError&) {
      return has_no_outputs();  // no meta kernel, and none needed for what only changes its arguments
    } catch (...) {
      return false;  // the operation itself gives the better error
    }
    for (size_t i = 0; i < results.size(); ++i) {
      if (results[i].isNone() && !make_result(shapes[i], results[i])) {
        return false;
      }
    }
    resize_outputs(to_meta);
    return true;
  }

  // Indexing by integers, and writing one value; other masks are data-dependent.
  bool is_plain_indexing() const {
    if (kIndexing.count(name_) == 0) {
      return false;
    }
    if (name_ != "aten::index" && arguments_[2].toTensor().numel() == 1) {
      return true;
    }
    bool is_plain = true;
    map_tensors(arguments_[1], [&](const at::Tensor& index) {
      is_plain = is_plain && index.scalar_type() != at::kBool && index.scalar_type() != at::kByte;
      return index;
    });
    return is_plain;
  }

  bool has_no_outputs() const {
    for (const c10::Argument& result : schema_.returns()) {
      if (result.alias_info() == nullptr) {
        return false;
      }
    }
    for (size_t i = 0; i < arguments_.size(); ++i) {
      if (is_output(i)) {
        return false;
      }
    }
    return true;
  }

  bool make_result(const IValue& shape, IValue& result) const {
    if (!shape.isTensor() && !shape.isTensorList()) {
      return false;
    }
    bool is_meta = true;
    result = map_tensors(shape, [&](const at::Tensor& tensor) {
      is_meta = is_meta && tensor.is_meta();
      return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(device_));
    });
    return is_meta;
  }

  void resize_outputs(Translation& to_meta) const {
    for (size_t i = 0; i < arguments_.size(); ++i) {
      if (is_output(i)) {
        map_tensors(arguments_[i], [&](const at::Tensor& output) {
          const at::Tensor shape = to_meta.of(output);
          if (shape.sizes() != output.sizes()) {
            output.resize_(shape.sizes()).as_strided_(shape.sizes(), shape.strides());
          }
          return output;
        });
      }
    }
  }

  void enqueue_for(const std::vector<IValue>& results) {
    const std::vector<IValue> arguments = host_arguments();
    std::vector<std::pair<size_t, IValue>> returned;
    for (size_t i = 0; i < results.size(); ++i) {
      if (schema_.returns()[i].alias_info() == nullptr) {
        returned.emplace_back(i, map_tensors(results[i], host_alias));
      }
    }
    std::vector<std::pair<size_t, IValue>> outputs;
    for (size_t i = 0; i < arguments_.size(); ++i) {
      if (is_output(i)) {
        outputs.emplace_back(i, map_tensors(arguments_[i], host_alias));
      }
    }
    count("operations enqueued");
    enqueue(current_stream(device_.index()), Kind::kOperation, name_, [op = op_, arguments, returned, outputs] {
      const std::vector<IValue> results = compute(op, arguments);
      for (const auto& [i, target] : returned) {
        assign(results[i], target);
      }
      for (const auto& [i, target] : outputs) {
        assign(arguments[i], target);
      }
    });
  }

  // Aliases, but new tensors for outputs: kernels may resize those.
  std::vector<IValue> host_arguments() const {
    Translation to_host(c10::DeviceType::CPU, host_alias);
    std::vector<IValue> arguments = to_host(arguments_);
    for (size_t i = 0; i < arguments.size(); ++i) {
      if (is_output(i)) {
        arguments[i] =
            map_tensors(arguments[i], [](const at::Tensor& output) { return at::empty({0}, output.options()); });
      }
    }
    return arguments;
  }

  std::vector<IValue> run_at_once() {
    const bool is_data_dependent = kDataDependent.count(name_) > 0;
    count(is_data_dependent ? "host wait: data-dependent operation" : "operations run at once");
    if (!is_data_dependent) {
      count("run at once: " + name_);
    }
    std::vector<IValue> results = returned_arguments();
    const std::vector<IValue> arguments = host_arguments();
    std::vector<IValue> found;
    run_and_wait(current_stream(device_.index()), Kind::kOperation, name_, [&] { found = compute(op_, arguments); });
    for (size_t i = 0; i < arguments.size(); ++i) {
      if (is_output(i)) {
        fill_output(arguments[i], arguments_[i]);
      }
    }
    for (size_t i = 0; i < results.size(); ++i) {
      if (results[i].isNone()) {
        results[i] = map_tensors(found[i], [this](const at::Tensor& tensor) { return from_host(tensor); });
      }
    }
    return results;
  }

  void fill_output(const IValue& found, const IValue& output) const {
    if (output.isTensor()) {
      output.toTensor().resize_(found.toTensor().sizes());
      write(found.toTensor(), output.toTensor());
      return;
    }
    const std::vector<at::Tensor> outputs = output.toTensorVector();
    for (size_t i = 0; i < outputs.size(); ++i) {
      outputs[i].resize_(found.toTensorVector()[i].sizes());
      write(found.toTensorVector()[i], outputs[i]);
    }
  }

  at::Tensor from_host(const at::Tensor& tensor) const {
    if (!tensor.is_cpu()) {
      return tensor;
    }
    const at::Tensor result = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(device_));
    write(tensor, result);
    return result;
  }

  void write(const at::Tensor& from, const at::Tensor& to) const {
    run_and_wait(current_stream(device_.index()), Kind::kControl, name_, [&] { host_alias(to).copy_(from); });
  }

  const c10::OperatorHandle op_;
  const c10::FunctionSchema& schema_;
  const std::string name_;
  std::vector<IValue> arguments_;
  const c10::Device device_;
};

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  TORCH_CHECK_NOT_IMPLEMENTED(op.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU), "simgpu does not simulate ",
                              op.schema().name(), ", which has no kernel for CPUs");
  const size_t arity = op.schema().arguments().size();
  const auto arguments = torch::jit::last(*stack, arity);
  Call call(op, std::vector<IValue>(arguments.begin(), arguments.end()));
  const c10::DeviceGuard guard(call.device());
  std::vector<IValue> results = call.run();
  torch::jit::drop(*stack, arity);
  for (IValue& result : results) {
    torch::jit::push(*stack, std::move(result));
  }
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

// torch 2.8 has no fallback for autograd, which collectives need.
[[maybe_unused]] const torch::Library* const autograd_fallback = []() -> torch::Library* {
  constexpr auto kKey = c10::DispatchKey::AutogradPrivateUse1;
  if (c10::Dispatcher::singleton().hasBackendFallbackForDispatchKey(kKey)) {
    return nullptr;
  }
  auto* const library = new torch::Library(torch::Library::IMPL, "_", kKey, __FILE__, __LINE__);
  library->fallback(torch::CppFunction::makeFallthrough());
  return library;
}();

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  // torch's own kernel for all devices would look for the nonzero elements of a mask twice.
  library.impl("index.Tensor", torch::CppFunction::makeFromBoxedFunction<&fallback>());
  // One launch each, as on a GPU; torch's own kernels for all devices would launch one for each tensor.
  for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
    if (name.name.rfind("aten::_foreach_", 0) == 0) {
      const std::string overload = name.overload_name.empty() ? "" : "." + name.overload_name;
      library.impl((name.name + overload).c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>());
    }
  }
}

}  // namespace

bool is_on_device(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kDeviceType;
}

bool is_half(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kHalf || tensor.scalar_type() == at::kBFloat16;
}

at::Tensor host_alias(const at::Tensor& tensor) {
  void* const data = const_cast<void*>(tensor.const_data_ptr());
  const auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU);
  const at::Tensor alias = at::from_blob(data, tensor.sizes(), tensor.strides(), [](void*) {}, options);
  keep_wrapped_number(tensor, alias);
  return alias;
}

void launch(const at::Tensor& tensor, const std::string& name, std::function<void()> work) {
  check_failure(tensor.device().index());
  count("operations enqueued");
  enqueue(current_stream(tensor.device().index()), Kind::kOperation, name, std::move(work));
}

}  // namespace simgpu
