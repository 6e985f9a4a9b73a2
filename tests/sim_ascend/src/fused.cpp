// Fused operators of torch_npu on the CPU, forward and gradient, by their documented contracts (torch_npu docs, and the
// parameter tables of CANN's aclnnFlashAttentionVarLenScore, aclnnRmsNorm, aclnnRotaryPositionEmbedding, aclnnSwiGlu).
// They are registered as torch_npu's operators for CPU tensors; operators.cpp leads those of a simulated card here. What
// the contracts allow and training does not use is refused, never computed in another way.
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <limits>
#include <map>
#include <string>
#include <vector>

namespace {

using at::Tensor;
using c10::DispatchKeySet;
using c10::IValue;
using c10::OperatorHandle;
using torch::jit::Stack;

constexpr int64_t kMaskSide = 2048;     // of the causal modes, whatever the length of the rows
constexpr int64_t kStatistics = 8;      // copies of each softmax statistic that the operator keeps
constexpr int64_t kLargestHead = 768;
enum SparseMode { kDefaultMask = 0, kCausal = 3, kBand = 4 };

// The arguments of a call by name, taken from the stack: releases of torch_npu differ in their number.
class Arguments {
public:
    Arguments(const OperatorHandle& op, Stack& stack) : operator_(op.schema().name())
    {
        const auto& declared = op.schema().arguments();
        const size_t first = stack.size() - declared.size();
        for (size_t i = 0; i < declared.size(); ++i) values_[declared[i].name()] = stack[first + i];
        torch::jit::drop(stack, declared.size());
    }

