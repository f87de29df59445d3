/* Products by instruction set, of which `linear` chooses the one that a weight was laid out for. */
#ifndef OUTRIDER_LINEAR_H
#define OUTRIDER_LINEAR_H

#include "kernels.h"

void linear_bf16(const Linear *linear, int num_threads);
void linear_amx(const Linear *linear, int num_threads);
void linear_amx_emulated(const Linear *linear, int num_threads);

#endif
