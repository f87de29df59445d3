/*
 * y = x W^T at the speed at which W can be read, up to the number of rows where arithmetic takes longer.
 *
 * Every instruction set sums in an order of its own, which depends on nothing but the weight's shape: a row's result
 * has the same bits in any number of rows, but other bits with another set.
 */
#include "linear.h"

#include "instruction_sets.h"

#if defined(__x86_64__)
#include "blocks.h"
#endif

int64_t linear_scratch_size(const Weight *weight) {
#if defined(__x86_64__)
    if (weight->instruction_set != PORTABLE) return blocks_of(weight).num_blocks * BLOCK;
#endif
    (void)weight;
    return 0;
}

void linear(const Linear *l, int num_threads) {
    switch ((InstructionSet)l->weight->instruction_set) {
        case PORTABLE: portable->linear(l, num_threads); break;
#if KNOWS_AVX512_BF16
        case AVX512_BF16: linear_bf16(l, num_threads); break;
#endif
#if KNOWS_AMX
        case AMX: linear_amx(l, num_threads); break;
#endif
#if defined(__x86_64__)
        case AMX_EMULATED: linear_amx_emulated(l, num_threads); break;
#endif
        default: break; /* Python lays nothing out for what is not supported */
    }
}