    Tensor tensor(const char* name) const
    {
        const auto found = values_.find(name);
        return found == values_.end() || found->second.isNone() ? Tensor() : found->second.toTensor();
    }
    // Called "input" or "self", by release of torch_npu.
    Tensor input() const { return tensor(values_.count("input") != 0 ? "input" : "self"); }
    int64_t integer(const char* name) const { return values_.at(name).toInt(); }
    double number(const char* name) const { return values_.at(name).toDouble(); }
    std::string text(const char* name) const { return values_.at(name).toStringRef(); }
    std::vector<int64_t> list(const char* name) const
    {
        const IValue& value = values_.at(name);
        return value.isNone() ? std::vector<int64_t>() : value.toIntVector();
    }
    void refuse(bool wrong, const std::string& what) const { TORCH_CHECK(!wrong, operator_, ": ", what); }

private:
    std::string operator_;
    std::map<std::string, IValue> values_;
};

Tensor wide(const Tensor& x) { return x.to(at::promoteTypes(x.scalar_type(), at::kFloat)); }

// ---- RMSNorm: y = x · rstd · gamma, rstd = 1 / √(mean x² + ε) in float32 ---------------------------------------------

void rms_norm(const OperatorHandle& op, DispatchKeySet, Stack* stack)
{
    const Arguments given(op, *stack);
    const Tensor x = given.input(), gamma = given.tensor("gamma");
    given.refuse(gamma.dim() != 1 || gamma.size(0) != x.size(-1), "gamma must have the length of the last dimension");
    given.refuse(gamma.scalar_type() != x.scalar_type() && gamma.scalar_type() != at::kFloat,
                 "gamma must have the dtype of the input, or float32");
    const Tensor rstd = wide(x).square().mean(-1, true).add(given.number("epsilon")).rsqrt();
    torch::jit::push(*stack, (wide(x) * rstd * wide(gamma)).to(x.scalar_type()), rstd);
}

void rms_norm_backward(const OperatorHandle& op, DispatchKeySet, Stack* stack)
{
    const Arguments given(op, *stack);
    const Tensor x = given.input(), gamma = given.tensor("gamma");
    const Tensor rstd = given.tensor("rstd"), dy = wide(given.tensor("dy"));
    const Tensor normed = wide(x) * rstd, scaled = dy * wide(gamma);
    const Tensor dx = rstd * (scaled - normed * (scaled * normed).mean(-1, true));
    const Tensor dgamma = (dy * normed).reshape({-1, x.size(-1)}).sum(0);
    torch::jit::push(*stack, dx.to(x.scalar_type()), dgamma.to(at::kFloat));
}

// ---- rotary angles: y = x · r1 + (−second half, first half of x) · r2 ------------------------------------------------

Tensor turned(const Tensor& x)
{
    const auto halves = x.chunk(2, -1);
    return at::cat({-halves[1], halves[0]}, -1);
}

Tensor turned_back(const Tensor& x)
{
    const auto halves = x.chunk(2, -1);
    return at::cat({halves[1], -halves[0]}, -1);
}

void check_rotary(const Arguments& given, const Tensor& x, const Tensor& r1, const Tensor& r2)
{
    given.refuse(x.dim() != 4 || r1.dim() != 4 || r2.sizes() != r1.sizes(), "input, r1 and r2 must have four dimensions");
    given.refuse(r1.size(-1) != x.size(-1), "r1 must have the last dimension of the input");
    given.refuse(x.scalar_type() != r1.scalar_type(), "input and angles must have one dtype");
    given.refuse(given.text("rotary_mode") != "half", "only rotary_mode half is simulated");
}

void rotary_mul(const OperatorHandle& op, DispatchKeySet, Stack* stack)
{
    const Arguments given(op, *stack);
    const Tensor x = given.input();
    const Tensor r1 = given.tensor("r1"), r2 = given.tensor("r2");
    check_rotary(given, x, r1, r2);
    torch::jit::push(*stack, (wide(x) * wide(r1) + turned(wide(x)) * wide(r2)).to(x.scalar_type()).contiguous());
}

void rotary_mul_backward(const OperatorHandle& op, DispatchKeySet, Stack* stack)
{
    const Arguments given(op, *stack);
    const Tensor x = given.input();
    const Tensor r1 = given.tensor("r1"), r2 = given.tensor("r2"), dy = wide(given.tensor("grad"));
    check_rotary(given, x, r1, r2);
    const Tensor dx = dy * wide(r1) + turned_back(dy * wide(r2));
    torch::jit::push(*stack, dx.to(x.scalar_type()), (dy * wide(x)).sum_to_size(r1.sizes()).to(r1.scalar_type()),
                     (dy * turned(wide(x))).sum_to_size(r2.sizes()).to(r2.scalar_type()));
}

// ---- SwiGLU: y = silu(first half) · second half ----------------------------------------------------------------------

void swiglu(const OperatorHandle& op, DispatchKeySet, Stack* stack)
{
    const Arguments given(op, *stack);
    const Tensor x = given.input();
    const int64_t dim = given.integer("dim");
    given.refuse(x.size(dim) % 2 != 0, "the dimension to be halved has an odd size");
    const auto halves = wide(x).chunk(2, dim);
    torch::jit::push(*stack, (at::silu(halves[0]) * halves[1]).to(x.scalar_type()).contiguous());
}

void swiglu_backward(const OperatorHandle& op, DispatchKeySet, Stack* stack)
{
    const Arguments given(op, *stack);
    const Tensor x = given.input();
    const Tensor dy = wide(given.tensor("grad_output").defined() ? given.tensor("grad_output") : given.tensor("gradOutput"));
    const auto halves = wide(x).chunk(2, given.integer("dim"));
    const Tensor gate = halves[0].sigmoid();
    const Tensor dgate = dy * halves[1] * gate * (1 + halves[0] * (1 - gate));
    torch::jit::push(*stack, at::cat({dgate, dy * halves[0] * gate}, given.integer("dim")).to(x.scalar_type()));
}

// ---- attention over rows that stand one after another (layout TND) ---------------------------------------------------

struct Row {
    int64_t start, length;
};

class Attention {
public:
    explicit Attention(const Arguments& given, const std::string& scale_name)
        : query(given.tensor("query")), key(given.tensor("key")), value(given.tensor("value"))
    {
        given.refuse(given.text("input_layout") != "TND", "only the layout TND is simulated");
        given.refuse(query.dim() != 3 || key.dim() != 3 || value.sizes() != key.sizes(), "TND tensors have three dimensions");
        given.refuse(query.size(1) != given.integer("head_num") || query.size(1) % key.size(1) != 0,
                     "head_num must be the heads of the query and a multiple of those of the key");
        given.refuse(query.size(2) != key.size(2) || query.size(2) > kLargestHead, "head sizes differ or are above 768");
        for (const char* name : {"pse", "padding_mask", "sink", "dropout_mask"})
            given.refuse(given.tensor(name).defined(), std::string(name) + " is not simulated");
        given.refuse(given.number("keep_prob") != 1.0, "dropout is not simulated");
        scale = given.number(scale_name.c_str());
        const auto ends = given.list("actual_seq_qlen");
        given.refuse(ends.empty() || ends != given.list("actual_seq_kvlen"), "only equal lengths of query and key are simulated");
        int64_t start = 0;
        for (const int64_t end : ends) {
            given.refuse(end < start, "actual_seq_qlen must be cumulative");
            rows.push_back({start, end - start});
            start = end;
        }
        given.refuse(start != query.size(0) || start != key.size(0), "actual_seq_qlen must end at the number of tokens");
        mask = given.tensor("atten_mask");
        mode = given.integer("sparse_mode");
        before = given.integer("pre_tockens");
        after = given.integer("next_tockens");
        if (!mask.defined()) return;  // then sparse_mode is ignored and attention is full, without a word
        given.refuse(mode != kCausal && mode != kBand, "only sparse_mode 3 and 4 are simulated with a mask");
        given.refuse(mask.dim() != 2 || mask.size(0) != kMaskSide || mask.size(1) != kMaskSide || mask.scalar_type() != at::kBool,
                     "atten_mask must be 2048 x 2048 bool for this sparse_mode");
        given.refuse(!mask.equal(at::ones({kMaskSide, kMaskSide}, at::kBool).triu(1)),
                     "atten_mask must be true above the diagonal and false elsewhere");
    }

