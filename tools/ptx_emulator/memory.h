// Memory of the GPU that a launch may use: everything else is an error.
#pragma once

#include "types.h"

namespace emulator {

enum class Access { kRead, kWrite };

// Until forget_memory(). What is added again may be written if it may be once.
void add_memory(u64 begin, u64 bytes, Access access);
void forget_memory();
// What a launch may write to after forget_memory() too.
void keep_memory(u64 begin, u64 bytes);
// Memory whose bytes are all 0xff: it may be read where a kernel or the host has written. Until
// forget_memory() too.
void add_unwritten(u64 begin, u64 bytes);
void check_unwritten(bool checks);
// Whether all of these bytes are in one piece of memory that allows it.
bool may_access(u64 begin, u64 bytes, Access access);

}  // namespace emulator
