/* The kernels for tiles, on an emulation of their instructions: for tests. */
#define EMULATE_TILES
#include "linear_amx.c"
