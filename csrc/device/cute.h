// The only file that includes CUTLASS and CuTe. Do not define
// CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED: it adds 25 s to every compile unit; wgmma_shapes.h
// provides the few extra shapes that are needed.
#pragma once

// TRAP: CUTLASS includes this header inside its own namespace unless it has been included before.
#include <cudaTypedefs.h>

#include <cute/arch/copy_sm90.hpp>
#include <cute/arch/copy_sm90_desc.hpp>
#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/atom/copy_traits_sm90.hpp>
#include <cute/atom/mma_traits_sm90_gmma.hpp>
#include <cute/tensor.hpp>
#include <cutlass/arch/barrier.h>
#include <cutlass/arch/reg_reconfig.h>
#include <cutlass/cutlass.h>
#include <cutlass/numeric_types.h>
