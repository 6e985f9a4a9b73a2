// The operators of the simulated card: each aten operator that torch_npu would hand to CANN runs on the CPU instead, on
// CPU tensors that alias the NPU tensors' memory. Loaded by aclInit (acl.cpp), after torch_npu has registered its own
// kernels; what is registered here replaces them.
//
// What stays torch_npu's own: allocation, views, resizing, streams, pinning, c10d - the parts that a test on a
// simulated card is about. An operator without a CPU kernel keeps torch_npu's too, and ends in CANN's "not simulated".
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/_to_copy.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/library.h>

#include <cstdlib>
#include <iostream>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "torch_versions.h"

// Two functions of libtorch_npu.
namespace c10_npu {
bool npuSynchronizeDevice(bool check_error);  // waits for the current card and its task queue
}
namespace at_npu::detail {
const at::Generator& getDefaultNPUGenerator(c10::DeviceIndex card);
}

namespace {

using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IValue;
using c10::OperatorHandle;
using sim::nullopt;
using sim::optional;
using torch::jit::Stack;

constexpr auto kNpu = c10::DeviceType::PrivateUse1;

// ---- tensors -------------------------------------------------------------------------------------------------------

// A CPU tensor over the same memory. Its storage is resizable by the CPU allocator, because kernels resize `out=`
// arguments; write_back() then carries the result over.
at::Tensor alias_on_cpu(const at::Tensor& npu)
{
    const c10::Storage& storage = npu.storage();
    auto alias = c10::make_intrusive<c10::StorageImpl>(
        c10::StorageImpl::use_byte_size_t(), storage.nbytes(), at::DataPtr(storage.mutable_data(), at::kCPU),
        c10::GetAllocator(c10::kCPU), /*resizable=*/true);
    auto cpu = at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(std::move(alias)), DispatchKeySet(DispatchKey::CPU), npu.dtype());
    cpu.unsafeGetTensorImpl()->set_sizes_and_strides(npu.sizes(), npu.strides(), npu.storage_offset());
    return cpu;
}

// A new NPU tensor with the content of a CPU one, so that torch_npu's allocator counts every result.
at::Tensor copy_to_npu(const at::Tensor& cpu, c10::Device device)
{
    if (!cpu.defined()) return cpu;
    const bool dense = cpu.is_non_overlapping_and_dense();
    const at::Tensor source = dense ? cpu : cpu.contiguous();
    at::Tensor npu = at::empty_strided(source.sizes(), source.strides(), source.options().device(device));
    alias_on_cpu(npu).copy_(source);
    return npu;
}

void write_back(const at::Tensor& npu, const at::Tensor& cpu)
{
    if (cpu.storage().data() != npu.storage().data()) {  // the kernel had to make the storage larger
        npu.resize_(cpu.sizes());
        npu.unsafeGetTensorImpl()->set_sizes_and_strides(cpu.sizes(), cpu.strides(), 0);
        alias_on_cpu(npu).copy_(cpu);
    } else if (cpu.sizes() != npu.sizes() || cpu.strides() != npu.strides()) {
        npu.unsafeGetTensorImpl()->set_sizes_and_strides(cpu.sizes(), cpu.strides(), cpu.storage_offset());
    }
}

// ---- random numbers ------------------------------------------------------------------------------------------------

// The numbers of a card follow from its generator's (seed, offset), which advances with each use as on hardware; they
// are the CPU's numbers, not Ascend's.
at::Generator cpu_generator_for(at::Generator npu)
{
    std::lock_guard<std::mutex> guard(npu.mutex());
    const uint64_t seed = npu.current_seed(), offset = npu.get_offset();
    npu.set_offset(offset + 4);  // torch_npu wants multiples of 4
    return at::make_generator<at::CPUGeneratorImpl>((seed + 0x9E3779B97F4A7C15ull) * (2 * offset + 1));
}

