/*
 * The kernels that compute in float32, compiled from one source for each width of registers: all of them give the same
 * bits. A file that includes this one defines WIDTH and TARGET.
 */
#include <math.h>

#include "attention.h"
#include "vector.h"

#include "linear_portable.c"

#include "attention_portable.c"
#include "elementwise_portable.c"

#define JOINED(a, b) a##b
#define OF_WIDTH(width) JOINED(portable_, width)
const Portable OF_WIDTH(WIDTH) = {
    linear_portable, attention_portable, add_rms_norm_portable, gate_and_multiply_portable, rotate_and_store_portable,
    widen_portable, narrow_portable,
};
