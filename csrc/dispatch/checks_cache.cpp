#include "dispatch/checks_cache.h"

namespace fa3 {

std::string check_append(AttentionCall const&) { return {}; }

}  // namespace fa3
