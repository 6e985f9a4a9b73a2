// What the host asks of a card, counted: launches of operators by name, waits of the host, copies by direction. Nothing
// is computed; memory is that of ../../sim_ascend/src/acl.cpp, whose functions of these names are compiled under the
// prefix "untraced_" (build.py) and called from here.
#include <atomic>
#include <cstdint>
#include <cstring>
#include <sstream>
#include <string>

#include <acl/acl.h>

#include "cann.h"

namespace {

using Count = std::atomic<uint64_t>;

// Operators that torch_npu knows the name of, in the order of the generated list.
#define OPERATOR(name) #name,
const char* const kOperators[] = {
#include "operators.inc"
};
#undef OPERATOR
constexpr size_t kOperatorCount = sizeof(kOperators) / sizeof(kOperators[0]);
Count launches[kOperatorCount];

struct Counter {
    const char* name;
    Count count{0};
};
enum { kWaitStream, kWaitDevice, kWaitEvent, kDeviceWaitsEvent, kCopies };
Counter counters[] = {
    {"host waits for a stream"}, {"host waits for the device"}, {"host waits for an event"},
    {"stream waits for an event"},
    // by kind of aclrtMemcpyKind: host to host, to device, to host, device to device; first blocking, then asynchronous
    {"blocking copies host to host"}, {"blocking copies to the device"}, {"blocking copies to the host"},
    {"blocking copies on the device"},
    {"asynchronous copies host to host"}, {"asynchronous copies to the device"}, {"asynchronous copies to the host"},
    {"asynchronous copies on the device"},
};
constexpr size_t kCopyKinds = 4;

thread_local bool counting = true;  // false while this thread empties the task queue to read the counters

void count(size_t counter)
{
    if (counting) ++counters[counter].count;
}

// Nothing is computed, so there is nothing to copy: the host reads zeros, always the same, and a card's memory is never
// touched, so that it may be larger than the machine's.
int copy(void* to, size_t room, const void* from, size_t size, aclrtMemcpyKind kind, bool asynchronous)
{
    if (static_cast<size_t>(kind) >= kCopyKinds) return sim::unsupported("a copy of this kind");
    if (size > room) return sim::fail(ACL_ERROR_INVALID_PARAM, "a copy: the target is smaller than the source");
    count(kCopies + (asynchronous ? kCopyKinds : 0) + static_cast<size_t>(kind));
    if (kind == ACL_MEMCPY_DEVICE_TO_HOST) std::memset(to, 0, size);
    if (kind == ACL_MEMCPY_HOST_TO_HOST) std::memmove(to, from, size);
    return ACL_SUCCESS;
}

}  // namespace