// native_dropout and a few others take no generator; for their sake the default one is exchanged during the call.
class DefaultGeneratorSwap {
public:
    explicit DefaultGeneratorSwap(at::Generator replacement)
        : default_(at::detail::getDefaultCPUGenerator()), saved_(default_.get_state())
    {
        default_.set_state(replacement.get_state());
    }
    ~DefaultGeneratorSwap() { default_.set_state(saved_); }

private:
    at::Generator default_;
    at::Tensor saved_;
};

// ---- the fallback --------------------------------------------------------------------------------------------------

// These move data between devices, or take indices on either: torch itself lets them mix NPU and CPU tensors.
bool may_mix_devices(const std::string& name)
{
    static const std::set<std::string> names{
        "aten::copy_", "aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_",
        "aten::_unsafe_index", "aten::_unsafe_index_put"};
    return names.count(name) != 0;
}

// One call: its arguments, before and after they are moved.
class Call {
public:
    Call(const OperatorHandle& op, Stack& stack)
        : op_(op), stack_(stack), begin_(stack.size() - op.schema().arguments().size()) {}

    void run()
    {
        npu_arguments_.assign(stack_.begin() + begin_, stack_.end());
        for (size_t i = begin_; i < stack_.size(); ++i) move_argument(stack_[i]);
        // As generated kernels do. A thread that has chosen no card is put back without touching card 0: to
        // synchronizeDevice alone, "back" would mean card 0, and autograd then expects streams on it.
        const c10::OptionalDeviceGuard guard(device_);
        // With the task queue, torch_npu issues HCCL calls from a thread of its own: what this operator reads may
        // still be on its way. Hardware orders the two by streams, here one has to wait.
        if (device_) c10_npu::npuSynchronizeDevice(true);
        cpu_arguments_.assign(stack_.begin() + begin_, stack_.end());
        optional<DefaultGeneratorSwap> swap;
        if (device_ && op_.hasTag(at::Tag::nondeterministic_seeded) && !generator_given_)
            swap.emplace(cpu_generator_for(at_npu::detail::getDefaultNPUGenerator(device_->index())));
        op_.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), &stack_);
        finish();
    }

