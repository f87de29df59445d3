/* Products by instruction set; `linear` chooses the one for which a weight was laid out. */
#ifndef OUTRIDER_LINEAR_H
#define OUTRIDER_LINEAR_H

#include "kernels.h"

void linear_bf16(const Linear *linear, int num_threads);
void linear_amx(const Linear *linear, int num_threads);
void linear_amx_emulated(const Linear *linear, int num_threads);

#endif
