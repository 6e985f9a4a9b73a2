// What differs between the releases of torch that the simulator goes with.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/api/include/torch/version.h>

#include <optional>

#if TORCH_VERSION_MINOR < 13  // torch 2.1 and 2.6

template <>
class c10::TypedOperatorHandle<struct Kernels> {  // a friend of OperatorHandle, and so the way to its kernels
public:
    static KernelFunction get(const OperatorHandle& op, DispatchKey key)
    {
        return op.operatorDef_->op.lookup(DispatchKeySet(key));
    }
};

namespace sim {
using c10::nullopt;
using c10::optional;  // torch 2.1 has its own
using Kernel = c10::KernelFunction;
inline Kernel kernel_of(const c10::OperatorHandle& op, c10::DispatchKey key)
{
    return c10::TypedOperatorHandle<struct Kernels>::get(op, key);
}
}  // namespace sim

#else

namespace sim {
using std::nullopt;
using std::optional;
using Kernel = c10::SafeKernelFunction;
inline Kernel kernel_of(const c10::OperatorHandle& op, c10::DispatchKey key)
{
    return op.getComputedKernelForDispatchKey(key);
}
}  // namespace sim

#endif