private:
    void see(const at::Tensor& tensor)
    {
        if (!tensor.defined()) return;
        if (tensor.device().type() == kNpu) {
            if (!device_) device_ = tensor.device();
            mixed_ = mixed_ || *device_ != tensor.device();
        } else if (tensor.dim() > 0) {
            mixed_ = true;
            other_ = tensor.device();
        }
    }

    at::Tensor moved(const at::Tensor& tensor)
    {
        return tensor.defined() && tensor.device().type() == kNpu ? alias_on_cpu(tensor) : tensor;
    }

    void move_argument(IValue& value)
    {
        if (value.isTensor()) {
            see(value.toTensor());
            value = moved(value.toTensor());
        } else if (value.isTensorList()) {
            c10::List<at::Tensor> list;
            for (const at::Tensor& tensor : value.toTensorVector()) {
                see(tensor);
                list.push_back(moved(tensor));
            }
            value = std::move(list);
        } else if (value.isOptionalTensorList()) {
            c10::List<optional<at::Tensor>> list;
            for (const optional<at::Tensor>& tensor : value.toOptionalTensorList().vec()) {
                if (tensor) see(*tensor);
                list.push_back(tensor ? optional<at::Tensor>(moved(*tensor)) : nullopt);
            }
            value = std::move(list);
        } else if (value.isDevice() && value.toDevice().type() == kNpu) {  // a factory: tril_indices(device=npu)
            device_ = value.toDevice();
            if (!device_->has_index()) device_ = c10::impl::VirtualGuardImpl(kNpu).getDevice();
            value = c10::Device(c10::kCPU);
        } else if (value.isGenerator() && value.toGenerator().defined()) {
            TORCH_CHECK(value.toGenerator().device().type() == kNpu,
                        "Expected a 'npu' device type for generator but found '", value.toGenerator().device(), "'");
            generator_given_ = true;
            value = cpu_generator_for(value.toGenerator());
        }
        if (mixed_ && device_ && !may_mix_devices(op_.schema().name()))
            TORCH_CHECK(false, "Expected all tensors to be on the same device, but ", op_.schema().name(), " got ",
                        *device_, " and ", other_ ? other_->str() : std::string("another NPU"));
    }

    // Results that alias an argument are that argument; the others become new NPU tensors.
    void finish()
    {
        const auto& arguments = op_.schema().arguments();
        for (size_t i = 0; i < arguments.size(); ++i) {
            const auto* alias = arguments[i].alias_info();
            if (alias == nullptr || !alias->isWrite()) continue;
            if (npu_arguments_[i].isTensor()) {
                write_back_one(npu_arguments_[i].toTensor(), cpu_arguments_[i].toTensor());
            } else if (npu_arguments_[i].isTensorList()) {
                const auto npu = npu_arguments_[i].toTensorVector(), cpu = cpu_arguments_[i].toTensorVector();
                for (size_t k = 0; k < npu.size(); ++k) write_back_one(npu[k], cpu[k]);
            }
        }
        const auto& returns = op_.schema().returns();
        const size_t first = stack_.size() - returns.size();
        for (size_t r = 0; r < returns.size(); ++r) {
            IValue& value = stack_[first + r];
            if (const auto* alias = returns[r].alias_info(); alias != nullptr && alias->isWrite())
                value = argument_with(*alias);
            else if (value.isTensor() && device_)
                value = copy_to_npu(value.toTensor(), *device_);
            else if (value.isTensorList() && device_) {
                c10::List<at::Tensor> list;
                for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(copy_to_npu(tensor, *device_));
                value = std::move(list);
            }
        }
    }

    static void write_back_one(const at::Tensor& npu, const at::Tensor& cpu)
    {
        if (npu.defined() && npu.device().type() == kNpu) write_back(npu, cpu);
    }

    IValue argument_with(const c10::AliasInfo& alias)
    {
        const auto& arguments = op_.schema().arguments();
        for (size_t i = 0; i < arguments.size(); ++i)
            if (arguments[i].alias_info() != nullptr && *arguments[i].alias_info() == alias) return npu_arguments_[i];
        TORCH_INTERNAL_ASSERT(false, "no argument is aliased by the result of ", op_.schema().name());
    }

    const OperatorHandle& op_;
    Stack& stack_;
    size_t begin_;
    std::vector<IValue> npu_arguments_, cpu_arguments_;
    optional<c10::Device> device_, other_;
    bool mixed_ = false, generator_given_ = false;
};

void run_on_cpu(const OperatorHandle& op, DispatchKeySet, Stack* stack) { Call(op, *stack).run(); }

// torch's own kernel for an operator, called with the NPU tensors as they are.
struct StockKernel : c10::OperatorKernel {
    explicit StockKernel(sim::Kernel kernel) : kernel(std::move(kernel)) {}
    void operator()(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) { kernel.callBoxed(op, keys, stack); }
    sim::Kernel kernel;
};

// npu::_npu_dtype_cast(self, dtype): the cast that torch_npu's c10d makes around a reduction of bool or uint8.
void cast(const OperatorHandle&, DispatchKeySet, Stack* stack)
{
    const auto dtype = (*stack)[stack->size() - 1].toScalarType();
    const at::Tensor self = (*stack)[stack->size() - 2].toTensor();
    torch::jit::drop(*stack, 2);
    torch::jit::push(*stack, at::_to_copy(self, self.options().dtype(dtype)));  // Tensor.to() of torch_npu 2.1 ends here
}

// ---- which operator runs how ---------------------------------------------------------------------------------------

// torch_npu's own kernels that work here and should be the ones tested.
bool stays_with_torch_npu(const c10::FunctionSchema& schema)
{
    static const std::set<std::string> names{
        "aten::empty", "aten::empty_strided", "aten::empty_like", "aten::new_empty_strided", "aten::resize_",
        "aten::record_stream", "aten::_pin_memory", "aten::is_pinned", "aten::set_"};
    if (names.count(schema.name()) != 0) return true;
    for (const auto& result : schema.returns())  // a view
        if (result.alias_info() != nullptr && !result.alias_info()->isWrite()) return true;
    return false;
}

