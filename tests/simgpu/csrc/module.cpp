// What Python calls.
#include "collectives.h"
#include "device.h"
#include "generator.h"
#include "hooks.h"
#include "memory.h"
#include "streams.h"

#include <pybind11/chrono.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/Event.h>
#include <torch/csrc/Generator.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdlib>

namespace simgpu {
namespace {

// Blocks a stream until it is released, so that tests decide which of two streams is first.
class Hold {
 public:
  explicit Hold(const c10::Stream& stream) {
    add_holds(1);
    wait_on_stream(stream, released_);
  }

  void release() {
    add_holds(-1);
    released_->complete();
  }

 private:
  RecordingPtr released_ = std::make_shared<Recording>();
};

}  // namespace
}  // namespace simgpu

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using namespace simgpu;
  namespace py = pybind11;
  register_hooks();
  std::atexit(&stop);

  module.def("set_device_count", &set_device_count);
  module.def("device_count", [] { return static_cast<int>(device_count()); });
  module.def("set_float64", &set_float64);
  module.def("has_float64", &has_float64);
  module.def("current_device", [] { return static_cast<int>(current_device()); });
  module.def("is_in_bad_fork", &is_forked_after_use);
  module.def("contexts", &contexts);
  module.def("counts", &counts);
  module.def("reset_counts", &reset_counts);
  module.def("event_waits", &event_waits);
  module.def("set_delays", &set_delays);
  module.def("default_generator", [](int index) { return default_generator(static_cast<c10::DeviceIndex>(index)); });
  module.def("unreported_failure", &unreported_failure);
  module.def("late_writes", &late_writes);
  module.def("limit_memory",
             [](int index, size_t size_bytes) { limit_memory(static_cast<c10::DeviceIndex>(index), size_bytes); });
  module.def("empty_cache", [] { empty_cache(current_device()); });
  module.def("reset_peak_memory", [](int index) { reset_peak_memory(static_cast<c10::DeviceIndex>(index)); });
  module.def("memory_statistics", [](int index) {
    const MemoryStatistics now = memory_statistics(static_cast<c10::DeviceIndex>(index));
    return py::make_tuple(now.limit_bytes, now.used_bytes, now.peak_bytes);
  });
  module.def("record_event", [](const py::handle& event, const c10::Stream& stream) {
    c10::Event& recorded = reinterpret_cast<THPEvent*>(event.ptr())->event;
    const py::gil_scoped_release without_gil;
    recorded.record(stream);
  });
  module.def("launch_failing_operation", [](const c10::Stream& stream) {
    enqueue(stream, Kind::kOperation, "failing operation", [] { TORCH_CHECK(false, "injected failure"); });
  });

  const py::object backend = py::module_::import("torch._C._distributed_c10d").attr("Backend");
  py::class_<Group, c10::intrusive_ptr<Group>>(module, "Group", backend)
      .def(py::init<c10::intrusive_ptr<c10d::Backend>, int, int, std::chrono::milliseconds>(),
           py::call_guard<py::gil_scoped_release>());
  py::class_<Hold>(module, "Hold").def(py::init<const c10::Stream&>()).def("release", &Hold::release);
}