extern "C" {

aclError untraced_aclrtSynchronizeStream(aclrtStream);
aclError untraced_aclrtSynchronizeStreamWithTimeout(aclrtStream, int32_t);
aclError untraced_aclrtSynchronizeDevice();
aclError untraced_aclrtSynchronizeDeviceWithTimeout(int32_t);
aclError untraced_aclrtSynchronizeEvent(aclrtEvent);
aclError untraced_aclrtStreamWaitEvent(aclrtStream, aclrtEvent);
aclError aclrtSynchronizeStream(aclrtStream stream)
{
    count(kWaitStream);
    return untraced_aclrtSynchronizeStream(stream);
}

aclError aclrtSynchronizeStreamWithTimeout(aclrtStream stream, int32_t timeout)
{
    count(kWaitStream);
    return untraced_aclrtSynchronizeStreamWithTimeout(stream, timeout);
}

aclError aclrtSynchronizeDevice()
{
    count(kWaitDevice);
    return untraced_aclrtSynchronizeDevice();
}

aclError aclrtSynchronizeDeviceWithTimeout(int32_t timeout)
{
    count(kWaitDevice);
    return untraced_aclrtSynchronizeDeviceWithTimeout(timeout);
}

aclError aclrtSynchronizeEvent(aclrtEvent event)
{
    count(kWaitEvent);
    return untraced_aclrtSynchronizeEvent(event);
}

aclError aclrtStreamWaitEvent(aclrtStream stream, aclrtEvent event)
{
    count(kDeviceWaitsEvent);
    return untraced_aclrtStreamWaitEvent(stream, event);
}

aclError aclrtMemcpy(void* to, size_t room, const void* from, size_t size, aclrtMemcpyKind kind)
{
    return copy(to, room, from, size, kind, false);
}

aclError aclrtMemcpyAsync(void* to, size_t room, const void* from, size_t size, aclrtMemcpyKind kind, aclrtStream)
{
    return copy(to, room, from, size, kind, true);
}

aclError aclrtMemset(void*, size_t, int32_t, size_t) { return ACL_SUCCESS; }
aclError aclrtMemsetAsync(void*, size_t, int32_t, size_t, aclrtStream) { return ACL_SUCCESS; }

// ---- operators -----------------------------------------------------------------------------------------------------

// The first call of an operator prepares it: no workspace, no executor, which is what torch_npu's own variables say
// already. The second launches it. Their arguments are left alone, whatever their number.
#define OPERATOR(name)                                   \
    int name##GetWorkspaceSize() { return ACL_SUCCESS; } \
    int name()                                           \
    {                                                    \
        ++launches[__COUNTER__ - kFirst];                \
        return ACL_SUCCESS;                              \
    }
constexpr int kFirst = __COUNTER__ + 1;
#include "operators.inc"
#undef OPERATOR

// Descriptions of arguments. Only the shape of a tensor is ever asked for: operators whose result has as many elements
// as the values say (nonzero, unique) report it there.
struct aclTensor {
    int64_t sizes[16];
    uint64_t dimensions;
};

aclTensor* aclCreateTensor(const int64_t* sizes, uint64_t dimensions, aclDataType, const int64_t*, int64_t, aclFormat,
                           const int64_t*, uint64_t, void*)
{
    auto* tensor = new aclTensor{{}, dimensions < 16 ? dimensions : 16};
    for (uint64_t d = 0; d < tensor->dimensions; ++d) tensor->sizes[d] = sizes[d];
    return tensor;
}

int aclGetViewShape(const aclTensor* tensor, int64_t** sizes, uint64_t* dimensions)
{
    *sizes = new int64_t[16];  // torch_npu deletes it
    for (uint64_t d = 0; d < tensor->dimensions; ++d) (*sizes)[d] = tensor->sizes[d];
    *dimensions = tensor->dimensions;
    return ACL_SUCCESS;
}

int aclDestroyTensor(const aclTensor* tensor)
{
    delete tensor;
    return ACL_SUCCESS;
}

// Anything but null; none of them is looked into.
void* aclCreateScalar(void*, aclDataType) { return new char; }
void* aclCreateIntArray(const int64_t*, uint64_t) { return new char; }
void* aclCreateBoolArray(const bool*, uint64_t) { return new char; }
void* aclCreateFloatArray(const float*, uint64_t) { return new char; }
void* aclCreateScalarList(const void* const*, uint64_t) { return new char; }
int aclDestroyScalar(const void* one) { delete static_cast<const char*>(one); return ACL_SUCCESS; }
int aclDestroyIntArray(const void* one) { return aclDestroyScalar(one); }
int aclDestroyBoolArray(const void* one) { return aclDestroyScalar(one); }
int aclDestroyFloatArray(const void* one) { return aclDestroyScalar(one); }
int aclDestroyScalarList(const void* one) { return aclDestroyScalar(one); }

// A list owns its tensors (CANN, "aclDestroyTensorList").
struct aclTensorList {
    uint64_t count;
    const aclTensor** tensors;
};
aclTensorList* aclCreateTensorList(const aclTensor* const* tensors, uint64_t size)
{
    auto* list = new aclTensorList{size, new const aclTensor*[size]};
    for (uint64_t i = 0; i < size; ++i) list->tensors[i] = tensors[i];
    return list;
}
int aclDestroyTensorList(const aclTensorList* list)
{
    for (uint64_t i = 0; i < list->count; ++i) delete list->tensors[i];
    delete[] list->tensors;
    delete list;
    return ACL_SUCCESS;
}
int aclDestroyAclOpExecutor(void*) { return ACL_SUCCESS; }

// ---- reading -------------------------------------------------------------------------------------------------------

// Whether waits and copies made by the calling thread count.
void trace_count(int yes) { counting = yes != 0; }

// All counters as JSON: {"launches": {operator: count}, counter: count …}, zeros left out of the launches.
const char* trace_read()
{
    static thread_local std::string text;
    std::ostringstream out;
    out << "{\"launches\": {";
    const char* separator = "";
    for (size_t i = 0; i < kOperatorCount; ++i) {
        if (launches[i] == 0) continue;
        out << separator << '"' << kOperators[i] << "\": " << launches[i];
        separator = ", ";
    }
    out << "}";
    for (const Counter& counter : counters) out << ", \"" << counter.name << "\": " << counter.count;
    out << "}";
    text = out.str();
    return text.c_str();
}

}  // extern "C"
