#pragma once

namespace simgpu {

// Register what torch asks of a kind of device; once per process.
void register_hooks();

}  // namespace simgpu
