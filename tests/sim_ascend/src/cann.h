// What the parts of the simulated CANN share.
#pragma once

#include <string>

namespace sim {

// Keeps `message` for aclGetRecentErrMsg, which torch_npu appends to its own errors, and returns `code`.
int fail(int code, const std::string& message);

// The answer of every function that CANN has and the simulator has not.
int unsupported(const char* function);

// The value of an environment variable, or `fallback` when it is unset or empty.
std::string setting(const char* name, const std::string& fallback);

}  // namespace sim
