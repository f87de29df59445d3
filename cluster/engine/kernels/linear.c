/*
 * y = x W^T at the speed at which W can be read, up to the number of rows where arithmetic takes longer.
 *
 * Every instruction set sums in an order of its own, which depends on nothing but the weight's shape: a row's result
 * has the same bits in any number of rows, but other bits with another set.
 */
#include "linear.h"

#include "blocks.h"

int64_t linear_scratch_size(const Weight *weight) {
    return weight->instruction_set == AVX512 ? 0 : blocks_of(weight).num_blocks * BLOCK;
}

void linear(const Linear *l, int num_threads) {
    switch ((InstructionSet)l->weight->instruction_set) {
        case AVX512: linear_avx512(l, num_threads); break;
#if KNOWS_AVX512_BF16
        case AVX512_BF16: linear_bf16(l, num_threads); break;
#endif
#if KNOWS_AMX
        case AMX: linear_amx(l, num_threads); break;
#endif
        case AMX_EMULATED: linear_amx_emulated(l, num_threads); break;
        default: break; /* Python lays nothing out for what is not supported */
    }
}
