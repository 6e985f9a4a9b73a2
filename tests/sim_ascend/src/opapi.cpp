// The one aclnn operator that exists. torch_npu's process group pads the tensors of an uneven all_gather by calling
// op_plugin::constant_pad_nd directly, past the dispatcher and so past operators.cpp.
//
// An aclnn operator is two calls: ...GetWorkspaceSize prepares an executor, the other runs it. The structures are
// opaque to torch_npu, so they hold here what that one operator needs. Any other aclnn function is absent from the
// library, and torch_npu says so: "aclnnX or aclnnXGetWorkspaceSize not in libopapi.so".
#include <cstring>
#include <vector>

#include <acl/acl.h>

#include "cann.h"

struct aclTensor {
    std::vector<int64_t> sizes, strides;
    aclDataType type;
    char* data;  // of the first element
};

struct aclIntArray {
    std::vector<int64_t> values;
};

struct aclScalar {
    bool zero;
};

struct aclOpExecutor {
    aclTensor from, to;
    std::vector<int64_t> pad;
};

namespace {

// Copies `from` into `to` from the dimension `d` on; the addresses are those of the current position.
void copy(const aclTensor& from, const aclTensor& to, size_t d, const char* source, char* target, size_t element)
{
    if (d == from.sizes.size()) {
        std::memcpy(target, source, element);
        return;
    }
    for (int64_t i = 0; i < from.sizes[d]; ++i)
        copy(from, to, d + 1, source + i * from.strides[d] * static_cast<int64_t>(element),
             target + i * to.strides[d] * static_cast<int64_t>(element), element);
}

}  // namespace

extern "C" {

aclTensor* aclCreateTensor(const int64_t* sizes, uint64_t dimensions, aclDataType type, const int64_t* strides,
                           int64_t offset, aclFormat, const int64_t*, uint64_t, void* data)
{
    return new aclTensor{{sizes, sizes + dimensions}, {strides, strides + dimensions}, type,
                         static_cast<char*>(data) + offset * static_cast<int64_t>(aclDataTypeSize(type))};
}

aclIntArray* aclCreateIntArray(const int64_t* values, uint64_t count)
{
    return new aclIntArray{{values, values + count}};
}

aclScalar* aclCreateScalar(void* value, aclDataType type)
{
    bool zero = true;
    for (size_t i = 0; i < aclDataTypeSize(type); ++i) zero = zero && static_cast<char*>(value)[i] == 0;
    return new aclScalar{zero};
}

int aclDestroyTensor(const aclTensor* tensor) { delete tensor; return ACL_SUCCESS; }
int aclDestroyIntArray(const aclIntArray* array) { delete array; return ACL_SUCCESS; }
int aclDestroyScalar(const aclScalar* scalar) { delete scalar; return ACL_SUCCESS; }

size_t aclDataTypeSize(aclDataType type)
{
    switch (type) {
        case ACL_BOOL:
        case ACL_INT8:
        case ACL_UINT8: return 1;
        case ACL_FLOAT16:
        case ACL_BF16:
        case ACL_INT16:
        case ACL_UINT16: return 2;
        case ACL_FLOAT:
        case ACL_INT32:
        case ACL_UINT32: return 4;
        case ACL_COMPLEX128: return 16;
        default: return 8;
    }
}

// `pad` is torch's: (before, after) from the last dimension backwards.
int aclnnConstantPadNdGetWorkspaceSize(const aclTensor* self, const aclIntArray* pad, const aclScalar* value,
                                       aclTensor* out, uint64_t* workspace_size, aclOpExecutor** executor)
{
    if (!value->zero) return sim::unsupported("aclnnConstantPadNd with a value other than 0");
    for (int64_t amount : pad->values)
        if (amount < 0) return sim::unsupported("aclnnConstantPadNd with a negative pad");
    *workspace_size = 0;
    *executor = new aclOpExecutor{*self, *out, pad->values};
    return ACL_SUCCESS;
}

int aclnnConstantPadNd(void*, uint64_t, aclOpExecutor* executor, aclrtStream)
{
    const aclTensor &from = executor->from, &to = executor->to;
    const size_t element = aclDataTypeSize(from.type), dimensions = to.sizes.size();
    size_t count = 1;
    for (int64_t size : to.sizes) count *= static_cast<size_t>(size);
    std::memset(to.data, 0, count * element);  // `out` is contiguous: op_plugin has just allocated it
    char* target = to.data;
    for (size_t i = 0; i < executor->pad.size() / 2; ++i)
        target += executor->pad[2 * i] * to.strides[dimensions - 1 - i] * static_cast<int64_t>(element);
    copy(from, to, 0, from.data, target, element);
    delete executor;
    return ACL_SUCCESS;
}

}  // extern "C"
