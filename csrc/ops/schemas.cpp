// Whether Python defined the schemas that the readers of the ops were generated from.
#include <cstring>
#include <stdexcept>

#include "attention_ops.h"
#include "call/text.h"
#include "ops/boxed_stack.h"

namespace fa3 {
namespace {

bool are_accepted = false;

}  // namespace

void require_schemas() {
  if (!are_accepted) {
    throw std::runtime_error(error_text("library", "_C.abi3.so and Python files of one version",
                                        "other schemas", "reinstall"));
  }
}

}  // namespace fa3

// For Python's ctypes, once the library is loaded. Until a text is accepted, each op is an error.
extern "C" __attribute__((visibility("default"))) bool flash_attn3_accept_schemas(
    char const* schemas) {
  fa3::are_accepted = std::strcmp(schemas, fa3::kSchemas) == 0;
  return fa3::are_accepted;
}
