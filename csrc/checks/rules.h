// Rules that a row of a table cannot say, and that several ops share. Each gives an error text or
// "". The letters of q, k and v are bound, but for those that bind them.
#pragma once

#include "call/attention_call.h"
#include "checks/table.h"

namespace fa3 {

// With q as anchor. is_fp8: q, k and v are e4m3.
Solver solver_of(char const* op, AttentionCall const& call, bool is_fp8);

// q is on a device that the package knows.
std::string check_device(Solver const& solver, AttentionCall const& call);

// Heads, head dims and lengths, and the numbers among the arguments.
std::string check_limits(Solver const& solver, AttentionCall const& call);

std::string check_sinks(Solver& solver, AttentionCall const& call);

// The number of tiles of q or k fits into an int. rows: the letter of its seqlen or total.
std::string check_tiles(Solver const& solver, char const* name, Letter rows, Letter heads);

// The FP8 kernels keep no row maxima; the CPU path does.
std::string check_maxima(Solver const& solver, AttentionCall const& call);

// All of a forward call, dense or packed; and that of e4m3, with its scales.
std::string check_attention(Solver& solver, AttentionCall const& call);
std::string check_scaled_attention(Solver& solver, AttentionCall const& call);

}  // namespace fa3