    // (heads, n, d) of a row, key and value repeated for the heads of the query, in float32.
    Tensor part(const Tensor& all, const Row& row) const
    {
        const Tensor heads = wide(all.narrow(0, row.start, row.length)).transpose(0, 1);
        return heads.repeat_interleave(query.size(1) / all.size(1), 0);
    }

    // (heads, n, n), -inf where the query does not see the key.
    Tensor scores(const Row& row) const
    {
        Tensor result = part(query, row).matmul(part(key, row).transpose(1, 2)) * scale;
        if (!mask.defined()) return result;
        const Tensor position = at::arange(row.length);
        const Tensor distance = position.unsqueeze(1) - position.unsqueeze(0);
        Tensor hidden = distance.lt(mode == kBand ? -after : 0);
        if (mode == kBand) hidden = hidden.logical_or(distance.gt(before));
        return result.masked_fill(hidden, -std::numeric_limits<double>::infinity());
    }

    // The heads of the query added up to those of the key, (n, key heads, d).
    Tensor gathered(const Tensor& gradient) const
    {
        const int64_t groups = query.size(1) / key.size(1);
        return gradient.view({key.size(1), groups, gradient.size(1), gradient.size(2)}).sum(1).transpose(0, 1);
    }

    Tensor query, key, value, mask;
    std::vector<Row> rows;
    double scale;
    int64_t mode, before, after;
};

void fusion_attention(const OperatorHandle& op, DispatchKeySet, Stack* stack)
{
    const Arguments given(op, *stack);
    const Attention attention(given, "scale");
    const Tensor& query = attention.query;
    const auto statistics = [&] { return at::empty({query.size(0), query.size(1), kStatistics}, at::kFloat); };
    Tensor output = at::empty(query.sizes(), query.options()), largest = statistics(), sum = statistics();
    for (const Row& row : attention.rows) {
        if (row.length == 0) continue;
        const Tensor scores = attention.scores(row);
        const Tensor top = scores.amax(-1, true), weights = (scores - top).exp(), total = weights.sum(-1, true);
        output.narrow(0, row.start, row.length).copy_((weights / total).matmul(attention.part(attention.value, row)).transpose(0, 1));
        largest.narrow(0, row.start, row.length).copy_(top.transpose(0, 1).expand({-1, -1, kStatistics}));
        sum.narrow(0, row.start, row.length).copy_(total.transpose(0, 1).expand({-1, -1, kStatistics}));
    }
    torch::jit::push(*stack, output, largest, sum, at::empty({0}, query.options()), int64_t{0}, int64_t{0}, int64_t{0});
}

void fusion_attention_grad(const OperatorHandle& op, DispatchKeySet, Stack* stack)
{
    const size_t returns = op.schema().returns().size();
    const Arguments given(op, *stack);
    const Attention attention(given, "scale_value");
    const Tensor dy = given.tensor("dy"), largest = given.tensor("softmax_max"), sum = given.tensor("softmax_sum");
    given.refuse(!largest.defined() || !sum.defined(), "softmax_max and softmax_sum are needed");
    Tensor dq = at::empty(attention.query.sizes(), attention.query.options());
    Tensor dk = at::empty(attention.key.sizes(), attention.key.options()), dv = at::empty_like(dk);
    for (const Row& row : attention.rows) {
        if (row.length == 0) continue;
        const auto kept = [&](const Tensor& one) { return one.narrow(0, row.start, row.length).narrow(2, 0, 1).transpose(0, 1); };
        const Tensor weights = (attention.scores(row) - kept(largest)).exp() / kept(sum);
        const Tensor slope = wide(dy.narrow(0, row.start, row.length)).transpose(0, 1);
        const Tensor of_weights = slope.matmul(attention.part(attention.value, row).transpose(1, 2));
        const Tensor of_scores = weights * (of_weights - (weights * of_weights).sum(-1, true)) * attention.scale;
        dq.narrow(0, row.start, row.length).copy_(of_scores.matmul(attention.part(attention.key, row)).transpose(0, 1));
        dk.narrow(0, row.start, row.length).copy_(attention.gathered(of_scores.transpose(1, 2).matmul(attention.part(attention.query, row))));
        dv.narrow(0, row.start, row.length).copy_(attention.gathered(weights.transpose(1, 2).matmul(slope)));
    }
    torch::jit::push(*stack, dq, dk, dv);
    for (size_t i = 3; i < returns; ++i) torch::jit::push(*stack, at::empty({0}, dq.options()));  // of pse, of sink
}

TORCH_LIBRARY_IMPL(npu, CPU, library)
{
    library.impl("npu_rms_norm", torch::CppFunction::makeFromBoxedFunction<&rms_norm>());
    library.impl("npu_rms_norm_backward", torch::CppFunction::makeFromBoxedFunction<&rms_norm_backward>());
    library.impl("npu_rotary_mul", torch::CppFunction::makeFromBoxedFunction<&rotary_mul>());
    library.impl("npu_rotary_mul_backward", torch::CppFunction::makeFromBoxedFunction<&rotary_mul_backward>());
    library.impl("npu_swiglu", torch::CppFunction::makeFromBoxedFunction<&swiglu>());
    library.impl("npu_swiglu_backward", torch::CppFunction::makeFromBoxedFunction<&swiglu_backward>());
    library.impl("npu_fusion_attention", torch::CppFunction::makeFromBoxedFunction<&fusion_attention>());
    library.impl("npu_fusion_attention_grad", torch::CppFunction::makeFromBoxedFunction<&fusion_attention_grad>());
}

}  // namespace