// Fused operators whose CPU kernels are in fused.cpp.
const char* const kFused[] = {
    "npu_rms_norm", "npu_rms_norm_backward", "npu_rotary_mul", "npu_rotary_mul_backward", "npu_swiglu",
    "npu_swiglu_backward", "npu_fusion_attention", "npu_fusion_attention_grad"};

class Registration {
public:
    Registration() : library_(torch::Library::IMPL, "aten", nullopt, __FILE__, __LINE__),
                     npu_library_(torch::Library::IMPL, "npu", nullopt, __FILE__, __LINE__)
    {
        // Overriding is what this library is for; torch would warn about it.
        struct Silence : c10::WarningHandler {
            void process(const c10::Warning&) override {}
        } silence;
        c10::WarningUtils::WarningHandlerGuard guard(&silence);
        c10::Dispatcher& dispatcher = c10::Dispatcher::singleton();
        for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
            const auto op = dispatcher.findSchema(name);
            if (op && name.name.rfind("aten::", 0) == 0) choose(*op);
        }
        for (const char* name : {"_npu_dtype_cast", "npu_dtype_cast"})
            npu_library_.impl(name, DispatchKey::PrivateUse1, torch::CppFunction::makeFromBoxedFunction<&cast>());
        for (const char* name : kFused)
            npu_library_.impl(name, DispatchKey::PrivateUse1, torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
        if (std::getenv("SIM_ASCEND_LIST_OPERATORS") != nullptr) std::cerr << report_;
    }

private:
    void choose(const OperatorHandle& op)
    {
        const bool own = op.hasKernelForDispatchKey(DispatchKey::PrivateUse1);
        const bool own_autograd = op.hasKernelForDispatchKey(DispatchKey::AutogradPrivateUse1);
        if (stays_with_torch_npu(op.schema())) {
            if (own || own_autograd) note("torch_npu", op);
            return;
        }
        // torch_npu replaced some composites (matmul, softmax, ...) and autograd formulas with ones that end in
        // operators that only CANN has. What torch has for the CPU is right for a card whose operators are the CPU's.
        const bool on_cpu = op.hasKernelForDispatchKey(DispatchKey::CPU);
        const bool composite = op.hasKernelForDispatchKey(DispatchKey::CompositeImplicitAutograd);
        if (own_autograd || (own && composite && !on_cpu))  // torch 2.1 has a formula for matmul that then takes effect
            use_stock(op, DispatchKey::AutogradPrivateUse1, DispatchKey::AutogradCPU, "stock autograd");
        if (on_cpu || op.schema().name() == "aten::copy_") {
            note("CPU", op);
            library_.impl(full_name(op), DispatchKey::PrivateUse1,
                          torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
        } else if (own && (composite || op.hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutograd))) {
            use_stock(op, DispatchKey::PrivateUse1, DispatchKey::CPU, "stock composite");
        } else if (own) {
            note("torch_npu only", op);
        }
    }

    // Registers for `key` the kernel that torch has for `like`, the same key of the CPU.
    void use_stock(const OperatorHandle& op, DispatchKey key, DispatchKey like, const char* why)
    {
        note(why, op);
        library_.impl(full_name(op), key, torch::CppFunction::makeFromBoxedFunctor(
            std::make_unique<StockKernel>(sim::kernel_of(op, like))));
    }

    static const char* full_name(const OperatorHandle& op)
    {
        static std::set<std::string> names;  // torch::Library wants a const char*
        return names.insert(c10::toString(op.operator_name())).first->c_str();
    }

    void note(const char* how, const OperatorHandle& op)
    {
        report_ += std::string(how) + "\t" + c10::toString(op.operator_name()) + "\n";
    }

    torch::Library library_, npu_library_;
    std::string report_;
};

// Never destroyed: tensors outlive static destructors.
[[maybe_unused]] const auto* const registration = new Registration;

}  // namespace
